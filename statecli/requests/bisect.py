"""Run `statecli bisect` with its options and return its outcome."""

from __future__ import annotations

from statecli.commands.bisect.condition import FORMS, parse_condition
from statecli.commands.bisect.result import Bisection
from statecli.commands.bisect.run import Request, bisect_run
from statecli.core.errors import UsageError, option
from statecli.report import View
from statecli.report.bisect import build_bisect_report, describe_inconclusive
from statecli.requests.options import BisectOptions
from statecli.requests.outcome import Caller, Outcome


def run(options: BisectOptions, caller: Caller) -> Outcome[Bisection]:
    """Search the checkpoints of the training run. An inconclusive search is a failure.

    Raises UsageError for a missing or invalid condition.
    """
    if not options.condition:
        raise UsageError(f"{option('--condition')} is missing; write {option('--condition')} and {FORMS}")
    request = Request(options.targets, parse_condition(options.condition), cache=not options.no_cache)
    bisection = bisect_run(request)
    caller.check_files([probe.path for probe in bisection.probes])
    view = View(unfold=options.all, verbose=options.verbose)
    return Outcome(bisection, build_bisect_report(bisection, view), failures=describe_inconclusive(bisection))
