"""Executors: engines for the tasks on tensor values, selected by `--executor` or `executor=`.

    threads[:N]              threads of this process
    processes[:N]            forked processes of this machine, for any size of the work
    dask:tcp://HOST:PORT     workers of a Dask cluster
    mpi                      the other ranks of this MPI job
    ray[:ADDRESS]            workers of a Ray cluster; without an address a cluster of this machine
    an Executor              of `concurrent.futures`, from Python

All executors get the same tasks, and results are added in the same order, so the result is bit-identical.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from statecli.core import posix
from statecli.core.errors import UsageError, option
from statecli.workers import pool
from statecli.workers.pool import Engine

_FORMS = "threads[:N], processes[:N], dask:tcp://HOST:PORT, mpi or ray[:ADDRESS]"
#: Regular expression of the text after the name of an executor, by name.
_SUFFIX_PATTERNS = {
    "threads": r"(?::(?P<count>[1-9]\d{0,3}))?",
    "processes": r"(?::(?P<count>[1-9]\d{0,3}))?",
    "dask": r":(?P<address>\S+)",
    "mpi": "",
    "ray": r"(?::(?P<address>\S+))?",
}


def format_executor_name(executor: object) -> str:
    """Return the name of an executor for messages."""
    return executor if isinstance(executor, str) else type(executor).__name__


def check_executor(executor: object, *, jobs: int = 0, device: str = "cpu") -> None:
    """Raise UsageError unless `executor` names an executor that fits the other options. Imports no package."""
    if executor is None:
        return
    _parse_executor(executor)
    for other_option, is_given in ((option("--jobs", jobs), jobs != 0), (option("--device", device), device != "cpu")):
        if is_given:
            option_pair = f"{option('--executor', format_executor_name(executor))} and {other_option}"
            raise UsageError(f"{option_pair} contradict each other; leave one of them out")


@contextmanager
def use_executor(executor: object) -> Iterator[None]:
    """Let `executor` run all tasks while the block runs. None means the default engine.

    Raises:
        UsageError: `executor` does not name an executor.
        MissingDependency: A package of the executor is not installed.
        EngineError: The executor does not answer.
    """
    if executor is None:
        yield
        return
    with _open_engine(executor) as engine, pool.use_engine(engine):
        yield


def _open_engine(executor: Any) -> AbstractContextManager[Engine]:
    name, count, address = _parse_executor(executor)
    if not isinstance(executor, str):
        from statecli.workers.executors.futures import ExecutorEngine

        workers = getattr(executor, "_max_workers", 0)  # the standard library has no public attribute for it
        return nullcontext(ExecutorEngine(executor, name, workers if isinstance(workers, int) else 0))
    if name in ("threads", "processes"):
        engine = pool.Threads if name == "threads" else pool.Processes
        return nullcontext(engine(count or posix.count_usable_cores()))
    if name == "dask":
        from statecli.workers.executors.dask import use_dask

        return use_dask(address)
    if name == "ray":
        from statecli.workers.executors.ray import use_ray

        return use_ray(address)
    from statecli.workers.executors.mpi import use_mpi

    return use_mpi()


def _parse_executor(executor: object) -> tuple[str, int, str]:
    """Return the executor's name, its number of workers (0 for the number of cores), and its address."""
    if not isinstance(executor, str):
        from concurrent.futures import Executor

        if not isinstance(executor, Executor):
            raise UsageError(f"{option('--executor')}: {executor!r} is not an Executor or one of {_FORMS}")
        return format_executor_name(executor), 0, ""
    name = executor.partition(":")[0]
    match = re.fullmatch(re.escape(name) + _SUFFIX_PATTERNS[name], executor) if name in _SUFFIX_PATTERNS else None
    if match is None:
        raise UsageError(f"{option('--executor', executor)}: is not one of {_FORMS}")
    groups = match.groupdict()
    return name, int(groups.get("count") or 0), groups.get("address") or ""
