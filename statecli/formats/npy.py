"""A single numpy array as written by `numpy.save` (`.npy`): one tensor without a name."""

from __future__ import annotations

from msgspec.structs import replace

from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import ByteRange, ModelState, Oddity, Place
from statecli.core.oddity_kind import OddityKind
from statecli.formats.shared import npy_array
from statecli.storage.byte_source import ByteSource

NAME = "npy"
TRAITS = FormatTraits()

#: Name of the array; a tensor saved alone by torch.save has the same name.
FQN = "tensor"


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the file begins with numpy's magic number."""
    return head.startswith(npy_array.MAGIC)


def read(path: str, section: str | None = None) -> ModelState:  # noqa: ARG001  # a file has one section
    """Read the header of the file. The format records neither devices nor requires_grad.

    Raises UnreadableError and MalformedError, without the path. A truncated array is damaged.
    """
    with ByteSource(path) as source:
        header = npy_array.read_header(lambda length: source.read(0, min(length, source.size)))
        size = source.size
    row = npy_array.build_row(FQN, header, ByteRange(path, 0, size, big_endian=header.element.is_big_endian))
    if row.data is not None:
        # No checksum for the whole file is recorded, so the storage has only the elements.
        storage = ByteRange(path, header.length, row.nbytes, big_endian=header.element.is_big_endian)
        row = replace(row, data=replace(row.data, storage=storage, offset=0))
    end = header.length + row.nbytes
    message = f"{size - end} bytes follow the array: numpy.load ignores them"
    oddities = (
        (Oddity(OddityKind.SUFFIXED.value, message, place=Place(path, end, size - end)),)
        if end < size and not row.damage
        else ()
    )
    return ModelState(path, NAME, (row,), oddities=oddities, traits=TRAITS)
