"""Real classes of transformers with more ways to name their tensors than the classes of tests/zoo.py."""

from __future__ import annotations

from torch import nn

from ..zoo import GQA, SMALL, TEXT, VISION, transformers

_VISION = {**VISION, "patch_size": 8}
_MORE = {
    "RobertaForMaskedLM": TEXT,
    "ElectraForPreTraining": TEXT,
    "DistilBertModel": {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "MPNetModel": TEXT,
    "BloomModel": {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "FalconModel": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "Qwen2ForCausalLM": GQA,
    "Starcoder2Model": GQA,
    "ViTForImageClassification": _VISION,
    "Dinov2Model": _VISION,
    "SegformerModel": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]},
}
CLASSES = (*SMALL, *_MORE)


def make(name: str) -> nn.Module:
    kind = getattr(transformers, name)
    if name in SMALL:
        config, options = SMALL[name]
        return kind(getattr(transformers, config)(**options))
    return kind(kind.config_class(**_MORE[name]))
