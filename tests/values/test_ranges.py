"""Bytes stored in pieces, compressed, or in archives inside a file, checked against numpy and torch."""

from __future__ import annotations

import io
import zlib
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from statecli.core.errors import ChecksumMismatch, MalformedError
from statecli.core.model_state import Box, Boxes, ByteRange, Packing, TensorData, TensorInfo
from statecli.values import ranges
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions
from statecli.values.digest import compute_digests
from statecli.values.pair_plan import Pair
from statecli.values.ranges import check_crc, open_range
from statecli.values.read import read_all_values


def write_content(path, content):
    path.write_bytes(content)
    return str(path)


def split_into_boxes(shape, cuts):
    """Return the boxes (start, shape) of an array that is cut along each axis."""
    boxes = [((), ())]
    for size, places in zip(shape, cuts, strict=True):
        edges = sorted({0, size, *(at % (size + 1) for at in places)})
        spans = list(pairwise(edges)) or [(0, 0)]
        boxes = [((*start, a), (*extents, b - a)) for start, extents in boxes for a, b in spans]
    return boxes


def write_boxes(array, cuts, folder, *, columns_first=False, name="part"):
    """Write `array` to a file for each box of `cuts`, in C order or with the first axis fastest."""
    boxes = []
    for n, (start, shape) in enumerate(split_into_boxes(array.shape, cuts)):
        part = array[tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))]
        raw = b"before" + part.tobytes("F" if columns_first else "C")
        where = ByteRange(write_content(folder / f"{name}{n}", raw), 6, len(raw) - 6)
        strides = tuple(prod(shape[:axis]) for axis in range(len(shape))) if columns_first else None
        boxes.append(Box(start, TensorData(where, str(array.dtype), shape, strides=strides)))
    whole = ByteRange(str(folder), 0, array.nbytes, boxes=Boxes(array.shape, array.itemsize, tuple(boxes)))
    return TensorData(whole, str(array.dtype), array.shape)


def row(data, fqn="w"):
    return TensorInfo(fqn, data.dtype, data.shape, prod(data.shape), data.storage.length, data=data)


def read_values(data):
    return read_all_values(data, "w")


SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=4).map(tuple)
CUTS = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(SHAPES, CUTS, st.booleans(), st.sampled_from(["f4", "f8", "i2", "u1", "c8"]))
def test_boxes_of_any_cuts_have_the_values_of_the_array(tmp_path_factory, shape, cuts, columns_first, dtype):
    """The values equal numpy's for any cuts along the axes and any order of the boxes."""
    array = (np.arange(prod(shape)) * 1.5).astype(dtype).reshape(shape)
    data = write_boxes(array, cuts[: len(shape)], tmp_path_factory.mktemp("boxes"), columns_first=columns_first)
    assert np.array_equal(read_values(data).reshape(shape), array)


@settings(max_examples=40, deadline=None)
@given(SHAPES, CUTS, CUTS, st.integers(-1, 5000))
def test_pieces_cut_differently_are_compared_element_by_element(tmp_path_factory, shape, cuts, others, at):
    """Two sides with different cuts are equal, or differ only at the changed element."""
    folder = tmp_path_factory.mktemp("sides")
    array = np.arange(prod(shape), dtype="f4").reshape(shape)
    other = array.copy()
    changed = at >= 0
    if changed:
        other.reshape(-1)[at % array.size] += 1
    first, second = (
        write_boxes(array, cuts[: len(shape)], folder),
        write_boxes(other, others[: len(shape)], folder, name="other"),
    )
    (delta,) = compare_pairs([Pair(row(first), row(second))], CompareOptions())
    assert delta.changed == changed
    assert delta.first == (tuple(map(int, np.unravel_index(at % array.size, shape))) if changed else None)


def test_view_into_boxes_has_the_values_of_torch(tmp_path):
    """Offset and strides of a view of a storage in boxes count in the whole storage."""
    array = np.arange(60, dtype="f4").reshape(6, 10)
    whole = write_boxes(array, [[2, 4], [3]], tmp_path)
    view = TensorData(whole.storage, "float32", (3, 4), offset=11, strides=(2, 10))
    expected = torch.from_numpy(array).as_strided((3, 4), (2, 10), 11).numpy()
    assert np.array_equal(read_values(view).reshape(3, 4), expected)


def test_many_pieces_open_few_files_at_a_time(tmp_path, monkeypatch):
    """A storage in more files than may be open at once is read whole."""
    monkeypatch.setattr(ranges, "MAX_OPEN_FILES", 2)
    array = np.arange(40, dtype="f4")
    assert np.array_equal(read_values(write_boxes(array, [range(40)], tmp_path)), array)


@pytest.mark.parametrize("left_out", [0, 1], ids=["first", "last"])
def test_missing_box_is_an_error(tmp_path, left_out):
    """Boxes that leave a gap are an error; uninitialized memory is never returned."""
    data = write_boxes(np.arange(8, dtype="f4"), [[3]], tmp_path)
    boxes = data.storage.boxes
    other_boxes = tuple(box for n, box in enumerate(boxes.boxes) if n != left_out)
    holed = ByteRange("x", 0, data.storage.length, boxes=Boxes(boxes.shape, 4, other_boxes))
    with pytest.raises(MalformedError, match="its chunks leave a gap; save the checkpoint again"):
        read_values(TensorData(holed, "float32", (8,)))


def deflate_content(content, path, *, claims=None, cut_to=None):
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    raw = (packer.compress(content) + packer.flush())[:cut_to]
    write_content(path, b"head" + raw + b"tail")
    length = len(content) if claims is None else claims
    return ByteRange(str(path), 4, length, zlib.crc32(content), packing=Packing("deflate", len(raw)))


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=5000).map(lambda part: part * 60), st.lists(st.integers(0, 300_000), max_size=6))
def test_deflated_content_is_read_from_any_position(tmp_path_factory, content, places):
    """Reads may go forwards, backwards, and to the last byte."""
    where = deflate_content(content, tmp_path_factory.mktemp("deflate") / "x")
    with open_range(where) as source:
        for at in places:
            at %= len(content) + 1
            buffer = np.zeros(min(700, len(content) - at), np.uint8)
            source.read(at, buffer)
            assert buffer.tobytes() == content[at : at + buffer.size]
    check_crc(where)


@pytest.mark.parametrize("claims", [99_999, 100_001], ids=["fewer", "more"])
def test_wrong_recorded_size_of_deflated_content_is_an_error(tmp_path, claims):
    """Content that decompresses to more or fewer bytes than its archive records is damaged."""
    where = deflate_content(bytes(100_000), tmp_path / "x", claims=claims)
    with (
        pytest.raises(MalformedError, match=rf"decompresses to .*, but the archive records {claims}"),
        open_range(where) as source,
    ):
        source.read(0, np.empty(claims, np.uint8))


def test_a_deflated_stream_cut_short_is_named(tmp_path):
    """A truncated stream does not give a partial tensor."""
    where = deflate_content(np.random.default_rng(0).bytes(50_000), tmp_path / "x", cut_to=20_000)
    with pytest.raises(MalformedError, match="decompresses to"), open_range(where) as source:
        source.read(0, np.empty(50_000, np.uint8))


def archive_tensor(tensor, path):
    """Write `tensor` as one of several torch.save archives in a file, as in a .distcp file."""
    other, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(3), other)
    torch.save(tensor, packed)
    content, size = packed.getvalue(), other.tell()
    write_content(path, other.getvalue() + content)
    where = ByteRange(str(path), size, tensor.nbytes, packing=Packing("torch-zip", len(content)))
    return TensorData(where, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4).t(), torch.arange(5, dtype=torch.bfloat16)],
    ids=["plain", "transposed", "bfloat16"],
)
def test_tensor_in_a_separate_archive_is_read(tmp_path, tensor):
    """Values, checksum and digest equal those of the tensor that torch saved."""
    data = archive_tensor(tensor, tmp_path / "x.distcp")
    assert np.array_equal(read_values(data).reshape(data.shape), tensor.float().numpy())
    check_crc(data.storage)
    plain = ByteRange(
        write_content(tmp_path / "raw", tensor.contiguous().view(torch.uint8).numpy().tobytes()), 0, tensor.nbytes
    )
    rows = [row(data), row(TensorData(plain, data.dtype, data.shape))]
    assert len(set(compute_digests(rows, "blake3"))) == 1
    (delta,) = compare_pairs([Pair(*rows)], CompareOptions())
    assert delta.changed == 0


def test_an_archive_that_holds_another_tensor_is_refused(tmp_path):
    """The metadata and the content of the archive must agree."""
    data = archive_tensor(torch.zeros(4), tmp_path / "x")
    with pytest.raises(
        MalformedError, match=r"the index records float32 \[2, 2\], but the array at byte \d+ has float32 \[4\]"
    ):
        read_values(TensorData(data.storage, "float32", (2, 2)))


def test_a_damaged_archive_inside_a_file_fails_its_checksum(tmp_path):
    data = archive_tensor(torch.ones(400), tmp_path / "x")
    raw = bytearray((tmp_path / "x").read_bytes())
    raw[raw.rindex(torch.ones(100).numpy().tobytes()) + 5] ^= 1
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(ChecksumMismatch, match="checksum wrong"):
        check_crc(data.storage)
