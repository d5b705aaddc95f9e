"""Check the attributes of an optimizer whose methods torch calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statecli.pickle_scan import expected_calls
from statecli.pickle_scan.expected_calls import is_clean
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Global, Obj, Persistent, Value


class OptimizerAttributes:
    """Checker of the attributes `defaults`, `param_groups` and `state`, which may hold only plain data and tensors."""

    def __init__(self, get_root_name: Callable[[Value], str | None], steps: Steps) -> None:
        self._get_root_name, self._steps = get_root_name, steps

    def is_plain(self, key: Value, value: Value) -> bool:
        """Return True if an optimizer never gets an object as this attribute, or if the value is plain data."""
        if key == "defaults":
            return self._is_dict(value)
        if key == "param_groups":
            return self._is_param_groups(value)
        return key != "state" or self._is_optimizer_state(value)

    def _is_dict(self, value: Value) -> bool:
        is_object = type(value) is Obj and self._get_root_name(value) in expected_calls.DICT_CLASSES
        return is_object or type(value) is dict

    def _is_param_groups(self, value: Value) -> bool:
        """Return True for groups that are plain dicts, because a defaultdict calls a factory for a missing key."""
        self._steps.take(Budget.FLOW, len(value) if type(value) is list else 1)
        return type(value) is list and all(
            type(group) is dict and self._are_parameters(group.get("params", [])) for group in value
        )

    def _are_parameters(self, value: Value) -> bool:
        """Return True for a list or tuple of tensors or their ids, because an optimizer uses them as keys."""
        if type(value) not in (list, tuple):
            return False
        self._steps.take(Budget.FLOW, len(value))
        return all(
            type(parameter) in (int, str, Persistent)
            or (
                (root := self._get_root_name(parameter)) is not None
                and (expected_calls.is_tensor_data(root) or not is_clean(root))
            )
            for parameter in value
        )

    def _is_optimizer_state(self, value: Value) -> bool:
        """Return True for a dict or defaultdict whose values are dicts or lists, as in the state of an optimizer."""
        if not self._is_dict(value):
            return False
        items: Any = value.items or {} if type(value) is Obj else value
        arguments: Any = value.args if type(value) is Obj else ()
        self._steps.take(Budget.FLOW, len(items))
        # An argument that is not a class may hold items, but pickle writes items outside of the arguments.
        is_plain = all(type(argument) is Global or argument is None for argument in arguments)
        return is_plain and all(type(entry) in (dict, list) for entry in items.values())
