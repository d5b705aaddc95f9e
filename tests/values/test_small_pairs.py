"""Small adjacent pairs are compared together, with the same outcome as when each pair is compared separately."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from statecli import formats  # noqa: E402
from statecli.core.errors import ChecksumMismatch, StateError  # noqa: E402
from statecli.values import compare, compiled_kernel, pair_plan  # noqa: E402
from statecli.values.compare import compare_pairs  # noqa: E402
from statecli.values.delta import CompareOptions  # noqa: E402
from statecli.values.pair_plan import Pair  # noqa: E402
from statecli.values.small_pairs import MAX_GAP_BYTES, MAX_TENSOR_BYTES, compare_small_pairs  # noqa: E402
from statecli.workers import pool  # noqa: E402

from .conftest import save_rows  # noqa: E402

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"]


def pair_states(tmp_path, before, after, suffix="safetensors"):
    """Save both sides, and return the pairs of tensors in their order."""
    return list(map(Pair, save_rows(tmp_path / f"a.{suffix}", before), save_rows(tmp_path / f"b.{suffix}", after)))


def settle_pairs(pairs):
    tensor_pairs = [(pair.before, pair.after) for pair in pairs]
    return compare_small_pairs(tensor_pairs, CompareOptions())


def draw_tensor(rng):
    shape = rng.choice([(), (0,), (3,), (5, 7), (300,), (MAX_TENSOR_BYTES // 4,), (MAX_TENSOR_BYTES // 4 + 1,)])
    tensor = torch.randint(0, 2, shape).to(getattr(torch, rng.choice(DTYPES)))
    return tensor.t().contiguous().t() if tensor.dim() == 2 and rng.random() < 0.5 else tensor


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("seed", range(6))
def test_pairs_compared_together_have_the_results_of_single_pairs(tmp_path, monkeypatch, suffix, seed):
    """Forty neighbours with any types, sizes, strides and changes."""
    rng = random.Random(seed)  # noqa: S311  # reproducible, no secret
    torch.manual_seed(seed)
    before = {f"t{n}": draw_tensor(rng) for n in range(40)}
    after = {name: t.clone() for name, t in before.items()}
    for name in rng.sample(sorted(after), 8):
        flat = after[name].contiguous().view(-1)
        if flat.numel():
            flat[rng.randrange(flat.numel())] = 1 - int(bool(flat[0]))
            after[name] = flat.view(after[name].shape)
    if suffix == "safetensors":
        before, after = ({name: t.contiguous() for name, t in side.items()} for side in (before, after))
    pairs = pair_states(tmp_path, before, after, suffix)
    together = compare_pairs(pairs, CompareOptions())
    assert len(settle_pairs(pairs)) > 10
    monkeypatch.setattr(compare, "compare_small_pairs", lambda *_: {})
    assert together == compare_pairs(pairs, CompareOptions())


def list_planned_names(monkeypatch):
    """Return a list; the names of pairs that get tasks are appended to the list."""
    names = []
    plan = pair_plan._plan_or_error
    monkeypatch.setattr(
        pair_plan, "_plan_or_error", lambda n, pair, options: names.append(pair.after.fqn) or plan(n, pair, options)
    )
    return names


def build_neighbours(tmp_path, dtype):
    """Five hundred pairs: a pair differs in all elements, a pair in one element, and a pair in the sign of a zero."""
    tensors = {f"layers.{n}.bias": torch.full((4,), float(n)).to(dtype) for n in range(500)}
    tensors["layers.1.bias"][2] = 0
    other = {name: t.clone() for name, t in tensors.items()}
    other["layers.77.bias"][:] = 0
    other["layers.78.bias"][3] = -1
    other["layers.1.bias"][2] = -0.0
    return pair_states(tmp_path, tensors, other)


@pytest.mark.skipif(compiled_kernel.native is None, reason="no compiled kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_small_neighbours_need_no_task(tmp_path, monkeypatch, dtype):
    """Neither equal pairs nor different pairs need a task."""
    pairs = build_neighbours(tmp_path, dtype)
    planned = list_planned_names(monkeypatch)
    outcomes = compare_pairs(pairs, CompareOptions())
    assert planned == []
    assert [outcome.changed for outcome in outcomes] == [0] * 77 + [4, 1] + [0] * 421
    bitwise = compare_pairs(pairs, CompareOptions(bitwise=True))
    assert planned == []
    assert [outcome.changed for outcome in bitwise] == [0, 1] + [0] * 75 + [4, 1] + [0] * 421


@pytest.mark.parametrize(
    "options", [CompareOptions(), CompareOptions(bitwise=True), CompareOptions(atol=1e-3), CompareOptions(rtol=1e-3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64])
def test_statistics_equal_those_of_a_task_to_the_last_bit(tmp_path, monkeypatch, dtype, options):
    """The values include NaN, infinities, tiny and huge values, products that cancel, and zeros of either sign."""
    torch.manual_seed(3)
    before = {f"t{n}": (torch.randn(n % 300 + 1) * 10.0 ** (n % 7 * 12 - 36)).to(dtype) for n in range(90)}
    after = {name: t + (torch.rand(t.shape) < 0.5) * t * 0.01 for name, t in before.items()}
    before |= {"orthogonal": torch.tensor([1, 0]).to(dtype), "zeros": torch.zeros(3, dtype=dtype)}
    after |= {"orthogonal": torch.tensor([-0.0, 1]).to(dtype), "zeros": torch.tensor([0, 1, 0]).to(dtype)}
    if dtype.is_floating_point:
        for n, value in enumerate((float("nan"), float("inf"), 3e38, 1e-45)):
            before[f"t{50 + n}"][-1] = value
    pairs = pair_states(tmp_path, before, {name: t.to(dtype) for name, t in after.items()})
    deltas = compare_pairs(pairs, options)
    monkeypatch.setattr(compare, "compare_small_pairs", lambda *_: {})
    assert list(map(repr, deltas)) == list(map(repr, compare_pairs(pairs, options)))


def test_the_order_of_the_two_files_need_not_be_the_same(tmp_path):
    """Tensors in reverse order in the second file do not form a run and are compared pair by pair."""
    tensors = [torch.full((5,), float(n)) for n in range(50)]
    before, after = ({name(n): tensors[n] for n in range(50)} for name in ("t{}".format, lambda n: f"z{99 - n}"))
    pairs = pair_states(tmp_path, before, after)
    assert [outcome.changed for outcome in compare_pairs(pairs, CompareOptions())] == [0] * 50


@pytest.mark.parametrize(("gap", "count"), [(MAX_GAP_BYTES, 2), (MAX_GAP_BYTES + 1, 0)])
def test_tensors_with_a_large_gap_are_not_read_together(tmp_path, gap, count):
    """Unneeded bytes between two tensors are read only if there are few of them."""
    tensors = {"a": torch.zeros(2), "b": torch.zeros(gap, dtype=torch.uint8), "c": torch.zeros(2)}
    for name in ("x", "y"):
        header = ",".join(
            f'"{key}":{{"dtype":"{dtype}","shape":[{t.numel()}],"data_offsets":[{begin},{begin + t.nbytes}]}}'
            for key, t, dtype, begin in zip(
                tensors, tensors.values(), ("F32", "U8", "F32"), (0, 8, 8 + gap), strict=True
            )
        )
        raw = f"{{{header}}}".encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16 + gap))
    states = [formats.read(str(tmp_path / f"{name}.safetensors")).tensors for name in ("x", "y")]
    assert len(settle_pairs([Pair(states[0][n], states[1][n]) for n in (0, 2)])) == count


@pytest.mark.parametrize(("recorded", "stored"), [(7.0, 700.0), (700.0, 7.0)], ids=["different", "equal"])
def test_bytes_that_contradict_their_checksum_are_damage(tmp_path, recorded, stored):
    """Different bytes under equal checksums or equal bytes under different checksums; the neighbours are compared."""
    tensors = {f"t{n}": torch.full((8,), float(n)) for n in range(20)}
    pairs = pair_states(tmp_path, tensors, {**tensors, "t7": torch.full((8,), recorded)}, "pt")
    content = (tmp_path / "b.pt").read_bytes()
    right, wrong = (torch.full((8,), value).numpy().tobytes() for value in (recorded, stored))
    assert content.count(right) == 1
    (tmp_path / "b.pt").write_bytes(content.replace(right, wrong))
    outcomes = compare_pairs(pairs, CompareOptions())
    assert [n for n, outcome in enumerate(outcomes) if isinstance(outcome, ChecksumMismatch)] == [7]


def test_a_file_that_ends_early_fails_its_own_pairs(tmp_path):
    """The run cannot be read as a whole; readable pairs are equal, and the errors of the rest name the file."""
    tensors = {f"t{n:02}": torch.full((8,), float(n)) for n in range(20)}
    pairs = pair_states(tmp_path, tensors, tensors)
    place = pairs[15].after.data.storage
    with open(place.path, "r+b") as file:
        file.truncate(place.offset + 3)
    outcomes = compare_pairs(pairs, CompareOptions())
    errors = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, StateError)]
    assert errors == [15, 16, 17, 18, 19]
    assert all(place.path in str(outcomes[n]) for n in errors)


def test_shard_of_a_command_runs_a_task_for_each_pair(tmp_path):
    """A shard of a command must plan the same tasks as the other shards."""

    class Everything:
        is_complete = True

        def results(self, work, do):
            seen.extend(work.tasks)
            return do(work.tasks)

    seen = []
    tensors = {f"t{n}": torch.full((8,), float(n)) for n in range(9)}
    with pool.use_result_store(Everything()):
        compare_pairs(pair_states(tmp_path, tensors, tensors), CompareOptions())
    assert len(seen) == 9
