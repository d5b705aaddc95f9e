"""Saving: tensors that a new instance restores or loses, each checked against torch and safetensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import statecli
from statecli.commands.verify.proofs import save
from statecli.commands.verify.result import Name, Verdict
from statecli.core.finding import Severity
from statecli.core.model_state import Origin
from statecli.live import tensor_bits

from .proving import (
    SOURCE,
    build_net,
    find_cell,
    map_rules,
    map_verdicts,
    prove_live,
    prove_sample,
    prove_source,
    run_proof,
)

pytestmark = pytest.mark.usefixtures("in_tmp_path")

FAILING = {
    "net:Net": {"table": "lost-by-saving"},
    "tied:Tied": {"head.weight": "shared-in-safetensors"},
    "precomputed:Normed": {"direction": "lost-by-saving"},
    "plain_lists:Lists": {
        **{f"scales[{i}]": "lost-by-saving" for i in range(2)},
        **{f"blocks[{i}].{name}": "lost-by-saving" for i in range(2) for name in ("weight", "bias")},
        **{f"heads['{key}'].{name}": "lost-by-saving" for key in "ab" for name in ("weight", "bias")},
    },
}


def run_save(body: str, *input: str, **options):
    return prove_source(Name.SAVE, body, *input, **options)


@pytest.mark.parametrize("spec", FAILING)
def test_sample_has_exactly_the_expected_findings(spec):
    """FAILING has the tensors of each sample and their rules; a finding about another tensor fails the test."""
    assert map_rules(prove_sample(Name.SAVE, spec)) == FAILING[spec]


def test_check_has_three_columns():
    """Saved, restored and restored from safetensors: each column has a cell for each tensor concerned."""
    check = prove_sample(Name.SAVE, "positions:Positions")
    assert map_verdicts(check, "saved") == {"embed.weight": "passed", "positions": "skipped"}
    assert map_verdicts(check, "restored") == map_verdicts(check, "safetensors") == {"embed.weight": "passed"}
    reason = "not in state_dict() (persistent=False); the constructor creates an equal tensor"
    assert find_cell(check, "saved", "positions").reason == reason


def test_tensor_of_the_first_forward_refers_to_the_check_resume(in_tmp_path):
    """The values may depend on the first input, and only the check `resume` compares the values of two instances."""
    forward = "if self.mean is None:\n        self.mean = x.detach().mean(0)\n    return self.fc(x - self.mean)"
    body = f"self.fc = nn.Linear(3, 3)\nself.mean = None\n---\ndef forward(self, x):\n    {forward}"
    cell = find_cell(prove_source(Name.SAVE, body, "2x3"), "saved", "mean")
    assert cell.verdict is Verdict.SKIPPED
    assert cell.reason.endswith("the first forward creates the tensor again; the check `resume` compares the values")


# --- tensors of the constructor --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("torch.arange(5.0)", None),
        ("torch.rand(5)", "lost-by-saving"),
        ("torch.tensor(numpy.random.rand(5))", "lost-by-saving"),
        ("torch.randperm(100)", "lost-by-saving"),
        ("torch.rand(5, generator=torch.Generator().manual_seed(3))", None),
        ("torch.empty(5000)", None),
        ("torch.empty(300, 301)", None),
        ("torch.empty((70, 1000))", None),
        ("torch.empty(size=[90_000])", None),
        ("self.w.weight.detach().clone()", "lost-by-saving"),
        ("torch.full((3,), torch.nan)", None),
    ],
)
def test_random_buffer_fails_and_computed_buffer_passes(value, rule):
    """Two instances are built with different seeds and compared; their large parameters are initialized too."""
    body = f'import numpy; self.w = nn.Linear(300, 300)\nself.register_buffer("t", {value}, persistent=False)'
    assert map_rules(run_save(body)) == ({"t": rule} if rule else {})


def test_help_makes_the_buffer_persistent():
    """The tensor is already registered, so the help changes only the flag."""
    (finding,) = run_save('self.register_buffer("t", torch.rand(3), persistent=False)').findings
    assert finding.help == "register the buffer with persistent=True; assigned at net.py:6"


def test_tensor_that_requires_grad_fails_even_if_rebuilt():
    """The constructor sets ones and does not restore the trained values."""
    assert map_rules(run_save("self.t = torch.ones(3, requires_grad=True)")) == {"t": "lost-by-saving"}


def test_unregistered_tensor_of_a_live_model_is_inconclusive():
    """In a live model, an unregistered tensor is inconclusive, and a non-persistent buffer is accepted."""
    body = "self.t = torch.ones(3); self.register_buffer('u', torch.ones(3), persistent=False)\n---\n"
    run_save(body)
    with open("net.py", "a") as file:
        file.write("\nnet = Net()\n")
    check = run_proof(Name.SAVE, "net.py:net")
    assert map_verdicts(check, "saved") == {"t": "inconclusive", "u": "skipped"}


STATE = """
self.lin = nn.Linear(4, 4)
{}
---
def forward(self, x):
    if self.training:
        {}
    return self.lin(x) - self.t.sum()
"""
#: Two ways in which a class declares a tensor with the value `torch.zeros(4)`.
NOT_PERSISTENT = 'self.register_buffer("t", torch.zeros(4), persistent=False)'
PLAIN = "self.t = torch.zeros(4)"


@pytest.mark.parametrize(("declared", "severity"), [(NOT_PERSISTENT, Severity.WARNING), (PLAIN, Severity.ERROR)])
@pytest.mark.parametrize(
    "update",
    [
        "self.t.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)",
        "self.t = 0.9 * self.t + x.detach().mean(0)",
        "self.t += 1",
        "self.t[0] = self.t[0] + 1",
        "torch.maximum(self.t, x.detach().abs().amax(0), out=self.t)",
    ],
)
def test_unsaved_running_state_is_reported(declared, severity, update):
    """An average, a counter, a maximum: a loaded model starts from the constructor's value again."""
    check = run_save(STATE.format(declared, update), "4x4")
    (finding,) = check.findings
    assert (finding.rule, finding.severity, finding.fqn) == ("lost-by-saving", severity, "t")
    assert find_cell(check, "saved", "t").verdict is Verdict.FAILED
    if severity is Severity.WARNING:
        assert finding.help == "register the buffer with persistent=True; assigned at net.py:8"
    else:
        assert finding.help.startswith('net.py:8: self.register_buffer("t", torch.zeros(4))')
        assert "persistent=False" not in finding.help


@pytest.mark.parametrize("declared", [NOT_PERSISTENT, PLAIN])
@pytest.mark.parametrize(
    "update",
    [
        "pass",
        "self.t.copy_(x.detach().mean(0))",
        "self.t = x.detach().mean(0)",
        "self.t[1:3] = x.detach().mean(0)[1:3]",
        "self.t = self.t.clone()",
        "x = x + self.t",
        "raise ValueError",
    ],
)
def test_unsaved_cache_is_skipped(declared, update):
    """Forward writes the same values again, whatever the old values were; or forward does not run."""
    check = run_save(STATE.format(declared, update), "4x4")
    assert (check.findings, find_cell(check, "saved", "t").verdict) == ((), Verdict.SKIPPED)


def test_help_for_a_running_state_of_the_class_saves_the_buffer():
    """A buffer with persistent=False would lose the updates as well."""
    body = "self.lin = nn.Linear(4, 4)\n---\nmean = torch.zeros(4)\ndef forward(self, x):\n"
    body += "    if self.training: self.mean.lerp_(x.mean(0), 0.1)\n    return self.lin(x) - self.mean"
    (finding,) = run_save(body, "2x4").findings
    assert 'self.register_buffer("mean", torch.zeros(4))' in finding.help
    assert "persistent" not in finding.help


def test_random_running_state_is_an_error():
    """The finding is an error with an input, just as without an input."""
    body = STATE.format(NOT_PERSISTENT.replace("zeros", "rand"), "self.t += 1")
    (finding,) = run_save(body, "4x4").findings
    assert (finding.severity, "drawn at random" in finding.message) == (Severity.ERROR, True)


def test_state_of_a_metric_is_not_reported():
    """torchmetrics resets its sums in each epoch, and has an option to save the sums."""
    pytest.importorskip("torchmetrics")
    body = "import torchmetrics; self.m = torchmetrics.MeanMetric(); self.lin = nn.Linear(4, 4)\n---\n"
    check = run_save(body + "def forward(self, x):\n    self.m.update(x.detach())\n    return self.lin(x)\n", "4x4")
    assert check.findings == ()


# --- saved tensors ---------------------------------------------------------------------------------------------------


def test_every_dtype_is_restored():
    """Small floats, complex numbers, integers of each width, bools, quantized, 0-dim, empty and expanded tensors."""
    dtypes = ["float16", "bfloat16", "float64", "float8_e4m3fn", "complex64", "int8", "uint8", "int16", "int64", "bool"]
    lines = [f'self.register_buffer("{name}_", torch.zeros(3).to(torch.{name}))' for name in dtypes]
    lines += ['self.register_buffer("scalar", torch.tensor(3))', 'self.register_buffer("empty", torch.empty(0))']
    check = run_save("\n".join(lines))
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert set(map_verdicts(check, "restored")) == {*(f"{name}_" for name in dtypes), "scalar", "empty"}


def test_state_dict_without_a_parameter_is_reported():
    """Loading refuses the state_dict, and a finding names the missing tensor."""
    body = "self.w = nn.Parameter(torch.ones(3)); self.v = nn.Parameter(torch.ones(3))\n---\n"
    body += "def state_dict(self, *args, **kwargs):\n    state = super().state_dict(*args, **kwargs)\n"
    body += '    del state["v"]\n    return state'
    check = run_save(body)
    assert map_rules(check) == {None: "not-loadable", "v": "lost-by-saving"}
    assert 'Missing key(s) in state_dict: "v"' in check.findings[0].message
    assert map_verdicts(check, "restored") == {"w": "passed"}


def test_tensors_are_inconclusive_if_the_load_raises():
    """The class's load raises, and statecli does not know the tensors that were loaded before."""
    body = "self.w = nn.Parameter(torch.ones(3))\n---\n"
    body += 'def load_state_dict(self, *args, **kwargs):\n    raise ValueError("not today")'
    check = run_save(body)
    assert map_rules(check) == {None: "not-loadable"}
    assert "not today (net.py:8)" in check.findings[0].message
    assert find_cell(check, "restored", "w").verdict is Verdict.INCONCLUSIVE


def test_state_dict_that_raises_is_inconclusive():
    """The error shows no fault of a tensor."""
    body = (
        'self.w = nn.Parameter(torch.ones(3))\n---\ndef state_dict(self, *a, **k):\n    raise ValueError("not today")'
    )
    check = run_save(body)
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "not today" in check.reason


EXTRA_STATE = "self.w = nn.Parameter(torch.ones(3)); self.seen = 3\n---\n"
EXTRA_STATE += "def get_extra_state(self):\n    return {}\ndef set_extra_state(self, state):\n    assert state"


def test_extra_state_of_plain_data_passes():
    """torch.save accepts plain data. safetensors refuses the data, but loses no tensor, so the cell is skipped."""
    check = run_save(EXTRA_STATE.format('{"seen": [self.seen, "often", None]}'))
    assert (check.verdict, check.findings) == (Verdict.PASSED, ())
    assert find_cell(check, "restored", "w").verdict is Verdict.PASSED
    plain = find_cell(check, "safetensors", "w")
    reason = "_extra_state: type is dict, but safetensors stores only tensors"
    assert (plain.verdict, plain.reason) == (Verdict.SKIPPED, reason)


def test_extra_state_with_tensors_or_objects_fails():
    """safetensors cannot store a tensor in the extra state; an object is also refused by torch.load."""
    (finding,) = run_save(EXTRA_STATE.format('{"seen": [torch.ones(self.seen)]}')).findings
    assert (finding.rule, finding.fqn, finding.severity) == ("not-in-safetensors", "_extra_state", Severity.WARNING)
    actual = map_rules(run_save(EXTRA_STATE.format("__import__('fractions').Fraction(1, 3)")))
    assert actual == {None: "not-plain-data", "_extra_state": "not-in-safetensors"}


def test_extra_state_without_a_load_is_reported():
    """The tensor is in the file, so the message does not say that state_dict() lacks the tensor."""
    methods = "def get_extra_state(self):\n    return self.t\ndef set_extra_state(self, state):\n    pass"
    (finding,) = run_save(f"self.w = nn.Parameter(torch.ones(3)); self.t = torch.rand(3)\n---\n{methods}").findings
    assert (finding.rule, finding.message) == (
        "not-restored",
        "t: saved, but load_state_dict() does not restore the tensor",
    )
    assert "restore the tensor in Net.set_extra_state" in finding.help
    (check,) = statecli.verify(build_net(), checks=["save"]).checks
    assert map_rules(check) == {"t": "not-restored"}


def test_refused_class_is_named():
    """A tensor subclass needs add_safe_globals; the state_dict of the other class is a tuple with an object."""
    code = "---\nclass Odd(torch.Tensor):\n    pass"
    check = run_save(f'self.register_buffer("t", torch.ones(3).as_subclass(self.Odd))\n{code}')
    (finding,) = [finding for finding in check.findings if finding.rule == "not-plain-data"]
    assert "torch.serialization.add_safe_globals" in finding.help
    check = run_save("self.w = nn.Parameter(torch.ones(3))\n---\n" + STATE_IN_TUPLE)
    assert "not-plain-data" in map_rules(check).values()


STATE_IN_TUPLE = """def state_dict(self, **options):
    return __import__("fractions").Fraction(1, 3), super().state_dict(**options)
def load_state_dict(self, state, strict=True):
    return super().load_state_dict(state[1], strict=strict)"""


def test_shared_memory_is_found_despite_extra_state():
    """Tensors that share memory are found, although safetensors cannot write the state_dict as a whole."""
    check = run_save(EXTRA_STATE.replace("---", "self.v = self.w\n---").format('{"seen": 3}'))
    assert map_rules(check) == {"v": "shared-in-safetensors"}


@pytest.mark.parametrize("piece", [1, 1 << 30])
def test_tensor_changed_by_safetensors_is_reported(piece, monkeypatch):
    """If safetensors changes a tensor, only this tensor is reported, whatever the size of the pieces."""
    from safetensors import torch as format

    whole = format.load

    def load(data):
        return {name: value + 1 if name == "b.bias" else value for name, value in whole(data).items()}

    monkeypatch.setattr(format, "load", load)
    monkeypatch.setattr(save, "_PIECE_BYTES", piece)
    check = run_save("self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 2)")
    assert map_rules(check) == {"b.bias": "changed-by-safetensors"}
    names = ("a.weight", "a.bias", "b.weight", "b.bias")
    assert map_verdicts(check, "safetensors") == {name: "failed" if name == "b.bias" else "passed" for name in names}


@pytest.mark.parametrize("spec", ["tied:Tied", "net:Net", "batchnorm:Block"])
def test_small_pieces_give_the_same_result(spec, monkeypatch):
    """Shared memory is found before the state_dict is split into pieces."""
    whole = prove_sample(Name.SAVE, spec)
    monkeypatch.setattr(save, "_PIECE_BYTES", 1)
    assert prove_sample(Name.SAVE, spec) == whole


def test_safetensors_gets_small_pieces():
    """safetensors gets small pieces in turn, so memory holds only a few pieces and not a copy of the model."""
    entries = {str(n): torch.zeros(1 << 20) for n in range(12)}
    sizes = [sum(tensor.nbytes for tensor in piece.values()) for piece in save._iter_pieces(entries)]
    assert sum(sizes) == 12 << 22
    assert max(sizes) <= save._PIECE_BYTES


@pytest.mark.parametrize(
    ("make_it", "words"), [("torch.eye(3).to_sparse()", "sparse_coo"), ("torch.rand(3, 4).t()", "not contiguous")]
)
def test_tensor_that_safetensors_refuses_is_reported(make_it, words):
    """The oracle: safetensors' own save refuses the buffer; torch.save restores the buffer."""
    from safetensors.torch import save as save_file

    check = run_save(f'self.register_buffer("b", {make_it})')
    assert map_rules(check) == {"b": "not-in-safetensors"}
    assert words in check.findings[0].message
    assert map_verdicts(check, "restored") == {"b": "passed"}
    with pytest.raises(ValueError, match=r"sparse|contiguous"):
        save_file({"b": eval(make_it, {"torch": torch})})  # noqa: S307 - the text above


def test_help_suggests_contiguous_copies_for_save_file():
    """The oracle: safetensors refuses the module of torch, and accepts the copies that the help suggests."""
    from safetensors.torch import save as save_file

    check = run_save("self.c = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))")
    (finding,) = check.findings
    assert finding.rule == "not-in-safetensors"
    assert finding.help == (
        "pass copies to save_file: {name: tensor.contiguous() for name, tensor in model.state_dict().items()}"
    )
    model = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="contiguous"):
        save_file(model.state_dict())
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()})


LOAD_METHODS = {
    "_load_from_state_dict(self, state, prefix, *args)": (
        "state['t'] = state['t'].half().float(); super()._load_from_state_dict(state, prefix, *args)"
    ),
    "load_state_dict(self, state, strict=True, assign=False)": (
        "return super().load_state_dict({**state, 't': self.t}, strict)"
    ),
}


@pytest.mark.parametrize("method", LOAD_METHODS)
def test_help_names_the_loading_method(method):
    """A method that rounds, and a method that loads the model's own value."""
    check = run_save(f'self.register_buffer("t", torch.rand(3))\n---\ndef {method}:\n    {LOAD_METHODS[method]}')
    assert map_rules(check) == {"t": "not-restored"}
    assert (map_verdicts(check, "saved")["t"], map_verdicts(check, "restored")["t"]) == ("passed", "failed")
    assert check.findings[0].message == "t: saved, but load_state_dict() does not restore the tensor"
    name = method.partition("(")[0]
    assert check.findings[0].help == f"net.py:7: in Net.{name}, pass the saved entry on to super()"


def test_help_names_the_saving_method():
    """The method omits the tensor, or saves rounded values."""
    body = 'self.register_buffer("t", torch.rand(3))\n---\ndef state_dict(self, *args, **kwargs):\n    return {}'
    for state, rule in (("{}", "lost-by-saving"), ("{'t': self.t.half()}", "changed-by-saving")):
        (finding,) = [finding for finding in run_save(body.replace("{}", state)).findings if finding.fqn == "t"]
        assert (finding.rule, finding.help) == (
            rule,
            "net.py:7: let Net.state_dict keep all entries that super() saves",
        )
        assert finding.origin == Origin("net.py", 7)


def test_help_registers_a_buffer_that_forward_fills():
    """A new model has None as the buffer and refuses the saved tensor; the help has the line of forward."""
    body = 'self.a = nn.Linear(3, 3); self.register_buffer("q", {})\n---\ndef forward(self, x):\n'
    body += "    if self.q is None: self.q = torch.ones(3)\n    return self.a(x) * self.q"
    findings = run_save(body.format("None"), "2x3").findings
    assert {finding.origin for finding in findings} == {Origin("net.py", 8)}
    helps = {finding.rule: finding.help for finding in findings}
    what = "register the tensor in the constructor with its final shape, because a new instance lacks it before forward"
    assert helps == {"not-loadable": f"net.py:8: {what}", "not-restored": f"{what}; assigned at net.py:8"}
    assert run_save(body.format("torch.ones(3)"), "2x3").findings == ()


# --- state of the process and of the file ----------------------------------------------------------------------------


def test_tensor_shared_by_all_instances_is_restored():
    """All instances register the same global tensor: the proof writes to the global tensor and restores its values."""
    body = SOURCE + "MEAN = torch.rand(3)\nclass Net(nn.Module):\n    table = torch.ones(2)\n    def __init__(self):\n"
    body += '        super().__init__()\n        self.register_buffer("mean", MEAN)\n'
    body += "        assert MEAN.equal(KEPT) and self.table.equal(torch.ones(2))\nKEPT = MEAN.clone()\n"
    with open("net.py", "w") as file:
        file.write(body)
    check = run_proof(Name.SAVE, "net.py:Net")
    assert map_verdicts(check, "saved") == {"mean": "passed", "table": "skipped"}
    assert map_verdicts(check, "restored") == {"mean": "passed"}
    assert check.verdict is Verdict.PASSED


def test_deterministic_mode_is_restored():
    """The deterministic mode, which fills uninitialized memory, is reset after the proof."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    run_save("self.t = torch.rand(3)")
    assert (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ) == before


# --- real classes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build_module",
    [
        lambda: torch.jit.script(nn.BatchNorm1d(3)),
        lambda: torch.compile(nn.Linear(2, 2)),
    ],
    ids=["script", "compile"],
)
def test_modules_of_torch_have_no_findings(build_module):
    """Scripted and compiled modules have no finding; `test_zoo.py` has other modules of torch."""
    assert prove_live(save.prove, build_module).findings == ()


def test_lazy_module_with_an_input_is_saved_from_its_first_forward():
    """The first forward gives the saved instance its shapes; loading gives the new instance its shapes."""
    check = run_save("self.l = nn.LazyLinear(2)\n---\ndef forward(self, x):\n    return self.l(x)", "4x3")
    assert map_verdicts(check, "restored") == {"l.weight": "passed", "l.bias": "passed"}


def test_model_on_meta_is_skipped():
    """A model without values is skipped."""
    assert run_save("self.w = nn.Parameter(torch.ones(3))", init_device="meta").verdict is Verdict.SKIPPED


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1000),
        torch.ones(7, dtype=torch.bool),
        torch.zeros(5, dtype=torch.complex128),
        torch.arange(9, dtype=torch.uint8).view(3, 3).t(),
        torch.zeros(1).expand(4),
        torch.zeros(3).to(torch.float8_e5m2),
        torch.zeros(10)[2:5],
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.stride())}",
)
def test_perturb_changes_every_element(tensor):
    """`perturb` changes every element, for each dtype and stride; before the change, `is_same` is True for a clone."""
    before = tensor.clone()
    assert tensor_bits.is_same(before, tensor) is True
    tensor_bits.perturb([tensor])
    assert tensor_bits.is_same(before, tensor) is False
    assert bool((before.to(torch.complex128) != tensor.to(torch.complex128)).all())


def test_is_same_compares_bits():
    """-0.0 differs from 0.0, a NaN equals a NaN with the same bits, and other dtypes or shapes always differ."""
    assert tensor_bits.is_same(torch.tensor(0.0), torch.tensor(-0.0)) is False
    assert tensor_bits.is_same(torch.tensor(torch.nan), torch.tensor(torch.nan)) is True
    assert tensor_bits.is_same(torch.zeros(2), torch.zeros(2, dtype=torch.int32)) is False
    assert tensor_bits.is_same(torch.zeros(2), torch.zeros(2, 1)) is False
    assert tensor_bits.is_same(torch.zeros(2, device="meta"), torch.zeros(2, device="meta")) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("start", range(5))
def test_is_same_finds_a_change_of_the_last_element(dtype, start):
    """Slices of every length, on word boundaries or not, with the last element changed or none."""
    for length in range(1, 40):
        tensor = (torch.arange(100) % 2).to(dtype)[start : start + length]
        shifted = torch.cat([torch.zeros(3, dtype=dtype), tensor])[3:]
        assert tensor_bits.is_same(tensor, shifted) is tensor_bits.is_same(shifted, tensor) is True
        shifted[-1] = 1 - tensor[-1].to(torch.uint8)
        assert tensor_bits.is_same(tensor, shifted) is tensor_bits.is_same(shifted, tensor) is False
