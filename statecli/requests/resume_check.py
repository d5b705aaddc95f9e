"""Run `statecli resume-check` with its options and return its outcome."""

from __future__ import annotations

from statecli.commands.resume_check.result import ResumeCheck
from statecli.commands.resume_check.run import Request, check_target, resume_check
from statecli.core.errors import UsageError, option
from statecli.report import View
from statecli.report.resume_check import build_resume_check_report, describe_inconclusive
from statecli.requests.options import ResumeCheckOptions
from statecli.requests.outcome import Caller, ExtraInputs, Outcome


def prepare(options: ResumeCheckOptions, caller: Caller, extra: ExtraInputs) -> Request:  # noqa: ARG001 - every command has the same signature
    """Build the request from the options. Raises UsageError for a wrong target or number of steps."""
    check_target(options.target)
    if options.steps < 2 or options.steps % 2:
        raise UsageError(f"{option('--steps', options.steps)}: must be an even number, 2 or more")
    return Request(options.target, options.steps)


def run(options: ResumeCheckOptions, request: Request, caller: Caller, extra: ExtraInputs) -> Outcome[ResumeCheck]:  # noqa: ARG001
    """Run the training script with and without a resume, and compare. An inconclusive comparison is a failure."""
    result = resume_check(request)
    report = build_resume_check_report(result, View(options.all, options.verbose))
    return Outcome(result, report, failures=describe_inconclusive(result))
