"""A file changes after its listing: each command that reads values exits with 2 with one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit import run as auditing
from statecli.commands.diff import run as comparing
from statecli.core.errors import UnreadableError
from statecli.requests import git_textconv
from statecli.storage import files
from statecli.targets import load


def rewrite(path: Path) -> None:
    """Write the same bytes to the same inode, and restore the times."""
    before = path.stat()
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    """Replace the file by another file with the same bytes and times."""
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def touch(path: Path) -> None:
    """Change the time of the last write."""
    os.utime(path, (1, 1))


def truncate_file(path: Path) -> None:
    """Truncate the file after its first half."""
    os.truncate(path, path.stat().st_size // 2)


def remove(path: Path) -> None:
    """Remove the file."""
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
    """Return a checkpoint that all commands accept."""
    for name in ("a.pt", "other.pt"):
        torch.save({"w": torch.arange(10.0)}, name)
    assert statecli("lock", "a.pt", "-o", "lock.json").code == 0
    return Path("a.pt")


@pytest.fixture
def call_after_listing(monkeypatch) -> Callable[[Callable[[], None]], None]:
    """Call a function once, after the header of a checkpoint is read and before its values are read."""

    def arrange(act: Callable[[], None]) -> None:
        read_whole, calls = load.read_whole_checkpoint, []

        def read_and_act(text, *args, **options):
            state = read_whole(text, *args, **options)
            if text.startswith(("a.pt", "a")) and not calls:
                calls.append(True)
                act()
            return state

        monkeypatch.setattr(load, "read_whole_checkpoint", read_and_act)

    return arrange


@pytest.mark.parametrize(
    ("command", "change"),
    [*((command, rewrite) for command in COMMANDS), (COMMANDS[0], replace), (COMMANDS[0], touch)],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(value),
)
def test_change_after_the_listing_exits_with_2_and_one_line(command, change, path, call_after_listing, statecli):
    """The values read are of two files: status 2, and one line names the changed file."""
    call_after_listing(lambda: change(path))
    result = statecli(*(word.format(path) for word in command))
    assert result.code == 2, result
    lines = [line for line in result.err.splitlines() if "changed while statecli read it" in line]
    assert len(lines) == 1, result
    assert "a.pt: " in lines[0]


@each_command
def test_unchanged_file_is_not_reported_as_changed(command, path, call_after_listing, statecli):
    """Reading a file or its status is not a change."""
    call_after_listing(lambda: path.stat())
    result = statecli(*(word.format(path) for word in command))
    assert result.code == 0, result


@pytest.mark.parametrize("change", [truncate_file, remove], ids=lambda change: change.__name__)
@each_command
def test_truncated_or_removed_file_exits_with_2(command, change, path, call_after_listing, statecli):
    """Each command names the file and exits with status 2."""
    call_after_listing(lambda: change(path))
    result = statecli(*(word.format(path) for word in command))
    assert result.code == 2, result
    assert "a.pt" in result.out + result.err


@each_change
def test_a_change_between_the_scan_and_the_listing_fails_the_target(change, path, monkeypatch, statecli):
    """The scanned pickles are not the listed pickles."""
    scan = auditing.scan_pickles

    def scan_and_change(text):
        scan_result = scan(text)
        change(path)
        return scan_result

    monkeypatch.setattr(auditing, "scan_pickles", scan_and_change)
    result = statecli("audit", path, "-f", "json")
    assert result.code == 2
    (row,) = result.json["targets"]
    assert (row["status"], row["reason"]) == ("failed", "changed while statecli read it; try again")


def test_only_the_changed_target_of_an_audit_fails(path, call_after_listing, statecli):
    """Only the changed file fails."""
    call_after_listing(lambda: touch(path))
    result = statecli("audit", "a.pt", "other.pt", "--values", "-f", "json")
    assert [row["status"] for row in result.json["targets"]] == ["failed", "audited"]


def test_change_of_a_shard_in_a_subfolder_is_reported(tmp_path, monkeypatch, call_after_listing, statecli):
    """In a folder each opened file counts, also a file of a subfolder."""
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
            call_after_listing(lambda: touch(shard))
            result = statecli(*command)
        assert result.code == 2, command
        assert "mp_rank_00_model_states.pt: " in result.out + result.err
        touch(shard)


def test_change_of_config_json_is_reported(tmp_path, in_tmp_path, call_after_listing, statecli):
    """`config.json` was compared as well."""
    for name in "ab":
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"architectures": ["Net"]}')
    call_after_listing(lambda: touch(tmp_path / "a" / "config.json"))
    result = statecli("diff", "a", "b")
    assert (result.code, "config.json: changed while statecli read it" in result.err) == (2, True)


def test_change_of_a_file_that_is_not_read_is_ignored(tmp_path, in_tmp_path, call_after_listing, statecli):
    """A training may write a log next to the inspected checkpoint."""
    (tmp_path / "a").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_text('{"architectures": ["Net"]}')
    log = tmp_path / "a" / "train.log"
    log.write_text("x")
    call_after_listing(lambda: log.write_text("xy"))
    assert statecli("inspect", "a", "--stats").code == 0
    assert statecli("lock", "a", "-o", "-").code == 0


def test_git_keeps_no_text_of_a_file_that_changed(path, call_after_listing):
    """git caches the lines of the driver under the former content of the file."""
    call_after_listing(lambda: touch(path))
    with pytest.raises(UnreadableError, match="changed while statecli read it"):
        list(git_textconv.convert_to_text(str(path)))


def test_file_opened_in_an_inner_block_is_recorded_in_both_blocks(path):
    """A file opened first in an inner block is recorded for both blocks, with its version at the first opening."""
    with files.record_opened_files() as outer:
        with files.record_opened_files() as inner:
            files.open_file(str(path)).close()
        touch(path)
        files.open_file(str(path)).close()
    assert inner == outer
    assert comparing.find_changed(outer) == ["a.pt"]
