"""Run `statecli resume-check` with its options and return its outcome."""

from __future__ import annotations

from statecli.commands.resume_check.result import ResumeCheck
from statecli.commands.resume_check.run import Request, check_target, resume_check
from statecli.core.errors import UsageError, option
from statecli.report import View
from statecli.report.resume_check import build_resume_check_report, describe_inconclusive
from statecli.requests.options import ResumeCheckOptions
from statecli.requests.outcome import Caller, Outcome


def run(options: ResumeCheckOptions, caller: Caller) -> Outcome[ResumeCheck]:  # noqa: ARG001 - every command has the same signature
    """Run the training script with and without a resume, and compare. An inconclusive comparison is a failure.

    Raises UsageError for a wrong target or number of steps.
    """
    check_target(options.target)
    if options.steps < 2 or options.steps % 2:
        raise UsageError(f"{option('--steps', options.steps)}: must be an even number, 2 or more")
    result = resume_check(Request(options.target, options.steps))
    report = build_resume_check_report(result, View(options.all, options.verbose))
    return Outcome(result, report, failures=describe_inconclusive(result))
