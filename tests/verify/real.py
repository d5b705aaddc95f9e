"""Small models of real classes: `make(name)` builds a model. `INPUTS` has inputs for classes whose config does not give
any.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, prune

from ..zoo import NOT_SIMILAR_TO_REAL, SMALL

HIDDEN = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 64, **HIDDEN}
GROUPED = {**TEXT, "num_key_value_heads": 1}
VISION = {**HIDDEN, "image_size": 16, "patch_size": 8}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
LAYERS |= {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
BOTH = {"vocab_size": 64, "pad_token_id": 0, **LAYERS}
GPT = {"vocab_size": 64, "n_layer": 1, "n_head": 2}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
SWIN = {"embed_dim": 8, "window_size": 4, "patch_size": 4}
SPEECH = {**TEXT, "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
IDS, IMAGE, LARGER = "int64:2x8<64", "2x3x16x16", "2x3x32x32"
PAST = ("past_values=2x10", "past_time_features=2x10x1", "past_observed_mask=2x10")
FUTURE = ("future_values=2x4", "future_time_features=2x4x1")
STATES = ("states=2x4x3", "actions=2x4x2", "rewards=2x4x1", "returns_to_go=2x4x1", "timesteps=int64:2x4<32")

#: The class, its config's class, and the config's options.
CLASSES = {
    "BertForMaskedLM": ("BertConfig", TEXT),
    "DebertaV2Model": ("DebertaV2Config", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "LongformerModel": ("LongformerConfig", {**TEXT, "attention_window": 4, "max_position_embeddings": 40}),
    "XLNetModel": ("XLNetConfig", {"vocab_size": 64, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}),
    "ReformerModel": (
        "ReformerConfig",
        {"vocab_size": 64, "hidden_size": 16, "attention_head_size": 8, "num_attention_heads": 2, "num_buckets": 4}
        | {"feed_forward_size": 32, "attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 4], "is_decoder": False}
        | {"axial_pos_embds_dim": [8, 8], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4}
        | {"max_position_embeddings": 16},
    ),
    "GPT2LMHeadModel": ("GPT2Config", {**GPT, "n_embd": 16}),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 2}),
    "MambaForCausalLM": (
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},
    ),
    "RwkvModel": ("RwkvConfig", {**TEXT, "num_hidden_layers": 2, "attention_hidden_size": 16}),
    "SwitchTransformersForConditionalGeneration": (
        "SwitchTransformersConfig",
        {**T5, "num_layers": 1, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 0}
        | {"num_decoder_layers": 1},
    ),
    "BartForConditionalGeneration": ("BartConfig", BOTH),
    "Dinov2Model": ("Dinov2Config", VISION),
    "BeitModel": ("BeitConfig", {**VISION, "use_relative_position_bias": True}),
    "VideoMAEModel": ("VideoMAEConfig", {**VISION, "num_frames": 4, "tubelet_size": 2}),
    "SwinModel": ("SwinConfig", {**SWIN, "image_size": 32, "depths": [1, 1], "num_heads": [2, 2]}),
    "CLIPModel": (
        "CLIPConfig",
        {"text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 63, "pad_token_id": 0}, "vision_config": VISION},
    ),
    "Wav2Vec2Model": ("Wav2Vec2Config", SPEECH),
    "TimeSeriesTransformerModel": (
        "TimeSeriesTransformerConfig",
        {**LAYERS, "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1},
    ),
    "PerceiverModel": (
        "PerceiverConfig",
        {"num_latents": 4, "d_latents": 16, "d_model": 8, "num_blocks": 1, "num_self_attends_per_block": 1}
        | {"num_self_attention_heads": 2, "num_cross_attention_heads": 2},
    ),
    "DecisionTransformerModel": (
        "DecisionTransformerConfig",
        {"state_dim": 3, "act_dim": 2, "hidden_size": 16, "n_layer": 1, "n_head": 2, "max_ep_len": 32},
    ),
}
CLASSES |= {name: SMALL[name] for name in NOT_SIMILAR_TO_REAL}
INPUTS = {
    **dict.fromkeys(["Dinov2Model", "BeitModel"], (IMAGE,)),
    "SwinModel": (LARGER,),
    "DetrModel": ("2x3x32x32",),
    "Wav2Vec2Model": ("2x200",),
    "OneFormerModel": ("2x3x32x32", IDS),
    "ReformerModel": ("int64:2x16<64",),
    "VideoMAEModel": ("2x4x3x16x16",),
    "CLIPModel": (IDS, IMAGE),
    "TimeSeriesTransformerModel": (*PAST, *FUTURE),
    "PerceiverModel": ("2x5x8",),
    "DecisionTransformerModel": (*STATES, "attention_mask=int64:2x4<2"),
}


def _detr() -> nn.Module:
    stages = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "out_features": ["stage2"]}
    options = {**LAYERS, "num_queries": 3, "backbone": None, "use_timm_backbone": False}
    backbone = transformers.ResNetConfig(**stages)
    return transformers.DetrModel(transformers.DetrConfig(**options, backbone_config=backbone))


def _swin() -> transformers.SwinConfig:
    stages = [f"stage{number}" for number in (1, 2, 3, 4)]
    heads = {"depths": [1] * 4, "num_heads": [1] * 4}
    return transformers.SwinConfig(**SWIN, **heads, image_size=32, out_features=stages)


def _oneformer() -> nn.Module:
    text = {"text_encoder_width": 32, "text_encoder_num_layers": 1, "text_encoder_context_length": 8}
    text |= {"text_encoder_vocab_size": 64, "text_encoder_n_ctx": 2, "task_seq_len": 8}
    segments = {"hidden_dim": 32, "num_attention_heads": 2, "num_queries": 4, "encoder_layers": 1, "decoder_layers": 2}
    segments |= {"encoder_feedforward_dim": 32, "dim_feedforward": 32}
    sizes = {"conv_dim": 64, "mask_dim": 64, "query_dec_layers": 1}
    config = transformers.OneFormerConfig(backbone_config=_swin(), **segments, **sizes, **text)
    return transformers.OneFormerModel(config)


#: Models whose config contains another config.
NESTED: dict[str, Callable[[], nn.Module]] = {"DetrModel": _detr, "OneFormerModel": _oneformer}
#: Modules of torch, and their inputs.
TORCH: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "Transformer": (lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True), ("2x4x16", "2x4x16")),
    "LSTM": (lambda: nn.LSTM(4, 5, 2, bidirectional=True), ("3x2x4",)),
    "GRU": (lambda: nn.GRU(4, 5), ("3x2x4",)),
    "projected LSTM": (lambda: nn.LSTM(4, 5, proj_size=2), ("3x2x4",)),
    "LSTMCell": (lambda: nn.LSTMCell(4, 5), ("3x4",)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), ("2x4x3x3",)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), ("2x4x3x3",)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2), ("3x2x8", "3x2x8", "3x2x8")),
    "MultiheadAttention with kdim": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
        ("3x2x8", "3x2x4", "3x2x4"),
    ),
    "sparse Embedding": (lambda: nn.Embedding(10, 4, sparse=True), ("int64:2x3<10",)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4), ("int64:2x3<10",)),
    "lazy": (
        lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)),
        ("2x3x6x6",),
    ),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), ("2x3",)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), ("2x3",)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 4)), ("2x3",)),
    "parametrized LSTM": (lambda: parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0"), ("2x1x3",)),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(3, 4)), ("2x3",)),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 4)), ("2x3",)),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5), ("2x3",)),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(2, 3)), ("2x2",)),
    "AveragedModel": (lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 3)), ("2x2",)),
}


def make(name: str) -> nn.Module:
    if name in TORCH:
        return TORCH[name][0]()
    if name in NESTED:
        return NESTED[name]()
    config, options = CLASSES[name]
    return getattr(transformers, name)(getattr(transformers, config)(**options))
