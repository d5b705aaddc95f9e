"""JSON document of `config`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from statecli.commands.audit.config import Setting
from statecli.core.version import __version__


class SettingRow(msgspec.Struct, frozen=True):
    """A key of the configuration, with its value and its source."""

    key: str
    value: bool | int | float | str | list[Any] | dict[str, Any] | None
    source: str


class ConfigDocument(msgspec.Struct, frozen=True):
    """`statecli config -f json`. `file` is null if no configuration was found."""

    schema: str
    statecli: str
    file: str | None
    settings: tuple[SettingRow, ...]


def build_config_document(settings: Sequence[Setting], path: str | None) -> ConfigDocument:
    """Return the document of the configuration: each key, its value, and its source."""
    rows = tuple(SettingRow(setting.key, msgspec.to_builtins(setting.value), setting.source) for setting in settings)
    return ConfigDocument("statecli.config/1", __version__, path, rows)
