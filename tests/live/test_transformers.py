"""Real classes of transformers, built small from their configs, are compared with torch's own functions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from statecli.core.model_state import Kind

from ..zoo import SMALL, make

transformers = pytest.importorskip("transformers")


def _oracles():
    path = Path(__file__).with_name("test_oracles.py")
    spec = importlib.util.spec_from_file_location("_modules_oracles", path)
    module = sys.modules.setdefault("_modules_oracles", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


oracles = _oracles()


@pytest.mark.parametrize("name", SMALL)
def test_registered_tensors_are_those_torch_names(name, read_live):
    """Names, kinds, dtypes, shapes, requires_grad and saving agree with torch on a real model."""
    assert oracles.seen(read_live(lambda: make(name))) == oracles.oracle(make(name))


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_left_behind_that_follows(name, read_live):
    """Every registered tensor follows a move, and these classes have no unregistered tensors."""
    state = read_live(lambda: make(name))
    assert [t.fqn for t in state.tensors if t.moves is not True] == []
    assert [t.fqn for t in state.tensors if t.kind is Kind.UNREGISTERED] == []
    assert {oddity.name for oddity in state.oddities} <= {"none-parameter"}


def test_tied_heads_are_tied(read_live, rows):
    """The storages show that GPT-2's head is tied to the token embedding."""
    actual_rows = rows(read_live(lambda: make("GPT2LMHeadModel")))
    assert actual_rows["lm_head.weight"].tied_to == ("transformer.wte.weight",)


def test_modules_in_a_plain_list_are_found(read_live, rows):
    """OneFormer keeps convolutions in a plain list: six parameters are not in state_dict()."""
    config = transformers.OneFormerConfig(
        num_queries=4, hidden_dim=32, conv_dim=32, mask_dim=32, enforce_input_proj=True
    )
    config.backbone_config = transformers.SwinConfig(
        image_size=32,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    live = read_live(lambda: transformers.OneFormerModel(config))
    lost = [t for t in live.tensors if t.kind is Kind.UNREGISTERED and "input_projections" in t.fqn]
    assert len(lost) == 6
    assert {(t.saved, t.moves, t.requires_grad) for t in lost} == {(False, False, True)}


@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM"])
def test_skipping_the_draws_changes_nothing_shown(name, read_live):
    """A model without drawn values of large parameters shows the same rows."""
    from statecli.live.skip_random_init import SkippedFills, skip_random_fills

    def undrawn() -> nn.Module:
        with skip_random_fills(SkippedFills()):
            return make(name)

    torch.manual_seed(0)
    assert read_live(undrawn).tensors == read_live(lambda: make(name)).tensors
