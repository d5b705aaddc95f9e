"""Match the findings of inspect and verify with `--ignore` and `--baseline`. Imported only for these options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from statecli.commands.audit import baseline, config
from statecli.commands.audit.result import Audit
from statecli.core import move_rules, registration_rules
from statecli.core.errors import option
from statecli.core.finding import Finding
from statecli.core.model_state import ModelState
from statecli.report import rules
from statecli.report.problems import group_findings
from statecli.requests.options import COMMAND_NAMES, InspectOptions, VerifyOptions
from statecli.requests.outcome import AcceptedFindings, OutputFile
from statecli.rules.dictionary import DICTIONARY
from statecli.targets.target_result import Accepted, TargetResult, TargetStatus, drop_accepted

_REGISTRATION_RULES = frozenset(rule.name for rule in registration_rules.RULES)
_TIE_RULES = {rule.name: rule for rule in (move_rules.STALE_VIEW, move_rules.UNTIED_BY_MOVE)}


def expand_ignored(options: InspectOptions | VerifyOptions) -> frozenset[str]:
    """Return the rules of `--ignore`. Raises UsageError for a name that is not a rule or a rule group."""
    all_rules, command = DICTIONARY.values(), COMMAND_NAMES[type(options)]
    return frozenset(config.expand_rules(options.ignore, option("--ignore"), all_rules, command))


def describe_former_names(options: InspectOptions | VerifyOptions) -> str | None:
    """Return a warning about former names of rules in `--ignore`, or None if all names are current."""
    return rules.describe_former_names(options.ignore, DICTIONARY.values(), COMMAND_NAMES[type(options)])


def match_accepted(
    findings: Sequence[Finding], state: ModelState, options: InspectOptions | VerifyOptions
) -> AcceptedFindings:
    """See `accepted_findings.list_accepted`."""
    accepted_findings = _list_ignored(findings, state, options)
    if options.baseline is None and options.write_baseline is None:
        return AcceptedFindings(accepted_findings)
    causes = list(_name_causes(drop_accepted(findings, accepted_findings), state))
    # No rule counts as complete, because other commands report other findings of the same tensors.
    cause_findings = tuple(cause for _, cause in causes)
    audit = Audit(
        (TargetResult(state.target, TargetStatus.AUDITED, findings=cause_findings, unregistered=state.tensors),)
    )
    paths = (options.baseline, baseline.find_existing_file(options.write_baseline))
    accepted_before = baseline.join_baselines(paths, plugin_rules=None)
    files: tuple[OutputFile, ...] = ()
    if options.write_baseline is not None:
        accepted_before = baseline.build_baseline(audit, accepted_before, options.reason or "", unfiltered=False)
        files = (OutputFile(options.write_baseline, baseline.encode_baseline(accepted_before, options.write_baseline)),)
    if accepted_before is None:
        return AcceptedFindings(accepted_findings, files)
    reasons = {
        id(entry.finding): entry.reason
        for entry in baseline.accept_findings(audit, accepted_before, unfiltered=False).targets[0].accepted
    }
    in_baseline = (Accepted(finding, reasons[id(cause)]) for finding, cause in causes if id(cause) in reasons)
    return AcceptedFindings((*accepted_findings, *in_baseline), files)


def _name_causes(findings: Sequence[Finding], state: ModelState) -> Iterator[tuple[Finding, Finding]]:
    """Yield (finding, finding of `audit` with the same cause). Without such a finding, yield the finding twice."""
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
    """Return the findings with an ignored rule, and all findings of each problem whose rule is ignored."""
    if not options.ignore:
        return ()
    ignored_rules = expand_ignored(options)
    problems = group_findings(findings, state.tensors)
    return tuple(
        Accepted(finding, f"--ignore {rule}")
        for problem in problems
        for finding in problem.findings
        for rule in [problem.rule if problem.rule in ignored_rules else finding.rule]
        if rule in ignored_rules
    )
