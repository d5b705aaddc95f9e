"""Part files with any content: merge fails with a single line or gives the same as the unsharded command."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import threading
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

import statecli as api
from statecli.core import errors
from statecli.core.errors import ChecksumMismatch, StateError, UsageError
from statecli.core.model_state import Place, Stats
from statecli.shards import shard_file, tasks
from statecli.shards.partition import ShardNumber
from statecli.values import kernels
from statecli.values.compare_task import Comparison
from statecli.values.element_checks import CheckResult
from statecli.values.summary import Facts
from statecli.values.tally import Tally, Wide

LINE = ("diff", "a.pt", "b.pt")


@pytest.fixture
def parts(run_shards):
    """Two part files of a small diff."""
    for n, name in enumerate(("a.pt", "b.pt")):
        torch.save({f"w{i}": torch.full((30, 20), float(i + n * (i % 2))) for i in range(6)}, name)
    return run_shards(2, *LINE)[0]


@pytest.fixture
def read_merge_error(statecli):
    """Return a function that runs merge, checks exit status 2 and returns the single line on stderr."""

    def run(*words: str) -> str:
        result = statecli("merge", *words)
        assert (result.code, result.out) == (2, ""), result
        assert result.err.startswith("statecli: ")
        assert result.err.count("\n") == 1
        return result.err.removeprefix("statecli: ").rstrip("\n")

    return run


def read_documents(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_forged(path: str, documents: list[dict]) -> None:
    """Write the documents as --shard would, with a matching digest."""
    body = b"".join(json.dumps(document).encode() + b"\n" for document in documents[:-1])
    end = {**documents[-1], "tasks": len(documents) - 2, "sha256": hashlib.sha256(body).hexdigest()}
    Path(path).write_bytes(body + json.dumps(end).encode() + b"\n")


def find_planned_task(documents: list[dict]) -> int:
    """Return the index of a planned task of the diff."""
    return next(
        n
        for n, document in enumerate(documents)
        if document.get("function") == "run_batch" and "derived" not in document
    )


# --- incomplete and mixed sets of parts -------------------------------------------------------------------------------


def test_missing_part_is_named(run_shards, parts, read_merge_error):
    """A single missing part, and several missing parts."""
    assert read_merge_error(parts[0]) == "part 2 of 2 is missing; give all part files"
    paths, _ = run_shards(14, *LINE)
    assert read_merge_error(*paths[:2], *paths[3:]) == "part 3 of 14 is missing; give all part files"
    assert (
        read_merge_error(paths[0])
        == "parts 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more of 14 are missing; give all part files"
    )


def test_duplicate_part_is_named(parts, read_merge_error):
    """A part file is given under another name, or both by a glob and by name."""
    shutil.copy(parts[0], "copy.jsonl")
    assert (
        read_merge_error(*parts, "copy.jsonl")
        == f"copy.jsonl: contains part 1 of 2, and so does {parts[0]}; leave one of the two files out"
    )
    assert (
        read_merge_error(parts[1], "parts/*.jsonl")
        == f"{parts[1]}: contains part 2 of 2, and so does {parts[1]}; leave one of the two files out"
    )


def test_parts_of_different_runs_are_refused(run_shards, parts, read_merge_error):
    """Part files of another command, target, option or number of shards are refused."""
    for folder, line, reason in (
        ("audit", ("audit", "a.pt", "--values"), "the command is audit, but diff"),
        ("other", ("diff", "a.pt", "a.pt"), "after is a.pt, but b.pt"),
        ("bits", (*LINE, "--bitwise"), "bitwise is True, but not given"),
        ("globs", (*LINE, "-i", "w1"), "include is ['w1'], but not given"),
    ):
        other, _ = run_shards(2, *line, folder=folder)
        expected = f"{other[1]}: {reason} in {parts[0]}; merge only part files of the same run"
        assert read_merge_error(parts[0], other[1]) == expected
    other, _ = run_shards(3, *LINE)
    reason = f"the number of parts is 3, but 2 in {parts[0]}; merge only part files of the same run"
    assert read_merge_error(parts[0], other[1]) == f"{other[1]}: {reason}"


def test_options_without_an_effect_may_differ(run_shards, statecli):
    """Jobs, engines, colours and the progress bar may differ between shards."""
    torch.save({"w": torch.ones(3)}, "a.pt")
    options = [(), ("--no-progress", "-j", "1"), ("--color", "never", "--executor", "threads:1"), ("-q",)]
    paths, _ = run_shards(4, "diff", "a.pt", "a.pt", more=lambda index: options[index - 1])
    assert statecli("merge", *paths).code == 0


@pytest.mark.parametrize(("key", "value"), [("statecli", "0.0.9"), ("kernel", "abacus")])
def test_parts_of_another_version_or_kernel_are_refused(parts, read_merge_error, key, value):
    """Another version may give the fields another meaning; sums of another kernel differ in their last bits."""
    documents = read_documents(parts[1])
    documents[0][key] = value
    write_forged(parts[1], documents)
    version = f"{documents[0]['statecli']} with the {documents[0]['kernel']} compute kernel"
    current = f"statecli {read_documents(parts[0])[0]['statecli']} with the {kernels.kernel_name()} compute kernel"
    assert (
        read_merge_error(*parts)
        == f"{parts[1]}: was written by statecli {version}, but this machine has {current}; install the same version "
        "on all machines"
    )


def test_part_of_an_unknown_format_version_is_refused(parts, read_merge_error):
    """The message names the unknown format version."""
    documents = read_documents(parts[0])
    documents[0]["schema"] = "statecli.part/2"
    write_forged(parts[0], documents)
    assert (
        read_merge_error(*parts)
        == f"{parts[0]}: has the format version statecli.part/2, but this version of statecli reads only "
        "statecli.part/1; use the statecli version that wrote the file"
    )


# --- changed targets --------------------------------------------------------------------------------------------------


def test_changed_target_is_named(parts, read_merge_error):
    """The target has another size, or the same size and other bytes."""
    Path("b.pt").write_bytes(Path("b.pt").read_bytes() + b"\0")
    assert read_merge_error(*parts) == f"b.pt: has changed since {parts[0]} was made; run all shards again"
    torch.save({f"w{i}": torch.full((30, 20), float(i + (i % 2))) for i in range(6)}, "b.pt")
    raw = bytearray(Path("b.pt").read_bytes())
    raw[len(raw) // 7 * 3] ^= 1
    raw[0:0] = b""
    Path("b.pt").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert read_merge_error(*parts) == f"b.pt: has changed since {parts[0]} was made; run all shards again"


def test_missing_target_is_named(parts, read_merge_error, tmp_path, monkeypatch):
    """Relative paths start at the folder in which the shards ran."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    above = [os.path.join("..", path) for path in parts]
    assert (
        read_merge_error(*above)
        == f"a.pt: cannot be opened, but {above[0]} was made from this file; merge in the folder where --shard ran"
    )


def test_shards_of_different_target_versions_are_refused(run_shards, read_merge_error):
    """A training run replaced the checkpoint between two jobs."""
    torch.save({"w": torch.ones(300), "v": torch.ones(300)}, "a.pt")
    first, _ = run_shards(2, "inspect", "a.pt", "--stats", folder="one")
    torch.save({"w": torch.zeros(300), "v": torch.ones(300)}, "a.pt")
    two, _ = run_shards(2, "inspect", "a.pt", "--stats", folder="two")
    expected_message = (
        f"{two[1]}: was made from different files than {first[0]}, for example a.pt; run all shards again"
    )
    assert read_merge_error(first[0], two[1]) == expected_message


def test_copy_of_a_target_is_accepted(parts, statecli):
    """Each job of a matrix may have downloaded a copy: either the copies keep their times, or --copies is given."""
    whole = statecli(*LINE)
    for name in ("a.pt", "b.pt"):
        shutil.copy2(name, "copy")
        os.replace("copy", name)
    assert statecli("merge", *parts).out == whole.out
    for name in ("a.pt", "b.pt"):
        os.utime(name, (1, 1))
    assert statecli("merge", *parts, "--copies").out == whole.out
    assert repr(api.merge(parts, copies=True)) == repr(api.diff("a.pt", "b.pt"))


RERUN_ADVICE = "run all shards again, or give --copies if each job read a separate copy of the files"
REASON = f"so the file may have changed; {RERUN_ADVICE}"
BIG_FILE = "big.safetensors"


def write_big(value: float) -> None:
    """Write 40 MB; the middle 4 MB have this value, and statecli samples no byte of them."""
    rest = {"frozen": torch.zeros(4_500_000), "rest": torch.ones(4_500_000)}
    save_file({**rest, "head": torch.full((1_000_000,), value)}, BIG_FILE)


def test_unsampled_change_is_found_by_the_modification_time(run_shards, read_merge_error, statecli):
    """A training run changes only the head, between the shards and the merge, or between two shards."""
    write_big(0.0)
    parts, _ = run_shards(2, "inspect", BIG_FILE, "--stats")
    mtime = Path(BIG_FILE).stat().st_mtime_ns
    write_big(1.0)
    os.utime(BIG_FILE, ns=(mtime + 1000, mtime + 1000))
    assert (
        read_merge_error(*parts)
        == f"{BIG_FILE}: has a modification time that differs from the time in {parts[0]}, {REASON}"
    )
    others, _ = run_shards(2, "inspect", BIG_FILE, "--stats", folder="others")
    expected_message = (
        f"{others[1]}: records a modification time of {BIG_FILE} that differs from the time in {parts[0]}, {REASON}"
    )
    assert read_merge_error(parts[0], others[1]) == expected_message
    assert statecli("merge", *others).out == statecli("inspect", BIG_FILE, "--stats").out
    with pytest.raises(UsageError, match="or give copies if each job read a separate copy of the files"):
        api.merge(parts)


def test_target_with_a_changed_sample_is_not_a_copy(parts, run_shards, read_merge_error):
    """--copies does not accept a copy with another size or other samples."""
    torch.save({f"w{i}": torch.full((30, 20), float(i)) for i in range(6)}, "b.pt")
    expected_message = f"b.pt: has changed since {parts[0]} was made; run all shards again"
    assert read_merge_error(*parts, "--copies") == expected_message
    others, _ = run_shards(2, *LINE, folder="others")
    expected_message = (
        f"{others[1]}: was made from different files than {parts[0]}, for example b.pt; run all shards again"
    )
    assert read_merge_error(parts[0], others[1], "--copies") == expected_message


def test_lock_of_two_target_versions_is_refused(run_shards, read_merge_error):
    """A lock of shards from two versions would describe a checkpoint that never existed."""
    write_big(0.0)
    first, _ = run_shards(2, "lock", BIG_FILE, folder="one")
    mtime = Path(BIG_FILE).stat().st_mtime_ns
    write_big(1.0)
    os.utime(BIG_FILE, ns=(mtime + 1000, mtime + 1000))
    two, _ = run_shards(2, "lock", BIG_FILE, folder="two")
    expected_message = (
        f"{two[1]}: records a modification time of {BIG_FILE} that differs from the time in {first[0]}, {REASON}"
    )
    assert read_merge_error(first[0], two[1]) == expected_message


# --- files that are not parts -----------------------------------------------------------------------------------------


def test_file_that_is_not_a_part_is_refused(parts, read_merge_error):
    """The message names the file and the fault."""
    Path("x").write_bytes(b"")
    assert read_merge_error(*parts, "x") == "x: is empty, so it is not a file written by --shard"
    invalid_contents = (
        b"hello\n",
        b"[1]\n2\n3\n",
        b'{"schema": "statecli.diff/1"}\n\n\n',
        b"\xff\xfe\0",
        Path("a.pt").read_bytes(),
    )
    for raw in invalid_contents:
        Path("x").write_bytes(raw)
        assert read_merge_error("x", *parts) == "x: is not a file written by --shard"
    assert read_merge_error("nothing.jsonl").startswith("nothing.jsonl: cannot be opened")
    assert read_merge_error(".") == ".: is a directory, not a regular file"


def test_truncated_part_is_refused(parts, read_merge_error):
    """A part file is refused wherever the file is truncated."""
    raw = Path(parts[0]).read_bytes()
    *boundaries, last = (match.end() for match in re.finditer(b"\n", raw))
    assert (len(boundaries), last) == (len(read_documents(parts[0])) - 1, len(raw))
    for end in sorted({*range(1, len(raw), 7), *boundaries}):
        Path(parts[0]).write_bytes(raw[:end])
        complete = sum(boundary <= end for boundary in boundaries)
        reason = f"ends in the middle of line {complete + 1}; run its shard again"
        if end < boundaries[0]:
            reason = "is not a file written by --shard"
        elif end in boundaries[1:]:
            reason = "is incomplete: its closing line is missing; run its shard again"
        assert read_merge_error(*parts) == f"{parts[0]}: {reason}"


def test_missing_or_changed_line_is_refused(parts, read_merge_error):
    """The last line contains the number and the digest of all other lines."""
    raw = Path(parts[0]).read_bytes().splitlines(keepends=True)
    Path(parts[0]).write_bytes(b"".join(raw[:1] + raw[2:]))
    assert (
        read_merge_error(*parts)
        == f"{parts[0]}: has {len(raw) - 3} results, but its last line records {len(raw) - 2}; run its shard again"
    )
    Path(parts[0]).write_bytes(b"".join(raw).replace(b'"bytes": ', b'"bytes":1'))
    assert read_merge_error(*parts) == (
        f"{parts[0]}: was changed after statecli wrote it: the digest in its last "
        "line does not match; run its shard again"
    )


UNUSUAL_VALUES = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        2**80,
        10**299,
        1.5,
        float("1e308"),
        "",
        "x",
        "\ud800",
        [],
        [1],
        {},
        {"float": "nan"},
        {"float": []},
    ]
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_are_refused_or_merged(statecli, parts, data):
    """Changed bits and changed values never cause a traceback or an internal error."""
    original = Path(parts[0]).read_bytes()
    try:
        if data.draw(st.booleans()):
            raw = bytearray(original)
            for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
                raw[at] = data.draw(st.integers(0, 255))
            Path(parts[0]).write_bytes(raw)
        else:
            documents = read_documents(parts[0])
            _insert_unusual_value(documents, data)
            write_forged(parts[0], documents)
        result = statecli("merge", *parts)
        assert result.code in (0, 1, 2)
        assert result.err.startswith("statecli: ") == bool(result.err) == (result.code == 2)
        assert "internal error" not in result.err
        assert "Traceback" not in result.err
    finally:
        Path(parts[0]).write_bytes(original)


def _insert_unusual_value(documents: list, data: st.DataObject) -> None:
    """Put an odd value anywhere into a line, except into the last line."""
    at = documents[data.draw(st.integers(0, len(documents) - 2))]
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(UNUSUAL_VALUES)
        return


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"function": "system"},
            "contains a result of 'system', which this version of statecli does not know; use the version that wrote "
            "the file",
        ),
        ({"function": 3}, "does not have the format that --shard writes: Expected `str`, got `int` - at `$.function`"),
        ({"result": None}, "does not have the format that --shard writes: Expected `object`, got `null`"),
        ({"error": {"type": "SystemExit", "message": "0"}}, "has an error of unknown type 'SystemExit'"),
    ],
)
def test_invalid_result_line_is_refused(parts, read_merge_error, change, reason):
    """The message names the line, although the digest is right."""
    documents = read_documents(parts[0])
    at = find_planned_task(documents)
    documents[at] = {**documents[at], **change}
    write_forged(parts[0], documents)
    assert read_merge_error(*parts) == f"{parts[0]}: line {at + 1} {reason}"


SUM = [1.0, 0]


@pytest.mark.parametrize(
    ("field", "result"),
    [
        ("changed", {"tally": [-1]}),
        ("changed", {"tally": [601, 0]}),
        ("changed", {"tally": [1, 0], "equal": [[0, 600]]}),
        ("first", {"tally": [1, 10**12]}),
        ("first", {"tally": [1, 600]}),
        ("first", {"tally": [1, -1]}),
        ("first", {"tally": [1, None]}),
        ("first", {"tally": [0, 0]}),
        ("finite", {"tally": []}),
        ("finite", {"tally": [1, 0, 599]}),
        ("finite", {"tally": [], "equal": [[0, 599]]}),
        ("finite", {"tally": [1, 0, 601]}),
        ("finite", {"tally": [1, 0, 10**200]}),
        ("finite", {"tally": [1, 0, -1]}),
        ("max_abs", {"tally": [1, 0, 600, {"float": "nan"}]}),
        ("max_abs", {"tally": [1, 0, 600, -1.0]}),
        ("sum_abs", {"tally": [1, 0, 600, 1.0, [-1.0, 0]]}),
        ("sum_abs", {"tally": [1, 0, 600, 1.0, [{"float": "nan"}, 0]]}),
        ("squares", {"tally": [1, 0, 600, 1.0, SUM, [1.0, 1 << 40]]}),
        ("before", {"tally": [1, 0, 600, 1.0, SUM, SUM, [-1.0, 0]]}),
        ("product", {"tally": [1, 0, 600, 1.0, SUM, SUM, SUM, SUM, [1.0, 1 << 19]]}),
        ("product", {"tally": [1, 0, 600, 1.0, SUM, SUM, SUM, [0.0, 0], SUM]}),
        ("nan_before", {"tally": [1, 0, 600, 1.0, *[SUM] * 5, 1]}),
        ("inf_after", {"tally": [1, 0, 600, 1.0, *[SUM] * 5, 0, 0, 0, 1]}),
        ("left_out", {"tally": [1, 0, 600, 1.0, *[SUM] * 5, 0, 0, 0, 0, 1]}),
        ("lost", {"tally": [1, 0, 599, 1.0, *[SUM] * 5, 0, 0, 0, 0, 1, 2]}),
        ("equal", {"tally": [], "equal": [[0, 601]]}),
        ("equal", {"tally": [], "equal": [[-1, 10]]}),
        ("equal", {"tally": [], "equal": [[0, 0]]}),
        ("equal", {"tally": [], "equal": [[300, 300], [0, 300]]}),
        ("equal", {"tally": [], "equal": [[0, 300], [299, 301]]}),
    ],
)
def test_impossible_difference_is_refused(parts, read_merge_error, field, result):
    """Each field is checked against the task's 600 elements; the message names part file, line, tensor and field."""
    documents = read_documents(parts[0])
    at = find_planned_task(documents)
    documents[at] = {**documents[at], "result": result}
    write_forged(parts[0], documents)
    reason = f"has an impossible result for {documents[at]['name']} (field {field}); run this shard again"
    assert read_merge_error(*parts) == f"{parts[0]}: line {at + 1} {reason}"


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("audit a.pt --values", {"elements": 599}),
        ("audit a.pt --values", {"nan": 601}),
        ("audit a.pt --values", {"inf": -1}),
        ("audit a.pt --values", {"minus_inf": 1}),
        ("audit a.pt --values", {"low": None}),
        ("audit a.pt --values", {"low": 1e9}),
        ("audit a.pt --values", {"high": {"float": "inf"}}),
        ("audit a.pt --values", {"only": "AAAA" * 8}),
        ("audit a.pt --values", {"digest": -1}),
        ("inspect a.pt --stats", {"zeros": 601}),
        ("inspect a.pt --stats", {"nan": -1}),
        ("inspect a.pt --stats", {"std": -1.0}),
        ("inspect a.pt --stats", {"mean": {"float": "nan"}}),
        ("inspect a.pt --stats", {"min": 1e9}),
        ("inspect a.pt --stats", {"max": None}),
        ("lock a.pt", "zz"),
    ],
)
def test_impossible_values_are_refused(run_shards, statecli, line, change):
    """Facts, statistics and digests are checked against their tensor too; in an audit, the target fails."""
    torch.save({"w": torch.arange(600.0)}, "a.pt")
    (path,), _ = run_shards(1, *line.split())
    documents = read_documents(path)
    kinds = ("facts_of_batch", "stats_batch", "digest_batch")
    at = next(n for n, document in enumerate(documents) if document.get("function") in kinds)
    result = documents[at]["result"]
    documents[at]["result"] = {**result, **change} if isinstance(change, dict) else change
    write_forged(path, documents)
    field = next(iter(change)) if isinstance(change, dict) else "result"
    reason = f"has an impossible result for w (field {'min' if field == 'max' else field}); run this shard again"
    result = statecli("merge", path)
    assert (result.code, result.err) == (2, f"statecli: {path}: line {at + 1} {reason}\n")
    if line.startswith("audit "):
        assert f"failed: a.pt: {path}: line {at + 1} {reason}\n" in result.out
    else:
        assert result.out == ""


def test_part_without_all_results_is_named(parts, read_merge_error):
    """The message gives the number of missing results, even if the last line and the digest are consistent."""
    documents = read_documents(parts[0])
    count = documents[0]["own"]
    del documents[find_planned_task(documents)]
    write_forged(parts[0], documents)
    reason = f"lacks 1 of its {count} results; run its shard again"
    assert read_merge_error(*parts) == f"{parts[0]}: {reason}"
    documents[0]["own"] = count - 1
    write_forged(parts[0], documents)
    tasks = documents[0]["tasks"]
    reason = f"expected {tasks} results in all part files together, found {tasks - 1}; run all shards again"
    assert read_merge_error(*parts) == f"{parts[0]}: {reason}"


def test_result_without_a_task_is_refused(parts, read_merge_error, statecli):
    """A result too many, a result in place of another result, and a result that only the command can recognise as
    foreign.
    """
    documents = read_documents(parts[0])
    at = find_planned_task(documents)
    unplanned = {**documents[at], "key": "0" * 32}
    write_forged(parts[0], [documents[0], unplanned, *documents[1:]])
    count = documents[0]["own"]
    reason = f"has {count + 1} results, but its shard has {count} tasks; run its shard again"
    assert read_merge_error(*parts) == f"{parts[0]}: {reason}"
    write_forged(parts[0], [*documents[:at], unplanned, *documents[at + 1 :]])
    reason = "the part files do not have a result for this file or tensor; run all shards again"
    assert read_merge_error(*parts).endswith(f".pt: {documents[at]['name']}: {reason}")
    write_forged(parts[0], [documents[0], {**unplanned, "derived": True}, *documents[1:]])
    result = statecli("merge", *parts)
    reason = "line 2 has a result of a file or tensor that this command does not read; run all shards again"
    expected_message = f"statecli: {parts[0]}: {reason}\n"
    assert (result.code, result.err) == (2, expected_message)


def test_endless_line_is_refused(parts, read_merge_error, monkeypatch):
    """Reading stops after the longest line that --shard can write, so memory use stays bounded."""
    monkeypatch.setattr(shard_file, "PIECE_BYTES", 1 << 10)
    expected = read_merge_error(parts[0])
    monkeypatch.setattr(shard_file, "MAX_LINE_BYTES", 1 << 16)
    assert read_merge_error(parts[0]) == expected
    raw = Path(parts[0]).read_bytes().splitlines(keepends=True)
    Path("x").write_bytes(raw[0] + b" " * (1 << 20))
    assert read_merge_error("x") == "x: line 2 is longer than any line that --shard writes"
    Path("x").write_bytes(bytes(1 << 20))
    assert read_merge_error("x") == "x: line 1 is longer than any line that --shard writes"


def test_reading_a_part_takes_bounded_memory(tmp_path):
    """Reading a part file of many tasks takes less memory than twice the file's size."""
    wide, count = Wide(1.2345678, 3), 5_000
    comparison = Comparison(Tally(5, 3, 600, 1.5, *[wide] * 5))
    head = shard_file.Head(shard_file.SCHEMA, "0", "C", "diff", {}, ShardNumber(1, 1), (), count, count, {})
    numbers = (
        shard_file.build_line(tasks.TaskKey("run_batch", f"{n:032x}"), f"layers.{n}.mlp.weight", 1 << 23, comparison)
        for n in range(count)
    )
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"".join(shard_file.encode_file(head, numbers)))
    with patch.object(shard_file, "PIECE_BYTES", 1 << 16):
        tracemalloc.start()
        results = shard_file.read_file(str(path)).results
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert results[tasks.TaskKey("run_batch", "0" * 32)].result == comparison
    assert peak < 2 * path.stat().st_size


def test_part_is_read_from_a_pipe(parts, statecli):
    """`<(zcat part.jsonl.gz)` can be read only once, and merge reads the pipe only once."""
    for read, raw in ((read, Path(path).read_bytes()) for path, read in zip(parts, ("one", "two"), strict=True)):
        os.mkfifo(read)
        threading.Thread(target=Path(read).write_bytes, args=(raw,), daemon=True).start()
    unsharded = statecli(*LINE)
    merged = statecli("merge", "one", "two")
    assert (merged.code, merged.out, merged.err) == (unsharded.code, unsharded.out, unsharded.err)


def test_deep_nesting_is_refused(parts, read_merge_error):
    """No parser accepts JSON of this depth."""
    raw = Path(parts[0]).read_bytes().splitlines(keepends=True)
    raw[1] = b"[" * 100_000 + b"]" * 100_000 + b"\n"
    body = b"".join(raw[:-1])
    end = {"end": True, "tasks": len(raw) - 2, "sha256": hashlib.sha256(body).hexdigest()}
    Path(parts[0]).write_bytes(body + json.dumps(end).encode() + b"\n")
    assert read_merge_error(*parts) == f"{parts[0]}: line 2 is not valid JSON"


@pytest.mark.parametrize("shard", [[1, 10**12], [0, 2], [3, 2], [1, 2, 3], "1/2"])
def test_part_with_an_impossible_shard_number_is_refused(parts, read_merge_error, shard):
    """merge does not count up to the number in the file."""
    documents = read_documents(parts[0])
    documents[0]["shard"] = shard
    write_forged(parts[0], documents)
    assert read_merge_error(*parts).startswith(f"{parts[0]}: line 1 ")


def test_number_of_a_million_digits_is_refused(parts, read_merge_error):
    """Parsing such a number would take very long."""
    documents = read_documents(parts[0])
    documents[1]["bytes"] = 1
    write_forged(parts[0], documents)
    body = Path(parts[0]).read_bytes().replace(b'"bytes": 1,', b'"bytes": ' + b"1" * 10**6 + b",", 1)
    body = body[: body.rindex(b'{"end"')]
    end = {"end": True, "tasks": len(documents) - 2, "sha256": hashlib.sha256(body).hexdigest()}
    Path(parts[0]).write_bytes(body + json.dumps(end).encode() + b"\n")
    assert read_merge_error(*parts) == f"{parts[0]}: line 2 is not valid JSON"


@pytest.mark.parametrize(
    "options",
    [{"output": "a.pt"}, {"report": ["json=a.pt"]}, {"shard": "1/2"}, {"executor": "threads"}, {"nonsense": 1}],
)
def test_part_with_another_option_is_refused(parts, read_merge_error, options):
    """A forged part file cannot make merge write a file or use a cluster."""
    before = Path("a.pt").read_bytes()
    for path in parts:
        documents = read_documents(path)
        documents[0]["options"] |= options
        write_forged(path, documents)
    name = next(iter(options))
    assert read_merge_error(*parts) == f"{parts[0]}: line 1 contains the option '{name}', which --shard does not write"
    assert Path("a.pt").read_bytes() == before


def test_parts_that_contradict_each_other_are_refused(parts, read_merge_error):
    """Two part files have different results for the same task."""
    documents = [read_documents(path) for path in parts]
    task = documents[0][find_planned_task(documents[0])]
    other = {**task, "result": {"tally": [1, 0, 600, 1.0, [1.0, 0], [1.0, 0]]}}
    documents[1].insert(1, other)
    documents[1][0]["own"] += 1
    write_forged(parts[1], documents[1])
    reason = "line 2: another part file has a different result for the same file or tensor; run all shards again"
    assert read_merge_error(*parts) == f"{parts[1]}: {reason}"


# --- code -------------------------------------------------------------------------------------------------------------


def test_code_named_in_parts_runs_only_with_allow_code(run_shards, statecli, read_merge_error, tmp_path):
    """A part file may come from anywhere, and `os:system("…")` is a valid spec."""
    Path("net.py").write_text(
        "from pathlib import Path\nfrom torch import nn\nPath('ran').touch()\n"
        "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
    )
    torch.save(torch.nn.Linear(2, 2).state_dict(), "a.pt")
    line = ("inspect", "a.pt", "--stats", "--model", "net.py:Net")
    paths, _ = run_shards(2, *line)
    Path("ran").unlink()
    assert (
        read_merge_error(*paths)
        == "net.py:Net: merging these part files imports and runs this code; if you trust the code, give "
        "--allow-code 'net.py:Net'"
    )
    assert not Path("ran").exists()
    assert read_merge_error(*paths, "--allow-code", "net.py:Other").startswith(
        "net.py:Net: merging these part files imports and runs this code"
    )
    assert statecli("merge", *paths, "--allow-code", "net.py:Net").out == statecli(*line).out
    expected_message = read_merge_error(*paths, "--allow-code", "net.py:Net", "--allow-code", "x.py:Y")
    assert (
        expected_message
        == "--allow-code x.py:Y: the part files do not use a class or plugin of this name; leave the option out"
    )


# --- results are the same after writing and reading -------------------------------------------------------------------

floats = st.floats(width=64) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324])
wides = st.builds(Wide, floats.filter(lambda number: not number < 0), st.integers(-5000, 5000))
counts = st.integers(0, 2**70)
tallies = st.builds(Tally, counts, st.none() | counts, counts, floats, wides, wides, wides, wides, wides, *[counts] * 6)
comparisons = st.builds(Comparison, tallies, st.lists(st.tuples(counts, counts), max_size=3).map(tuple))
number = st.none() | floats | st.integers(-(2**63), 2**64)
text = st.text(st.characters(codec=None)) | st.none()
all_facts = st.builds(
    Facts,
    *[counts] * 6,
    number,
    number,
    st.none() | st.binary(),
    st.none() | st.integers(0, 2**64 - 1),
    text,
    st.booleans(),
)
stats = st.builds(Stats, *[st.none() | floats] * 4, *[st.none() | counts] * 3, text)
errors_of_ours = st.builds(
    lambda kind, message: kind(message),
    st.sampled_from([error for error in shard_file.ERRORS.values() if error is not ChecksumMismatch]),
    st.text(st.characters(codec=None)),
)
RESULTS = {
    "run_batch": comparisons,
    "facts_of_batch": all_facts,
    "stats_batch": stats,
    "digest_batch": st.text(),
    "fingerprint_batch": st.none() | st.integers(0, 2**32 - 1),
    "check_batch": st.none(),
    "check_elements_batch": st.builds(CheckResult, *[counts] * 5, st.lists(counts).map(tuple), counts),
}


def test_every_result_type_has_a_strategy():
    """A task function without a test here could lose data; derived_batch runs only in a merge."""
    from statecli.workers.executors.batch import FUNCTIONS

    assert set(RESULTS) == set(tasks.RESULT_TYPES)
    assert set(FUNCTIONS) == {"derived_batch"} | set(RESULTS)


@settings(max_examples=100)
@given(data=st.data())
def test_result_is_unchanged_after_writing_and_reading(tmp_path_factory, data):
    """NaN, infinities, -0.0, integers of more than 64 bits, bytes, lone surrogates."""
    path = tmp_path_factory.mktemp("part") / "p.jsonl"
    head = shard_file.Head(shard_file.SCHEMA, "0", "C", "diff", {}, ShardNumber(1, 1), (), 1, 1, {})
    name = data.draw(st.sampled_from(sorted(RESULTS)))
    result = data.draw(RESULTS[name] | errors_of_ours)
    key = tasks.TaskKey(name, "k")
    path.write_bytes(b"".join(shard_file.encode_file(head, [shard_file.build_line(key, "w", 3, result)])))
    read_result = shard_file.read_file(str(path)).results[key].result
    assert type(read_result) is type(result)
    assert repr(read_result) == repr(result)


def test_error_keeps_its_type_and_place(tmp_path):
    """Error classes of a single reader become their base class; the error keeps its byte range for SARIF."""
    from statecli.pickles.errors import TruncatedPickle

    head = shard_file.Head(shard_file.SCHEMA, "0", "C", "diff", {}, ShardNumber(1, 1), (), 2, 2, {})
    wrong = ChecksumMismatch("a.pt: w: checksum wrong", difference="1, not 2", place=Place("a.pt", 64, 128))
    results = {
        tasks.TaskKey("check_batch", "1"): wrong,
        tasks.TaskKey("check_batch", "2"): TruncatedPickle("a.pt: ends"),
    }
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b"".join(
            shard_file.encode_file(
                head, [shard_file.build_line(key, "w", 3, result) for key, result in results.items()]
            )
        )
    )
    first, second = read_results = [result.result for result in shard_file.read_file(str(path)).results.values()]
    assert (type(first), str(first), vars(first)) == (ChecksumMismatch, str(wrong), vars(wrong))
    assert (type(second), str(second)) == (errors.MalformedError, "a.pt: ends")
    assert all(isinstance(result, StateError) for result in read_results)
