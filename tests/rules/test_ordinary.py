"""Ordinary checkpoints of real models: nothing is wrong with how they are laid out, named, stored and placed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity
from statecli.rules import layout, names, placement, storage
from statecli.rules.dictionary import RULES
from statecli.targets.target_result import TargetStatus

from ..zoo import SMALL, make

QUIET = tuple(rule.name for module in (layout, names, placement, storage) for rule in module.RULES)
SAMPLES = Path(__file__).parents[2] / "sample_models"


def audit_folder(folder: Path) -> list[str]:
    """Audit every target in a folder; return the messages of findings worse than a note."""
    targets = audit(Request((str(folder),), select=QUIET, values=True)).targets
    audited_targets = [target for target in targets if target.status is not TargetStatus.SKIPPED]
    assert audited_targets
    assert all(target.status is TargetStatus.AUDITED for target in audited_targets), targets
    return [
        f"{finding.target}: {finding.message}"
        for t in audited_targets
        for finding in t.findings
        if finding.severity is not Severity.NOTE
    ]


def build_optimizer(module):
    """Adam with moments, its step counters 0-dim tensors of float32."""
    optimizer = torch.optim.AdamW(module.named_parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_real_model_in_every_format_is_clean(tmp_path, name):
    """state_dict, old stream, training and Lightning checkpoints, safetensors, model folder, sharded folder."""
    module = make(name)
    state, optimizer = module.state_dict(), build_optimizer(module).state_dict()
    torch.save(state, tmp_path / "state.pt")
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save({"model": state, "optimizer": optimizer, "rng": torch.get_rng_state()}, tmp_path / "train.pt")
    lightning = {"epoch": 1, "state_dict": {f"net.{n}": t for n, t in state.items()}, "optimizer_states": [optimizer]}
    torch.save({**lightning, "loops": {}, "lr_schedulers": [{"last_epoch": 1}]}, tmp_path / "last.ckpt")
    save_model(module, str(tmp_path / "alone.safetensors"))
    module.save_pretrained(tmp_path / "folder")
    module.save_pretrained(tmp_path / "sharded", max_shard_size="5KB")
    assert not audit_folder(tmp_path)


def test_the_sample_models_in_every_format_are_clean(tmp_path, monkeypatch):
    """Some sample models have problems, but only in their registration."""
    monkeypatch.syspath_prepend(str(SAMPLES))
    script = importlib.import_module("make_checkpoints")
    for name in script.MODELS:
        script.write(name, tmp_path / name)
        sys.modules.pop(name)
    sys.modules.pop("make_checkpoints")
    assert not audit_folder(tmp_path)


def test_a_real_folder_is_clean(minilm):
    """Weights of the Hugging Face hub, as they were uploaded."""
    assert not audit_folder(minilm)


def test_no_rule_reports_a_plain_layer(tmp_path):
    """All rules together report nothing for the smallest checkpoint, not even a note."""
    torch.save(torch.nn.Linear(3, 3).state_dict(), tmp_path / "a.pt")
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=tuple(rule.name for rule in RULES))).targets
    assert target.status is TargetStatus.AUDITED
    assert target.findings == ()
