"""Causes and lines from the errors that torch and safetensors raise for real files."""

from __future__ import annotations

import argparse
import io
import subprocess
import traceback

import pytest
import torch
from safetensors.torch import load_file

from statecli.commands.explain.result import Diagnosis
from statecli.commands.explain.torch_errors import explain_text
from statecli.core.errors import UnreadableError


def raise_text(action) -> str:
    """Return the traceback of a failing action."""
    try:
        action()
    except Exception:  # noqa: BLE001 - any error text
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def diagnose(text: str) -> Diagnosis:
    """Return the diagnosis of an error text."""
    diagnosis = explain_text(text).diagnosis
    assert diagnosis is not None
    return diagnosis


def load_text(net, state) -> str:
    """Return the error text of a strict load."""
    return raise_text(lambda: net["Net"]().load_state_dict(state))


def run_lines(diagnosis, model, state, monkeypatch):
    """Run the lines for a model; the file holds `state`."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: state)
    exec("\n".join(diagnosis.code), {"model": model})  # noqa: S102 - the printed lines
    return model.state_dict()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda state: {f"module.{name}": tensor for name, tensor in state.items()}, "prefix"),
        (lambda state: {name.replace("encoder.", "enc.layer."): tensor for name, tensor in state.items()}, "renamed"),
        (lambda state: {"model": state, "epoch": 1}, "nested"),
    ],
)
def test_the_lines_for_a_load_restore_the_values(net, monkeypatch, change, cause):
    """The lines use only the names in the error text, and are never proved."""
    saved = net["Net"]().state_dict()
    diagnosis = diagnose(load_text(net, change(saved)))
    assert diagnosis.causes[0].cause.value == cause
    assert not diagnosis.proved
    loaded = run_lines(diagnosis, net["Net"](), change(saved), monkeypatch)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("wrap", [lambda state: [state, 3], lambda state: {"nets": state, "count": 3}])
def test_an_object_around_the_state_dict_has_no_lines(net, wrap):
    """A list is not a pickled module, and the keys of a training checkpoint are not renamed to tensors."""
    diagnosis = diagnose(load_text(net, wrap(net["Net"]().state_dict())))
    assert [evidence.cause.value for evidence in diagnosis.causes] == ["nested"]
    assert diagnosis.code == ()
    assert diagnosis.proof.startswith("no code to load the file; print ")


def test_tensors_of_another_shape_keep_initial_values(net, monkeypatch):
    """Tensors named in the error text keep their initial values."""
    wide = net["Net"](num_classes=1000).state_dict()
    diagnosis = diagnose(load_text(net, wide))
    assert diagnosis.causes[0].cause.value == "width"
    assert diagnosis.initial == ("head.weight", "head.bias")
    assert torch.equal(run_lines(diagnosis, net["Net"](), dict(wide), monkeypatch)["bn.weight"], wide["bn.weight"])


@pytest.mark.parametrize("is_wide", [False, True])
def test_only_names_that_the_class_lacks_are_left_out(net, monkeypatch, is_wide):
    """The text does not list matching names, and matching names are in the same modules as unexpected names."""
    saved = net["Net"](**({"num_classes": 1000} if is_wide else {})).state_dict()
    extra_tensors = {f"encoder.{n}.query.{part}": torch.ones(1) for n in range(3) for part in ("scale", "shift")}
    state = saved | extra_tensors
    diagnosis = diagnose(load_text(net, state))
    loaded = run_lines(diagnosis, net["Net"](), state, monkeypatch)
    kept_names = [name for name in loaded if not (is_wide and name.startswith("head."))]
    assert all(torch.equal(loaded[name], saved[name]) for name in kept_names)


@pytest.mark.parametrize(
    ("extra_name", "cause", "words"),
    [
        ("query.SCB", "quantized", "the weights are quantized (bitsandbytes): 3 tensors such as encoder.0.query.SCB"),
        ("query.lora_A.default.weight", "adapter", "the checkpoint has a LoRA adapter: 3 tensors such as encoder.0."),
    ],
)
def test_quantized_weights_and_adapters_have_no_lines(net, extra_name, cause, words):
    """The values differ from the values of the class's layers."""
    state = net["Net"]().state_dict() | {f"encoder.{n}.{extra_name}": torch.ones(2, 2) for n in range(3)}
    diagnosis = diagnose(load_text(net, state))
    assert (diagnosis.causes[0].cause.value, diagnosis.code) == (cause, ())
    assert words in diagnosis.causes[0].message


def test_a_quantized_class_does_not_take_plain_weights(net):
    """The text lists names of quantized weights as missing."""
    missing = ", ".join(f'"encoder.{n}.query.qweight"' for n in range(3))
    text = f"{load_text(net, {})}\nMissing key(s) in state_dict: {missing}. "
    diagnosis = diagnose(text)
    assert (diagnosis.causes[0].cause.value, diagnosis.code) == ("quantized", ())


FILES = {
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3\n",
    "not-a-checkpoint": b"<!DOCTYPE html><html></html>",
}


@pytest.mark.parametrize("cause", FILES)
@pytest.mark.parametrize("weights_only", [True, False])
def test_cause_of_a_file_that_is_not_a_checkpoint_is_named(tmp_path, cause, weights_only):
    """The texts of both unpicklers name the cause, and there are no lines."""
    path = tmp_path / "model.pt"
    path.write_bytes(FILES[cause])
    text = raise_text(lambda: torch.load(path, weights_only=weights_only))
    diagnosis = diagnose(text)
    assert (diagnosis.causes[0].cause.value, diagnosis.code) == (cause, ())


def test_a_wrong_safetensors_header_is_named(tmp_path):
    """Read as safetensors, a Git LFS pointer has a header size that is too large."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(FILES["git-lfs"])
    diagnosis = diagnose(raise_text(lambda: load_file(path)))
    assert diagnosis.causes[0].cause.value == "not-a-checkpoint"


def test_a_refused_class_is_allowed_only_if_it_is_plain_data(tmp_path):
    """A Namespace has a line; a function of the file has none."""
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "plain.pt")
    torch.save({"run": subprocess.run}, tmp_path / "run.pt")
    plain, run = (
        diagnose(raise_text(lambda name=name: torch.load(tmp_path / name, weights_only=True)))
        for name in ("plain.pt", "run.pt")
    )
    assert "torch.serialization.add_safe_globals([argparse.Namespace])" in plain.code
    assert run.causes[0].cause.value == "unsafe-file"
    assert run.code == ()


def test_text_without_a_known_error_exits_with_2(statecli, monkeypatch):
    """The command exits with 2."""
    with pytest.raises(UnreadableError, match="no known error"):
        explain_text("epoch 1: loss 0.5\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"fine\n")))
    assert statecli("explain", "-").code == 2
