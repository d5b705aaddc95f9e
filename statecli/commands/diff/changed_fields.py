"""What of a pair's metadata differs. A field counts only where both sides know it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from statecli.commands.diff.pairing import Match
from statecli.commands.diff.result import Change, Field, Status
from statecli.core.state import Evidence, TensorInfo

#: A name or a dtype alone is a guess of what registered it: no evidence of a change against what is known.
_GUESSES = (Evidence.ASSUMED, Evidence.CONVENTION)


def shape(tensor: TensorInfo) -> tuple[object, ...] | None:
    """Its shape; of a nested tensor, which has no one, its parts and theirs. None where the source does not say."""
    if tensor.shape is None and tensor.parts:
        return tuple((name, part.shape) for name, part in tensor.parts)
    return tensor.shape


def _shape(before: TensorInfo, after: TensorInfo) -> bool:
    one, two = shape(before), shape(after)
    return one != two and one is not None and two is not None


def _kind(before: TensorInfo, after: TensorInfo) -> bool:
    return before.kind is not after.kind and before.evidence not in _GUESSES and after.evidence not in _GUESSES


def _requires_grad(before: TensorInfo, after: TensorInfo) -> bool:
    known = before.requires_grad is not None and after.requires_grad is not None
    return known and before.requires_grad is not after.requires_grad


def _device(before: TensorInfo, after: TensorInfo) -> bool:
    return before.device != after.device and before.device is not None and after.device is not None


#: In the order of `Field`; tying and values need more than the two tensors.
_DIFFERS: tuple[tuple[Field, Callable[[TensorInfo, TensorInfo], bool]], ...] = (
    (Field.DTYPE, lambda before, after: before.dtype != after.dtype),
    (Field.SHAPE, _shape),
    (Field.KIND, _kind),
    (Field.REQUIRES_GRAD, _requires_grad),
    (Field.DEVICE, _device),
)


def differing(matches: Sequence[Match], ignore: Sequence[Field], *, devices: bool) -> list[tuple[Field, ...]]:
    """For each match the fields that differ, without values, in order; () where one side is missing or damaged.

    `devices` False: a class is one side, whose devices are only those it was built on.
    """
    left_out = {*ignore, *(() if devices else (Field.DEVICE,))}
    tests = [(field, test) for field, test in _DIFFERS if field not in left_out]
    retied = set() if Field.TYING in ignore else _retied(matches)
    found: list[tuple[Field, ...]] = []
    for n, match in enumerate(matches):
        before, after = match.before, match.after
        if before is None or after is None or before.damage or after.damage:
            found.append(())
            continue
        fields = tuple([field for field, test in tests if test(before, after)])
        found.append((*fields, Field.TYING) if n in retied else fields)
    return found


def _retied(matches: Sequence[Match]) -> set[int]:
    """The matches that share their storage with other matches than before, where both sides record storages.

    Both states cut the matches into groups of one storage. A match's two groups are the same if and only if each has
    as many members as both have together.
    """
    known = [
        (n, before.storage, after.storage)
        for n, match in enumerate(matches)
        if (before := match.before) and (after := match.after) and before.nbytes and after.nbytes
        if before.storage is not None and after.storage is not None
    ]
    one_side, other_side = Counter(one for _, one, _ in known), Counter(two for _, _, two in known)
    if len(one_side) == len(other_side) == len(known):
        return set()
    both = Counter((one, two) for _, one, two in known)
    return {n for n, one, two in known if not one_side[one] == other_side[two] == both[one, two]}


# --- in words --------------------------------------------------------------------------------------------------------


def described(change: Change) -> str:
    """What became of a tensor, on one line and without its name: `values, dtype: float32 → bfloat16`."""
    if change.status is Status.ADDED and change.after:
        return f"added ({_form(change.after)})"
    if change.status is Status.REMOVED and change.before:
        return f"removed ({_form(change.before)})"
    parts = [_part(field, change) for field in change.fields if field is not Field.VALUES]
    if Field.VALUES in change.fields:
        parts.insert(0, "values")
    if change.status is Status.RENAMED:
        parts.insert(0, f"renamed from {change.renamed_from}")
    return ", ".join(parts) or change.status.value


def _form(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor.shape is not None else tensor.dtype


def _part(field: Field, change: Change) -> str:
    one, two = (_shown(field, tensor) for tensor in (change.before, change.after))
    return f"{field.value}: {one} → {two}" if one != two else f"{field.value} of its inner tensors"


def _shown(field: Field, tensor: TensorInfo | None) -> str:
    if tensor is None:
        return "none"
    if field is Field.TYING:
        return f"tied to {', '.join(tensor.tied_to[:3])}" if tensor.tied_to else "untied"
    if field is Field.SHAPE:
        parts = ", ".join(f"{name} {list(part.shape)}" for name, part in tensor.parts)
        return parts if tensor.shape is None else str(list(tensor.shape))
    value = getattr(tensor, field.value)
    return str(getattr(value, "value", value)).replace("True", "true").replace("False", "false")
