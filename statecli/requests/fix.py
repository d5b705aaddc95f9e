"""Run `statecli fix` with its options and return its outcome."""

from __future__ import annotations

from statecli.commands.fix import run as fix_run
from statecli.commands.fix.result import Fixes
from statecli.commands.fix.run import Request
from statecli.commands.verify.run import Request as VerifyRequest
from statecli.report import View
from statecli.report.fix import build_fix_report
from statecli.requests.options import FixOptions
from statecli.requests.outcome import Caller, Outcome, OutputFile


def run(options: FixOptions, caller: Caller) -> Outcome[Fixes]:
    """Propose edits. With --write, the outcome contains the edited files."""
    verify = VerifyRequest(
        target=options.target, input=options.input, inputs=options.input_from, init_device=options.init_device
    )
    with caller.progress(values=False):
        fixes = fix_run.run(Request(verify, options.write))
    caller.check_files([file.path for file in fixes.files])
    report = build_fix_report(fixes, options.target, View(unfold=options.all, verbose=options.verbose))
    files = [OutputFile(file.path, (file.after,)) for file in fixes.files] if fixes.written else []
    failures = [f"{options.target}: {line}" for line in fixes.inconclusive]
    return Outcome(fixes, report, failures=failures, findings_first=True, reported=True, files=files)
