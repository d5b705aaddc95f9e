"""Files that an audit does not check: the verdict counts them in every output. A file that cannot be opened fails."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import torch

from statecli.file_scan import scan
from statecli.storage import files

FOREIGN_FILES = {
    "model.7z": b"7z\xbc\xaf\x27\x1c" + bytes(64),
    "model.h5": b"\x89HDF\r\n\x1a\n" + bytes(64),
    "saved_model.pb": b"\x08\x01\x12\x96\x20" + bytes(range(256)),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a clean checkpoint and three files of formats that statecli does not read."""
    torch.save({"w": torch.arange(3.0)}, tmp_path / "a.pt")
    for name, content in FOREIGN_FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


VERDICT_OUTPUTS = ("json", "jsonl", "markdown", "html", "github")
DOCUMENT_OUTPUTS = ("csv", "sarif", "junit", "gitlab")


def test_every_output_lists_unchecked_files(statecli, folder):
    """`clean` never stands alone where files were skipped: a verdict counts the files, a document has each reason."""
    reports = {name: folder.parent / f"{folder.name}.{name}" for name in (*VERDICT_OUTPUTS, *DOCUMENT_OUTPUTS)}
    result = statecli("audit", ".", *(f"--report={name}={path}" for name, path in reports.items()))
    assert result.code == 0
    texts = {name: path.read_text("utf-8") for name, path in reports.items()}
    for text in (result.out, *(texts[name] for name in VERDICT_OUTPUTS)):
        assert "not checked: 1 file (7z archive), 1 file (HDF5 file), 1 file (" in text
    entries = json.loads(texts["json"])["not_checked"]
    assert [(entry["what"], entry["count"]) for entry in entries] == [("file", 1)] * 3
    assert entries[0]["why"] == "7z archive"
    rows = list(csv.DictReader(io.StringIO(texts["csv"])))
    assert [row["rule"] for row in rows] == ["not-checked"] * 3
    (invocation,) = json.loads(texts["sarif"])["runs"][0]["invocations"]
    notified = [finding["message"]["text"] for finding in invocation["toolExecutionNotifications"]]
    assert "not checked: 1 file: 7z archive" in notified
    assert invocation["executionSuccessful"]
    root = ET.fromstring(texts["junit"])  # noqa: S314 - our own
    assert [element.get("name") for element in root.iter("property")] == ["not-checked"] * 3
    issues = json.loads(texts["gitlab"])
    assert [(issue["check_name"], issue["severity"]) for issue in issues] == [("not-checked", "info")] * 3


@pytest.mark.parametrize("output", ["plain", "table", "markdown", "html", "github"])
def test_quiet_output_counts_unchecked_files(statecli, folder, output):
    """In plain text, the count is the only output for a clean folder."""
    result = statecli("audit", ".", "-q", "-f", output)
    assert "not checked: 1 file (7z archive), 1 file (HDF5 file), 1 file (" in result.out
    assert result.out.startswith("not checked: ") == (output in ("plain", "table"))


def test_harmless_kinds_do_not_push_others_out_of_the_verdict(statecli, folder):
    """Broken links come first in the walk, and the verdict still lists every kind."""
    (folder / "0").symlink_to("nowhere")
    (folder / "1.txt").write_text("words")
    (folder / ".git").mkdir()
    verdict = statecli("audit", ".").out
    assert all(kind in verdict for kind in ("broken link", "text file", "of a tool", "7z archive", "HDF5 file"))


def test_folders_of_tools_count_as_not_checked(statecli, folder):
    """A walk does not enter folders of tools."""
    (folder / ".cache").mkdir()
    assert statecli("audit", ".", "-f", "json").json["not_checked"][0] == {
        "what": "folder",
        "count": 1,
        "why": "of a tool",
    }


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_local_file_that_cannot_be_opened_fails(statecli, folder, monkeypatch, error):
    """The name does not matter, because an unreadable file may have any content."""
    (folder / "notes.txt").write_text("hello")
    opened = os.open

    def refuse(path, *args, **kwargs):
        if os.fspath(path).endswith("notes.txt"):
            raise error
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(files.os, "open", refuse)
    result = statecli("audit", ".")
    assert result.code == 2
    assert "notes.txt" in result.err


def test_broken_links_are_counted_and_do_not_fail(statecli, folder):
    """A loader cannot load anything from a broken link; the lock file of Emacs is a broken link."""
    (folder / ".#notes.txt").symlink_to("user@host.123")
    result = statecli("audit", ".", "-f", "json")
    reasons = {entry["why"] for entry in result.json["not_checked"]}
    assert result.code == 0
    assert "broken link" in reasons


def list_audited(document):
    """Return the audited targets of a JSON document."""
    return {target["target"] for target in document["targets"] if target["status"] == "audited"}


HIDDEN_FILES = (".evil.pt", ".hidden/b.pt")


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*", HIDDEN_FILES),
        ("**", HIDDEN_FILES),
        ("**/*.pt", HIDDEN_FILES),
        ("*.pt", HIDDEN_FILES[:1]),
        ("?evil.pt", HIDDEN_FILES[:1]),
    ],
)
def test_glob_finds_hidden_files_and_folders(statecli, folder, glob, names):
    """`folder/*` and `folder` agree. Neither enters `.git`, which is reported as not checked."""
    for path in HIDDEN_FILES:
        (folder / path).parent.mkdir(exist_ok=True)
        torch.save({"w": torch.zeros(1)}, folder / path)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main")
    document = statecli("audit", f"{folder}/{glob}", "-f", "json").json
    audited = list_audited(document)
    assert {str(folder / name) for name in names} <= audited
    if names == HIDDEN_FILES:
        assert audited == list_audited(statecli("audit", folder, "-f", "json").json)
    assert any(entry["what"] == "folder" for entry in document["not_checked"]) is (names == HIDDEN_FILES)
    assert not any("HEAD" in target["target"] for target in document["targets"])


def test_a_glob_that_matches_only_hidden_folders_matches_no_file(statecli, tmp_path):
    """Nothing was audited, so the command exits with status 2."""
    (tmp_path / ".hidden").mkdir()
    result = statecli("audit", f"{tmp_path}/**/*.pt")
    assert (result.code, "no file matches" in result.err) == (2, True)


def test_link_to_an_audited_file_does_not_count_as_unchecked(statecli, folder):
    """The link counts as skipped."""
    (folder / "b.pt").symlink_to("a.pt")
    document = statecli("audit", "a.pt", "b.pt", "-f", "json").json
    assert document["not_checked"] == []
    assert "1 skipped" in document["verdict"]


TRUNCATED_MESSAGE = (
    "file is truncated: its 60 bytes contain no end record of a zip archive (end-of-central-directory record)"
)


@pytest.fixture
def truncated_checkpoint(folder):
    """The first 60 bytes of a checkpoint."""
    (folder / "cut.pt").write_bytes((folder / "a.pt").read_bytes()[:60])
    return "cut.pt"


def test_a_truncated_file_is_reported_with_the_fact_first(statecli, truncated_checkpoint):
    """The advice to copy the file again is given once, as the help."""
    message = f"the {TRUNCATED_MESSAGE}; statecli scanned only the records that it found by searching for headers"
    result = statecli("audit", truncated_checkpoint, "-f", "json")
    (finding,) = result.json["findings"]
    assert (finding["rule"], finding["message"]) == ("unscanned-pickle", message)
    assert result.code == 2
    assert "failed: cut.pt: see unscanned-pickle" in statecli("audit", truncated_checkpoint).out


def test_only_the_beginning_of_a_large_truncated_file_is_searched(statecli, folder, monkeypatch):
    """A file may claim any size: a sparse file of 1 TB is zeros after its first bytes."""
    torch.save(os.system, folder / "a.pt")
    archive = (folder / "a.pt").read_bytes()
    (folder / "cut.pt").write_bytes(b"PK\3\4" + bytes(1000) + archive[:-200])
    found_rules = {finding["rule"] for finding in statecli("audit", "cut.pt", "-f", "json").json["findings"]}
    assert {"unscanned-pickle", "unsafe-global"} <= found_rules
    monkeypatch.setattr(scan, "_MAX_READ_BYTES", 1000)
    result = statecli("audit", "cut.pt", "-f", "json")
    (finding,) = result.json["findings"]
    assert finding["message"].endswith("by searching for headers in the first 1,000 bytes")
    assert result.code == 2


@pytest.mark.parametrize("options", [["-f", "github"], ["-f", "github", "-q"]])
def test_a_truncated_file_is_reported_once_in_a_log_of_github(statecli, truncated_checkpoint, options):
    """The log shows annotations and standard error, so the message must not be in both."""
    result = statecli("audit", truncated_checkpoint, *options)
    assert (result.out + result.err).count(TRUNCATED_MESSAGE) == 1


def test_a_truncated_file_is_reported_once_in_quiet_text(truncated_checkpoint):
    """Standard output and standard error are merged into one stream, as in a log."""
    command = [sys.executable, "-m", "statecli", "audit", truncated_checkpoint, "-q"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert result.stdout.count(TRUNCATED_MESSAGE) == 1
    assert result.returncode == 2
