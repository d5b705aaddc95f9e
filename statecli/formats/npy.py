"""A numpy array by itself, as `numpy.save` writes it (`.npy`): one tensor without a name."""

from __future__ import annotations

from msgspec.structs import replace

from statecli.core.state import ByteRange, ModelState, Oddity, Place
from statecli.formats.shared import npy_array
from statecli.storage.source import Source

NAME = "npy"

#: What the array is called, as a tensor that torch.save wrote by itself is.
FQN = "tensor"


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Whether it begins with numpy's magic number."""
    return head.startswith(npy_array.MAGIC)


def read(path: str, section: str | None = None) -> ModelState:  # noqa: ARG001  # the one it has
    """The header of the file as a `ModelState`: no device, no requires_grad, since the format records neither.

    Raises UnreadableError and MalformedError, without the path. An array that is cut short is damaged.
    """
    with Source(path) as source:
        found = npy_array.header(lambda length: source.read(0, min(length, source.size)))
        size = source.size
    row = npy_array.row(FQN, found, ByteRange(path, 0, size, big_endian=found.element.is_big_endian))
    if row.data is not None:
        # No checksum is recorded of the whole file: the elements stand for themselves.
        where = ByteRange(path, found.length, row.nbytes, big_endian=found.element.is_big_endian)
        row = replace(row, data=replace(row.data, storage=where, offset=0))
    end = found.length + row.nbytes
    message = f"{size - end} bytes follow the array: numpy.load does not look at them"
    after = (Oddity("suffixed", message, place=Place(path, end, size - end)),) if end < size and not row.damage else ()
    return ModelState(path, NAME, (row,), oddities=after)
