"""Dask: the workers of a cluster, by `distributed.Client`.

Its own `get_executor` makes an error of a result that came while its worker died.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from statecli.core.errors import EngineError, MissingDependency
from statecli.values.pool import Engine
from statecli.workers.executors.futures import Elsewhere

#: Bytes of small tasks in a parcel, at most: a task of Dask takes 2 to 3 ms of its scheduler, client and worker
#: together, and comparing these a hundred times as long.
GRAIN = 512 << 20
#: Before Python 3.11 these are two.
LATE = (TimeoutError, asyncio.TimeoutError)
#: Seconds that a scheduler has to answer, and to have a worker.
TIMEOUT = 10.0


@contextmanager
def connected(address: str) -> Iterator[Engine]:
    """The engine of the cluster whose scheduler is at `address`. Raises `MissingDependency` and `EngineError`."""
    name = f"dask:{address}"
    try:
        from distributed import Client
    except ImportError as missing:
        raise MissingDependency(f"--executor {name} needs Dask: pip install 'statecli[dask]'") from missing
    with _without_its_log():
        client = _client(Client, address, name)
        # asyncio says of each task that fails when nobody waits for it any more that nobody did.
        client.loop.asyncio_loop.set_exception_handler(lambda *_: None)
        try:
            _refuse_without_workers(client, name)
            # What a dead worker had is done by another without being asked for, `allowed-failures` times.
            yield Elsewhere(_Tasks(client), name, _threads(client), GRAIN, _Watch(client).lost)
        finally:
            with suppress(OSError, *LATE):  # the results are there, or what went wrong is being told
                client.close(timeout=1)


def _client(make: Any, address: str, name: str) -> Any:
    try:
        with ThreadPoolExecutor(1) as beside:  # this thread may have a loop of its own, as in a notebook
            beside.submit(lambda: asyncio.run(asyncio.wait_for(_greet(address), TIMEOUT))).result()
        return make(address, timeout=TIMEOUT, set_as_default=False)
    except (OSError, ValueError, RuntimeError, *LATE) as why:
        raise EngineError(f"--executor {name}: no scheduler of Dask answers there ({type(why).__name__})") from why


async def _greet(address: str) -> None:
    """Connects once: a client waits without end for whoever accepts a connection and says nothing."""
    comm: Any = importlib.import_module("distributed.comm")
    security: Any = importlib.import_module("distributed.security").Security()
    where = address if "://" in address else f"tcp://{address}"
    (await comm.connect(where, timeout=TIMEOUT, **security.get_connection_args("client"))).abort()


def _refuse_without_workers(client: Any, name: str) -> None:
    try:
        client.wait_for_workers(1, timeout=TIMEOUT)
    except LATE as why:
        raise EngineError(f"--executor {name}: has no worker; start one with: dask worker …") from why


def _threads(client: Any) -> int:
    """Of all workers together; 0 where nobody says so, which is told when their results are waited for."""
    with suppress(OSError, *LATE):
        return sum(client.sync(client.scheduler.ncores, callback_timeout=TIMEOUT).values())
    return 0


class _Tasks(Executor):
    """Dask's tasks as futures."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, function: Callable[..., Any], /, *words: Any, **more: Any) -> Future[Any]:
        """As `Executor.submit`."""
        task = self._client.submit(function, *words, pure=False, **more)
        return asyncio.run_coroutine_threadsafe(self._result(task), self._client.loop.asyncio_loop)

    async def _result(self, task: Any) -> Any:
        try:
            return await self._client.gather(task, asynchronous=True)
        except asyncio.CancelledError:
            await self._client.cancel([task], asynchronous=True)
            raise


class _Watch:
    """Looks whether there is anybody to wait for."""

    def __init__(self, client: Any) -> None:
        self._client, self._seen = client, time.monotonic()

    def lost(self) -> str | None:
        """Why nothing is waited for any more: for TIMEOUT seconds no scheduler answered, or it had no worker."""
        workers = self._workers()
        now = time.monotonic()
        if workers:
            self._seen = now
        if now - self._seen < TIMEOUT:
            return None
        return "the scheduler is gone, or does not answer" if workers is None else "all workers are gone"

    def _workers(self) -> int | None:
        """One, where there are any; None where nobody says so."""
        if self._client.status != "running":
            return None
        with suppress(OSError, *LATE):
            return len(self._client.sync(self._identity, callback_timeout=TIMEOUT)["workers"])
        return None

    async def _identity(self) -> Any:
        return await self._client.scheduler.identity(n_workers=1)


@contextmanager
def _without_its_log() -> Iterator[None]:
    """What it would write to stderr is told by us, in one line."""
    # Dask gives some of its loggers levels of their own; those that are yet to be made have their parent's.
    logs = [log for name in _LOGS for log in (logging.getLogger(name), *_below(name))]
    before = [(log, log.level) for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in before:
            log.setLevel(level)


_LOGS = ("distributed", "tornado")


def _below(name: str) -> list[logging.Logger]:
    every = list(logging.Logger.manager.loggerDict.items())
    return [log for one, log in every if one.startswith(f"{name}.") and isinstance(log, logging.Logger)]
