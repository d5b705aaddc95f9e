"""All engines give the same result, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest

import statecli as package

from ..conftest import Result

COMMANDS = {
    "diff": ("diff", "before.pt", "after.pt", "-f", "json"),
    "bitwise": ("diff", "before.pt", "after.pt", "-f", "json", "--bitwise"),
    "stats": ("inspect", "after.pt", "--stats", "-f", "json"),
    "audit": ("audit", "after.pt", "--values", "-f", "json"),
    "lock": ("lock", "after.pt", "-o", "-"),
}


@pytest.fixture(autouse=True)
def _checkpoint_folder(checkpoints, monkeypatch, one_task_per_batch):
    monkeypatch.chdir(checkpoints)


#: A command for each kind of task.
TASK_COMMANDS = ("diff", "stats", "lock")
_results_by_command: dict[str, Result] = {}


@pytest.fixture
def single_process_results(statecli):
    """The results of a single process."""
    if not _results_by_command:
        _results_by_command.update({name: statecli(*words) for name, words in COMMANDS.items()})
    return _results_by_command


def test_compared_documents_are_not_empty(single_process_results):
    """The documents have changed, renamed and identical tensors, so equal documents are not equal because they are
    empty.
    """
    codes = {"diff": 1, "bitwise": 1, "stats": 0, "audit": 1, "lock": 0}
    assert {name: result.code for name, result in single_process_results.items()} == codes
    summary = single_process_results["diff"].json["summary"]
    assert (summary["changed"], summary["renamed"], summary["identical"], summary["broken"]) == (21, 1, 2, 0)


#: The command line, with each task handed out by itself.
SINGLE_TASK_BATCHES = (
    "from statecli.workers import pool; from statecli.workers.executors import futures; from statecli import __main__\n"
    "pool.MIN_BATCH_BYTES = futures.MAX_BATCH_BYTES = 1; __main__.command()"
)


def run_in_new_process(*words: str, code: str = "from statecli import __main__; __main__.command()") -> Result:
    """Run statecli in a new process, because a fork of this process copies the memory of all libraries of the tests."""
    line = [sys.executable, "-c", code, *words]
    process = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    return Result(process.returncode, process.stdout, process.stderr)


def test_threads_give_the_same_result(statecli, single_process_results):
    for name, words in COMMANDS.items():
        assert statecli(*words, "--executor", "threads:2") == single_process_results[name], name


def test_processes_give_the_same_result(single_process_results):
    process = run_in_new_process(*COMMANDS["diff"], "--executor", "processes:2", code=SINGLE_TASK_BATCHES)
    assert process == single_process_results["diff"]


def test_dask_cluster_gives_the_same_result(statecli, single_process_results, dask_cluster):
    """Two worker processes share only the batches with this process; the paths are relative."""
    engine = f"dask:{dask_cluster().scheduler_address}"
    for name in TASK_COMMANDS:
        assert statecli(*COMMANDS[name], "--executor", engine) == single_process_results[name], name


@pytest.mark.skipif(
    shutil.which("mpiexec", path=str(Path(sys.executable).parent)) is None, reason="mpiexec is not installed"
)
def test_mpi_ranks_give_the_same_result(single_process_results):
    """Three ranks, two of them workers; the exit status is the command's, and no rank adds output."""
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    line = [mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures", "-m", "statecli", *COMMANDS["diff"]]
    process = subprocess.run([*line, "--executor", "mpi"], capture_output=True, text=True, timeout=120, check=False)
    assert Result(process.returncode, process.stdout, process.stderr) == single_process_results["diff"]


def test_ray_workers_give_the_same_result(single_process_results):
    """The command starts a cluster on this machine and stops the cluster at the end."""
    pytest.importorskip("ray")
    process = run_in_new_process(*COMMANDS["diff"], "--executor", "ray")
    assert (process.code, process.out) == (single_process_results["diff"].code, single_process_results["diff"].out), (
        process.err
    )


def test_executor_of_python_gives_the_same_result():
    """The caller's threads, and processes that were not forked; statecli closes neither executor."""

    def diff_and_inspect(**options):
        results = package.diff("before.pt", "after.pt", **options), package.inspect("after.pt", stats=True, **options)
        return [msgspec.json.encode(result) for result in results]

    expected = diff_and_inspect()
    with ThreadPoolExecutor(2) as threads, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        assert diff_and_inspect(executor=threads) == expected
        assert diff_and_inspect(executor=processes) == expected
        assert threads.submit(int, "1").result() == 1
    assert diff_and_inspect(executor="threads:2") == expected
