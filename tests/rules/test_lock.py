"""A checkpoint that is not as it was locked, and one that is."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import nn

from statecli.commands.audit.run import Request, audit
from statecli.commands.lock import lock_file, run
from statecli.core.selection import Selection
from statecli.rules.policy_config import Policy
from statecli.targets.target_result import Status


def build_lock(*targets, **options):
    request = run.Request(tuple(map(str, targets)), **options)
    return run.build_lock(run.read_targets(request), request)


@pytest.fixture
def state():
    torch.manual_seed(0)
    return {"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4), "b.weight": torch.randn(2, 4).half()}


@pytest.fixture
def audit_changed(run_rule, tmp_path, state):
    """`audit_changed({"a.bias": other}, …)`: findings of the locked state with these entries; None removes."""
    torch.save(state, tmp_path / "a.pt")
    lock = build_lock(tmp_path / "a.pt")

    def audit_entries(changed, **options):
        new = {name: tensor for name, tensor in {**state, **changed}.items() if tensor is not None}
        torch.save(new, tmp_path / "b.pt")
        return run_rule("lock-mismatch", tmp_path / "b.pt", lock=lock, **options)

    return audit_entries


def test_lock_mismatch_finds_one_nudged_weight_and_names_it_alone(audit_changed, state):
    """One bit of one element."""
    nudged = state["a.weight"].clone()
    nudged.view(torch.int32)[3, 2] ^= 1
    (finding,) = audit_changed({"a.weight": nudged})
    assert (finding.fqn, finding.section) == ("a.weight", "model")
    assert "values differ from the lock" in finding.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensor: tensor.double(), "dtype is float64, locked as float32"),
        (lambda tensor: tensor.t().contiguous(), "shape is [3, 4], locked as [4, 3]"),
        (
            lambda tensor: tensor.reshape(2, 6).half(),
            "dtype is float16, locked as float32; shape is [2, 6], locked as [4, 3]",
        ),
        (lambda tensor: None, "missing, locked as float32 [4, 3]"),
    ],
)
def test_lock_mismatch_finds_what_changed_of_a_tensor(audit_changed, state, change, says):
    """In one finding, with both figures."""
    (finding,) = audit_changed({"a.weight": change(state["a.weight"])})
    assert finding.message == f"a.weight: {says}"


def test_the_content_of_a_mismatch_is_that_of_its_values(audit_changed, state):
    """An accepted change is accepted again, and no other one of the same tensor is; without a digest none is."""
    (first,), (again,), (other,) = (audit_changed({"a.bias": state["a.bias"] + number}) for number in (1, 1, 2))
    assert first.content == again.content != other.content
    assert len(first.content) == len(other.content) == 64
    for change in ({"new": torch.ones(1)}, {"a.bias": state["a.bias"].double()}):
        (finding,) = audit_changed(change)
        assert finding.content == ""


def test_lock_mismatch_finds_a_tensor_that_nobody_locked(audit_changed):
    """What came in may be what does the harm."""
    (finding,) = audit_changed({"adapter.weight": torch.ones(1)})
    assert finding.message == "adapter.weight: not in the lock"


def test_lock_mismatch_spares_the_same_weights_in_another_container(run_rule, tmp_path, state):
    """Kinds and requires_grad that one of the two does not know are no mismatch either."""
    pickled = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in state.items()}
    torch.save(pickled, tmp_path / "a.pt")
    save_file(state, tmp_path / "a.safetensors")
    for first, second in (("a.pt", "a.safetensors"), ("a.safetensors", "a.pt")):
        assert not run_rule("lock-mismatch", tmp_path / second, lock=build_lock(tmp_path / first))


def test_lock_mismatch_finds_kind_and_requires_grad_where_both_sides_know(run_rule, tmp_path):
    """Two classes register the same name as one thing and as another."""
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
        "w: kind is buffer, locked as parameter; frozen, locked as requiring grad",
        "v: frozen, locked as requiring grad",
    }
    assert not run_rule("lock-mismatch", f"{path}:One", lock=build_lock(f"{path}:One"))


def test_lock_mismatch_spares_a_section_by_another_name(run_rule, tmp_path, state):
    """A state_dict and the same one inside a training checkpoint: sections are paired as diff pairs them."""
    torch.save(state, tmp_path / "a.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "b.pt")
    assert not run_rule("lock-mismatch", tmp_path / "b.pt", lock=build_lock(tmp_path / "a.pt"))


def build_tied_state(extra=0.0):
    shared = torch.arange(6.0).reshape(3, 2)
    return {"embed.weight": shared, "head.weight": shared, "n": torch.full((1,), extra)}


def test_lock_mismatch_spares_a_tied_name_that_safetensors_dropped(run_rule, tmp_path):
    """transformers keeps one name and notes nothing; the lock knows that the two are one tensor."""
    torch.save(build_tied_state(), tmp_path / "a.pt")
    save_file(
        {name: tensor for name, tensor in build_tied_state().items() if name != "head.weight"},
        tmp_path / "a.safetensors",
    )
    assert not run_rule("lock-mismatch", tmp_path / "a.safetensors", lock=build_lock(tmp_path / "a.pt"))
    assert not run_rule("lock-mismatch", tmp_path / "a.pt", lock=build_lock(tmp_path / "a.safetensors"))


def test_lock_mismatch_finds_a_missing_name_that_was_only_equal(run_rule, tmp_path):
    """Two biases of zeros are no tie: the one that is gone is gone."""
    state = {"a.bias": torch.zeros(3), "b.bias": torch.zeros(3)}
    torch.save(state, tmp_path / "a.pt")
    save_file({"a.bias": torch.zeros(3)}, tmp_path / "a.safetensors")
    (finding,) = run_rule("lock-mismatch", tmp_path / "a.safetensors", lock=build_lock(tmp_path / "a.pt"))
    assert finding.fqn == "b.bias"


def test_lock_mismatch_finds_the_kept_name_of_a_tie_that_moved(run_rule, tmp_path):
    """The tensor is one: it is named once."""
    torch.save(build_tied_state(), tmp_path / "a.pt")
    save_file({"embed.weight": torch.ones(3, 2), "n": torch.zeros(1)}, tmp_path / "a.safetensors")
    (finding,) = run_rule("lock-mismatch", tmp_path / "a.safetensors", lock=build_lock(tmp_path / "a.pt"))
    assert finding.fqn == "embed.weight"


def test_lock_mismatch_spares_what_no_state_dict_holds(run_rule, tmp_path):
    """The class is locked with its plain attributes, the checkpoint cannot have them; nor may its values be random."""
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


def test_lock_mismatch_spares_what_the_filters_leave_out(audit_changed, state):
    """Of both: what is gone and what came too. The kind of a name that is gone is not known, and it is told."""
    changed = {"a.weight": state["a.weight"] + 1, "a.bias": None, "new": torch.ones(1)}
    assert not audit_changed(changed, selection=Selection(include=("b.*",)))
    assert [tensor.fqn for tensor in audit_changed(changed, selection=Selection(exclude=("a.weight",)))] == [
        "a.bias",
        "new",
    ]


def test_lock_mismatch_finds_only_what_is_frozen_where_that_is_asked(run_rule, tmp_path):
    """`--frozen-only`: what the lock knows not to train; what trains, and what is new, may be anything."""
    kept = {"frozen": nn.Parameter(torch.ones(2), requires_grad=False), "head": nn.Parameter(torch.ones(2))}
    torch.save(kept, tmp_path / "a.pt")
    lock = build_lock(tmp_path / "a.pt")
    torch.save({"frozen": torch.ones(2), "head": torch.zeros(2), "adapter": torch.ones(1)}, tmp_path / "b.pt")
    assert not run_rule("lock-mismatch", tmp_path / "b.pt", lock=lock, frozen_only=True)
    torch.save({"frozen": torch.zeros(2), "head": torch.zeros(2)}, tmp_path / "b.pt")
    (finding,) = run_rule("lock-mismatch", tmp_path / "b.pt", lock=lock, frozen_only=True)
    assert finding.fqn == "frozen"
    findings = run_rule("lock-mismatch", tmp_path / "b.pt", lock=lock, frozen_only=True, policy=Policy(frozen=("he*",)))
    assert [finding.fqn for finding in findings] == ["frozen", "head"]


def test_frozen_only_with_nothing_frozen_does_not_pass(tmp_path, state):
    """A state_dict records no requires_grad: to hold to nothing would be to check nothing."""
    torch.save(state, tmp_path / "a.pt")
    (target,) = audit(Request((str(tmp_path / "a.pt"),), lock=build_lock(tmp_path / "a.pt"), frozen_only=True)).targets
    assert target.status is Status.FAILED
    assert "frozen" in (target.reason or "")


def test_a_target_that_is_not_in_the_lock_does_not_pass(in_tmp_path, state):
    """A lock of several names them; one more is told, with the name that is nearest."""
    for name in ("one.pt", "two.pt", "tow.pt"):
        torch.save(state, name)
    lock = build_lock("one.pt", "two.pt")
    result = audit(Request(("one.pt", "./two.pt", "tow.pt"), lock=lock, select=("lock-mismatch",)))
    assert [target.status for target in result.targets] == [Status.AUDITED, Status.AUDITED, Status.FAILED]
    assert "two.pt" in (result.targets[2].reason or "")
    assert not result.findings


def test_values_are_read_only_where_the_rest_agrees(monkeypatch, audit_changed, state):
    """A tensor of another shape is told already; without a lock nothing is read at all."""
    from statecli.values import digest

    asked = []
    real = digest.compute_digests
    monkeypatch.setattr(
        digest, "compute_digests", lambda tensors, *a, **k: asked.extend(tensors) or real(tensors, *a, **k)
    )
    audit_changed({"a.weight": state["a.weight"].double(), "new": torch.ones(1)})
    assert sorted(tensor.fqn for tensor in asked) == ["a.bias", "b.weight"]
    asked.clear()
    audit(Request(("sample_models/net.py:Net",)))
    assert not asked


def test_a_locked_repository_fails_for_a_nudged_weight(tmp_path, in_tmp_path, statecli, state):
    """As a pull request has it: lock, audit, nudge, audit, lock again; the lock's difference is one line."""
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
    assert sum(tensor != two for tensor, two in zip(before, after, strict=True)) == 1
    assert statecli(*line).code == 0


def test_frozen_only_needs_a_lock(statecli):
    """It says what part of one counts."""
    result = statecli("audit", "x.pt", "--frozen-only")
    assert (result.code, result.out) == (2, "")
    assert "--lock" in result.err


def test_what_a_lock_says_survives_its_file(tmp_path, run_rule, state):
    """Written, read again, it holds as before."""
    torch.save(state, tmp_path / "a.pt")
    (tmp_path / "lock.json").write_bytes(b"".join(lock_file.encode_lock(build_lock(tmp_path / "a.pt"))))
    assert lock_file.read_lock(str(tmp_path / "lock.json")) == build_lock(tmp_path / "a.pt")
    assert not run_rule("lock-mismatch", tmp_path / "a.pt", lock=lock_file.read_lock(str(tmp_path / "lock.json")))


def test_values_not_locked_finds_a_lock_without_digests(run_rule, tmp_path, state):
    """Whatever the values are, it would pass; one finding says of how many."""
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


def test_values_not_locked_spares_what_has_no_values(run_rule, tmp_path, state):
    """A class held to its own lock, tensors on the meta device, and a lock that has them all."""
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
    """The learning rate changes nothing which the model computes."""
    path = tmp_path / "a.pt"
    checkpoint = {"model": {"w": torch.ones(2)}, "config": {"rms_norm_eps": 1e-06}}
    torch.save({**checkpoint, "scheduler": {"base_lr": 0.1}}, path)
    lock = build_lock(path)
    torch.save({**checkpoint, "scheduler": {"base_lr": 0.2}}, path)
    assert not run_rule("settings-mismatch", path, lock=lock)
