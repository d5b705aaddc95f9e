"""Model under test: its tensors, its inputs, and a function that builds new instances, which proofs may modify."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from statecli import live
from statecli.commands.verify import copy_model
from statecli.commands.verify.inputs import NO_INPUT, MissingInput, map_tensors, use_seed
from statecli.commands.verify.result import Check, Name, Verdict
from statecli.core.errors import ModelError
from statecli.core.model_state import REGISTERED_KINDS, Kind, ModelState, TensorInfo
from statecli.live import measure, tensor_bits
from statecli.live.assignment_lines import Origins
from statecli.live.built_model import BuiltModel
from statecli.live.spec import ModelSpec
from statecli.live.walk import walk

if TYPE_CHECKING:
    import torch
    from torch import nn

    from statecli.commands.verify.inputs import Call, Inputs


@dataclass(frozen=True)
class ModelUnderTest:
    """Model to verify. Each proof gets fresh instances, which it may change.

    Attributes:
        target: The user's name of the model.
        state: A row for each tensor.
        build_fresh: Builds an instance in the mode of the constructor: `build_fresh(values=False, seed=0)`. Without
            `values` large random values are not drawn, to save most of the building time. Raises ModelError if there is
            no second instance.
        built_model: The model as it was built, with the context for its own code; its instance must not be used.
        rebuilds: True if the constructor runs for each instance with the seed, False if a live instance is copied.
        inputs: Arguments of forward; None without inputs.
        why_no_inputs: Why there are no inputs.
        created_by_forward: Names of tensors created by a first forward.
        reassigned_by_forward: Names under which a first forward puts another tensor.
        non_leaves: Names of tensors computed from others before the model was copied. A copy lacks their graph.
        forward_passed: The check `forward` has passed: forward ran on the moved model.
        forward_error: The error of a plain call of a second instance in one line; None if forward returned.
        name_mismatch: Set if two instances register different names, and cannot be compared.
        original: The live model copied by `build_fresh`, read-only.
        read_original: Name of a tensor of the original that forward of a copy reads.
        sample_inputs: Names of tensors that are sample inputs stored in the model.
        excluded: Names of tensors that the filters exclude from the results.
    """

    target: str
    state: ModelState
    build_fresh: Callable[..., nn.Module]
    built_model: BuiltModel
    rebuilds: bool
    inputs: Inputs | None = None
    why_no_inputs: MissingInput = NO_INPUT
    created_by_forward: frozenset[str] = frozenset()
    reassigned_by_forward: frozenset[str] = frozenset()
    non_leaves: tuple[str, ...] = ()
    forward_passed: bool = False
    forward_error: str | None = None
    name_mismatch: str | None = None
    original: nn.Module | None = None
    read_original: str | None = None
    sample_inputs: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()

    @property
    def origins(self) -> Origins:
        """Lines of the constructor's assignments."""
        return self.built_model.origins

    def user_code(self, activity: str) -> AbstractContextManager[None]:
        """Return a context for a call of the model's own code, whose errors become a ModelError with `activity`."""
        return self.built_model.user_code(activity)

    @functools.cached_property
    def rows_by_fqn(self) -> Mapping[str, TensorInfo]:
        """The description (`TensorInfo`) of each tensor, by FQN."""
        return {tensor.fqn: tensor for tensor in self.state.tensors}

    @functools.cached_property
    def input_dependent(self) -> frozenset[str]:
        """Names of created tensors that depend on the input or the seed. If forward raises: all created tensors."""
        if self.inputs is None or not self.created_by_forward:
            return frozenset()
        inputs = self.inputs

        def make_other_call(seed: int = 0) -> Call:
            call: Call = map_tensors(inputs.make_call(seed=seed), _change_values)
            return call

        other_subject = replace(self, inputs=replace(inputs, make_call=make_other_call))
        try:
            first, second = self.build_fresh(values=True), self.build_fresh(values=True)
            self.call(first)
            other_subject.call(second, seed=1)
        except ModelError:
            return self.created_by_forward
        tensors, other_tensors = measure.map_tensors(first), measure.map_tensors(second)
        return frozenset(
            name
            for name in self.created_by_forward
            if name not in tensors
            or name not in other_tensors
            or not tensor_bits.is_same(tensors[name], other_tensors[name])
        )

    def skip_without_inputs(self, name: Name, how: str = "") -> Check:
        """Return a skipped check. Its reason says why forward has no inputs."""
        return Check(name, Verdict.SKIPPED, how, str(self.why_no_inputs))

    def find_home(self) -> str:
        """Return the device of the first parameter, or else of the first buffer. The model is called on this device."""
        registered = [row for row in self.state.tensors if row.kind in REGISTERED_KINDS]
        first = min(registered, key=lambda row: row.kind is not Kind.PARAMETER, default=None)
        return first.device if first is not None and first.device is not None else "cpu"

    def build_used(self, *, values: bool = False, seed: int = 0) -> nn.Module:
        """Build an instance, and call it once if forward creates tensors."""
        if not self.created_by_forward:
            return self.build_fresh(values=values, seed=seed)
        module = self.build_for_call(values=values, seed=seed)
        self.call(module)
        return module

    def build_for_call(self, *, values: bool = False, seed: int = 0) -> nn.Module:
        """Build an instance to call. A copy gets the model's values, because forward may use the values as indexes."""
        return self.build_fresh(values=values or not self.rebuilds, seed=seed)

    def call(self, module: nn.Module, seed: int = 0, *, training: bool = False, grad: bool = False) -> Any:
        """Call `module` with the inputs, in eval mode unless `training` is True. Raises ModelError.

        The random generators start from `seed`, so two calls draw equal numbers.
        """
        import torch

        assert self.inputs is not None  # noqa: S101 - callers have looked
        args, kwargs = self.inputs.make_call(seed=seed)
        # A frozen ScriptModule has no mode.
        modes = [(part, part.training) for part in module.modules() if hasattr(part, "training")]
        with self.user_code("calling the model"), use_seed(seed, module), torch.set_grad_enabled(grad):
            try:
                return (module if training else module.eval())(*args, **kwargs)
            finally:
                for part, training in modes:
                    part.training = training


def _change_values(tensor: torch.Tensor) -> torch.Tensor:
    """Reverse the values and halve floats, so that inputs differ even if the user's function ignores the seed."""
    changed = tensor.flatten().flip(0).reshape(tensor.shape)
    return changed / 2 if tensor.is_floating_point() or tensor.is_complex() else changed


def prepare_built_model(built_model: BuiltModel, target: str) -> ModelUnderTest:
    """Prepare a model of a spec. Each instance comes from the constructor or, if a second call fails, from a copy."""
    measure.check_no_freed_storage(built_model.module, target)
    try:
        renames = _find_name_mismatch(built_model.module, built_model.build_again())
    except ModelError:
        return _prepare_copies(built_model.module, target, built_model)
    state = live.model_reader.read(built_model, target)
    return ModelUnderTest(
        target,
        state,
        built_model.build_again,
        built_model,
        rebuilds=True,
        name_mismatch=renames,
    )


def _find_name_mismatch(first: nn.Module, second: nn.Module) -> str | None:
    """Describe the first name that only one of two instances registers. Return None if the names are equal."""
    names, second_names = (dict.fromkeys(entry.fqn for entry in walk(module).registered) for module in (first, second))
    for name in (*names, *second_names):
        if not (name in names and name in second_names):
            return f"statecli cannot compare two instances of the class, because only one has {name}"
    return None


def prepare_live_model(module: nn.Module) -> ModelUnderTest:
    """Return the model under test for a live model. Its instances are copies of the live model.

    If the model cannot be copied, `build_fresh` raises a ModelError with the reason, and no move is measured.
    """
    name = type(module).__name__
    measure.check_no_freed_storage(module, name)
    return _prepare_copies(module, name, wrap_live_model(module))


def wrap_live_model(module: nn.Module) -> BuiltModel:
    """Wrap a live model as a `BuiltModel`. Callers read or move only copies of the live model."""
    name = type(module).__name__
    return BuiltModel(ModelSpec(name, "", False, name), module, Origins({}), "cpu", True, lambda _, __: module)


def _prepare_copies(module: nn.Module, target: str, wrapped: BuiltModel) -> ModelUnderTest:
    def build_fresh(*, values: bool = False, seed: int = 0) -> nn.Module:  # noqa: ARG001 - there is no constructor to seed
        with wrapped.user_code("copying the model"):
            return copy_model.copy_live_model(module, values=values, contents=contents)

    contents = copy_model.list_contents(module)
    try:
        built_model = replace(
            wrapped,
            module=build_fresh(),
            original=module,
            values=True,
            make_instance=lambda values, _: build_fresh(values=values),
        )
    except ModelError as error:
        state = live.model_reader.read_without_move(wrapped, target, str(error).removeprefix(f"{target}: "))
    else:
        state = live.model_reader.read(built_model, target)
    # Tensors that torch recomputes before each forward find their parameters again.
    recomputed = state.recomputed
    non_leaf_names = tuple(name for name in copy_model.find_non_leaves(contents) if name not in recomputed)
    return ModelUnderTest(
        target,
        state,
        build_fresh,
        wrapped,
        rebuilds=False,
        non_leaves=non_leaf_names,
        original=module,
    )
