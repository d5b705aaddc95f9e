"""Check the functions that a pickle stores so that a program calls them later, such as in a `functools.partial`.

A program that loads a checkpoint calls stored functions: an activation, a method of a configuration. So a partial may
hold a function of tensors or a class of torch modules, with numbers, tensors and dtypes as arguments. With an object as
argument, the function would call methods of an object chosen by the pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from statecli.pickle_scan import known_names
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Global, Obj, Value

#: Function that returns the plain name whose call built a value; None if unknown.
RootLookup: TypeAlias = Callable[[Value], "str | None"]
#: Function that returns True if a value may be an argument of a call.
ArgumentTest: TypeAlias = Callable[[Value, RootLookup], bool]

#: Keyword arguments of tensor functions that may be texts, because they name a method or a mode, never a path.
_TEXT_ARGUMENTS = frozenset(
    [
        *("approximate", "distribution", "generator", "mode", "nonlinearity", "normalization_mode", "ord"),
        *("padding", "padding_mode", "reduction", "rounding_mode", "driver", "UPLO"),
    ]
)
#: Classes of containers and numbers that call none of their arguments.
DATA_CLASSES = frozenset(
    [
        *known_names.qualify_names(
            "builtins", "dict list tuple set frozenset int float bool complex str bytes bytearray object"
        ),
        *known_names.qualify_names("collections", "OrderedDict Counter deque defaultdict"),
    ]
)
#: Prefixes of classes and functions that return values, with any arguments from the pickle.
_VALUE_PREFIXES = (
    *("torch._utils._rebuild_", "torch.device", "torch.Size", "builtins.complex", "builtins.bytearray", "numpy.dtype"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
)
#: Classes and functions whose objects pass a call on to the function that they hold.
_WRAPPERS = frozenset(
    ["functools.partial", "types.GenericAlias", "torch.jit._pickle.restore_type_tag", "builtins.getattr"]
)
#: Prefixes of classes whose objects can be called, and of the exceptions among them.
_CALLABLE_PREFIXES = (
    "torch.nn.",
    "torch.ao.",
    "torch.quantization.",
    "torch.distributions.transforms.",
    "torch.distributions.constraints.",
    "torch.optim.swa_utils.",
    "numpy.poly1d",
)
_NOT_CALLABLE_PREFIXES = (
    "torch.nn.parameter.",
    "torch.nn.utils.rnn.",
    "torch.nn.parallel.distributed._BucketCapacityConfig",
    "torch.ao.quantization.qconfig.",
    "torch.quantization.qconfig.",
    "torch.optim.swa_utils.SWALR",
)


class DeferredCalls:
    """Checker of the functions that a pickle stores for later calls. Shared containers are checked once."""

    def __init__(self, root: RootLookup, steps: Steps) -> None:
        self._root = root
        self._steps = steps
        #: Ids of containers whose values all pass a test, by the test.
        self._fitting: dict[ArgumentTest, set[int]] = {}

    def builds_data(self, function: str, args: Value, kwargs: Value) -> bool:
        """Return True if `function`, called with these and any further arguments, only computes or builds data.

        Raises OutOfSteps.
        """
        if type(args) is not tuple or not (kwargs is None or type(kwargs) is dict):
            return False
        keywords = kwargs or {}
        self._steps.take(Budget.FLOW, len(args) + len(keywords))
        if known_names.computes_tensors(function):
            has_known_texts = all(type(arg) is not str or key in _TEXT_ARGUMENTS for key, arg in keywords.items())
            has_text = any(type(arg) is str for arg in args)
            return has_known_texts and not has_text and self._all_fit((*args, *keywords.values()), _is_value)
        if function in ("builtins.bytes", "builtins.bytearray") and args:  # the number N creates N bytes
            return False
        if function in DATA_CLASSES or (known_names.is_class(function) and function not in known_names.HOOK_CLASSES):
            return self._all_fit((*args, *keywords.values()), _is_constructor_argument)
        return False

    def _all_fit(self, values: Iterable[Value], fits: ArgumentTest) -> bool:
        """Return True if all names and calls in the values, also in nested containers, pass the test `fits`."""
        waiting: list[Any] = list(values)
        fitting = self._fitting.setdefault(fits, set())
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if type(value) in (list, tuple, dict):
                if id(value) not in seen and id(value) not in fitting:
                    seen.add(id(value))
                    self._steps.take(Budget.FLOW, len(value))
                    waiting.extend(value.values() if type(value) is dict else value)
            elif type(value) in (Global, Obj) and not fits(value, self._root):
                return False
        fitting |= seen
        return True


def is_callable(value: Value, root: RootLookup) -> bool:
    """Return True for a function, a class, a partial or an object with a `__call__` method."""
    name = root(value)
    if name is None:
        return False
    if type(value) is Global:
        return (
            known_names.is_class(name) or name in _WRAPPERS or known_names.computes_tensors(name) or is_callback(name)
        )
    return name in _WRAPPERS or (name.startswith(_CALLABLE_PREFIXES) and not name.startswith(_NOT_CALLABLE_PREFIXES))


def is_callback(name: str) -> bool:
    """Return True for a function or class that a pickle may store but must not call; False for functions of tensors."""
    is_stored = known_names.may_be_named(name) and not known_names.computes_tensors(name)
    return is_stored and not name.startswith(("typing.", "types."))


def _is_value(value: Value, root: RootLookup) -> bool:
    name = root(value) or ""
    if type(value) is Global:
        return name.startswith(("torch.", "numpy.", "builtins.")) and not is_callable(value, root)
    return name.startswith(_VALUE_PREFIXES)


def _is_constructor_argument(value: Value, root: RootLookup) -> bool:
    """Return True for a plain value, and for a callable (or partial) that a constructor stores without calling it."""
    name = root(value) or ""
    is_kept = name == "functools.partial" or (
        type(value) is Global and (name in DATA_CLASSES or is_callable(value, root))
    )
    return is_kept or _is_value(value, root)
