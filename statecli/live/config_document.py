"""Find and read the configuration file of a model, and determine which library wrote the file."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any

from statecli.core.errors import UnreadableError, UsageError
from statecli.core.quoting import quote_for_shell
from statecli.core.target_suggestions import suggest_repository
from statecli.formats.shared import config_files
from statecli.storage import files
from statecli.storage.checkpoint_folder import CONFIG, MODULES, PIPELINE


class Library(enum.Enum):
    """The library of a model class."""

    TRANSFORMERS = "transformers"
    DIFFUSERS = "diffusers"
    TIMM = "timm"
    SENTENCE_TRANSFORMERS = "sentence-transformers"


def read_document(config: str) -> dict[str, Any]:
    """Return the JSON object in a configuration file. Raises UsageError if the file cannot be read."""
    folder, name = files.split(config)
    try:
        return config_files.read_document(folder or os.curdir, name)
    except UnreadableError as error:
        raise UsageError(f"{folder}: {error}" if folder else str(error)) from error


def find_library(document: Mapping[str, Any]) -> Library:
    """Return the library of the model class in config.json, or transformers if config.json names no class."""
    if type(document.get("_class_name")) is str:
        return Library.DIFFUSERS
    if type(document.get("architecture")) is str and "architectures" not in document:
        return Library.TIMM
    return Library.TRANSFORMERS


def names_model(config: str) -> bool:
    """Return True if the file is a modules.json, or a configuration that names a model class.

    True for an unreadable file, because the build reports the reason.
    """
    if files.get_name(config) == MODULES:
        return True
    try:
        document = read_document(config)
    except UsageError:
        return True
    return any(key in document for key in ("architectures", "model_type", "_class_name", "architecture", "auto_map"))


def find_config_file(path: str, default: str = "") -> str:
    """Return the configuration file in a folder, or the file itself. Raises UsageError if there is no such file.

    `default`: a spec with the default configuration, which the error suggests.
    """
    if not files.is_folder(path):
        if files.exists(path):
            return path
        hint = suggest_repository(path) or "give a config.json, its folder, or hf://ORGANIZATION/NAME"
        line = f"for the default configuration, write {quote_for_shell(default)}" if default else None
        raise UsageError(f"{path}: no such file or folder; {hint}", advice=line)
    names = [name for name in (MODULES, CONFIG) if files.exists(files.join(path, name))]
    if names:
        return files.join(path, names[0])
    if files.exists(files.join(path, PIPELINE)):
        raise UsageError(f"{path}: is a diffusers pipeline, not one model; name the folder of a component")
    raise UsageError(f"{path}: has no {CONFIG} that names the model class; name the class: file.py:Class")
