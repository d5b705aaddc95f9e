"""Group the errors of many tensors by their common cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.units import plural

#: Parts that differ between messages with the same cause: a checksum, an offset, a storage key.
_FIGURE = compile_on_use(r"(0x[0-9a-f]+|\d+)")


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Name of a tensor or file that could not be read or compared, and the error (`file: name: cause`)."""

    name: str
    message: str


class FailureGroup(msgspec.Struct, frozen=True, gc=False):
    """Failures with a common cause: one line about all of them, and their number."""

    line: str
    size: int


def group_by_cause(failures: Iterable[Failure]) -> list[FailureGroup]:
    """Return one line per file and cause, with the number of failures. Numbers in which the messages differ become "…".

    Tensors of one storage share one message, with the name of the first.
    """
    keys: dict[str, tuple[str, ...]] = {}
    groups: dict[tuple[str, ...], list[Failure]] = {}
    for failure in failures:
        name, message = failure.name, failure.message
        file, has_name, cause = message.partition(f": {name}: ")
        key = keys.setdefault(message, (file, *_FIGURE.split(cause)[::2]) if has_name else (message,))
        groups.setdefault(key, []).append(failure)
    return [FailureGroup(_describe_group(group), len(group)) for group in groups.values()]


def _describe_group(failures: Sequence[Failure]) -> str:
    name, message = failures[0].name, failures[0].message
    file, has_name, _ = message.partition(f": {name}: ")
    if len(failures) == 1 or not has_name:
        return message
    causes = (failure.message.partition(f": {failure.name}: ")[2] for failure in failures)
    figures = zip(*(_FIGURE.split(cause) for cause in causes if cause), strict=True)
    cause = "".join(each[0] if len(set(each)) == 1 else "…" for each in figures)
    return f"{file}: {name} and {plural(len(failures) - 1, 'more tensor')}: {cause}"
