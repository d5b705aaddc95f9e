"""Program of a torch.export archive (JSON): the tensors in its signature, its version and a digest of its code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from statecli.core import quoting
from statecli.core.errors import MalformedError
from statecli.core.model_state import Kind, Scalar


class Role(msgspec.Struct, frozen=True):
    """Kind of a tensor in the signature of a program. `persistent` is None for a tensor that is not a buffer."""

    kind: Kind
    persistent: bool | None = None


#: Field of a tensor's input in the signature -> key of the tensor's name, and kind.
_INPUT_FIELDS = {
    "parameter": ("parameter_name", Kind.PARAMETER),
    "buffer": ("buffer_name", Kind.BUFFER),
    "tensor_constant": ("tensor_constant_name", Kind.UNREGISTERED),
}


def _iter_inputs(program: Mapping[str, Any]) -> Iterator[tuple[str, Kind, dict[str, Any]]]:
    """Yield the name, the kind and the description of each tensor in the signature."""
    for input_spec in _list_specs(program):
        for field, (key, kind) in _INPUT_FIELDS.items():
            description = input_spec.get(field) if type(input_spec) is dict else None
            if type(description) is dict and type(description.get(key)) is str:
                yield description[key], kind, description


def collect_roles(program: Mapping[str, Any]) -> Iterator[tuple[str, Role]]:
    """Yield the name and the role of each tensor in the signature."""
    for fqn, kind, description in _iter_inputs(program):
        persistent = description.get("persistent") if kind is Kind.BUFFER else None
        yield fqn, Role(kind, persistent if type(persistent) is bool else None)


def collect_stated_metas(program: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the graph's metadata (dtype, sizes) of each tensor in the signature, because kernels rely on the graph."""
    graph = program["graph_module"].get("graph")
    values = graph.get("tensor_values") if type(graph) is dict else None
    for fqn, _, description in _iter_inputs(program):
        argument = description.get("arg")
        name = argument.get("name") if type(argument) is dict else None
        meta = values.get(name) if type(values) is dict and type(name) is str else None
        if type(meta) is dict:
            yield fqn, meta


def _list_specs(program: Mapping[str, Any]) -> Iterable[Any]:
    node: Any = program
    for key in ("graph_module", "signature", "input_specs"):
        node = node.get(key) if type(node) is dict else None
    if type(node) is not list:
        raise MalformedError("its program has no list graph_module.signature.input_specs")
    return node


def read_major_version(program: Mapping[str, Any]) -> int | None:
    """Return the major schema version, or None if it is missing. torch 2.1 wrote a single number."""
    schema = program.get("schema_version")
    major = schema.get("major") if type(schema) is dict else schema
    if schema is not None and (type(major) is not int or major < 0):
        raise MalformedError(
            f"its program's schema_version is {quoting.value(schema)}; expected an integer of 0 or more"
        )
    return major


def describe_program(program: Mapping[str, Any]) -> Iterator[tuple[str, Scalar]]:
    """Yield settings of a program: torch version, schema version and a digest of the computation."""
    version, schema = program.get("torch_version"), program.get("schema_version")
    if type(version) is str:
        yield "torch_version", version[:100]
    if type(schema) is dict and all(type(schema.get(part)) is int for part in ("major", "minor")):
        yield "schema_version", f"{schema['major']}.{schema['minor']}"
    yield "program sha256", _compute_program_digest(program)


def _compute_program_digest(program: Mapping[str, Any]) -> str:
    """Return a digest of a program's computation, so that a comparison detects different programs.

    The digest excludes the metadata of nodes, because it has the source lines of the traced code.
    """
    import hashlib
    import json

    try:
        text = json.dumps(_drop_node_metadata(program), sort_keys=True)
    except RecursionError as error:
        raise MalformedError("its program is nested too deeply for statecli to read") from error
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _drop_node_metadata(value: object) -> Any:
    if type(value) is dict:
        is_node = "target" in value
        return {key: _drop_node_metadata(part) for key, part in value.items() if not (is_node and key == "metadata")}
    return [_drop_node_metadata(part) for part in value] if type(value) is list else value
