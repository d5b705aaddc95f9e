"""Comparison of values, checked against numpy in float64 for every element type and layout."""

from __future__ import annotations

import math
import os
from contextlib import closing

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from statecli import formats  # noqa: E402
from statecli.core.errors import ChecksumMismatch, MalformedError, UnreadableError  # noqa: E402
from statecli.core.model_state import ByteRange, Quantizer, TensorData, TensorInfo  # noqa: E402
from statecli.values import compare, compare_task, gpu_kernel, kernels, pair_plan  # noqa: E402
from statecli.values.compare import compare_pairs  # noqa: E402
from statecli.values.delta import CompareOptions, Delta  # noqa: E402
from statecli.values.elements import Decoder  # noqa: E402
from statecli.values.fingerprints import compute_fingerprints  # noqa: E402
from statecli.values.histogram import compute_histograms  # noqa: E402
from statecli.values.pair_plan import Pair  # noqa: E402

from .conftest import save_rows  # noqa: E402

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
COMPLEX = ["complex128", "complex64", "complex32"]


@pytest.fixture
def pair_states(tmp_path):
    """Save two dicts of tensors as `.pt` and return their pairs by name."""

    def pair(before, after, suffixes=("pt", "pt")):
        paths = tmp_path / f"a.{suffixes[0]}", tmp_path / f"b.{suffixes[1]}"
        return list(map(Pair, save_rows(paths[0], before), save_rows(paths[1], after)))

    return pair


def random_tensor(dtype, n, seed):
    numbers = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, (n,), generator=numbers).bool()
    if dtype in INTEGERS:
        low = 0 if dtype.startswith("u") else -100
        return torch.randint(low, 100, (n,), generator=numbers).to(getattr(torch, dtype))
    if dtype in COMPLEX:
        return torch.randn(n, dtype=torch.complex128, generator=numbers).to(getattr(torch, dtype))
    return torch.randn(n, dtype=torch.float64, generator=numbers).to(getattr(torch, dtype))


def oracle(before, after):
    """Return the expected delta, computed by numpy in float64."""
    wide = torch.complex128 if before.is_complex() or after.is_complex() else torch.float64
    a, b = (t.to(torch.complex64).to(wide) if t.dtype == torch.complex32 else t.to(wide) for t in (before, after))
    a, b = a.reshape(-1).numpy(), b.reshape(-1).numpy()
    gap = np.abs(b - a)
    norm_a, norm_b = np.linalg.norm(a), np.linalg.norm(b)
    return {
        "elements": a.size,
        "changed": int(np.count_nonzero(a != b)),
        "max_abs": gap.max(),
        "mean_abs": gap.mean(),
        "l2": np.linalg.norm(gap),
        "relative_l2": np.linalg.norm(gap) / norm_a if norm_a else None,
        "cosine": np.vdot(a, b).real / (norm_a * norm_b) if norm_a and norm_b else None,
    }


def check_delta(delta, expected):
    assert isinstance(delta, Delta), delta
    for name, value in expected.items():
        got = getattr(delta, name)
        assert got is value is None or got == pytest.approx(value, rel=1e-6, abs=1e-9 if name == "cosine" else 0), name


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX)
@pytest.mark.parametrize("n", [7, 70_000])
def test_every_type_agrees_with_numpy(pair_states, dtype, n):
    """Counts are equal and sums within 1e-6, for any type and any number of blocks."""
    before, after = random_tensor(dtype, n, 0), random_tensor(dtype, n, 1)
    after[: n // 3] = before[: n // 3]
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    expected = oracle(before, after)
    if not expected["changed"]:
        expected = {"changed": 0}
    check_delta(delta, expected)


@pytest.mark.parametrize("first", FLOATS + INTEGERS)
@pytest.mark.parametrize("second", ["float32", "bfloat16", "float64", "int64"])
def test_types_are_compared_by_value(pair_states, first, second):
    """An export to another type differs where rounding changed a value, and nowhere else."""
    before = random_tensor(first, 5000, 3)
    after = before.to(torch.float64).to(getattr(torch, second))
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    expected = oracle(before, after)
    check_delta(delta, expected if expected["changed"] else {"changed": 0})


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX)
def test_index_of_a_single_changed_element_is_reported(pair_states, dtype):
    """For a single change among 200,000 equal elements, the count is 1 and the index is right."""
    before = random_tensor(dtype, 200_000, 5).reshape(400, 500)
    after = before.clone()
    after[311, 77] = 1 if before[311, 77].to(torch.complex128) != 1 else 0
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    assert (delta.changed, delta.first) == (1, (311, 77))
    check_delta(delta, oracle(before, after))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t[:, 3],
        lambda t: t[5:6].expand(64, 64),
        lambda t: t.reshape(4, 16, 8, 8).permute(2, 0, 3, 1),
    ],
    ids=["transposed", "sliced", "column", "expanded", "permuted"],
)
@pytest.mark.parametrize("is_after_strided", [True, False])
def test_strided_views_are_compared_in_element_order(pair_states, view, is_after_strided):
    """A view saved with its strides is compared in the order of its elements."""
    base = torch.randn(64, 64)
    changed = base.clone()
    changed[5, 3] += 1
    before, after = view(base), view(changed)
    (delta,) = compare_pairs(
        pair_states({"t": before}, {"t": after if is_after_strided else after.contiguous()}), CompareOptions()
    )
    different = (before != after).nonzero()
    assert (delta.changed, delta.first) == (len(different), tuple(different[0].tolist()) if len(different) else None)
    if len(different):
        check_delta(delta, oracle(before, after))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "complex128", "float16"])
def test_nan_equals_nan_and_bitwise_distinguishes_zeros(pair_states, dtype, strided):
    """NaN equals NaN at the same index, and -0.0 equals 0.0; --bitwise treats the zeros as different."""
    kind = getattr(torch, dtype)
    before = torch.tensor([[math.nan, 0.0, 1.0], [2.0, math.inf, 3.0]]).to(kind)
    after = torch.tensor([[math.nan, -0.0, 1.0], [2.0, math.inf, 3.0]]).to(kind)
    if strided:
        before, after = before.t(), after.t()
    pairs = pair_states({"t": before}, {"t": after})
    assert compare_pairs(pairs, CompareOptions())[0].changed == 0
    bitwise = compare_pairs(pairs, CompareOptions(bitwise=True))[0]
    assert (bitwise.changed, bitwise.first) == (1, (1, 0) if strided else (0, 1))
    assert bitwise.nan_before == bitwise.nan_after == 1
    assert bitwise.inf_before == bitwise.inf_after == 1


def test_nan_and_infinities_are_left_out_of_the_sums(pair_states):
    """NaN and infinities on one side are changes; the sums cover only finite elements."""
    before = torch.tensor([1.0, 2.0, math.nan, math.inf, 5.0])
    after = torch.tensor([1.5, math.nan, 3.0, -math.inf, 5.0])
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    assert (delta.changed, delta.left_out, delta.first) == (4, 3, (0,))
    assert (delta.nan_before, delta.nan_after, delta.inf_before, delta.inf_after) == (1, 1, 1, 1)
    assert (delta.max_abs, delta.mean_abs, delta.l2) == (0.5, 0.25, 0.5)


def test_tensor_without_finite_pairs_has_a_reason(pair_states):
    """If each element is NaN or Inf on one of the sides, there are no sums, and the reason is given."""
    (delta,) = compare_pairs(pair_states({"t": torch.tensor([math.nan])}, {"t": torch.tensor([1.0])}), CompareOptions())
    assert (delta.changed, delta.max_abs, delta.l2, delta.cosine) == (1, None, None, None)
    assert "the old or the new value is NaN or Inf" in delta.reason


@pytest.mark.parametrize("size", [1e300, 1e-300, 1e-200, 1e160])
def test_norms_of_huge_and_tiny_values_are_exact(pair_states, size):
    """The squares of the values are beyond float64; the norms are not."""
    before = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) * size
    after = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64) * size
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    assert delta.l2 == pytest.approx(size, rel=1e-9)
    assert delta.relative_l2 == pytest.approx(1 / math.sqrt(30), rel=1e-9)
    assert delta.cosine == pytest.approx(34 / math.sqrt(30 * 39), rel=1e-9)


def test_difference_beyond_float64_is_null_with_a_reason(pair_states):
    """max |Δ| of 1.8e308 + 1.8e308 is null with a reason, not infinite and not zero."""
    top = torch.finfo(torch.float64).max
    pairs = pair_states(
        {"t": torch.tensor([-top], dtype=torch.float64)}, {"t": torch.tensor([top], dtype=torch.float64)}
    )
    (delta,) = compare_pairs(pairs, CompareOptions())
    assert (delta.changed, delta.max_abs, delta.l2) == (1, None, None)
    assert "too large for float64" in delta.reason


def test_large_integers_are_compared_exactly(pair_states):
    """2 ** 62 + 1 differs from 2 ** 62, although both have the same float64."""
    before = torch.tensor([2**62, -(2**63), 5])
    after = torch.tensor([2**62 + 1, 2**63 - 1, 5])
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    assert delta.changed == 2
    assert delta.max_abs == float(2**64 - 1)
    (delta,) = compare_pairs(pair_states({"t": before[:1]}, {"t": after[:1]}), CompareOptions())
    assert (delta.changed, delta.max_abs) == (1, 1.0)


@pytest.mark.parametrize(
    "options", [CompareOptions(atol=0.1), CompareOptions(rtol=0.05), CompareOptions(atol=0.01, rtol=0.01)]
)
def test_tolerance_is_that_of_isclose(pair_states, options):
    """An element counts as changed if torch.isclose(after, before) is False."""
    before = torch.randn(3000, dtype=torch.float64)
    after = before + torch.randn(3000, dtype=torch.float64) * 0.05
    before[7], after[7], before[8], after[8] = math.inf, math.inf, math.nan, math.nan
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), options)
    close = torch.isclose(after, before, atol=options.atol, rtol=options.rtol, equal_nan=True)
    assert delta.changed == int((~close).sum())


@pytest.mark.parametrize("tensor", [torch.tensor(1.5), torch.empty(0, 3), torch.ones(1, 1, 1)])
def test_scalars_and_empty_tensors_are_compared(pair_states, tensor):
    """A scalar has the index (), and an empty tensor cannot differ."""
    assert compare_pairs(pair_states({"t": tensor}, {"t": tensor}), CompareOptions())[0].changed == 0
    if tensor.numel():
        (delta,) = compare_pairs(pair_states({"t": tensor}, {"t": tensor + 1}), CompareOptions())
        assert (delta.changed, delta.first) == (1, (0,) * tensor.dim())


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_compared_by_value(pair_states):
    """Different codes with a different scale may represent the same values."""
    values = torch.tensor([0.5, 1.0, -1.0])
    half = torch.quantize_per_tensor(values, 0.5, 0, torch.qint8)
    quarter = torch.quantize_per_tensor(values, 0.25, 0, torch.qint8)
    other = torch.quantize_per_tensor(values + 0.5, 0.25, 0, torch.qint8)
    assert compare_pairs(pair_states({"t": half}, {"t": quarter}), CompareOptions())[0].changed == 0
    (delta,) = compare_pairs(pair_states({"t": half}, {"t": other}), CompareOptions())
    assert (delta.changed, delta.max_abs) == (3, 0.5)


def test_the_number_of_workers_makes_no_difference(pair_states, monkeypatch):
    """Tasks are divided and their results added in the same way for any number of workers."""
    before = {f"t{i}": torch.randn(300_000) for i in range(4)}
    after = {name: t + torch.randn(1) * (torch.rand(300_000) > 0.5) for name, t in before.items()}
    pairs = pair_states(before, after)
    serial_deltas = compare_pairs(pairs, CompareOptions(), jobs=1)
    monkeypatch.setattr(compare.pool, "MIN_BYTES_FOR_WORKERS", 0)
    monkeypatch.setattr(compare.pool, "MIN_BATCH_BYTES", 1 << 20)
    assert compare_pairs(pairs, CompareOptions(), jobs=2) == serial_deltas
    assert compare_pairs(pairs, CompareOptions(), jobs=3) == serial_deltas


@pytest.mark.parametrize("block", [256, 1000, 4096])
def test_the_size_of_blocks_makes_no_difference(pair_states, monkeypatch, block):
    """Counts are equal, sums within 1e-9."""
    before = torch.randn(20_000, dtype=torch.float64)
    after = before * (1 + (torch.rand(20_000) > 0.9) * 0.1)
    pairs = pair_states({"t": before}, {"t": after})
    (expected,) = compare_pairs(pairs, CompareOptions())
    monkeypatch.setattr(compare_task.Worker, "block", block)
    monkeypatch.setattr(pair_plan, "TASK_ELEMENTS", 3 * block)
    (pair,) = compare_pairs(pairs, CompareOptions())
    assert (pair.changed, pair.first, pair.max_abs) == (expected.changed, expected.first, expected.max_abs)
    for name in ("mean_abs", "l2", "relative_l2", "cosine"):
        assert getattr(pair, name) == pytest.approx(getattr(expected, name), rel=1e-9)


def test_equal_bytes_with_a_wrong_checksum_in_an_archive_are_an_error(tmp_path):
    """The sums of a distributed checkpoint are in the archives of its tensors, and looked up there."""
    values = torch.arange(1.0, 9.0)
    for name, tensor in (("saved", values), ("same", values), ("damaged", values * 2)):
        dcp.save({"t": tensor}, checkpoint_id=tmp_path / name, no_dist=True)
    (file,) = (tmp_path / "damaged").glob("*.distcp")
    file.write_bytes(file.read_bytes().replace((values * 2).numpy().tobytes(), values.numpy().tobytes()))
    saved, same, damaged = (formats.read(str(tmp_path / name)).tensors[0] for name in ("saved", "same", "damaged"))
    assert compare_pairs([Pair(saved, same)], CompareOptions())[0].changed == 0
    (pair,) = compare_pairs([Pair(saved, damaged)], CompareOptions())
    assert isinstance(pair, ChecksumMismatch)
    assert pair.place.path == str(file)


def test_truncated_file_fails_only_its_pair(pair_states):
    """The error of a truncated file names the file and the tensor in one line, and the other pairs are compared."""
    pairs = pair_states(
        {"a": torch.ones(4), "t": torch.ones(99_999)},
        {"a": torch.ones(4), "t": torch.zeros(99_999)},
        ("safetensors", "safetensors"),
    )
    path = pairs[1].after.data.storage.path
    with open(path, "r+b") as file:
        file.truncate(pairs[1].after.data.storage.offset + 1000)
    actual = dict(zip(("a", "t"), compare_pairs(pairs, CompareOptions()), strict=True))
    assert isinstance(actual["t"], MalformedError)
    assert path in str(actual["t"])
    assert "t: ends at byte" in str(actual["t"])
    assert actual["a"].changed == 0


def test_result_of_a_file_that_changes_during_the_run_is_an_error(pair_states, monkeypatch):
    """If the file's modification time changes during the run, its result is discarded."""
    (pair,) = pair_states({"t": torch.ones(4)}, {"t": torch.ones(4)})
    path = pair.after.data.storage.path
    original = compare._run_tasks

    def change_mtime(*arguments, **options):
        os.utime(path, ns=(1, 1))
        return original(*arguments, **options)

    monkeypatch.setattr(compare, "_run_tasks", change_mtime)
    (actual_pair,) = compare_pairs([pair], CompareOptions())
    assert isinstance(actual_pair, UnreadableError)
    assert "changed while statecli read it" in str(actual_pair)


def test_an_error_of_a_file_names_the_tensor(pair_states):
    """The error of a file that cannot be read again afterwards has the file, the tensor and the reason."""
    (pair,) = pair_states({"t": torch.ones(4)}, {"t": torch.ones(4)})
    path = pair.after.data.storage.path
    error = compare._find_error(pair, {path: UnreadableError("permission denied")})
    assert str(error) == f"{path}: t: permission denied"


def test_deleted_file_is_an_error_with_its_path(pair_states):
    (pair,) = pair_states({"t": torch.ones(4)}, {"t": torch.ones(4)})
    os.remove(pair.before.data.storage.path)
    (actual_pair,) = compare_pairs([pair], CompareOptions())
    path = pair.before.data.storage.path
    assert str(actual_pair) == f"{path}: cannot be opened: no such file or directory"


def test_huge_expanded_tensor_has_no_fingerprint(pair_states):
    """Reading 2 ** 62 elements for a hint would never end."""
    (pair,) = pair_states({"t": torch.ones(1).expand(2**62)}, {"t": torch.ones(1)})
    assert compute_fingerprints([pair.before]) == [None]


def test_histograms_count_every_difference(pair_states):
    """The counts are numpy's, and add up to the elements."""
    before, after = torch.randn(5000), torch.randn(5000)
    pairs = pair_states({"t": before}, {"t": after})
    ((edges, counts),) = compute_histograms(pairs, compare_pairs(pairs, CompareOptions()), bins=20)
    assert sum(counts) == 5000
    gap = np.clip((after.double() - before.double()).numpy(), edges[0], edges[-1])
    expected = np.histogram(gap, edges)[0]
    assert counts == tuple(expected.tolist())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e5m2", "int32", "complex64"])
def test_torch_kernel_agrees_with_the_numpy_result(pair_states, dtype):
    """The kernel of another device, run by torch on the CPU: equal counts, sums within 1e-6."""
    before, after = random_tensor(dtype, 70_000, 1), random_tensor(dtype, 70_000, 2)
    pairs = pair_states({"t": before}, {"t": after})
    (expected,) = compare_pairs(pairs, CompareOptions())
    tasks = pair_plan._plan_or_error(0, pairs[0], CompareOptions())
    with closing(gpu_kernel.DeviceWorker(CompareOptions(), torch.device("cpu"))) as worker:
        (result,) = worker.compare_all(tasks)
    delta = result.tally.to_delta((70_000,))
    assert (delta.changed, delta.first) == (expected.changed, expected.first)
    for name in ("max_abs", "mean_abs", "l2", "relative_l2", "cosine"):
        assert getattr(delta, name) == pytest.approx(getattr(expected, name), rel=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_kernel_agrees_with_the_cpu_result(pair_states):
    """A GPU gives equal counts, and sums within 1e-6."""
    before, after = torch.randn(1_000_000), torch.randn(1_000_000)
    pairs = pair_states({"t": before}, {"t": after})
    (expected,), (actual,) = compare_pairs(pairs, CompareOptions()), compare_pairs(pairs, CompareOptions(device="cuda"))
    assert (actual.changed, actual.first) == (expected.changed, expected.first)
    assert actual.l2 == pytest.approx(expected.l2, rel=1e-6)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_counts_and_sums_of_any_two_arrays_equal_numpy(tmp_path_factory, data):
    """Random sizes, values and places of NaN: counts and sums are numpy's."""
    n = data.draw(st.integers(1, 3000))
    seed = data.draw(st.integers(0, 2**32 - 1))
    scale = data.draw(st.sampled_from([1.0, 1e-20, 1e20, 1e-40, 1e38]))
    numbers = np.random.default_rng(seed)
    before = (torch.from_numpy(numbers.standard_normal(n)) * scale).float()
    after = torch.where(torch.from_numpy(numbers.random(n) < 0.5), before, before * 1.5)
    folder = tmp_path_factory.mktemp("any")
    sides = zip("ab", (before, after), strict=True)
    pair = Pair(*(save_rows(folder / f"{name}.safetensors", {"t": tensor})[0] for name, tensor in sides))
    (delta,) = compare_pairs([pair], CompareOptions())
    finite = torch.isfinite(before) & torch.isfinite(after)
    assert delta.changed == int((before != after).sum())
    if (before != after)[finite].any():
        expected = oracle(before[finite], after[finite])
        expected.pop("elements")
        expected["changed"] = delta.changed
        check_delta(delta, expected)


# --- bits that mean something else -----------------------------------------------------------------------------------


def quantize_codes(codes, scale, zero=0):
    return torch._make_per_tensor_quantized_tensor(codes, scale, zero)


def per_channel(codes, scales):
    return torch._make_per_channel_quantized_tensor(codes, torch.tensor(scales), torch.zeros(2, dtype=torch.long), 0)


CODES = torch.tensor([[1, 2, 0], [3, -4, 5]], dtype=torch.int8)
ROOT = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, 0.0], [5.0, -6.0]]))
LAZY = {
    "conjugated": (ROOT, ROOT.conj(), 3),  # 0.0 and -0.0 too
    "conjugated and resolved": (ROOT.conj(), ROOT.conj().resolve_conj(), 3),
    "negated": (ROOT.imag.contiguous(), torch._neg_view(ROOT.imag.contiguous()), 3),
    "scale": (quantize_codes(CODES, 0.1), quantize_codes(CODES, 0.2), 5),
    "zero point": (quantize_codes(CODES, 0.1), quantize_codes(CODES, 0.1, 1), 6),
    "one channel's scale": (per_channel(CODES, [0.1, 0.2]), per_channel(CODES, [0.1, 0.3]), 3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LAZY)
def test_bitwise_resolves_conjugate_and_negative_views(pair_states, case):
    """A conjugated or negated view differs by its bits or by its values, and equals itself."""
    before, after, count = LAZY[case]
    assert compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions(bitwise=True))[0].changed == count
    assert compare_pairs(pair_states({"t": after}, {"t": after}), CompareOptions(bitwise=True))[0].changed == 0


# --- sparse ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_bitwise_distinguishes_zeros_of_sparse_values(pair_states):
    """--bitwise treats -0.0 and 0.0 in sparse values as different; otherwise they are equal."""
    first, second = (torch.sparse_coo_tensor([[0, 2]], [zero, 1.0], (4,)).coalesce() for zero in (0.0, -0.0))
    assert compare_pairs(pair_states({"t": first}, {"t": second}), CompareOptions())[0].changed == 0
    (delta,) = compare_pairs(pair_states({"t": first}, {"t": second}), CompareOptions(bitwise=True))
    assert (delta.changed, delta.first) == (1, (0,))


# --- numbers of two kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complex_", [torch.complex64, torch.complex128])
def test_large_integer_is_compared_exactly_with_a_complex_value(pair_states, complex_):
    """An integer equals a complex value only if the real part is exactly the integer and the imaginary part is 0."""
    before = torch.tensor([2**53 + 1, 2**53, 7, 7, -(2**63), 2**63 - 1])
    after = torch.tensor([2**53, 2**53, 7, 7 + 1j, -(2**63), 2**63]).to(complex_)
    for pair in (({"t": before}, {"t": after}), ({"t": after}, {"t": before})):
        (delta,) = compare_pairs(pair_states(*pair), CompareOptions())
        assert (delta.changed, delta.first, delta.max_abs) == (3, (0,), 1.0)


@example(whole=[9_999_999_999_999_017], nudge=1, dtype=np.float64)
@example(whole=[2**53 + 1, 2**53, 7], nudge=0, dtype=np.float64)
@example(whole=[2**53 + 1, 2**64 - 1], nudge=-2, dtype=np.complex128)
@given(
    whole=st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=6),
    nudge=st.integers(-(2**54), 2**54) | st.integers(-2, 2),
    dtype=st.sampled_from([np.float64, np.complex128, np.int64, np.uint64]),
)
def test_integers_are_compared_exactly_with_any_type(whole, nudge, dtype):
    """Changed elements and differences are checked against Python's exact integers."""
    low, high = (-(2**63), 2**63 - 1) if min(whole) < 0 else (0, 2**64 - 1)
    exact = [min(max(n, low), high) for n in whole]
    before = np.array(exact, np.int64 if low else np.uint64)
    near = [n + nudge for n in exact]
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        near = [min(max(n, int(info.min)), int(info.max)) for n in near]
    after = np.array(near, dtype)
    others = [int(n.real) if np.dtype(dtype).kind == "c" else int(n) for n in after]
    gaps = [abs(first - second) for first, second in zip(exact, others, strict=True)]
    values = kernels.tally_values(before, after, CompareOptions(), Decoder())
    assert values.changed == sum(gap > 0 for gap in gaps)
    delta = values.to_delta((len(exact),))
    figures = (max(gaps), sum(gaps) / len(gaps), math.sqrt(sum(gap**2 for gap in gaps)))
    assert (delta.max_abs, delta.mean_abs, delta.l2) == pytest.approx(figures, rel=1e-14)


def test_difference_of_uint64_and_int64_is_exact(pair_states):
    """The two values are 1.5 * 2 ** 64 apart, more than a 64-bit integer can represent."""
    before, after = torch.tensor([2**64 - 1], dtype=torch.uint64), torch.tensor([-(2**63)])
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    assert delta.max_abs == delta.mean_abs == delta.l2 == 1.5 * 2.0**64
    assert delta.relative_l2 == 1.5


@pytest.mark.parametrize("options", [CompareOptions(), CompareOptions(atol=1.0), CompareOptions(bitwise=True)])
def test_complex_values_are_compared_part_by_part(pair_states, options):
    """nan+1j is not nan+2j, whichever part is NaN; NaN equals NaN part by part."""
    nan, inf = math.nan, math.inf
    pairs = [
        [nan, 1, nan, 2],
        [1, nan, 3, nan],
        [nan, 1, nan, 1],
        [nan, nan, nan, nan],
        [nan, 1, 1, nan],
        [inf, 1, inf, 2],
    ]
    parts = torch.tensor(pairs, dtype=torch.float64)
    before, after = (torch.view_as_complex(parts[:, side : side + 2].contiguous()) for side in (0, 2))
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), options)
    assert (delta.changed, delta.first) == (4, (0,))


# --- more or less than one number an element -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [CompareOptions(), CompareOptions(bitwise=True), CompareOptions(atol=0.1), CompareOptions(rtol=0.01, atol=0.01)],
)
@pytest.mark.parametrize("view", [lambda t: t, torch.t], ids=["in order", "transposed"])
def test_float4_counts_elements(pair_states, options, view):
    """An element of float4 is a byte of two values; a change of either or both counts once."""
    codes = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    other = codes.clone()
    other[3, 5] += 0x11
    before, after = (view(t.view(torch.float4_e2m1fn_x2)) for t in (codes, other))
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), options)
    assert (delta.elements, delta.changed) == (24, 1)
    assert delta.first == ((3, 5) if before.shape == (4, 6) else (5, 3))
    assert compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions(atol=100))[0].changed == 0


@pytest.mark.parametrize("dtype", ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"])
@pytest.mark.parametrize("view", [lambda t: t, torch.t], ids=["in order", "transposed"])
@pytest.mark.parametrize("options", [CompareOptions(), CompareOptions(bitwise=True), CompareOptions(atol=100)])
def test_bits_types_have_counts_and_no_statistics(pair_states, dtype, view, options):
    """For elements that are not numbers, only changed elements are reported, without statistics."""
    codes = torch.arange(24, dtype=torch.int16 if dtype == "bits16" else torch.uint8).reshape(4, 6)
    other = codes.clone()
    other[1, 2] += 1
    before, after = (view(t.view(getattr(torch, dtype))) for t in (codes, other))
    assert compare_pairs(pair_states({"t": before}, {"t": before}), options)[0].changed == 0
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), options)
    assert (delta.elements, delta.changed) == (24, 1)
    assert delta.first == ((1, 2) if before.shape == (4, 6) else (2, 1))
    assert (delta.max_abs, delta.mean_abs, delta.l2, delta.cosine) == (None,) * 4
    assert delta.reason == f"statecli cannot read {dtype} elements as numbers"


@pytest.mark.parametrize("dtype", ["quint4x2", "quint2x4"])
@pytest.mark.parametrize("scaled", [True, False])
def test_packed_quantized_elements_are_compared_singly(tmp_path, dtype, scaled):
    """Elements that share a byte are compared singly, with or without a scale, also across rows of odd length."""
    per = {"quint4x2": 2, "quint2x4": 4}[dtype]
    pair = []
    for name, codes in (("a", [0x21, 0x43, 0x65, 0x07]), ("b", [0x21, 0x43, 0x66, 0x07])):
        (tmp_path / name).write_bytes(bytes(codes))
        quantizer = Quantizer("torch.per_tensor_affine", 0.5, 0) if scaled else None
        where = ByteRange(str(tmp_path / name), 0, 4)
        shape = (1, 4 * per - 1)
        data = TensorData(where, dtype, shape, quantizer=quantizer)
        pair.append(TensorInfo("t", dtype, shape, shape[1], 4, data=data))
    for options in (CompareOptions(), CompareOptions(bitwise=True)):
        (delta,) = compare_pairs([Pair(*pair)], options)
        codes = [(0x66 >> shift & 15, 0x65 >> shift & 15) for shift in (0, 4)] if per == 2 else [(2, 1), (1, 1)]
        assert delta.changed == sum(first != second for first, second in codes)
        assert delta.first == (0, 2 * per)
        assert delta.max_abs == (0.5 if scaled else None)
        assert compare_pairs([Pair(pair[0], pair[0])], options)[0].changed == 0


# --- tensors that repeat themselves ----------------------------------------------------------------------------------


def test_an_expanded_tensor_is_compared_once(pair_states):
    """25 million elements share one stored value: all of them are equal, or all of them differ."""
    first, second = (torch.full((1,), value).expand(5000, 5000) for value in (1.0, 3.0))
    assert compare_pairs(pair_states({"t": first}, {"t": first}), CompareOptions())[0].changed == 0
    (delta,) = compare_pairs(pair_states({"t": first}, {"t": second}), CompareOptions())
    assert (delta.elements, delta.changed, delta.first) == (25_000_000, 25_000_000, (0, 0))
    assert (delta.max_abs, delta.mean_abs, delta.l2, delta.relative_l2, delta.cosine) == (2.0, 2.0, 10_000.0, 2.0, 1.0)


def test_tensor_of_2_to_the_62_repeated_elements_is_compared(pair_states):
    """2 ** 62 elements are compared by the stored value, and by the strides if the tensor has two stored values."""
    shape = (2**31, 2, 2**30)
    first, second = (torch.full((1, 1, 1), value).expand(shape) for value in (1.0, 3.0))
    (delta,) = compare_pairs(pair_states({"t": first}, {"t": second}), CompareOptions())
    assert (delta.elements, delta.changed, delta.first, delta.max_abs) == (2**62, 2**62, (0, 0, 0), 2.0)
    rows = (torch.tensor([1.0, value]).view(1, 2, 1).expand(shape) for value in (1.0, 3.0))
    (delta,) = compare_pairs(pair_states(*({"t": row} for row in rows)), CompareOptions())
    assert (delta.changed, delta.first, delta.mean_abs) == (2**61, (0, 1, 0), 1.0)


def test_expanded_tensor_has_the_statistics_of_its_copy(pair_states):
    """An expanded tensor has the same statistics as its contiguous copy."""
    before = torch.randn(7, 1, 5, dtype=torch.float64)
    after = before.clone()
    after[3:, 0, 2], before[6, 0, 4] = 1.0, math.nan
    tensors = [(t.expand(7, 4, 5), t.expand(7, 4, 5).contiguous()) for t in (before, after)]
    expanded, contiguous = (
        compare_pairs(pair_states({"t": tensors[0][n]}, {"t": tensors[1][n]}), CompareOptions())[0] for n in (0, 1)
    )
    assert expanded.first == contiguous.first == (3, 0, 2)
    for name in Delta.__struct_fields__:
        first, second = getattr(expanded, name), getattr(contiguous, name)
        assert first == (pytest.approx(second, rel=1e-12) if isinstance(second, float) else second), name


def test_expanded_side_is_compared_with_each_element(pair_states):
    """The expanded side is compared with each element of the other side."""
    before = torch.ones(1).expand(5000, 5000)
    after = before.contiguous()
    after[4321, 1234] = 2
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    assert (delta.changed, delta.first) == (1, (4321, 1234))


def test_quantized_tensor_equals_its_dequantized_tensor(pair_states):
    """The values of a quantized tensor are the values that torch dequantizes."""
    tensor = torch.quantize_per_tensor(torch.randn(50, 40), 0.0371, 3, torch.qint8)
    assert compare_pairs(pair_states({"t": tensor}, {"t": tensor.dequantize()}), CompareOptions())[0].changed == 0


def test_huge_overlapping_windows_are_equal_or_an_error(pair_states):
    """2 ** 32 elements in 4 kB: equal bytes are equal elements; with different bytes, the comparison is an error."""
    first, second = torch.zeros(1 << 10), torch.zeros(1 << 10)
    second[1000] = 1
    before, after = (t.as_strided((1 << 8,) * 4, (1, 1, 1, 1)) for t in (first, second))
    assert compare_pairs(pair_states({"t": before}, {"t": before}), CompareOptions()) == [Delta(elements=1 << 32)]
    (pair,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions())
    assert isinstance(pair, UnreadableError)
    assert "a.pt" in str(pair)
    assert "b.pt: t: the tensor repeats 1021 stored elements as 4294967296 elements" in str(pair)


@pytest.mark.parametrize("strides", [(0,), (0, 0, 0), (-1, 0), (9, 9)])
def test_impossible_strides_are_an_error_of_the_file(tmp_path, strides):
    """The pair has an error, whatever the other side."""
    (tmp_path / "a").write_bytes(bytes(100))
    where = ByteRange(str(tmp_path / "a"), 0, 100)
    datas = [TensorData(where, "float32", (3, 3), 0, side_strides) for side_strides in (strides, (0, 1))]
    for first, second in (datas, datas[::-1], datas[:1] * 2):
        pair = Pair(*(TensorInfo("t", "float32", (3, 3), 9, 36, data=data) for data in (first, second)))
        assert isinstance(compare_pairs([pair], CompareOptions())[0], MalformedError)


def test_changed_sign_of_a_zero_is_not_attributed_to_a_nan(pair_states):
    """The two zeros differ in their bits by a distance of 0; the NaN next to the zero did not change."""
    before, after = (torch.tensor([zero, math.nan, 1.0]) for zero in (0.0, -0.0))
    (delta,) = compare_pairs(pair_states({"t": before}, {"t": after}), CompareOptions(bitwise=True))
    assert (delta.changed, delta.first, delta.max_abs, delta.left_out, delta.reason) == (1, (0,), 0.0, 1, None)
