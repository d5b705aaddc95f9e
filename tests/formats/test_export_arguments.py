"""Programs of torch.export whose kernels read outside of their tensors, or whose numbers take forever to compute."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import types
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from statecli.commands.audit.run import Request, audit
from statecli.pickle_scan import export_arguments, export_expressions
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.rules.pickles import RULES

from . import attacks
from .torch_archives import read_archive, write_archive

pytest.importorskip("torch.export.pt2_archive._package", reason="needs torch 2.8: archives of torch.export")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

PICKLES = tuple(rule.name for rule in RULES)
PROGRAM = "models/model.json"


def change(path: Path, edit: Callable[[dict[str, Any]], None], part: str = "graph") -> Path:
    """Edit the graph of an archive, or the module around the graph."""
    records = read_archive(path)
    document = json.loads(records[PROGRAM])
    edit(document["graph_module"]["graph"] if part == "graph" else document[part])
    write_archive({**records, PROGRAM: json.dumps(document).encode()}, str(path))
    return path


def messages(path: Path) -> list[str]:
    result = audit(Request((str(path),), select=PICKLES))
    assert set(result.targets[0].ran) == set(PICKLES)
    return [finding.message for finding in result.findings]


def node(graph: dict[str, Any], name: str) -> dict[str, Any]:
    return next(node for node in graph["nodes"] if f".{name}." in f"{node['target']}.")


def sizes(*numbers: int) -> list[dict[str, int]]:
    return [{"as_int": number} for number in numbers]


class Fourier(nn.Module):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x)) + torch.fft.fft2(x).real


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4)

    def forward(self, x, offsets):
        return self.bag(x, offsets)


class Branches(nn.Module):
    """Model with graphs inside its graph: branches, a loop, a scan, and contexts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"it-s": nn.Linear(8, 8), "b c": nn.Linear(8, 8)})

    def forward(self, x):
        total, _ = scan(lambda carry, row: (carry + row, (carry * row).clone()), torch.zeros(8), x)
        x = torch.cond(x.sum() > 0, self.layers["it-s"], self.layers["b c"], (x,))
        _, x = while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 2), (torch.tensor(0), x))
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu"):
            return y @ x.T, total


class Asserted(nn.Module):
    """Model with messages of checks, and operators whose names look like attributes."""

    def forward(self, x):
        rows = x.nonzero()
        torch._check(rows.shape[0] > 1, lambda: "it's (small)")
        torch._assert_async(x.sum() > -1e9, "the sum isn't (finite)")
        return rows, (x > 0) & (x < 1) | (x > 2)


NORMED = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
IMAGE, SEQUENCE, ROWS = torch.rand(2, 8, 4, 4), torch.rand(1, 2, 8), torch.rand(4, 8)
HONEST_PROGRAMS = {
    "lstm": (nn.LSTM(8, 6, 2, bidirectional=True), SEQUENCE),
    "lstm with a projection": (nn.LSTM(8, 6, 2, proj_size=3, batch_first=True), SEQUENCE),
    "lstm without biases": (nn.LSTM(8, 6, bias=False), SEQUENCE),
    "gru": (nn.GRU(8, 6, 2, bidirectional=True), SEQUENCE),
    "rnn": (nn.RNN(8, 6, nonlinearity="relu"), SEQUENCE),
    "batch norm": (nn.BatchNorm2d(8), IMAGE),
    "batch norm without weights": (nn.BatchNorm2d(8, affine=False, track_running_stats=False), IMAGE),
    "group norm": (nn.GroupNorm(2, 8), IMAGE),
    "weight norm": (NORMED, ROWS),
    "weight norm of columns": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 4), dim=1), ROWS),
    "embedding bag": (Bag(), torch.tensor([1, 2, 3]), torch.tensor([0, 1])),
    "fourier": (Fourier(), ROWS),
    "control flow": (Branches(), ROWS),
    "checks": (Asserted(), ROWS),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SEQUENCE),
}


class Repeat(nn.Module):
    def forward(self, x):
        return x.new_zeros(x.shape[0] * 3 + 1)


class Cast(nn.Module):
    def forward(self, x):
        return x.to(torch.float64) + torch.softmax(x, 0, dtype=torch.float64) + torch.zeros(2, dtype=torch.float64)


class _Added(nn.Module):
    def forward(self, x, y):
        return x + y


class _Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.added = _Added()

    def forward(self, x):
        return self.added(x, 1.5)


#: Programs that the attacks below change, and the options of their exports.
ATTACKED_PROGRAMS = {
    "linear": (nn.Linear(2, 2), torch.ones(1, 2)),
    "repeat": (Repeat(), torch.ones(4, 2)),
    "cast": (Cast(), torch.ones(2)),
    "outer": (_Outer(), torch.ones(2, 2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "repeat": {"dynamic_shapes": ({0: torch.export.Dim("n", min=2, max=1000)},)},
    "outer": {"preserve_module_call_signature": ("added",)},
}


@functools.cache
def program(name: str) -> torch.export.ExportedProgram:
    module, *inputs = {**HONEST_PROGRAMS, **ATTACKED_PROGRAMS}[name]
    return torch.export.export(module.eval(), tuple(inputs), **OPTIONS.get(name, {}))


@functools.cache
def archive(name: str, decomposed: bool) -> bytes:
    """Return the program's archive: as exported, or with core operators after `run_decompositions`."""
    stream = io.BytesIO()
    torch.export.save(program(name).run_decompositions() if decomposed else program(name), stream)
    return stream.getvalue()


def write_program(path: Path, name: str, decomposed: bool = False) -> Path:
    path.write_bytes(archive(name, decomposed))
    return path


@pytest.fixture
def insert(tmp_path) -> Callable[[dict[str, Any]], list[str]]:
    """Return the messages about a program that begins with the given node."""

    def run(node: dict[str, Any]) -> list[str]:
        path = write_program(tmp_path / "a.pt2", "linear")
        return messages(change(path, lambda graph: graph["nodes"].insert(0, node)))

    return run


#: Programs of the same core operators as others after `run_decompositions`, which takes seconds for them.
NOT_DECOMPOSED_PROGRAMS = {"lstm with a projection", "lstm without biases", "gru", "weight norm of columns"}


@pytest.mark.parametrize(
    ("name", "decomposed"),
    [
        *((name, False) for name in HONEST_PROGRAMS),
        *((name, True) for name in HONEST_PROGRAMS if name not in NOT_DECOMPOSED_PROGRAMS),
    ],
)
def test_modules_of_torch_are_clean(name, decomposed, tmp_path):
    """The programs are saved as exported, and after `run_decompositions`."""
    path = write_program(tmp_path / "x.pt2", name, decomposed)
    result = audit(Request((str(path),)))
    assert [finding.message for finding in result.findings if finding.rule != "empty-checkpoint"] == []
    assert result.targets[0].reason is None


def test_programs_that_are_exported_again_are_clean(tmp_path):
    """The module of a program has a module of guards, and an unflattened program calls its modules by number."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    net.append(net[0])
    first = torch.export.export(net, (ROWS,), preserve_module_call_signature=("0",))
    for number, module in enumerate((first.module(), torch.export.unflatten(first))):
        path = tmp_path / f"{number}.pt2"
        torch.export.save(torch.export.export(module, (ROWS,)), path)
        assert messages(path) == []


def _shorten(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(graph: dict[str, Any]) -> None:
        graph["tensor_values"]["p_weight_hh_l0"][field] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_shorten("sizes", sizes(1, 6)), "its sizes are [24, 6], but the graph was traced for [1, 6]"),
        (_shorten("sizes", [{"as_expr": {"expr_str": "s0"}}, {"as_int": 6}]), "the graph was traced for [None, 6]"),
        (_shorten("dtype", 8), "its dtype is float32, but the graph was traced for float64"),
    ],
    ids=["sizes", "symbol", "dtype"],
)
def test_a_weight_that_contradicts_its_graph_is_not_read(edit, reason, tmp_path):
    """torch gives the weight to the kernel, whatever the graph says about the weight."""
    path = change(write_program(tmp_path / "x.pt2", "lstm"), edit)
    (target,) = audit(Request((str(path),))).targets
    assert reason in str(target.reason)


def test_short_weights_of_an_lstm_crash_and_are_found(tmp_path, forked_python):
    """Only the weights change; the graph is unchanged."""
    program = torch.export.export(nn.LSTM(64, 4096), (torch.ones(3, 1, 64),))
    for name, weight in list(program.state_dict.items()):
        program.state_dict[name] = nn.Parameter(weight[:1].detach().clone())
    torch.export.save(program, tmp_path / "x.pt2")
    (target,) = audit(Request((str(tmp_path / "x.pt2"),))).targets
    assert "its sizes are [1, …], but the graph was traced for [16384, …]" in str(target.reason)
    code = f"import torch; torch.export.load({str(tmp_path / 'x.pt2')!r}).module()(torch.ones(3, 1, 64))"
    assert forked_python(code).returncode < 0


WIDE_SIZES = {"as_ints": [1, 2, 4096]}


def _widen_state(graph: dict[str, Any]) -> None:
    for number, name in enumerate(("zeros", "zeros_1")):
        graph["tensor_values"][name]["sizes"] = sizes(1, 2, 4096)
        [zeros for zeros in graph["nodes"] if "zeros" in zeros["target"]][number]["inputs"][0]["arg"] = WIDE_SIZES


def _set_argument(argument: str, value: dict[str, Any], operator: str) -> Callable[[dict[str, Any]], None]:
    def edit(graph: dict[str, Any]) -> None:
        inputs = node(graph, operator)["inputs"]
        next(argument_input for argument_input in inputs if argument_input["name"] == argument)["arg"] = value

    return edit


def _set_state_sizes(argument: str, value: list[Any], operator: str) -> Callable[[dict[str, Any]], None]:
    def edit(graph: dict[str, Any]) -> None:
        inputs = node(graph, operator)["inputs"]
        name = next(argument_input for argument_input in inputs if argument_input["name"] == argument)["arg"][
            "as_tensor"
        ]["name"]
        graph["tensor_values"][name]["sizes"] = value

    return edit


ATTACKS = {
    "a wider state": ("lstm", _widen_state, "has weights that do not fit its hidden size of 4096"),
    "a state that lies": (
        "lstm without biases",
        _set_argument("size", WIDE_SIZES, "zeros"),
        "with other sizes than the graph declares",
    ),
    "a state that lies with symbols": (
        "lstm without biases",
        _set_argument("size", {"as_sym_ints": sizes(*WIDE_SIZES["as_ints"])}, "zeros"),
        "with other sizes than the graph declares",
    ),
    "fewer layers": (
        "lstm",
        _set_argument("num_layers", {"as_int": 5}, "lstm"),
        "which does not match its number of layers",
    ),
    "no weights": ("gru", _set_argument("params", {"as_tensors": []}, "gru"), "whose sizes the graph does not declare"),
    "variances": (
        "batch norm",
        _set_state_sizes("running_var", sizes(1), "_native_batch_norm_legit_no_training"),
        "has a running_var whose size is not 8, the number of channels",
    ),
    "a norm": (
        "weight norm",
        _set_state_sizes("g", sizes(1, 1), "_weight_norm"),
        "a norm whose size does not fit its weight",
    ),
    "offsets": (
        "embedding bag",
        _set_argument("offsets", {"as_tensor": {"name": "p_bag_weight"}}, "_embedding_bag"),
        "offsets that the program computes or stores",
    ),
    "dimensions": (
        "fourier",
        _set_argument("dim", {"as_ints": [2**20]}, "_fft_r2c"),
        "over dimensions that its input does not have",
    ),
    "groups": (
        "group norm",
        _set_argument("group", {"as_int": 0}, "native_group_norm"),
        ("a number of groups or a size that is not valid"),
    ),
}


#: Programs whose operators `run_decompositions` replaces.
DECOMPOSABLE_PROGRAMS = ("lstm", "lstm without biases", "gru", "weight norm")


@pytest.mark.parametrize("name", ATTACKS)
def test_arguments_that_torch_does_not_check_are_unsafe(name, tmp_path):
    """The kernels read memory by the sizes in the arguments."""
    honest, edit, reason = ATTACKS[name]
    path = write_program(tmp_path / "x.pt2", honest, decomposed=honest not in DECOMPOSABLE_PROGRAMS)
    assert any(reason in message for message in messages(change(path, edit)))


def _operate(*steps: tuple[str, Any, Any]) -> Callable[[dict[str, Any]], None]:
    """Return an edit that puts steps in front of the graph; a text operand is the name of a step's result."""

    def edit(graph: dict[str, Any]) -> None:
        first = graph["nodes"][0]
        new_nodes = []
        for number, (target, *operands) in enumerate(steps):
            inputs = [
                {
                    "name": "",
                    "arg": {"as_sym_int": {"as_name": value}} if type(value) is str else {"as_int": value},
                    "kind": 1,
                }
                for value in operands
            ]
            new_nodes.append(
                {**first, "target": target, "inputs": inputs, "outputs": [{"as_sym_int": {"as_name": f"y{number}"}}]}
            )
        graph["nodes"][1:1] = new_nodes

    return edit


SIZE = "sym_size_int_1"
ENDLESS_NUMBERS = {
    "a power": [("_operator.pow", 7, 10**10)],
    "a shift": [("_operator.lshift", 1, 10**11)],
    "a chain": [("_operator.pow", 7, 50), ("_operator.pow", "y0", "y0")],
    "a chain of products": [("_operator.mul", SIZE, SIZE), *(("_operator.mul", f"y{n}", f"y{n}") for n in range(40))],
    "many large ones": [("_operator.pow", 7, 10**6)] * 200,
    "a power of sizes": [("_operator.mul", SIZE, 10**9), ("_operator.pow", 7, "y0")],
    "digits": [("builtins.round", 5, -(10**10))],
    "a class of sympy": [("torch.utils._sympy.functions.PowByNatural", 7, 10**10)],
    "a sum": [("_operator.pow", 2, 20), ("_operator.add", "y0", "y0"), ("_operator.pow", "y1", "y1")],
}


@pytest.mark.parametrize("name", ENDLESS_NUMBERS)
def test_numbers_that_grow_without_limit_are_unsafe(name, tmp_path):
    """Python computes the numbers when a user calls the program."""
    path = write_program(tmp_path / "x.pt2", "repeat")
    assert messages(path) == []
    (message,) = messages(change(path, _operate(*ENDLESS_NUMBERS[name])))
    assert "computes numbers of more than 4,194,304 bits" in message


def test_numbers_of_ordinary_sizes_are_clean(tmp_path):
    """Powers and shifts of sizes, and a thousand products of two sizes, are not reported."""
    path = write_program(tmp_path / "x.pt2", "repeat")
    steps = [("_operator.pow", SIZE, 2), ("_operator.pow", 2, SIZE), ("_operator.lshift", 1, 40)]
    assert messages(change(path, _operate(*steps, *[("_operator.mul", SIZE, SIZE)] * 1000))) == []


def test_weight_that_begins_like_a_frame_is_clean(tmp_path):
    """In 1 of 256 programs a small weight begins with the byte of FRAME."""
    module = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        module.weight.view(-1)[:1] = torch.tensor([0x3C0F9195], dtype=torch.int32).view(torch.float32)
    torch.export.save(torch.export.export(module, (torch.rand(2, 3),)), tmp_path / "x.pt2")
    assert messages(tmp_path / "x.pt2") == []


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 3, 3))

    def forward(self, x):
        return torch.func.vmap(lambda w: x @ w)(self.w)


def test_message_about_vmap_names_run_decompositions(tmp_path):
    """The functions of vmap crash the process for other levels and sizes; a decomposed program calls only operators."""
    program = torch.export.export(Mapped(), (torch.ones(2, 3),))
    torch.export.save(program, tmp_path / "vmap.pt2")
    actual_messages = messages(tmp_path / "vmap.pt2")
    if not actual_messages:
        pytest.skip("needs a newer torch")
    assert all("to remove this operator, call run_decompositions()" in message for message in actual_messages)
    torch.export.save(program.run_decompositions(), tmp_path / "plain.pt2")
    assert messages(tmp_path / "plain.pt2") == []


#: A text that has code of its own when sympy or fx writes it into source.
TEXT = {"as_string": "__import__('os')"}
OBJECT = {"as_custom_obj": {"name": "K", "class_fqn": "x"}}
GRAPH = {"as_graph": {"name": "g", "graph": {"inputs": [], "nodes": [], "outputs": []}}}
VALUE, PLAIN = {"as_tensor": {"name": "x"}}, {"as_operator": "torch.ops.mine.use.default"}
FALSE = {"as_bool": False}
USE, ADD, GRADLESS = "torch.ops.mine.use.default", "torch.ops.aten.add.Tensor", "wrap_with_set_grad_enabled"


def call(target: str, *arguments: dict[str, Any], names: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """Return a node whose positional arguments have these names, or none, as in the files of torch."""
    named_arguments = zip_longest(arguments, names, fillvalue="")
    inputs = [{"name": name, "arg": argument, "kind": 1} for argument, name in named_arguments]
    outputs = [{"as_tensor": {"name": "new"}}]
    return {"target": target, "inputs": inputs, "outputs": outputs, "metadata": {}, **fields}


def call_higher(name: str, *arguments: dict[str, Any], names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a node of an operator that calls its arguments."""
    return call(f"torch.ops.higher_order.{name}", *arguments, names=names)


FUNCTION = "torch.utils._sympy.functions.ToFloat"
FOREIGN_ARGUMENTS = {
    "a text for a number": (call(FUNCTION, TEXT), "gets a string or an object from the file instead of a number"),
    "a text to format": (
        call("_operator.mod", TEXT, {"as_int": 1}),
        "gets a string or an object from the file instead of a number",
    ),
    "texts in a list": (
        call("_operator.add", {"as_strings": ["a"]}),
        "gets a string or an object from the file instead of a number",
    ),
    "a class of sympy": (call("torch.utils._sympy.functions.Application"), "is not an operator of torch"),
    "a function through an operator": (
        call("torch.ops.higher_order.wrap_with_set_grad_enabled", {"as_bool": True}, {"as_operator": FUNCTION}, TEXT),
        f"calls {FUNCTION} with arguments that statecli cannot check",
    ),
    **{
        f"an attribute, {target}": (call(f"torch.ops.{target}"), "is an attribute of")
        for target in (
            "quantization.__getattr__.__getattribute__",
            "aten.cos.py_impl",
            "prims.__dict__",
            "aten.cos._op",
        )
    },
    **{
        f"an attribute through an operator, {target}": (
            call("torch.ops.higher_order.cond", {"as_operator": f"torch.ops.{target}"}),
            "is an attribute of",
        )
        for target in ("quantization.__dict__.update", "mine.__getattr__")
    },
    "an operator that formats a text": (call("torch.ops.higher_order.print", TEXT), "read any attribute of any object"),
    "an operator that calls its argument": (
        call("torch.ops.higher_order.wrap"),
        "calls functions whose names are in its arguments",
    ),
    "an operator through an operator": (
        call("torch.ops.higher_order.with_effects", {"as_operator": "torch.ops.aten._embedding_bag.default"}),
        "calls torch.ops.aten._embedding_bag.default with arguments that statecli cannot check",
    ),
    "an object of the constants": (
        call("torch.ops.aten.mul.Tensor", OBJECT),
        "an object from the file that is not an input of the graph",
    ),
    # torch checks no types, and sympy evaluates a text in any list of numbers, and as a symbolic number
    **{
        f"a text for a number in {value}": (call(USE, value), "instead of a number")
        for value in (
            {"as_int": "x"},
            {"as_ints": [1, "x"]},
            {"as_int_lists": [[1], ["x"]]},
            {"as_bool": "x"},
            {"as_sym_int": {"as_int": "x"}},
        )
    },
    # a value with a name that has a meaning in the source: `self` takes the place of the module
    "an input called self": (
        call(ADD, VALUE, {"as_tensor": {"name": "self"}}),
        "finds a value named self, which changes",
    ),
    "a number called torch": (
        call(ADD, VALUE, {"as_sym_int": {"as_name": "torch"}}),
        "finds a value named torch, which changes",
    ),
    "an output called lambda": (
        call(ADD, VALUE, VALUE, outputs=[{"as_tensor": {"name": "lambda"}}]),
        "finds a value named lambda, which changes",
    ),
    "a node called inf": (call(ADD, VALUE, VALUE, name="inf"), "finds a value named inf, which changes"),
    # the source reads `self.to_folder`, a method that writes files
    "a graph with the name of a method": (
        call_higher(GRADLESS, FALSE, {"as_graph": {**GRAPH["as_graph"], "name": "to_folder"}}),
        "loading the file calls torch.export.load, which finds a graph named to_folder",
    ),
    # the called tensor may be a method: the source has `self.` and the name of a buffer in place of the tensor
    "a value in place of a graph": (call_higher(GRADLESS, FALSE, VALUE), "calls a value that is not"),
    "nothing in place of a graph": (call_higher(GRADLESS, FALSE), "calls a value that is not"),
    "texts in place of graphs": (
        call_higher("while_loop", {"as_string": "a"}, {"as_string": "b"}),
        "calls a value that is not",
    ),
    "a value in place of an operator": (call_higher("with_effects", VALUE, VALUE), "calls a value that is not"),
    # a text that the graph computes becomes source of a kernel, and no check has seen the text
    **{
        f"an operator on texts, {target}": (call(f"torch.ops.{target}", {"as_int": 39}), "computes a string or a list")
        for target in (
            "aten.chr.default",
            "aten.replace.default",
            "aten.add.str",
            "aten.mul.left_t",
            "aten.add.t",
            "prim.StringIndex.default",
        )
    },
    **{
        f"a message of {name} in {value}": (
            call(f"torch.ops.aten.{name}", VALUE, value, names=("self", "assert_msg")),
            "has a message that is not a constant string",
        )
        for name, value in (
            ("_assert_async.msg", {"as_sym_int": {"as_name": "m"}}),
            ("_assert_async.msg", {"as_strings": ["a"]}),
            ("_functional_assert_async.msg", VALUE),
            ("_assert_scalar.default", VALUE),
        )
    },
    # the graph concatenates the texts
    **{
        f"a text for a graph in {kind}": (
            call_higher(GRADLESS, FALSE, GRAPH, kind),
            "gets a string as an input of its graph",
        )
        for kind in ({"as_string": "'"}, {"as_strings": ["'"]}, {"as_string_to_argument": {}})
    },
    # inductor writes the scale and the kernel options into C++ without escaping; torch cannot save this program
    **{
        f"arguments of {name}": (
            call_higher(name, VALUE, VALUE, VALUE, GRAPH, VALUE, {"as_float": 1.0}, {"as_none": True}),
            "torch writes into source code",
        )
        for name in ("flex_attention", "flex_attention_backward")
    },
    # torch counts arguments by their kind, so that an argument with a name shifts the value that an operator calls
    "a value shifted by a name": (
        call_higher(GRADLESS, FALSE, VALUE, GRAPH, names=("", "callee")),
        "calls a value",
    ),
    "a positional argument with a name": (
        call_higher(GRADLESS, FALSE, GRAPH, VALUE, names=("", "", "a")),
        "positional argument that has a name",
    ),
    "an operator for a graph's input": (
        call_higher("cond", VALUE, GRAPH, GRAPH, PLAIN),
        "gets an operator as an argument",
    ),
}


@pytest.mark.parametrize("name", FOREIGN_ARGUMENTS)
def test_an_argument_that_becomes_source_or_is_called_is_found(name, insert):
    """torch evaluates, calls or compiles the argument: while loading, or when an interpreter calls the graph."""
    foreign, expected_text = FOREIGN_ARGUMENTS[name]
    actual_messages = insert(foreign)
    assert any(expected_text in message for message in actual_messages), actual_messages


@pytest.mark.parametrize("key", ["graph", "inputs", "nodes", "as_graph", "as_string", "arg"])
@pytest.mark.parametrize("place", ["a node", "an output", "a signature"])
def test_dict_key_does_not_hide_an_object(place, key, tmp_path):
    """The keys of a dict argument are free: no key is a field of the schema."""
    argument = {"as_string_to_argument": {key: OBJECT}}
    path = write_program(tmp_path / "a.pt2", "outer")

    def edit(graph_module: dict[str, Any]) -> None:
        if place == "a node":
            graph_module["graph"]["nodes"].insert(0, call("torch.ops.mine.use.default", argument))
        elif place == "an output":
            graph_module["graph"]["outputs"].append(argument)
        else:
            (entry,) = [entry for entry in graph_module["module_call_graph"] if entry["fqn"] == "added"]
            entry["signature"]["inputs"][1] = argument

    assert any("an object from the file" in message for message in messages(change(path, edit, "graph_module")))


def test_dict_key_is_not_taken_for_a_field():
    """A key with the name of a field may have a value of any kind."""
    argument = {"as_string_to_argument": {"as_int": {"as_none": True}, "name": {"as_none": True}, "as_operator": {}}}
    graph = {"nodes": [call("torch.ops.mine.use.default", argument)]}
    assert list(export_arguments.find_misuses({"graph_module": {"graph": graph}}, Steps())) == []


def test_dict_key_does_not_hide_text_in_arithmetic():
    node = call("_operator.add", {"as_string_to_argument": {"graph": TEXT}})
    misuses = list(export_arguments.find_misuses({"graph_module": {"graph": {"nodes": [node]}}}, Steps()))
    assert [misuse.why for misuse in misuses] == [
        "gets a string or an object from the file instead of a number, and may evaluate this value as code"
    ]


def test_object_as_a_graph_input_is_not_reported(tmp_path):
    """torch gives the graph its objects as inputs."""

    def edit(graph: dict[str, Any]) -> None:
        graph["inputs"].append(OBJECT)
        graph["nodes"].insert(0, call(USE, OBJECT))

    actual_messages = messages(change(write_program(tmp_path / "a.pt2", "linear"), edit))
    assert not any("an object from the file" in message for message in actual_messages)


def constant(name: str, pickled: bytes) -> dict[str, bytes]:
    """Return the records of an object among the constants of a program."""
    config = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    document = json.dumps({"config": {name: config}}).encode()
    return {"data/constants/model_constants_config.json": document, "data/constants/opaque_obj_0": pickled}


#: Fields that torch ignores next to the name of an object.
IGNORED_FIELDS: dict[str, dict[str, Any]] = {"": {}, "nodes": {"nodes": []}, "a graph": {"graph": {"nodes": []}}}


@pytest.mark.parametrize("ignored", IGNORED_FIELDS.values(), ids=IGNORED_FIELDS)
def test_repr_of_a_constant_that_torch_compiles_is_found(tmp_path, ignored):
    """The oracle is torch: a namespace's repr() has attribute names unescaped, and loading runs them as code."""
    mark, space = tmp_path / "ran", types.SimpleNamespace()
    space.__dict__[f"a=0))\ropen('{mark}','w')\rdef g(self):\r    return dict(dict(a"] = 1
    path = write_program(tmp_path / "a.pt2", "linear")
    change(path, lambda graph: node(graph, "linear")["inputs"][1].update(arg=OBJECT, **ignored))
    write_archive({**read_archive(path), **constant("K", pickle.dumps(space, 2))}, str(path))
    assert any("an object from the file" in message for message in messages(path))
    with contextlib.suppress(Exception):
        torch.export.load(path)
    assert mark.exists()


def test_repr_of_a_signature_object_that_torch_compiles_is_found(tmp_path):
    """The object is an argument of a submodule, and not an argument of a node."""
    path, mark = write_program(tmp_path / "a.pt2", "outer"), tmp_path / "ran"
    assert messages(path) == []
    records = read_archive(path)
    program = json.loads(records[PROGRAM])
    (entry,) = [entry for entry in program["graph_module"]["module_call_graph"] if entry["fqn"] == "added"]
    entry["signature"]["inputs"][1] = {"as_custom_obj": {"name": "output", "class_fqn": "x"}}
    custom_object = {"name": "cobj", "class_fqn": "x"}
    program["graph_module"]["graph"]["inputs"].insert(0, {"as_custom_obj": custom_object})
    program["graph_module"]["graph"]["custom_obj_values"] = {"cobj": custom_object}
    spec = {"custom_obj": {"arg": custom_object, "custom_obj_name": "output"}}
    program["graph_module"]["signature"]["input_specs"].insert(0, spec)
    mesh = attacks.build_mesh(f"1))], 0)\ropen('{mark}','w')\rdef f(a=0):\r    pass#")
    changed = {PROGRAM: json.dumps(program).encode(), **constant("output", pickle.dumps(mesh, 2))}
    write_archive({**records, **changed}, str(path))
    start = (
        "unflattening the program calls torch.export.unflatten, which compiles the repr() of an object from the file"
    )
    assert any(message.startswith(start) for message in messages(path))
    with contextlib.suppress(Exception):
        torch.export.unflatten(torch.export.load(path))
    assert mark.exists()


def test_an_object_in_place_of_a_graph_is_found(tmp_path):
    """wrap_with_set_grad_enabled calls its second argument: a method of an object in the file."""

    def edit(graph: dict[str, Any]) -> None:
        graph["inputs"].append(OBJECT)
        graph["nodes"].insert(0, call_higher(GRADLESS, FALSE, OBJECT, {"as_string": "a"}))

    actual_messages = messages(change(write_program(tmp_path / "a.pt2", "linear"), edit))
    assert any(
        "gets an object from the file instead of a graph, and calls this object" in message
        for message in actual_messages
    )


def test_each_character_of_a_guard_is_a_step():
    steps, guards = Steps(), [f"max(s{n},{','.join('1' * 2_000)})<1" for n in range(5)]
    list(export_expressions.find_program_calls({"guards_code": guards}, steps))
    assert steps.counts[Budget.TEXT] >= sum(map(len, guards))


@pytest.mark.parametrize(
    ("name", "keyword", "value", "count"),
    [
        ("wrap_activation_checkpoint", "context_fn", VALUE, 1),
        ("tag_activation_checkpoint", "determinism_check", {"as_string": "x"}, 1),
        ("tag_activation_checkpoint", "determinism_check", {"as_string": "default"}, 0),
        ("tag_activation_checkpoint", "use_reentrant", {"as_bool": False}, 0),
        ("strict_mode", "context_fn", VALUE, 1),
        ("hints_wrapper", "hints", {"as_string_to_argument": {}}, 0),
    ],
)
def test_an_argument_by_name_that_torch_calls_is_found(name, keyword, value, count, insert):
    """torch's operator for activation checkpoints calls its argument `context_fn`."""
    edit = call_higher(name, GRAPH)
    edit["inputs"].append({"name": keyword, "arg": value, "kind": 2})
    actual_messages = insert(edit)
    assert len(actual_messages) == count, actual_messages
    assert all(f"gets the keyword argument {keyword}" in message for message in actual_messages)


@pytest.mark.parametrize("name", ["\uff52ecompile", "_\uff47raph.a"])
def test_a_name_that_python_normalizes_is_found(name):
    """Python's source turns a fullwidth letter into the ASCII letter; names in other scripts stay the same."""
    spec = {"buffer": {"arg": {"name": "b_w"}, "buffer_name": name}}
    document = {"graph_module": {"signature": {"input_specs": [spec]}}}
    assert list(export_expressions.find_program_calls(document, Steps()))
    spec["buffer"]["buffer_name"] = "\u540d\u524d.\u00e9"
    assert not list(export_expressions.find_program_calls(document, Steps()))


@pytest.mark.parametrize(("names", "count"), [(("p", "p.foo.write_text"), 1), (("p.a", "p.b", "pa"), 0)])
def test_a_constant_below_another_is_found(names, count):
    """torch takes an attribute of the constant `p` for the constant `p.foo.write_text`: a path has methods."""
    specs = [{"custom_obj": {"arg": {"name": f"o{n}"}, "custom_obj_name": name}} for n, name in enumerate(names)]
    document = {"graph_module": {"signature": {"input_specs": specs}}}
    assert len(list(export_expressions.find_program_calls(document, Steps()))) == count


def test_an_object_among_the_outputs_of_a_graph_is_found(insert, tmp_path):
    """torch takes the object from the constants of the file."""
    path = write_program(tmp_path / "a.pt2", "linear")
    actual_messages = messages(change(path, lambda graph: graph["outputs"].append(OBJECT)))
    assert any("an object from the file" in message for message in actual_messages)
    inner = {"as_graph": {"name": "g", "graph": {"inputs": [], "nodes": [], "outputs": [OBJECT]}}}
    actual_messages = insert(call_higher("cond", inner))
    assert any("an object from the file" in message for message in actual_messages)


def test_each_character_of_an_expression_is_a_step():
    """Parsing an expression takes as long as a word of code."""
    steps, texts = Steps(), [f"Max(s{n},{','.join('a' * 2_000)})" for n in range(5)]
    values = {f"s{n}": {"as_expr": {"expr_str": text}} for n, text in enumerate(texts)}
    list(export_expressions.find_program_calls({"graph_module": {"graph": {"sym_int_values": values}}}, steps))
    assert steps.counts[Budget.TEXT] >= sum(map(len, texts))


@pytest.mark.parametrize("name", ["to", "softmax", "zeros"])
@pytest.mark.parametrize("value", [{"as_int": 200}, {"as_int": -1}, {"as_sym_int": {"as_name": "s0"}}], ids=repr)
def test_a_number_in_place_of_a_dtype_is_found(name, value, tmp_path):
    """torch takes any number for a dtype, and reads memory outside its table for the size."""
    path = write_program(tmp_path / "a.pt2", "cast")
    assert messages(path) == []

    def edit(graph):
        entry = next(entry for entry in node(graph, name)["inputs"] if "as_scalar_type" in entry["arg"])
        entry["arg"] = value

    assert any("gets a number that is not a valid dtype" in text for text in messages(change(path, edit)))
