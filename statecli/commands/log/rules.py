"""Rules of `log`: values that became NaN or infinite, and modules that stopped changing."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

BECAME_NAN = Rule(
    "became-nan",
    "log",
    ("log",),
    Severity.WARNING,
    summary="A tensor has NaN or an infinity for the first time in the run.",
    why="the training diverged between the previous checkpoint and this checkpoint. Later checkpoints inherit the NaN.",
    example="`layers.2.weight` is finite at step 900 and has NaN at step 1000.",
    fix="""resume from the previous checkpoint, with a smaller learning rate, gradient clipping or another loss scale.
Use `--fail-on warning` to exit with status 1.""",
)
STOPPED = Rule(
    "stopped-moving",
    "log",
    ("log",),
    Severity.NOTE,
    summary="A module changed between earlier checkpoints, but is identical bit for bit in all later checkpoints.",
    why="the module is no longer trained: it was frozen, lost its gradient, or its learning rate became zero.",
    example="`layers.1` changed until step 600; the checkpoints from 700 to 1200 have the same bits there.",
    fix="""ignore the note if the module was frozen on purpose; otherwise check `requires_grad` and the groups of the
optimizer.""",
)

RULES = (BECAME_NAN, STOPPED)
