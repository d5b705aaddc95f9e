"""Python attributes of Parameters and tensor subclasses: torch's marks (parameter, buffer) and all other attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from statecli.core.errors import MalformedError
from statecli.formats.torch.checkpoint_pickle import REFUSAL_REASON, REPLACING_ATTRIBUTES
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import as_sequence, get_attributes, get_name, get_state_attributes
from statecli.pickles.nodes import Global, Obj

#: Placeholder for a tensor among the attributes of a tensor.
TENSOR_PLACEHOLDER = Global("torch", "Tensor", 0)
#: Classes of tensors that are not described as wrappers.
PLAIN_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")

#: Attributes with which torch marks a parameter, a buffer, and a persistent buffer.
_MARK_ATTRIBUTES = ("_is_param", "_is_buffer", "persistent")
#: Prefixes of attributes of torch.compile (varying sizes) and transformers (initialized tensors).
_TRANSIENT_MARKS = ("_dynamo_", "_has_dynamo_", "_specialize_on", "_is_hf_initialized")


def select_attributes(state: object, is_tensor: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the attributes in a rebuild call's state. Omit torch's marks, and replace tensors by a placeholder.

    A class with its own `__getstate__` may give the state any type.
    """
    attributes = get_state_attributes(state)
    if not attributes:
        return {"__state__": state} if state else {}
    marks = _MARK_ATTRIBUTES if attributes.get("_is_buffer") is True else _MARK_ATTRIBUTES[:2]
    return {
        name: TENSOR_PLACEHOLDER if is_tensor(value) else value
        for name, value in attributes.items()
        if name not in marks and not name.startswith(_TRANSIENT_MARKS)
    }


def apply_marks(tensor: Tensor, attributes: Mapping[str, Any], fqn: str) -> None:
    """Copy torch's marks (`_is_param`, `_is_buffer`) from the Python attributes to the fields of `tensor`.

    Raises MalformedError for attributes that torch does not save as Python attributes, because setting them changes
    values.
    """
    replaced = REPLACING_ATTRIBUTES.intersection(attributes)
    if replaced:
        raise MalformedError(
            f"{fqn}: the pickle sets the attribute {min(replaced)} of this tensor after creating it; {REFUSAL_REASON}"
        )
    if attributes.get("_is_param") is True:
        tensor.is_parameter = True
    if attributes.get("_is_buffer") is True:
        tensor.is_buffer = True
        if type(attributes.get("persistent")) is bool:
            tensor.persistent = attributes["persistent"]


def describe_wrapper(cls: str, local: Tensor | None, spec: object) -> str:
    """Describe a tensor subclass by its class name. For a DTensor, add the local shape and the placements."""
    name = cls.rpartition(".")[2] or "tensor subclass"
    if local is None or local.shape is None:
        return name
    placements = as_sequence(get_attributes(spec).get("placements")) or ()
    placement_text = ", ".join(_describe_placement(node) for node in placements)
    return f"{name}: local shape {list(local.shape)}" + (f", {placement_text}" if placement_text else "")


def _describe_placement(node: object) -> str:
    name = get_name(node.cls).rpartition(".")[2] if type(node) is Obj else "?"
    dim = get_attributes(node).get("dim")
    if dim is None and type(node) is Obj and node.args and type(node.args[0]) is int:
        dim = node.args[0]
    return f"{name}({dim})" if type(dim) is int else name
