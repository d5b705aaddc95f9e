"""What a command has to say, ready for any output: the second waist.

A `Report` gives the same content at the three grains that outputs need: a `document` (typed, for JSON), a flat
`table` (one row a tensor, for plain and CSV) and a `page` for people. What other programs read (SARIF, JUnit) takes
the findings and their `rules`, the `cases` that were tried, and the `troubles`. `failed()` is the only source of
exit 1. One module a command makes its report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from statecli.core import output_rules
from statecli.core.finding import Finding, Severity
from statecli.core.scope import Configuration, NotChecked
from statecli.core.state import Oddity
from statecli.core.units import describe_configuration, plural


class Column(msgspec.Struct, frozen=True):
    """`name` heads the column, `right` aligns numbers.

    `shared`, "all {}", is how a narrow table says a value that every row has, instead of showing the column.
    `calm` are the values that it may say by group as well, "saved: ✓ parameters, – unregistered": those that no reader
    looks for. `detail` marks a column of the flat table that only machines read.
    """

    name: str
    right: bool = False
    shared: str | None = None
    calm: frozenset[str] = frozenset()
    detail: bool = False


#: A fact in the flat table, None where there is none: numbers are numbers, for each output to write in its own way.
Cell = str | int | float | None


_Row = TypeVar("_Row")


class Rows(Generic[_Row]):
    """Rows that are built each time they are iterated: a renderer writes one after another and keeps none."""

    def __init__(self, build: Callable[[Any], _Row], items: Collection[Any]) -> None:
        self._build = build
        self._items = items

    def __iter__(self) -> Iterator[_Row]:
        return map(self._build, self._items)

    def __len__(self) -> int:
        return len(self._items)


class Table(msgspec.Struct, frozen=True):
    """The flat one: every row has a cell a column. `told`: findings can be of a row, and are told beside it."""

    columns: tuple[Column, ...]
    rows: Rows[tuple[Cell, ...]] | tuple[tuple[Cell, ...], ...]
    told: bool = True


class Line(msgspec.Struct, frozen=True, gc=False):
    """One row for people: its cells, what else there is to say of it, and how it is meant.

    `mood` is "", "good", "bad", "warn", "info", "dim" or "strong".
    """

    cells: tuple[str, ...]
    remark: str = ""
    mood: str = ""


class Group(msgspec.Struct, frozen=True):
    """Rows that belong together, under a heading and the sum of them."""

    heading: str
    summary: str
    lines: tuple[Line, ...]


class Fix(msgspec.Struct, frozen=True):
    """Lines to paste, and where: `place` is `net.py:9`."""

    place: str
    text: str


class Page(msgspec.Struct, frozen=True):
    """What people see: groups of rows under one set of columns, then what to do about them."""

    subtitle: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    totals: tuple[str, ...]
    fixes: tuple[Fix, ...] = ()
    #: The findings that the rows do not show, with repeated layers folded; `Report.findings` has each.
    findings: tuple[Finding, ...] = ()
    #: The one line that says it all. It ends a table, and begins what is read from the top.
    verdict: str = ""
    #: All that makes it end 1, folded alike, for who wants nothing else (`-q`); None: `findings` are that.
    reasons: Callable[[], tuple[Finding, ...]] | None = None
    #: What was done, a line each: names and remarks alone. Outputs that show `totals` find it there.
    done: Group | None = None

    def told(self, *, quiet: bool) -> tuple[Finding, ...]:
        """The findings to tell beside the rows, or, where there are none, instead of them."""
        return self.reasons() if quiet and self.reasons is not None else self.findings


class Bars(msgspec.Struct, frozen=True):
    """A value for each of many things in order, one bar each: the change of each layer over depth.

    NaN is a value that is not finite. Infinity is one that has no measure, and nothing bad: the entry of `words` says
    what it is.
    """

    title: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    #: What a value means, as one reads it: "relative L2 change".
    unit: str = ""
    #: One a value, or none: then what is infinite is called so.
    words: tuple[str, ...] = ()


class Spread(msgspec.Struct, frozen=True):
    """A histogram: `counts[i]` of the values lie between `edges[i]` and `edges[i + 1]`."""

    title: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    unit: str = ""


class RuleText(msgspec.Struct, frozen=True):
    """A rule as outputs show it: one line, and the whole explanation where an output may have it.

    `about` is the group of the rule (`storage`), `commands` are those that report it.
    """

    name: str
    severity: Severity
    summary: str
    explanation: str = ""
    about: str = ""
    commands: tuple[str, ...] = ()


class Outcome(str, Enum):
    """What became of a case; `error` is one that could not be tried or told."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"


class Case(msgspec.Struct, frozen=True):
    """One thing that was tried, as a test runner would show it: `name` of `suite`, mostly a rule of a target.

    `message` says in a line why it is not simply passed, `text` the rest, a line each.
    """

    suite: str
    name: str
    outcome: Outcome
    message: str = ""
    text: tuple[str, ...] = ()


class Trouble(msgspec.Struct, frozen=True):
    """What could not be looked at, and why: a note where nobody expects it to be, else an error, which exits 2."""

    target: str
    message: str
    severity: Severity = Severity.ERROR


class Report(msgspec.Struct, frozen=True):
    """`document`, `table` and `page` are made when an output asks for them: none asks for all three."""

    title: str
    document: Callable[[], msgspec.Struct]
    table: Callable[[], Table]
    page: Callable[[], Page]
    #: As the command found them. `describe` gives them the place and the words that outputs for people and CI need.
    findings: tuple[Finding, ...] = ()
    describe: Callable[[Iterable[Finding]], tuple[Finding, ...]] = tuple
    notes: tuple[Oddity, ...] = ()
    #: Pictures, for outputs that can draw.
    charts: Callable[[], tuple[Bars | Spread, ...]] = tuple
    #: The page is an outline (`--tree`), and plain text shows it too rather than the flat table.
    outline: bool = False
    #: Rules whose findings are rows already: outputs for people do not say them twice.
    in_rows: frozenset[str] = frozenset()
    #: Names alone (`--name-only`), in place of all else: a line each, its parts set apart by tabs.
    listing: Callable[[], Iterable[tuple[str, ...]]] | None = None

    #: What of the findings makes the command end 1; None: each.
    failing: tuple[Finding, ...] | None = None
    #: Each line is asked for (`--all`), also by who writes for a place of limited size.
    whole: bool = False
    #: At most so many findings are told people, and how many more there are (`-n`); None: each.
    lines: int | None = None
    #: Of several targets: a line that tells a finding by itself begins with its target.
    several: bool = False
    #: What the rules of the findings are, and those of which there is none although they were tried.
    rules: Callable[[], tuple[RuleText, ...]] = tuple
    #: All that was tried.
    cases: Callable[[], tuple[Case, ...]] = tuple
    #: Findings that are none, for the reason that was given.
    accepted: tuple[tuple[Finding, str], ...] = ()
    troubles: tuple[Trouble, ...] = ()
    #: What the run did not check. The verdict of the page says it too.
    not_checked: tuple[NotChecked, ...] = ()
    #: The configuration that the run used; None where the command reads none.
    configuration: Configuration | None = None
    #: The page without its rows, for who shows the flat table in their place; None: the page.
    foot: Callable[[], Page] | None = None
    #: The flat table without the columns that only machines read; None: the table.
    brief: Callable[[], Table] | None = None

    def described_findings(self) -> tuple[Finding, ...]:
        """Return all findings."""
        return self.describe(self.findings)

    def beside(self) -> tuple[Finding, ...]:
        """The findings that no row shows."""
        return self.describe(finding for finding in self.findings if finding.rule not in self.in_rows)

    def failed(self) -> bool:
        """Whether the command ends 1."""
        return bool(self.findings if self.failing is None else self.failing)

    def passed(self) -> bool:
        """Whether the command ends 0: nothing makes it end 1, and all could be looked at."""
        return not self.failed() and all(one.severity is not Severity.ERROR for one in self.troubles)

    def reasons(self) -> tuple[Finding, ...]:
        """The findings that make it end 1."""
        return self.described_findings() if self.failing is None else self.failing

    def weakening(self) -> str:
        """Describe the configuration if it lets more pass, else return "". Outputs show this with `-q` too."""
        used = self.configuration
        return describe_configuration(used) if used is not None and (used.disabled or used.weakened) else ""


def scope_notes(report: Report) -> tuple[Finding, ...]:
    """Return what was not checked and what the configuration weakens as notes, for outputs that have no verdict."""
    unchecked = [f"{plural(entry.count, entry.what)}: {entry.why}" for entry in report.not_checked]
    where = "." if report.several else report.title
    notes = [output_rules.NOT_CHECKED.finding(f"not checked: {text}", target=where) for text in unchecked]
    message = describe_configuration(report.configuration) if report.configuration is not None else ""
    if report.configuration is not None and message:
        notes.append(output_rules.CONFIGURATION.finding(message, target=report.configuration.file or where))
    return tuple(notes)


class View(msgspec.Struct, frozen=True):
    """How people want to see it: `unfold` repeated layers, as a `tree` of modules, `verbose`."""

    unfold: bool = False
    tree: bool = False
    verbose: bool = False


def first(findings: Sequence[Finding], lines: int | None) -> tuple[Finding, ...]:
    """At most so many of them, and how many more there are; one at least, since no exit 1 is without its reason."""
    kept = len(findings) if lines is None else max(1, lines)
    if len(findings) <= kept:
        return tuple(findings)
    more = f"… and {len(findings) - kept:,} more (-n {lines})"
    return (*findings[:kept], output_rules.MORE.finding(more, target=findings[0].target))
