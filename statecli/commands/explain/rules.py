"""Rules of `explain`. The rule `does-not-load` is also reported by `diff` of a class and a checkpoint."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

DOES_NOT_LOAD = Rule(
    "does-not-load",
    "explain",
    ("explain",),
    Severity.ERROR,
    summary="The class does not load the checkpoint by a strict `load_state_dict`.",
    why="""`load_state_dict` lists each missing and unexpected key, although all of them often have one cause: a prefix,
other names, or another number of classes.""",
    example="all 39 names of the checkpoint have the prefix `module.` of DistributedDataParallel.",
    fix="""load the checkpoint with the printed code. If the code is not tested or not certain, compare the results of
the loaded model with known results.""",
)
OTHER_WAY_TO_LOAD = Rule(
    "other-way-to-load",
    "explain",
    ("explain",),
    Severity.NOTE,
    summary="The checkpoint can also be loaded in another way: into another class, or from another key of the file.",
    why="you can change the arguments of the class, or tensors of another shape can keep their initial values.",
    example="`Net(num_classes=1000)` loads the whole checkpoint; `Net()` loads all tensors except the head.",
    fix="choose the code for your purpose: the saved model, or a new head to train.",
)
RULES = (DOES_NOT_LOAD, OTHER_WAY_TO_LOAD)
