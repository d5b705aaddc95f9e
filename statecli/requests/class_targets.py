"""Replace each model class of a command by its full name, with its configuration file and its class options.

Workers, shards and reports get the full name, and a user can type it as shown:
`net.py:Net --config-json net.json`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

from msgspec.structs import replace

from statecli.core.errors import UsageError, option
from statecli.live.spec import AUTO
from statecli.requests.options import (
    AuditOptions,
    DiffOptions,
    ExplainOptions,
    FixOptions,
    InspectOptions,
    LockOptions,
    NamedKind,
    VerifyOptions,
)
from statecli.requests.parameters import parameters_of
from statecli.storage import checkpoint_folder, files
from statecli.targets import load

ClassOptions: TypeAlias = (
    InspectOptions | DiffOptions | VerifyOptions | FixOptions | AuditOptions | ExplainOptions | LockOptions
)


def name_classes(options: ClassOptions) -> ClassOptions:
    """Return the options with the full name of each class. Options that become part of a name are reset.

    Raises UsageError for a class option if no target is a class.
    """
    named_classes = {name: load.name_class(getattr(options, name)) for name in _list_class_fields(options)}
    options = replace(options, **named_classes) if named_classes else options
    if isinstance(options, InspectOptions) and options.from_config:
        if load.find_class_spec(options.target) is None and files.is_remote(options.target):
            # Reading the file gives the reason why a repository cannot be opened.
            options = replace(options, target=files.join(options.target, checkpoint_folder.CONFIG))
        if load.find_class_spec(options.target) is None:
            raise UsageError(
                f"{option('--from-config')}: {options.target} is not a folder or repository with a config.json"
            )
        options = replace(options, from_config=False)
    return _add_class_options(options)


def _list_class_fields(options: ClassOptions) -> list[str]:
    """Return the fields that name a class. In these fields, a folder with weights stands for its class."""
    fields = ["model"] if isinstance(options, (InspectOptions, AuditOptions)) else []
    if isinstance(options, (VerifyOptions, FixOptions)) or (
        isinstance(options, InspectOptions) and options.from_config
    ):
        fields.append("target")
    return [name for name in fields if getattr(options, name) not in (None, AUTO)]


def _add_class_options(options: ClassOptions) -> ClassOptions:
    suffix = " --trust-remote-code" if options.trust_remote_code else ""
    suffix += "" if options.config_json is None else f" --config-json {options.config_json}"
    if not suffix:
        return options
    fields = [
        each.field for each in parameters_of(type(options)) if each.names is NamedKind.TARGET and not each.repeatable
    ]
    texts: dict[str, str] = {name: value for name in fields if (value := getattr(options, name)) is not None}
    targets = options.targets if isinstance(options, (AuditOptions, LockOptions)) else ()
    target_texts = [*texts.values(), *targets]
    if not any(map(_is_class, target_texts)):
        raise _build_error(options, target_texts)
    if options.config_json is not None:
        _check_configuration(options.config_json, target_texts)
    changes: dict[str, object] = {name: _add_suffix(text, suffix) for name, text in texts.items()}
    if targets:
        changes["targets"] = tuple(_add_suffix(text, suffix) for text in targets)
    return replace(options, **changes, trust_remote_code=False, config_json=None)


def _add_suffix(text: str, suffix: str) -> str:
    """Return the target. Append `suffix` to a class. Raises UsageError if a file or folder has the new name."""
    if not _is_class(text):
        return text
    if os.path.lexists(text + suffix):
        raise UsageError(
            f"{text}: a file or folder is called {text + suffix!r}, like this model with its options; rename it"
        )
    return text + suffix


def _check_configuration(config_json: str, target_texts: Sequence[str]) -> None:
    """Raise UsageError if --config-json is given for a class that already has a configuration."""
    for text in target_texts:
        spec = load.find_class_spec(text)
        if spec is not None and spec.config is not None:
            raise UsageError(
                f"{option('--config-json', config_json)}: {text} is built from {spec.config}; leave the option out"
            )


def _is_class(text: str) -> bool:
    return load.find_class_spec(text) is not None


def _build_error(options: ClassOptions, target_texts: Sequence[str]) -> UsageError:
    trust = option("--trust-remote-code")
    flag = trust if options.config_json is None else option("--config-json", options.config_json)
    verb = "is not a model class" if len(target_texts) == 1 else "are not model classes"
    problem = f"{' and '.join(target_texts[:3])} {verb}"
    return UsageError(f"{flag}: {problem}; give a class, such as net.py:Net")
