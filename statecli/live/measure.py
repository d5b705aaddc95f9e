"""Which tensors follow a move and which get saved, by trying both on an instance that is ours alone.

`.to("cuda")` goes through `module._apply(fn)`, overridden or not, and so does the stand-in used here: `_apply` with a
function that gives each tensor fresh memory of the same kind. Whatever still lies in the old memory afterwards would
have stayed behind. Unlike a move to meta this keeps each Parameter object and swaps the data inside it, as CUDA does,
so ties and further names come out as they do there. The fresh memory is never touched, which makes it nearly free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from statecli.core.errors import ModelError
from statecli.live.build import Built
from statecli.live.tensors import is_freed, is_lazy, parts, storage
from statecli.live.walk import Walk, walk


@dataclass
class Trial:
    """What one move did: name -> the tensor and storage before and after. A name that is gone is not in `after`.

    `identity` False: the move made new objects (meta), so that it says nothing of ties and further names.
    `reason` is set where no move could be tried at all.
    """

    before: dict[str, int | str] = field(default_factory=dict)
    after: dict[str, tuple[torch.Tensor, int | str]] = field(default_factory=dict)
    identity: bool = True
    reason: str | None = None

    def followed(self, name: str) -> bool | None:
        """Whether the tensor called `name` moved; None where it cannot be told, or is gone."""
        if self.reason is not None or name not in self.after or name not in self.before:
            return None
        tensor, key = self.after[name]
        return key != self.before[name] if self.identity else tensor.device.type == "meta"


def names(found: Walk) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of a walk, registered ones first."""
    for entry in found.registered:
        if entry.tensor is not None:
            yield entry.fqn, entry.tensor
    for held in found.held:
        yield held.fqn, held.tensor


def refuse_freed(module: nn.Module, target: str) -> None:
    """Raise ModelError for a tensor whose storage was freed: whatever reads its values kills the process."""
    with torch._C.DisableTorchFunctionSubclass():
        for name, tensor in names(walk(module)):
            if is_freed(tensor):
                size = sum(part.untyped_storage().nbytes() for part in parts(tensor))
                raise ModelError(
                    f"{target}: {name}: its storage was freed: it holds {size:,} bytes and {list(tensor.shape)} needs "
                    f"{tensor.numel() * tensor.element_size():,}; give it its values back first"
                )


def stand_in(built: Built, found: Walk) -> Trial:
    """Try a move on `built.module`, walked as `found`; the next way on a fresh instance where one fails."""
    reasons: list[str] = []
    ways: list[tuple[Callable[[nn.Module], Any], bool]] = [(_renewed, True), (_cloned, True), (_to_meta, False)]
    if built.init_device == "meta":
        ways.pop()  # from meta to meta nothing can be seen
    for number, (way, identity) in enumerate(ways):
        try:
            module = built.module if number == 0 else built.again()
            with built.user_code("moving it"):
                return _try(module, found if number == 0 else walk(module), way, identity)
        except ModelError as error:
            reasons.append(str(error).removeprefix(f"{built.spec.text}: "))
    return Trial(reason=reasons[0])


def _try(module: nn.Module, found: Walk, way: Callable[[nn.Module], Any], identity: bool) -> Trial:
    kept = list(names(found))  # old tensors stay alive, so that no address is given out twice
    trial = Trial({name: storage(tensor)[0] for name, tensor in reversed(kept)}, identity=identity)
    # A Parameter keeps its identity and changes its storage: only the storage itself can be kept alive.
    stores = [_kept_alive(tensor) for _, tensor in kept]
    for name, tensor in names(walk(moved(module, way(module)))):
        trial.after.setdefault(name, (tensor, storage(tensor)[0]))
    del stores
    return trial


def moved(module: nn.Module, given: object) -> nn.Module:
    """What is used after a move of `module` that gave `given`: as in `model = model.to(...)`, if that is a model."""
    return given if isinstance(given, nn.Module) else module


def _kept_alive(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.detach() if not is_lazy(tensor) else tensor.data
        except (RuntimeError, NotImplementedError, ValueError):
            return tensor


def _renewed(module: nn.Module) -> None:
    module._apply(_fresh)  # type: ignore[no-untyped-call]


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        return tensor.to(tensor.device, copy=True)
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()  # empty_like gives a sparse tensor no values at all
    return torch.empty_like(tensor)


def _cloned(module: nn.Module) -> None:
    module._apply(lambda tensor: tensor.clone())  # type: ignore[no-untyped-call]


def _to_meta(module: nn.Module) -> object:
    return module.to("meta")


def overrides_to(module: nn.Module) -> bool:
    """Whether the class has a `.to` of its own, which then decides what moves."""
    return type(module).to is not nn.Module.to


def overrides_cuda_alone(module: nn.Module) -> bool:
    """Whether the class has a `.cuda` of its own and torch's `.to`, which does not call it."""
    return type(module).cuda is not nn.Module.cuda and not overrides_to(module)


def by_own_to(built: Built, found: Walk) -> Trial | None:
    """The model's own `.to("meta")` on `built.module`, after `stand_in`; None where that raises."""
    try:
        with built.user_code("moving it"):
            return _try(built.module, found, _to_meta, identity=False)
    except ModelError:
        return None  # the stand-in has already answered


def is_of_torch(method: Callable[..., Any]) -> bool:
    """Or Python's own, which says no module."""
    return getattr(method, "__module__", None) is None or method.__module__.startswith("torch.")


def has_own_move(module: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Whether code that is not torch's has a part in what `module.to` does; `modules` are all that it registers."""
    methods: list[Callable[..., Any]] = [type(module).to]
    methods += [type(one)._apply for one in modules]
    return not all(map(is_of_torch, methods))


def by_fake_gpu(built: Built) -> dict[str, bool] | None:
    """Whether each tensor is on a fake CUDA device after `.to` of a further instance, by name; None if that fails.

    Without values first, and with values where code of the model needs them.
    """
    # Late, because the proofs are built on this package.
    from statecli.live import fake_gpu, fake_gpu_values

    for stage, values in ((fake_gpu.faked, False), (fake_gpu_values.pretended, True)):
        try:
            module = built.again(values=values)
            with fake_gpu.on_gpu(stage) as kept, built.user_code(f"moving it to {fake_gpu.SHOWN}"):
                there = moved(module, module.to(fake_gpu.DEVICE))
                return {name: fake_gpu.has_followed(tensor, kept) for name, tensor in names(walk(there))}
        except (ModelError, RuntimeError, TypeError, NotImplementedError):  # torch's own, of tensors it cannot fake
            continue
    return None


# --- saving -------------------------------------------------------------------------------------------------


@dataclass
class Saved:
    """The names and storages in the model's own `state_dict()`; `reason` is set where that raises.

    `keys` gives the storage of another tensor of the model where that is what the name holds, else None.
    `renamed` are the storages held under keys that are no tensor's name: what a state_dict hook made of them.
    `copies` are (dtype, shape) of tensors in it that are copies: whose they are cannot be told, except of those that it
    holds `under` the name of a tensor.
    """

    keys: dict[str, int | str | None] = field(default_factory=dict)
    storages: frozenset[int | str] = frozenset()
    renamed: frozenset[int | str] = frozenset()
    copies: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    under: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    reason: str | None = None

    def holds(self, name: str, fqn: str, tensor: torch.Tensor, key: int | str) -> bool | None:
        """Whether `tensor`, called `fqn`, is saved; None where it cannot be told.

        What is registered is saved under its own `name`, what is not ("") under any. A metric of torchmetrics saves
        copies of its states, under their names.
        """
        if self.reason is not None:
            return None
        if name in self.keys and self.keys[name] in (None, key):
            return True
        if key in self.storages:
            return not name or key in self.renamed
        if is_lazy(tensor) or tensor.is_nested:
            return False
        like = (str(tensor.dtype), tuple(tensor.shape))
        if not name and self.under.get(fqn) == like:
            return True
        return None if like in self.copies else False


def saved(built: Built, found: Walk) -> Saved:
    """Call the real `state_dict()` and note what it holds, extra state and all."""
    try:
        with built.user_code("state_dict()"), _grad_free():
            entries = dict(built.listed.state_dict())
    except ModelError as error:
        return Saved(reason=str(error).removeprefix(f"{built.spec.text}: "))
    known = dict(names(found))
    own = {storage(tensor)[0] for tensor in known.values()}
    holder = nn.Module()
    object.__setattr__(holder, "state", entries)
    tensors = _held_by(walk(holder), entries)
    direct = {id(value) for key, value in entries.items() if key in known}
    keys = {str(key): _whose(value, own) for key, value in entries.items()}
    copies = {
        name: (str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors
        if not (is_lazy(tensor) or tensor.is_nested) and storage(tensor)[0] not in own
    }
    unnamed = {
        copies[name] for name, tensor in tensors if name in copies and id(tensor) not in direct and name not in known
    }
    renamed = {storage(tensor)[0] for _, tensor in tensors if id(tensor) not in direct}
    stores = frozenset(storage(tensor)[0] for _, tensor in tensors)
    return Saved(keys, stores, frozenset(renamed), frozenset(unnamed), copies)


def _held_by(found: Walk, entries: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Every tensor in a state_dict, by the name that it has in a model: `preds[0]` in the entry `preds`."""
    keys = {f"[{key!r}]": str(key) for key in entries if type(key) is str}
    tensors = []
    for held in found.held:
        label, *rest = [step.label for step in held.steps[1:]] or [""]
        tensors.append((keys.get(label, label) + "".join(rest), held.tensor))
    return tensors


def _whose(value: Any, own: set[int | str]) -> int | str | None:
    """The storage of `value` if a tensor of the model lies there; None for a copy and for anything else."""
    key = storage(value)[0] if issubclass(type(value), torch.Tensor) else None
    return key if key in own else None


@contextmanager
def _grad_free() -> Iterator[None]:
    with torch.no_grad():
        yield
