"""Run `statecli bisect` with its options and return its outcome."""

from __future__ import annotations

from statecli.commands.bisect.condition import FORMS, parse_condition
from statecli.commands.bisect.result import Bisection
from statecli.commands.bisect.run import Request, bisect_run
from statecli.core.errors import UsageError, option
from statecli.report import View
from statecli.report.bisect import build_bisect_report, describe_inconclusive
from statecli.requests.options import BisectOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome


def prepare(options: BisectOptions, caller: Caller, extra: ExtraInputs) -> Request:  # noqa: ARG001 - every command has the same signature
    """Build the request of the search from the options. Raises UsageError for a missing or invalid condition."""
    if not options.condition:
        raise UsageError(f"{option('--condition')} is missing; write {option('--condition')} and {FORMS}")
    return Request(options.targets, parse_condition(options.condition), cache=not options.no_cache)


def run(options: BisectOptions, request: Request, caller: Caller, extra: ExtraInputs) -> Outcome[Bisection]:  # noqa: ARG001
    """Search the checkpoints of the training run. An inconclusive search is a failure."""
    bisection = bisect_run(request)
    caller.check_files([probe.path for probe in bisection.probes])
    view = View(unfold=options.all, verbose=options.verbose)
    return Outcome(bisection, build_bisect_report(bisection, view), failures=describe_inconclusive(bisection))
