"""Set apart the findings accepted by `--ignore` and `--baseline`, in inspect and verify; write the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli.core import move_rules, registration_rules
from statecli.core.errors import UsageError, option
from statecli.core.finding import Finding
from statecli.core.model_state import ModelState
from statecli.requests.options import COMMAND_NAMES, InspectOptions, VerifyOptions
from statecli.requests.outcome import OutputFile

if TYPE_CHECKING:
    from statecli.commands.verify.result import Verification
    from statecli.targets.target_result import Accepted

_REGISTRATION_RULES = frozenset(rule.name for rule in registration_rules.RULES)
_TIE_RULES = {rule.name: rule for rule in (move_rules.STALE_VIEW, move_rules.UNTIED_BY_MOVE)}


def check_options(options: InspectOptions | VerifyOptions) -> None:
    """Raise UsageError for an unknown rule, and for a baseline to write without a reason."""
    expand_ignored(options)
    check_reason(options.write_baseline, options.reason)


def check_reason(path: str | None, reason: str | None) -> None:
    """Raise UsageError unless a baseline to write has a reason, and a reason a baseline."""
    if path is not None and not (reason or "").strip():
        advice = f"add {option('--reason', 'TEXT')}; statecli shows the reason next to each accepted finding"
        raise UsageError(f"{option('--write-baseline', path)}: {advice}")
    if path is None and reason is not None:
        raise UsageError(f"{option('--reason')}: works only with {option('--write-baseline', 'FILE')}; give both")


def expand_ignored(options: InspectOptions | VerifyOptions) -> frozenset[str]:
    """Return the rules of `--ignore`. Raises UsageError for a name that is not a rule or a rule group."""
    if not options.ignore:
        return frozenset()
    # Both are imported here, because most commands ignore no rule.
    from statecli.commands.audit import config
    from statecli.rules.dictionary import DICTIONARY

    known, command = DICTIONARY.values(), COMMAND_NAMES[type(options)]
    return frozenset(config.expand_rules(options.ignore, option("--ignore"), known, command))


def describe_former_names(options: InspectOptions | VerifyOptions) -> str | None:
    """Return a warning about former names of rules in `--ignore`; None without one."""
    if not options.ignore:
        return None
    from statecli.report import rules  # imported here for the same reason
    from statecli.rules.dictionary import DICTIONARY

    return rules.describe_former_names(options.ignore, DICTIONARY.values(), COMMAND_NAMES[type(options)])


def list_accepted(
    findings: Sequence[Finding], state: ModelState, options: InspectOptions | VerifyOptions
) -> tuple[tuple[Accepted, ...], tuple[OutputFile, ...]]:
    """Return the accepted findings, each with its reason, and the baseline to write, if any.

    Raises UnreadableError and MalformedError for an unreadable baseline.
    """
    accepted = _list_ignored(findings, state, options)
    if options.baseline is None and options.write_baseline is None:
        return accepted, ()
    # They are imported here, because most runs have no baseline.
    from statecli.commands.audit import baseline
    from statecli.commands.audit.result import Audit
    from statecli.targets.target_result import Accepted, Status, TargetResult

    causes = list(_name_causes(drop_accepted(findings, accepted), state))
    # No rule counts as complete, because other commands report other findings of the same tensors.
    audit = Audit((TargetResult(state.target, Status.AUDITED, findings=tuple(cause for _, cause in causes)),))
    paths = (options.baseline, baseline.find_existing_file(options.write_baseline))
    accepted_before = baseline.join_baselines(paths, plugin_rules=None)
    files: tuple[OutputFile, ...] = ()
    if options.write_baseline is not None:
        accepted_before = baseline.build_baseline(audit, accepted_before, options.reason or "", unfiltered=False)
        files = (OutputFile(options.write_baseline, baseline.encode_baseline(accepted_before, options.write_baseline)),)
    if accepted_before is None:
        return accepted, files
    reasons = {
        id(entry.finding): entry.reason
        for entry in baseline.accept_findings(audit, accepted_before, unfiltered=False).targets[0].accepted
    }
    in_baseline = (Accepted(finding, reasons[id(cause)]) for finding, cause in causes if id(cause) in reasons)
    return (*accepted, *in_baseline), files


def _name_causes(findings: Sequence[Finding], state: ModelState) -> Iterator[tuple[Finding, Finding]]:
    """Yield each finding, with audit's finding for the same cause; itself without a common cause."""
    from statecli.report.problems import group_findings

    rows = {tensor.fqn: tensor for tensor in state.tensors}
    for problem in group_findings(findings, state.tensors):
        names = [finding.fqn for finding in problem.findings if finding.rule == problem.rule]
        for finding in problem.findings:
            row = rows.get(finding.fqn or "")
            if problem.rule in _REGISTRATION_RULES and row is not None:
                cause = registration_rules.choose_rule(row)
                yield finding, cause.finding(finding.message, target=state.target, fqn=finding.fqn)
            elif problem.rule in _TIE_RULES:
                fqn = finding.fqn if finding.fqn in names else names[0]
                yield finding, _TIE_RULES[problem.rule].finding(finding.message, target=state.target, fqn=fqn)
            else:
                yield finding, finding


def _list_ignored(
    findings: Sequence[Finding], state: ModelState, options: InspectOptions | VerifyOptions
) -> tuple[Accepted, ...]:
    """Return the findings of ignored rules, and of problems with an ignored rule's name."""
    ignored = expand_ignored(options)
    if not ignored:
        return ()
    from statecli.report.problems import group_findings
    from statecli.targets.target_result import Accepted

    problems = group_findings(findings, state.tensors)
    return tuple(
        Accepted(finding, f"--ignore {rule}")
        for problem in problems
        for finding in problem.findings
        for rule in [problem.rule if problem.rule in ignored else finding.rule]
        if rule in ignored
    )


def drop_accepted(findings: Iterable[Finding], accepted: Iterable[Accepted]) -> tuple[Finding, ...]:
    """Return the findings not accepted."""
    dropped = {id(entry.finding) for entry in accepted}
    return tuple(finding for finding in findings if id(finding) not in dropped)


def drop_accepted_of_checks(verification: Verification, accepted: Sequence[Accepted]) -> Verification:
    """Return the verification without the accepted findings of each proof."""
    if not accepted:
        return verification
    checks = tuple(replace(check, findings=drop_accepted(check.findings, accepted)) for check in verification.checks)
    return replace(verification, checks=checks)
