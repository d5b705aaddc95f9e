"""Values compared: against numpy in float64, for every element type, layout and way there."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from statecli import formats  # noqa: E402
from statecli.diff.result import Delta, How  # noqa: E402
from statecli.errors import MalformedError, UnreadableError  # noqa: E402
from statecli.values import compare, on_device, run  # noqa: E402
from statecli.values.compare import NotCompared, Pair, compare_all, fingerprints  # noqa: E402
from statecli.values.histogram import histograms  # noqa: E402

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
COMPLEX = ["complex128", "complex64", "complex32"]


@pytest.fixture
def paired(tmp_path):
    """Two dicts of tensors saved as `.pt` -> pairs by name."""

    def pair(before, after, suffixes=("pt", "pt")):
        paths = [str(tmp_path / f"{side}.{suffix}") for side, suffix in zip(("a", "b"), suffixes, strict=True)]
        for path, tensors in zip(paths, (before, after), strict=True):
            torch.save(tensors, path) if path.endswith("pt") else save_file(tensors, path)
        states = [{t.fqn: t for t in formats.read(path).tensors} for path in paths]
        return [Pair(states[0][name], states[1][name]) for name in before]

    return pair


def made(dtype, n, seed):
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
    """The same in plain numpy float64."""
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


def agrees(delta, expected):
    assert isinstance(delta, Delta), delta
    for name, value in expected.items():
        got = getattr(delta, name)
        assert got is value is None or got == pytest.approx(value, rel=1e-6, abs=1e-9 if name == "cosine" else 0), name


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX)
@pytest.mark.parametrize("n", [1, 7, 1000, 70_000])
def test_every_type_agrees_with_numpy(paired, dtype, n):
    """Counts are equal, sums within 1e-6, whatever the type and however many blocks."""
    before, after = made(dtype, n, 0), made(dtype, n, 1)
    after[: n // 3] = before[: n // 3]
    (delta,) = compare_all(paired({"t": before}, {"t": after}), How())
    expected = oracle(before, after)
    if not expected["changed"]:
        expected = {"changed": 0}
    agrees(delta, expected)


@pytest.mark.parametrize("one", FLOATS + INTEGERS)
@pytest.mark.parametrize("other", ["float32", "bfloat16", "float64", "int64"])
def test_types_are_compared_by_value(paired, one, other):
    """An export to another type differs where rounding changed a value, and nowhere else."""
    before = made(one, 5000, 3)
    after = before.to(torch.float64).to(getattr(torch, other))
    (delta,) = compare_all(paired({"t": before}, {"t": after}), How())
    expected = oracle(before, after)
    agrees(delta, expected if expected["changed"] else {"changed": 0})


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + COMPLEX)
def test_one_element_is_found_where_it_is(paired, dtype):
    """A single change in the middle of 200,000 equal elements: one changed, and its index."""
    before = made(dtype, 200_000, 5).reshape(400, 500)
    after = before.clone()
    after[311, 77] = 1 if before[311, 77].to(torch.complex128) != 1 else 0
    (delta,) = compare_all(paired({"t": before}, {"t": after}), How())
    assert (delta.changed, delta.first) == (1, (311, 77))
    agrees(delta, oracle(before, after))


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
@pytest.mark.parametrize("both", [True, False])
def test_strides_do_not_matter(paired, view, both):
    """A view saved with its strides is compared in the order of its elements."""
    base = torch.randn(64, 64)
    changed = base.clone()
    changed[5, 3] += 1
    before, after = view(base), view(changed)
    (delta,) = compare_all(paired({"t": before}, {"t": after if both else after.contiguous()}), How())
    different = (before != after).nonzero()
    assert (delta.changed, delta.first) == (len(different), tuple(different[0].tolist()) if len(different) else None)
    if len(different):
        agrees(delta, oracle(before, after))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "complex128", "float16"])
def test_nan_zero_and_bits(paired, dtype, strided):
    """NaN equals NaN in its place, -0.0 equals 0.0; --bitwise tells the zeros apart."""
    kind = getattr(torch, dtype)
    before = torch.tensor([[math.nan, 0.0, 1.0], [2.0, math.inf, 3.0]]).to(kind)
    after = torch.tensor([[math.nan, -0.0, 1.0], [2.0, math.inf, 3.0]]).to(kind)
    if strided:
        before, after = before.t(), after.t()
    pairs = paired({"t": before}, {"t": after})
    assert compare_all(pairs, How())[0].changed == 0
    bitwise = compare_all(pairs, How(bitwise=True))[0]
    assert (bitwise.changed, bitwise.first) == (1, (1, 0) if strided else (0, 1))
    assert bitwise.nan_before == bitwise.nan_after == 1
    assert bitwise.inf_before == bitwise.inf_after == 1


def test_what_is_no_number_is_counted_and_left_out(paired):
    """NaN and infinities on one side are changes; the sums are those of the rest."""
    before = torch.tensor([1.0, 2.0, math.nan, math.inf, 5.0])
    after = torch.tensor([1.5, math.nan, 3.0, -math.inf, 5.0])
    (delta,) = compare_all(paired({"t": before}, {"t": after}), How())
    assert (delta.changed, delta.left_out, delta.first) == (4, 3, (0,))
    assert (delta.nan_before, delta.nan_after, delta.inf_before, delta.inf_after) == (1, 1, 1, 1)
    assert (delta.max_abs, delta.mean_abs, delta.l2) == (0.5, 0.25, 0.5)


def test_nothing_finite_is_said(paired):
    """Where no position is finite on both sides there are no sums, and the reason is given."""
    (delta,) = compare_all(paired({"t": torch.tensor([math.nan])}, {"t": torch.tensor([1.0])}), How())
    assert (delta.changed, delta.max_abs, delta.l2, delta.cosine) == (1, None, None, None)
    assert "no position is finite" in delta.reason


@pytest.mark.parametrize("size", [1e300, 1e-300, 1e-200, 1e160])
def test_no_size_overflows_or_vanishes(paired, size):
    """Squares of these are beyond float64; the norms are not."""
    before = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) * size
    after = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64) * size
    (delta,) = compare_all(paired({"t": before}, {"t": after}), How())
    assert delta.l2 == pytest.approx(size, rel=1e-9)
    assert delta.relative_l2 == pytest.approx(1 / math.sqrt(30), rel=1e-9)
    assert delta.cosine == pytest.approx(34 / math.sqrt(30 * 39), rel=1e-9)


@pytest.mark.parametrize("size", [1e-30, 1e-42, 3e38])
def test_float32_sizes_that_squares_cannot_hold(paired, size):
    """The fast way in float32 hands such blocks to float64."""
    before = torch.full((1000,), size)
    after = before.clone()
    after[10] = 0
    (delta,) = compare_all(paired({"t": before}, {"t": after}), How())
    agrees(delta, oracle(before, after))


def test_a_difference_beyond_float64_is_said(paired):
    """max |Δ| of 1.8e308 + 1.8e308 is null with a reason, not infinite and not zero."""
    top = torch.finfo(torch.float64).max
    pairs = paired({"t": torch.tensor([-top, 1.0]).double()}, {"t": torch.tensor([top, 1.0]).double()})
    pairs = paired({"t": torch.tensor([-top], dtype=torch.float64)}, {"t": torch.tensor([top], dtype=torch.float64)})
    (delta,) = compare_all(pairs, How())
    assert (delta.changed, delta.max_abs, delta.l2) == (1, None, None)
    assert "beyond float64" in delta.reason


def test_big_integers_differ_exactly(paired):
    """2 ** 62 + 1 is not 2 ** 62, though float64 thinks so."""
    before = torch.tensor([2**62, -(2**63), 5])
    after = torch.tensor([2**62 + 1, 2**63 - 1, 5])
    (delta,) = compare_all(paired({"t": before}, {"t": after}), How())
    assert delta.changed == 2
    assert delta.max_abs == float(2**64 - 1)
    (delta,) = compare_all(paired({"t": before[:1]}, {"t": after[:1]}), How())
    assert (delta.changed, delta.max_abs) == (1, 1.0)


def test_a_big_integer_beside_a_float(paired):
    """Compared as numbers: 2 ** 53 + 1 is no float64."""
    before = torch.tensor([2**53 + 1, 2**53, 7])
    (delta,) = compare_all(paired({"t": before}, {"t": before.double()}), How())
    assert (delta.changed, delta.first) == (1, (0,))


@pytest.mark.parametrize("how", [How(atol=0.1), How(rtol=0.05), How(atol=0.01, rtol=0.01)])
def test_tolerance_is_that_of_isclose(paired, how):
    """An element counts where torch.isclose(after, before) says no."""
    before = torch.randn(3000, dtype=torch.float64)
    after = before + torch.randn(3000, dtype=torch.float64) * 0.05
    before[7], after[7], before[8], after[8] = math.inf, math.inf, math.nan, math.nan
    (delta,) = compare_all(paired({"t": before}, {"t": after}), how)
    close = torch.isclose(after, before, atol=how.atol, rtol=how.rtol, equal_nan=True)
    assert delta.changed == int((~close).sum())


@pytest.mark.parametrize("tensor", [torch.tensor(1.5), torch.empty(0, 3), torch.ones(1, 1, 1)])
def test_scalars_and_empty_tensors(paired, tensor):
    """A scalar has the index (), an empty tensor nothing to differ in."""
    assert compare_all(paired({"t": tensor}, {"t": tensor}), How())[0].changed == 0
    if tensor.numel():
        (delta,) = compare_all(paired({"t": tensor}, {"t": tensor + 1}), How())
        assert (delta.changed, delta.first) == (1, (0,) * tensor.dim())


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_by_what_they_are_worth(paired):
    """Other codes under another scale may be the same values."""
    values = torch.tensor([0.5, 1.0, -1.0])
    half = torch.quantize_per_tensor(values, 0.5, 0, torch.qint8)
    quarter = torch.quantize_per_tensor(values, 0.25, 0, torch.qint8)
    other = torch.quantize_per_tensor(values + 0.5, 0.25, 0, torch.qint8)
    assert compare_all(paired({"t": half}, {"t": quarter}), How())[0].changed == 0
    (delta,) = compare_all(paired({"t": half}, {"t": other}), How())
    assert (delta.changed, delta.max_abs) == (3, 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_part_by_part(paired, layout):
    """Equal parts are equal tensors; a changed value is found where it is, among the zeros that are not stored."""
    before = torch.eye(4)
    after = before.clone()
    after[2, 2] = 5
    one, two = (getattr(t, layout)() for t in (before, after))
    assert compare_all(paired({"t": one}, {"t": one.clone()}), How())[0].changed == 0
    (delta,) = compare_all(paired({"t": one}, {"t": two}), How())
    assert (delta.changed, delta.first) == (1, (2, 2))
    agrees(delta, oracle(before, after))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_that_store_other_places(paired, layout):
    """Compared by value: what one of the two does not store is zero there."""
    before, after = torch.eye(4), torch.eye(4)
    after[0, 3], after[1, 1] = 2, 0
    one, two = (getattr(t, layout)() for t in (before, after))
    (delta,) = compare_all(paired({"t": one}, {"t": two}), How())
    agrees(delta, oracle(before, after))


@pytest.mark.filterwarnings("ignore")
def test_duplicates_of_an_uncoalesced_tensor_are_summed(paired):
    """Stored twice at one place means their sum."""
    twice = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), is_coalesced=False)
    once = torch.sparse_coo_tensor([[0], [1]], [3.0], (2, 2)).coalesce()
    assert compare_all(paired({"t": twice}, {"t": once}), How())[0].changed == 0


def test_meta_is_not_compared(paired):
    """There is nothing to read, and that is said."""
    (found,) = compare_all(paired({"t": torch.ones(2, device="meta")}, {"t": torch.ones(2)}), How())
    assert found == NotCompared("meta holds no data")


@pytest.mark.parametrize("suffixes", [("pt", "safetensors"), ("safetensors", "safetensors")])
def test_the_format_makes_no_difference(paired, suffixes):
    """The same tensors from other files give the same numbers, bit for bit."""
    before, after = {"t": torch.randn(100_000)}, {"t": torch.randn(100_000)}
    assert compare_all(paired(before, after), How()) == compare_all(paired(before, after, suffixes), How())


def test_the_number_of_workers_makes_no_difference(paired, monkeypatch):
    """Tasks are cut and added up in the same way, whoever does them."""
    before = {f"t{i}": torch.randn(300_000) for i in range(4)}
    after = {name: t + torch.randn(1) * (torch.rand(300_000) > 0.5) for name, t in before.items()}
    pairs = paired(before, after)
    alone = compare_all(pairs, How(), jobs=1)
    monkeypatch.setattr(compare, "ALONE", 0)
    monkeypatch.setattr(compare, "BATCH", 1 << 20)
    assert compare_all(pairs, How(), jobs=2) == alone
    assert compare_all(pairs, How(), jobs=3) == alone


@pytest.mark.parametrize("block", [256, 1000, 4096])
def test_the_size_of_blocks_makes_no_difference(paired, monkeypatch, block):
    """Counts are equal, sums within 1e-9."""
    before = torch.randn(20_000, dtype=torch.float64)
    after = before * (1 + (torch.rand(20_000) > 0.9) * 0.1)
    pairs = paired({"t": before}, {"t": after})
    (expected,) = compare_all(pairs, How())
    monkeypatch.setattr(run.Worker, "block", block)
    monkeypatch.setattr(compare, "TASK", 3 * block)
    (found,) = compare_all(pairs, How())
    assert (found.changed, found.first, found.max_abs) == (expected.changed, expected.first, expected.max_abs)
    for name in ("mean_abs", "l2", "relative_l2", "cosine"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9)


def test_damage_is_not_taken_for_a_change(paired):
    """A byte that flipped in a zip contradicts its checksum: that file's error, not a changed tensor."""
    pairs = paired({"t": torch.ones(500), "u": torch.ones(9)}, {"t": torch.ones(500), "u": torch.zeros(9)})
    where = pairs[0].after.data.storage
    with open(where.path, "r+b") as file:
        file.seek(where.offset + 40)
        file.write(b"\x01")
    found, other = compare_all(pairs, How())
    assert isinstance(found, MalformedError)
    assert "t: checksum wrong" in str(found)
    assert other.changed == 9


def test_damage_on_one_side_of_equal_bytes_is_told(paired):
    """Equal bytes under two checksums: one of them is wrong."""
    (pair,) = paired({"t": torch.ones(5)}, {"t": torch.ones(5)})
    data = pair.after.data
    other = replace(pair.after, data=replace(data, storage=replace(data.storage, crc32=data.storage.crc32 ^ 1)))
    (found,) = compare_all([Pair(pair.before, other)], How())
    assert isinstance(found, MalformedError)


def test_a_file_cut_short_is_its_pairs_error(paired):
    """One file ends early: one line with file and tensor, and the other pairs are compared."""
    pairs = paired(
        {"a": torch.ones(4), "t": torch.ones(99_999)},
        {"a": torch.ones(4), "t": torch.zeros(99_999)},
        ("safetensors", "safetensors"),
    )
    path = pairs[1].after.data.storage.path
    with open(path, "r+b") as file:
        file.truncate(pairs[1].after.data.storage.offset + 1000)
    found = dict(zip(("a", "t"), compare_all(pairs, How()), strict=True))
    assert isinstance(found["t"], MalformedError)
    assert path in str(found["t"])
    assert "t: ends at byte" in str(found["t"])
    assert found["a"].changed == 0


def test_a_file_that_changes_meanwhile_is_noticed(paired, monkeypatch):
    """Its time of modification is other at the end than at the beginning: nothing it said counts."""
    import os

    (pair,) = paired({"t": torch.ones(4)}, {"t": torch.ones(4)})
    path = pair.after.data.storage.path
    original = compare._run

    def touching(*arguments):
        os.utime(path, ns=(1, 1))
        return original(*arguments)

    monkeypatch.setattr(compare, "_run", touching)
    (found,) = compare_all([pair], How())
    assert isinstance(found, UnreadableError)
    assert "changed while it was read" in str(found)


def test_a_file_that_is_gone(paired):
    """One line with its name."""
    import os

    (pair,) = paired({"t": torch.ones(4)}, {"t": torch.ones(4)})
    os.remove(pair.before.data.storage.path)
    (found,) = compare_all([pair], How())
    assert pair.before.data.storage.path in str(found)


def test_fingerprints_are_of_the_elements(paired):
    """The same elements have the same one from a zip, from safetensors and through strides; others another."""
    base = torch.randn(30, 20)
    pairs = paired({"t": base, "u": base.t()}, {"t": base, "u": base.t().contiguous()}, ("pt", "safetensors"))
    found = fingerprints([pairs[0].before, pairs[0].after, pairs[1].before, pairs[1].after])
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


def test_histograms_count_every_difference(paired):
    """The counts are numpy's, and add up to the elements."""
    before, after = torch.randn(5000), torch.randn(5000)
    pairs = paired({"t": before}, {"t": after})
    ((edges, counts),) = histograms(pairs, compare_all(pairs, How()), bins=20)
    assert sum(counts) == 5000
    gap = np.clip((after.double() - before.double()).numpy(), edges[0], edges[-1])
    expected = np.histogram(gap, edges)[0]
    assert counts == tuple(expected.tolist())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "float8_e5m2", "int32", "complex64"])
def test_torch_adds_up_to_the_same(paired, dtype):
    """The kernel of another device, run by torch on the CPU: equal counts, sums within 1e-6."""
    before, after = made(dtype, 70_000, 1), made(dtype, 70_000, 2)
    pairs = paired({"t": before}, {"t": after})
    (expected,) = compare_all(pairs, How())
    tasks = compare._plan(0, pairs[0], How())
    with on_device.DeviceWorker(How(), torch.device("cpu")) as worker:
        (found,) = worker.results(tasks)
    delta = found.tally.delta((70_000,))
    assert (delta.changed, delta.first) == (expected.changed, expected.first)
    for name in ("max_abs", "mean_abs", "l2", "relative_l2", "cosine"):
        assert getattr(delta, name) == pytest.approx(getattr(expected, name), rel=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_cuda_adds_up_to_the_same(paired):
    """The same on a GPU."""
    before, after = torch.randn(1_000_000), torch.randn(1_000_000)
    pairs = paired({"t": before}, {"t": after})
    (expected,), (found,) = compare_all(pairs, How()), compare_all(pairs, How(device="cuda"))
    assert (found.changed, found.first) == (expected.changed, expected.first)
    assert found.l2 == pytest.approx(expected.l2, rel=1e-6)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_two_arrays(tmp_path_factory, data):
    """Random sizes, values and places of NaN: counts and sums are numpy's."""
    n = data.draw(st.integers(1, 3000))
    seed = data.draw(st.integers(0, 2**32 - 1))
    scale = data.draw(st.sampled_from([1.0, 1e-20, 1e20, 1e-40, 1e38]))
    numbers = np.random.default_rng(seed)
    before = torch.from_numpy((numbers.standard_normal(n) * scale).astype(np.float32))
    after = torch.where(torch.from_numpy(numbers.random(n) < 0.5), before, before * 1.5)
    folder = tmp_path_factory.mktemp("any")
    for name, tensor in (("a", before), ("b", after)):
        save_file({"t": tensor}, folder / f"{name}.safetensors")
    pair = Pair(*(formats.read(str(folder / f"{name}.safetensors")).tensors[0] for name in "ab"))
    (delta,) = compare_all([pair], How())
    finite = torch.isfinite(before) & torch.isfinite(after)
    assert delta.changed == int((before != after).sum())
    if (before != after)[finite].any():
        expected = oracle(before[finite], after[finite])
        expected.pop("elements")
        expected["changed"] = delta.changed
        agrees(delta, expected)
