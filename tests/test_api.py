"""statecli.inspect, diff and verify: results, errors, and that a live model is left as it was."""

from __future__ import annotations

import ast
import inspect
import os
import random
import re
import subprocess
import sys
import threading
import typing
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import statecli
from statecli.commands.audit.result import Audit
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Diff, Field
from statecli.commands.diff.run import compare_targets
from statecli.commands.inspect import run as inspection
from statecli.commands.lock.lock_file import Lock
from statecli.commands.verify import run as proofs
from statecli.commands.verify.result import DEFAULT_PROOFS, Name, Verdict, Verification
from statecli.core.digest_algorithm import Algorithm
from statecli.core.errors import ModelError, NothingMatched, UnreadableError, UsageError
from statecli.core.finding import Severity
from statecli.core.model_state import Kind
from statecli.core.selection import Selection
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import parameters_of
from statecli.testing import assert_loaded, assert_only_changed, assert_state_follows

from .forked_python import run_python
from .test_samples import FAILING, verify_sample

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "sample_models"

pytestmark = pytest.mark.usefixtures("in_project")


#: A class whose constructor takes a config object.
CONFIGURED = """
import dataclasses
from torch import nn


@dataclasses.dataclass
class Config:
    width: int


class Net(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.fc = nn.Linear(config.width, config.width)
"""


def verdicts(verification):
    return {check.check.value: check.verdict.value for check in verification.checks}


def rules(verification):
    return {(finding.rule, finding.fqn) for finding in verification.findings}


# --- models ---------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """BatchNorm, dropout, a tie, a view of a buffer, a frozen parameter, submodules in either mode, hooks."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.body[0].weight
        self.register_buffer("table", torch.arange(8.0))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.body[1].eval()
        self.seen = 0
        self.head.register_forward_hook(lambda *_: None)

    def forward(self, x):
        self.seen += 1
        return self.head(self.body(x)) * self.frozen + self.table[:4] + random.random() + numpy.random.rand()  # noqa: S311


class NonLeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scaled = self.fc.weight / 3

    def forward(self, x):
        return self.fc(x) @ self.scaled


class Locked(nn.Module):
    """A model that cannot be copied because of an attribute that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.lock = threading.Lock()

    def forward(self, x):
        return self.fc(x)


class Closed(nn.Module):
    """A model whose activation is a closure over the model; copy.deepcopy does not copy the closure."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act = lambda x: self.norm(x) * self.fc.weight.sum()

    def forward(self, x):
        return self.act(self.fc(x))


class Global(nn.Module):
    """A model whose forward also uses the instance in a global variable, whichever instance is called."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        KNOWN.append(self)

    def forward(self, x):
        instance = KNOWN[-1]
        instance.train()
        return instance.norm(instance.fc(x)) + self.fc(x)


class Returns(nn.Module):
    """A model whose `to` moves and returns the instance in a global variable, whichever instance is moved."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        KNOWN.append(self)

    def to(self, *args, **kwargs):
        nn.Module.to(KNOWN[-1], *args, **kwargs)
        return KNOWN[-1]

    def forward(self, x):
        return self.norm(self.fc(x))


class Reset(nn.Module):
    """A model whose forward changes settings of the process: seeds, the default dtype, the grad mode."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        torch.manual_seed(7)
        random.seed(7)
        numpy.random.seed(7)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(True)
        return self.fc(x)


KNOWN: list[nn.Module] = []


def capture_state(model):
    """Return everything of a model that must not change: modes, values, gradients, identities, hooks, calls."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "objects": [(name, id(tensor), tensor.data_ptr(), tensor.dtype, tensor.device) for name, tensor in named],
        "values": [(name, tensor.detach().clone().tolist()) for name, tensor in named],
        "requires_grad": [(name, tensor.requires_grad) for name, tensor in named],
        "grads": [(name, id(tensor.grad), tensor.grad.tolist()) for name, tensor in named if tensor.grad is not None],
        "hooks": [list(module._forward_hooks.items()) for module in model.modules()],
        "keys": [(name, sorted(vars(module))) for name, module in model.named_modules()],
        "calls": getattr(model, "seen", 0),
    }


def capture_process():
    """Return everything of the process that must not change."""
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(part) for part in numpy.random.get_state()],
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        list(sys.path),
        list(sys.argv),
    )


# --- a live model is left as it was ---------------------------------------------------------------------------------


def test_a_class_of_torch_is_a_spec_in_python_too(tmp_path):
    """A spec of a class is written as on the command line; only a dtype and a device are without `torch.` there."""
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    inspection = statecli.inspect(tmp_path / "a.pt", model="torch.nn:Linear(2, 2)")
    assert {tensor.kind for tensor in inspection.state.tensors} == {Kind.PARAMETER}


@pytest.mark.parametrize("kind", [Plain, NonLeaf, Locked, Closed, Global, Returns, Reset])
def test_verify_does_not_change_a_live_model(kind):
    """Proofs with inputs leave modes, values, gradients, objects, hooks and the settings of the process as before."""
    model = kind()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.5)
    model.fc.eval() if kind is Closed else None
    before = capture_state(model), capture_process()
    statecli.verify(model, inputs="6x4")
    assert (capture_state(model), capture_process()) == before


@pytest.mark.parametrize("check", Name)
def test_model_that_its_copies_return_is_restored(check):
    """Each proof moves, casts or trains the original model, because `to` of a copy returns the original."""
    model = Returns()
    before = capture_state(model), capture_process()
    statecli.verify(model, checks=[check], inputs="6x4", device="meta" if check is Name.MOVE else None)
    assert (capture_state(model), capture_process()) == before


def test_the_callers_grad_mode_changes_nothing():
    """Proofs have a grad mode of their own, and give the caller's back."""
    model = Plain()
    expected = verdicts(statecli.verify(model, inputs="6x4"))
    assert expected["step"] == "passed"
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = verdicts(statecli.verify(model, inputs="6x4"))
            assert not torch.is_grad_enabled()
            assert torch.is_inference_mode_enabled() is (mode is torch.inference_mode)
        assert actual == expected


def test_a_reason_in_a_result_names_the_argument():
    """A reason is in the words of Python, as an error is; on the command line it names the option."""
    (check,) = statecli.verify(nn.Linear(4, 2), inputs=(torch.ones(2, 9),), checks=["forward"]).checks
    assert check.reason.endswith("takes 4 values in the last dimension: inputs='2x4'")


def test_build_of_a_spec_keeps_the_state_of_the_process():
    """Building a class seeds them; the caller's go on as if nothing had been built."""
    before = capture_process()
    statecli.verify(f"{SAMPLES}/net.py:Net", inputs="4x3")
    statecli.inspect(f"{SAMPLES}/net.py:Net", to="meta")
    assert capture_process() == before


def test_inspect_does_not_change_a_live_model():
    """Statistics and a real move to meta use a copy."""
    model = Plain()
    before = capture_state(model), capture_process()
    state = statecli.inspect(model, to="meta", stats=True)
    assert (capture_state(model), capture_process()) == before
    (row,) = [row for row in state.state.tensors if row.fqn == "table"]
    assert (row.stats.min, row.stats.max, row.after.device) == (0.0, 7.0, "meta")


# --- proofs of a live model -----------------------------------------------------------------------------------------


#: Inconclusive proofs of a live model, which has no constructor to call again and no graph back to its parameters.
INCONCLUSIVE_CHECKS = {
    "anchors:Head": {"save"},
    "net:Net": {"save"},
    "precomputed:Normed": {"save", "step"},
    "relative_bias:Attention": {"save"},
}


@pytest.mark.parametrize("name", FAILING)
def test_a_live_model_fails_as_its_class_does(name):
    """The live model breaks the same rules for the same tensors as its class, except where a check is inconclusive."""
    input, _ = FAILING[name]
    file, _, attribute = name.partition(":")
    spec = verify_sample(name, input, "fake-cuda")
    live = statecli.verify(getattr(load_sample(file), attribute)(), inputs=input, device="fake-cuda")
    inconclusive = INCONCLUSIVE_CHECKS.get(name, set())
    for check, other in zip(spec.checks, live.checks, strict=True):
        if check.check.value in inconclusive:
            assert other.verdict is Verdict.INCONCLUSIVE
        else:
            assert (check.verdict, rules(check)) == (other.verdict, rules(other)), check.check


def load_sample(name):
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"sample_{name}", SAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_fixed_live_model_passes_everything():
    """Every proof runs on the live model."""
    verification = statecli.verify(load_sample("net_fixed").Net(), inputs="4x3")
    assert verdicts(verification) == dict.fromkeys([name.value for name in DEFAULT_PROOFS], "passed")


def test_a_non_leaf_attribute_fails_copy_by_name():
    """copy.deepcopy refuses the model; all other proofs run all the same, except for the proof about gradients."""
    model = NonLeaf()
    with pytest.raises(RuntimeError, match="graph leaves"):
        __import__("copy").deepcopy(model)
    verification = statecli.verify(model, device="meta", inputs="2x4")
    assert verdicts(verification)["copy"] == "failed"
    assert ("non-leaf-attribute", "scaled") in rules(verification)
    assert ("left-behind", "scaled") in rules(verification)
    step = next(check for check in verification.checks if check.check is Name.STEP)
    assert step.verdict is Verdict.INCONCLUSIVE
    assert step.reason.startswith("scaled was computed from other tensors")
    (message,) = [finding.message for finding in verification.findings if finding.rule == "non-leaf-attribute"]
    assert "DivBackward0" in message


def test_a_model_that_cannot_be_copied_fails_that_proof_and_is_listed():
    """The tensors are listed, and every other proof names the attribute that prevents the copy."""
    verification = statecli.verify(nn.Sequential(Locked()), inputs="2x4")
    assert verdicts(verification) == {name.value: "inconclusive" for name in DEFAULT_PROOFS} | {"copy": "failed"}
    assert rules(verification) == {("not-copyable", "0.lock")}
    assert all("0.lock (a lock)" in check.reason for check in verification.checks if check.check is not Name.COPY)
    assert [row.fqn for row in verification.state.tensors] == ["0.fc.weight", "0.fc.bias"]
    with pytest.raises(ModelError, match=r"because of lock \(a lock\)"):
        statecli.inspect(Locked(), to="meta")
    state = statecli.inspect(Locked()).state
    assert [(row.fqn, row.saved, row.moves) for row in state.tensors] == [
        ("fc.weight", True, None),
        ("fc.bias", True, None),
    ]
    assert (
        "cannot check which tensors move: the model cannot be copied because of lock (a lock)"
        in state.oddities[0].message
    )


def test_a_parameter_that_copies_share_is_never_spoiled():
    """A class attribute is the same tensor in each copy: no proof overwrites the tensor."""

    class Shared(nn.Module):
        scale = nn.Parameter(torch.full((4,), 3.0))

    model = Shared()
    verification = statecli.verify(model)
    assert set(verdicts(verification).values()) == {"inconclusive", "skipped"}
    assert "scale of the copy shares memory with scale of the model" in verification.checks[0].reason
    assert model.scale.tolist() == [3.0] * 4


def test_tensor_in_a_closure_moves_with_its_copy_of_the_model():
    """A tensor in the closure of an activation trains and moves with its own copy of the model."""
    verification = statecli.verify(Closed(), checks=["move", "cast", "step", "forward"], inputs="6x4")
    assert set(verdicts(verification).values()) == {"passed"}
    assert [row.fqn for row in verification.state.tensors if row.kind.value == "unregistered"] == []


HUGE = """
import resource, sys
import torch
from torch import nn
import statecli

# 128 MB. Random values would take a second; a copy would be written, and so counted, all the same.
model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False) for _ in range(2)))
model[0].table = torch.ones(4096, 6144)  # 96 MB
statecli.verify(nn.Linear(2, 2), device="meta", checks=["move"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = statecli.verify(model, device="meta", checks=["move"])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, [f.fqn for f in found.findings])
"""


def test_a_move_to_meta_needs_no_second_copy_of_the_data():
    """224 MB of tensors are proved to follow, or not, within 60 MB."""
    result = run_python(["-c", HUGE], check=True)
    grown, _, failing = result.stdout.partition(" ")
    assert failing.strip() == "['0.table']"
    assert int(grown) < 60


# --- inputs ---------------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *, scale):
        return self.fc(x) * scale


X, S = torch.ones(2, 4), torch.ones(4)


@pytest.mark.parametrize(
    "inputs",
    [
        ((X,), {"scale": S}),
        {"x": X, "scale": S},
        lambda: ((X,), {"scale": S}),
        lambda: {"x": X, "scale": S},
        ("2x4", "scale=4"),
        ["2x4", "scale=float32:4"],
        {"x": "2x4", "scale": "4"},
    ],
)
def test_several_inputs_are_accepted_in_every_form(inputs):
    """(args, kwargs), keywords, functions and texts all reach forward."""
    verification = statecli.verify(TwoInputs(), checks=["step"], inputs=inputs)
    assert verdicts(verification) == {"step": "passed"}


@pytest.mark.parametrize("inputs", [X, (X,), [X], "2x4", lambda: X, {"input": X}])
def test_single_input_is_accepted_in_every_form(inputs):
    """A tensor by itself, a sequence, a text, a function, by name."""
    assert verdicts(statecli.verify(nn.Linear(4, 4), checks=["step"], inputs=inputs)) == {"step": "passed"}
    assert verdicts(statecli.verify("torch.nn:Linear(4, 4)", checks=["step"], inputs=inputs)) == {"step": "passed"}


def test_verify_does_not_change_the_inputs():
    """Forward gets copies of the inputs, because forward may write to its inputs."""

    class Writes(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2) if not x.requires_grad else x * 2)

    tensor = torch.ones(2, 4)
    statecli.verify(Writes(4, 4), inputs=tensor)
    assert tensor.tolist() == torch.ones(2, 4).tolist()
    assert tensor.grad is None


def test_example_input_array_is_the_default_input():
    """If no inputs are given, forward is called with `example_input_array`."""
    model = nn.Linear(4, 4)
    model.example_input_array = torch.ones(2, 4)
    assert verdicts(statecli.verify(model, checks=["step"])) == {"step": "passed"}


def test_tensor_created_by_forward_has_a_row():
    """A cache is a row, and is proved."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.cache = None

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.ones(4)
            return self.fc(x) * self.cache

    model = Cached()
    verification = statecli.verify(model, checks=["move", "forward"], inputs="2x4")
    assert ("left-behind", "cache") in rules(verification)
    assert ("device-mismatch", "cache") in rules(verification)
    assert model.cache is None
    assert "cache" not in {row.fqn for row in statecli.inspect(model).state.tensors}
    listed = {row.fqn: row for row in statecli.inspect(model, to="meta", inputs="2x4").state.tensors}
    assert (listed["cache"].appeared, listed["cache"].after.device) == (True, "cpu")
    assert model.cache is None


# --- results and errors ---------------------------------------------------------------------------------------------


def test_inspect_of_a_file_equals_the_result_of_the_command(tmp_path):
    """The same data as the command has."""
    torch.save({"a.weight": torch.ones(2, 3)}, tmp_path / "a.pt")
    state = statecli.inspect(tmp_path / "a.pt", stats=True, kind="parameter")
    assert state == inspection.inspect(
        inspection.Request(str(tmp_path / "a.pt"), stats=True, selection=Selection(kind=((Kind.PARAMETER,))))
    )
    assert state.state.tensors[0].stats.mean == 1.0


def test_diff_of_files_equals_the_result_of_the_command(tmp_path):
    """The same data as the command has."""
    torch.save({"w": torch.zeros(3)}, tmp_path / "a.pt")
    torch.save({"w": torch.tensor([0.0, 0.5, 0.0])}, tmp_path / "b.pt")
    diff = statecli.diff(tmp_path / "a.pt", tmp_path / "b.pt", jobs=1)
    assert diff == compare_targets(Request(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), jobs=1))
    assert diff.changes[0].values.max_abs == 0.5
    assert statecli.diff(tmp_path / "a.pt", tmp_path / "b.pt", atol=1).findings == ()


def test_verify_of_a_spec_equals_the_result_of_the_command():
    """The same data as the command has."""
    target = f"{SAMPLES}/net.py:Net"
    verification = statecli.verify(target, device=torch.device("meta"), dtype=torch.float16, inputs="4x3")
    expected = proofs.run(proofs.Request(target, device="meta", dtype="float16", input=("4x3",)))
    assert [(check.check, check.verdict, check.columns) for check in verification.checks] == [
        (check.check, check.verdict, check.columns) for check in expected.checks
    ]


@pytest.mark.parametrize(
    ("call", "kind", "expected_text"),
    [
        (lambda: statecli.inspect("missing.pt"), UnreadableError, "missing.pt"),
        (lambda: statecli.inspect(3), UsageError, "not int"),
        (lambda: statecli.inspect(nn.Linear), UsageError, "Linear is a class"),
        (
            lambda: statecli.inspect(nn.Linear(2, 2), model="net.py:Net"),
            UsageError,
            "needs a checkpoint, and Linear is a model",
        ),
        (lambda: statecli.inspect(nn.Linear(2, 2), kind="weights"), UsageError, "'weights' is not one of parameter"),
        (lambda: statecli.inspect(nn.Linear(2, 2), include="x"), NothingMatched, "none of its 2 tensors"),
        (lambda: statecli.inspect(nn.Linear(2, 2), inputs="2x3"), ModelError, "shapes cannot be multiplied"),
        (lambda: statecli.inspect("a.pt", inputs="2x3"), UsageError, "a.pt is a checkpoint"),
        (lambda: statecli.diff(nn.Linear(2, 2), "missing.pt"), UnreadableError, "missing.pt: cannot be opened"),
        (lambda: statecli.diff(nn.Linear(2, 2), nn.Linear), UsageError, "Linear is a class: pass an instance"),
        (lambda: statecli.diff({"a": lambda: 0}, nn.Linear(2, 2)), UsageError, "state_dict: torch.save cannot write"),
        (lambda: statecli.diff({"a": 3}, nn.Linear(2, 2)), UnreadableError, "state_dict: contains no tensor"),
        (
            lambda: statecli.diff(nn.Linear(2, 2), nn.Linear(2, 2), executor="processes:2"),
            UsageError,
            "workers cannot read Linear, because it is an object of this process; leave executor out",
        ),
        (lambda: statecli.lock(nn.ReLU()), NothingMatched, "ReLU: contains no tensor"),
        (lambda: statecli.lock(nn.Linear(2, 2), digest="md5"), UsageError, "'md5' is not one of"),
        (lambda: statecli.audit(nn.Linear(2, 2), select="nann"), UsageError, "nann"),
        (lambda: statecli.Snapshot("a.pt"), UsageError, "a snapshot needs an nn.Module, an optimizer or a state_dict"),
        (
            lambda: statecli.diff(statecli.Snapshot(nn.Linear(2, 2)), nn.Linear(2, 2), atol=1),
            UsageError,
            "atol: needs values, but the snapshot has only digests; use Snapshot(model, values=True)",
        ),
        (
            lambda: statecli.audit([]),
            UsageError,
            "targets: is empty; pass a path, an nn.Module, an optimizer or a state_dict",
        ),
        (lambda: statecli.lock(iter(())), UsageError, "targets: is empty"),
        (
            lambda: statecli.diff(statecli.Snapshot(nn.Linear(2, 2)), "a.pt", executor="threads:2"),
            UsageError,
            "executor: workers cannot read a snapshot, because a snapshot exists only in this process; "
            "leave executor out",
        ),
        (lambda: statecli.diff((1, 2), nn.Linear(2, 2)), UsageError, "an optimizer or a state_dict, not tuple"),
        (lambda: statecli.audit(3), UsageError, "not int"),
        (lambda: statecli.diff("a.pt", "b.pt", atol=-1), UsageError, "must be a finite number"),
        (lambda: statecli.verify(nn.Linear(2, 2), checks=["moves"]), UsageError, "'moves' is not one of move"),
        (lambda: statecli.verify(nn.Linear(2, 2), checks=5), UsageError, "checks: 5 is not a string"),
        (lambda: statecli.verify(nn.Linear(2, 2), include=[nn]), UsageError, "include: <module"),
        (lambda: statecli.verify(nn.Linear(2, 2), device="gpu"), UsageError, "device='gpu': must be cuda"),
        (
            lambda: statecli.verify(nn.Linear(2, 2), dtype="f12"),
            UsageError,
            "dtype='f12': torch does not have this dtype",
        ),
        (
            lambda: statecli.verify(nn.Linear(2, 2), dtype=torch.int8),
            UsageError,
            "dtype='int8': a model cannot be cast",
        ),
        (
            lambda: statecli.verify(nn.Linear(2, 2), optimizer="a"),
            UsageError,
            "optimizer='a': torch.optim does not have",
        ),
        (
            lambda: statecli.verify(nn.Linear(2, 2), optimizer=nn.Linear),
            UsageError,
            "a class of torch.optim, not <class",
        ),
        (
            lambda: statecli.verify(nn.Linear(2, 2), checks="move", optimizer=torch.optim.Adam),
            UsageError,
            "optimizer='Adam': has no effect, because checks leaves out resume and step",
        ),
        (lambda: statecli.verify(nn.Linear(2, 2), inputs="2xx"), UsageError, "inputs='2xx': '2xx' is not a shape"),
        (
            lambda: statecli.verify(nn.Linear(2, 2), inputs=("2x2", torch.ones(2))),
            UsageError,
            "inputs: '2x2' is a shape, but another input is not",
        ),
        (lambda: statecli.verify(nn.Linear(2, 2), inputs=lambda: 1 / 0), ModelError, "ZeroDivisionError"),
        (lambda: statecli.verify(nn.Linear(2, 2), inputs=lambda: None), ModelError, "returned nothing"),
        (lambda: statecli.verify(nn.Linear(2, 2), inputs=3), ModelError, "the value is an int, which contains no"),
        (lambda: statecli.verify(f"{SAMPLES}/net.py:Nett"), ModelError, "Net"),
    ],
)
def test_error_in_python_is_the_line_of_the_command(call, kind, expected_text):
    """The error is a subclass of StateError with the line that the command would print."""
    with pytest.raises(kind) as raised:
        call()
    assert issubclass(kind, statecli.StateError)
    assert expected_text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_none_is_the_default_of_each_argument():
    """None means the same as an argument that is not given."""
    none_arguments = dict.fromkeys(("checks", "device", "dtype", "optimizer", "inputs", "include", "exclude", "kind"))
    verification = statecli.verify(nn.Linear(2, 2), **none_arguments)
    assert [check.check for check in verification.checks] == list(DEFAULT_PROOFS)
    assert len(verification.state.tensors) == 2


def test_an_optimizer_may_be_a_class():
    """The class is from torch.optim, or a class of the user."""

    class Halved(torch.optim.SGD):
        pass

    for optimizer in (torch.optim.Adam, Halved):
        (check,) = statecli.verify(nn.Linear(2, 2), checks="step", optimizer=optimizer, inputs="3x2").checks
        assert check.verdict is Verdict.PASSED
        assert f"backward, {optimizer.__name__})" in check.how


@pytest.mark.parametrize(
    ("inputs", "text"), [([(2, 4)], "2x4"), ((2, 4), "2x4"), ([[2, 4], (3,)], "2x4"), ([1.5], "2x3")]
)
def test_error_about_inputs_without_a_tensor_says_what_to_pass(inputs, text):
    """A shape is written as a text; the message contains the text."""
    with pytest.raises(ModelError, match="contains no tensor; pass a tensor, or its shape as a string") as raised:
        statecli.verify(nn.Linear(4, 2), inputs=inputs)
    assert str(raised.value).endswith(f"such as {text!r}")
    model = nn.Linear(int(text[-1]), 2)
    assert statecli.verify(model, checks="forward", inputs=[text]).checks[0].verdict is Verdict.PASSED


def test_reason_without_inputs_names_the_python_argument():
    """The reason names arguments of Python, not options of the command line."""
    checks = statecli.verify(nn.Linear(2, 2)).checks
    unknown = statecli.verify(nn.BatchNorm1d(2)).checks
    ids = statecli.verify(nn.Embedding(9, 2)).checks
    assert {check.reason for check in unknown if check.verdict is Verdict.SKIPPED} == {
        "no input given: pass inputs='2x3', tensors, or a function that returns tensors"
    }
    assert any("pass inputs='int64:2x16<9', tensors" in (check.reason or "") for check in ids)
    assert {check.reason for check in checks if check.verdict is Verdict.SKIPPED} == {
        "no input given: pass inputs='2x2', tensors, or a function that returns tensors"
    }


@pytest.mark.parametrize("arguments", [{"optimizer": "nope"}, {"inputs": lambda: 1 / 0}], ids=["ours", "theirs"])
def test_an_error_comes_from_the_call(arguments):
    """Pytest shows no frame of statecli between the error and the caller; the cause keeps the user's own frame."""
    with pytest.raises(statecli.StateError) as raised:
        statecli.verify(nn.Linear(2, 2), **arguments)
    visible_entries = [entry for entry in raised.traceback if not entry.ishidden(raised)]
    assert [Path(entry.path) for entry in visible_entries] == [Path(__file__)]
    cause = raised.value.__cause__
    if cause is not None:
        assert isinstance(cause, ZeroDivisionError)
        assert cause.__traceback__.tb_frame.f_code.co_filename == __file__


def test_failing_forward_makes_only_its_checks_inconclusive():
    """With wrong inputs step and forward are inconclusive; the other proofs are not."""
    actual = verdicts(statecli.verify(nn.Linear(4, 4), inputs="2x5"))
    assert (actual["step"], actual["forward"], actual["move"]) == ("inconclusive", "inconclusive", "passed")


LIGHT = """
import sys
import statecli
assert callable(statecli.inspect) and callable(statecli.diff) and callable(statecli.verify) and statecli.StateError
print(sorted(set(sys.modules) & {"torch", "numpy", "rich", "typer", "msgspec", "jinja2", "safetensors", "pytest"}))
statecli.inspect(sys.argv[1])
print("torch" in sys.modules)
"""


def test_importing_statecli_imports_nothing_heavy(tmp_path):
    """Even the modules that the functions need are not imported; a checkpoint is then inspected without torch."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    line = [sys.executable, "-c", LIGHT, str(tmp_path / "a.pt")]
    result = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "[]\nFalse\n"


def test_package_exports_every_type_of_a_result():
    """Each type is listed once, under its own name; a misspelt name raises AttributeError."""
    listed = [name for names in statecli._TYPES.values() for name in names]
    assert set(listed) <= set(statecli.__all__)
    assert len(set(statecli.__all__)) == len(statecli.__all__)
    assert all(getattr(statecli, name).__name__ == name for name in listed)
    assert (statecli.Verification, statecli.Verdict) == (Verification, Verdict)
    with pytest.raises(AttributeError, match="has no attribute 'Verfication'"):
        statecli.Verfication  # noqa: B018


# --- the documentation ----------------------------------------------------------------------------------------------

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reference" / "python.md").read_text(), re.DOTALL)


def test_the_documentations_first_example_runs(capsys):
    """The example prints the text below it."""
    exec(BLOCKS[0], {})  # noqa: S102 - our own
    assert capsys.readouterr().out in (ROOT / "docs" / "reference" / "python.md").read_text()


#: The literals that a type checker reads, by name.
LITERALS = {
    node.targets[0].id: typing.Literal[tuple(word.value for word in node.value.slice.elts)]
    for node in ast.walk(ast.parse((ROOT / "statecli" / "__init__.py").read_text()))
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
    if ast.unparse(node.value.value) == "Literal"
}


@pytest.mark.parametrize(
    ("command", "left_out"),
    [
        ("inspect", {"cuda", "as_class", "fail_on", "distributions", "spectra", "parts", "top", "output"}),
        ("audit", {"no_values", "frozen_only", "weights_only", "include", "kind", "init_device", "as_found"}),
        ("verify", {"init_device", "fail_on", "baseline", "timeout", "report"}),
    ],
)
def test_options_of_the_shell_have_no_argument(command, left_out):
    """Python gets the result as an object, and passes the model itself."""
    parameters = inspect.signature(getattr(statecli, command)).parameters
    assert left_out <= {parameter.argument for parameter in parameters_of(COMMANDS[command])}
    assert not left_out & parameters.keys()


def test_default_of_each_argument_is_that_of_its_option():
    """Each argument is converted to the field of its option; the defaults of Python give the defaults of the table."""
    for command in ("inspect", "diff", "lock", "audit", "merge", "verify"):
        parameters = {parameter.argument: parameter for parameter in parameters_of(COMMANDS[command])}
        for name, argument in inspect.signature(getattr(statecli, command)).parameters.items():
            default = parameters[name].default
            if argument.default is inspect.Parameter.empty:
                assert parameters[name].is_required
            elif (command, name) != ("audit", "values") and name != "inputs":
                assert argument.default == getattr(default, "value", default), (command, name)


def test_a_class_gets_its_settings(in_tmp_path):
    """The settings are in a file, as for `--config-json`; each function of a class reads them."""
    Path("made.py").write_text(CONFIGURED)
    Path("net.json").write_text('{"width": 5}')
    shapes = [tensor.shape for tensor in statecli.inspect("made.py:Net", config_json=Path("net.json")).state.tensors]
    assert shapes == [(5, 5), (5,)]
    changes = statecli.diff("made.py:Net", "made.py:Net", config_json="net.json", metadata_only=True).changes
    assert [change.after.shape for change in changes] == shapes
    assert statecli.lock("made.py:Net", config_json="net.json").targets
    assert statecli.verify("made.py:Net", checks="save", config_json="net.json").checks[0].verdict == "passed"


@pytest.mark.parametrize("argument", [{"config_json": "net.json"}, {"trust_remote_code": True}])
@pytest.mark.parametrize("function", [statecli.inspect, statecli.lock, statecli.audit, statecli.verify])
def test_an_option_of_a_class_is_refused_for_a_live_model(function, argument):
    """The option would have no effect."""
    (name,) = argument
    with pytest.raises(UsageError, match=rf"^{name}: works only with a class, such as 'net.py:Net', but Linear is an"):
        function(nn.Linear(2, 2), **argument)


def test_a_merged_adapter_is_checked(in_tmp_path):
    """The adapter is given by its path; a value that is not a path is refused."""
    save_file({"w": torch.zeros(2)}, "a.safetensors")
    save_file({"x.lora_A.weight": torch.ones(1, 2), "x.lora_B.weight": torch.ones(2, 1)}, "adapter.safetensors")
    result = statecli.diff("a.safetensors", "a.safetensors", adapter=Path("adapter.safetensors"))
    (problem,) = result.broken
    assert problem.message.endswith(
        "cannot check whether this update was merged: the base model has no weight of this name"
    )
    with pytest.raises(UsageError, match=r"^expected a path, .* not int$"):
        statecli.diff("a.safetensors", "a.safetensors", adapter=3)


FUNCTIONS = (
    *(statecli.inspect, statecli.diff, statecli.lock, statecli.audit, statecli.merge, statecli.verify),
    *(assert_state_follows, assert_only_changed, assert_loaded),
)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_parameter_is_documented(function):
    """The section Args of the docstring has exactly the parameters of the signature, in their order."""
    arguments = inspect.getdoc(function).partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.MULTILINE) == [*inspect.signature(function).parameters]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_annotation_can_be_resolved(function):
    """The names in the signatures exist: type checkers of other people's code read them."""
    names = {"os": os, "torch": torch, "nn": nn, "Any": Any, "Iterable": Iterable, "Kind": Kind, "Field": Field}
    names |= {
        "Executor": Executor,
        "Diff": Diff,
        "Inspection": inspection.Inspection,
        "Verification": Verification,
        "Name": Name,
        "Lock": Lock,
        "Audit": Audit,
        "Algorithm": Algorithm,
        "Severity": Severity,
        "Snapshot": statecli.Snapshot,
        "LiveObject": nn.Module | torch.optim.Optimizer | Mapping,
        **LITERALS,
        "Target": str | os.PathLike | nn.Module | torch.optim.Optimizer | Mapping,
    }
    assert set(typing.get_type_hints(function, names)) == {*inspect.signature(function).parameters, "return"}
