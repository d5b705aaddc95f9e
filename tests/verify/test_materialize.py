"""The proof `materialize`: a model built on meta gets memory, init methods and a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import statecli
from statecli.commands.verify.result import Name, Verdict
from statecli.live.build import build
from statecli.live.spec import parse_spec

from .proving import expect_findings, find_imported_net, map_rules, map_verdicts, prove_real, prove_source, run_proof

LOST, CHANGED, META, UNBUILT = (
    "lost-by-materializing",
    "changed-by-materializing",
    "left-on-meta",
    "not-built-on-meta",
)
STEPS = "torch.arange(0, 8, 2) / 8"
RESET = "def reset_parameters(self):\n    self.{0}.copy_({1})"


def buffer(value: str, name: str = "t", *, persistent: bool = False) -> str:
    return f'self.register_buffer("{name}", {value}{"" if persistent else ", persistent=False"})'


#: A class that fails, with the rule of each failed tensor, and a class of the same purpose that passes.
ZOO = {
    "a table that is not saved": (buffer(STEPS), {"t": LOST}, buffer(STEPS, persistent=True)),
    "and no init method": (buffer(STEPS), {"t": LOST}, f"{buffer(STEPS)}\n---\n{RESET.format('t', STEPS)}"),
    "integers": (
        buffer("torch.arange(4)"),
        {"t": LOST},
        f"{buffer('torch.arange(4)')}\n---\n{RESET.format('t', 'torch.arange(4)')}",
    ),
    "a mask of False": (
        buffer("torch.zeros(4, dtype=torch.bool)"),
        {"t": LOST},
        f"{buffer('torch.zeros(4, dtype=torch.bool)')}\n---\ndef reset_parameters(self):\n    self.t.zero_()",
    ),
    "complex numbers": (
        buffer("torch.polar(torch.ones(4), torch.arange(4.0))"),
        {"t": LOST},
        buffer("torch.polar(torch.ones(4), torch.arange(4.0))", persistent=True),
    ),
    "eight bits": (
        buffer("torch.ones(4).to(torch.float8_e4m3fn)"),
        {"t": LOST},
        f"{buffer('torch.ones(4).to(torch.float8_e4m3fn)')}\n---\ndef reset_parameters(self):\n    self.t.fill_(1)",
    ),
    "a scale without a dimension": (
        buffer("torch.tensor(0.5)"),
        {"t": LOST},
        f"{buffer('torch.tensor(0.5)')}\n---\ndef init_weights(self, buffer_device=None):\n    self.t.fill_(0.5)",
    ),
    "half of the elements": (
        f"{buffer('torch.ones(4)')}\n---\ndef reset_parameters(self):\n    self.t[:2] = 1",
        {"t": LOST},
        f"{buffer('torch.ones(4)')}\n---\ndef reset_parameters(self):\n    self.t[:] = 1",
    ),
    "computed from memory that was not written": (
        f"{buffer('torch.ones(4)')}\n{buffer('2 * torch.ones(4)', 'u')}\n---\n{RESET.format('u', '2 * self.t')}",
        {"t": LOST, "u": LOST},
        f"{buffer('torch.ones(4)')}\n{buffer('2 * torch.ones(4)', 'u')}\n---\n"
        "def reset_parameters(self):\n    self.t.fill_(1)\n    self.u.copy_(2 * self.t)",
    ),
    "in a part": (
        f"""
        self.parts = nn.ModuleList([Part(), Part()])
        ---
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                {buffer(STEPS)}
        """,
        {"parts.0.t": LOST, "parts.1.t": LOST},
        f"""
        self.parts = nn.ModuleList([Part(), Part()])
        ---
        def _init_weights(self, module):
            if isinstance(module, Part):
                module.t.copy_({STEPS})
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                {buffer(STEPS)}
        """,
    ),
    "a parameter that the class does not save": (
        """
        self.w = nn.Parameter(torch.ones(2))
        ---
        def state_dict(self, *args, **kwargs):
            return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k != "w"}
        def load_state_dict(self, state, strict=True):
            return super().load_state_dict(state, strict=False)
        """,
        {"w": LOST},
        """
        self.w = nn.Parameter(torch.ones(2))
        ---
        def state_dict(self, *args, **kwargs):
            return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k != "w"}
        def load_state_dict(self, state, strict=True):
            self.w.data.fill_(1)
            return super().load_state_dict(state, strict=False)
        """,
    ),
    "an init method with other values": (
        f"{buffer('2 * torch.ones(4)')}\n---\ndef reset_parameters(self):\n    self.t.fill_(1)",
        {"t": CHANGED},
        f"{buffer('2 * torch.ones(4)')}\n---\ndef reset_parameters(self):\n    self.t.fill_(2)",
    ),
    "a plain attribute": ("self.t = torch.ones(3)", {"t": META}, "self.t = torch.ones(3, device='cpu')"),
    "a plain list of modules": (
        "self.parts = [nn.Linear(2, 2)]",
        {"parts[0].weight": META, "parts[0].bias": META},
        "self.parts = nn.ModuleList([nn.Linear(2, 2)])",
    ),
    "a second name of a parameter": (
        "self.fc = nn.Linear(2, 2)\nself.names = [self.fc.weight]",
        {"names[0]": META},
        "self.fc = nn.Linear(2, 2)\nself.names = ['weight']",
    ),
    "a view of a buffer": (
        "self.register_buffer('t', torch.ones(4))\nself.half = self.t[:2]",
        {"half": META},
        "self.register_buffer('t', torch.ones(4))\nself.half = slice(2)",
    ),
    "a number of a tensor": (
        "self.rates = [x.item() for x in torch.linspace(0, 1, 3)]\nself.fc = nn.Linear(2, 2)",
        {None: UNBUILT},
        "self.rates = [x / 2 for x in range(3)]\nself.fc = nn.Linear(2, 2)",
    ),
    "a branch on values": (
        "self.fc = nn.Linear(2, 2)\nif self.fc.weight.sum() > 0: pass",
        {None: UNBUILT},
        "self.fc = nn.Linear(2, 2)",
    ),
}


prove = partial(prove_source, Name.MATERIALIZE)


@pytest.mark.parametrize("name", ZOO)
def test_uninitialized_tensor_is_reported(name, in_tmp_path):
    """Each failing class has the findings of the table, and its twin passes."""
    expect_findings(prove, *ZOO[name])


@pytest.mark.parametrize("name", [name for name, (_, expected, _) in ZOO.items() if set(expected.values()) == {LOST}])
@pytest.mark.parametrize("is_mended", [False, True])
def test_differing_memory_confirms_the_findings(name, is_mended, in_tmp_path):
    """The oracle: two models whose memory was filled with 3 and with 0 differ exactly in the reported tensors."""
    body = ZOO[name][2 if is_mended else 0]
    prove(body)
    built = []
    for number in (3, 7):
        real = build(parse_spec("net.py:Net")).module
        with torch.device("meta"):
            model = build(parse_spec("net.py:Net")).module
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(number % 2 if number == 3 and tensor.dtype is torch.bool else number % 7)
        for part in model.modules():
            for method in ("reset_parameters", "init_weights"):
                if hasattr(part, method) and not isinstance(part, nn.Linear):
                    getattr(part, method)()
        if hasattr(model, "_init_weights"):
            model.apply(model._init_weights)
        model.load_state_dict(real.state_dict())
        built.append({**dict(model.named_parameters()), **dict(model.named_buffers())})
    differing = {
        name for name, tensor in built[0].items() if tensor.detach().tolist() != built[1][name].detach().tolist()
    }
    assert differing == (set() if is_mended else set(ZOO[name][1]))


def test_uninitialized_buffer_is_an_error_and_attribute_a_warning(in_tmp_path):
    """Without an input, the program may copy a plain attribute, but nothing writes the buffer."""
    check = prove_source(Name.MATERIALIZE, f"{buffer(STEPS)}\nself.u = torch.ones(3)")
    assert {finding.fqn: finding.severity.value for finding in check.findings} == {"t": "error", "u": "warning"}
    buffer_finding = next(finding for finding in check.findings if finding.fqn == "t")
    assert "add a method reset_parameters() to Net" in buffer_finding.help
    assert "net.py:6" in buffer_finding.help


FORWARD = "\n---\ndef forward(self, x):\n    return {}"


@pytest.mark.parametrize(
    ("result", "severities"),
    [
        ("x * self.t", {"t": "error", "u": "note"}),
        ("x + 1", {"t": "note", "u": "note"}),
        ("x + self.u", {"u": "error"}),
    ],
)
def test_forward_decides_the_severity(result, severities, in_tmp_path):
    """A tensor that forward does not read is a note; a plain attribute that forward reads is an error."""
    body = f"{buffer('torch.ones(3)')}\nself.u = torch.ones(3)" + FORWARD.format(result)
    check = prove_source(Name.MATERIALIZE, body, "2x3")
    values_by_fqn = {finding.fqn: finding.severity.value for finding in check.findings}
    assert severities.items() <= values_by_fqn.items()
    failed = {name for name, severity in values_by_fqn.items() if severity == "error"}
    assert {name for name, verdict in map_verdicts(check, "materialized").items() if verdict == "failed"} == failed


def test_attribute_that_the_class_moves_itself_is_uninitialized(in_tmp_path):
    """`to_empty()` gives memory to the attribute too, and nothing writes this memory, unless _apply does."""
    body = (
        "self.t = torch.ones(4)\n---\ndef _apply(self, fn, recurse=True):\n    super()._apply(fn, recurse)\n"
        "    self.t = {}\n    return self"
    )
    expect_findings(prove, body.format("fn(self.t)"), {"t": LOST}, body.format("torch.ones_like(fn(self.t))"))


def test_partly_uninitialized_tensor_is_reported(in_tmp_path):
    """A method writes only some of the elements."""
    check = prove_source(Name.MATERIALIZE, ZOO["half of the elements"][0])
    (finding,) = check.findings
    assert finding.message.endswith("no init method computes all of its values")
    assert "compute t also in Net.reset_parameters()" in finding.help


def test_failing_init_method_is_inconclusive(in_tmp_path):
    """The reason has the error; saved tensors, which the checkpoint restores, still pass."""
    body = f"{buffer(STEPS)}\nself.fc = nn.Linear(2, 2)\n---\ndef reset_parameters(self):\n    raise ValueError('no')"
    check = prove_source(Name.MATERIALIZE, body)
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "reset_parameters() of the model raised ValueError: no" in check.reason
    assert map_verdicts(check, "materialized") == {"t": "inconclusive", "fc.weight": "passed", "fc.bias": "passed"}


def test_init_method_that_ignores_the_seed_is_inconclusive(in_tmp_path):
    """The init method ignores the seed, so two instances differ without a pattern."""
    body = (
        f"{buffer('torch.ones(1)')}\n---\ndef reset_parameters(self):\n    import time\n    self.t[0] = time.time() % 9"
    )
    check = prove_source(Name.MATERIALIZE, body.replace("torch.ones(1)", "torch.ones(1, dtype=torch.float64)"))
    assert (check.verdict, check.findings) == (Verdict.INCONCLUSIVE, ())
    assert "different values each time" in check.reason


def test_random_values_of_init_methods_pass(in_tmp_path):
    """A value drawn at random in the constructor and in the init method is initialized."""
    method = "def reset_parameters(self):\n    nn.init.normal_(self.t)\n    self.t[0] = __import__('random').random()"
    body = f"{buffer('torch.randn(4)')}\n---\n{method}"
    assert prove_source(Name.MATERIALIZE, body).verdict is Verdict.PASSED


def test_init_method_may_append_to_a_list_of_the_class(in_tmp_path):
    """Init methods run on statecli's instances; tensors that they add to a list of tensors of the class are removed."""
    method = "def reset_parameters(self):\n    self.seen.append(torch.ones(1))"
    body = f"self.fc = nn.Linear(1, 1)\n---\nseen = [torch.ones(1)]\n{method}"
    assert prove_source(Name.MATERIALIZE, body).verdict is Verdict.PASSED
    assert len(find_imported_net().Net.seen) == 1


def test_live_model_is_copied_to_meta(in_tmp_path):
    """The copy loses a non-persistent buffer; the live model keeps its values."""
    model = nn.Linear(2, 2)
    model.register_buffer("t", torch.ones(3), persistent=False)
    (check,) = statecli.verify(model, checks=["materialize"]).checks
    assert map_rules(check) == {"t": LOST}
    assert model.t.tolist() == [1, 1, 1]
    assert model.weight.device.type == "cpu"


def test_plain_tensor_of_a_live_model_is_inconclusive():
    """A copy of the model keeps the tensor on the cpu; the constructor would create it on meta."""
    model = nn.Linear(2, 2)
    model.t = torch.ones(3)
    (check,) = statecli.verify(model, checks=["materialize"]).checks
    assert map_verdicts(check, "materialized") == {"weight": "passed", "bias": "passed", "t": "inconclusive"}


#: Classes that do not pass: they keep modules in a plain list, have no shapes, or have other names on meta.
UNPROVED = {"OneFormerModel": "failed", "lazy": "inconclusive", "orthogonal": "inconclusive"}


def test_real_classes_have_the_expected_verdicts():
    """Classes of transformers and torch write all their tensors; OneFormer leaves a plain list of modules on meta."""
    pytest.importorskip("transformers")
    from . import real

    checks = prove_real(Name.MATERIALIZE, *real.CLASSES, *real.NESTED, *real.TORCH)
    verdicts = {name: check.verdict.value for name, check in checks.items()}
    assert verdicts == dict.fromkeys(verdicts, "passed") | UNPROVED


def test_llama_without_its_init_method_loses_its_frequencies(in_tmp_path):
    """LlamaModel passes only because of its `_init_weights`; BERT loses its tables in the same way."""
    pytest.importorskip("transformers")
    Path("nets.py").write_text(
        "from transformers import BertModel, LlamaModel\n"
        "def llama():\n    class Net(LlamaModel):\n        def _init_weights(self, module): pass\n"
        "    return Net(Net.config_class(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,\n"
        "               intermediate_size=32))\n"
        "def bert():\n    class Net(BertModel):\n        def _init_weights(self, module): pass\n"
        "    return Net(Net.config_class(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,\n"
        "               intermediate_size=32))\n"
    )
    llama = map_rules(run_proof(Name.MATERIALIZE, "nets.py:llama"))
    assert llama == dict.fromkeys(("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"), LOST)
    bert = map_rules(run_proof(Name.MATERIALIZE, "nets.py:bert"))
    assert bert == dict.fromkeys(("embeddings.position_ids", "embeddings.token_type_ids"), LOST)


def test_second_name_of_an_unregistered_tensor_is_no_second_finding(in_tmp_path):
    """The finding of the first name says how to register the tensor."""
    body = "self.fc = nn.Linear(3, 3)\nself.t = torch.ones(3)\nself.u = self.t\n---\ndef forward(self, x):\n    "
    check = prove_source(Name.MATERIALIZE, body + "return self.fc(x) * self.t", "2x3")
    assert map_rules(check) == {"t": META}


@pytest.mark.parametrize("name", [Name.MATERIALIZE, Name.RESUME])
@pytest.mark.parametrize(
    ("init", "method", "kind"),
    [
        ('self._register_state_dict_hook(lambda m, s, p, _: s.pop(p + "fc.bias"))', "", "Tensor"),
        ("", "def state_dict(self, *args, **kwargs):\n    return None", "NoneType"),
        ("", "def state_dict(self, *args, **kwargs):\n    return [super().state_dict()]", "list"),
    ],
    ids=["hook", "none", "list"],
)
def test_state_dict_that_is_not_a_dict_is_inconclusive(name, init, method, kind, in_tmp_path):
    """The reason has the type of the object, and there is no internal error."""
    body = f"self.fc = nn.Linear(3, 3)\n{init}\n---\ndef forward(self, x):\n    return self.fc(x)\n{method}"
    check = prove_source(name, body, "2x3")
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.reason.startswith(f"state_dict() returned an object of type {kind}, not a dict; ")
