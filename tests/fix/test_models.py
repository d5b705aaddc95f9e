"""Broken models of many kinds are repaired; honest models and unproved edits leave the file unchanged."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from statecli.commands.fix import run as fix_run
from statecli.commands.fix.run import Request
from statecli.commands.verify import run as verify_run
from statecli.commands.verify.result import Verdict

from .broken_models import BROKEN_MODELS, HONEST_MODELS, UNFIXABLE_MODELS

pytest.importorskip("libcst")

SAMPLES = Path(__file__).parent.parent.parent / "sample_models"
#: Each sample with a fixed twin, and the input.
PAIRS = {
    "anchors.py:Head": "1x8x4x4",
    "cached_mask.py:Causal": "2x4x8",
    "detached.py:Net": "4x8",
    "grad_buffer.py:Scaled": "2x4",
    "net.py:Net": "2x3",
    "phases.py:Phases": "16",
    "plain_lists.py:Lists": "2x4",
    "precomputed.py:Normed": "2x4",
    "relative_bias.py:Attention": "1x4x4",
    "rotary.py:Rotary": "1x4x8",
}
#: Samples whose twin has the code that the fix writes.
SAME_CODE = ("net.py:Net", "relative_bias.py:Attention", "grad_buffer.py:Scaled", "precomputed.py:Normed")
#: Twins that only a person can write: which input the forgotten layer gets, and whether to untie the weights.
WITHOUT_EDIT = {"unused.py:Net": "4x8", "tied.py:Tied": "int64:2x3<100"}


def fix(target, shape="", **options):
    """The result of `statecli fix TARGET --input SHAPE`."""
    request = verify_run.Request(target=str(target), input=(shape,) if shape else (), **options)
    return fix_run.run(Request(request))


def verify(target, shape=""):
    return verify_run.run(verify_run.Request(target=str(target), input=(shape,) if shape else ()))


def write(folder, text, name="net.py"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_a_broken_model_is_repaired(name, tmp_path, in_tmp_path):
    """Every defect has a proved edit, the fixed file has the expected lines, and the user's file is unchanged."""
    model = BROKEN_MODELS[name]
    path = write(tmp_path, model.text)
    fixes = fix("net.py:Net", model.input)
    assert [edit.reason for edit in fixes.edits if not edit.kept] == []
    (file,) = fixes.files
    for line in model.expected:
        assert line in file.after.decode()
    assert file.before == path.read_bytes() == model.text.encode()
    assert set(re.findall("#.*", model.text)) <= set(re.findall("#.*", file.after.decode()))


@pytest.mark.parametrize("name", UNFIXABLE_MODELS)
def test_an_edit_without_a_proof_is_refused(name, tmp_path, in_tmp_path):
    """A defect is reported with the reason, and there is nothing to write."""
    model = UNFIXABLE_MODELS[name]
    path = write(tmp_path, model.text)
    fixes = fix("net.py:Net", model.input)
    assert fixes.files == ()
    assert fixes.edits
    assert all(edit.reason and not edit.kept for edit in fixes.edits)
    assert any(model.expected[0] in edit.reason for edit in fixes.edits), [edit.reason for edit in fixes.edits]
    assert path.read_bytes() == model.text.encode()


def test_cache_of_the_input_is_not_created_again_for_a_fixed_batch(tmp_path, in_tmp_path):
    """A function that returns the same batch each time shows the dependence only with changed values."""
    text = UNFIXABLE_MODELS["cache-of-the-input"].text
    write(tmp_path, f"{text}\n\ndef make():\n    return torch.ones(2, 4)\n")
    (edit,) = fix("net.py:Net", inputs="net.py:make").edits
    assert edit.reason.startswith("another input gives m other values")


@pytest.mark.parametrize("name", HONEST_MODELS)
def test_an_honest_model_gets_no_edit(name, tmp_path, in_tmp_path):
    """There is nothing to fix."""
    write(tmp_path, HONEST_MODELS[name])
    fixes = fix("net.py:Net", "2x4")
    assert fixes.edits == fixes.files == ()


def test_every_pair_of_samples_is_in_a_table():
    """A new pair of samples must be in PAIRS or WITHOUT_EDIT."""
    pairs = {f"{path.stem.removesuffix('_fixed')}.py" for path in SAMPLES.glob("*_fixed.py")}
    assert {target.partition(":")[0] for target in (*PAIRS, *WITHOUT_EDIT)} == pairs


@pytest.mark.parametrize("target", PAIRS)
def test_a_sample_is_repaired_like_its_twin(target, tmp_path, monkeypatch):
    """The fixed sample passes the same proofs as its twin, except for a layer without use in forward. The code of some
    is the same but for the docstring.
    """
    monkeypatch.chdir(SAMPLES)
    fixes = fix(target, PAIRS[target])
    refused_edits = [edit for edit in fixes.edits if not edit.kept]
    assert [edit.rule for edit in refused_edits] == ["no-gradient"] * (target == "plain_lists.py:Lists")
    name, _, kind = target.partition(":")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, fixes.files[0].after)
    twin = write(tmp_path, (SAMPLES / name.replace(".py", "_fixed.py")).read_bytes(), "twin.py")
    if not refused_edits:
        result, expected = (verify(f"{file}.py:{kind}", PAIRS[target]) for file in ("net", "twin"))
        assert [check.verdict for check in result.checks] == [check.verdict for check in expected.checks]
        assert all(check.verdict is Verdict.PASSED for check in result.checks)
    if target in SAME_CODE:
        assert [ast.dump(node) for node in ast.parse(fixes.files[0].after).body[1:]] == [
            ast.dump(node) for node in ast.parse(twin.read_bytes()).body[1:]
        ]


@pytest.mark.parametrize("target", WITHOUT_EDIT)
def test_model_without_a_proved_fix_is_not_edited(target, monkeypatch):
    """A mere guess does not lead to an edit."""
    monkeypatch.chdir(SAMPLES)
    assert fix(target, WITHOUT_EDIT[target]).files == ()
