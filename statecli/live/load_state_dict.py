"""Find out which errors the `load_state_dict` of a built module would report for a checkpoint.

Hooks and overrides of `_load_from_state_dict` rename, fill in and drop entries by version and by other entries, so they
must run. The module gets a state_dict of meta tensors with the names, shapes and dtypes of the checkpoint. The
state_dict has no values, and no element is copied.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn

from statecli.core.errors import ModelError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import NoteKind, TensorInfo
from statecli.live import pretrained
from statecli.live.attribute_patch import replace_attribute
from statecli.live.built_model import BuiltModel
from statecli.live.load_state_dict_result import Entries, LoadReport
from statecli.live.tensors import is_lazy


def load(built: BuiltModel, entries: Entries, *, by_from_pretrained: bool = True) -> LoadReport:
    """Return the report of a strict `load_state_dict` for a checkpoint with these names, shapes and dtypes.

    Runs the module's own hooks and overrides; torch's code copies no element. Raises ModelError if the model's code
    fails on tensors without values, or torch cannot create a tensor: the answer is then inconclusive.

    `by_from_pretrained`: leave out the names that `from_pretrained` of a transformers model ignores or converts.
    """
    with built.user_code("load_state_dict()"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about meta tensors do not matter, because nothing is loaded
        module = _get_instance(built)
        extra = _silence_extra_states(module)
        state = _build_state_dict(module, entries)
        refusal = _Refusal(module)
        with refusal.catch(), _skip_copies():
            module.load_state_dict(state)
        answer = refusal.build_answer(tuple(name for name in extra if name in state))
        return pretrained.adjust_answer(module, entries, answer) if by_from_pretrained else answer


# --- the module ------------------------------------------------------------------------------------------------------


def _get_instance(built: BuiltModel) -> nn.Module:
    """Return the built module, or a new instance if code outside of torch may read values while loading."""
    if not _has_own_loading(built.module):
        return built.module
    try:
        return built.build_again()
    except ModelError:
        return built.module


_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_LOADING = ("_load_from_state_dict", "load_state_dict")


def _has_own_loading(root: nn.Module) -> bool:
    modules = list(root.modules())
    overrides = (getattr(kind, name) for kind in set(map(type, modules)) for name in _LOADING)
    hooks = (hook for module in modules for registry in _HOOKS for hook in getattr(module, registry).values())
    return any(not str(getattr(code, "__module__", "")).startswith("torch.") for code in (*overrides, *hooks))


def _silence_extra_states(root: nn.Module) -> list[str]:
    """Make each `set_extra_state` do nothing. Return the keys of these extra states."""
    keys = []
    for path, module in root.named_modules(remove_duplicate=False):
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            module.__dict__["set_extra_state"] = lambda state: None  # noqa: ARG005
            keys.append(f"{path}._extra_state".removeprefix("."))
    return keys


def list_extra_states(root: nn.Module) -> list[str]:
    """Return the keys of the extra states in the module's state_dict."""
    return [
        f"{path}._extra_state".removeprefix(".")
        for path, module in root.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


# --- the state_dict --------------------------------------------------------------------------------------------------


class _NoTensor:
    """Stand-in for a value other than a tensor. Code that reads the value fails, and the answer is then unknown."""


def _build_state_dict(module: nn.Module, entries: Entries) -> OrderedDict[str, Any]:
    state = OrderedDict[str, Any]((name, _create_stand_in(tensor)) for name, tensor in entries.tensors.items())
    state.update((name, _NoTensor()) for name in entries.others)
    metadata = entries.metadata
    if entries.as_saved:
        state.update((name, _NoTensor()) for name in list_extra_states(module))
        metadata = {
            path: {"version": submodule._version} for path, submodule in module.named_modules(remove_duplicate=False)
        }
    if metadata is not None:
        state._metadata = {path: dict(local) for path, local in metadata.items()}  # type: ignore[attr-defined]
    return state


def _create_stand_in(tensor: TensorInfo) -> torch.Tensor:
    """Create a meta tensor with dtype, shape and layout of an entry. Raises ModelError if torch cannot create it."""
    if tensor.note_kind is NoteKind.UNINITIALIZED:
        lazy: Any = nn.UninitializedParameter  # its stub has no arguments
        return lazy(device="meta", dtype=_get_dtype(tensor))  # type: ignore[no-any-return]
    if tensor.shape is None:
        raise ModelError(tensor.damage or f"{tensor.fqn} is nested, which the meta device does not support")
    layout = torch.strided if tensor.layout == "quantized" else getattr(torch, tensor.layout, torch.jagged)
    try:
        return torch.empty(tensor.shape, dtype=_get_dtype(tensor), layout=layout, device="meta")
    except (RuntimeError, TypeError, NotImplementedError) as error:
        form = f"{tensor.layout} {tensor.dtype} {list(tensor.shape)}"
        raise ModelError(f"{tensor.fqn} is {form}, which the meta device does not support") from error


def _get_dtype(tensor: TensorInfo) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"{tensor.fqn} has the dtype {tensor.dtype}, which this version of torch does not have")
    return dtype


# --- load without copying --------------------------------------------------------------------------------------------


class _Refusal:
    """Record of loading the root module: torch's error and the report, if the module refuses the checkpoint."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._error: RuntimeError | None = None
        self._answer = LoadReport()

    def build_answer(self, extra: tuple[str, ...]) -> LoadReport:
        return msgspec.structs.replace(self._answer if self._error else LoadReport(), extra=extra)

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Speed up `nn.Module.load_state_dict` in the block, and catch the error of loading the root module.

        torch looks for each child's entries among all entries of the parent: 20 s for a list of 10,000 layers. A
        class's own `load_state_dict` calls the replacement in place of torch's method.
        """

        def replacement(module: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return self._load(module, state_dict, strict, assign)

        with replace_attribute(nn.Module, "load_state_dict", replacement):
            try:
                yield
                self._error = None  # the class's own load_state_dict has handled the error
            except RuntimeError as error:
                if error is not self._error:
                    raise

    def _load(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        missing, unexpected, messages = _load_all(module, state_dict, assign)
        incompatible = nn.modules.module._IncompatibleKeys(missing, unexpected)
        if not messages and not (strict and (missing or unexpected)):
            return incompatible
        error = RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}")
        if module is self._root:
            keys = (missing, unexpected) if strict else ([], [])
            self._error, self._answer = error, _build_answer(*keys, messages)
        raise error


def _load_all(root: nn.Module, state_dict: Mapping[str, Any], assign: bool) -> tuple[list[str], list[str], list[str]]:
    """Load as torch 2.13's `nn.Module.load_state_dict` does. Return missing names, unexpected names and messages."""
    missing: list[str] = []
    unexpected: list[str] = []
    messages: list[str] = []
    metadata = getattr(state_dict, "_metadata", None)
    entries = OrderedDict(state_dict)
    if metadata is not None:
        entries._metadata = metadata  # type: ignore[attr-defined]

    def load(module: nn.Module, local: dict[str, Any], prefix: str) -> None:
        metadata_of_module = {} if metadata is None else metadata.get(prefix[:-1], {})
        if assign:
            metadata_of_module["assign_to_params_buffers"] = assign
        module._load_from_state_dict(local, prefix, metadata_of_module, True, missing, unexpected, messages)
        children = {name: child for name, child in module._modules.items() if child is not None}
        entries_by_child = _group_by_child(local, prefix) if children else {}
        for name, child in children.items():
            load(child, entries_by_child.get(name, {}), f"{prefix}{name}.")
        incompatible = nn.modules.module._IncompatibleKeys(missing, unexpected)
        for hook in module._load_state_dict_post_hooks.values():
            if hook(module, incompatible) is not None:
                raise AssertionError("a hook of register_load_state_dict_post_hook returned a value")

    load(root, entries, "")
    return missing, unexpected, messages


def _group_by_child(local: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    entries_by_child: dict[str, dict[str, Any]] = {}
    for key, value in local.items():
        if key.startswith(prefix):
            name, dot, _ = key[len(prefix) :].partition(".")
            if dot:
                entries_by_child.setdefault(name, {})[key] = value
    return entries_by_child


_MISMATCH = compile_on_use(r"size mismatch for (.+?): copying a param with shape", re.DOTALL)
_NAMED = compile_on_use(r'While (?:copying|swapping) the parameter named "(.+?)", ', re.DOTALL)


def _build_answer(missing: Iterable[str], unexpected: Iterable[str], messages: Iterable[str]) -> LoadReport:
    """Build the report. Each name occurs once, although a hook of the model and a child may both report it missing."""
    mismatched: dict[str, None] = {}
    refusals: list[tuple[str | None, str]] = []
    for message in messages:
        if match := _MISMATCH.match(message):
            mismatched[match[1]] = None
            continue
        name_match = _NAMED.match(message)
        reason = "the entry of the checkpoint is not a tensor" if _NoTensor.__name__ in message else message
        refusals.append((name_match[1] if name_match else None, f"refused: {' '.join(reason.split())}"))
    return LoadReport(
        tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(unexpected)), tuple(mismatched), tuple(refusals)
    )


@contextmanager
def _skip_copies() -> Iterator[None]:
    """Make `copy_` from meta tensors check dtypes and layouts on one element, and leave the target unchanged."""
    torch_copy = torch.Tensor.copy_
    errors: dict[tuple[object, ...], Exception | None] = {}

    def copy_unless_meta(self: torch.Tensor, other: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(other, torch.Tensor) or is_lazy(self) or is_lazy(other) or not other.is_meta:
            return torch_copy(self, other, *args, **kwargs)
        if self.shape != other.shape:
            other.expand_as(self)  # raises what the copy would
        pair = (self.dtype, self.layout, other.dtype, other.layout, other.dim())
        if pair[:2] != pair[2:4] and pair not in errors:
            errors[pair] = _try_copy(torch_copy, self, other)
        error = errors.get(pair)
        if error is not None:
            raise error
        return self

    with replace_attribute(torch.Tensor, "copy_", copy_unless_meta):
        yield


def _try_copy(copy: Callable[..., torch.Tensor], to: torch.Tensor, source: torch.Tensor) -> Exception | None:
    """Copy one element with the dtypes and layouts of `source` and `to`. Return torch's error, or None on success."""
    pair = [torch.empty((1,) * source.dim(), dtype=t.dtype, layout=t.layout, device="cpu") for t in (to, source)]
    try:
        copy(*pair)
    except (RuntimeError, NotImplementedError) as error:
        return error
    return None
