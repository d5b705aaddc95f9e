"""Dask: the workers of a cluster, by `distributed.Client.get_executor`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from statecli.engines.elsewhere import Elsewhere
from statecli.errors import EngineError, MissingDependency
from statecli.values.pool import Engine

#: Seconds that a scheduler has to answer, and to have a worker.
TIMEOUT = 10.0
#: Workers that may die of one parcel before it is given up.
RETRIES = 3


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
        try:
            _refuse_without_workers(client, name)
            executor = client.get_executor(pure=False, retries=RETRIES)
            yield Elsewhere(executor, name, _Watch(client).lost)
        finally:
            client.close(timeout=1)


def _client(make: Any, address: str, name: str) -> Any:
    try:
        return make(address, timeout=TIMEOUT, set_as_default=False)
    except (OSError, ValueError, RuntimeError, TimeoutError) as why:
        raise EngineError(f"--executor {name}: no scheduler of Dask answers there ({type(why).__name__})") from why


def _refuse_without_workers(client: Any, name: str) -> None:
    try:
        client.wait_for_workers(1, timeout=TIMEOUT)
    except TimeoutError as why:
        raise EngineError(f"--executor {name}: has no worker; start one with: dask worker …") from why


class _Watch:
    """Looks whether there is anybody to wait for."""

    def __init__(self, client: Any) -> None:
        self._client, self._seen = client, time.monotonic()

    def lost(self) -> str | None:
        """Why nothing is waited for any more: for TIMEOUT seconds there was no scheduler, or it had no worker."""
        now = time.monotonic()
        connected = self._client.status == "running"
        if connected and self._client.scheduler_info(n_workers=1)["workers"]:
            self._seen = now
        if now - self._seen < TIMEOUT:
            return None
        return "all workers are gone" if connected else "the scheduler is gone"


@contextmanager
def _without_its_log() -> Iterator[None]:
    """What it would write to stderr is told by us, in one line."""
    log = logging.getLogger("distributed")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)
