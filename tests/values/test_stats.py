"""Statistics checked against torch's float64 reductions, at the ends of the number ranges, and without values."""

from __future__ import annotations

import functools
import math
import time

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.model_state import ByteRange, ModelState, NoteKind, Stats, TensorData, TensorInfo
from statecli.values import read, stats as module
from statecli.values.elements import MAX_UNSCALED, Decoder
from statecli.values.stats import compute_live_stats, fill_stats, read_stats
from statecli.values.summary import Facts, Moments, summarize_chunk

from .conftest import LAYOUTS

REAL = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
REAL += [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
REAL += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32]


def oracle(tensor):
    """Return the statistics computed by torch at once in float64."""
    x = tensor.double().reshape(-1)
    finite = x[x.isfinite()]
    stats = Stats(zeros=int((x == 0).sum()), nan=int(x.isnan().sum()), inf=int(x.isinf().sum()))
    if not finite.numel():
        return stats
    return msgspec.structs.replace(
        stats,
        min=finite.min().item(),
        max=finite.max().item(),
        mean=finite.mean().item(),
        std=finite.std().item() if finite.numel() > 1 else None,
    )


def check_stats(actual, expected, rel=1e-9, scale=0.0):
    """Check counts and extremes exactly, and moments within `rel`."""
    exact = ("min", "max", "zeros", "nan", "inf", "reason")
    assert [getattr(actual, name) for name in exact] == [getattr(expected, name) for name in exact]
    for name in ("mean", "std"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours == pytest.approx(theirs, rel=rel, abs=rel * max(abs(expected.max), abs(expected.min), scale))


def sample(dtype):
    """Return positive and negative values, zeros, and NaN and infinities if the type has them."""
    x = torch.randn(40, 90, generator=torch.Generator().manual_seed(0)) * 3
    x[0, :9] = 0
    if dtype.is_floating_point:
        x[1, :5], x[2, 3:7], x[3, 4] = math.nan, math.inf, -math.inf
    return (x.abs() if dtype in (torch.uint8, torch.uint16, torch.uint32) else x).to(dtype)


@pytest.fixture(params=["decoded", "counted"])
def algorithm(request, monkeypatch):
    """Run the test with both ways of computing statistics, for any size of tensor."""
    monkeypatch.setattr(module, "MIN_ELEMENTS_TO_COUNT", 0 if request.param == "counted" else 1 << 60)


@pytest.mark.usefixtures("algorithm")
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_statistics_of_a_stored_tensor_equal_torch(store, monkeypatch, dtype):
    """The statistics equal torch's for every type and layout, in one chunk and in dozens."""
    chunks = 71, read.CHUNK_ELEMENTS
    for lay_out in LAYOUTS.values():
        tensor = lay_out(sample(dtype))
        stored, expected = store(tensor), oracle(tensor)
        for chunk in chunks:
            monkeypatch.setattr(read, "CHUNK_ELEMENTS", chunk)
            check_stats(read_stats(stored), expected)


@pytest.mark.usefixtures("algorithm")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32], ids=str)
def test_statistics_of_a_big_endian_tensor_equal_torch(store, dtype):
    """The bytes of each element are swapped."""
    tensor = sample(dtype)
    check_stats(read_stats(store(tensor, big_endian=True)), oracle(tensor))


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_statistics_of_a_live_tensor_equal_torch(dtype):
    """The tensor is read through its own storage, in every layout."""
    for lay_out in LAYOUTS.values():
        tensor = lay_out(sample(dtype))
        check_stats(compute_live_stats(tensor), oracle(tensor))


@given(
    values=hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.float16]), hnp.array_shapes(max_dims=3, max_side=9, min_side=0)
    ),
    chunk=st.integers(1, 40),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
def test_statistics_of_any_values_equal_numpy(monkeypatch, values, chunk):
    """With NaN payloads, infinities, subnormals and maxima, extremes and counts are exact, and moments nearly exact."""
    monkeypatch.setattr(read, "CHUNK_ELEMENTS", chunk)
    actual, finite = compute_live_stats(torch.from_numpy(values)), values[np.isfinite(values)].astype(np.float64)
    assert (actual.zeros, actual.nan, actual.inf) == (
        int((values == 0).sum()),
        int(np.isnan(values).sum()),
        int(np.isinf(values).sum()),
    )
    if not finite.size:
        assert (actual.min, actual.max, actual.mean, actual.std) == (None,) * 4
        return
    assert (actual.min, actual.max) == (finite.min(), finite.max())
    exact = finite.astype(np.longdouble)
    spread = float(np.abs(finite).max())
    # The mean of each chunk, and each mean of two chunks, is rounded to a multiple of the smallest subnormal number.
    smallest = 5e-324 * (1 + values.size // chunk)
    assert actual.mean == pytest.approx(float(exact.mean()), rel=1e-12, abs=1e-13 * spread + smallest)
    assert actual.min <= actual.mean <= actual.max
    if finite.size > 1 and float(exact.std(ddof=1)) < 1.7e308:
        assert actual.std == pytest.approx(float(exact.std(ddof=1)), rel=1e-9, abs=1e-13 * spread + smallest)


@given(
    parts=st.lists(st.lists(st.floats(-1e300, 1e300), max_size=6), max_size=5),
)
@settings(max_examples=100, deadline=None)
@example(parts=[[0.0], [5e-324, 5e-324]])
def test_merged_parts_have_the_statistics_of_the_whole(parts):
    """Parts are merged forwards, backwards and in two halves, with empty parts among them."""
    summaries = [summarize_chunk(np.array(part), Decoder()) if part else Facts() for part in parts]
    whole = np.array([value for part in parts for value in part])
    forwards, backwards = Facts(), Facts()
    for first, second in zip(summaries, reversed(summaries), strict=True):
        forwards, backwards = forwards.merge(first), second.merge(backwards)
    middle = len(summaries) // 2
    halves = [functools.reduce(Facts.merge, half, Facts()) for half in (summaries[:middle], summaries[middle:])]
    for merged in (forwards, backwards, halves[0].merge(halves[1])):
        moments = merged.moments
        assert moments.finite == whole.size
        if whole.size:
            # Each merge rounds to a double, of which the smallest are 5e-324 apart.
            slack = 1e-12 * np.abs(whole).max() + len(parts) * 5e-324
            exact = whole.astype(np.longdouble)
            assert moments.mean == pytest.approx(float(exact.mean()), rel=1e-9, abs=slack)
            assert moments.deviation == pytest.approx(float(exact.std()), rel=1e-9, abs=slack)


# --- the ends of the ranges ----------------------------------------------------------------------------------------


def test_data_far_from_zero_keeps_its_spread():
    """1e8 with a spread of 1: float64 sums of squares would lose the spread; float32 would lose even the data."""
    x = 1e8 + torch.randn(300_000, dtype=torch.float64)
    live_stats = compute_live_stats(x)
    assert live_stats.std == pytest.approx(x.std().item(), rel=1e-9)
    assert live_stats.mean == pytest.approx(x.mean().item(), rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_maxima_of_the_type_do_not_overflow(dtype):
    """Half the elements at the type's maximum, half at its minimum: mean 0, std the maximum."""
    top = torch.finfo(dtype).max
    x = torch.tensor([top, -top] * 100_000, dtype=dtype)
    live_stats = compute_live_stats(x)
    assert (live_stats.min, live_stats.max) == (-top, top)
    assert live_stats.mean == 0
    assert live_stats.std == pytest.approx(top, rel=1e-5) if dtype != torch.float64 else live_stats.std is None
    if dtype == torch.float64:
        assert live_stats.reason == "std is too large for float64"


def test_chunks_at_opposite_maxima_can_be_merged():
    """The difference of their means is beyond float64; mean and deviation are not."""
    top = torch.finfo(torch.float64).max
    low, high = (Facts(3, low=value, high=value, moments=Moments(3, value)) for value in (-top, top))
    merged = low.merge(high).moments
    assert (merged.mean, merged.deviation) == (0.0, top)


def test_a_mean_of_maxima_is_the_maximum():
    """Their sum is beyond float64, their mean is not."""
    top = torch.finfo(torch.float64).max
    x = torch.full((200_000,), top, dtype=torch.float64)
    x[0] = top / 2
    assert compute_live_stats(x).mean == pytest.approx(top, rel=1e-5)


def test_squares_of_a_band_of_unscaled_values_do_not_overflow():
    """The largest chunk of float64 values, of the largest size that is not scaled, on both sides of the mean."""
    size = math.nextafter(MAX_UNSCALED, 0)
    chunk = np.tile([size, -size], read.BAND_BYTES // 16)
    assert summarize_chunk(chunk, Decoder()).moments == Moments(chunk.size, 0.0, pytest.approx(size))


def test_values_whose_squares_vanish_keep_their_spread():
    """1e-200 squared is 0."""
    x = torch.randn(1000, dtype=torch.float64) * 1e-200
    assert compute_live_stats(x).std == pytest.approx((x * 1e200).std().item() * 1e-200, rel=1e-9)


@pytest.mark.parametrize("value", [0.1, -3e38, 1e-40])
def test_a_constant_has_no_spread_at_all(value):
    """The deviation is exactly 0, and the mean is exactly the value."""
    x = torch.full((200_001,), value)
    live_stats = compute_live_stats(x)
    assert (live_stats.mean, live_stats.std) == (x[0].item(), 0.0)


def test_one_element_has_no_std():
    """With a single element, n - 1 is 0."""
    assert compute_live_stats(torch.tensor(5.0)) == Stats(5.0, 5.0, 5.0, None, 0, 0, 0)


def test_tensor_without_finite_values_has_counts_and_no_statistics():
    """For example a tensor that is masked out."""
    x = torch.tensor([math.nan, -math.inf, math.inf])
    assert compute_live_stats(x) == Stats(zeros=0, nan=1, inf=2)


def test_zeros_of_either_sign_count():
    assert compute_live_stats(torch.tensor([0.0, -0.0, 1.0])).zeros == 2


@pytest.mark.parametrize("value", [2**53 + 1, -(2**62) - 1])
def test_reason_has_integers_that_float64_cannot_represent(value):
    """min and max are floats in the output; the exact integers are in the reason."""
    live_stats = compute_live_stats(torch.tensor([value, 0]))
    assert str(value) in live_stats.reason
    assert "rounded" in live_stats.reason


def test_integers_that_float64_can_represent_have_no_reason():
    assert compute_live_stats(torch.tensor([2**60, 7])).reason is None


def test_uint64_beyond_int64_is_read_as_unsigned(store):
    """Unsigned integers are not read as signed."""
    stats = read_stats(store(torch.tensor([2**64 - 1024 * 2, 0], dtype=torch.uint64)))
    assert (stats.min, stats.max, stats.zeros) == (0, 2**64 - 2048, 1)


def test_a_bool_byte_that_is_neither_0_nor_1_is_true(store):
    """A file may have any byte as a bool; each nonzero byte counts as 1."""
    data = store(torch.tensor([0, 1, 2, 255], dtype=torch.uint8)).data
    stats = read_stats(TensorInfo("w", "bool", (4,), 4, 4, data=TensorData(data.storage, "bool", (4,))))
    assert (stats.min, stats.max, stats.mean, stats.zeros) == (0, 1, 0.75, 1)


# --- kinds of tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=str)
def test_complex_values_are_counted_and_not_ordered(store, dtype):
    """A zero needs both parts to be zero; one part is enough for NaN and infinity, as in torch.isnan and isinf."""
    nan, inf = math.nan, math.inf
    x = torch.tensor([0, 1, 1j, complex(nan, 1), complex(0, inf), complex(inf, nan), -0.0]).to(dtype)
    wide = x.to(torch.complex128)
    stats = read_stats(store(x))
    assert (stats.zeros, stats.nan, stats.inf) == (2, int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert (stats.min, stats.max, stats.mean, stats.std) == (None,) * 4
    assert stats.reason == "complex values have no order"
    assert compute_live_stats(x) == stats


@pytest.mark.usefixtures("algorithm")
def test_float4_counts_values_not_bytes(store):
    """Eight bytes have sixteen codes, two of them zero."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).view(torch.float4_e2m1fn_x2)
    stats = read_stats(store(packed))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (stats.min, stats.max, stats.mean, stats.zeros) == (-6, 6, 0, 2)
    assert stats.std == pytest.approx(np.std(values + [-v for v in values], ddof=1))
    assert compute_live_stats(packed) == stats


@pytest.mark.usefixtures("algorithm")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2], ids=str)
def test_quantized_tensors_are_dequantized(store, dtype):
    """Stored and live values agree with torch's dequantization, within float32 precision."""
    x = torch.rand(6, 9) * 4
    scales, zeros = torch.rand(9) + 0.2, torch.zeros(9)
    if dtype == torch.quint4x2:
        tensor = torch.quantize_per_channel(x, scales, zeros, 1, dtype)
    else:
        tensor = torch.quantize_per_tensor(x, 0.05, 3, dtype)
    expected = oracle(tensor.dequantize())
    for actual in (read_stats(store(tensor)), compute_live_stats(tensor)):
        assert actual.zeros == expected.zeros
        assert [actual.min, actual.max, actual.mean, actual.std] == pytest.approx(
            [expected.min, expected.max, expected.mean, expected.std], rel=1e-6
        )


def sparse_row(store, tensor, name, **fields):
    """Return the row of a sparse tensor as a format reader builds a row."""
    values = store(tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()).data
    return TensorInfo(
        "w",
        values.dtype,
        tuple(tensor.shape),
        tensor.numel(),
        0,
        layout=name,
        parts=(("values", values),),
        **fields,
    )


@pytest.mark.parametrize("name", ["sparse_coo", "sparse_csr", "sparse_bsr"])
def test_statistics_of_a_sparse_tensor_equal_its_dense_tensor(store, name):
    """The statistics equal the dense tensor's, also with explicit zeros and blocks."""
    dense = torch.randn(6, 8).double() * (torch.rand(6, 8) > 0.7)
    sparse = {
        "sparse_coo": lambda: dense.to_sparse(),
        "sparse_csr": lambda: dense.to_sparse_csr(),
        "sparse_bsr": lambda: dense.to_sparse_bsr((2, 2)),
    }[name]()
    check_stats(read_stats(sparse_row(store, sparse, name)), oracle(dense))
    check_stats(compute_live_stats(sparse), oracle(dense))


def test_a_full_sparse_tensor_has_no_implicit_zeros(store):
    """min is the smallest stored value, not 0."""
    dense = torch.rand(4, 4).double() + 1
    check_stats(read_stats(sparse_row(store, dense.to_sparse(), "sparse_coo")), oracle(dense))


def test_uncoalesced_tensor_has_a_reason(store):
    """Entries with the same index are not summed."""
    tensor = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (4,))
    for actual in (
        read_stats(sparse_row(store, tensor, "sparse_coo", note_kind=NoteKind.UNCOALESCED)),
        compute_live_stats(tensor),
    ):
        assert actual.reason.startswith("uncoalesced")
        assert actual.max == 2.0


class Wrapper(torch.Tensor):
    """A subclass without its own storage, whose code raises an unexpected error."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise KeyError("not this one") from None


# --- values not read ------------------------------------------------------------------------------------------------


def test_a_huge_expanded_tensor_is_read_at_once(store):
    """2 ** 40 elements share four stored values: only these are read, and the counts cover all elements."""
    data = store(torch.tensor([0.0, 1.0, 2.0, 5.0])).data
    shape, strides = (2**20, 4, 2**18), (0, 1, 0)
    info = TensorInfo("w", "float32", shape, 2**40, 2**42, data=TensorData(data.storage, "float32", shape, 0, strides))
    start = time.process_time()
    stats = read_stats(info)
    assert time.process_time() - start < 5  # not the hours that each element would take
    assert (stats.zeros, stats.mean, stats.min, stats.max) == (2**38, 2.0, 0.0, 5.0)
    assert stats.std == pytest.approx(np.std([0, 1, 2, 5]))
    live = torch.as_strided(torch.tensor([0.0, 1.0, 2.0, 5.0]), shape, strides)
    assert compute_live_stats(live) == stats


def test_windows_without_end_are_refused_at_once(store):
    """2 ** 30 overlapping windows over 3,000 elements give a reason at once."""
    data = store(torch.zeros(3072)).data
    shape, strides = (1024, 1024, 1024), (1, 1, 1)
    info = TensorInfo("w", "float32", shape, 2**30, 2**32, data=TensorData(data.storage, "float32", shape, 0, strides))
    start = time.process_time()
    stats = read_stats(info)
    assert time.process_time() - start < 5  # not the hours that each element would take
    assert stats.mean is None
    assert "repeats" in stats.reason


@pytest.mark.parametrize(
    ("row", "expected_reason"),
    [
        (TensorInfo("w", "float32", None, 0, 0), "uninitialized"),
        (TensorInfo("w", "unknown", None, 0, 0, damage="two tensors share bytes"), "it cannot be read"),
        (TensorInfo("w", "q8_0", (32,), 32, 34), "blocks of q8_0 in big-endian order"),
        (TensorInfo("w", "float32", (2,), 2, 8, device="meta"), "a meta tensor has no data"),
        (TensorInfo("w", "float32", (2,), 2, 8), "not in the file"),
        (TensorInfo("w", "float32", (2,), 2, 8, layout="sparse_csr"), "its values are missing from the file"),
    ],
)
def test_tensors_without_bytes_have_a_reason(row, expected_reason):
    """The statistics are never zeros, and no exception is raised."""
    stats = read_stats(row)
    assert expected_reason in stats.reason
    assert stats.zeros is None


def test_a_subclass_names_its_inner_tensors(store):
    """The values would have to be computed by the subclass's code, and statecli does not run this code."""
    data = store(torch.zeros(3)).data
    stats = read_stats(TensorInfo("w", "bfloat16", (3,), 3, 6, parts=(("qdata", data), ("scale", data))))
    assert stats.reason == "stored as several tensors (qdata, scale), so statistics are not available"


def test_a_type_without_numbers_has_a_reason(store):
    data = store(torch.zeros(4, dtype=torch.uint8)).data
    stats = read_stats(TensorInfo("w", "bits8", (4,), 4, 4, data=TensorData(data.storage, "bits8", (4,))))
    assert stats.reason == "statecli cannot read bits8 elements as numbers"


@pytest.mark.parametrize(
    ("build_tensor", "expected_reason"),
    [
        (lambda: torch.zeros(3, device="meta"), "a meta tensor has no data"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "statecli does not compute statistics"),
        (lambda: torch.nn.UninitializedParameter(), "Attempted to use an uninitialized parameter"),
        (lambda: Wrapper(torch.zeros(3)), "the values of a Wrapper cannot be read: 'not this one'"),
    ],
)
def test_live_tensors_without_bytes_have_a_reason(build_tensor, expected_reason):
    assert expected_reason in compute_live_stats(build_tensor()).reason


def test_a_fake_tensor_has_a_reason():
    """A FakeTensor claims to be on the CPU and has no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    assert compute_live_stats(fake).reason == "a FakeTensor has no data in memory"


def test_an_mkldnn_tensor_is_read_densely():
    """Its own layout is opaque."""
    x = torch.randn(4, 5)
    check_stats(compute_live_stats(x.to_mkldnn()), oracle(x))


def test_tensor_on_another_device_is_copied_in_bounded_pieces(monkeypatch):
    """Expanded dimensions are not copied; pieces cover everything once."""
    from statecli.values import live_tensor as live

    monkeypatch.setattr(live, "PIECE_BYTES", 64)
    x = torch.randn(7, 3, 5).double()
    seen = [piece.numel() * 8 for piece in live.iter_cpu_pieces(x.transpose(0, 2))]
    assert sum(seen) == x.numel() * 8
    assert max(seen) <= 64
    shrunk, times = live.skip_expanded(x[:, :1, :1].expand(7, 3, 5))
    assert (tuple(shrunk.shape), times) == ((7, 1, 1), 15)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_of_a_cuda_tensor_equal_torch(monkeypatch, layout):
    """The tensor is copied in pieces, from any layout."""
    from statecli.values import live_tensor as live

    monkeypatch.setattr(live, "PIECE_BYTES", 512)
    tensor = LAYOUTS[layout](sample(torch.float32).cuda())
    check_stats(compute_live_stats(tensor), oracle(tensor.cpu()))


def test_parameters_and_their_views_need_no_detach():
    """requires_grad does not prevent reading, and no gradient is recorded."""
    weight = torch.nn.Parameter(torch.randn(3, 4))
    check_stats(compute_live_stats(weight.t()), oracle(weight.detach().t()))
    assert weight.grad is None


# --- all of a checkpoint -------------------------------------------------------------------------------------------


def test_all_tensors_of_a_state_are_filled_and_storages_checked_once(store, monkeypatch):
    """A storage with several views has one checksum check, and each tensor has statistics and a progress call."""
    checked, reported = [], []
    monkeypatch.setattr(module, "check_crc", lambda where, what: checked.append(where))
    x = torch.randn(4, 5)
    first = store(x)
    second = msgspec.structs.replace(first, fqn="v", data=msgspec.structs.replace(first.data, shape=(4,), strides=(5,)))
    third = msgspec.structs.replace(first, fqn="tied")
    state = ModelState("t", "torch_zip", (first, second, third))
    filled = fill_stats(state, lambda name, size: reported.append((name, size)))
    check_stats(filled.tensors[0].stats, oracle(x))
    check_stats(filled.tensors[1].stats, oracle(x[:, 0]))
    assert filled.tensors[2].stats == filled.tensors[0].stats
    assert len(checked) == 1
    assert [name for name, _ in reported] == ["w", "v", "tied"]


def test_number_of_processes_does_not_change_the_statistics(store, monkeypatch):
    """Any number of processes gives the same statistics and errors, also for tied and damaged tensors."""
    infos = [msgspec.structs.replace(store(torch.randn(3000) * n), fqn=f"w{n}") for n in range(5)]
    infos.append(msgspec.structs.replace(infos[1], fqn="tied"))
    state = ModelState("t", "torch_zip", tuple(infos))
    expected = fill_stats(state)
    monkeypatch.setattr(module.pool, "MIN_BYTES_FOR_WORKERS", 0)
    monkeypatch.setattr(module.pool, "MIN_BATCH_BYTES", 1)
    assert fill_stats(state) == expected
    with open(infos[2].data.storage.path, "r+b") as file:
        file.seek(4)
        file.write(b"\x13\x37")
    with pytest.raises(MalformedError, match="w2: checksum wrong"):
        fill_stats(state)


def test_a_damaged_storage_stops_the_run(store):
    """Numbers from damaged bytes would mean nothing."""
    info = store(torch.randn(5))
    damaged = msgspec.structs.replace(info.data.storage, crc32=info.data.storage.crc32 ^ 1)
    info = msgspec.structs.replace(info, data=msgspec.structs.replace(info.data, storage=damaged))
    with pytest.raises(MalformedError, match="w: checksum wrong"):
        fill_stats(ModelState("t", "torch_zip", (info,)))


def test_a_damaged_scale_stops_the_run(store):
    """The scales of a quantized tensor are read, so they are checked."""
    x = torch.quantize_per_channel(torch.rand(3, 4), torch.rand(3) + 0.1, torch.zeros(3), 0, torch.qint8)
    info = store(x)
    path = info.data.quantizer.scales.storage.path
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(b"\x13\x37")
    with pytest.raises(MalformedError, match="checksum wrong"):
        fill_stats(ModelState("t", "torch_zip", (info,)))


def test_a_missing_file_stops_the_run(tmp_path):
    """The file was deleted after its tensors were listed."""
    data = TensorData(ByteRange(str(tmp_path / "gone"), 0, 4), "float32", (1,))
    with pytest.raises(UnreadableError, match="gone"):
        fill_stats(ModelState("t", "x", (TensorInfo("w", "float32", (1,), 1, 4, data=data),)))


def test_the_exponent_type_is_read_without_a_warning():
    """In float8_e8m0fnu, the code for 2 ** 128 is NaN, so the table does not overflow."""
    import warnings

    from statecli.values.elements import _build_exponent_table

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = _build_exponent_table()
    assert table[0] == 2.0**-127
    assert table[254] == 2.0**127
    assert table[255] != table[255]
