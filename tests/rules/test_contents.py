"""Checkpoints without tensors, and weights without elements."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity


def write_adapter(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    return folder


# --- empty-checkpoint ------------------------------------------------------------------------------------------------


def test_empty_checkpoint_finds_an_adapter_without_tensors(run_rule, tmp_path):
    """An adapter folder without tensors is an error although its configuration declares an adapter."""
    (finding,) = run_rule("empty-checkpoint", write_adapter(tmp_path / "adapter", {}))
    assert (finding.message, finding.severity) == ("checkpoint contains no tensors", Severity.ERROR)


@pytest.mark.parametrize(
    "state", [{}, {"state_dict": {}, "epoch": 3}, {"model": {}, "optimizer": {"a": torch.ones(1)}}]
)
def test_an_empty_state_dict_is_an_error(run_rule, save_checkpoint, state):
    """The state_dict is alone, among settings, or next to tensors of another kind."""
    (finding,) = run_rule("empty-checkpoint", save_checkpoint(state))
    assert finding.severity is Severity.ERROR


def test_settings_without_tensors_are_a_note(run_rule, save_checkpoint):
    """A pickle may hold settings alone."""
    (finding,) = run_rule("empty-checkpoint", save_checkpoint({"lr": 0.1, "betas": (0.9, 0.99)}, "settings.pt"))
    assert finding.severity is Severity.NOTE
    assert finding.help == "no action is needed if the file should have no weights"


@pytest.mark.filterwarnings("ignore")
def test_a_program_without_weights_is_a_note(run_rule, tmp_path):
    """A scripted function without weights is complete."""
    torch.jit.script(torch.nn.ReLU()).save(tmp_path / "relu.pt")
    (finding,) = run_rule("empty-checkpoint", tmp_path / "relu.pt")
    assert finding.severity is Severity.NOTE


def test_empty_checkpoint_spares_a_schedulers_state(run_rule, save_checkpoint):
    """A Trainer writes the state next to the weights. The state has numbers but no tensors."""
    assert not run_rule("empty-checkpoint", save_checkpoint({"last_epoch": 1}, "scheduler.pt"))


def test_empty_checkpoint_spares_an_optimizer_without_state(run_rule, save_checkpoint):
    """SGD without momentum saves only settings. An empty model next to the same optimizer state is reported."""
    state = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1).state_dict()
    assert not run_rule("empty-checkpoint", save_checkpoint(state))
    assert run_rule("empty-checkpoint", save_checkpoint({"model": {}, "optimizer": state}))


def test_empty_checkpoint_spares_weights_next_to_an_empty_model_key(run_rule, save_checkpoint):
    """`model` is empty, and the weights are under `state_dict`."""
    assert not run_rule(
        "empty-checkpoint", save_checkpoint({"model": {}, "state_dict": torch.nn.Linear(2, 2).state_dict()})
    )


# --- empty-tensor ----------------------------------------------------------------------------------------------------


def test_empty_tensor_finds_an_adapter_of_one_rank_of_zero_3(run_rule, tmp_path):
    """The tensors have names of factors but no elements."""
    names = [f"base_model.model.layers.{n}.q_proj.lora_{f}.weight" for n in range(2) for f in "AB"]
    path = write_adapter(tmp_path / "adapter", {name: torch.zeros(0) for name in names})
    (finding,) = run_rule("empty-tensor", path)
    assert finding.message.startswith("model: 4 of 4 tensors are empty (0 elements): base_model.model.layers.0")
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize("name", ["w", "table", "0.bias"])
def test_checkpoint_without_any_element_is_found_under_any_name(run_rule, save_checkpoint, name):
    """The names are not usual names of weights, and the audit has no value to check."""
    (finding,) = run_rule("empty-tensor", save_checkpoint({name: torch.zeros(0, 4)}))
    assert finding.message == f"model: 1 of 1 tensors are empty (0 elements): {name}"


def test_one_empty_weight_among_others_is_found(run_rule, save_checkpoint):
    """FSDP leaves an empty weight if the process has no part of the weight."""
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).state_dict()
    (finding,) = run_rule("empty-tensor", save_checkpoint(state | {"1.weight": torch.zeros(0)}))
    assert finding.message == "model: 1 of 4 parameters are empty (0 elements): 1.weight"


@pytest.mark.parametrize(
    "name",
    [
        *("experts.gate_up_proj", "in_proj_weight", "pos_embed", "cls_token", "A_log", "norm.gamma", "logit_scale"),
        *("w", "weights.0", "in_proj_bias", "prompt_encoder.prefix", "tp.weight.0", "tp.x"),
    ],
)
def test_empty_parameter_is_found_under_any_name(run_rule, save_checkpoint, name):
    """A tensor is a parameter even if its name is on no list of weight names."""
    layers = {f"layers.{n}.weight": torch.ones(2) for n in range(3)}
    (finding,) = run_rule(
        "empty-tensor", save_checkpoint(layers | {"tp.output_mask": torch.ones(4), name: torch.zeros(0)})
    )
    assert finding.message == f"model: 1 of 5 parameters are empty (0 elements): {name}"


def test_a_checkpoint_of_experts_without_elements_is_found(run_rule, tmp_path):
    """All parameters except the norm are empty, under names known only to the architecture."""
    names = [f"layers.{n}.experts.{name}" for n in range(20) for name in ("gate_up_proj", "down_proj")]
    save_file({name: torch.zeros(0) for name in names} | {"norm.weight": torch.ones(4)}, tmp_path / "a.safetensors")
    (finding,) = run_rule("empty-tensor", tmp_path / "a.safetensors")
    assert finding.message.startswith("model: 40 of 41 parameters are empty (0 elements): layers.0.experts.")


def test_placeholders_are_reported_if_they_fill_most_of_a_section(run_rule, save_checkpoint):
    """A single bias without elements may mean a layer without bias; two of three empty parameters mean lost weights."""
    state = {"weight": torch.ones(2), "0.bias": torch.zeros(0), "1.bias": torch.zeros(0)}
    (finding,) = run_rule("empty-tensor", save_checkpoint(state))
    assert finding.message == "model: 2 of 3 parameters are empty (0 elements): 0.bias, 1.bias"


def test_empty_buffers_are_reported_if_no_tensor_has_an_element(run_rule, save_checkpoint):
    """With only empty tensors, the audit checks nothing. A scalar next to the empty tensors is a checked value."""
    state = {"running_mean": torch.zeros(0), "num_batches_tracked": torch.zeros(0, dtype=torch.int64)}
    (finding,) = run_rule("empty-tensor", save_checkpoint(state))
    assert finding.message == "model: 2 of 2 tensors are empty (0 elements): running_mean, num_batches_tracked"
    assert not run_rule("empty-tensor", save_checkpoint(state | {"num_batches_tracked": torch.tensor(1)}))


def test_parameter_placeholders_of_zero_3_are_a_note(run_rule, save_checkpoint):
    """DeepSpeed writes this file next to the partitions: parameters of shape [0], and complete buffers."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    for parameter in net.parameters():
        parameter.data = torch.empty(0)
    path = save_checkpoint(
        {"module": net.state_dict(), "param_shapes": [{"0.weight": torch.Size([3, 3])}], "ds_version": "1"}
    )
    (finding,) = run_rule("empty-tensor", path)
    assert finding.message == "module: 4 of 4 parameters are empty (0 elements): 0.weight, 0.bias and 2 more"
    assert (finding.severity, finding.section) == (Severity.NOTE, "module")


def test_empty_tensor_spares_placeholders_of_real_models(run_rule, save_checkpoint):
    """An observer without data, a lazy layer, layers of e3nn without weights and bias, placeholders for a device."""
    observer = torch.ao.quantization.PerChannelMinMaxObserver().state_dict()
    assert observer["min_val"].numel() == 0
    e3nn = {"tp.weight": torch.zeros(0), "tp.output_mask": torch.ones(4), "lin.bias": torch.zeros(0)}
    linear = torch.nn.Linear(3, 3).state_dict()
    assert not run_rule("empty-tensor", save_checkpoint(linear | e3nn))
    assert not run_rule(
        "empty-tensor", save_checkpoint(linear | {f"0.{key}": value for key, value in observer.items()})
    )
    devices = {"dummy_param": torch.zeros(0), "_device_indicator": torch.zeros(0)}
    assert not run_rule("empty-tensor", save_checkpoint(linear | devices))
    assert not run_rule("empty-tensor", save_checkpoint(torch.nn.LazyLinear(3).state_dict()))


def test_empty_adapter_exits_with_status_1(statecli, tmp_path, in_tmp_path):
    """An empty adapter fails with --fail-on error too; an adapter with a tensor does not fail."""
    write_adapter(tmp_path / "adapter", {})
    write_adapter(tmp_path / "full", {"base.lora_A.weight": torch.eye(3)})
    for options in ((), ("--fail-on", "error")):
        assert statecli("audit", "adapter", *options).code == 1
        assert statecli("audit", "full", *options).code == 0


def test_a_class_without_tensors_is_not_a_checkpoint():
    """A layer without state is complete."""
    (target,) = audit(Request(("torch.nn:ReLU",), select=("empty-checkpoint", "mixed-dtypes"))).targets
    assert not target.findings
