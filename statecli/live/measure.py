"""Measure which tensors of a model follow a move and which are saved, on an instance that only statecli uses.

`.to("cuda")` calls `module._apply(fn)`, overridden or not. So does the stand-in for a move: its `fn` returns fresh
memory of the same kind for each tensor. A tensor still in the old memory would not follow a move. Unlike a move to
meta, the stand-in keeps each Parameter object and swaps its data, as CUDA does. Tied weights and aliases therefore come
out as on CUDA. The fresh memory is never written to, so the stand-in is nearly free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from statecli import live
from statecli.core.errors import ModelError
from statecli.live.built_model import BuiltModel
from statecli.live.move_model import get_moved_model, move_model
from statecli.live.tensors import identify_storage, is_freed, is_lazy, split_disjoint, split_parts
from statecli.live.walk import WalkResult, walk


@dataclass
class MoveTrial:
    """Result of a test move of a model: the storage of each tensor before and after the move.

    Attributes:
        before: Storage key of each name before the move.
        memories: For each name, the first name of its memory before the move; equal for names that share an element.
        after: Tensor and storage key of each name after the move, without names removed by the move.
        keeps_objects: False if the move made new objects (meta), so that ties and aliases cannot be measured.
        reason: Why no move could be tried; None after a move.
    """

    before: dict[str, int | str] = field(default_factory=dict)
    memories: dict[str, str] = field(default_factory=dict)
    after: dict[str, tuple[torch.Tensor, int | str]] = field(default_factory=dict)
    keeps_objects: bool = True
    reason: str | None = None

    def follows_device(self, fqn: str) -> bool | None:
        """Return True if the tensor `fqn` moved, or None if no move was possible or the move removed the name."""
        if self.reason is not None or fqn not in self.after or fqn not in self.before:
            return None
        tensor, key = self.after[fqn]
        return key != self.before[fqn] if self.keeps_objects else tensor.device.type == "meta"


def iter_tensors(result: WalkResult) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor that `walk` found, registered tensors first."""
    for entry in result.registered:
        if entry.tensor is not None:
            yield entry.fqn, entry.tensor
    for unregistered in result.unregistered:
        yield unregistered.fqn, unregistered.tensor


def map_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Map every name of every tensor of `module` to the tensor, registered tensors first."""
    tensors_by_name: dict[str, torch.Tensor] = {}
    for name, tensor in iter_tensors(walk(module)):
        tensors_by_name.setdefault(name, tensor)
    return tensors_by_name


def check_no_freed_storage(module: nn.Module, target: str) -> None:
    """Raise ModelError for a tensor whose storage was freed, because reading its values kills the process."""
    with torch._C.DisableTorchFunctionSubclass():
        for name, tensor in iter_tensors(walk(module)):
            if is_freed(tensor):
                size = sum(part.untyped_storage().nbytes() for part in split_parts(tensor))
                needed_bytes = tensor.numel() * tensor.element_size()
                raise ModelError(
                    f"{target}: {name}: its storage was freed: shape {list(tensor.shape)} needs {needed_bytes:,} "
                    f"bytes, but the storage has {size:,}; restore the values first"
                )


def try_stand_in_move(built: BuiltModel, result: WalkResult) -> MoveTrial:
    """Move `built.module` to fresh memory instead of a device. If this fails, try other moves on new instances."""
    reasons: list[str] = []
    stand_in_moves: list[Callable[[nn.Module], object]] = [_apply_fresh_memory, _apply_clone]
    if built.init_device != "meta":  # a move from meta to meta shows nothing
        stand_in_moves.append(_move_to_meta)
    for number, move in enumerate(stand_in_moves):
        try:
            module = built.module if number == 0 else built.build_again()
            with built.user_code("moving the model"):
                return _try_move(module, result if number == 0 else walk(module), move)
        except ModelError as error:
            reasons.append(str(error).removeprefix(f"{built.spec.text}: "))
    return MoveTrial(reason=reasons[0])


def try_fresh_memory(module: nn.Module) -> MoveTrial:
    """Give new memory to each tensor that `nn.Module._apply` reaches. These tensors follow every move."""
    return _try_move(module, walk(module), _apply_fresh_memory)


def _try_move(module: nn.Module, result: WalkResult, move: Callable[[nn.Module], object]) -> MoveTrial:
    tensors_before = list(iter_tensors(result))  # keeps old tensors alive, so that no address is used twice
    storages = {name: identify_storage(tensor) for name, tensor in reversed(tensors_before)}
    memories = _group_by_memory(storages, dict(reversed(tensors_before)))
    trial = MoveTrial(storages, memories, keeps_objects=move is not _move_to_meta)
    # A Parameter keeps its identity and changes its storage: only the storage itself can be kept alive.
    stores = [_keep_storage_alive(tensor) for _, tensor in tensors_before]
    for name, tensor in iter_tensors(walk(get_moved_model(module, move(module)))):
        trial.after.setdefault(name, (tensor, identify_storage(tensor)))
    del stores
    return trial


def _group_by_memory(storages: Mapping[str, int | str], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Map each name to the first name of the same memory. Disjoint chunks of a storage count as separate memories."""
    by_storage: dict[int | str, dict[str, torch.Tensor]] = {}
    for name, key in storages.items():
        by_storage.setdefault(key, {})[name] = tensors[name]
    groups = (group for sharing in by_storage.values() for group in split_disjoint(sharing))
    return {name: group[0] for group in groups for name in group}


def _keep_storage_alive(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.detach() if not is_lazy(tensor) else tensor.data
        except (RuntimeError, NotImplementedError, ValueError):
            return tensor


def _apply_fresh_memory(module: nn.Module) -> None:
    module._apply(_allocate_like)  # type: ignore[no-untyped-call]


def _allocate_like(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        return tensor.to(tensor.device, copy=True)
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()  # empty_like gives a sparse tensor no values at all
    return torch.empty_like(tensor)


def _apply_clone(module: nn.Module) -> None:
    module._apply(lambda tensor: tensor.clone())  # type: ignore[no-untyped-call]


def _move_to_meta(module: nn.Module) -> object:
    return module.to("meta")


def has_own_to(module: nn.Module) -> bool:
    """Return True if the class overrides `.to`, so that its own code decides which tensors move."""
    return type(module).to is not nn.Module.to


def has_own_cuda_only(module: nn.Module) -> bool:
    """Return True if the class overrides `.cuda` but not `.to`. A call of `.to` does not run the override."""
    return type(module).cuda is not nn.Module.cuda and not has_own_to(module)


def try_own_to(built: BuiltModel, result: WalkResult) -> MoveTrial | None:
    """Try the model's own `.to("meta")` on `built.module`, after `try_stand_in_move`. Return None if it raises."""
    try:
        with built.user_code("moving the model"):
            return _try_move(built.module, result, _move_to_meta)
    except ModelError:
        return None  # the stand-in has already given a result


def is_torch_code(method: Callable[..., Any]) -> bool:
    """Return True for a method of torch, or for a built-in method (without a `__module__`)."""
    return getattr(method, "__module__", None) is None or method.__module__.startswith("torch.")


def has_own_move(module: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Return True if `module.to` runs code outside of torch. `modules` are all registered modules."""
    methods: list[Callable[..., Any]] = [type(module).to]
    methods += [type(module_)._apply for module_ in modules]
    return not all(map(is_torch_code, methods))


def try_fake_gpu_move(built: BuiltModel) -> dict[str, bool] | None:
    """Move a new instance to a fake CUDA device. Return by name whether each tensor follows, or None if this fails.

    Tries without values first, then with values, because the model's code may read them.
    """
    for context, values in ((live.fake_gpu.use_fake_gpu, False), (live.fake_gpu_values.use_fake_gpu_with_values, True)):
        try:
            module = built.build_again(values=values)
            with (
                live.fake_gpu.watch_move(context) as record,
                built.user_code(f"moving the model to {live.fake_gpu.DISPLAY_NAME}"),
            ):
                moved_module = move_model(module, live.fake_gpu.DEVICE)
                return {
                    name: live.fake_gpu.follows_device(tensor, record)
                    for name, tensor in iter_tensors(walk(moved_module))
                }
        except (ModelError, RuntimeError, TypeError):  # raised by torch for tensors that cannot be fake
            continue
    return None


# --- saving -------------------------------------------------------------------------------------------------


@dataclass
class SavedState:
    """Names and storages in the model's own `state_dict()`.

    Attributes:
        keys: Storage key of the model's tensor in each entry; None for a copy or another value.
        storages: Storage keys of all tensors in the entries.
        renamed_storages: Storage keys of tensors under names that the model does not have, as from a state_dict hook.
        copies: (dtype, shape) of copies whose original is unknown.
        copies_by_name: (dtype, shape) of each copy by its name.
        reason: Why `state_dict()` raised; None without an error.
    """

    keys: dict[str, int | str | None] = field(default_factory=dict)
    storages: frozenset[int | str] = frozenset()
    renamed_storages: frozenset[int | str] = frozenset()
    copies: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    copies_by_name: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    reason: str | None = None

    def includes(self, name: str, fqn: str, tensor: torch.Tensor, key: int | str) -> bool | None:
        """Return True if `state_dict()` includes `tensor`, which is called `fqn`. Return None if inconclusive.

        A registered tensor is saved under its own key `name`, an unregistered tensor (name "") under any key. A metric
        of torchmetrics saves copies of its states under their names.
        """
        if self.reason is not None:
            return None
        if name in self.keys and self.keys[name] in (None, key):
            return True
        if key in self.storages:
            return not name or key in self.renamed_storages
        if is_lazy(tensor) or tensor.is_nested:
            return False
        dtype_and_shape = (str(tensor.dtype), tuple(tensor.shape))
        if not name and self.copies_by_name.get(fqn) == dtype_and_shape:
            return True
        return None if dtype_and_shape in self.copies else False


def measure_state_dict(built: BuiltModel, result: WalkResult) -> SavedState:
    """Call the model's `state_dict()` and record its entries, extra state included."""
    try:
        with built.user_code("state_dict()"), torch.no_grad():
            entries = dict(built.listed_module.state_dict())
    except ModelError as error:
        return SavedState(reason=str(error).removeprefix(f"{built.spec.text}: "))
    tensors_by_name = dict(iter_tensors(result))
    model_storages = {identify_storage(tensor) for tensor in tensors_by_name.values()}
    holder = nn.Module()
    object.__setattr__(holder, "state", entries)
    tensors = _name_state_dict_tensors(walk(holder), entries)
    direct = {id(value) for key, value in entries.items() if key in tensors_by_name}
    keys = {str(key): _find_model_storage(value, model_storages) for key, value in entries.items()}
    copies = {
        name: (str(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors
        if not (is_lazy(tensor) or tensor.is_nested) and identify_storage(tensor) not in model_storages
    }
    unnamed = {
        copies[name]
        for name, tensor in tensors
        if name in copies and id(tensor) not in direct and name not in tensors_by_name
    }
    renamed_storages = {identify_storage(tensor) for _, tensor in tensors if id(tensor) not in direct}
    stores = frozenset(identify_storage(tensor) for _, tensor in tensors)
    return SavedState(keys, stores, frozenset(renamed_storages), frozenset(unnamed), copies)


def _name_state_dict_tensors(result: WalkResult, entries: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) for each tensor in a state_dict. The tensors in a list `preds` are called `preds[0]`..."""
    keys = {f"[{key!r}]": str(key) for key in entries if type(key) is str}
    tensors = []
    for unregistered in result.unregistered:
        label, *inner_labels = [step.label for step in unregistered.steps[1:]] or [""]
        tensors.append((keys.get(label, label) + "".join(inner_labels), unregistered.tensor))
    return tensors


def _find_model_storage(value: Any, model_storages: set[int | str]) -> int | str | None:
    """Return the storage key of `value` if it is a tensor and shares a storage with the model, otherwise None."""
    key = identify_storage(value) if issubclass(type(value), torch.Tensor) else None
    return key if key in model_storages else None
