"""Find tensors of a state that share a storage."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from statecli.core.model_state import ModelState, Origin, TensorInfo

#: Largest number of names in a row's `tied_to`. Thousands of views of a flat storage would make the lists quadratic, so
#: each further row names only the first row, and the first row names the second.
MAX_LISTED_NAMES = 64
#: Remedy for tied weights that `safetensors.torch.save_file` refuses.
SAVE_TIES_AS_SAFETENSORS = (
    "use safetensors.torch.save_model, which writes one of the names, and load_model, which accepts the "
    "missing names if the class ties the weights"
)


def fill_tied_to(state: ModelState) -> ModelState:
    """Return the state with `tied_to` set to the names of the other tensors with the same storage."""
    storages = [tensor.storage for tensor in state.tensors if tensor.storage is not None and tensor.nbytes]
    if len(set(storages)) == len(storages):
        return state
    groups: dict[object, list[int]] = {}
    for position, tensor in enumerate(state.tensors):
        # Tensors in an empty storage share nothing.
        if tensor.storage is not None and tensor.nbytes:
            groups.setdefault(tensor.storage, []).append(position)
    shared_groups = [group for group in groups.values() if len(group) > 1]
    tensors = list(state.tensors)
    for group in shared_groups:
        is_long = len(group) > MAX_LISTED_NAMES + 1
        listed_tensors = [(position, tensors[position]) for position in (group[:2] if is_long else group)]
        for position in group:
            tensor = tensors[position]
            tied = (other for other_position, other in listed_tensors if other_position != position)
            names = tuple(o.fqn if o.section == tensor.section else f"{o.section}#{o.fqn}" for o in tied)
            if is_long:
                note = f"shares its storage with {len(group) - 1} other tensors"
                tensor = replace(tensor, note=f"{tensor.note}; {note}" if tensor.note else note)
            tensors[position] = replace(tensor, tied_to=names[:1] if is_long else names)
    return replace(state, tensors=tuple(tensors))


def find_tie_line(tensors: Iterable[TensorInfo]) -> Origin | None:
    """Return the line that tied the tensors: the last line in the first tensor's file that assigned one of them."""
    origins = [tensor.origin for tensor in tensors if tensor.origin is not None]
    return max((o for o in origins if o.file == origins[0].file), key=lambda origin: origin.line, default=None)
