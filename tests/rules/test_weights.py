"""Values that contradict the signs of training in a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from statecli.core.finding import Severity

LAYERS = range(3)


def build_factors(*trained):
    """The two factors of each layer. Factor B is zero except in the given layers."""
    names = [f"base_model.model.layers.{n}.q_proj" for n in LAYERS]
    tensors = {f"{name}.lora_A.weight": torch.randn(4, 16) for name in names}
    return tensors | {f"{name}.lora_B.weight": torch.ones(16, 4) * (n in trained) for n, name in enumerate(names)}


@pytest.fixture
def write_adapter(tmp_path):
    """Write an adapter's folder as peft and a Trainer do; return the folder."""

    def write(tensors, step=None):
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
        if step is not None:
            (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
        return tmp_path

    return write


# --- untrained-adapter -----------------------------------------------------------------------------------------------


def test_untrained_adapter_finds_zeros_after_training_steps(run_rule, write_adapter):
    """The message names the sign of training."""
    (finding,) = run_rule("untrained-adapter", write_adapter(build_factors(), step=500), values=True)
    assert finding.severity is Severity.WARNING
    assert (
        "all 3 factors that start at zero are still zero after training (trainer_state.global_step 500)"
        in finding.message
    )


def test_an_optimizers_state_is_a_sign_of_training(run_rule, tmp_path):
    """The state of an optimizer is saved after a step at the earliest."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": build_factors(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    (finding,) = run_rule("untrained-adapter", tmp_path / "a.pt", values=True)
    assert finding.severity is Severity.WARNING


def test_an_adapter_without_a_sign_of_training_is_a_note(run_rule, write_adapter):
    """The adapter may have been saved before training."""
    (finding,) = run_rule("untrained-adapter", write_adapter(build_factors()), values=True)
    assert finding.severity is Severity.NOTE


def test_some_zero_factors_after_training_are_a_note(run_rule, write_adapter):
    """Not every layer needs to get a gradient."""
    (finding,) = run_rule("untrained-adapter", write_adapter(build_factors(0, 1), step=5), values=True)
    assert (finding.severity, finding.message.partition(" factors")[0]) == (Severity.NOTE, "1 of 3")


def test_untrained_adapter_spares_a_trained_adapter(run_rule, write_adapter, tmp_path):
    """Without a sign of training, an adapter with untrained layers passes as well."""
    assert not run_rule("untrained-adapter", write_adapter(build_factors(*LAYERS), step=500), values=True)
    (tmp_path / "trainer_state.json").unlink()
    assert not run_rule("untrained-adapter", write_adapter(build_factors(0)), values=True)


def test_untrained_adapter_spares_b_of_adalora(run_rule, write_adapter):
    """AdaLoRA starts with zeros in E alone; zeros in B by itself say nothing."""
    state = {f"q.lora_{name}.weight": torch.ones(4, 4) for name in "AE"} | {"q.lora_B.weight": torch.zeros(4, 4)}
    assert not run_rule("untrained-adapter", write_adapter(state, step=5), values=True)


# --- outlier ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "place"), [(64, 0), (5_000, 1_666), (1_000_003, 1_000_002)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outlier_finds_a_single_value(run_rule, save_checkpoint, size, place, dtype):
    """The tensor may have any size, and the value any place: first, last or between."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[place] = -50_000.0
    (finding,) = run_rule("outlier", save_checkpoint({"fc.weight": values}), values=True)
    assert finding.message.startswith(
        "fc.weight: value -49920 is" if dtype is torch.bfloat16 else "fc.weight: value -50000 is"
    )
    assert finding.severity is Severity.WARNING


def test_a_flipped_bit_of_an_exponent_is_found(run_rule, save_checkpoint):
    """The flipped bit turns 0.02 into 6.8e36."""
    values = torch.randn(4096) * 0.02
    values.view(torch.int32)[7] ^= 1 << 30
    assert len(run_rule("outlier", save_checkpoint({"fc.weight": values}), values=True)) == 1


def test_outlier_spares_heavy_tails_and_buffers(run_rule, save_checkpoint):
    """Gains of single channels, a mask, an optimizer's moments, sparse weights, a tensor of few elements."""
    gains = torch.ones(256)
    gains[3] = 60.0
    mask = torch.zeros(64, 64)
    mask[0, 1] = -3e38
    sparse = torch.zeros(100, 100)
    sparse[0, 0] = 5.0
    state = {"norm.weight": gains, "attn.mask": mask, "sparse.weight": sparse, "few": torch.tensor([1.0, 1e9])}
    state["tail.weight"] = torch.distributions.StudentT(3.0).sample((512, 512))
    assert not run_rule("outlier", save_checkpoint(state), values=True)
