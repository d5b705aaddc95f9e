"""The checkpoints changed by a pull request, compared with its base branch in a repository of git."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

SCRIPT = Path(__file__).parent.parent / "tools" / "pull_request_changes.py"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"


def git(*words):
    process = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def commit():
    git("add", "--all")
    git("commit", "--quiet", "-m", "x")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A branch `main` with a checkpoint, and a checked-out branch `change`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "s@example.org")
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "--quiet", "--initial-branch=main")
    (folder / "weights").mkdir()
    save_file({"fc.weight": torch.eye(3), "fc.bias": torch.arange(3.0)}, "weights/m.safetensors")
    save_file({"w": torch.ones(2)}, "same.safetensors")
    save_file({"w": torch.ones(2)}, "gone.safetensors")
    commit()
    git("switch", "--quiet", "-c", "change")
    return folder


def change_bias():
    save_file({"fc.weight": torch.eye(3), "fc.bias": torch.tensor([0.0, 1.0, 3.0])}, "weights/m.safetensors")


def compare(base="main"):
    """The Markdown; stderr is empty."""
    process = subprocess.run([sys.executable, "-I", SCRIPT, base], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


def test_a_changed_checkpoint_has_the_table_of_diff(repository):
    """The verdict is first, the changed tensor below; equal checkpoints are not mentioned."""
    change_bias()
    save_file({"w": torch.ones(2)}, "new.safetensors")
    Path("gone.safetensors").unlink()
    Path("notes.txt").write_text("text")
    commit()
    text = compare()
    assert "<summary><code>weights/m.safetensors</code>: 1 of 2 parameters changed" in text
    assert "| `M fc.bias` |" in text
    assert text.count("<details>") == text.count("</details>") == 1
    assert "- added: `new.safetensors`\n" in text
    assert "- deleted: `gone.safetensors`\n" in text
    assert "same.safetensors" not in text
    assert "notes" not in text
    assert str(repository) not in text


def test_change_of_the_base_branch_is_not_reported(repository):
    """The pull request is compared with its merge base."""
    git("switch", "--quiet", "main")
    change_bias()
    commit()
    git("switch", "--quiet", "change")
    assert compare() == ""


def save_pointer(path, content):
    digest = hashlib.sha256(content).hexdigest()
    Path(path).write_text(POINTER.format(digest, len(content)))
    return digest


def test_pointers_are_compared_by_their_files(repository):
    """If the checkout has them; otherwise they are named. Both versions are below .git/lfs."""
    contents = [save({"w": torch.full((4,), value)}) for value in (1.0, 2.0)]
    git("switch", "--quiet", "main")
    digests = [save_pointer("lfs.safetensors", contents[0])]
    commit()
    git("switch", "--quiet", "-C", "change")
    digests.append(save_pointer("lfs.safetensors", contents[1]))
    commit()
    named = compare()
    assert f"base: git-lfs pointer: sha256:{digests[0]}, {len(contents[0])} bytes" in named
    assert f"head: git-lfs pointer: sha256:{digests[1]}" in named
    assert "`lfs.safetensors`: not compared" in named
    for digest, content in zip(digests, contents, strict=True):
        path = Path(".git", "lfs", "objects", digest[:2], digest[2:4], digest)
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    assert "<code>lfs.safetensors</code>: 1 of 1 parameters changed" in compare()


def test_stored_file_with_a_wrong_digest_is_not_read(repository):
    """A store with another content."""
    git("switch", "--quiet", "main")
    digest = save_pointer("lfs.safetensors", b"one")
    commit()
    git("switch", "--quiet", "-C", "change")
    save_pointer("lfs.safetensors", b"two")
    commit()
    path = Path(".git", "lfs", "objects", digest[:2], digest[2:4], digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"six")
    assert f"base: git-lfs pointer: sha256:{digest}" in compare()


def test_a_checkpoint_that_cannot_be_read_is_a_line(repository):
    """The other checkpoints are compared."""
    save_file({"w": torch.zeros(2)}, "same.safetensors")
    Path("weights/m.safetensors").write_bytes(b"\xff" * 40)
    commit()
    text = compare()
    assert "- `weights/m.safetensors`: head/weights/m.safetensors: " in text
    assert "<code>same.safetensors</code>: 1 of 1 parameters changed" in text


def test_links_and_hostile_names_are_harmless(repository):
    """A link is not followed, and a name is text."""
    name = "a`<b>@team\x1b[31m.safetensors"
    save_file({"w": torch.zeros(2)}, name)
    git("switch", "--quiet", "main")
    commit()
    git("switch", "--quiet", "-C", "change")
    save_file({"w": torch.ones(2)}, name)
    Path("gone.safetensors").unlink()
    os.symlink("/etc/passwd", "gone.safetensors")
    os.symlink("/etc/passwd", "link.safetensors")
    commit()
    text = compare()
    assert "\x1b" not in text
    assert "<b>" not in text
    assert "root" not in text
    assert "link.safetensors" not in text
    assert "- deleted: `gone.safetensors`" in text


def test_a_large_number_of_checkpoints_is_limited(repository):
    """The remaining checkpoints are counted."""
    for number in range(22):
        save_file({"w": torch.ones(2)}, f"new{number}.safetensors")
    commit()
    text = compare()
    assert text.count("- added") == 20
    assert "- and 2 more, which were not compared\n" in text


def test_missing_base_is_a_warning(repository):
    """A shallow clone without the base branch."""
    process = subprocess.run([sys.executable, "-I", SCRIPT, "nowhere"], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (0, "")
    assert process.stderr.startswith("::warning title=statecli::the checkpoints were not compared (fatal: ")
