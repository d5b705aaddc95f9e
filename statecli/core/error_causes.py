"""Group the errors of many tensors by their common cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.units import plural

#: Parts that differ between messages with the same cause: a checksum, an offset, a storage key.
_FIGURE = compile_on_use(r"(0x[0-9a-f]+|\d+)")


def group_by_cause(errors: Iterable[tuple[str, str]]) -> list[tuple[str, int]]:
    """Return one line per file and cause, with the number of errors. Figures that differ are shown as "…".

    `errors` are pairs (tensor name, `file: name: cause`). Tensors of one storage share one message, with the name of
    the first.
    """
    keys: dict[str, tuple[str, ...]] = {}
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, message in errors:
        file, has_name, cause = message.partition(f": {name}: ")
        key = keys.setdefault(message, (file, *_FIGURE.split(cause)[::2]) if has_name else (message,))
        groups.setdefault(key, []).append((name, message))
    return [(_describe_group(group), len(group)) for group in groups.values()]


def _describe_group(errors: Sequence[tuple[str, str]]) -> str:
    name, message = errors[0]
    file, has_name, _ = message.partition(f": {name}: ")
    if len(errors) == 1 or not has_name:
        return message
    causes = (text.partition(f": {tensor_name}: ")[2] for tensor_name, text in errors)
    figures = zip(*(_FIGURE.split(cause) for cause in causes if cause), strict=True)
    cause = "".join(each[0] if len(set(each)) == 1 else "…" for each in figures)
    return f"{file}: {name} and {plural(len(errors) - 1, 'more tensor')}: {cause}"
