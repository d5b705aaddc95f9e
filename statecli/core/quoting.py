"""How one-line messages show what comes from a file: escaped, and cut where it is absurdly long."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Characters of a name, dimensions of a shape that a message shows.
MAX_NAME = 200
MAX_DIMS = 8
#: What a text begins with that has the name before it for its subject.
_PREDICATE = re.compile(r"(?:answers|cannot|changed|claims|does|ends|has|holds|is|lacks|lies|names|nests|stores) ")


def name(text: str) -> str:
    """The name as it is; with escapes where it holds line breaks or what a terminal acts on, '' where it is empty."""
    if not text:
        return "''"
    text = _cut(text)
    return text if text.isprintable() else repr(text)[1:-1]


def with_reason(what: str, why: object) -> str:
    """What is wrong behind what it is wrong with: `x.json is empty`, but `x.json: the connection was cut`."""
    return f"{what} {why}" if is_predicate(str(why)) else f"{what}: {why}"


def is_predicate(why: str) -> bool:
    """Whether it begins with a verb, and so says nothing without what it is said of."""
    return _PREDICATE.match(why) is not None


def quoted(text: str) -> str:
    """The same in quotes, for the middle of a sentence."""
    return repr(_cut(text))


def names(texts: Sequence[str]) -> str:
    """The first four names, and how many more there are."""
    more = f", and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(map(name, texts[:4])) + more


def shape(dims: Sequence[int]) -> str:
    """`[2, 3]`, and `[1, 1, …] (50 dimensions)` for a shape too long to show."""
    if len(dims) <= MAX_DIMS:
        return str(list(dims))
    return f"[{', '.join(map(str, dims[:MAX_DIMS]))}, …] ({len(dims)} dimensions)"


def value(node: object) -> str:
    """A scalar as JSON's reader gave it, a container by its type alone: it may be of any size."""
    if isinstance(node, (list, dict)):
        return f"a {type(node).__name__}"
    text = repr(node) if not isinstance(node, int) or abs(node) < 10**30 else "an absurd number"
    return text if len(text) <= 60 else text[:60] + "…"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME // 2]}…{text[-MAX_NAME // 2 :]}"
