"""Rules about tensors that do not follow their model to a device; inspect, verify and audit report them."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

LEFT_BEHIND = Rule(
    "left-behind",
    "move",
    ("inspect", "verify"),
    Severity.ERROR,
    summary="A tensor stays where it is when its model moves.",
    why="""`model.to("cuda")` moves only registered parameters and buffers. The tensor stays on the CPU, and the first
forward on the GPU raises "Expected all tensors to be on the same device".""",
    example='`self.table = torch.randn(5, 5)` in `__init__`, then `model.to("cuda")`.',
    fix="""register the tensor: `self.register_buffer("table", torch.randn(5, 5))`. If the class has its own `_apply`,
call `super()._apply(fn)` in it.""",
)
UNTIED_BY_MOVE = Rule(
    "untied-by-move",
    "move",
    ("inspect", "verify"),
    Severity.WARNING,
    summary="Two tensors that share their memory no longer do after the model moves.",
    why="""after `.to(device)` the two tied tensors are separate copies. An update of one no longer changes the other,
and the model uses more memory.""",
    example='`self.register_buffer("a", t)` and `self.register_buffer("b", t)`: a move gives each its own memory.',
    fix="""register the tensor once and read the other name through a property, or tie the two again in the class's own
`_apply`.""",
)
STALE_VIEW = Rule(
    "stale-view",
    "registration",
    ("inspect", "verify", "audit"),
    Severity.WARNING,
    summary="A further name of a registered tensor still points at the old memory after a move.",
    why="""a move gives a buffer new memory under its registered name alone. A view or second name of it keeps the old
values on the old device, and the two part without a word.""",
    example='`self.cos = self.table[0]` beside `self.register_buffer("table", table)`.',
    fix="make it a property that takes the view when it is asked for, or register it too.",
)

RULES = (LEFT_BEHIND, UNTIED_BY_MOVE, STALE_VIEW)
