"""Metrics of torchmetrics in the proofs: they save their states on request and synchronize them over the ranks."""

from __future__ import annotations

import pytest

from statecli.commands.verify.result import Name, Verdict
from statecli.core.finding import Severity

from .proving import find_cell, prove_source, run_proof

torchmetrics = pytest.importorskip("torchmetrics")

import torch  # noqa: E402

#: A model that counts with a metric. `{0}`: arguments of the metric; `{1}`: what forward returns.
BODY = """import torchmetrics
self.m = torchmetrics.MeanMetric({0})
self.fc = nn.Linear(4, 4)
---
def forward(self, x):
    self.m.update(x.detach())
    return {1}
"""


@pytest.fixture(autouse=True)
def in_tmp(in_tmp_path):
    """Models are written to a temporary current folder."""


def prove(name, text="self.fc(x)", arguments=""):
    return prove_source(name, BODY.format(arguments, text), "4x4", device="cpu")


@pytest.mark.parametrize(("name", "columns"), [(Name.SHARD, ["sharded", "replicated"]), (Name.RESUME, ["resumed"])])
def test_states_of_a_metric_are_skipped(name, columns):
    """No output depends on the metric, so its states are skipped with the reason."""
    check = prove(name)
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    for column in columns:
        for tensor in ("m.mean_value", "m.weight"):
            skipped = find_cell(check, column, tensor)
            assert skipped.verdict is Verdict.SKIPPED
            assert skipped.reason.startswith("a metric of torchmetrics ")


def test_help_makes_a_metric_in_the_loss_persistent():
    """The remedy is an option of the metric, not an edit of torchmetrics; with this option the proof passes."""
    check = prove(Name.RESUME, "self.fc(x) * self.m.compute()")
    assert [finding.fqn for finding in check.findings] == ["m.mean_value", "m.weight"]
    assert {finding.severity for finding in check.findings} == {Severity.ERROR}
    assert {finding.help for finding in check.findings} == {
        "call persistent(True) on the metric in __init__, so that state_dict() contains its states; "
        "assigned at net.py:7"
    }
    body = BODY.format("", "self.fc(x) * self.m.compute()").replace("---", "self.m.persistent(True)\n---")
    assert prove_source(Name.RESUME, body, "4x4", device="cpu").findings == ()


def test_many_metrics_are_compared_together():
    """The metrics have more values than the proof tests individually, and no value has an effect."""
    body = """import torchmetrics
kinds = ("Accuracy", "Recall", "F1Score", "Precision", "ConfusionMatrix")
metrics = {kind: getattr(torchmetrics, kind)(task="multiclass", num_classes=4) for kind in kinds}
self.ms = torchmetrics.MetricCollection(metrics, compute_groups=False)
self.fc = nn.Linear(4, 4)
---
def forward(self, x):
    y = self.fc(x)
    self.ms.update(y.detach(), torch.zeros(len(x)).long())
    return y
"""
    check = prove_source(Name.RESUME, body, "4x4", device="cpu")
    assert (check.verdict, check.reason, check.findings) == (Verdict.PASSED, None, ())


@pytest.mark.parametrize("is_synchronized", [True, False])
def test_metric_without_synchronization_fails(is_synchronized):
    """`sync_on_compute=False` leaves each rank its own values: checked with a metric of two ranks."""
    metric = torchmetrics.SumMetric(
        sync_on_compute=is_synchronized,
        dist_sync_fn=lambda value, group: [value, value + 1],
        distributed_available_fn=lambda: True,
    )
    metric.update(torch.tensor(1.0))
    assert float(metric.compute()) == (3.0 if is_synchronized else 1.0)
    check = prove(Name.SHARD, arguments=f"sync_on_compute={is_synchronized}")
    assert (check.verdict is Verdict.FAILED) is not is_synchronized
    assert {"m.mean_value", "m.weight"}.isdisjoint(finding.fqn for finding in check.findings) is is_synchronized


def test_tensor_outside_of_the_metric_states_is_reported():
    """A metric synchronizes and saves only the states from add_state."""
    body = """import torchmetrics
class Mine(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("hits", torch.zeros(3), dist_reduce_fx="sum")
        self.extra = torch.zeros(2)
    def update(self, x):
        self.hits += x.sum()
        self.extra = self.extra + x.mean()
    def compute(self):
        return self.hits
self.m = Mine()
self.fc = nn.Linear(4, 4)
---
def forward(self, x):
    self.m.update(x.detach())
    return self.fc(x)
"""
    for name in (Name.SHARD, Name.RESUME):
        assert [finding.fqn for finding in prove_source(name, body, "4x4", device="cpu").findings] == ["m.extra"]


def test_count_of_a_metric_is_a_note_for_compile():
    """torch.compile compiles again for each count; the remedy does not edit an installed package."""
    check = run_proof(Name.COMPILE, "torchmetrics:MeanMetric", "3", device="cpu")
    (finding,) = check.findings
    assert (finding.fqn, finding.severity) == ("_update_count", Severity.NOTE)
    assert finding.help == "call the metric outside of the compiled or exported model"


def test_plain_tensors_share_a_line_about_ranks(statecli, tmp_path):
    """A sum and a count share a line: the count is equal on each rank only because the batches are equal."""
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Own(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.total, self.n = torch.zeros(()), torch.zeros(())\n"
        "        self.fc = nn.Linear(3, 3)\n\n    def forward(self, x):\n"
        "        self.total = self.total + x.sum().detach()\n        self.n = self.n + len(x)\n"
        "        return self.fc(x)\n"
    )
    out = statecli("verify", str(tmp_path / "own.py:Own"), "--input", "2x3", "--check", "shard").out
    assert "total, n: 2 plain attributes" in out
    assert out.count("left out by") == 1
    assert "forward in train mode computes different values on each rank" in out
