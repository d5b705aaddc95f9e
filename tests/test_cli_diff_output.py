"""The output of `statecli diff`, end to end: order, digits, limits, and words that agree with the exit code."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .test_cli import process

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def layers():
    """a.safetensors and b.safetensors: twelve layers of two dtypes, all of them changed."""
    torch.manual_seed(0)
    before = {f"layers.{n}.norm": torch.randn(3) for n in range(12)}
    before |= {f"layers.{n}.weight": torch.randn(3).bfloat16() for n in range(12)}
    save_file(before, "a.safetensors")
    save_file({name: tensor + 1 for name, tensor in before.items()}, "b.safetensors")
    return [f"layers.{n}.{name}" for n in range(12) for name in ("norm", "weight")]


def test_rows_stand_in_the_order_of_layers(statecli, layers):
    """safetensors writes float32 before bfloat16, and layer 10 before layer 2; every output has the module's order."""
    paths = ("a.safetensors", "b.safetensors")
    assert statecli("diff", *paths, "--name-only").out.split() == layers
    assert [row["fqn"] for row in statecli("diff", *paths, "-f", "json").json["changes"]] == layers
    assert [row["fqn"] for row in csv.DictReader(io.StringIO(statecli("diff", *paths, "-f", "csv").out))] == layers
    plain = statecli("diff", *paths, "-f", "plain").out.splitlines()
    assert [line.split()[2] for line in plain[1:25]] == layers
    table = statecli("diff", *paths, "--all", "-f", "table").out
    assert [line.split()[1] for line in table.splitlines() if line.startswith("  M ")] == layers
    lines = statecli("diff", *paths, "-q").out.splitlines()
    assert [line.split()[1].removesuffix(":") for line in lines] == layers


def test_unchanged_tensors_are_listed_on_request(statecli):
    """With `--unchanged` each tensor has a row in every output; without it, identical tensors are only counted."""
    save_file({name: torch.ones(2) for name in ("frozen", "head")}, "a.safetensors")
    save_file({"frozen": torch.ones(2), "head": torch.zeros(2)}, "b.safetensors")
    paths = ("a.safetensors", "b.safetensors")
    assert [row["fqn"] for row in statecli("diff", *paths, "-f", "json").json["changes"]] == ["head"]
    result = statecli("diff", *paths, "--unchanged", "-f", "json")
    assert result.code == 1
    assert [(row["fqn"], row["status"]) for row in result.json["changes"]] == [
        ("frozen", "identical"),
        ("head", "changed"),
    ]
    plain = statecli("diff", *paths, "--unchanged", "-f", "plain").out.splitlines()
    assert [line.split()[:3] for line in plain[1:3]] == [
        ["unchanged", "parameter", "frozen"],
        ["changed", "parameter", "head"],
    ]
    table = statecli("diff", *paths, "--unchanged", "-f", "table").out
    assert "parameters  1 of 2 changed" in table
    assert re.search(r"^    frozen +unchanged$", table, re.MULTILINE)
    same = statecli("diff", paths[0], paths[0], "--unchanged", "-f", "table")
    assert (same.code, "parameters  2 unchanged" in same.out) == (0, True)
    names = statecli("diff", *paths, "--unchanged", "--name-only")
    assert (names.code, names.out) == (1, "frozen\n")
    for option in ("--tree", "--name-status"):
        refused = statecli("diff", *paths, "--unchanged", option)
        assert (refused.code, refused.err.count("contradict each other")) == (2, 1)


@pytest.mark.parametrize(("wrapped", "target"), [(True, "Plain"), (False, "Wrapped")])
def test_the_fix_of_a_wrappers_prefix_can_be_pasted(statecli, tmp_path, wrapped, target):
    """Pasted between torch.load and load_state_dict, the state loads strictly: the prefix is removed or added."""
    tmp_path.joinpath("net.py").write_text(
        "from torch import nn\nclass Plain(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Linear(2, 2))\n"
        "class Wrapped(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.module = Plain()\n"
    )
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    source, model = (wrapper, plain) if wrapped else (plain, wrapper)
    torch.save(source.state_dict(), "a.pt")
    (finding,) = statecli("diff", "a.pt", f"net.py:{target}", "-f", "json").json["findings"]
    assert finding["rule"] == "wrapper-prefix"
    pasted = {"state": source.state_dict()}
    exec(finding["help"], pasted)  # noqa: S102
    model.load_state_dict(pasted["state"])


def test_a_refused_load_has_its_line_and_its_help(statecli, tmp_path):
    """The same findings have the same line and help in inspect and audit."""
    line = "super().__init__(); self.fc = nn.Linear(2, 2)"
    tmp_path.joinpath("net.py").write_text(
        f"from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        {line}\n"
    )
    torch.save({"module.fc.weight": torch.zeros(2, 2), "module.fc.bias": torch.zeros(2)}, "wrapped.pt")
    torch.save({"fc.weight": torch.zeros(2, 2)}, "partial.pt")
    assert "\n  fix: state = {" in statecli("diff", "wrapped.pt", "net.py:Net", "-f", "plain", "--all").out
    missing = statecli("diff", "partial.pt", "net.py:Net", "-f", "plain", "--all").out
    assert "partial.pt does not contain this tensor [net.py:4]\n" in missing


def test_page_draws_differences_near_the_end_of_float64():
    """Δ near the end of float64 is drawn, and stderr is empty."""
    torch.save({"w": torch.tensor([1e308, -1.0], dtype=torch.float64)}, "a.pt")
    torch.save({"w": torch.tensor([-1.0, 1.5e308], dtype=torch.float64)}, "b.pt")
    result = process("diff", "a.pt", "b.pt", "-f", "html")
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.count("<figure") == 2


def test_csv_has_every_digit(statecli, layers):
    """The numbers are the floats of the JSON, with all digits; an unknown value is an empty cell."""
    paths = ("a.safetensors", "b.safetensors")
    changes = statecli("diff", *paths, "-f", "json").json["changes"]
    rows = list(csv.DictReader(io.StringIO(statecli("diff", *paths, "-f", "csv").out)))
    for change, row in zip(changes, rows, strict=True):
        for name in ("relative_l2", "max_abs", "mean_abs", "l2", "cosine"):
            assert float(row[name]) == change["values"][name]
        assert int(row["elements"]) == change["values"]["elements"]
        assert (row["device_before"], row["renamed_from"], row["not_compared"]) == ("", "", "")


@pytest.mark.parametrize("name", ['=HYPERLINK("http://x","y")', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_csv_contains_no_formula(statecli, name):
    """A name from a file that a spreadsheet would compute is a text; negative numbers are numbers."""
    torch.save({name: torch.tensor([1.0, 2.0]), "lr": 1}, "a.pt")
    torch.save({name: torch.tensor([-1.0, -2.0]), "lr": 1, "delta": -5}, "b.pt")
    for command in (("diff", "a.pt", "b.pt"), ("inspect", "a.pt")):
        for row in csv.reader(io.StringIO(statecli(*command, "-f", "csv").out)):
            assert not [cell for cell in row if cell.startswith(("=", "+", "@", "\t", "\r"))]
            assert all(float(cell) < 0 for cell in row if cell.startswith("-"))
    first, second = csv.DictReader(io.StringIO(statecli("diff", "a.pt", "b.pt", "-f", "csv").out))
    assert (float(first["cosine"]), second["change"]) == (pytest.approx(-1), "-5")


def test_verbose_adds_columns_through_a_pipe(statecli, layers):
    """The facts of -v have columns of their own."""
    paths = ("a.safetensors", "b.safetensors")
    promised = {"first", "mean_abs", "l2", "cosine"}
    assert promised <= set(statecli("diff", *paths, "-v").out.splitlines()[0].split())
    assert not promised & set(statecli("diff", *paths).out.splitlines()[0].split())


@pytest.fixture
def sections():
    """a.pt and b.pt: `w` of the model and of its average, both changed."""
    for path, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({name: {"w": torch.full((3,), value)} for name in ("model", "ema")}, path)


def test_failed_tensor_is_named_with_its_section(statecli, sections):
    """The name of `--name-only`, on stdout as on stderr; JSON has the section next to the name."""
    lines = statecli("diff", "a.pt", "b.pt", "-q").out.splitlines()
    assert [line.split()[1] for line in lines] == ["model.w:", "ema.w:"]
    named = statecli("diff", "a.pt", "b.pt", "--name-only", "--must-not-change", "w")
    assert named.out.split() == ["model.w", "ema.w"]
    assert [line.split()[1] for line in named.err.splitlines()] == ["model.w:", "ema.w:"]
    findings = statecli("diff", "a.pt", "b.pt", "-f", "json").json["findings"]
    assert [(tensor["section"], tensor["fqn"], tensor["message"]) for tensor in findings] == [
        (section, "w", "w: values differ") for section in ("model", "ema")
    ]


def test_one_cause_is_one_line_on_stderr(statecli):
    """Forty wrong checksums are reported once, by their first name; -n limits their rows too."""
    torch.manual_seed(0)
    state = {f"l.{n}.w": torch.randn(9) for n in range(40)}
    torch.save(state, "a.pt")
    raw = Path("a.pt").read_bytes()
    for tensor in state.values():
        at = raw.index(tensor.numpy().tobytes())
        raw = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    Path("b.pt").write_bytes(raw)
    result = statecli("diff", "a.pt", "b.pt", "-n", "2")
    assert result.code == 2
    assert result.err == (
        "statecli: b.pt: l.0.w and 39 more tensors: checksum wrong: recorded …, computed …; "
        "the file is damaged: copy the file again\n"
    )
    assert result.out.count("checksum wrong") == 2
    assert "… and 38 more (-n 2)" in result.out


def test_chart_counts_tensors_that_could_not_be_compared(statecli):
    """Another shape and a damaged tensor are not among the zeros; a page ends with its line."""
    torch.save({"a": torch.ones(9), "b": torch.ones(2), "c": torch.full((9,), 3.0), "d": torch.ones(4)}, "a.pt")
    torch.save({"a": torch.zeros(9), "b": torch.ones(3), "c": torch.full((9,), 5.0), "d": torch.ones(4)}, "b.pt")
    raw = Path("b.pt").read_bytes()
    at = raw.index(torch.full((9,), 5.0).numpy().tobytes())
    Path("b.pt").write_bytes(raw[:at] + b"\1" + raw[at + 1 :])
    page = statecli("diff", "a.pt", "b.pt", "-f", "html").out
    assert page.endswith("</html>\n")
    assert "4 values, in order; 1 zero (grey); 1 of another shape, 1 not compared (drawn from the top)" in page
    assert "<title>b: of another shape</title>" in page
    assert "<title>c: not compared</title>" in page
    assert "2 of 4 parameters changed" in page


def test_lines_limit_the_findings_of_quiet(statecli, layers):
    """-q -n 2: two reasons and how many more; -n next to a failed expectation too."""
    paths = ("a.safetensors", "b.safetensors")
    result = statecli("diff", *paths, "-q", "-n", "2")
    assert (result.code, len(result.out.splitlines())) == (1, 3)
    assert "… and 22 more" in result.out
    output = statecli("diff", *paths, "--must-not-change", "*", "-n", "2").out
    assert output.count("error[frozen-changed]: 24 tensors differ, but match --must-not-change '*'") == 1
    assert output.count("… and 22 more") == 1  # of the rows; the tensors of the problem fold


@pytest.fixture
def spec(tmp_path):
    """A class of one layer."""
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(2, 3)\n"
    )
    return "net.py:Net"


STATE = {"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3)}


@pytest.mark.parametrize("output", ["table", "plain", "markdown"])
@pytest.mark.parametrize(
    ("state", "expected_text"),
    [
        ({f"module.{name}": tensor for name, tensor in STATE.items()}, "have the prefix 'module.'"),
        ({**STATE, "fc.bias": torch.zeros(3).half()}, "error[changed]: fc.bias: dtype"),
        ({"fc.weight": STATE["fc.weight"]}, "the file lacks 1 tensor of net.py:Net"),
    ],
)
def test_failed_load_has_its_reason_in_every_output(statecli, spec, state, expected_text, output):
    """The verdict does not claim equality, and a file is named by its name."""
    torch.save(state, "net.pt")
    result = statecli("diff", spec, "net.pt", "-f", output)
    assert result.code == 1
    assert expected_text in result.out
    assert "nothing differs" not in result.out


def test_quiet_and_table_write_settings_in_the_same_way(statecli):
    """-q and the table have the same words for null and true."""
    torch.save({"w": torch.ones(1), "best": None, "flag": True}, "a.pt")
    torch.save({"w": torch.ones(1), "best": 0.5, "flag": False}, "b.pt")
    quiet, table = (statecli("diff", "a.pt", "b.pt", *options).out for options in (("-q",), ()))
    for text in ("null → 0.5", "true → false"):
        assert text in quiet
        assert text in table
    assert json.loads(statecli("diff", "a.pt", "b.pt", "-f", "json").out)["metadata"][0]["before"] is None


@pytest.mark.parametrize("words", [("-f", "github"), ("-q",), ("-f", "gitlab")])
def test_message_of_a_change_has_its_size(statecli, tmp_path, words):
    """One tensor has its largest change; a folded annotation of layers has the smallest and the largest change."""
    before = {f"layers.{n}.w": torch.zeros(2) for n in range(12)}
    save_file(before, tmp_path / "a.safetensors")
    save_file(before | {"layers.0.w": torch.tensor([0.0, 0.5])}, tmp_path / "one.safetensors")
    save_file({name: torch.full((2,), 2.0**n) for n, name in enumerate(before)}, tmp_path / "all.safetensors")
    assert "layers.0.w: values differ, by at most 0.5" in statecli(
        "diff", tmp_path / "a.safetensors", tmp_path / "one.safetensors", "--must-not-change", "*", *words
    ).out.replace("changed, but matches --must-not-change '*': ", "")
    text = statecli("diff", tmp_path / "a.safetensors", tmp_path / "all.safetensors", *words).out
    if "github" not in words:
        assert "layers.11.w: values differ, by at most 2.05e+03" in text
    else:
        assert "layers.{0..11}.w: values differ, by at most 1..2.05e+03" in text
        assert text.count("by at most") == 1
