"""Rules about tensors that do not follow their model to a device, reported by inspect, verify and audit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from statecli.core.finding import Finding, Severity
from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.rule import Rule
from statecli.core.severity import is_trainable

LEFT_BEHIND = Rule(
    "left-behind",
    "move",
    ("inspect", "verify"),
    Severity.ERROR,
    summary="A tensor does not move to the new device with its model.",
    why="""`model.to("cuda")` moves only registered parameters and buffers. The tensor is left on the CPU, and the first
forward on the GPU raises "Expected all tensors to be on the same device".""",
    example='`self.table = torch.randn(5, 5)` in `__init__`, then `model.to("cuda")`.',
    fix="""register the tensor: `self.register_buffer("table", torch.randn(5, 5))`. If the class has its own `_apply`,
call `super()._apply(fn)` in this method.""",
)
#: Remark on a tensor that was already on the device of the move.
KEEPS_MEMORY_REMARK = "keeps its memory when the model moves, so a move to another device does not move the tensor"
UNTIED_BY_MOVE = Rule(
    "untied-by-move",
    "registration",
    ("inspect", "verify", "audit"),
    Severity.WARNING,
    summary="Tied tensors no longer share memory after the model moves.",
    why="""after `.to(device)`, the tied tensors are separate copies. A change to one copy no longer changes the other,
and the model uses more memory.""",
    example='`self.register_buffer("a", t)` and `self.register_buffer("b", t)`: a move gives each its own memory.',
    fix="""register the tensor once, and read the other name through a property. Or tie the two tensors again in the
class's own `_apply`.""",
    cases={"trained": Severity.ERROR},
)
STALE_VIEW = Rule(
    "stale-view",
    "registration",
    ("inspect", "verify", "audit"),
    Severity.WARNING,
    summary="A second name or view of a registered tensor still points to the old memory after a move.",
    why="""a move gives only the registered name a new tensor. A view or second name keeps the old values on the old
device, and later updates silently change only one of the two. The finding is an error if the tensor is trainable,
because the view never gets the updates of the training.""",
    example='`self.cos = self.table[0]` next to `self.register_buffer("table", table)`.',
    fix="replace the attribute with a property that computes the view at each access. If the values never change, you "
    "can register the view as a buffer instead.",
    cases={"trained": Severity.ERROR},
)

RULES = (LEFT_BEHIND, UNTIED_BY_MOVE, STALE_VIEW)

_TIE_RULES = {OddityKind.UNTIED_BY_MOVE: UNTIED_BY_MOVE, OddityKind.STALE_VIEW: STALE_VIEW}
STALE_VIEW_HELP = "replace the attribute with a property that computes the value from the registered tensor"
_TIE_HELP = {
    UNTIED_BY_MOVE.name: "register the tensor once and read the other name through a property, "
    "or tie the two tensors again in the class's own _apply",
    STALE_VIEW.name: STALE_VIEW_HELP,
}


def report_broken_ties(state: ModelState) -> Iterator[Finding]:
    """Yield a finding for each name that no longer shares memory with another name after the model moves."""
    tie_oddities = [(oddity, _TIE_RULES[oddity.kind]) for oddity in state.oddities if oddity.kind in _TIE_RULES]
    owners = {alias: tensor for tensor in state.tensors for alias in tensor.aliases} if tie_oddities else {}
    for oddity, rule in tie_oddities:
        yield rule.finding(
            oddity.message,
            target=state.target,
            fqn=oddity.fqn,
            help=_TIE_HELP[rule.name],
            severity=rule.cases["trained"] if (row := owners.get(oddity.fqn or "")) and is_trainable(row) else None,
            origin=oddity.origin,
        )


def map_stale_views(state: ModelState) -> dict[str | None, Finding]:
    """Map each name to the finding about its stale view: a view that keeps the old memory after the model moves."""
    return {finding.fqn: finding for finding in report_broken_ties(state) if finding.rule == STALE_VIEW.name}


def map_broken_ties(state: ModelState) -> dict[str | None, Finding]:
    """Map each tied name to the finding about the tie that a move of the model breaks."""
    return map_tied_names(report_broken_ties(state), state.tensors)


def map_tied_names(findings: Iterable[Finding], tensors: Iterable[TensorInfo]) -> dict[str | None, Finding]:
    """Map each tied name to the first finding about its broken tie."""
    finding_by_name: dict[str | None, Finding] = {}
    for finding in findings:
        finding_by_name.setdefault(finding.fqn, finding)
    names = (
        {tensor.fqn: tensor.tied_to for tensor in tensors if tensor.fqn in finding_by_name} if finding_by_name else {}
    )
    return {name: finding for fqn, finding in finding_by_name.items() for name in (fqn, *names.get(fqn or "", ()))}
