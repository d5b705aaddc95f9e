"""Ray: the workers of a cluster, or of one of this machine that is started for the command."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from statecli.core.errors import EngineError, MissingDependency
from statecli.values.pool import Engine
from statecli.workers.executors.futures import Elsewhere


class _Tasks(Executor):
    """Ray's tasks as futures."""

    def __init__(self, ray: Any) -> None:
        def call(function: Callable[..., Any], words: Any, more: Any) -> Any:
            return function(*words, **more)

        # Ray takes no function in C, and carries a local one as a whole, so that workers need no module of ours for it.
        # It does so once: one a task would cost ten times as much.
        self._call = ray.remote(call)

    def submit(self, function: Callable[..., Any], /, *words: Any, **more: Any) -> Future[Any]:
        """As `Executor.submit`."""
        found: Future[Any] = self._call.remote(function, words, more).future()
        return found


@contextmanager
def started(address: str) -> Iterator[Engine]:
    """The engine of the cluster at `address`. Raises `MissingDependency` and `EngineError`."""
    name = f"ray:{address}" if address else "ray"
    try:
        ray = importlib.import_module("ray")
    except ImportError as missing:
        raise MissingDependency(f"--executor {name} needs Ray: pip install 'statecli[ray]'") from missing
    own = not ray.is_initialized()
    if own:
        _start(ray, address, name)
    try:
        yield Elsewhere(_Tasks(ray), name, int(ray.cluster_resources().get("CPU", 0)), GRAIN)
    finally:
        if own:
            ray.shutdown()


#: Bytes of small tasks in a parcel, at most: a task of Ray takes 1 ms, and comparing these more than a hundred times as
#: long.
GRAIN = 256 << 20
#: Seconds that a cluster has to answer.
TIMEOUT = 10.0


#: The first words of HTTP/2, which gRPC is spoken in, with empty settings; and the type of the frame that answers them.
HELLO, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 4


def _refuse_silence(address: str, name: str) -> None:
    """Raises `EngineError` where no gRPC is spoken at HOST:PORT: Ray itself would wait for many minutes, and log."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    deadline = time.monotonic() + TIMEOUT
    try:
        if colon:
            with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT) as server:
                _greet(server, deadline)
    except (OSError, ValueError, OverflowError) as why:
        raise EngineError(f"--executor {name}: nothing answers there ({type(why).__name__})") from why


def _greet(server: socket.socket, deadline: float) -> None:
    """Raises OSError for who does not answer as HTTP/2 does by then."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # these would not be its first words
    server.sendall(HELLO)
    answer = b""
    while len(answer) < 9:
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        more = server.recv(9 - len(answer))
        if not more:
            raise ConnectionAbortedError
        answer += more
    if answer[3] != SETTINGS:
        raise ConnectionAbortedError


def _start(ray: Any, address: str, name: str) -> None:
    """Connects; without an address a cluster of this machine's cores is begun."""
    if address:
        _refuse_silence(address, name)
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True}
    try:
        ray.init(address=address or "local", include_dashboard=None if address else False, **quiet)
    except (OSError, RuntimeError, ValueError, TimeoutError) as why:
        raise EngineError(f"--executor {name}: no cluster of Ray answers there ({type(why).__name__})") from why
