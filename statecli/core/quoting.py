"""Format text from a file for a one-line message: escaped, and truncated if very long."""

from __future__ import annotations

import re
from collections.abc import Sequence

from statecli.core.lazy_pattern import compile_on_use

#: Largest number of characters of a name, and of dimensions of a shape, in a message.
MAX_NAME_CHARACTERS = 200
MAX_SHOWN_DIMENSIONS = 8
#: Verbs at the start of an error text whose subject is the name before the text: `x.json is empty`.
_FIRST_VERB = compile_on_use(
    r"(?:answers|cannot|changed|claims|contains|does|ends|has|holds|is|lacks|lies|names|nests|stores) "
)


def name(text: str) -> str:
    """Return a name with escapes for line breaks and control characters, or two quotes for an empty name."""
    if not text:
        return "''"
    text = _truncate(text)
    return text if text.isprintable() else repr(text)[1:-1]


def append_reason(noun: str, reason: object) -> str:
    """Join a noun and a reason: `x.json is empty`, or `x.json: …` if the reason does not begin with a verb."""
    return f"{noun} {reason}" if starts_with_verb(str(reason)) else f"{noun}: {reason}"


def starts_with_verb(reason: str) -> bool:
    """Return True if the text begins with a verb and so needs a subject before it."""
    return _FIRST_VERB.match(reason) is not None


def quote(text: str) -> str:
    """Return the text in quotes, for the middle of a sentence."""
    return repr(_truncate(text))


def quote_for_shell(word: str) -> str:
    """Return a word for a shell: in quotes if the word has parentheses or other special characters."""
    import shlex

    quoted_word = shlex.quote(word)
    return quoted_word if "'" not in word or re.search(r'["$`\\!]', word) else f'"{word}"'


def names(texts: Sequence[str]) -> str:
    """Return the first four names, and the number of the remaining names: `a, b, c, d and 3 more`."""
    count_text = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(map(name, texts[:4])) + count_text


def shape(dims: Sequence[int]) -> str:
    """Return `[2, 3]`, or `[1, 1, …] (50 dimensions)` for a shape with many dimensions."""
    if len(dims) <= MAX_SHOWN_DIMENSIONS:
        return str(list(dims))
    return f"[{', '.join(map(str, dims[:MAX_SHOWN_DIMENSIONS]))}, …] ({len(dims)} dimensions)"


def value(node: object) -> str:
    """Return a JSON scalar as text. Show only the type of a container, because containers can have any size."""
    if isinstance(node, (list, dict)):
        return f"a {type(node).__name__}"
    text = repr(node) if not isinstance(node, int) or abs(node) < 10**30 else "a number of more than 30 digits"
    return text if len(text) <= 60 else text[:60] + "…"


def _truncate(text: str) -> str:
    return (
        text
        if len(text) <= MAX_NAME_CHARACTERS
        else f"{text[: MAX_NAME_CHARACTERS // 2]}…{text[-MAX_NAME_CHARACTERS // 2 :]}"
    )
