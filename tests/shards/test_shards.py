"""A shard runs its own tasks, which are evenly cut, and writes a complete part file or none."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file

from statecli.shards.partition import RUNS_PER_SHARD, Partition
from statecli.workers import pool
from statecli.workers.pool import TASK_OVERHEAD_BYTES

from ..forked_python import run_python, start_python


@pytest.fixture
def checkpoint_files():
    """Write two different checkpoints, and a file with a model class."""
    for n, name in enumerate(("a.safetensors", "b.safetensors")):
        save_file({f"w{i}": torch.full((40, 10), float(i + n * (i % 2))) for i in range(12)}, name)
    Path("net.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self): super().__init__(2, 2)\n"
    )


# --- assignment of tasks ----------------------------------------------------------------------------------------------

passes = st.lists(st.lists(st.tuples(st.integers(0, 1 << 24), st.integers(0, 40)), max_size=60), max_size=5)


@given(passes, st.integers(1, 9))
def test_each_task_belongs_to_a_single_shard(given_passes, count):
    """For tasks of any size: tasks with the same key are in the same shard, and each shard computes this by itself."""
    partitions = [Partition(index, count) for index in range(1, count + 1)]
    for tasks in given_passes:
        sizes, keys = [size for size, _ in tasks], [key for _, key in tasks]
        owned = [partition.select_tasks(sizes, keys) for partition in partitions]
        assert sorted(n for task_numbers in owned for n in task_numbers) == list(range(len(tasks)))
        assert all(task_numbers == sorted(task_numbers) for task_numbers in owned)
        owners = {}
        for index, task_numbers in enumerate(owned):
            for n in task_numbers:
                assert owners.setdefault(keys[n], index) == index


@given(passes, st.integers(1, 9))
def test_shards_are_even_in_bytes(given_passes, count):
    """Over all passes, two shards differ at most by a run of tasks, or by the largest task."""
    partitions, loads, largest = [Partition(index, count) for index in range(1, count + 1)], [0] * count, 0
    for tasks in given_passes:
        sizes = [size for size, _ in tasks]
        enough = sum(size + TASK_OVERHEAD_BYTES for size in sizes) // (count * RUNS_PER_SHARD)
        largest = max([largest, *(enough + size + TASK_OVERHEAD_BYTES for size in sizes)])
        for n, partition in enumerate(partitions):
            loads[n] += sum(sizes[task] + TASK_OVERHEAD_BYTES for task in partition.select_tasks(sizes, None))
    assert max(loads) - min(loads) <= largest


def test_small_targets_are_spread_over_the_shards():
    """Each pass balances the earlier passes: the first task of each pass does not always go to the first shard."""
    partitions = [Partition(index, 4) for index in range(1, 5)]
    counts = [0] * 4
    for _ in range(100):
        for n, partition in enumerate(partitions):
            counts[n] += len(partition.select_tasks([1000], None))
    assert counts == [25] * 4


def test_shard_reads_runs_of_neighbouring_tensors():
    """A shard reads runs of neighbouring tensors, not every fourth tensor of a file."""
    task_numbers = Partition(2, 4).select_tasks([1 << 20] * 6400, None)
    leaps = sum(after - before > 1 for before, after in pairwise(task_numbers))
    assert len(task_numbers) == 1600
    assert leaps < RUNS_PER_SHARD


# --- a single shard ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("checkpoint_files")
def test_each_shard_runs_only_its_own_tasks(statecli, run_shards, computed_tasks, monkeypatch):
    """All shards together run the tasks of the unsharded command, and no shard runs another shard's task.

    The unsharded command compares small files and neighbours without a task; here each pair gets a task.
    """
    monkeypatch.setattr("statecli.values.compare.compare_small_pairs", lambda *_: {})
    monkeypatch.setattr("statecli.commands.diff.value_comparison.compare_plain_pairs", lambda *_: None)
    assert statecli("diff", "a.safetensors", "b.safetensors").code == 1
    task_count = sum(count for name, count in computed_tasks)
    computed_tasks.clear()
    paths, codes = run_shards(4, "diff", "a.safetensors", "b.safetensors")
    assert codes == [0] * 4
    assert sum(count for name, count in computed_tasks) == task_count
    lines = [[json.loads(line) for line in Path(path).read_text().splitlines()] for path in paths]
    names = [{line["name"] for line in part[1:-1]} for part in lines]
    assert sorted(name for part_names in names for name in part_names) == sorted(f"w{i}" for i in range(12))
    assert all(part[0]["shard"] == [n, 4] for n, part in enumerate(lines, 1))
    assert all(len(part) - 2 == part[-1]["tasks"] for part in lines)


@pytest.mark.usefixtures("checkpoint_files")
def test_shard_without_tasks_writes_a_part(run_shards, statecli):
    """There are more shards than tensors, or no values to read at all."""
    paths, codes = run_shards(30, "diff", "a.safetensors", "b.safetensors", "-i", "w1")
    assert codes == [0] * 30
    assert min(len(Path(path).read_bytes().splitlines()) for path in paths) == 2
    assert statecli("merge", *paths).out == statecli("diff", "a.safetensors", "b.safetensors", "-i", "w1").out
    save_file({"other": torch.ones(3, 3)}, "c.safetensors")
    paths, codes = run_shards(2, "diff", "a.safetensors", "c.safetensors")
    assert statecli("merge", *paths).out == statecli("diff", "a.safetensors", "c.safetensors").out


@pytest.mark.usefixtures("checkpoint_files")
def test_part_is_printed_without_an_output_file(statecli):
    """A job may keep its logs instead of a file."""
    printed = [statecli("diff", "a.safetensors", "b.safetensors", "--shard", f"{n}/2") for n in (1, 2)]
    for n, result in enumerate(printed):
        assert (result.code, result.err) == (0, "")
        Path(f"{n}.jsonl").write_text(result.out)
    unsharded = statecli("diff", "a.safetensors", "b.safetensors")
    assert statecli("merge", "0.jsonl", "1.jsonl").out == unsharded.out


@pytest.mark.usefixtures("checkpoint_files")
def test_part_does_not_depend_on_the_engine(statecli):
    """The number of jobs and the engine leave no trace: a repeated shard writes the same bytes."""
    line = ("diff", "a.safetensors", "b.safetensors", "--shard", "2/3")
    texts = {statecli(*line, *options).out for options in ((), ("-j", "1"), ("--executor", "threads:2"), ("-j", "2"))}
    assert len(texts) == 1


@pytest.mark.usefixtures("checkpoint_files")
def test_shard_of_an_unreadable_target_fails_as_the_command(statecli):
    """A truncated file, a missing file and an empty selection: the message is the same, and no part file is written."""
    raw = Path("b.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(raw[:-100])
    for line in (
        ("diff", "a.safetensors", "cut.safetensors"),
        ("diff", "a.safetensors", "nowhere.pt"),
        ("diff", "a.safetensors", "b.safetensors", "-i", "nothing"),
        ("lock", "cut.safetensors"),
    ):
        unsharded, share = statecli(*line), statecli(*line, "--shard", "1/2", "-o", "p.jsonl")
        assert (share.code, share.out, share.err) == (2, "", unsharded.err)
        assert not Path("p.jsonl").exists()


@pytest.mark.usefixtures("checkpoint_files")
@pytest.mark.parametrize(
    "line", ["diff a.safetensors b.safetensors", "inspect b.safetensors --stats", "audit b.safetensors --values"]
)
def test_target_changed_while_read_writes_no_part(statecli, monkeypatch, line):
    """The part file would describe neither state of the checkpoint."""
    run = pool._run_batches

    def run_and_change_file(*words, **options):
        actual_result = run(*words, **options)
        raw = Path("b.safetensors").read_bytes()
        Path("b.safetensors").write_bytes(raw[:-4] + b"\1\1\1\1")
        return actual_result

    monkeypatch.setattr(pool, "_run_batches", run_and_change_file)
    result = statecli(*line.split(), "--shard", "1/2", "-o", "p.jsonl")
    assert (result.code, result.out) == (2, "")
    reason = "; try again" if "inspect" in line else ", so the result is not valid; compare again"
    assert f"b.safetensors: changed while statecli read it{reason}" in result.err
    assert result.err.count("\n") == 1
    assert not Path("p.jsonl").exists()


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["0/8", "9/8", "a/b", "3", "3/", "/3", "3/8/2", "-1/8", "1/0", "٣/٨", "1/100001", "1 /2"]
)
@pytest.mark.usefixtures("checkpoint_files")
def test_invalid_shard_number_is_refused(statecli, text):
    """Shards count from 1, and the message says so, because Kubernetes and other schedulers count from 0."""
    result = statecli("diff", "a.safetensors", "b.safetensors", f"--shard={text}")
    assert (result.code, result.out) == (2, "")
    reason = "write I/N, e.g. 2/8 for the second of 8 shards (at most 100000 shards)"
    assert result.err == f"statecli: --shard {text}: {reason}\n"


@pytest.mark.parametrize(
    ("line", "expected_message"),
    [
        ("diff a.safetensors b.safetensors --metadata-only", "--metadata-only and --shard 1/2 contradict each other"),
        ("diff a.safetensors b.safetensors --ignore values", "--ignore values and --shard 1/2 contradict each other"),
        ("diff a.safetensors net.py:Net", "--shard 1/2: values are not compared with the class net.py:Net"),
        ("diff a.safetensors b.safetensors --device cuda", "--device cuda and --shard 1/2 contradict each other"),
        (
            "inspect a.safetensors",
            "--shard 1/2: inspect reads values only if the target is a checkpoint and --stats is given",
        ),
        ("inspect a.safetensors --stats --to meta", "--to and --shard 1/2 contradict each other"),
        (
            "audit a.safetensors",
            "--shard 1/2: splits the reading of tensor values, but this command does not read values; add --values or "
            "--lock FILE",
        ),
        ("lock net.py:Net", "--shard 1/2: the targets are model classes, whose values are not locked"),
        (
            "diff a.safetensors b.safetensors -f json",
            "--output-format: part files have a fixed format; give this option",
        ),
        ("diff a.safetensors b.safetensors --report json=x", "--report: part files have a fixed format"),
        ("diff a.safetensors b.safetensors --name-only", "--name-only: part files have a fixed format"),
        ("inspect a.safetensors --stats -v", "--verbose: part files have a fixed format"),
        ("audit a.safetensors --values --write-baseline x --reason y", "--write-baseline and --shard 1/2 contradict"),
        (
            "diff a.safetensors b.safetensors -o a.safetensors",
            "-o a.safetensors: the command also reads this file",
        ),
    ],
)
def test_shard_with_an_unsuitable_option_or_target_is_refused(statecli, line, expected_message):
    """The message is a single line, and no file is read or written: one target is empty, and the others are missing."""
    Path("a.safetensors").touch()
    result = statecli(*line.split(), "--shard", "1/2")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"statecli: {expected_message}")
    assert os.listdir() == ["a.safetensors"]
    assert not os.path.getsize("a.safetensors")


@pytest.mark.usefixtures("checkpoint_files")
def test_merge_refuses_options_of_other_commands(statecli, run_shards):
    """Each command has its own output options."""
    paths, _ = run_shards(2, "lock", "a.safetensors")
    for words, option in ((["-f", "json"], "--output-format"), (["--tree"], "--tree"), (["-v"], "--verbose")):
        result = statecli("merge", *paths, *words)
        reason = "the part files were written by `statecli lock`, which does not have this option; leave the option out"
        assert (result.code, result.out, result.err) == (2, "", f"statecli: {option}: {reason}\n")
    paths, _ = run_shards(2, "diff", "a.safetensors", "b.safetensors")
    assert statecli("merge", *paths, "--name-only", "--name-status").code == 2
    result = statecli("merge", *paths, "-o", paths[1])
    assert (result.code, result.err) == (
        2,
        f"statecli: -o {paths[1]}: the command also reads this file; write to another file\n",
    )
    assert statecli("merge", *paths, "-o", "a.safetensors").code == 2


@pytest.mark.usefixtures("checkpoint_files")
def test_shards_in_separate_processes_are_merged(statecli):
    """All shards run at the same time, as in an array of jobs, and the merge runs in another process."""
    command = ["-m", "statecli"]
    line = ["diff", "a.safetensors", "b.safetensors"]
    jobs = [
        start_python([*command, *line, "--shard", f"{n}/3", "-o", f"part-{n}.jsonl"], "statecli") for n in (1, 2, 3)
    ]
    assert [job.wait() for job in jobs] == [0, 0, 0]
    merged = run_python([*command, "merge", "part-*.jsonl", "-f", "json"], "statecli")
    unsharded = statecli(*line, "-f", "json")
    assert (merged.returncode, merged.stdout, merged.stderr) == (unsharded.code, unsharded.out, "")
    assert sorted(os.listdir()) == ["a.safetensors", "b.safetensors", "net.py", *(f"part-{n}.jsonl" for n in (1, 2, 3))]
