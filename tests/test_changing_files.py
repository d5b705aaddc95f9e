"""A file that changes between its listing and its values: each command that reads values exits with 2 with one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.cli import git_driver
from statecli.commands.audit import run as auditing
from statecli.commands.diff import run as comparing
from statecli.core.errors import UnreadableError
from statecli.storage import files
from statecli.targets import load


def rewrite(path: Path) -> None:
    """Other values in the same inode, and the time of the last write as it was."""
    before = path.stat()
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    """Another file under the same name, with the same bytes and times."""
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def touch(path: Path) -> None:
    """Another time."""
    os.utime(path, (1, 1))


def cut_file(path: Path) -> None:
    """Nothing behind the first half."""
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    """No file at all."""
    path.unlink()


CHANGES: tuple[Callable[[Path], None], ...] = (rewrite, replace, touch)
each_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)

COMMANDS = (
    ("inspect", "{}", "--stats"),
    ("inspect", "{}", "--to", "cpu"),
    ("audit", "{}", "--values"),
    ("audit", "{}"),
    ("audit", "{}", "--lock", "lock.json"),
    ("lock", "{}", "-o", "-"),
    ("diff", "{}", "other.pt"),
    ("diff", "other.pt", "{}"),
)
each_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@pytest.fixture
def path(in_tmp_path, statecli) -> Path:
    """A checkpoint that all commands accept."""
    for name in ("a.pt", "other.pt"):
        torch.save({"w": torch.arange(10.0)}, name)
    assert statecli("lock", "a.pt", "-o", "lock.json").code == 0
    return Path("a.pt")


@pytest.fixture
def after_listing(monkeypatch) -> Callable[[Callable[[], None]], None]:
    """Calls it once, when a checkpoint's header has been read and before its values are."""

    def arrange(act: Callable[[], None]) -> None:
        whole, done = load.read_whole_checkpoint, []

        def and_act(text, *args, **more):
            state = whole(text, *args, **more)
            if text.startswith(("a.pt", "a")) and not done:
                done.append(True)
                act()
            return state

        monkeypatch.setattr(load, "read_whole_checkpoint", and_act)

    return arrange


@each_change
@each_command
def test_a_change_behind_the_listing_is_one_line_and_2(command, change, path, after_listing, statecli):
    """Whatever was read is of two files."""
    after_listing(lambda: change(path))
    result = statecli(*(word.format(path) for word in command))
    assert result.code == 2, result
    lines = [line for line in result.err.splitlines() if "changed while statecli read it" in line]
    assert len(lines) == 1, result
    assert "a.pt: " in lines[0]


@each_command
def test_an_unchanged_file_is_not_said_to_change(command, path, after_listing, statecli):
    """Being read, linked nowhere and looked at is no change."""
    after_listing(lambda: path.stat())
    result = statecli(*(word.format(path) for word in command))
    assert result.code == 0, result


@pytest.mark.parametrize("change", [cut_file, remove], ids=lambda change: change.__name__)
@each_command
def test_a_file_that_is_cut_or_removed_is_2(command, change, path, after_listing, statecli):
    """Each says what it met."""
    after_listing(lambda: change(path))
    result = statecli(*(word.format(path) for word in command))
    assert result.code == 2, result
    assert "a.pt" in result.out + result.err


@each_change
def test_a_change_between_the_scan_and_the_listing_fails_the_target(change, path, monkeypatch, statecli):
    """The pickles that were scanned are not those that are listed."""
    scan = auditing.scan_pickles

    def and_change(text):
        found = scan(text)
        change(path)
        return found

    monkeypatch.setattr(auditing, "scan_pickles", and_change)
    result = statecli("audit", path, "-f", "json")
    assert result.code == 2
    (row,) = result.json["targets"]
    assert (row["status"], row["reason"]) == ("failed", "changed while statecli read it; try again")


def test_other_targets_of_an_audit_are_judged(path, after_listing, statecli):
    """The file that changed fails alone."""
    after_listing(lambda: touch(path))
    result = statecli("audit", "a.pt", "other.pt", "--values", "-f", "json")
    assert [row["status"] for row in result.json["targets"]] == ["failed", "audited"]


def test_a_shard_below_the_folder_is_noticed(tmp_path, monkeypatch, after_listing, statecli):
    """Of a folder each file that was opened counts, in whatever folder of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "global_step1").mkdir(parents=True)
    (tmp_path / "a" / "latest").write_text("global_step1")
    shard = tmp_path / "a" / "global_step1" / "mp_rank_00_model_states.pt"
    torch.save({"module": {"w": torch.ones(3)}}, shard)
    shutil.copytree("a", "b")
    for command in (
        ("diff", "a", "b"),
        ("audit", "a", "--values"),
        ("lock", "a", "-o", "-"),
        ("inspect", "a", "--stats"),
    ):
        with monkeypatch.context() as _:
            after_listing(lambda: touch(shard))
            result = statecli(*command)
        assert result.code == 2, command
        assert "mp_rank_00_model_states.pt: " in result.out + result.err
        touch(shard)


def test_settings_beside_the_weights_are_noticed(tmp_path, in_tmp_path, after_listing, statecli):
    """`config.json` was compared as well."""
    for name in "ab":
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"architectures": ["Net"]}')
    after_listing(lambda: touch(tmp_path / "a" / "config.json"))
    result = statecli("diff", "a", "b")
    assert (result.code, "config.json: changed while statecli read it" in result.err) == (2, True)


def test_a_log_that_nobody_reads_may_change(tmp_path, in_tmp_path, after_listing, statecli):
    """A training writes next to the checkpoint that is looked at."""
    (tmp_path / "a").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_text('{"architectures": ["Net"]}')
    log = tmp_path / "a" / "train.log"
    log.write_text("x")
    after_listing(lambda: log.write_text("xy"))
    assert statecli("inspect", "a", "--stats").code == 0
    assert statecli("lock", "a", "-o", "-").code == 0


def test_git_keeps_no_text_of_a_file_that_changed(path, after_listing):
    """git caches what the driver prints by the content that the file had."""
    after_listing(lambda: touch(path))
    with pytest.raises(UnreadableError, match="changed while statecli read it"):
        list(git_driver.convert_to_text(str(path)))


def test_what_is_opened_within_is_opened_without(path):
    """A file that an inner block opened first has the version that it had then."""
    with files.record_opened_files() as outer:
        with files.record_opened_files() as inner:
            files.open_file(str(path)).close()
        touch(path)
        files.open_file(str(path)).close()
    assert inner == outer
    assert comparing.find_changed(outer) == ["a.pt"]
