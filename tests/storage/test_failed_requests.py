"""After all attempts of a request failed, the file's later ranges fail at once."""

from __future__ import annotations

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from statecli.core.errors import UnreadableError
from statecli.storage import files
from statecli.storage.http import Http

from .server import After, HangUp, Refuse, Stall, Times


@pytest.fixture(autouse=True)
def three_attempts(monkeypatch):
    """Send each request three times at most."""
    monkeypatch.setenv("STATECLI_RETRIES", "2")
    monkeypatch.setenv("STATECLI_TIMEOUT", "0.3")
    files.forget_command()
    yield
    files.forget_command()


@pytest.fixture
def get_error(file_server):
    """Return a function that requests ten bytes of a file (a to d) and returns the error message or None."""
    for name in "abcd":
        (file_server.folder / name).write_bytes(bytes(1000))
    http = Http()

    def request_bytes(name: str, offset: int = 0) -> str | None:
        try:
            http.get(file_server.url(name), offset, 10, None)
        except UnreadableError as error:
            return str(error)
        return None

    return request_bytes


def join_paths(file_server) -> str:
    return "".join(request.path for request in file_server.requests)


FAULTS = [Refuse(503), HangUp(None), HangUp(100), Stall(None), Stall(100)]


@pytest.mark.parametrize("fault", FAULTS, ids=["busy", "cut", "cut within", "stall", "stall within"])
def test_failed_file_is_not_requested_for_each_tensor(file_server, statecli, tmp_path, fault):
    """Of 60 tensors in 15 windows, the first failing window is requested three times; earlier tensors are compared."""
    state = {f"w{i:02}": torch.full((150_000,), float(i)) for i in range(60)}
    save_file(state, file_server.folder / "m.safetensors")
    save_file(state, tmp_path / "m.safetensors")
    file_server.behave("*", After(4, fault))
    url = file_server.url("m.safetensors")
    result = statecli("diff", url, tmp_path / "m.safetensors", "--jobs", "1", "-f", "json")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert 0 < result.json["summary"]["identical"] < 60
    assert len(file_server.requests) == 4 + 3
    file_server.behave("*")
    files.forget_command()
    assert statecli("diff", url, tmp_path / "m.safetensors").code == 0


def test_threads_start_no_request_after_a_failure(file_server, statecli, tmp_path):
    """Each thread finishes the attempts of its current request, and starts no other request."""
    save_file({f"w{i:03}": torch.zeros(150_000) for i in range(200)}, file_server.folder / "m.safetensors")
    file_server.behave("*", After(1, Stall(10)))
    result = statecli("inspect", "--stats", file_server.url("m.safetensors"), "--jobs", "8")
    assert result.code == 2
    assert len(file_server.requests) <= 1 + 8 * 3


def test_failing_server_gets_a_single_attempt_per_file(file_server, get_error):
    """Each file gets a single attempt while the server fails, and all attempts after a success."""
    file_server.behave("*", Refuse(503))
    assert (
        get_error("a") == get_error("a", 500) == "the server is busy (HTTP 503), in each of 3 attempts; try again later"
    )
    assert get_error("b") == get_error("b", 500) == "the server is busy (HTTP 503); try again later"
    assert join_paths(file_server) == "aaab"
    file_server.behave("*")
    assert get_error("c") is None
    file_server.behave("*", Times(2, Refuse(503)))
    assert get_error("c") is None
    assert get_error("a") == "the server is busy (HTTP 503), in each of 3 attempts; try again later"
    assert join_paths(file_server) == "aaabcccc"


def test_another_host_gets_all_attempts(file_server, get_error):
    """Only requests to the same scheme and host fail together."""
    file_server.behave("a", Refuse(503))
    get_error("a")
    file_server.behave("b", Times(2, Refuse(503)))
    Http().get(file_server.url("b").replace("127.0.0.1", "localhost"), 0, 10, None)
    assert join_paths(file_server) == "aaabbb"


@pytest.mark.parametrize("status", [401, 403, 404, 410, 416])
def test_refusal_does_not_reduce_later_attempts(file_server, get_error, status):
    """The refusal came at once, so later requests for other bytes and files still get all their attempts."""
    file_server.behave("a", Times(1, Refuse(status)))
    assert f"HTTP {status}" in get_error("a")
    assert get_error("a") is None
    file_server.behave("b", Times(2, Refuse(503)))
    assert get_error("b") is None


def test_long_retry_after_is_not_requested_again(file_server, get_error):
    """The server has already said how long to wait."""
    file_server.behave("a", Refuse(503, Retry_After="3600"))
    assert (
        get_error("a")
        == get_error("a")
        == "the server is busy (HTTP 503): the server asks statecli to wait 3,600 s; try again later"
    )
    assert join_paths(file_server) == "a"


def test_next_command_of_a_worker_requests_again(file_server, get_error):
    """A worker of Dask outlives a command, and gets no signal when the next command begins."""
    file_server.behave("a", Times(3, Refuse(503)))
    command = files.export_access()
    files.import_access(command)
    assert get_error("a") is not None
    files.import_access(command)
    assert get_error("a") is not None
    files.import_access(msgspec.structs.replace(command, command="the next one"))
    assert get_error("a") is None
