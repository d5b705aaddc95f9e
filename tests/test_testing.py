"""assert_state_follows, as a function and as a pytest fixture: a failure has the table of verify."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import statecli  # noqa: E402
from statecli import render  # noqa: E402
from statecli.commands.verify.result import Verdict, Verification  # noqa: E402
from statecli.core.errors import StateError  # noqa: E402
from statecli.report import View, verify  # noqa: E402
from statecli.testing import assert_state_follows as checked  # noqa: E402

from .forked_python import run_python  # noqa: E402

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("in_project")


class Left(nn.Module):
    """A model with a table that is left on its old device."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.table = torch.ones(4)

    def forward(self, x):
        return self.fc(x) + self.table


def test_passing_model_returns_the_verification():
    """The result of verify; without inputs, step and forward may be skipped."""
    result = checked(nn.Linear(4, 4))
    assert isinstance(result, Verification)
    assert [check.verdict for check in result.checks] == [Verdict.PASSED] * 4 + [Verdict.SKIPPED] * 2
    assert {check.verdict for check in checked(nn.Linear(4, 4), inputs="2x4").checks} == {Verdict.PASSED}


def test_a_failure_has_the_table_of_the_command():
    """The table is that of the command on a terminal, below a line with the failing proofs."""
    spec = "sample_models/net.py:Net"
    with pytest.raises(AssertionError) as raised:
        checked(spec, device="meta", checks=["move", "save"])
    verdict, _, table = str(raised.value).partition("\n\n")
    assert verdict == f"{spec}: 1 error: 1 of 3 tensors failed move, save"
    verification = statecli.verify(spec, device="meta", checks=["move", "save"])
    look = render.RenderOptions(terminal=True, width=100)
    assert (
        table
        == render.format_report(verify.build_verify_report(verification, View()), render.Output.TABLE, look).rstrip()
    )
    assert "left on cpu when the model moves to meta" in table


def test_a_failure_is_laid_out_for_a_terminal():
    """No line is wider than 100 columns, and a fact about every row is given once."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model.register_forward_hook(lambda *_: None)  # which cannot be pickled
    with pytest.raises(AssertionError, match="copy inconclusive") as raised:
        checked(model, inputs="2x4")
    text = str(raised.value)
    assert max(map(len, text.splitlines())) <= 100
    assert " ".join(text.split()).count("pickling the model raised") <= 2


def test_check_without_a_remaining_tensor_does_not_pass():
    """A tensor without a gradient has no part in a step, so the requested proof proves nothing."""
    with pytest.raises(AssertionError, match="step: the filters exclude all tensors of this check"):
        checked(Left(), include="table", checks=["step"], inputs="2x4")
    assert checked(Left(), include="fc.*", checks=["step"], inputs="2x4").checks[0].verdict is Verdict.PASSED


def test_failure_of_a_live_model_names_the_tensor():
    """The failure of a live model names the tensor."""
    with pytest.raises(AssertionError, match=r"warning\[unregistered-tensor\]: table: is a plain attribute"):
        checked(Left(), device="meta", checks="move")


def test_inconclusive_check_does_not_pass():
    """The assertion has the error of forward."""
    with pytest.raises(AssertionError, match="step inconclusive") as raised:
        checked(nn.Linear(4, 4), checks=["step"], inputs="2x5")
    assert "shapes cannot be multiplied" in " ".join(str(raised.value).split())


def test_skipped_requested_check_does_not_pass():
    """No inputs, and step was named: nothing was checked."""
    with pytest.raises(AssertionError, match="no input given"):
        checked(nn.Linear(4, 4), checks=["step"])


def test_model_without_tensors_does_not_pass():
    """There was nothing to prove."""
    with pytest.raises(AssertionError, match="no tensor"):
        checked(nn.ReLU())


def test_excluded_tensor_is_not_checked():
    """A tensor that may stay on its device is excluded by name."""
    actual = checked(Left(), checks=["move", "cast"], device="meta", exclude="table")
    assert [row.fqn for row in actual.state.tensors] == ["fc.weight", "fc.bias"]


def test_invalid_input_raises_a_state_error():
    """The error is not an AssertionError, because the model is not at fault."""
    with pytest.raises(StateError, match="is not a shape"):
        checked(nn.Linear(2, 2), inputs="2xx")


# --- the plugin -----------------------------------------------------------------------------------------------------

USING = """
import torch
from torch import nn

class Left(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.table = torch.ones(4)

def test_passes(assert_state_follows):
    assert assert_state_follows(nn.Linear(4, 4), inputs="2x4").findings == ()

def test_fails(assert_state_follows):
    assert_state_follows(Left(), device="meta", checks=["move"])
"""
NOT_USING = """
import sys

def test_nothing_is_imported():
    assert not set(sys.modules) & {"torch", "numpy", "msgspec", "statecli.testing"}
"""


def run_pytest(folder, source, run=run_python):
    """Run pytest with the plugin, whether or not the plugin is installed."""
    (folder / "test_it.py").write_text(textwrap.dedent(source))
    words = ["-p", "no:cacheprovider", "-p", "statecli.pytest_plugin", "-q", "test_it.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run(["-m", "pytest", *words], cwd=folder, env=environment)


def start_new_process(words, **options):
    """Run like `run_python`, in a newly started process without imports."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **options)


def test_the_fixture_passes_and_fails(tmp_path):
    """The failure shows the table and the line of the test, and no line of ours."""
    result = run_pytest(tmp_path, USING)
    assert "1 failed, 1 passed" in result.stdout
    assert "Left: 1 warning: 1 of 3 tensors failed move" in result.stdout
    assert "left on cpu when the model moves to meta" in result.stdout
    assert 'assert_state_follows(Left(), device="meta", checks=["move"])' in result.stdout
    assert "statecli/testing.py" not in result.stdout


def test_usage_error_in_the_fixture_is_one_line(tmp_path):
    """Below the line of the test; no line of ours."""
    using = "def test_it(assert_state_follows):\n    assert_state_follows(object, inputs=3)\n"
    result = run_pytest(tmp_path, using)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("E  ")]
    assert line.endswith("UsageError: object is a class: pass an instance, or the spec 'file.py:object'"), line
    assert "statecli/" not in result.stdout


def test_pytest_run_without_the_fixture_imports_nothing(tmp_path):
    """The plugin is loaded by every pytest run on the machine."""
    result = run_pytest(tmp_path, NOT_USING, start_new_process)
    assert result.returncode == 0, result.stdout


def test_the_entry_point_names_the_plugin():
    """The entry point registers the fixture if the package is installed."""
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nstatecli = "statecli.pytest_plugin"\n' in text


def test_models_are_tested_without_a_test_file(tmp_path):
    """`pytest --statecli` and the key `statecli_models`: each model has a test, and a failure has its table."""
    (tmp_path / "net.py").write_text((ROOT / "sample_models" / "net.py").read_text())
    (tmp_path / "net_fixed.py").write_text((ROOT / "sample_models" / "net_fixed.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nstatecli_models = net_fixed.py:Net\n")
    options = ["--statecli", "net.py:Net", "--statecli", "nett.py:Net", "--statecli-input", "4x3"]
    process = run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", *options], cwd=tmp_path)
    assert "2 failed, 1 passed" in process.stdout
    assert "error[unregistered-tensor]: table" in process.stdout
    assert "nett.py: no such file; did you mean net.py?" in process.stdout
    assert "Traceback" not in process.stdout
    assert "pytest_plugin.py" not in process.stdout


def test_models_of_the_configuration_are_found_from_any_folder(tmp_path):
    """A path is relative to the configuration file, so a run in a folder of tests finds the file."""
    (tmp_path / "net_fixed.py").write_text((ROOT / "sample_models" / "net_fixed.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nstatecli_models = net_fixed.py:Net\n")
    (tmp_path / "tests").mkdir()
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--statecli-input", "4x3"]
    process = run_python(words, cwd=tmp_path / "tests")
    assert "1 passed" in process.stdout, process.stdout
