"""Build models that a library creates from a name: `timm:resnet50` is `timm.create_model('resnet50')`.

The name before the colon is the package. A class or function of this name in the package comes first.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from statecli.core.errors import ModelError
from statecli.live.spec import ModelSpec


class Registry(msgspec.Struct, frozen=True):
    """Module of a library, its function that builds a model by name, and its function that lists the names."""

    module: str
    build: str
    names: str


REGISTRIES = {
    "timm": Registry("timm", "create_model", "list_models"),
    "torchvision": Registry("torchvision.models", "get_model", "list_models"),
}
#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.6

#: Model named as an example in an error.
_EXAMPLE_MODEL = "resnet18"


def _find_registry(module: str) -> Registry | None:
    by_module = (registry for registry in REGISTRIES.values() if registry.module == module)
    return REGISTRIES.get(module) or next(by_module, None)


def find_builder(spec: ModelSpec, package: object) -> Callable[..., Any] | None:
    """Return the function that builds the named model of a package, or None if the package has no registry.

    `package`: the imported module of the spec. Raises ModelError for a name missing in the registry.
    """
    registry = _find_registry(spec.module)
    if registry is None:
        return None
    module = importlib.import_module(registry.module)
    first = spec.args[0] if spec.attribute == registry.build and spec.args else None
    if type(first) is str:
        _check_name(spec, first, registry, module)
    if hasattr(package, spec.attribute.partition(".")[0]):
        return None
    _check_name(spec, spec.attribute, registry, module)
    return functools.partial(getattr(module, registry.build), spec.attribute)


def format_builder(spec: ModelSpec) -> tuple[str, str]:
    """Return the names of a registry's module and of its build function, for a spec that `find_builder` accepts."""
    registry = _find_registry(spec.module)
    assert registry is not None  # noqa: S101 - `find_builder` has found the registry
    return registry.module, f"{registry.module}.{registry.build}"


def _check_name(spec: ModelSpec, name: str, registry: Registry, module: object) -> None:
    """Raise ModelError, with similar names, for a name that the registry does not have."""
    if ":" in name:  # a repository of the hub
        return
    names = list(getattr(module, registry.names)())
    # A name of timm may end in the name of pretrained weights, as in resnet50.a1_in1k.
    model = name.partition(".")[0] if spec.module == "timm" else name
    if model not in names:
        similar_names = difflib.get_close_matches(name.lower(), names, 3, _SIMILARITY)
        problem = f"{spec.text}: {spec.module} has no model called {name}"
        if similar_names:
            suggested_specs = " or ".join(f"{spec.module}:{similar_name}" for similar_name in similar_names)
            raise ModelError(problem, advice=f"did you mean {suggested_specs}?")
        example = f"for example, write {spec.module}:{_EXAMPLE_MODEL if _EXAMPLE_MODEL in names else names[0]}"
        raise ModelError(f"{problem}; {example}, or list the names with {registry.module}.{registry.names}()")
