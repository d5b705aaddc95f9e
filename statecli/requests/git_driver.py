"""Compare two files for git, so that `git diff` and `git difftool` show changed tensors of checkpoints as tables.

`git_setup.py` writes the drivers into a repository: `.gitattributes` lists checkpoints, `.git/config` the commands.
`git diff` calls the external diff driver with the two files; `git log -p` and `git diff --no-ext-diff` compare the
texts of `git_textconv.py`. All drivers describe an error as `git_failures.py` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from statecli.core.errors import StateError
from statecli.core.escaping import escape
from statecli.requests.git_failures import describe_failure, end_with_failure
from statecli.requests.git_setup import PATTERNS, shorten_path
from statecli.requests.git_textconv import convert_to_text, describe_pointer
from statecli.requests.outcome import Caller, Outcome

#: Function that compares two checkpoints: the old file, the new file, and the path in the repository.
Compare = Callable[[str, str, str], None]


def write_lines(lines: Iterator[str], caller: Caller) -> Outcome[None]:
    """Write the lines of a git driver. If an error occurs, its message is the last line."""
    for line in end_with_failure(lines, describe_failure):
        caller.write_line(line)
    return Outcome(None)


def compare_files(before: str, after: str, compare: Compare, name: str = "") -> Iterator[str]:
    """Yield lines about two files. `compare` compares two checkpoints; pointer files (git-lfs) are compared as text.

    For a missing file, git passes the null device; the lines list the other file. `name` is the path in the repository.
    Two folders (`git difftool -d`) are compared file by file.
    """
    if os.path.isdir(before) and os.path.isdir(after):
        yield from _compare_folders(before, after, compare)
        return
    name = name or shorten_path(after if before == os.devnull else before)
    pointers = describe_pointer(before), describe_pointer(after)
    if os.devnull in (before, after):
        path, event = (after, "added") if before == os.devnull else (before, "deleted")
        yield f"{event}: {escape(name)}"
        yield from convert_to_text(path)
    elif pointers == (None, None):
        yield f"changed: {escape(name)}"
        compare(before, after, name)
    elif pointers[0] == pointers[1]:
        yield f"both versions are equal: {pointers[0]}"
    else:
        yield f"changed: {escape(name)}"
        yield from (f"{side}: {pointer or 'a checkpoint'}" for side, pointer in zip("ab", pointers, strict=True))


def _compare_folders(before: str, after: str, compare: Compare) -> Iterator[str]:
    """Compare files named like checkpoints between the folders, by relative path. List the names of all other files."""
    other_files = []
    for name in sorted({*_list_files(before), *_list_files(after)}):
        if not any(fnmatchcase(os.path.basename(name), pattern) for pattern in PATTERNS):
            other_files.append(name)
            continue
        sides = (os.path.join(folder, name) for folder in (before, after))
        old, new = (path if os.path.exists(path) else os.devnull for path in sides)
        try:
            yield from compare_files(old, new, compare, name)
        except StateError as error:
            yield describe_failure(error)
    if other_files:
        names = ", ".join(map(escape, other_files))
        yield f"{names}: not compared, because only files named like checkpoints (such as *.pt) are compared"


def _list_files(folder: str) -> Iterator[str]:
    for path, _, names in os.walk(folder):
        yield from (os.path.relpath(os.path.join(path, name), folder) for name in names)
