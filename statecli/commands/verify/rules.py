"""Rules of the proofs of `verify`, in the order of the proofs. `core/move_rules.py` has the rules about moves."""

from __future__ import annotations

from collections.abc import Mapping

from statecli.core.finding import Severity
from statecli.core.rule import Rule


def _build_rule(
    name: str,
    proof: str,
    summary: str,
    why: str,
    example: str,
    fix: str,
    severity: Severity = Severity.ERROR,
    commands: tuple[str, ...] = ("verify",),
    cases: Mapping[str, Severity] | None = None,
) -> Rule:
    return Rule(name, proof, commands, severity, summary, why, example, fix, cases or {})


#: Commands that report the use of an unregistered tensor by forward: `inspect` only with an input.
_WITH_INPUT = ("inspect", "verify")


# --- move -----------------------------------------------------------------------------------------------------------

TO_RETURNS_NO_MODEL = _build_rule(
    "to-returns-no-model",
    "move",
    summary="The class has a `.to` of its own that does not return the model, so `model = model.to(device)` breaks.",
    why="most code calls `model = model.to(device)`. After this line, `model` is None or another object.",
    example="a method `def to(self, device): self.net.to(device)` without a return statement.",
    fix="end the method with `return self`.",
)
CHANGED_BY_MOVE = _build_rule(
    "changed-by-move",
    "move",
    summary="A tensor has other values after it was moved and moved back.",
    why="a move must not change values. The model gives other results after each move to a GPU or back.",
    example="the `_apply` method of the class also rounds the weights to float16.",
    fix="change only the device in the class's own `_apply` or `to`: call `super()` and return its result.",
)

# --- cast -----------------------------------------------------------------------------------------------------------

KEEPS_DTYPE = _build_rule(
    "keeps-dtype",
    "cast",
    summary="A tensor keeps its dtype when its model is cast.",
    why="""after `.half()` or `.to(torch.bfloat16)`, forward mixes two dtypes. It raises "expected scalar type Half but
found Float", or it computes in float32 silently and is slow.""",
    example="`self.scale = torch.ones(8)` in `__init__`, then `model.half()`.",
    fix="register the tensor as a buffer; if the class has its own `half` or `_apply`, call `super()` in this method.",
    commands=_WITH_INPUT,
)
IMAGINARY_LOST = _build_rule(
    "imaginary-lost",
    "cast",
    summary="A cast drops the imaginary part of a complex tensor.",
    why="the values cannot be restored: a cast back gives zeros as the imaginary part. Forward gives other results.",
    example='`self.register_buffer("freqs", torch.polar(r, angle))`, then `model.to(torch.bfloat16)`.',
    fix="""store the real and the imaginary part in a new last dimension with `torch.view_as_real`, and call
`torch.view_as_complex` in forward.""",
)
INTEGER_CAST = _build_rule(
    "integer-cast",
    "cast",
    summary="A cast converts an integer tensor to floating point.",
    why="a float cannot be an index, so forward raises. In half precision, integers above 2,048 are also rounded.",
    example="the `_apply` method of the class casts every tensor, including `position_ids`.",
    fix="cast only tensors for which `tensor.is_floating_point()` is true.",
)
INTEGER_CHANGED = _build_rule(
    "integer-changed",
    "cast",
    summary="A cast changes the values of an integer tensor.",
    why="the tensor silently contains other indices or counts than before, although its dtype is the same.",
    example="an `_apply` that casts `position_ids` to float16 and back: 2,049 becomes 2,048.",
    fix="leave integer tensors unchanged in the class's own `half`, `to` or `_apply`.",
)

# --- save -----------------------------------------------------------------------------------------------------------

LOST_BY_SAVING = _build_rule(
    "lost-by-saving",
    "save",
    summary="A tensor is not restored from the saved state_dict.",
    why="""the tensor is not in `state_dict()`. A loaded model silently has other values. With an input, `verify` also
finds a running state, such as an average that forward updates in train mode. For a buffer with
`persistent=False`, the finding is a warning.""",
    example="`self.noise = torch.randn(16)` in `__init__`: each new instance draws other values.",
    fix="register the tensor as a parameter or a persistent buffer, and keep it in `state_dict` of the class.",
    commands=_WITH_INPUT,
    cases={"not persistent": Severity.WARNING},
)
CHANGED_BY_SAVING = _build_rule(
    "changed-by-saving",
    "save",
    summary="A tensor has other values after it was saved and loaded.",
    why="`state_dict()` returns other values than the model has, so the checkpoint is not the model that was "
    "evaluated.",
    example="the `state_dict` method of the class rounds the weights to float16.",
    fix="return the entries of `super().state_dict()` unchanged, or convert a copy outside the class.",
)
NOT_RESTORED = _build_rule(
    "not-restored",
    "save",
    summary="A saved entry is not restored when the model is loaded.",
    why="`load_state_dict` succeeds, and the tensor keeps other values. Training continues from a wrong state.",
    example="the class overrides `_load_from_state_dict` and removes the entry before it calls `super()`.",
    fix="pass every saved entry to `super()._load_from_state_dict`; register the tensor in `__init__`, not in forward.",
)
NOT_LOADABLE = _build_rule(
    "not-loadable",
    "save",
    summary="The model cannot load its own saved state_dict.",
    why="no checkpoint of this class loads strictly. People then write `strict=False`, which hides real errors.",
    example="forward registers a buffer, so a used model saves an entry that a new model does not have.",
    fix="register every tensor in the constructor with its final shape, and do not rename entries in a hook.",
)
NOT_PLAIN_DATA = _build_rule(
    "not-plain-data",
    "save",
    summary="A saved entry is not plain data, so `torch.load` refuses the file by default.",
    why="""only `torch.load(path, weights_only=False)` loads the file. This setting is dangerous for files from
other people: loading such a file runs any code that the file contains.""",
    example="`get_extra_state` returns an object of a class of the project.",
    fix="return plain data from `get_extra_state`: tensors, numbers, text, and lists and dicts of these.",
    severity=Severity.WARNING,
)
CHANGED_BY_SAFETENSORS = _build_rule(
    "changed-by-safetensors",
    "save",
    summary="A tensor has other values after it was saved as safetensors and loaded.",
    why="the weights that you publish as safetensors are not the weights that you evaluated.",
    example="a tensor subclass whose quantized values are written without their scales.",
    fix="save the tensor in a form that safetensors supports: a plain, contiguous, strided tensor.",
)
NOT_IN_SAFETENSORS = _build_rule(
    "not-in-safetensors",
    "save",
    summary="safetensors cannot store an entry of the state_dict.",
    why="`safetensors.torch.save_file` raises, or the entry is missing in the file that you publish.",
    example="a sparse tensor, a tensor that is not contiguous, or an extra state with an object in it.",
    fix="save the entry as a contiguous, dense tensor, or in a second file next to the tensors.",
    severity=Severity.WARNING,
)
#: Refusals by safetensors in a real call. They include overlapping views, which audit reports as `shared-slices` or
#: `untied-by-move`. `tied-tensors` is about the tensors, whatever the format, so neither name is another name of the
#: other.
SHARED_IN_SAFETENSORS = _build_rule(
    "shared-in-safetensors",
    "save",
    summary="safetensors refuses entries that share memory.",
    why="`safetensors.torch.save_file(model.state_dict(), path)` raises for tied weights, and writes no file.",
    example="`self.lm_head.weight = self.embed.weight`.",
    fix="call `safetensors.torch.save_model` and `load_model`: the file keeps one of the names, and the class must tie "
    "the weights again.",
    severity=Severity.NOTE,
)

# --- copy -----------------------------------------------------------------------------------------------------------

NOT_COPYABLE = _build_rule(
    "not-copyable",
    "copy",
    summary="The model cannot be copied or pickled.",
    why="`copy.deepcopy(model)` raises an error. EMA, stochastic weight averaging and many trainers copy the model.",
    example="`self.lock = threading.Lock()` in `__init__`.",
    fix="remove the attribute in `__getstate__` of the class, and create it again in `__setstate__`.",
)
NON_LEAF_ATTRIBUTE = Rule(
    "non-leaf-attribute",
    "registration",
    ("verify", "audit"),
    Severity.ERROR,
    summary="An attribute is the result of an operation on tensors that require grad.",
    why="""`copy.deepcopy` of the model raises an error, and so does a second backward through the attribute. A value
computed in `__init__` does not change when its parameters are trained or moved. A value stored by `forward` keeps the
graph of its step in memory.""",
    example="`self.kernel = self.weight.softmax(0)` in `__init__`.",
    fix="compute the value in `forward`; for a constant, register `value.detach()` as a buffer.",
)
SHARED_WITH_COPY = _build_rule(
    "shared-with-copy",
    "copy",
    summary="A copy of the model shares a tensor with the original.",
    why="training the model also changes its copy. An EMA model or a teacher that was created as a copy then changes "
    "with the model.",
    example="the class overrides `__deepcopy__` and copies the attribute dict but not the tensors.",
    fix="copy every tensor in the class's own `__deepcopy__` or `__setstate__`, or remove the method.",
)
LOST_BY_COPY = _build_rule(
    "lost-by-copy",
    "copy",
    summary="A copy of the model lacks a tensor.",
    why="the copy raises in its first forward, or computes without the tensor.",
    example="a `__getstate__` that removes a cache and also a registered buffer.",
    fix="keep every registered tensor in the class's own `__getstate__`.",
)
CHANGED_BY_COPY = _build_rule(
    "changed-by-copy",
    "copy",
    summary="`copy.deepcopy` or pickle gives a model with other values.",
    why="the copy is another model: its results differ from those of the original.",
    example="a `__setstate__` that calls `reset_parameters()`.",
    fix="copy the values in the class's own `__deepcopy__`, `__getstate__` and `__setstate__`.",
)
UNTIED_BY_COPY = _build_rule(
    "untied-by-copy",
    "copy",
    summary="Tied tensors no longer share memory in a copy of the model.",
    why="in the copy, training changes each tensor separately, and the copy uses more memory than the model.",
    example="the class overrides `__deepcopy__` and clones each parameter separately.",
    fix="pass `memo` to each `copy.deepcopy` in `__deepcopy__` of the class, or tie the weights again at its end.",
)

# --- step -----------------------------------------------------------------------------------------------------------

NO_GRADIENT = _build_rule(
    "no-gradient",
    "step",
    summary="A trainable parameter gets no gradient.",
    why="the optimizer never changes it. DistributedDataParallel also raises for a parameter without a gradient.",
    example="`self.fc(x.detach())`, which cuts off all layers before `fc`; or a layer that forward never calls.",
    fix="look for `.detach()`, `.data` and `torch.no_grad()` in forward; or freeze or delete the parameter.",
)
ZERO_GRADIENT = _build_rule(
    "zero-gradient",
    "step",
    summary="A trainable parameter gets a gradient of zeros.",
    why="""only weight decay and momentum change the parameter, so it does not learn. The finding is a
note for `weight_hh` of a recurrent module that starts from a hidden state of zeros.""",
    example="a gate of 0 is multiplied by a branch whose output is 0 too, so neither gets a gradient.",
    fix="look for a factor of zero in forward, for terms that cancel out, and for a hook that changes the gradient.",
    severity=Severity.WARNING,
    cases={"hidden state of zeros": Severity.NOTE},
)
NON_FINITE_GRADIENT = _build_rule(
    "non-finite-gradient",
    "step",
    summary="A parameter's gradient is NaN or infinite.",
    why="one step of the optimizer with this gradient makes the weights NaN.",
    example="`torch.where(x > 0, x.sqrt(), 0)`: the gradient of `sqrt` at 0 is infinite, and infinite × 0 is NaN.",
    fix="""keep the input of sqrt, norm and division away from zero. `torch.autograd.set_detect_anomaly(True)` shows the
line.""",
)
NOT_IN_OPTIMIZER = _build_rule(
    "not-in-optimizer",
    "step",
    summary="The tensor requires grad but is not in `model.parameters()`, so no optimizer trains it.",
    why="an optimizer gets only `model.parameters()`. The loss falls, but the tensor does not change.",
    example="`self.scale = torch.ones(3, requires_grad=True)`.",
    fix="register the tensor as `nn.Parameter` to train it; otherwise call `requires_grad_(False)` on it.",
    cases={"no gradient": Severity.WARNING},
)
OVERWRITTEN_BY_FORWARD = _build_rule(
    "overwritten-by-forward",
    "step",
    summary="Forward overwrites a parameter, so that each update of the optimizer is lost.",
    why="the optimizer spends memory and time on a parameter that never learns.",
    example="`self.scale.data.copy_(x.abs().mean())` in forward, where `scale` is an `nn.Parameter`.",
    fix="register the tensor as a buffer, or do not write to it in forward.",
)
NOT_UPDATED = _build_rule(
    "not-updated",
    "step",
    summary="A step of the optimizer does not change a trainable parameter.",
    why="the parameter has a gradient and still does not learn.",
    example="a hook on `optimizer.step` that writes the old values back.",
    fix="look for a hook of the module or the optimizer that undoes the update.",
)
FROZEN_UPDATED = _build_rule(
    "frozen-updated",
    "step",
    summary="A step of the optimizer changes a frozen tensor.",
    why="freezing the layer has no effect: the optimizer trains a tensor that should stay unchanged.",
    example="`self.old = nn.Parameter(self.fc.weight.data, requires_grad=False)`: both names share one memory.",
    fix="clone the frozen tensor, or freeze both with `requires_grad_(False)`.",
)

# --- forward --------------------------------------------------------------------------------------------------------

DEVICE_MISMATCH = _build_rule(
    "device-mismatch",
    "forward",
    summary="Forward combines tensors on different devices.",
    why="""on a GPU this operator raises "Expected all tensors to be on the same device". Tests on the CPU do not
find the error.""",
    example="`x + torch.arange(8)` in forward: `torch.arange` creates its tensor on the CPU.",
    fix="create the tensor with `device=x.device`, or register it as a buffer that moves with the model.",
    commands=_WITH_INPUT,
)

# --- materialize ----------------------------------------------------------------------------------------------------

LOST_BY_MATERIALIZING = _build_rule(
    "lost-by-materializing",
    "materialize",
    summary="A tensor of a model built on meta is never initialized.",
    why="""large models are built on meta, get memory from `to_empty`, and load a checkpoint. A tensor that is not in
the checkpoint keeps arbitrary values from the allocated memory. The model then silently computes with these values.""",
    example="""`self.register_buffer("inv_freq", 1 / steps, persistent=False)` in `__init__`, in a class without
`reset_parameters`.""",
    fix="""compute the tensor in a method `reset_parameters()` that `__init__` also calls, or in `_init_weights` of a
transformers model.""",
    cases={"not read": Severity.NOTE},
)
CHANGED_BY_MATERIALIZING = _build_rule(
    "changed-by-materializing",
    "materialize",
    summary="`reset_parameters()` or `_init_weights()` gives a tensor other values than the constructor.",
    why="""the tensor is not in the checkpoint. A model built on meta then differs from a model built on the CPU,
although both load the same checkpoint.""",
    example="`__init__` scales `inv_freq`, but `reset_parameters` computes `inv_freq` without the scale.",
    fix="compute the tensor in the init method only, and call the method in `__init__`.",
    cases={"not read": Severity.NOTE},
)
LEFT_ON_META = _build_rule(
    "left-on-meta",
    "materialize",
    summary="A tensor of a model built on meta gets no memory.",
    why="""`to_empty` allocates only registered parameters and buffers. The tensor has no values, and forward raises or
returns results without values. Without an input, the finding is a warning.""",
    example='`self.scale = torch.ones(8)` in `__init__`, in a model built with `torch.device("meta")`.',
    fix="register the tensor as a buffer, and compute it in `reset_parameters()`; or create it in forward.",
    cases={"not read": Severity.NOTE, "without an input": Severity.WARNING},
)
NOT_BUILT_ON_META = _build_rule(
    "not-built-on-meta",
    "materialize",
    summary="The model cannot be built on meta.",
    why="programs that build large models on meta stop in the constructor.",
    example="`[rate.item() for rate in torch.linspace(0, 0.1, depth)]` in `__init__`: a meta tensor has no values.",
    fix="compute numbers of the constructor with Python or numpy, or on the CPU: `torch.linspace(..., device='cpu')`.",
)

# --- export, compile --------------------------------------------------------------------------------------------------

CHANGING_ATTRIBUTE = _build_rule(
    "changing-attribute",
    "export",
    summary="Forward uses a plain attribute, and changes it in each call.",
    why="""the value is state, but no state_dict contains it. An exported program uses the value at the time of the
export in each call. torch.compile compiles the model again for each new value, and after 8 compilations it runs the
model uncompiled.""",
    example="`self.steps += 1` in forward, and `x * 0.9 ** self.steps`.",
    fix="""register a tensor as a buffer and change the buffer in place: `self.steps.add_(1)`; or pass the value as an
input.""",
    cases={"of a metric": Severity.NOTE},
)

KEPT_BY_COMPILE = _build_rule(
    "kept-by-compile",
    "export",
    summary="A compiled model computes with an old value of a tensor.",
    why="""the value was computed when torch.compile captured the model. A load or a training step changes the tensor,
and the compiled model still computes with the old value.""",
    example="`@torch.compiler.assume_constant_result` on a method that reads `self.weight`.",
    fix="""compute the value in forward, without `assume_constant_result`; or call `torch.compile` after the load, and
train without it.""",
)

# --- shard ------------------------------------------------------------------------------------------------------------

NOT_SYNCHRONIZED = _build_rule(
    "not-synchronized",
    "shard",
    summary="A registered tensor differs between the ranks of a distributed training.",
    why="""each rank trains or computes with other values, and a checkpoint has the values of one rank. `fully_shard`
shards parameters, but does not synchronize buffers. DistributedDataParallel broadcasts buffers from rank 0, except
for ignored tensors. The finding is a note for modules of torch, such as BatchNorm, and for a random buffer that a
checkpoint contains. The finding is a warning for other buffers that forward updates.""",
    example="`self.mean.lerp_(x.mean(0), 0.1)` in forward, where `mean` is a buffer, and `fully_shard(model)`.",
    fix="""average the tensor over the ranks in forward, with `torch.distributed.all_reduce`; do not list trained
tensors in `_ddp_params_and_buffers_to_ignore`.""",
    cases={
        "updated by forward": Severity.WARNING,
        "module of torch": Severity.NOTE,
        "random": Severity.ERROR,
        "random, in the checkpoint": Severity.NOTE,
    },
)
NOT_SHARDABLE = _build_rule(
    "not-shardable",
    "shard",
    summary="`fully_shard` refuses a parameter.",
    why="`fully_shard(model)` raises an error. If the parameter is ignored instead, its gradients are not averaged.",
    example="`self.scale = nn.Parameter(torch.tensor(1.0))`.",
    fix="register a parameter with one dimension, `nn.Parameter(torch.ones(1))`, and contiguous memory.",
)

# --- resume -----------------------------------------------------------------------------------------------------------

LOST_BY_RESUMING = _build_rule(
    "lost-by-resuming",
    "resume",
    summary="A value that training changes is not in the state_dict, so a resumed training starts with another value.",
    why="""`state_dict()` does not contain the value, so a load does not restore it. The resumed training computes
other results than a training without an interruption. The finding is a warning for a number or a list that
changes no output in these steps, such as a counter for the log.""",
    example="`self.steps += 1` in forward, and `x * 0.9 ** self.steps`; an average with `persistent=False`.",
    fix="""register a tensor as a buffer, and change it in place: `self.steps.add_(1)`; or return the value from
`get_extra_state()` and restore it in `set_extra_state()`.""",
    cases={"lost": Severity.ERROR, "no effect": Severity.WARNING},
)

RULES = (
    *(TO_RETURNS_NO_MODEL, CHANGED_BY_MOVE),
    *(KEEPS_DTYPE, IMAGINARY_LOST, INTEGER_CAST, INTEGER_CHANGED),
    *(LOST_BY_SAVING, CHANGED_BY_SAVING, NOT_RESTORED, NOT_LOADABLE, NOT_PLAIN_DATA),
    *(CHANGED_BY_SAFETENSORS, NOT_IN_SAFETENSORS, SHARED_IN_SAFETENSORS),
    *(NOT_COPYABLE, NON_LEAF_ATTRIBUTE, SHARED_WITH_COPY, LOST_BY_COPY, CHANGED_BY_COPY, UNTIED_BY_COPY),
    *(NO_GRADIENT, ZERO_GRADIENT, NON_FINITE_GRADIENT, NOT_IN_OPTIMIZER, OVERWRITTEN_BY_FORWARD, NOT_UPDATED),
    *(FROZEN_UPDATED, DEVICE_MISMATCH),
    *(LOST_BY_MATERIALIZING, CHANGED_BY_MATERIALIZING, LEFT_ON_META, NOT_BUILT_ON_META),
    *(CHANGING_ATTRIBUTE, KEPT_BY_COMPILE, NOT_SYNCHRONIZED, NOT_SHARDABLE, LOST_BY_RESUMING),
)
