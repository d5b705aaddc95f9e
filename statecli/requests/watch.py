"""Run `statecli watch`: write a line for each checkpoint."""

from __future__ import annotations

import math

import msgspec

from statecli.commands.log.result import CheckpointRow
from statecli.commands.log.steps import EPOCH_KEYS, STEP_KEYS
from statecli.commands.watch.run import Request, watch_run
from statecli.core.errors import UsageError, option
from statecli.core.escaping import escape_line
from statecli.core.units import format_number
from statecli.report.log import NORM_DIGITS, describe_row, format_relative
from statecli.requests.options import WatchFormat, WatchOptions
from statecli.requests.outcome import Caller, Outcome
from statecli.storage import files

_HEADER = f"{'step':>10}  {'norm':>10}  {'rel. change':>11}  checkpoint"


def run(options: WatchOptions, caller: Caller) -> Outcome[CheckpointRow | None]:
    """Write a line for each checkpoint, for at most --count checkpoints. Checkpoints with an error are failures."""
    if not 0 < options.interval < math.inf:
        raise UsageError(f"{option('--interval', options.interval)}: must be a number of seconds above 0")
    is_json = options.output_format is WatchFormat.JSONL
    request = Request(
        options.targets, options.interval, options.count, history=options.history, cache=not options.no_cache
    )
    if not is_json:
        for target in options.targets:
            if not (files.is_glob(target) or files.exists(target)):
                caller.write_line(escape_line(f"waiting for {target}, which does not exist yet"))
        caller.write_line(_HEADER)
    failures: list[str] = []
    counters = frozenset((*STEP_KEYS, *EPOCH_KEYS))
    changed_before: frozenset[str] = frozenset()
    for row in watch_run(request):
        line = msgspec.json.encode(row).decode() if is_json else format_line(row, counters | changed_before)
        caller.write_line(line)
        changed_before = frozenset(change.key for change in row.settings)
        failures += [row.error] if row.error is not None else []
        if options.fail_on_nan and row.became_nan:
            return Outcome(row, has_findings=True)
    return Outcome(None, failures=failures, reported=True)


def format_line(row: CheckpointRow, counters: frozenset[str] = frozenset()) -> str:
    """Return the line of a checkpoint: step, norm, change, path and remarks. Leave out the settings in `counters`."""
    step = f"{row.step.number:,}" if row.step else "-"
    if row.error is not None:
        return escape_line(f"{step:>10}  {'-':>10}  {'-':>11}  {row.path}: not read: {row.error}")
    change = format_relative(row.relative_change) if row.compared_with is not None else ""
    cells = f"{step:>10}  {format_number(row.norm, NORM_DIGITS):>10}  {change:>11}  {row.path}"
    return escape_line("; ".join([cells, *describe_row(row, counters)]))
