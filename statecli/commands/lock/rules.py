"""Rules for the notes of `lock`: tensors and targets that the lock file does not cover."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

NOTHING_TO_LOCK = Rule(
    "nothing-to-lock",
    "lock",
    ("lock",),
    Severity.NOTE,
    summary="A target has no tensor that can be locked, so it is not in the lock file.",
    why="`audit --lock` compares only tensors in the lock file, so any later version of this target passes.",
    example="`statecli lock runs/` where one checkpoint contains only the state of callbacks.",
    fix="if the target should contain a model, save the model again. Otherwise leave the target out of the "
    "command to avoid the note.",
)
CALLBACKS_NOT_LOCKED = Rule(
    "callbacks-not-locked",
    "lock",
    ("lock",),
    Severity.NOTE,
    summary="Tensors that callbacks keep in a checkpoint are not in the lock file.",
    why="""these tensors record the training, such as the best score; they are not weights. With these tensors
in the lock file, `audit --lock` would report each new epoch.""",
    example="a Lightning checkpoint whose `ModelCheckpoint` keeps `best_model_score` as a tensor.",
    fix="ignore the note. If one of these tensors is a weight, save this tensor in the state_dict of the model.",
)
VALUES_NOT_LOCKED = Rule(
    "values-not-locked",
    "lock",
    ("lock", "audit"),
    Severity.WARNING,
    summary="The lock has no digest of the values of some tensors, so any values pass.",
    why="""a lock without value digests covers only names, dtypes and shapes. A checkpoint with other weights passes
such a lock.""",
    example="the lock was created from a class (`statecli lock net.py:Net`), whose initial weights are random; "
    "or somebody\nremoved the digests from the file.",
    fix="run `statecli lock` on the checkpoint; ignore this rule if the lock should cover only shapes.",
    cases={"on writing": Severity.NOTE},
)

RULES = (NOTHING_TO_LOCK, CALLBACKS_NOT_LOCKED, VALUES_NOT_LOCKED)
