"""What is told beside the findings of an audit, being of no one target: nothing that was asked for is undone unsaid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from statecli.auditing import baseline, config, held
from statecli.auditing.baseline import Baseline
from statecli.auditing.result import Audit
from statecli.auditing.run import Request
from statecli.finding import Finding, Severity
from statecli.report.text import names, plural
from statecli.rules import RULES

#: Each key of a policy, and the rules that judge by it.
JUDGES = {
    "dtype": ("unexpected-dtype", "overflows-dtype"),
    "device": ("accelerator-device",),
    "frozen": ("trainable-mismatch",),
    "trainable": ("trainable-mismatch",),
    "max-bytes": ("too-large",),
    "require-metadata": ("missing-metadata",),
    "must-change": ("unchanged-tensor",),
    "must-not-change": ("changed-tensor",),
}


def told(found: Audit, request: Request) -> list[Finding]:
    """Notes of what the policy asks for and no rule could judge, and of entries of the baseline that accept nothing."""
    known = request.baseline
    notes = list(_unjudged(found, request))
    return notes if known is None else [*notes, *_gone(known, request), *_unknown(known)]


def _note(rule: str, message: str, target: str) -> Finding:
    return Finding(rule, Severity.NOTE, message, target)


def _unjudged(found: Audit, request: Request) -> Iterator[Finding]:
    """A line a rule and reason; of a class that others are held to nothing was asked."""
    where: dict[tuple[str, str], list[str]] = {}
    for target in found.targets:
        if target.target == request.model and request.model not in request.targets:
            continue
        for one in target.skipped:
            where.setdefault((one.rule, one.reason), []).append(target.target)
    policy = zip(request.policy.__struct_encode_fields__, request.policy.__struct_fields__, strict=True)
    asked = [key for key, field in policy if getattr(request.policy, field) not in (None, ())]
    for (rule, reason), targets in where.items():
        keys = [f"policy.{key}" for key in asked if rule in JUDGES.get(key, ())]
        # That what is no model is not judged as one is told where nothing else was.
        if keys and not (reason in held.WHYS and rule in found.ran):
            message = f"{' and '.join(keys)}: {rule} did not run on {names(targets)}: {reason}"
            yield _note("policy-not-judged", message, targets[0])


def _gone(known: Baseline, request: Request) -> Iterator[Finding]:
    for target, count in Counter(one.target for one in baseline.gone(known, request.targets)).items():
        accepted = f"the baseline accepts {plural(count, 'finding')} of it, which --write-baseline drops"
        yield _note(baseline.FIXED, f"{target}: is no longer there; {accepted}", target)


def _unknown(known: Baseline) -> Iterator[Finding]:
    """Rules that there are not: a typo, or the rule of another version."""
    rules = [rule.name for rule in RULES]
    for name, count in Counter(one.rule for one in known.findings if one.rule not in rules).items():
        near = config.near(name, rules)
        accepted = f"the baseline accepts {plural(count, 'finding')} of {name!r}"
        yield _note("baseline-unknown", f"{accepted}, and there is no such rule{near}", "")
