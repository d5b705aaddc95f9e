"""Rules that only `inspect --to` reports; those about moves are in `core/move_rules.py`."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

CANNOT_TELL = Rule(
    "cannot-tell",
    "move",
    ("inspect",),
    Severity.WARNING,
    summary="Whether a tensor follows a move cannot be told.",
    why="""the tensor was not found again after the move, or it could not be measured. If it stays on its device, the
first forward on the other device raises.""",
    example="a class whose own `_apply` deletes a cached tensor.",
    fix="""run `statecli verify --check forward`, which calls forward on a fake GPU and reports tensors on the wrong
device.""",
)
BYTES_DIFFER = Rule(
    "bytes-differ",
    "move",
    ("inspect",),
    Severity.ERROR,
    summary="The bytes that arrived on the device are not those of the file.",
    why="the model would compute with weights that the file does not have. The device or its driver is faulty.",
    example="a GPU with broken memory returns other bytes than were copied to it.",
    fix="run the command again. If the finding stays, test the device and its driver; do not use its results.",
)

RULES = (CANNOT_TELL, BYTES_DIFFER)
