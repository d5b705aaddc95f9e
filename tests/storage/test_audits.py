"""What an audit says of a checkpoint of which not all bytes came: never that it is clean, and never what it is like."""

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
from .server import Cut, Headers, Refuse, Reply, Request, Stall


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """No request is tried a second time."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    monkeypatch.setenv("STATECLI_TIMEOUT", "0.3")
    storage_files.forget_command()


def far(folder: Path) -> Path:
    """Four tensors of 8 MB, of which the first has a NaN."""
    state = {f"w{i}": torch.full((2_000_000,), float(i)) for i in range(4)}
    state["w0"][5] = float("nan")
    save_file(state, folder / "m.safetensors")
    return folder / "m.safetensors"


class Within:
    """A behaviour for requests of the values of all tensors but the first; what stands at the end is no value."""

    def __init__(self, behaviour) -> None:
        self.behaviour = behaviour

    def __call__(self, request: Request, reply: Reply) -> None:
        first = (request.range or "bytes=0-").removeprefix("bytes=").partition("-")[0]
        if 8_100_000 <= int(first) < 31_900_000:
            self.behaviour(request, reply)


FAULTS = [Refuse(403), Refuse(404), Refuse(500), Cut(100), Stall(100), Headers(ETag='"another"')]


@pytest.mark.parametrize("fault", FAULTS, ids=["403", "404", "500", "cut", "stall", "changed"])
def test_values_that_did_not_come_end_2_whatever_is_asked(served, statecli, tmp_path, fault):
    """One line with target and tensor once each, what was found before, and nothing that could be accepted."""
    far(served.folder)
    served.behave("*", Within(fault))
    url, baseline = served.url("m.safetensors"), tmp_path / "b.json"
    for options in ((), ("--select", "nan"), ("--ignore", "unread-values")):
        asked = ("audit", url, "--values", "--jobs", "1", *options)  # behind what did not come nothing is asked for
        storage_files.forget_command()
        result = statecli(*asked, "-f", "json")
        assert (result.code, result.json["passed"]) == (2, False)
        assert [finding["rule"] for finding in result.json["findings"]] == ["nan"]
        (line,) = result.err.splitlines()
        assert (line.count(url), line.count(": w"), "more tensor" in line) == (1, 1, True), line
        storage_files.forget_command()
        accepted = statecli(*asked, "--write-baseline", baseline, "--reason", "a test")
        storage_files.forget_command()
        assert (accepted.code, statecli(*asked, "--baseline", baseline).code) == (2, 2)
        assert "unread" not in baseline.read_text()


@pytest.mark.parametrize("output", ["plain", "markdown", "github", "junit", "sarif", "gitlab"])
def test_no_output_of_such_a_run_looks_clean(served, statecli, output):
    """Each says that the target could not be read; no rule that had not seen all values is told to have passed."""
    far(served.folder)
    served.behave("*", Within(Refuse(403)))
    result = statecli("audit", served.url("m.safetensors"), "--values", "--select", "inf", "-f", output)
    assert result.code == 2
    assert "w1 and 2 more tensors: access is refused (HTTP 403)" in result.out
    assert "clean" not in result.out
    assert 'name="inf"/>' not in result.out


def test_a_lock_and_a_reference_that_could_not_be_compared_end_2(served, statecli, tmp_path):
    """With and without values; and no lock is written, and no statistic shown."""
    near, lock, config = far(tmp_path), tmp_path / "l.json", tmp_path / "s.toml"
    config.write_text('[policy]\nmust-change = ["w*"]\n')
    far(served.folder)
    assert statecli("lock", near, "-o", lock).code == 0
    served.behave("*", Within(Refuse(403)))
    url = served.url("m.safetensors")
    for asked in (
        ("audit", url, "--lock", lock),
        ("audit", url, "--lock", lock, "--values", "--select", "lock", "--select", "nan"),
        ("audit", url, "--against", near, "--config", config),
        ("audit", near, "--against", url, "--config", config),
        ("lock", url, "-o", tmp_path / "none"),
        ("inspect", "--stats", url),
    ):
        storage_files.forget_command()
        result = statecli(*asked, *(("--ignore", "unread-values") if asked[0] == "audit" else ()))
        assert (result.code, "HTTP 403" in result.err, "clean" in result.out) == (2, True, False), (asked, result)
    assert not (tmp_path / "none").exists()


def of_before_1_6(folder: Path) -> str:
    torch.save(
        {"a": torch.zeros(100_000), "b": Call(os.system, "echo")}, folder / "m.pt", _use_new_zipfile_serialization=False
    )
    return "m.pt"


def archive(folder: Path) -> str:
    torch.save([torch.zeros(50_000) for _ in range(4)], folder / "m.pt")
    with zipfile.ZipFile(folder / "m.pt", "a") as zip_file:
        zip_file.writestr("m/more.pkl", pickle.dumps([b"x" * 200_000, Call(os.system, "echo")]))
    return "m.pt"


def files(folder: Path) -> str:
    """A checkpoint that its name does not tell, another pickle, and a text."""
    inner = folder / "x"
    inner.mkdir()
    (folder / archive(folder)).rename(inner / "weights")
    (inner / "vocab.pkl").write_bytes(pickle.dumps([1, Call(os.system, "echo")]))
    (inner / "README.txt").write_text("none")
    return "x/"


class Once:
    """A behaviour for one request of all."""

    def __init__(self, number: int, behaviour) -> None:
        self.number, self.behaviour, self._count = number, behaviour, itertools.count()

    def __call__(self, request: Request, reply: Reply) -> None:
        if next(self._count) == self.number:
            self.behaviour(request, reply)


@pytest.mark.parametrize("fault", [Refuse(403), Refuse(404), Cut(None)], ids=["403", "404", "cut"])
@pytest.mark.parametrize("write", [of_before_1_6, archive, files])
def test_whichever_request_fails_nothing_is_left_out_of_what_is_found(served, statecli, write, fault):
    """Pickles are searched by a pass of their own, which a server may refuse what it then gives to the reader."""
    served.listing = "python"
    url = served.url(write(served.folder))
    whole = statecli("audit", url, "-f", "json")
    assert (whole.code, "unsafe-global" in whole.out) == (1, True)
    counted = len(served.requests)
    for number in range(counted):
        served.behave("*", Once(number, fault))
        storage_files.forget_command()
        result = statecli("audit", url, "-f", "json")
        assert result.code == 2 or (result.code, result.out) == (whole.code, whole.out)
        assert "unscanned-pickle" not in [finding["rule"] for finding in result.json["findings"]]
