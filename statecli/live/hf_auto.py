"""Build a transformers class from config.json without weights, and map names in a checkpoint to parameter names.

Nothing in the configuration is downloaded or run. The class must be part of transformers. Entries that fetch kernels,
backbones or a quantizer are removed or refused, and the hub is off during the build.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from statecli.core import quoting
from statecli.core.errors import MissingDependency, ModelError, UsageError, option
from statecli.core.installed_package import install_packages
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.core.units import join_names
from statecli.live import config_guards, search_path
from statecli.live.config_document import read_document
from statecli.live.library_output import hide_library_lines
from statecli.storage import files

if TYPE_CHECKING:
    from torch import nn

_NAME = compile_on_use(r"[A-Za-z_]\w*")
#: Names of transformers' classes that choose another class by the `model_type` of the configuration.
_AUTO_CLASS = compile_on_use(r"AutoModel\w*|AutoBackbone")


def find_class_name(document: Mapping[str, Any], config: str, *, for_auto: bool = False) -> str:
    """Return the class name in a transformers configuration. Raises UsageError if there is none.

    `for_auto`: `--model auto` asks for the class.
    """
    names = document.get("architectures")
    name = names[0] if type(names) is list and names else None
    if type(name) is str and _NAME.fullmatch(name):
        return name
    kind = document.get("model_type")
    if type(kind) is str and not names:
        classes = import_transformers(config).models.auto.modeling_auto.MODEL_MAPPING_NAMES
        if type(classes.get(kind)) is str:
            return str(classes[kind])
    architectures_problem = (
        "does not name a class" if name is None else f"has {quoting.value(name)}, which is not the name of a class"
    )
    auto_problem = f", but {option('--model', 'auto')} needs a class name; name the class instead"
    advice = auto_problem if for_auto else "; name the class: file.py:Class"
    raise UsageError(f"{config}: architectures {architectures_problem}{advice}")


def import_transformers(config: str) -> Any:
    """Return the installed transformers, never a module from the current folder or the configuration's folder."""
    try:
        with hide_library_lines(), search_path.use_installed_only(files.get_folder(config)):
            import transformers
            import transformers.models.auto.modeling_auto
    except ImportError as error:
        reason = f"needs transformers, which cannot be imported: {install_packages('transformers')}"
        raise MissingDependency(f"{option('--model', 'auto')} {reason}") from error
    return transformers


# --- building --------------------------------------------------------------------------------------------------------


def build_transformers(name: str | None, config: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the class `name`, or the class that the configuration file `config` names. Raises UsageError, ModelError.

    `arguments`: constructor arguments, or entries that replace those of the configuration.
    """
    import torch

    transformers = import_transformers(config)
    document = read_document(config)
    is_named, name = name is not None, name or find_class_name(document, config)
    config_guards.check_config(document, config)
    model_class = _find_class(transformers, name, document, config, is_named=is_named)
    config_class = model_class.config_class
    kind, model_type = document.get("model_type"), config_class.model_type
    if kind not in (None, model_type) and not (is_named and not _knows_type(transformers, document)):
        raise ModelError(
            f"{config}: model_type is {str(kind)[:80]!r}, but {name} needs {model_type!r}; "
            + _suggest_class(transformers, document, config)
        )
    with (
        config_guards.disable_hub(),
        config_guards.silence_logging(transformers.logging),
        config_guards.limit_registrations(config),
        config_guards.use_saved_dtype(torch, document),
    ):
        model_arguments, replaced_entries = _divide_arguments(model_class, arguments)
        config_guards.check_config(replaced_entries, config)
        settings = config_class.from_dict(config_guards.remove_fetches({**document, **replaced_entries}))
        settings._attn_implementation = "eager"
        model: nn.Module = model_class(settings, **model_arguments)
    return model


def _find_class(transformers: Any, name: str, document: Mapping[str, Any], config: str, *, is_named: bool) -> Any:
    """Return the transformers model class `name`, or the class that the Auto class `name` would choose.

    `is_named`: the user or `--model auto` named the class, and not the configuration.
    """
    if _AUTO_CLASS.fullmatch(name):
        return _choose_class(transformers, name, document, config)
    model_class: Any = getattr(transformers, name, None)
    if (
        getattr(model_class, "config_class", None) is None
        or not isinstance(model_class, type)
        or not issubclass(model_class, transformers.PreTrainedModel)
    ):
        if document.get("auto_map"):
            runs_it = f"statecli runs only with {option('--trust-remote-code')}"
            if is_named:
                runs_it = f"{option('--model', 'auto')} does not run; name the class: file.py:Class"
            raise ModelError(f"{config}: {name} is code of the checkpoint (auto_map), which {runs_it}")
        problem = f"{config}: transformers {transformers.__version__} has no model class {name}"
        raise ModelError(f"{problem}; {_suggest_class(transformers, document, config)}")
    return model_class


def _knows_type(transformers: Any, document: Mapping[str, Any]) -> bool:
    """Return True if transformers knows the configuration's model_type, or if the configuration has no model_type."""
    kind = document.get("model_type")
    return type(kind) is not str or kind in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES


def _suggest_class(transformers: Any, document: Mapping[str, Any], config: str) -> str:
    """Return advice to name the class for the configuration's `model_type`, or else to name any class."""
    kind = document.get("model_type")
    names = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES
    class_name = names.get(kind) if type(kind) is str and not document.get("auto_map") else None
    if type(class_name) is not str:
        return "name the class: file.py:Class"
    return f"for this model_type, write {quote_for_shell(f'transformers:{class_name}({config!r})')}"


def _choose_class(transformers: Any, name: str, document: Mapping[str, Any], config: str) -> Any:
    kind = document.get("model_type")
    config_classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    # Index the mapping, because its `get` finds no entry.
    config_class = config_classes[kind] if type(kind) is str and kind in config_classes else None
    mapping = getattr(getattr(transformers, name, None), "_model_mapping", None)
    if config_class is None or mapping is None or config_class not in mapping:
        has = f"model_type {str(kind)[:80]!r}" if kind else "a file without model_type"
        problem = f"{config}: {name} of transformers {transformers.__version__} has no class for {has}"
        example = find_example(getattr(transformers, name, None), str(kind or ""))
        raise ModelError(f"{problem}; for random values, write {quote_for_shell(example)}" if example else problem)
    model_classes = mapping[config_class]
    if not isinstance(model_classes, (tuple, list)):
        return model_classes
    architecture_names = document.get("architectures") or ()
    return next(
        (model_class for model_class in model_classes if model_class.__name__ in architecture_names), model_classes[0]
    )


def find_example(model_class: object, name: str = "") -> str | None:
    """Return a model spec for a class of transformers with its default configuration, or None for another class.

    `name`: a repository or a model, whose model_type decides which model an Auto class builds; None if it is unknown.
    """
    config_class = getattr(model_class, "config_class", None)
    if isinstance(config_class, type):
        return f"transformers:{getattr(model_class, '__name__', '')}(config={config_class.__name__}())"
    mapping: Any = getattr(model_class, "_model_mapping", None) or {}
    classes = list(mapping.keys())
    kind = find_model_type(name, [config_class.model_type for config_class in classes]) if name else None
    fitting_classes = [config_class for config_class in classes if config_class.model_type == kind or not name]
    if not fitting_classes:
        return None
    model_classes = mapping[fitting_classes[0]]
    return find_example(model_classes[0] if isinstance(model_classes, (tuple, list)) else model_classes)


def find_model_type(repository: str, kinds: Iterable[str]) -> str | None:
    """Return the model type that begins a word of a repository's name (`bert` for `bert-base-uncased`), or None.

    The first such word counts, and the longest type: `distilbert-base` is not a BERT.
    """
    name = repository.rpartition("/")[2].lower().replace("_", "-")
    starts = [match.start() for match in re.finditer(r"(?<![a-z0-9])[a-z]", name)]
    for start in starts:
        fitting_kinds = [kind for kind in kinds if name.startswith(kind.replace("_", "-"), start)]
        if fitting_kinds:
            return max(fitting_kinds, key=len)
    return None


class DividedArguments(NamedTuple):
    """Arguments of a model's constructor, and arguments that replace entries of its configuration."""

    model_arguments: dict[str, Any]
    replaced_entries: dict[str, Any]


def divide_arguments(name: str, config: str, arguments: Mapping[str, Any]) -> DividedArguments:
    """Divide the arguments into constructor arguments and configuration entries of class `name`. Raises ModelError."""
    model_class = _find_class(import_transformers(config), name, read_document(config), config, is_named=True)
    return _divide_arguments(model_class, arguments)


def _divide_arguments(model_class: Any, arguments: Mapping[str, Any]) -> DividedArguments:
    import inspect

    parameters = list(inspect.signature(model_class.__init__).parameters)[2:]
    model_arguments = {key: value for key, value in arguments.items() if key in parameters}
    other_arguments = {key: value for key, value in arguments.items() if key not in model_arguments}
    unknown = [key for key in other_arguments if not hasattr(model_class.config_class(), key)]
    if unknown:
        name = model_class.__name__
        accepted_text = f"{name} takes {join_names(['config', *parameters], 6)}"
        raise ModelError(f"neither {name} nor its configuration takes {join_names(unknown, 3)}; {accepted_text}")
    return DividedArguments(model_arguments, other_arguments)


def build_remote_code(config: str, document: Mapping[str, Any], arguments: Mapping[str, Any]) -> nn.Module:
    """Build the class in `auto_map`, whose code is in the folder of `config`. Raises ModelError.

    This imports the folder's Python files, so the user must give `--trust-remote-code`.
    """
    transformers = import_transformers(config)
    if files.is_remote(config):
        reason = "runs only code on this disk; download the folder first"
        raise ModelError(f"{files.get_folder(config)}: {option('--trust-remote-code')} {reason}")
    folder = os.path.abspath(files.get_folder(config) or os.curdir)
    auto_map = document["auto_map"]
    classes = [key for key in auto_map if key.startswith("AutoModel")] if type(auto_map) is dict else []
    if not classes:
        raise ModelError(f"{config}: auto_map does not name a model class; name the class: file.py:Class")
    with config_guards.disable_hub(), config_guards.silence_logging(transformers.logging):
        settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, **arguments)
        auto_class = getattr(transformers, classes[-1], transformers.AutoModel)
        model: nn.Module = auto_class.from_config(settings, trust_remote_code=True)
    return model


# --- names in checkpoints --------------------------------------------------------------------------------------------


def map_loaded_names(model: Any, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Map names in a checkpoint to names of the class's tensors, as `from_pretrained` does.

    Names may differ by the base model's prefix, by renames, and by tensors merged or split. Returns {} for a class of
    another library.
    """
    if not hasattr(model, "base_model_prefix"):  # a class of another library
        return {}
    class_tensors = dict(model.state_dict())
    with search_path.use_installed_only():
        rename = build_renaming(model, class_tensors)
    targets_by_name: dict[str, tuple[str, ...]] = {}
    for name in names:
        new_names = rename(name) if rename else _swap_prefix(name, model.base_model_prefix, class_tensors)
        targets = tuple(target for target in new_names if target in class_tensors)
        if targets and targets != (name,):
            targets_by_name[name] = targets
    return targets_by_name


def build_renaming(model: nn.Module, class_tensors: dict[str, Any]) -> Callable[[str], list[str]] | None:
    """Return the function that maps a name in a checkpoint to the names under which transformers loads the entry.

    Returns None for versions before transformers 5, because they have no such mappings.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return None
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_source = {source: conversion for conversion in converters for source in conversion.source_patterns}

    def rename(name: str) -> list[str]:
        renamed_key, source = rename_source_key(name, renamings, converters, model.base_model_prefix, class_tensors)
        targets = by_source[source].target_patterns if source in by_source else []
        first = targets[0] if targets else ""
        return [renamed_key.replace(first, conversion) for conversion in targets] if len(targets) > 1 else [renamed_key]

    return rename


def _swap_prefix(name: str, prefix: str, class_tensors: Mapping[str, Any]) -> list[str]:
    if f"{prefix}.{name}" in class_tensors:
        return [f"{prefix}.{name}"]
    return [name.removeprefix(f"{prefix}.") if name not in class_tensors else name]
