"""Devices named in a checkpoint. The tests write the checkpoints without these devices."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit.run import Request, audit
from statecli.core.selection import Selection
from statecli.rules.policy_config import Policy


@pytest.fixture
def save_on_devices(tmp_path, monkeypatch):
    """Save the state. `devices` maps the size of a tensor in bytes to the device recorded for the tensor."""

    def save(state, devices):
        with monkeypatch.context() as patch:
            patch.setattr(torch.serialization, "location_tag", lambda storage: devices.get(storage.nbytes(), "cpu"))
            torch.save(state, tmp_path / "a.pt")
        return tmp_path / "a.pt"

    return save


STATE = {"a": torch.zeros(1), "b": torch.zeros(2), "c": torch.zeros(3)}
A, B, C = 4, 8, 12


def test_torch_fails_to_load_tensors_on_a_missing_device(save_on_devices):
    """The files of the other tests name a missing device, because no machine of these tests has a fourth GPU."""
    path = save_on_devices(STATE, {A: "cuda:3"})
    with pytest.raises(RuntimeError, match="cuda"):
        torch.load(path)
    assert torch.load(path, map_location="cpu")["a"].numel() == 1


def test_accelerator_device_finds_a_gpu_that_few_machines_have(run_rule, save_on_devices):
    """Each device has a single finding, with the count and the first names."""
    (finding,) = run_rule("accelerator-device", save_on_devices(STATE, {A: "cuda:3", B: "cuda:3"}))
    assert finding.message.startswith("2 tensors on cuda:3 (a, b): torch.load fails on a machine without this device")
    assert finding.severity.value == "warning"
    assert "map_location" in finding.help


def test_accelerator_device_finds_the_first_gpu_as_a_note(run_rule, save_on_devices):
    """Every checkpoint trained on a single GPU names the first GPU."""
    findings = run_rule("accelerator-device", save_on_devices(STATE, {A: "cuda:0", B: "mps", C: "cuda:0"}))
    assert [(finding.message[:19], finding.severity.value) for finding in findings] == [
        ("2 tensors on cuda:0", "note"),
        ("1 tensor on mps (b)", "note"),
    ]


def test_accelerator_device_finds_devices_outside_the_policy(run_rule, save_on_devices):
    """A device outside the policy is an error, even the CPU. `cuda` allows every GPU, `cuda:0` only the first GPU."""
    path = save_on_devices(STATE, {A: "cuda:0", B: "cuda:1"})
    (finding,) = run_rule("accelerator-device", path, policy=Policy(device=("cuda",)))
    assert (finding.message, finding.severity.value) == ("1 tensor on cpu (c): policy.device allows only cuda", "error")
    (finding,) = run_rule("accelerator-device", path, policy=Policy(device=("cuda:0", "cpu")))
    assert finding.message == "1 tensor on cuda:1 (b): policy.device allows only cuda:0 or cpu"


def test_accelerator_device_finds_the_first_gpu_once_under_both_its_names(run_rule, save_on_devices):
    """torch loads `cuda` on the current device, the first GPU."""
    (finding,) = run_rule("accelerator-device", save_on_devices(STATE, {A: "cuda:0", B: "cuda", C: "cuda:0"}))
    assert finding.message.startswith("3 tensors on cuda:0 (a, b, c): ")
    assert finding.severity.value == "note"
    (finding,) = run_rule("accelerator-device", save_on_devices(STATE, {A: "cuda", B: "cuda"}))
    assert finding.message.startswith("2 tensors on cuda:0 (a, b): ")
    findings = run_rule("accelerator-device", save_on_devices(STATE, {A: "cuda", B: "cuda:3"}))
    assert [finding.message.partition(" (")[0] for finding in findings] == ["1 tensor on cuda:0", "1 tensor on cuda:3"]


def test_accelerator_device_spares_the_first_gpu_named_by_the_policy(run_rule, save_on_devices):
    """`cuda:0` in a policy allows `cuda`, but `cuda:1` does not."""
    assert not run_rule(
        "accelerator-device", save_on_devices(STATE, {A: "cuda"}), policy=Policy(device=("cuda:0", "cpu"))
    )
    assert run_rule("accelerator-device", save_on_devices(STATE, {A: "cuda"}), policy=Policy(device=("cuda:1", "cpu")))


def test_accelerator_device_spares_the_cpu_and_meta(run_rule, save_on_devices):
    """Every machine has both devices."""
    state = {**STATE, "m": torch.zeros(5, device="meta")}
    assert not run_rule("accelerator-device", save_on_devices(state, {}))
    assert not run_rule(
        "accelerator-device", save_on_devices(STATE, {A: "cuda:7"}), selection=Selection(include=("b", "c"))
    )


def test_mixed_devices_finds_a_tensor_left_on_cpu(run_rule, save_on_devices):
    """The finding names the tensor of the rarer device."""
    (finding,) = run_rule("mixed-devices", save_on_devices(STATE, {A: "cuda:0", C: "cuda:0"}))
    assert finding.message == "model: tensors are on 2 devices: 2 on cuda:0, 1 on cpu (b)"
    assert finding.fqn == "b"


def test_mixed_devices_spares_meta_and_another_name_of_the_first_gpu(run_rule, save_on_devices):
    """Tensors on meta have no values to compute with, and `cuda` means `cuda:0` to a single process."""
    assert not run_rule("mixed-devices", save_on_devices({**STATE, "m": torch.zeros(5, device="meta")}, {}))
    assert not run_rule("mixed-devices", save_on_devices(STATE, {A: "cuda", B: "cuda:0", C: "cuda:0"}))


def test_mixed_devices_finds_two_gpus(run_rule, save_on_devices):
    """The first GPU has the name `cuda` or `cuda:0`."""
    (finding,) = run_rule("mixed-devices", save_on_devices(STATE, {A: "cuda", B: "cuda:1", C: "cuda:0"}))
    assert finding.message == "model: tensors are on 2 devices: 2 on cuda:0, 1 on cuda:1 (b)"


def test_mixed_devices_spares_an_optimizer_and_other_sections(run_rule, save_on_devices):
    """Step counters are on the CPU, and each section may be on another device."""
    optimizer = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}}, "param_groups": []}
    optimizer["param_groups"].append({"lr": 0.1, "params": [0]})
    state = {"model": {"a.weight": torch.zeros(3)}, "optimizer": optimizer, "ema": {"a.weight": torch.zeros(5)}}
    assert not run_rule("mixed-devices", save_on_devices(state, {C: "cuda:0"}))


@pytest.mark.parametrize("rule", ["accelerator-device", "mixed-devices"])
def test_format_without_devices_is_not_checked(tmp_path, rule):
    """The format does not record devices, and the rule is skipped for this reason."""
    save_file(STATE, tmp_path / "a.safetensors")
    (target,) = audit(Request((str(tmp_path / "a.safetensors"),), select=(rule,))).targets
    assert (target.ran, target.skipped[0].reason) == ((), "the file format does not record devices")
