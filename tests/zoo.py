"""Real classes of transformers, built small from their configs."""

from __future__ import annotations

import pytest
from torch import nn

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
#: Models without a similar model in tests/verify/real.py.
NOT_SIMILAR_TO_REAL = ("CLIPVisionModel", "GPTNeoXModel", "T5ForConditionalGeneration", "ViTModel")


def make(name: str) -> nn.Module:
    config, options = SMALL[name]
    return getattr(transformers, name)(getattr(transformers, config)(**options))
