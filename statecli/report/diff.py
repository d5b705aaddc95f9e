"""The report of `statecli diff`: a stat view as `git diff --stat` has it, a flat table, names alone, pictures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter

from msgspec.structs import replace

from statecli.commands.diff import rules, settings
from statecli.commands.diff.result import Change, Diff, Field, ScalarChange, Status
from statecli.core import sizes
from statecli.core.finding import Finding
from statecli.core.oddity_kind import OddityKind
from statecli.core.scope import NotChecked, merge_not_checked
from statecli.core.state import Kind, ModelState, TensorInfo
from statecli.core.units import KIND_NOUNS, draw_bar, format_fqn, format_shape, format_size, format_yes_no, plural
from statecli.report import (
    Bars,
    Case,
    Cell,
    Column,
    Group,
    Line,
    Outcome,
    Page,
    Report,
    Rows,
    Spread,
    Table,
    Trouble,
    View,
    change_text,
    documents,
    first,
    fold,
    rule_texts,
    test_cases,
)
from statecli.report.change_text import LETTERS, NUMBERS, largest_text, odd, relative_text, side, values_text, what
from statecli.targets.location import located

#: The rules of findings that are a row each.
ROW_RULES = frozenset(rule.name for rule in (*rules.BY_STATUS.values(), rules.METADATA))
#: Characters of a text beside the tensors (`__metadata__`) that are shown in a row for people, and in the flat table.
MAX_SCALAR = 60
MAX_WHOLE = 10_000
#: A longer one is remarked: it would make its whole column as wide.
MAX_CELL = 40


class Names(str, Enum):
    """Names alone, as git lists them."""

    ONLY = "only"
    STATUS = "status"


class DiffView(View, frozen=True):
    """How people want to see a diff: at most `lines` a group, or names alone.

    `within` is what was asked to be overlooked, in words.
    """

    lines: int | None = None
    names: Names | None = None
    within: str = ""


def of_diff(diff: Diff, view: DiffView) -> Report:
    """Everything `diff` has to say."""
    # What a class says to a file is not what its rows say.
    in_rows = frozenset[str]() if diff.expected or _is_load(diff) else ROW_RULES
    report = Report(
        title=f"{diff.before.target} → {diff.after.target}",
        document=lambda: documents.of_diff(diff, _verdict(diff, view), _not_checked(diff)),
        table=lambda: _flat(diff, view),
        brief=lambda: _flat(diff, view, details=False),
        page=lambda: _page(diff, view, report),
        foot=lambda: _foot(diff, view),
        findings=diff.findings,
        describe=lambda findings: _described(findings, diff),
        notes=fold.notes(diff.notes, view.verbose),
        charts=lambda: _charts(diff),
        outline=view.tree,
        in_rows=in_rows,
        lines=view.lines,
        whole=view.unfold,
        listing=(lambda: _names(diff, view.names)) if view.names else None,
        rules=lambda: rule_texts.of(diff.findings),
        cases=lambda: _cases(diff, report),
        troubles=tuple(Trouble(diff.after.target, message) for _, message in broken(diff)),
    )
    return report


def _rows(diff: Diff) -> Iterable[TensorInfo]:
    """What a finding may be of: the tensor after, unless it was removed."""
    for change in diff.changes:
        if change.status is not Status.IDENTICAL:
            row = change.after or change.before
            if row is not None:
                yield replace(row, fqn=change.fqn, section=change.section)


def _cases(diff: Diff, report: Report) -> tuple[Case, ...]:
    """A case for each tensor that could not be compared, that changed, and for what else is found of none of them."""
    sectioned = _sectioned(diff)
    tried = [Case(report.title, name, Outcome.ERROR, message) for name, message in broken(diff)]
    of: dict[tuple[str | None, str | None], list[Finding]] = {}
    for finding in report.described_findings():
        of.setdefault((finding.section, finding.fqn), []).append(finding)
    for change in differing(diff):
        name = side(change.fqn, change.section, sectioned)
        found = of.pop((change.section, change.fqn), []) + of.pop((None, change.fqn), [])
        tried.append(_tried(report.title, name, _told(change), found))
    for scalar in diff.scalars:
        told = settings.format_values(scalar, MAX_SCALAR)
        tried.append(_tried(report.title, scalar.key, told, of.pop((None, scalar.key), [])))
    rest = [finding for several in of.values() for finding in several]
    if tried and not rest:
        return tuple(tried)
    return (*tried, *test_cases.of_findings(report.title, rest, "identical"))


def _tried(suite: str, name: str, told: str, found: Sequence[Finding]) -> Case:
    """One difference, which passed where it was expected."""
    case = test_cases.failed(suite, name, found) if found else Case(suite, name, Outcome.PASSED)
    return replace(case, text=(told, *case.text))


def _told(change: Change) -> str:
    of = f" from {change.renamed_from}" if change.renamed_from is not None else ""
    values = f"values {values_text([change])}" if change.values is not None else ""
    largest = f"max |Δ| {largest_text([change])}" if change.values is not None and change.values.max_abs else ""
    told = ", ".join(filter(None, (what(change), values, largest, *odd([change]))))
    return ": ".join(filter(None, (f"{change.status.value}{of}", told)))


def _sectioned(diff: Diff) -> bool:
    """Whether names need their section before them."""
    return len({one.section for one in diff.changes} | {one.section for one in diff.broken if one.section}) > 1


#: The rules of findings that say that values differ.
_DIFFER = frozenset(rule.name for rule in (rules.CHANGED, rules.RENAMED, rules.OUTSIDE_ONLY, rules.FROZEN_CHANGED))


def _described(findings: Iterable[Finding], diff: Diff) -> tuple[Finding, ...]:
    """The findings as people need them, with their place."""
    findings = tuple(findings)
    if not findings:
        return ()
    sectioned = _sectioned(diff)
    return located((_qualified(finding, sectioned) for finding in _measured(findings, diff)), _rows(diff))


def _measured(findings: Iterable[Finding], diff: Diff) -> Iterable[Finding]:
    """The findings, each with how much its values changed: programs have it beside them, in the changes."""
    known = {(one.section, one.fqn): one for one in diff.changes if one.values is not None and one.values.max_abs}
    for finding in findings:
        change = known.get((finding.section or "", finding.fqn or "")) if finding.rule in _DIFFER else None
        largest = f", by at most {largest_text([change])}" if change else ""
        yield replace(finding, message=finding.message + largest) if largest else finding


def _qualified(finding: Finding, sectioned: bool) -> Finding:
    """A message as people need it: it begins with the name, which in JSON has its section beside it."""
    start = f"{finding.fqn}: "
    if finding.fqn is None or not finding.message.startswith(start):
        return finding
    name = side(finding.fqn, finding.section or "", sectioned)
    return replace(finding, message=f"{name}: {finding.message.removeprefix(start)}")


def broken(diff: Diff) -> list[tuple[str, str]]:
    """Each tensor that could not be compared, and a line that says why, as people need their names."""
    sectioned = _sectioned(diff)
    named = [(side(one.fqn, one.section, sectioned), one) for one in diff.broken]
    return [(name, one.message.replace(f": {one.fqn}: ", f": {name}: ", 1)) for name, one in named]


def _is_load(diff: Diff) -> bool:
    return diff.before.traits.is_class is not diff.after.traits.is_class


def _page(diff: Diff, view: DiffView, report: Report) -> Page:
    def told(findings: Sequence[Finding]) -> tuple[Finding, ...]:
        return first(findings if view.unfold else fold.findings(findings), view.lines)

    columns = change_text.COLUMNS if view.tree else _columns(diff)
    groups = change_text.groups(diff, view.unfold) if view.tree else _groups(diff, view, columns)
    if diff.scalars:
        groups = (*groups, _settings(diff.scalars, columns, view))
    if diff.broken:
        groups = (*groups, _broken(diff, columns, view))
    return replace(
        _foot(diff, view),
        columns=columns,
        groups=tuple(_shortened(group, view) for group in groups),
        findings=told(report.beside()),
        reasons=lambda: told(report.described_findings()),
    )


def _foot(diff: Diff, view: DiffView) -> Page:
    """The page without rows and findings."""
    verdict = _verdict(diff, view)
    totals = (verdict, *_shortening(diff, view))
    return Page(subtitle=_subtitle(diff), columns=(), groups=(), totals=totals, verdict=verdict)


def differing(diff: Diff) -> list[Change]:
    """What is to be shown: all but the identical."""
    return [change for change in diff.changes if change.status is not Status.IDENTICAL]


def _shortened(group: Group, view: DiffView) -> Group:
    if view.lines is None or len(group.lines) <= view.lines:
        return group
    rest = len(group.lines) - view.lines
    more = Line((f"… and {rest:,} more", *("" for _ in group.lines[0].cells[1:])), mood="dim")
    return Group(group.heading, group.summary, (*group.lines[: view.lines], more))


# Sums.


def _subtitle(diff: Diff) -> str:
    return f"{_source(diff.before)} → {_source(diff.after)}"


def _source(state: ModelState) -> str:
    size = sizes.sum_bytes(state.tensors)
    return f"{state.format}, {plural(len(state.tensors), 'tensor')}, {format_size(size)}"


def _verdict(diff: Diff, view: DiffView) -> str:
    """The line that says it all: what differs by role, or that nothing does, and what nobody could tell."""
    summary = documents.counted(diff)
    unsure = [c for c in diff.changes if c.not_compared is not None and c.status is Status.IDENTICAL]
    damaged = Counter(one.kind.value for one in _damaged(diff))
    parts = [
        _counts(replace(counts, identical=counts.identical + damaged[kind]), _COUNTED[Kind(kind)])
        for kind, counts in summary.by_kind.items()
        if counts.added or counts.removed or counts.changed or counts.renamed
    ]
    if diff.scalars:
        parts.append(f"metadata: {_tally(one.status for one in diff.scalars)}")
    text = "; ".join(parts) if parts else _nothing(diff, view, sure=not (unsure or diff.broken))
    if parts and diff.expected and not (diff.findings or diff.broken):
        text += ": as expected"
    if unsure:
        text += f"; values of {plural(len(unsure), 'tensor')} not compared"
    if diff.broken:
        text += f"; {plural(len(diff.broken), 'tensor')} could not be compared"
    return text


def _not_checked(diff: Diff) -> tuple[NotChecked, ...]:
    """Return the pairs whose values were not compared, by reason."""
    reasons = (change.not_compared for change in diff.changes if change.not_compared is not None)
    return merge_not_checked(NotChecked("tensor", 1, f"values not compared: {reason}") for reason in reasons)


def _damaged(diff: Diff) -> list[TensorInfo]:
    """What of after is among no changes, because a file failed: whether it differs is not known."""
    if not diff.broken:
        return []
    known = {(one.section, one.fqn) for one in diff.changes}
    lost = {(one.section, one.fqn) for one in diff.broken} - known
    return [one for one in diff.after.tensors if (one.section, one.fqn) in lost]


def _nothing(diff: Diff, view: DiffView, *, sure: bool) -> str:
    if not sure:
        return f"no difference found in {plural(len(diff.changes), 'tensor')}"
    tensors = [change.after for change in diff.changes if change.after is not None]
    size = sizes.sum_bytes(tensors)
    same = f"{plural(len(diff.changes), 'tensor')}, {format_size(size)}"
    if diff.findings and not diff.expected:
        return f"no tensor differs, but load_state_dict would fail ({plural(len(diff.findings), 'finding')}): {same}"
    if any(note.kind is OddityKind.VALUES_NOT_COMPARED for note in diff.notes):
        return f"nothing differs{view.within}: {same}; values not compared"
    return f"identical{view.within}: {same}"


def _counts(counts: documents.Counts, noun: str = "") -> str:
    """`3 of 201 parameters changed, 2 added`: what is on both sides first, and of how many."""
    both = counts.changed + counts.renamed + counts.identical
    told = [f"{n:,} {word}" for word in ("changed", "renamed", "added", "removed") if (n := getattr(counts, word))]
    if both and (counts.changed or counts.renamed):
        count, word = told[0].split()
        told[0] = f"{count} of {both:,}{' ' * bool(noun)}{noun} {word}"
    elif noun:
        count, word = told[0].split()
        told[0] = f"{count} {noun.removesuffix('s') if count == '1' else noun} {word}"
    return ", ".join(told)


_COUNTED = {
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.UNREGISTERED: "unregistered tensors",
    Kind.OPTIMIZER: "optimizer tensors",
    Kind.OTHER: "other tensors",
}


def _tally(statuses: Iterable[Status]) -> str:
    counts = Counter(statuses)
    return ", ".join(f"{counts[status]:,} {status.value}" for status in Status if counts[status])


# For people: grouped by section and kind.


#: Where no values differ.
_FACTS = (Column("name"), Column("change"))
_MEASURED = (
    Column("name"),
    Column("values", right=True),
    Column("max |Δ|", right=True),
    Column("rel. change", right=True),
    Column(""),
)


def _columns(diff: Diff) -> tuple[Column, ...]:
    """How much changed, where values differ: what else did is remarked. Else what did."""
    return _MEASURED if any(change.values is not None for change in diff.changes) else _FACTS


def _groups(diff: Diff, view: DiffView, columns: tuple[Column, ...]) -> tuple[Group, ...]:
    rows = differing(diff)
    folded = len(rows) > fold.ABOVE and not view.unfold and not view.verbose
    sectioned = _sectioned(diff)
    roles: dict[tuple[str, Kind], list[Change]] = {}
    for change in rows:
        roles.setdefault((change.section, change.kind), []).append(change)
    first = {section: n for n, section in reversed(list(enumerate(section for section, _ in roles)))}
    kinds = list(Kind)
    ordered = sorted(roles, key=lambda role: (first[role[0]], kinds.index(role[1])))
    whole = Counter((c.section, c.kind) for c in diff.changes if c.before is not None and c.after is not None)
    whole.update((one.section, one.kind) for one in _damaged(diff))
    return tuple(
        Group(
            (f"{section or '(top level)'}: " if sectioned else "") + KIND_NOUNS[kind],
            _summary(roles[section, kind], whole[section, kind]),
            tuple(_lines(roles[section, kind], columns is _MEASURED, view, folded)),
        )
        for section, kind in ordered
    )


def _summary(rows: Sequence[Change], both: int) -> str:
    counts = Counter(change.status for change in rows)
    of = documents.Counts(
        counts[Status.ADDED],
        counts[Status.REMOVED],
        counts[Status.CHANGED],
        counts[Status.RENAMED],
        both - counts[Status.CHANGED] - counts[Status.RENAMED],
    )
    return _counts(of)


def _lines(rows: Sequence[Change], measured: bool, view: DiffView, folded: bool) -> list[Line]:
    # The name before stands in the remark, where folding knows the numbers that it shares with the name; the
    # bracket makes a number at its start one of them.
    plain = [
        Line((format_fqn(one.fqn), LETTERS[one.status], what(one)), f"[{_other_name(one)}", change_text.mood(one))
        for one in rows
    ]
    joined = fold.joined(plain) if folded else [(line, [n]) for n, line in enumerate(plain)]
    return [_line(line, [rows[n] for n in positions], measured, view) for line, positions in joined]


def _other_name(change: Change) -> str:
    """A note tells of the prefixes and maps by which all others were matched."""
    return format_fqn(change.renamed_from or "") if change.status is Status.RENAMED else ""


def _line(line: Line, rows: list[Change], measured: bool, view: DiffView) -> Line:
    fqn, letter, text = line.cells
    before = line.remark.removeprefix("[")
    name = f"{letter} {before} → {fqn}" if before else f"{letter} {fqn}"
    rest = ", ".join(odd(rows, view.verbose))
    if not measured:
        return Line((name, text), rest, line.mood)
    remark = ", ".join(filter(None, (text, rest)))
    if all(row.values is None for row in rows):
        return Line((name, "", "", "", ""), remark, line.mood)
    values = change_text.relative(rows)
    how_much = (relative_text(values) or "-", draw_bar(max(values, default=None)))
    return Line((name, values_text(rows), largest_text(rows), *how_much), remark, line.mood)


def _settings(beside: Sequence[ScalarChange], columns: tuple[Column, ...], view: DiffView) -> Group:
    lines = [_scalar_line(one, columns) for one in beside]
    folded = len(lines) > fold.ABOVE and not view.unfold
    return Group("metadata", _tally(one.status for one in beside), tuple(fold.lines(lines) if folded else lines))


def _broken(diff: Diff, columns: tuple[Column, ...], view: DiffView) -> Group:
    empty = ("",) * (len(columns) - 1)
    lines = [Line((f"? {name}", *empty), message, "bad") for name, message in broken(diff)]
    folded = len(lines) > fold.ABOVE and not view.unfold
    return Group("not compared", plural(len(lines), "tensor"), tuple(fold.lines(lines) if folded else lines))


def _scalar_line(one: ScalarChange, columns: tuple[Column, ...]) -> Line:
    name, mood = f"{LETTERS[one.status]} {one.key}", change_text.MOODS.get(one.status, "")
    text = settings.format_values(one, MAX_SCALAR)
    if columns is _FACTS and len(text) <= MAX_CELL:
        return Line((name, text), mood=mood)
    return Line((name, *("" for _ in columns[1:])), text, mood)


# The flat table: a row a change, every fact in a column of its own.

_SIDES = ("dtype", "shape", "requires_grad", "device")
#: A column, and its cell for a change.
_Measure = tuple[Column, Callable[[Change], Cell]]


def _flat(diff: Diff, view: DiffView, *, details: bool = True) -> Table:
    """`details` False: without the columns that only machines read."""
    changes, sectioned = _first(differing(diff), view.lines), _sectioned(diff)
    scalars_, broken_ = diff.scalars[: view.lines], diff.broken[: view.lines]
    told = bool(diff.scalars or diff.broken) or any(map(_remark, changes))
    measures = [*_flat_columns(changes, sectioned, view.verbose), (Column("change", detail=not told), _remark)]
    columns = tuple(column for column, _ in measures if details or not column.detail)
    cells = tuple(cell for column, cell in measures if details or not column.detail)
    others: list[dict[str, Cell]] = [
        {
            "status": one.status.value,
            "kind": "metadata",
            "fqn": one.key,
            "change": settings.format_values(one, MAX_WHOLE),
        }
        for one in scalars_
    ]
    others += [
        {"status": "not compared", "section": one.section or None, "fqn": one.fqn, "change": one.message}
        for one in broken_
    ]

    def row(item: Change | dict[str, Cell]) -> tuple[Cell, ...]:
        if isinstance(item, dict):
            return tuple(item.get(column.name) for column in columns)
        return tuple([cell(item) for cell in cells])

    return Table(columns, Rows(row, [*changes, *others]))


#: What plain text has of `NUMBERS`, and what -v adds to it.
_TOLD = ("elements", "changed", "relative_l2", "max_abs")
_TOLD_VERBOSE = (*_TOLD, "mean_abs", "l2", "cosine")


def _flat_columns(rows: Sequence[Change], sectioned: bool, verbose: bool) -> Iterator[_Measure]:
    """All but the last. Those that people need no further are details."""
    measured = any(change.values is not None for change in rows)
    shown = (_TOLD_VERBOSE if verbose else _TOLD) if measured else ()
    yield Column("status"), lambda change: change.status.value
    yield Column("kind"), lambda change: change.kind.value
    if sectioned:
        yield Column("section"), lambda change: change.section or None
    yield Column("fqn"), attrgetter("fqn")
    yield Column("renamed_from", detail=all(change.renamed_from is None for change in rows)), attrgetter("renamed_from")
    yield (
        Column("fields", detail=True),
        lambda change: ",".join([field.value for field in change.fields]) or None,
    )
    for name in _SIDES:
        for when in ("before", "after"):
            yield Column(f"{name}_{when}", detail=True), partial(_fact, name, when)
    for name in NUMBERS:
        yield Column(name, right=True, detail=name not in shown), partial(_measured_number, name)
    yield Column("first", detail=not (measured and verbose)), _first_index
    yield Column("not_compared", detail=True), attrgetter("not_compared")


def _measured_number(name: str, change: Change) -> Cell:
    number: Cell = getattr(change.values, name, None)
    return number


def _first_index(change: Change) -> Cell:
    values = change.values
    return format_shape(values.first) if values is not None and values.first is not None else None


def _remark(change: Change) -> str | None:
    return ", ".join(filter(None, (what(change), *odd([change])))) or None


def _fact(name: str, when: str, change: Change) -> Cell:
    tensor: TensorInfo | None = getattr(change, when)
    if tensor is None:
        return None
    if name == "shape":
        return format_shape(tensor.shape)
    value: Cell = getattr(tensor, name)
    return format_yes_no(tensor.requires_grad) if name == "requires_grad" else value


def _first(rows: list[Change], lines: int | None) -> list[Change]:
    """At most so many of each role."""
    if lines is None:
        return rows
    taken: Counter[tuple[str, Kind]] = Counter()
    kept = []
    for change in rows:
        role = (change.section, change.kind)
        taken[role] += 1
        if taken[role] <= lines:
            kept.append(change)
    return kept


def _shortening(diff: Diff, view: DiffView) -> tuple[str, ...]:
    """What plain text says of rows that `-n` left out; the groups of a page say it themselves."""
    if view.lines is None or view.tree:
        return ()
    rows = differing(diff)
    beside = sum(max(0, count - view.lines) for count in (len(diff.scalars), len(diff.broken)))
    rest = len(rows) - len(_first(rows, view.lines)) + beside
    return (f"… and {rest:,} more (-n {view.lines})",) if rest else ()


# Names alone.


def _names(diff: Diff, names: Names | None) -> Iterable[tuple[str, ...]]:
    """One line a change; where a state has sections, each name is the whole path in its file."""
    sectioned = _sectioned(diff)
    for change in differing(diff):
        name = side(change.fqn, change.section, sectioned)
        if names is Names.ONLY:
            yield (name,)
        elif change.status is Status.RENAMED and change.renamed_from is not None:
            section = change.before.section if change.before is not None else change.section
            yield "R", side(change.renamed_from, section, sectioned), name
        else:
            yield LETTERS[change.status], name
    for scalar in diff.scalars:
        yield (scalar.key,) if names is Names.ONLY else (LETTERS[scalar.status], scalar.key)


# Pictures.


def _charts(diff: Diff) -> tuple[Bars | Spread, ...]:
    sectioned = _sectioned(diff)
    spreads = [
        Spread(side(one.fqn, one.section, sectioned), one.edges, one.counts, "after - before")
        for one in diff.histograms
    ]
    if not any(change.values is not None for change in diff.changes if change.kind is Kind.PARAMETER):
        return tuple(spreads)
    depth = [(side(one.fqn, one.section, sectioned), *measured) for one, measured in _depth(diff)]
    names, values, words = zip(*depth, strict=True)
    title = "change over depth: each parameter, equal values at zero"
    return (Bars(title, names, values, "relative L2 change", words), *spreads)


def _depth(diff: Diff) -> list[tuple[Change | TensorInfo, tuple[float, str]]]:
    """Each parameter that both sides have, in order."""
    found: list[tuple[Change | TensorInfo, tuple[float, str]]] = [
        (one, _measure(one)) for one in diff.changes if one.before is not None and one.after is not None
    ]
    if damaged := _damaged(diff):
        found += [(one, (math.inf, "not compared")) for one in damaged]
        place = {(one.section, one.fqn): n for n, one in enumerate(diff.after.tensors)}
        found.sort(key=lambda pair: place.get((pair[0].section, pair[0].fqn), len(place)))
    return [pair for pair in found if pair[0].kind is Kind.PARAMETER]


def _measure(change: Change) -> tuple[float, str]:
    """The relative change of the values, NaN where NaN or infinities came up; where there is no such number, infinity
    and what it is instead.
    """
    delta = change.values
    if Field.SHAPE in change.fields:
        return math.inf, "of another shape"
    if delta is None:
        return (0.0, "") if change.not_compared is None else (math.inf, "not compared")
    if delta.max_abs is None or change_text.mood(change) == "bad":
        return math.nan, ""
    return (
        (delta.relative_l2, "") if delta.relative_l2 is not None else (math.inf, "changed from zero, without a ratio")
    )
