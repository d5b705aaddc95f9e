"""Each sample model fails exactly the proofs that it was written to fail, and its fixed twin passes all proofs."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from statecli.commands.verify.result import DEFAULT_PROOFS, Name, Verdict, Verification  # noqa: E402
from statecli.commands.verify.run import Request, run  # noqa: E402

SAMPLES = Path(__file__).parents[1] / "sample_models"
#: Files that write checkpoints and have no model.
FILES_WITHOUT_MODEL = {
    "make_checkpoints",
    "bad_checkpoints",
    "transformed_checkpoints",
    "training_checkpoints",
    "train",
}

#: Sample and class -> the input of its forward, and the failing proofs.
FAILING = {
    "anchors:Head": ("2x8x4x4", "move cast forward"),
    "batchnorm:Block": ("2x3x8x8", ""),
    "cached_mask:Causal": ("2x4x8", "move forward"),
    "detached:Net": ("4x8", "step"),
    "finetune:Net": ("4x16", ""),
    "frozen:Frozen": ("2x4", ""),
    "grad_buffer:Scaled": ("2x4", "step"),
    "net:Net": ("2x3", "move cast save forward"),
    "none_parameter:Optional": ("2x4", ""),
    "phases:Phases": ("2x16", "cast"),
    "plain_lists:Lists": ("2x4", "move cast save step forward"),
    "positions:Positions": ("int64:2x4<100", ""),
    "precomputed:Normed": ("2x4", "move cast save copy forward"),
    "relative_bias:Attention": ("1x4x4", "move forward"),
    "rotary:Rotary": ("2x4x8", "move cast"),
    "tied:Tied": ("int64:2x4<100", ""),
    "unused:Net": ("4x8", "step"),
}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
#: A real GPU gives the verdicts of a fake CUDA device.
ANY_GPU = pytest.mark.parametrize("device", ["fake-cuda", pytest.param("cuda", marks=[pytest.mark.cuda, GPU])])
FIXED = sorted(path.stem for path in SAMPLES.glob("*_fixed.py"))


@functools.cache
def verify_sample(sample: str, input: str, device: str, *checks: Name) -> Verification:
    """Verify a sample model once for all tests."""
    name, _, attribute = sample.partition(":")
    return run(Request(f"{SAMPLES / name}.py:{attribute}", checks=checks, input=(input,), device=device))


def verdicts(sample: str, input: str, device: str, *checks: Name) -> dict[Name, Verdict]:
    """How each proof of a sample model ends."""
    return {check.check: check.verdict for check in verify_sample(sample, input, device, *checks).checks}


def expected_verdicts(sample: str) -> dict[Name, Verdict]:
    """Return the verdicts of the table; no proof is skipped or inconclusive."""
    failing = FAILING[sample][1].split()
    return {name: Verdict.FAILED if name.value in failing else Verdict.PASSED for name in DEFAULT_PROOFS}


def find_twin(fixed: str) -> str:
    """Return the entry of FAILING for the model mended by `fixed`."""
    (actual_sample,) = [sample for sample in FAILING if sample.startswith(fixed.removesuffix("_fixed") + ":")]
    return actual_sample


@ANY_GPU
@pytest.mark.parametrize("sample", FAILING)
def test_sample_fails_only_its_documented_checks(sample, device):
    """Every other proof passes."""
    assert verdicts(sample, FAILING[sample][0], device) == expected_verdicts(sample)


@ANY_GPU
@pytest.mark.parametrize("fixed", FIXED)
def test_fixed_sample_passes_all_checks(fixed, device):
    """The same class, called with the same input."""
    twin = find_twin(fixed)
    sample = f"{fixed}:{twin.partition(':')[2]}"
    assert set(verdicts(sample, FAILING[twin][0], device).values()) == {Verdict.PASSED}


@pytest.mark.parametrize("sample", FAILING)
def test_move_to_meta_gives_the_expected_verdict(sample):
    """A move to meta creates new objects, a move to a GPU does not; the verdict is the same."""
    actual = verdicts(sample, FAILING[sample][0], "meta", Name.MOVE)
    assert actual == {Name.MOVE: expected_verdicts(sample)[Name.MOVE]}


def test_every_sample_is_in_the_table():
    """A sample missing in the table would not be checked."""
    models = {path.stem for path in SAMPLES.glob("*.py")} - set(FIXED) - FILES_WITHOUT_MODEL
    assert models == {sample.partition(":")[0] for sample in FAILING}


def test_each_failing_sample_has_a_fixed_twin():
    """A sample with a failing proof has a mended twin."""
    samples_without_twin = {sample.partition(":")[0] for sample, (_, failing) in FAILING.items() if failing}
    samples_without_twin -= {fixed.removesuffix("_fixed") for fixed in FIXED}
    assert not samples_without_twin


def test_the_file_of_the_page_about_load_state_dict_is_written(tmp_path, monkeypatch, statecli):
    """`python finetune.py` in the folder of the samples."""
    statecli("samples", tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("finetune.py")["main"](".")
    result = statecli("explain", "finetune.py:Net", "trained.pt")
    assert result.code == 1
    assert "all 15 names have the prefix 'module.'" in result.out
