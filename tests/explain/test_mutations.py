"""Rename the state_dicts of real classes in known ways: the printed lines restore each, and no wrong map is proved."""

from __future__ import annotations

import random
import re

import torch

from statecli import live
from statecli.commands.explain.run import build_on_meta, explain_states
from statecli.targets import load

from .classes import CLASSES, make

#: Text of a module with a function for each class.
MODULE = "from tests.explain.classes import make\n" + "".join(
    f"\n\ndef {name}():\n    return make({name!r})\n" for name in CLASSES
)
SHORT_WORDS = {"query": "q", "key": "k", "value": "v", "attention": "attn", "encoder": "enc", "decoder": "dec"}
SHORT_WORDS |= {"layers": "blocks", "layer": "h", "embeddings": "emb", "LayerNorm": "ln", "lm_head": "output"}
#: Words of the first release of Llama: the order of w1, w2 and w3 differs from the class.
LLAMA_WORDS = {
    "embed_tokens": "tok_embeddings",
    "self_attn": "attention",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
}
LLAMA_WORDS |= {"o_proj": "wo", "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
LLAMA_WORDS |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "lm_head": "output"}


def list_words(state):
    return sorted({word for name in state for word in name.split(".")[:-1] if not word.isdigit()})


def rename_words(state, words):
    return {".".join(words.get(word, word) for word in name.split(".")): tensor for name, tensor in state.items()}


def rename_one_word(state, choice):
    return rename_words(state, {choice.choice(list_words(state)): "zork"})


def rename_several_words(state, choice):
    words = choice.sample(list_words(state), min(3, len(list_words(state))))
    return rename_words(state, dict(zip(words, choice.sample(["zorka", "zorkb", "zorkc"], 3), strict=False)))


def shorten(state, _):
    words = list_words(state)
    return rename_words(
        state, {word: SHORT_WORDS[word] for word in words if word in SHORT_WORDS and SHORT_WORDS[word] not in words}
    )


def add_prefix(state, choice):
    prefix = choice.choice(["module.", "model.", "net.core.", "_orig_mod.", "backbone."])
    return {prefix + name: tensor for name, tensor in state.items()}


def shift_layers(state, _):
    return {
        re.sub(r"(^|\.)(layers?|h|blocks?)\.(\d+)\.", lambda m: f"{m[1]}{m[2]}.{int(m[3]) + 1}.", name): tensor
        for name, tensor in state.items()
    }


def use_old_norms(state, _):
    def rename(name):
        if not re.search("(?i)norm|ln_", ".".join(name.split(".")[-2:-1])):
            return name
        return re.sub(r"\.weight$", ".gamma", re.sub(r"\.bias$", ".beta", name))

    return {rename(name): tensor for name, tensor in state.items()}


def change_head(state, _):
    head = list(state)[-1].split(".")[0]
    names = [name for name in state if name.startswith(f"{head}.")]
    changed = {name: torch.zeros(7, *state[name].shape[1:]) for name in names} if len(names) <= 2 else {}
    return add_prefix({**state, **changed}, random.Random(0))  # noqa: S311


def rename_all(state, choice):
    words = list_words(state)
    renamed = rename_words(
        state, dict(zip(words, choice.sample([f"x{n}" for n in range(len(words))], len(words)), strict=True))
    )
    return {name: renamed[name] for name in choice.sample(sorted(renamed), len(renamed))}


MUTATIONS = {
    "prefix": add_prefix,
    "one word": rename_one_word,
    "short words": shorten,
    "several words": rename_several_words,
    "prefix and word": lambda state, choice: add_prefix(rename_one_word(state, choice), choice),
    "nested": lambda state, _: {"epoch": 3, "model": dict(state)},
    "nested and prefix": lambda state, choice: {"epoch": 3, "state_dict": add_prefix(state, choice)},
    "numbers from 1": shift_layers,
    "old norms": use_old_norms,
    "sorted": lambda state, choice: dict(sorted(rename_one_word(state, choice).items())),
    "another tensor": lambda state, choice: {**rename_one_word(state, choice), "aux.weight": torch.zeros(3, 5, 7)},
    "joined words": lambda state, _: {re.sub(r"\.([a-zA-Z]\w*)\.(\w+)$", r".\1_\2", n): t for n, t in state.items()},
    "another head": change_head,
}
#: Renames after which names do not identify the tensors.
TRAPS = {
    "llama": lambda state, _: rename_words(state, LLAMA_WORDS),
    "teacher": lambda state, _: {
        f"{model}.{name}": tensor + (model == "teacher")
        for model in ("student", "teacher")
        for name, tensor in state.items()
    },
    "nonsense": rename_all,
}


def number_tensors(module):
    """Return the state_dict with another value in each storage."""
    numbers: dict[int, int] = {}
    return {
        name: torch.full_like(tensor, numbers.setdefault(tensor.data_ptr() or id(tensor), len(numbers)))
        if tensor.dtype != torch.bool
        else tensor
        for name, tensor in module.state_dict().items()
    }


def check_lines(model, built, path, state):
    """Return whether the printed lines restore the state and are proved; None if the file loads as it is."""
    explanation = explain_states(model, built, load.read_checkpoint(path))
    if explanation.loads:
        return None
    diagnosis = explanation.diagnosis
    assert diagnosis is not None
    if not diagnosis.code:
        return False, False
    names: dict[str, object] = {}
    exec("\n".join(diagnosis.code), names)  # noqa: S102 - the printed lines
    loaded = names["model"].state_dict()  # type: ignore[attr-defined]
    exact = all(torch.equal(loaded[name], state[name]) for name in state if name not in diagnosis.initial)
    return exact, diagnosis.proved


def run_all(mutations):
    """Yield the class, the mutation and the result of each case: some of the mutations for a class, in turn."""
    for number, name in enumerate(CLASSES):
        state = number_tensors(make(name))
        spec = load.find_class_spec(f"real_classes.py:{name}")
        assert spec is not None
        built = build_on_meta(spec)
        model = live.model_reader.read(built, spec.text)
        for mutation, change in list(mutations.items())[number % 3 :: 3]:
            changed = change(state, random.Random(name + mutation))  # noqa: S311
            torch.save(changed, "other.pt")
            result = check_lines(model, built, "other.pt", state)
            if result is not None:
                yield name, mutation, result


def test_known_renames_are_restored_and_wrong_maps_are_not_proved(tmp_path, in_tmp_path, monkeypatch):
    """The printed lines restore the values in at least 95 of 100 cases of known renames.

    Lines that load other values than the saved values are never proved, also if the names are ambiguous.
    """
    (tmp_path / "real_classes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    results = list(run_all(MUTATIONS | TRAPS))
    assert [(name, mutation) for name, mutation, (exact, proved) in results if proved and not exact] == []
    wrong = [(name, mutation) for name, mutation, (exact, _) in results if not exact]
    assert sum(mutation in TRAPS for _, mutation in wrong) > 5
    known_renames = [mutation for _, mutation, _ in results if mutation not in TRAPS]
    assert len(known_renames) >= 100
    assert sum(mutation not in TRAPS for _, mutation in wrong) <= 0.05 * len(known_renames), wrong
