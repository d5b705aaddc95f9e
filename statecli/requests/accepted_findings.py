"""Separate the findings of inspect and verify that `--ignore` or `--baseline` accepts, and build a new baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli import requests
from statecli.core.errors import UsageError, option
from statecli.core.finding import Finding
from statecli.core.model_state import ModelState
from statecli.requests.options import InspectOptions, VerifyOptions
from statecli.requests.outcome import AcceptedFindings
from statecli.targets.target_result import Accepted, drop_accepted

if TYPE_CHECKING:
    from statecli.commands.verify.result import Verification


def check_options(options: InspectOptions | VerifyOptions) -> None:
    """Raise UsageError if `--ignore` has an unknown rule, or if only one of --write-baseline and --reason is given."""
    if options.ignore:
        requests.match_accepted.expand_ignored(options)
    check_reason(options.write_baseline, options.reason)


def check_reason(path: str | None, reason: str | None) -> None:
    """Raise UsageError if only one of --write-baseline and --reason is given."""
    if path is not None and not (reason or "").strip():
        advice = f"add {option('--reason', 'TEXT')}; statecli shows the reason next to each accepted finding"
        raise UsageError(f"{option('--write-baseline', path)}: {advice}")
    if path is None and reason is not None:
        raise UsageError(f"{option('--reason')}: works only with {option('--write-baseline', 'FILE')}; give both")


def list_accepted(
    findings: Sequence[Finding], state: ModelState, options: InspectOptions | VerifyOptions
) -> AcceptedFindings:
    """Return the accepted findings with their reasons and, for --write-baseline, the baseline file to write.

    Raises UnreadableError or MalformedError if a baseline cannot be read.
    """
    if not options.ignore and options.baseline is None and options.write_baseline is None:
        return AcceptedFindings()
    return requests.match_accepted.match_accepted(findings, state, options)


def drop_accepted_of_checks(verification: Verification, accepted: Sequence[Accepted]) -> Verification:
    """Return the result of `verify` without the accepted findings in its checks."""
    if not accepted:
        return verification
    checks = tuple(replace(check, findings=drop_accepted(check.findings, accepted)) for check in verification.checks)
    return replace(verification, checks=checks)
