"""Rules of the notes that a report adds to a command's findings, for example about files that were not checked."""

from __future__ import annotations

from collections.abc import Iterable

from statecli.core.finding import Severity
from statecli.core.rule import Rule
from statecli.core.run_scope import NotChecked, has_unread_tensors

NOT_CHECKED = Rule(
    "not-checked",
    "outputs",
    ("audit",),
    Severity.NOTE,
    summary="Some files, tensors or values were not checked by any rule.",
    why="the exit status does not cover them: an audit without findings may have skipped a broken tensor.",
    example="the values of 12 tensors were not read, because the file is larger than the default limit.",
    fix="add the option in the note, such as `--values`, or give the path of the file to audit.",
    cases={"tensors": Severity.WARNING},
)
CONFIGURATION = Rule(
    "configuration",
    "outputs",
    ("audit",),
    Severity.NOTE,
    summary="The configuration disables rules, or accepts findings that would fail the audit without it.",
    why="a change to the configuration can hide a finding, so the result shows which rules did not run.",
    example='`ignore = ["unsafe-global"]` in `statecli.toml`.',
    fix="review the configuration file in the note; run `statecli audit --no-config` to see all findings.",
)
MORE = Rule(
    "more",
    "outputs",
    ("diff",),
    Severity.NOTE,
    summary="There are more findings than the output shows.",
    why="`-n` limits the output, not the comparison. The exit status counts every finding.",
    example="`statecli diff a.pt b.pt -n 10` where 200 tensors differ.",
    fix="give a larger number to `-n`, or leave the option out.",
)
CANNOT_READ = Rule(
    "cannot-read",
    "outputs",
    ("inspect", "diff", "verify", "audit"),
    Severity.ERROR,
    summary="A file or a tensor could not be read, so it was not checked.",
    why="without this finding, an unreadable file would look clean. `-f gitlab` has no field for errors, so it shows "
    "each error as a finding.",
    example="a checkpoint whose download was interrupted.",
    fix="correct the problem in the message; for example, copy the file again. Then run the command again.",
)
SKIPPED = Rule(
    "skipped",
    "outputs",
    ("audit",),
    Severity.NOTE,
    summary="A file was not audited, because it is not a checkpoint or another target contains it.",
    why="the exit status does not cover the file.",
    example="a README next to the checkpoints, or a shard of a checkpoint that is audited as a whole.",
    fix="give the path of the file if the file should be audited by itself.",
)

RULES = (NOT_CHECKED, CONFIGURATION, MORE, CANNOT_READ, SKIPPED)


def choose_case(entries: Iterable[NotChecked]) -> str | None:
    """Return "tensors", a case of the rule NOT_CHECKED, if the entries contain unread tensors; else None."""
    return "tensors" if has_unread_tensors(entries) else None
