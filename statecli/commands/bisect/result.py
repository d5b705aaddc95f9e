"""Result of `statecli bisect`: the first checkpoint where the condition holds, and each checkpoint that was read."""

from __future__ import annotations

from enum import Enum

import msgspec

from statecli.commands.log.result import Step
from statecli.core.finding import Finding
from statecli.core.model_state import Oddity


class BisectAnswer(str, Enum):
    """Answer of the search for the first checkpoint.

    `found`: the first checkpoint where the condition holds is known; `never`: the condition is false at the last
    checkpoint; `inconclusive`: unreadable checkpoints leave the answer open.
    """

    FOUND = "found"
    NEVER = "never"
    INCONCLUSIVE = "inconclusive"


class Probe(msgspec.Struct, frozen=True):
    """A checkpoint read during the search.

    Attributes:
        holds: Whether the condition holds; None if undecided: then `error` is the reason.
        evidence: The observation: names of tensors, a cosine.
    """

    path: str
    step: Step | None
    holds: bool | None
    evidence: str = ""
    error: str | None = None


class Bisection(msgspec.Struct, frozen=True):
    """Result of `statecli bisect`.

    Attributes:
        condition: The condition as typed.
        checkpoints: Number of checkpoints of the run.
        first: The first checkpoint where the condition holds, as far as known.
        last_before: The last checkpoint before `first` where the condition does not hold, as far as known.
        between: Paths of unreadable checkpoints between `last_before` and `first`.
        probes: The read checkpoints, in the order of reading.
    """

    target: str
    condition: str
    answer: BisectAnswer
    checkpoints: int
    probes: tuple[Probe, ...]
    first: Probe | None = None
    last_before: Probe | None = None
    between: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[Oddity, ...] = ()
