"""Engines: who does the tasks of the value passes, where `--executor` or `executor=` says so.

    threads[:N]              threads of this process
    processes[:N]            forked processes of this machine, whatever the size of the work
    dask:tcp://HOST:PORT     workers of a Dask cluster
    mpi                      the other ranks of this MPI job
    ray[:ADDRESS]            workers of a Ray cluster; without an address one of this machine
    an Executor              of `concurrent.futures`, from Python

Tasks are cut, and their results added up, in one way for all of them, so that the result is the same bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from statecli.core.errors import UsageError
from statecli.values import pool
from statecli.values.pool import Engine

_WRITTEN = "threads[:N], processes[:N], dask:tcp://HOST:PORT, mpi or ray[:ADDRESS]"
#: Of each engine what may stand behind its name, as a regular expression.
_ENGINES = {
    "threads": r"(?::(?P<count>[1-9]\d{0,3}))?",
    "processes": r"(?::(?P<count>[1-9]\d{0,3}))?",
    "dask": r":(?P<address>\S+)",
    "mpi": "",
    "ray": r"(?::(?P<address>\S+))?",
}


def named(executor: object) -> str:
    """What it is called in messages."""
    return executor if isinstance(executor, str) else type(executor).__name__


def check(executor: object, *, jobs: int = 0, device: str = "cpu") -> None:
    """Raises `UsageError` for what is no engine, or makes no sense beside the other options. Nothing is imported."""
    if executor is None:
        return
    _parsed(executor)
    for option, given in ((f"--jobs {jobs}", jobs != 0), (f"--device {device}", device != "cpu")):
        if given:
            raise UsageError(f"--executor {named(executor)} and {option} contradict each other; leave one of them out")


def working(executor: object) -> AbstractContextManager[None]:
    """Around the work that it is to do; None: as it is done without.

    Raises `UsageError` for what is no engine, `MissingDependency` for a package that it needs, `EngineError` where it
    does not answer.
    """
    return nullcontext() if executor is None else _working(executor)


@contextmanager
def _working(executor: object) -> Iterator[None]:
    with _opened(executor) as engine, pool.using(engine):
        yield


def _opened(executor: Any) -> AbstractContextManager[Engine]:
    name, count, address = _parsed(executor)
    if not isinstance(executor, str):
        from statecli.workers.executors.futures import Elsewhere

        workers = getattr(executor, "_max_workers", 0)  # the standard library's have nothing to be asked by
        return nullcontext(Elsewhere(executor, name, workers if isinstance(workers, int) else 0))
    if name in ("threads", "processes"):
        return nullcontext(_LOCAL[name](count or pool.cores()))
    if name == "dask":
        from statecli.workers.executors.dask import connected

        return connected(address)
    if name == "ray":
        from statecli.workers.executors.ray import started

        return started(address)
    from statecli.workers.executors.mpi import ranks

    return ranks()


_LOCAL: dict[str, Callable[[int], Engine]] = {"threads": pool.Threads, "processes": pool.Processes}


def _parsed(executor: object) -> tuple[str, int, str]:
    """The engine's name, its number of workers (0: as many as there are cores), and its address."""
    if not isinstance(executor, str):
        from concurrent.futures import Executor

        if not isinstance(executor, Executor):
            raise UsageError(f"--executor: {executor!r} is no Executor, nor one of {_WRITTEN}")
        return named(executor), 0, ""
    name = executor.partition(":")[0]
    found = re.fullmatch(re.escape(name) + _ENGINES[name], executor) if name in _ENGINES else None
    if found is None:
        raise UsageError(f"--executor {executor}: is none of {_WRITTEN}")
    groups = found.groupdict()
    return name, int(groups.get("count") or 0), groups.get("address") or ""
