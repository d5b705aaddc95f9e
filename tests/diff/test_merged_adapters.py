"""LoRA adapters next to their base, and `--adapter`: a checkpoint is the base with an adapter merged in.

peft writes and merges the files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from statecli.commands.diff.request import Request
from statecli.commands.diff.result import TransformationKind
from statecli.commands.diff.run import compare_targets
from statecli.commands.diff.transformations import views
from statecli.targets.load import read_checkpoint
from statecli.values.merged_update import MergeTask

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "num_attention_heads": 4}
Q_AND_V = ("q_proj", "v_proj")


def build_llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **SIZES, **options)
    return transformers.LlamaForCausalLM(config)


def build_gpt2() -> Any:
    """Return a model of Conv1D layers with transposed weights, including a square weight."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))


@pytest.fixture
def adapt(tmp_path):
    """Write a base and an adapter with random updates, and return the model with the adapter."""

    def write(model: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        torch.manual_seed(0)
        model = model.to(dtype)
        model.save_pretrained(tmp_path / "base")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name or (parameter.requires_grad and name.endswith("bias")):
                torch.nn.init.normal_(parameter, std=0.02)
        adapted.save_pretrained(tmp_path / "adapter")
        return adapted

    return write


@pytest.fixture
def merge(tmp_path, adapt):
    """Write a base, an adapter with random updates, and the merged model."""

    def write(model: Any, **options: Any) -> tuple[Path, Path, Path]:
        adapt(model, **options).merge_and_unload().save_pretrained(tmp_path / "merged")
        return tmp_path / "base", tmp_path / "merged", tmp_path / "adapter"

    return write


def compare_with_adapter(base: Path, merged: Path, adapter: Path, **options: Any):
    return compare_targets(Request(str(base), str(merged), adapter=str(adapter), jobs=1, **options))


def edit_weights(folder: Path, change) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def map_merged(result) -> dict[str, Any]:
    transformations = {change.fqn: change.transformation for change in result.changes}
    return {
        name: transformation
        for name, transformation in transformations.items()
        if transformation and transformation.kind is TransformationKind.MERGED
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rslora", [False, True])
def test_a_merge_is_recognised(merge, dtype, rslora):
    """Each weight is the original weight plus the update, up to the rounding of its dtype."""
    paths = merge(build_llama(), dtype=dtype, target_modules=list(Q_AND_V), use_rslora=rslora)
    result = compare_with_adapter(*paths)
    transformations = map_merged(result)
    assert len(transformations) == 4
    assert {
        (transformation.exceptions, transformation.rank, transformation.factor)
        for transformation in transformations.values()
    } == {(0, 4, 4.0 if rslora else 2.0)}
    assert (result.findings, result.broken) == ((), ())
    before, after = load_file(paths[0] / "model.safetensors"), load_file(paths[1] / "model.safetensors")
    factors = load_file(paths[2] / "adapter_model.safetensors")
    for name, transformation in transformations.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        a, b = factors[f"{stem}A.weight"].double(), factors[f"{stem}B.weight"].double()
        error = (after[name].double() - before[name].double() - transformation.factor * (b @ a)).abs().max().item()
        assert transformation.max_abs == pytest.approx(error, rel=1e-6)


def test_weights_of_conv1d_are_transposed(merge):
    result = compare_with_adapter(*merge(build_gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
    assert len(map_merged(result)) == 6
    assert (result.findings, result.broken) == ((), ())


def test_patterns_embeddings_and_saved_modules_are_merged(merge):
    """The configuration may give a layer its own rank and alpha; an embedding has its factors transposed."""
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    targets = [*Q_AND_V, "embed_tokens"]
    result = compare_with_adapter(
        *merge(build_llama(), target_modules=targets, modules_to_save=["lm_head"], **patterns)
    )
    transformations = map_merged(result)
    assert (transformations["model.layers.1.self_attn.q_proj.weight"].rank, len(transformations)) == (2, 6)
    assert transformations["model.layers.1.self_attn.q_proj.weight"].factor == 4
    assert transformations["model.layers.1.self_attn.v_proj.weight"].factor == 0.75
    assert transformations["model.embed_tokens.weight"].factor == 2
    assert transformations["lm_head.weight"].rank is None
    assert (result.findings, result.broken) == ((), ())


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_trained_biases_are_part_of_a_merge(merge, bias):
    """peft stores the biases of adapted layers as `base_layer.bias`; a wrong bias is named."""
    paths = merge(build_llama(attention_bias=True), target_modules=list(Q_AND_V), bias=bias)
    name = "model.layers.1.self_attn.v_proj.bias"
    stored = load_file(paths[2] / "adapter_model.safetensors")
    assert f"base_model.model.{name.replace('.bias', '.base_layer.bias')}" in stored
    result = compare_with_adapter(*paths)
    assert len(map_merged(result)) == (12 if bias == "all" else 8)
    assert (result.findings, result.broken) == ((), ())
    edit_weights(paths[1], lambda tensors: tensors[name].__setitem__(3, 9.0))
    (finding,) = compare_with_adapter(*paths).findings
    assert (finding.rule, finding.fqn) == ("not-merged", name)


def test_the_factor_is_found_without_a_configuration(merge):
    base, merged, adapter = merge(build_llama(), target_modules=list(Q_AND_V))
    (adapter / "adapter_config.json").unlink()
    result = compare_with_adapter(base, merged, adapter)
    assert {transformation.factor for transformation in map_merged(result).values()} == {2.0}
    assert result.findings == ()


def _change_element(tensors, name: str) -> None:
    tensors[name][3, 5] += 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_is_found(merge, dtype):
    base, merged, adapter = merge(build_llama(), dtype=dtype, target_modules=list(Q_AND_V))
    name = "model.layers.1.self_attn.q_proj.weight"
    edit_weights(merged, lambda tensors: _change_element(tensors, name))
    result = compare_with_adapter(base, merged, adapter)
    assert map_merged(result)[name].exceptions == 1
    (finding,) = result.findings
    assert (finding.rule, finding.fqn) == ("not-merged", name)
    assert "1 of 1,024 elements differs by more than rounding from before + 2 × B·A" in finding.message


def test_a_weight_without_its_update_is_found(merge):
    """The weight is identical, which is not a finding in any other comparison."""
    base, merged, adapter = merge(build_llama(), target_modules=list(Q_AND_V))
    name = "model.layers.1.self_attn.v_proj.weight"
    original = load_file(base / "model.safetensors")[name]
    edit_weights(merged, lambda tensors: tensors.update({name: original}))
    (finding,) = compare_with_adapter(base, merged, adapter).findings
    assert finding.message == f"{name}: is unchanged: the update of the adapter is not merged"


def test_a_weight_outside_of_the_adapter_is_found(merge):
    base, merged, adapter = merge(build_llama(), target_modules=["q_proj"])
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_weights(merged, lambda tensors: _change_element(tensors, name))
    (finding,) = compare_with_adapter(base, merged, adapter).findings
    assert finding.fqn == name
    assert "the adapter does not change this tensor" in finding.message


def test_wrong_scale_is_named(merge):
    """The update was merged with alpha / rank 1 instead of 2."""
    base, merged, adapter = merge(build_llama(), target_modules=["q_proj"])
    before = load_file(base / "model.safetensors")

    def halve(tensors):
        for name, old in before.items():
            tensors[name] = old + (tensors[name] - old) / 2

    edit_weights(merged, halve)
    findings = compare_with_adapter(base, merged, adapter).findings
    assert len(findings) == 2
    assert all(finding.message.endswith("; 1 × B·A fits") for finding in findings)


def test_an_untrained_adapter_changes_nothing(merge):
    """B is zero: the merged model is the base."""
    base, _, adapter = merge(build_llama(), target_modules=["q_proj"])
    edit_weights(adapter, lambda tensors: [tensor.zero_() for name, tensor in tensors.items() if "lora_B" in name])
    result = compare_with_adapter(base, base, adapter)
    assert (result.findings, map_merged(result)) == ((), {})
    (adapter / "adapter_config.json").unlink()
    assert compare_with_adapter(base, base, adapter).findings == ()


def test_dora_cannot_be_checked(merge):
    """The norms of DoRA change the weights in a different way, so the check is inconclusive."""
    result = compare_with_adapter(*merge(build_llama(), target_modules=["q_proj"], use_dora=True))
    assert result.findings == ()
    assert len(result.broken) == 2
    assert all("only plain LoRA" in item.message for item in result.broken)


def test_nan_in_an_adapter_is_inconclusive_and_inf_in_a_weight_fails(merge):
    base, merged, adapter = merge(build_llama(), target_modules=["q_proj"])
    edit_weights(adapter, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))
    result = compare_with_adapter(base, merged, adapter)
    assert [item.message.endswith("a value is NaN or infinite") for item in result.broken] == [True]
    edit_weights(merged, lambda tensors: tensors["model.layers.1.self_attn.q_proj.weight"].fill_(float("inf")))
    assert [finding.rule for finding in compare_with_adapter(base, merged, adapter).findings] == ["not-merged"]


def test_command_checks_the_adapter(merge, statecli):
    base, merged, adapter = map(str, merge(build_llama(), target_modules=list(Q_AND_V)))
    result = statecli("diff", base, merged, "--adapter", adapter)
    assert result.code == 0
    assert "q_proj, v_proj (4 weights): = before + 2 × B·A (r 4), within " in result.out
    assert statecli("diff", base, base, "--adapter", adapter).code == 1
    wrong_result = statecli("diff", base, merged, "--adapter", base)
    assert (wrong_result.code, wrong_result.err) == (
        2,
        f"statecli: {base}: contains no weights of a LoRA adapter (lora_A, lora_B)\n",
    )
    assert statecli("diff", base, merged, "--adapter", adapter, "--metadata-only").code == 2
    assert statecli("diff", base, merged, "--adapter", adapter, "-i", "*q_proj*").code == 0


# --- an adapter compared with its base -------------------------------------------------------------------------------


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_measured_against_its_base(merge, statecli, rslora):
    """The merged model gives the expected result."""
    base, merged, adapter = merge(build_llama(), target_modules=list(Q_AND_V), use_rslora=rslora)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, merged))
    result = compare_targets(Request(str(base), str(adapter), jobs=1))
    transformations = [change.transformation for change in result.changes if change.transformation is not None]
    assert {transformation.kind for transformation in transformations} == {TransformationKind.ADAPTER}
    for transformation in transformations:
        name, factor = transformation.sources
        assert factor.endswith(".lora_A.weight")
        assert (transformation.rank, transformation.factor) == (4, 4.0 if rslora else 2.0)
        expected = (after[name] - before[name]).norm() / before[name].norm()
        assert transformation.relative_l2 == pytest.approx(expected.item(), 1e-3)
    assert len(transformations) == sum(not torch.equal(after[name], before[name]) for name in before) == 4
    scale = ", scale 4" if rslora else ""
    lines = statecli("diff", base, adapter).out.splitlines()
    assert any(line.startswith(f"LoRA on q_proj, v_proj (4 weights): r 4, alpha 8{scale}, ‖ΔW‖") for line in lines)

    nan_name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    edit_weights(adapter, lambda tensors: tensors[nan_name].view(-1).__setitem__(3, math.nan))
    lines = statecli("diff", base, adapter).out.splitlines()
    assert any(line.startswith("LoRA on q_proj, v_proj (4 weights): r 4, alpha ") for line in lines)
    assert any(line.startswith(f"{nan_name}: has no norm, NaN 0 → 1") for line in lines)
    assert next(line.split()[2] for line in lines if line.startswith(("added", "removed"))) == nan_name
    assert "other tensors of the base" in "\n".join(lines)


def test_an_adapter_with_saved_modules_hides_the_rest_of_the_base(adapt, tmp_path, statecli):
    """Each rank has the alpha of the configuration; a tensor that the adapter replaces keeps its row."""
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 8}, "modules_to_save": ["lm_head"]}
    adapted = adapt(build_llama(), target_modules=list(Q_AND_V), use_rslora=True, **patterns)
    lines = statecli("diff", tmp_path / "base", tmp_path / "adapter").out.splitlines()
    assert any(line.startswith("LoRA on q_proj, v_proj (3 weights): r 4, alpha 8, scale 4, ") for line in lines)
    assert any(line.startswith("LoRA on q_proj (1 weight): r 8, alpha 8, scale 2.828, ") for line in lines)
    assert "16 other tensors of the base: not in the adapter, which contains only updates and replaced tensors" in lines
    table = statecli("diff", tmp_path / "base", tmp_path / "adapter", "-f", "table").out
    assert "embed_tokens" not in table
    assert "M base_model.model.lm_head.weight" in table

    whole_state = {f"base_model.model.{name}": tensor for name, tensor in adapted.base_model.model.state_dict().items()}
    del whole_state["base_model.model.model.norm.weight"]
    save_file({name: tensor.clone() for name, tensor in whole_state.items()}, tmp_path / "whole.safetensors")
    table = statecli("diff", tmp_path / "base", tmp_path / "whole.safetensors", "-f", "table").out
    assert "D model.norm.weight" in table


def test_the_factor_of_large_values_is_found(tmp_path):
    """The square of the product of update and change is beyond float64."""
    torch.manual_seed(0)
    left, right = torch.randn(6, 2).double() * 1e75, torch.randn(2, 8).double() * 1e75
    before = torch.randn(6, 8).double() * 1e150
    torch.save({"before": before, "after": before + 3 * left @ right, "left": left, "right": right}, tmp_path / "a.pt")
    rows = read_checkpoint(str(tmp_path / "a.pt")).tensors
    result = MergeTask("w", *(views.locate(row.data, row.fqn) for row in rows)).compute()
    assert result is not None
    assert (result.factor, result.exceptions) == (3.0, 0)
