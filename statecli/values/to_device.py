"""Check for `--to DEVICE` whether every tensor of a checkpoint arrives on the device, byte for byte.

Each storage is copied in chunks of at most `CHUNK_BYTES`, so neither the host nor the device ever has a big tensor in
memory. The bytes that are copied back are compared with the file. No other module of `values` imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import MissingDependency, UsageError, option
from statecli.core.installed_package import install_extra
from statecli.core.model_state import After, ByteRange, ModelState, Oddity, TensorData, TensorInfo
from statecli.values.ggml_blocks import to_stored_blocks
from statecli.values.live_tensor import format_first_line
from statecli.values.ranges import check_crc, read_chunks

if TYPE_CHECKING:
    from torch import device as Device, dtype as DType

#: Function called after each tensor with its name and its size in bytes.
Progress = Callable[[str, int], None]

#: Maximum number of bytes of a storage on the device at a time; a multiple of every element size.
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Arrival:
    """Result of copying a storage to the device and back.

    Attributes:
        followed: True if the bytes came back equal; None if inconclusive.
        note: An oddity to report.
        refused: True if the device did not accept the storage.
    """

    followed: bool | None
    note: str | None = None
    refused: bool = False


def place_on_device(state: ModelState, device: str, progress: Progress | None = None) -> ModelState:
    """Return `state` with `after` set for each tensor: its device after loading, and whether its bytes arrived.

    Checksums of all bytes read are verified. On `meta`, each tensor is created with its dtype and shape; its bytes are
    read and checksummed, and `note` reports that they were not compared.

    Raises:
        UsageError: torch does not know the device, or this machine lacks the device.
        MissingDependency: torch is not installed.
        MalformedError: A file is damaged.
    """
    target = resolve_device(device)
    arrivals: dict[tuple[ByteRange, str], Arrival] = {}
    checked_storages: set[ByteRange] = set()
    placed = []
    for tensor in state.tensors:
        for storage in tensor.ranges:
            if storage not in checked_storages:
                check_crc(storage, tensor.fqn)
                checked_storages.add(storage)
        placed.append(_place_tensor(tensor, target, arrivals))
        if progress:
            progress(tensor.fqn, tensor.nbytes)
    oddities = state.oddities
    if target.type == "meta":
        oddities += (
            Oddity(
                "not-compared",
                "statecli read the bytes and verified their checksums, but did not compare the bytes on the device, "
                "because a meta tensor has no data",
            ),
        )
    return msgspec.structs.replace(state, tensors=tuple(placed), oddities=oddities)


def resolve_device(device: str) -> Device:
    """Return torch's device for the name `device`, with its index, after a test allocation on the device.

    Raises `UsageError` or `MissingDependency`, each with a remedy.
    """
    torch = _import_torch()
    try:
        requested = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = "torch does not know this device; try cpu, cuda, cuda:0, mps or meta"
        raise UsageError(f"{option('--to', device)}: {problem}") from error
    if requested.type == "cuda":
        _require_cuda(torch, device, requested)
    try:
        allocated: Device = torch.empty(1, dtype=torch.uint8, device=requested).device
    except Exception as error:  # each backend raises its own exception if it is missing
        reason = format_first_line(error)
        advice = f"use {option('--to', 'meta')}, which works on any machine"
        raise UsageError(f"{option('--to', device)}: not available here ({reason}): {advice}") from error
    return allocated


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        reason = f"loads tensors with torch, which is not installed: {install_extra('torch')}"
        raise MissingDependency(f"{option('--to')} {reason}") from error
    return torch


def _require_cuda(torch: Any, device: str, requested: Device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UsageError(
            f"{option('--to', device)}: torch {torch.__version__} finds no CUDA device here; use "
            f"{option('--to', 'cpu')} to compare every byte without a CUDA device, or "
            f"{option('--to', 'meta')} to read the bytes and check their checksums"
        )
    if requested.index is not None and requested.index >= count:
        raise UsageError(f"{option('--to', device)}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}")


def _place_tensor(tensor: TensorInfo, device: Device, cache: dict[tuple[ByteRange, str], Arrival]) -> TensorInfo:
    holders = ([to_stored_blocks(tensor.data)] if tensor.data and tensor.data.inline is None else []) + [
        data for _, data in tensor.parts
    ]
    if not holders:
        after = After(device=None, followed=None)
        return _add_note(msgspec.structs.replace(tensor, after=after), "no bytes to load")
    arrivals = [_send_once(data, tensor.fqn, device, cache) for data in holders]
    answers = [arrival.followed for arrival in arrivals]
    followed = False if False in answers else None if None in answers else True
    is_refused = any(arrival.refused for arrival in arrivals)
    after = After(device=None if is_refused else str(device), followed=followed)
    notes = [arrival.note for arrival in arrivals if arrival.note]
    return _add_note(msgspec.structs.replace(tensor, after=after), notes[0] if notes else None)


def _add_note(tensor: TensorInfo, note: str | None) -> TensorInfo:
    if not note:
        return tensor
    return msgspec.structs.replace(tensor, note=f"{tensor.note}; {note}" if tensor.note else note)


def _send_once(data: TensorData, name: str, device: Device, cache: dict[tuple[ByteRange, str], Arrival]) -> Arrival:
    if device.type == "meta":
        return _place_on_meta(data, name)
    key = (data.storage, data.dtype)
    if key not in cache:
        cache[key] = _send_and_compare(data.storage, data.dtype, name, device)
    return cache[key]


def _place_on_meta(data: TensorData, name: str) -> Arrival:
    """Create the tensor on meta. Read its bytes, unless an earlier check of the checksum has read them."""
    torch = _import_torch()
    dtype = getattr(torch, data.dtype, None)
    strides = contiguous_strides(data.shape) if data.strides is None else data.strides
    if not isinstance(dtype, torch.dtype):
        return Arrival(None, f"torch {torch.__version__} has no {data.dtype}", refused=True)
    try:
        tensor = torch.empty_strided(data.shape, strides, dtype=_choose_plain_dtype(torch, dtype), device="meta")
    except (RuntimeError, OverflowError, TypeError) as error:
        return Arrival(False, format_first_line(error), refused=True)
    if data.storage.crc32 is None:
        for _ in read_chunks(data.storage, name, CHUNK_BYTES):
            pass
        return Arrival(
            tensor.is_meta,
            "statecli read the bytes, but did not compare them on the device, because a meta tensor has no data",
        )
    return Arrival(
        tensor.is_meta,
        "the checksum is correct; statecli did not compare the bytes on the device, because a meta tensor has no data",
    )


def _choose_plain_dtype(torch: Any, dtype: DType) -> DType:
    """Return a substitute for a quantized dtype, because creating a quantized tensor requires a scale."""
    stand_ins = {
        torch.qint8: torch.int8,
        torch.quint8: torch.uint8,
        torch.qint32: torch.int32,
        torch.quint4x2: torch.uint8,
        torch.quint2x4: torch.uint8,
    }
    stand_in: DType = stand_ins.get(dtype, dtype)
    return stand_in


def _send_and_compare(byte_range: ByteRange, dtype_name: str, name: str, device: Device) -> Arrival:
    """Copy a storage to the device and back. Compare the returned bytes with the bytes in the file."""
    torch = _import_torch()
    dtype = getattr(torch, dtype_name, None)
    dtype = _choose_plain_dtype(torch, dtype) if isinstance(dtype, torch.dtype) else torch.uint8
    for start, chunk in read_chunks(byte_range, name, CHUNK_BYTES):
        try:
            copied_back = _copy_back(torch, chunk, dtype, device)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return Arrival(False, f"{device} refuses the tensor: {format_first_line(error)}", refused=True)
        changed_count = int(np.count_nonzero(copied_back != chunk))
        if changed_count:
            return Arrival(
                False,
                f"{changed_count} bytes differ after the load to {device}, the first at or after byte {start} of the "
                "storage",
            )
    return Arrival(True)


def _copy_back(torch: Any, chunk: Any, dtype: DType, device: Device) -> Any:
    """Copy a chunk to the device and back, if possible as elements of `dtype`. Return the bytes."""
    source = torch.from_numpy(chunk)
    if chunk.size % dtype.itemsize == 0:
        source = source.view(dtype)
    copy = source.to(device, copy=True)
    return copy.cpu().view(torch.uint8).numpy()
