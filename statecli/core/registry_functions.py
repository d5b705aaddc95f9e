"""Functions of libraries that build models by name: `timm.create_model('resnet50')`. The libraries are not imported."""

from __future__ import annotations

import msgspec


class Registry(msgspec.Struct, frozen=True):
    """Module of a library, its function that builds a model by name, and its function that lists the names."""

    module: str
    build: str
    names: str


REGISTRIES = {
    "timm": Registry("timm", "create_model", "list_models"),
    "torchvision": Registry("torchvision.models", "get_model", "list_models"),
}


def find_function(module: str, name: str) -> Registry | None:
    """Return the registry that builds the named model, or None for the registry's own functions and other modules."""
    registry = REGISTRIES.get(module)
    return registry if registry is not None and name not in (registry.build, registry.names) else None
