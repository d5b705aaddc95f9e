"""`--model auto` builds the class in config.json with transformers; results are checked against `from_pretrained`."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch

from statecli.live import config_guards

pytestmark = pytest.mark.usefixtures("in_tmp_path")

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}


def save_model(name: str = "BertModel", config: str = "BertConfig", **sizes: object) -> None:
    """Save a model of the class in the folder `m`."""
    settings = getattr(transformers, config)(**{**SIZES, **sizes})
    getattr(transformers, name)(settings).save_pretrained("m")


@pytest.fixture
def bert(tmp_path_factory, in_tmp_path) -> None:
    """Copy a BertModel, saved once, into the folder `m`."""
    folder = tmp_path_factory.getbasetemp() / "saved_bert"
    if not folder.exists():
        save_model()
        shutil.copytree("m", folder)
    shutil.copytree(folder, "m", dirs_exist_ok=True)


def change_config(**settings: object) -> None:
    """Change settings of the configuration."""
    path = Path("m/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def list_kinds(result) -> dict[str, tuple[str, str]]:
    """Kind and evidence of each tensor."""
    return {name: (row["kind"], row["evidence"]) for name, row in result.rows().items()}


CLASSES = [
    ("BertForSequenceClassification", "BertConfig", {}),
    ("BertForMaskedLM", "BertConfig", {}),
    ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
    ("MixtralForCausalLM", "MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 2}),
    ("ViTForImageClassification", "ViTConfig", {"image_size": 8, "patch_size": 4}),
    ("ResNetForImageClassification", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
]


@pytest.mark.parametrize(("name", "config", "sizes"), CLASSES, ids=[class_[0] for class_ in CLASSES])
def test_every_entry_has_the_kind_of_the_loaded_model(statecli, name, config, sizes):
    """Each entry has the kind of the loaded model, under the name that loading uses; no entry is missing."""
    save_model(name, config, **sizes)
    result = statecli("inspect", "m", "--model", "auto", "-f", "json")
    assert (result.code, result.json["findings"]) == (0, []), result.err
    model = getattr(transformers, name).from_pretrained("m")
    buffers = {name for name, _ in model.named_buffers()}
    for fqn, (kind, evidence) in list_kinds(result).items():
        assert evidence == "registered"
        assert kind == ("buffer" if fqn in buffers else "parameter")
    for words in (("auto", "m"), ("m", "auto")):
        assert statecli("diff", *words).code == 0
    assert statecli("audit", "m", "--model", "auto").code == 0


@pytest.mark.parametrize(
    ("name", "other", "rule", "renamed"),
    [
        ("BertModel", "BertForSequenceClassification", "missing-entry", "{} as bert.{}"),
        ("BertForSequenceClassification", "BertModel", "unexpected-entry", "bert.{} as {}"),
    ],
    ids=["base-into-head", "head-into-base"],
)
def test_head_and_base_model_are_paired_by_the_prefix(statecli, name, other, rule, renamed):
    """Three commands have the same findings, only about the head, and diff pairs tensors as `from_pretrained` does."""
    save_model(name)
    change_config(architectures=[other])
    commands = (("inspect", "m", "--model", "auto"), ("diff", "auto", "m"), ("audit", "m", "--model", "auto"))
    results = [statecli(*words, "-f", "json") for words in commands]
    assert [result.code for result in results] == [1, 1, 1]
    actual_results = [{(finding["rule"], finding["fqn"]) for finding in result.json["findings"]} for result in results]
    assert actual_results[0] == actual_results[1] == actual_results[2]
    assert actual_results[0] == {(rule, "classifier.weight"), (rule, "classifier.bias")}
    (note,) = results[0].json["notes"]
    assert note["message"].endswith(renamed.replace("{}", "embeddings.LayerNorm.bias"))
    assert results[1].json["summary"]["identical"] == 39
    assert "renamed-on-loading" in {note["name"] for note in results[1].json["notes"]}
    _, info = getattr(transformers, other).from_pretrained("m", output_loading_info=True)
    assert {name for _, name in actual_results[0]} == {*info["missing_keys"], *info["unexpected_keys"]}


def test_prefix_that_from_pretrained_adds_is_not_a_finding(statecli):
    """`from_pretrained` adds the prefix `model.`, which the base model lacks."""
    save_model("LlamaModel", "LlamaConfig", num_key_value_heads=2)
    change_config(architectures=["LlamaForCausalLM"])
    for words in (("inspect", "m", "--model", "auto"), ("diff", "auto", "m"), ("audit", "m", "--model", "auto")):
        result = statecli(*words, "-f", "json")
        assert {finding["fqn"] for finding in result.json["findings"]} == {"lm_head.weight"}


def test_a_configuration_without_architectures_is_of_the_base_model(bert, statecli):
    """`AutoModel` builds the class from the model_type."""
    change_config(architectures=None)
    assert statecli("inspect", "m", "--model", "auto").code == 0


def test_the_class_is_of_the_type_of_the_weights(statecli):
    """No cast is reported if the configuration says bfloat16."""
    save_model("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, dtype=torch.bfloat16)
    model = transformers.LlamaForCausalLM.from_pretrained("m").to(torch.bfloat16)
    model.save_pretrained("m")
    before = torch.get_default_dtype()
    result = statecli("audit", "m", "--model", "auto", "-f", "json")
    assert (result.code, result.json["findings"]) == (0, [])
    assert torch.get_default_dtype() is before


def test_a_shape_that_is_another_is_a_finding(statecli):
    """The configuration has 50 words, the weights have 48."""
    save_model("BertModel", vocab_size=48)
    change_config(vocab_size=50)
    for words in (("inspect", "m", "--model", "auto"), ("diff", "auto", "m"), ("audit", "m", "--model", "auto")):
        result = statecli(*words, "-f", "json")
        assert result.code == 1
        assert {finding["fqn"] for finding in result.json["findings"]} == {"embeddings.word_embeddings.weight"}


BERT_LINE = "for this model_type, write \"transformers:BertModel('m/config.json')\""
REFUSED = {
    "code of its own": (
        {"architectures": ["Mine"], "auto_map": {"AutoModel": "mine.Mine"}},
        "Mine is code of the checkpoint (auto_map), which --model auto does not run; name the class: file.py:Class",
    ),
    "unknown": (
        {"architectures": ["Mine"]},
        f"transformers {transformers.__version__} has no model class Mine; {BERT_LINE}",
    ),
    "no model": (
        {"architectures": ["pipeline"]},
        f"transformers {transformers.__version__} has no model class pipeline; {BERT_LINE}",
    ),
    "a call": (
        {"architectures": ["os.system"]},
        "architectures has 'os.system', which is not the name of a class, but --model auto needs a class name; "
        "name the class instead",
    ),
    "no list": (
        {"architectures": "BertModel"},
        "architectures does not name a class, but --model auto needs a class name; name the class instead",
    ),
    "none": (
        {"architectures": [], "model_type": "no such"},
        "architectures does not name a class, but --model auto needs a class name; name the class instead",
    ),
    "a number": (
        {"architectures": [3]},
        "architectures has 3, which is not the name of a class, but --model auto needs a class name; "
        "name the class instead",
    ),
    "another type": (
        {"model_type": "gpt2"},
        "model_type is 'gpt2', but BertModel needs 'bert'; for this model_type, write "
        "\"transformers:GPT2Model('m/config.json')\"",
    ),
    "endless": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers is 1,000,000,000, larger than in any model; correct the file",
    ),
    "endless inside": (
        {"text_config": {"depths": [10**9, 1]}},
        "depths is 1,000,000,001, larger than in any model; correct the file",
    ),
    "quantized": (
        {"quantization_config": {"quant_method": "gptq"}},
        "is quantized (gptq), so the file does not say which tensors the class has; name the class, "
        "as in file.py:Class",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_is_refused(bert, statecli, case):
    """The configuration is refused in one line, before any code of the folder runs, by every command."""
    settings, expected = REFUSED[case]
    change_config(**settings)
    Path("m/mine.py").write_text("raise SystemExit('run')\n")
    result = statecli("inspect", "m", "--model", "auto")
    assert (result.code, result.err) == (2, f"statecli: m/config.json: {expected}\n")
    if case == "code of its own":
        assert statecli("diff", "auto", "m").code == statecli("audit", "m", "--model", "auto").code == 2


@pytest.mark.parametrize(
    "settings",
    [{"hidden_size": 10**12}, {"hidden_size": -1}, {"hidden_size": "x"}, {"hidden_act": "os.system"}],
    ids=["huge", "negative", "text", "unknown-name"],
)
def test_config_that_the_class_refuses_is_a_one_line_error(bert, statecli, settings):
    """No memory is allocated for the model."""
    change_config(**settings)
    result = statecli("inspect", "m", "--model", "auto")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "building the model on meta raised" in result.err


def test_config_that_names_code_of_the_hub_opens_no_socket(bert, statecli, monkeypatch):
    """A configuration may name kernels of the hub, but no socket is opened."""
    change_config(
        attn_implementation="kernels-community/flash-attn", _attn_implementation="a/b", auto_map={"AutoModel": "x.Y"}
    )
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    assert statecli("inspect", "m", "--model", "auto").code == 0


@pytest.mark.parametrize(
    ("limit", "value", "text"),
    [
        ("MAX_REGISTERED", 20, "21 modules and parameters so far; the limit is 20, or 4 seconds"),
        ("MAX_SECONDS", 0, "64 modules and parameters so far; the limit is 30,000, or 0 seconds"),
    ],
)
def test_a_class_that_registers_without_end_is_stopped(bert, statecli, monkeypatch, limit, value, text):
    """The limits apply to any cause."""
    monkeypatch.setattr(config_guards, limit, value)
    result = statecli("inspect", "m", "--model", "auto")
    assert (result.code, result.err) == (2, f"statecli: m/config.json: the model is too large: {text}\n")


def test_named_pipe_as_config_json_is_an_error(bert, statecli):
    """The error says which type of file config.json is."""
    os.remove("m/config.json")
    os.mkfifo("m/config.json")
    result = statecli("inspect", "m", "--model", "auto")
    assert (result.code, result.err) == (2, "statecli: m: config.json is a named pipe, not a regular file\n")


def test_config_warnings_of_transformers_are_hidden(bert, statecli):
    """An end-of-text id beyond the vocabulary does not matter for the class; the log level is restored."""
    change_config(eos_token_id=10**6)
    before = transformers.logging.get_verbosity()
    result = statecli("inspect", "m", "--model", "auto")
    assert (result.code, result.err) == (0, "")
    assert transformers.logging.get_verbosity() == before


def test_auto_without_config_json_asks_for_a_class(bert, statecli):
    """An adapter does not have a config.json, so the error asks for the class of its base model."""
    shutil.move("m/config.json", "m/other.json")
    assert statecli("inspect", "m", "--model", "auto").err == (
        "statecli: m: --model auto needs a config.json next to the checkpoint; name the class instead\n"
    )
    Path("m/adapter_config.json").write_text("{}")
    assert "name the class of the adapter's base model" in statecli("inspect", "m", "--model", "auto").err
