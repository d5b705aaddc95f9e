"""Messages about an unread file of a folder: the file's name, followed by the end of a sentence or a whole sentence."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from statecli.storage import files

from .server import HangUp, Refuse, login_page

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _single_attempt(monkeypatch):
    """Send no request a second time."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    files.forget_command()


REASONS = [
    (Refuse(404), " does not exist (HTTP 404)"),
    (login_page, " is an HTML page, perhaps a login or an error page (HTTP 200)"),
    (Refuse(403), ": access is refused (HTTP 403): statecli sent no user name and no password"),
    (Refuse(503), ": the server is busy (HTTP 503); try again later"),
    (HangUp(10), ": the connection was cut after 10 of "),
]


@pytest.fixture
def sharded_server(file_server):
    folder = file_server.folder / "net"
    folder.mkdir()
    save_file({"w": torch.zeros(4)}, folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    (folder / "config.json").write_text(json.dumps({"model_type": "net" * 10}))
    file_server.listing = "python"
    return file_server


@pytest.mark.parametrize(("fault", "reason"), REASONS)
def test_unread_index_is_named_with_the_reason(sharded_server, inspect_error, fault, reason):
    """The message for the folder names the index and the reason."""
    sharded_server.behave(f"net/{INDEX}", fault)
    assert f"{INDEX}{reason}" in inspect_error(sharded_server.url("net/"))


@pytest.mark.parametrize(("fault", "reason"), REASONS)
def test_unread_dcp_metadata_is_named_with_the_reason(file_server, inspect_error, fault, reason):
    """The reasons have the same words for a distributed checkpoint."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.zeros(4)}, storage_writer=dcp.FileSystemWriter(file_server.folder / "run"), no_dist=True)
    file_server.listing = "python"
    file_server.behave("run/.metadata", fault)
    assert f".metadata{reason}" in inspect_error(file_server.url("run/"))


@pytest.mark.parametrize(("fault", "reason"), REASONS)
def test_unread_configuration_is_a_note(sharded_server, statecli, fault, reason):
    """The message is a note, because the weights are read without the configuration."""
    sharded_server.behave("net/config.json", fault)
    result = statecli("inspect", sharded_server.url("net/"), "-f", "json")
    (message,) = [note["message"] for note in result.json["notes"] if note["name"] == "config-unread"]
    because = f", because it{reason}" if reason.startswith(" ") else reason
    assert message.startswith(f"config.json was not read{because}")
