"""Facts about every proof that runs only on request: its output, and what it leaves unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import statecli
from statecli.commands.verify.proofs import compile as compiling
from statecli.commands.verify.result import DEFAULT_PROOFS, Name

from . import mixes
from .proving import expect_pass, map_rules, prove_real, run_proof, write_class

OPTIONAL = [name for name in Name if name not in DEFAULT_PROOFS]
COUNTER = "self.fc, self.n = nn.Linear(3, 3), 0\n---\ndef forward(self, x):\n    self.n += 1\n    return {}"
PLAIN_TENSOR = (
    "self.fc, self.t = nn.Linear(3, 3), torch.randn(3)\n---\ndef forward(self, x):\n    return self.fc(x) + self.t"
)
UNSAVED = 'self.register_buffer("t", torch.arange(3.0), persistent=False)'
TENSOR_LINE = "error[unregistered-tensor]: t: is a plain attribute, not registered (float32 [3]) [net.py:6]"
#: The class, and parts of the output for each proof.
OUTPUTS = {
    Name.MATERIALIZE: (
        UNSAVED,
        ["error[lost-by-materializing]: t: uninitialized after to_empty() and load_state_dict()", "net.py:6"],
    ),
    Name.EXPORT: (
        PLAIN_TENSOR,
        [TENSOR_LINE, "read at net.py:8: load_state_dict() after the export does not change the exported program"],
    ),
    Name.COMPILE: (
        COUNTER.format("self.fc(x) * self.n"),
        [
            "error[changing-attribute]: n: torch.compile compiles the model again for each new value, read at",
            'self.register_buffer("n", torch.tensor(0))',
        ],
    ),
    Name.SHARD: (
        PLAIN_TENSOR,
        [
            TENSOR_LINE,
            "left out by fully_shard() and DistributedDataParallel: the constructor sets different values on each rank",
        ],
    ),
    Name.RESUME: (
        COUNTER.format("self.fc(x) * 0.9 ** self.n"),
        [
            "error[lost-by-resuming]: n: 2 when saved, 0 in a new instance after the load",
            'self.register_buffer("n", torch.tensor(...))',
            "the output of step 3 differs [net.py:8]\n",
            "with AdamW",
        ],
    ),
}


def test_other_proofs_run_only_on_request():
    """Each of these proofs can fail for a class that is harmless in most programs, so the proof is off by default."""
    assert set(OUTPUTS) == set(OPTIONAL)
    assert [check.check for check in statecli.verify(nn.Linear(2, 2)).checks] == list(DEFAULT_PROOFS)


@pytest.mark.parametrize("name", OPTIONAL)
def test_command_line_names_the_lines(statecli, in_tmp_path, name):
    """The finding has its source lines, its consequence and its fix, and the exit status is 1."""
    body, texts = OUTPUTS[name]
    write_class(body)
    inputs = () if name in (Name.MATERIALIZE, Name.SHARD) else ("--input", "2x3")
    result = statecli("verify", "net.py:Net", *inputs, "--check", name.value)
    assert result.code == 1
    assert [text for text in texts if text not in result.out] == []


class Counting(nn.Linear):
    """A model with a counter, a plain tensor and a buffer that forward updates in train mode."""

    def __init__(self):
        super().__init__(2, 2)
        self.n, self.t = 5, [torch.ones(2)]
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        self.n += 1
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x) * self.n + self.t[0]


@pytest.mark.parametrize("name", OPTIONAL)
def test_live_model_is_unchanged(name):
    """A proof changes only copies, and restores the settings of the compiler."""
    model, limit = Counting(), getattr(torch._dynamo.config, compiling._LIMIT_SETTING)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    attributes = dict(vars(model))
    (check,) = statecli.verify(model, inputs="2x2", checks=[name.value]).checks
    assert check.verdict.value in ("failed", "inconclusive")
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert model.t[0].tolist() == [1, 1]
    assert vars(model) == attributes
    assert type(model.weight) is nn.Parameter
    assert getattr(torch._dynamo.config, compiling._LIMIT_SETTING) == limit


@pytest.mark.parametrize("name", [Name.EXPORT, Name.COMPILE, Name.RESUME])
def test_without_inputs_the_proof_is_skipped(name, in_tmp_path):
    """The reason has the option for an input."""
    check = run_proof(name, f"{mixes.SAMPLES}/net.py:Net")
    assert check.verdict.value == "skipped"
    assert "--input" in check.reason


@pytest.mark.parametrize("name", [Name.MATERIALIZE, Name.SHARD])
def test_model_without_shapes_or_values_is_not_tested(name):
    """torch refuses a parameter without a shape; a model on meta has no values, and the reason has the option."""
    (check,) = statecli.verify(nn.LazyLinear(2), checks=[name.value]).checks
    assert check.verdict.value == "inconclusive"
    check = run_proof(name, f"{mixes.SAMPLES}/net.py:Net", init_device="meta")
    assert check.verdict.value == "skipped"
    assert "--init-device cpu" in check.reason


REAL = {
    Name.COMPILE: ("BertForMaskedLM", "BatchNorm2d", "EmbeddingBag", "old weight_norm"),
    Name.SHARD: (
        *("BertForMaskedLM", "LlamaForCausalLM", "GPT2LMHeadModel", "SwinModel", "Dinov2Model", "MambaForCausalLM"),
        *("LSTM", "weight_norm", "old weight_norm", "MultiheadAttention", "sparse Embedding", "parametrized LSTM"),
    ),
    Name.RESUME: (
        *("BertForMaskedLM", "LlamaForCausalLM", "SwinModel", "BartForConditionalGeneration"),
        *("BatchNorm2d", "spectral_norm", "AveragedModel", "lazy", "parametrized LSTM"),
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_classes_pass(name):
    """A sample of the classes on which the proof was measured passes."""
    expect_pass(name, *REAL[name])


def test_fully_shard_refuses_the_scalar_parameter_of_clip():
    """`logit_scale` has no dimension to shard."""
    assert map_rules(prove_real(Name.SHARD, "CLIPModel")["CLIPModel"]) == {"logit_scale": "not-shardable"}
