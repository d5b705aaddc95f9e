"""Check that a pickle stores functions and other callables only in attributes in which torch stores callables.

Python code calls certain attributes of an object: `forward` and the hooks in `_forward_hooks` of a module, each module
in `_modules`, `get` of a mapping. An attribute of the instance hides the method of its class. So a class of torch may
keep functions only at the attributes where torch stores functions (`_FUNCTION_ATTRIBUTES`), and hooks only in dicts of
hooks. Tensors and modules may be only in torch's own places. Sources: torch/nn/modules/module.py (`__setstate__`,
`__getattr__`, `_call_impl`) of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import deferred_calls, known_names
from statecli.pickle_scan.deferred_calls import RootLookup
from statecli.pickle_scan.expected_calls import is_clean
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles import safe_globals
from statecli.pickles.nodes import Global, Key, Obj, Persistent, Value

#: Keys and values of a dict, in the order in which the pickle sets them.
Pairs: TypeAlias = list[tuple[Value, Value]]

#: Attributes of torch's classes that are functions or callable objects in pickles of torch.
_FUNCTION_ATTRIBUTES = frozenset(
    [
        # torch.nn: layers of transformers, losses.
        *("activation", "distance_function"),
        # torch.nn.utils, torch.ao.quantization: hooks, and callables that their classes keep.
        *("hook", "fn", "module_hook", "_pruning_methods", "p", "callable_args", "qconfig"),
        # torch.optim.
        *("lr_lambdas", "anneal_func", "_anneal_func", "_scale_fn_ref", "_scale_fn_custom", "avg_fn", "multi_avg_fn"),
    ]
)
#: Attributes of distributions and transforms whose values are transforms, constraints or distributions.
_TRANSFORM_ATTRIBUTES = frozenset(
    [
        *("transforms", "transform", "parts", "base_transform", "_inv", "tseq"),
        *("base_constraint", "cseq", "constraint", "distribution", "base_dist"),
    ]
)
_DISTRIBUTIONS_PREFIX = "torch.distributions."
#: Attributes of a hook that may be functions or modules.
_HOOK_ATTRIBUTES = _FUNCTION_ATTRIBUTES | {"module"}
_HOOK_DICTS = compile_on_use(r"_\w*hooks(?:_with_kwargs|_always_called)?")
_TENSOR_DICTS = frozenset(["_parameters", "_buffers"])
_MODULE_DICT = "_modules"
#: Prefixes of classes of modules, whose `__setstate__` takes a dict with the dicts of a module.
_MODULE_CLASS_PREFIXES = (
    *("torch.nn.modules.", "torch.nn.parallel.", "torch.nn.utils.parametriz", "torch.ao.nn."),
    *("torch.nn.quantized.", "torch.nn.qat.", "torch.nn.intrinsic.", "torch.nn.quantizable.", "torch.ao.quantization."),
    *("torch.quantization.", "torch.optim.swa_utils.AveragedModel"),
)
#: Classes below these prefixes that are not modules.
_OTHER_CLASSES = frozenset(
    [
        *known_names.HOOK_CLASSES,
        *(
            f"torch.{package}{name}"
            for package in ("ao.quantization.", "quantization.")
            for name in ("qconfig.QConfig", "qconfig.QConfigDynamic", "observer._PartialWrapper")
        ),
        *known_names.qualify_names("torch.nn.parallel.distributed", "_BucketCapacityConfig"),
    ]
)
#: Prefixes of functions and classes that return a tensor, which may be a parameter or a buffer.
_TENSOR_PREFIXES = ("torch._utils._rebuild_", "torch._tensor._rebuild_", "torch.nn.parameter.", "torch.distributed.")
_CONSTANT = compile_on_use(r"torch\.[a-z]\w*")


def is_module_class(name: str) -> bool:
    """Return True if this is a class of torch whose objects are modules."""
    return name.startswith(_MODULE_CLASS_PREFIXES) and name not in _OTHER_CLASSES and known_names.is_class(name)


def list_pairs(value: Value, root: RootLookup) -> Pairs | None:
    """Return all (key, value) pairs that were set in a dict or OrderedDict; None for other values."""
    if type(value) is dict:
        return list(value.items())
    if type(value) is not Obj or root(value) not in ("collections.OrderedDict", "builtins.dict") or value.elems:
        return None
    pairs: Pairs = []
    for argument in value.args:
        if type(argument) is dict:
            pairs += argument.items()
        elif type(argument) in (list, tuple):
            if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in argument):
                return None
            pairs += [tuple(pair) for pair in argument]
        elif type(argument) is not Global and argument is not None:
            return None
    return pairs + list((value.items or {}).items())


def has_modules(state: Value, root: RootLookup) -> bool:
    """Return True if a state has the dicts of parameters and submodules, which every module has."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    entries: dict[Value, Value] = {}
    for part in parts:
        entries |= part if type(part) is dict else {}
    return all(list_pairs(entries.get(name), root) is not None for name in ("_parameters", _MODULE_DICT))


class Attributes:
    """Checker of the attributes of torch's own classes in a pickle."""

    def __init__(self, root: RootLookup, steps: Steps) -> None:
        self._root = root
        self._steps = steps
        #: Valid dicts that were checked, as (attribute, id of the dict).
        self._sound: set[tuple[str, int]] = set()

    def is_expected(self, holder: str, key: str, value: Value) -> bool:
        """Return True if an object of class `holder` may have this attribute. Raises OutOfSteps."""
        if key == _MODULE_DICT:
            return self._is_dict_of(key, value, self._is_module)
        if key in _TENSOR_DICTS:
            return self._is_dict_of(key, value, self._is_tensor)
        if _HOOK_DICTS.fullmatch(key) and type(value) in (dict, Obj):
            return self._is_dict_of(key, value, self._is_hook)
        values = value if type(value) in (list, tuple) else (value,)
        self._steps.take(Budget.FLOW, len(values))
        if not holder.startswith(_DISTRIBUTIONS_PREFIX):
            is_named = key in (_HOOK_ATTRIBUTES if holder in known_names.HOOK_CLASSES else _FUNCTION_ATTRIBUTES)
        else:
            is_named = key in _TRANSFORM_ATTRIBUTES and all(
                (self._root(function) or "").startswith(_DISTRIBUTIONS_PREFIX) for function in values
            )
        return is_named or not any(map(self._may_be_called, values))

    def _is_dict_of(self, key: str, value: Value, fits: Callable[[Value], bool]) -> bool:
        """Return True for None, and for a dict of such values whose names are plain texts."""
        if value is None or (key, id(value)) in self._sound:
            return True
        pairs = list_pairs(value, self._root)
        if pairs is None:
            return False
        self._steps.take(Budget.FLOW, len(pairs))
        if any(type(name) is Key or (type(name) is str and name.startswith("__")) for name, _ in pairs):
            return False
        if not all(fits(item) for _, item in pairs):
            return False
        self._sound.add((key, id(value)))
        return True

    def _may_be_called(self, value: Value) -> bool:
        name = self._root(value) or ""
        if type(value) is Global:
            is_constant = _CONSTANT.fullmatch(name) and name in safe_globals.list_allowed_names()
            return not is_constant and is_clean(name) and not known_names.is_member(name)
        return type(value) is Obj and deferred_calls.is_callable(value, self._root)

    def _is_module(self, value: Value) -> bool:
        name = self._root(value) if type(value) is Obj else None
        return value is None or (name is not None and (is_module_class(name) or not is_clean(name)))

    def _is_tensor(self, value: Value) -> bool:
        if value is None or type(value) is Persistent:
            return True
        name = self._root(value) if type(value) is Obj else None
        if name is None:
            return False
        has_tensor_name = name.startswith("torch.") and name.endswith(("Tensor", "Parameter", "Buffer"))
        return has_tensor_name or name.startswith(_TENSOR_PREFIXES) or not is_clean(name)

    def _is_hook(self, value: Value) -> bool:
        """Return True for a value that torch may store as a hook, and for names that other checks report as unclean."""
        if type(value) not in (Global, Obj):
            return type(value) in (bool, int, type(None))
        name = self._root(value) or ""
        if name == "functools.partial" and type(value) is Obj:
            state: Any = value.state
            functions: Sequence[Value] = (*value.args[:1], *(state[:1] if type(state) is tuple else ()))
            return all(type(function) is Global and not is_clean(self._root(function) or "") for function in functions)
        if not is_clean(name):
            return True
        if type(value) is Obj:
            return name in known_names.HOOK_CLASSES
        of_tensors = name.startswith("torch.") and known_names.computes_tensors(name)
        return of_tensors or known_names.is_hook_of_lazy_module(*name.rpartition(".")[::2])
