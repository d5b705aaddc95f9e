"""Copies of a live model that share nothing with it which a proof may spoil.

`copy.deepcopy` alone does not do: it refuses non-leaf tensors, parts views from the parameters that they look into, and
shares functions, so that a hook or an activation `lambda x: self.scale * x` of the copy still works on the original.
"""

from __future__ import annotations

import copy
import types
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from statecli.core.errors import ModelError
from statecli.live import measure
from statecli.live.build import text_of
from statecli.live.tensors import derived_by, has_memory, is_freed, is_lazy, leaves_of, storage
from statecli.live.walk import Holding, own_dict, walk

#: Bytes of a storage up to which its values are copied in any case: forward may count or look up by them.
SMALL = 1 << 16


@dataclass(frozen=True)
class Found:
    """What one walk of a live model found: every (name, tensor), how each is held, and the modules.

    A live model is walked once, since it does not change while it is proved.
    """

    tensors: list[tuple[str, torch.Tensor]]
    layout: dict[str, Holding]
    modules: list[nn.Module]


def found_in(module: nn.Module) -> Found:
    """Every tensor under every name, and every module, registered or not."""
    found = walk(module)
    modules = {id(one): one for _, one in found.modules}
    for held in found.held:
        modules |= {id(step.held): step.held for step in held.steps if issubclass(type(step.held), nn.Module)}
    return Found(list(measure.names(found)), found.layout(), list(modules.values()))


def of_live(module: nn.Module, *, values: bool, found: Found | None = None) -> nn.Module:
    """A copy of `module`, with its values or with memory that nobody has written to. `found` is what is in it.

    Where code of a class makes another model of it (a GraphModule registers each plain tensor as a buffer), it is
    copied attribute by attribute, if that gives the same. Raises ModelError where the copy would still reach a
    parameter of the original, and whatever its own code raises.
    """
    found = found_in(module) if found is None else found
    copied = _finished(_copied(module, memo := memo_of(found, values=values)), memo)
    kinds = {id(type(one)): type(one) for one in found.modules}  # a metaclass may hash as it likes
    itself = {key for key, kind in kinds.items() if _copies_itself(kind)}
    own = [one for one in found.modules if id(type(one)) in itself]
    if own and walk(copied).layout() != found.layout:
        copied = _by_attributes(module, found, own, values=values) or copied
    _check_apart(found, copied)
    return copied


def _finished(copied: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    _rebind(copied, memo)
    _make_leaves(copied)
    return copied


#: Methods by which a class decides what a copy of it holds.
_COPYING = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")


def _copies_itself(kind: type) -> bool:
    """Whether code that is neither Python's nor of torch.nn has a part in copying modules of this class."""
    if issubclass(kind, torch.jit.ScriptModule):
        return False  # its state lies in C++, and only its own code copies that
    methods = (getattr(kind, name, None) for name in _COPYING)
    places = (getattr(method, "__module__", None) for method in methods if method is not None)
    return any(place is not None and not place.startswith("torch.nn.") for place in places)


def _by_attributes(module: nn.Module, found: Found, own: list[nn.Module], *, values: bool) -> nn.Module | None:
    """A copy in which the modules of `own` hold a copy of each attribute; None if that is not the same model either."""
    memo = memo_of(found, values=values)
    for one in own:
        memo[id(one)] = object.__new__(type(one))
    try:
        for one in own:
            vars(memo[id(one)]).update(copy.deepcopy(own_dict(one), memo))
        copied = _finished(_copied(module, memo), memo)
    except Exception:  # noqa: BLE001 - anybody's code, and there is another copy
        return None
    return copied if walk(copied).layout() == found.layout else None


def non_leaves(found: Found) -> tuple[str, ...]:
    """The names of the tensors that autograd computed from others."""
    return tuple(name for name, tensor in found.tensors if derived_by(tensor))


def memo_of(found: Found, *, values: bool) -> dict[Any, Any]:
    """A memo for `copy.deepcopy` by which each storage is copied once, whatever looks into it.

    Without `values` what is not small is memory of its size that nobody has written to. A system hands out such memory
    without taking any, so the copy of a model takes no more than its Python objects.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[Any, Any] = {"torch": storages}
    tensors = [tensor for _, tensor in found.tensors]
    memo[id(memo)] = tensors  # kept alive, as deepcopy itself does: an id that is given out again would be in it
    memo |= {id(one): _lazy_buffer(one) for one in tensors if type(one) is nn.UninitializedBuffer}
    plain = list(filter(_is_plain, tensors))
    for tensor in plain:
        view = _in_copy(tensor, storages, values=values)
        if type(tensor) is nn.Parameter:  # its own __deepcopy__ clones it, whatever the memo says of its storage
            memo[id(tensor)] = nn.Parameter(view, tensor.requires_grad)
        elif not (vars(tensor) or derived_by(tensor)):  # that of a tensor makes plain what is conjugated
            memo[id(tensor)] = view.requires_grad_(tensor.requires_grad)
    for tensor in plain:
        if derived_by(tensor):
            memo[id(tensor)] = _computed(tensor, _in_copy(tensor, storages, values=values), memo)
    return memo


def _lazy_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Another one; `copy.deepcopy` raises of a buffer without a shape, and not of a parameter without one."""
    return nn.UninitializedBuffer(tensor.requires_grad, tensor.device, tensor.dtype)  # type: ignore[arg-type]


def _is_plain(tensor: torch.Tensor) -> bool:
    """What else there is has a `__deepcopy__` that knows more of it, and is copied as it is."""
    kinds = (torch.Tensor, nn.Parameter)
    return type(tensor) in kinds and tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _in_copy(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage], *, values: bool) -> torch.Tensor:
    """What lies where `tensor` lies, in the copy of its storage."""
    store = tensor.untyped_storage()
    if store._cdata not in storages:
        drawn = (values or store.nbytes() <= SMALL) and store.device.type != "meta" and has_memory(store)
        empty = torch.UntypedStorage(store.nbytes(), device=store.device)  # type: ignore[no-untyped-call]
        storages[store._cdata] = empty.copy_(store) if drawn else empty
    view = torch.empty(0, dtype=tensor.dtype, device=store.device)
    with torch.no_grad():
        view.set_(storages[store._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        if is_freed(tensor):  # `set_` has given the copy memory that nobody has written to
            storages[store._cdata].resize_(store.nbytes())
        view = torch._neg_view(view) if tensor.is_neg() else view
        return view.conj() if tensor.is_conj() else view


def _computed(tensor: torch.Tensor, view: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """`view` as a non-leaf of the operation that computed `tensor`, from the copies of the same leaves."""

    class Stand(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, data: torch.Tensor, *__: torch.Tensor) -> torch.Tensor:
            return data.view_as(data)

        @staticmethod
        def backward(_: Any, *__: Any) -> Any:
            raise ModelError("a copied non-leaf tensor has no graph")  # `Subject.cut` is asked before

    Stand._backward_cls.__name__ = str(derived_by(tensor))
    leaves = [memo[id(leaf)] for leaf in leaves_of(tensor) or () if id(leaf) in memo]
    with torch.enable_grad():
        known = [leaf for leaf in leaves if leaf.requires_grad] or [torch.empty(0, requires_grad=True)]
        made: torch.Tensor = Stand.apply(view, *known)  # type: ignore[no-untyped-call]
        return made


def _copied(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        where = _uncopied(module, memo)
        if where is None:
            raise
        raise ModelError(f"it cannot be copied, for {where}: {type(error).__name__}: {text_of(error)}") from error
    if not isinstance(copied, nn.Module) or copied is module:
        raise ModelError("it cannot be copied: its __deepcopy__ gives no other module")
    return copied


def _uncopied(module: nn.Module, memo: dict[Any, Any]) -> str | None:
    """The first attribute that cannot be copied by itself, and what it is: `blocks.0.lock (a lock)`."""
    for path, one in module.named_modules():
        for name, value in vars(one).items():
            try:
                copy.deepcopy(value, ChainMap({}, memo)) if name != "_modules" else None  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 - anybody's code; this is the one that is looked for
                return f"{path + '.' if path else ''}{name} (a {type(value).__name__})"
    return None


def _make_leaves(copied: nn.Module) -> None:
    """A ScriptModule copies its parameters by an operation that autograd sees."""
    with torch._C.DisableTorchFunctionSubclass():
        for one in copied.parameters():
            if not is_lazy(one) and derived_by(one):
                one.detach_().requires_grad_()


# --- functions that know the original ---------------------------------------------------------------------------------


def _rebind(copied: nn.Module, memo: dict[Any, Any]) -> None:
    """Functions among the attributes and hooks of the copy that close over parts of the original get the copy's."""
    for one in copied.modules():
        for holder in _holders(one):
            for key, value in list(_items(holder)):
                if type(value) is types.FunctionType:
                    holder[key] = _rebound(value, memo)


def _holders(module: nn.Module) -> Iterator[Any]:
    yield vars(module)
    for value in vars(module).values():
        if isinstance(value, (dict, list)):
            yield value


def _items(holder: Any) -> Iterator[tuple[Any, Any]]:
    return iter(holder.items()) if isinstance(holder, dict) else enumerate(holder)


def _rebound(function: types.FunctionType, memo: dict[Any, Any]) -> types.FunctionType:
    cells = tuple(_cell(cell, memo) for cell in function.__closure__ or ())
    if all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    return made


def _cell(cell: types.CellType, memo: dict[Any, Any]) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # empty
        return cell
    return types.CellType(memo[id(held)]) if id(held) in memo else cell


def _check_apart(found: Found, copied: nn.Module) -> None:
    """Parameters are overwritten by proofs: one that the copy shares with the model must not be."""
    own = {storage(tensor)[0]: name for name, tensor in found.tensors if _is_written(tensor)}
    for name, tensor in measure.names(walk(copied)):
        original = own.get(storage(tensor)[0]) if _is_written(tensor) else None
        if original is not None:
            why = f"{name} of the copy is still {original} of the model itself"
            raise ModelError(f"it cannot be copied so that it is left as it is: {why}")


def _is_written(tensor: torch.Tensor) -> bool:
    return issubclass(type(tensor), nn.Parameter) and (is_lazy(tensor) or tensor.numel() > 0)


__all__ = ["found_in", "non_leaves", "of_live"]
