"""`--to DEVICE` for a checkpoint: does every tensor arrive on that device, byte for byte?

Each storage travels in chunks of at most `CHUNK` bytes, so neither the host nor the device ever holds a big tensor.
What came back is compared with what the file holds. Only here does anything in `values` import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from statecli.core.errors import MissingDependency, UsageError
from statecli.core.state import After, ByteRange, ModelState, Oddity, TensorData, TensorInfo
from statecli.values.elements import Array
from statecli.values.ggml_blocks import as_stored
from statecli.values.live_tensor import first_line
from statecli.values.ranges import check_crc, contiguous_strides, open_range

if TYPE_CHECKING:
    from torch import device as Device
    from torch import dtype as DType

#: Called after each tensor with its name and its bytes.
Progress = Callable[[str, int], None]

#: Bytes of a storage that are on the device at a time; a multiple of every element size.
CHUNK = 16 << 20


@dataclass(frozen=True)
class Arrival:
    """Whether one storage came back as it went; None where that cannot be told.

    `refused`: the device did not take it at all. `note` says what is odd.
    """

    followed: bool | None
    note: str | None = None
    refused: bool = False


def place(state: ModelState, device: str, progress: Progress | None = None) -> ModelState:
    """`state` with `after` filled: where each tensor is once loaded onto `device`, and whether its bytes arrived.

    Checksums of all that is read are verified. On `meta` each tensor is made with its dtype and shape; its bytes are
    read and checksummed, and `note` says that they cannot be compared. Raises `UsageError` for a device that torch does
    not know or this machine lacks, `MissingDependency` without torch, `MalformedError` for a damaged file.
    """
    target = resolve_device(device)
    known: dict[tuple[ByteRange, str], Arrival] = {}
    checked: set[ByteRange] = set()
    placed = []
    for tensor in state.tensors:
        _check_once(tensor, checked)
        placed.append(_placed(tensor, target, known))
        if progress:
            progress(tensor.fqn, tensor.nbytes)
    oddities = state.oddities
    if target.type == "meta":
        oddities += (Oddity("not-compared", "meta holds no data: the bytes were read and checksummed, not compared"),)
    return msgspec.structs.replace(state, tensors=tuple(placed), oddities=oddities)


def _check_once(tensor: TensorInfo, checked: set[ByteRange]) -> None:
    for storage in tensor.ranges:
        if storage not in checked:
            check_crc(storage, tensor.fqn)
            checked.add(storage)


def resolve_device(device: str) -> Device:
    """The device, with its index, that `device` names; something has been allocated on it.

    Raises `UsageError` or `MissingDependency`, each with what to do.
    """
    torch = _torch()
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as why:
        raise UsageError(f"--to {device}: torch knows no such device: try cpu, cuda, cuda:0, mps or meta") from why
    if wanted.type == "cuda":
        _require_cuda(torch, device, wanted)
    try:
        found: Device = torch.empty(1, dtype=torch.uint8, device=wanted).device
    except Exception as why:  # each backend has an exception of its own for not being there
        raise UsageError(
            f"--to {device}: not available here ({first_line(why)}): --to meta makes the same check on any machine"
        ) from why
    return found


def _torch() -> Any:
    try:
        import torch
    except ImportError as missing:
        raise MissingDependency("--to loads tensors with torch, which is not installed: pip install torch") from missing
    return torch


def _require_cuda(torch: Any, device: str, wanted: Device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UsageError(
            f"--to {device}: torch {torch.__version__} finds no CUDA device here: "
            "--to cpu compares every byte on any machine, --to meta reads them and checks their checksums"
        )
    if wanted.index is not None and wanted.index >= count:
        raise UsageError(f"--to {device}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}")


def _placed(tensor: TensorInfo, device: Device, known: dict[tuple[ByteRange, str], Arrival]) -> TensorInfo:
    holders = ([as_stored(tensor.data)] if tensor.data and tensor.data.inline is None else []) + [
        data for _, data in tensor.parts
    ]
    if not holders:
        after = After(device=None, followed=None)
        return _noted(msgspec.structs.replace(tensor, after=after), "no bytes to load")
    arrivals = [_arrival(data, tensor.fqn, device, known) for data in holders]
    followed = _all_followed([arrival.followed for arrival in arrivals])
    refused = any(arrival.refused for arrival in arrivals)
    after = After(device=None if refused else str(device), followed=followed)
    notes = [arrival.note for arrival in arrivals if arrival.note]
    return _noted(msgspec.structs.replace(tensor, after=after), notes[0] if notes else None)


def _all_followed(answers: list[bool | None]) -> bool | None:
    if False in answers:
        return False
    return None if None in answers else True


def _noted(tensor: TensorInfo, more: str | None) -> TensorInfo:
    if not more:
        return tensor
    return msgspec.structs.replace(tensor, note=f"{tensor.note}; {more}" if tensor.note else more)


def _arrival(data: TensorData, what: str, device: Device, known: dict[tuple[ByteRange, str], Arrival]) -> Arrival:
    if device.type == "meta":
        return _on_meta(data, what)
    key = (data.storage, data.dtype)
    if key not in known:
        known[key] = _round_trip(data.storage, data.dtype, what, device)
    return known[key]


def _on_meta(data: TensorData, what: str) -> Arrival:
    """Makes the tensor on meta and reads its bytes; a checksum, where there is one, has read them already."""
    torch = _torch()
    dtype = getattr(torch, data.dtype, None)
    strides = contiguous_strides(data.shape) if data.strides is None else data.strides
    if not isinstance(dtype, torch.dtype):
        return Arrival(None, f"torch {torch.__version__} has no {data.dtype}", refused=True)
    try:
        made = torch.empty_strided(data.shape, strides, dtype=_plain(torch, dtype), device="meta")
    except (RuntimeError, OverflowError, TypeError) as why:
        return Arrival(False, first_line(why), refused=True)
    if data.storage.crc32 is None:
        _read_through(data.storage, what)
        return Arrival(made.is_meta, "bytes read; meta holds none to compare")
    return Arrival(made.is_meta, "bytes read and checksum right; meta holds none to compare")


def _read_through(where: ByteRange, what: str) -> None:
    for _ in _chunks(where, what):
        pass


def _chunks(where: ByteRange, what: str) -> Iterator[tuple[int, Array]]:
    """The bytes of a storage with where they begin, each chunk valid until the next is asked for."""
    buffer = np.empty(min(CHUNK, where.length), np.uint8)
    with open_range(where, what) as source:
        for start in range(0, where.length, CHUNK):
            chunk = buffer[: where.length - start]
            source.read(start, chunk)
            yield start, chunk


def _plain(torch: Any, dtype: DType) -> DType:
    """The dtype that stands in for a quantized one, which cannot be made without its scale."""
    stand_ins = {
        torch.qint8: torch.int8,
        torch.quint8: torch.uint8,
        torch.qint32: torch.int32,
        torch.quint4x2: torch.uint8,
        torch.quint2x4: torch.uint8,
    }
    stand_in: DType = stand_ins.get(dtype, dtype)
    return stand_in


def _round_trip(where: ByteRange, dtype_name: str, what: str, device: Device) -> Arrival:
    """Sends a storage to the device and back, and compares."""
    torch = _torch()
    dtype = getattr(torch, dtype_name, None)
    dtype = _plain(torch, dtype) if isinstance(dtype, torch.dtype) else torch.uint8
    for start, chunk in _chunks(where, what):
        try:
            back = _there_and_back(torch, chunk, dtype, device)
        except (RuntimeError, TypeError, NotImplementedError) as why:
            return Arrival(False, f"{device} refuses it: {first_line(why)}", refused=True)
        wrong = int(np.count_nonzero(back != chunk))
        if wrong:
            return Arrival(False, f"{wrong} bytes came back changed, the first after byte {start} of its storage")
    return Arrival(True)


def _there_and_back(torch: Any, chunk: Any, dtype: DType, device: Device) -> Any:
    """The chunk's bytes after a stay on the device, as elements of `dtype` where the chunk holds whole ones."""
    sent = torch.from_numpy(chunk)
    if chunk.size % dtype.itemsize == 0:
        sent = sent.view(dtype)
    there = sent.to(device, copy=True)
    return there.cpu().view(torch.uint8).numpy()
