"""Texts in plain data evaluated by fairseq and Composer: code is reported, and texts of honest checkpoints pass."""

from __future__ import annotations

import ast
from argparse import Namespace
from array import array
from collections import OrderedDict, UserString
from pathlib import Path

import numpy as np
import pytest
import torch

from statecli.core.finding import Severity
from statecli.pickle_scan import evaluated_texts

CODE = "[open('PROOF', 'w').write('code ran')] and [(8, 10, 5)]"
ORDINARY_TEXTS = {
    "conv_feature_layers": "[(512,10,5)] + [(512,3,2)] * 4 + [(512,2,2)] * 2",
    "conv_aggregator_layers": "[(512, 2, 1), (512, 3, 1), (512, 4, 1)]",
    "extractor_conv_feature_layers": "[(512,10,5)] + [(512,3,2)] * 4 + [(512,2,2)] * 2",
    "override_encoder_layers": "[4, 4, 4]",
    "adam_betas": "(0.9, 0.98)",
    "adafactor_eps": "(1e-30, 1e-3)",
    "character_filters": "[(1, 64), (2, 128), (3, 192), (4, 256)]",
    "encoder_layers": "[(512, 3)] * 20",
    "decoder_layers": "[(512, 4)] * 4 + [(768, 4, -1)] * 2 + [(1024, 4)]",
    "decoder_attention": "True",
    "feat_type": "fbank",
    "wer_args": "('lm.bin', 'lexicon.lst', 2, -1)",
    "xformers_att_config": "{'name': 'scaled_dot_product'}",
    # Texts of other libraries; these libraries evaluate no text.
    "pretrained": "https://host/resnet50-0676ba61.pth?download=true",
    "downsample": "conv-1x1",
    "self_attention": "flash_attention_2",
}


@pytest.fixture
def list_unsafe_data(run_rule, tmp_path):
    """`judge(data)`: severities and messages of unsafe-data for an archive of torch.save."""

    def list_unsafe_data(data):
        torch.save(data, tmp_path / "archive.pt")
        return [(finding.severity, finding.message) for finding in run_rule("unsafe-data", tmp_path / "archive.pt")]

    return list_unsafe_data


@pytest.mark.parametrize("key", sorted(evaluated_texts.KEYS))
def test_unsafe_data_finds_code_that_fairseq_evaluates(list_unsafe_data, key):
    """Code is reported at each key whose text fairseq, or a library with a copy of its models, passes to `eval`."""
    ((severity, message),) = list_unsafe_data({"cfg": {key: CODE}, "model": {"w": torch.ones(2)}})
    assert severity is Severity.ERROR
    assert message.startswith(
        f"['cfg']['{key}'] has code other than numbers, strings, lists and dicts; fairseq evaluates the text"
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            CODE,
            "f'{exit()}'",
            "[x for x in (1,)]",
            "(9).__class__",
            "[*range(10**9)]",
            "{**a()}",
            "2**9**9",
            "(x := [])",
        ),
        *(
            "[0] * 10001",
            "'a' * 99999 * 99999",
            "[[0] * 200] * 200 * 200",
            "-(-99999) * [0]",
            "[0] + [1] * (200 * 200)",
        ),
        *("[1 2]", "[" + "1," * 9999 + "]", "(" * 500, "'" + "\u0315\u0300" * 100 + "'", "[0] \\\n and exit()"),
    ],
)
def test_unsafe_data_finds_texts_other_than_small_literals(list_unsafe_data, text):
    """Calls, comprehensions, powers, long values and unparsable texts are reported."""
    ((severity, message),) = list_unsafe_data({"cfg": {"conv_feature_layers": text}})
    assert severity is Severity.ERROR
    assert message.partition(" (archive")[0].endswith("fairseq evaluates the text as Python code")


@pytest.mark.parametrize(("key", "text"), ORDINARY_TEXTS.items(), ids=ORDINARY_TEXTS)
def test_unsafe_data_passes_ordinary_configurations(list_unsafe_data, key, text):
    """Defaults of fairseq and texts of other libraries at the same keys pass, also in a Namespace."""
    assert (
        list_unsafe_data({"cfg": {key: text, "x": 1, "y": 2}, "args": Namespace(**{key: text}), "pair": [key, text]})
        == []
    )
    assert (
        list_unsafe_data(
            {key: np.str_(text), "n": {key: 12}, "m": {key: None}, "l": {key: [1, 2]}, "i": {key: np.int64(3)}}
        )
        == []
    )


@pytest.mark.parametrize("text", [text for text in ORDINARY_TEXTS.values() if text[0] in "[('{"])
def test_passed_literals_need_no_names_or_builtins(text):
    """Python evaluates each passed text without builtins, and the text contains no name."""
    assert evaluated_texts.check_text("x", "conv_feature_layers", text) is None
    assert eval(text, {"__builtins__": {}}) is not None  # noqa: S307
    assert not any(isinstance(node, ast.Name) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize(
    "cfg",
    [
        Namespace(conv_feature_layers=CODE),
        OrderedDict(conv_feature_layers=CODE),
        [("conv_feature_layers", CODE)],
        [{"conv_feature_layers": 0, CODE: 0}],
        {"conv_feature_layers": UserString(CODE)},
        {np.str_("conv_feature_layers"): np.str_(CODE)},
        {"conv_feature_layers": CODE.encode()},
        {"conv_feature_layers": bytearray(CODE.encode())},
        {"conv_feature_layers": np.frombuffer(CODE.encode(), np.uint8).copy()},
        {"conv_feature_layers": array("b", CODE.encode())},
    ],
    ids=["namespace", "ordered", "pairs", "keys", "user", "numpy", "bytes", "bytearray", "ndarray", "array"],
)
def test_unsafe_data_finds_code_in_objects_used_as_a_configuration(list_unsafe_data, cfg):
    """`__dict__.update` takes pairs, and `eval` takes bytes and arrays."""
    findings = list_unsafe_data({"cfg": cfg})
    assert any(severity is Severity.ERROR and "conv_feature_layers" in message for severity, message in findings)


def test_unsafe_data_warns_of_an_unparsable_text_at_a_common_key(list_unsafe_data):
    """A newer Python may parse the text, and in most checkpoints no library evaluates the text."""
    ((severity, message),) = list_unsafe_data({"cfg": {"pretrained": "best model (v2).pt"}})
    assert severity is Severity.WARNING
    assert "['cfg']['pretrained'] is not an expression that statecli can parse" in message


# Algorithms of Composer.

ORDINARY_ALGORITHMS = [
    "BlurPool(replace_convs=True,replace_maxpools=True,blur_first=True,min_channels=16)",
    "GatedLinearUnits(act_fn=act_fn,gated_layer_bias=False,non_gated_layer_bias=False)",
    "LowPrecisionLayerNorm(apply_at=Event.AFTER_LOAD)",
    "StochasticDepth(target_layer_name='ResNetBottleneck',drop_rate=0.2,drop_warmup=Time(0.0, TimeUnit.DURATION))",
    "NoOpModel()",
    "<my.Algorithm object at 0x7f64>",
]


@pytest.mark.parametrize(
    "text",
    [
        "BlurPool() if open('PROOF', 'w') else None",
        "BlurPool(x=open('PROOF', 'w'))",
        "BlurPool(x=Time(open('PROOF', 'w')))",
        "BlurPool(x=[0 for _ in Time()])",
        "BlurPool(x=[0] * 99999)",
        "BlurPool(x=f'{exit()}')",
        "BlurPool(*exit())",
        "BlurPool(x=Event.mro())",
        "BlurPool().__class__()",
        "BlurPool(",
        "__loader__.load_module('os')",
        UserString("BlurPool(exit())"),
        ValueError("BlurPool(exit())"),
    ],
)
def test_unsafe_data_finds_code_that_composer_evaluates(list_unsafe_data, text):
    """Composer evaluates the text of an algorithm, and formats any object as text."""
    for pair in (("BlurPool", {"repr": text}), ["BlurPool", OrderedDict(repr=text)]):
        ((severity, message),) = list_unsafe_data({"state": {"model": {}, "algorithms": [pair]}, "rng": []})
        assert severity is Severity.ERROR
        assert message.startswith("['state']['algorithms']…['repr'] ")


def test_unsafe_data_passes_the_algorithms_of_composer(list_unsafe_data):
    """`repr` of algorithms of Composer, and of an algorithm without its own `repr`."""
    algorithms = [(text.partition("(")[0], {"repr": text}) for text in ORDINARY_ALGORITHMS]
    assert (
        list_unsafe_data({"state": {"model": {}, "algorithms": [*algorithms, ("X", {"repr": None}), ("Y", {})]}}) == []
    )


# The model and the tokenizer of transformers in a checkpoint of Composer.

TOKENIZER = {
    "tokenizer_config.json": {"file_extension": ".json", "content": {"tokenizer_class": "PreTrainedTokenizerFast"}},
    "vocab.txt": {"file_extension": ".txt", "content": ["a", "b"]},
    "special_tokens_map": {"file_extension": ".json", "content": {}},
}
BERT = "transformers.models.bert.modeling_bert.BertModel"


def build_composer(files=(), name=BERT, **entries):
    """A checkpoint of `HuggingFaceModel`, with more files, another class or more entries of its configuration."""
    config = {"file_extension": ".json", "content": {"model_type": "bert", **entries}, "class": name}
    huggingface = {"model": {"config": config}, "tokenizer": {**TOKENIZER, **dict(files)}}
    return {"state": {"model": {"w": torch.ones(2)}, "integrations": {"huggingface": huggingface}}}


@pytest.mark.parametrize("name", ["/home/me/.bashrc", "../x.json", "a/b.json", "..\\x.json", "C:x.json", "..", "\0"])
def test_unsafe_data_finds_files_that_composer_writes_outside(list_unsafe_data, name):
    """Composer joins the name to a folder, and so writes to any path."""
    ((severity, message),) = list_unsafe_data(build_composer({name: {"file_extension": ".json", "content": {}}}))
    assert severity is Severity.ERROR
    assert "which is not a plain file name; Composer writes to this path" in message


@pytest.mark.parametrize("name", [("a", "b"), b"x.json", Path("../x.json")], ids=["tuple", "bytes", "path"])
def test_unsafe_data_finds_file_names_that_are_not_texts(list_unsafe_data, name):
    """Composer joins any value to a folder; statecli checks texts alone."""
    ((severity, message),) = list_unsafe_data(build_composer({name: {"file_extension": ".json", "content": {}}}))
    assert severity is Severity.ERROR
    assert "['tokenizer']" in message


@pytest.mark.parametrize("name", ["tokenization_x.py", "tokenization_x"])
def test_unsafe_data_warns_of_python_files_that_composer_writes(list_unsafe_data, name):
    """Composer saves the code of a user-defined tokenizer as a Python file."""
    ((severity, message),) = list_unsafe_data(build_composer({name: {"file_extension": ".py", "content": "print()"}}))
    assert severity is Severity.WARNING
    assert f"has the Python file {name!r}" in message


@pytest.mark.parametrize(
    ("name", "severity"),
    [("os.system", Severity.ERROR), ("my_models.Net", Severity.WARNING), ("transformers.os.system", Severity.WARNING)],
)
def test_unsafe_data_finds_a_class_that_composer_calls(list_unsafe_data, name, severity):
    """Composer imports and calls the class that the checkpoint names for the model."""
    ((actual_severity, message),) = list_unsafe_data(build_composer(name=name))
    assert actual_severity is severity
    assert "which Composer imports and calls" in message


def test_unsafe_data_finds_a_configuration_that_trusts_remote_code(list_unsafe_data):
    """Composer gives the entries to `AutoConfig.from_pretrained`, with the repository at `_name_or_path`."""
    ((severity, message),) = list_unsafe_data(build_composer(trust_remote_code=True, _name_or_path="author/repository"))
    assert severity is Severity.ERROR
    assert "['trust_remote_code'] is set, so transformers runs Python files" in message


@pytest.mark.parametrize("name", [BERT, "transformers.BertModel", "peft.peft_model.PeftModelForCausalLM"])
def test_unsafe_data_passes_the_tokenizer_of_composer(list_unsafe_data, name):
    """Composer saves the files of a tokenizer and the class of a model."""
    assert list_unsafe_data(build_composer(name=name, trust_remote_code=False)) == []
