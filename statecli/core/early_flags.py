"""Spellings of the options that must be recognised at the start, before the table of options is imported."""

from __future__ import annotations

HELP_FLAGS = ("-h", "--help")
VERSION_FLAGS = ("-V", "--version")
VERBOSE_FLAGS = ("--verbose", "-v")
COLOR_FLAG, PLUGIN_FLAG, TIMEOUT_FLAG = "--color", "--plugin", "--timeout"
