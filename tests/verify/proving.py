"""A proof of a model, and what it said, in few words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from statecli.commands.verify import model_under_test
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.commands.verify.run import Request, run
from statecli.live.assignment_lines import Origins
from statecli.live.built_model import BuiltModel
from statecli.live.spec import ModelSpec

SAMPLES = Path(__file__).parents[2] / "sample_models"
SOURCE = "import torch\nfrom torch import nn\n"


def run_proof(name: Name, spec: str, *input: str, device: str = "meta", **options) -> Check:
    """One proof of the class that `spec` names."""
    return run(Request(spec, checks=(name,), input=input, device=device, **options)).checks[0]


def sample(name: Name, spec: str, *input: str, **options) -> Check:
    """One proof of a sample model: `net:Net`."""
    return run_proof(name, f"{SAMPLES}/{spec.replace(':', '.py:')}", *input, **options)


def of_source(name: Name, body: str, *input: str, **options) -> Check:
    """One proof of the class Net whose __init__ is `body`; a class of its own may follow it, without indentation."""
    written = textwrap.dedent(body)
    init, _, rest = written.partition("\n---\n")
    lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    text = "\n".join(lines) + "\n" + textwrap.indent(init, " " * 8) + "\n" + textwrap.indent(rest, " " * 4)
    Path("net.py").write_text(SOURCE + text, "utf-8")
    return run_proof(name, "net.py:Net", *input, **options)


def of_live(prove: Callable, make: Callable, *args) -> Check:
    """A proof of what a factory builds, each time again."""
    built = BuiltModel(
        ModelSpec("live", "", False, "live"), make(), Origins({}), "cpu", True, lambda values, seed: make()
    )
    return prove(model_under_test.prepare_built_model(built, "live"), *args)


def rules(check: Check) -> dict[str | None, str]:
    """The rule that each tensor broke; two findings of one tensor fail the test."""
    rules_by_fqn = {finding.fqn: finding.rule for finding in check.findings}
    assert len(rules_by_fqn) == len(check.findings), check.findings
    return rules_by_fqn


def prove_real(name: Name, *classes: str) -> dict[str, Check]:
    """One proof of each of these classes of `real.py`."""
    pytest.importorskip("transformers")
    from . import real

    checks = {}
    for of in classes:
        inputs = real.TORCH[of][1] if of in real.TORCH else real.INPUTS.get(of, ())
        checks[of] = run_proof(name, f"{Path(__file__).parent / 'real.py'}:make({of!r})", *inputs)
    return checks


def expect_pass(name: Name, *classes: str) -> None:
    """The proof passes without a finding for these classes of `real.py`, on which the proof was measured."""
    checks = prove_real(name, *classes)
    passed = dict.fromkeys(checks, ("passed", ()))
    assert {of: (check.verdict.value, check.findings) for of, check in checks.items()} == passed


def expect_findings(prove: Callable[[str], Check], bad: str, expected: dict[str | None, str], good: str) -> None:
    """The failing class has the findings, and its twin passes."""
    check, twin = prove(bad), prove(good)
    assert (rules(check), check.verdict, check.reason) == (expected, Verdict.FAILED, None)
    assert (twin.verdict, twin.reason, twin.findings) == (Verdict.PASSED, None, ()), twin


def cell(check: Check, column: str, fqn: str) -> Cell:
    return next(column_.cells[fqn] for column_ in check.columns if column_.name == column)


def verdicts(check: Check, column: str) -> dict[str, str]:
    """The verdicts of one column by name."""
    (cells,) = [column_.cells for column_ in check.columns if column_.name == column]
    return {fqn: cell.verdict.value for fqn, cell in cells.items()}
