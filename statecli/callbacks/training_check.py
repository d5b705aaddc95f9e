"""Check a training: whether its first steps update all tensors, and whether saved files contain the model's values."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import statecli
from statecli.commands.diff.result import Change, Field, Status, TransformationKind
from statecli.core.errors import StateError
from statecli.core.units import join_names

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Number of steps after which tensors still without an update are reported. The gradient of a LoRA factor is zero in
#: the first step, an expert has no gradient, the learning rate is often zero, and a scaler skips steps.
MAX_STEPS = 10
#: dtypes with so few digits that a usual update may be rounded to zero.
_SHORT_DTYPES = ("bfloat16", "float16")
#: Largest number of names or globs in a line.
_MAX_SHOWN_NAMES = 5
#: Names of the model file in a checkpoint folder, the preferred name first.
_MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
#: Kinds of transformations that keep the values of a tensor in a file.
_FAITHFUL_KINDS = frozenset(
    getattr(TransformationKind, name)
    for name in ("CAST", "MOVED", "TRANSPOSED", "JOINED", "SPLIT", "STACKED", "UNSTACKED")
)


class StatecliWarning(UserWarning):
    """Warning that reports a finding of a callback."""


class TrainingCheck:
    """Checks that a callback runs during training.

    Attributes:
        findings: The lines that were reported.
        fail: True raises AssertionError for a finding; False warns.
    """

    def __init__(self, *, fail: bool) -> None:
        self.fail = fail
        self.findings: list[str] = []
        self._before: statecli.Snapshot | None = None
        #: Names of the tensors in the snapshot, which lacks lazy parameters without a shape.
        self._names: frozenset[str] = frozenset()
        self._steps = 0
        #: Learning rate of each parameter in the optimizer, by id.
        self._rates: dict[int, float] = {}
        #: Parameters that had a gradient before or after a step, by id. A loop may clear gradients between two steps,
        #: and an expert may get its first gradient in a later step.
        self._with_gradient: set[int] = set()
        #: Optimizers that made a step since the last comparison, by id.
        self._stepped: set[int] = set()
        #: Parameters without an update that are compared again; None until a step has changed a parameter.
        self._waiting: set[str] | None = None

    def start(self, model: nn.Module) -> None:
        """Take a snapshot of the model before the first step."""
        self._steps, self._waiting = 0, None
        self._stepped.clear()
        self._with_gradient.clear()
        tensors = _list_tensors(model)
        self._names = frozenset(tensors)
        self._before = statecli.Snapshot(tensors) if tensors else None
        if self._before is None:
            self.report(["cannot check the updates: this process has no elements of the model"])

    def record_rates(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Record the learning rates before `optimizer.step()`, because a scheduler changes them after the step."""
        if self._before is not None:
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            self._rates |= {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
            parameters = (parameter for group in groups for parameter in group["params"])
            self._with_gradient |= {id(parameter) for parameter in parameters if parameter.grad is not None}

    def record_step(self, optimizer: torch.optim.Optimizer, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Record the learning rates before `optimizer.step()`. `optimizers` are all optimizers of the model."""
        self.record_rates(optimizers)
        self._stepped.add(id(optimizer))

    def finish_round(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Compare the model after a step, if each optimizer made a step since the last comparison.

        A GAN may train its generator only after several steps of its discriminator.
        """
        if self._stepped >= set(map(id, optimizers)):
            self._stepped.clear()
            self.finish_step(model)

    def finish_step(self, model: nn.Module) -> None:
        """Compare the model with the snapshot, after `optimizer.step()` and before the gradients are cleared."""
        if self._before is None:
            return
        self._steps += 1
        changed_names = _list_changed(self._before, model)
        compared_names = self._names & _list_tensors(model).keys()
        parameters = {name: parameter for name, parameter in model.named_parameters() if name in compared_names}
        trainable = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self._with_gradient |= {id(parameter) for parameter in parameters.values() if parameter.grad is not None}
        lines: list[str] = []
        if self._waiting is None and (trainable & changed_names or not trainable):
            reasons = {name: self._explain_no_update(parameters[name]) for name in trainable - changed_names}
            for reason in sorted({*reasons.values()} - {""}):
                names = {name for name, other in reasons.items() if other == reason}
                lines.append(f"{_join_globs(names, parameters)} got no update: {reason}")
            lines += _describe_frozen(model, changed_names)
            self._waiting = {name for name, reason in reasons.items() if not reason}
        elif self._waiting is not None:
            self._waiting -= changed_names
        if self._waiting == set():
            self._before = None
        self.report(lines)
        if self._steps >= MAX_STEPS:
            self.finish(model)

    def finish(self, model: nn.Module) -> None:
        """Report the tensors that got no update in any compared step."""
        if self._stepped:  # an optimizer made no step since the last comparison
            self._stepped.clear()
            self.finish_step(model)
        if self._before is None or not self._steps:
            return
        self._before = None
        steps = "step 1" if self._steps == 1 else f"{self._steps} steps"
        parameters = dict(model.named_parameters())
        reason = f"in {steps}: the gradient or the learning rate is zero or too small"
        if self._waiting is None:
            self.report([f"no parameter got an update {reason}"])
        else:
            without_gradient = {name for name in self._waiting if id(parameters.get(name)) not in self._with_gradient}
            groups = (
                (without_gradient, f": no gradient {reason.partition(':')[0]}"),
                (self._waiting - without_gradient, f" {reason}"),
            )
            self.report([f"{_join_globs(group, parameters)} got no update{text}" for group, text in groups if group])

    def _explain_no_update(self, parameter: torch.Tensor) -> str:
        """Return the reason why a parameter has the same values as before, or "" if a later step may change them."""
        if self._rates and id(parameter) not in self._rates:
            return "not in the optimizer"
        if parameter.grad is None:
            return ""
        dtype = str(parameter.dtype).removeprefix("torch.")
        is_zero = not bool(parameter.grad.any()) or not self._rates.get(id(parameter), 1)
        # In float32 the gradient of a bias before a BatchNorm is rounding noise, as expected.
        return "" if is_zero or dtype not in _SHORT_DTYPES else f"the update is too small for the precision of {dtype}"

    def check_folder(self, folder: str | os.PathLike[str], expected: statecli.Snapshot | nn.Module) -> None:
        """Compare the file of the model in a checkpoint folder with a snapshot or a model."""
        paths = (os.path.join(folder, name) for name in _MODEL_FILES)
        path = next(filter(os.path.isfile, paths), None)
        if path is None:
            self.report([f"cannot check the saved files: {folder} has no model.safetensors or pytorch_model.bin"])
        else:
            self.check_file(path, expected)

    def check_file(self, path: str, expected: statecli.Snapshot | nn.Module) -> None:
        """Compare a saved file with a snapshot or a model."""
        try:
            diff = statecli.diff(path, expected, ignore=("kind", "requires_grad", "device", "tying"))
        except StateError as error:
            self.report([f"cannot check the saved file: {error}"])
            return
        changes = [change for change in diff.changes if change.after is not None]
        saved_names = {change.fqn for change in changes if _is_held(change)}
        ties = {change.fqn: set(change.after.tied_to) for change in changes if change.after is not None}
        unsaved_names = {
            change.fqn
            for change in changes
            if change.fqn not in saved_names and saved_names.isdisjoint(ties[change.fqn])
        }
        missing_names = {change.fqn for change in changes if change.status is Status.ADDED}
        names = [change.fqn for change in changes]
        groups = (
            (unsaved_names & missing_names, f"missing in {path}"),
            (unsaved_names - missing_names, f"differs between {path} and the model"),
        )
        lines = [f"{_join_globs(group, names)}: {text}" for group, text in groups if group]
        self.report([*lines, *(f"not checked: {pair.message}" for pair in diff.broken)])

    def report(self, lines: Iterable[str]) -> None:
        """Warn about each line or, if `fail` is set, raise an AssertionError with all lines."""
        new = list(lines)
        self.findings += new
        if new and self.fail:
            raise AssertionError("statecli: " + "; ".join(new))
        for line in new:
            warnings.warn(f"statecli: {line}", StatecliWarning, stacklevel=2)


def _list_tensors(model: nn.Module) -> dict[str, Any]:
    """Return the tensors of a model by name: the local shards of sharded tensors, and without empty tensors."""
    named: Mapping[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # A lazy parameter has no shape before the first forward.
    shaped = {name: tensor for name, tensor in named.items() if not hasattr(tensor, "materialize")}
    local = {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in shaped.items()}
    return {name: tensor.detach() for name, tensor in local.items() if tensor.numel()}


def _list_changed(before: statecli.Snapshot, model: nn.Module) -> set[str]:
    diff = statecli.diff(before, _list_tensors(model))
    return {change.fqn for change in diff.changes if Field.VALUES in change.fields}


def _describe_frozen(model: nn.Module, changed_names: set[str]) -> list[str]:
    """Return lines about changed tensors that are frozen: parameters, and buffers of modules with frozen parameters."""
    parameters = dict(model.named_parameters())
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad} & changed_names
    buffers: set[str] = set()
    for prefix, module in model.named_modules():
        own_parameters = list(module.parameters(recurse=False))
        if own_parameters and not any(parameter.requires_grad for parameter in own_parameters):
            buffers |= {f"{prefix}.{name}" if prefix else name for name, _ in module.named_buffers(recurse=False)}
    buffers &= changed_names
    lines = [f"{_join_globs(frozen, parameters)} changed, although these parameters are frozen"] if frozen else []
    if buffers:
        # A glob may cover frozen parameters too, but no trainable parameters and no other buffers.
        trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
        names = _join_globs(buffers, [*trainable, *(name for name, _ in model.named_buffers())])
        lines.append(f"{names}: these buffers of a frozen module changed; call .eval() on the module")
    return lines


def _join_globs(names: set[str], all_names: Iterable[str]) -> str:
    """Return the names as text: `module.*` for all names of a module, and a count of the names beyond a limit."""
    others = [name for name in all_names if name not in names]
    globs: list[str] = []
    for name in sorted(names):
        steps = name.split(".")
        prefixes = [".".join(steps[:end]) + "." for end in range(1, len(steps))]
        module_prefix = next((p for p in prefixes if not any(other.startswith(p) for other in others)), None)
        globs.append(name if module_prefix is None else module_prefix + "*")
    return join_names(list(dict.fromkeys(globs)), _MAX_SHOWN_NAMES)


def _is_held(change: Change) -> bool:
    """Return True if the file contains the tensor's values, under any name and in any arrangement."""
    transformation = change.transformation
    is_faithful = (
        transformation is not None and transformation.kind in _FAITHFUL_KINDS and not transformation.exceptions
    )
    cast = change.fields == (Field.DTYPE,) and change.not_compared is None
    return change.status in (Status.IDENTICAL, Status.RENAMED) or is_faithful or cast
