"""`statecli diff` on the command line: codes, streams, options, and every output."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import save_file

from statecli.render import Output

from .forked_python import start_python
from .test_cli import on_a_terminal

pytestmark = pytest.mark.usefixtures("in_tmp_path")

DOCUMENTS = (Output.JSON, Output.JSONL, Output.CSV, Output.SARIF, Output.JUNIT, Output.GITLAB)


@pytest.fixture
def state():
    torch.manual_seed(0)
    return {f"layers.{n}.{name}": torch.randn(3, 4) for n in range(3) for name in ("weight", "bias")}


@pytest.fixture
def a(state):
    torch.save(state, "a.pt")
    return state


@pytest.fixture
def b(a):
    """A checkpoint that differs from a.pt in one element."""
    changed = {name: tensor.clone() for name, tensor in a.items()}
    changed["layers.1.weight"][1, 2] += 0.5
    torch.save(changed, "b.pt")
    return changed


def test_diff_of_a_file_with_itself_is_identical(statecli, a):
    """The status is 0, one line says "identical", and stderr is empty."""
    result = statecli("diff", "a.pt", "a.pt")
    assert (result.code, result.out, result.err) == (0, "identical: 6 tensors, 288 B: exit status 0\n", "")


def test_same_tensors_in_another_format_exit_with_0(statecli, a):
    """The models are compared, not the files: the line says "identical"."""
    save_file(a, "a.safetensors")
    result = statecli("diff", "a.pt", "a.safetensors")
    assert (result.code, result.out, result.err) == (0, "identical: 6 tensors, 288 B: exit status 0\n", "")


@pytest.mark.parametrize("output", [output for output in Output if output not in (*DOCUMENTS, Output.HTML)])
def test_quiet_prints_only_differences(statecli, b, output):
    """With -q, equal states print nothing, and a difference is reported."""
    assert statecli("diff", "a.pt", "a.pt", "-q", "-f", output.value).out == ""
    reason = "title=statecli changed::layers.1.weight" if output is Output.GITHUB else "error[changed]: layers.1.weight"
    assert reason in statecli("diff", "a.pt", "b.pt", "-q", "-f", output.value).out


@pytest.mark.parametrize("options", [(), ("--metadata-only",), ("--may-change", "layers.0.*"), ("--atol", "1")])
def test_json_fits_its_schema(statecli, b, options):
    """The schema of `statecli schema diff` fits the output of `-f json`."""
    described = statecli("schema", "diff").json
    jsonschema.validate(statecli("diff", "a.pt", "b.pt", "-f", "json", *options).json, described)


def test_json_has_the_documented_keys(statecli, b):
    """The keys of the document and of a change are as documented."""
    document = statecli("diff", "a.pt", "b.pt", "-f", "json").json
    assert (document["before"], document["after"]) == ("a.pt", "b.pt")
    assert list(document)[:7] == ["schema", "statecli", "before", "after", "summary", "changes", "findings"]
    summary = {key: document["summary"][key] for key in ("added", "removed", "changed", "renamed", "identical")}
    assert summary == {"added": 0, "removed": 0, "changed": 1, "renamed": 0, "identical": 5}
    (change,) = document["changes"]
    keys = ["fqn", "section", "status", "kind", "fields", "renamed_from", "before", "after", "values"]
    assert list(change)[:9] == keys
    assert {"dtype", "shape"} <= set(change["before"])
    assert (change["fields"], change["renamed_from"]) == (["values"], None)
    assert (change["values"]["changed"], change["values"]["first"]) == (1, [1, 2])
    assert change["values"]["max_abs"] == pytest.approx(0.5, rel=1e-6)


def test_jsonl_and_csv_have_a_row_for_each_change(statecli, b):
    """The same change in both."""
    lines = [json.loads(line) for line in statecli("diff", "a.pt", "b.pt", "-f", "jsonl").out.splitlines()]
    assert [line["fqn"] for line in lines if line["type"] == "change"] == ["layers.1.weight"]
    (row,) = csv.DictReader(io.StringIO(statecli("diff", "a.pt", "b.pt", "-f", "csv").out))
    assert (row["fqn"], row["changed"]) == ("layers.1.weight", "1")


def test_name_only_prints_a_line_for_each_change(statecli, b):
    """Exactly one line a change, and the exit status of a difference."""
    result = statecli("diff", "a.pt", "b.pt", "--name-only")
    assert (result.code, result.out, result.err) == (1, "layers.1.weight\n", "")
    assert statecli("diff", "a.pt", "b.pt", "--name-status").out == "M\tlayers.1.weight\n"
    assert statecli("diff", "a.pt", "a.pt", "--name-only").out == ""


def test_name_only_reports_a_failed_expectation_on_stderr(statecli, b):
    """The names stay alone on stdout; the reason of exit 1 is on stderr."""
    result = statecli("diff", "a.pt", "b.pt", "--name-only", "--must-not-change", "layers.*")
    assert (result.code, result.out) == (1, "layers.1.weight\n")
    assert result.err.startswith("error[frozen-changed]: layers.1.weight")


def test_fulfilled_expectation_exits_with_0(statecli, b):
    """An expected difference is shown, and is not a failure."""
    result = statecli("diff", "a.pt", "b.pt", "--may-change", "layers.1.*", "--must-change", "layers.1.*")
    assert result.code == 0
    assert "layers.1.weight" in result.out


def test_result_within_a_tolerance_names_the_tolerance(statecli, b):
    """Tensors that are equal only within a tolerance are called identical with the tolerance."""
    result = statecli("diff", "a.pt", "b.pt", "--atol", "1")
    assert (result.code, result.out) == (0, "identical with --atol 1: 6 tensors, 288 B: exit status 0\n")


def test_metadata_only_reads_no_values(statecli, b):
    """The status is 0, and values that were not read are not called identical."""
    result = statecli("diff", "a.pt", "b.pt", "--metadata-only")
    assert result.code == 0
    assert "identical" not in result.out
    assert "values not compared" in result.out


@pytest.mark.parametrize(
    "words",
    [
        ("--atol", "-1"),
        ("--rtol=-0.5",),
        ("--atol", "nan"),
        ("--rtol", "inf"),
        ("--jobs", "-1"),
        ("--lines", "-1"),
        ("--device", "tpu"),
        ("--device", "cuda:x"),
        ("--bitwise", "--atol", "1e-6"),
        ("--metadata-only", "--rtol", "1e-6"),
        ("--metadata-only", "--bitwise"),
        ("--name-only", "--name-status"),
        ("--name-only", "-f", "json"),
        ("--name-status", "-f", "markdown"),
        ("--name-only", "--tree"),
        ("--name-only", "-n", "3"),
        ("--name-only", "-q"),
        ("-n", "3", "-f", "csv"),
        ("--tree", "-f", "csv"),
        ("--tree", "-f", "json"),
        ("--all", "-f", "jsonl"),
        ("--ignore", "values", "--bitwise"),
        ("--ignore", "values", "--atol", "1e-6"),
    ],
)
def test_contradicting_options_are_refused(statecli, words):
    """One line and status 2, before anything is read: the files do not exist."""
    result = statecli("diff", "missing.pt", "gone.pt", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert words[0].partition("=")[0] in result.err
    assert "missing.pt" not in result.err


@pytest.mark.parametrize(
    ("targets", "words", "expected_text"),
    [
        (("a.pt", "b.pt"), ("--init-device", "bogus"), "a.pt and b.pt are not model classes"),
        (("net.py:Net", "b.pt"), ("--bitwise",), "values are not compared with the class net.py:Net"),
        (("a.pt", "net.py:Net"), ("--atol", "1"), "values are not compared with the class net.py:Net"),
        (("a.pt", "net.py:Net"), ("--rtol", "1"), "values are not compared with the class net.py:Net"),
        (("net.py:Net", "net.py:Net"), ("--device", "cuda"), "values are not compared with the class net.py:Net"),
    ],
)
def test_options_that_do_not_apply_to_the_targets_are_refused(statecli, targets, words, expected_text):
    """One line and status 2, before anything is read: the files do not exist."""
    result = statecli("diff", *targets, *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"statecli: {words[0]}" if words else f"statecli: {expected_text}")
    assert expected_text in result.err
    assert result.err.count("\n") == 1


def test_every_problem_is_one_line(statecli, a):
    """One file is missing, on either side."""
    for words in (("a.pt", "gone.pt"), ("gone.pt", "a.pt")):
        result = statecli("diff", *words)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("statecli: gone.pt: ")
        assert result.err.count("\n") == 1


def test_corrupt_tensor_does_not_hide_the_other_changes(statecli, b):
    """The status is 2, stderr names the corrupt tensor, and the result of the comparison is shown."""
    torch.save({name: tensor + 0 for name, tensor in b.items()}, "c.pt")
    raw = bytearray(Path("c.pt").read_bytes())
    at = raw.find(b["layers.2.bias"].numpy().tobytes())
    raw[at] ^= 1
    Path("c.pt").write_bytes(raw)
    result = statecli("diff", "a.pt", "c.pt")
    assert result.code == 2
    assert "layers.1.weight" in result.out
    assert "1 tensor could not be compared" in result.out
    assert "c.pt" in result.err
    assert "layers.2.bias" in result.err
    assert result.err.count("\n") == 1


def test_a_page_has_pictures(statecli, b):
    """-f html includes the distribution of the largest changes."""
    result = statecli("diff", "a.pt", "b.pt", "-f", "html")
    assert result.out.count("<svg") >= 2


@pytest.mark.parametrize("options", [(), ("--tree",), ("-v",), ("--all",), ("-n", "1"), ("--metadata-only",)])
def test_no_line_is_wider_than_the_terminal(statecli, b, monkeypatch, options):
    """The table is laid out for its width."""
    b["a.very.long.name." * 10 + "weight"] = torch.zeros(2)
    b["layers.0.bias"] = b["layers.0.bias"].half()
    torch.save(b, "b.pt")
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = statecli("diff", "a.pt", "b.pt", "-f", "table", *options)
        assert result.code == 1
        assert max(map(len, result.out.splitlines())) <= columns


def test_a_terminal_without_blocks_gets_plain_bars(b):
    """An ASCII stream: a bar of #, arrows of two signs, no escapes of ours."""
    os.environ["PYTHONIOENCODING"] = "ascii"
    try:
        out, _ = on_a_terminal(["diff", "a.pt", "b.pt", "--no-progress"])
    finally:
        del os.environ["PYTHONIOENCODING"]
    assert out.isascii()
    assert "\\u" not in out
    assert "a.pt -> b.pt" in out
    assert "####" in out


def test_through_a_pipe_each_change_is_a_line(statecli):
    """No folding, nothing cut, every row greppable."""
    torch.save({f"layers.{n}.weight": torch.ones(2) * n for n in range(60)}, "c.pt")
    torch.save({f"layers.{n}.weight": torch.ones(2) * (n + 1) for n in range(60)}, "d.pt")
    result = statecli("diff", "c.pt", "d.pt")
    assert result.code == 1
    assert sum(line.startswith("changed") for line in result.out.splitlines()) == 60


def _sparse(path, elements):
    """Write a sparse safetensors file of one float32 tensor of zeros."""
    entry = {"dtype": "F32", "shape": [elements], "data_offsets": [0, elements * 4]}
    header = json.dumps({"w": entry}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + elements * 4)


def test_interrupt_exits_with_130_and_leaves_no_process():
    """The process ends at once, with nothing on stdout or stderr, and no process is left running."""
    _sparse("a.safetensors", 20 << 30)
    _sparse("b.safetensors", 20 << 30)
    words = ["-m", "statecli", "diff", "a.safetensors", "b.safetensors", "--jobs", "2"]
    run = start_python(words, "statecli", session="new", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while str(run.pid) not in subprocess.check_output(["ps", "-A", "-o", "ppid="], text=True).split():
        assert run.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(5) == 130
    assert run.stdout.read() == run.stderr.read() == b""  # ends only when every process has closed them
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)


def test_diff_of_a_class_and_a_checkpoint_shows_missing_keys(statecli, tmp_path):
    """The diff shows the keys that load_state_dict would call missing."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(2, 3)\n"
    )
    torch.save({"fc.weight": torch.zeros(3, 2)}, "net.pt")
    result = statecli("diff", "net.py:Net", "net.pt")
    assert result.code == 1
    assert "fc.bias" in result.out
    torch.save({"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3)}, "net.pt")
    result = statecli("diff", "net.py:Net", "net.pt")
    assert result.code == 0
    assert "identical" not in result.out


@pytest.mark.parametrize("output", ["table", "plain", "json", "jsonl", "csv", "markdown", "html"])
def test_every_output_has_tensors_that_could_not_be_compared(statecli, tmp_path, output):
    """A damaged tensor has a row in every output, besides its line on stderr."""
    import torch

    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({"w": torch.full((999,), value), "u": torch.ones(3)}, tmp_path / name)
    raw = bytearray((tmp_path / "b.pt").read_bytes())
    at = raw.index(torch.full((999,), 2.0).numpy().tobytes())
    raw[at + 8] ^= 1
    (tmp_path / "b.pt").write_bytes(raw)
    result = statecli("diff", tmp_path / "a.pt", tmp_path / "b.pt", "-f", output)
    assert result.code == 2
    assert "checksum wrong" in result.out
    assert "w: checksum wrong" in result.err


def test_settings_are_filtered_and_checked_by_expectations(statecli):
    """Hidden changes are counted, selected settings are found, and each finding has the name of its setting."""
    for name, epoch in (("a.pt", 1), ("b.pt", 2)):
        torch.save({"model": {"w": torch.ones(3)}, "epoch": epoch}, name)
    hidden = statecli("diff", "a.pt", "b.pt", "--kind", "parameter")
    assert hidden.code == 0
    assert "1 setting differs but is not selected: epoch" in hidden.out
    assert statecli("diff", "a.pt", "b.pt", "-i", "epoch").code == 1
    refused = statecli("diff", "a.pt", "b.pt", "--kind", "parameter", "--must-not-change", "epoch")
    assert (refused.code, refused.out) == (2, "")
    assert "--must-not-change 'epoch': matches none" in refused.err
    (finding,) = statecli("diff", "a.pt", "b.pt", "--must-not-change", "epoch", "-f", "json").json["findings"]
    assert (finding["rule"], finding["fqn"]) == ("frozen-changed", "epoch")


def test_inconclusive_expectation_exits_with_2(statecli, b):
    """The expectation has neither passed nor failed; the result of the comparison is shown."""
    result = statecli("diff", "a.pt", "b.pt", "--metadata-only", "--must-change", "layers.*")
    assert result.code == 2
    assert "no difference found in 6 tensors" in result.out
    assert "cannot check --must-change 'layers.*'" in result.err
