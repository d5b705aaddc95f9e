"""Run `statecli git external-diff`: compare two versions of a checkpoint for `git diff`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from statecli.core.errors import UsageError
from statecli.core.escaping import escape
from statecli.core.output import Color, Output
from statecli.requests.git_driver import Compare, compare_files, write_lines
from statecli.requests.git_setup import query_git
from statecli.requests.options import DiffOptions, GitExternalDiffOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome


def run(options: GitExternalDiffOptions, caller: Caller) -> Outcome[None]:
    """Write lines about a file and its changed tensors. Raises UsageError unless git gives 1, 7 or 9 arguments."""
    count = len(options.arguments)
    if count not in (1, 7, 9):
        raise UsageError(
            f"git external-diff: expected 1, 7 or 9 arguments from git, but got {count}; run git diff instead"
        )
    os.environ["STATECLI_PAGER"] = "cat"  # git itself shows all files in one pager
    color = Color.ALWAYS if _use_color_of_git(caller) else Color.NEVER

    def compare(before: str, after: str, name: str) -> None:
        diff = DiffOptions(before=before, after=after, output_format=Output.TABLE, color=color, no_progress=True)
        caller.run_command(diff, ExtraInputs(name=name))

    return write_lines(_list_lines(options.arguments, compare), caller)


def _list_lines(arguments: Sequence[str], compare: Compare) -> Iterator[str]:
    """Yield lines about one file of `git diff`. `arguments` are those that git passes to an external diff driver.

    git passes the path, and then file, id and mode of the old and of the new version. For a renamed file, the new path
    and a text follow. For a file with a merge conflict, git passes only the path. Equal ids mean equal contents.
    """
    if len(arguments) == 1:
        yield f"unmerged: {escape(arguments[0])}"
        return
    path, before, before_id, before_mode, after, after_id, after_mode, *renamed = arguments
    if renamed and renamed[0] != path:
        yield f"renamed: {escape(path)} to {escape(renamed[0])}"
        path = renamed[0]
    if os.devnull not in (before, after) and before_mode != after_mode:
        yield f"mode: {before_mode} to {after_mode}"
    if before_id == after_id and set(before_id) - {"0", "."}:  # zeros: a file of the working tree without an id
        return
    yield from compare_files(before, after, compare, path)


def _use_color_of_git(caller: Caller) -> bool:
    """Return whether git's configuration asks for colours, on a terminal or in git's own pager."""
    is_terminal = os.environ.get("GIT_PAGER_IN_USE") in ("1", "true") or caller.is_terminal()
    return query_git("config", "--get-colorbool", "color.diff", str(is_terminal).lower()) == "true"
