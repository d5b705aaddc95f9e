"""Names come from files and can carry terminal escapes, line breaks and bidirectional overrides: made visible here."""

from __future__ import annotations

import re

#: C0 and C1 controls, DEL, soft hyphens, bidirectional marks and overrides, zero-width characters, line and paragraph
#: separators, lone surrogates, BOM, noncharacters (Unicode 23.7), tags.
_LAST = "".join(chr(plane << 16 | last) for plane in range(1, 17) for last in (0xFFFE, 0xFFFF))
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufdd0-\ufdef\ufeff\ufffe\uffff"
    f"\U000e0000-\U000e007f{_LAST}]"
)
#: What runners of workflows take for a command: `::` that begins a line, and `##[`, `##vso[` anywhere.
_COMMAND = re.compile(r"^(\s*):(?=:)|#(#)(?=\w*\[)")

#: Longer names are elided in the middle; JSON has them whole.
MAX_NAME = 1000


def visible(text: str) -> str:
    """The text with every character that a terminal would act on written as `\\x1b` or `\\u202e`."""
    return text if text.isascii() and text.isprintable() else _UNSAFE.sub(_written, text)


def as_line(text: str) -> str:
    """`visible`, as a line of its own: none of it is a command to whoever reads the output of a workflow's step."""
    text = visible(text)
    if "::" not in text and "##" not in text:
        return text
    return _COMMAND.sub(lambda match: r"#\x23" if match[2] else match[1] + r"\x3a", text)


#: Longer remarks, notes and findings are elided in the middle.
MAX_SENTENCE = 2000


def sentence(text: str) -> str:
    """`visible`, and elided in the middle when a name inside it is absurdly long."""
    return visible(elided(text, MAX_SENTENCE))


def name(text: str) -> str:
    """`visible`, and elided in the middle when absurdly long."""
    if len(text) <= MAX_NAME and text.isascii() and text.isprintable():
        return text
    return visible(elided(text, MAX_NAME))


def elided(text: str, width: int) -> str:
    """The text with its middle left out, `width` characters at most; the end of an FQN says more than its start."""
    if len(text) <= width:
        return text
    start = max((width - 1) // 3, 0)
    return text[:start] + "…" + text[len(text) - (width - 1 - start) :]


def in_json(line: str) -> str:
    """Encoded JSON with the same characters as JSON escapes: they only ever stand inside strings."""
    return _UNSAFE.sub(_in_json, line)


def _in_json(match: re.Match[str]) -> str:
    """Beyond 16 bits by the two halves of its pair."""
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _written(match: re.Match[str]) -> str:
    code = ord(match[0])
    known = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    return known or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}")
