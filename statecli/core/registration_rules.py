"""Rules about registration, for inspect and audit: PyTorch saves, moves and trains only registered objects."""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.model_state import TensorInfo
from statecli.core.rule import Rule
from statecli.core.severity import is_trainable

_COMMANDS = ("inspect", "verify", "audit")

UNREGISTERED_TENSOR = Rule(
    "unregistered-tensor",
    "registration",
    _COMMANDS,
    Severity.WARNING,
    summary="A tensor is a plain attribute, not a registered buffer or parameter.",
    why="""`state_dict()` leaves it out and `.to()` leaves it on its device. The checkpoint loads without an error, and
the model computes with other values; on a GPU the first forward raises "Expected all tensors to be on the same
device". With an input, the finding is an error if forward mixes the tensor with tensors on another device, or updates
the tensor in train mode, because a checkpoint loses this running state. The finding is also an error if the constructor
draws the value at random. With an input, the finding is a note if forward copies and casts the tensor at each call. The
finding is also a note if the tensor is a scalar or empty, if the class's own code moves the tensor, and in TorchScript
or a torch.export program, which stores the tensor.""",
    example="`self.table = torch.randn(5, 5)` in `__init__`.",
    fix="""`self.register_buffer("table", torch.randn(5, 5))`; with `persistent=False` if the constructor computes the
same value each time, so that existing checkpoints still load.""",
)
UNREGISTERED_PARAMETER = Rule(
    "unregistered-parameter",
    "registration",
    _COMMANDS,
    Severity.ERROR,
    summary="A tensor that requires grad is not a parameter of any module.",
    why="""`model.parameters()` does not return it, so no optimizer trains it, `.to()` does not move it and
`state_dict()` does not contain it. The loss still falls, because the other parameters learn. In TorchScript or a
torch.export program, which stores the tensor, the finding is a note.""",
    example="`self.scale = torch.ones(3, requires_grad=True)`, or `self.weights = [nn.Parameter(...)]` in a list.",
    fix="`self.scale = nn.Parameter(torch.ones(3))`; `nn.ParameterList` for a list of them.",
)
UNREGISTERED_MODULE = Rule(
    "unregistered-module",
    "registration",
    _COMMANDS,
    Severity.ERROR,
    summary="A module that contains tensors is in a plain list, a dict or an attribute of another object.",
    why="its parent does not register it: none of its parameters is trained, saved or moved.",
    example="`self.projections = [nn.Conv2d(8, 8, 1) for _ in range(3)]`.",
    fix="`nn.ModuleList([...])` or `nn.ModuleDict({...})`.",
)


#: Begins the remark of a finding about an unregistered tensor that torch.export made a constant.
EXPORTED = "exported as a constant"
#: Begins the remark of a finding about a tensor that a wrapper for several ranks does not synchronize.
LEFT_OUT = "left out by"
#: Begins the remark of a finding about a tensor without which a resumed training goes on differently.
NOT_RESUMED = "begins again when a training is resumed"
#: Of a tensor that no checkpoint holds, and its fix for a buffer.
RANDOM_VALUE = "not in state_dict() and drawn at random by the constructor, so a loaded model has other values"
PERSISTENT = "register the buffer with persistent=True"


def describe_unregistered(tensor: TensorInfo) -> str:
    """Return what is not registered: the tensor, a parameter, or the module of the tensor."""
    rule = choose_rule(tensor)
    if rule is UNREGISTERED_MODULE:
        return f"belongs to {tensor.within}, which is not registered"
    if rule is UNREGISTERED_PARAMETER:
        return "requires grad and is not a registered parameter"
    return "is not registered"


def choose_rule(tensor: TensorInfo) -> Rule:
    """Return the rule of an unregistered tensor: for its module, for a parameter or for any tensor."""
    if tensor.within is not None:
        return UNREGISTERED_MODULE
    return UNREGISTERED_PARAMETER if is_trainable(tensor) else UNREGISTERED_TENSOR


RULES = (UNREGISTERED_TENSOR, UNREGISTERED_MODULE, UNREGISTERED_PARAMETER)
