"""The report of `statecli log`: a line for each checkpoint, then a line for each module with a sparkline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from statecli.commands.diff.settings import format_values
from statecli.commands.log.checkpoints import shorten_paths
from statecli.commands.log.result import CheckpointRow, Log, ModuleRow
from statecli.core.finding import Severity
from statecli.core.grouping import group_by
from statecli.core.units import format_count, format_fqn, format_number, join_names, plural
from statecli.report import (
    Case,
    CaseOutcome,
    Cell,
    Curve,
    Group,
    Line,
    Page,
    Report,
    ReportColumn,
    Rows,
    Table,
    Trouble,
    View,
    build_problem,
    fold,
    rule_texts,
)
from statecli.report.bars import BAR_SCALE, draw_bar
from statecli.report.documents.log import build_log_document
from statecli.report.sparkline import ZERO_CELL, draw_sparkline, find_range

#: Number of significant digits of a norm and of a change in human-readable outputs.
NORM_DIGITS, CHANGE_DIGITS = 5, 3
#: Largest number of lines of modules without --all and --top.
MAX_MODULE_LINES = 20
#: Largest number of settings and of names in a remark, and of characters of a setting.
MAX_REMARK_SETTINGS, MAX_REMARK_NAMES, MAX_SETTING_CHARACTERS = 3, 3, 30

COLUMNS = (
    ReportColumn("name"),
    ReportColumn("step", right=True),
    ReportColumn("norm", right=True),
    ReportColumn("rel. change", right=True),
    ReportColumn(BAR_SCALE, optional=True),
)
#: Headings of `COLUMNS` in the group of the modules, which have no step.
MODULE_HEADS = ("name", "", "last norm", "last change", "each change")
TABLE_COLUMNS = (
    ReportColumn("checkpoint"),
    ReportColumn("step", right=True),
    ReportColumn("norm", right=True),
    ReportColumn("relative_change", right=True),
    ReportColumn("cosine", right=True),
    ReportColumn("changed", right=True),
    ReportColumn("nan", right=True),
    ReportColumn("inf", right=True),
    ReportColumn("became_nan"),
    ReportColumn("stopped"),
    ReportColumn("settings"),
    ReportColumn("error"),
    ReportColumn("step_source", detail=True),
    ReportColumn("format", detail=True),
    ReportColumn("tensors", right=True, detail=True),
    ReportColumn("elements", right=True, detail=True),
    ReportColumn("change", right=True, detail=True),
    ReportColumn("compared_with", detail=True),
)


class LogView(View, frozen=True):
    """Options of the human-readable log. `top` is the largest number of modules."""

    top: int | None = None


def build_log_report(log: Log, view: LogView, fail_on: Severity) -> Report:
    """Return the report of `log`."""
    return Report(
        title=log.target,
        document=lambda: build_log_document(log),
        table=lambda: _build_table(log, with_details=True),
        short_table=lambda: _build_table(log, with_details=False),
        page=lambda: _build_page(log, view),
        page_without_rows=lambda: _build_page_without_rows(log),
        findings=log.findings,
        notes=fold.limit_notes(log.notes, view.verbose),
        charts=lambda: _build_charts(log),
        rules_in_rows=frozenset(finding.rule for finding in log.findings),
        rules=lambda: rule_texts.list_rule_texts(log.findings),
        cases=lambda: tuple(_build_cases(log, fail_on)),
        troubles=tuple(Trouble(failure.name, failure.message) for failure in log.broken),
        fail_on=fail_on,
        show_all=view.unfold,
        has_several_targets=True,
    )


def _build_table(log: Log, *, with_details: bool) -> Table:
    count = sum(not column.detail for column in TABLE_COLUMNS)
    columns = TABLE_COLUMNS if with_details else TABLE_COLUMNS[:count]
    return Table(columns, Rows(lambda row: _build_cells(row)[: len(columns)], log.rows), has_findings=False)


def _build_cells(row: CheckpointRow) -> tuple[Cell, ...]:
    return (
        row.path,
        row.step.number if row.step else None,
        row.norm,
        row.relative_change,
        row.cosine,
        row.changed,
        row.nan if row.error is None else None,
        row.inf if row.error is None else None,
        ", ".join(map(format_fqn, row.became_nan)) or None,
        ", ".join(map(format_fqn, row.stopped)) or None,
        ", ".join(f"{change.key}: {format_values(change, 200)}" for change in row.settings) or None,
        row.error,
        row.step.source if row.step else None,
        row.format,
        row.tensors,
        row.elements,
        row.change,
        row.compared_with,
    )


# --- page -------------------------------------------------------------------------------------------------------------


def _build_page_without_rows(log: Log) -> Page:
    return Page(
        subtitle=_format_subtitle(log),
        columns=(),
        groups=(),
        totals=(*_list_stopped(log), verdict := _format_verdict(log)),
        verdict=verdict,
    )


def _build_page(log: Log, view: LogView) -> Page:
    names = shorten_paths([row.path for row in log.rows])
    counters = frozenset(log.changing if not view.verbose else ())
    lines = tuple(_build_line(row, name, counters) for row, name in zip(log.rows, names, strict=True))
    groups = [Group("checkpoints", _format_steps(log), lines)]
    if log.modules and len(log.rows) > 1:
        groups.append(_build_module_group(log, view))
    return replace(_build_page_without_rows(log), columns=COLUMNS, groups=tuple(groups))


def _format_subtitle(log: Log) -> str:
    readable_rows = [row for row in log.rows if row.error is None]
    formats = join_names(list(dict.fromkeys(row.format or "" for row in readable_rows)), 3)
    last = readable_rows[-1] if readable_rows else None
    sizes = f", {plural(last.tensors, 'tensor')}, {format_count(last.elements)} parameters" if last else ""
    return f"{plural(len(log.rows), 'checkpoint')}{f' ({formats})' if formats else ''}{sizes}"


def _format_steps(log: Log) -> str:
    steps = [row.step.number for row in log.rows if row.step is not None]
    return f"steps {steps[0]:,} to {steps[-1]:,}" if len(steps) > 1 else ""


def _format_verdict(log: Log) -> str:
    readable_rows = [row for row in log.rows if row.error is None]
    parts = [f"{plural(len(readable_rows), 'checkpoint')} read"]
    if len(readable_rows) < len(log.rows):
        parts.append(f"{len(log.rows) - len(readable_rows):,} not read")
    first = next((row for row in readable_rows if row.became_nan), None)
    if first is not None:
        parts.append(f"first NaN or infinity at {f'step {first.step.number:,}' if first.step else first.path}")
    stopped_count = sum(module.stopped for module in log.modules)
    if stopped_count:
        parts.append(f"{plural(stopped_count, 'module')} no longer changing")
    return ", ".join(parts)


def _list_stopped(log: Log) -> tuple[str, ...]:
    """Return a line for each step at which modules stopped changing: `unchanged since step 400: layers.{0..3}`."""
    lines = []
    for row in log.rows:
        if row.stopped:
            step_text = f"step {row.step.number:,}" if row.step else row.path
            lines.append(f"unchanged since {step_text}: {_fold_names(row.stopped, 8)}")
    return tuple(lines)


def _build_line(row: CheckpointRow, name: str, counters: frozenset[str]) -> Line:
    step = f"{row.step.number:,}" if row.step else "-"
    if row.error is not None:
        return Line((name, step, "", "", ""), f"not read: {row.error.removeprefix(f'{row.path}: ')}", "bad")
    cells = (
        name,
        step,
        format_number(row.norm, NORM_DIGITS),
        format_relative(row.relative_change) if row.compared_with is not None else "",
        draw_bar(row.relative_change),
    )
    remarks = list(describe_row(row, counters))
    mood = "bad" if row.became_nan else "warn" if row.not_compared else "dim" if row.is_copy else ""
    return Line(cells, "; ".join(remarks), mood)


def format_relative(value: float | None) -> str:
    """Format a relative change: `0` for equal values, `-` if the change is unknown."""
    return "0" if value == 0 else format_number(value, CHANGE_DIGITS)


def describe_row(row: CheckpointRow, counters: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield remarks on a checkpoint: NaN, modules that stopped, tensors added or removed, changed settings."""
    if row.became_nan:
        yield f"NaN or infinity in {_fold_names(row.became_nan)}"
    elif row.nan or row.inf:
        yield f"{plural(row.nan + row.inf, 'value')} not finite"
    if row.is_copy:
        yield "no tensor differs from the previous checkpoint"
    if row.stopped:
        yield f"no change from this checkpoint on: {_fold_names(row.stopped)}"
    for names, word in ((row.added, "added"), (row.removed, "removed")):
        if names:
            yield f"{plural(len(names), 'tensor')} {word} ({_fold_names(names)})"
    if len(row.not_compared) == 1:
        yield f"not compared: {row.not_compared[0]}"
    elif row.not_compared:
        yield f"{plural(len(row.not_compared), 'tensor')} not compared"
    settings = [change for change in row.settings if change.key not in counters]
    for change in settings[:MAX_REMARK_SETTINGS]:
        yield f"{change.key}: {format_values(change, MAX_SETTING_CHARACTERS)}"
    if len(settings) > MAX_REMARK_SETTINGS:
        yield f"{plural(len(settings) - MAX_REMARK_SETTINGS, 'other setting')} changed"


def _fold_names(names: Iterable[str], limit: int = MAX_REMARK_NAMES) -> str:
    return join_names(fold.fold_names(map(format_fqn, names)), limit)


# --- modules ----------------------------------------------------------------------------------------------------------


def _build_module_group(log: Log, view: LogView) -> Group:
    modules = list(log.modules)
    limits = find_range([module.relative_changes for module in modules])
    if view.top is not None:
        modules = sorted(modules, key=_measure_largest, reverse=True)[: view.top]
        lines = [_build_module_line([module], module.name, limits, log) for module in modules]
        heading = "modules that changed most"
    else:
        lines = _fold_modules(modules, limits, log, unfold=view.unfold)
        heading = "modules"
    listed_lines = lines if view.unfold or view.top is not None else lines[:MAX_MODULE_LINES]
    summary = "rel. change from checkpoint to checkpoint"
    if limits is not None:
        low, high = (format_number(value, 2) for value in limits)
        summary += f", {low} (▁) to {high} (█) log; {ZERO_CELL} unchanged"
    if len(listed_lines) < len(lines):
        summary += f"; {len(lines) - len(listed_lines)} more lines with --all"
    return Group(heading, summary, tuple(listed_lines), heads=MODULE_HEADS)


def _measure_largest(module: ModuleRow) -> float:
    return max((value for value in module.relative_changes if value is not None), default=-1.0)


def _fold_modules(
    modules: Sequence[ModuleRow], limits: tuple[float, float] | None, log: Log, *, unfold: bool
) -> list[Line]:
    if unfold:
        return [_build_module_line([module], module.name, limits, log) for module in modules]

    def make_key(module: ModuleRow) -> tuple[object, ...]:
        pattern, numbers = fold.split_numbers(module.name)
        since = module.last_moved if module.stopped else module.last_moved is None
        return pattern, len(numbers), module.stopped, since, module.has_nan

    alike = group_by(modules, make_key).values()
    return fold.fold_lines([_build_module_line(group, module.name, limits, log) for group in alike for module in group])


def _build_module_line(modules: Sequence[ModuleRow], name: str, limits: tuple[float, float] | None, log: Log) -> Line:
    """Return the line of folded modules: the norm over all of them, and the largest change among them at each step."""
    first = modules[0]
    norms = [module.norms[-1] for module in modules if module.norms]
    known_norms = [norm for norm in norms if norm is not None]
    changes = [
        max((value for value in step if value is not None), default=None)
        for step in zip(*(module.relative_changes for module in modules), strict=True)
    ]
    last = next((value for value in reversed(changes) if value is not None), None)
    remarks = ["has NaN or infinities"] if first.has_nan else []
    if first.last_moved is None:
        remarks.append("never changed")
    elif first.stopped:
        row = log.rows[first.last_moved]
        remarks.append(f"unchanged since {f'step {row.step.number:,}' if row.step else row.path}")
    cells = (
        format_fqn(name) if name else "(the model itself)",
        "",
        format_number(math.hypot(*known_norms), NORM_DIGITS) if known_norms and len(known_norms) == len(norms) else "-",
        format_relative(last),
        draw_sparkline(changes[1:], limits),
    )
    mood = "bad" if first.has_nan else "warn" if first.stopped else "dim" if first.last_moved is None else ""
    return Line(cells, "; ".join(remarks), mood)


# --- charts, cases ----------------------------------------------------------------------------------------------------


def _build_charts(log: Log) -> tuple[Curve, ...]:
    """Return charts of the norm and of the change. The axis is the step, or the checkpoint if steps are missing."""
    readable_rows = [row for row in log.rows if row.error is None]
    # `last.ckpt` is often a copy of the checkpoint before, with the same step.
    rows = [
        row for n, row in enumerate(readable_rows) if not (n and row.is_copy and row.step == readable_rows[n - 1].step)
    ]
    if not rows:
        return ()
    labels = tuple(f"step {row.step.number:,}" if row.step else row.path for row in rows)
    steps = [row.step.number for row in rows if row.step]
    has_steps = len(set(steps)) == len(rows)
    places = tuple(map(float, steps)) if has_steps else tuple(map(float, range(1, len(rows) + 1)))
    alarms = tuple(f"NaN or infinity in {_fold_names(row.became_nan)}" if row.became_nan else "" for row in rows)
    axis_title = "step" if has_steps else "checkpoint"
    norms = tuple(_to_float(row.norm) for row in rows)
    changes = tuple(_to_float(row.relative_change) for row in rows[1:])
    charts = [Curve("norm of the parameters", labels, places, norms, alarms, "L2 norm", axis_title)]
    if changes:
        title = "change since the previous checkpoint"
        charts.append(Curve(title, labels[1:], places[1:], changes, alarms[1:], "rel. change", axis_title))
    return tuple(charts)


def _to_float(value: float | None) -> float:
    return math.nan if value is None else value


def _build_cases(log: Log, fail_on: Severity) -> Iterator[Case]:
    for row in log.rows:
        findings = [finding for finding in log.findings if finding.target == row.path]
        failing = [finding for finding in findings if finding.severity.is_at_least(fail_on)]
        text = tuple(build_problem(finding).message for finding in findings)
        if row.error is not None:
            yield Case(log.target, row.path, CaseOutcome.ERROR, row.error)
        elif row.not_compared:
            yield Case(log.target, row.path, CaseOutcome.ERROR, row.not_compared[0], row.not_compared)
        elif failing:
            yield Case(log.target, row.path, CaseOutcome.FAILED, failing[0].message, text)
        else:
            yield Case(log.target, row.path, CaseOutcome.PASSED, text=text)
