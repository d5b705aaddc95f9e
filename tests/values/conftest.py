"""Tensors written to files like a container's: the whole storage, at an offset in the file."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import save_file

from statecli import formats
from statecli.core.model_state import ByteRange, Quantizer, TensorData, TensorInfo

#: Views of a matrix of 5 rows and 6 columns or more.
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, 2:5],
    "stepped": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(4, x.shape[1]),
    "expanded twice": lambda x: x[0, 0].expand(3, 5),
    "windows": lambda x: x.reshape(-1).unfold(0, 5, 2),
    "scalar": lambda x: x[2, 3],
    "empty": lambda x: x[:0],
}


class Store(Protocol):
    """Write a tensor to a file and return its row."""

    def __call__(self, tensor: torch.Tensor, at: int = 3, big_endian: bool = False) -> TensorInfo: ...


def storage_bytes(tensor: torch.Tensor) -> bytes:
    """Return every byte of the storage, also bytes outside the tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


def build_row(data: TensorData, **fields: object) -> TensorInfo:
    """Return a row for `data`."""
    elements = torch.Size(data.shape).numel()
    return TensorInfo("w", data.dtype, data.shape, elements, data.storage.length, data=data, **fields)


def save_rows(path: Path, tensors: dict[str, torch.Tensor]) -> list[TensorInfo]:
    """Save the tensors in the format of the suffix, and return their rows."""
    torch.save(tensors, path) if path.suffix == ".pt" else save_file(tensors, path)
    rows = {row.fqn: row for row in formats.read(str(path)).tensors}
    return [rows[name] for name in tensors]


def _swap_bytes(content: bytes, unit: int) -> bytes:
    return b"".join(content[i : i + unit][::-1] for i in range(0, len(content), unit))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Each call writes a file; its storage begins at byte `at`, an odd position by default."""
    paths: list[Path] = []

    def write(tensor: torch.Tensor, at: int = 3, big_endian: bool = False) -> TensorInfo:
        content = storage_bytes(tensor)
        if big_endian:
            content = _swap_bytes(content, tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1))
        path = tmp_path / f"{len(paths)}.bin"
        paths.append(path)
        path.write_bytes(b"\xff" * at + content + b"\xff" * 5)
        where = ByteRange(str(path), at, len(content), zlib.crc32(content), big_endian)
        return build_row(
            TensorData(
                where,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor.storage_offset(),
                tuple(tensor.stride()),
                tensor.is_conj(),
                tensor.is_neg(),
                quantizer(tensor) if tensor.is_quantized else None,
            )
        )

    def quantizer(tensor: torch.Tensor) -> Quantizer:
        scheme = str(tensor.qscheme())
        if "per_channel" not in scheme:
            return Quantizer(scheme, tensor.q_scale(), tensor.q_zero_point())
        scales, zeros = write(tensor.q_per_channel_scales()).data, write(tensor.q_per_channel_zero_points()).data
        return Quantizer(scheme, axis=tensor.q_per_channel_axis(), scales=scales, zero_points=zeros)

    return write
