"""Values quantized by ggml, read in pieces, equal the float32 bytes that the package gguf computes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, strategies as some

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import ByteRange, Packing, TensorData
from statecli.values import ggml_blocks, ranges
from statecli.values.ranges import open_range
from statecli.values.read import read_all_values

gguf = pytest.importorskip("gguf")

ROWS, COLUMNS = 40, 512


@pytest.fixture(scope="module")
def q5_storage(tmp_path_factory) -> tuple[ByteRange, bytes]:
    """A q5_k storage after other bytes, and its values as dequantized by the package gguf."""
    values, size = BLOCK_SIZES["q5_k"]
    raw = np.random.default_rng(5).integers(0, 64, ROWS * COLUMNS // values * size).astype(np.uint8)
    path = tmp_path_factory.mktemp("blocks") / "storage"
    path.write_bytes(b"before" + raw.tobytes() + b"behind")
    dequantized = gguf.quants.dequantize(raw.reshape(ROWS, -1), gguf.GGMLQuantizationType.Q5_K)
    return ByteRange(str(path), 6, ROWS * COLUMNS * 4, packing=Packing("gguf:q5_k", raw.size)), dequantized.tobytes()


@given(at=some.integers(0, ROWS * COLUMNS * 4), length=some.integers(0, 5000))
def test_any_piece_equals_the_same_part_of_the_whole(q5_storage, at, length):
    """The piece may begin and end inside a block or between two blocks."""
    where, dequantized = q5_storage
    buffer = np.zeros(min(length, where.length - at), np.uint8)
    with open_range(where) as source:
        source.read(at, buffer)
    assert buffer.tobytes() == dequantized[at : at + length]


def test_blocks_are_dequantized_in_pieces_of_bounded_size(q5_storage, monkeypatch):
    """Pieces of bounded size are read one after another."""
    where, dequantized = q5_storage
    sizes = []

    def numbers(raw, name):
        sizes.append(raw.size)
        return ggml_blocks.dequantize_blocks(raw, name)

    monkeypatch.setattr(ranges, "VALUES_BYTES", 8192)
    monkeypatch.setattr(ranges, "dequantize_blocks", numbers)
    buffer = np.zeros(where.length, np.uint8)
    with open_range(where) as source:
        source.read(0, buffer)
    assert buffer.tobytes() == dequantized
    assert max(sizes) == 8192 // 4 // 256 * BLOCK_SIZES["q5_k"][1]


def test_view_of_dequantized_blocks_is_read(q5_storage):
    """Offset and strides count values."""
    where, dequantized = q5_storage
    matrix = np.frombuffer(dequantized, np.float32).reshape(ROWS, COLUMNS)
    part = TensorData(where, "float32", (COLUMNS, 7), 3 * COLUMNS, (1, COLUMNS))
    assert np.array_equal(read_all_values(part), matrix[3:10].T.reshape(-1))


def test_a_file_that_has_shrunk_is_an_error(q5_storage, tmp_path):
    """Missing bytes are not read as zeros."""
    where, _ = q5_storage
    truncated_path = tmp_path / "cut"
    with open(where.path, "rb") as file:
        truncated_path.write_bytes(file.read(200))
    shorter = ByteRange(str(truncated_path), 6, where.length, packing=where.packing)
    with pytest.raises(MalformedError, match="it is truncated"), open_range(shorter) as source:
        source.read(0, np.zeros(where.length, np.uint8))


def test_stored_blocks_have_their_own_type_and_size(q5_storage):
    """Each block is an element of its own type and stored size; a tensor that is not quantized does not change."""
    where, _ = q5_storage
    data = TensorData(where, "float32", (ROWS, COLUMNS))
    tensor = ggml_blocks.to_stored_blocks(data)
    assert (tensor.dtype, tensor.shape) == ("q5_k", (ROWS, COLUMNS // 256))
    assert (tensor.storage.offset, tensor.storage.length, tensor.storage.packing) == (6, where.packing.length, None)
    assert ggml_blocks.to_stored_blocks(tensor) is tensor


def test_a_type_that_the_package_does_not_read():
    """Only the type that gguf cannot read has an explanation."""
    assert ggml_blocks.explain_unreadable_blocks("q4_k") is None
    for name in ("q4_0_4_4", "q8_k"):
        assert (
            ggml_blocks.explain_unreadable_blocks(name) == f"the installed package gguf cannot read {name} as numbers"
        )


def test_values_need_the_gguf_package(q5_storage, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    ggml_blocks.explain_unreadable_blocks.cache_clear()
    try:
        with pytest.raises(UnreadableError, match=r"pip install 'torch-statecli\[gguf\]'"), open_range(q5_storage[0]):
            pass
    finally:
        ggml_blocks.explain_unreadable_blocks.cache_clear()
