"""The command line of verify: exit codes, streams, options, and the results for the sample models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest

from statecli.commands.verify import run as proving
from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict
from statecli.core.errors import ModelError
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import Kind
from statecli.core.selection import Selection

from .forked_python import run_python

NET = "sample_models/net.py:Net"
pytestmark = pytest.mark.usefixtures("in_project")


def build_passing_check(name):
    """Return a proof that passes for each tensor."""

    def prove(subject, _request):
        cells = {fqn: Cell(Verdict.PASSED) for fqn in subject.rows_by_fqn}
        return Check(name, Verdict.PASSED, f"a {name.value}", columns=(Column(f"{name.value}s", cells),))

    return prove


def build_check(name, verdict, reason=None, fqn=None):
    """Return a proof with this verdict, for all tensors or for one."""

    def prove(subject, _request):
        columns = (Column("x", {fqn: Cell(verdict, reason=reason)}),) if fqn else ()
        message = f"{fqn}: {reason}"
        finding = Finding("left-behind", Severity.ERROR, message, subject.target, fqn)
        findings = (finding,) if verdict is Verdict.FAILED else ()
        return Check(name, verdict, "", None if fqn else reason, columns, findings)

    return prove


@pytest.fixture
def proofs(monkeypatch):
    """Every proof passes, except for those given: `proofs(step=ending(...))`."""

    def set_proofs(**others):
        def prove(name, subject, request):
            return others.get(name.value, build_passing_check(name))(subject, request)

        monkeypatch.setattr(proving, "_prove", prove)

    set_proofs()
    return set_proofs


def failed_check(fqn="table"):
    return build_check(Name.MOVE, Verdict.FAILED, "stays", fqn)


def skipped_check():
    return build_check(Name.STEP, Verdict.SKIPPED, "no input given")


def inconclusive_check():
    return build_check(Name.FORWARD, Verdict.INCONCLUSIVE, "net.py:7: depends on data")


# Exit codes.


def test_passed_checks_exit_with_0(statecli, proofs):
    """Nothing found, nothing on stderr."""
    result = statecli("verify", NET)
    assert (result.code, result.err) == (0, "")


def test_failed_check_exits_with_1(statecli, proofs):
    """The finding is in the result, and stderr stays empty."""
    proofs(move=failed_check())
    result = statecli("verify", NET)
    assert (result.code, result.err) == (1, "")
    assert "error[unregistered-tensor]: table: is a plain attribute" in result.out


def test_inconclusive_check_exits_with_2(statecli, proofs):
    """Inconclusive is not passed; one line names the proof and the reason, and the other results are shown."""
    proofs(forward=inconclusive_check())
    result = statecli("verify", NET)
    assert (result.code, result.err) == (2, f"statecli: {NET}: forward: net.py:7: depends on data\n")
    assert "move: a move" in result.out


def test_failed_and_inconclusive_checks_exit_with_1(statecli, proofs):
    """A failure gives status 1, even if another proof is inconclusive."""
    proofs(move=failed_check(), forward=inconclusive_check())
    result = statecli("verify", NET)
    assert result.code == 1
    assert result.err == f"statecli: {NET}: forward: net.py:7: depends on data\n"


def test_skipped_check_fails_only_if_requested(statecli, proofs):
    """A skipped proof is a failure only if requested."""
    proofs(step=skipped_check())
    result = statecli("verify", NET)
    assert (result.code, result.err) == (0, "")
    assert "step: no input given" in result.out
    requested = statecli("verify", NET, "--check", "step")
    assert (requested.code, requested.err) == (2, f"statecli: {NET}: step: no input given\n")


def test_run_with_only_skipped_checks_exits_with_2(statecli, proofs):
    """If every proof is skipped, there is no result."""
    proofs(**{name.value: build_check(name, Verdict.SKIPPED, "no") for name in Name})
    result = statecli("verify", NET)
    assert result.code == 2
    assert "no check ran" in result.err


def test_model_without_tensors_exits_with_2(statecli, proofs, tmp_path):
    """Without a tensor, there is nothing to prove."""
    (tmp_path / "empty.py").write_text("from torch import nn\nEmpty = nn.ReLU\n")
    result = statecli("verify", f"{tmp_path}/empty.py:Empty")
    assert result.code == 2
    assert "no tensor" in result.err


def test_check_that_raises_does_not_stop_the_other_checks(statecli, proofs):
    """The other proofs run all the same."""

    def raise_model_error(_subject, _request):
        raise ModelError(f"{NET}: net.py:9: ValueError: no")

    proofs(copy=raise_model_error)
    result = statecli("verify", NET, "-f", "json")
    assert (result.code, result.err) == (2, f"statecli: {NET}: copy: net.py:9: ValueError: no\n")
    assert [check["passed"] for check in result.json["checks"]] == [True, True, True, None, True, True]


@pytest.mark.parametrize(
    ("words", "expected_text"),
    [
        (["model.safetensors"], "is not a model class"),
        ([NET, "--device", "gpu"], "--device gpu: must be cuda, cuda:N, cpu, meta or fake-cuda"),
        ([NET, "--device", "cuda:01"], "--device cuda:01: must be cuda"),
        ([NET, "--check", "moves"], "move"),
        ([NET, "--check", "cast", "--device", "meta"], "--check leaves out forward and move"),
        ([NET, "--check", "move", "--dtype", "float16"], "--check leaves out cast"),
        ([NET, "--check", "move", "--optimizer", "adam"], "--check leaves out resume and step"),
        ([NET, "--input", "2x3", "--input-from", "a.py:make"], "contradict each other"),
        ([NET, "-i", "nothing"], "none of its 3 tensors matches"),
        (["sample_models/net.py:Nett"], "Nett"),
        ([], "MODEL"),
    ],
)
def test_a_mistake_is_one_line(statecli, proofs, words, expected_text):
    """The status is 2, stdout is empty, and the line names the mistake."""
    result = statecli("verify", *words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert expected_text in result.err


# Options reach the proofs.


def test_checks_run_once_each_in_their_order(statecli, proofs):
    """However they were asked for."""
    result = statecli("verify", NET, "--check", "save", "--check", "move", "--check", "save", "-f", "json")
    assert [check["check"] for check in result.json["checks"]] == ["move", "save"]


def test_options_reach_the_request(statecli, monkeypatch):
    """Each option is handed on under its name."""
    seen = []

    def run(request, *_):
        seen.append(request)
        raise ModelError("enough")

    monkeypatch.setattr(proving, "run", run)
    words = ["--check", "move", "--check", "step", "--check", "cast", "--device", "meta", "--dtype", "bfloat16"]
    words += ["--optimizer", "adamw", "--input", "2x3", "--input", "y=int64:2", "--init-device", "meta"]
    words += ["-i", "a*", "-x", "b*", "--kind", "buffer"]
    assert statecli("verify", NET, *words).code == 2
    assert seen == [
        proving.Request(
            NET,
            (Name.MOVE, Name.CAST, Name.STEP),
            "meta",
            "bfloat16",
            "adamw",
            ("2x3", "y=int64:2"),
            None,
            "meta",
            Selection(("a*",), ("b*",), (Kind.BUFFER,)),
        )
    ]


def test_filters_leave_out_findings_too(statecli):
    """A tensor excluded by -x is neither shown nor a failure."""
    result = statecli("verify", NET, "-x", "table", "--check", "move")
    assert result.code == 0
    assert "table" not in result.out


# Streams and outputs.


def test_quiet_prints_findings_or_nothing(statecli, proofs):
    """-q is a gate."""
    assert statecli("verify", NET, "-q").out == ""
    proofs(move=failed_check())
    assert statecli("verify", NET, "-q").out == (
        "error[unregistered-tensor]: table: is a plain attribute, not registered"
        " (float32 [3,3]) [sample_models/net.py:19]\n"
    )


def test_json_fits_its_printed_schema(statecli, proofs):
    """The schema of `statecli schema verify` fits the output of `verify -f json`."""
    proofs(move=failed_check(), step=skipped_check(), forward=inconclusive_check())
    document = statecli("verify", NET, "-f", "json").json
    schema = statecli("schema", "verify")
    assert schema.code == 0
    jsonschema.validate(document, json.loads(schema.out))
    assert document["schema"] == "statecli.verify/1"
    assert document["target"] == NET


def test_an_ascii_stdout_gets_one_character_a_sign():
    """Columns stay columns where the encoding has no tick."""
    words = ["verify", NET, "--check", "move", "--device", "meta", "-f", "markdown"]
    result = run_python(["-m", "statecli", *words], env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 1
    assert "| `param` | + |" in result.stdout
    assert "| `table` | x |" in result.stdout


# The sample models, truly.


def test_the_sample_fails_the_move(statecli):
    """The plain attribute stays; the buffer and the parameter follow."""
    result = statecli("verify", NET, "--check", "move", "--device", "meta", "-f", "json")
    assert result.code == 1
    (check,) = result.json["checks"]
    assert {cell["fqn"]: cell["verdict"] for cell in check["tensors"] if cell["column"] == "moves"} == {
        "param": "passed",
        "mybuffer1": "passed",
        "table": "failed",
    }


def run(folder: Path, source: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `verify net.py:Net` in a process of its own, for at most a minute."""
    (folder / "net.py").write_text(f"import os, threading\nimport torch\nfrom torch import nn\n{source}", "utf-8")
    return run_python(["-m", "statecli", "verify", "net.py:Net", *args], cwd=folder, timeout=60)


def test_a_model_cannot_end_the_process(tmp_path):
    """os._exit in forward is reported, and the status is neither 0 nor 1, because nothing was proved."""
    source = """
class Net(nn.Linear):
    def __init__(self): super().__init__(3, 3)
    def forward(self, x): os._exit(0)
"""
    process = run(tmp_path, source, "--input", "2x3", "--check", "forward")
    assert process.returncode == 2
    assert "raised SystemExit: 0 (net.py:7)" in process.stderr


def test_exception_whose_str_raises_is_reported_by_name_and_line(tmp_path):
    """An exception whose own `__str__` raises makes its proofs inconclusive; the other proofs are shown."""
    source = """
class Odd(Exception):
    def __str__(self): raise RuntimeError("no str")
class Net(nn.Linear):
    def __init__(self): super().__init__(3, 3)
    def forward(self, x): raise Odd
"""
    process = run(tmp_path, source, "--input", "2x3", "-f", "json")
    assert process.returncode == 2
    verdicts = {check["check"]: check["verdict"] for check in json.loads(process.stdout)["checks"]}
    assert (verdicts["move"], verdicts["step"], verdicts["forward"]) == ("passed", "inconclusive", "inconclusive")
    assert "forward: calling the model raised Odd: (its message cannot be shown) (net.py:9)" in process.stderr


def test_torch_setting_of_a_constructor_does_not_affect_checks(tmp_path):
    """Each proof gets a float32 instance, as in the table, although the constructor changes the default dtype."""
    source = """
class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        torch.set_default_dtype(torch.float64)
"""
    process = run(tmp_path, source, "--input", "2x3")
    assert (process.returncode, process.stderr) == (0, "")


def test_child_process_of_a_model_does_not_block_the_exit(tmp_path):
    """An exit handler that waits for a child, as Python's own for multiprocessing, and a reader of the output."""
    source = """
import multiprocessing
class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        multiprocessing.Process(target=threading.Event().wait).start()
"""
    process = run(tmp_path, source, "--check", "move", "-f", "json")
    assert process.returncode == 0
    assert json.loads(process.stdout)["checks"][0]["passed"] is True


def test_repeated_warning_is_one_line(tmp_path):
    """Every instance and every call warns; warnings with the same line and words are one warning."""
    code = """import warnings, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        warnings.warn("old\\nways", FutureWarning)
    def forward(self, x):
        warnings.warn("slow")
        return self.fc(x)
"""
    (tmp_path / "net.py").write_text(code)
    process = run_python(["-m", "statecli", "verify", "net.py:Net", "--input", "3x2"], cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    warning_lines = sorted(line.rpartition("net.py:")[2] for line in process.stderr.splitlines())
    assert warning_lines == ["6: FutureWarning: old ways", "8: UserWarning: slow"]


def test_error_about_embedding_indices_has_the_right_input(statecli, in_tmp_path):
    """torch names neither the option nor the number of ids."""
    Path("emb.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Embedding(50, 8))\n"
    )
    result = statecli("verify", "emb.py:Net", "--check", "forward", "--input", "int64:2x8<90")
    assert result.code == 2
    assert "; the embedding takes integers from 0 to 49: --input 'int64:2x8<50'" in result.err


LAYERS = """
from torch import nn
def linear(): return nn.Sequential(nn.Linear(12, 3))
def flat(): return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
def conv(): return nn.Sequential(nn.Conv2d(3, 4, 3))
def signal(): return nn.Sequential(nn.Conv1d(2, 4, 3))
def later(): return nn.Sequential(nn.Linear(4, 5), nn.Linear(6, 2))
"""


@pytest.mark.parametrize(
    ("spec", "size", "answer"),
    [
        ("linear", "2x5", "takes 12 values in the last dimension: --input 2x12"),
        ("linear", "7x2x5", "takes 12 values in the last dimension: --input 7x2x12"),
        ("conv", "2x4x8x8", "takes 3 channels: --input 2x3x8x8"),
        ("conv", "4x8x8", "takes 3 channels: --input 3x8x8"),
        ("signal", "1x3x9", "takes 2 channels: --input 1x2x9"),
        ("flat", "2x5x2", None),
        ("conv", "2x4", None),
        ("later", "2x4", None),
    ],
)
def test_error_about_an_input_size_has_the_right_input(statecli, in_tmp_path, spec, size, answer):
    """The right size is given only if the input of the layer is that of the model, so the printed line works."""
    Path("layers.py").write_text(LAYERS)
    result = statecli("verify", f"layers.py:{spec}", "--check", "forward", "--input", size)
    assert result.code == 2
    assert ("the first layer" in result.err) == (answer is not None)
    if answer is not None:
        assert result.err.rstrip().endswith(answer)
        (line,) = (text for text in result.out.splitlines() if text.endswith(answer))
        assert line.startswith("? forward: ")
        right = answer.rpartition(" ")[2]
        assert statecli("verify", f"layers.py:{spec}", "--check", "forward", "--input", right).code == 0


BIG = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        x = x + self.out(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))

class Big(nn.Module):
    def __init__(self, d=8, layers=12):
        super().__init__()
        self.embed = nn.Embedding(20, d)
        self.blocks = [Block(d) for _ in range(layers)]
        self.scale = torch.full((d,), 0.5)
        self.head = nn.Linear(d, 20)

    def forward(self, ids):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""


def test_two_mistakes_are_two_errors_in_every_output(statecli, in_tmp_path, tmp_path, monkeypatch):
    """The mistakes are one line of source with 96 tensors, and one attribute; the table is a page at 100 columns."""
    (tmp_path / "big.py").write_text(BIG)
    monkeypatch.setenv("COLUMNS", "100")
    others = ("plain", "markdown", "html", "github", "junit", "sarif")
    reports = [word for output in others for word in ("--report", f"{output}={output}.txt")]
    words = ("verify", "big.py:Big", "--input", "int64:2x8<20", "-f", "table", *reports)
    table = statecli(*words).out
    texts = {"table": table, **{output: Path(f"{output}.txt").read_text() for output in others}}
    for output in ("table", "plain", "markdown", "html", "github"):
        assert "2 errors" in texts[output], output
    assert table.splitlines()[-1] == texts["plain"].splitlines()[-1] == "2 errors: exit status 1"
    assert len(table.splitlines()) <= 45
    # A line that counts one hidden consequence would take the same room as the consequence.
    assert "on cpu while the other operands are on cuda:0, in addmm at big.py:12, 13" in table
    assert "more (--all)" not in table
    assert "blocks[{0..11}].* (96 tensors)" in table
    xml = texts["junit"]
    assert 'failures="2" errors="0"' in xml
    assert [line.split(' name="')[1].split('"')[0] for line in xml.splitlines() if "<testcase" in line] == [
        "unregistered-tensor",
        "unregistered-module",
        "copy",
    ]
    assert len(xml.splitlines()) < 60
    assert texts["github"].count("::error ") == 2
    assert len(json.loads(texts["sarif"])["runs"][0]["results"]) == 2


@pytest.mark.parametrize(
    ("before", "after"), [("in self.blocks:", "in self.blocks[1:]:"), ("self.out(self.norm(x))", "self.norm(x)")]
)
def test_a_layer_that_forward_does_not_read_takes_no_screen(
    statecli, in_tmp_path, tmp_path, monkeypatch, before, after
):
    """A block, or a layer of each block: at most 45 lines."""
    (tmp_path / "big.py").write_text(BIG.replace(before, after).replace("torch.full((d,), 0.5)", "torch.randn(d)"))
    monkeypatch.setenv("COLUMNS", "100")
    table = statecli("verify", "big.py:Big", "--input", "int64:2x8<20", "-f", "table").out
    assert len(table.splitlines()) <= 45, table


def test_all_option_shows_every_tensor(statecli, in_tmp_path, tmp_path, monkeypatch):
    """The lines of one consequence are joined without the option."""
    (tmp_path / "big.py").write_text(BIG)
    monkeypatch.setenv("COLUMNS", "100")
    joined, whole = (statecli("verify", "big.py:Big", "-f", "table", *options).out for options in ((), ("--all",)))
    assert "blocks[{0..11}].* (96 tensors)" in joined
    assert "blocks[7].down.bias" not in joined
    assert "blocks[7].down.bias" in whole
    assert "blocks[{0..11}]" not in whole


def test_line_of_a_check_ends_with_the_input_to_type(statecli, tmp_path):
    """The input follows the error of torch."""
    (tmp_path / "emb.py").write_text("from torch import nn\ndef make(): return nn.Embedding(100, 8)\n")
    text = statecli("verify", f"{tmp_path}/emb.py:make", "--input", "2x16", "-f", "table").out
    advice = "the embedding takes integers from 0 to 99: --input 'int64:2x16<100'"
    assert f"; {advice} ? forward" in " ".join(text.split())
