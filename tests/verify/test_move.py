"""The move: tensors that a model's `.to` leaves behind, unties or changes, each checked against torch."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from statecli.commands.verify.proofs import cast, move, save
from statecli.commands.verify.result import Name, Verdict
from statecli.core.errors import UsageError
from statecli.core.finding import Severity
from statecli.core.model_state import SAMPLE_INPUT_NOTE

from .proving import find_cell, map_rules, map_verdicts, prove_live, prove_sample, prove_source

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FAILING = {
    "net:Net": {"table": "left-behind"},
    "anchors:Head": {f"anchors[{i}]": "left-behind" for i in range(3)},
    "rotary:Rotary": {"original_inv_freq": "stale-view"},
    "precomputed:Normed": {"direction": "left-behind"},
}
PASSING = ["net_fixed:Net", "anchors_fixed:Head", "rotary_fixed:Rotary", "precomputed_fixed:Normed"]
PASSING += ["tied:Tied", "positions:Positions", "batchnorm:Block", "frozen:Frozen", "plain_lists_fixed:Lists"]


def run_move(body: str, *input: str, **options):
    return prove_source(Name.MOVE, body, *input, **options)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("spec", FAILING)
def test_sample_has_exactly_the_expected_findings(spec, device):
    """Exactly the expected tensors fail, with the expected rules, on meta and on their own device."""
    check = prove_sample(Name.MOVE, spec, device=device)
    assert check.verdict is Verdict.FAILED
    assert map_rules(check) == FAILING[spec]


@pytest.mark.parametrize("spec", PASSING)
def test_sound_sample_passes(spec):
    """Every tensor follows, including tied weights; `tests/test_samples.py` has the other devices."""
    check = prove_sample(Name.MOVE, spec, device="cpu")
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert set(map_verdicts(check, "moves").values()) == {"passed"}


def test_cell_and_message_have_the_devices():
    """The cell has torch's devices before and after; the finding has the tensor, device, line and fix."""
    check = prove_sample(Name.MOVE, "net:Net")
    assert (find_cell(check, "moves", "param").before, find_cell(check, "moves", "param").after) == ("cpu", "meta")
    assert (find_cell(check, "moves", "table").before, find_cell(check, "moves", "table").after) == ("cpu", "cpu")
    (finding,) = check.findings
    assert finding.message == "table: left on cpu when the model moves to meta"
    assert 'net.py:19: self.register_buffer("table", torch.randn(size, size))' in finding.help


def test_tied_buffers_are_reported():
    """After a move, each of the two names has its own storage, on any device."""
    check = run_move('self.register_buffer("a", torch.ones(3)); self.register_buffer("b", self.a)')
    assert map_rules(check) == {"b": "untied-by-move"}
    assert find_cell(check, "moves", "b").verdict is Verdict.FAILED


@pytest.mark.parametrize("name", [Name.MOVE, Name.COPY])
def test_chunks_of_one_tensor_are_not_tied(name):
    """They share a storage, but no element; a third tensor that overlaps both is tied to them."""
    chunks = "q, k = torch.ones(6, 3).chunk(2)\nself.q = nn.Parameter(q); self.k = nn.Parameter(k)"
    assert prove_source(name, chunks).findings == ()
    assert set(map_rules(prove_source(name, f"{chunks}\nself.w = nn.Parameter(q[1:])"))) == {"w"}


def test_tied_parameters_pass():
    """A move to meta creates a Parameter for each name; a move to CUDA does not, and only the move to CUDA counts."""
    check = run_move("self.a = nn.Linear(3, 3); self.b = nn.Linear(3, 3); self.b.weight = self.a.weight")
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())


def test_plain_list_of_registered_parameters_follows():
    """Meta leaves the list with the old objects; CUDA swaps their data."""
    assert run_move("self.a = nn.Linear(3, 3); self.all = [self.a.weight, self.a.bias]").findings == ()


def test_tensor_without_dimensions_is_a_note():
    """The 0-dim tensor stays on the CPU, but operators on CUDA accept a 0-dim tensor from the CPU."""
    (finding,) = run_move("self.scale = torch.tensor(2.0)").findings
    assert (finding.rule, finding.severity) == ("left-behind", Severity.NOTE)


def test_class_attribute_fails():
    """Forward can read the class attribute through the instance, and a move leaves the attribute on its device."""
    assert map_rules(run_move("pass\n---\ntable = torch.ones(3)")) == {"table": "left-behind"}


def test_parameter_skipped_by_apply_fails():
    """A module whose own `_apply` does nothing keeps its parameter on the old device."""
    check = run_move("self.w = nn.Parameter(torch.ones(3))\n---\ndef _apply(self, fn, recurse=True):\n    return self")
    assert map_rules(check) == {"w": "left-behind"}


@pytest.mark.parametrize("old", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weight_recomputed_by_torch_is_skipped(old):
    """The weight attribute of old weight_norm and spectral_norm is left behind, but no forward reads its value."""
    check = prove_live(move.prove, lambda: old(nn.Linear(3, 3)), "meta")
    assert check.verdict is Verdict.PASSED
    assert check.findings == ()
    assert map_verdicts(check, "moves").get("weight", "skipped") == "skipped"


class Shifted(nn.Module):
    """A model with a table that a trace turns into a constant."""

    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(2, 2), torch.rand(2)

    def forward(self, x):
        return self.fc(x) + self.table


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prove", [partial(move.prove, device="meta"), partial(cast.prove, dtype=None), save.prove])
def test_constants_of_a_trace_are_inconclusive(prove):
    """The proofs cannot check constants of a trace, so the verdict is inconclusive; a trace of a Linear passes."""
    check = prove_live(prove, lambda: torch.jit.trace(Shifted(), torch.ones(1, 2)))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "the model contains 1 constant tensor" in check.reason
    check = prove_live(prove, lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    assert check.verdict is Verdict.PASSED


@pytest.mark.filterwarnings("ignore")
def test_plain_tensor_of_a_scripted_module_is_reported():
    """The table is left behind by a move, and a loaded model has another table."""
    build_module = lambda: torch.jit.script(Shifted())  # noqa: E731
    assert map_rules(prove_live(move.prove, build_module, "meta")) == {"table": "left-behind"}
    assert map_rules(prove_live(save.prove, build_module)) == {"table": "lost-by-saving"}


@pytest.fixture
def _single_process_group():
    """A process group with only this process, because DDP needs a process group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def build_distributed(*also):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    for name in also:
        setattr(model, name, list(model.modules_buffers))
    return model


@pytest.mark.usefixtures("_single_process_group")
def test_buffer_lists_of_ddp_are_not_reported():
    """DDP's lists of buffers are stale until its next synchronization. The oracle: DDP's own `_sync_buffers`."""
    check = prove_live(move.prove, build_distributed, "meta")
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    model = build_distributed()
    model.module.double()
    assert model.modules_buffers[0].dtype is torch.float32
    model._sync_buffers()
    assert model.modules_buffers[0].dtype is torch.float64


@pytest.mark.usefixtures("_single_process_group")
def test_another_list_of_buffers_on_ddp_is_stale():
    """DDP replaces only its own two attributes, so another list of buffers is reported."""
    actual = map_rules(prove_live(move.prove, lambda: build_distributed("own"), "meta"))
    assert actual == {f"own[{i}]": "stale-view" for i in range(3)}


def test_stand_in_move_runs_after_a_move_raises():
    """The reason has the model's error and line; a stand-in move still finds the plain tensor."""
    body = "self.w = nn.Parameter(torch.ones(3)); {}\n---\n"
    body += "def _apply(self, fn, recurse=True):\n    super()._apply(fn)\n    self.w.sum().item()\n    return self"
    check = run_move(body.format("self.t = torch.ones(3)"))
    assert map_rules(check) == {"t": "left-behind"}
    assert "(net.py:9)" in check.reason
    assert find_cell(check, "moves", "w").after == "cpu, new memory"
    assert run_move(body.format("pass")).verdict is Verdict.INCONCLUSIVE


def test_plain_tensor_is_inconclusive_if_to_raises():
    """The `.to` of the class might have moved the plain tensor, so its cell is inconclusive."""
    body = "self.w = nn.Parameter(torch.ones(3)); self.t = torch.ones(3)\n---\n"
    body += 'def to(self, *args, **kwargs):\n    raise RuntimeError("not today")'
    check = run_move(body)
    assert "RuntimeError: not today (net.py:8)" in check.reason
    assert map_verdicts(check, "moves") == {"w": "passed", "t": "inconclusive"}


def test_tensor_deleted_by_the_class_is_skipped():
    """The class deletes its cache during the move, so the cache is skipped."""
    body = "self.cache = torch.ones(3); self.w = nn.Parameter(torch.ones(3))\n---\n"
    body += "def _apply(self, fn, recurse=True):\n    self.cache = None\n    return super()._apply(fn)"
    assert map_verdicts(run_move(body), "moves") == {"w": "passed", "cache": "skipped"}


def test_values_that_a_move_changes_fail():
    """A `.to` that rounds values is detected by their bits after the move back."""
    body = 'self.register_buffer("b", torch.full((3,), 0.1))\n---\n'
    body += "def to(self, *args, **kwargs):\n    self.b = self.b.half().float()\n    return super().to(*args, **kwargs)"
    check = run_move(body, device="cpu")
    assert map_rules(check) == {"b": "changed-by-move"}
    assert run_move(body.replace(".half().float()", ".clone()"), device="cpu").findings == ()


def test_nan_equals_itself_after_a_move():
    """The values before the move and after the move back are compared by their bits."""
    assert run_move('self.register_buffer("b", torch.full((3,), torch.nan))', device="cpu").verdict is Verdict.PASSED


# --- tensors of a first forward --------------------------------------------------------------------------------------


def test_running_sum_of_forward_fails():
    """Forward replaces the tensor, but reads the old value; `test_read_by_forward.py` has other caches."""
    forward = "self.sum = x if self.sum is None else self.sum + x; return x"
    body = f"self.w = nn.Parameter(torch.ones(3))\nself.sum = None\n---\ndef forward(self, x):\n    {forward}"
    assert map_verdicts(run_move(body, "3"), "moves")["sum"] == "failed"


# --- messages of a failure -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["fake-cuda", "meta", "cpu"])
def test_finding_of_a_stale_view_has_its_line(device):
    """A second name has no row, so the finding has its line."""
    check = run_move("self.a = nn.Linear(3, 3)\nself.w = self.a.weight.detach()[:2]", device=device)
    assert map_rules(check) == {"w": "stale-view"}
    (finding,) = check.findings
    assert finding.message.startswith("w is another name of a.weight, but still points")
    assert (finding.origin.file, finding.origin.line) == ("net.py", 7)


def test_message_for_the_same_device_describes_memory():
    """A move from the cpu to the cpu does not move the tensor, so the message describes memory."""
    (finding,) = prove_sample(Name.MOVE, "net:Net", device="cpu").findings
    what = "keeps its memory when the model moves, so a move to another device does not move the tensor"
    assert finding.message == f"table: {what}"


APPLY = "self.a = nn.Linear(3, 3)\n---\ndef _apply(self, fn, recurse=True):\n    {}\n    return self\n"


@pytest.mark.parametrize(
    ("does", "rule", "mend"),
    [
        (
            "super()._apply(fn); self.a.weight.data = self.a.weight.data * 2",
            "changed-by-move",
            "change only the device in",
        ),
        ("pass", "left-behind", "call super() in"),
        ("super()._apply(fn)", None, ""),
    ],
)
def test_help_names_the_method_of_the_class(does, rule, mend):
    """The help has the first line of the class's own method."""
    check = run_move(APPLY.format(does), device="cpu")
    assert {finding.rule for finding in check.findings} == ({rule} if rule else set())
    assert all(finding.help.startswith(f"net.py:7: {mend} Net._apply") for finding in check.findings)


# --- sample inputs of a model ----------------------------------------------------------------------------------------

MODEL_WITH_SAMPLE_INPUT = "self.a = nn.Linear(3, 3); {}\n---\n{}\ndef forward(self, x):\n    return self.a(x){}\n"
SAMPLE_INPUTS = {
    "an attribute": ("self.example_input_array = torch.randn(2, 3, requires_grad=True)", ""),
    "a class attribute": ("", "example_input_array = torch.randn(2, 3)"),
    "by name": ("self.dummy_inputs = {'x': torch.randn(2, 3)}", ""),
    "in a property, as in Lightning": ("self._example_input_array = torch.randn(2, 3)", ""),
}


@pytest.mark.parametrize(
    ("declaration", "name"),
    [
        *((declaration, Name.MOVE) for declaration in SAMPLE_INPUTS),
        *(("an attribute", name) for name in Name if name is not Name.MOVE),
    ],
)
def test_sample_input_is_skipped(declaration, name):
    """No proof checks the sample inputs that a model contains."""
    check = prove_source(
        name, MODEL_WITH_SAMPLE_INPUT.format(*SAMPLE_INPUTS[declaration], ""), "2x3", device="fake-cuda"
    )
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    cells = check.columns[0].cells
    (carried,) = [cells[fqn] for fqn in cells if "input" in fqn]
    assert (carried.verdict, carried.reason) == (Verdict.SKIPPED, SAMPLE_INPUT_NOTE)


@pytest.mark.parametrize(
    ("init", "fails"),
    [
        ("self.example_inputs = torch.randn(2, 3)", "example_inputs"),
        ("self.a.example_input_array = torch.randn(2, 3)", "a.example_input_array"),
        ("self.example_input_array = self.mean = torch.randn(2, 3)", "example_input_array"),
    ],
    ids=["another name", "of a part", "with another name that forward may read"],
)
def test_only_the_sample_input_of_the_model_is_skipped(init, fails):
    """All other tensors are still checked."""
    check = prove_source(Name.MOVE, MODEL_WITH_SAMPLE_INPUT.format(init, "", ""), "2x3")
    assert map_rules(check) == {fails: "left-behind"}


def test_sample_input_read_by_forward_is_reported():
    """Forward reads the sample input as state, and the sample input is on the cpu."""
    body = MODEL_WITH_SAMPLE_INPUT.format(SAMPLE_INPUTS["an attribute"][0], "", " + self.example_input_array")
    check = prove_source(Name.FORWARD, body, "2x3", device="fake-cuda")
    assert map_rules(check) == {"example_input_array": "device-mismatch"}
    assert check.findings[0].message.endswith("; assigned at net.py:6")


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", "xpu"])
def test_unavailable_device_is_refused(device):
    """The error is a single line with the option and a valid value."""
    advice = "numbered from 0" if device == "cuda:99" and torch.cuda.is_available() else "fake-cuda"
    with pytest.raises(UsageError, match=f"--device {device}: .*{advice}"):
        move.parse_device(device)


def test_move_from_meta_to_the_cpu_is_inconclusive():
    """The model has no values, so the check is inconclusive; a stand-in move shows which tensors would follow."""
    check = run_move("self.w = nn.Parameter(torch.ones(3))", device="cpu", init_device="meta")
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "built on meta" in check.reason


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spec", [*FAILING, *PASSING])
def test_cuda_and_meta_find_the_same_rules(spec):
    """The oracle: a real GPU gives the verdicts of meta."""
    assert map_rules(prove_sample(Name.MOVE, spec, device="cuda")) == map_rules(prove_sample(Name.MOVE, spec))


def test_model_without_tensors_is_skipped():
    """There is no tensor to move, so the check is skipped and does not pass."""
    assert run_move("pass").verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    "build_module",
    [lambda: nn.LSTM(3, 4, 2), lambda: nn.MultiheadAttention(4, 2), lambda: nn.LazyLinear(3)],
    ids=["LSTM", "MultiheadAttention", "LazyLinear"],
)
def test_modules_of_torch_follow(build_module):
    """`_flat_weights` and uninitialized parameters are not reported."""
    assert prove_live(move.prove, build_module, "meta").verdict is Verdict.PASSED


@pytest.mark.parametrize("device", ["meta", "cpu", "fake-cuda"])
@pytest.mark.parametrize("name", [Name.MOVE, Name.FORWARD])
def test_model_returned_by_the_move_is_checked(name, device):
    """As in `model = model.to(...)`, a `.to` that returns another model is a valid move."""
    own = "def to(self, *args):\n    import copy\n    return nn.Module.to(copy.deepcopy(self), *args)\n"
    forward = "def forward(self, x):\n    return self.l(x)\n"
    check = prove_source(name, "self.l = nn.Linear(3, 3)\n---\n" + own + forward, "2x3", device=device)
    assert check.findings == ()
    assert check.verdict is (Verdict.SKIPPED if (name, device) == (Name.FORWARD, "meta") else Verdict.PASSED)


@pytest.mark.parametrize("device", ["fake-cuda", "meta", "cpu"])
@pytest.mark.parametrize("returns", [True, False])
def test_to_without_a_return_value_is_reported(returns, device):
    """The class's `.to` moves all tensors but does not return the model: the help has the line of the method."""
    body = "self.fc = nn.Linear(2, 2)\n---\ndef to(self, *args, **kwargs):\n    super().to(*args, **kwargs)\n"
    check = prove_source(Name.MOVE, body + "    return self\n" * returns, device=device)
    assert set(map_verdicts(check, "moves").values()) == {"passed"}
    assert map_rules(check) == ({} if returns else {None: "to-returns-no-model"})
    helps = [finding.help for finding in check.findings]
    assert helps == ([] if returns else ["net.py:7: end the method with: return self"])


def test_fake_move_is_shown_as_a_real_call():
    """`how` shows a real call, because `cuda:0 (fake)` is not a device that a user can request."""
    assert prove_sample(Name.MOVE, "net:Net", device="fake-cuda").how == '.to("cuda") on a fake CUDA device'


#: Classes whose own methods move: the code, and a part of the reason for the buffer t (None: the class is correct).
MOVERS = {
    "doubles a buffer": (
        "def to(self, *a):\n    super().to(*a)\n    self.t = self.t * 2\n    return self",
        "values change",
    ),
    "doubles it in _apply": (
        "def _apply(self, fn, recurse=True):\n    super()._apply(fn)\n    self.t = self.t * 2\n    return self",
        "values change",
    ),
    "does no more than torch": ("def _apply(self, fn, recurse=True):\n    return super()._apply(fn)", None),
    "moves a plain tensor": (
        "plain = torch.ones(3)\ndef to(self, *a):\n    super().to(*a)\n    self.plain = self.plain.to(*a)\n"
        "    return self",
        None,
    ),
}


@pytest.mark.parametrize("device", ["fake-cuda", "meta", "cpu"])
@pytest.mark.parametrize("name", MOVERS)
def test_values_after_the_move_of_the_class_are_compared(name, device):
    """Changed values are reported alike on each device."""
    body, reason = MOVERS[name]
    init = "self.register_buffer('t', torch.rand(3))\nself.w = nn.Parameter(torch.rand(3))"
    check = run_move(f"{init}\n---\n{body}", device=device)
    assert check.verdict is (Verdict.FAILED if reason else Verdict.PASSED), check
    assert (", values compared on the cpu" in check.how) is (device != "cpu")
    if reason:
        assert reason in find_cell(check, "moves", "t").reason
        assert re.search(r"^net\.py:\d: .* in Net\.(to|_apply)\b", check.findings[0].help)


def test_class_without_its_own_move_is_not_moved_back():
    """An ordinary class is not moved back, nor is a class of torch with its own `_apply`."""
    assert run_move("self.r = nn.LSTM(2, 2)", device="fake-cuda").how == '.to("cuda") on a fake CUDA device'
    assert run_move("self.r = nn.LSTM(2, 2)").how == '.to("meta")'


def test_plain_move_imports_no_compiler(tmp_path):
    """torch's fake tensors import torch.compile, which takes as long as the rest of torch."""
    code = "import sys, statecli; statecli.verify('torch.nn:Linear(2, 2)', checks=['move'])"
    code += "; print('torch._dynamo' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
