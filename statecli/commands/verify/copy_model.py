"""Copy a live model so that proofs may change the copy without any effect on the original.

`copy.deepcopy` is insufficient: it refuses non-leaf tensors and separates views from their parameters. It also shares
functions, so that a hook or an activation `lambda x: self.scale * x` of the copy still uses the original.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from statecli.core.errors import ModelError
from statecli.live import measure
from statecli.live.exception_text import get_exception_text
from statecli.live.object_attributes import get_own_dict
from statecli.live.tensors import find_leaves, get_grad_fn_name, has_memory, identify_storage, is_freed, is_lazy
from statecli.live.walk import walk

#: Maximum bytes of a storage whose values are always copied, because forward may use them as counters or indexes.
COPIED_STORAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class ModelContents:
    """Tensors and modules of a live model. A single walk suffices, because the proofs do not change the model."""

    tensors: list[tuple[str, torch.Tensor]]
    modules: list[nn.Module]


def list_contents(module: nn.Module) -> ModelContents:
    """Return all tensors and modules of a live model, registered or not. A tensor appears under each of its names."""
    result = walk(module)
    modules = {id(submodule): submodule for _, submodule in result.modules}
    for unregistered in result.unregistered:
        modules |= {
            id(step.value): step.value for step in unregistered.steps if issubclass(type(step.value), nn.Module)
        }
    return ModelContents(list(measure.iter_tensors(result)), list(modules.values()))


def copy_live_model(module: nn.Module, *, values: bool, contents: ModelContents | None = None) -> nn.Module:
    """Deep-copy a live model. Unless `values` is set, large tensors of the copy have uninitialized memory.

    Raises ModelError if the copy shares a parameter with the original. Errors of the model's code are not caught.
    """
    contents = list_contents(module) if contents is None else contents
    copy_of_model = _deepcopy(module, memo := build_memo(contents, values=values))
    _copy_tensor_attributes(contents, memo)
    _rebind_references(copy_of_model, contents, memo)
    _make_leaves(copy_of_model)
    _check_no_shared_parameter(contents, copy_of_model)
    return copy_of_model


def find_non_leaves(contents: ModelContents) -> tuple[str, ...]:
    """Return the names of tensors computed by autograd from other tensors."""
    return tuple(name for name, tensor in contents.tensors if get_grad_fn_name(tensor))


def build_memo(contents: ModelContents, *, values: bool) -> dict[Any, Any]:
    """Return a memo for `copy.deepcopy` with copies of the tensors. Tensors that share a storage share its copy.

    Without `values`, large tensors get uninitialized memory. The system allocates memory only on writing, so such a
    copy needs hardly more memory than its Python objects.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[Any, Any] = {"torch": storages}
    tensors = [tensor for _, tensor in contents.tensors]
    memo[id(memo)] = tensors  # kept alive, as in deepcopy, because a reused id would be found in the memo
    memo |= {
        id(tensor_): _create_lazy_buffer(tensor_) for tensor_ in tensors if type(tensor_) is nn.UninitializedBuffer
    }
    plain_tensors = list(filter(_is_plain, tensors))
    for tensor in plain_tensors:
        view = _get_view_in_copy(tensor, storages, values=values)
        if type(tensor) is nn.Parameter:  # Parameter.__deepcopy__ clones its tensor, even if the memo has the storage
            memo[id(tensor)] = nn.Parameter(view, tensor.requires_grad)
        elif not (vars(tensor) or get_grad_fn_name(tensor)):  # deepcopy of a tensor would resolve its conjugation
            memo[id(tensor)] = view.requires_grad_(tensor.requires_grad)
    for tensor in plain_tensors:
        if get_grad_fn_name(tensor):
            memo[id(tensor)] = _create_non_leaf(tensor, _get_view_in_copy(tensor, storages, values=values), memo)
    return memo


def _create_lazy_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Create a lazy buffer like `tensor`. `copy.deepcopy` raises for lazy buffers, but not for lazy parameters."""
    return nn.UninitializedBuffer(tensor.requires_grad, tensor.device, tensor.dtype)  # type: ignore[arg-type]


def _is_plain(tensor: torch.Tensor) -> bool:
    kinds = (torch.Tensor, nn.Parameter)
    return type(tensor) in kinds and tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _get_view_in_copy(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage], *, values: bool) -> torch.Tensor:
    """Return the view of the copied storage that corresponds to `tensor`."""
    store = tensor.untyped_storage()
    if store._cdata not in storages:
        is_copied = (
            (values or store.nbytes() <= COPIED_STORAGE_BYTES) and store.device.type != "meta" and has_memory(store)
        )
        copied_storage = torch.UntypedStorage(store.nbytes(), device=store.device)  # type: ignore[no-untyped-call]
        storages[store._cdata] = copied_storage.copy_(store) if is_copied else copied_storage
    view = torch.empty(0, dtype=tensor.dtype, device=store.device)
    with torch.no_grad():
        view.set_(storages[store._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        if is_freed(tensor):  # `set_` has allocated memory with arbitrary values for the copy
            storages[store._cdata].resize_(store.nbytes())
        view = torch._neg_view(view) if tensor.is_neg() else view
        return view.conj() if tensor.is_conj() else view


def _create_non_leaf(tensor: torch.Tensor, view: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Return `view` as a non-leaf tensor. Its leaves are the copies of the leaves of `tensor`."""

    class Stand(torch.autograd.Function):
        @staticmethod
        def forward(_: object, data: torch.Tensor, *__: torch.Tensor) -> torch.Tensor:
            return data.view_as(data)

        @staticmethod
        def backward(_: object, *__: Any) -> Any:
            raise ModelError("a copied non-leaf tensor has no graph")  # callers check `ModelUnderTest.non_leaves`

    Stand._backward_cls.__name__ = str(get_grad_fn_name(tensor))
    leaves = [memo[id(leaf)] for leaf in find_leaves(tensor) or () if id(leaf) in memo]
    with torch.enable_grad():
        inputs = [leaf for leaf in leaves if leaf.requires_grad] or [torch.empty(0, requires_grad=True)]
        non_leaf: torch.Tensor = Stand.apply(view, *inputs)  # type: ignore[no-untyped-call]
        return non_leaf


def _copy_tensor_attributes(contents: ModelContents, memo: dict[Any, Any]) -> None:
    """Copy the Python attributes of each tensor to the copy of the tensor.

    `nn.Parameter.__deepcopy__` drops attributes, and `Params4bit.__deepcopy__` of bitsandbytes keeps the module of the
    original and copies `quant_state` a second time.
    """
    for _, tensor in contents.tensors:
        copied_tensor = memo.get(id(tensor))
        if copied_tensor is None or copied_tensor is tensor or not issubclass(type(copied_tensor), torch.Tensor):
            continue
        attributes = get_own_dict(copied_tensor)
        for name, value in get_own_dict(tensor).items():
            if id(value) in memo:
                attributes[name] = memo[id(value)]
            elif name not in attributes:
                with contextlib.suppress(Exception):  # the user's object may refuse; its absence is reported
                    attributes[name] = copy.deepcopy(value, memo)


def _deepcopy(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    try:
        copy_of_model = copy.deepcopy(module, memo)
    except Exception as error:
        attribute = _find_uncopyable(module, memo)
        if attribute is None:
            raise
        raise ModelError(
            f"the model cannot be copied because of {attribute}: {type(error).__name__}: {get_exception_text(error)}"
        ) from error
    if not isinstance(copy_of_model, nn.Module) or copy_of_model is module:
        raise ModelError("the model cannot be copied: its __deepcopy__ does not return a new module")
    return copy_of_model


def _find_uncopyable(module: nn.Module, memo: dict[Any, Any]) -> str | None:
    """Return the name and type of the first attribute that deepcopy cannot copy: `blocks.0.lock (a lock)`."""
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            try:
                copy.deepcopy(value, ChainMap({}, memo)) if name != "_modules" else None  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 - the user's code may raise anything; this attribute is the result
                return f"{path + '.' if path else ''}{name} (a {type(value).__name__})"
    return None


def _make_leaves(copy_of_model: nn.Module) -> None:
    """Turn the copy's parameters into leaf tensors. A ScriptModule copies parameters under autograd, as non-leaves."""
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in copy_of_model.parameters():
            if not is_lazy(parameter) and get_grad_fn_name(parameter):
                parameter.detach_().requires_grad_()


# --- references to the original ---------------------------------------------------------------------------------------


def _rebind_references(copy_of_model: nn.Module, contents: ModelContents, memo: dict[Any, Any]) -> None:
    """Let functions and weak references in attributes and hooks of the copy refer to the copied modules.

    Only an object itself knows its weak proxies, so its list of references is read.
    """
    targets = {
        id(reference): memo[id(module)]
        for module in contents.modules
        if id(module) in memo
        for reference in weakref.getweakrefs(module)
    }
    for submodule in copy_of_model.modules():
        for holder in _iter_holders(submodule):
            for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
                if id(value) in targets:
                    holder[key] = _rebind_weak_reference(value, targets[id(value)])
                elif type(value) is types.FunctionType:
                    holder[key] = _rebind_function(value, memo)
                elif type(value) is types.MethodType and type(value.__func__) is functools.partial:
                    holder[key] = types.MethodType(_rebind_partial(value.__func__, memo), value.__self__)


def _rebind_weak_reference(reference: object, target: nn.Module) -> Any:
    if type(reference) is weakref.ref:
        return weakref.ref(target, reference.__callback__)
    return weakref.proxy(target) if type(reference) in weakref.ProxyTypes else reference


def _iter_holders(module: nn.Module) -> Iterator[Any]:
    yield vars(module)
    for value in vars(module).values():
        if isinstance(value, (dict, list)):
            yield value


def _rebind_function(function: types.FunctionType, memo: dict[Any, Any]) -> types.FunctionType:
    cells = tuple(_rebind_cell(cell, memo) for cell in function.__closure__ or ())
    if all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    rebound = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    vars(rebound).update(vars(function))
    return rebound


def _rebind_partial(function: functools.partial[Any], memo: dict[Any, Any]) -> functools.partial[Any]:
    """Replace methods in the arguments of a functools.partial by the copy's methods, as for torchao's `extra_repr`."""

    def rebind(value: Any) -> Any:
        is_method = type(value) is types.MethodType and id(value.__self__) in memo
        return types.MethodType(value.__func__, memo[id(value.__self__)]) if is_method else value

    keywords = {name: rebind(value) for name, value in function.keywords.items()}
    return functools.partial(function.func, *map(rebind, function.args), **keywords)


def _rebind_cell(cell: types.CellType, memo: dict[Any, Any]) -> types.CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return cell
    return types.CellType(memo[id(value)]) if id(value) in memo else cell


def _check_no_shared_parameter(contents: ModelContents, copy_of_model: nn.Module) -> None:
    """Raise ModelError if the copy shares a parameter with the model, because proofs overwrite parameters."""
    names_by_storage = {identify_storage(tensor): name for name, tensor in contents.tensors if _is_written(tensor)}
    for name, tensor in measure.iter_tensors(walk(copy_of_model)):
        original = names_by_storage.get(identify_storage(tensor)) if _is_written(tensor) else None
        if original is not None:
            reason = f"{name} of the copy shares memory with {original} of the model"
            raise ModelError(
                f"the checks would change the model, because a copy shares memory with the model: {reason}"
            )


def _is_written(tensor: torch.Tensor) -> bool:
    return issubclass(type(tensor), nn.Parameter) and (is_lazy(tensor) or tensor.numel() > 0)
