"""Test the unregistered tensors of a model on a fake GPU, by running the checks of `verify` with an input.

Without an input, forward may or may not copy an unregistered tensor to the device of the model. With an input, the
checks measure this, so that a tensor has the same severity in `inspect` as in `verify`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from statecli.commands import verify
from statecli.commands.inspect.unregistered_harm import Harm
from statecli.commands.verify import rules
from statecli.commands.verify.result import Check, Name, Verdict, Verification
from statecli.commands.verify.run import FAKE_CUDA, Request, verify_model
from statecli.core.finding import Severity
from statecli.core.model_state import Kind, ModelState, TensorInfo
from statecli.core.move_rules import LEFT_BEHIND
from statecli.core.severity import decide_tensor_severity

if TYPE_CHECKING:
    from statecli.commands.verify.forward_effects import CalledModel

_PROOFS = (Name.MOVE, Name.CAST, Name.SAVE, Name.FORWARD)
#: Rules of `verify` about an unregistered tensor that `inspect` reports too, besides its own rules.
_RULES = frozenset((rules.DEVICE_MISMATCH.name, rules.KEEPS_DTYPE.name, rules.LOST_BY_SAVING.name))
RAN_ON_FAKE_GPU = "forward ran without an error on a fake GPU"


def measure_harm(called_model: CalledModel, state: ModelState) -> Mapping[str, Harm]:
    """Return the harm of unregistered tensors, limited to tensors whose severity depends on their use in forward."""
    rows = [row for row in state.tensors if _depends_on_forward(row)]
    if not rows:
        return {}
    subject = verify.first_forward.add_inputs(called_model.subject, called_model.inputs, None)
    verification = verify_model(subject, Request(state.target, checks=_PROOFS, device=FAKE_CUDA))
    return {row.fqn: _read_harm(row, verification) for row in rows}


def _depends_on_forward(row: TensorInfo) -> bool:
    is_unregistered = row.kind is Kind.UNREGISTERED and not row.is_input
    return is_unregistered and (row.appeared or decide_tensor_severity(row) is not Severity.ERROR)


def _read_harm(row: TensorInfo, verification: Verification) -> Harm:
    checks = {check.check: check for check in verification.checks}
    findings = [finding for finding in verification.findings if finding.fqn == row.fqn]
    left_behind = next((finding.severity for finding in findings if finding.rule == LEFT_BEHIND.name), None)
    others = tuple(finding for finding in findings if finding.rule in _RULES)
    is_mixed = any(finding.rule == rules.DEVICE_MISMATCH.name for finding in others)
    unknown = None if is_mixed else _find_inconclusive((checks[Name.FORWARD], checks[Name.MOVE]), row.fqn)
    if unknown is not None:
        remark = f"statecli does not know whether forward mixes devices: {unknown}"
        return Harm(left_behind or decide_tensor_severity(row), others, remark, is_unknown=True)
    ran = left_behind is Severity.NOTE and checks[Name.FORWARD].verdict is Verdict.PASSED
    return Harm(left_behind, others, RAN_ON_FAKE_GPU if ran else "")


def _find_inconclusive(checks: Iterable[Check], fqn: str) -> str | None:
    """Return the reason of the first inconclusive check of the tensor, or None."""
    for check in checks:
        cell = next((column.cells[fqn] for column in check.columns if fqn in column.cells), None)
        verdict, reason = (cell.verdict, cell.reason) if cell else (check.verdict, check.reason)
        if verdict is Verdict.INCONCLUSIVE:
            return check.reason or reason or "inconclusive"
    return None
