"""What each rule is, in words: the explanations of `audit`'s own, and a line for what the other commands find."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from statecli.core.finding import Finding
from statecli.report import RuleText

if TYPE_CHECKING:
    from statecli.rules.rule import Rule

#: What `inspect`, `diff` and `verify` say against a target, and an audit of a target that it could not judge.
TEXTS = {
    "added": "A tensor is new.",
    "removed": "A tensor is gone.",
    "changed": "A tensor is not what it was: its values, dtype, shape, kind or device.",
    "renamed": "A tensor has another name.",
    "metadata": "A setting beside the tensors differs.",
    "outside-only": "Something changed that was not to change.",
    "frozen-changed": "What is frozen has changed.",
    "unchanged": "What was to change did not.",
    "load-refused": "The class refuses to load the checkpoint.",
    "missing-entry": "The class asks for an entry that the checkpoint lacks.",
    "unexpected-entry": "The checkpoint has an entry that the class does not take.",
    "shape-mismatch": "The class registers a tensor of another shape than the checkpoint has.",
    "wrapper-prefix": "Every name begins with the name of a wrapper.",
    "left-behind": "A tensor stays where it is when its model moves.",
    "cannot-tell": "Whether a tensor follows a move cannot be told.",
    "bytes-differ": "The bytes that arrived on the device are not those of the file.",
    "stale-view": "A view still shows the memory that its base had before the move.",
    "broken-tie": "Two tensors that shared their memory no longer do.",
    "changed-by-move": "A tensor has other values after it was moved and moved back.",
    "keeps-dtype": "A tensor keeps its dtype when its model is cast.",
    "imaginary-lost": "A cast drops the imaginary part of a complex tensor.",
    "integer-cast": "A cast makes an integer tensor a floating-point one.",
    "integer-changed": "A cast changes the values of an integer tensor.",
    "lost-by-saving": "What is saved does not restore a tensor.",
    "changed-by-saving": "A tensor has other values after it was saved and loaded.",
    "changed-by-safetensors": "A tensor has other values after it was saved as safetensors and loaded.",
    "not-in-safetensors": "safetensors has no place for an entry of the state_dict.",
    "shared-in-safetensors": "safetensors refuses entries that share their memory.",
    "not-restored": "A saved entry is not restored when the model is loaded.",
    "not-loadable": "The model does not load what was saved of it.",
    "not-plain-data": "A saved entry is no plain data: only unpickling code loads it.",
    "not-copyable": "The model cannot be copied or pickled.",
    "non-leaf-attribute": "An attribute is the result of an operation, and no copy can be made of it.",
    "shared-with-copy": "A copy of the model shares a tensor with it.",
    "lost-by-copy": "A copy of the model lacks a tensor.",
    "changed-by-copy": "A copy of the model has other values.",
    "no-gradient": "A trainable parameter gets no gradient.",
    "zero-gradient": "A trainable parameter gets a gradient of zeros.",
    "non-finite-gradient": "A parameter's gradient is NaN or infinite.",
    "not-in-optimizer": "No optimizer that is given the model's parameters trains the tensor.",
    "not-updated": "A step of the optimizer leaves a trainable parameter as it was.",
    "device-mismatch": "forward meets tensors of several devices.",
    "internal-error": "A rule failed itself: what it would have found is not known.",
}


def of(findings: Iterable[Finding]) -> tuple[RuleText, ...]:
    """What the rules of these findings are, each once."""
    # An inspection does without the rules of an audit, and starts the sooner.
    from statecli.rules import RULES

    own = {rule.name: rule for rule in RULES}
    texts: dict[str, RuleText] = {}
    for finding in findings:
        known = TEXTS.get(finding.rule)
        if known is None and finding.rule in own:
            texts.setdefault(finding.rule, text(own[finding.rule]))
        summary = known or finding.rule.replace("-", " ")
        texts.setdefault(finding.rule, RuleText(finding.rule, finding.severity, summary))
    return tuple(texts.values())


def text(rule: Rule) -> RuleText:
    """A rule of `audit`, as outputs have it."""
    return RuleText(rule.name, rule.severity, rule.summary, rule.explanation, rule.about)


def of_audit(tried: Iterable[str], findings: Iterable[Finding]) -> tuple[RuleText, ...]:
    """The rules of an audit: those that were tried, and what else there are findings of."""
    from statecli.rules import RULES

    wanted = set(tried) | {finding.rule for finding in findings}
    known = tuple(text(rule) for rule in RULES if rule.name in wanted)
    names = {rule.name for rule in known}
    return (*known, *of(finding for finding in findings if finding.rule not in names and finding.rule in wanted))
