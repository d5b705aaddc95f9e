"""Rules of `fix`: an edit that is shown or written, and a defect without an edit."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

PROPOSED_FIX = Rule(
    "proposed-fix",
    "fix",
    ("fix",),
    Severity.WARNING,
    summary="An edit of the source repairs a defect, and is not written yet.",
    why="""the proofs of `verify` fail for the named tensors, and pass with the edit on a copy of the file. All other
proofs have the same results, and the entries of older state_dicts load.""",
    example="""`self.table = torch.arange(8)` becomes
`self.register_buffer("table", torch.arange(8), persistent=False)`.""",
    fix="read the diff, and write the edit with `statecli fix net.py:Net --write`.",
)
WRITTEN_FIX = Rule(
    "written-fix",
    "fix",
    ("fix",),
    Severity.NOTE,
    summary="An edit of the source repaired a defect, and was written.",
    why="""the proofs of `verify` pass with the edit. A checkpoint of the old class has no entry for a tensor that only
the new class saves.""",
    example="`self.blocks = [nn.Linear(4, 4)]` became `self.blocks = nn.ModuleList([nn.Linear(4, 4)])`.",
    fix="""review the change with `git diff`. If the edit adds names to the state_dict, load older checkpoints with
`strict=False`.""",
)
NOT_FIXED = Rule(
    "not-fixed",
    "fix",
    ("fix",),
    Severity.WARNING,
    summary="A proof of `verify` fails, and no edit repairs the defect.",
    why="""no edit is known, or `verify` did not prove the edit. An edit without a proof could change what the model
computes, so the file keeps its bytes.""",
    example="a layer is not used in forward: its parameters get no gradient.",
    fix="change the line by hand: `statecli verify` prints the problem and the remedy.",
)
RULES = (PROPOSED_FIX, WRITTEN_FIX, NOT_FIXED)
