"""Audits of a checkpoint with unread bytes: an audit never calls such a checkpoint clean or judges the unread bytes."""

from __future__ import annotations

import itertools
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.storage import files as storage_files

from ..formats.attacks import Call
from .server import HangUp, Headers, Refuse, Reply, Request, Stall


@pytest.fixture(autouse=True)
def _single_attempt(monkeypatch):
    """Send no request a second time."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    monkeypatch.setenv("STATECLI_TIMEOUT", "0.3")
    storage_files.forget_command()


def write_tensors(folder: Path) -> Path:
    """Write four tensors of 8 MB; the first tensor has a NaN."""
    state = {f"w{i}": torch.full((2_000_000,), float(i)) for i in range(4)}
    state["w0"][5] = float("nan")
    save_file(state, folder / "m.safetensors")
    return folder / "m.safetensors"


class DuringValues:
    """Apply a behaviour to requests for the values of all tensors but the first, up to the end of the last tensor."""

    def __init__(self, behaviour) -> None:
        self.behaviour = behaviour

    def __call__(self, request: Request, reply: Reply) -> None:
        first = (request.range or "bytes=0-").removeprefix("bytes=").partition("-")[0]
        if 8_100_000 <= int(first) < 31_900_000:
            self.behaviour(request, reply)


FAULTS = [Refuse(403), Refuse(404), Refuse(500), HangUp(100), Stall(100), Headers(ETag='"another"')]


@pytest.mark.parametrize("fault", FAULTS, ids=["403", "404", "500", "cut", "stall", "changed"])
def test_audit_with_unread_values_exits_with_status_2(file_server, statecli, tmp_path, fault):
    """An audit prints a line with target and tensor once each, keeps earlier findings and accepts no unread values."""
    write_tensors(file_server.folder)
    file_server.behave("*", DuringValues(fault))
    url, baseline = file_server.url("m.safetensors"), tmp_path / "b.json"
    for options in ((), ("--select", "nan"), ("--ignore", "unread-values")):
        command = ("audit", url, "--values", "--jobs", "1", *options)  # serial: nothing is requested after the fault
        storage_files.forget_command()
        result = statecli(*command, "-f", "json")
        assert (result.code, result.json["passed"]) == (2, False)
        assert [finding["rule"] for finding in result.json["findings"]] == ["nan"]
        (line,) = result.err.splitlines()
        assert (line.count(url), line.count(": w"), "more tensor" in line) == (1, 1, True), line
        storage_files.forget_command()
        accepted = statecli(*command, "--write-baseline", baseline, "--reason", "a test")
        storage_files.forget_command()
        assert (accepted.code, statecli(*command, "--baseline", baseline).code) == (2, 2)
        assert "unread" not in baseline.read_text()


@pytest.mark.parametrize("output", ["plain", "markdown", "github", "junit", "sarif", "gitlab"])
def test_no_output_calls_an_audit_with_unread_values_clean(file_server, statecli, output):
    """Each output says that the target could not be read; a rule with unread values is not reported as passed."""
    write_tensors(file_server.folder)
    file_server.behave("*", DuringValues(Refuse(403)))
    result = statecli("audit", file_server.url("m.safetensors"), "--values", "--select", "inf", "-f", output)
    assert result.code == 2
    assert "w1 and 2 more tensors: access is refused (HTTP 403)" in result.out
    assert "clean" not in result.out
    assert 'name="inf"/>' not in result.out


def test_comparison_with_unread_values_exits_with_status_2(file_server, statecli, tmp_path):
    """With and without --values; no lock is written, and no result looks clean."""
    near, lock, config = write_tensors(tmp_path), tmp_path / "l.json", tmp_path / "s.toml"
    config.write_text('[policy]\nmust-change = ["w*"]\n')
    write_tensors(file_server.folder)
    assert statecli("lock", near, "-o", lock).code == 0
    file_server.behave("*", DuringValues(Refuse(403)))
    url = file_server.url("m.safetensors")
    for command in (
        ("audit", url, "--lock", lock),
        ("audit", url, "--lock", lock, "--values", "--select", "lock", "--select", "nan"),
        ("audit", url, "--against", near, "--config", config),
        ("audit", near, "--against", url, "--config", config),
        ("lock", url, "-o", tmp_path / "none"),
        ("inspect", "--stats", url),
    ):
        storage_files.forget_command()
        result = statecli(*command, *(("--ignore", "unread-values") if command[0] == "audit" else ()))
        assert (result.code, "HTTP 403" in result.err, "clean" in result.out) == (2, True, False), (command, result)
    assert not (tmp_path / "none").exists()


def write_legacy_file(folder: Path) -> str:
    torch.save(
        {"a": torch.zeros(100_000), "b": Call(os.system, "echo")}, folder / "m.pt", _use_new_zipfile_serialization=False
    )
    return "m.pt"


def write_archive(folder: Path) -> str:
    torch.save([torch.zeros(50_000) for _ in range(4)], folder / "m.pt")
    with zipfile.ZipFile(folder / "m.pt", "a") as zip_file:
        zip_file.writestr("m/more.pkl", pickle.dumps([b"x" * 200_000, Call(os.system, "echo")]))
    return "m.pt"


def write_folder(folder: Path) -> str:
    """Write a checkpoint without a suffix, another pickle, and a text file."""
    inner = folder / "x"
    inner.mkdir()
    (folder / write_archive(folder)).rename(inner / "weights")
    (inner / "vocab.pkl").write_bytes(pickle.dumps([1, Call(os.system, "echo")]))
    (inner / "README.txt").write_text("none")
    return "x/"


class OnRequest:
    """Apply a behaviour to a single request, by its number."""

    def __init__(self, number: int, behaviour) -> None:
        self.number, self.behaviour, self._count = number, behaviour, itertools.count()

    def __call__(self, request: Request, reply: Reply) -> None:
        if next(self._count) == self.number:
            self.behaviour(request, reply)


@pytest.mark.parametrize("fault", [Refuse(403), Refuse(404), HangUp(None)], ids=["403", "404", "cut"])
@pytest.mark.parametrize("write", [write_legacy_file, write_archive, write_folder])
def test_failing_request_never_hides_a_finding(file_server, statecli, write, fault):
    """The pickle scan reads files again, so a server may refuse the scan and serve the reader."""
    file_server.listing = "python"
    url = file_server.url(write(file_server.folder))
    expected = statecli("audit", url, "-f", "json")
    assert (expected.code, "unsafe-global" in expected.out) == (1, True)
    counted = len(file_server.requests)
    for number in range(counted):
        file_server.behave("*", OnRequest(number, fault))
        storage_files.forget_command()
        result = statecli("audit", url, "-f", "json")
        assert result.code == 2 or (result.code, result.out) == (expected.code, expected.out)
        assert "unscanned-pickle" not in [finding["rule"] for finding in result.json["findings"]]
