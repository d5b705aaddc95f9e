"""Checkpoints of real classes, and a real model folder, against the libraries' own loaders."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_model

from statecli import formats
from statecli.core import parameter_or_buffer
from statecli.core.model_state import Kind

from .zoo import SMALL, make

NAMES = sorted(SMALL)
#: Models for tests that change none.
shared_model = functools.cache(make)


def rows(path):
    return {row.fqn: row for row in parameter_or_buffer.classify_tensors(formats.read(str(path))).tensors}


def check_row(row, tensor):
    assert f"torch.{row.dtype}" == str(tensor.dtype)
    assert row.shape == tuple(tensor.shape)
    assert row.nbytes == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_rows_of_a_state_dict_agree_with_torch_load(tmp_path, name, legacy):
    """Names in order, dtypes, shapes, bytes and ties agree with torch.load, and no parameter is called a buffer."""
    path, module = tmp_path / "net.pt", shared_model(name)
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    loaded, actual = torch.load(path, weights_only=True), rows(path)
    assert list(actual) == list(loaded)
    for fqn, tensor in loaded.items():
        check_row(actual[fqn], tensor)
        same = {n for n, t in loaded.items() if t.untyped_storage()._cdata == tensor.untyped_storage()._cdata}
        assert set(actual[fqn].tied_to) == same - {fqn}
    parameters = {n for n, _ in module.named_parameters(remove_duplicate=False)}
    assert not parameters & {fqn for fqn, row in actual.items() if row.kind is Kind.BUFFER}


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_safetensors_agree_with_safe_open(tmp_path, name):
    """save_model and safe_open: names, dtypes, shapes."""
    path = tmp_path / "net.safetensors"
    save_model(shared_model(name), str(path))
    actual_rows = rows(path)
    with safe_open(path, "pt") as file:
        stored_names = set(file.keys())
        for fqn in stored_names:
            check_row(actual_rows[fqn], file.get_tensor(fqn))
    dropped = set(actual_rows) - stored_names
    assert all(actual_rows[fqn].tied_to for fqn in dropped)


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_pickled_model_is_grouped_as_the_live_one(tmp_path, name):
    """Parameters, buffers, persistence and requires_grad, from the pickle alone."""
    module = make(name)
    next(module.parameters()).requires_grad_(False)
    path = tmp_path / "whole.pt"
    try:
        torch.save(module, path)
    except RuntimeError as error:
        if "parametrized modules" not in str(error):
            raise
        pytest.skip("torch cannot pickle the module")
    actual_rows = rows(path)
    registered = {fqn: row for fqn, row in actual_rows.items() if row.kind is not Kind.UNREGISTERED}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    assert {n for n, row in registered.items() if row.kind is Kind.PARAMETER} == set(parameters)
    assert {n for n, row in registered.items() if row.kind is Kind.BUFFER} == set(buffers)
    for fqn, tensor in {**parameters, **buffers}.items():
        check_row(actual_rows[fqn], tensor)
        assert actual_rows[fqn].requires_grad is tensor.requires_grad
    assert {n for n, row in registered.items() if row.saved} == set(module.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_a_training_checkpoint_knows_its_parameters(tmp_path, name):
    """AdamW over named_parameters: all of them, and nothing else, are parameters by the optimizer."""
    module = make(name)
    optimizer = torch.optim.AdamW(module.named_parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    path = tmp_path / "train.pt"
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, path)
    tensors = parameter_or_buffer.classify_tensors(formats.read(str(path)))
    trained = {row.fqn for row in tensors.tensors if row.section == "model" and row.evidence.value == "optimizer"}
    assert {n for n, _ in module.named_parameters()} <= trained
    assert trained <= {n for n, _ in module.named_parameters(remove_duplicate=False)}


def test_rows_of_the_real_folder_agree_with_safe_open(statecli, minilm):
    """A BERT of 22.7 M parameters: names, dtypes and shapes, and no byte of data read."""
    actual_rows = statecli("inspect", minilm, "-f", "json").rows()
    with safe_open(minilm / "model.safetensors", "pt") as file:
        assert set(actual_rows) == set(file.keys())
        for fqn in file.keys():  # noqa: SIM118  # safe_open is no mapping
            piece = file.get_slice(fqn)
            assert actual_rows[fqn]["shape"] == piece.get_shape()
            assert actual_rows[fqn]["dtype"] == {"F32": "float32", "I64": "int64"}[piece.get_dtype()]


def test_class_of_the_real_folder_does_not_expect_position_ids(statecli, minilm, tmp_path, monkeypatch):
    """Grouped by BertModel: its position ids are there, and today's class does not expect them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "of_config.py").write_text(
        "from transformers import AutoConfig, AutoModel\n\n\ndef make(folder):\n"
        "    return AutoModel.from_config(AutoConfig.from_pretrained(folder))\n"
    )
    result = statecli("inspect", minilm, "--model", f"{tmp_path}/of_config.py:make({str(minilm)!r})", "-f", "json")
    assert result.code == 1, result
    assert [(f["rule"], f["fqn"]) for f in result.json["findings"]] == [("unexpected-entry", "embeddings.position_ids")]
    kinds_found = {row["kind"] for row in result.json["tensors"]}
    assert kinds_found == {"parameter", "buffer"}
    assert "transformers" in sys.modules


def test_all_tensors_of_the_real_folder_load_to_cpu(statecli, minilm):
    """--to cpu: 90 MB loaded tensor by tensor, every byte compared."""
    result = statecli("inspect", minilm, "--to", "cpu", "-f", "json")
    assert result.code == 0
    assert all(row["after"] == {"device": "cpu", "followed": True} for row in result.json["tensors"])


def test_statistics_of_the_real_folder_are_torchs(statecli, minilm):
    """min, max, mean and std of every tensor, as torch computes them in float64."""
    actual_rows = statecli("inspect", minilm, "--stats", "-f", "json").rows()
    with safe_open(minilm / "model.safetensors", "pt") as file:
        for fqn, row in actual_rows.items():
            tensor = file.get_tensor(fqn).double()
            stats = row["stats"]
            assert stats["min"] == tensor.min().item()
            assert stats["max"] == tensor.max().item()
            assert stats["mean"] == pytest.approx(tensor.mean().item(), rel=1e-9, abs=1e-12)
            assert stats["std"] == pytest.approx(tensor.std().item(), rel=1e-9)
            assert stats["zeros"] == int((tensor == 0).sum())
