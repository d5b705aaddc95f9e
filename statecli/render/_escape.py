"""Names come from files and can carry terminal escapes, line breaks and bidirectional overrides: made visible here."""

from __future__ import annotations

import re

#: C0 and C1 controls, DEL, bidirectional marks and overrides, line and paragraph separators, BOM, lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")

#: Longer names are elided in the middle; JSON has them whole.
MAX_NAME = 1000


def visible(text: str) -> str:
    """The text with every character that a terminal would act on written as `\\x1b` or `\\u202e`."""
    return text if text.isascii() and text.isprintable() else _UNSAFE.sub(_written, text)


#: Longer remarks, notes and findings are elided in the middle.
MAX_SENTENCE = 2000


def sentence(text: str) -> str:
    """`visible`, and elided in the middle when a name inside it is absurdly long."""
    return visible(elided(text, MAX_SENTENCE))


def name(text: str) -> str:
    """`visible`, and elided in the middle when absurdly long."""
    return visible(elided(text, MAX_NAME))


def elided(text: str, width: int) -> str:
    """The text with its middle left out, `width` characters at most; the end of an FQN says more than its start."""
    if len(text) <= width:
        return text
    start = max((width - 1) // 3, 0)
    return text[:start] + "…" + text[len(text) - (width - 1 - start) :]


def in_json(line: str) -> str:
    """Encoded JSON with the same characters as JSON escapes: they only ever stand inside strings."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def _written(match: re.Match[str]) -> str:
    code = ord(match[0])
    return {9: "\\t", 10: "\\n", 13: "\\r"}.get(code) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
