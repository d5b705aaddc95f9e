"""Rules about entries that the `load_state_dict` of a class refuses, reported by inspect, diff and audit."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule

_COMMANDS = ("inspect", "diff", "audit")

MISSING_ENTRY = Rule(
    "missing-entry",
    "against",
    _COMMANDS,
    Severity.ERROR,
    summary="The checkpoint lacks a key that the model class or reference checkpoint has.",
    why="`load_state_dict(strict=True)` fails with a missing key. With `strict=False` the tensor silently keeps its "
    "initial values.",
    example="a head that was renamed in the code after the checkpoint was written.",
    heading="{} keys of {} are missing",
    fix="save the checkpoint again from the current class, or map the old name to the new name before loading.",
    cases={"accepted by the class": Severity.NOTE},
)
UNEXPECTED_ENTRY = Rule(
    "unexpected-entry",
    "against",
    _COMMANDS,
    Severity.ERROR,
    summary="The checkpoint has a key that the model class or reference checkpoint does not have.",
    why="`load_state_dict(strict=True)` fails with an unexpected key. With `strict=False` the key is silently ignored.",
    example="a checkpoint for inference still has the weights of an auxiliary loss.",
    heading="{} keys are unexpected",
    fix="leave the tensor out when saving, or add the module of the tensor to the class.",
    cases={"accepted by the class": Severity.NOTE},
)
SHAPE_MISMATCH = Rule(
    "shape-mismatch",
    "against",
    _COMMANDS,
    Severity.ERROR,
    summary="A tensor's shape differs from the model class or the reference checkpoint.",
    why="`load_state_dict` raises a size mismatch, with or without `strict`.",
    example="an embedding for 30,522 words, although the class was built for 30,528.",
    heading="{} tensors have another shape",
    fix="build the class with the sizes of the checkpoint, or resize the tensor before saving.",
)
WRAPPER_PREFIX = Rule(
    "wrapper-prefix",
    "names",
    _COMMANDS,
    Severity.WARNING,
    summary="Names contain a prefix that a wrapper added: `module.`, `_orig_mod.`, `_fsdp_wrapped_module.`, "
    "`_forward_module.`.",
    why="""the plain model does not have these names. A strict load raises an error, and a load with `strict=False`
silently leaves every weight at its initial value. Names that the class of `--model` registers are not reported.""",
    example="`torch.save(ddp_model.state_dict(), …)` of a DistributedDataParallel or a compiled model.",
    fix="""save the wrapped module's own state_dict (`ddp_model.module`, `compiled._orig_mod`), or strip the prefix.""",
    cases={"refused by the class": Severity.ERROR, "of the reference": Severity.NOTE},
)

RULES = (MISSING_ENTRY, UNEXPECTED_ENTRY, SHAPE_MISMATCH, WRAPPER_PREFIX)

#: Remedy by rule, for a strict load that the class refuses.
LOAD_HELP = {
    MISSING_ENTRY.name: "load with strict=False, and the tensor keeps its initial values; or add the tensor to the "
    "checkpoint",
    UNEXPECTED_ENTRY.name: "load with strict=False, which ignores the tensor, or register a tensor of this name",
    SHAPE_MISMATCH.name: "build the class with the arguments of the saved model; strict=False does not accept this "
    "shape",
}
