"""Run `statecli git difftool`: compare two files, or the files in two folders, for `git difftool`."""

from __future__ import annotations

from statecli.requests.git_driver import compare_files, write_lines
from statecli.requests.options import DiffOptions, GitDifftoolOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome


def run(options: GitDifftoolOptions, caller: Caller) -> Outcome[None]:
    """Write the difference of the two files or folders."""

    def compare(before: str, after: str, name: str) -> None:
        caller.run_command(DiffOptions(before=before, after=after), ExtraInputs(name=name))

    return write_lines(compare_files(options.before, options.after, compare, options.name), caller)
