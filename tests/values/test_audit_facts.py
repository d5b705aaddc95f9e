"""Facts of values equal torch's for every type, in every layout and for any size of the pieces read."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from statecli import formats
from statecli.core.model_state import ByteRange, Quantizer, TensorData, TensorInfo
from statecli.values import audit_facts, facts_kernel
from statecli.values.elements import Decoder
from statecli.values.summary import Facts

from .conftest import build_row

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from ..formats import zero  # noqa: E402

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = [
    getattr(torch, f"float8_{name}")
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
    if hasattr(torch, f"float8_{name}")
]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]

needs_kernel = pytest.mark.skipif(facts_kernel._native is None, reason="no compiled kernel")


@pytest.fixture(params=["compiled", "numpy"])
def kernel(request, monkeypatch):
    """Run the test with both kernels: the compiled C kernel, and numpy as used without the C kernel."""
    if request.param == "numpy":
        monkeypatch.setattr(facts_kernel, "_native", None)
    elif facts_kernel._native is None:
        pytest.skip("no compiled kernel")
    return request.param


@pytest.fixture
def small(monkeypatch):
    """Use blocks of 64 bytes and tasks of four blocks, so that a few hundred elements cross every boundary."""
    monkeypatch.setattr(facts_kernel, "BLOCK_BYTES", 64)
    monkeypatch.setattr(audit_facts, "TASK_BYTES", 256)


def read_fact(info, **options):
    (fact,) = audit_facts.read_facts([info], **options)
    return fact


def draw_any_bits(dtype, n, seed=0):
    """Return elements of random bits, including NaN, infinities, zeros of both signs and denormals."""
    raw = torch.randint(0, 256, (n * dtype.itemsize,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    tensor = raw.view(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        tiny = torch.finfo(dtype).smallest_normal
        special_values = [math.nan, math.inf, -math.inf, -math.inf, 0.0, -0.0, tiny, tiny / 2, -tiny / 2]
        tensor[5 : 5 + len(special_values)] = torch.tensor(special_values, dtype=torch.float64).to(dtype)
    return tensor


def compute_expected_facts(tensor):
    """Return the facts computed element by element in float64."""
    wide = tensor.to(torch.float64)
    finite = wide[wide.isfinite()]
    tiny = torch.finfo(tensor.dtype).smallest_normal if tensor.dtype.is_floating_point else 0.0
    return {
        "elements": tensor.numel(),
        "nan": int(wide.isnan().sum()),
        "inf": int(wide.isinf().sum()),
        "minus_inf": int((wide == -math.inf).sum()),
        "zeros": int((wide == 0).sum()),
        "denormal": int(((wide != 0) & (wide.abs() < tiny)).sum()),
        "low": float(finite.min()) if finite.numel() else None,
        "high": float(finite.max()) if finite.numel() else None,
    }


def select_facts(result):
    return {name: getattr(result, name) for name in compute_expected_facts(torch.zeros(1))}


# --- every type ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS + EIGHT_BITS, ids=str)
@pytest.mark.parametrize("n", [16, 333])
def test_facts_of_floats_with_any_bits_equal_torch(store, kernel, small, dtype, n):
    """Counts, lowest and highest are torch's, for every float type."""
    tensor = draw_any_bits(dtype, n)
    assert select_facts(read_fact(store(tensor))) == compute_expected_facts(tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *EIGHT_BITS], ids=str)
def test_facts_of_every_code_of_a_small_type_equal_torch(store, kernel, dtype):
    """The facts of each code of the type equal torch's."""
    codes = torch.arange(256**dtype.itemsize, dtype=torch.int32)
    all_codes = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    for part in [all_codes, *all_codes.split(256)[:: max(len(all_codes) // 256 // 16, 1)], *all_codes[-3:].split(1)]:
        assert select_facts(read_fact(store(part.clone()))) == compute_expected_facts(part)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_integers_are_exact(store, kernel, small, dtype):
    """Lowest and highest are exact integers, also beyond the integers that float64 represents."""
    tensor = draw_any_bits(dtype, 300)
    tensor[7] = 0
    listed = tensor.tolist()
    actual = read_fact(store(tensor))
    assert (actual.low, actual.high, actual.zeros) == (min(listed), max(listed), listed.count(0))
    assert (actual.nan, actual.inf, actual.denormal) == (0, 0, 0)


def test_true_counts_as_1(store, kernel, small):
    """True counts as 1."""
    tensor = torch.arange(300) % 3 == 0
    assert select_facts(read_fact(store(tensor))) == select_facts(Facts(300, zeros=200, low=0, high=1))


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_element_is_nan_or_infinite_if_a_part_is(store, kernel, small, dtype):
    """An element is NaN, infinite or denormal if one part is, and zero if both are; complex numbers have no order."""
    part = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}[dtype]
    tensor = draw_any_bits(part, 400).view(dtype)
    tensor[100] = 0
    parts = torch.view_as_real(tensor).to(torch.float64)
    tiny = torch.finfo(part).smallest_normal
    actual = read_fact(store(tensor))
    assert actual.elements == 200
    assert actual.nan == int(parts.isnan().any(1).sum())
    assert actual.inf == int(parts.isinf().any(1).sum())
    assert actual.zeros == int((parts == 0).all(1).sum())
    assert actual.denormal == int(((parts != 0) & (parts.abs() < tiny)).any(1).sum())
    assert (actual.low, actual.high) == (None, None)


def test_float4_has_two_values_in_a_byte(tmp_path, kernel):
    """The sixteen codes are eight sizes of two signs; the size 0.5 is denormal."""
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    content = bytes(range(256))
    (tmp_path / "a").write_bytes(content)
    actual = read_fact(build_row(TensorData(ByteRange(str(tmp_path / "a"), 0, 256), "float4_e2m1fn_x2", (256,))))
    values = [sizes[code % 8] * (-1 if code > 7 else 1) for byte in content for code in (byte % 16, byte // 16)]
    assert (actual.elements, actual.low, actual.high) == (512, min(values), max(values))
    assert (actual.zeros, actual.denormal) == (values.count(0), sum(abs(value) == 0.5 for value in values))


def test_quantized_values_are_scaled(store, kernel):
    """The facts are of (code - zero point) * scale, as in torch, with a single scale or a scale per channel."""
    values = torch.randn(8, 40) * torch.arange(8)[:, None]
    whole = torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
    scales, zeros = torch.arange(1, 9) / 50, torch.zeros(8, dtype=torch.long)
    channels = torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    for tensor in (whole, channels):
        assert select_facts(read_fact(store(tensor))) == compute_expected_facts(tensor.dequantize())


def test_each_channel_has_its_own_scale_in_every_block(store, kernel, small):
    """The last element of a channel and the first of the next keep their own scales, also many blocks later."""
    for at, highest in ((39, 127.0), (40, 254.0), (279, 127.0 * 64), (280, 127.0 * 128)):
        codes = torch.zeros(8, 40, dtype=torch.int8)
        codes.view(-1)[at] = 127
        scales = 2.0 ** torch.arange(8)
        tensor = torch._make_per_channel_quantized_tensor(codes, scales, torch.zeros(8, dtype=torch.long), 0)
        assert read_fact(store(tensor)).high == highest


def test_a_scale_that_is_not_a_number_makes_values_nan(store, kernel):
    """A scale of NaN makes every value NaN, although no code shows this."""
    info = store(torch.quantize_per_tensor(torch.randn(10), 0.1, 0, torch.qint8))
    row_with_nan_scale = replace(
        info, data=replace(info.data, quantizer=Quantizer("torch.per_tensor_affine", math.nan, 0))
    )
    assert read_fact(row_with_nan_scale).nan == 10


# --- layouts and containers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_byte_order_and_strides_do_not_change_the_facts(store, kernel, small, dtype):
    """Facts and digest cover the logical elements: big-endian, transposed and plain storages give the same facts."""
    tensor = torch.arange(17 * 23).reshape(17, 23).to(dtype)
    plain = read_fact(store(tensor))
    assert read_fact(store(tensor.t().contiguous().t())) == plain
    assert read_fact(store(tensor, big_endian=True)) == plain
    assert read_fact(store(torch.cat([tensor, tensor])[17:])) == plain


def test_expanded_elements_count_each_time(store, kernel):
    row = draw_any_bits(torch.float32, 50)
    actual = read_fact(store(row.expand(1000, 50)))
    assert select_facts(actual) == compute_expected_facts(row.expand(1000, 50))
    assert actual.digest is None


def test_facts_of_a_negative_view_cover_the_resolved_values(store, kernel):
    """The lowest value of a lazily negated tensor is the negated highest value."""
    pair = torch.complex(torch.zeros(9), torch.arange(9.0))
    negated = pair.conj().imag
    assert negated.is_neg()
    assert select_facts(read_fact(store(negated))) == compute_expected_facts(negated.resolve_neg())


def test_facts_of_a_sparse_tensor_count_zeros_that_are_not_stored(tmp_path):
    """An element that is not stored counts as zero, in the number of zeros and in the range."""
    dense = torch.zeros(10, 10)
    dense[3, 4], dense[5, 6] = 2.0, math.nan
    torch.save({"w": dense.to_sparse()}, tmp_path / "a.pt")
    assert select_facts(read_fact(formats.read(str(tmp_path / "a.pt")).tensors[0])) == compute_expected_facts(dense)


def test_empty_tensor_has_empty_facts(store):
    assert read_fact(store(torch.empty(0, 3))) == Facts()


# --- constant tensors, digests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex128], ids=str)
@pytest.mark.parametrize("differing_index", [None, 0, 1, 150, 299])
def test_tensor_with_one_differing_element_is_not_constant(store, kernel, small, dtype, differing_index):
    """A single differing element, at any index, makes the tensor not constant."""
    tensor = torch.full((300,), 3).to(dtype)
    if differing_index is not None:
        tensor[differing_index] = 4
    element = tensor[0].reshape(1).view(torch.uint8).numpy().tobytes()
    assert read_fact(store(tensor)).only == (element if differing_index is None else None)


def test_tensor_with_zeros_of_both_signs_is_not_constant(store, kernel):
    """Bits are compared: -0.0 is not 0.0, and NaNs with different bits are different."""
    assert read_fact(store(torch.tensor([0.0, -0.0]))).only is None


def test_digest_depends_on_every_bit_and_its_position(store, kernel, small):
    """A flipped bit, two swapped elements, or two swapped blocks give another digest."""
    tensor = torch.arange(300, dtype=torch.int32)
    changed = [tensor]
    for n in (0, 17, 299):
        changed.append(tensor.clone())
        changed[-1][n] ^= 1 << 20
    for a, b in ((0, 1), (5, 6), (10, 200)):
        changed.append(tensor.clone())
        changed[-1][[a, b]] = changed[-1][[b, a]]
    changed.append(torch.cat([tensor[16:32], tensor[:16], tensor[32:]]))
    assert len({read_fact(store(variant)).digest for variant in changed}) == len(changed)


@needs_kernel
@given(st.binary(max_size=5000))
def test_both_kernels_compute_the_same_digest(content):
    """The C kernel and numpy agree for any bytes."""
    raw = np.frombuffer(content, np.uint8)
    assert facts_kernel._native.digest(raw) == facts_kernel._hash_block(raw)


@needs_kernel
@given(st.integers(0, 6000), st.integers(0, 2**32))
def test_both_kernels_count_the_same(n, seed):
    """The C kernel and numpy agree for floats and codes of any bits and length."""
    raw = np.random.default_rng(seed).integers(0, 256, 8 * n).astype(np.uint8)
    counts = np.zeros(256, np.int64)
    Decoder().count_codes(raw, counts)
    assert (np.frombuffer(facts_kernel._native.codes(raw), np.int64) == counts).all()
    for signed, infinity, normal in facts_kernel.FLOAT_LAYOUTS.values():
        some = raw.view(signed)
        actual, expected = (
            facts_kernel._native.floats(some, some.itemsize, infinity, normal),
            facts_kernel._count_floats(some, infinity, normal),
        )
        assert actual[:5] == expected[:5]
        assert actual[0] + actual[1] == some.size or actual == expected


@needs_kernel
def test_kernel_refuses_blocks_that_are_not_whole_floats():
    """Half an element, or a size of no float type, is an error and not a count."""
    for block, size in ((b"123", 2), (b"123", 3), (b"", 0)):
        with pytest.raises(ValueError, match="not a block of floats"):
            facts_kernel._native.floats(block, size, 1, 1)


# --- in pieces -------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 400), st.randoms(use_true_random=False), st.sampled_from([torch.float32, torch.float16, torch.int64])
)
def test_facts_of_blocks_merge_in_any_order(n, shuffled: random.Random, dtype):
    """The facts of the whole tensor do not depend on the order in which its blocks are merged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts_kernel, "BLOCK_BYTES", 64)
        items = (
            draw_any_bits(dtype, max(n, 20), seed=n).view(torch.int64 if dtype.itemsize == 8 else torch.int16).numpy()
        )
        name, per_block = str(dtype).removeprefix("torch."), 64 // dtype.itemsize
        items = items.view({"float32": "f4", "float16": "u2", "int64": "i8"}[name])
        blocks = [
            facts_kernel.scan_stored(items[start : start + per_block], name, start // per_block, Decoder())
            for start in range(0, items.size, per_block)
        ]
        whole = Facts()
        for block in blocks:
            whole = whole.merge(block)
        shuffled.shuffle(blocks)
        while len(blocks) > 1:
            block = blocks.pop(shuffled.randrange(len(blocks)))
            at = shuffled.randrange(len(blocks))
            blocks[at] = blocks[at].merge(block)
        assert blocks == [whole]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8], ids=str)
def test_number_of_tasks_does_not_change_the_facts(store, monkeypatch, dtype):
    """A tensor read in one task or in many has the same facts, because the type alone decides where blocks begin."""
    info = store(draw_any_bits(torch.float32, 3000).view(dtype))
    monkeypatch.setattr(facts_kernel, "BLOCK_BYTES", 64)
    whole = read_fact(info)
    monkeypatch.setattr(audit_facts, "TASK_BYTES", 256)
    assert len(list(audit_facts._build_tasks(0, "w", info.data))) > 10
    assert read_fact(info) == whole


def test_every_format_gives_the_same_facts(tmp_path, monkeypatch, kernel):
    """A tensor of several tasks is stored plainly, in its own archive, deflated, or split among ranks."""
    values = draw_any_bits(torch.float32, 2000)
    dcp.save({"w": values}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    np.savez_compressed(tmp_path / "a.npz", w=values.numpy())
    zero.write(tmp_path / "zero", 3, [{"w": values}], moments=False)
    torch.save({"w": values}, tmp_path / "a.pt")
    torch.save({"w": values}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file({"w": values}, tmp_path / "a.safetensors")
    monkeypatch.setattr(facts_kernel, "BLOCK_BYTES", 64)
    plain = read_fact(formats.read(str(tmp_path / "a.pt")).tensors[0])
    assert select_facts(plain) == compute_expected_facts(values)
    monkeypatch.setattr(audit_facts, "TASK_BYTES", 256)
    for name in ("dcp", "a.npz", "zero", "legacy.pt", "a.safetensors"):
        assert read_fact(formats.read(str(tmp_path / name)).tensors[0]) == plain, name


def test_two_processes_compute_the_same_facts_as_one(store, monkeypatch):
    """Two processes compute the same facts as a single process."""
    monkeypatch.setattr(audit_facts.pool, "MIN_BYTES_FOR_WORKERS", 0)
    monkeypatch.setattr(audit_facts.pool, "MIN_BATCH_BYTES", 1)
    infos = [store(draw_any_bits(torch.float32, 1000, seed=seed)) for seed in range(5)]
    assert audit_facts.read_facts(infos, jobs=2) == audit_facts.read_facts(infos, jobs=1)


def test_storage_of_tied_tensors_is_read_once(store):
    """Tied tensors share their facts, and the reported bytes count the storage once."""
    info, read = store(torch.randn(100)), []
    first, second = audit_facts.read_facts(
        [info, replace(info, fqn="tied")], progress=lambda name, size: read.append(size)
    )
    assert first == second
    assert read == [400]


# --- unreadable values ------------------------------------------------------------------------------------------------


def test_a_type_without_numbers_says_so(tmp_path):
    """bits8 is not a number: the result has a reason and no facts, but still a digest of the bytes."""
    (tmp_path / "a").write_bytes(bytes(range(64)))
    actual = read_fact(build_row(TensorData(ByteRange(str(tmp_path / "a"), 0, 64), "bits8", (64,))))
    assert "cannot read bits8 elements as numbers" in actual.reason
    assert actual.digest
    assert not actual.damaged


def test_a_type_that_is_not_known_says_so(tmp_path):
    """The reason names the type that this version does not know."""
    actual = read_fact(build_row(TensorData(ByteRange(str(tmp_path / "a"), 0, 64), "float3_e1m1", (64,))))
    assert "float3_e1m1" in actual.reason


def test_a_quantized_tensor_without_its_scale_says_so(store):
    info = store(torch.quantize_per_tensor(torch.randn(10), 0.1, 0, torch.qint8))
    assert read_fact(replace(info, data=replace(info.data, quantizer=None))).reason == (
        "qint8 elements have no recorded scale, so statecli cannot convert them to numbers"
    )


def test_only_the_tensor_of_a_truncated_file_is_damaged(store):
    """The tensor of the truncated file is damaged, in one line with the name; the other tensor is not."""
    intact, truncated = store(torch.randn(100)), store(torch.randn(100))
    with open(truncated.data.storage.path, "r+b") as file:
        file.truncate(50)
    first, second = audit_facts.read_facts([intact, replace(truncated, fqn="cut")])
    assert first.reason is None
    assert second.damaged
    assert "cut" in second.reason
    assert "\n" not in second.reason


def test_facts_of_a_file_that_changes_during_the_run_are_discarded(store, monkeypatch):
    """Facts of a file that changed during the run are discarded."""
    info = store(torch.randn(100))
    monkeypatch.setattr(audit_facts, "find_changed", lambda _: [info.data.storage.path])
    assert "changed while statecli read it" in read_fact(info).reason


def test_windows_that_overlap_without_end_are_not_read(tmp_path):
    """A few bytes that claim to be 10 ** 12 elements are not read, and the result gives the reason."""
    (tmp_path / "a").write_bytes(bytes(8_000_008))
    shape, strides = (1_000_000, 1_000_001), (1, 1)
    actual = read_fact(
        build_row(TensorData(ByteRange(str(tmp_path / "a"), 0, 8_000_008), "float32", shape, 0, strides))
    )
    assert "repeats" in actual.reason


def test_meta_has_no_values():
    """The result gives the reason: the tensor has no data."""
    assert "meta" in read_fact(TensorInfo("w", "float32", (3,), 3, 12, device="meta")).reason


def test_tensors_with_equal_short_digests_are_distinguished(store, monkeypatch):
    """If two tensors have the same short digest by accident, SHA-256 distinguishes them; copies still match."""
    monkeypatch.setattr(facts_kernel, "mix_bits", lambda _: 7)
    a, b, c = store(torch.arange(9)), store(torch.arange(9) + 1), store(torch.arange(9))
    first, second, third = audit_facts.read_facts([a, b, c])
    assert first.digest == third.digest != second.digest


# --- formats ---------------------------------------------------------------------------------------------------------
