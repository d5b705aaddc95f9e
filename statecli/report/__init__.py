"""Result of a command, in a form that every output format can use.

A `Report` has the same content in three forms: a `document` for JSON, a flat `table` for plain text and CSV, and a
readable `page`. Machine formats (SARIF, JUnit) take the findings and their `rules`, the `cases` and the
`troubles`. `has_failed()` decides exit status 1 of each command with a report. A module for each command builds its
report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from statecli.core import output_rules
from statecli.core.errors import strip_copy_advice
from statecli.core.finding import Finding, Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Oddity, Origin, TensorKey
from statecli.core.output import ChangeOrder, TensorOrder
from statecli.core.rule import Rule
from statecli.core.run_scope import Configuration, NotChecked
from statecli.core.units import describe_configuration, describe_not_checked, plural

if TYPE_CHECKING:
    from statecli.report import (
        diff_charts as diff_charts,
        inspect_rows as inspect_rows,
        inspect_table as inspect_table,
        problems as problems,
        source_lines as source_lines,
        tensor_list as tensor_list,
        tree as tree,
    )
    from statecli.report.tensor_list import TensorList
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)


class ReportColumn(msgspec.Struct, frozen=True):
    """Column of a table. `name` is the heading; `right` aligns the cells to the right.

    A narrow table may write `shared_format`, "all {}", instead of a column with the same value in all rows of the table
    or of each group. `detail` marks a column of the flat table for programs only. `optional` marks a column of
    drawings, bars made of blocks, which a narrow table leaves out to make room for all names.
    """

    name: str
    right: bool = False
    shared_format: str | None = None
    detail: bool = False
    optional: bool = False


#: A fact in the flat table, or None. Numbers stay numbers, because each output formats them in its own way.
Cell = str | int | float | None


_Row = TypeVar("_Row")


class Rows(Generic[_Row]):
    """Rows that are built in each iteration, because a renderer writes them in order and does not keep them."""

    def __init__(self, build: Callable[[Any], _Row], items: Collection[Any]) -> None:
        self._build = build
        self._items = items

    def __iter__(self) -> Iterator[_Row]:
        return map(self._build, self._items)

    def __len__(self) -> int:
        return len(self._items)


class CellRows(Rows[tuple[Cell, ...]]):
    """Rows built from columns. Each column has a function that gets an item's value and a function that formats it.

    Equal values of a column are formatted only once. Without the second function (None), the value is the cell.
    """

    def __init__(
        self, columns: Sequence[tuple[Callable[[Any], Any], Callable[[Any], Cell] | None]], items: Collection[Any]
    ) -> None:
        super().__init__(tuple, items)
        self._columns = columns

    def __iter__(self) -> Iterator[tuple[Cell, ...]]:
        return zip(*self._iter_columns(), strict=True)

    def iter_batches(self, size: int) -> Iterator[list[Sequence[Cell]]]:
        """Yield batches of `size` rows. Each batch is a list of columns."""
        columns = self._iter_columns()
        for _ in range(0, len(self), size):
            yield [list(islice(column, size)) for column in columns]

    def _iter_columns(self) -> list[Iterator[Cell]]:
        values = [(map(get, self._items), format_value) for get, format_value in self._columns]
        return [column if format_value is None else map(cache(format_value), column) for column, format_value in values]


class Table(msgspec.Struct, frozen=True):
    """The flat table: every row has a cell for each column. If `has_findings`, outputs may add findings to the rows."""

    columns: tuple[ReportColumn, ...]
    rows: Rows[tuple[Cell, ...]] | tuple[tuple[Cell, ...], ...]
    has_findings: bool = True

    def iter_batches(self, size: int) -> Iterator[Sequence[Sequence[Cell]]]:
        """Yield batches of `size` rows. Each batch is a sequence of columns."""
        if isinstance(self.rows, CellRows):
            yield from self.rows.iter_batches(size)
            return
        rows = iter(self.rows)
        while batch := list(islice(rows, size)):
            yield list(zip(*batch, strict=True))


class Line(msgspec.Struct, frozen=True, gc=False):
    """Human-readable row: its cells, a remark, and the word that sets its colour, such as "bad".

    `mood` is "", "good", "bad", "warn", "info", "dim" or "strong". A page sorts the lines of a group by `sort_key`;
    other outputs keep their order. `tensors` are the section and name of each tensor of the row, for links to the row.
    """

    cells: tuple[str, ...]
    remark: str = ""
    mood: str = ""
    sort_key: tuple[float, ...] = ()
    tensors: tuple[TensorKey, ...] = ()


class Problem(msgspec.Struct, frozen=True):
    """Findings that a single change would fix.

    Attributes:
        rule: Name of the cause, the same in all commands.
        severity: The worst severity of the findings.
        message: The cause, in one line.
        target: Target of the findings.
        effects: Consequences, a line each.
        effect_counts: Number of findings behind each of the first consequences; each further consequence stands for a
            single finding.
        help: Lines to paste, or the remedy in words.
        origin: Source line to change.
        source: Text of this line; "" for an unreadable file.
        findings: All findings of the problem, in the order of the command.
    """

    rule: str
    severity: Severity
    message: str
    target: str
    findings: tuple[Finding, ...]
    effects: tuple[str, ...] = ()
    help: str | None = None
    origin: Origin | UnsetType = UNSET
    source: str = ""
    effect_counts: tuple[int, ...] = ()

    def label_help(self) -> str:
        """Return the label of the remedy: `fix` for lines to paste, `help` for a sentence."""
        return _name_help(self.help or "")

    def list_names(self) -> list[str]:
        """Return the names of the tensors, each once."""
        return list(dict.fromkeys(finding.fqn for finding in self.findings if finding.fqn))

    def count_effects_after(self, shown_count: int) -> int:
        """Return the number of findings behind all consequences except the first `shown_count` consequences."""
        further = len(self.effects) - max(shown_count, len(self.effect_counts))
        return sum(self.effect_counts[shown_count:]) + max(0, further)

    def merge_findings(self) -> Finding:
        """Merge the findings of the problem into one, for outputs that have one entry for each problem.

        The consequences follow the message. A finding about several tensors has no name in `fqn`; `about` keeps the
        fingerprints of two problems of a target apart.
        """
        names = self.list_names()
        count = count_shown_effects(self.effects)
        effects = [*self.effects[:count]]
        if len(self.effects) > count:
            effects.append(f"{self.count_effects_after(count):,} more")
        first = self.findings[0]
        return first.merge(
            self.rule,
            self.severity,
            "; ".join([self.message, *effects]),
            fqn=names[0] if len(names) == 1 else None,
            help=self.help,
            origin=self.origin or first.origin,
            about=first.about if len(names) < 2 else self.message.partition(":")[0],
        )


class Group(msgspec.Struct, frozen=True):
    """Related rows, or the problems of a target, with a heading and a summary. Outputs show `lines` after `problems`.

    `heads` replaces the names of the columns for this group.
    """

    heading: str
    summary: str
    lines: tuple[Line, ...]
    problems: tuple[Problem, ...] = ()
    heads: tuple[str, ...] = ()


def build_problem(finding: Finding) -> Problem:
    """Return a problem that consists of a single finding."""
    return Problem(
        finding.rule,
        finding.severity,
        finding.message,
        finding.target,
        (finding,),
        help=finding.help,
        origin=finding.origin,
    )


def is_code(line: str) -> bool:
    """Return whether a line of help is Python or a command to paste, not a sentence or a comment."""
    return _CODE.match(line) is not None


def label_help(help: str) -> str:
    """Return the help with its label: `fix:` for lines to paste, `help:` for a sentence. Return "" for an empty help.

    Several lines to paste begin below the label.
    """
    name = _name_help(help)
    space = "\n" if name == "fix" and "\n" in help else " "
    return f"{name}:{space}{help}" if help else ""


def _name_help(help: str) -> str:
    """Return `fix` if the help has lines to paste, possibly after comments. Return `help` for a sentence."""
    first = next((line for line in help.split("\n") if not line.startswith("#")), "")
    return "fix" if is_code(first) else "help"


#: Beginning of a line of code or a command to paste.
_CODE = compile_on_use(
    r"\s+|[\w.]+(?:\[[^\]]*\])*(?: *, *[\w.]+)* *(?:[-+*/|&@]?=(?!=)|\()|@\w|(?:statecli|pip|python) \S"
    r"|(?:def|class|if|for|with|try|return|raise|del|import|from)\b.*(?:[:)]|import \w+)|del \w+\[|import [\w.]+$"
)
#: Largest number of consequences shown for a problem without --all.
MAX_EFFECTS = 8


def count_shown_effects(effects: Sequence[str]) -> int:
    """Return how many consequences to show without --all. Hide two or more, never one, as their count takes a line."""
    return len(effects) if len(effects) <= MAX_EFFECTS + 1 else MAX_EFFECTS


#: Largest number of names in a sentence about tensors.
MAX_NAMES = 3


class NamedTensors(msgspec.Struct, frozen=True):
    """A sentence about tensors, such as `2 tensors contain NaN`, and the names of these tensors.

    `filter` is a text that selects these tensors in the list on a page.
    """

    message: str
    names: tuple[str, ...]
    filter: str

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The names that the sentence shows: all of them, or only the first ones if there are many."""
        return self.names[: MAX_NAMES if len(self.names) > MAX_NAMES + 1 else None]

    @property
    def text(self) -> str:
        """The sentence with the names."""
        further_count = len(self.names) - len(self.shown_names)
        return f"{self.message}: {', '.join(self.shown_names)}" + (
            f" and {further_count:,} more" if further_count else ""
        )


class Page(msgspec.Struct, frozen=True):
    """The human-readable page: groups of rows under the same columns, then problems."""

    subtitle: str
    columns: tuple[ReportColumn, ...]
    groups: tuple[Group, ...]
    totals: tuple[str, ...]
    #: The problems that the findings are grouped into; `Report.findings` has all of them.
    problems: tuple[Problem, ...] = ()
    #: The summary of the page in a line, below the title.
    verdict: str = ""
    #: The problems to show with `-q`; None: those of `problems` that set exit status 1.
    failing_problems: Callable[[], tuple[Problem, ...]] | None = None
    #: Checks or targets with their results, a line each. `totals` has the same lines, for outputs that show `totals`.
    outcomes: Group | None = None
    #: Sentences about tensors that stand out. `totals` has the same sentences.
    unusual: tuple[NamedTensors, ...] = ()
    #: Meaning of the signs in the rows, for outputs with enough space.
    legend: tuple[str, ...] = ()
    #: Name of the column by which `Line.sort_key` sorts the lines; "" without such keys.
    sorted_by: str = ""


class Bars(msgspec.Struct, frozen=True):
    """Chart with a bar for each item of a sequence, such as the change of each layer over depth.

    NaN stands for a value that is not finite. Infinity stands for an item without a value; `words` has the reason.
    """

    title: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    #: The meaning of a value: "relative L2 change".
    unit: str = ""
    #: A text for each value, or empty: then the text of infinity is "infinite". A text for a finite value is a remark.
    words: tuple[str, ...] = ()
    #: Section and name of the tensor that each bar leads to, or empty.
    tensors: tuple[TensorKey, ...] = ()
    #: Whether each value stands out, or empty.
    unusual: tuple[bool, ...] = ()


class Curve(msgspec.Struct, frozen=True):
    """Chart with a line through values along an axis, such as the steps of checkpoints.

    NaN is an unknown value: the line has a gap. `alarms` has a text for each value, "" for none.
    """

    title: str
    labels: tuple[str, ...]
    places: tuple[float, ...]
    values: tuple[float, ...]
    alarms: tuple[str, ...]
    #: The meaning of a value and of a place: "L2 norm", "step".
    unit: str = ""
    below: str = ""
    #: Whether several curves are drawn side by side.
    small: bool = False
    #: Section and name of the tensor that each point leads to, or empty.
    tensors: tuple[TensorKey, ...] = ()


class Spread(msgspec.Struct, frozen=True):
    """A histogram: `counts[i]` of the values lie between `edges[i]` and `edges[i + 1]`."""

    title: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    unit: str = ""


class SettingGroup(msgspec.Struct, frozen=True):
    """Settings from one source, such as `config.json`: pairs of a name and a value as text."""

    title: str
    settings: tuple[tuple[str, str], ...]


class RuleText(msgspec.Struct, frozen=True):
    """Rule as outputs show it: a summary line and, for outputs with enough space, the whole explanation.

    `about` is the group of the rule (`storage`); `commands` are the commands with findings of the rule. `plugin`
    is the plugin that defines the rule, if any. `heading` is the heading of several findings, see `Rule`.
    """

    name: str
    severity: Severity
    summary: str
    explanation: str = ""
    about: str = ""
    commands: tuple[str, ...] = ()
    plugin: str | None = None
    heading: str = ""


class CaseOutcome(str, Enum):
    """Result of a test case. `error` means that the check is inconclusive or did not run."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"


class Case(msgspec.Struct, frozen=True):
    """Test case for outputs such as JUnit: the result of a check. `name` is usually a rule, and `suite` is a target.

    `message` says in one line why the case did not pass. `text` has all further lines.
    """

    suite: str
    name: str
    outcome: CaseOutcome
    message: str = ""
    text: tuple[str, ...] = ()


class Trouble(msgspec.Struct, frozen=True):
    """Target that was not or only partly checked, with the reason. An error sets exit status 2; a note does not."""

    target: str
    message: str
    rule: Rule = output_rules.CANNOT_READ
    case: str | None = None

    @property
    def severity(self) -> Severity:
        """Severity of the rule in the case `case`, or the rule's general severity if `case` is None."""
        return self.rule.severity if self.case is None else self.rule.cases[self.case]

    def is_reported_by(self, finding: Finding) -> bool:
        """Return True if a finding about the same target already contains the reason."""
        reason = strip_copy_advice(self.message.removeprefix(f"{self.target}: "))
        return finding.target == self.target and reason in finding.message


class Report(msgspec.Struct, frozen=True):
    """Report of a command. `document`, `table` and `page` are built when an output needs them."""

    title: str
    document: Callable[[], msgspec.Struct]
    table: Callable[[], Table]
    page: Callable[[], Page]
    #: The command's findings. `describe` adds places and wording for readers and CI.
    findings: tuple[Finding, ...] = ()
    describe: Callable[[Iterable[Finding]], tuple[Finding, ...]] = tuple
    notes: tuple[Oddity, ...] = ()
    #: Charts, for outputs that can draw.
    charts: Callable[[], tuple[Bars | Curve | Spread, ...]] = tuple
    #: Whether the page is an outline (`--tree`), which plain text shows instead of the flat table.
    outline: bool = False
    #: Rules whose findings are rows, which human-readable outputs do not repeat.
    rules_in_rows: frozenset[str] = frozenset()
    #: Lines of names (`--name-only`), which replace all other content. Tabs separate the parts of a line.
    listing: Callable[[], Iterable[tuple[str, ...]]] | None = None

    #: Findings of this severity or a higher one set exit status 1.
    fail_on: Severity = Severity.NOTE
    #: Whether every line is shown (`--all`), also in outputs of limited size.
    show_all: bool = False
    #: All findings, grouped into problems; None if each finding is a problem, and may be a row.
    problems: Callable[[], tuple[Problem, ...]] | None = None
    #: Largest number of findings in human-readable outputs (`-n`), before a count of the rest; None: no limit.
    max_findings: int | None = None
    #: Whether there are several targets: then a line with a finding begins with its target.
    has_several_targets: bool = False
    #: The rules of the findings, and the rules that ran without a finding.
    rules: Callable[[], tuple[RuleText, ...]] = tuple
    #: A case for each check that was tried.
    cases: Callable[[], tuple[Case, ...]] = tuple
    #: Accepted findings, with the reason.
    accepted: tuple[tuple[Finding, str], ...] = ()
    #: Number of problems that the accepted findings are grouped into.
    accepted_problems: int = 0
    troubles: tuple[Trouble, ...] = ()
    #: The parts that the run did not check, which are also in the verdict of the page.
    not_checked: tuple[NotChecked, ...] = ()
    #: The targets with parts that the run did not check, for outputs that annotate files.
    partly_checked: tuple[Trouble, ...] = ()
    configuration: Configuration = Configuration()
    #: The page without its rows, for outputs that show the flat table instead; None: the page.
    page_without_rows: Callable[[], Page] | None = None
    #: The flat table without the columns for programs, and only with the rows to show; None: the table.
    short_table: Callable[[], Table] | None = None
    #: The lines of a unified diff, without line ends, for human-readable outputs. Plain text begins with the diff.
    patch: tuple[str, ...] = ()
    #: The command that writes the fixes of the problems, for human-readable outputs; "" without a fix to write.
    fix_command: str = ""
    #: The tensors as a list to filter and sort, for outputs that can; None: the rows of the page.
    tensor_list: Callable[[], TensorList] | None = None
    #: Settings next to the tensors, for outputs with enough space.
    settings: Callable[[], tuple[SettingGroup, ...]] = tuple

    def describe_findings(self) -> tuple[Finding, ...]:
        """Return all findings with the places and texts shown in outputs."""
        return self.describe(self.findings)

    def describe_findings_without_row(self) -> tuple[Finding, ...]:
        """Return the findings that the rows of the output do not show."""
        return self.describe(finding for finding in self.findings if finding.rule not in self.rules_in_rows)

    def list_problems(self, *, quiet: bool = False) -> tuple[Problem, ...]:
        """Return all problems, for outputs with an entry for each problem. With `quiet`, return only the failures."""
        problems = self.problems() if self.problems is not None else map(build_problem, self.describe_findings())
        return tuple(problem for problem in problems if not quiet or problem.severity.is_at_least(self.fail_on))

    def select_problems(self, page: Page, *, quiet: bool) -> tuple[Problem, ...]:
        """Return the problems to show after the page's rows. With `quiet`, return failures, which replace the rows."""
        if not quiet:
            return page.problems
        if page.failing_problems is not None:
            return page.failing_problems()
        # A page shows some findings only in its rows.
        problems = page.problems or tuple(map(build_problem, self.describe_findings()))
        return tuple(problem for problem in problems if problem.severity.is_at_least(self.fail_on))

    def has_failed(self) -> bool:
        """Return whether the command exits with status 1."""
        return any(finding.severity.is_at_least(self.fail_on) for finding in self.findings)

    def has_passed(self) -> bool:
        """Return whether the command exits with status 0: no failure, and everything could be checked."""
        return not self.has_failed() and all(trouble.severity is not Severity.ERROR for trouble in self.troubles)

    def describe_failing_findings(self) -> tuple[Finding, ...]:
        """Return the findings that set exit status 1."""
        return self.describe(finding for finding in self.findings if finding.severity.is_at_least(self.fail_on))

    def describe_scope(self) -> str:
        """Describe parts that were not checked, and settings that disable or weaken rules, for outputs with `-q`.

        Returns "" if everything was checked by all rules.
        """
        parts = [f"not checked: {describe_not_checked(self.not_checked)}"] if self.not_checked else []
        if self.configuration.disabled or self.configuration.weakened:
            parts.append(describe_configuration(self.configuration))
        return "; ".join(parts)


def build_scope_notes(report: Report) -> tuple[Finding, ...]:
    """Return notes about parts that were not checked and settings that weaken rules, for outputs without a verdict."""
    target = "." if report.has_several_targets else report.title
    notes = []
    for entry in report.not_checked:
        case = output_rules.choose_case([entry])
        message = f"not checked: {plural(entry.count, entry.what)}: {entry.why}"
        severity = output_rules.NOT_CHECKED.cases.get(case or "")
        notes.append(output_rules.NOT_CHECKED.finding(message, target=target, severity=severity))
    if message := describe_configuration(report.configuration):
        notes.append(output_rules.CONFIGURATION.finding(message, target=report.configuration.file or target))
    return tuple(notes)


class View(msgspec.Struct, frozen=True):
    """Options of human-readable outputs. `unfold` gives each repeated layer its own line; `tree` shows the modules."""

    unfold: bool = False
    tree: bool = False
    verbose: bool = False


class RowView(View, frozen=True):
    """Options of a list of tensors.

    Attributes:
        sort: Order of the rows; None keeps the order of the file, unless `top` or `lines` hides rows.
        top: Largest number of rows, then shown as a single group.
        lines: Largest number of lines in each group.
        parts: List the tensors of quantized weights too.
    """

    sort: TensorOrder | ChangeOrder | None = None
    top: int | None = None
    lines: int | None = None
    parts: bool = False

    @property
    def hides_rows(self) -> bool:
        """Return True if only the most important rows are shown."""
        return self.top is not None or self.lines is not None


def limit_findings(findings: Sequence[Finding], limit: int | None) -> tuple[Finding, ...]:
    """Return the first findings and a count of the rest. Keep at least one finding as the reason of exit status 1."""
    count = len(findings) if limit is None else max(1, limit)
    if len(findings) <= count:
        return tuple(findings)
    message = f"… and {len(findings) - count:,} more (-n {limit})"
    return (*findings[:count], output_rules.MORE.finding(message, target=findings[0].target))
