"""The rules of `audit`, one module a subject. A rule is in RULES or does not exist: a test holds the folder to it."""

from __future__ import annotations

from statecli.rules import (
    against,
    contents,
    gradients,
    layout,
    lock,
    names,
    pickles,
    placement,
    policy,
    registration,
    siblings,
    storage,
    values,
    weights,
)
from statecli.rules.rule import Rule

#: In the order in which they are listed.
RULES: tuple[Rule, ...] = (
    *registration.RULES,
    *against.RULES,
    *gradients.RULES,
    *policy.RULES,
    *values.RULES,
    *weights.RULES,
    *siblings.RULES,
    *placement.RULES,
    *storage.RULES,
    *contents.RULES,
    *layout.RULES,
    *names.RULES,
    *pickles.RULES,
    *lock.RULES,
)
