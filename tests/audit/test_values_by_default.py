"""Values are read by default up to a size, and a verdict says so where they were not read."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from statecli.commands.audit import values_budget
from statecli.commands.audit.run import Request, audit

from ..published import github


@pytest.fixture
def nan_checkpoint(in_tmp_path):
    """A checkpoint with 40 bytes of NaN, in the current folder."""
    torch.save({"w": torch.full((10,), float("nan"))}, "a.pt")
    return "a.pt"


def test_nan_is_found_without_an_option(nan_checkpoint, statecli):
    """A small file is read completely."""
    result = statecli("audit", nan_checkpoint, "-f", "json")
    assert (result.code, [finding["rule"] for finding in result.json["findings"]]) == (1, ["nan"])
    assert result.json["not_checked"] == []


def test_no_values_option_is_in_the_verdict(nan_checkpoint, statecli):
    """The run passes, and the verdict counts the tensors whose values were not read."""
    result = statecli("audit", nan_checkpoint, "--no-values")
    assert result.code == 0
    assert "not checked: 1 tensor (values not read, because of --no-values)" in result.out


@pytest.mark.parametrize(("limit", "code"), [(40, 1), (39, 0)])
def test_default_limit_counts_bytes(nan_checkpoint, statecli, monkeypatch, limit, code):
    """For one byte above the limit, the verdict says that the values were not read."""
    monkeypatch.setattr(values_budget, "DEFAULT_VALUE_BYTES", limit)
    result = statecli("audit", nan_checkpoint, "-f", "json")
    assert result.code == code
    assert [gap["count"] for gap in result.json["not_checked"]] == [1] * (code == 0)
    assert statecli("audit", nan_checkpoint, "--values").code == 1


def test_unread_values_are_a_warning_on_github_and_in_the_last_line(nan_checkpoint, statecli, monkeypatch):
    """The exit status alone lets a CI job pass; each target has its own warning, with the option to add."""
    torch.save({"w": torch.zeros(10)}, "b.pt")
    monkeypatch.setattr(values_budget, "DEFAULT_VALUE_BYTES", 39)
    message = (
        "not checked: 1 tensor (values not read: the target is larger than the default limit of 39 B; add --values)"
    )
    for quiet_options in ([], ["-q"]):
        result = statecli("audit", nan_checkpoint, "b.pt", "-f", "github", *quiet_options)
        title = {"title": "statecli not-checked"}
        assert github(result.out) == [
            ("warning", {"file": name, **title}, message) for name in (nan_checkpoint, "b.pt")
        ]
        assert result.code == 0
    (issue,) = statecli("audit", nan_checkpoint, "-f", "gitlab").json
    assert (issue["check_name"], issue["severity"]) == ("not-checked", "minor")
    last = statecli("audit", nan_checkpoint, "-f", "table").out.splitlines()[-1]
    assert last == "no findings, 1 tensor not checked: exit status 0"


@pytest.mark.filterwarnings("ignore")
def test_the_limit_counts_the_scales_of_a_quantized_tensor(nan_checkpoint, monkeypatch):
    """The scales are read with the elements, and there may be more scales than elements."""
    scales, zeros = torch.ones(100, dtype=torch.float64), torch.zeros(100, dtype=torch.int64)
    torch.save({"w": torch.quantize_per_channel(torch.zeros(1, 100), scales, zeros, 1, torch.qint8)}, nan_checkpoint)
    monkeypatch.setattr(values_budget, "DEFAULT_VALUE_BYTES", 1699)
    assert [gap.why.split(":")[0] for gap in audit(Request((nan_checkpoint,))).not_checked] == ["values not read"]
    monkeypatch.setattr(values_budget, "DEFAULT_VALUE_BYTES", 1700)
    assert not audit(Request((nan_checkpoint,))).not_checked


@pytest.mark.parametrize(("limit", "code"), [(2, 1), (1, 0)])
def test_default_limit_counts_tensors(nan_checkpoint, statecli, monkeypatch, limit, code):
    """Even a small tensor costs time: 300,000 tensors took a minute."""
    torch.save({"w": torch.full((2,), float("nan")), "v": torch.zeros(2)}, nan_checkpoint)
    monkeypatch.setattr(values_budget, "DEFAULT_VALUE_TENSORS", limit)
    result = statecli("audit", nan_checkpoint, "-f", "json")
    assert result.code == code
    assert [gap["count"] for gap in result.json["not_checked"]] == [2] * (code == 0)


def test_targets_share_the_default_limit(nan_checkpoint, monkeypatch):
    """The targets share one limit in order: many small files cost no more than a large file."""
    torch.save({"w": torch.zeros(10)}, "b.pt")
    monkeypatch.setattr(values_budget, "DEFAULT_VALUE_BYTES", 60)
    result = audit(Request((nan_checkpoint, "b.pt")))
    assert [len(target.not_checked) for target in result.targets] == [0, 1]
    assert result.not_checked[0].why.startswith("values not read: the target is larger than the default limit of 60 B")


def test_rules_that_need_no_values_read_none(nan_checkpoint):
    """If no selected rule needs values, no value counts as unread."""
    actual_audit = audit(Request((nan_checkpoint,), select=("unsafe-global",)))
    assert actual_audit.not_checked == ()


def test_configuration_sets_values_unless_an_option_does(nan_checkpoint, statecli, tmp_path):
    """`values = false` is `--no-values`; `--values` comes first."""
    (tmp_path / "statecli.toml").write_text("values = false\n")
    assert statecli("audit", nan_checkpoint).code == 0
    assert statecli("audit", nan_checkpoint, "--values").code == 1


def test_values_and_no_values_contradict_each_other(nan_checkpoint, statecli):
    """The usage error has one line."""
    result = statecli("audit", nan_checkpoint, "--values", "--no-values")
    assert (result.code, result.err) == (
        2,
        "statecli: --no-values and --values contradict each other; leave one of them out\n",
    )


def test_audit_without_values_does_not_import_numpy(nan_checkpoint):
    """An audit of names and pickles stays light."""
    code = "import sys, statecli.cli.command_runner, statecli.__main__ as m\n"
    code += f"sys.argv = ['statecli', 'audit', {nan_checkpoint!r}, '--no-values']"
    code += "\ntry:\n    m.main()\nfinally:\n    assert 'numpy' not in sys.modules"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
