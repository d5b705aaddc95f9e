"""Group the errors of many tensors by what they have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from statecli.core.units import plural

#: What differs between the messages of one cause: a checksum, an offset, a storage.
_FIGURE = re.compile(r"(0x[0-9a-f]+|\d+)")


def group_by_cause(broken: Iterable[tuple[str, str]]) -> list[tuple[str, int]]:
    """Of (name, `file: name: cause`): one line a file and cause, with how many there are; figures that differ are "…".

    Tensors of one storage have one message, which names the first of them.
    """
    keys: dict[str, tuple[str, ...]] = {}
    same: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, message in broken:
        file, said, cause = message.partition(f": {name}: ")
        key = keys.setdefault(message, (file, _FIGURE.sub("", cause)) if said else (message,))
        same.setdefault(key, []).append((name, message))
    return [(_describe_cause(several), len(several)) for several in same.values()]


def _describe_cause(several: Sequence[tuple[str, str]]) -> str:
    name, message = several[0]
    file, said, _ = message.partition(f": {name}: ")
    if len(several) == 1 or not said:
        return message
    causes = (text.partition(f": {one}: ")[2] for one, text in several)
    figures = zip(*(_FIGURE.split(cause) for cause in causes if cause), strict=True)
    cause = "".join(each[0] if len(set(each)) == 1 else "…" for each in figures)
    return f"{file}: {name} and {plural(len(several) - 1, 'more tensor')}: {cause}"
