"""Check the attributes of an optimizer whose methods torch calls."""

from __future__ import annotations

from typing import Any

from statecli.pickle_scan import expected_calls
from statecli.pickle_scan.deferred_calls import RootLookup
from statecli.pickle_scan.expected_calls import is_clean
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickles.nodes import Global, Obj, Persistent, Value


def is_plain(key: Value, value: Value, root: RootLookup, steps: Steps) -> bool:
    """Return True if an optimizer never gets an object as this attribute, or if the value is plain data."""
    if key == "defaults":
        return _is_dict(value, root)
    if key == "param_groups":
        return _is_param_groups(value, root, steps)
    return key != "state" or _is_optimizer_state(value, root, steps)


def _is_dict(value: Value, root: RootLookup) -> bool:
    is_object = type(value) is Obj and root(value) in expected_calls.DICT_CLASSES
    return is_object or type(value) is dict


def _is_param_groups(value: Value, root: RootLookup, steps: Steps) -> bool:
    """Return True for groups that are plain dicts, because a defaultdict calls a factory for a missing key."""
    steps.take(Budget.FLOW, len(value) if type(value) is list else 1)
    return type(value) is list and all(
        type(group) is dict and _are_parameters(group.get("params", []), root, steps) for group in value
    )


def _are_parameters(value: Value, root: RootLookup, steps: Steps) -> bool:
    """Return True for a list or tuple of tensors or their ids, because an optimizer uses them as keys."""
    if type(value) not in (list, tuple):
        return False
    steps.take(Budget.FLOW, len(value))
    return all(
        type(parameter) in (int, str, Persistent)
        or ((name := root(parameter)) is not None and (expected_calls.is_tensor_data(name) or not is_clean(name)))
        for parameter in value
    )


def _is_optimizer_state(value: Value, root: RootLookup, steps: Steps) -> bool:
    """Return True for a dict or defaultdict whose values are dicts or lists, as in the state of an optimizer."""
    if not _is_dict(value, root):
        return False
    items: Any = value.items or {} if type(value) is Obj else value
    arguments: Any = value.args if type(value) is Obj else ()
    steps.take(Budget.FLOW, len(items))
    # An argument that is not a class may hold items, but pickle writes items outside of the arguments.
    is_plain = all(type(argument) is Global or argument is None for argument in arguments)
    return is_plain and all(type(entry) in (dict, list) for entry in items.values())
