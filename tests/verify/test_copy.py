"""Deep and pickled copies, each checked against torch and copy."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import statecli
from statecli.commands.verify.proofs import copy as copying
from statecli.commands.verify.result import Name, Verdict

from .proving import build_net, find_cell, map_rules, map_verdicts, prove_live, prove_sample, prove_source

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FAILING = {"precomputed:Normed": {"direction": "non-leaf-attribute"}}


def run_copy(body: str, *input: str, **options):
    return prove_source(Name.COPY, body, *input, **options)


@pytest.mark.parametrize("spec", FAILING)
def test_sample_has_exactly_the_expected_findings(spec):
    """Only the computed tensor of the sample is reported, and the message has the operation of autograd."""
    check = prove_sample(Name.COPY, spec)
    assert map_rules(check) == FAILING[spec]
    assert "DivBackward0" in check.findings[0].message


def test_tensor_that_torch_cannot_copy_is_named():
    """The oracle: copy.deepcopy of the tensor alone raises."""
    with pytest.raises(NotImplementedError):
        copy.deepcopy(torch.eye(3).to_sparse_csr())
    body = 'self.w = nn.Linear(2, 2); self.register_buffer("adjacency", torch.eye(3).to_sparse_csr())'
    assert map_rules(run_copy(body)) == {"adjacency": "not-copyable"}


def test_tensor_subclass_that_torch_cannot_copy_is_named():
    """The class is the reason, not the layout or the dtype."""
    code = "---\nclass Odd(torch.Tensor):\n    pass"
    (finding,) = run_copy(f"self.t = torch.ones(3).as_subclass(self.Odd)\n{code}").findings
    assert (finding.rule, finding.fqn) == ("not-copyable", "t")
    assert finding.message.startswith("t: Odd, a tensor subclass that torch does not copy")


OWN_COPY = """
self.w = nn.Parameter(torch.ones(3)); self.v = nn.Parameter(torch.ones(3))
---
def __deepcopy__(self, memo):
    other = type(self)()
    {}
    return other
"""


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        ("other.w = self.w", {"w": "shared-with-copy"}),
        ("other.w.data.zero_()", {"w": "changed-by-copy"}),
        ("del other.w", {"w": "lost-by-copy"}),
        ("other.w.data.copy_(self.w.data)", {}),
    ],
)
def test_deepcopy_of_the_class_is_checked(what, rule):
    """A parameter that `__deepcopy__` shares, changes or forgets is reported; the other parameter is copied well."""
    check = run_copy(OWN_COPY.format(f"other.v.data.copy_(self.v.data); {what}"))
    assert map_rules(check) == rule
    assert all(
        "copy the tensor in " in finding.help and finding.help.endswith("__deepcopy__") for finding in check.findings
    )


def test_tie_broken_by_deepcopy_is_reported():
    """Two names of the same tensor become two tensors in the copy."""
    body = "self.w = nn.Parameter(torch.ones(3)); self.v = self.w\n---\ndef __deepcopy__(self, memo):\n"
    body += "    other = type(self)(); other.w.data.copy_(self.w.data); other.v = nn.Parameter(self.v.data.clone())\n"
    body += "    return other"
    check = run_copy(body)
    assert map_rules(check) == {"v": "untied-by-copy"}
    assert find_cell(check, "copied", "v").verdict is Verdict.FAILED
    assert find_cell(check, "pickled", "v").verdict is Verdict.PASSED


def test_closure_shared_with_the_copy_is_reported():
    """copy.deepcopy copies no function, so the copy's hook uses the original's tensor; pickle refuses the hook."""
    body = "keep = torch.rand(3)\nself.l = nn.Linear(3, 3)\n"
    body += "self.register_forward_hook(lambda module, args, output: output + keep)"
    check = run_copy(body)
    assert list(map_rules(check).values()) == ["shared-with-copy"]
    assert "Can't" in check.reason


def test_class_attribute_is_skipped():
    """A class attribute is shared by all instances, so its cell is skipped."""
    check = run_copy("self.w = nn.Linear(2, 2)\n---\ntable = torch.ones(3)")
    assert map_verdicts(check, "copied")["table"] == "skipped"
    assert check.verdict is Verdict.PASSED


def test_cache_dropped_by_getstate_is_skipped():
    """The class drops a cache in `__getstate__`."""
    body = "self.w = nn.Linear(2, 2); self.cache = torch.ones(3)\n---\n"
    body += 'def __getstate__(self):\n    return {**self.__dict__, "cache": None}'
    assert map_verdicts(run_copy(body), "pickled")["cache"] == "skipped"


REFUSED = {
    "parametrized": (
        "nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))",
        "torch.save cannot save parametrized modules",
    ),
    "script": ("torch.jit.script(nn.Linear(2, 2))", "torch.save cannot save a nested ScriptModule"),
}


@pytest.mark.parametrize(("part", "reason"), REFUSED.values(), ids=REFUSED)
def test_pickled_copy_is_skipped_if_torch_save_refuses(part, reason):
    """The oracle: torch.save raises. Only the deep copy is checked, and each cell of the pickled copy is skipped."""
    check = run_copy(f"self.l = {part}")
    with pytest.raises(RuntimeError):
        torch.save(build_net(), io.BytesIO())
    assert check.how == (
        f"copy.deepcopy of the module; the copy with pickle was not checked, because {reason}, only a state_dict()"
    )
    assert set(map_verdicts(check, "pickled").values()) == {"skipped"}
    assert set(map_verdicts(check, "copied").values()) == {"passed"}


def test_lambda_attribute_is_inconclusive():
    """A lambda cannot be pickled: the check is inconclusive and has no finding about a tensor."""
    check = run_copy("self.l = nn.Linear(2, 2); self.act = lambda x: x")
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "lambda" in check.reason
    assert set(map_verdicts(check, "copied").values()) == {"passed"}


def test_class_local_to_a_test_is_not_expected_to_pickle():
    """Python cannot find a local class by name, so pickling is skipped; the deep copy is still checked."""

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2)

    check = statecli.verify(Local(), checks=["copy"]).checks[0]
    assert check.verdict is Verdict.PASSED
    assert set(map_verdicts(check, "pickled").values()) == {"skipped"}
    assert set(map_verdicts(check, "copied").values()) == {"passed"}


def test_class_that_refuses_to_be_copied_fails():
    """A copy was attempted and raised an error; the finding has the model's own message and line."""
    body = 'self.w = nn.Linear(2, 2)\n---\ndef __deepcopy__(self, memo):\n    raise ValueError("not today")'
    check = run_copy(body)
    assert map_rules(check) == {None: "not-copyable"}
    assert "raised ValueError: not today (net.py:8)" in check.findings[0].message


HOLDER = """
self.l = nn.Linear(3, 3); {init}
---
def forward(self, x):
    {forward}
    return self.kept
"""
NON_LEAF_STATES = {
    "appears": ("pass", "self.kept = self.l(x).softmax(-1)", "SoftmaxBackward0"),
    "a hidden state": ("self.kept = 0", "self.kept = self.l(x) + self.kept", "AddBackward0"),
    "in a tensor's place": ("self.kept = torch.zeros(3)", "self.kept = self.l(x) * 2", "MulBackward0"),
    "in a buffer's place": (
        "self.register_buffer('kept', torch.zeros(3))",
        "self.kept = self.l(x).neg()",
        "NegBackward0",
    ),
}


@pytest.mark.parametrize(("init", "forward", "operation"), NON_LEAF_STATES.values(), ids=NON_LEAF_STATES)
def test_non_leaf_kept_by_forward_breaks_deepcopy(init, forward, operation):
    """The oracle: copy.deepcopy of the same class raises after a call. With a detached tensor, the check passes."""
    check = run_copy(HOLDER.format(init=init, forward=forward), "2x3")
    model = build_net().eval()
    model(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(model)
    assert map_rules(check) == {"kept": "non-leaf-attribute"}
    assert check.findings[0].help.startswith("store the tensor with .detach()")
    what = f"kept: computed by autograd ({operation}), not a leaf tensor"
    assert check.findings[0].message == f"{what}, so after a forward copy.deepcopy of the model raises an error"
    check = run_copy(HOLDER.format(init=init, forward=f"{forward}; self.kept = self.kept.detach()"), "2x3")
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())


def test_tensor_of_a_forward_without_gradients_is_copied():
    """Forward writes to a parameter, so forward runs without gradients: `kept` has no graph and is copied."""
    check = run_copy(HOLDER.format(init="pass", forward="self.l.weight.mul_(1); self.kept = self.l(x)"), "2x3")
    assert map_verdicts(check, "copied")["kept"] == "passed"


@pytest.mark.parametrize(
    "build_module",
    [
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
        lambda: torch.jit.script(nn.BatchNorm1d(3)),
        lambda: torch.compile(nn.Linear(2, 2)),
    ],
    ids=["spectral_norm", "script", "compile"],
)
def test_modules_of_torch_pass(build_module):
    """Modules of torch pass; the tensors that torch omits from pickles on purpose are skipped there."""
    check = prove_live(copying.prove, build_module)
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())


def test_old_weight_norm_breaks_deepcopy():
    """The oracle: copy.deepcopy raises. The advice names torch's replacement of the old weight_norm."""
    module = nn.utils.weight_norm(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(module)
    check = prove_live(copying.prove, lambda: nn.utils.weight_norm(nn.Linear(3, 3)))
    assert map_rules(check) == {"weight": "non-leaf-attribute"}
    assert "parametrizations" in check.findings[0].help


def test_uninitialized_parameters_are_inconclusive():
    """torch itself cannot copy a lazy module before its first forward."""
    check = prove_live(copying.prove, lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())


def test_uncopyable_live_model_has_the_result_of_its_class():
    """A live model has the same verdict, rules, cells and reason as its class, and stays unchanged. The cells of the
    other tensors are inconclusive and not passed.
    """
    check = run_copy("import threading\nself.l = nn.Linear(2, 2); self.lock = threading.Lock()")
    assert (
        set(map_verdicts(check, "copied").values()) == set(map_verdicts(check, "pickled").values()) == {"inconclusive"}
    )
    assert find_cell(check, "copied", "l.weight").reason.startswith("lock: cannot pickle '_thread.lock' object")
    assert find_cell(check, "pickled", "l.weight").reason.startswith("pickling the model raised TypeError")
    model = build_net()
    before = model.l.weight.detach().clone()
    (live,) = statecli.verify(model, checks=["copy"]).checks
    assert map_rules(live) == map_rules(check) == {"lock": "not-copyable"}
    assert (live.verdict, live.reason, live.columns) == (check.verdict, check.reason, check.columns)
    assert torch.equal(model.l.weight, before)


def test_attribute_that_cannot_be_copied_is_named():
    """copy.deepcopy of the model raises because of a nested lock, and the finding names the lock's attribute."""
    body = "import threading\nself.l = nn.Linear(2, 2)\nself.l.guards = {'a': threading.Lock()}\nself.l.owner = [self]"
    check = prove_source(Name.COPY, body)
    assert map_rules(check) == {"l.guards": "not-copyable"}
    assert check.findings[0].message == (
        "l.guards: cannot pickle '_thread.lock' object, so copy.deepcopy of the model raises an error"
    )


def test_view_untied_by_deepcopy_has_a_cell():
    """The second name has no row; its cell is in the column of the copy that no longer shares the memory."""
    check = run_copy("self.lin = nn.Linear(4, 4)\nself.view = self.lin.weight.detach().t()")
    assert map_rules(check) == {"view": "untied-by-copy"}
    assert find_cell(check, "copied", "view").verdict is Verdict.FAILED


def test_row_of_a_parameter_has_a_single_finding():
    """The first row of a weight is reported as a stale view, even though deepcopy also refuses the attribute."""
    check = run_copy("self.l = nn.Linear(2, 2); self.row = self.l.weight[0]")
    assert map_rules(check) == {"row": "stale-view"}
    assert find_cell(check, "copied", "l.weight").reason.startswith("row: computed by autograd (SelectBackward0)")
