"""Rules of `fix`: a fix that is proposed or written, and a defect without a fix."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

PROPOSED_FIX = Rule(
    "proposed-fix",
    "fix",
    ("fix",),
    Severity.WARNING,
    summary="statecli found a fix for a defect, but the fix is not written to the file yet.",
    why="""the checks of `verify` fail for the named tensors, and pass in a copy of the file with the fix. No other
check gets worse, and each entry of an older state_dict loads.""",
    example="""`self.table = torch.arange(8)` becomes
`self.register_buffer("table", torch.arange(8), persistent=False)`.""",
    fix="read the diff, and write the fix with `statecli fix net.py:Net --write`.",
)
WRITTEN_FIX = Rule(
    "written-fix",
    "fix",
    ("fix",),
    Severity.NOTE,
    summary="A fix for a defect was written to the file.",
    why="""the checks of `verify` pass with the fix. If the fixed class saves more tensors than before, older
checkpoints lack these entries.""",
    example="`self.blocks = [nn.Linear(4, 4)]` became `self.blocks = nn.ModuleList([nn.Linear(4, 4)])`.",
    fix="""review the change with `git diff`. If the fix adds names to the state_dict, load older checkpoints with
`strict=False`.""",
)
NOT_FIXED = Rule(
    "not-fixed",
    "fix",
    ("fix",),
    Severity.WARNING,
    summary="A check of `verify` fails, and statecli has no fix for the defect.",
    why="""`fix` has no fix for the defect, or the fixed class fails a check. A fix that fails a check could change the
results of the model, so `fix` leaves the code unchanged.""",
    example="a layer that forward never calls: its parameters get no gradient.",
    fix="change the line by hand, as the output of `statecli verify` advises.",
)
RULES = (PROPOSED_FIX, WRITTEN_FIX, NOT_FIXED)
