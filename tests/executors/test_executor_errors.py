"""Reasons why `--executor` is refused before any file is read; each error is a single line."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import statecli as package
from statecli.core.errors import EngineError, UsageError
from statecli.workers.executors import ray

NET_SOURCE = "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"


@pytest.fixture(autouse=True)
def _files(tmp_path, in_tmp_path):
    torch.save({"w": torch.ones(3)}, "a.pt")
    (tmp_path / "net.py").write_text(NET_SOURCE)


def read_error(result):
    """Return the single error line of a command that exits with status 2."""
    assert (result.code, result.out) == (2, ""), result
    assert result.err.startswith("statecli: ")
    assert result.err.count("\n") == 1
    return result.err.removeprefix("statecli: ").rstrip()


@pytest.mark.parametrize(
    "engine", ["thread", "threads:", "threads:0", "threads:-1", "threads:two", "dask", "dask:", "mpi:4", "ray:", " mpi"]
)
def test_unknown_engine_is_refused(engine, statecli):
    """The error lists the valid engines."""
    line = read_error(statecli("diff", "a.pt", "a.pt", f"--executor={engine}"))
    assert line.startswith(f"--executor {engine}: is not one of threads[:N], processes[:N], dask:tcp://HOST:PORT, mpi")


def test_empty_engine_is_refused(statecli):
    """A script passes a variable that is not set."""
    assert (
        read_error(statecli("diff", "a.pt", "a.pt", "--executor", ""))
        == "--executor: is empty; give a value, or leave the option out"
    )


@pytest.mark.parametrize(
    ("words", "expected_message"),
    [
        (("diff", "a.pt", "a.pt", "--jobs", "2"), "--executor mpi and --jobs 2 contradict each other"),
        (("audit", "a.pt", "--values", "--jobs", "2"), "--executor mpi and --jobs 2 contradict each other"),
        (("lock", "a.pt", "--jobs", "2"), "--executor mpi and --jobs 2 contradict each other"),
        (("diff", "a.pt", "a.pt", "--device", "cuda"), "--executor mpi and --device cuda contradict each other"),
        (("diff", "a.pt", "a.pt", "--metadata-only"), "--metadata-only and --executor mpi contradict each other"),
        (("diff", "a.pt", "a.pt", "--ignore", "values"), "--ignore values and --executor mpi contradict each other"),
        (("diff", "a.pt", "net.py:Net"), "--executor mpi: values are not compared with the class net.py:Net"),
        (
            ("inspect", "a.pt"),
            "--executor mpi: inspect reads values only if the target is a checkpoint and --stats is given",
        ),
        (
            ("inspect", "net.py:Net", "--stats"),
            "--executor mpi: inspect reads values only if the target is a checkpoint and --stats is given",
        ),
        (
            ("audit", "a.pt"),
            "--executor mpi: splits the reading of tensor values, but this command does not read values; add --values "
            "or --lock FILE",
        ),
        (("lock", "net.py:Net"), "--executor mpi: the targets are model classes"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_executor_without_use_is_refused(words, expected_message, statecli):
    """The command does not read values, or another option contradicts `--executor`."""
    assert read_error(statecli(*words, "--executor", "mpi")).startswith(expected_message)


@pytest.mark.parametrize(
    ("engine", "package", "extra"),
    [("dask:tcp://h:1", "distributed", "dask"), ("mpi", "mpi4py", "mpi"), ("ray", "ray", "ray")],
)
def test_missing_package_is_named(engine, package, extra, statecli, monkeypatch):
    """The package is an optional extra, and the error says how to install the extra."""
    monkeypatch.setitem(sys.modules, package, None)
    line = read_error(statecli("diff", "a.pt", "a.pt", "--executor", engine))
    assert line.endswith(f"pip install 'torch-statecli[{extra}]'")


def test_mpi_without_ranks_is_refused(statecli):
    """The error has the command that starts several ranks."""
    line = read_error(statecli("lock", "a.pt", "--executor", "mpi", "-o", "-"))
    assert line.startswith(
        "--executor mpi: found no other MPI ranks; start statecli with: mpiexec -n 3 python -m mpi4py"
    )


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:port"])
def test_unreachable_ray_cluster_is_reported(address, statecli):
    """Ray itself would wait a quarter of an hour for the cluster."""
    pytest.importorskip("ray")
    line = read_error(statecli("diff", "a.pt", "a.pt", "--executor", f"ray:{address}"))
    assert line.startswith(f"--executor ray:{address}: nothing answers at this address")


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0", None], ids=["silence", "a page", "a half", "an end"]
)
def test_listener_other_than_ray_is_reported(answer, statecli, monkeypatch):
    """The listener's answer is not the start of gRPC: the error is a single line, and Ray is not called."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(ray, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        accepted = thread.submit(_accept_and_answer, server, answer)
        line = read_error(statecli("diff", "a.pt", "a.pt", "--executor", f"ray:{address}"))
        accepted.result()[0].close()
    assert line.startswith(f"--executor ray:{address}: nothing answers at this address")


def _accept_and_answer(server, answer):
    connection, _ = server.accept()
    if answer is None:
        connection.shutdown(socket.SHUT_RDWR)
    else:
        connection.sendall(answer)
    return connection, answer


def test_error_in_python_names_the_argument():
    """An executor of a wrong type, an executor that was shut down, and an executor that contradicts an argument."""
    with pytest.raises(UsageError, match="executor: 3 is not an Executor"):
        package.diff("a.pt", "a.pt", executor=3)
    with pytest.raises(UsageError, match="executor='threads' and jobs=2 contradict each other"):
        package.diff("a.pt", "a.pt", executor="threads", jobs=2)
    with pytest.raises(
        UsageError,
        match="executor='threads': inspect reads values only if the target is a checkpoint and stats is given",
    ):
        package.inspect("a.pt", executor="threads")
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    with pytest.raises(EngineError, match="the executor does not accept work: cannot schedule new futures"):
        package.diff("a.pt", "a.pt", executor=closed)
