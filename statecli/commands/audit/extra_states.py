"""Scan tensors whose bytes are unpickled by a module when the module loads them.

`set_extra_state` of TransformerEngine, and so of Megatron and NeMo, calls `pickle.loads` on the bytes of the tensor
`*._extra_state` from load_state_dict, for any format of the file. Source: transformer_engine/pytorch/module/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from statecli import values
from statecli.core import quoting
from statecli.core.model_state import ModelState, Place, ScannedPickle, TensorInfo
from statecli.file_scan.scan import scan_bytes
from statecli.storage.checkpoint_names import EXTRA_STATE


def scan_extra_states(state: ModelState) -> Iterator[ScannedPickle]:
    """Yield the pickles in the `_extra_state` tensors. Raises UnreadableError for unreadable bytes."""
    for tensor in state.tensors:
        # In a list, the name ends in a subscript: `net[0]['l._extra_state']`.
        if EXTRA_STATE not in tensor.fqn or not tensor.elements or state.traits.is_class:
            continue
        label = f"the tensor {quoting.name(tensor.fqn)}"
        if tensor.data is not None:
            yield from scan_bytes(locate_storage(tensor, state), label, read_bytes(tensor))
        else:
            reason = (
                "statecli cannot read the bytes of this tensor, because the tensor is sparse, nested, a subclass, or "
                "on meta"
            )
            yield ScannedPickle(label, Place(state.target, 0, 0), unread=reason)


def locate_storage(tensor: TensorInfo, state: ModelState) -> Place:
    """Return the position of the tensor's storage in its file, or the file's start if the storage is in pieces."""
    assert tensor.data is not None  # noqa: S101 - the caller has looked
    storage = tensor.data.storage
    return storage.place or Place(storage.path or state.target, 0, 0)


def read_bytes(tensor: TensorInfo) -> bytes:
    """Return the elements in C order, as `tensor.numpy().tobytes()` does."""
    assert tensor.data is not None  # noqa: S101 - the caller has looked
    with values.read.open_view(tensor.data, tensor.fqn) as view:
        return b"".join(items.tobytes() for items in values.read.read_items(view))
