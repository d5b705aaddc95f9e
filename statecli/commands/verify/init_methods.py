"""Init methods of a model built on meta, in the order in which training programs call them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from statecli.live import measure

#: Names of init methods. If a class has several, the first is expected to write a tensor.
INIT_METHODS = ("reset_parameters", "init_weights", "_init_weights")


def list_init_methods(module: nn.Module, state: Mapping[str, object]) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield (module path, method name, callable) for each init method, in the order of the calls.

    torch's own `reset_parameters` is left out for a module whose tensors are all loaded later, to save time.
    """
    modules = list(module.named_modules())[::-1]
    for path, part in modules:
        method = _find_method(part, "reset_parameters", 0)
        if method is not None and not (measure.is_torch_code(method) and _is_loaded(path, part, state)):
            yield path, "reset_parameters()", method
    of_parts = {
        path: method for path, part in modules if (method := _find_method(part, "_init_weights", 1)) is not None
    }
    for path, part in modules:
        nearest = max((other for other in of_parts if is_inside(path, other)), key=len, default=None)
        if nearest is not None:
            yield path, "_init_weights()", functools.partial(of_parts[nearest], part)
    outermost: list[str] = []
    for path, part in modules[::-1]:
        for name in ("init_weights", "_init_weights"):
            method = _find_method(part, name, 0)
            if method is not None and not any(is_inside(path, other) for other in outermost):
                outermost.append(path)
                yield path, f"{name}()", method


def _find_method(part: nn.Module, name: str, required: int) -> Callable[..., Any] | None:
    """Return a method that needs exactly `required` arguments, or None if `part` has no such method."""
    method = getattr(part, name, None)
    if not callable(method):
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return None
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required_parameters = [
        parameter for parameter in parameters if parameter.default is parameter.empty and parameter.kind not in optional
    ]
    return method if len(required_parameters) == required else None


def _is_loaded(path: str, part: nn.Module, state: Mapping[str, object]) -> bool:
    prefix = f"{path}." if path else ""
    return all(f"{prefix}{name}" in state for name in (*part._parameters, *part._buffers))


def is_inside(name: str, path: str) -> bool:
    """Return True if the tensor or module `name` is the module `path` or is inside it."""
    return not path or name == path or name.startswith((f"{path}.", f"{path}["))
