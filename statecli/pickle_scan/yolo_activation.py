"""Find code at the key `activation` of a YAML file, because Ultralytics evaluates the value when building a model.

The text is searched, not parsed as YAML: each possible place of the key is judged. Ultralytics ignores bytes that are
not UTF-8, and removes unprintable characters. Sources: ultralytics 8.4 (nn/tasks.py, utils/__init__.py), PyYAML 6
(reader.py, scanner.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import evaluated_texts

#: Key, and the spaces after the key.
_KEY = compile_on_use(r"(?<![\w.-])activation[\"']?\s*")
_BRACKET = compile_on_use(r"[\[{]")
#: Text that may precede a value: spaces, comments, a tag, and the name by which other places refer to the value.
_BEFORE_VALUE = compile_on_use(r"(?:\s+|(?<=\s)#[^\n]*|[!&][^\s,\[\]{}]*)*")
_ANCHOR = re.compile(r"&[\w-]+")
#: Reference to another value as a key, which may be any text.
_ALIAS_AS_KEY = compile_on_use(r"(?<![^\s{\[,])\*[\w-]+\s*:(?!\S)")
#: Characters that Ultralytics removes, line breaks of PyYAML, and escapes of letters and of a line break in quotes.
_REMOVED = compile_on_use("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")
_LINE_BREAK = compile_on_use("\r\n?|[\x85\u2028\u2029]")
_ESCAPE = compile_on_use(r"\\(?:x|u00|U000000)([46][1-9A-Fa-f]|[57][0-9Aa])|\\\n[ \t]*")
_SINGLE, _DOUBLE = re.compile(r"'((?:[^']|'')*)'"), re.compile(r'"([^"\\]*)"')
_COMMENT, _TRAILING_COMMENT = re.compile(r"(?<!\S)#"), re.compile(r"\s#.*")
#: Beginning of a value that is not a text, and sign of a mapping, which no line of an unquoted text has.
_COLLECTION, _MAPPING = re.compile(r"-\s|\[|\{"), re.compile(r":(?:\s|$)")
#: Largest number of characters in a text, and of places that are checked.
_MAX_CHARACTERS, _MAX_PLACES = 4096, 2000


def has_code(content: bytes) -> bool:
    """Return True if an `activation` may call anything but a class of torch.nn with literal arguments."""
    text = _REMOVED.sub("", content.decode("utf-8", "ignore"))
    text = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)) if escape[1] else "", _LINE_BREAK.sub("\n", text))
    if "activation" not in text:
        return False
    if _ALIAS_AS_KEY.search(text):
        return True
    for count, scalar in enumerate(_iter_scalars(text)):
        if scalar is None or count > _MAX_PLACES or not evaluated_texts.is_plain_activation(" ".join(scalar.split())):
            return True
    return False


def _iter_scalars(text: str) -> Iterator[str | None]:
    """Yield the text at each key `activation`; None for a text that statecli cannot read."""
    bracket = _BRACKET.search(text)
    for place in _KEY.finditer(text):
        end = place.end()
        if text[end : end + 1] == "#" and "?" in text:  # after `? activation`, a colon may follow the comment
            yield None
        if text[end : end + 1] != ":":
            continue
        line_end = text.rfind("\n", max(0, place.start() - _MAX_CHARACTERS), place.start())
        begin = line_end + 1 if line_end >= 0 else max(0, place.start() - _MAX_CHARACTERS)
        preceding_text = text[begin : place.start()]
        if _is_comment(preceding_text):
            continue
        start = _skip_to_value(text, end + 1)
        if text[start : start + 1] == "*":  # another value of the text
            yield from (_read_scalar(text, _skip_to_value(text, at.end()), None) for at in _ANCHOR.finditer(text))
        else:
            is_in_flow = (bracket is not None and bracket.start() < begin) or preceding_text.strip(" ?-\"'") != ""
            yield _read_scalar(text, start, None if is_in_flow else place.start() - begin)


def _skip_to_value(text: str, position: int) -> int:
    match = _BEFORE_VALUE.match(text, position)
    return match.end() if match else position


def _is_comment(preceding_text: str) -> bool:
    """Return True if a comment begins before the key and after the last quote, so that the `#` is not in a text."""
    preceding_text = preceding_text[:-1] if preceding_text[-1:] in ("'", '"') else preceding_text
    quote = max(preceding_text.rfind("'"), preceding_text.rfind('"'))
    return _COMMENT.search(preceding_text, max(0, quote)) is not None


def _read_scalar(text: str, start: int, indent: int | None) -> str | None:
    """Return the text that begins at `start`: "" for a list or mapping, None if the text is too long or has escapes.

    `indent`: the column of the key, whose text goes on in lines with a larger indent; None if the key may be in braces,
    because a text in braces goes on in any line.
    """
    part = text[start : start + _MAX_CHARACTERS]
    if part[:1] in ("'", '"'):
        quoted = (_SINGLE if part[0] == "'" else _DOUBLE).match(part)
        return quoted[1].replace("''", "'") if quoted else None
    first, *following_lines = part.split("\n")
    is_block = first[:1] in ("|", ">")
    if _COLLECTION.match(part) or (not is_block and _MAPPING.search(first.partition(" #")[0])):
        return ""
    lines = [] if is_block else [_TRAILING_COMMENT.sub("", first)]
    for line in following_lines:
        is_deeper = indent is not None and len(line) - len(line.lstrip(" ")) > indent
        mapping = _MAPPING.search(line)
        if line.strip() and not is_deeper and (indent is not None or mapping):
            rest_of_text = line[: mapping.start()] if mapping and indent is None else ""
            return "\n".join([*lines, rest_of_text if "(" in rest_of_text else ""])
        lines.append(line)
    return "\n".join(lines) if len(part) < _MAX_CHARACTERS else None
