"""The model under proof: instances of it for each proof to spoil, its tensors by name, what it is called with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from statecli import live
from statecli.core.errors import ModelError
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import ModelState, TensorInfo
from statecli.live.build import Built
from statecli.live.origin import Origins
from statecli.live.spec import Spec

if TYPE_CHECKING:
    from torch import nn

    from statecli.commands.verify.inputs import Inputs


class Fresh(Protocol):
    """One more instance; see `Subject.fresh`."""

    def __call__(self, *, values: bool = False, seed: int = 0) -> nn.Module: ...


@dataclass(frozen=True)
class Subject:
    """`target` is what the user calls the model; `state` has a row for each of its tensors.

    `fresh()` gives an instance that the caller may spoil, in the mode in which it was built. Only with `values=True` do
    its tensors surely hold what the constructor gives them (drawing random numbers is most of the time of building);
    `seed` is the generator's when the constructor runs. Raises ModelError where there is no second instance to be had.
    `rebuilds`: the constructor runs for each; otherwise one live instance is copied, `seed` or not.

    `user_code("moving it")` is around each call of the model's own code: what it prints goes to stderr, what it raises
    becomes a ModelError of one line with the line of its own that failed.

    `inputs` are what forward is called with; where there are none, `no_inputs` says why. `appeared` are the names of
    tensors that are there only after a first forward, `assigned` those under which it puts another tensor. `cut` are
    those that were computed from others before the model was copied: a copy's have no graph back to them. `origins` are
    the lines of the constructor's assignments.
    `raises` is what the plain call of a second instance raised, in a line; None where it gave something.
    `renames` says so where two instances register different names, and cannot be compared. `original` is the live model
    that `fresh` copies: nothing may be written to it.
    """

    target: str
    state: ModelState
    fresh: Fresh
    user_code: Callable[[str], AbstractContextManager[None]]
    rebuilds: bool
    inputs: Inputs | None = None
    no_inputs: str = "no input given: --input 2x3 or --inputs file.py:make"
    appeared: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()
    cut: tuple[str, ...] = ()
    origins: Origins = field(default_factory=Origins)
    raises: str | None = None
    renames: str | None = None
    original: nn.Module | None = None

    def rows(self) -> Mapping[str, TensorInfo]:
        """The tensors by FQN."""
        return self._rows

    @functools.cached_property
    def _rows(self) -> dict[str, TensorInfo]:
        return {tensor.fqn: tensor for tensor in self.state.tensors}

    def used(self, *, values: bool = False, seed: int = 0) -> nn.Module:
        """`fresh()`, after one forward on the CPU where that makes tensors appear; its mode is kept."""
        module = self.fresh(values=values, seed=seed)
        if self.appeared:
            self.call(module)
        return module

    def call(self, module: nn.Module, seed: int = 0, *, training: bool = False, grad: bool = False) -> Any:
        """What `module` gives for the inputs, with a graph if `grad`; in eval mode, or as it is. Raises ModelError.

        The random generators start from `seed`, so that two calls draw the same numbers.
        """
        import torch

        from statecli.commands.verify.inputs import seeded

        assert self.inputs is not None  # noqa: S101 - callers have looked
        args, kwargs = self.inputs.make(seed=seed)
        # A frozen ScriptModule has no mode.
        modes = [(one, one.training) for one in module.modules() if hasattr(one, "training")]
        with self.user_code("calling it"), seeded(seed, module), torch.set_grad_enabled(grad):
            try:
                return (module if training else module.eval())(*args, **kwargs)
            finally:
                for one, training in modes:
                    one.training = training


def of_built(built: Built, target: str) -> Subject:
    """Of a model that a spec names: its constructor is called again for each instance, or the one there is copied."""
    from statecli.live import measure

    measure.refuse_freed(built.module, target)
    try:
        renames = _renames(built.module, built.again())
    except ModelError:
        return _of_copies(built.module, target, built)
    state = live.read(built, target)
    return Subject(target, state, built.again, built.user_code, rebuilds=True, origins=built.origins, renames=renames)


def _renames(one: nn.Module, other: nn.Module) -> str | None:
    """That two instances register tensors under different names, if so."""
    names, others = _registered(one), _registered(other)
    differing = [name for name in (*names, *others) if not (name in names and name in others)]
    return f"the constructor gives other names each time: not every instance has {differing[0]}" if differing else None


def _registered(module: nn.Module) -> dict[str, None]:
    from statecli.live.walk import walk

    return dict.fromkeys(entry.fqn for entry in walk(module).registered)


def of_module(module: nn.Module) -> Subject:
    """Of a live model, which is left as it was: all is done to copies.

    Where it cannot be copied, `fresh` raises the reason, a ModelError, and the rows say nothing of what moves.
    """
    from statecli.live import measure

    name = type(module).__name__
    measure.refuse_freed(module, name)
    return _of_copies(module, name, built_of(module))


def built_of(module: nn.Module) -> Built:
    """A live model as what was built; it is not ours, and only its copies may be read or moved."""
    name = type(module).__name__
    return Built(Spec(name, "", False, name), module, Origins({}), "cpu", True, lambda _, __: module)


def _of_copies(module: nn.Module, target: str, known: Built) -> Subject:
    def fresh(*, values: bool = False, seed: int = 0) -> nn.Module:  # noqa: ARG001 - there is no constructor to seed
        with known.user_code("copying it"):
            return copy_model.of_live(module, values=values, found=found)

    from statecli.commands.verify import copy_model

    found = copy_model.found_in(module)
    try:
        built = replace(
            known, module=fresh(), original=module, values=True, _make=lambda values, _: fresh(values=values)
        )
    except ModelError as error:
        state = live.listed(known, target, str(error).removeprefix(f"{target}: "))
    else:
        state = live.read(built, target)
    # What torch recomputes before each forward finds its parameters again.
    again = {oddity.fqn for oddity in state.oddities if oddity.kind is OddityKind.RECOMPUTED}
    cut = tuple(name for name in copy_model.non_leaves(found) if name not in again)
    return Subject(
        target, state, fresh, known.user_code, rebuilds=False, cut=cut, origins=known.origins, original=module
    )
