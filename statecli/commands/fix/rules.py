"""Rules of `fix`: an edit that is shown or written, and a defect without an edit."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

PROPOSED_FIX = Rule(
    "proposed-fix",
    "fix",
    ("fix",),
    Severity.WARNING,
    summary="A proved edit repairs a defect, but is not written to the file yet.",
    why="""the proofs of `verify` fail for the named tensors, and pass in a copy of the file with the edit. No other
proof gets worse, and each entry of an older state_dict loads.""",
    example="""`self.table = torch.arange(8)` becomes
`self.register_buffer("table", torch.arange(8), persistent=False)`.""",
    fix="read the diff, and write the edit with `statecli fix net.py:Net --write`.",
)
WRITTEN_FIX = Rule(
    "written-fix",
    "fix",
    ("fix",),
    Severity.NOTE,
    summary="A proved edit repaired a defect, and was written to the file.",
    why="""the proofs of `verify` pass with the edit. If the edited class saves more tensors than before, older
checkpoints lack these entries.""",
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
    why="""`fix` has no edit for the defect, or the edited class fails a check. An unproved edit could change the
results of the model, so `fix` leaves the code unchanged.""",
    example="a layer that forward never calls: its parameters get no gradient.",
    fix="change the line by hand, as the output of `statecli verify` advises.",
)
RULES = (PROPOSED_FIX, WRITTEN_FIX, NOT_FIXED)
