"""Rules about registration, for inspect and audit: PyTorch saves, moves and trains only registered objects."""

from __future__ import annotations

from statecli.core.finding import Consequence, Severity, Wording
from statecli.core.model_state import TensorInfo
from statecli.core.rule import Rule
from statecli.core.severity import is_trainable

_COMMANDS = ("inspect", "verify", "audit")
#: Severity of each case that a check of `verify` or a file shows. For other cases, `decide_tensor_severity` decides.
_SEVERITY_BY_CASE = {"lost": Severity.ERROR, "no effect": Severity.WARNING, "kept": Severity.NOTE}

UNREGISTERED_TENSOR = Rule(
    "unregistered-tensor",
    "registration",
    _COMMANDS,
    Severity.WARNING,
    summary="A tensor is a plain attribute, not a registered buffer or parameter.",
    why="""`state_dict()` does not save the tensor, and `.to()` does not move it. After a load, the model silently
computes with other values. On a GPU, the first forward raises "Expected all tensors to be on the same device". The
finding is an error if the constructor draws the value at random. With an input, the finding is also an error if forward
combines the tensor with tensors on another device, or if forward updates the tensor in train mode: a checkpoint loses
this update. The finding is a note if the tensor is a scalar or empty, or if the class's own code moves the tensor. It
is also a note if forward, called with an input, copies and casts the tensor each time. TorchScript and torch.export
programs store the tensor, so the finding is a note there.""",
    example="`self.table = torch.randn(5, 5)` in `__init__`.",
    fix="""register the tensor: `self.register_buffer("table", torch.randn(5, 5))`. Add `persistent=False` if the
constructor computes the same value each time; then existing checkpoints still load.""",
    cases=_SEVERITY_BY_CASE,
)
UNREGISTERED_PARAMETER = Rule(
    "unregistered-parameter",
    "registration",
    _COMMANDS,
    Severity.ERROR,
    summary="A tensor requires grad, but is not a parameter of any module.",
    why="""`model.parameters()` does not return the tensor, so no optimizer trains it. `.to()` does not move the tensor,
and `state_dict()` does not save it. The loss still falls, because the other parameters learn. TorchScript and
torch.export programs store the tensor, so the finding is a note there.""",
    example="`self.scale = torch.ones(3, requires_grad=True)`, or `self.weights = [nn.Parameter(...)]` in a list.",
    fix="write `self.scale = nn.Parameter(torch.ones(3))`; for a list of parameters use `nn.ParameterList`.",
    cases=_SEVERITY_BY_CASE,
)
UNREGISTERED_MODULE = Rule(
    "unregistered-module",
    "registration",
    _COMMANDS,
    Severity.ERROR,
    summary="A module with tensors is in a plain list, in a dict, or in an object that is not a module.",
    why="PyTorch does not register such a module, so its tensors are not trained, saved or moved with the model.",
    example="`self.projections = [nn.Conv2d(8, 8, 1) for _ in range(3)]`.",
    fix="put the modules in `nn.ModuleList([...])` or `nn.ModuleDict({...})`.",
    cases=_SEVERITY_BY_CASE,
)


#: Remark on a random tensor that no checkpoint contains, and the remedy for a buffer.
RANDOM_VALUE_REMARK = "not in state_dict() and drawn at random by the constructor, so a loaded model has other values"
PERSISTENT_HELP = "register the buffer with persistent=True"


def describe_unregistered(tensor: TensorInfo) -> str:
    """Describe the unregistered object: the tensor, a parameter, or the module of the tensor."""
    rule = choose_rule(tensor)
    if rule is UNREGISTERED_MODULE:
        return f"belongs to {tensor.within}, which is not registered"
    if rule is UNREGISTERED_PARAMETER:
        return "requires grad and is not a registered parameter"
    return "is not registered"


def build_wording(tensor: TensorInfo, consequence: Consequence) -> Wording:
    """Return the parts of a message about an unregistered tensor and a consequence."""
    return Wording(f"{describe_unregistered(tensor)}; {consequence.message}", tensor.fqn, consequence=consequence)


def choose_rule(tensor: TensorInfo) -> Rule:
    """Return the rule that reports an unregistered tensor: the rule for modules, for parameters or for other cases."""
    if tensor.within is not None:
        return UNREGISTERED_MODULE
    return UNREGISTERED_PARAMETER if is_trainable(tensor) else UNREGISTERED_TENSOR


RULES = (UNREGISTERED_TENSOR, UNREGISTERED_MODULE, UNREGISTERED_PARAMETER)
