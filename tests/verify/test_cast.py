"""The cast: tensors that keep their dtype and tensors that lose their values, each checked against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from statecli.commands.verify.proofs import cast
from statecli.commands.verify.result import Name, Verdict
from statecli.core.errors import UsageError
from statecli.core.finding import Severity

from .proving import find_cell, map_rules, map_verdicts, prove_live, prove_sample, prove_source

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FAILING = {
    "net:Net": {"table": "keeps-dtype"},
    "anchors:Head": {f"anchors[{i}]": "keeps-dtype" for i in range(3)},
    "precomputed:Normed": {"direction": "keeps-dtype"},
    "phases:Phases": {"phases": "imaginary-lost"},
    "rotary:Rotary": {"original_inv_freq": "stale-view"},
}


def run_cast(body: str, *input: str, **options):
    return prove_source(Name.CAST, body, *input, **options)


@pytest.mark.parametrize("spec", FAILING)
def test_sample_has_exactly_the_expected_findings(spec):
    """FAILING has the tensors of each sample and their rules; a finding about another tensor fails the test."""
    assert map_rules(prove_sample(Name.CAST, spec)) == FAILING[spec]


def test_cell_lists_the_dtype_after_each_cast():
    """Each tensor of the state_dict has a cell. The parameter's cell lists the dtypes after each of the three casts,
    the counter keeps its dtype, and `how` lists the calls.
    """
    check = prove_sample(Name.CAST, "batchnorm:Block")
    assert check.how == ".to(torch.float64), .half(), .bfloat16()"
    weight, count = find_cell(check, "casts", "norm.weight"), find_cell(check, "casts", "norm.num_batches_tracked")
    assert (weight.before, weight.after) == ("float32", "float64 → float16 → bfloat16")
    assert (count.before, count.after) == ("int64", "int64")
    module = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
    assert len(map_verdicts(check, "casts")) == len(module.state_dict())


def test_dtype_option_runs_a_single_cast():
    """With `dtype`, the proof runs only the cast to `dtype`."""
    check = prove_sample(Name.CAST, "batchnorm:Block", dtype="bfloat16")
    assert check.how == ".to(torch.bfloat16)"
    assert find_cell(check, "casts", "norm.weight").after == "bfloat16"


@pytest.mark.filterwarnings("ignore")
def test_scripted_module_is_cast_with_to():
    """A scripted module does not support bfloat16(); `.to(torch.bfloat16)` does the same."""
    with pytest.raises(RuntimeError, match="not supported"):
        torch.jit.script(nn.Linear(2, 2)).bfloat16()
    check = prove_live(cast.prove, lambda: torch.jit.script(nn.Linear(2, 2)), None)
    assert (check.verdict, check.reason) == (Verdict.PASSED, None)
    assert check.how == ".to(torch.float64), .half(), .to(torch.bfloat16)"
    assert find_cell(check, "casts", "weight").after == "float64 → float16 → bfloat16"


def test_half_does_not_cast_complex_tensors():
    """As in torch, `.half()` casts only floating-point tensors and `.to(torch.float16)` also casts complex tensors."""
    body = 'self.register_buffer("f", torch.ones(2, dtype=torch.complex64))'
    assert map_rules(run_cast(body, dtype="float16")) == {"f": "imaginary-lost"}
    assert torch.ones(2, dtype=torch.complex64).to(torch.float16).dtype is torch.float16
    assert "after .to(torch.float64)" in run_cast(body).findings[0].message


@pytest.mark.parametrize(
    ("text", "reason"), [("flaot16", "does not have this dtype"), ("int8", "cannot be cast to integers")]
)
def test_invalid_dtype_is_refused(text, reason):
    """The error is a single line and names dtypes that can be used."""
    with pytest.raises(UsageError, match=f"--dtype {text}: .*{reason}; use float64"):
        prove_sample(Name.CAST, "net:Net", dtype=text)


def test_integer_cast_by_the_class_fails():
    """An `_apply` that casts a buffer of indices or changes its values is reported; the help has its first line."""
    body = 'self.register_buffer("i", torch.arange(3))\n---\n'
    body += "def _apply(self, fn, recurse=True):\n    self.i = {}\n    return super()._apply(fn)"
    check = run_cast(body.format("self.i.float()"))
    assert map_rules(check) == {"i": "integer-cast"}
    assert check.findings[0].help == "net.py:7: leave integer tensors unchanged in Net._apply"
    assert map_rules(run_cast(body.format("self.i + 1"))) == {"i": "integer-changed"}
    assert map_rules(run_cast(body.format("self.i.clone()"))) == {}


def test_parameter_skipped_by_half_of_the_class_fails():
    """The `.half()` of the class forgets a parameter."""
    body = "self.w = nn.Parameter(torch.ones(3)); self.v = nn.Parameter(torch.ones(3))\n---\n"
    body += "def half(self):\n    self.w.data = self.w.data.half()\n    return self"
    (finding,) = run_cast(body).findings
    assert (finding.rule, finding.message) == (
        "keeps-dtype",
        "v: is float32 after .half(), although .to(torch.float64) changes its dtype",
    )


def test_metric_state_may_keep_its_dtype():
    """The states of a torchmetrics metric follow a move through `_apply` and keep their dtype on purpose."""
    metrics = pytest.importorskip("torchmetrics")
    check = prove_live(cast.prove, metrics.MeanMetric, None)
    assert check.findings == ()
    assert "keeps its dtype" in find_cell(check, "casts", "mean_value").reason


def test_tensor_without_dimensions_is_a_note():
    """A 0-dim tensor does not affect the dtype of an operator's result."""
    (finding,) = run_cast("self.scale = torch.tensor(2.0)").findings
    assert (finding.rule, finding.severity) == ("keeps-dtype", Severity.NOTE)


def test_other_casts_run_after_a_cast_raises():
    """The reason has the model's own error; the other casts are checked on another instance."""
    body = 'self.w = nn.Parameter(torch.ones(3))\n---\ndef half(self):\n    raise RuntimeError("not today")'
    check = run_cast(body)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "not today (net.py:8)" in check.reason
    assert find_cell(check, "casts", "w").after == "float64 → bfloat16"


def test_wrapper_without_a_length_is_cast():
    """`torch.compile` returns a module whose `len` raises: statecli never evaluates the module's truth value."""
    assert prove_live(cast.prove, lambda: torch.compile(nn.Linear(2, 2)), None).verdict is Verdict.PASSED


def test_uninitialized_parameters_are_inconclusive():
    """torch itself refuses to cast uninitialized parameters, so the verdict is inconclusive."""
    check = prove_live(cast.prove, lambda: nn.LazyLinear(3), None)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.findings == ()


def test_quantized_tensors_keep_their_values():
    """Quantized tensors are integers with a scale."""
    body = 'self.register_buffer("q", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))'
    assert run_cast(body).verdict is Verdict.PASSED


def test_own_to_does_not_excuse_a_tensor_skipped_by_half():
    """nn.Module.half() calls `_apply` and not `.to`, so only the class's own `_apply` may decide to keep a dtype."""
    follows = "def to(self, *args):\n    super().to(*args)\n    self.t = self.t.to(*args)\n    return self\n"
    keeps = "def _apply(self, fn, recurse=True):\n    super()._apply(fn)\n    self.t = fn(self.t).to(self.t.dtype)\n"
    body = "self.t = torch.ones(3)\n---\n"
    check = run_cast(body + follows)
    (finding,) = check.findings
    assert (finding.rule, finding.fqn) == ("keeps-dtype", "t")
    assert finding.message == "t: is float32 after .half(), although .to(torch.float64) changes its dtype"
    assert finding.help.startswith("register the tensor, or cast it in the class's own _apply")
    assert finding.help.endswith("assigned at net.py:6")
    excused = find_cell(run_cast(body + keeps + "    return self\n"), "casts", "t")
    assert (excused.verdict, excused.reason) == (
        Verdict.SKIPPED,
        "the class's own _apply moves the tensor and keeps its dtype",
    )


TO_RETURNS_A_COPY = """
self.l = nn.Linear(3, 3)
---
def to(self, *args):
    import copy
    return nn.Module.to(copy.deepcopy(self), *args)
def forward(self, x):
    return self.l(x)
"""


def test_model_returned_by_the_cast_is_checked():
    """As in `model = model.to(...)`, a `.to` that returns another model is a valid cast."""
    assert run_cast(TO_RETURNS_A_COPY).verdict is Verdict.PASSED


VIEW = """
self.a = nn.Linear(3, 3)
self.w = {view}
---
def forward(self, x):
    return self.a(x) + self.w.sum()
"""


@pytest.mark.parametrize("view", ["self.a.weight.detach()[:2]", "self.a.weight[:2]", "self.a.weight.data"])
def test_view_of_the_old_memory_fails(view):
    """The view has no row, but the finding has its line. The oracle is the view's dtype after .half()."""
    check = run_cast(VIEW.format(view=view))
    assert map_rules(check) == {"w": "stale-view"}
    (finding,) = check.findings
    assert finding.message == (
        "w is another name of a.weight, but still points to the old memory after a move; "
        "w is float32 after .to(torch.float64)"
    )
    assert (finding.origin.file, finding.origin.line) == ("net.py", 8)
    assert finding.help.startswith("replace the attribute with a property")
    assert (find_cell(check, "casts", "w").after, find_cell(check, "casts", "a.weight").verdict) == (
        "float32",
        Verdict.PASSED,
    )
    model = nn.Linear(3, 3)
    kept_view = eval(view.replace("self.a", "model"), {"model": model})  # noqa: S307 - one of the texts above
    assert (model.half().weight.dtype, kept_view.dtype) == (torch.float16, torch.float32)


def test_second_name_of_a_parameter_passes():
    """A cast keeps the identity of a Parameter, so all names of the Parameter follow."""
    check = run_cast(VIEW.format(view="self.a.weight"))
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    check = run_cast("self.a = nn.Linear(3, 3); self.all = [self.a.weight]; self.l = nn.LSTM(3, 3)")
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())


def test_help_names_the_apply_that_skips_a_parameter():
    """The help gives the line of the class's `_apply`, which causes the failure."""
    body = "self.w = nn.Parameter(torch.ones(3))\n---\ndef half(self):\n    return self.to(torch.float16)\n"
    assert run_cast(body).findings == ()
    body += "def _apply(self, fn, recurse=True):\n    return self\n"
    assert run_cast(body).findings[0].help == "net.py:9: call super() in Net._apply and cast this tensor too"


RECAST = """
self.lin = nn.Linear(4, 4)
self.table = torch.arange(4.0)
---
def forward(self, x):
    y = self.lin(x)
    return {}
"""


@pytest.mark.parametrize(
    "result",
    [
        "y + self.table.to(y)",
        "y + self.table[:4].to(y.device, y.dtype)",
        "y + self.table.type_as(y)",
        "y + (self.table.to(y) if self.training else self.table.view(4).to(y))",
    ],
)
def test_tensor_cast_by_forward_at_each_call_is_a_note(result):
    """The table keeps its dtype, but no other operator reads the table before the cast."""
    check = run_cast(RECAST.format(result), "2x4")
    (finding,) = check.findings
    assert (finding.severity, check.verdict) == (Severity.NOTE, Verdict.PASSED)
    assert finding.message == "table: is float32 after .to(torch.float64); forward casts the tensor at each call"
    assert find_cell(check, "casts", "table").verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    "result",
    [
        "y + self.table",
        "y + self.table.to(y.device)",
        "y + self.table.double()",
        "y + self.table.to(torch.float64)",
        "y + self.table.to(y) + self.table",
        "y + (self.table if self.training else self.table.to(y))",
        "y + self.table.double().to(y)",
        "y",
        "y + self.table.to(y) + (1 / 0 if y.dtype is torch.float64 else 0)",
    ],
)
def test_tensor_not_always_cast_by_forward_stays_a_warning(result):
    """Another operator reads the table, forward always casts the table to a fixed dtype, or forward did not run."""
    check = run_cast(RECAST.format(result), "2x4")
    assert (check.findings[0].severity, check.verdict) == (Severity.WARNING, Verdict.FAILED)


def test_random_tensor_that_forward_casts_stays_an_error():
    """The cast in forward does not change the severity: saving the model still loses the random values."""
    body = RECAST.replace("arange(4.0)", "randn(4)").format("y + self.table.to(y)")
    assert run_cast(body, "2x4").findings[0].severity is Severity.ERROR


def test_finding_without_an_input_stays_a_warning():
    """Forward does not run, so the proof does not know that forward casts the table."""
    assert run_cast(RECAST.format("y + self.table.to(y)")).findings[0].severity is Severity.WARNING
