"""A command split into shards, each shard run in this process as a separate job would run, and the merge of the part
files.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from statecli.workers import pool


@pytest.fixture(autouse=True)
def _job_folder(tmp_path, monkeypatch):
    """Run the test in a temporary folder, so that part files and targets have short names, as in a job's folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_shards(statecli):
    """Run a command line in `count` shards; return part files and exit statuses; `more` adds options per shard."""

    def run(count: int, *line: str, more=lambda _: (), folder: str = "parts") -> tuple[list[str], list[int]]:
        os.makedirs(folder, exist_ok=True)
        paths, codes = [], []
        for index in range(1, count + 1):
            path = os.path.join(folder, f"{index}-of-{count}.jsonl")
            result = statecli(*line, "--shard", f"{index}/{count}", "-o", path, *more(index))
            assert result.out == ""
            assert result.code == (2 if result.err else 0), result
            paths.append(path)
            codes.append(result.code)
        return paths, codes

    return run


@pytest.fixture
def computed_tasks(monkeypatch):
    """The (function, number of tasks) of all tasks that are computed and not looked up from now on."""
    tasks_by_function: list[tuple[str, int]] = []
    run = pool._run_batches

    def count_tasks(function, shared, tasks, *rest, **options):
        tasks_by_function.extend([(function.__name__, len(tasks))] if tasks else [])
        return run(function, shared, tasks, *rest, **options)

    monkeypatch.setattr(pool, "_run_batches", count_tasks)
    return tasks_by_function


#: Tasks that only the merge can run, because they depend on the results of all shards.
MERGE_TASKS = (
    "fingerprint_batch",
    "check_elements_batch",
    "derived_batch",
)


@pytest.fixture
def check_merge(statecli, run_shards, computed_tasks):
    """Check that the merge of all shards equals the unsharded command in some formats; return the merge's own tasks."""

    def check(count: int, *line: str, formats=("json",), more=lambda _: ()) -> list[tuple[str, int]]:
        paths, _ = run_shards(count, *line, more=more)
        own_tasks: list[tuple[str, int]] = []
        for output in formats:
            output_options = ("-f", output) if output else ()
            unsharded = statecli(*line, *output_options)
            computed_tasks.clear()
            # Parts come in any order.
            merged = statecli("merge", *reversed(paths), *output_options)
            own_tasks += [item for item in computed_tasks if item[0] not in MERGE_TASKS]
            assert (merged.code, merged.out, merged.err) == (unsharded.code, unsharded.out, unsharded.err)
        for path in paths:
            Path(path).unlink()
        return own_tasks

    return check
