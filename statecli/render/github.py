"""`-f github`: annotations of a workflow's run, which the runner reads from the step's standard output.

The findings of one source line are one annotation, and repeated layers in it are folded. GitHub shows ten errors, ten
warnings and ten notices of a step and drops the rest silently. So if there are more than ten, findings in files without
lines are one annotation a rule, at the first of their targets. If that is still too much, the last annotation counts
the rest. `-q` leaves only what makes the command exit 1, and drops the last line unless the configuration weakens
something.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from statecli.core.escaping import escape, escape_name, escape_sentence
from statecli.core.finding import Finding, Severity
from statecli.core.units import join_names, plural
from statecli.report import Line, Report, Trouble, fold
from statecli.storage import files
from statecli.targets.location import Located, file_of, of

if TYPE_CHECKING:
    from statecli.render import Look, Sink

#: Annotations of each level that GitHub shows of one step.
SHOWN = 10
#: Findings that one annotation tells of.
TOLD = 10

#: Findings of one annotation that are each followed by what to do, if that differs.
MAX_HELPS = 3

LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
#: The rule of what could not be read.
UNREAD = "cannot-read"


class _Note(msgspec.Struct, frozen=True):
    """One annotation: of `count` findings of one rule or one source line."""

    rule: str
    message: str
    where: Located | None
    count: int = 1
    target: str = ""


def write(report: Report, sink: Sink, look: Look) -> None:
    findings = report.reasons() if look.quiet else report.described_findings()
    troubles = report.troubles
    for severity, level in LEVELS.items():
        notes = _unread(one for one in troubles if one.severity is severity)
        notes += _folded([one for one in findings if one.severity is severity])
        for note in _fitting(notes):
            sink.text(_command(level, note))
    verdict = report.page().verdict
    last = report.weakening() if look.quiet else verdict
    if last:
        sink.text(f"statecli: {_plain(escape_sentence(last))}\n")


def _unread(troubles: Iterable[Trouble]) -> list[_Note]:
    rules = {Severity.ERROR: UNREAD}
    return [
        _Note(
            rules.get(one.severity, "skipped"),
            escape_sentence(one.message),
            Located(file_of(one.target)),
            1,
            one.target,
        )
        for one in troubles
    ]


def _folded(findings: Sequence[Finding]) -> list[_Note]:
    """One a finding, those of repeated layers of one target and one source line together."""
    by_line: dict[tuple[str, int] | None, list[Finding]] = {}
    for finding in findings:
        by_line.setdefault(_source_line(of(finding)), []).append(finding)
    notes = []
    for same in by_line.values():
        rows = [Line((one.message, one.rule, one.target, one.help or "")) for one in same]
        for line, positions in fold.messages(rows):
            message, rule, target, help = line.cells
            text = "\n".join(map(escape_sentence, (message, *help.splitlines())))
            notes.append(_Note(rule, text, of(same[positions[0]]), len(positions), target))
    return notes


def _source_line(where: Located | None) -> tuple[str, int] | None:
    """Return the file and line of a place; None where the place has no line."""
    return None if where is None or where.line is None else (where.path, where.line)


def _fitting(notes: list[_Note]) -> list[_Note]:
    """At most as many as are shown, whatever it takes; none is left out unsaid."""
    groups: dict[tuple[str, int] | str | int, list[_Note]] = {}
    for number, note in enumerate(notes):
        groups.setdefault(_source_line(note.where) or number, []).append(note)
    if len(groups) > SHOWN:
        groups = {}
        for note in notes:
            groups.setdefault(_source_line(note.where) or note.rule, []).append(note)
    together = [_together(", ".join(dict.fromkeys(note.rule for note in one)), one) for one in groups.values()]
    if len(together) <= SHOWN:
        return together
    rest = together[SHOWN - 1 :]
    count = sum(note.count for note in rest)
    lines = [f"{line[0]}:{line[1]}" for note in rest if (line := _source_line(note.where)) is not None]
    what = (
        f"and {plural(count, 'finding')} of {plural(len(rest), 'rule')} more: {', '.join(note.rule for note in rest)}"
    )
    if lines:
        what = f"and {plural(count, 'finding')} at {plural(len(rest), 'place')} more: {join_names(lines, TOLD)}"
    return [*together[: SHOWN - 1], _Note("more", what, None, count)]


def _together(rule: str, notes: Sequence[_Note]) -> _Note:
    if len(notes) == 1:
        return notes[0]
    several = len({note.target for note in notes}) > 1
    said: dict[str, list[_Note]] = {}
    for note in notes:
        line = note.message.partition("\n")[0]
        said.setdefault(line.removeprefix(f"{note.target}: ") if several else line, []).append(note)
    shown = list(said.items())
    helps = {note.message.partition("\n")[2] for note in notes}
    lines = []
    for line, same in shown[:TOLD]:
        lines.append(f"{_targets(same)}: {line}" if several else line)
        # If what to do is the same for all of them, it follows the last.
        lines += [same[0].message.partition("\n")[2]] if len(helps) > 1 and len(shown) <= MAX_HELPS else []
    rest = sum(note.count for _, same in shown[TOLD:] for note in same)
    lines += [f"… and {rest:,} more"] if rest else []
    lines += helps if len(helps) == 1 else []
    lines = list(filter(None, lines))
    target = "" if several else notes[0].target
    return _Note(rule, "\n".join(lines), notes[0].where, sum(note.count for note in notes), target)


def _targets(notes: Sequence[_Note]) -> str:
    """The first of them, each once."""
    return join_names([escape_name(one) for one in dict.fromkeys(note.target for note in notes)], TOLD)


def _command(level: str, note: _Note) -> str:
    properties, message = {}, note.message
    # An annotation of what is no file of the repository is attached to none.
    if note.where is not None and files.is_remote(note.where.path):
        target = escape_name(note.target)
        message = message if target in message else f"{target}: {message}"
    elif note.where is not None:
        properties["file"] = escape_name(note.where.path.replace(os.sep, "/"))
        if note.where.line is not None:
            properties["line"] = str(max(1, note.where.line))
    properties["title"] = f"statecli {escape(note.rule)}" + (f" ({note.count:,})" if note.count > 1 else "")
    said = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{level} {said}::{_data(message)}\n"


def _data(text: str) -> str:
    return _plain(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _plain(text: str) -> str:
    """`##[` would begin a command of the older kind wherever it stands in a line."""
    return text.replace("##[", "# #[")
