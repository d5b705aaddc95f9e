"""Rules of `resume-check`: a state that a resumed training lacks, and a difference without a known cause."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

NOT_RESUMED = Rule(
    "not-resumed",
    "resume-check",
    ("resume-check",),
    Severity.ERROR,
    summary="A training script does not save or does not load a part of its state.",
    why="""the resumed training continues with a wrong state, such as optimizer moments of zero, the initial learning
rate, batches that were already used, or other random numbers. The loss often looks plausible.""",
    example="a script with a learning rate scheduler saves only the model and the optimizer.",
    fix="save the `state_dict()` of the named object in each checkpoint, and load it before the first step.",
)
RESUMED_DIFFERENTLY = Rule(
    "resumed-differently",
    "resume-check",
    ("resume-check",),
    Severity.ERROR,
    summary="A resumed training computes other values, and statecli finds no cause.",
    why="""the last checkpoints of both trainings differ, although model, optimizer, scheduler, scaler, averages, data
and random numbers were equal at the first step. The script keeps some other state.""",
    example="a curriculum that depends on a list of losses, which no checkpoint contains.",
    fix="save and load the variables that the training loop carries from one step to the next.",
)

RULES = (NOT_RESUMED, RESUMED_DIFFERENTLY)
