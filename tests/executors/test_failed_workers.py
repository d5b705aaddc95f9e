"""Workers that die, refuse the work or never existed, and an interrupt during the work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli import formats
from statecli.core.errors import EngineError, UnreadableError
from statecli.storage import files
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions, Delta
from statecli.values.pair_plan import Pair
from statecli.workers import pool
from statecli.workers.executors import batch as parcel, dask, use_executor
from statecli.workers.executors.futures import ExecutorEngine

from ..forked_python import start_python

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX: signals")

dask_config = pytest.importorskip("dask.config")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _paths(in_tmp_path, one_task_per_batch):
    """Two files with forty tensors each; each tensor is a batch of its own."""
    torch.manual_seed(0)
    for name in ("a", "b"):
        save_file({f"w{n}": torch.randn(50_000) for n in range(40)}, name)


@pytest.fixture
def pairs():
    sides = [formats.read(name).tensors for name in ("a", "b")]
    return [Pair(*pair) for pair in zip(*sides, strict=True)]


@pytest.fixture
def workers(dask_cluster, tmp_path):
    """A function that starts a cluster and workers, which no nanny restarts; each worker runs `preload` before its
    first task.
    """
    processes = []

    def begin(count=2, preload=""):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "preload.py").write_text(preload)
        cluster = dask_cluster(0)
        line = ["-m", "distributed.cli.dask_worker", cluster.scheduler_address, "--no-nanny"]
        line += ["--nthreads", "1", "--no-dashboard", "--preload", str(tmp_path / "preload.py")]
        for n in range(count):
            log = open(tmp_path / f"log{n}", "w")  # noqa: SIM115 - the worker's
            processes.append(start_python(line, "dask", cwd=tmp_path / "elsewhere", stdout=log, stderr=log))
        cluster.wait_for_workers(count, timeout=60)
        return cluster, processes

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def use_dask(cluster):
    return use_executor(f"dask:{cluster.scheduler_address}")


def call_once(do):
    """Return a callback that calls `do` only the first time."""
    pending_calls = [do]
    return lambda *_: pending_calls.pop()() if pending_calls else None


# --- workers that die ------------------------------------------------------------------------------------------------


#: The first task of any worker never ends by itself.
STUCK_PRELOAD = """
import os, time
from statecli.values import compare_task as run
real = run.real = getattr(run, "real", run.run_batch)  # a preload may be loaded twice
def run_batch(how, tasks):
    try:
        os.symlink(str(os.getpid()), {path!r})
    except FileExistsError:
        return real(how, tasks)
    while True:
        time.sleep(0.01)
run_batch.__module__ = "statecli.values.compare_task"
run.run_batch = run_batch
"""


def kill_worker(path, signal_number=signal.SIGKILL):
    """Wait for the worker with the first task, and kill this worker."""
    wait_for(path.is_symlink)
    os.kill(int(os.readlink(path)), signal_number)


def test_killed_worker_does_not_change_the_result(pairs, dask_cluster, tmp_path):
    """SIGKILL ends a worker process of a real cluster whose task never finishes: the result is the same."""
    expected = compare_pairs(pairs, CompareOptions())
    (tmp_path / "preload.py").write_text(STUCK_PRELOAD.format(path=str(tmp_path / "first")))
    cluster = dask_cluster(preload=[str(tmp_path / "preload.py")])
    with use_dask(cluster), ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_worker, tmp_path / "first")
        assert compare_pairs(pairs, CompareOptions()) == expected
        killing.result()


def test_batch_size_leaves_work_for_each_thread(dask_cluster, monkeypatch):
    """By the cost of Dask alone, 400 MB would be a single batch."""
    monkeypatch.setattr(dask, "MAX_BATCH_BYTES", 512 << 20)
    monkeypatch.setattr(pool, "MIN_BATCH_BYTES", 16 << 20)
    with use_dask(dask_cluster(2)):
        assert pool._engine.get().min_batch_bytes(400 << 20) == 50 << 20


def test_delivered_result_counts_after_dask_loses_it(pairs, dask_cluster, monkeypatch):
    """Dask reports that a result is lost just after the result arrived."""
    expected = compare_pairs(pairs, CompareOptions())
    real = distributed.Client._gather

    async def gather_and_lose(self, futures, *words, **options):
        results = await real(self, futures, *words, **options)
        for future in futures if isinstance(futures, list) else [futures]:
            future._state.lose()
        return results

    monkeypatch.setattr(distributed.Client, "_gather", gather_and_lose)
    with use_dask(dask_cluster(1)):
        assert compare_pairs(pairs, CompareOptions()) == expected


def test_stopped_worker_does_not_change_the_result(pairs, workers, tmp_path):
    """After SIGSTOP, the scheduler reassigns the worker's tasks when the worker is silent for `worker-ttl`."""
    expected = compare_pairs(pairs, CompareOptions())
    with dask_config.set({"distributed.scheduler.worker-ttl": "2s"}):
        cluster, _ = workers(2, STUCK_PRELOAD.format(path=str(tmp_path / "first")))
    with use_dask(cluster), ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(kill_worker, tmp_path / "first", signal.SIGSTOP)
        assert compare_pairs(pairs, CompareOptions()) == expected
        stopping.result()


def test_remaining_worker_gives_the_whole_result(pairs, workers):
    """One of the two workers dies and is not restarted."""
    expected = compare_pairs(pairs, CompareOptions())
    cluster, (victim, _) = workers()
    with use_dask(cluster):
        assert compare_pairs(pairs, CompareOptions(), progress=call_once(victim.kill)) == expected
    assert victim.wait() == -signal.SIGKILL


def test_results_before_the_death_of_all_workers_are_shown(workers, statecli, monkeypatch):
    """Earlier results are shown, the error for the rest is a single line, and the command exits with status 2 without
    waiting.
    """
    cluster, processes = workers()
    first = call_once(lambda: [process.kill() for process in processes])
    results = ExecutorEngine._get_results
    monkeypatch.setattr(ExecutorEngine, "_get_results", lambda *args: (results(*args), first())[0])
    monkeypatch.setattr(dask, "TIMEOUT_S", 1.0)
    engine = f"dask:{cluster.scheduler_address}"
    result = statecli("diff", "a", "b", "-f", "json", "--executor", engine)
    assert result.code == 2
    assert result.err == f"statecli: --executor {engine}: all workers have stopped\n"
    values = [change["values"] for change in result.json["changes"]]
    assert 0 < len([value for value in values if value]) < 40


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_scheduler_makes_pairs_unreadable(pairs, tmp_path, monkeypatch, signal_number):
    """Results not delivered by then are lost; statecli does not wait for a stopped, silent scheduler either."""
    line = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    file = tmp_path / "scheduler.json"
    line += ["--dashboard-address", ":0", "--scheduler-file", str(file)]
    scheduler = start_python(line, "dask", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    line = ["-m", "distributed.cli.dask_worker", "--scheduler-file", str(file), "--no-nanny"]
    worker = start_python([*line, "--no-dashboard"], "dask", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not file.exists():
            time.sleep(0.05)
        address = distributed.Client(scheduler_file=str(file), set_as_default=False)
        with address, use_executor(f"dask:{address.scheduler.address}"):
            monkeypatch.setattr(dask, "TIMEOUT_S", 1.0)
            actual_pairs = compare_pairs(
                pairs, CompareOptions(), progress=call_once(lambda: scheduler.send_signal(signal_number))
            )
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    unreadable_pairs = [pair for pair in actual_pairs if not isinstance(pair, Delta)]
    assert unreadable_pairs
    assert all(isinstance(pair, UnreadableError) for pair in unreadable_pairs)


LOGGING_SCRIPT = """
import logging, sys
from distributed import Client
from statecli.workers.executors import use_executor
with use_executor(sys.argv[1]):
    for name in ("distributed", "distributed.client", "distributed.core", "distributed.later", "tornado.application"):
        logging.getLogger(name).critical("said by %s", name)
logging.getLogger("distributed.client").warning("said afterwards")
"""


def test_logs_of_dask_are_not_shown(dask_cluster):
    """No logger of Dask or tornado writes during the work, whatever its own level; afterwards the loggers are as
    before.
    """
    line = [sys.executable, "-c", LOGGING_SCRIPT, f"dask:{dask_cluster(1).scheduler_address}"]
    process = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT)
    (message,) = process.stderr.splitlines()
    assert message.endswith("said afterwards")


class LosesEverySecondTask(Executor):
    """An executor that loses every second task."""

    def __init__(self):
        self.count = 0

    def submit(self, function, *words):
        self.count += 1
        future = Future()
        if self.count % 2:
            future.set_result(function(*words))
        else:
            future.set_exception(OSError("http://user:s3cr3t@host"))
        return future


def test_failed_task_affects_only_its_pair(pairs):
    """All other pairs are compared; the message has only the type of the executor's error, because its text may be
    secret.
    """
    with use_executor(LosesEverySecondTask()):
        actual_pairs = compare_pairs(pairs, CompareOptions())
    assert {type(pair) for pair in actual_pairs} == {Delta, UnreadableError}
    assert {str(pair) for pair in actual_pairs[1::2]} == {
        "--executor LosesEverySecondTask: a worker stopped during a task (OSError)"
    }


# --- workers that refuse ---------------------------------------------------------------------------------------------

OLDER_VERSION = "import statecli.core.version; statecli.core.version.__version__ = '0.0.9'"
NUMPY_KERNEL = "from statecli.values import compiled_kernel; compiled_kernel.native = None"
NO_STATECLI = f"import sys; sys.path[:] = [folder for folder in sys.path if folder not in ('', {str(ROOT)!r})]"


@pytest.mark.parametrize(
    ("preload", "expected_message"),
    [
        (OLDER_VERSION, "a worker refused the task: the worker runs statecli 0.0.9 with the "),
        pytest.param(
            NUMPY_KERNEL,
            "with the numpy compute kernel, but this command runs ",
            marks=pytest.mark.skipif(parcel.get_current_build()[1] == "numpy", reason="no compiled kernel"),
        ),
        (NO_STATECLI, "a worker has no statecli or an old version; install statecli"),
    ],
    ids=["older", "numpy", "none"],
)
def test_worker_with_another_statecli_is_refused(preload, expected_message, workers, statecli, monkeypatch, tmp_path):
    """The error is a single line, with status 2 and no values; the worker's log has no credentials."""
    monkeypatch.setattr(files, "export_access", lambda: {"token": "s3cr3t"})
    cluster, _ = workers(1, preload)
    engine = f"dask:{cluster.scheduler_address}"
    result = statecli("diff", "a", "b", "--executor", engine)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"statecli: --executor {engine}: ")
    assert expected_message in result.err
    assert result.err.count("\n") == 1
    assert "s3cr3t" not in (tmp_path / "log0").read_text()


# --- no scheduler or worker ------------------------------------------------------------------------------------------


def test_cluster_without_workers_is_refused(dask_cluster, statecli, monkeypatch):
    """The command does not wait without a limit for a worker."""
    monkeypatch.setattr(dask, "TIMEOUT_S", 0.5)
    engine = f"dask:{dask_cluster(0).scheduler_address}"
    result = statecli("diff", "a", "b", "--executor", engine)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"statecli: --executor {engine}: the scheduler has no worker; start one with: dask worker …\n"


@pytest.mark.parametrize("silent", [False, True])
def test_silent_scheduler_is_reported(statecli, monkeypatch, silent):
    """There is no listener at the address, or the listener is silent."""
    monkeypatch.setattr(dask, "TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not silent:
            server.close()
        result = statecli("diff", "a", "b", "--executor", f"dask:tcp://127.0.0.1:{port}")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(
        f"statecli: --executor dask:tcp://127.0.0.1:{port}: no Dask scheduler answers at this address"
    )
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("address", ["nonsense://h:1", "tcp://", "tcp://127.0.0.1:port", "h:p:q"])
def test_invalid_scheduler_address_is_refused(statecli, monkeypatch, address):
    """The error is a single line, as for a silent scheduler."""
    monkeypatch.setattr(dask, "TIMEOUT_S", 1.0)
    result = statecli("diff", "a", "b", "--executor", f"dask:{address}")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1


# --- an interrupt ----------------------------------------------------------------------------------------------------

#: A worker that reports its start and never ends.
ENDLESS_PRELOAD = """
import pathlib, time
from statecli.values import compare_task as run
def run_batch(how, tasks):
    pathlib.Path({path!r}).touch()
    while True:
        time.sleep(0.01)
run_batch.__module__ = "statecli.values.compare_task"
run.run_batch = run_batch
"""


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def interrupt_diff(engine, began):
    """Return the status and output of a diff after Ctrl-C, once its work has begun."""
    line = [sys.executable, "-m", "statecli", "diff", "a", "b", "--executor", engine]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(began)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


def test_interrupt_cancels_the_tasks_of_dask(workers, tmp_path):
    """The command exits with status 130 at once and silently; tasks that have not begun are cancelled."""
    began = tmp_path / "began"
    cluster, _ = workers(1, ENDLESS_PRELOAD.format(path=str(began)))
    engine = f"dask:{cluster.scheduler_address}"
    assert interrupt_diff(engine, began.exists) == (130, "", "")
    wait_for(lambda: not cluster.scheduler.tasks)


THREADS_SCRIPT = """
import os, sys, time
from statecli.cli import process_exit, interrupts
from statecli.workers import pool
class Task(int): size = pool.MIN_BYTES_FOR_WORKERS
def endless(shared, batch):
    os.write(1, b"began\\n")  # at once: two of them begin
    time.sleep(60)
def run():
    with pool.use_engine(pool.Threads(2)):
        pool.run_tasks(endless, None, [Task(1), Task(2), Task(3)], absent=None)
interrupts.handle_interrupts()
try:
    process_exit.run_body_and_exit(run, debug=False)
except SystemExit as done:
    from statecli.__main__ import _exit_process
    _exit_process(done.code)
"""


def test_interrupt_does_not_wait_for_threads():
    """The command does not wait for the threads."""
    process = subprocess.Popen(
        [sys.executable, "-c", THREADS_SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "began\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=40)
    assert (process.returncode, err) == (130, "")
    assert time.monotonic() - start < 30


def test_engine_gets_the_smallest_task(monkeypatch):
    """The engine gets even a single tensor with a single element; with `jobs=1`, the task runs in this process."""

    class Engine:
        runs = 0

        def min_batch_bytes(self, total):
            return 0

        def run(self, function, shared, batches, deliver):
            self.runs += 1
            for n, batch in enumerate(batches):
                deliver(n, function(shared, batch))

    class Task(int):
        size = 1

    engine = Engine()
    with pool.use_engine(engine):
        for jobs in (0, 1):
            assert pool.run_tasks(lambda _, batch: batch, None, [Task(7)], absent=None, jobs=jobs) == [7]
    assert engine.runs == 1


def test_refusal_cancels_the_other_tasks():
    """After a refusal, the other submitted tasks are cancelled, because the command has no result."""

    submitted = []

    class Refusing(Executor):
        def submit(self, function, *words):
            submitted.append(Future())
            if len(submitted) == 1:
                submitted[0].set_result("statecli 0.0.9")
            return submitted[-1]

    pairs = [Pair(*pair) for pair in zip(*(formats.read(name).tensors for name in ("a", "b")), strict=True)]
    refusal = pytest.raises(
        EngineError, match=r"--executor Refusing: a worker refused the task: the worker runs statecli 0\.0\.9"
    )
    with refusal, use_executor(Refusing()):
        compare_pairs(pairs, CompareOptions())
    assert all(future.cancelled() for future in submitted[1:])
