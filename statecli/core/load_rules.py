"""Rules about what `load_state_dict` of a class refuses; inspect, diff and audit report them."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

_COMMANDS = ("inspect", "diff", "audit")

MISSING_ENTRY = Rule(
    "missing-entry",
    "against",
    _COMMANDS,
    Severity.ERROR,
    summary="An entry that the class, or the checkpoint it is held to, has is not there.",
    why="`load_state_dict(strict=True)` refuses it; with `strict=False` the tensor silently keeps its initial values.",
    example="a head that was renamed in the code after the checkpoint was written.",
    fix="save it again from the class as it is now, or map the old name to the new one before loading.",
)
UNEXPECTED_ENTRY = Rule(
    "unexpected-entry",
    "against",
    _COMMANDS,
    Severity.ERROR,
    summary="There is an entry that the class, or the checkpoint it is held to, does not have.",
    why="`load_state_dict(strict=True)` refuses it; with `strict=False` it is silently left out.",
    example="the weights of an auxiliary loss in a checkpoint that is to be served.",
    fix="leave it out when saving, or give the class what it is for.",
)
SHAPE_MISMATCH = Rule(
    "shape-mismatch",
    "against",
    _COMMANDS,
    Severity.ERROR,
    summary="A tensor has another shape than the class registers, or than the checkpoint it is held to has.",
    why="`load_state_dict` refuses it, with or without `strict`.",
    example="an embedding for 30,522 words where the class was built for 30,528.",
    fix="build the class with the sizes of the checkpoint, or resize the tensor before saving.",
)
#: An error where a class is there to refuse the names, a warning where none is.
WRAPPER_PREFIX = Rule(
    "wrapper-prefix",
    "names",
    _COMMANDS,
    Severity.WARNING,
    summary="Names have in them what a wrapper added: `module.`, `_orig_mod.`, `_fsdp_wrapped_module.`, "
    "`_forward_module.`.",
    why="""the plain model knows none of these names. A strict load raises, and a load with `strict=False` leaves every
weight as it was initialised and says nothing. Names that the class given with `--model` registers are its own.""",
    example="`torch.save(ddp_model.state_dict(), …)` of a DistributedDataParallel or a compiled model.",
    fix="""save the wrapped module's own state_dict (`ddp_model.module`, `compiled._orig_mod`), or strip the prefix.""",
)

RULES = (MISSING_ENTRY, UNEXPECTED_ENTRY, SHAPE_MISMATCH, WRAPPER_PREFIX)
