"""Rule of `bisect`: the condition does not hold."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

NEVER_HOLDS = Rule(
    "never-holds",
    "bisect",
    ("bisect",),
    Severity.ERROR,
    summary="The condition of `--first` does not hold at the last checkpoint.",
    why="""`bisect` assumes that a condition stays true once it is true, so a condition that is false at the end
was never true. The exit status is 1, as that of grep without a match.""",
    example="`statecli bisect runs/ --first nan`, and the last checkpoint is finite.",
    fix="check the condition; if it may have become false again, look at every checkpoint with `statecli log`.",
)

RULES = (NEVER_HOLDS,)
