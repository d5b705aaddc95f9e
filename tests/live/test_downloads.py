"""While the code of a model runs, statecli refuses downloads in a line that names the argument to change."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import urllib.request

import pytest

pytest.importorskip("torch")

from statecli.core.errors import ModelError
from statecli.live import downloads
from statecli.live.build import build
from statecli.live.spec import parse_spec

SOURCE = """import enum
import socket
import urllib.request

import torch
from torch import nn


class Weights(enum.Enum):
    DEFAULT = "https://weights.invalid/w.pth"


def load(url):
    torch.hub.load_state_dict_from_url(url, model_dir="cache")
    return nn.Linear(2, 2)


def flag(pretrained=True):
    return load("https://weights.invalid/w.pth") if pretrained else nn.Linear(2, 2)


def weights(weights=Weights.DEFAULT):
    return load(weights.value) if weights else nn.Linear(2, 2)


def outer():
    return flag()


def retrieve():
    urllib.request.urlretrieve("ftp://weights.invalid/w.pth")


def connect():
    socket.create_connection(("weights.invalid", 80))


def hub():
    from huggingface_hub import hf_hub_download

    hf_hub_download("no-organization/no-model", "config.json")


def cached():
    try:
        connect()
    except Exception:
        return nn.Linear(2, 2)


def from_here():
    urllib.request.urlopen(PLACE).read()
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    """Put the file of the models into the current folder, and unset the variable that allows downloads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(downloads.ALLOW_VARIABLE, raising=False)
    (tmp_path / "net.py").write_text(SOURCE)


def get_download_error(text):
    with pytest.raises(ModelError) as caught:
        build(parse_spec(text))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "line", "source", "fix"),
    [
        ("flag", 14, "https://weights.invalid/w.pth", "write 'net.py:flag(pretrained=False)', or "),
        ("weights", 14, "https://weights.invalid/w.pth", "write 'net.py:weights(weights=None)', or "),
        ("outer", 14, "https://weights.invalid/w.pth", "write pretrained=False, or "),
        ("retrieve", 31, "ftp://weights.invalid/w.pth", ""),
        ("connect", 35, "weights.invalid", ""),
    ],
)
def test_a_download_is_refused_in_one_line(name, line, source, fix):
    """Downloads by torch.hub, urllib and sockets are refused; the error names the argument of the outermost call."""
    assert get_download_error(f"net.py:{name}") == (
        f"net.py:{name}: building the model (net.py:{line}) needs a download from {source}, but statecli does not "
        f"download by default: {fix}set STATECLI_DOWNLOADS=1 to allow the download"
    )


@pytest.mark.parametrize("text", ["net.py:flag(pretrained=False)", "net.py:weights(weights=None)", "net.py:cached"])
def test_a_model_without_a_download_is_built(text):
    """The models follow the advice of the error, or handle the missing file in their own code."""
    assert build(parse_spec(text)).module.in_features == 2


def test_the_hub_is_offline_without_retries():
    """huggingface_hub finds no file in its cache; its setting is restored afterwards."""
    constants = pytest.importorskip("huggingface_hub").constants
    before = constants.HF_HUB_OFFLINE
    message = get_download_error("net.py:hub")
    assert "needs a download from the Hugging Face hub, but statecli does not download by default: set " in message
    assert constants.HF_HUB_OFFLINE is before


def test_the_variable_allows_downloads(monkeypatch):
    """With the variable, the error comes from the network."""
    monkeypatch.setenv(downloads.ALLOW_VARIABLE, "1")
    assert "raised gaierror" in get_download_error("net.py:connect")


def test_requests_to_localhost_are_allowed(tmp_path):
    """A request to a server on localhost is not a download."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}/net.py"
    (tmp_path / "net.py").write_text(SOURCE.replace("PLACE", repr(place)))
    try:
        assert build(parse_spec("net.py:from_here")).module.in_features == 2
    finally:
        server.shutdown()
        server.server_close()


def test_nested_blocks_restore_the_patched_functions():
    """Nested blocks restore the patched functions, and other threads are never affected."""
    before = (urllib.request.OpenerDirector.open, socket.getaddrinfo, "connect" in vars(socket.socket))
    with downloads.refuse_downloads(), downloads.refuse_downloads():
        with pytest.raises(downloads.DownloadRefused):
            socket.getaddrinfo("weights.invalid", 80)
        socket.getaddrinfo("localhost", 80)
        with contextlib.suppress(OSError):  # the name of this machine may have no address
            socket.getaddrinfo(socket.gethostname(), 80)
        errors = []

        def look_up():
            try:
                socket.getaddrinfo("weights.invalid", 80)
            except OSError as error:
                errors.append(error)

        thread = threading.Thread(target=look_up)
        thread.start()
        thread.join()
        assert len(errors) == 1
    assert (urllib.request.OpenerDirector.open, socket.getaddrinfo, "connect" in vars(socket.socket)) == before
