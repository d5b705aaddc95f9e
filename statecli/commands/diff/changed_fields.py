"""Compare the metadata of paired tensors. A field is compared only if both sides record it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from statecli.commands.diff.pairing import Match
from statecli.commands.diff.result import Change, Field, Status
from statecli.core.model_state import Evidence, TensorInfo
from statecli.core.units import format_shape, format_yes_no

#: Evidence by name or dtype is a guess, so differing kinds with such evidence are not reported.
_GUESSES = (Evidence.ASSUMED, Evidence.CONVENTION)
#: Layouts of torch that can hold the same values. An array of numpy or a packed weight has a layout of its own.
_LAYOUTS = frozenset(("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"))


def get_effective_shape(tensor: TensorInfo) -> tuple[object, ...] | None:
    """Return a tensor's shape, or None if unknown. For a nested tensor, return the shape of each part."""
    if tensor.shape is None and tensor.parts:
        return tuple((name, part.shape) for name, part in tensor.parts)
    return tensor.shape


def _iter_differing(before: TensorInfo, after: TensorInfo) -> Iterator[Field]:
    """Yield the fields in which two tensors differ. Other functions compare values and weight tying."""
    if before.dtype != after.dtype:
        yield Field.DTYPE
    if _differ_if_known(get_effective_shape(before), get_effective_shape(after)):
        yield Field.SHAPE
    if before.kind is not after.kind and before.evidence not in _GUESSES and after.evidence not in _GUESSES:
        yield Field.KIND
    if _differ_if_known(before.requires_grad, after.requires_grad):
        yield Field.REQUIRES_GRAD
    if _differ_if_known(before.device, after.device):
        yield Field.DEVICE
    if before.layout != after.layout and {before.layout, after.layout} <= _LAYOUTS:
        yield Field.LAYOUT


def _differ_if_known(before: object, after: object) -> bool:
    return before is not None and after is not None and before != after


def find_changed_fields(matches: Sequence[Match], ignore: Sequence[Field], *, devices: bool) -> list[tuple[Field, ...]]:
    """Return the differing fields (except values) of each match, or () if one of its tensors is missing or damaged.

    `devices` is False if a side is a class, whose devices are only those of the build.
    """
    left_out = {*ignore, *(() if devices else (Field.DEVICE,))}
    retied = set() if Field.TYING in ignore else _find_retied(matches)
    fields_of_matches: list[tuple[Field, ...]] = []
    for n, match in enumerate(matches):
        before, after = match.before, match.after
        if before is None or after is None or before.damage or after.damage:
            fields_of_matches.append(())
            continue
        differing = () if _are_alike(before, after) else _iter_differing(before, after)
        fields = tuple([field for field in differing if field not in left_out])
        fields_of_matches.append((*fields, Field.TYING) if n in retied else fields)
    return fields_of_matches


def _are_alike(before: TensorInfo, after: TensorInfo) -> bool:
    """Return True if all compared fields are equal. This is a fast path, because nearly all pairs are equal."""
    return (
        before.shape is not None  # else the shapes of parts count
        and before.shape == after.shape
        and before.dtype == after.dtype
        and before.kind is after.kind
        and before.device == after.device
        and before.layout == after.layout
        and before.requires_grad is after.requires_grad
    )


def _find_retied(matches: Sequence[Match]) -> set[int]:
    """Return the indexes of matches whose tensor is tied to different tensors in the old and the new state.

    Each state groups the matches by storage. The old and the new group of a match are the same if and only if each has
    as many members as their intersection.
    """
    storage_pairs = [
        (n, before.storage, after.storage)
        for n, match in enumerate(matches)
        if (before := match.before) and (after := match.after) and before.nbytes and after.nbytes
        if before.storage is not None and after.storage is not None
    ]
    old_sizes, new_sizes = Counter(old for _, old, _ in storage_pairs), Counter(new for _, _, new in storage_pairs)
    if len(old_sizes) == len(new_sizes) == len(storage_pairs):
        return set()
    pair_counts = Counter((old, new) for _, old, new in storage_pairs)
    return {n for n, old, new in storage_pairs if not old_sizes[old] == new_sizes[new] == pair_counts[old, new]}


# --- text ------------------------------------------------------------------------------------------------------------


def describe_change(change: Change) -> str:
    """Return the change of a tensor on a single line, without the name: `values differ, dtype float32 → bfloat16`."""
    if change.status is Status.ADDED and change.after:
        return f"added ({_describe_tensor(change.after)})"
    if change.status is Status.REMOVED and change.before:
        return f"removed ({_describe_tensor(change.before)})"
    parts = ["values differ" if Field.VALUES in change.fields else "", describe_fields(change)]
    if change.status is Status.RENAMED:
        parts.insert(0, f"renamed from {change.renamed_from}")
    return ", ".join(filter(None, parts)) or change.status.value


def _describe_tensor(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor.shape is not None else tensor.dtype


def describe_fields(change: Change) -> str:
    """Describe the differing fields of a tensor, except its values. Layers with the same change get the same text."""
    before, after = change.before, change.after
    if before is None or after is None:
        return ""
    return ", ".join(_describe_field(field, before, after) for field in change.fields if field is not Field.VALUES)


def _describe_field(field: Field, before: TensorInfo, after: TensorInfo) -> str:
    if field is Field.TYING:
        return (
            "now tied" if not before.tied_to else "no longer tied" if not after.tied_to else "tied to different tensors"
        )
    sides = [_FIELD_TEXTS[field](tensor) for tensor in (before, after)]
    if sides[0] == sides[1]:
        return f"the {field.value} of its inner tensors differs"
    return f"{field.value} {sides[0]} → {sides[1]}"


def _format_shape(tensor: TensorInfo) -> str:
    """Format a shape. For a nested tensor, format the shapes of its parts."""
    parts = "" if tensor.shape else ", ".join(f"{name} {format_shape(part.shape)}" for name, part in tensor.parts)
    return parts or format_shape(tensor.shape)


_FIELD_TEXTS: Mapping[Field, Callable[[TensorInfo], str]] = {
    Field.DTYPE: lambda t: t.dtype,
    Field.SHAPE: _format_shape,
    Field.KIND: lambda t: t.kind.value,
    Field.REQUIRES_GRAD: lambda t: format_yes_no(t.requires_grad) or "-",
    Field.DEVICE: lambda t: t.device or "-",
    Field.LAYOUT: lambda t: t.layout,
}
