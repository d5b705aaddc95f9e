"""Tied names that a checkpoint does not store, and their names in inspect and on the page."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from statecli.core.unstored_ties import TIED_NAMES

NOTE = "tied to lm_head.weight, which is not stored"
SIZES = {"vocab_size": 16, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder written by save_pretrained: the embedding, without the head."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).save_pretrained(folder)
    return folder


def list_rows(statecli, *arguments):
    document = json.loads(statecli("inspect", *map(str, arguments), "-f", "json").out)
    return {row["fqn"]: row for row in document["tensors"]}


def change_config(folder, target, **settings):
    """A copy of the folder with another config.json; None removes a key."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target


@pytest.mark.parametrize("options", [(), ("--model", "auto")], ids=["config", "class"])
def test_the_stored_tensor_names_the_tied_name(statecli, folder, options):
    """The tied name is in the JSON and on the terminal; it comes from config.json, or from the class."""
    row = list_rows(statecli, folder, *options)["transformer.wte.weight"]
    assert (row["tied_to"], row["aliases"], row["note"]) == (["lm_head.weight"], ["lm_head.weight"], NOTE)
    assert NOTE in statecli("inspect", str(folder), *options, "-f", "table").out


@pytest.mark.parametrize(
    "settings", [{"tie_word_embeddings": False}, {"tie_word_embeddings": None}, {"architectures": ["OwnLMHeadModel"]}]
)
def test_a_tie_that_is_not_recorded_is_not_reported(statecli, folder, tmp_path, settings):
    """The setting is missing, or statecli does not know the class."""
    rows = list_rows(statecli, change_config(folder, tmp_path / "other", **settings))
    assert all("aliases" not in row and "note" not in row for row in rows.values())


def test_a_stored_head_is_not_an_alias(statecli, tmp_path, folder):
    """A checkpoint with both names holds two tensors."""
    target = change_config(folder, tmp_path / "both")
    state = load_file(target / "model.safetensors")
    state["lm_head.weight"] = torch.ones(16, 8)
    save_file(state, target / "model.safetensors")
    assert all("aliases" not in row for row in list_rows(statecli, target).values())


@pytest.mark.parametrize("name", TIED_NAMES)
def test_tied_names_agree_with_transformers(name):
    """Each class of the table ties these names if tie_word_embeddings is true, as in transformers."""
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, name, None)
    keys = getattr(model, "_tied_weights_keys", None)
    if not isinstance(keys, dict):
        pytest.skip("needs transformers 5")
    assert {tied: stored for tied, stored in keys.items() if tied.endswith(".weight")} == TIED_NAMES[name]
