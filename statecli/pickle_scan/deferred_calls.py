"""Calls that a pickle puts off, and what in it can be called: a partial is judged as the call that it is one day.

Whoever loads a checkpoint calls what it keeps: an activation, a method of a configuration. So a partial may hold a
function of tensors or a class that torch's modules are made of, with numbers, tensors and dtypes beside it. With an
object beside it, the function calls that object's methods, which are whatever the pickle made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from statecli.pickle_scan import known_names
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.machine import Global, Obj, Value

#: The plain name that a call gives an object of.
Root: TypeAlias = Callable[[Value], "str | None"]
#: Whether a value may be among the arguments of a call.
Fits: TypeAlias = Callable[[Value, Root], bool]

#: Which words the arguments of a function of tensors may be: its ways to do it, never a path.
_WORDS = frozenset(
    [
        *("approximate", "distribution", "generator", "mode", "nonlinearity", "normalization_mode", "ord"),
        *("padding", "padding_mode", "reduction", "rounding_mode", "driver", "UPLO"),
    ]
)
_CONTAINERS = frozenset(
    [
        *known_names.names(
            "builtins", "dict list tuple set frozenset int float bool complex str bytes bytearray object"
        ),
        *known_names.names("collections", "OrderedDict Counter deque defaultdict"),
    ]
)
#: Objects of these are values, whatever the pickle says of them.
_VALUES = (
    *("torch._utils._rebuild_", "torch.device", "torch.Size", "builtins.complex", "builtins.bytearray", "numpy.dtype"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
)
#: What a pickle calls through: by calling it, what it holds is called.
_WRAPPERS = frozenset(
    ["functools.partial", "types.GenericAlias", "torch.jit._pickle.restore_type_tag", "builtins.getattr"]
)
#: Where classes are defined whose objects can be called, and those of them that cannot.
_CALLABLE = (
    "torch.nn.",
    "torch.ao.",
    "torch.quantization.",
    "torch.distributions.transforms.",
    "torch.distributions.constraints.",
    "torch.optim.swa_utils.",
    "numpy.poly1d",
)
_NOT_CALLABLE = (
    "torch.nn.parameter.",
    "torch.nn.utils.rnn.",
    "torch.nn.parallel.distributed._BucketCapacityConfig",
    "torch.ao.quantization.qconfig.",
    "torch.quantization.qconfig.",
    "torch.optim.swa_utils.SWALR",
)


class Calls:
    """The calls that one pickle puts off. A container that many of them hold is judged once."""

    def __init__(self, root: Root, steps: Steps) -> None:
        self._root = root
        self._steps = steps
        #: Containers of which all values fit, by the test that they were given to.
        self._fitting: dict[Fits, set[int]] = {}

    def is_of_data(self, function: str, args: Value, kwargs: Value) -> bool:
        """Whether to call this with these arguments, and with whatever a caller adds, computes or builds data.

        Raises OutOfSteps.
        """
        if type(args) is not tuple or not (kwargs is None or type(kwargs) is dict):
            return False
        named = kwargs or {}
        self._steps.take(Budget.FLOW, len(args) + len(named))
        if known_names.computes(function):
            words = all(type(one) is not str or key in _WORDS for key, one in named.items())
            texts = any(type(one) is str for one in args)
            return words and not texts and self._all((*args, *named.values()), _is_value)
        if function in _CONTAINERS or (known_names.is_class(function) and function not in known_names.HOOKS):
            return self._all((*args, *named.values()), _is_kept)
        return False

    def _all(self, values: Iterable[Value], fits: Fits) -> bool:
        """Whether all of these fit, and all in the containers among them; a container may hold itself."""
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


def is_container(value: Value, root: Root) -> bool:
    """Return whether this is the name of a class of containers or numbers, which runs nothing that it is given."""
    return type(value) is Global and root(value) in _CONTAINERS


def is_callable(value: Value, root: Root) -> bool:
    """Whether this is a function, a class, a partial or an object that is made to be called."""
    name = root(value)
    if name is None:
        return False
    if type(value) is Global:
        return known_names.is_class(name) or name in _WRAPPERS or known_names.computes(name) or is_callback(name)
    return name in _WRAPPERS or (name.startswith(_CALLABLE) and not name.startswith(_NOT_CALLABLE))


def is_callback(name: str) -> bool:
    """Whether it is a function or class that may be kept, and that nothing which writes data would call."""
    return known_names.is_named(name) and not known_names.computes(name) and not name.startswith(("typing.", "types."))


def _is_value(value: Value, root: Root) -> bool:
    name = root(value) or ""
    if type(value) is Global:
        return name.startswith(("torch.", "numpy.", "builtins.")) and not is_callable(value, root)
    return name.startswith(_VALUES)


def _is_kept(value: Value, root: Root) -> bool:
    """What a constructor may be given beside that: a class or function that it keeps, or another partial."""
    name = root(value) or ""
    kept = name == "functools.partial" or (type(value) is Global and (name in _CONTAINERS or is_callable(value, root)))
    return kept or _is_value(value, root)
