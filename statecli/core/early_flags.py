"""Spellings of the options that the program must recognise at its start, before it imports the table of options."""

from __future__ import annotations

HELP_FLAGS = ("-h", "--help")
VERSION_FLAGS = ("-V", "--version")
VERBOSE_FLAGS = ("--verbose", "-v")
COLOR_FLAG, PLUGIN_FLAG, TIMEOUT_FLAG = "--color", "--plugin", "--timeout"
