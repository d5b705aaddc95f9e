"""Read the settings files of a model folder that name Python code, or contain chat templates."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ChatTemplate
from statecli.rules.settings_file import ATTENTION_KEYS, MODEL_INDEX, MODULES, PIPELINES, CodeReference, SettingsFile
from statecli.storage import files
from statecli.storage.byte_source import read_small_file

#: Largest settings file that is read, in bytes; a tokenizer_config.json with many added tokens has several MB.
_MAX_BYTES = 64 * 2**20
#: Files in which transformers looks for `auto_map`, for `custom_pipelines` or for chat templates, diffusers for the
#: classes of a pipeline, and sentence-transformers for the classes of a model.
#: `configuration_files` in `config.json` selects a file such as `config.4.0.0.json` by the version of transformers.
_SETTINGS = compile_on_use(r"(?:\w*config(?:\.[^/]+)?|chat_template|model_index|modules)\.json\Z")
#: Files in which transformers and vLLM look for chat templates, by their folder and name.
_TEMPLATE = compile_on_use(r"additional_chat_templates/[^/]*\.jinja\Z|[^/]*/[^/]*chat_template[^/]*\.jinja2?\Z")
#: Folder and file that `generate(custom_generate=…)` runs.
_GENERATE = ("custom_generate", "generate.py")
#: Name of a kernel in a repository, with a revision and a function, and the repositories that transformers trusts.
_KERNEL = compile_on_use(r"[^/:]+/[^/:]+(?:@[^/:]+)?(?::[^/:]+)?\Z")
_VERIFIED_KERNELS = "kernels-community/"
_AUTO_MAP, _CHAT_TEMPLATE = "auto_map", "chat_template"


def read_settings_file(path: str) -> SettingsFile | None:
    """Return the Python code and the chat templates that the file names or contains, or None for other files."""
    folder, name = files.split(path)
    if not may_be_settings(path):
        return None
    if (files.get_name(folder), name) == _GENERATE:
        return SettingsFile(path, (CodeReference("custom_generate", "generate.py"),))
    is_template = not _SETTINGS.match(name)
    try:
        raw = read_small_file(path, _MAX_BYTES)
    except UnreadableError as error:
        return SettingsFile(path, unread_because=str(error)) if files.exists(path) else None  # a broken link
    text = raw.decode("utf-8", "replace")
    if is_template:
        return SettingsFile(path, templates=(ChatTemplate(name, text),))
    try:
        document = json.loads(text)
    except ValueError:  # transformers reads the file in the same way
        return None
    except RecursionError:  # a program with fewer calls on its stack may read the file
        return SettingsFile(path, unread_because="its lists or objects are nested too deeply")
    code = tuple(_iter_references(folder, name, document))
    templates = tuple(_iter_templates(document.get(_CHAT_TEMPLATE))) if isinstance(document, dict) else ()
    return SettingsFile(path, code, templates) if code or templates else None


def list_settings_files(folder: str) -> list[str]:
    """Return the files of a model folder that `read_settings_file` may read. An unlistable folder is skipped."""
    paths = []
    for parent in (folder, *(files.join(folder, name) for name in ("additional_chat_templates", _GENERATE[0]))):
        with suppress(OSError):
            paths += [files.join(parent, name) for name in sorted(files.list_names(parent or os.curdir))]
    return [path for path in paths if may_be_settings(path) and files.exists(path)]


def may_be_settings(path: str) -> bool:
    """Return whether libraries look for code or chat templates in a file of this name."""
    folder, name = files.split(path)
    place = files.get_name(folder), name
    return place == _GENERATE or _SETTINGS.match(name) is not None or _TEMPLATE.match("/".join(place)) is not None


def _iter_references(folder: str, name: str, document: Any) -> Iterator[CodeReference]:
    """Yield the references to Python code that a library follows in the settings file `name`."""
    if name == MODULES:
        yield from _iter_modules(document)
    elif isinstance(document, dict) and name == MODEL_INDEX:
        yield from _iter_components(folder, document)
    elif isinstance(document, dict):
        yield from _iter_code(document.get(_AUTO_MAP))
        yield from _iter_pipelines(document.get(PIPELINES))
        yield from _iter_kernels(document)


def _iter_kernels(settings: dict[str, Any], prefix: str = "") -> Iterator[CodeReference]:
    """Yield each attention kernel from another repository that the settings of a model or a submodel name."""
    for key, value in settings.items():
        if key in ATTENTION_KEYS:
            names = value.values() if isinstance(value, dict) else [value]
            for name in names:
                if isinstance(name, str) and _KERNEL.match(name) and not name.startswith(_VERIFIED_KERNELS):
                    yield CodeReference(f"{prefix}{key}", name)
        elif isinstance(value, dict) and not prefix:
            yield from _iter_kernels(value, f"{key}.")


def _iter_modules(modules: Any) -> Iterator[CodeReference]:
    """Yield the module classes of sentence-transformers that come from the folder or from another repository."""
    for number, module in enumerate(modules if isinstance(modules, list) else ()):
        text = module.get("type") if isinstance(module, dict) else None
        if isinstance(text, str) and text.count(".") == 1:  # another class is in an installed package
            yield CodeReference(f"{number}.type", text)


def _iter_components(folder: str, index: dict[str, Any]) -> Iterator[CodeReference]:
    """Yield the class of a diffusers pipeline and of each component whose code is a file in the folder."""
    for key, value in index.items():
        names = value[:2] if isinstance(value, list) else []
        if len(names) < 2 or not all(isinstance(name, str) for name in names):
            continue
        module = names[0] if key == "_class_name" else f"{key}/{names[0]}"
        if key == "_class_name" or files.is_file(files.join(folder, f"{module}.py")):
            yield CodeReference(key, f"{module}.{names[1]}")


def _iter_code(auto_map: object) -> Iterator[CodeReference]:
    """Yield the classes in `auto_map`. A value is a class, or a list: slow and fast tokenizer (each may be None)."""
    for key, value in auto_map.items() if isinstance(auto_map, dict) else ():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                yield CodeReference(f"{_AUTO_MAP}.{key}", text)


def _iter_pipelines(pipelines: object) -> Iterator[CodeReference]:
    """Yield the class that `custom_pipelines` names for each task."""
    for task, settings in pipelines.items() if isinstance(pipelines, dict) else ():
        text = settings.get("impl") if isinstance(settings, dict) else None
        if isinstance(text, str):
            yield CodeReference(f"{PIPELINES}.{task}.impl", text)


def _iter_templates(value: object) -> Iterator[ChatTemplate]:
    """Yield each template of a setting: a text, a dict of texts, or a list of dicts with `name` and `template`."""
    if isinstance(value, str):
        yield ChatTemplate(_CHAT_TEMPLATE, value)
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        for key, text in entry.items() if isinstance(entry, dict) else ():
            if isinstance(text, str):
                yield ChatTemplate(f"{_CHAT_TEMPLATE}.{key}", text)
