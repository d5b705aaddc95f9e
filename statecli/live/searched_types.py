"""Types whose objects the walk searches, and types whose objects it leaves closed."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import logging
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

mro_of = type.__dict__["__mro__"].__get__
dict_of = type.__dict__["__dict__"].__get__
_Result = TypeVar("_Result")


def type_ids(kinds: Iterable[Any]) -> frozenset[int]:
    """Return the ids of the types. A comparison of ids runs no code of the types."""
    return frozenset(id(kind) for kind in kinds)


def cache_by_type(compute: Callable[[type], _Result]) -> Callable[[type], _Result]:
    """Return a function that caches the result of `compute` for each type, as long as the type exists.

    A result that refers to the type, such as a slot descriptor, keeps the type alive.
    """
    results: dict[int, tuple[weakref.ref[type], _Result]] = {}

    def look_up(kind: type) -> _Result:
        key = id(kind)
        entry = results.get(key)
        if entry is None:
            reference = weakref.ref(kind, lambda _: results.pop(key, None))
            entry = results[key] = (reference, compute(kind))
        return entry[1]

    return look_up


# Types are distinguished by id: a metaclass may define __eq__ and __hash__, and they are the user's code.
ATOM_TYPES = type_ids(
    [
        type(None),
        type(...),
        type(NotImplemented),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        range,
        memoryview,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        torch.Generator,
        torch.UntypedStorage,
        torch.TypedStorage,
        types.ModuleType,
        types.FrameType,
        types.TracebackType,
        types.CodeType,
        types.GeneratorType,
        types.CoroutineType,
        types.AsyncGeneratorType,
        weakref.ref,
        weakref.ProxyType,
        weakref.CallableProxyType,
    ]
)
_CLOSED_TYPES = type_ids(
    [
        type,
        types.ModuleType,
        property,
        functools.cached_property,
        enum.Enum,
        weakref.ref,
        weakref.WeakKeyDictionary,
        weakref.WeakValueDictionary,
        weakref.WeakSet,
        threading.Thread,
        threading.local,
        logging.Logger,
        logging.Handler,
        logging.LoggerAdapter,
        torch.autograd.function.FunctionCtx,
        torch.fx.Graph,
        torch.fx.Node,
        torch._C.ScriptMethod,  # holds the Python module from which a ScriptModule was made
        torch._ops.OperatorBase,
        torch._ops.OpOverloadPacket,
        torch._ops._OpNamespace,
        torch._ops._Ops,
    ]
)
#: Modules of torch whose objects hold the shards of parameters, and buffers for their exchange.
_SHARDING_MODULES = (
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed._composable",
    "torch.distributed.device_mesh",
)
#: Built-in types that only hold other objects, without a name of their own: iterators, views, cells.
TRANSPARENT_TYPES = type_ids(
    [
        *map(type, (iter([]), iter(()), iter({}), iter({}.values()), iter({}.items()), iter(set()), reversed([]))),
        *map(type, (reversed({}), iter(collections.deque()), {}.keys(), {}.values(), {}.items())),
        *(types.MappingProxyType, types.CellType, zip, map, filter, enumerate, reversed, slice),
        *(type(functools.lru_cache(len)), operator.methodcaller, staticmethod, classmethod),
        *(kind for kind in vars(itertools).values() if type(kind) is type),
    ]
)


@cache_by_type
def is_closed(kind: type) -> bool:
    """Return True if the walk does not search objects of this type."""
    if id(kind) in ATOM_TYPES or any(id(base) in _CLOSED_TYPES for base in mro_of(kind)):
        return True
    module = dict_of(kind).get("__module__")
    if type(module) is str and module.startswith(_SHARDING_MODULES):
        return not issubclass(kind, nn.Module)  # `fully_shard` derives a new class from the class of each module
    return module in ("torch.autograd.graph", "torch._C._functions", "torch._C._autograd")


#: Types whose contents `object_contents.py` knows how to list.
_OPENED_TYPES = (
    *(nn.Module, torch.Tensor, dict, list, tuple, collections.deque, set, frozenset, functools.partial, BaseException),
    *(types.FunctionType, types.BuiltinMethodType, types.MethodType),
)


@cache_by_type
def is_unknown(kind: type) -> bool:
    """Return True for a type whose objects may hold other objects in places that no lister reads."""
    return id(kind) not in TRANSPARENT_TYPES and not issubclass(kind, _OPENED_TYPES)


@cache_by_type
def is_wrapper(kind: type) -> bool:
    """Return True for a tensor class that holds its values in other tensors (a wrapper subclass)."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
