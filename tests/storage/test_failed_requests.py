"""After all attempts of a request failed, the file's later ranges fail at once."""

from __future__ import annotations

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from statecli.core.errors import UnreadableError
from statecli.storage import files
from statecli.storage.http import Http

from .server import After, Cut, Refuse, Stall, Times


@pytest.fixture(autouse=True)
def twice(monkeypatch):
    """Send each request three times at most."""
    monkeypatch.setenv("STATECLI_RETRIES", "2")
    monkeypatch.setenv("STATECLI_TIMEOUT", "0.3")
    files.forget_command()
    yield
    files.forget_command()


@pytest.fixture
def get(served):
    """Return a function that requests ten bytes of a file (a to d) and returns the error message or None."""
    for name in "abcd":
        (served.folder / name).write_bytes(bytes(1000))
    http = Http()

    def ask(name: str, offset: int = 0) -> str | None:
        try:
            http.get(served.url(name), offset, 10, None)
        except UnreadableError as why:
            return str(why)
        return None

    return ask


def paths(served) -> str:
    return "".join(request.path for request in served.requests)


FAULTS = [Refuse(503), Cut(None), Cut(100), Stall(None), Stall(100)]


@pytest.mark.parametrize("fault", FAULTS, ids=["busy", "cut", "cut within", "stall", "stall within"])
def test_a_file_that_was_asked_for_in_vain_is_not_asked_for_with_each_tensor(served, statecli, tmp_path, fault):
    """Of 60 tensors in 15 windows, the first failing window is requested three times; earlier tensors are compared."""
    state = {f"w{i:02}": torch.full((150_000,), float(i)) for i in range(60)}
    save_file(state, served.folder / "m.safetensors")
    save_file(state, tmp_path / "m.safetensors")
    served.behave("*", After(4, fault))
    url = served.url("m.safetensors")
    result = statecli("diff", url, tmp_path / "m.safetensors", "--jobs", "1", "-f", "json")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert 0 < result.json["summary"]["identical"] < 60
    assert len(served.requests) == 4 + 3
    served.behave("*")
    files.forget_command()
    assert statecli("diff", url, tmp_path / "m.safetensors").code == 0


def test_threads_that_ask_together_end_together(served, statecli, tmp_path):
    """Each thread finishes the attempts of its current request, and starts no other request."""
    save_file({f"w{i:03}": torch.zeros(150_000) for i in range(200)}, served.folder / "m.safetensors")
    served.behave("*", After(1, Stall(10)))
    result = statecli("inspect", "--stats", served.url("m.safetensors"), "--jobs", "8")
    assert result.code == 2
    assert len(served.requests) <= 1 + 8 * 3


def test_where_nothing_answers_one_attempt_is_enough_until_one_succeeds(served, get):
    """Each file gets a single attempt while the server fails, and all attempts after a success."""
    served.behave("*", Refuse(503))
    assert get("a") == get("a", 500) == "the server is busy (HTTP 503), in each of 3 attempts; try again later"
    assert get("b") == get("b", 500) == "the server is busy (HTTP 503); try again later"
    assert paths(served) == "aaab"
    served.behave("*")
    assert get("c") is None
    served.behave("*", Times(2, Refuse(503)))
    assert get("c") is None
    assert get("a") == "the server is busy (HTTP 503), in each of 3 attempts; try again later"
    assert paths(served) == "aaabcccc"


def test_another_place_is_asked_as_often_as_ever(served, get):
    """Only requests to the same scheme and host fail together."""
    served.behave("a", Refuse(503))
    get("a")
    served.behave("b", Times(2, Refuse(503)))
    Http().get(served.url("b").replace("127.0.0.1", "localhost"), 0, 10, None)
    assert paths(served) == "aaabbb"


@pytest.mark.parametrize("status", [401, 403, 404, 410, 416])
def test_an_answer_that_refuses_says_nothing_of_the_next_one(served, get, status):
    """The refusal came at once, so later requests for other bytes and files still get all their attempts."""
    served.behave("a", Times(1, Refuse(status)))
    assert f"HTTP {status}" in get("a")
    assert get("a") is None
    served.behave("b", Times(2, Refuse(503)))
    assert get("b") is None


def test_a_server_that_asks_for_much_patience_is_not_asked_again(served, get):
    """The server has already said how long to wait."""
    served.behave("a", Refuse(503, Retry_After="3600"))
    assert (
        get("a")
        == get("a")
        == "the server is busy (HTTP 503): the server asks statecli to wait 3,600 s; try again later"
    )
    assert paths(served) == "a"


def test_what_a_worker_could_not_reach_is_asked_for_again_by_the_next_command(served, get):
    """A worker of Dask outlives a command, and gets no signal when the next command begins."""
    served.behave("a", Times(3, Refuse(503)))
    command = files.export_access()
    files.import_access(command)
    assert get("a") is not None
    files.import_access(command)
    assert get("a") is not None
    files.import_access(msgspec.structs.replace(command, command="the next one"))
    assert get("a") is None
