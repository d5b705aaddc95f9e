"""Run the rules on one target, and build the result of the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from statecli.commands.audit import lock_check, unreadable_values
from statecli.core import sizes
from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import Kind
from statecli.core.run_scope import NotChecked
from statecli.rules import audit_run
from statecli.rules.audit_rule import AuditRule
from statecli.rules.audit_subject import Subject, needs_values
from statecli.targets.location import add_places
from statecli.targets.target_result import Skipped, TargetResult, TargetStatus


@with_denormals
def run_rules(subject: Subject, rules: Sequence[AuditRule], severity: Mapping[str, Severity]) -> TargetResult:
    """Return the result of a target: the findings of each rule, and the rules and values that were not checked."""
    findings_by_rule: dict[AuditRule, list[Finding]] = {}
    skipped = []
    for rule in rules:
        try:
            reason = rule.why_not(subject)
        except Exception as error:  # noqa: BLE001  # no error lets an audit pass
            findings_by_rule[rule] = [_build_internal_error(rule, error, subject)]
            continue
        if reason is not None:
            skipped.append(Skipped(rule.name, reason, subject.target))
        else:
            findings_by_rule[rule] = list(run_rule(rule, subject, severity.get(rule.name)))
    unreadable = unreadable_values.list_unreadable(subject, findings_by_rule)
    # A rule without findings has not passed if some values could not be read.
    silent_rules = [rule for rule, findings in findings_by_rule.items() if not findings] if unreadable else []
    inconclusive = [rule for rule in silent_rules if needs_values in rule.needs]
    skipped += [Skipped(rule.name, unreadable_values.NOT_ALL_READ, subject.target) for rule in inconclusive]
    state = subject.state
    ran_lock_rule = any(rule.name == lock_check.LOCK_RULE for rule in findings_by_rule)
    return TargetResult(
        subject.target,
        TargetStatus.FAILED if unreadable else TargetStatus.AUDITED,
        unreadable_values.summarize_reasons(unreadable),
        format=state.format,
        tensors=len(state.tensors),
        bytes=sizes.sum_bytes(state.tensors),
        findings=add_places([finding for findings in findings_by_rule.values() for finding in findings], state.tensors),
        ran=tuple(rule.name for rule in findings_by_rule if rule not in inconclusive),
        skipped=tuple(skipped),
        notes=(
            *state.oddities,
            *subject.section_notes,
            *unreadable,
            *lock_check.list_unlocked_sections((subject.lock or ()) if ran_lock_rule else ()),
        ),
        not_checked=(
            *_count_unread_values(subject),
            *(
                NotChecked("file", 1, checked.unread_because)
                for checked in subject.digest_files
                if checked.unread_because is not None
            ),
            *(subject.companions.not_checked if subject.companions is not None else ()),
        ),
        unregistered=tuple(
            row for row in (subject.module.tensors if subject.module else ()) if row.kind is Kind.UNREGISTERED
        ),
        lock_count=lock_check.count_matches(subject.lock or ()) if ran_lock_rule else None,
    )


def _count_unread_values(subject: Subject) -> tuple[NotChecked, ...]:
    """Return how many tensors have values that no rule has checked, and the reason."""
    count = sum(bool(tensor.elements) for tensor in subject.state.tensors)
    if subject.unread_because and count:
        return (NotChecked("tensor", count, subject.unread_because),)
    uncheckable = sum(facts.reason is not None and not facts.damaged for facts in subject.values or ())
    reason = "no rule can check the values (see the rule unread-values)"
    return (NotChecked("tensor", uncheckable, reason),) if uncheckable else ()


def run_rule(rule: AuditRule, subject: Subject, severity: Severity | None) -> Iterator[Finding]:
    """Yield the findings of a rule. A bug in the rule becomes a finding, and the run continues."""
    try:
        for issue in rule.find(subject):
            yield rule.build_finding(issue, subject.target, severity)
    except StateError:
        raise
    except Exception as error:  # noqa: BLE001  # no error lets an audit pass
        yield _build_internal_error(rule, error, subject)


def _build_internal_error(rule: AuditRule, error: Exception, subject: Subject) -> Finding:
    report = "please report this bug"
    if rule.plugin is not None:
        report = f"please report this bug to the author of the plugin {rule.plugin}"
    message = f"rule {rule.name} failed: {type(error).__name__}: {error} ({report})"
    return audit_run.INTERNAL_ERROR.finding(message, target=subject.target)
