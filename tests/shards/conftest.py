"""One command in shares: each in this process as it would be in its own, and what merge makes of their parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from statecli.workers import pool


@pytest.fixture(autouse=True)
def _job_folder(tmp_path, monkeypatch):
    """Parts and targets by names alone, as a job has them in its folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shares(statecli):
    """The parts of a command line in `count` shares, and their exit codes; `more` are the options of each share."""

    def run(count: int, *line: str, more=lambda _: (), folder: str = "parts") -> tuple[list[str], list[int]]:
        os.makedirs(folder, exist_ok=True)
        paths, codes = [], []
        for index in range(1, count + 1):
            path = os.path.join(folder, f"{index}-of-{count}.jsonl")
            result = statecli(*line, "--shard", f"{index}/{count}", "-o", path, *more(index))
            assert result.out == ""
            assert result.code in (0, 2), result
            paths.append(path)
            codes.append(result.code)
        return paths, codes

    return run


@pytest.fixture
def computed_tasks(monkeypatch):
    """The (function, number of tasks) of all that is computed from now on, and not looked up."""
    tasks_by_function: list[tuple[str, int]] = []
    run = pool._run_batches

    def count_tasks(function, shared, tasks, *rest, **more):
        tasks_by_function.extend([(function.__name__, len(tasks))] if tasks else [])
        return run(function, shared, tasks, *rest, **more)

    monkeypatch.setattr(pool, "_run_batches", count_tasks)
    return tasks_by_function


#: What only the merge can do, because it follows from the results of all shares: what was done to which tensor.
OF_MERGE = (
    "fingerprint_batch",
    "check_elements_batch",
    "derived_batch",
)


@pytest.fixture
def same(statecli, shares, computed_tasks):
    """Holds the merge of all shares to the undivided command, in some formats; what the merge computed itself."""

    def check(count: int, *line: str, formats=("json",), more=lambda _: ()) -> list[tuple[str, int]]:
        paths, _ = shares(count, *line, more=more)
        own: list[tuple[str, int]] = []
        for output in formats:
            shown = ("-f", output) if output else ()
            whole = statecli(*line, *shown)
            computed_tasks.clear()
            # Parts come in any order.
            merged = statecli("merge", *reversed(paths), *shown)
            own += [item for item in computed_tasks if item[0] not in OF_MERGE]
            assert (merged.code, merged.out, merged.err) == (whole.code, whole.out, whole.err)
        for path in paths:
            Path(path).unlink()
        return own

    return check
