"""Uncommitted changes of an edited file. As with `ruff --fix`, they do not stop the edit, but a note reports them."""

from __future__ import annotations

import os
import shutil
import subprocess

from statecli.commands.fix.result import ChangedFile

#: Seconds to wait for git, because a slow disk must not delay the result.
GIT_TIMEOUT_S = 10.0


def describe_changes(file: ChangedFile) -> str:
    """Return a note if git shows uncommitted changes of the file, or does not track the file; else ""."""
    git = shutil.which("git")
    if git is None:
        return ""
    folder, name = os.path.split(file.path)
    command = [git, "-C", folder, "status", "--porcelain", "--untracked-files=all", "--", name]
    try:
        status = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, check=False)  # noqa: S603 - a list
    except (OSError, subprocess.SubprocessError):
        return ""
    if status.returncode or not status.stdout.strip():
        return ""
    if status.stdout.startswith(b"??"):
        return f"{file.name}: git does not track this file, so git cannot undo the fix"
    return f"{file.name}: has uncommitted changes; git diff shows these changes together with the fix"
