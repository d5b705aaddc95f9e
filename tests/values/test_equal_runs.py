"""Small neighbours that are equal are settled together: with the outcome that each has by itself."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from statecli import formats  # noqa: E402
from statecli.comparison.result import Delta, How  # noqa: E402
from statecli.errors import ChecksumMismatch, StateError  # noqa: E402
from statecli.values import compare, pool  # noqa: E402
from statecli.values.compare import Pair, compare_all  # noqa: E402
from statecli.values.equal_runs import GAP, SMALL, equal_pairs  # noqa: E402

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"]


def saved(path, tensors):
    torch.save(tensors, path) if path.suffix == ".pt" else save_file(tensors, path)
    return {tensor.fqn: tensor for tensor in formats.read(str(path)).tensors}


def paired(tmp_path, before, after, suffix="safetensors"):
    one, two = saved(tmp_path / f"a.{suffix}", before), saved(tmp_path / f"b.{suffix}", after)
    return [Pair(one[name], two[name]) for name in before]


def settled(pairs):
    return equal_pairs([(pair.before, pair.after) for pair in pairs], compare._place)


def some_tensor(rng):
    shape = rng.choice([(), (0,), (3,), (5, 7), (300,), (SMALL // 4,), (SMALL // 4 + 1,)])
    tensor = torch.randint(0, 2, shape).to(getattr(torch, rng.choice(DTYPES)))
    return tensor.t().contiguous().t() if tensor.dim() == 2 and rng.random() < 0.5 else tensor


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("seed", range(6))
def test_the_outcome_is_that_of_each_pair_by_itself(tmp_path, monkeypatch, suffix, seed):
    """Whatever the types, sizes, strides and changes of forty neighbours."""
    rng = random.Random(seed)  # noqa: S311  # reproducible, no secret
    torch.manual_seed(seed)
    before = {f"t{n}": some_tensor(rng) for n in range(40)}
    after = {name: t.clone() for name, t in before.items()}
    for name in rng.sample(sorted(after), 8):
        flat = after[name].contiguous().view(-1)
        if flat.numel():
            flat[rng.randrange(flat.numel())] = 1 - int(bool(flat[0]))
            after[name] = flat.view(after[name].shape)
    if suffix == "safetensors":
        before, after = ({name: t.contiguous() for name, t in side.items()} for side in (before, after))
    pairs = paired(tmp_path, before, after, suffix)
    together = compare_all(pairs, How())
    assert len(settled(pairs)) > 10
    monkeypatch.setattr(compare, "equal_pairs", lambda *_: set())
    assert together == compare_all(pairs, How())


def test_equal_neighbours_need_no_task(tmp_path, monkeypatch):
    """Of five hundred pairs the one that differs is planned by itself."""
    tensors = {f"layers.{n}.bias": torch.full((4,), float(n)) for n in range(500)}
    other = {**tensors, "layers.77.bias": torch.zeros(4)}
    pairs = paired(tmp_path, tensors, other)
    planned = []
    monkeypatch.setattr(
        compare, "_plan", lambda n, pair, how, plan=compare._plan: planned.append(pair) or plan(n, pair, how)
    )
    outcomes = compare_all(pairs, How())
    assert [pair.after.fqn for pair in planned] == ["layers.77.bias"]
    assert [outcome.changed for outcome in outcomes if isinstance(outcome, Delta)] == [0] * 77 + [4] + [0] * 422


def test_the_order_of_the_two_files_need_not_be_the_same(tmp_path):
    """What is reversed in the other file has no run, and is compared pair by pair."""
    names = [f"t{n}" for n in range(50)]
    one = saved(tmp_path / "a.safetensors", {name: torch.full((5,), float(n)) for n, name in enumerate(names)})
    two = saved(tmp_path / "b.safetensors", {f"z{99 - n}": torch.full((5,), float(n)) for n in range(50)})
    pairs = [Pair(one[name], two[f"z{99 - n}"]) for n, name in enumerate(names)]
    assert [outcome.changed for outcome in compare_all(pairs, How())] == [0] * 50


@pytest.mark.parametrize(("gap", "count"), [(GAP, 2), (GAP + 1, 0)])
def test_what_lies_far_apart_is_not_read_together(tmp_path, gap, count):
    """Bytes that belong to none of the pairs are read only where there are few of them."""
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
    assert len(settled([Pair(states[0][n], states[1][n]) for n in (0, 2)])) == count


def test_equal_bytes_under_different_checksums_are_damage(tmp_path):
    """A record whose checksum says other bytes is reported, among neighbours that are well."""
    tensors = {f"t{n}": torch.full((8,), float(n)) for n in range(20)}
    changed = {**tensors, "t7": torch.full((8,), 700.0)}
    paired(tmp_path, tensors, changed, "pt")
    path = tmp_path / "b.pt"
    right, wrong = torch.full((8,), 7.0).numpy().tobytes(), torch.full((8,), 700.0).numpy().tobytes()
    content = path.read_bytes()
    assert content.count(wrong) == 1
    path.write_bytes(content.replace(wrong, right))
    states = [{t.fqn: t for t in formats.read(str(tmp_path / name)).tensors} for name in ("a.pt", "b.pt")]
    outcomes = compare_all([Pair(states[0][name], states[1][name]) for name in tensors], How())
    assert [n for n, outcome in enumerate(outcomes) if isinstance(outcome, ChecksumMismatch)] == [7]


def test_a_file_that_ends_early_fails_its_own_pairs(tmp_path):
    """The run cannot be read; each pair that can is equal, and the others name the file."""
    tensors = {f"t{n:02}": torch.full((8,), float(n)) for n in range(20)}
    pairs = paired(tmp_path, tensors, tensors)
    place = pairs[15].after.data.storage
    with open(place.path, "r+b") as file:
        file.truncate(place.offset + 3)
    outcomes = compare_all(pairs, How())
    errors = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, StateError)]
    assert errors == [15, 16, 17, 18, 19]
    assert all(place.path in str(outcomes[n]) for n in errors)


def test_who_does_a_part_leaves_all_pairs_to_their_tasks(tmp_path):
    """A share of a command must find the tasks that the others find."""

    class Everything:
        whole = True

        def results(self, work, do):
            seen.extend(work.tasks)
            return do(work.tasks)

    seen = []
    tensors = {f"t{n}": torch.full((8,), float(n)) for n in range(9)}
    with pool.kept(Everything()):
        compare_all(paired(tmp_path, tensors, tensors), How())
    assert len(seen) == 9
