"""Run batches on the workers of a Dask cluster, by `distributed.Client`.

`get_executor` of Dask is not used, because it raises an error for a result that was received while its worker died.
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

#: Maximum size of a batch of small tasks in bytes. A Dask task takes 2 to 3 ms of scheduler, client and worker
#: together; comparing this many bytes takes a hundred times as long.
MAX_BATCH_BYTES = 512 << 20
#: Timeout errors, which are two classes before Python 3.11.
TIMEOUT_ERRORS = (TimeoutError, asyncio.TimeoutError)
#: Maximum time in seconds for a scheduler to answer, and to have a worker.
TIMEOUT_S = 10.0


@contextmanager
def use_dask(address: str) -> Iterator[Engine]:
    """Yield the engine for the Dask cluster whose scheduler is at `address`.

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
        # Discard asyncio's log entries, because asyncio logs each failed task without a waiter.
        client.loop.asyncio_loop.set_exception_handler(lambda *_: None)
        try:
            _require_workers(client, flag)
            # No retry here: Dask itself gives the work of a dead worker to another worker, `allowed-failures` times.
            watch = _Watch(client)
            yield ExecutorEngine(_DaskExecutor(client), name, _count_threads(client), MAX_BATCH_BYTES, watch.why_lost)
        finally:
            with suppress(OSError, *TIMEOUT_ERRORS):  # the results have arrived, or an error is being raised
                client.close(timeout=1)


def _connect(client: Any, address: str, flag: str) -> Any:
    try:
        with ThreadPoolExecutor(1) as thread:  # because this thread may have its own event loop, as in a notebook
            thread.submit(lambda: asyncio.run(asyncio.wait_for(_open_connection(address), TIMEOUT_S))).result()
        return client(address, timeout=TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError, RuntimeError, *TIMEOUT_ERRORS) as error:
        raise EngineError(f"{flag}: no Dask scheduler answers at this address ({type(error).__name__})") from error


async def _open_connection(address: str) -> None:
    """Test the connection, because a client waits forever for a server that accepts connections but sends nothing."""
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
    """Return the number of threads of all workers, or 0 if the scheduler does not answer (`_Watch` reports this)."""
    with suppress(OSError, *TIMEOUT_ERRORS):
        return sum(client.sync(client.scheduler.ncores, callback_timeout=TIMEOUT_S).values())
    return 0


class _DaskExecutor(Executor):
    """Executor interface to Dask's tasks."""

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
    """Check whether the cluster still has workers."""

    def __init__(self, client: Any) -> None:
        self._client, self._last_seen = client, time.monotonic()

    def why_lost(self) -> str | None:
        """Return the reason to stop waiting: for TIMEOUT_S, the scheduler did not answer or had no workers.

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
        """Return 1 if there are workers, 0 if there are none, or None if the scheduler does not answer."""
        if self._client.status != "running":
            return None
        with suppress(OSError, *TIMEOUT_ERRORS):
            return len(self._client.sync(self._fetch_identity, callback_timeout=TIMEOUT_S)["workers"])
        return None

    async def _fetch_identity(self) -> Any:
        return await self._client.scheduler.identity(n_workers=1)


@contextmanager
def _silence_logs() -> Iterator[None]:
    """Disable Dask's loggers, because statecli reports errors in one line."""
    # Child loggers too, because Dask sets levels on some of them; loggers created later inherit the level.
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
