"""Work in other processes: in order, all of it, and what is told when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from statecli.errors import MalformedError, UnreadableError
from statecli.values import pool

linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes only where there is fork")


def double(n):
    return 2 * n


def fail(n):
    raise MalformedError(f"{n}: no")


def die(n):
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_results_are_in_order(jobs):
    """Whatever the number of workers; `done` is called once for each."""
    seen = []
    assert pool.run(double, list(range(20)), jobs, seen.append) == [2 * n for n in range(20)]
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_worker_raises_is_raised(jobs):
    """With its own type and text."""
    with pytest.raises(MalformedError, match=r"\d: no"):
        pool.run(fail, [1, 2], jobs)


@linux
def test_a_worker_that_dies_is_told():
    """Killed for lack of memory, say: one line, not a wait without end."""
    with pytest.raises(UnreadableError, match="a worker process was killed"):
        pool.run(die, list(range(8)), 2)


SLEEPY = """
import os, sys, time
from statecli.values import pool
def sleepy(path):
    with open(path, "a") as file: file.write(f"{os.getpid()}\\n")
    time.sleep(60)
if __name__ == "__main__":
    try:
        pool.run(sleepy, [sys.argv[1]] * 4, 2)
    except KeyboardInterrupt:
        os._exit(130)  # as the command does: the executor's own threads are not waited for
"""


@pytest.fixture
def sleeping(tmp_path):
    """A process of its own group with two workers asleep, and the workers' process numbers."""
    script, pids = tmp_path / "long.py", tmp_path / "pids"
    script.write_text(SLEEPY)
    process = subprocess.Popen(
        [sys.executable, str(script), str(pids)], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (not pids.exists() or len(pids.read_text().split()) < 2):
        time.sleep(0.05)
    return process, [int(pid) for pid in pids.read_text().split()]


def is_running(pid):
    """A zombie, whose parent is gone and whom nobody has waited for yet, does not run."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@linux
def test_ctrl_c_stops_all_workers(sleeping):
    """SIGINT to the whole group, as a terminal sends it: out at once, no process left, no traceback of a worker."""
    process, pids = sleeping
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not any(map(is_running, pids))


@linux
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_workers_end_with_their_parent(sleeping, how):
    """A parent that is killed cannot end anybody; its workers see to it, or a CI step would wait for them for ever."""
    process, pids = sleeping
    process.send_signal(how)
    process.communicate(timeout=20)
    assert process.returncode == -how
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.05)
    assert not any(map(is_running, pids))
