"""The report of `statecli verify`: tensors down, what was proved of them across, then each proof in a line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from statecli import report
from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict, Verification
from statecli.core import sizes
from statecli.core.finding import Finding
from statecli.core.oddity_kind import OddityKind
from statecli.core.scope import NotChecked
from statecli.core.state import Kind, ModelState, TensorInfo
from statecli.core.units import KIND_NOUNS, format_kind, format_origin, format_shape, format_size, format_yes_no, plural
from statecli.report import (
    Case,
    Fix,
    Group,
    Line,
    Outcome,
    Page,
    Report,
    Table,
    Trouble,
    View,
    documents,
    fold,
    rule_texts,
    test_cases,
)
from statecli.targets.location import located

#: How a cell is drawn; a tensor of which a column says nothing is drawn as skipped.
SIGNS = {Verdict.PASSED: "✓", Verdict.FAILED: "✗", Verdict.SKIPPED: "–", Verdict.INCONCLUSIVE: "?"}


#: What a narrow table may say by group: it keeps each column that has anything else.
CALM = frozenset((SIGNS[Verdict.PASSED], SIGNS[Verdict.SKIPPED]))


class Shown(msgspec.Struct, frozen=True):
    """One column of a proof under the name by which the table knows it.

    `told` are the tensors that the proof has findings of, `why` is the reason of the proof as a whole.
    """

    name: str
    cells: dict[str, Cell]
    told: frozenset[str | None]
    why: str | None

    def verdict(self, fqn: str) -> Verdict:
        """SKIPPED where there is no cell."""
        return self.cells[fqn].verdict if fqn in self.cells else Verdict.SKIPPED

    def reason(self, fqn: str) -> str | None:
        """Why the cell is as it is, unless a finding or the proof's own line says so already."""
        cell = self.cells.get(fqn)
        if cell is None or (cell.verdict is Verdict.FAILED and fqn in self.told):
            return None
        return cell.reason if cell.reason != self.why else None


def of_verification(found: Verification, view: View, asked: Sequence[Name] = ()) -> Report:
    """Everything `verify` has to say; `asked` as in `untold`."""
    known = {(finding.rule, finding.fqn) for finding in found.findings}
    notes = [note for note in found.notes if (note.name, note.fqn) not in known]
    return Report(
        title=found.state.target,
        document=lambda: documents.of_verification(found, _verdict(found), _not_checked(found)),
        table=lambda: _flat(found, view.verbose),
        page=lambda: _page(found, view),
        findings=located(found.findings, found.state.tensors),
        notes=fold.notes(notes, view.verbose),
        whole=view.unfold,
        rules=lambda: rule_texts.of(found.findings),
        cases=lambda: tuple(_case(check, found.state, asked) for check in found.checks),
        troubles=tuple(Trouble(found.state.target, message) for message in untold(found, asked)),
    )


_OUTCOMES = {
    Verdict.PASSED: Outcome.PASSED,
    Verdict.FAILED: Outcome.FAILED,
    Verdict.INCONCLUSIVE: Outcome.ERROR,
    Verdict.SKIPPED: Outcome.SKIPPED,
}


def _case(check: Check, state: ModelState, asked: Sequence[Name]) -> Case:
    """A proof that was asked for and not tried is an error, as it is to the exit code."""
    target, name, outcome = state.target, check.check.value, _OUTCOMES[check.verdict]
    if outcome is Outcome.FAILED and check.findings:
        return test_cases.failed(target, name, located(check.findings, state.tensors))
    if outcome is Outcome.PASSED:
        return Case(target, name, outcome, text=(check.how,) if check.how else ())
    untried = outcome is Outcome.SKIPPED and check.check in asked
    return Case(target, name, Outcome.ERROR if untried else outcome, _why_not(check))


def untold(found: Verification, asked: Sequence[Name]) -> tuple[str, ...]:
    """A line for each proof that could not be told, or not tried although it was asked for: what exit 2 is for.

    Where no proof was tried at all one says so, asked for or not.
    """
    target = found.state.target
    if not found.state.tensors:
        packed = [note.fqn for note in found.notes if note.kind is OddityKind.PACKED_PARAMS and note.fqn]
        where = f" that can be seen: {packed[0].partition('._packed')[0]} packs its weights in C++" if packed else ""
        return (f"{target}: the model holds no tensor{where}: there is nothing to prove",)
    lines = [
        f"{target}: {check.check.value}: {_why_not(check)}"
        for check in found.checks
        if check.verdict is Verdict.INCONCLUSIVE or (check.verdict is Verdict.SKIPPED and check.check in asked)
    ]
    if not lines and all(check.verdict is Verdict.SKIPPED for check in found.checks):
        lines = [f"{target}: nothing was proved: {_names(found.checks)} skipped"]
    return tuple(lines)


def _not_checked(found: Verification) -> tuple[NotChecked, ...]:
    """Return the proofs that were not tried, and those that are inconclusive."""
    unproved = (one for one in found.checks if one.verdict in (Verdict.SKIPPED, Verdict.INCONCLUSIVE))
    return tuple(NotChecked("proof", 1, f"{check.check.value}: {_why_not(check)}") for check in unproved)


def _why_not(check: Check) -> str:
    """The reason of the whole, else that of the first tensor which has one, and of how many it is true."""
    if check.reason:
        return check.reason
    cells = [(fqn, cell) for column in check.columns for fqn, cell in column.cells.items()]
    unsure = [(fqn, cell) for fqn, cell in cells if cell.verdict is Verdict.INCONCLUSIVE]
    if not unsure:
        return "does not apply to this model" if check.verdict is Verdict.SKIPPED else "cannot tell"
    fqn, cell = unsure[0]
    count = len({fqn for fqn, _ in unsure})
    more = f"; nor of {plural(count - 1, 'other tensor')}" if count > 1 else ""
    return f"{fqn}: {cell.reason or 'cannot tell'}{more}"


def _columns(found: Verification) -> tuple[Shown, ...]:
    """The proofs' columns in order; one whose name an earlier proof has too is called after its own proof as well."""
    shown: list[Shown] = []
    for check in found.checks:
        told = frozenset(finding.fqn for finding in check.findings)
        for column in check.columns:
            taken = any(other.name == column.name for other in shown)
            name = f"{column.name} ({check.check.value})" if taken else column.name
            shown.append(Shown(name, column.cells, told, check.reason))
    return tuple(shown)


# The flat table: every fact in a column of its own.


def _flat(found: Verification, verbose: bool) -> Table:
    """Where `verbose`, people see what was measured and the lines too."""
    shown = _columns(found)
    measured = [(column, when) for column in shown for when in ("before", "after")]
    told = [verbose and any(getattr(cell, when) for cell in column.cells.values()) for column, when in measured]
    columns = (
        report.Column("kind"),
        report.Column("fqn"),
        report.Column("dtype", detail=True),
        report.Column("shape", detail=True),
        report.Column("requires_grad", detail=True),
        report.Column("origin", detail=not (verbose and any(row.origin for row in found.state.tensors))),
        *(report.Column(column.name) for column in shown),
        *(
            report.Column(f"{column.name}_{when}", detail=not one)
            for (column, when), one in zip(measured, told, strict=True)
        ),
        report.Column("reason"),
    )
    rows = tuple(
        (
            format_kind(row),
            row.fqn,
            row.dtype,
            format_shape(row.shape),
            format_yes_no(row.requires_grad),
            format_origin(row.origin) if row.origin else None,
            *(column.cells[row.fqn].verdict.value if row.fqn in column.cells else None for column in shown),
            *(getattr(column.cells.get(row.fqn), when, None) for column, when in measured),
            "; ".join(_worded(_given(row.fqn, shown))) or None,
        )
        for row in found.state.tensors
    )
    return Table(columns, rows)


def _given(fqn: str, shown: Sequence[Shown]) -> list[Because]:
    """Every reason that a cell of the tensor has, whatever else says it."""
    cells = [(column.name, column.cells.get(fqn)) for column in shown]
    return [(name, cell.reason) for name, cell in cells if cell is not None and cell.reason]


# For people: grouped by kind, then the proofs.


def _page(found: Verification, view: View) -> Page:
    shown = _columns(found)
    heads = (
        report.Column("name"),
        *(report.Column(one.name, shared=f"{one.name}: all {{}}", calm=CALM) for one in shown),
    )
    known = frozenset(row.fqn for row in found.state.tensors)
    proofs = tuple(_proof_line(check, known) for check in found.checks)
    verdict = _verdict(found)
    return Page(
        subtitle=_subtitle(found),
        columns=heads,
        groups=_groups(found, shown, view),
        totals=(*(f"{line.cells[0]}: {line.remark}" for line in proofs), verdict),
        fixes=_fixes(found),
        findings=found.findings if view.unfold else fold.findings(found.findings),
        verdict=verdict,
        done=Group("proofs", _tally(found.checks), proofs),
    )


def _subtitle(found: Verification) -> str:
    tensors = found.state.tensors
    size = sizes.sum_bytes(tensors)
    return f"{found.state.format}, {plural(len(tensors), 'tensor')}, {format_size(size)}"


def _groups(found: Verification, shown: Sequence[Shown], view: View) -> tuple[Group, ...]:
    worst = documents.worst_of(found)
    folded = not view.unfold and len(found.state.tensors) > fold.ABOVE
    groups = []
    for kind in Kind:
        rows = [row for row in found.state.tensors if row.kind is kind]
        if not rows:
            continue
        shared = _shared(rows, shown)
        lines = [_line(row, shown, shared, worst[row.fqn], view) for row in rows]
        summary = _summary(rows, worst) + "".join(f"; {reason}" for reason in _worded(shared))
        groups.append(Group(KIND_NOUNS[kind], summary, tuple(fold.lines(lines) if folded else lines)))
    return tuple(groups)


def _summary(rows: Sequence[TensorInfo], worst: dict[str, Verdict]) -> str:
    text = plural(len(rows), "tensor")
    for verdict in (Verdict.FAILED, Verdict.INCONCLUSIVE):
        count = sum(worst[row.fqn] is verdict for row in rows)
        text += f", {count:,} {verdict.value}" if count else ""
    return text


#: A column's name, and why a cell of it is as it is.
Because = tuple[str, str]


def _shared(rows: Sequence[TensorInfo], shown: Sequence[Shown]) -> tuple[Because, ...]:
    """What is true of every row of a group alike: said once, beside its heading."""
    found = []
    for column in shown:
        alike = {(column.verdict(row.fqn), column.reason(row.fqn)) for row in rows}
        _, reason = alike.pop()
        if not alike and reason:
            found.append((column.name, reason))
    return tuple(found)


def _reasons(fqn: str, shown: Sequence[Shown], shared: Sequence[Because]) -> list[str]:
    """Why its cells are as they are, each reason once, behind the columns that it holds for."""
    own = [(column.name, column.reason(fqn)) for column in shown]
    return _worded([(name, reason) for name, reason in own if reason and (name, reason) not in shared])


def _worded(becauses: Iterable[Because]) -> list[str]:
    columns: dict[str, list[str]] = {}
    for name, reason in becauses:
        columns.setdefault(reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in columns.items()]


_MOODS = {Verdict.FAILED: "bad", Verdict.INCONCLUSIVE: "warn"}


def _line(row: TensorInfo, shown: Sequence[Shown], shared: Sequence[Because], worst: Verdict, view: View) -> Line:
    """The remark has what the signs do not say; of a tensor that passed everything, nothing but its own note."""
    parts = _reasons(row.fqn, shown, shared)
    if row.note:
        parts.append(row.note)
    if view.verbose:
        parts.extend(_measured(row.fqn, shown))
    if row.origin and (worst is Verdict.FAILED or view.verbose):
        parts.append(format_origin(row.origin))
    signs = (SIGNS[column.verdict(row.fqn)] for column in shown)
    return Line((row.fqn, *signs), "; ".join(parts), _MOODS.get(worst, ""))


def _measured(fqn: str, shown: Sequence[Shown]) -> list[str]:
    """`moves: cpu → cuda:0`, of each column that measured something."""
    cells = [(column.name, column.cells[fqn]) for column in shown if fqn in column.cells]
    return [
        f"{name}: {cell.before or '-'} → {cell.after or '-'}"
        for name, cell in cells
        if cell.before is not None or cell.after is not None
    ]


def _proof_line(check: Check, known: frozenset[str]) -> Line:
    """`✗ move`, and behind it what was done and what came of it."""
    parts = [check.how]
    if check.verdict is Verdict.FAILED:
        parts.append(check.reason or _how_many(check, known))
    elif check.verdict is not Verdict.PASSED:
        parts.append(_why_not(check))
    elif check.reason:
        parts.append(check.reason)
    remark = ": ".join(filter(None, parts)) or check.verdict.value
    mood = _MOODS.get(check.verdict, "dim" if check.verdict is Verdict.SKIPPED else "")
    return Line((f"{SIGNS[check.verdict]} {check.check.value}",), remark, mood)


def _how_many(check: Check, known: frozenset[str]) -> str:
    """Of the tensors that are rows; further names of theirs, and what is no tensor, are counted apart."""
    failed = {finding.fqn for finding in check.findings} | set(_with(check.columns, (Verdict.FAILED,)))
    tried = set(_with(check.columns, (Verdict.FAILED, Verdict.PASSED, Verdict.INCONCLUSIVE)))
    count, names = len(failed & known), len(failed - known - {None})
    parts = [f"{count:,} of {plural(max(len(tried & known), count), 'tensor')}"] if count else []
    parts += [plural(names, "other attribute")] if names else []
    return f"failed for {' and '.join(parts)}" if parts else "failed"


def _with(columns: Iterable[Column], verdicts: Sequence[Verdict]) -> Iterable[str]:
    return (fqn for column in columns for fqn, cell in column.cells.items() if cell.verdict in verdicts)


def _names(checks: Iterable[Check]) -> str:
    return ", ".join(check.check.value for check in checks)


#: Worst first.
_ORDER = (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED, Verdict.SKIPPED)


def _tally(checks: Sequence[Check]) -> str:
    counts = Counter(check.verdict for check in checks)
    return ", ".join(f"{counts[verdict]:,} {verdict.value}" for verdict in _ORDER if counts[verdict])


def _verdict(found: Verification) -> str:
    """The line that says it all: which proofs failed and of how many tensors, which cannot tell, which hold."""
    tensors = len(found.state.tensors)
    failed = documents.proved(found).tensors[Verdict.FAILED.value]
    of = {Verdict.FAILED: f" for {failed:,} of {plural(tensors, 'tensor')}" if failed else ""}
    parts = []
    for verdict in _ORDER:
        checks = [check for check in found.checks if check.verdict is verdict]
        if checks:
            parts.append(f"{_names(checks)} {verdict.value}{of.get(verdict, '')}")
    return "; ".join(parts)


def _fixes(found: Verification) -> tuple[Fix, ...]:
    """What mends it, each once: the layers of a stack are mended by the same line of source."""
    rows = {row.fqn: row for row in found.state.tensors}
    fixes: dict[Fix, None] = {}
    for finding in found.findings:
        fix = _fix(finding, rows.get(finding.fqn or ""))
        if fix is not None:
            fixes.setdefault(fix)
    return tuple(fixes)


def _fix(finding: Finding, row: TensorInfo | None) -> Fix | None:
    """Lines to paste where the row has some; advice in words is a comment among them. None where it has only a line."""
    line = format_origin(row.origin) if row is not None and row.origin else None
    if row is None and (assigned := re.search(r"assigned at (\S+:\d+)", finding.message)):
        line = assigned[1]  # a further name of a tensor
    where = line if line and line in f"{finding.message} {finding.help}" else finding.fqn or finding.rule
    if row is not None and row.fix and row.fix in (finding.help or ""):
        return Fix(where, row.fix)
    advice = (finding.help or "").removesuffix(f"assigned at {where}").removesuffix("; ")
    if placed := re.match(r"(\S.*?:\d+): ", advice):  # a line of its own, where a method begins
        where, advice = placed[1], advice[placed.end() :]
    return None if not advice else Fix(where, "\n".join(f"# {line}" for line in advice.splitlines()))
