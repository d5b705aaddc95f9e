"""Colours as ANSI escape sequences (the SGR codes of ECMA-48)."""

from __future__ import annotations

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "bold red": "1;31"}


def paint(text: str, style: str, color: bool) -> str:
    """Return the text in a style. Return it unchanged if `color` is False or `style` is empty."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if color and style and text else text


def get_patch_style(line: str) -> str:
    """Return the style of a line of a unified diff."""
    return next((style for start, style in _PATCH_STYLES if line.startswith(start)), "")


_PATCH_STYLES = (("---", "bold"), ("+++", "bold"), ("@@", "cyan"), ("+", "green"), ("-", "red"))
