"""The report of `statecli audit`: what was found, target by target, and the line that says how many were audited."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from statecli import report
from statecli.commands.audit.result import Audit
from statecli.core.escaping import truncate_middle
from statecli.core.finding import Finding, Severity
from statecli.core.units import describe_configuration, describe_not_checked, format_size, join_names, plural
from statecli.report import (
    Case,
    Group,
    Line,
    Outcome,
    Page,
    Report,
    Table,
    Trouble,
    View,
    documents,
    fold,
    rule_texts,
    test_cases,
)
from statecli.targets import location
from statecli.targets.outcome import Status, Target

_MOODS = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: "dim"}
#: Lines of one group that are shown, unless each is asked for.
MANY = 50
#: Targets of which the same is said that are named, and characters of such a name: what names them holds all of these.
ALIKE, LONGEST = 10, 180
#: Worst first.
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def untold(found: Audit, select: Collection[str], *, allow_empty: bool) -> tuple[str, ...]:
    """Why a run ends 2 that found nothing and in which no target failed: what was asked for was not judged."""
    if found.failing or found.count(Status.FAILED):
        return ()
    if not found.count(Status.AUDITED):
        return () if allow_empty else ("nothing was audited",)
    unheard = (f"{one.rule} did not run: {one.reason}" for one in found.unheard(select))
    return (*unheard, *filter(None, (found.unheld,)))


def of_audit(found: Audit, view: View, untold: Sequence[str] = (), told: Sequence[Finding] = ()) -> Report:
    """Everything `audit` has to say; `untold` is why it ends 2, where no target says so, `told` what is of no one
    target.
    """
    notes = [note for target in found.targets for note in target.notes] if view.verbose else []
    return Report(
        title=found.targets[0].target if len(found.targets) == 1 else plural(len(found.targets), "target"),
        document=lambda: documents.of_audit(found, _verdict(found), told),
        table=lambda: _flat(found),
        page=lambda: _page(found, view, untold),
        findings=found.findings,
        notes=tuple(notes),
        in_rows=frozenset(finding.rule for finding in found.findings),
        failing=found.failing,
        whole=view.unfold,
        several=len(found.targets) > 1,
        rules=lambda: rule_texts.of_audit(found.ran, _everything(found)),
        cases=lambda: (*_cases(found), *(Case(_first(found), "audit", Outcome.ERROR, one) for one in untold)),
        accepted=tuple((one.finding, one.reason) for target in found.targets for one in target.accepted),
        troubles=(*_troubles(found), *(Trouble(_first(found), one) for one in untold)),
        not_checked=found.not_checked,
        configuration=found.configuration,
    )


def _first(found: Audit) -> str:
    """The target that stands for a run of which nothing is known: one that was audited, if any was."""
    return max(found.targets, key=lambda one: one.status is Status.AUDITED).target


def _everything(found: Audit) -> list[Finding]:
    """Accepted findings too."""
    return [*found.findings, *(one.finding for target in found.targets for one in target.accepted)]


def _troubles(found: Audit) -> tuple[Trouble, ...]:
    """A target that failed is an error, one that was skipped a note."""
    bad = {Status.FAILED: Severity.ERROR, Status.SKIPPED: Severity.NOTE}
    return tuple(
        Trouble(one.target, one.reason or one.status.value, bad[one.status])
        for one in found.targets
        if one.status in bad
    )


def _cases(found: Audit) -> Iterator[Case]:
    """A case a target and rule, in the order in which they ran; one for a target that was not audited."""
    for target in found.targets:
        if target.status is not Status.AUDITED:
            outcome = Outcome.ERROR if target.status is Status.FAILED else Outcome.SKIPPED
            yield Case(target.target, "audit", outcome, target.reason or "")
        by_rule: dict[str, list[Finding]] = {rule: [] for rule in target.ran}
        for finding in target.findings:
            by_rule.setdefault(finding.rule, []).append(finding)
        accepted: dict[str, list[str]] = {}
        for one in target.accepted:
            accepted.setdefault(one.finding.rule, []).append(f"accepted: {test_cases.told(one.finding)}: {one.reason}")
        for rule, several in by_rule.items():
            yield _case(target.target, rule, several, accepted.get(rule, []), found.fail_on)
        yield from (Case(target.target, one.rule, Outcome.SKIPPED, one.reason) for one in target.skipped)


def _case(target: str, rule: str, found: Sequence[Finding], accepted: Sequence[str], fail_on: Severity) -> Case:
    """One that findings milder than `fail_on` do not fail tells of them all the same."""
    failing = [one for one in found if one.severity.rank >= fail_on.rank]
    mild = [test_cases.told(one) for one in found if one.severity.rank < fail_on.rank]
    case = test_cases.failed(target, rule, failing) if failing else Case(target, rule, Outcome.PASSED)
    return replace(case, text=(*case.text, *mild, *accepted))


def _flat(found: Audit) -> Table:
    names = ("target", "severity", "rule", "section", "fqn", "message", "help", "place")
    columns = tuple(report.Column(name, detail=name in ("section", "fqn", "place")) for name in names)
    rows = tuple(
        (
            one.target,
            one.severity.value,
            one.rule,
            one.section or None,
            one.fqn,
            one.message,
            one.help,
            location.shown(one),
        )
        for target in found.targets
        for one in _sorted(target.findings)
    )
    return Table(columns, rows, told=False)


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    """Worst first, those of one rule together, else as they were found."""
    first = {finding.rule: n for n, finding in reversed(list(enumerate(findings)))}
    return sorted(findings, key=lambda one: (-one.severity.rank, first[one.rule]))


def _page(found: Audit, view: View, untold: Sequence[str]) -> Page:
    verdict = _verdict(found)
    not_run = [Line((rule,), why, "bad") for rule, told, why in (one.partition(": ") for one in untold) if told]
    beside = [
        *_unread(found),
        *not_run,
        *_hollow(found),
        *_accepted(found, view),
        *(_unheard(found) if view.verbose else ()),
    ]
    groups = _by_rule(found.targets[0], view) if len(found.targets) == 1 else _by_target(found.targets, view)
    return Page(
        subtitle=_subtitle(found),
        columns=(report.Column("finding"),),
        groups=tuple(groups),
        totals=(*(f"{line.cells[0]}: {line.remark}" for line in beside), verdict),
        reasons=lambda: fold.findings(_named(found)),
        verdict=verdict,
        done=Group("beside the findings", ", ".join(_others(found)) or "rules that did not run", tuple(beside))
        if beside
        else None,
    )


def _subtitle(found: Audit) -> str:
    audited = [target for target in found.targets if target.status is Status.AUDITED]
    tensors, size = sum(target.tensors for target in audited), sum(target.bytes for target in audited)
    formats = ", ".join(dict.fromkeys(target.format or "" for target in audited))
    return f"{formats or 'nothing audited'}, {plural(tensors, 'tensor')}, {format_size(size)}"


def _named(found: Audit) -> tuple[Finding, ...]:
    """What makes it fail, behind the name of its target where there are several."""
    if len(found.targets) == 1:
        return found.failing
    return tuple(replace(one, message=f"{one.target}: {one.message}") for one in found.failing)


# For people: a group a rule of the only target, else a group a target.


def _by_rule(target: Target, view: View) -> Iterator[Group]:
    for (severity, rule), several in itertools.groupby(_sorted(target.findings), lambda one: (one.severity, one.rule)):
        found = list(several)
        helps = {one.help for one in found}
        shared = helps.pop() if len(helps) == 1 and len(found) > 1 else None
        summary = plural(len(found), "finding") + (f": {shared}" if shared else "")
        lines = [Line((one.message,), "" if shared else one.help or "", _MOODS[severity]) for one in found]
        yield Group(f"{severity.value}[{rule}]", summary, _shown(lines, view))


def _by_target(targets: Sequence[Target], view: View) -> Iterator[Group]:
    """Targets of which the same is said are one group, in the place of the first."""
    alike: dict[tuple[object, ...], list[Target]] = {}
    for n, target in enumerate(targets):
        said = tuple((one.rule, one.severity, one.message, one.help) for one in _sorted(target.findings))
        if said:
            alike.setdefault((said, n) if view.unfold else (said,), []).append(target)
    for same in alike.values():
        found = _sorted(same[0].findings)
        heading, each = same[0].target, counted(found)
        if len(same) > 1:
            others = join_names([truncate_middle(one.target, LONGEST) for one in same[1:]], ALIKE)
            each = f"and {len(same) - 1:,} more like it, each {each}: {others}"
        yield Group(heading, each, _shown([_line(one) for one in found], view))


def _line(one: Finding) -> Line:
    return Line((f"{one.severity.value}[{one.rule}]: {one.message}",), one.help or "", _MOODS[one.severity])


def _shown(lines: Sequence[Line], view: View) -> tuple[Line, ...]:
    """Repeated layers folded and no more than are read; what to do is said once of lines that follow one another."""
    if view.unfold:
        return tuple(lines)
    folded = fold.lines(lines) if len(lines) > fold.FEW_FINDINGS else list(lines)
    rest = len(folded) - MANY
    kept = folded if rest <= 0 else folded[:MANY]
    more = [Line((f"… and {plural(rest, 'line')} more (--all)",), mood="dim")] if rest > 0 else []
    after = [line.remark for line in kept[1:]] + [""]
    once = [
        replace(line, remark="" if line.remark == then else line.remark) for line, then in zip(kept, after, strict=True)
    ]
    return (*once, *more)


def counted(findings: Sequence[Finding]) -> str:
    """`1 error, 2 warnings`; `clean` where there is none."""
    counts = Counter(one.severity for one in findings)
    return ", ".join(plural(counts[one], one.value) for one in _ORDER if counts[one]) or "clean"


# What is said beside the findings: nothing is left out without a word.


def _unread(found: Audit) -> Iterator[Line]:
    """Each target that failed of itself; those that something beside them failed, or were skipped, by their reasons."""
    alike: dict[tuple[Status, str, str], list[str]] = {}
    for one in found.targets:
        if one.status is not Status.AUDITED:
            own = one.status is Status.FAILED and one.own_reason != one.reason
            alike.setdefault((one.status, one.own_reason or "", one.target if own else ""), []).append(one.target)
    for (status, reason, _), targets in sorted(alike.items(), key=lambda group: group[0][0] is Status.SKIPPED):
        if status is Status.FAILED:
            yield Line((f"failed: {join_names(targets)}",), reason, "bad")
        else:
            yield Line((f"{len(targets):,} skipped: {join_names(targets)}",), _of_each(reason, len(targets)), "dim")


def _of_each(reason: str, count: int) -> str:
    return f"each {reason}" if count > 1 and reason.startswith(("is ", "holds ", "lies ")) else reason


def _hollow(found: Audit) -> Iterator[Line]:
    """Name the targets that were audited and of which no tensor was read: only what loading them runs was checked."""
    hollow = [target.target for target in found.targets if target.status is Status.AUDITED and not target.tensors]
    if hollow:
        yield Line((f"no tensor was read of {plural(len(hollow), 'target')}",), join_names(hollow), "dim")


def _accepted(found: Audit, view: View) -> Iterator[Line]:
    """What is accepted, by rule and reason; each with -v."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for target in found.targets:
        for one in target.accepted:
            alike.setdefault((one.finding.rule, one.reason), []).append(one.finding)
    for (rule, reason), findings in alike.items():
        for finding in findings if view.verbose else ():
            yield Line((f"accepted: {finding.target}: {rule}: {finding.message}",), reason, "dim")
        if not view.verbose:
            yield Line((f"accepted: {plural(len(findings), 'finding')} of {rule}",), reason, "dim")


def _unheard(found: Audit) -> Iterator[Line]:
    """The rules that did not run, by their reasons; where others have another reason or ran, on how many targets."""
    alike: dict[str, Counter[str]] = {}
    for target in found.targets:
        for one in target.skipped:
            alike.setdefault(one.reason, Counter())[one.rule] += 1
    reasons = Counter((*found.ran, *(rule for unheard in alike.values() for rule in unheard)))
    for reason, unheard in alike.items():
        named = (
            f"{rule} (on {plural(count, 'target')})" if reasons[rule] > 1 else rule for rule, count in unheard.items()
        )
        yield Line((f"not run: {', '.join(named)}",), reason, "dim")


def _others(found: Audit) -> list[str]:
    """`1 failed`, `2 skipped`, `3 accepted`; skipped are those that were checked as a part of another target."""
    skipped = sum(one.status is Status.SKIPPED and not one.not_checked for one in found.targets)
    counts = {Status.FAILED: found.count(Status.FAILED), Status.SKIPPED: skipped}
    parts = [f"{count:,} {status.value}" for status, count in counts.items() if count]
    if found.not_checked:
        parts.append(f"not checked: {describe_not_checked(found.not_checked)}")
    accepted = sum(len(target.accepted) for target in found.targets)
    return [*parts, f"{accepted:,} accepted"] if accepted else parts


def _verdict(found: Audit) -> str:
    """`3 audited: 1 error in 1 target; 1 failed; not checked: 2 files (text file); 31 rules ran, 12 skipped`.

    What is found in targets that failed, or were skipped, is counted too.
    """
    bad = sum(bool(target.findings) for target in found.targets)
    said = counted(found.findings) if found.ran or found.findings else "no rule judged it"
    parts = [f"{found.count(Status.AUDITED):,} audited: {said}"]
    if not found.count(Status.AUDITED):
        parts = [f"nothing audited: {said}" if found.findings else "nothing audited"]
    if bad and len(found.targets) > 1:
        parts[0] += f" in {plural(bad, 'target')}"
    parts += _others(found)
    unheard = len({one.rule for one in found.skipped} - set(found.ran))
    disabled = f", {found.left_out:,} disabled" if found.left_out else ""
    parts.append(f"{plural(len(found.ran), 'rule')} ran" + (f", {unheard:,} skipped" if unheard else "") + disabled)
    return "; ".join(filter(None, (*parts, describe_configuration(found.configuration))))
