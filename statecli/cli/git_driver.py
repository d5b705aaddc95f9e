"""`statecli git`: checkpoints in `git diff`, `git log -p` and `git difftool`.

`git_setup.py` writes the drivers into a repository: `.gitattributes` lists checkpoints, `.git/config` the commands.
`git diff` calls the external diff driver with the two files; `git log -p` and `git diff --no-ext-diff` compare texts.
A driver turns a checkpoint into text, a line a tensor; git compares this text and caches it by the id of the blob and
the command line of the driver. Drivers always exit with 0 and describe an error in the text, because git aborts for any
other status. Git caches the text of an error too: an error outside of the file has a unique text with the command to
drop it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from statecli.core.errors import StateError, UsageError
from statecli.core.escaping import escape
from statecli.core.terminal_width import is_terminal
from statecli.requests.git_setup import PATTERNS, query_git, shorten_path
from statecli.requests.git_textconv import convert_to_text, describe_pointer

#: git's cache of the texts of the driver.
_CACHE = "refs/notes/textconv/statecli"


def describe_failure(error: BaseException) -> str:
    """Return the text for an error outside of the file; unique, because git shows no difference of equal texts."""
    message = str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
    return (
        f"cannot be read (attempt {time.time_ns()}): {escape(message)}; fix the error, then delete git's "
        f"cache: git update-ref -d {_CACHE}"
    )


def compare_files(before: str, after: str, compare: Callable[[str, str, str], int], name: str = "") -> Iterator[str]:
    """Yield lines about two files, and compare two checkpoints by `compare`; of two pointers, say if they are equal.

    Git passes the null device for a missing file: the other file is listed then. `name`: the path in the repository.
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


def compare_for_git(arguments: Sequence[str], compare: Callable[[str, str, str], int]) -> Iterator[str]:
    """Yield lines about one file of `git diff`, from the arguments that git gives an external diff driver.

    These are the path, then file, id and mode of the old version and of the new version; for a renamed file also its
    new path and a text; for a file with a merge conflict the path alone. Equal ids are equal contents. Raises
    UsageError for another number of arguments.
    """
    if len(arguments) == 1:
        yield f"unmerged: {escape(arguments[0])}"
        return
    if len(arguments) not in (7, 9):
        raise UsageError(
            f"git external-diff: expected 1, 7 or 9 arguments from git, but got {len(arguments)}; run git diff instead"
        )
    path, before, after = arguments[0], arguments[1], arguments[4]
    if len(arguments) == 9 and arguments[7] != path:
        yield f"renamed: {escape(path)} to {escape(arguments[7])}"
        path = arguments[7]
    if before != os.devnull and after != os.devnull and arguments[3] != arguments[6]:
        yield f"mode: {arguments[3]} to {arguments[6]}"
    ids = {arguments[2], arguments[5]}
    if len(ids) == 1 and set(*ids) - {"0", "."}:  # zeros: a file of the working tree without an id
        return
    yield from compare_files(before, after, compare, path)


def use_color_of_git() -> bool:
    """Return whether git shows colours: its configuration, for a terminal or git's own pager."""
    is_terminal_output = os.environ.get("GIT_PAGER_IN_USE") in ("1", "true") or is_terminal(1)
    return query_git("config", "--get-colorbool", "color.diff", str(is_terminal_output).lower()) == "true"


def _compare_folders(before: str, after: str, compare: Callable[[str, str, str], int]) -> Iterator[str]:
    """Compare files with names of checkpoints with the files of the same name; list the names of all other files."""
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
            yield escape(str(error))
    if other_files:
        names = ", ".join(map(escape, other_files))
        yield f"files without the name of a checkpoint, such as *.pt, were not compared: {names}"


def _list_files(folder: str) -> Iterator[str]:
    for path, _, names in os.walk(folder):
        yield from (os.path.relpath(os.path.join(path, name), folder) for name in names)
