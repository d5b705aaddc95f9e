"""Escape text from files for terminals: escape sequences, line breaks, bidirectional overrides."""

from __future__ import annotations

from statecli.core.lazy_pattern import compile_on_use

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    import re
    from collections.abc import Collection

#: Unsafe characters: C0 and C1 controls, DEL, soft hyphens, bidirectional marks and overrides, zero-width characters,
#: line and paragraph separators, lone surrogates, BOM, noncharacters (Unicode 23.7), tags.
_NONCHARACTERS = "".join(chr(plane << 16 | last) for plane in range(1, 17) for last in (0xFFFE, 0xFFFF))
_UNSAFE = compile_on_use(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufdd0-\ufdef\ufeff\ufffe\uffff"
    f"\U000e0000-\U000e007f{_NONCHARACTERS}]"
)
#: Text that CI runners execute as a command: `::` at the start of a line; `##[` and `##vso[` anywhere.
_WORKFLOW_COMMAND = compile_on_use(r"^(\s*):(?=:)|#(#)(?=\w*\[)")

#: Largest number of characters of a shown name, truncated in the middle; JSON contains the whole name.
MAX_NAME_CHARACTERS = 1000


def escape(text: str) -> str:
    r"""Return the text with an escape such as `\x1b` or `\u202e` for each character that a terminal acts on."""
    return text if text.isascii() and text.isprintable() else _UNSAFE.sub(_escape_character, text)


def escape_path(text: str) -> str:
    """Return `escape(text)`, but keep line breaks and tabs, because the output's own encoding escapes these."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in "\t\n\r" else _escape_character(match), text)


def escape_line(text: str) -> str:
    """Return `escape(text)` for a whole line. Also escape text that a CI runner executes as a command."""
    text = escape(text)
    if "::" not in text and "##" not in text:
        return text
    return _WORKFLOW_COMMAND.sub(lambda match: r"#\x23" if match[2] else match[1] + r"\x3a", text)


def escape_lines(lines: Collection[str]) -> str:
    """Return the lines, each escaped by `escape_line` and with a line break."""
    text = "".join(lines)
    if text.isascii() and text.isprintable() and "::" not in text and "##" not in text:
        return "\n".join((*lines, ""))
    return "".join([f"{escape_line(line)}\n" for line in lines])


#: Largest number of characters of a shown remark, note or finding, truncated in the middle.
MAX_SENTENCE_CHARACTERS = 2000


def escape_sentence(text: str) -> str:
    """Return `escape(text)`, truncated in the middle at MAX_SENTENCE_CHARACTERS."""
    return escape(truncate_middle(text, MAX_SENTENCE_CHARACTERS))


def escape_name(text: str) -> str:
    """Return `escape(text)`, truncated in the middle at MAX_NAME_CHARACTERS."""
    if len(text) <= MAX_NAME_CHARACTERS and text.isascii() and text.isprintable():
        return text
    return escape(truncate_middle(text, MAX_NAME_CHARACTERS))


def are_safe_names(texts: Collection[str]) -> bool:
    """Return True if `escape_name` changes none of these texts."""
    text = "".join(texts)
    return text.isascii() and text.isprintable() and max(map(len, texts), default=0) <= MAX_NAME_CHARACTERS


def truncate_middle(text: str, width: int) -> str:
    """Return the text, cut in the middle to at most `width` characters. Keep more of the end, where FQNs differ."""
    if len(text) <= width:
        return text
    start = max((width - 1) // 3, 0)
    return text[:start] + "…" + text[len(text) - (width - 1 - start) :]


def escape_json(line: str) -> str:
    """Return encoded JSON with unsafe characters as JSON escapes; such characters occur only inside strings."""
    return _UNSAFE.sub(_escape_json_character, line)


def _escape_json_character(match: re.Match[str]) -> str:
    r"""Return `\uXXXX`, or a surrogate pair of escapes for a code point above 0xFFFF."""
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    short = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}")
