"""Google Cloud Storage: the requests, and the messages after a refusal or a change."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import save_file

from .server import After, Headers, OtherRange, Refuse, Times, compress

pytest.importorskip("gcsfs")
URL = "gs://models/run/m.safetensors"
MEDIA = "download/storage/v1/b/models/o/run/m.safetensors"


@pytest.fixture
def gs(cloud_storage):
    """A bucket with a checkpoint."""
    folder = cloud_storage.folder / "models" / "run"
    folder.mkdir(parents=True)
    save_file({"w": torch.arange(1 << 18, dtype=torch.float32)}, folder / "m.safetensors")
    return cloud_storage


def test_file_takes_a_single_request(gs, statecli):
    """The size comes with the first bytes; gcsfs would first request a description of the object."""
    assert statecli("inspect", URL).code == 0
    assert [(request.method, request.path, request.range) for request in gs.requests] == [
        ("GET", MEDIA, "bytes=0-65535")
    ]


def test_folder_takes_a_listing_and_a_file_request(gs, statecli):
    """For a bucket without a checkpoint, the message names the subfolder with a checkpoint."""
    assert statecli("inspect", "gs://models/run/").code == 0
    assert [request.path for request in gs.requests] == ["storage/v1/b/models/o", MEDIA]
    assert "give one of the subfolders: run" in statecli("inspect", "gs://models").err


@pytest.mark.parametrize(
    ("behaviour", "line"),
    [
        (Refuse(404), "does not exist, or its bucket does not exist (HTTP 404)"),
        (Refuse(401), "no Google credentials were found"),
        (Refuse(403), "no Google credentials were found"),
        (Refuse(418), "cannot be read (HTTP 418)"),
        (OtherRange(4), "did not send the byte range that statecli requested"),
        (compress, "is stored compressed (Content-Encoding: gzip); download the file first"),
    ],
)
def test_refusal_gives_a_single_line(gs, statecli, behaviour, line):
    """The message names the URL and the remedy."""
    gs.behave(MEDIA, behaviour)
    result = statecli("inspect", URL)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"statecli: {URL}: ")
    assert line in result.err


def test_busy_server_is_requested_again(gs, statecli):
    """The server answers 429, then 503, and then the file."""
    gs.behave(MEDIA, Times(1, Refuse(429)), Times(2, Refuse(503)))
    assert statecli("inspect", URL).code == 0


def test_changed_object_is_reported(gs, statecli):
    """Each answer contains the object's generation."""
    gs.behave(MEDIA, Headers(X_Goog_Generation="1"), After(1, Headers(X_Goog_Generation="2")))
    result = statecli("inspect", URL, "--stats")
    assert result.code == 2
    assert "changed while statecli read it; try again" in result.err


def test_generation_is_shown_and_sent(gs, statecli):
    """`?generation=` is shown and sent."""
    assert statecli("inspect", f"{URL}?generation=17", "-f", "json").json["target"] == f"{URL}?generation=17"
    assert gs.requests[0].query["generation"] == "17"


def test_empty_object_is_reported_as_an_empty_file(gs, statecli):
    """The server answers every range of an empty object with 416."""
    (gs.folder / "models" / "m.pt").write_bytes(b"")
    assert statecli("inspect", "gs://models/m.pt").err == "statecli: gs://models/m.pt: is an empty file\n"


def test_missing_package_is_named(monkeypatch, statecli):
    """Without gcsfs, the message names the package."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    line = "statecli: gs:// needs the package gcsfs: pip install 'torch-statecli[gs]'\n"
    assert (statecli("inspect", URL).code, statecli("inspect", URL).err) == (2, line)
    monkeypatch.setitem(sys.modules, "fsspec", None)  # gcsfs installs fsspec
    assert statecli("inspect", URL).err == line


def test_names_with_special_characters_are_audited(gs, statecli):
    """Names may contain `?`, and listed names may contain `#`."""
    folder = gs.folder / "models" / "odd"
    for name in ("a#b?c.safetensors", "p#q/model.safetensors", "d?d/model.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({"w": torch.zeros(2)}, folder / name)
    result = statecli("audit", "gs://models/odd/", "-f", "json")
    assert (result.code, len(result.json["targets"]), result.err) == (0, 3, "")
    assert statecli("audit", "gs://models/odd/d?*").code == 0


def test_missing_folder_is_reported(gs, statecli):
    """A folder is missing with a slash as without."""
    for url in ("gs://models/nope", "gs://models/nope/"):
        assert statecli("inspect", url).err.startswith(f"statecli: {url}: does not exist")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "points to a file that does not exist"),
        ("folder", "points to a file that does not exist"),
        ("{", "points to a file without Google credentials"),
        ('{"type": "service_account", "private_key": "hidden-3"}', "points to a file without Google credentials"),
    ],
)
def test_unusable_credentials_file_is_reported(gs, statecli, monkeypatch, tmp_path, content, line):
    """gcsfs would continue without credentials or use different credentials."""
    path = tmp_path / "key.json"
    if content == "folder":
        path.mkdir()
    elif content:
        path.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    result = statecli("inspect", URL)
    text = f"statecli: {URL}: GOOGLE_APPLICATION_CREDENTIALS {line}: set it to a file of credentials, or unset it\n"
    assert (result.code, result.err, gs.requests) == (2, text, [])
