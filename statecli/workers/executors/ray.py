"""Run batches on a Ray cluster, or on a cluster that is started on this machine for the command."""

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

from statecli.core.errors import EngineError, MissingDependency, option
from statecli.core.installed_package import install_extra
from statecli.workers.executors.futures import ExecutorEngine
from statecli.workers.pool import Engine


class _RayExecutor(Executor):
    """Executor interface to Ray's tasks."""

    def __init__(self, ray: Any) -> None:
        def call(function: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
            return function(*arguments, **keywords)

        # A local function, because Ray does not accept functions in C. Ray transfers it whole, so workers need no
        # module of statecli; registering it once is ten times as fast as a function per task.
        self._call = ray.remote(call)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = self._call.remote(function, arguments, keywords).future()
        return future


@contextmanager
def use_ray(address: str) -> Iterator[Engine]:
    """Yield the engine of the Ray cluster at `address`. An empty address starts a cluster on this machine.

    Raises `MissingDependency` without Ray, and `EngineError` if no cluster answers.
    """
    name = f"ray:{address}" if address else "ray"
    flag = option("--executor", name)
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependency(f"{flag} needs Ray: {install_extra('ray')}") from error
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, address, flag)
    try:
        yield ExecutorEngine(_RayExecutor(ray), name, int(ray.cluster_resources().get("CPU", 0)), MAX_BATCH_BYTES)
    finally:
        if is_ours:
            ray.shutdown()


#: Maximum size of a batch of small tasks in bytes. A Ray task takes 1 ms; comparing this many bytes takes more than a
#: hundred times as long.
MAX_BATCH_BYTES = 256 << 20
#: Maximum time in seconds for a cluster to answer.
TIMEOUT_S = 10.0


#: First bytes of an HTTP/2 connection (used by gRPC) with empty settings, and the type of the frame in the answer.
HTTP2_HELLO, SETTINGS_FRAME = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 4


def _require_answer(address: str, flag: str) -> None:
    """Raise `EngineError` unless HOST:PORT answers like gRPC, because Ray would wait for minutes and log."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    deadline = time.monotonic() + TIMEOUT_S
    try:
        if colon:
            with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as server:
                _exchange_hello(server, deadline)
    except (OSError, ValueError, OverflowError) as error:
        raise EngineError(f"{flag}: nothing answers at this address ({type(error).__name__})") from error


def _exchange_hello(server: socket.socket, deadline: float) -> None:
    """Raise OSError unless the server answers like HTTP/2 before the deadline (`time.monotonic`)."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # a TLS connection, which begins with other bytes
    server.sendall(HTTP2_HELLO)
    answer = b""
    while len(answer) < 9:
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        received = server.recv(9 - len(answer))
        if not received:
            raise ConnectionAbortedError
        answer += received
    if answer[3] != SETTINGS_FRAME:
        raise ConnectionAbortedError


def _connect(ray: Any, address: str, flag: str) -> None:
    """Connect to a cluster. Without an address, start a cluster with this machine's cores."""
    if address:
        _require_answer(address, flag)
    options = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True}
    try:
        ray.init(address=address or "local", include_dashboard=None if address else False, **options)
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        raise EngineError(f"{flag}: no Ray cluster answers at this address ({type(error).__name__})") from error
