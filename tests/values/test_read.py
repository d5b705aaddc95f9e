"""Reading stored values: order, layouts, checksums, files that change, bounded memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import ByteRange, Quantizer, TensorData
from statecli.values import ranges, read
from statecli.values.ranges import check_crc
from statecli.values.read import open_view, read_all_values, read_values

from .conftest import LAYOUTS

PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8]
PLAIN += [torch.complex64, torch.complex128, torch.complex32, torch.float8_e5m2, torch.bool, torch.int8, torch.uint16]


def as_numpy(tensor):
    """Return the values of a tensor as read by torch, in the widest type of the same kind."""
    if tensor.is_complex():
        return tensor.to(torch.complex128).numpy().reshape(-1)
    return (tensor if not tensor.is_floating_point() else tensor.double()).resolve_neg().numpy().reshape(-1)


def build_tensor(dtype, *shape):
    """Return a tensor in which each value differs from its neighbours, in every type."""
    base = torch.arange(1, 1 + torch.Size(shape).numel()) % 13 - 3
    if dtype.is_complex:
        return torch.complex(base.double(), base.flip(0).double() / 4).to(dtype).reshape(shape)
    return (base.abs() if dtype in (torch.uint8, torch.uint16) else base).to(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@pytest.mark.parametrize("big_endian", [False, True])
def test_values_come_in_logical_order_from_any_layout(store, dtype, big_endian):
    """Every type in every layout, from an unaligned place, equals torch's own conversion."""
    for layout, lay_out in LAYOUTS.items():
        tensor = lay_out(build_tensor(dtype, 6, 8))
        values = read_all_values(store(tensor, big_endian=big_endian).data)
        np.testing.assert_array_equal(values, as_numpy(tensor), err_msg=layout)


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_lazy_conjugates_and_negatives_are_applied(store, lazy):
    """The stored bytes are the values before conjugation or negation."""
    x = build_tensor(torch.complex64, 3, 4)
    tensor = x.conj() if lazy == "conj" else x.conj().imag
    assert (tensor.is_conj(), tensor.is_neg()) == (lazy == "conj", lazy == "neg")
    expected = tensor.resolve_conj().resolve_neg().numpy().reshape(-1)
    np.testing.assert_array_equal(read_all_values(store(tensor).data), expected)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    strides=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    offset=st.integers(0, 9),
    chunk=st.sampled_from([1, 2, 7, 65536]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
def test_views_of_any_strides_are_read_in_chunks_of_any_size(store, monkeypatch, shape, strides, offset, chunk):
    """Merging dimensions and cutting chunks never loses, repeats or reorders an element."""
    monkeypatch.setattr(read, "CHUNK_ELEMENTS", chunk)
    tensor = torch.as_strided(torch.arange(150.0), shape, strides[: len(shape)], offset)
    data = store(tensor).data
    np.testing.assert_array_equal(read_all_values(data), as_numpy(tensor))
    with open_view(data) as view:
        assert all(part.size <= chunk for part in read_values(view))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantized_values_are_scaled(store, dtype):
    """The scale is per tensor or per channel of either axis; values agree up to torch's float32 rounding."""
    x = torch.randn(5, 7)
    scales, zeros = torch.rand(7).double() + 0.1, torch.randint(0, 9, (7,))
    for tensor in (
        torch.quantize_per_tensor(x, 0.1, 3, dtype),
        torch.quantize_per_tensor(x, 0.1, 3, dtype).t(),
        torch.quantize_per_channel(x, scales, zeros, 1, dtype),
        torch.quantize_per_channel(x, scales[:5], zeros[:5], 0, dtype),
    ):
        np.testing.assert_allclose(read_all_values(store(tensor).data), as_numpy(tensor.dequantize()), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4], ids=str)
@pytest.mark.parametrize("chunk", [4, 8, 65536])
def test_packed_quantized_values_are_unpacked(store, monkeypatch, dtype, chunk):
    """Rows of odd length share bytes, because packing continues across rows."""
    monkeypatch.setattr(read, "CHUNK_ELEMENTS", chunk)
    x = torch.rand(3, 7) * 3
    tensor = torch.quantize_per_channel(x, torch.rand(3) + 0.2, torch.rand(3), 0, dtype)
    np.testing.assert_allclose(read_all_values(store(tensor).data), as_numpy(tensor.dequantize()), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8], ids=str)
def test_quantized_values_equal_torch_to_the_last_bit(store, dtype):
    """Values agree to the last bit: torch multiplies in float32, and in float64 by scales per channel in float64."""
    x = torch.randn(64, 100, generator=torch.Generator().manual_seed(2))
    scales, zeros = torch.rand(64).double() * 0.1 + 1e-4, torch.arange(64) % 5
    quantized = [torch.quantize_per_tensor(x, float(scale), 7, dtype) for scale in scales[:8]]
    quantized += [torch.quantize_per_channel(x, scales, zeros, 0, dtype)]
    quantized += [torch.quantize_per_channel(x, scales.float(), zeros * 1.1, 0, dtype)]
    for tensor in quantized:
        assert np.array_equal(read_all_values(store(tensor).data), tensor.dequantize().numpy().reshape(-1))


def test_a_wrong_number_of_scales_is_refused(store):
    """Three scales cannot serve seven channels."""
    tensor = torch.quantize_per_channel(torch.rand(3, 7), torch.rand(3) + 0.1, torch.zeros(3), 0, torch.qint8)
    data = store(tensor).data
    lying = TensorData(data.storage, data.dtype, (7, 3), quantizer=data.quantizer)
    with pytest.raises(
        UnreadableError,
        match="7 channels need 7 scales and 1 or 7 zero points, but the file has 3 scales and 3 zero points",
    ):
        read_all_values(lying)


@pytest.mark.parametrize("dtype", ["bits8", "uint3", "nonsense"])
def test_types_without_numbers_are_refused(store, dtype):
    """Only the author of the tensor knows the meaning of bits in this type."""
    data = store(torch.zeros(4, dtype=torch.uint8)).data
    with pytest.raises(UnreadableError, match=dtype):
        read_all_values(TensorData(data.storage, dtype, (4,)))


# --- checksums and files that change -------------------------------------------------------------------------------


def test_a_right_checksum_passes_and_a_missing_one_too(store):
    """A container may record no checksum."""
    where = store(torch.arange(9.0)).data.storage
    check_crc(where)
    check_crc(ByteRange(where.path, where.offset, where.length))


@pytest.mark.parametrize("at", [0, 17, 35])
def test_one_flipped_byte_breaks_the_checksum(store, at):
    """The message has both checksums, the tensor, and the remedy."""
    where = store(torch.arange(9.0)).data.storage
    with open(where.path, "r+b") as file:
        file.seek(where.offset + at)
        byte = file.read(1)
        file.seek(where.offset + at)
        file.write(bytes([byte[0] ^ 0x40]))
    with pytest.raises(MalformedError, match=r"fc\.weight: checksum wrong: recorded 0x\w{8}, computed 0x\w{8}; .*copy"):
        check_crc(where, "fc.weight")


def test_checksum_of_a_storage_of_several_pieces_is_right(tmp_path):
    """The storage is larger than the piece of a single read."""
    import zlib

    content = os.urandom((1 << 22) + 12345)
    path = tmp_path / "big"
    path.write_bytes(content)
    check_crc(ByteRange(str(path), 7, len(content) - 7, zlib.crc32(content[7:])))


@pytest.mark.parametrize("size", [0, 1, 38])
def test_file_truncated_after_the_listing_is_an_error_with_both_sizes(store, size):
    """The error has both sizes, and the process does not crash."""
    data = store(torch.arange(9.0)).data
    os.truncate(data.storage.path, size)
    with pytest.raises(MalformedError, match=f"ends at byte 39, but the file has {size} bytes"):
        read_all_values(data)


@pytest.mark.parametrize("layout", [lambda x: x, torch.t], ids=["in order", "transposed"])
def test_file_truncated_during_the_read_is_an_error(store, layout, monkeypatch):
    """The next chunk or band is refused."""
    monkeypatch.setattr(read, "BAND_BYTES", read.CHUNK_ELEMENTS * 4)
    data = store(layout(torch.zeros(512, read.CHUNK_ELEMENTS * 4 // 512))).data
    with open_view(data) as view:
        chunks = read_values(view)
        next(chunks)
        os.truncate(data.storage.path, 4096)
        with pytest.raises(MalformedError, match="truncated"):
            list(chunks)


def test_deleted_file_is_an_error(store):
    data = store(torch.zeros(4)).data
    os.unlink(data.storage.path)
    with pytest.raises(UnreadableError, match="no such file"):
        read_all_values(data)


def test_a_file_replaced_by_a_pipe_does_not_block(store):
    """Opening a pipe without a writer would block forever."""
    data = store(torch.zeros(4)).data
    os.unlink(data.storage.path)
    os.mkfifo(data.storage.path)
    with pytest.raises(UnreadableError, match="not a regular file"):
        read_all_values(data)


def test_empty_range_is_not_damaged(tmp_path):
    """An empty range has nothing to read and is not damaged."""
    path = tmp_path / "empty"
    path.touch()
    assert read_all_values(TensorData(ByteRange(str(path), 0, 0, 0), "float32", (0, 4))).size == 0
    check_crc(ByteRange(str(path), 0, 0, 0))


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "message"),
    [
        ((10,), (1,), 0, "needs 40 bytes of its storage, but the storage has only 36"),
        ((9,), (1,), 1, "needs 40 bytes"),
        ((3, 3), (4, 1), 0, "needs 44 bytes"),
        ((2**62, 2**62), (2**62, 1), 0, "needs"),
        ((3,), (-1,), 2, "is negative"),
        ((-3,), (1,), 0, "is negative"),
        ((3,), (1,), -1, "is negative"),
        ((3,), (1, 1), 0, "the tensor has 1 dimensions but 2 strides"),
    ],
)
def test_a_view_outside_its_storage_is_refused(store, shape, strides, offset, message):
    """A neighbour's bytes are never returned, and the process does not crash."""
    where = store(torch.arange(9.0)).data.storage
    with pytest.raises(MalformedError, match=message):
        read_all_values(TensorData(where, "float32", shape, offset, strides))


def test_view_with_too_many_dimensions_is_refused(store):
    """2 ** 33 expanded elements in 33 dimensions that cannot be merged are refused without a crash."""
    where = store(torch.zeros(400)).data.storage
    strides = tuple(3 + n * (n % 2) for n in range(33))
    with (
        open_view(TensorData(where, "float32", (2,) * 33, 0, strides)) as view,
        pytest.raises(UnreadableError, match="dimensions, but statecli reads at most"),
    ):
        next(read_values(view))


# --- bounded memory ------------------------------------------------------------------------------------------------

READ_A_BIG_FILE = """
import resource, sys
import numpy
from statecli.core.model_state import ByteRange, TensorData, TensorInfo
from statecli.values.stats import read_stats
path, size, dtype = sys.argv[1], int(sys.argv[2]), "float64"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = TensorData(ByteRange(path, 0, size), dtype, (1024, size // 8192), 0, (1, 1024))
found = read_stats(TensorInfo("w", dtype, data.shape, size // 8, size, data=data))
print(found.zeros * 8 == size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: sparse files, and ru_maxrss in KiB")
def test_a_gigabyte_is_read_in_a_hundred_megabytes(tmp_path):
    """Resident memory does not grow with the file."""
    path, size = tmp_path / "sparse", 1 << 30
    with open(path, "wb") as file:
        file.truncate(size)
    process = subprocess.run(
        [sys.executable, "-c", READ_A_BIG_FILE, str(path), str(size)], capture_output=True, text=True, check=True
    )
    right, grown = process.stdout.split()
    assert right == "True"
    assert int(grown) * 1024 < 110 << 20


def test_files_are_closed_when_they_have_been_read(store):
    """A hundred thousand tensors do not need a hundred thousand descriptors."""
    data = store(torch.arange(9.0)).data
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(min(soft, 2048) + 10):
        with open_view(data):
            pass


def test_importing_the_package_imports_nothing_heavy():
    """`statecli.values` itself needs neither numpy nor torch; its readers do not need torch."""
    code = (
        "import sys, statecli.values; assert 'numpy' not in sys.modules; "
        "import statecli.values.stats, statecli.values.to_device; assert 'numpy' in sys.modules; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_chunks_of_a_huge_outer_dimension_start_at_once(tmp_path):
    """Making the list of blocks must not take memory or time in proportion to the blocks."""
    path = tmp_path / "sparse"
    rows, gap = 1 << 21, 3 * read.CHUNK_ELEMENTS
    with open(path, "wb") as file:
        file.truncate(rows * gap)
    data = TensorData(ByteRange(str(path), 0, rows * gap), "uint8", (rows, 2 * read.CHUNK_ELEMENTS), 0, (gap, 1))
    start = time.process_time()
    with open_view(data) as view:
        next(read_values(view))
    assert time.process_time() - start < 5


def test_packed_values_may_begin_in_the_middle_of_a_byte(store):
    """An odd offset: the first value is the high half of its byte."""
    data = store(torch.tensor([0x10, 0x32, 0x54], dtype=torch.uint8)).data
    scale = Quantizer("torch.per_tensor_affine", 1.0, 0)
    packed = TensorData(data.storage, "quint4x2", (4,), 1, quantizer=scale)
    assert read_all_values(packed).tolist() == [1, 2, 3, 4]
    with pytest.raises(MalformedError, match="needs 4 bytes"):
        read_all_values(TensorData(data.storage, "quint4x2", (6,), 1, quantizer=scale))


def test_quantized_values_without_a_scale_are_refused(store):
    """Their integers would be mistaken for values."""
    data = store(torch.zeros(4, dtype=torch.uint8)).data
    with pytest.raises(
        UnreadableError, match=("quint8 elements have no recorded scale, so statecli cannot convert them to numbers")
    ):
        read_all_values(TensorData(data.storage, "quint8", (4,)))


# --- elements that are not stored in C order -------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    strides=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    band=st.sampled_from([1, 8, 40, 1 << 20]),
    window=st.sampled_from([1, 16, 100]),
    gap=st.sampled_from([0, 8, 1000]),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.complex32, torch.complex128]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
def test_views_of_any_strides_are_read_in_bands_of_any_size(
    store, monkeypatch, shape, strides, band, window, gap, dtype
):
    """For any sizes of bands and windows, every element of the tensor arrives at its place."""
    for name, value in (("BAND_BYTES", band), ("CHUNK_ELEMENTS", 8)):
        monkeypatch.setattr(read, name, value)
    for name, value in (("WINDOW_BYTES", window), ("MAX_GAP_BYTES", gap)):
        monkeypatch.setattr(ranges, name, value)
    strides = strides[: len(shape)]
    needed = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    tensor = build_tensor(dtype, needed).as_strided(shape, strides)
    np.testing.assert_array_equal(read_all_values(store(tensor).data), as_numpy(tensor))


def test_rows_a_power_of_two_apart_are_read_correctly(store):
    """Bands whose rows are a power of two apart are padded, without loss."""
    tensor = torch.arange(1024.0 * 512).reshape(1024, 512).t()
    np.testing.assert_array_equal(read_all_values(store(tensor).data), tensor.reshape(-1).numpy())
