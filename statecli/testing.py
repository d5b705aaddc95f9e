"""Assertion for tests of models: the state follows the model, is saved, restored and trained.

    from statecli.testing import assert_state_follows

    def test_state():
        assert_state_follows(Net(), inputs="2x3", device="fake-cuda")

The pytest fixture `assert_state_follows` is the same function, without an import. Only a call imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import statecli

if TYPE_CHECKING:
    import torch
    from torch import nn

    from statecli.commands.verify.result import Name, Verification
    from statecli.core.finding import Severity
    from statecli.core.model_state import Kind
    from statecli.report import Report

__all__ = ["assert_state_follows"]


def assert_state_follows(
    model: str | nn.Module,
    *,
    checks: Iterable[Name | str] | None = (),
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    inputs: Any = None,
    include: Iterable[str] | None = (),
    exclude: Iterable[str] | None = (),
    kind: Iterable[Kind | str] | None = (),
    fail_on: str = "warning",
    ignore: Iterable[str] | None = (),
) -> Verification:
    """Verify a model, and raise AssertionError if its state does not follow.

    The default of `fail_on` is "warning", and "error" on the command line: a test builds the model itself, so statecli
    cannot build it again to learn whether an unregistered value is random.

    Args:
        model: An nn.Module, or a spec such as "file.py:Class".
        checks: Proofs to run, as in `statecli.verify`. A proof that is named here must not be skipped.
        device: Device to move to, as in `statecli.verify`.
        dtype: Dtype to cast to.
        optimizer: Optimizer of the training step.
        inputs: Arguments of forward, as in `statecli.verify`. Without inputs some proofs are skipped.
        include: Globs; only tensors whose name matches one are tested.
        exclude: Globs; tensors whose name matches one are left out.
        kind: Kinds to test, as in `statecli.inspect`.
        fail_on: Lowest severity that fails: "note", "warning" or "error".
        ignore: Rules or rule groups that are not reported.

    Returns:
        The result of `statecli.verify`.

    Raises:
        AssertionError: A finding has the severity of `fail_on` or a higher one, a proof is inconclusive, a proof in
            `checks` was skipped, or all were. The message is the table of `statecli verify`.
        StateError: The model could not be tested.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    from statecli.api.calls import build_options
    from statecli.core.finding import Severity
    from statecli.requests.options import VerifyOptions

    requested = build_options(VerifyOptions, {"target": "", "check": checks}).check
    verification = statecli.verify(
        model,
        checks=requested,
        device=device,
        dtype=dtype,
        optimizer=optimizer,
        inputs=inputs,
        include=include,
        exclude=exclude,
        kind=kind,
        ignore=ignore,
    )
    message = describe_failure(verification, requested, Severity(fail_on))
    if message:
        raise AssertionError(message)
    return verification


def describe_failure(verification: Verification, requested: Iterable[Name], fail_on: Severity) -> str:
    """Return a line about the failed proofs and the table of a terminal; "" if all is well."""
    from statecli.commands.verify.result import Verdict
    from statecli.report import View, verify

    inconclusive = verify.list_inconclusive(verification, tuple(requested))
    failing = [finding for finding in verification.findings if finding.severity.is_at_least(fail_on)]
    bad = bool(failing) or any(check.verdict is Verdict.INCONCLUSIVE for check in verification.checks)
    if not (bad or inconclusive):
        return ""
    report = verify.build_verify_report(verification, View())
    verdict = f"{verification.state.target}: {report.page().verdict}"
    return "\n".join([verdict, "", _format_table(report), *(() if bad else inconclusive)]).rstrip()


#: Columns of the table; pytest puts four in front of each line.
_TABLE_COLUMNS = 100


def _format_table(report: Report) -> str:
    from statecli import render

    options = render.RenderOptions(terminal=True, width=_TABLE_COLUMNS)
    return render.format_report(report, render.Output.TABLE, options)
