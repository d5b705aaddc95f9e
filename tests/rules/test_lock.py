"""Changed and unchanged checkpoints, checked against their lock."""

from __future__ import annotations

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import nn

from statecli.commands.audit.run import Request, audit
from statecli.commands.lock import lock_file, run
from statecli.commands.lock.companion_files import FileChange
from statecli.core.selection import Selection
from statecli.rules import lock as lock_rules
from statecli.rules.policy_config import Policy
from statecli.targets.target_result import TargetStatus


def build_lock(*targets, **options):
    request = run.Request(tuple(map(str, targets)), **options)
    return run.build_lock(run.read_targets(request), request)


@pytest.fixture
def state():
    torch.manual_seed(0)
    return {"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4), "b.weight": torch.randn(2, 4).half()}


@pytest.fixture
def audit_changed(run_rule, tmp_path, state):
    """`audit_changed({"a.bias": other}, …)`: findings for the locked state with changed entries (None: removed)."""
    torch.save(state, tmp_path / "a.pt")
    lock = build_lock(tmp_path / "a.pt")

    def audit_entries(changed, **options):
        new = {name: tensor for name, tensor in {**state, **changed}.items() if tensor is not None}
        torch.save(new, tmp_path / "b.pt")
        return run_rule("lock-mismatch", tmp_path / "b.pt", lock=lock, **options)

    return audit_entries


def test_lock_mismatch_names_only_the_changed_weight(audit_changed, state):
    """A single bit of a single element differs."""
    nudged = state["a.weight"].clone()
    nudged.view(torch.int32)[3, 2] ^= 1
    (finding,) = audit_changed({"a.weight": nudged})
    assert (finding.fqn, finding.section) == ("a.weight", "model")
    assert "values differ from the lock" in finding.message


@pytest.mark.parametrize(
    ("change", "description"),
    [
        (lambda tensor: tensor.double(), "dtype is float64, but the lock has float32"),
        (lambda tensor: tensor.t().contiguous(), "shape is [3, 4], but the lock has [4, 3]"),
        (
            lambda tensor: tensor.reshape(2, 6).half(),
            "dtype is float16, but the lock has float32; shape is [2, 6], but the lock has [4, 3]",
        ),
        (lambda tensor: None, "missing from the checkpoint; the lock has float32 [4, 3]"),
    ],
)
def test_lock_mismatch_describes_the_change_of_a_tensor(audit_changed, state, change, description):
    """A single finding gives both figures."""
    (finding,) = audit_changed({"a.weight": change(state["a.weight"])})
    assert finding.message == f"a.weight: {description}"


def test_content_of_a_mismatch_depends_on_its_values(audit_changed, state):
    """An accepted change stays accepted, but not another change of the tensor. Without a digest, `content` is empty."""
    (first,), (repeated,), (other,) = (audit_changed({"a.bias": state["a.bias"] + number}) for number in (1, 1, 2))
    assert first.content == repeated.content != other.content
    assert len(first.content) == len(other.content) == 64
    for change in ({"new": torch.ones(1)}, {"a.bias": state["a.bias"].double()}):
        (finding,) = audit_changed(change)
        assert finding.content == ""


def test_content_does_not_depend_on_the_names_of_fields():
    """A baseline keeps the digest, so another name of an internal field must not change the digest."""
    renamed = msgspec.defstruct("Renamed", ["path", "before", "after"])
    assert lock_rules._digest_values(FileChange("a", "1", "2")) == lock_rules._digest_values(renamed("a", "1", "2"))


def test_lock_mismatch_finds_an_unlocked_tensor(audit_changed):
    """A tensor added after the lock may do harm."""
    (finding,) = audit_changed({"adapter.weight": torch.ones(1)})
    assert finding.message == "adapter.weight: not in the lock"


def test_lock_mismatch_spares_the_same_weights_in_another_container(run_rule, tmp_path, state):
    """A kind or requires_grad recorded on only a single side is not a mismatch."""
    pickled = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in state.items()}
    torch.save(pickled, tmp_path / "a.pt")
    save_file(state, tmp_path / "a.safetensors")
    for first, second in (("a.pt", "a.safetensors"), ("a.safetensors", "a.pt")):
        assert not run_rule("lock-mismatch", tmp_path / second, lock=build_lock(tmp_path / first))


def test_lock_mismatch_finds_other_kind_and_requires_grad(run_rule, tmp_path):
    """Two classes register the same names with different kinds and requires_grad."""
    path = tmp_path / "nets.py"
    path.write_text(
        "from torch import nn, ones\n"
        "class One(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(ones(2))\n        self.v = nn.Parameter(ones(2))\n"
        "class Two(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('w', ones(2))\n        self.v = nn.Parameter(ones(2), requires_grad=False)\n"
    )
    findings = run_rule("lock-mismatch", f"{path}:Two", lock=build_lock(f"{path}:One"))
    assert {finding.message for finding in findings} == {
        "w: kind is buffer, but the lock has parameter; requires_grad is False, but the lock has True",
        "v: requires_grad is False, but the lock has True",
    }
    assert not run_rule("lock-mismatch", f"{path}:One", lock=build_lock(f"{path}:One"))


def test_lock_mismatch_spares_a_section_by_another_name(run_rule, tmp_path, state):
    """A training checkpoint contains the locked state_dict: sections are paired as in diff."""
    torch.save(state, tmp_path / "a.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "b.pt")
    assert not run_rule("lock-mismatch", tmp_path / "b.pt", lock=build_lock(tmp_path / "a.pt"))


def build_tied_state(extra=0.0):
    shared = torch.arange(6.0).reshape(3, 2)
    return {"embed.weight": shared, "head.weight": shared, "n": torch.full((1,), extra)}


def test_lock_mismatch_spares_a_tied_name_that_safetensors_dropped(run_rule, tmp_path):
    """transformers keeps a single tied name and records no tie, but the lock records the tie."""
    torch.save(build_tied_state(), tmp_path / "a.pt")
    save_file(
        {name: tensor for name, tensor in build_tied_state().items() if name != "head.weight"},
        tmp_path / "a.safetensors",
    )
    assert not run_rule("lock-mismatch", tmp_path / "a.safetensors", lock=build_lock(tmp_path / "a.pt"))
    assert not run_rule("lock-mismatch", tmp_path / "a.pt", lock=build_lock(tmp_path / "a.safetensors"))


def test_lock_mismatch_finds_a_missing_name_without_a_tie(run_rule, tmp_path):
    """Two biases of zeros are not tied, so the missing bias is reported."""
    state = {"a.bias": torch.zeros(3), "b.bias": torch.zeros(3)}
    torch.save(state, tmp_path / "a.pt")
    save_file({"a.bias": torch.zeros(3)}, tmp_path / "a.safetensors")
    (finding,) = run_rule("lock-mismatch", tmp_path / "a.safetensors", lock=build_lock(tmp_path / "a.pt"))
    assert finding.fqn == "b.bias"


def test_lock_mismatch_reports_a_changed_tie_once(run_rule, tmp_path):
    """The tied names share a tensor, so the change is reported once."""
    torch.save(build_tied_state(), tmp_path / "a.pt")
    save_file({"embed.weight": torch.ones(3, 2), "n": torch.zeros(1)}, tmp_path / "a.safetensors")
    (finding,) = run_rule("lock-mismatch", tmp_path / "a.safetensors", lock=build_lock(tmp_path / "a.pt"))
    assert finding.fqn == "embed.weight"


def test_lock_mismatch_spares_tensors_outside_a_state_dict(run_rule, tmp_path):
    """A lock of a class lists plain attributes, unknown to a checkpoint. Random values of a class are not compared."""
    path = tmp_path / "net.py"
    path.write_text(
        "from torch import nn, ones\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(ones(2))\n        self.mask = ones(2)\n"
        "        self.register_buffer('cache', ones(2), persistent=False)\n"
    )
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    lock = build_lock(f"{path}:Net")
    assert {line.fqn for line in lock.targets[0].tensors} == {"w", "mask", "cache"}
    assert not run_rule("lock-mismatch", tmp_path / "a.safetensors", lock=lock)
    assert not run_rule("lock-mismatch", f"{path}:Net", lock=build_lock(tmp_path / "a.safetensors"))


def test_lock_mismatch_spares_filtered_tensors(audit_changed, state):
    """The filters also apply to missing and new tensors. A missing name of unknown kind is reported."""
    changed = {"a.weight": state["a.weight"] + 1, "a.bias": None, "new": torch.ones(1)}
    assert not audit_changed(changed, selection=Selection(include=("b.*",)))
    assert [tensor.fqn for tensor in audit_changed(changed, selection=Selection(exclude=("a.weight",)))] == [
        "a.bias",
        "new",
    ]


def test_lock_mismatch_with_frozen_only_finds_only_frozen_tensors(run_rule, tmp_path):
    """`--frozen-only` checks tensors frozen in the lock or by the policy. Trained and new tensors may differ."""
    parameters = {"frozen": nn.Parameter(torch.ones(2), requires_grad=False), "head": nn.Parameter(torch.ones(2))}
    torch.save(parameters, tmp_path / "a.pt")
    lock = build_lock(tmp_path / "a.pt")
    torch.save({"frozen": torch.ones(2), "head": torch.zeros(2), "adapter": torch.ones(1)}, tmp_path / "b.pt")
    assert not run_rule("lock-mismatch", tmp_path / "b.pt", lock=lock, frozen_only=True)
    torch.save({"frozen": torch.zeros(2), "head": torch.zeros(2)}, tmp_path / "b.pt")
    (finding,) = run_rule("lock-mismatch", tmp_path / "b.pt", lock=lock, frozen_only=True)
    assert finding.fqn == "frozen"
    findings = run_rule("lock-mismatch", tmp_path / "b.pt", lock=lock, frozen_only=True, policy=Policy(frozen=("he*",)))
    assert [finding.fqn for finding in findings] == ["frozen", "head"]


def test_frozen_only_with_nothing_frozen_does_not_pass(tmp_path, state):
    """A state_dict does not record requires_grad, so the audit would check nothing."""
    torch.save(state, tmp_path / "a.pt")
    (target,) = audit(Request((str(tmp_path / "a.pt"),), lock=build_lock(tmp_path / "a.pt"), frozen_only=True)).targets
    assert target.status is TargetStatus.FAILED
    assert "frozen" in (target.reason or "")


def test_a_target_that_is_not_in_the_lock_does_not_pass(in_tmp_path, state):
    """The lock lists two targets. For a third target the reason names the most similar target of the lock."""
    for name in ("one.pt", "two.pt", "tow.pt"):
        torch.save(state, name)
    lock = build_lock("one.pt", "two.pt")
    result = audit(Request(("one.pt", "./two.pt", "tow.pt"), lock=lock, select=("lock-mismatch",)))
    assert [target.status for target in result.targets] == [
        TargetStatus.AUDITED,
        TargetStatus.AUDITED,
        TargetStatus.FAILED,
    ]
    assert "two.pt" in (result.targets[2].reason or "")
    assert not result.findings


def test_values_are_read_only_if_dtypes_agree(monkeypatch, audit_changed, state):
    """A tensor of another dtype is reported without its values. Without a lock, no values are read."""
    from statecli.values import digest

    digested = []
    compute_digests = digest.compute_digests
    monkeypatch.setattr(
        digest,
        "compute_digests",
        lambda tensors, *a, **k: digested.extend(tensors) or compute_digests(tensors, *a, **k),
    )
    audit_changed({"a.weight": state["a.weight"].double(), "new": torch.ones(1)})
    assert sorted(tensor.fqn for tensor in digested) == ["a.bias", "b.weight"]
    digested.clear()
    audit(Request(("sample_models/net.py:Net",)))
    assert not digested


def test_locked_repository_fails_for_a_changed_weight(tmp_path, in_tmp_path, statecli, state):
    """The steps of a pull request: lock, audit, nudge, audit, lock again. The lock differs in a single line."""
    save_file(state, "model.safetensors")
    assert statecli("lock", "model.safetensors", "-o", "statecli.lock.json").code == 0
    before = (tmp_path / "statecli.lock.json").read_text().splitlines()
    line = ("audit", "model.safetensors", "--lock", "statecli.lock.json")
    assert statecli(*line).code == 0
    state["a.bias"][1] += 1e-3
    save_file(state, "model.safetensors")
    result = statecli(*line, "-f", "json")
    assert result.code == 1
    assert [
        (finding["rule"], finding["fqn"]) for finding in result.json["findings"] if finding["severity"] == "error"
    ] == [("lock-mismatch", "a.bias")]
    assert statecli("lock", "model.safetensors", "-o", "statecli.lock.json").code == 0
    after = (tmp_path / "statecli.lock.json").read_text().splitlines()
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    assert statecli(*line).code == 0


def test_frozen_only_needs_a_lock(statecli):
    """The option selects a part of a lock."""
    result = statecli("audit", "x.pt", "--frozen-only")
    assert (result.code, result.out) == (2, "")
    assert "--lock" in result.err


def test_lock_is_equal_after_reading_its_file(tmp_path, run_rule, state):
    """A lock written to a file and read again is equal and still matches."""
    torch.save(state, tmp_path / "a.pt")
    (tmp_path / "lock.json").write_bytes(b"".join(lock_file.encode_lock(build_lock(tmp_path / "a.pt"))))
    assert lock_file.read_lock(str(tmp_path / "lock.json")) == build_lock(tmp_path / "a.pt")
    assert not run_rule("lock-mismatch", tmp_path / "a.pt", lock=lock_file.read_lock(str(tmp_path / "lock.json")))


def test_values_not_locked_finds_a_lock_without_digests(run_rule, tmp_path, state):
    """A lock without digests accepts all values. A single finding gives the count of tensors without a digest."""
    torch.save(state, tmp_path / "a.pt")
    lock = build_lock(tmp_path / "a.pt")
    (target,) = lock.targets
    emptied = replace(
        lock, targets=(replace(target, tensors=tuple(replace(line, digest=None) for line in target.tensors)),)
    )
    torch.save({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "a.pt")
    assert not run_rule("lock-mismatch", tmp_path / "a.pt", lock=emptied)
    (finding,) = run_rule("values-not-locked", tmp_path / "a.pt", lock=emptied)
    assert finding.message == "the values of 3 of 3 tensors are not locked: a.bias, a.weight and 1 more"


def test_values_not_locked_spares_tensors_without_values(run_rule, tmp_path, state):
    """A class with its own lock, tensors on the meta device, and a lock with all digests."""
    torch.save(state, tmp_path / "a.pt")
    torch.save({name: tensor.to("meta") for name, tensor in state.items()}, tmp_path / "meta.pt")
    for target in (tmp_path / "a.pt", tmp_path / "meta.pt", "sample_models/net.py:Net"):
        assert not run_rule("values-not-locked", target, lock=build_lock(target))


def test_settings_mismatch_finds_a_changed_setting(run_rule, tmp_path):
    """The message has the key and both values."""
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2)}, "config": {"rms_norm_eps": 1e-06}}, path)
    lock = build_lock(path)
    torch.save({"model": {"w": torch.ones(2)}, "config": {"rms_norm_eps": 0.1}}, path)
    (finding,) = run_rule("settings-mismatch", path, lock=lock)
    assert finding.message == "setting differs from the lock: config.rms_norm_eps: 1e-06 → 0.1"


def test_settings_mismatch_spares_settings_of_the_training(run_rule, tmp_path):
    """The learning rate does not change the computation of the model."""
    path = tmp_path / "a.pt"
    checkpoint = {"model": {"w": torch.ones(2)}, "config": {"rms_norm_eps": 1e-06}}
    torch.save({**checkpoint, "scheduler": {"base_lr": 0.1}}, path)
    lock = build_lock(path)
    torch.save({**checkpoint, "scheduler": {"base_lr": 0.2}}, path)
    assert not run_rule("settings-mismatch", path, lock=lock)
