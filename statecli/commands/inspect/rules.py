"""Rules reported only by `inspect --to`; rules about moves are in `core/move_rules.py`."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

CANNOT_TELL = Rule(
    "cannot-tell",
    "move",
    ("inspect",),
    Severity.WARNING,
    summary="statecli cannot tell whether the tensor moves with its model.",
    why="""the tensor was not found again after the move, or it could not be measured. If the tensor is left on its
device, the first forward on the other device raises.""",
    example="a class whose own `_apply` deletes a cached tensor.",
    fix="""run `statecli verify --check forward`, which calls forward on a fake GPU and reports tensors on the wrong
device.""",
)
BYTES_DIFFER = Rule(
    "bytes-differ",
    "move",
    ("inspect",),
    Severity.ERROR,
    summary="After the load to a device, a tensor there differs from the tensor in the file.",
    why="the model would compute with other weights than those in the file. The device or its driver is faulty.",
    example="a GPU with broken memory returns other bytes than the bytes that were copied to it.",
    fix="run the command again. If the finding remains, test the device and its driver, and do not use its results.",
)

RULES = (CANNOT_TELL, BYTES_DIFFER)
