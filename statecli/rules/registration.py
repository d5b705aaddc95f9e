"""Rules about registration: PyTorch saves, moves and trains only registered tensors."""

from __future__ import annotations

from collections.abc import Iterator

from statecli.core import quoting, registration_rules
from statecli.core.finding import Severity
from statecli.core.model_state import Evidence, Kind, NoteKind, TensorInfo
from statecli.core.move_rules import STALE_VIEW, UNTIED_BY_MOVE, report_broken_ties
from statecli.core.rule import Rule
from statecli.core.severity import decide_tensor_severity, is_trainable
from statecli.rules.audit_rule import Issue, convert_finding, rule, rule_for
from statecli.rules.audit_subject import Subject, needs_module


def _select_unregistered(subject: Subject) -> Iterator[TensorInfo]:
    """Yield the tensors that are certainly unregistered. Example inputs of the model are left out."""
    rows = [row for row in (subject.module.tensors if subject.module else ()) if not row.is_input]
    return (row for row in rows if row.kind is Kind.UNREGISTERED and row.evidence is Evidence.REGISTERED)


_STORED = (
    "no action is needed if you run the archive as it is; to save the tensor in a state_dict, register the tensor in "
    "the class"
)


def _is_archive(subject: Subject) -> bool:
    return subject.module is not None and subject.module.traits.is_program


def _build_issue(row: TensorInfo, text: str, severity: Severity | None = None, help: str | None = None) -> Issue:
    return Issue(f"{row.fqn}: {text}", row.fqn, row.section, row.fix or help, severity, row.origin)


def _describe_consequences(row: TensorInfo) -> str:
    """Describe the effects on an unregistered tensor, such as `not in state_dict(), not moved by .to()`; else ""."""
    parts = ["not in state_dict()"] if row.saved is False else []
    parts += ["not moved by .to()"] if row.moves is False else []
    return ", ".join(parts)


@rule_for(registration_rules.UNREGISTERED_TENSOR, needs_module)
def unregistered_tensor(subject: Subject) -> Iterator[Issue]:
    """Yield an issue for each unregistered tensor that does not require grad and is not in an unregistered module."""
    stored = _is_archive(subject)
    for row in _select_unregistered(subject):
        if row.within is not None or is_trainable(row):
            continue
        if row.derived is not None:
            # For a file, hooks of torch compute the derived tensors again before each forward.
            if subject.module and subject.module.traits.is_class and row.fqn not in subject.module.recomputed:
                text = f"computed once ({row.derived}), and not updated when its parameters change or move"
                yield _build_issue(row, text, decide_tensor_severity(row), "compute the value in forward")
        else:
            is_harmless = stored or row.note_kind is NoteKind.METRIC_STATE
            severity = unregistered_tensor.cases["kept"] if is_harmless else decide_tensor_severity(row)
            help = _STORED if stored else None
            text = _describe_consequences(row) or "not a parameter or buffer"
            yield _build_issue(row, f"not registered: {text}", severity, help)


@rule_for(registration_rules.UNREGISTERED_PARAMETER, needs_module)
def unregistered_parameter(subject: Subject) -> Iterator[Issue]:
    """Yield an issue for each unregistered tensor that requires grad."""
    severity, help = (unregistered_parameter.cases["kept"], _STORED) if _is_archive(subject) else (None, None)
    for row in _select_unregistered(subject):
        if row.within is None and is_trainable(row):
            consequences = ", ".join(filter(None, ("not trained", _describe_consequences(row))))
            yield _build_issue(row, f"requires grad but is not a parameter: {consequences}", severity, help)


@rule_for(registration_rules.UNREGISTERED_MODULE, needs_module)
def unregistered_module(subject: Subject) -> Iterator[Issue]:
    """Yield an issue for each unregistered module that holds tensors."""
    rows_by_module: dict[str, list[TensorInfo]] = {}
    for row in _select_unregistered(subject):
        if row.within is not None:
            rows_by_module.setdefault(row.within, []).append(row)
    for name, rows in rows_by_module.items():
        tensors_are = f"its {len(rows)} tensors ({quoting.names([row.fqn for row in rows])}) are"
        tensor_is = f"its only tensor ({rows[0].fqn}) is"
        message = (
            f"{name}: module is not registered: {tensors_are if rows[1:] else tensor_is} not trained, saved or moved"
        )
        yield Issue(message, rows[0].fqn, rows[0].section, rows[0].fix or _LIST, None, rows[0].origin)


_LIST = "keep the module in nn.ModuleList or nn.ModuleDict, or as an attribute of a module"


@rule(Severity.NOTE, needs_module, cases={"random": Severity.ERROR})
def non_persistent_buffer(subject: Subject) -> Iterator[Issue]:
    """A buffer is registered with `persistent=False`, so a save and a load leave out the buffer.

    Why: a loaded model has the values from the constructor, not the values before saving. The finding is an error if
    the constructor draws the values at random, and a note if statecli cannot run the constructor again. If the
    constructor gives the same values each time, as for a position table, the buffer is not reported.

    Example: `self.register_buffer("noise", torch.randn(8), persistent=False)`.

    Fix: register the buffer as persistent, or compute the values in the constructor from settings.
    """
    for row in subject.module.tensors if subject.module else ():
        if row.kind is Kind.BUFFER and row.persistent is False and row.rebuilt is not True:
            if row.rebuilt is False:
                severity = non_persistent_buffer.cases["random"]
                yield _build_issue(
                    row, registration_rules.RANDOM_VALUE_REMARK, severity, registration_rules.PERSISTENT_HELP
                )
            else:
                help = "check that the value is recomputed when the model is loaded"
                yield _build_issue(row, "non-persistent buffer: not in state_dict()", help=help)


@rule(Severity.WARNING, needs_module)
def buffer_requires_grad(subject: Subject) -> Iterator[Issue]:
    """A buffer requires grad.

    Why: no optimizer updates the buffer, because `model.parameters()` does not include buffers. Its gradients only take
    time and memory.

    Example: `self.register_buffer("prior", torch.ones(3, requires_grad=True))`.

    Fix: use `nn.Parameter` to train the tensor; otherwise register `tensor.detach()`.
    """
    for row in subject.module.tensors if subject.module else ():
        if row.kind is Kind.BUFFER and row.requires_grad:
            text = "buffer has requires_grad=True but is not in parameters(): no optimizer updates it"
            yield _build_issue(row, text, help="use nn.Parameter to train the tensor, or detach() it")


@rule_for(STALE_VIEW, needs_module)
def stale_view(subject: Subject) -> Iterator[Issue]:
    """Yield an issue for each name that still refers to the old memory of a tensor after the model moves."""
    return _report_broken_ties(subject, STALE_VIEW)


@rule_for(UNTIED_BY_MOVE, needs_module)
def untied_by_move(subject: Subject) -> Iterator[Issue]:
    """Yield an issue for tied weights that become separate tensors when the model moves."""
    return _report_broken_ties(subject, UNTIED_BY_MOVE)


def _report_broken_ties(subject: Subject, entry: Rule) -> Iterator[Issue]:
    for finding in report_broken_ties(subject.module) if subject.module else ():
        if finding.rule == entry.name:
            yield convert_finding(finding)


RULES = (
    unregistered_tensor,
    unregistered_module,
    unregistered_parameter,
    non_persistent_buffer,
    buffer_requires_grad,
    stale_view,
    untied_by_move,
)
