"""Rule of `bisect` for a condition that is false at the last checkpoint."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

NEVER_HOLDS = Rule(
    "never-holds",
    "bisect",
    ("bisect",),
    Severity.ERROR,
    summary="The condition of `--condition` is false at the last checkpoint.",
    why="""`bisect` assumes that a condition stays true after it becomes true. If the condition is false at the last
checkpoint, bisect concludes that the condition was never true. The exit status is 1, as for grep without a match.""",
    example="`statecli bisect runs/ --condition nan`, and the last checkpoint has no NaN.",
    fix="check the condition. If the condition can become false again, read all checkpoints with `statecli log`.",
)

RULES = (NEVER_HOLDS,)
