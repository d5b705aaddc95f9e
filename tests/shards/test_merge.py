"""The merge of all shards gives the same as the unsharded command: stdout, notes on stderr, and exit status."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

import statecli as api
from statecli.core.errors import UnreadableError, UsageError
from statecli.requests import shard_options
from statecli.requests.options import MergeOptions
from statecli.values import audit_facts, pair_plan, tally

pytest.importorskip("torch.distributed.checkpoint")
import torch.distributed.checkpoint as dcp

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int8),
    *(torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
]
OUTPUTS = ("json", "jsonl", "csv", "markdown", "html", "table", "plain", "sarif", "junit", "github", "gitlab")


def build_random_bits(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bits, including NaN, infinities and denormals."""
    numbers = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(numbers.integers(0, 2, shape).astype(bool))
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.tensor(bytearray(numbers.bytes(torch.Size(shape).numel() * size)), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def build_all_kinds(seed: int) -> dict[str, torch.Tensor]:
    """Return strided, tied, sparse and quantized tensors and tensors of all dtypes; some tensors take several tasks."""
    numbers = torch.Generator().manual_seed(seed)
    weight = torch.randn(90, 70, generator=numbers)
    half = torch.randn(60, 50, generator=torch.Generator().manual_seed(99))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(weight, 0.02, 3, torch.qint8)
        channels = torch.quantize_per_channel(weight, torch.rand(90) + 0.1, torch.zeros(90), 0, torch.qint8)
    by_dtype = {str(dtype).removeprefix("torch."): build_random_bits(seed % 3, dtype, (31, 17)) for dtype in DTYPES}
    return {
        **by_dtype,
        "half": torch.cat([half, half + seed]),
        "weight": weight,
        "tied": weight,
        "t": weight.t(),
        "expanded": torch.full((1,), float(seed)).expand(500),
        "coo": (weight * (weight > 1)).to_sparse(),
        "quantized": quantized,
        "channels": channels,
        "empty": torch.zeros(0, 3),
        f"moved{seed}": torch.arange(5000.0),
        f"gone{seed}": torch.full((33,), float(seed)),
        "big": torch.arange(3 * tally.BLOCK_ELEMENTS, dtype=torch.float32) * (1 + 0.001 * seed),
    }


@pytest.fixture
def small_tasks(monkeypatch):
    """Split tensors of some kilobytes into several tasks, as if they had gigabytes."""
    monkeypatch.setattr(pair_plan, "TASK_ELEMENTS", tally.BLOCK_ELEMENTS)
    monkeypatch.setattr(audit_facts, "TASK_BYTES", 1 << 18)


# --- any checkpoints -------------------------------------------------------------------------------------------------

tensor = st.builds(
    build_random_bits, st.integers(0, 3), st.sampled_from(DTYPES), st.sampled_from([(5,), (2, 3), (), (0, 2), (64,)])
)
names = st.sampled_from(["a.w", "a.b", "b.w", "c.w", "layers.0.w", "layers.1.w"])


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.dictionaries(names, tensor, min_size=1),
    after=st.dictionaries(names, tensor, min_size=1),
    count=st.integers(1, 7),
    zipped=st.booleans(),
)
def test_merge_of_any_two_checkpoints_equals_the_command(statecli, run_shards, before, after, count, zipped):
    """Added, removed, renamed and changed tensors: the JSON of diff, inspect, audit and lock is the same for any number
    of shards.
    """
    torch.save(before, "a.pt", _use_new_zipfile_serialization=zipped)
    torch.save(after, "b.pt")
    lines = (
        ("diff", "a.pt", "b.pt"),
        ("diff", "a.pt", "b.pt", "--bitwise"),
        ("inspect", "b.pt", "--stats"),
        ("audit", "--values", "a.pt", "b.pt"),
        ("lock", "a.pt", "b.pt"),
    )
    for line in lines:
        paths, _ = run_shards(count, *line)
        output_options = () if line[0] == "lock" else ("-f", "json")
        unsharded, merged = statecli(*line, *output_options), statecli("merge", *paths, *output_options)
        assert (merged.code, merged.out) == (unsharded.code, unsharded.out), line


# --- checkpoints with everything -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize(("count", "zipped"), [(1, False), (2, True), (5, False), (7, True)])
def test_merge_supports_all_kinds_of_tensors(check_merge, count, zipped):
    """All dtypes and layouts; the merge computes nothing again except the tasks in OF_MERGE."""
    for seed, name in ((1, "a.pt"), (2, "b.pt")):
        torch.save(build_all_kinds(seed), name, _use_new_zipfile_serialization=zipped)
    assert check_merge(count, "diff", "a.pt", "b.pt") == []
    assert check_merge(count, "diff", "a.pt", "b.pt", "--atol", "0.01") == []
    assert check_merge(count, "inspect", "a.pt", "--stats") == []
    assert check_merge(count, "audit", "a.pt", "b.pt", "--values") == []


def test_merge_finds_the_same_operations(check_merge):
    """Shards check casts and resizes; the merge looks for moves, factors and joins, including tensors with NaN."""
    torch.manual_seed(0)
    before = {f"layers.{n}.w": torch.randn(64, 32) for n in range(6)}
    after = {f"layers.{n}.w": before[f"layers.{n + 1}.w"] for n in range(5)} | {"words": torch.randn(40, 8)}
    before["words"], before["q"], before["k"] = after["words"][:32].clone(), torch.randn(4, 3), torch.randn(2, 3)
    after["qk"] = torch.cat([before["q"], before["k"]])
    for n in range(8):
        before[f"cast{n}"] = torch.randn(50)
        after[f"cast{n}"] = before[f"cast{n}"].half() + (n == 3)
    torch.save(before, "a.pt")
    torch.save(after, "b.pt")
    for line, formats in (
        (("diff", "a.pt", "b.pt"), ("json", "plain")),
        (("diff", "a.pt", "b.pt", "--cast"), ("json",)),
    ):
        assert {name for name, _ in check_merge(3, *line, formats=formats)} <= {
            "run_batch",
            "check_batch",
            "stats_batch",
        }


def build_unusual_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return complex, packed, NaN and huge values, an endless view, and quantized, nested and sparse tensors."""
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 4000).astype("u1"))
    kinds = ("complex32", "complex128", "float4_e2m1fn_x2", "float8_e8m0fnu", "bits8", "bits16", "bits2x4")
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(seed))
    sign = 1 if seed == 1 else -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        halves = torch.quantize_per_channel(weight, torch.rand(40) + 0.1, torch.zeros(40), 0, torch.quint4x2)
        nested = torch.nested.nested_tensor([weight[:3], weight[:5]])
        csr = (weight * (weight > 1)).to_sparse_csr()
    return {
        **{name: raw.clone().view(getattr(torch, name)) for name in kinds if hasattr(torch, name)},
        "halves": halves,
        "nested": nested,
        "csr": csr,
        "scalar": torch.tensor(float(seed)),
        "nan": torch.full((3, 1), float("nan") if seed == 1 else 2.0).expand(3, 50),
        "both": torch.full((1,), complex(float(seed), float("nan"))).expand(300),
        "conjugate": torch.complex(weight, weight).conj(),
        "endless": (torch.arange(100.0) + seed).as_strided((40, 40), (1, 1)),
        "huge": torch.full((300_000,), 1.7e308 * sign, dtype=torch.float64),
        "ends": torch.tensor([1e308, -1e308, float("nan"), 5e-324, float("inf")], dtype=torch.float64) * sign,
        "cast": torch.complex(weight, weight) if seed == 1 else weight,
    }


def test_results_of_unusual_tensors_are_accepted(check_merge):
    """Part files are refused only for results that no tensor of any type can have."""
    for seed, name in ((1, "a.pt"), (2, "b.pt")):
        torch.save(build_unusual_tensors(seed), name)
    for options in ((), ("--bitwise",), ("--atol", "0.1")):
        assert check_merge(2, "diff", "a.pt", "b.pt", *options) == []
    check_merge(2, "inspect", "a.pt", "--stats")
    check_merge(2, "audit", "a.pt", "b.pt", "--values", "--against", "a.pt")


def test_every_output_equals_the_unsharded_output(check_merge):
    """Drawn and folded outputs too: the merge reads values again for the histograms of the page."""
    for seed, name in ((1, "a.pt"), (2, "b.pt")):
        torch.save(build_all_kinds(seed), name)
    check_merge(3, "diff", "a.pt", "b.pt", formats=OUTPUTS)
    check_merge(2, "audit", "a.pt", "--values", formats=OUTPUTS)
    check_merge(2, "inspect", "a.pt", "--stats", formats=("json", "csv", "table", "html"))


def test_options_of_merge_match_the_options_of_shards():
    """A new option of merge takes the place of an option of the shards, or is about the part files."""
    about_parts = {"parts", "allow_code", "url", "copies"}
    assert set(MergeOptions.__struct_fields__) - about_parts | {"shard"} == shard_options.OUTPUT_OPTIONS
    of_shards = {"output", "color", "quiet", "no_progress", "debug", "timeout", "jobs", "executor", "shard"}
    assert shard_options.OUTPUT_OPTIONS - of_shards == shard_options._REPORT_OPTIONS


def test_merge_has_the_output_options_of_the_command(statecli, run_shards):
    """-q, -v, --tree, -n, --name-only, --report and -o are options of merge, because part files do not contain them."""
    for seed, name in ((1, "a.pt"), (2, "b.pt")):
        torch.save(build_all_kinds(seed), name)
    paths, _ = run_shards(3, "diff", "a.pt", "b.pt")
    for output_options in (["-v"], ["-q"], ["--tree"], ["-n", "2"], ["--name-only"], ["--name-status"], ["--all"]):
        unsharded, merged = (
            statecli("diff", "a.pt", "b.pt", *output_options),
            statecli("merge", *paths, *output_options),
        )
        assert (merged.code, merged.out, merged.err) == (unsharded.code, unsharded.out, unsharded.err), output_options
    line = ("-f", "csv", "-o", "{}.csv", "--report", "sarif={}.sarif")
    statecli("diff", "a.pt", "b.pt", *(word.format("whole") for word in line))
    assert statecli("merge", *paths, *(word.format("merged") for word in line)).code == 1
    for name in ("csv", "sarif"):
        assert Path(f"merged.{name}").read_bytes() == Path(f"whole.{name}").read_bytes()


def test_merge_supports_sharded_dcp_and_training_checkpoints(check_merge):
    """The values are in several files, and in archives inside the files."""
    for n in (0, 1):
        os.mkdir(f"many{n}")
        state = {f"layers.{i}.w": torch.full((50, 40), float(i + n * (i % 2))) for i in range(9)}
        index = {name: f"model-{1 + i % 3:05}-of-00003.safetensors" for i, name in enumerate(state)}
        for file in sorted(set(index.values())):
            save_file({name: tensor for name, tensor in state.items() if index[name] == file}, f"many{n}/{file}")
        weights = {"metadata": {}, "weight_map": index}
        Path(f"many{n}/model.safetensors.index.json").write_text(json.dumps(weights))
        dcp.save(state, checkpoint_id=f"dcp{n}", no_dist=True)
        model = torch.nn.Linear(30, 20)
        optimizer = torch.optim.AdamW(model.named_parameters())
        model(torch.randn(2, 30, generator=torch.Generator().manual_seed(n))).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": n}, f"train{n}.pt")
    for first, second in (("many0", "many1"), ("dcp0", "dcp1"), ("train0.pt", "train1.pt"), ("many0", "dcp1")):
        check_merge(4, "diff", first, second)
        check_merge(3, "inspect", second, "--stats")
        check_merge(3, "audit", first, second, "--values")


def test_merged_lock_equals_the_unsharded_lock(statecli, run_shards):
    """The lock of several targets has names relative to the lock file, not to the part files."""
    os.mkdir("runs")
    for seed, name in ((1, "runs/a.pt"), (2, "runs/b.pt")):
        torch.save({k: v for k, v in build_all_kinds(seed).items() if k != "channels"}, name)
    paths, _ = run_shards(3, "lock", "runs", "--digest", "sha256")
    assert statecli("lock", "runs", "--digest", "sha256", "-o", "runs/whole.lock").code == 0
    merged = statecli("merge", *paths, "-o", "runs/merged.lock")
    assert (merged.code, merged.out) == (0, "")
    assert Path("runs/merged.lock").read_bytes() == Path("runs/whole.lock").read_bytes()
    Path("runs/whole.lock").rename("whole.lock")
    Path("runs/merged.lock").unlink()
    assert statecli("lock", "runs", "--digest", "sha256").out == statecli("merge", *paths).out


def test_folder_of_a_part_does_not_change_the_lock(statecli):
    """Names in a lock, and the order of targets, are relative to the lock file; part files may be in any folder."""
    for name in ("x", "y"):
        os.mkdir(name)
        torch.save({"w": torch.full((40, 40), float(ord(name))), "v": torch.ones(9)}, f"{name}/{name}.pt")
    os.symlink("../x/x.pt", "y/z.pt")
    for n, path in enumerate(("x/1.jsonl", "y/2.jsonl", "3.jsonl"), 1):
        assert statecli("lock", "x", "y", "--shard", f"{n}/3", "-o", path).code == 0
    for folder in ("x", "y", "."):
        unsharded = statecli("lock", "x", "y", "-o", f"{folder}/whole.lock")
        assert unsharded.code == 0
        assert statecli("merge", "**/*.jsonl", "-o", f"{folder}/merged.lock").code == 0
        assert Path(folder, "merged.lock").read_bytes() == Path(folder, "whole.lock").read_bytes()


def test_merge_supports_lock_reference_and_policy(check_merge, statecli):
    """An audit reads values for the lock, the reference and the policy, besides the statistics of the tensors."""
    for seed, name in ((1, "a.pt"), (2, "b.pt")):
        torch.save({k: v for k, v in build_all_kinds(seed).items() if k not in ("coo", "channels")}, name)
    assert statecli("lock", "a.pt", "b.pt", "-o", "statecli.lock").code == 0
    state = torch.load("b.pt")
    torch.save({**state, "weight": state["weight"] + 1}, "b.pt")
    Path("statecli.toml").write_text('[policy]\nmust-change = ["big"]\nmust-not-change = ["weight"]\n')
    check_merge(4, "audit", "a.pt", "b.pt", "--lock", "statecli.lock", "--against", "a.pt")
    check_merge(3, "audit", "a.pt", "b.pt", "--values", "--against", "a.pt")


# --- findings that need all shards -----------------------------------------------------------------------------------


def test_renames_are_found_within_each_shard(check_merge):
    """Possible renames of each other are in the same shard: renaming all tensors costs the merge nothing."""
    before = {f"old.{i}.w": torch.randn(20 + i, 30) for i in range(12)}
    after = {f"new.{11 - i}.v": tensor for i, tensor in enumerate(before.values())}
    save_file(before, "a.safetensors")
    save_file({name: tensor.clone() for name, tensor in after.items()}, "b.safetensors")
    assert check_merge(4, "diff", "a.safetensors", "b.safetensors") == []
    assert check_merge(4, "diff", "a.safetensors", "b.safetensors", "--no-renames") == []


def test_renames_of_equal_tensors_are_merged(check_merge):
    """Equal tensors of one shape, biases of zeros, and the same bytes twice in the same checkpoint."""
    shared = torch.randn(8, 8)
    before = {"x.bias": torch.zeros(8), "x.weight": shared, "y.weight": shared.clone(), "z": torch.randn(8, 8)}
    after = {"p.bias": torch.zeros(8), "q.other": torch.zeros(8), "p.weight": shared, "z": torch.randn(8, 8)}
    for output in ("safetensors", "pt"):
        write = save_file if output == "safetensors" else torch.save
        write({k: v.clone() for k, v in before.items()}, f"a.{output}")
        write({k: v.clone() for k, v in after.items()}, f"b.{output}")
        for count in (1, 2, 3, 6):
            check_merge(count, "diff", f"a.{output}", f"b.{output}")


def test_duplicates_in_two_shards_are_found(check_merge):
    """Only the merge can check whether two tensors of different shards with the same digest have the same bytes."""
    torch.manual_seed(1)
    once, twice = torch.randn(700, 100), torch.randn(900, 100)
    torch.save({"a": once, "b": twice, "c": once.clone(), "d": twice.clone()}, "a.pt")
    assert check_merge(4, "audit", "a.pt", "--values") == [("digest_batch", 4)]
    assert check_merge(1, "audit", "a.pt", "--values") == []


# --- unreadable and inconclusive tensors -----------------------------------------------------------------------------


def _damage_tensor(path: str, tensor: str, state: str) -> None:
    """Change a byte of the tensor."""
    from statecli import formats

    where = next(row for row in formats.read(state).tensors if row.fqn == tensor).ranges[0]
    raw = bytearray(Path(path).read_bytes())
    raw[where.offset] ^= 0x40
    Path(path).write_bytes(raw)


@pytest.mark.parametrize("line", ["diff a.pt b.pt", "audit b.pt --values", "lock b.pt", "inspect b.pt --stats"])
def test_wrong_checksum_is_reported_as_without_shards(statecli, run_shards, line):
    """The affected shard reports the checksum, exits with status 2 and still writes its part file; the merge reports it
    too.
    """
    torch.save({f"w{i}": torch.full((40, 10), float(i)) for i in range(9)}, "a.pt")
    torch.save({f"w{i}": torch.full((40, 10), float(i % 4)) for i in range(9)}, "b.pt")
    _damage_tensor("b.pt", "w6", "b.pt")
    paths, codes = run_shards(4, *line.split())
    assert sorted(codes) == [0, 0, 0, 2]
    unsharded, merged = statecli(*line.split()), statecli("merge", *paths)
    assert (merged.code, merged.out, merged.err) == (unsharded.code, unsharded.out, unsharded.err)
    assert "checksum" in unsharded.out + unsharded.err


def test_inconclusive_pair_is_reported_as_without_shards(statecli, run_shards):
    """A view with endlessly overlapping windows makes only its own pair inconclusive; the other pairs are compared."""
    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        windows = (torch.arange(16000.0) + value).as_strided((8000, 8000), (1, 1))
        torch.save({"odd": windows, "w": torch.full((9,), value), "v": torch.ones(700)}, name)
    paths, codes = run_shards(3, "diff", "a.pt", "b.pt")
    unsharded, merged = statecli("diff", "a.pt", "b.pt"), statecli("merge", *paths)
    assert (merged.code, merged.out, merged.err) == (unsharded.code, unsharded.out, unsharded.err)
    assert (unsharded.code, sorted(codes)) == (2, [0, 0, 2])


def test_missing_checkpoint_shard_is_reported_as_without_shards(check_merge):
    """Each shard reads all headers, so the merge reports a missing file as the unsharded command does."""
    for n in (0, 1):
        os.mkdir(f"m{n}")
        index = {}
        for i in range(1, 4):
            save_file({f"w{i}": torch.full((9, 9), float(i + n))}, f"m{n}/model-{i:05}-of-00003.safetensors")
            index[f"w{i}"] = f"model-{i:05}-of-00003.safetensors"
        text = json.dumps({"metadata": {}, "weight_map": index})
        Path(f"m{n}/model.safetensors.index.json").write_text(text)
    Path("m1/model-00002-of-00003.safetensors").unlink()
    check_merge(3, "diff", "m0", "m1")
    check_merge(2, "audit", "m0", "m1", "--values")


# --- engines, and Python ---------------------------------------------------------------------------------------------


def test_parts_of_several_engines_are_merged(check_merge):
    """Threads, processes and this process: a part file does not name its engine, because the engine does not matter."""
    for seed, name in ((1, "a.pt"), (2, "b.pt")):
        torch.save(build_all_kinds(seed), name)
    engines = (("-j", "1"), ("--executor", "threads:2"), ("--executor", "processes:2"), ())
    engine_options = lambda index: engines[index % 4]  # noqa: E731
    assert check_merge(4, "diff", "a.pt", "b.pt", more=engine_options) == []


def test_merge_uses_its_own_engine(statecli, run_shards, computed_tasks):
    """The merge does not use the engines of the shards."""
    torch.manual_seed(1)
    once = torch.randn(700, 100)
    torch.save({"a": once, "b": torch.randn(900, 100), "c": once.clone()}, "a.pt")
    paths, _ = run_shards(3, "audit", "a.pt", "--values", more=lambda _: ("-j", "1"))
    unsharded = statecli("audit", "a.pt", "--values")
    computed_tasks.clear()
    merged = statecli("merge", *paths, "--executor", "threads:2")
    assert (merged.code, merged.out) == (unsharded.code, unsharded.out)
    assert computed_tasks == [("digest_batch", 2)]


def test_python_merges_only_diff_and_inspect(run_shards):
    """The Python API returns the same Inspection and Diff; it refuses part files of an audit or a lock."""
    for seed, name in ((1, "a.pt"), (2, "b.pt")):
        torch.save({k: v for k, v in build_all_kinds(seed).items() if k != "channels"}, name)
    paths, _ = run_shards(3, "diff", "a.pt", "b.pt")
    assert repr(api.merge(map(Path, paths))) == repr(api.diff("a.pt", "b.pt"))
    run_shards(2, "inspect", "a.pt", "--stats", folder="stats")
    assert repr(api.merge("stats/*.jsonl")) == repr(api.inspect("a.pt", stats=True))
    with pytest.raises(UnreadableError, match="part 3 of 3 is missing"):
        api.merge(paths[:2])
    paths, _ = run_shards(2, "lock", "a.pt", folder="lock")
    with pytest.raises(UsageError, match="accepts only part files of diff and inspect"):
        api.merge(paths)


def test_damaged_target_is_audited_as_without_shards(statecli, run_shards):
    """A single shard reads the damage: all shards plan the same passes, and the merge stops where the unsharded command
    does.
    """
    for n, name in enumerate(("a.pt", "b.pt", "c.pt")):
        torch.save({f"w{i}": torch.full((40, 10), float(i + n)) for i in range(9)}, name)
    assert statecli("lock", "a.pt", "b.pt", "c.pt", "-o", "statecli.lock").code == 0
    _damage_tensor("b.pt", "w6", "b.pt")
    Path("statecli.toml").write_text('[policy]\nmust-change = ["w2"]\nmust-not-change = ["w6"]\n')
    line = ("audit", "b.pt", "c.pt", "--values", "--lock", "statecli.lock", "--against", "a.pt")
    for count in (1, 3, 5):
        paths, codes = run_shards(count, *line)
        assert 2 in codes
        whole, merged = statecli(*line, "-f", "json"), statecli("merge", *paths, "-f", "json")
        assert (merged.code, merged.out, merged.err) == (whole.code, whole.out, whole.err)
        assert whole.code == 2
