"""Tensors that the first forward adds, shapes, changes and removes, checked against torch."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from statecli.commands.inspect import run as inspection  # noqa: E402
from statecli.commands.verify.result import Name  # noqa: E402
from statecli.commands.verify.run import Request, run  # noqa: E402
from statecli.core.errors import ModelError, UsageError  # noqa: E402

HEADER = "import torch\nfrom torch import nn\n"
CLASS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        {init}
    def forward(self, x):
        {forward}
        return self.fc(x)
"""


@pytest.fixture
def inspect_after_forward(tmp_path, in_tmp_path):
    """Return a function that inspects a class Net, made of the given source lines, after a forward with a 2×3 input."""

    def inspect_net(forward: str, init: str = "pass", call: str = "Net", **options) -> inspection.Inspection:
        lines = [textwrap.indent(textwrap.dedent(text), " " * 8).strip() for text in (init, forward)]
        more = options.pop("more", "")
        (tmp_path / "net.py").write_text(HEADER + CLASS.format(init=lines[0], forward=lines[1]) + more, "utf-8")
        return inspection.inspect(inspection.Request(f"net.py:{call}", input=("2x3",), **options))

    return inspect_net


def map_rows(result):
    return {row.fqn: row for row in result.state.tensors}


def find_line(text: str) -> int:
    """Return the number of the only line of net.py that contains `text`."""
    (number,) = [n for n, line in enumerate(Path("net.py").read_text().splitlines(), 1) if text in line]
    return number


def list_notes(result) -> dict[str, str]:
    return {row.fqn: row.note for row in result.state.tensors if row.note}


# --- tensors that appear ------------------------------------------------------------------------------------


def test_attribute_created_by_forward_has_its_line(inspect_after_forward):
    """The attribute is unregistered, neither saved nor moved, and has the line of its assignment in forward. The
    constructor has no line to replace, so the row has no fix.
    """
    row = map_rows(inspect_after_forward("self.mask = torch.ones(3)", init="self.mask = None"))["mask"]
    assert (row.appeared, row.kind.value, row.saved, row.moves) == (True, "unregistered", False, False)
    assert (row.note, row.fix) == ("created by the first forward", None)
    assert row.origin.line == find_line("self.mask = torch.ones(3)")


def test_dict_item_has_the_line_of_the_dict(inspect_after_forward):
    """torch does not see an item assigned to a dict, so the item has the dict's line; an attribute has its own line."""
    actual_rows = map_rows(
        inspect_after_forward("self.seen = x\nself.cache[str(x.device)] = torch.ones(3)", init="self.cache = {}")
    )
    assert actual_rows["cache['cpu']"].origin.line == find_line("self.cache = {}")
    assert actual_rows["seen"].origin.line == find_line("self.seen = x")


def test_module_created_in_forward_is_registered(inspect_after_forward):
    """The new module's parameters are listed in torch's order, and they are saved and moved."""
    actual = inspect_after_forward("if not hasattr(self, 'late'):\n    self.late = nn.Linear(3, 3)")
    assert [row.fqn for row in actual.state.tensors] == ["fc.weight", "fc.bias", "late.weight", "late.bias"]
    late = [row for row in actual.state.tensors if row.appeared]
    assert [(row.fqn, row.saved, row.moves) for row in late] == [("late.weight", True, True), ("late.bias", True, True)]


def test_tensors_of_the_constructor_are_not_marked_as_appeared(inspect_after_forward):
    """The rows of the constructor equal the rows without an input."""
    actual = inspect_after_forward("self.mask = x", init="self.table = torch.ones(3)")
    before = inspection.inspect(inspection.Request("net.py:Net")).state.tensors
    assert [row for row in actual.state.tensors if not row.appeared] == list(before)


def test_reassigned_attribute_keeps_the_line_of_the_constructor(inspect_after_forward):
    """The fix replaces the line of the constructor."""
    row = map_rows(inspect_after_forward("self.table = self.table.to(x.dtype) * 1", init="self.table = torch.ones(3)"))[
        "table"
    ]
    assert not row.appeared
    assert row.origin.line == find_line("self.table = torch.ones(3)")
    assert "register_buffer" in row.fix


def test_alias_of_a_rebound_buffer_is_not_marked_as_appeared(inspect_after_forward):
    """A further name of a buffer becomes a tensor of its own when forward rebinds the buffer."""
    actual_rows = map_rows(
        inspect_after_forward(
            "self.t = self.t + 1", init="self.register_buffer('t', torch.ones(3)); self.other = self.t"
        )
    )
    assert (actual_rows["other"].appeared, actual_rows["other"].fix) == (False, None)
    assert actual_rows["t"].aliases == ()


def test_forward_is_not_called_without_input(tmp_path, in_tmp_path):
    """Forward is not called even if the model has an example input."""
    net = """
        class Net(nn.Linear):
            example_input_array = torch.ones(2, 3)
            def forward(self, x):
                raise ValueError
    """
    (tmp_path / "net.py").write_text(HEADER + textwrap.dedent(net))
    assert inspection.inspect(inspection.Request("net.py:Net(3, 3)")).inputs is None


# --- lazy parameters ----------------------------------------------------------------------------------------


def test_lazy_parameters_get_their_shapes():
    """The shapes equal the shapes that torch gives, and a note says that the first forward set them; without an input,
    there are no shapes.
    """
    state = inspection.inspect(inspection.Request("torch.nn:LazyConv2d(4, 3)", input=("1x2x8x8",)))
    oracle = nn.LazyConv2d(4, 3)
    oracle(torch.ones(1, 2, 8, 8))
    assert {row.fqn: row.shape for row in state.state.tensors} == {
        n: tuple(p.shape) for n, p in oracle.state_dict().items()
    }
    assert list_notes(state) == dict.fromkeys(oracle.state_dict(), "gets its shape in the first forward")
    assert not any(row.appeared for row in state.state.tensors)
    state = inspection.inspect(inspection.Request("torch.nn:LazyConv2d(4, 3)"))
    assert [row.shape for row in state.state.tensors] == [None, None]


# --- tensors that change ------------------------------------------------------------------------------------

CHANGES = {
    "in place": "self.kept += 1",
    "by .data": "self.kept.data.mul_(3)",
    "assigned again": "self.kept = self.kept * 2",
    "in shape": "self.kept = torch.cat([self.kept, x])",
    "in dtype": "self.kept = self.kept.double()",
    "in its sign of zero": "self.kept[0, 0] = -0.0",
}


DECLARATIONS = ["self.register_buffer('kept', torch.full((3, 3), {}))", "self.kept = torch.full((3, 3), {})"]


@pytest.mark.parametrize("declaration", DECLARATIONS)
@pytest.mark.parametrize("change", CHANGES)
def test_tensor_changed_by_forward_has_a_note(inspect_after_forward, change, declaration):
    """A change is detected bit by bit, however the code writes it, and no other tensor has a note."""
    value = "0.0" if "zero" in change else "1.0"
    assert list_notes(inspect_after_forward(CHANGES[change], init=declaration.format(value))) == {
        "kept": "changed by forward"
    }


def test_parameter_changed_by_forward_has_a_note(inspect_after_forward):
    """Code that writes to `.data`, and an embedding with max_norm, which scales its rows in forward."""
    result = inspect_after_forward(
        "self.fc.bias.data.add_(1)\nself.emb(torch.arange(2))", init="self.emb = nn.Embedding(2, 3, max_norm=0.1)"
    )
    assert list_notes(result) == dict.fromkeys(["fc.bias", "emb.weight"], "changed by forward")


@pytest.mark.parametrize("forward", ["self.kept = self.kept * 1", "self.kept.mul_(1)", "self.kept = self.kept.clone()"])
def test_rewrite_with_the_same_bits_has_no_note(inspect_after_forward, forward):
    """A NaN with the same bits counts as unchanged."""
    assert not list_notes(inspect_after_forward(forward, init="self.kept = torch.full((3,), torch.nan)"))


def test_running_statistics_change_in_training_mode():
    """Forward changes BatchNorm's three buffers in training mode, but not in evaluation mode."""
    state = inspection.inspect(inspection.Request("torch.nn:BatchNorm1d(3)", input=("2x3",)))
    buffers = dict(nn.BatchNorm1d(3).named_buffers())
    assert list_notes(state) == dict.fromkeys(buffers, "changed by forward in training mode")


def test_model_built_in_eval_mode_is_not_run_in_training_mode(inspect_after_forward):
    """The constructor sets evaluation mode, so forward is not called in training mode."""
    result = inspect_after_forward("self.norm(x)", init="self.norm = nn.BatchNorm1d(3); self.eval()")
    assert not list_notes(result)


def test_statistics_are_computed_after_forward(inspect_after_forward):
    """Forward ran once, in evaluation mode: the statistics describe the instance that ran it."""
    actual = inspect_after_forward("self.count += 1", init="self.register_buffer('count', torch.zeros(()))", stats=True)
    assert map_rows(actual)["count"].stats.max == 1


def test_writes_on_meta_are_reported_as_changes(inspect_after_forward):
    """Tensors on meta have no values to compare; inputs are on meta like the model."""
    init = "self.register_buffer('count', torch.zeros(())); self.register_buffer('still', torch.zeros(()))"
    actual = inspect_after_forward("self.count += 1; self.seen = x + self.still", init=init, init_device="meta")
    assert list_notes(actual) == {"count": "changed by forward", "seen": "created by the first forward"}
    assert map_rows(actual)["seen"].device == "meta"


def test_attribute_deleted_by_forward_is_reported(inspect_after_forward):
    """An attribute that forward deletes has no row any more."""
    actual = inspect_after_forward("if hasattr(self, 'tmp'): del self.tmp", init="self.tmp = torch.ones(3)")
    assert [(oddity.name, oddity.fqn) for oddity in actual.state.oddities] == [("gone-after-forward", "tmp")]


# --- errors -------------------------------------------------------------------------------------------------


def test_error_of_forward_has_its_message_and_line(inspect_after_forward):
    """The error is a single line."""
    with pytest.raises(ModelError) as raised:
        inspect_after_forward("raise ValueError('no such size')")
    expected = f"net.py:Net: calling the model raised ValueError: no such size (net.py:{find_line('raise Value')})"
    assert str(raised.value) == expected


def test_error_only_in_training_mode_is_reported():
    """BatchNorm raises in training mode with a batch of one row; the table is still shown."""
    state = inspection.inspect(inspection.Request("torch.nn:BatchNorm1d(3)", input=("1x3",)))
    (oddity,) = state.state.oddities
    assert oddity.name == "not-tried-in-training"
    assert "Expected more than 1 value per channel" in oddity.message
    assert not list_notes(state)


def test_module_level_model_is_copied(inspect_after_forward):
    """A module-level object has no constructor to call again; the result shows a copy of the object after a forward.
    The object itself is unchanged.
    """
    result = inspect_after_forward("self.mask = torch.ones(3)", call="net", more="\nnet = Net()\n")
    assert map_rows(result)["mask"].appeared
    path = str(Path("net.py").resolve())
    (module,) = (module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == path)
    assert not hasattr(module.net, "mask")


@pytest.mark.parametrize("expression", ["torch.compile(Net(), backend='eager', fullgraph=True)", "compiled()"])
def test_compiled_model_can_be_traced(inspect_after_forward, expression):
    """Dynamo cannot trace methods that are wrapped to record lines, so a compiled model has no recorded lines."""
    extra_source = f"""
def compiled():
    net = Net()
    net.compile(backend="eager", fullgraph=True)
    return net

def make():
    return {expression}
"""
    actual = inspect_after_forward("self.mask = torch.ones(3)", call="make", more=extra_source)
    assert [row.fqn.rpartition(".")[2] for row in actual.state.tensors if row.appeared] == ["mask"]


def test_input_for_a_checkpoint_is_refused(tmp_path):
    """The error is a single line."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="is a checkpoint, which has no forward"):
        inspection.inspect(inspection.Request(str(tmp_path / "a.pt"), input=("2x3",)))


# --- moves and proofs ---------------------------------------------------------------------------------------


def test_tensor_created_by_forward_is_checked_by_the_move(inspect_after_forward):
    """A cache stays on the device of its forward and is reported; a tensor replaced by each forward is not reported."""
    result = inspect_after_forward(
        "if self.mask is None:\n    self.mask = torch.ones(3)\nx = x + self.mask", init="self.mask = None", to="meta"
    )
    assert [(finding.rule, finding.fqn) for finding in result.findings] == [
        ("left-behind", "mask"),
        ("keeps-dtype", "mask"),
        ("device-mismatch", "mask"),
    ]
    assert map_rows(result)["mask"].after.device == "cpu"
    result = inspect_after_forward("self.mask = torch.ones(3)", to="meta")
    assert result.findings == ()
    assert map_rows(result)["mask"].after.device == "cpu"


def test_help_names_the_line_in_forward(inspect_after_forward):
    """The help names the line of forward that assigned the tensor which the move leaves on the CPU."""
    inspect_after_forward(
        "if self.mask is None:\n    self.mask = torch.ones(3)\nx = x + self.mask", init="self.mask = None"
    )
    result = run(Request("net.py:Net", checks=(Name.MOVE,), device="meta", input=("2x3",)))
    (finding,) = result.findings
    assert finding.help.endswith(f"; assigned at net.py:{find_line('self.mask = torch.ones(3)')}")


MODULES = {
    "torch.nn:LSTM(3, 4)": ("5x2x3",),
    "torch.nn:MultiheadAttention(4, 2)": ("5x2x4", "5x2x4", "5x2x4"),
    "torch.nn:LazyBatchNorm1d()": ("4x3",),
    "torch.nn:Embedding(10, 4)": ("int64:2x3<10",),
    "torchmetrics:MeanSquaredError()": ("4", "4"),
}


@pytest.mark.parametrize("spec", MODULES)
def test_registered_rows_equal_the_lists_of_torch(spec):
    """The registered rows equal torch's own lists of parameters and buffers, with names and shapes."""
    if spec.startswith("torchmetrics"):
        pytest.importorskip("torchmetrics")
    from statecli.commands.verify import inputs
    from statecli.live.build import build
    from statecli.live.spec import parse_spec

    state = inspection.inspect(inspection.Request(spec, input=MODULES[spec]))
    built = build(parse_spec(spec))
    args, _ = inputs.find_inputs(MODULES[spec], None, built)[0].make_call()
    built.module(*args)
    named = [*built.module.named_parameters(), *built.module.named_buffers()]
    expected_shapes = {name: tuple(tensor.shape) for name, tensor in named}
    assert {row.fqn: row.shape for row in state.state.tensors if row.kind.value != "unregistered"} == expected_shapes
