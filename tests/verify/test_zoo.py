"""All proofs of real classes. Each failure was examined and is a fault of the class; torch confirms the failure where
possible.
"""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors
from torch import nn
from torch.utils._pytree import tree_leaves

from statecli.commands.verify.proofs import move
from statecli.commands.verify.result import Cell, Check, Name, Verdict, Verification
from statecli.commands.verify.run import Request, run

from .proving import find_cell, prove_source

pytest.importorskip("transformers")

from . import real

VERIFY_FOLDER = Path(__file__).parent


@functools.cache
def prove_model(name: str) -> Verification:
    """Run all proofs of a class, with a fake CUDA device for moves."""
    inputs = real.TORCH[name][1] if name in real.TORCH else real.INPUTS.get(name, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(Request(f"{VERIFY_FOLDER / 'real.py'}:make({name!r})", input=inputs, device="fake-cuda"))


def find_check(name: str, proof: Name) -> Check:
    return next(check for check in prove_model(name).checks if check.check is proof)


def list_cells(name: str, proof: Name, fqn: str) -> list[Cell]:
    return [column.cells[fqn] for column in find_check(name, proof).columns if fqn in column.cells]


def list_findings(name: str) -> set[tuple[str, str | None]]:
    return {(finding.rule, finding.fqn) for finding in prove_model(name).findings}


def list_shared_keys(name: str) -> set[tuple[str, str]]:
    """Return the state_dict entries that safetensors refuses because they share memory with an earlier entry."""
    seen, later = set(), set()
    for key, tensor in real.make(name).state_dict().items():
        if nn.parameter.is_lazy(tensor):
            continue
        if tensor.numel() and tensor.data_ptr() in seen:
            later.add(key)
        seen.add(tensor.data_ptr())
    return {("shared-in-safetensors", key) for key in later}


def compute_plain_gradients(name: str) -> dict[str, torch.Tensor | None]:
    """Return the gradients of a plain torch backward, for a loss that weights each output at random."""
    torch.manual_seed(0)
    module = real.make(name).train()
    shapes = [text.rpartition("=")[2] for text in real.INPUTS[name]]
    outputs = tree_leaves(module(*(torch.randn(*map(int, shape.split("x"))) for shape in shapes)).to_tuple())
    loss = sum((output * torch.randn_like(output)).sum() for output in outputs if output is not None)
    loss.backward()
    return {fqn: parameter.grad for fqn, parameter in module.named_parameters()}


PROJECTIONS = [f"transformer_module.input_projections[{n}].{what}" for n in (0, 1, 2) for what in ("weight", "bias")]
UNREGISTERED_RULES = ("left-behind", "keeps-dtype", "lost-by-saving", "not-in-optimizer", "device-mismatch")
DISCARDED_LAYER_NORM = {
    ("no-gradient", f"pixel_level_module.encoder.swin.layernorm.{what}") for what in ("weight", "bias")
}
#: Failures besides the tied weights that safetensors refuses; other classes have no failure.
EXPECTED_FAILURES: dict[str, set[tuple[str, str]]] = {
    "OneFormerModel": {(rule, fqn) for rule in UNREGISTERED_RULES for fqn in PROJECTIONS} | DISCARDED_LAYER_NORM,
    "VideoMAEModel": {(rule, "embeddings.position_embeddings") for rule in ("left-behind", "keeps-dtype")},
    "DetrModel": {("zero-gradient", "decoder.layers.0.self_attn.v_proj.weight")},
    "Dinov2Model": {("no-gradient", "embeddings.mask_token")},
    "DecisionTransformerModel": {("no-gradient", "encoder.wte.weight")},
    "orthogonal": {("not-in-safetensors", "parametrizations.weight.0.base")},
    "old weight_norm": {("non-leaf-attribute", "weight")},
    "old spectral_norm": {("non-leaf-attribute", "weight")},
    "parametrized LSTM": {("non-leaf-attribute", "_flat_weights[1]")},
    "pruned": {("non-leaf-attribute", "weight")},
    "LSTMCell": {("zero-gradient", "weight_hh")},
}
#: Inconclusive proofs: pickle refuses the modules.
INCONCLUSIVE_PROOFS = {"OneFormerModel": {Name.COPY}}
#: Skipped proofs, because the inputs that statecli chose do not reach every parameter.
SKIPPED_PROOFS = {"LongformerModel": {Name.STEP}, "XLNetModel": {Name.STEP}}


@pytest.mark.parametrize("name", [*real.CLASSES, *real.NESTED, *real.TORCH])
def test_real_class_has_exactly_the_expected_failures(name):
    """Every failure is in the table above or a tied weight of the state_dict; all other checks pass."""
    if name == "DataParallel" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")  # DataParallel takes tensors of the real device only
    assert list_findings(name) == list_shared_keys(name) | EXPECTED_FAILURES.get(name, set())
    unclear = {check.check for check in prove_model(name).checks if check.verdict is Verdict.INCONCLUSIVE}
    assert unclear == INCONCLUSIVE_PROOFS.get(name, set())
    skipped = [check for check in prove_model(name).checks if check.verdict is Verdict.SKIPPED]
    assert {check.check for check in skipped} == SKIPPED_PROOFS.get(name, set())
    assert all("inputs that statecli chose" in (check.reason or "") for check in skipped)


@pytest.mark.parametrize("name", ["LSTM", "lazy", "old weight_norm", "parametrized LSTM", "pruned", "Transformer"])
def test_plain_move_agrees_with_the_fake_gpu(name, monkeypatch):
    """A move to new memory through `nn.Module._apply` and a move with torch's fake tensors give the same result."""
    request = Request(
        f"{VERIFY_FOLDER / 'real.py'}:make({name!r})", (Name.MOVE,), "fake-cuda", input=real.TORCH[name][1]
    )
    plain = run(request).checks
    monkeypatch.setattr(move, "_move_plain_model", lambda subject: None)
    assert plain == run(request).checks


@pytest.mark.parametrize("name", ["old spectral_norm", "parametrized LSTM"])
def test_weight_computed_by_forward_cannot_be_copied(name):
    """The oracle: copy.deepcopy works only before a forward. The finding has the reason and the remedy."""
    module = real.make(name).eval()
    copy.deepcopy(module)
    module(*(torch.ones(*map(int, text.split("x"))) for text in real.TORCH[name][1]))
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(module)
    (finding,) = find_check(name, Name.COPY).findings
    assert finding.message.endswith("so after a forward copy.deepcopy of the model raises an error")
    assert "before copying" in finding.help


# --- classes of transformers ------------------------------------------------------------------------------------------


def test_oneformer_keeps_convolutions_in_a_plain_list():
    """The convolutions are not registered, and forward stops there; the message has the line that filled the list."""
    module = real.make("OneFormerModel")
    assert not set(PROJECTIONS) & {name for name, _ in module.named_parameters()}
    stopped = [finding for finding in find_check("OneFormerModel", Name.FORWARD).findings if finding.fqn in PROJECTIONS]
    assert {finding.fqn for finding in stopped} == set(PROJECTIONS)
    assert all("in convolution at" in finding.message for finding in stopped)
    assert all("assigned at" in finding.message and "modeling_oneformer.py" in finding.message for finding in stopped)


def test_table_copied_by_forward_is_harmless():
    """VideoMAE's positions are a plain tensor: no move reaches the positions, and forward casts them at each call."""
    (moved,) = list_cells("VideoMAEModel", Name.MOVE, "embeddings.position_embeddings")
    assert (moved.verdict, moved.after) == (Verdict.SKIPPED, "cpu")  # harmless, as forward ran
    (called,) = list_cells("VideoMAEModel", Name.FORWARD, "embeddings.position_embeddings")
    assert called.verdict is Verdict.PASSED
    assert "forward copies the tensor at each call" in called.reason


def test_weight_of_detr_gets_a_zero_gradient_from_torch():
    """DETR's queries start as zeros, so the first layer's values are only the bias; torch's backward agrees."""
    gradients = compute_plain_gradients("DetrModel")
    assert not gradients["decoder.layers.0.self_attn.v_proj.weight"].any()
    assert gradients["decoder.layers.0.self_attn.v_proj.bias"].any()


def test_mask_token_of_dinov2_gets_no_gradient_from_torch():
    """DINOv2 has a mask token and is called without a mask: in a plain backward, only this token has no gradient."""
    without = {fqn for fqn, gradient in compute_plain_gradients("Dinov2Model").items() if gradient is None}
    assert without == {"embeddings.mask_token"}


def test_layer_norm_with_a_discarded_result_is_reported_as_used():
    """OneFormer throws the result of its last layer norm away, unlike DINOv2, which does not use its mask token."""
    thrown_away = [
        finding for finding in find_check("OneFormerModel", Name.STEP).findings if finding.rule == "no-gradient"
    ]
    assert all(
        finding.message.endswith("used in forward, but no differentiable path leads to the output")
        for finding in thrown_away
    )
    (finding,) = find_check("Dinov2Model", Name.STEP).findings
    assert finding.message.endswith("not used in forward")


def test_tensor_cached_by_a_function_is_harmless():
    """functools.lru_cache keeps BEiT's index for all models: the index stays on the CPU, which CUDA accepts."""
    rows = [row.fqn for row in prove_model("BeitModel").state.tensors if "func_with_cache" in row.fqn]
    assert rows
    for fqn in rows:
        (moved,) = list_cells("BeitModel", Name.MOVE, fqn)
        assert (moved.verdict, moved.after) == (Verdict.SKIPPED, "cpu")
        assert "functools.lru_cache" in moved.reason
        (called,) = list_cells("BeitModel", Name.FORWARD, fqn)
        assert called.verdict is Verdict.PASSED


def test_tensor_cached_by_a_function_is_unchanged():
    """All models share BEiT's index: a proof that writes to the index would break the user's models."""
    from transformers.models.beit.modeling_beit import BeitRelativePositionBias as Bias

    window = (2, 2)
    prove_model("BeitModel")
    remembered = Bias.generate_relative_position_index(window)
    recomputed = Bias.generate_relative_position_index.__wrapped__(window)
    assert type(remembered) is torch.Tensor
    assert torch.equal(remembered, recomputed)


@pytest.mark.parametrize("name", ["ReformerModel", "SwitchTransformersForConditionalGeneration"])
def test_legacy_tensor_calls_pass_on_the_fake_gpu(name):
    """Reformer creates a tensor with `Tensor.new`; Switch names its experts f"expert_{index}" with an index on the
    device.
    """
    assert find_check(name, Name.FORWARD).verdict is Verdict.PASSED


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BartForConditionalGeneration"])
def test_safetensors_refuses_the_reported_ties(name):
    """The oracle: safetensors' `save` refuses the state_dict, and accepts the state_dict without the reported names."""
    state = real.make(name).state_dict()
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save(state)
    refused = {finding.fqn for finding in find_check(name, Name.SAVE).findings}
    assert safetensors.save({key: value for key, value in state.items() if key not in refused})


def test_parameter_unused_with_the_found_inputs_is_inconclusive():
    """Longformer's global attention needs a mask that its config does not describe, so the reason asks for inputs."""
    column = next(column for column in find_check("LongformerModel", Name.STEP).columns if column.name == "gradient")
    unclear = {fqn: cell for fqn, cell in column.cells.items() if cell.verdict is Verdict.INCONCLUSIVE}
    assert unclear
    assert all("global" in fqn for fqn in unclear)
    assert all("--input" in cell.reason for cell in unclear.values())


# --- classes of torch -------------------------------------------------------------------------------------------------


def test_weight_computed_by_a_hook_cannot_be_copied():
    """copy.deepcopy raises; all other proofs pass, because the hook computes the weight before each forward."""
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(real.make("pruned"))
    verdicts = {check.check: check.verdict for check in prove_model("pruned").checks}
    assert verdicts.pop(Name.COPY) is Verdict.FAILED
    assert set(verdicts.values()) == {Verdict.PASSED}


def test_lstm_cell_without_a_state_gets_a_zero_gradient():
    """`LSTMCell(x)` starts from zeros, so weight_hh has no effect; torch's backward agrees."""
    module = real.make("LSTMCell")
    sum(output.sum() for output in module(torch.randn(3, 4))).backward()
    assert not module.weight_hh.grad.any()


# --- metrics, graphs, images ------------------------------------------------------------------------------------------

METRICS = {
    "torchmetrics.classification:BinaryAUROC(thresholds=5)": ("4", "int64:4<2"),
    "torchmetrics:CatMetric()": ("4",),
    "torchmetrics:PearsonCorrCoef()": ("4", "4"),
}


@functools.cache
def prove_metric(target: str) -> Verification:
    return run(Request(target, input=METRICS[target], device="fake-cuda"))


@pytest.mark.parametrize("target", METRICS)
def test_states_of_a_metric_follow_the_move(target):
    """The states are plain attributes that the class's own `_apply` moves, and no state is reported."""
    pytest.importorskip("torchmetrics")
    result = prove_metric(target)
    assert not result.findings
    assert {check.verdict for check in result.checks} <= {Verdict.PASSED, Verdict.SKIPPED}
    assert next(check for check in result.checks if check.check is Name.MOVE).verdict is Verdict.PASSED


def test_own_half_may_keep_the_dtype():
    """torchmetrics' `half()` returns self: a registered table keeps its dtype and does not fail."""
    pytest.importorskip("torchmetrics")
    result = prove_metric("torchmetrics.classification:BinaryAUROC(thresholds=5)")
    cast = next(check for check in result.checks if check.check is Name.CAST)
    change = find_cell(cast, "casts", "thresholds")
    assert (change.verdict, change.after) == (Verdict.PASSED, "float64 → bfloat16")
    assert "the class's own .half() keeps the dtype" in change.reason


def test_cached_edges_of_a_graph_convolution_are_reported(tmp_path, monkeypatch):
    """With `cached=True`, torch_geometric keeps the edges of the first call on the CPU for the moved model."""
    pytest.importorskip("torch_geometric")
    monkeypatch.chdir(tmp_path)
    edges = "torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])"
    Path("graph.py").write_text(f"import torch\ndef make():\n    return torch.randn(6, 4), {edges}\n", "utf-8")
    for text, names in {"False": [], "True": ["_cached_edge_index[0]", "_cached_edge_index[1]"]}.items():
        target = f"torch_geometric.nn:GCNConv(4, 3, cached={text})"
        result = run(Request(target, checks=(Name.MOVE, Name.FORWARD), device="fake-cuda", inputs="graph.py:make"))
        assert [(finding.rule, finding.fqn) for finding in result.findings] == [
            (rule, name) for rule in ("left-behind", "device-mismatch") for name in names
        ]


def test_cache_per_device_is_not_reported():
    """timm's LeViT fills `attention_bias_cache['cpu']` in forward, and creates another entry for the new device."""
    try:
        import timm  # noqa: F401 - a build of torchvision for CUDA raises next to a torch for the CPU
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm does not import: {error}")
    target = "timm:create_model('levit_128s', pretrained=False)"
    result = run(Request(target, checks=(Name.MOVE, Name.FORWARD), device="fake-cuda", input=("1x3x224x224",)))
    assert any("attention_bias_cache['cpu']" in row.fqn for row in result.state.tensors)
    assert not result.findings


# --- small cases ------------------------------------------------------------------------------------------------------


def test_uninitialized_module_has_no_findings(in_tmp_path):
    """A lazy layer without inputs has no values: its parameters are neither saved nor copied, and no check fails."""
    for proof in (Name.MOVE, Name.SAVE, Name.COPY):
        result = prove_source(proof, "self.layer = nn.LazyLinear(2)")
        assert not result.findings
        assert result.verdict in (Verdict.PASSED, Verdict.SKIPPED)
    assert nn.LazyLinear(2).has_uninitialized_params()


def test_leaf_replaced_by_forward_is_not_reported(in_tmp_path):
    """The tensor requires grad and is not registered, but forward replaces the tensor without reading it."""
    init = "self.layer = nn.Linear(3, 3)\nself.last = torch.zeros(3, requires_grad=True)"
    forward = "def forward(self, x):\n    self.last = self.layer(x)\n    return self.last"
    result = prove_source(Name.STEP, f"{init}\n---\n{forward}", "2x3")
    assert not result.findings
    assert "forward replaces the tensor without reading it" in find_cell(result, "updated", "last").reason
