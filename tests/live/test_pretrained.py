"""Check models of transformers against their own `save_pretrained`: differences that `from_pretrained` accepts pass."""

from __future__ import annotations

import runpy

import pytest
import torch
from safetensors.torch import load_file, save_file

from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FACTORIES = f"""
import transformers


def marian():
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 1)
    config = transformers.MarianConfig(
        vocab_size=64, d_model=32, encoder_ffn_dim=8, decoder_ffn_dim=8, pad_token_id=0,
        decoder_start_token_id=1, max_position_embeddings=16, **sizes,
    )
    return transformers.MarianMTModel(config)


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{SMALL}, num_key_value_heads=1, num_local_experts=2)
    )


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{SMALL}, num_key_value_heads=1))
"""
RULES = ("missing-entry", "unexpected-entry", "shape-mismatch")


@pytest.fixture
def save_model(tmp_path):
    """Save a model above with transformers' own function; return the file and the model's spec."""
    (tmp_path / "nets.py").write_text(FACTORIES)
    names = runpy.run_path(str(tmp_path / "nets.py"))

    def save(name):
        names[name]().save_pretrained(tmp_path / "saved")
        return tmp_path / "saved" / "model.safetensors", f"{tmp_path / 'nets.py'}:{name}"

    return save


def list_findings(path, model):
    """Return severity, rule and message of each finding about the file."""
    result = audit(Request((str(path),), select=RULES, model=model)).targets[-1]
    assert result.status.value == "audited", result.reason
    assert result.ran == RULES
    return [(finding.severity, finding.rule, finding.message) for finding in result.findings]


def remove_tensors(path, *names, **others):
    state = {name: tensor for name, tensor in load_file(path).items() if name not in names}
    assert len(state) == len(load_file(path)) - len(names)
    save_file(state | others, path)
    return path


def errors(findings):
    """Return the rule and the name of each error."""
    return [(rule, message.partition(":")[0]) for severity, rule, message in findings if severity is Severity.ERROR]


def test_missing_entry_that_the_class_recomputes_is_a_note(save_model):
    """Marian computes its position embeddings and does not save them; another missing entry is an error."""
    path, model = save_model("marian")
    ((severity, rule, message),) = list_findings(path, model)
    assert (severity, rule) == (Severity.NOTE, "missing-entry")
    assert "lacks model.encoder.embed_positions.weight, model.decoder.embed_positions.weight" in message
    assert "from_pretrained loads the checkpoint" in message
    name = "model.encoder.layers.0.fc1.weight"
    assert errors(list_findings(remove_tensors(path, name), model)) == [("missing-entry", name)]


@pytest.mark.skipif(int(transformers.__version__.partition(".")[0]) < 5, reason="needs transformers 5")
def test_entries_that_are_converted_on_load_are_one_note(save_model):
    """Mixtral's experts are saved separately under other names and loaded as a single tensor.

    An entry that no conversion uses is unexpected, and the experts that remain cannot form the whole tensor.
    """
    path, model = save_model("mixtral")
    assert any("block_sparse_moe.experts.0.w1" in name for name in load_file(path))
    ((severity, rule, message),) = list_findings(path, model)
    assert (severity, rule) == (Severity.NOTE, "missing-entry")
    assert "transformers converts these names" in message
    assert "statecli checked only that" in message
    new = "model.layers.0.block_sparse_moe.new.weight"
    assert errors(list_findings(remove_tensors(path, **{new: torch.zeros(2)}), model)) == [("unexpected-entry", new)]
    missing_fqn = "model.layers.1.block_sparse_moe.experts.0.w2.weight"
    assert [name for _, name in errors(list_findings(remove_tensors(path, new, missing_fqn), model))] == [
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.1.block_sparse_moe.experts.1.w2.weight",
    ]


def test_complete_checkpoint_has_no_finding(save_model):
    """The model has no findings and no notes."""
    assert list_findings(*save_model("llama")) == []


def test_keys_to_ignore_count_only_for_classes_of_transformers(tmp_path):
    """`load_state_dict` ignores these attributes of a class outside transformers."""
    source = "import torch\nimport transformers.modeling_utils\n\n\nclass Net(torch.nn.Linear):\n"
    (tmp_path / "net.py").write_text(
        source + "    _keys_to_ignore_on_save = _keys_to_ignore_on_load_missing = ['bias']\n"
    )
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    ((severity, rule, _),) = list_findings(tmp_path / "a.safetensors", f"{tmp_path / 'net.py'}:Net(2, 2)")
    assert (severity, rule) == (Severity.ERROR, "missing-entry")
