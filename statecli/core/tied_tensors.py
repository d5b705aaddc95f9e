"""Which tensors of a state share one storage."""

from __future__ import annotations

from msgspec.structs import replace

from statecli.core.state import ModelState, TensorInfo

#: Names listed in one row's `tied_to`. A flat storage behind thousands of views would make the lists quadratic: there
#: each row names the first, and the first the second.
MAX_LISTED = 64


def tied(state: ModelState) -> ModelState:
    """The same state with `tied_to` filled: the names of the other rows that share the row's storage."""
    groups: dict[object, list[int]] = {}
    for position, tensor in enumerate(state.tensors):
        # An empty storage holds nothing to share.
        if tensor.storage is not None and tensor.nbytes:
            groups.setdefault(tensor.storage, []).append(position)
    shared = [group for group in groups.values() if len(group) > 1]
    if not shared:
        return state
    tensors = list(state.tensors)
    for group in shared:
        listed = group if len(group) <= MAX_LISTED + 1 else group[:2]
        names = [(position, tensors[position]) for position in listed]
        for position in group:
            tensors[position] = _with_names(tensors[position], position, names, len(group) - 1)
    return replace(state, tensors=tuple(tensors))


def _with_names(tensor: TensorInfo, own: int, group: list[tuple[int, TensorInfo]], others: int) -> TensorInfo:
    names = tuple(_seen_from(tensor, other) for position, other in group if position != own)
    if others <= MAX_LISTED:
        return replace(tensor, tied_to=names)
    names = names[:1]
    more = f"shares its storage with {others} others"
    return replace(tensor, tied_to=names, note=f"{tensor.note}; {more}" if tensor.note else more)


def _seen_from(tensor: TensorInfo, other: TensorInfo) -> str:
    return other.fqn if other.section == tensor.section else f"{other.section}#{other.fqn}"
