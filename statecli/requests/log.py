"""Run `statecli log` with its options and return its outcome."""

from __future__ import annotations

from statecli.commands.log.result import Log
from statecli.commands.log.run import Request, log_run
from statecli.report.log import LogView, build_log_report
from statecli.requests.options import LogOptions
from statecli.requests.outcome import Caller, Outcome, describe_failures


def run(options: LogOptions, caller: Caller) -> Outcome[Log]:
    """Return a row for each checkpoint of the training run. Checkpoints that could not be read are failures."""
    log = log_run(Request(options.targets, cache=not options.no_cache), caller.steps)
    caller.check_files([row.path for row in log.rows])
    view = LogView(unfold=options.all, verbose=options.verbose, top=options.top)
    report = build_log_report(log, view, options.fail_on)
    return Outcome(log, report, failures=describe_failures(log.broken, "read"))
