"""Contents of an object: the objects in its dict, slots, items, closure cells and class bodies, each with a label.

A lister reads where Python keeps the objects. It runs no code of the model: see `walk.py`.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from statecli.live.object_attributes import (
    SCRIPT_ATTRIBUTE,
    find_dict_getter,
    get_own_dict,
    is_module,
    is_scripted,
    list_script_attributes,
    read_registry,
)
from statecli.live.searched_types import (
    ATOM_TYPES,
    TRANSPARENT_TYPES,
    cache_by_type,
    dict_of,
    is_closed,
    mro_of,
    type_ids,
)

_CONTAINER_TYPES = type_ids([dict, collections.OrderedDict, list, tuple, set, frozenset, collections.deque])
#: Types whose repr is Python's own and short enough for a name.
_LITERAL_TYPES = type_ids([str, int, bool, float, bytes, type(None)])
#: Attributes that abstract classes and namedtuples add to class bodies.
_GENERATED_ATTRIBUTES = frozenset(["_abc_impl", "_fields", "_field_defaults"])
_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"])


def is_empty(obj: Any) -> bool:
    """Return True for an empty container, such as a module's hook dicts, and for a function that holds no objects."""
    kind = type(obj)
    if kind is types.FunctionType:  # methods of transformers' classes would be most of the opened objects
        return _is_empty_function(obj)
    # Of the container types, only OrderedDict takes attributes.
    takes_attributes = kind is collections.OrderedDict
    return id(kind) in _CONTAINER_TYPES and not obj and not (takes_attributes and dict.__len__(obj.__dict__))


def _is_empty_function(function: types.FunctionType) -> bool:
    if function.__closure__ or dict.__len__(function.__dict__):
        return False
    positional, by_name = _get_defaults(function)
    return all(is_closed(type(value)) for value in positional) and all(is_closed(type(value)) for _, value in by_name)


def _get_defaults(function: types.FunctionType) -> tuple[Iterable[Any], Iterable[tuple[str, Any]]]:
    """Return a function's defaults: values of positional parameters, and (name, value) of keyword-only parameters.

    The tuple and the dict that hold them may be instances of user classes.
    """
    positional, by_name = function.__defaults__, function.__kwdefaults__
    return (
        () if positional is None else tuple.__iter__(positional),
        () if by_name is None else dict.items(by_name),
    )


#: Contents of an object: (label, value, how).
_Contents = Iterable[tuple[str, Any, str]]
#: Function that lists the contents of an object. Its second argument is True if the keys of a dict are counters.
_Lister = Callable[[Any, bool], _Contents]


@cache_by_type
def find_listers(kind: type) -> tuple[_Lister, ...]:
    """Return the functions that list the contents of an object of this type. Together they list all contents."""
    if id(kind) in TRANSPARENT_TYPES:
        return (_list_referents,)
    if kind is types.MethodType:
        return (_list_method,)
    listers: list[_Lister] = [list_contents for base, list_contents in _LISTERS if issubclass(kind, base)][:1]
    if not listers and kind is types.BuiltinMethodType:
        listers = [_list_builtin_method]
    elif not listers and _is_object_array(kind):
        listers = [_list_array]
    if listers == [_list_dict] and issubclass(kind, collections.defaultdict):
        listers.append(_list_default_factory)
    if not issubclass(kind, nn.Module) and find_dict_getter(kind) is not None:
        listers.append(_list_attributes)
    if _find_declared_slots(kind):
        listers.append(_list_slots)
    return tuple(listers)


def _list_referents(obj: object, _: bool) -> _Contents:
    # Since Python 3.12, the referents may include the type itself.
    referents = [value for value in gc.get_referents(obj) if value is not type(obj)]
    return [(f"[#{i}]", value, "item") for i, value in enumerate(referents)]


def _list_method(method: types.MethodType, _: bool) -> _Contents:
    return [(".__self__", method.__self__, "attribute"), (".__func__", method.__func__, "attribute")]


def _list_builtin_method(method: types.BuiltinMethodType, _: bool) -> _Contents:
    # A method such as `tensor.add`, kept as a callable, holds the tensor.
    return [(".__self__", method.__self__, "attribute")]


def _list_exception(error: BaseException, _: bool) -> _Contents:
    return [(".args", BaseException.__dict__["args"].__get__(error), "attribute")]


def _list_attributes(obj: object, _: bool) -> _Contents:
    return [(f".{name}", value, "attribute") for name, value in list(dict.items(get_own_dict(obj)))]


def _list_module(module: nn.Module, _: bool) -> Iterator[tuple[str, Any, str]]:
    attributes = get_own_dict(module)
    registered = set()
    held_by_tensors: set[int] = set()
    for registry in ("_parameters", "_buffers", "_modules"):
        for name, value in read_registry(module, registry, attributes):
            if value is not None:
                registered.add(name)
                if issubclass(type(value), torch.Tensor):
                    held_by_tensors |= _list_ids_moved_by(value)
            yield f".{name}", value, "registered"
    for name, value in list(dict.items(attributes)):
        if id(type(value)) in ATOM_TYPES or is_empty(value):
            continue  # most attributes of a module are flags and empty dicts of hooks
        if id(value) in held_by_tensors:
            continue  # listed below the tensor, because its `.to` may move the object (`quant_state`)
        if name in registered:
            yield f".__dict__[{name!r}]", value, "hidden"
        elif name not in _REGISTRIES and not (name == SCRIPT_ATTRIBUTE and is_scripted(module)):
            yield f".{name}", value, "attribute"
    if is_scripted(module):
        for name, value in list_script_attributes(module):
            if name not in registered:
                yield f".{name}", value, "attribute"


def _list_ids_moved_by(tensor: torch.Tensor) -> set[int]:
    """Return the ids of a tensor's attribute values that may move together with the tensor, such as `quant_state`.

    These are all objects if the tensor's class has its own `.to`. Otherwise they are the objects of bitsandbytes,
    because the tensor may have lost its class.
    """
    attributes = get_own_dict(tensor)
    is_moving = has_own_to(type(tensor))
    return {
        id(value)
        for value in dict.values(attributes)
        if (is_moving or _is_of_bitsandbytes(type(value))) and not (is_closed(type(value)) or is_module(value))
    }


@cache_by_type
def _is_of_bitsandbytes(kind: type) -> bool:
    module = dict_of(kind).get("__module__")
    return type(module) is str and module.partition(".")[0] == "bitsandbytes"


@cache_by_type
def has_own_to(kind: type) -> bool:
    """Return True for a tensor class with its own `.to`, which may move more than the tensor (bitsandbytes)."""
    if not issubclass(kind, torch.Tensor):
        return False
    bases = itertools.takewhile(lambda base: base is not torch.Tensor, mro_of(kind))
    return any("to" in dict_of(base) for base in bases)


def _list_dict(mapping: dict[Any, Any], is_numbered: bool) -> Iterator[tuple[str, Any, str]]:
    for i, (key, value) in enumerate(list(dict.items(mapping))):
        literal = None if is_numbered else _format_literal(key)
        yield f"[{literal or f'#{i}'}]", value, "item"
        if literal is None:
            yield f".keys()[#{i}]", key, "key"


def _list_default_factory(mapping: object, _: bool) -> _Contents:
    member = collections.defaultdict.__dict__["default_factory"]
    return [(".default_factory", member.__get__(mapping), "attribute")]


@cache_by_type
def _is_object_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def _list_array(array: object, _: bool) -> Iterator[tuple[str, Any, str]]:
    """Yield the contents of an array of Python objects as nested lists. An array of numbers holds no tensor."""
    kind = sys.modules["numpy"].ndarray
    if kind.__dict__["dtype"].__get__(array).hasobject:
        yield ".tolist()", kind.tolist(array), "item"


def _format_literal(key: object) -> str | None:
    """Return `key` in Python's notation, or None if `repr` would run user code or would give no useful name."""
    if issubclass(type(key), str):
        return str.__repr__(key)
    if id(type(key)) in _LITERAL_TYPES:
        return repr(key)
    if type(key) is tuple and all(id(type(part)) in _LITERAL_TYPES for part in key):
        return repr(key)
    return None


def _list_sequence(obj: Any, _: bool) -> Iterator[tuple[str, Any, str]]:
    kind = type(obj)
    base = next(base for base in (list, tuple, collections.deque) if issubclass(kind, base))
    fields = _find_namedtuple_fields(kind)
    for i, value in enumerate(list(base.__iter__(obj))):
        yield (f".{fields[i]}" if i < len(fields) else f"[{i}]"), value, "item"


@cache_by_type
def _find_namedtuple_fields(kind: type) -> tuple[str, ...]:
    """Return the field names of a namedtuple type, or () for other types."""
    for base in mro_of(kind) if issubclass(kind, tuple) else ():
        names = dict_of(base).get("_fields")
        if type(names) is tuple and all(type(name) is str for name in names):
            return names
    return ()


def _list_set(obj: Any, _: bool) -> Iterator[tuple[str, Any, str]]:
    base = set if issubclass(type(obj), set) else frozenset
    # Sets have the order of addresses, so members are sorted by facts that can be read without running their code.
    members = sorted(base.__iter__(obj), key=_get_sort_key)
    yield from ((f"[#{i}]", value, "item") for i, value in enumerate(members))


def _get_sort_key(obj: Any) -> tuple[str, str]:
    if issubclass(type(obj), torch.Tensor) and not torch.nn.parameter.is_lazy(obj):
        return type(obj).__name__, f"{obj.dtype} {tuple(obj.shape)}"
    return type(obj).__name__, ""


def _list_function(function: types.FunctionType, _: bool) -> Iterator[tuple[str, Any, str]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        value = gc.get_referents(cell)  # an empty cell raises on .cell_contents
        if value:
            yield f".__closure__[{name!r}]", value[0], "closure"
    positional, by_name = _get_defaults(function)
    for i, value in enumerate(positional):
        yield f".__defaults__[{i}]", value, "default"
    for name, value in by_name:
        yield f".__kwdefaults__[{_format_literal(name)}]", value, "default"


def _list_partial(partial: functools.partial[Any], _: bool) -> Iterator[tuple[str, Any, str]]:
    members = functools.partial.__dict__
    yield ".func", members["func"].__get__(partial), "argument"
    for i, value in enumerate(members["args"].__get__(partial)):
        yield f".args[{i}]", value, "argument"
    for name, value in dict.items(members["keywords"].__get__(partial)):
        yield f".keywords[{name!r}]", value, "argument"


def _list_slots(obj: object, _: bool) -> Iterator[tuple[str, Any, str]]:
    for name, member in _find_declared_slots(type(obj)):
        try:
            yield f".{name}", member.__get__(obj), "attribute"
        except AttributeError:
            continue  # an unfilled slot


@cache_by_type
def _find_declared_slots(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return (name, member) of each slot that a Python class declares. Members of C structs are left out."""
    members = []
    for base in mro_of(kind):
        if "__slots__" in dict_of(base):
            members += [(n, m) for n, m in dict_of(base).items() if type(m) is types.MemberDescriptorType]
    return tuple(members)


#: Base types with their listers. The first base type from which a type is derived decides.
_LISTERS: tuple[tuple[Any, _Lister], ...] = (
    (nn.Module, _list_module),
    (dict, _list_dict),
    ((list, tuple, collections.deque), _list_sequence),
    ((set, frozenset), _list_set),
    (types.FunctionType, _list_function),
    (functools.partial, _list_partial),
    (BaseException, _list_exception),
)


def list_class_attributes(obj: object, kind: type, classes: dict[int, type]) -> Iterator[tuple[str, Any, str]]:
    """Yield tensors and containers in the class bodies of user classes, once per class."""
    for base in mro_of(kind):
        if id(base) in classes:
            continue
        classes[id(base)] = base
        if not _is_user_class(base):
            continue
        for name, value in list(dict_of(base).items()):
            if (name.startswith("__") and not _is_code(value)) or is_closed(type(value)) or is_empty(value):
                continue
            if name not in _GENERATED_ATTRIBUTES and (_is_code(value) or not _is_descriptor(type(value))):
                yield (f".__class__.{name}" if _is_shadowed(obj, name) else f".{name}"), value, "class"


def _is_code(value: object) -> bool:
    """Return True for a function or method in a class body, whose defaults or closure may hold tensors."""
    return type(value) in (types.FunctionType, staticmethod, classmethod)


def _is_shadowed(obj: Any, name: str) -> bool:
    attributes = get_own_dict(obj)
    if dict.__contains__(attributes, name):
        return True
    registries = ("_parameters", "_buffers", "_modules") if is_module(obj) else ()
    return any(
        name == registered_name
        for registry in registries
        for registered_name, _ in read_registry(obj, registry, attributes)
    )


@cache_by_type
def _is_user_class(kind: type) -> bool:
    module = dict_of(kind).get("__module__")
    top = module.partition(".")[0] if type(module) is str else "builtins"
    return top != "torch" and top not in sys.stdlib_module_names


@cache_by_type
def _is_descriptor(kind: type) -> bool:
    return any("__get__" in dict_of(base) for base in mro_of(kind) if base is not object)
