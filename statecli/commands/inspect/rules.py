"""Rules that only `inspect --to` checks. `core/move_rules.py` has the rules about moves."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

MOVE_UNKNOWN = Rule(
    "move-unknown",
    "move",
    ("inspect",),
    Severity.WARNING,
    summary="statecli does not know whether the tensor moves with its model.",
    why="""statecli did not find the tensor after the move, or could not read its device. If the tensor is left on the
old device, the first forward on the new device raises.""",
    example="a class whose own `_apply` deletes a cached tensor.",
    fix="""run `statecli verify --check forward`, which calls forward on a fake GPU and reports tensors on the wrong
device.""",
)
BYTES_DIFFER = Rule(
    "bytes-differ",
    "move",
    ("inspect",),
    Severity.ERROR,
    summary="After a load to a device, a tensor on the device differs from the tensor in the file.",
    why="the model would not compute with the weights of the file. The device or its driver is faulty.",
    example="a GPU with faulty memory changes bytes of a tensor that was copied to the GPU.",
    fix="run the command again. If the finding remains, do not use this device; test the device and its driver.",
)

RULES = (MOVE_UNKNOWN, BYTES_DIFFER)
