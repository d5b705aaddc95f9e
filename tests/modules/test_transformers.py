"""Real classes of transformers, built small from their configs, against torch's own account of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from statecli.state import Kind

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
GQA = {**TEXT, "num_key_value_heads": 1}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
}
SMALL = {
    "BertModel": ("BertConfig", TEXT),
    "BertForMaskedLM": ("BertConfig", TEXT),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    ),
    "LlamaForCausalLM": ("LlamaConfig", GQA),
    "ViTModel": ("ViTConfig", {**VISION, "patch_size": 8}),
    "CLIPVisionModel": ("CLIPVisionConfig", {**VISION, "patch_size": 8}),
    "WhisperModel": (
        "WhisperConfig",
        {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0},
    ),
    "MambaModel": ("MambaConfig", {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}),
    "MixtralForCausalLM": ("MixtralConfig", {**GQA, "num_local_experts": 2}),
    "DebertaV2Model": ("DebertaV2Config", TEXT),
    "Wav2Vec2Model": (
        "Wav2Vec2Config",
        {**TEXT, "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    ),
    "GPTNeoXModel": ("GPTNeoXConfig", TEXT),
    "BartModel": (
        "BartConfig",
        {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    ),
}


def _make(name: str) -> nn.Module:
    config, options = SMALL[name]
    return getattr(transformers, name)(getattr(transformers, config)(**options))


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
    assert oracles.seen(read_live(lambda: _make(name))) == oracles.oracle(_make(name))


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_left_behind_that_follows(name, read_live):
    """Everything registered follows a move, and there is nothing unregistered in these classes."""
    state = read_live(lambda: _make(name))
    assert [t.fqn for t in state.tensors if t.moves is not True] == []
    assert [t.fqn for t in state.tensors if t.kind is Kind.UNREGISTERED] == []
    assert {oddity.name for oddity in state.oddities} <= {"none-parameter"}


def test_tied_heads_are_tied(read_live, rows):
    """GPT-2's head names the token embedding, as the storages say."""
    found = rows(read_live(lambda: _make("GPT2LMHeadModel")))
    assert found["lm_head.weight"].tied_to == ("transformer.wte.weight",)


def test_modules_in_a_plain_list_are_found(read_live, rows):
    """OneFormer keeps convolutions in a plain list: six parameters that no state_dict holds."""
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
    found = read_live(lambda: transformers.OneFormerModel(config))
    lost = [t for t in found.tensors if t.kind is Kind.UNREGISTERED and "input_projections" in t.fqn]
    assert len(lost) == 6
    assert {(t.saved, t.moves, t.requires_grad) for t in lost} == {(False, False, True)}


@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM"])
def test_skipping_the_draws_changes_nothing_shown(name, read_live):
    """A model whose large random values were not drawn shows the same rows."""
    from statecli.modules.drawing import Skipped, skipping

    def undrawn() -> nn.Module:
        with skipping(Skipped()):
            return _make(name)

    torch.manual_seed(0)
    assert read_live(undrawn).tensors == read_live(lambda: _make(name)).tensors
