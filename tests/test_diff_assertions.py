"""statecli.testing: tensors changed by a step, complete loads of a checkpoint, and the types for mypy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import statecli
from statecli.testing import assert_loaded, assert_only_changed

from .test_live_objects import Tied, step

ROOT = Path(__file__).parent.parent


class Adapted(nn.Module):
    """A frozen base, and an adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(2, 2).requires_grad_(False)
        self.adapter = nn.Linear(2, 2)


def get_failure(call):
    with pytest.raises(AssertionError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("take", [statecli.Snapshot, lambda model: statecli.Snapshot(model, values=True)])
def test_step_of_an_adapter_changes_only_the_adapter(take):
    """The snapshot has digests or values; assert_only_changed returns the diff."""
    model = Adapted()
    before = take(model)
    step(model, torch.optim.SGD(model.adapter.parameters(), 0.1))
    diff = assert_only_changed(before, model, "adapter.*")
    assert {change.fqn for change in diff.changes if change.fields} == {"adapter.weight", "adapter.bias"}


def test_another_changed_tensor_fails_by_name():
    """The message has the line of the finding and the table."""
    model = Adapted()
    before = statecli.Snapshot(model)
    with torch.no_grad():
        model.base.bias += 1
        model.adapter.bias += 1
    message = get_failure(lambda: assert_only_changed(before, model, "adapter.*"))
    assert message.splitlines()[0].startswith("base.bias: changed, but does not match globs 'adapter.*': ")
    assert "--" not in message
    assert "M base.bias" in message
    assert "weight" not in message.splitlines()[0]


def test_a_glob_without_a_change_fails():
    """An adapter without an update fails, and a misspelt glob is an error."""
    model = Adapted()
    before = statecli.Snapshot(model)
    assert get_failure(lambda: assert_only_changed(before, model, "adapter.*")).startswith(
        "globs 'adapter.*': no matching "
    )
    step(model, torch.optim.SGD(model.adapter.parameters(), 0.1))
    with pytest.raises(statecli.NothingMatched, match=r"\Aglobs='adaptor\.\*': matches none"):
        assert_only_changed(before, model, "adapter.*", "adaptor.*")


def test_a_path_with_the_name_of_an_argument_stays(tmp_path):
    """Only the option is named as the argument of assert_only_changed."""
    path = tmp_path / "only=1.pt"
    torch.save(Adapted().state_dict(), path)
    with pytest.raises(statecli.NothingMatched, match=r"\Aglobs='adaptor\.\*': matches none.*only=1\.pt"):
        assert_only_changed(path, path, "adaptor.*")


def test_a_missing_update_may_be_allowed():
    """If a step may change nothing."""
    model = Adapted()
    assert_only_changed(statecli.Snapshot(model), model, "adapter.*", allow_unchanged=True)


def test_without_globs_nothing_may_change():
    """Without globs any change fails; an excluded tensor is not compared."""
    model = Adapted()
    before = statecli.Snapshot(model)
    assert_only_changed(before, model)
    with torch.no_grad():
        model.base.bias += 1
    assert "base.bias" in get_failure(lambda: assert_only_changed(before, model))
    assert_only_changed(before, model, exclude="base.bias")


def test_a_complete_load_passes(tmp_path):
    """The checkpoint is a path, a state_dict, a section of a training checkpoint, or its optimizer."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(saved, tmp_path / "train.pt")
    fresh = Tied()
    fresh.load_state_dict(torch.load(tmp_path / "a.pt"))
    for checkpoint in [tmp_path / "a.pt", model.state_dict(), f"{tmp_path / 'train.pt'}#model", tmp_path / "train.pt"]:
        assert_loaded(fresh, checkpoint)
    assert_loaded(optimizer, f"{tmp_path / 'train.pt'}#optimizer")
    step(model, optimizer)
    assert "other values" in get_failure(lambda: assert_loaded(optimizer, f"{tmp_path / 'train.pt'}#optimizer"))


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        (lambda s: s.pop("norm.bias"), "1 missing key in the model and not in state_dict: norm.bias"),
        (lambda s: s.update(other=torch.ones(2)), "1 unexpected key in state_dict and not in the model: other"),
        (lambda s: s.update({"norm.weight": torch.zeros(3)}), "1 tensor with other values, shapes or dtypes"),
        (lambda s: s.update({"head.weights": s.pop("head.weight"), "x": s.pop("low")}), "key"),
    ],
    ids=["missing", "unexpected", "values", "renamed"],
)
def test_keys_that_strict_false_ignores_fail(change, expected_text):
    """A key without a tensor of the model, and the reverse; the model keeps the values of its initialization."""
    model = Tied()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["head.weight"] = state["embedding.weight"] = torch.randn(5, 3)
    state["low"] = torch.full((3,), 7).half()
    change(state)
    model.load_state_dict({k: v for k, v in state.items() if k != "norm.weight"}, strict=False)
    assert expected_text in get_failure(lambda: assert_loaded(model, state))


def test_a_new_head_may_be_excluded():
    """The head is excluded, as after a load for fine-tuning."""
    model = Adapted()
    assert_loaded(model, nn.ModuleDict({"base": model.base}), exclude="adapter.*")


def test_a_cast_and_a_prefix_and_a_tie_count_as_loaded(tmp_path):
    """A load casts, DataParallel adds a prefix, and safetensors has one name of tied weights."""
    from safetensors.torch import save_file

    model = Tied()
    state = {f"module.{k}": v for k, v in model.state_dict().items() if k not in ("head.weight", "empty")}
    save_file({k: v.clone() for k, v in state.items()}, tmp_path / "a.safetensors")
    assert_loaded(model, tmp_path / "a.safetensors", exclude="empty")
    half = Tied()
    half.load_state_dict(model.state_dict())
    assert_loaded(half.bfloat16(), model.state_dict())
    with torch.no_grad():
        half.norm.weight[0] += 1
    assert "norm.weight" in get_failure(lambda: assert_loaded(half, model.state_dict()))


TYPED = """
import statecli
import torch
from statecli.testing import assert_loaded, assert_only_changed, assert_state_follows

model = torch.nn.Linear(2, 2)
statecli.verify(model, checks=["move", "save"])
statecli.verify(model, checks="move")
statecli.inspect(model, kind=["parameter"])
statecli.diff(statecli.Snapshot(model), model.state_dict(), ignore="dtype")
assert_state_follows(model, checks=["move"], fail_on="error")
assert_only_changed(statecli.Snapshot(model), model, "adapter.*")
assert_loaded(model, "net.pt")
statecli.verify(model, checks=["movee"])
assert_state_follows(model, checks=["movee"])
statecli.diff(model, "a.pt", ignore=["dtypes"])
statecli.inspect(3)
"""


def test_a_misspelt_word_is_a_type_error(tmp_path):
    """mypy accepts the first calls, and reports each of the last four."""
    (tmp_path / "typed.py").write_text(TYPED)
    cache = ROOT / ".mypy_cache"
    if cache.exists():  # checking torch takes a minute
        shutil.copytree(cache, tmp_path / "cache")
    options = ["--strict", "--cache-dir", str(tmp_path / "cache"), "--config-file", str(ROOT / "pyproject.toml")]
    words = [sys.executable, "-m", "mypy", *options, str(tmp_path / "typed.py")]
    result = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    last = len(TYPED.splitlines())
    assert [int(line.split(":")[1]) for line in errors] == list(range(last - 3, last + 1)), result.stdout
