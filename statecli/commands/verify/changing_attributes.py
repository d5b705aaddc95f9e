"""Find attributes (numbers, strings and containers) that forward changes, such as a step counter.

The changed value is state outside every `state_dict()`. torch.export stores the value at the time of the export, and
torch.compile captures the model again for each new value. Only attributes of registered modules, and of plain objects
in these attributes, are read.
"""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from statecli.commands.verify import check_builder, rules
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.core.errors import ModelError
from statecli.live.metric_states import CALL_OUTSIDE_HELP, is_metric

#: Types whose values are compared.
ATOM_TYPES = (bool, int, float, complex, str, bytes, type(None))
#: Types of objects without values of a model, or whose values are compared in another way.
_OPAQUE_TYPES = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, torch.Tensor)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
#: Largest number of steps from an attribute to a compared value.
_MAX_DEPTH = 4
#: Number of entries compared at the start of a container. In a longer container, such as a vocabulary, a change shows
#: in the length.
_MAX_ENTRIES = 1_000
#: Attributes that torch sets in each module.
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


@dataclass(frozen=True, eq=False)
class ChangedAttribute:
    """Plain attribute that forward changes at each call.

    Attributes:
        path: Path of its module; "" is the model.
        name: Name in the module.
        initial: Value before the first call.
        before: Value after the first call.
        after: Value after the second call.
        owner: Class of the module.
    """

    path: str
    name: str
    initial: object
    before: object
    after: object
    owner: type

    @property
    def fqn(self) -> str:
        """Dotted name of the attribute, such as `blocks.0.step`."""
        return f"{self.path}.{self.name}".lstrip(".")

    def put_back(self, module: nn.Module) -> None:
        """Set the attribute of an instance to a copy of its initial value, from before the first call of forward."""
        vars(module.get_submodule(self.path))[self.name] = copy.deepcopy(self.initial)


def find_changed_attributes(subject: ModelUnderTest) -> list[ChangedAttribute]:
    """Return the plain attributes whose value changes in the second call of forward, in eval or train mode.

    An attribute that only the first call sets is left out. Raises ModelError if forward raises in eval mode.
    """
    changed_attributes: dict[str, ChangedAttribute] = {}
    for training in (False, True):
        module = subject.build_used(values=not subject.rebuilds)
        initial = _copy_attributes(module)
        try:
            with check_builder.keep_class_attributes(module):
                subject.call(module, training=training)
                before, values = _read_attributes(module), _copy_attributes(module)
                subject.call(module, seed=1, training=training)
        except ModelError:
            if training:
                continue
            raise
        after = _read_attributes(module)
        for key in before.keys() & after.keys():
            if before[key] != after[key] and key in values:
                path, name = key
                owner = module.get_submodule(path)
                value = vars(owner)[name]
                attribute = ChangedAttribute(path, name, initial.get(key), values[key], value, type(owner))
                changed_attributes.setdefault(attribute.fqn, attribute)
    return sorted(changed_attributes.values(), key=lambda attribute: attribute.fqn)


def iter_attributes(module: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    """Yield ((module path, attribute name), value) for each plain attribute of the registered modules."""
    for path, part in module.named_modules():
        for name, value in tuple(vars(part).items()):
            if name not in OWN_ATTRIBUTES and not isinstance(value, _OPAQUE_TYPES):
                yield (path, name), value


def _read_attributes(module: nn.Module) -> dict[tuple[str, str], object]:
    return {key: _encode(value, _MAX_DEPTH) for key, value in iter_attributes(module)}


def _copy_attributes(module: nn.Module) -> dict[tuple[str, str], object]:
    copies = {}
    for key, value in iter_attributes(module):
        with suppress(Exception):  # an object without a copy is not compared
            copies[key] = copy.deepcopy(value)
    return copies


def _encode(value: object, depth: int) -> object:
    """Return the plain values in `value` and the sizes of its containers, to compare them after a call."""
    if type(value) in ATOM_TYPES:
        return repr(value)  # NaN equals itself
    if isinstance(value, _OPAQUE_TYPES) or depth == 0:
        return type(value).__name__
    first = list(islice(value, _MAX_ENTRIES)) if isinstance(value, _CONTAINERS) else []
    if isinstance(value, dict):
        return ("dict", len(value), [(_encode(key, 1), _encode(value[key], depth - 1)) for key in first])
    if isinstance(value, (list, tuple, deque)):
        size = sum(1 for _ in value)  # len() of a subclass may raise
        return (type(value).__name__, size, [_encode(entry, depth - 1) for entry in first])
    if isinstance(value, (set, frozenset)):
        return ("set", len(value), sorted(repr(entry) for entry in first if type(entry) in ATOM_TYPES))
    state = getattr(value, "__dict__", None)
    if type(state) is dict:
        return (type(value).__name__, _encode(state, depth - 1))
    return type(value).__name__


def report_changed_attribute(proof: Proof, attribute: ChangedAttribute, message: str) -> None:
    """Report an attribute that forward changes. The severity is note if a torchmetrics metric owns the attribute."""
    rule, is_of_metric = rules.CHANGING_ATTRIBUTE, is_metric(attribute.owner)
    help = CALL_OUTSIDE_HELP if is_of_metric else _build_fix(attribute)
    proof.report(rule, message, attribute.fqn, help=help, severity=rule.cases["of a metric"] if is_of_metric else None)


def _build_fix(attribute: ChangedAttribute) -> str:
    """Return the fix for the changing attribute: a `register_buffer` line for a number, or advice for other values."""
    name, value = attribute.name, attribute.initial
    if type(value) in (bool, int, float):
        fix = f'self.register_buffer("{name}", torch.tensor({value!r}))  # and change the buffer in place in forward'
    else:
        fix = (
            f"do not change {name} in forward: pass {name} as an input and return the next value, or register a buffer"
        )
    return check_builder.address_to_library(attribute.owner, fix)
