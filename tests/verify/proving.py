"""Helpers that run a single proof of a model and summarise its result."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from statecli.commands.verify import first_forward, inputs, model_under_test
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.commands.verify.run import Request, run
from statecli.live.build import build
from statecli.live.import_model import load_with_module
from statecli.live.spec import parse_spec

from . import mixes
from .mixes import SAMPLES

SOURCE = "import torch\nfrom torch import nn\n"


def run_proof(name: Name, spec: str, *input: str, device: str = "meta", **options) -> Check:
    """Run the proof `name` for the class that `spec` names."""
    return run(Request(spec, checks=(name,), input=input, device=device, **options)).checks[0]


def prove_sample(name: Name, spec: str, *input: str, **options) -> Check:
    """Run the proof `name` for a sample model, e.g. `net:Net`."""
    return run_proof(name, f"{SAMPLES}/{spec.replace(':', '.py:')}", *input, **options)


def prove_source(name: Name, body: str, *input: str, **options) -> Check:
    """Run the proof `name` for the class Net of `write_class`."""
    write_class(body)
    return run_proof(name, "net.py:Net", *input, **options)


def write_class(body: str) -> None:
    """Write net.py with a class Net whose __init__ is `body`. Its methods follow a line `---`, without indentation; a
    class Part after them is written in front of Net.
    """
    methods, start, part = textwrap.dedent(body).partition("class Part(")
    init, _, rest = methods.partition("\n---\n")
    lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    text = "\n".join(lines) + "\n" + textwrap.indent(init, " " * 8) + "\n" + textwrap.indent(rest, " " * 4)
    # Python takes a file of the same size and second for the same file.
    shutil.rmtree("__pycache__", ignore_errors=True)
    Path("net.py").write_text(f"{SOURCE}{start}{part}\n{text}" if start else SOURCE + text, "utf-8")


def prove_step(init: str = "pass", forward: str = "return self.used(x)", *input: str, methods: str = "") -> Check:
    """Run the proof `step` for a class with a layer `used`, and the code of `init`, `forward` and `methods`."""
    lines = forward.replace("\n", "\n    ")
    body = f"self.used = nn.Linear(8, 8)\n{init}\n---\ndef forward(self, x):\n    {lines}\n{methods}"
    return prove_source(Name.STEP, body, *(input or ("4x8",)))


def find_imported_net() -> ModuleType:
    """Return the module that statecli imported from net.py."""
    path = str(Path("net.py").resolve())
    (module,) = (module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == path)
    return module


def build_net() -> nn.Module:
    """Return an instance of the class Net in net.py."""
    return load_with_module(parse_spec("net.py:Net")).value()


def build_subject(target: str, input: str) -> model_under_test.ModelUnderTest:
    """Return the model of `target`, for proofs with this input."""
    built = build(parse_spec(target))
    subject = model_under_test.prepare_built_model(built, target)
    return first_forward.add_inputs(subject, *inputs.find_inputs([input], None, built))


def prove_live(prove: Callable, create: Callable, *args) -> Check:
    """Run `prove` for a model that the factory `create` builds; each further instance is another call of `create`."""
    return prove(mixes.build_live_subject(create), *args)


def map_rules(check: Check) -> dict[str | None, str]:
    """Return the rule that each tensor breaks; two findings for the same tensor fail the test."""
    rules_by_fqn = {finding.fqn: finding.rule for finding in check.findings}
    assert len(rules_by_fqn) == len(check.findings), check.findings
    return rules_by_fqn


def prove_real(name: Name, *classes: str) -> dict[str, Check]:
    """Run the proof `name` for each of the given classes of `real.py`."""
    pytest.importorskip("transformers")
    from . import real

    checks = {}
    for of in classes:
        inputs = real.TORCH[of][1] if of in real.TORCH else real.INPUTS.get(of, ())
        checks[of] = run_proof(name, f"{Path(__file__).parent / 'real.py'}:make({of!r})", *inputs)
    return checks


def expect_pass(name: Name, *classes: str) -> None:
    """The proof passes without a finding for the given classes of `real.py`."""
    checks = prove_real(name, *classes)
    passed = dict.fromkeys(checks, ("passed", ()))
    assert {of: (check.verdict.value, check.findings) for of, check in checks.items()} == passed


def expect_findings(prove: Callable[[str], Check], bad: str, expected: dict[str | None, str], good: str) -> None:
    """Assert that the class `bad` has exactly the expected findings, and that the class `good` passes."""
    check, twin = prove(bad), prove(good)
    assert (map_rules(check), check.verdict, check.reason) == (expected, Verdict.FAILED, None)
    assert (twin.verdict, twin.reason, twin.findings) == (Verdict.PASSED, None, ()), twin


def find_cell(check: Check, column: str, fqn: str) -> Cell:
    return next(column_.cells[fqn] for column_ in check.columns if column_.name == column)


def map_verdicts(check: Check, column: str) -> dict[str, str]:
    """Return the verdicts of a column by tensor name."""
    (cells,) = [column_.cells for column_ in check.columns if column_.name == column]
    return {fqn: cell.verdict.value for fqn, cell in cells.items()}
