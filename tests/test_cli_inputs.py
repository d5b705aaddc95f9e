"""`statecli inspect --input`: the table of a model after a call of forward."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

CACHED = "sample_models/cached_mask.py:Causal"


def test_every_output_marks_tensors_created_by_forward(statecli, tmp_path):
    """In JSON, `appeared` is written only if true, `inputs` only if forward was called; the page has the inputs too."""
    outputs = ("table", "plain", "markdown", "csv", "jsonl", "html")
    reports = [word for output in outputs for word in ("--report", f"{output}={tmp_path / output}")]
    result = statecli("inspect", CACHED, "--input", "2x4x8", "-f", "json", *reports)
    assert result.code == 1  # on a GPU, the next forward would mix devices
    assert result.json["inputs"] == "float32 2×4×8"
    assert {fqn: row.get("appeared") for fqn, row in result.rows().items()} == {
        "project.weight": None,
        "project.bias": None,
        "mask": True,
    }
    for output in outputs:
        assert "created by the first forward" in (tmp_path / output).read_text("utf-8"), output
    assert "after a forward with float32 2×4×8" in (tmp_path / "html").read_text("utf-8")
    assert "inputs" not in statecli("inspect", CACHED, "-f", "json").json


def test_a_function_makes_the_inputs(statecli, tmp_path):
    """`--input-from`, as in verify."""
    (tmp_path / "data.py").write_text("import torch\ndef make():\n    return torch.ones(2, 4, 8)\n")
    result = statecli("inspect", CACHED, "--input-from", f"{tmp_path}/data.py:make", "-f", "json")
    assert result.rows()["mask"]["shape"] == [4, 4]


def test_tensor_left_on_cpu_by_a_move_exits_with_1(statecli):
    """The mask of the CPU, when the model goes elsewhere; inspect does not know whether forward makes another."""
    moved = ("inspect", CACHED, "--to", "meta", "--fail-on", "warning")
    assert statecli(*moved).code == 0
    assert statecli(*moved, "--input", "2x4x8").code == 1


@pytest.mark.parametrize(
    ("words", "expected_text"),
    [
        ([CACHED, "--input", "2x4x8", "--input-from", "a.py:b"], "--input and --input-from contradict each other"),
        ([CACHED, "--input", "2xx8"], "--input 2xx8: '2xx8' is not a shape"),
        (
            [CACHED, "--input", "2x4x7"],
            "calling the model raised RuntimeError: mat1 and mat2 shapes",
        ),
        ([CACHED, "--input-from", "a.py"], "--input-from a.py: must name a function"),
        ([CACHED, "--input", "a=2x4x8"], "calling the model raised TypeError"),
        (["pyproject.toml", "--input", "2x3"], "--input 2x3: pyproject.toml is a checkpoint, which has no forward"),
        (["pyproject.toml", "--input-from", "a.py:b"], "--input-from a.py:b: pyproject.toml is a checkpoint"),
    ],
)
def test_wrong_input_is_one_line_and_exits_with_2(inspect_error, words, expected_text):
    """Exit 2, nothing on stdout."""
    assert expected_text in inspect_error(*words)


def test_fix_of_a_cache_is_at_the_assignment_in_forward(statecli):
    """There is no code to paste: the advice is a text, for the line that created the cache."""
    result = statecli("verify", CACHED, "--input", "2x4x8", "--check", "move", "--device", "meta", "-f", "plain")
    assert result.code == 1
    advice = "create the tensor again in forward when the device changes, or keep one tensor per device"
    assert "[sample_models/cached_mask.py:23]\n" in result.out
    assert f"help: {advice}\n" in result.out
    document = statecli("verify", CACHED, "--input", "2x4x8", "--check", "move", "--device", "meta", "-f", "json").json
    assert [finding["help"] for finding in document["findings"]] == [
        f"{advice}; assigned at sample_models/cached_mask.py:23"
    ]
    assert [row["fqn"] for row in document["tensors"] if row.get("appeared")] == ["mask"]


def test_the_old_spelling_still_works(statecli, tmp_path):
    """`--inputs` is `--input-from`, for both parsers and in both commands; no help and no document lists it."""
    (tmp_path / "data.py").write_text("import torch\ndef make():\n    return torch.ones(2, 4, 8)\n")
    for command in ("inspect", "verify"):
        new, old = (
            statecli(command, CACHED, flag, f"{tmp_path}/data.py:make", "-f", "json")
            for flag in ("--input-from", "--inputs")
        )
        assert (new.code, new.out) == (old.code, old.out)
        assert statecli(command, CACHED, "--inputs=a.py", "-qv").err.startswith("statecli: --input-from a.py: ")
        assert "--inputs" not in statecli(command, "--help").out
