"""Split components of tensor names into words, and count the words that two components share."""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import lru_cache

from statecli.core.lazy_pattern import compile_on_use

_PARTS = compile_on_use(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Spellings of one word in the libraries of models: transformers, timm, fairseq, TensorFlow, JAX.
_SYNONYMS = {
    spelling: word
    for word, spellings in {
        "weight": ("gamma", "kernel", "w"),
        "bias": ("beta", "b"),
        "var": ("variance",),
        "query": ("q", "wq"),
        "key": ("k", "wk"),
        "value": ("v", "wv"),
        "output": ("out", "o", "wo"),
        "embedding": ("emb", "embed", "embeddings", "embeds"),
        "encoder": ("enc",),
        "decoder": ("dec",),
        "attention": ("attn", "att"),
        "layer": ("layers", "block", "blocks"),
        "position": ("pos", "positional"),
        "projection": ("proj",),
        "norm": ("ln", "bn"),
        "downsample": ("shortcut",),
    }.items()
    for spelling in spellings
}
#: Words that do not distinguish modules.
_COMMON_WORDS = frozenset(("layer", "projection", "module", "model", "self"))


@lru_cache(maxsize=1 << 14)
def split_words(component: str) -> frozenset[str]:
    """Return the words of a component in their standard spelling: query and projection for `q_proj`."""
    text = component.replace("layernorm", "layer_norm").replace("batchnorm", "batch_norm")
    words = (match.group().lower() for match in _PARTS.finditer(text))
    return frozenset(_SYNONYMS.get(word, word) for word in words)


def count_shared_words(first: str, second: str) -> int:
    """Return how many words two components share. Words that any module may have, such as `layer`, do not count."""
    return len((split_words(first) & split_words(second)) - _COMMON_WORDS)


@lru_cache(maxsize=1 << 14)
def measure_similarity(first: str, second: str) -> float:
    """Return the similarity of two spellings, from 0 to 2. An equal first letter, as in abbreviations, adds 1."""
    same_letter = first[:1].lower() == second[:1].lower()
    return SequenceMatcher(None, first.lower(), second.lower(), autojunk=False).ratio() + same_letter


def split_meaningful_words(text: str) -> frozenset[str]:
    """Return the words of components, except words that any module may have, such as `layer`."""
    return split_words(text) - _COMMON_WORDS
