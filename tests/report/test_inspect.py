"""The facts about a target as a whole in `inspect`, next to its rows."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from ..published import junit

ADAPTER = {"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 4}


@pytest.fixture
def folder(tmp_path):
    """`folder(config={...})`: a folder with weights and JSON files with the given content."""

    def write_folder(**files):
        name = "adapter_model" if "adapter_config" in files else "model"
        save_file({"w": torch.ones(2, 2)}, tmp_path / f"{name}.safetensors")
        for stem, content in files.items():
            (tmp_path / f"{stem}.json").write_text(json.dumps(content))
        return str(tmp_path)

    return write_folder


def test_only_a_class_has_a_verdict(statecli, tmp_path, in_tmp_path):
    """Inspect checks the tensors of a class; of a checkpoint it only lists the tensors."""
    save_file({"w": torch.ones(2, 2)}, "w.safetensors")
    (tmp_path / "net.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n"
                                     "        super().__init__(2, 2)\n")  # fmt: skip
    lines = statecli("inspect", "net.py:Net", "-f", "table").out.splitlines()
    assert (lines[1], lines[-1]) == ("no problems: 2 tensors, all registered", "clean: exit status 0")
    assert "exit status" not in statecli("inspect", "w.safetensors", "-f", "table").out


FOUR = """
from torch import nn
class Net(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.blocks = [nn.Linear(4, 4) for _ in range(layers)]
        self.stack = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
"""


def test_four_blocks_and_twelve_blocks_both_fold(statecli, tmp_path, in_tmp_path):
    """Folding does not depend on the number of tensors; --all shows each."""
    (tmp_path / "four.py").write_text(FOUR)
    for spec, numbers in (("four.py:Net", "0..3"), ("four.py:Net(layers=12)", "0..11")):
        lines = statecli("inspect", spec, "-f", "table").out.splitlines()
        names = [line.split()[0] for line in lines if ".weight" in line]
        assert names == ["stack.{0,1}.weight", f"blocks[{{{numbers}}}].weight"]
    assert "blocks[2].weight" in statecli("inspect", "four.py:Net", "-f", "table", "--all").out


def test_a_remark_of_all_rows_is_in_the_heading(statecli, tmp_path):
    """A move to meta has the same remark for every tensor."""
    torch.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "w.pt")
    text = statecli("inspect", str(tmp_path / "w.pt"), "--to", "meta", "-f", "table").out
    assert text.count("the checksum is correct") == 1
    assert "↳" not in text


def test_the_size_of_a_folded_row_is_of_each_tensor(statecli, tmp_path):
    """The row has the number of tensors before the size; a row of one tensor has only the size."""
    torch.save({f"blocks.{i}.w": torch.zeros(250) for i in range(3)} | {"head.w": torch.zeros(250)}, tmp_path / "a.pt")
    rows = statecli("inspect", tmp_path / "a.pt", "-f", "table").out.splitlines()
    assert [row.split()[-5:-1] for row in rows if "blocks" in row] == [["3", "×", "1", "kB"]]
    assert [row.split()[-4:-1] for row in rows if "head" in row] == [["[250]", "1", "kB"]]


def test_a_tensor_without_a_finding_has_no_fix(statecli, tmp_path, in_tmp_path):
    """A 0-dim tensor is harmless; -v shows how to register the tensor."""
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
        "        self.eps = torch.tensor(1e-5)\n"
    )
    assert "register_buffer" not in statecli("inspect", "net.py:Net", "-f", "table").out
    assert 'self.register_buffer("eps"' in statecli("inspect", "net.py:Net", "-f", "table", "-v").out


NOTES_OF_FOLDERS = {
    "adapter": ({"adapter_config": ADAPTER}, "adapter (LORA) of base model org/base"),
    "a base that is null": (
        {"adapter_config": {**ADAPTER, "base_model_name_or_path": None}},
        "adapter (LORA); its base model is not recorded",
    ),
    "nothing of it": ({"adapter_config": {"r": 4}}, "adapter; its base model is not recorded"),
    "a long name": (
        {"adapter_config": {**ADAPTER, "base_model_name_or_path": "x" * 60}},
        f"adapter (LORA) of base model {'x' * 60}",
    ),
    "architecture": (
        {"config": {"architectures": ["BertForSequenceClassification"]}},
        "architecture BertForSequenceClassification",
    ),
    "two": ({"config": {"architectures": ["A", "B"]}}, "architecture A, B"),
    "diffusers": ({"config": {"_class_name": "UNet2DModel"}}, "architecture UNet2DModel"),
    "escapes": ({"config": {"architectures": ["\x1b[31m"]}}, None),
    "none": ({"config": {"architectures": None, "hidden_size": 4}}, None),
    "nothing beside": ({}, None),
}


@pytest.mark.parametrize("case", NOTES_OF_FOLDERS)
def test_note_below_the_rows_names_base_model_or_class(case, folder, statecli):
    """One line names the base model of an adapter, or the class of a model."""
    files, expected = NOTES_OF_FOLDERS[case]
    path = folder(**files)
    for arguments in ((), ("-f", "plain")):
        result = statecli("inspect", path, *arguments)
        assert result.code == 0
        assert "\x1b[31m" not in result.out
        lines = [line for line in result.out.splitlines() if line.startswith("note") and "escapes" not in case]
        assert [line.split(": ", 1)[1] for line in lines] == ([expected] if expected else [])


def test_plain_output_ends_with_the_totals(folder, statecli):
    """Totals are the same, whether or not rows were made for a page."""
    path = folder()
    plain, table = (statecli("inspect", path, "-f", output).out for output in ("plain", "table"))
    assert "parameter    1 tensor (kind assumed), 4 elements, 16 bytes" in plain
    assert "w " in table
    assert "w" in statecli("inspect", path, "--tree", "-f", "plain").out


@pytest.mark.parametrize(("fail_on", "tag"), [("error", "system-out"), ("warning", "failure")])
def test_warning_fails_a_case_only_if_it_fails_the_command(tmp_path, in_tmp_path, statecli, fail_on, tag):
    """A test runner that reads the file fails if the exit status is 1."""
    (tmp_path / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.table = torch.ones(2)\n"
    )
    result = statecli("inspect", "net.py:Net", "--fail-on", fail_on, "-f", "junit")
    assert result.code == (tag == "failure")
    (element,) = junit(result.out).find(".//testcase")
    assert element.tag == tag
    assert "unregistered-tensor" in element.text


def test_file_without_tensors_has_a_note(tmp_path, statecli):
    """An empty file of safetensors: a line in place of the rows."""
    save_file({}, tmp_path / "none.safetensors", {"by": "me"})
    result = statecli("inspect", str(tmp_path / "none.safetensors"))
    assert (result.code, result.out) == (0, "note[no-tensor]: contains no tensors, only metadata: by=me\n")


def test_statistics_name_the_tensors_with_nan_infinity_and_outliers(statecli, tmp_path):
    """The sentences stand in the verdict of JSON, in the table and on the page, where the names are links."""
    state = {f"h.{n}.w": torch.full((4,), 40.0 if n == 4 else 1.0) for n in range(9)}
    state |= {f"n.{n}": torch.tensor([1.0, float("nan")]) for n in "abcde"} | {"i": torch.tensor([float("inf")])}
    torch.save(state, tmp_path / "net.pt")
    sentences = [
        "5 tensors contain NaN: n.a, n.b, n.c and 2 more",
        "1 tensor contains infinity: i",
        "1 outlier among the layers: h.4.w",
    ]
    run = statecli("inspect", tmp_path / "net.pt", "--stats", "-f", "json")
    assert run.json["verdict"] == f"15 tensors; {'; '.join(sentences)}"
    for output in ("table", "plain", "markdown"):
        out = statecli("inspect", tmp_path / "net.pt", "--stats", "-f", output).out.replace("`", "")
        assert all(sentence in out for sentence in sentences), output
    page = statecli("inspect", tmp_path / "net.pt", "--stats", "-f", "html").out
    assert 'contain NaN: <a href="#tensor=n.a">n.a</a>, <a href="#tensor=n.b">n.b</a>' in page
    assert '<a href="#filter=nan%3E0">2 more</a>' in page
    assert "hold" not in statecli("inspect", tmp_path / "net.pt", "-f", "table").out


def test_a_name_in_several_sections_is_linked_with_its_section(statecli, tmp_path):
    """Otherwise the link would lead to the tensor of another section."""
    state = {"w": torch.tensor([float("nan")])}
    torch.save({"model": state, "ema": {"w": torch.ones(1)}}, tmp_path / "net.pt")
    page = statecli("inspect", tmp_path / "net.pt", "--stats", "-f", "html").out
    assert '1 tensor contains NaN: <a href="#tensor=model%3A%20w">model: w</a>' in page


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ({"architectures": ["BertModel"]}, "auto"),
        ({"_class_name": "UNet2DModel"}, "auto"),
        ({"architectures": ["Net"], "auto_map": {"AutoModel": "net.Net"}}, "CLASS"),
        ({"architectures": None}, "CLASS"),
    ],
)
def test_guessed_kinds_name_the_option_that_works(statecli, tmp_path, config, model):
    """`--model auto`, if the configuration in the folder names a class whose code is installed."""
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = " ".join(statecli("inspect", tmp_path, "-f", "table").out.split())
    assert f"kinds guessed; --model {model} shows the exact kinds" in output
