"""Tasks in other processes: results are in order and complete, and a killed worker is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from statecli.core.errors import MalformedError, UnreadableError
from statecli.workers import pool

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: forked workers")


def double_numbers(times, batch):
    return [2 * times * n for n in batch]


def fail_odd_numbers(_, batch):
    return [MalformedError(f"{n}: no") if n % 2 else n for n in batch]


def fail_batch(_, batch):
    raise MalformedError(f"{batch[0]}: no")


def kill_worker(_, batch):
    if 3 in batch:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


class Large(int):
    """A task that forms a batch alone."""

    size = pool.MIN_BYTES_FOR_WORKERS


class Small(int):
    """A task that shares a batch with others."""

    size = 100


def run(function, tasks, jobs, **options):
    """Run each task in its own batch."""
    return pool.run_tasks(function, 1, [Large(task) for task in tasks], absent=None, jobs=jobs, **options)


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_results_are_in_order(jobs):
    """The order does not depend on the number of workers; `on_batch` is called once for each batch."""
    seen = []
    assert run(double_numbers, list(range(20)), jobs, on_batch=seen.append) == [2 * n for n in range(20)]
    assert sorted(seen) == [(n,) for n in range(20)]


def test_small_tasks_are_run_in_batches():
    """Each task in a batch has its own result; an empty list of tasks has no results."""
    seen = []
    tasks = pool.run_tasks(double_numbers, 3, [Small(n) for n in range(2000)], absent=None, on_batch=seen.append)
    assert tasks == [6 * n for n in range(2000)]
    assert 1 < len(seen) < 10
    assert [n for batch in seen for n in batch] == list(range(2000))
    assert run(double_numbers, [], 2) == []


def test_small_tasks_run_in_this_process():
    """Starting workers would take longer than the tasks."""
    tasks = pool.run_tasks(lambda _, batch: [os.getpid()] * len(batch), None, [Small(1), Small(2)], absent=None)
    assert tasks == [os.getpid()] * 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_error_of_a_task_is_its_result(jobs):
    """The result is the error with its own type and text; other tasks have their own results."""
    result = run(fail_odd_numbers, [0, 1, 2], jobs)
    assert (result[0], result[2]) == (0, 2)
    assert isinstance(result[1], MalformedError)
    assert str(result[1]) == "1: no"


@pytest.mark.parametrize("jobs", [1, 2])
def test_error_of_a_batch_is_the_result_of_each_task(jobs):
    assert [str(error) for error in run(fail_batch, [5, 6], jobs)] == ["5: no", "6: no"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_first_error_is_raised_if_all_results_are_needed(jobs):
    """A lock without one of its digests is useless, so the remaining tasks need not be run."""
    with pytest.raises(MalformedError, match="1: no"):
        run(fail_odd_numbers, [0, 1, 2], jobs, raise_errors=True)


@linux
@pytest.mark.parametrize("jobs", [2, 3])
def test_only_the_task_of_a_killed_worker_is_an_error(jobs):
    """The task of a killed worker (for example out of memory) has an error, and all other tasks are done."""
    result = run(kill_worker, list(range(12)), jobs)
    assert isinstance(result[3], UnreadableError)
    assert "a worker process was killed" in str(result[3])
    assert [n for n in result if n is not result[3]] == [n for n in range(12) if n != 3]


SLEEPY = """
import os, sys, time
from statecli.workers import pool
class Task(str): size = pool.MIN_BYTES_FOR_WORKERS
def sleepy(_, batch):
    with open(batch[0], "a") as file: file.write(f"{os.getpid()}\\n")
    time.sleep(60)
if __name__ == "__main__":
    try:
        pool.run_tasks(sleepy, None, [Task(sys.argv[1])] * 4, absent=None, jobs=2)
    except KeyboardInterrupt:
        os._exit(130)  # as the command does: the executor's own threads are not waited for
"""


@pytest.fixture
def start_sleeping(tmp_path):
    """A process in its own group with two sleeping workers, and the workers' process ids."""
    script, pids = tmp_path / "long.py", tmp_path / "pids"
    script.write_text(SLEEPY)
    process = subprocess.Popen(
        # nohup and shells in the background have signals ignored, which a process inherits.
        ["env", "--default-signal", sys.executable, str(script), str(pids)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (not pids.exists() or len(pids.read_text().split()) < 2):
        time.sleep(0.05)
    return process, [int(pid) for pid in pids.read_text().split()]


def is_running(pid):
    """Return whether the process runs; a zombie, whose parent has exited, does not run."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@linux
def test_ctrl_c_stops_all_workers(start_sleeping):
    """A terminal sends SIGINT to the whole group: statecli exits, and no worker remains or prints a traceback."""
    process, pids = start_sleeping
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not any(map(is_running, pids))


@linux
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(start_sleeping, signal_number):
    """A killed parent cannot stop its workers; the workers exit by themselves, or a CI step would wait forever."""
    process, pids = start_sleeping
    process.send_signal(signal_number)
    process.communicate(timeout=20)
    assert process.returncode == -signal_number
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.05)
    assert not any(map(is_running, pids))
