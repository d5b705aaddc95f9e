"""Read the attributes of modules and other objects without running their code."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from statecli.live.searched_types import cache_by_type, dict_of, mro_of


def get_own_dict(obj: object) -> dict[str, Any]:
    """Return the instance dict of an object without running its code, or an empty dict if the object has none.

    The dict may be an instance of a user's class: use `dict.get(attributes, name)`, not `attributes.get(name)`.
    """
    getter = find_dict_getter(type(obj))
    return {} if getter is None else getter.__get__(obj)


@cache_by_type
def find_dict_getter(kind: type) -> Any:
    """Return the descriptor of the instance dict of a type, or None if its objects have no dict."""
    for base in mro_of(kind):
        getter = dict_of(base).get("__dict__")
        # types.SimpleNamespace declares its dict as a member, which no Python class can do.
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return getter
    return None


def is_scripted(module: nn.Module) -> bool:
    """Return True if `module` is a ScriptModule, whose state lives in C++."""
    return issubclass(type(module), torch.jit.ScriptModule)


def read_registry(module: nn.Module, name: str, attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the entries of the registry `name`, such as `_parameters`. `attributes` is the module's own dict."""
    entries = dict.get(attributes, name)
    if type(entries) is dict:
        return list(entries.items())
    if entries is None:
        # ScriptModules keep their registries in C++, and a property of torch returns them.
        entries = getattr(module, name, {}) if is_scripted(module) else {}
    if issubclass(type(entries), dict):
        return list(dict.items(entries))
    return list(entries.items())


def is_module(obj: object) -> bool:
    """Return True for a module, without asking the object for its class."""
    return issubclass(type(obj), nn.Module)


#: Attribute in which traced modules and old subclasses of ScriptModule keep the module whose attributes they show.
SCRIPT_ATTRIBUTE = "_actual_script_module"


def _get_script_object(module: nn.Module) -> Any:
    """Return the C++ object of a ScriptModule, or None if it is not created yet."""
    attributes = get_own_dict(module)
    return dict.get(get_own_dict(dict.get(attributes, SCRIPT_ATTRIBUTE, module)), "_c")


def list_script_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes kept in C++ by TorchScript, sorted by name. Reading them runs no code."""
    script = _get_script_object(module)
    if script is not None:
        script_type: Any = torch._C.ConcreteModuleType.from_jit_type(script._type())
        yield from ((name, script.getattr(name)) for name in sorted(script_type.get_attributes()))


def count_constants_in_code(module: nn.Module) -> int:
    """Count the constant tensors in the code of a traced or frozen ScriptModule. Return 0 for any other module.

    0-dim tensors are not counted, because a trace turns each number into a tensor.
    """
    script = _get_script_object(module) if is_scripted(module) else None
    graphs = [script._get_method(name).graph for name in script._method_names()] if script is not None else []
    constants = [node for graph in graphs for node in graph.findAllNodes("prim::Constant")]
    tensors = [node.t("value") for node in constants if node.hasAttribute("value") and node.kindOf("value") == "t"]
    return sum(tensor.dim() > 0 for tensor in tensors)
