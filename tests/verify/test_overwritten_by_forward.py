"""Trained parameters that forward writes to: whether an update survives the next forward, checked against torch."""

from __future__ import annotations

import pytest
import torch

from statecli.commands.verify.result import Check, Name, Verdict

from .proving import build_net, find_cell, map_rules, map_verdicts, prove_source

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def prove_write(write: str, start: str = "torch.ones(8)") -> Check:
    """Run the proof for a class whose forward runs `write`, then multiplies by the parameter w."""
    body = f"self.used, self.calls = nn.Linear(8, 8), 0\nself.w = nn.Parameter({start})\n---\n"
    forward = f"with torch.no_grad():\n        {write}\n    return self.used(x) * self.w"
    return prove_source(Name.STEP, f"{body}def forward(self, x):\n    self.calls += 1\n    {forward}", "4x8")


def update_survives() -> bool:
    """Return whether two different values of the parameter still differ after a forward of the checked class."""
    net, x, after = build_net(), torch.ones(4, 8), []
    for value in (2.0, -0.5):
        with torch.no_grad():
            net.w.copy_(torch.arange(8.0) * value)
        net(x)
        after.append(net.w.detach().clone())
    return not torch.equal(*after)


OVERWRITES = {
    "with what it has": ("self.w.fill_(1.0)", "torch.ones(8)"),
    "with other values": ("self.w.fill_(2.0)", "torch.ones(8)"),
    "by way of data": ("self.w.data.fill_(2.0)", "torch.ones(8)"),
    "new memory": ("self.w.data = torch.ones(8)", "torch.ones(8)"),
    "with what hangs on the inputs": ("self.w.copy_(x.mean(0))", "torch.ones(8)"),
    "of narrow numbers": ("self.w.fill_(3.0)", "torch.full((8,), 3.0, dtype=torch.bfloat16)"),
}


@pytest.mark.parametrize(("write", "start"), OVERWRITES.values(), ids=OVERWRITES)
def test_parameter_overwritten_by_forward_is_reported(write, start):
    """The next forward overwrites each update; without the write, the parameter trains and the check passes."""
    check = prove_write(write, start)
    assert not update_survives()
    assert map_rules(check) == {"w": "overwritten-by-forward"}
    assert check.findings[0].message == "w: overwritten by forward, so each update is lost"
    assert prove_write("pass", start).verdict is Verdict.PASSED


PROJECTIONS = {
    "a projection to a norm": "self.w.div_(self.w.norm())",
    "a range": "self.w.clamp_(0.0, 1.0)",
    "a range by way of data": "self.w.data.clamp_(-0.5, 0.5)",
    "whole numbers": "self.w.round_()",
    "a mean of zero": "self.w.sub_(self.w.mean())",
    "decay": "self.w.mul_(0.9)",
}


@pytest.mark.parametrize("write", PROJECTIONS.values(), ids=PROJECTIONS)
def test_parameter_projected_by_forward_passes(write):
    """A part of each update survives, so the write of forward is not reported as a failure."""
    check = prove_write(write)
    assert update_survives()
    assert (check.verdict, check.findings) == (Verdict.PASSED, ()), check
    assert map_verdicts(check, "updated")["w"] == "passed"


def test_trained_parameter_changed_by_forward_has_a_cell():
    """The parameter has a cell in the column "forward updates"."""
    assert map_verdicts(prove_write("self.w.mul_(0.9)"), "forward updates") == {"w": "passed"}


def test_embedding_with_max_norm_passes():
    """With max_norm, torch writes to the rows of the lookup."""
    body = "self.table = nn.Embedding(4, 8, max_norm=0.5)\n---\ndef forward(self, x): return self.table(x)"
    check = prove_source(Name.STEP, body, "int64:64<4")
    assert check.verdict is Verdict.PASSED, check
    assert map_verdicts(check, "forward updates") == {"table.weight": "passed"}


def test_error_of_the_second_forward_is_inconclusive():
    """The reason has the error of the second forward."""
    check = prove_write("self.w.fill_(1.0)\n        if self.calls > 1: raise ValueError('one call only')")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    reason = find_cell(check, "updated", "w").reason
    assert reason.startswith(
        "forward writes to the parameter, and statecli does not know whether an update is kept: calling the model in "
        "train"
    )
    assert "raised ValueError: one call only" in reason
