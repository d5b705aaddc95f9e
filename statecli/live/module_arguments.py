"""Refuse a string for an argument that takes a module, if the class stores the string and later calls it."""

from __future__ import annotations

import inspect
import re
import types
from typing import TYPE_CHECKING

from statecli.core.errors import ModelError, UsageError
from statecli.core.python_names import write_example
from statecli.live.object_scope import Scope, spell
from statecli.live.spec import ModelSpec
from statecli.live.spec_arguments import parse_arguments
from statecli.live.spec_objects import ObjectCall, ObjectName

if TYPE_CHECKING:
    from torch import nn


def check_stored_texts(spec: ModelSpec, module: types.ModuleType, model: nn.Module) -> None:
    """Raise ModelError if the model's class calls an attribute that holds a string from the model spec."""
    try:
        arguments = inspect.signature(type(model)).bind_partial(*spec.args, **spec.kwargs).arguments
    except (TypeError, ValueError):
        return
    for name, text in arguments.items():
        if type(text) is str and vars(model).get(name) == text and _is_called(type(model), name):
            line = _spell_with_module(Scope.around(spec, module, type(model)), text)
            problem = f"{name} must be a module, because the class calls self.{name}, but {text!r} is a string"
            raise ModelError(f"{spec.text}: {problem}; write {line}")


def _is_called(kind: type, name: str) -> bool:
    """Return True if the source of the class or of a base class calls the attribute `name`."""
    call = re.compile(rf"\bself\.{re.escape(name)}\(")
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        if call.search(source):
            return True
    return False


def _spell_with_module(scope: Scope, text: str) -> str:
    """Return the model spec with a module in place of the string: the module that the string names, or an example."""
    try:
        (value,), _ = parse_arguments(text, text, f"{text})")
    except (UsageError, ValueError):
        value = None
    module = scope.rewrite(value) if isinstance(value, ObjectCall) else ObjectName(write_example("module", "") or "...")
    return spell(scope.spec, lambda argument: module if argument == text else argument)
