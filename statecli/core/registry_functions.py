"""Functions of libraries that build models by name: `timm.create_model('resnet50')`. The libraries are not imported."""

from __future__ import annotations

from typing import NamedTuple


class Registry(NamedTuple):
    """The module of a registry, and its functions that build a model by name and list the names."""

    module: str
    build: str
    names: str


REGISTRIES = {
    "timm": Registry("timm", "create_model", "list_models"),
    "torchvision": Registry("torchvision.models", "get_model", "list_models"),
}


def find_function(module: str, name: str) -> Registry | None:
    """Return the registry of a package that builds the named model; None for a function of the registry itself."""
    registry = REGISTRIES.get(module)
    return registry if registry is not None and name not in (registry.build, registry.names) else None
