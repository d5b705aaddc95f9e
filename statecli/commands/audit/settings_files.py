"""Read the settings files of a model folder that name Python code, or contain chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator

from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.rules.settings_file import PIPELINES, CodeReference, SettingsFile, Template
from statecli.storage import files
from statecli.storage.byte_source import read_small_file

#: Largest settings file that is read, in bytes; a tokenizer_config.json with many added tokens has several MB.
_MAX_BYTES = 64 * 2**20
#: Files in which transformers looks for `auto_map`, for `custom_pipelines` or for chat templates.
_SETTINGS = compile_on_use(r"(?:\w*config|chat_template)\.json\Z")
#: Files in which transformers and vLLM look for chat templates, by their folder and name.
_TEMPLATE = compile_on_use(r"additional_chat_templates/[^/]*\.jinja\Z|[^/]*/[^/]*chat_template[^/]*\.jinja2?\Z")
#: Folder and file that `generate(custom_generate=…)` runs.
_GENERATE = ("custom_generate", "generate.py")
_AUTO_MAP, _CHAT_TEMPLATE = "auto_map", "chat_template"


def read_settings_file(path: str) -> SettingsFile | None:
    """Return the Python code and the chat templates that the file names or contains; None for other files."""
    folder, name = files.split(path)
    if (files.get_name(folder), name) == _GENERATE:
        return SettingsFile(path, (CodeReference("custom_generate", "generate.py"),))
    is_template = _TEMPLATE.match(f"{files.get_name(folder)}/{name}") is not None
    if not is_template and not _SETTINGS.match(name):
        return None
    try:
        raw = read_small_file(path, _MAX_BYTES)
    except UnreadableError as error:
        return SettingsFile(path, unread_because=str(error)) if files.exists(path) else None  # a broken link
    text = raw.decode("utf-8", "replace")
    if is_template:
        return SettingsFile(path, templates=(Template(name, text),))
    try:
        document = json.loads(text)
    except ValueError:  # transformers reads the file in the same way
        return None
    except RecursionError:  # a program with fewer calls on its stack may read the file
        return SettingsFile(path, unread_because="its lists or objects are nested too deeply")
    if not isinstance(document, dict):
        return None
    code = (*_iter_code(document.get(_AUTO_MAP)), *_iter_pipelines(document.get(PIPELINES)))
    templates = tuple(_iter_templates(document.get(_CHAT_TEMPLATE)))
    return SettingsFile(path, code, templates) if code or templates else None


def _iter_code(auto_map: object) -> Iterator[CodeReference]:
    """Yield the classes in `auto_map`. A value is a class, or a list of a slow and a fast tokenizer (or None)."""
    for key, value in auto_map.items() if isinstance(auto_map, dict) else ():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                yield CodeReference(f"{_AUTO_MAP}.{key}", text)


def _iter_pipelines(pipelines: object) -> Iterator[CodeReference]:
    """Yield the class of each task of `custom_pipelines`."""
    for task, settings in pipelines.items() if isinstance(pipelines, dict) else ():
        text = settings.get("impl") if isinstance(settings, dict) else None
        if isinstance(text, str):
            yield CodeReference(f"{PIPELINES}.{task}.impl", text)


def _iter_templates(value: object) -> Iterator[Template]:
    """Yield each template of a setting: a text, a dict of texts, or a list of dicts with `name` and `template`."""
    if isinstance(value, str):
        yield Template(_CHAT_TEMPLATE, value)
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        for key, text in entry.items() if isinstance(entry, dict) else ():
            if isinstance(text, str):
                yield Template(f"{_CHAT_TEMPLATE}.{key}", text)
