"""Tied weights that a checkpoint does not store. For example, `lm_head.weight` is saved only as the embedding.

transformers' `save_pretrained` stores a tied weight once. The tie is known from `config.json`: `tie_word_embeddings` is
true, and `architectures` is a class of the list below (`tests/test_unstored_ties.py` compares them with transformers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.parameter_or_buffer import MODEL_KINDS

_HEAD = "lm_head.weight"
_ENCODER_DECODER = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD), "shared.weight")
_CLASSES_BY_EMBEDDING = {
    "model.embed_tokens.weight": (
        "LlamaForCausalLM MistralForCausalLM MixtralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM "
        "Gemma2ForCausalLM Gemma3ForCausalLM Phi3ForCausalLM PhiForCausalLM SmolLM3ForCausalLM GraniteForCausalLM "
        "CohereForCausalLM Starcoder2ForCausalLM OlmoForCausalLM Olmo2ForCausalLM"
    ),
    "transformer.wte.weight": (
        "GPT2LMHeadModel GPTNeoForCausalLM GPTJForCausalLM GPTBigCodeForCausalLM MptForCausalLM CodeGenForCausalLM"
    ),
    "transformer.word_embeddings.weight": "BloomForCausalLM FalconForCausalLM",
    "model.decoder.embed_tokens.weight": "OPTForCausalLM MarianMTModel",
    "model.shared.weight": "BartForConditionalGeneration",
    "gpt_neox.embed_in.weight": "GPTNeoXForCausalLM",
    "backbone.embeddings.weight": "MambaForCausalLM Mamba2ForCausalLM",
}
#: Name of the stored tensor by the name of the tied, unstored tensor, for each class of transformers.
TIED_NAMES: Mapping[str, Mapping[str, str]] = {
    **{name: {_HEAD: stored} for stored, names in _CLASSES_BY_EMBEDDING.items() for name in names.split()},
    "T5ForConditionalGeneration": _ENCODER_DECODER,
    "MT5ForConditionalGeneration": _ENCODER_DECODER,
    "WhisperForConditionalGeneration": {"proj_out.weight": "model.decoder.embed_tokens.weight"},
    "BertForMaskedLM": {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    "RobertaForMaskedLM": {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"},
    "DistilBertForMaskedLM": {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
}


def add_unstored_ties(state: ModelState) -> ModelState:
    """Return the state with aliases for the tied names that `config.json` implies and the checkpoint does not store.

    The state is unchanged without a `config.json`, without `tie_word_embeddings`, and for other classes.
    """
    settings = state.metadata
    architecture = settings.values.get("config.architectures") if "config" in settings.companion_names else None
    ties = TIED_NAMES.get(str(architecture))
    if ties is None or settings.values.get("config.tie_word_embeddings") is not True:
        return state
    stored_names = {tensor.fqn for tensor in state.tensors}
    names_by_stored: dict[str, list[str]] = {}
    for name, stored_name in ties.items():
        if name not in stored_names:
            names_by_stored.setdefault(stored_name, []).append(name)
    tensors = (
        mark_unstored_ties(tensor, names_by_stored[tensor.fqn])
        if tensor.fqn in names_by_stored and tensor.kind in MODEL_KINDS
        else tensor
        for tensor in state.tensors
    )
    return replace(state, tensors=tuple(tensors))


def mark_unstored_ties(tensor: TensorInfo, names: Sequence[str]) -> TensorInfo:
    """Return the tensor with `names`, the tied names that its checkpoint does not store, as aliases and in a note."""
    are = "is" if len(names) == 1 else "are"
    note = f"tied to {' and '.join(names)}, which {are} not stored"
    return replace(tensor, aliases=(*tensor.aliases, *names), note="; ".join(filter(None, (tensor.note, note))))
