"""Numbers and words beside the tensors (epoch, lr, `__metadata__`) that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from statecli.diff.result import ScalarChange, Status
from statecli.formats import _shown
from statecli.state import ModelState, Oddity, Scalar

#: What an index of shards says of the files around it; one file has nothing of the kind.
_OF_INDEX = frozenset(("total_size", "total_parameters"))
#: Which framework wrote the tensors; safetensors alone records it.
_OF_SAFETENSORS = frozenset(("format",))


def changed_scalars(
    before: ModelState,
    after: ModelState,
    sections: tuple[str | None, str | None],
    wanted: Callable[[str], bool],
    paired: Mapping[str, str] = {},
) -> tuple[list[ScalarChange], list[Oddity]]:
    """What differs in the metadata of two checkpoints, by dotted path, in the order of before, then of after.

    Of a target that is one section (`train.ckpt#optimizer`), what lies below that section, by its path from there.
    What only one side's format can record is no difference, and a note names it. safetensors holds nothing but text:
    against another format, a number equals its text. `wanted` says which keys the globs leave, `paired` which section
    of before is compared with which of after.
    """
    one, two = _below(_moved(before.metadata, paired), sections[0]), _below(after.metadata, sections[1])
    same = _same_text if _textual(before) != _textual(after) else _same
    found: list[ScalarChange] = []
    passed: list[str] = []
    for key in (*one, *(key for key in two if key not in one)):
        if not wanted(key) or (key in one and key in two and same(one[key], two[key])):
            continue
        if (key not in two and key in _own(before, after)) or (key not in one and key in _own(after, before)):
            passed.append(key)
        else:
            found.append(_change(key, one, two))
    message = f"only one side's format records {_shown.names(passed)}: no difference"
    return found, [Oddity("format-metadata", message)] if passed else []


def _change(key: str, before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> ScalarChange:
    if key not in before:
        return ScalarChange(key, Status.ADDED, None, after[key])
    if key not in after:
        return ScalarChange(key, Status.REMOVED, before[key], None)
    return ScalarChange(key, Status.CHANGED, before[key], after[key])


def _moved(metadata: Mapping[str, Scalar], paired: Mapping[str, str]) -> Mapping[str, Scalar]:
    """The settings of a section under the name of the one that it is compared with."""
    moves = [(f"{old}.", f"{new}.") for old, new in paired.items() if old and new and old != new]
    if not moves:
        return metadata
    found: dict[str, Scalar] = {}
    for key, value in metadata.items():
        old, new = next(((old, new) for old, new in moves if key.startswith(old)), ("", ""))
        found[new + key[len(old) :]] = value
    return found


def _below(metadata: Mapping[str, Scalar], section: str | None) -> Mapping[str, Scalar]:
    if section is None:
        return metadata
    start = f"{section}."
    return {key[len(start) :]: value for key, value in metadata.items() if key.startswith(start)}


def _textual(state: ModelState) -> bool:
    return "safetensors" in state.format


def _own(state: ModelState, other: ModelState) -> frozenset[str]:
    """The keys that the state's format records and the other's cannot, names of dropped ties among them."""
    own: frozenset[str] = frozenset()
    if _textual(state) and not _textual(other):
        names = {tensor.fqn for tensor in state.tensors}
        dropped = (key for key, value in state.metadata.items() if key in names and value in names)
        own |= _OF_SAFETENSORS | frozenset(dropped)
    if state.format.startswith("sharded") and not other.format.startswith("sharded"):
        own |= _OF_INDEX
    return own


def _same(before: Scalar, after: Scalar) -> bool:
    if isinstance(before, bool) is not isinstance(after, bool):
        return False
    return before == after or (before != before and after != after)


def _same_text(before: Scalar, after: Scalar) -> bool:
    return _same(before, after) or str(before) == str(after)


def described(change: ScalarChange) -> str:
    """What became of it, on one line: `epoch: 3 → 4`."""
    if change.status is Status.ADDED:
        return f"{change.key}: added: {change.after!r}"
    if change.status is Status.REMOVED:
        return f"{change.key}: removed: {change.before!r}"
    return f"{change.key}: {change.before!r} → {change.after!r}"
