"""The oracle is torch: it runs programs of torch.export whose names have another meaning in the graph's source."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from statecli.commands.audit.run import Request, audit

from .torch_archives import read_archive, write_archive

TEXT = b"overwritten by the checkpoint\n"
WRAP = "torch.ops.higher_order.wrap_with_set_grad_enabled"


class Gradless(nn.Module):
    """A model with a buffer `w`, whose graph wraps a part of the model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("w", torch.tensor(list(TEXT), dtype=torch.uint8))

    def forward(self, x):
        with torch.no_grad():
            y = self.w.clone()
        return x + 1, y


def call_wrap(name: str, *arguments: dict[str, Any], outputs: tuple[str, ...] = (), single: bool | None = True) -> Any:
    """Return a node that calls its first argument."""
    return {
        "target": WRAP,
        "inputs": [{"name": "", "arg": value, "kind": 1} for value in ({"as_bool": False}, *arguments)],
        "outputs": [{"as_tensor": {"name": output}} for output in outputs or (name,)],
        "metadata": {"nn_module_stack": "L__self__,,__main__.M"},
        "is_hop_single_tensor_return": single,
        "name": name,
    }


def tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def overwrite_by_self(document: dict[str, Any], config: dict[str, Any], mark: Path) -> None:
    """`buffer.numpy().tofile(mark)`, because a value called `self` takes the place of the module."""
    graph = document["graph_module"]["graph"]
    meta = copy.deepcopy(graph["tensor_values"]["b_w"])

    def build(outputs: tuple[str, ...], nodes: list[Any], names: str, *, single: bool = False) -> dict[str, Any]:
        values = {"tensor_values": dict.fromkeys(names.split(), meta), "is_single_tensor_return": single}
        empty_values = {
            key: {} for key in ("sym_int_values", "sym_bool_values", "custom_obj_values", "sym_float_values")
        }
        return {
            "inputs": [tensor("a")],
            "outputs": list(map(tensor, outputs)),
            "nodes": nodes,
            **values,
            **empty_values,
        }

    def build_identity(name: str) -> dict[str, Any]:
        return {"as_graph": {"name": name, "graph": build(("a",), [], "a", single=True)}}

    def build_level(name: str, attribute: str, *other_operands: dict[str, Any]) -> dict[str, Any]:
        nodes = [
            call_wrap("self", build_identity("same"), tensor("a")),
            call_wrap("r", build_identity(attribute), *other_operands),
        ]
        return {"as_graph": {"name": name, "graph": build(("r", "self"), nodes, "a r self")}}

    position, out = find_wrap(graph)
    graph["nodes"][position : position + 1] = [
        call_wrap("l1", build_level("level1", "numpy"), tensor("b_w"), outputs=("arr", "k1"), single=None),
        call_wrap(
            "l2",
            build_level("level2", "tofile", {"as_string": str(mark)}),
            tensor("arr"),
            outputs=("none", out),
            single=None,
        ),
    ]
    graph["tensor_values"].update(dict.fromkeys(["arr", "k1", "none"], meta))


def run_by_normalized_name(document: dict[str, Any], config: dict[str, Any], mark: Path) -> None:
    """`self.recompile.__globals__.get("_exec_with_source")(code, {})`, because Python normalizes a buffer's name."""
    name = "\uff52ecompile._\uff3fglobals__.get"
    graph = document["graph_module"]["graph"]
    for spec in document["graph_module"]["signature"]["input_specs"]:
        if "buffer" in spec:
            spec["buffer"]["buffer_name"] = name
    config["config"] = {name: config["config"]["w"]}
    position, out = find_wrap(graph)
    code = {"as_string": f"open({str(mark)!r}, 'w').write({TEXT.decode()!r})"}
    graph["nodes"][position : position + 1] = [
        call_wrap("f", tensor("b_w"), {"as_string": "_exec_with_source"}),
        call_wrap(out, tensor("f"), code, {"as_string_to_argument": {}}),
    ]
    graph["tensor_values"]["f"] = copy.deepcopy(graph["tensor_values"]["b_w"])


def find_wrap(graph: dict[str, Any]) -> tuple[int, str]:
    """Return the index of the wrapping node, and the name of its output."""
    position = next(n for n, node in enumerate(graph["nodes"]) if "higher_order" in node["target"])
    return position, graph["nodes"][position]["outputs"][0]["as_tensor"]["name"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [(overwrite_by_self, "finds a value named self"), (run_by_normalized_name, "stands in place of a name")],
    ids=["a value called self", "a name of fullwidth letters"],
)
def test_name_with_another_meaning_in_the_graph_is_found(
    edit: Callable[..., None], message: str, tmp_path: Path
) -> None:
    """Calling the program writes the file; the unchanged program is clean."""
    path, mark = tmp_path / "a.pt2", tmp_path / "mark"
    torch.export.save(torch.export.export(Gradless(), (torch.ones(3),)), path)
    assert audit(Request((str(path),))).findings == ()
    records = read_archive(path)
    program = next(name for name in records if name.endswith("models/model.json"))
    weights = next(name for name in records if name.endswith("_weights_config.json"))
    document, config = json.loads(records[program]), json.loads(records[weights])
    edit(document, config, mark)
    records |= {program: json.dumps(document).encode(), weights: json.dumps(config).encode()}
    write_archive(records, str(path))
    assert any(message in finding.message for finding in audit(Request((str(path),))).findings)
    with contextlib.suppress(Exception):
        torch.export.load(path).module()(torch.ones(3))
    assert mark.read_bytes() == TEXT
