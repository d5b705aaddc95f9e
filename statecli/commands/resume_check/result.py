"""Result of `statecli resume-check`: a row for each kind of state, and findings."""

from __future__ import annotations

from enum import Enum

import msgspec

from statecli.core.finding import Finding
from statecli.core.model_state import Oddity


class State(str, Enum):
    """Kinds of state that a training resumes from, in the order of the report."""

    STEP = "step"
    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SCALER = "scaler"
    AVERAGE = "average"
    DATA = "data"
    RANDOM = "random"


class ResumeAnswer(str, Enum):
    """Whether a resumed training continues as before: `equal`, `different`, or `inconclusive` if unknown."""

    EQUAL = "equal"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"


class StateRow(msgspec.Struct, frozen=True):
    """Whether the script resumed a kind of state, judged at the first step after the resume.

    Attributes:
        resumed: Whether the state equals the state of the uninterrupted training; None if the script has no such state.
        evidence: The difference.
    """

    state: State
    resumed: bool | None
    evidence: str = ""


class ResumeCheck(msgspec.Struct, frozen=True):
    """Result of `statecli resume-check`.

    Attributes:
        steps: Optimizer steps of the uninterrupted training.
        saved_at: Step of the checkpoint that the resumed training starts from.
        reason: Why the answer is inconclusive.
    """

    target: str
    steps: int
    saved_at: int
    answer: ResumeAnswer
    states: tuple[StateRow, ...] = ()
    reason: str | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[Oddity, ...] = ()
