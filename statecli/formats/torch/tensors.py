"""Facts of a tensor from a rebuild call in a pickle, checked against the bytes of the file."""

from __future__ import annotations

import msgspec

from statecli.core.model_state import NoteKind, TensorData


class Tensor(msgspec.Struct, gc=False):
    """Checked facts of one rebuild call. The fields have the meanings of `TensorInfo`."""

    dtype: str
    shape: tuple[int, ...] | None
    elements: int
    nbytes: int
    device: str | None
    requires_grad: bool
    layout: str = "strided"
    is_parameter: bool = False
    is_buffer: bool = False
    persistent: bool | None = None
    note: str | None = None
    storage: int | str | None = None
    storage_bytes: int | None = None
    data: TensorData | None = None
    parts: tuple[tuple[str, TensorData], ...] = ()
    damage: str | None = None
    note_kind: NoteKind | None = None
