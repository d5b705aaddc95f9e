"""The model under proof: instances of it for each proof to spoil, its tensors by name, what it is called with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from statecli import modules
from statecli.errors import ModelError
from statecli.modules.build import Built
from statecli.modules.origin import Origins
from statecli.modules.spec import Spec
from statecli.state import ModelState, TensorInfo

if TYPE_CHECKING:
    from torch import nn

    from statecli.proofs.inputs import Inputs

#: What is said of a tensor that was not there before the model was first called.
APPEARED = "appears with the first forward"


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
    tensors that are there only after a first forward.
    """

    target: str
    state: ModelState
    fresh: Fresh
    user_code: Callable[[str], AbstractContextManager[None]]
    rebuilds: bool
    inputs: Inputs | None = None
    no_inputs: str = "no input given: --input 2x3 or --inputs file.py:make"
    appeared: frozenset[str] = frozenset()

    def rows(self) -> dict[str, TensorInfo]:
        """The tensors by FQN."""
        return {tensor.fqn: tensor for tensor in self.state.tensors}

    def used(self, *, values: bool = False, seed: int = 0) -> nn.Module:
        """`fresh()`, after one forward on the CPU where that makes tensors appear; its mode is kept."""
        module = self.fresh(values=values, seed=seed)
        if self.appeared:
            self.call(module)
        return module

    def call(self, module: nn.Module, seed: int = 0) -> Any:
        """What `module` gives for the inputs, in eval mode and without gradients. Raises ModelError."""
        import torch

        assert self.inputs is not None  # noqa: S101 - callers have looked
        args, kwargs = self.inputs.make(seed=seed)
        modes = [(one, one.training) for one in module.modules()]
        with self.user_code("calling it"), torch.no_grad():
            try:
                return module.eval()(*args, **kwargs)
            finally:
                for one, training in modes:
                    one.training = training


def of_built(built: Built, target: str) -> Subject:
    """Of a model that a spec names: its constructor is called again for each instance, or the one there is copied."""
    try:
        built.again()
    except ModelError:
        return _of_copies(built.module, target, built)
    return Subject(target, modules.read(built, target), built.again, built.user_code, rebuilds=True)


def of_module(module: nn.Module) -> Subject:
    """Of a live model, which is left as it was: all is done to copies. Raises ModelError where it cannot be copied."""
    name = type(module).__name__
    spec = Spec(name, "", False, name)
    return _of_copies(module, name, Built(spec, module, Origins({}), "cpu", True, lambda _, __: module))


def _of_copies(module: nn.Module, target: str, known: Built) -> Subject:
    def fresh(*, values: bool = False, seed: int = 0) -> nn.Module:  # noqa: ARG001 - there is no constructor to seed
        with known.user_code("copying it"):
            return copy.deepcopy(module, {} if values else hollow(module))

    built = Built(known.spec, fresh(), known.origins, known.init_device, True, lambda values, _: fresh(values=values))
    return Subject(target, modules.read(built, target), fresh, known.user_code, rebuilds=False)


def hollow(module: nn.Module) -> dict[Any, Any]:
    """A memo for `copy.deepcopy` by which each storage is copied as memory of its size that nobody has written to.

    A system hands out such memory without taking any, so the copy of a model takes no more than its Python objects.
    """
    import torch

    from statecli.modules import measure
    from statecli.modules.walk import walk

    storages: dict[int, Any] = {}
    memo: dict[Any, Any] = {"torch": storages}
    for _, tensor in measure.names(walk(module)):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            continue  # copied as it is
        store = tensor.untyped_storage()
        empty = torch.UntypedStorage(store.nbytes(), device=store.device)  # type: ignore[no-untyped-call]
        kept = storages.setdefault(store._cdata, empty)
        if type(tensor) is torch.nn.Parameter:  # its own __deepcopy__ clones it, whatever the memo says of its storage
            view = torch.empty(0, dtype=tensor.dtype, device=store.device)
            view.set_(kept, tensor.storage_offset(), tensor.size(), tensor.stride())
            memo[id(tensor)] = torch.nn.Parameter(view, tensor.requires_grad)
    return memo


def with_inputs(subject: Subject, inputs: Inputs | None, why_not: str) -> Subject:
    """The subject with inputs, and with the rows of what a first forward made appear; as it was where that raises."""
    subject = replace(subject, inputs=inputs, no_inputs=why_not or subject.no_inputs)
    if inputs is None:
        return subject
    module = _called(subject)
    if module is None:
        return subject  # the proofs that need a forward say so
    name = subject.target
    spec = Spec(name, "", False, name)
    after = modules.read(Built(spec, module, Origins({}), "cpu", True, lambda _, __: module), name)
    known = subject.rows()
    new = [row for row in after.tensors if row.fqn not in known or known[row.fqn].shape is None]
    marked = [_marked(row) for row in new]
    kept = [row for row in subject.state.tensors if row.fqn not in {one.fqn for one in new}]
    state = structs.replace(subject.state, tensors=(*kept, *marked))
    return replace(subject, state=state, appeared=frozenset(row.fqn for row in new))


def _called(subject: Subject) -> nn.Module | None:
    """An instance after one forward, without initial values where forward does not need them; None where it raises."""
    for values in (False, True):
        try:
            module = subject.fresh(values=values)
            subject.call(module)
        except ModelError:
            continue
        return module
    return None


def _marked(row: TensorInfo) -> TensorInfo:
    # What would register it in the constructor says nothing of a tensor that forward makes.
    return structs.replace(row, fix=None, note="; ".join(filter(None, [APPEARED, row.note])))
