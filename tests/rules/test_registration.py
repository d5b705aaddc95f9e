"""Rules about the registration of state in a class, checked against the sample models and their fixed twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity

SAMPLES = Path(__file__).parents[2] / "sample_models"


@pytest.fixture
def net(tmp_path):
    """Write a class Net with the given lines in its constructor and return its spec."""

    def write(*lines):
        body = "\n        ".join(("super().__init__()", "self.fc = nn.Linear(2, 2)", *lines))
        source = (
            f"import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        {body}\n"
        )
        (tmp_path / "net.py").write_text(source)
        return f"{tmp_path / 'net.py'}:Net"

    return write


def map_severities(findings):
    return {finding.fqn: finding.severity for finding in findings}


def test_unregistered_tensor_finds_a_plain_attribute_with_its_line(run_rule):
    """The sample model sets `self.table = torch.randn(5, 5)`."""
    (finding,) = run_rule("unregistered-tensor", f"{SAMPLES / 'net.py'}:Net")
    assert (finding.fqn, finding.severity) == ("table", Severity.ERROR)  # its value is random
    assert "not in state_dict()" in finding.message
    assert "register_buffer" in finding.help
    assert "self.table" in (SAMPLES / "net.py").read_text().splitlines()[finding.origin.line - 1]


def test_unregistered_tensor_finds_an_attribute_of_a_pickled_module(run_rule, save_checkpoint):
    """A whole module in a pickle has its plain attributes too."""
    module = nn.Linear(2, 2)
    module.table = torch.zeros(3)
    assert list(map_severities(run_rule("unregistered-tensor", save_checkpoint(module)))) == ["table"]


def test_unregistered_tensor_gives_a_note_for_a_scalar(run_rule, net):
    """A size kept as a 0-dim tensor does no harm."""
    assert map_severities(run_rule("unregistered-tensor", net("self.size = torch.tensor(3)"))) == {
        "size": Severity.NOTE
    }


def test_unregistered_tensor_gives_a_note_for_the_state_of_a_metric(run_rule, tmp_path):
    """The metric's own code moves its state, in a class and in a pickled module, before and after an update."""
    torchmetrics = pytest.importorskip("torchmetrics")
    text = "Accuracy('multiclass', num_classes=3)"
    (tmp_path / "net.py").write_text(f"import torchmetrics\n\n\ndef made():\n    return torchmetrics.{text}\n")
    used = torchmetrics.CatMetric()
    used.update(torch.ones(3))
    torch.save(nn.ModuleList([torchmetrics.Accuracy("multiclass", num_classes=3), used]), tmp_path / "a.pt")
    all_findings, class_findings = (
        run_rule("unregistered-tensor", tensor) for tensor in (tmp_path / "a.pt", f"{tmp_path / 'net.py'}:made")
    )
    assert {"0.tp", "0._defaults['tp']", "1.value[0]"} <= set(map_severities(all_findings))
    assert {f"0.{tensor.fqn}" for tensor in class_findings} <= set(map_severities(all_findings))
    assert {finding.severity for finding in (*all_findings, *class_findings)} == {Severity.NOTE}


def test_unregistered_tensor_finds_a_table_next_to_a_metric(run_rule, tmp_path):
    """Nothing moves the table, and the state of the same name in another module is not an excuse."""
    metric = pytest.importorskip("torchmetrics").Accuracy("multiclass", num_classes=3)
    metric.table, linear = torch.ones(3), nn.Linear(2, 2)
    linear.tp = torch.ones(3)
    torch.save(nn.ModuleList([metric, linear]), tmp_path / "a.pt")
    warned = [
        tensor.fqn
        for tensor in run_rule("unregistered-tensor", tmp_path / "a.pt")
        if tensor.severity is Severity.WARNING
    ]
    assert sorted(warned) == ["0.table", "1.tp"]


def test_unregistered_tensor_spares_buffers_and_second_names(run_rule, net):
    """A registered tensor may have other names."""
    lines = ("self.register_buffer('b', torch.ones(3))", "self.same = self.fc.weight")
    assert not run_rule("unregistered-tensor", net(*lines))
    assert not run_rule("unregistered-tensor", f"{SAMPLES / 'net_fixed.py'}:Net")


def test_unregistered_tensor_spares_an_example_input(run_rule, net):
    """`example_input_array` is an input of Lightning, not state."""
    assert not run_rule("unregistered-tensor", net("self.example_input_array = torch.ones(4, 2)"))


def test_unregistered_parameter_finds_leaves_that_no_optimizer_gets(run_rule, net):
    """A bare leaf, and parameters in a plain list."""
    lines = ("self.scale = torch.ones(3, requires_grad=True)", "self.many = [nn.Parameter(torch.ones(2))]")
    errors = dict.fromkeys(["scale", "many[0]"], Severity.ERROR)
    assert map_severities(run_rule("unregistered-parameter", net(*lines))) == errors


def test_unregistered_parameter_spares_parameter_lists_and_plain_tensors(run_rule, net):
    """nn.ParameterList registers its tensors."""
    lines = ("self.many = nn.ParameterList([torch.ones(2)])", "self.table = torch.ones(3)")
    assert not run_rule("unregistered-parameter", net(*lines))


def test_unregistered_module_finds_each_layer_of_a_plain_list(run_rule, net):
    """A layer gives a single finding for all its tensors."""
    findings = run_rule("unregistered-module", net("self.layers = [nn.Linear(2, 2), nn.Linear(2, 2)]"))
    assert [finding.message.partition(":")[0] for finding in findings] == ["layers[0]", "layers[1]"]
    assert {finding.severity for finding in findings} == {Severity.ERROR}


def test_unregistered_module_names_its_tensors(run_rule, net):
    """The message has the right grammar for a single tensor and for several tensors."""
    lines = "self.pair = [nn.Linear(2, 2)]", "self.single = [nn.Linear(2, 2, bias=False)]"
    pair, single = run_rule("unregistered-module", net(*lines))
    ends = "not trained, saved or moved"
    assert pair.message == (
        f"pair[0]: module is not registered: its 2 tensors (pair[0].weight, pair[0].bias) are {ends}"
    )
    assert single.message == f"single[0]: module is not registered: its only tensor (single[0].weight) is {ends}"


def test_unregistered_module_spares_module_lists_and_modules_without_tensors(run_rule, net):
    """An activation in a list holds nothing."""
    assert not run_rule(
        "unregistered-module", net("self.layers = nn.ModuleList([nn.ReLU()])", "self.act = [nn.ReLU()]")
    )


def test_non_persistent_buffer_finds_only_a_random_value(run_rule, net):
    """A loaded model has other random values; the constructor computes a position table again."""
    random = net("self.register_buffer('t', torch.randn(3), persistent=False)")
    assert map_severities(run_rule("non-persistent-buffer", random)) == {"t": Severity.ERROR}
    assert not run_rule("non-persistent-buffer", f"{SAMPLES / 'positions.py'}:Positions")


def test_non_persistent_buffer_gives_a_note_for_a_pickled_module(run_rule, net, tmp_path):
    """A pickled module has no constructor to run."""
    module = torch.nn.Module()
    module.register_buffer("t", torch.ones(3), persistent=False)
    torch.save(module, tmp_path / "whole.pt")
    assert map_severities(run_rule("non-persistent-buffer", tmp_path / "whole.pt")) == {"t": Severity.NOTE}


def test_non_persistent_buffer_spares_persistent_buffers(run_rule, net):
    """All buffers of BatchNorm are saved."""
    assert not run_rule("non-persistent-buffer", net("self.bn = nn.BatchNorm1d(2)"))


def test_buffer_requires_grad_finds_a_buffer_that_collects_gradients(run_rule):
    """The buffer of the sample model requires grad."""
    assert list(map_severities(run_rule("buffer-requires-grad", f"{SAMPLES / 'grad_buffer.py'}:Scaled"))) == ["scale"]


def test_buffer_requires_grad_spares_the_fixed_twin(run_rule):
    """In the fixed twin, only a parameter requires grad."""
    assert not run_rule("buffer-requires-grad", f"{SAMPLES / 'grad_buffer_fixed.py'}:Scaled")


def test_stale_view_finds_a_second_name_of_a_buffer(run_rule):
    """A move rebinds the registered name alone."""
    assert list(map_severities(run_rule("stale-view", f"{SAMPLES / 'rotary.py'}:Rotary"))) == ["original_inv_freq"]


QUANTIZED = {
    "dynamic": lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), dtype=torch.qint8),
    "lstm": lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(4, 4)), {nn.LSTM}, dtype=torch.qint8),
    "static": lambda: nn.Sequential(torch.ao.nn.quantized.Linear(4, 4), torch.ao.nn.quantized.Conv2d(3, 4, 3)),
    "gru": lambda: torch.ao.nn.quantized.dynamic.GRUCell(4, 4),
    "embedding": lambda: torch.ao.nn.quantized.Embedding(10, 4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build_module", QUANTIZED.values(), ids=QUANTIZED)
def test_packed_weights_of_quantized_modules_are_spared(tmp_path, build_module):
    """Quantized modules keep their weights in C++ attributes and save the weights themselves."""
    torch.save(build_module(), tmp_path / "a.pt")
    (target,) = audit(Request((str(tmp_path / "a.pt"),))).targets
    assert {finding.rule for finding in target.findings} == {"whole-module-pickle", "needs-weights-only-false"}


@pytest.mark.filterwarnings("ignore")
def test_unregistered_tensor_finds_a_table_next_to_quantized_modules(run_rule, save_checkpoint):
    """The list of a user's module is still not saved."""
    net = nn.Sequential(nn.Linear(4, 4))
    net.tables = [torch.zeros(3)]
    quantized = torch.ao.quantization.quantize_dynamic(net, dtype=torch.qint8)
    quantized.tables = net.tables
    assert list(map_severities(run_rule("unregistered-tensor", save_checkpoint(quantized)))) == ["tables[0]"]


def test_stale_view_points_at_the_line_that_took_the_view(run_rule, net):
    """The finding does not point at the line of the buffer."""
    spec = net('self.register_buffer("table", torch.zeros(3, 3))', "self.cos = self.table[0]")
    (finding,) = run_rule("stale-view", spec)
    assert (finding.fqn, finding.origin.line) == ("cos", 10)


def test_stale_view_spares_a_second_name_of_a_parameter(run_rule, net):
    """A move keeps the Parameter object."""
    assert not run_rule("stale-view", net("self.same = self.fc.weight"))


def test_unregistered_tensor_finds_a_tensor_of_the_constructor(run_rule):
    """The tensor follows neither training nor a move."""
    (finding,) = run_rule("unregistered-tensor", f"{SAMPLES / 'precomputed.py'}:Normed")
    assert "DivBackward0" in finding.message


def test_unregistered_tensor_spares_tensors_that_torch_recomputes(run_rule, net):
    """The old weight_norm sets its weight again before each forward."""
    assert not run_rule("unregistered-tensor", net("nn.utils.weight_norm(self.fc)"))


NET_WITH_HOOK = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(2, 2), "weight", 1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build_module", NET_WITH_HOOK.values(), ids=NET_WITH_HOOK)
def test_unregistered_tensor_spares_tensors_recomputed_by_a_hook(run_rule, save_checkpoint, build_module):
    """The tensor follows the parameters, although the tensor is a plain attribute of a pickled module."""
    net = nn.Sequential(build_module())
    with torch.no_grad():
        net(torch.ones(1, 2))
    assert not run_rule("unregistered-tensor", save_checkpoint(net))


def test_untied_by_move_finds_a_buffer_tied_to_a_parameter(run_rule, net):
    """The finding points at the line of the tie."""
    spec = net("self.tied = nn.Linear(3, 3, bias=False)", 'self.register_buffer("copy", self.tied.weight.data)')
    (finding,) = run_rule("untied-by-move", spec)
    assert (finding.message, finding.origin.line) == (
        "tied.weight shares memory with copy, but a move gives each its own memory",
        10,
    )
    assert not run_rule("tied-tensors", spec)


def test_untied_by_move_spares_tied_weights(run_rule, net):
    """A move keeps the Parameter object. audit reports the tie as a note, at the line of the tie."""
    spec = net(
        "self.tied = nn.Linear(3, 3, bias=False)", "self.head = nn.Linear(3, 3)", "self.head.weight = self.tied.weight"
    )
    assert not run_rule("untied-by-move", spec)
    (finding,) = run_rule("tied-tensors", spec)
    assert (finding.severity.value, finding.origin.line) == ("note", 11)
