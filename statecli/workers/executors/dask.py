"""Run batches on the workers of a Dask cluster, by `distributed.Client`.

Dask's own `get_executor` raises an error for a result received while its worker died.
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

from statecli.core.errors import EngineError, MissingDependency, option
from statecli.core.installed_package import install_extra
from statecli.workers.executors.futures import ExecutorEngine
from statecli.workers.pool import Engine

#: Bytes of a batch of small tasks, at most: a task of Dask takes 2 to 3 ms of its scheduler, client and worker
#: together, and comparing so many bytes takes a hundred times as long.
MAX_BATCH_BYTES = 512 << 20
#: Two classes before Python 3.11.
TIMEOUT_ERRORS = (TimeoutError, asyncio.TimeoutError)
#: Seconds that a scheduler has to answer, and to have a worker.
TIMEOUT_S = 10.0


@contextmanager
def use_dask(address: str) -> Iterator[Engine]:
    """Yield the engine of the cluster whose scheduler is at `address`.

    Raises `MissingDependency` without Dask, and `EngineError` if no scheduler or no worker answers.
    """
    name = f"dask:{address}"
    flag = option("--executor", name)
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingDependency(f"{flag} needs Dask: {install_extra('dask')}") from error
    with _silence_logs():
        client = _connect(Client, address, flag)
        # asyncio logs each failed task that nobody waits for any more.
        client.loop.asyncio_loop.set_exception_handler(lambda *_: None)
        try:
            _require_workers(client, flag)
            # Dask gives the work of a dead worker to another by itself, `allowed-failures` times.
            watch = _Watch(client)
            yield ExecutorEngine(_DaskExecutor(client), name, _count_threads(client), MAX_BATCH_BYTES, watch.why_lost)
        finally:
            with suppress(OSError, *TIMEOUT_ERRORS):  # the results are there, or an error is being raised
                client.close(timeout=1)


def _connect(client: Any, address: str, flag: str) -> Any:
    try:
        with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop of its own, as in a notebook
            thread.submit(lambda: asyncio.run(asyncio.wait_for(_open_connection(address), TIMEOUT_S))).result()
        return client(address, timeout=TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError, RuntimeError, *TIMEOUT_ERRORS) as error:
        raise EngineError(f"{flag}: no Dask scheduler answers at this address ({type(error).__name__})") from error


async def _open_connection(address: str) -> None:
    """Test the connection, because a client waits forever if a server accepts the connection and sends nothing."""
    comm: Any = importlib.import_module("distributed.comm")
    security: Any = importlib.import_module("distributed.security").Security()
    url = address if "://" in address else f"tcp://{address}"
    (await comm.connect(url, timeout=TIMEOUT_S, **security.get_connection_args("client"))).abort()


def _require_workers(client: Any, flag: str) -> None:
    try:
        client.wait_for_workers(1, timeout=TIMEOUT_S)
    except TIMEOUT_ERRORS as error:
        raise EngineError(f"{flag}: the scheduler has no worker; start one with: dask worker …") from error


def _count_threads(client: Any) -> int:
    """Return the threads of all workers; 0 if the scheduler does not answer: waiting for results reports this."""
    with suppress(OSError, *TIMEOUT_ERRORS):
        return sum(client.sync(client.scheduler.ncores, callback_timeout=TIMEOUT_S).values())
    return 0


class _DaskExecutor(Executor):
    """Dask's tasks as futures."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        task = self._client.submit(function, *arguments, pure=False, **keywords)
        return asyncio.run_coroutine_threadsafe(self._gather(task), self._client.loop.asyncio_loop)

    async def _gather(self, task: Any) -> Any:
        try:
            return await self._client.gather(task, asynchronous=True)
        except asyncio.CancelledError:
            await self._client.cancel([task], asynchronous=True)
            raise


class _Watch:
    """Check that the cluster still has workers."""

    def __init__(self, client: Any) -> None:
        self._client, self._last_seen = client, time.monotonic()

    def why_lost(self) -> str | None:
        """Return why waiting is useless: for TIMEOUT_S no scheduler answered, or the scheduler had no worker.

        None if waiting may help.
        """
        workers = self._count_workers()
        now = time.monotonic()
        if workers:
            self._last_seen = now
        if now - self._last_seen < TIMEOUT_S:
            return None
        return "the scheduler has stopped or does not answer" if workers is None else "all workers have stopped"

    def _count_workers(self) -> int | None:
        """Return 1 if there are workers, else 0; None if the scheduler does not answer."""
        if self._client.status != "running":
            return None
        with suppress(OSError, *TIMEOUT_ERRORS):
            return len(self._client.sync(self._fetch_identity, callback_timeout=TIMEOUT_S)["workers"])
        return None

    async def _fetch_identity(self) -> Any:
        return await self._client.scheduler.identity(n_workers=1)


@contextmanager
def _silence_logs() -> Iterator[None]:
    """Turn Dask's loggers off, because statecli reports its errors in one line."""
    # Dask gives some of its loggers levels of their own; loggers that are created later inherit their parent's.
    loggers = [logger for name in _LOGGERS for logger in (logging.getLogger(name), *_child_loggers(name))]
    levels = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)


_LOGGERS = ("distributed", "tornado")


def _child_loggers(name: str) -> list[logging.Logger]:
    loggers = logging.Logger.manager.loggerDict.items()
    return [logger for child, logger in loggers if child.startswith(f"{name}.") and isinstance(logger, logging.Logger)]
