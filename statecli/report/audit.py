"""The report of `statecli audit`: findings by target, and a verdict with the number of audited targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache

from msgspec import UNSET
from msgspec.structs import replace

from statecli import report
from statecli.commands.audit.result import Audit
from statecli.core.escaping import truncate_middle
from statecli.core.finding import Finding, Severity
from statecli.core.grouping import group_by
from statecli.core.model_state import Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.core.output_rules import CANNOT_READ, NOT_CHECKED, SKIPPED, choose_case
from statecli.core.rule import Rule
from statecli.core.units import (
    describe_configuration,
    describe_not_checked,
    format_fix_in_line,
    format_size,
    join_names,
    plural,
)
from statecli.report import (
    Case,
    CaseOutcome,
    Group,
    Line,
    Page,
    Problem,
    Report,
    RuleText,
    Table,
    Trouble,
    View,
    junit_cases,
    rule_texts,
)
from statecli.report.documents.audit import build_audit_document
from statecli.report.problems import format_counts, format_severities, group_accepted, group_findings
from statecli.rules.dictionary import RULES
from statecli.targets import location
from statecli.targets.target_result import Accepted, TargetResult, TargetStatus

#: Largest number of problems of a group without `--all`.
MAX_GROUP_PROBLEMS = 20
#: Largest number of target names in a list, and of characters of each name.
MAX_LISTED_TARGETS, MAX_TARGET_CHARACTERS = 10, 180


def list_inconclusive(audit: Audit, select: Collection[str], *, allow_empty: bool) -> tuple[str, ...]:
    """Return reasons for exit status 2, such as a rule that did not run, or () if failures already set the status."""
    if audit.failing or audit.count(TargetStatus.FAILED):
        return ()
    if not audit.count(TargetStatus.AUDITED):
        return () if allow_empty else ("nothing was audited",)
    not_run = (
        f"{skipped_rule.rule} did not run: {skipped_rule.reason}" for skipped_rule in audit.find_unrun_rules(select)
    )
    return (*not_run, *filter(None, (audit.unused_reference,)))


def build_audit_report(audit: Audit, view: View) -> Report:
    """Return the report of `audit`."""
    group_problems = cache(lambda: _group_problems(audit, audit.findings))
    accepted = tuple((entry.finding, entry.reason) for target in audit.targets for entry in target.accepted)
    return Report(
        title=_format_title(audit),
        document=lambda: build_audit_document(audit, group_problems(), _format_verdict(audit, group_problems(), "")),
        table=lambda: _build_table([finding for t in audit.targets for finding in _sort_findings(t.findings)]),
        short_table=lambda: _build_table(
            replace(finding, help=format_fix_in_line(finding.help or "") or None)
            for finding in (problem.merge_findings() for problem in group_problems())
        ),
        page=lambda: _build_page(audit, group_problems(), view),
        findings=audit.findings,
        notes=_list_notes(audit, view),
        rules_in_rows=frozenset(finding.rule for finding in audit.findings),
        fail_on=audit.fail_on,
        show_all=view.unfold,
        problems=group_problems,
        has_several_targets=len(audit.targets) > 1,
        rules=lambda: _list_rule_texts(
            audit.ran, (*audit.findings, *(finding for finding, _ in accepted), *group_problems()), audit.plugin_rules
        ),
        cases=lambda: (
            *_build_cases(audit),
            *(Case(_choose_target(audit), "audit", CaseOutcome.ERROR, reason) for reason in audit.inconclusive),
        ),
        accepted=accepted,
        accepted_problems=_count_accepted(audit),
        troubles=(
            *_list_troubles(audit.targets),
            *(Trouble(_choose_target(audit), reason) for reason in audit.inconclusive),
        ),
        not_checked=audit.not_checked,
        partly_checked=tuple(
            Trouble(
                target.target,
                f"not checked: {describe_not_checked(target.not_checked)}",
                NOT_CHECKED,
                choose_case(target.not_checked),
            )
            for target in audit.targets
            if target.status is TargetStatus.AUDITED and target.not_checked
        ),
        configuration=audit.configuration,
    )


def _list_notes(audit: Audit, view: View) -> tuple[Oddity, ...]:
    """Return the notes about the targets. Without -v, return only notes about sections missing in the lock."""
    notes = [note for target in audit.targets for note in target.notes]
    if not view.verbose:
        return tuple(dict.fromkeys(note for note in notes if note.kind is OddityKind.NOT_LOCKED))
    # The note about foreign names advises the user to run audit, but audit's own rules report these names.
    return tuple(note for note in notes if note.kind is not OddityKind.FOREIGN_GLOBALS)


def _format_title(audit: Audit) -> str:
    """Return the name of the only checked target, or the number of targets."""
    targets = audit.checked_targets
    return targets[0].target if len(targets) == 1 else plural(len(targets), "target")


def _choose_target(audit: Audit) -> str:
    """Return the target to which errors of the whole run are attributed: an audited target if possible."""
    return max(audit.targets, key=lambda target: target.status is TargetStatus.AUDITED).target


def _count_accepted(audit: Audit) -> int:
    """Return the number of accepted problems, not of accepted findings."""
    accepted_by_target = (group_accepted(target.accepted, target.unregistered) for target in audit.targets)
    return sum(len(problems) for by_reason in accepted_by_target for problems in by_reason.values())


def _list_troubles(targets: Iterable[TargetResult]) -> tuple[Trouble, ...]:
    """Return an error for each failed target, and a note for each skipped target."""
    rules = {TargetStatus.FAILED: CANNOT_READ, TargetStatus.SKIPPED: SKIPPED}
    return tuple(
        Trouble(target.target, target.reason or target.status.value, rules[target.status])
        for target in targets
        if target.status in rules
    )


def _build_cases(audit: Audit) -> Iterator[Case]:
    """Yield a test case for each target and rule, and a test case for each target that was not audited.

    A problem with findings of several rules is only in the case of the problem's own rule.
    """
    for target in audit.targets:
        if target.status is not TargetStatus.AUDITED:
            outcome = CaseOutcome.ERROR if target.status is TargetStatus.FAILED else CaseOutcome.SKIPPED
            yield Case(target.target, "audit", outcome, target.reason or "")
        problems = group_findings(target.findings, target.unregistered, audit.plugin_rules)
        accepted_by_rule = group_by(target.accepted, lambda entry: entry.finding.rule)
        by_rule = group_by(problems, lambda problem: problem.rule)
        for rule in dict.fromkeys((*target.ran, *by_rule)):
            yield _build_case(target.target, rule, by_rule.get(rule, ()), accepted_by_rule.get(rule, ()), audit.fail_on)
        yield from (
            Case(target.target, skipped_rule.rule, CaseOutcome.SKIPPED, skipped_rule.reason)
            for skipped_rule in target.skipped
        )


def _build_case(
    target: str, rule: str, problems: Sequence[Problem], accepted: Sequence[Accepted], fail_on: Severity
) -> Case:
    """Return the test case of a rule. Problems below `fail_on` are in its text, but do not make the case fail."""
    case = junit_cases.build_rule_case(target, rule, problems, fail_on)
    accepted_lines = (f"accepted: {junit_cases.describe_finding(entry.finding)}: {entry.reason}" for entry in accepted)
    return replace(case, text=(*case.text, *accepted_lines))


def _build_table(findings: Iterable[Finding]) -> Table:
    """Return a table with a row for each finding. Without source lines, only programs get the column `place`."""
    names = ("target", "severity", "rule", "section", "fqn", "message", "help", "place")
    findings = tuple(findings)
    has_lines = any(finding.origin is not UNSET for finding in findings)
    details = ("section", "fqn") if has_lines else ("section", "fqn", "place")
    columns = tuple(report.ReportColumn(name, detail=name in details) for name in names)
    rows = tuple(
        (
            finding.target,
            finding.severity.value,
            finding.rule,
            finding.section or None,
            finding.fqn,
            finding.message,
            finding.help,
            location.format_place(finding),
        )
        for finding in findings
    )
    return Table(columns, rows, has_findings=False)


def _sort_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Sort the findings: the worst first, then by rule, then in the order of the run."""
    first = {finding.rule: n for n, finding in reversed(list(enumerate(findings)))}
    return sorted(findings, key=lambda finding: (-finding.severity.rank, first[finding.rule]))


def _build_page(audit: Audit, problems: tuple[Problem, ...], view: View) -> Page:
    verdict = _format_verdict(audit, problems, "" if view.verbose else " (-v shows why)")
    not_run = [
        Line((rule,), reason, "bad")
        for rule, separator, reason in (text.partition(": ") for text in audit.inconclusive)
        if separator
    ]
    outcomes = [
        *_list_unread_targets(audit),
        *not_run,
        *_list_empty_targets(audit),
        *_list_accepted_findings(audit, view),
        *(_list_skipped_rules(audit) if view.verbose else ()),
    ]
    clean = _format_clean_targets(audit)
    is_single = len(audit.targets) == 1
    groups = () if is_single else _group_by_target(audit.targets, view, audit.plugin_rules)
    return Page(
        subtitle="; ".join(filter(None, (_format_subtitle(audit), clean))),
        columns=(report.ReportColumn("finding"),),
        groups=tuple(groups),
        totals=(*(f"{line.cells[0]}: {line.remark}" for line in outcomes), *filter(None, [clean]), verdict),
        problems=problems if is_single else (),
        failing_problems=lambda: _list_failing_problems(audit),
        verdict=verdict,
        outcomes=Group("other results", ", ".join(_format_others(audit)) or "rules that did not run", tuple(outcomes))
        if outcomes
        else None,
    )


def _format_subtitle(audit: Audit) -> str:
    audited_targets = [target for target in audit.checked_targets if target.status is TargetStatus.AUDITED]
    tensors, size = sum(target.tensors for target in audited_targets), sum(target.bytes for target in audited_targets)
    formats = ", ".join(dict.fromkeys(target.format or "" for target in audited_targets))
    if not audited_targets:
        return ""
    return f"{formats}, {plural(tensors, 'tensor')}, {format_size(size)}"


def _group_problems(audit: Audit, findings: Collection[Finding]) -> tuple[Problem, ...]:
    """Group the given findings of an audit into problems, target by target."""
    problems: list[Problem] = []
    selected_ids = set(map(id, findings))
    for target in audit.targets:
        findings_of_target = [finding for finding in _sort_findings(target.findings) if id(finding) in selected_ids]
        problems += group_findings(findings_of_target, target.unregistered, audit.plugin_rules)
    return tuple(problems)


def _list_failing_problems(audit: Audit) -> tuple[Problem, ...]:
    """Return the problems that set exit status 1. In a run with several targets, a message begins with its target."""
    problems = _group_problems(audit, audit.failing)
    if len(audit.targets) == 1:
        return problems
    return tuple(replace(problem, message=f"{problem.target}: {problem.message}") for problem in problems)


# The human-readable page: the problems of a single target, or a group for each target.


def _group_by_target(targets: Sequence[TargetResult], view: View, plugin_rules: Sequence[Rule]) -> Iterator[Group]:
    """Yield a group for each target that has findings. Targets with equal findings share a group."""
    alike: dict[tuple[object, ...], list[TargetResult]] = {}
    for n, target in enumerate(targets):
        content = tuple(
            (finding.rule, finding.severity, finding.message, finding.help)
            for finding in _sort_findings(target.findings)
        )
        if content:
            alike.setdefault((content, n) if view.unfold else (content,), []).append(target)
    for same_targets in alike.values():
        findings, rows = _sort_findings(same_targets[0].findings), same_targets[0].unregistered
        problems = group_findings(findings, rows, plugin_rules)
        heading, summary = same_targets[0].target, _summarize_target(same_targets[0], problems)
        if len(same_targets) > 1:
            other_targets = join_names(
                [truncate_middle(target.target, MAX_TARGET_CHARACTERS) for target in same_targets[1:]],
                MAX_LISTED_TARGETS,
            )
            summary = f"and {len(same_targets) - 1:,} more, each with the same {summary}: {other_targets}"
        hidden_count = 0 if view.unfold else max(0, len(problems) - MAX_GROUP_PROBLEMS)
        count_lines = (
            (Line((f"… and {plural(hidden_count, 'problem')} more (--all)",), mood="dim"),) if hidden_count else ()
        )
        yield Group(heading, summary, count_lines, problems[: len(problems) - hidden_count])


def _summarize_target(target: TargetResult, problems: Sequence[Problem]) -> str:
    """Format `1 error, 2 warnings`. Return `failed` if all findings repeat the reason why the target's audit failed."""
    is_repeated = target.status is TargetStatus.FAILED and all(
        any(trouble.is_reported_by(finding) for trouble in _list_troubles([target])) for finding in target.findings
    )
    return TargetStatus.FAILED.value if is_repeated else format_severities(problems)


# Lines besides the findings, so that nothing is omitted silently.


def _list_unread_targets(audit: Audit) -> Iterator[Line]:
    """Yield lines for the failed and skipped targets. Targets with the same reason share a line."""
    alike: dict[tuple[TargetStatus, str, str], list[str]] = {}
    for target in audit.targets:
        if target.status is not TargetStatus.AUDITED:
            has_own_reason = target.status is TargetStatus.FAILED and target.own_reason != target.reason
            alike.setdefault(
                (target.status, target.own_reason or "", target.target if has_own_reason else ""), []
            ).append(target.target)
    for (status, reason, _), targets in sorted(alike.items(), key=lambda group: group[0][0] is TargetStatus.SKIPPED):
        if status is TargetStatus.FAILED:
            rule = _find_rule_with_reason(audit, targets, reason)
            yield Line((f"failed: {join_names(targets)}",), f"see {rule}" if rule else reason, "bad")
        else:
            yield Line(
                (f"{len(targets):,} skipped: {join_names(targets)}",), _format_reason(reason, len(targets)), "dim"
            )


def _find_rule_with_reason(audit: Audit, targets: Sequence[str], reason: str) -> str | None:
    """Return the rule of the first finding that is about one of `targets` and contains `reason`, or None."""
    findings = (finding for target in audit.targets if target.target in targets for finding in target.findings)
    return next((f.rule for f in findings if reason and Trouble(f.target, reason).is_reported_by(f)), None)


def _format_reason(reason: str, count: int) -> str:
    return f"each {reason}" if count > 1 and reason.startswith(("is ", "contains ", "lies ")) else reason


def _list_empty_targets(audit: Audit) -> Iterator[Line]:
    """Yield a line that names the audited targets without tensors, because only their loading was checked."""
    targets = [
        target.target for target in audit.targets if target.status is TargetStatus.AUDITED and not target.tensors
    ]
    if targets:
        has = "has" if len(targets) == 1 else "have"
        yield Line((f"{plural(len(targets), 'target')} {has} no tensors",), join_names(targets), "dim")


def _format_clean_targets(audit: Audit) -> str:
    """Format the audited targets without a finding: `clean: a.pt, b.pt`. Return "" if all or none of them are clean."""
    clean = [
        target.target
        for target in audit.targets
        if target.status is TargetStatus.AUDITED and target.tensors and not target.findings and not target.accepted
    ]
    return (
        f"clean: {join_names(clean, MAX_LISTED_TARGETS)}" if 0 < len(clean) < audit.count(TargetStatus.AUDITED) else ""
    )


def _list_accepted_findings(audit: Audit, view: View) -> Iterator[Line]:
    """Yield lines about accepted problems: one for each rule and reason or, with `-v`, one for each finding."""
    alike: Counter[tuple[str, str]] = Counter()
    for target in audit.targets:
        for entry in target.accepted if view.verbose else ():
            finding = entry.finding
            line = f"accepted: {finding.target}: {finding.rule}: {finding.message}"
            yield Line((line,), entry.reason, "dim")
        for reason, problems in group_accepted(target.accepted, target.unregistered).items():
            alike.update((problem.rule, reason) for problem in problems)
    for (rule, reason), count in () if view.verbose else alike.items():
        yield Line((f"{plural(count, 'problem')} accepted ({rule})",), reason, "dim")


def _list_skipped_rules(audit: Audit) -> Iterator[Line]:
    """Yield a line for each reason why rules were skipped. Name the targets if the rules ran on other targets.

    Rules about code run on the class of --model, and all other rules run on the targets checked against the class. So a
    rule that did not run on a target is not listed if it ran on the class.
    """
    ran_on_class = {rule for target in audit.targets if target.target == audit.model for rule in target.ran}
    targets_of: dict[str, dict[str, list[str]]] = {}
    for target in audit.checked_targets:
        for skipped_rule in target.skipped:
            if target.target == audit.model or skipped_rule.rule not in ran_on_class:
                targets_of.setdefault(skipped_rule.reason, {}).setdefault(skipped_rule.rule, []).append(target.target)
    reasons = Counter((*audit.ran, *(rule for rules in targets_of.values() for rule in rules)))
    for reason, rules in targets_of.items():
        by_targets: dict[str, list[str]] = {}
        for rule, targets in rules.items():
            target_text = targets[0] if len(targets) == 1 else plural(len(targets), "target")
            by_targets.setdefault(f" on {target_text}" if reasons[rule] > 1 else "", []).append(rule)
        for target_text, names in by_targets.items():
            yield Line((f"not run{target_text}: {', '.join(names)}",), reason, "dim")


def _format_others(audit: Audit) -> list[str]:
    """Format counts such as `1 failed`, `2 skipped`, `3 accepted`. An unchecked target does not count as skipped."""
    skipped_count = sum(target.status is TargetStatus.SKIPPED and not target.not_checked for target in audit.targets)
    counts = {TargetStatus.FAILED: audit.count(TargetStatus.FAILED), TargetStatus.SKIPPED: skipped_count}
    parts = [f"{count:,} {status.value}" for status, count in counts.items() if count]
    if audit.not_checked:
        parts.append(f"not checked: {describe_not_checked(audit.not_checked)}")
    accepted_count = _count_accepted(audit)
    return [*parts, f"{accepted_count:,} accepted"] if accepted_count else parts


def _format_lock_count(audit: Audit) -> list[str]:
    """Format `all 10 tensors match the lock m.lock.json`. Return [] if no tensor was compared with a lock."""
    count = audit.lock_count
    if not count.compared or audit.lock_file is None:
        return []
    some = f"{count.matching:,} of " if count.matching < count.compared else "all " if count.compared > 1 else ""
    verb = "matches" if count.compared == 1 else "match"
    return [f"{some}{plural(count.compared, 'tensor')} {verb} the lock {audit.lock_file}"]


def _count_targets_and_class(audit: Audit, targets: Collection[TargetResult]) -> str:
    """Format `2 targets`, `1 target and the class`, or `the class`. The class of --model is not a target."""
    checked_targets = [target for target in audit.checked_targets if target in targets]
    parts = [plural(len(checked_targets), "target")] if checked_targets else []
    return " and ".join([*parts, "the class"] if len(checked_targets) < len(targets) else parts)


def _format_verdict(audit: Audit, problems: Collection[Problem], hint: str) -> str:
    """Summarize the run in a line.

    `3 audited: 1 error in 1 target; 1 failed; not checked: 2 files (text file); 31 rules ran, 12 skipped`. Findings of
    failed and skipped targets are counted too, but not a finding that only repeats the reason of a failure. The `hint`
    follows the number of skipped rules.
    """
    failures = [trouble for trouble in _list_troubles(audit.targets) if trouble.severity is Severity.ERROR]
    repeated_ids = {id(f) for f in audit.findings if any(failure.is_reported_by(f) for failure in failures)}
    problems = [problem for problem in problems if any(id(f) not in repeated_ids for f in problem.findings)]
    with_findings = [target for target in audit.targets if any(id(f) not in repeated_ids for f in target.findings)]
    audited_count = sum(target.status is TargetStatus.AUDITED for target in audit.checked_targets)
    against = f" against {audit.model}" if len(audit.checked_targets) < len(audit.targets) else ""
    counts_text = format_counts(problems, audit.not_checked) if audit.ran or audit.findings else "no rule ran"
    parts = [f"{audited_count:,} audited{against}: {counts_text}"]
    if not audited_count:
        parts = [f"nothing audited: {counts_text}" if problems else "nothing audited"]
    if with_findings and len(audit.targets) > 1:
        parts[0] += f" in {_count_targets_and_class(audit, with_findings)}"
    parts += [*_format_lock_count(audit), *_format_others(audit)]
    not_run = len({skipped_rule.rule for skipped_rule in audit.skipped_rules} - set(audit.ran))
    disabled = f", {audit.disabled_rules:,} disabled" if audit.disabled_rules else ""
    parts.append(
        f"{plural(len(audit.ran), 'rule')} ran" + (f", {not_run:,} skipped{hint}" if not_run else "") + disabled
    )
    return "; ".join(filter(None, (*parts, describe_configuration(audit.configuration))))


def _list_rule_texts(
    executed_rules: Iterable[str], findings: Iterable[Finding | Problem], plugin_rules: Sequence[Rule] = ()
) -> tuple[RuleText, ...]:
    """Return texts about the rules that ran in an audit, and about the rules of `findings`."""
    findings = tuple(findings)
    rule_names = set(executed_rules) | {finding.rule for finding in findings}
    audit_rules = tuple(rule_texts.describe_rule(rule) for rule in (*RULES, *plugin_rules) if rule.name in rule_names)
    names = {rule.name for rule in audit_rules}
    return (*audit_rules, *rule_texts.list_rule_texts(finding for finding in findings if finding.rule not in names))
