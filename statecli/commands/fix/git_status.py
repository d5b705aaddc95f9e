"""Uncommitted changes of an edited file. As with `ruff --fix`, they do not stop the edit, but a note reports them."""

from __future__ import annotations

import os
import shutil
import subprocess

from statecli.commands.fix.result import ChangedFile

#: Seconds to wait for git, because a slow disk must not delay the result.
GIT_TIMEOUT_S = 10.0
#: Arguments of git before a command, because the settings of a repository from another person name programs: a monitor
#: of files, a hook for a written index, and a transport for missing objects.
_RUN_NO_PROGRAMS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "protocol.allow=never")


def describe_changes(file: ChangedFile) -> str:
    """Return a note if git shows uncommitted changes of the file or does not track the file, or "" otherwise.

    The result is also "" for a file with a git filter, because the filter is a program of the repository.
    """
    folder, name = os.path.split(file.path)
    filters = _call_git(folder, "check-attr", "-z", "filter", "--", name).split(b"\0")
    if filters[2:3] != [b"unspecified"]:
        return ""
    status = _call_git(folder, "status", "--porcelain", "--untracked-files=all", "--ignore-submodules=all", "--", name)
    if not status.strip():
        return ""
    if status.startswith(b"??"):
        return f"{file.name}: git does not track this file, so git cannot undo the fix"
    return f"{file.name}: has uncommitted changes; git diff shows these changes together with the fix"


def _call_git(folder: str, *words: str) -> bytes:
    """Call git without the programs that a repository configures. Return the output, or b"" if the command fails."""
    git = shutil.which("git")
    if git is None:
        return b""
    command = [git, *_RUN_NO_PROGRAMS, "-C", folder, *words]
    try:
        process = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, check=False)  # noqa: S603 - a list
    except (OSError, subprocess.SubprocessError):
        return b""
    return b"" if process.returncode else process.stdout
