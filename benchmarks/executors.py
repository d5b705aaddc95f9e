"""The same `diff` by two threads, two processes and two workers of Dask on this machine; what a parcel costs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _inputs import changed_values, safetensors_values
from _measure import ROOT, Figures, alternate, environment, python, statecli

SIZE = 2 << 30
#: Two workers of one thread each; it ends when its standard input is closed.
CLUSTER = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""
#: Seconds that a parcel takes where its one task has one element; and the work of a parcel as `diff` makes them.
PARCELS = """
import json, sys, time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from statecli.values.compare_task import TASK_ELEMENTS, CompareTask, run_batch
from statecli.values.delta import CompareOptions
from statecli.workers import executors, pool
from statecli.workers.task import Piece

def took(count, size):
    pieces = [Piece(path, 1 << 20, "bfloat16") for path in (before, after)]
    tasks = [CompareTask(0, "w", n * size, size, *pieces) for n in range(count)]
    begun = time.perf_counter()
    pool.run_tasks(run_batch, CompareOptions(), tasks, absent=None)
    return time.perf_counter() - begun

if __name__ == "__main__":
    before, after, name, module = sys.argv[1:]
    made = import_module(f"statecli.workers.executors.{module}")
    count = made.MAX_BATCH_BYTES // (2 * TASK_ELEMENTS)
    with executors.use_executor("threads:1"):
        work = min(took(count, TASK_ELEMENTS) for _ in range(5))
    pool.MIN_BATCH_BYTES = made.MAX_BATCH_BYTES = 1
    with executors.use_executor(name or ProcessPoolExecutor(2, get_context("spawn"))):
        took(100, 1)
        handing = min(took(1000, 1) for _ in range(3)) / 1000
    print(json.dumps([handing, work]), flush=True)
"""


def lines(folder: Path) -> list[str]:
    """The engines beside two threads, with the cluster begun before; what a parcel costs beside its work."""
    before = safetensors_values(folder / "before.safetensors", "bfloat16", SIZE)
    after = changed_values(before, folder / "after.safetensors")
    with _cluster(folder) as address:
        engines = ("threads:2", "processes:2", f"dask:{address}")
        commands = [statecli("diff", str(before), str(after), "-f", "json", "--executor", one) for one in engines]
        documents = {_said(command) for command in commands}
        assert len(documents) == 1, "the engines disagree"
        threads, processes, dask = alternate(*commands, rounds=7, accept=(1,))
        files = (str(before), str(after))
        parcels = [_parcel("Dask", python(PARCELS, *files, f"dask:{address}", "dask"))]
    parcels += [
        _parcel("Ray", python(PARCELS, *files, "ray", "ray")),
        _parcel("a rank of MPI", _ranks(folder, *files, "mpi", "futures")),
        _parcel("a process of an `Executor`", python(PARCELS, *files, "", "futures")),
    ]
    return [
        _row("two processes", processes, threads, None),
        _row("Dask with two local workers", dask, threads, 1.3),
        *parcels,
    ]


def _parcel(to: str, command: list[str]) -> str:
    handing, work = json.loads(_said(command, code=0))
    met = "yes" if handing <= 0.02 * work else "**no**"
    figures = f"{handing * 1e3:.2f} ms | the work: {work * 1e3:.0f} ms | {handing / work:.1%} | ≤ 2 % | {met} |"
    return f"| sending a batch to {to}, compared with its work | {figures}"


def _ranks(folder: Path, *arguments: str) -> list[str]:
    """The command, as rank 0 of three."""
    script = folder / "parcels.py"
    script.write_text(PARCELS)
    interpreter = python("")[0]
    mpiexec = str(Path(interpreter).with_name("mpiexec"))
    return [mpiexec, "-n", "3", interpreter, "-m", "mpi4py.futures", str(script), *arguments]


def _row(name: str, found: Figures, threads: Figures, limit: float | None) -> str:
    ratio = found.wall / threads.wall
    met = "—" if limit is None else "yes" if ratio <= limit else "**no**"
    aim = "—" if limit is None else f"≤ {limit} × the time"
    times = f"{found.wall:.2f} s | two threads: {threads.wall:.2f} s | {ratio:.2f} × the time, the same document"
    return f"| `diff` of 2 GiB of bfloat16, every element changed, by {name} | {times} | {aim} | {met} |"


def _said(command: list[str], code: int = 1) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


@contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """Its address. Its workers stand in a folder of their own, and import statecli before they are measured."""
    script = folder / "cluster.py"
    script.write_text(CLUSTER)
    pipe = subprocess.PIPE
    process = subprocess.Popen([*python("")[:1], str(script)], env=environment(), stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.communicate()
