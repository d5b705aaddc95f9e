"""Leave out the findings of rules that `--ignore` names, in inspect and verify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from statecli.commands.verify.result import Verification
from statecli.core.errors import option
from statecli.core.finding import Finding
from statecli.core.state import ModelState
from statecli.report.problems import group_findings


def expand_rules(names: Sequence[str]) -> frozenset[str]:
    """Return the rules for these names: a rule, or each rule of a group. Raises UsageError for any other name."""
    if not names:
        return frozenset()
    # Both are imported here, because most commands ignore no rule.
    from statecli.commands.audit import config
    from statecli.rules import DICTIONARY

    return frozenset(config.expand_rules(names, option("--ignore"), DICTIONARY.values()))


def drop_ignored(findings: Iterable[Finding], state: ModelState, names: Sequence[str]) -> tuple[Finding, ...]:
    """Return the findings without those of ignored rules and those of problems that have an ignored rule's name."""
    findings, ignored = tuple(findings), expand_rules(names)
    if not ignored:
        return findings
    problems = group_findings(findings, state.tensors)
    dropped = {id(finding) for problem in problems if problem.rule in ignored for finding in problem.findings}
    return tuple(finding for finding in findings if id(finding) not in dropped and finding.rule not in ignored)


def drop_ignored_of_checks(verification: Verification, names: Sequence[str]) -> Verification:
    """Return the verification without the ignored findings of each proof."""
    if not names:
        return verification
    kept = set(map(id, drop_ignored(verification.findings, verification.state, names)))
    checks = tuple(
        replace(check, findings=tuple(finding for finding in check.findings if id(finding) in kept))
        for check in verification.checks
    )
    return replace(verification, checks=checks)
