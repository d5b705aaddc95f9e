"""Rules that compare a target with a class or with another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from statecli.commands.diff.result import Change, Diff, Field, Status
from statecli.core import quoting
from statecli.core.dtypes import is_floating
from statecli.core.finding import Severity
from statecli.core.load_rules import LOAD_HELP, MISSING_ENTRY, SHAPE_MISMATCH, UNEXPECTED_ENTRY
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.parameter_or_buffer import MODEL_KINDS, select_loaded_sections
from statecli.core.rule import Rule
from statecli.core.units import format_shape
from statecli.rules.audit_rule import Issue, convert_finding, report_tensor, rule, rule_for
from statecli.rules.audit_subject import Subject, needs_class_or_reference


def _report_load_findings(subject: Subject, rule: Rule) -> Iterator[Issue]:
    for finding in subject.load_diff.findings if subject.load_diff else ():
        if finding.rule == rule.name:
            yield convert_finding(replace(finding, help=finding.help or LOAD_HELP.get(finding.rule)))


def _report_load_notes(subject: Subject, rule: Rule, *kinds: OddityKind) -> Iterator[Issue]:
    """Yield notes about keys that the class accepts, although a strict load would refuse them."""
    for note in subject.load_diff.notes if subject.load_diff else ():
        if note.kind in kinds:
            yield Issue(note.message, severity=rule.cases["accepted by the class"])


def _select_changes(subject: Subject, field: Field | None = None, status: Status | None = None) -> Iterator[Change]:
    """Yield changes in this field, or with this status, in the sections that `_find_compared_sections` returns.

    Shapes and dtypes of an optimizer's tensors are always compared.
    """
    diff = subject.reference_diff
    if diff is None:
        return
    sections = _find_compared_sections(diff)
    for change in diff.changes:
        differs = change.status is status if field is None else field in change.fields
        is_in_sections = change.kind in MODEL_KINDS and change.section in sections
        if differs and (
            not sections or is_in_sections or (change.kind is Kind.OPTIMIZER and field in _FIELDS_OF_OPTIMIZER_PAIRS)
        ):
            yield change


#: Fields that are compared for tensors of an optimizer too, if both sides have the tensor.
_FIELDS_OF_OPTIMIZER_PAIRS = (Field.SHAPE, Field.DTYPE)


def _find_compared_sections(diff: Diff) -> frozenset[str]:
    """Return the model sections to compare: paired sections, and sections that a load would read.

    An averaged model without a counterpart is not compared. If the reference has no model, return an empty set: then
    all sections are compared.
    """
    models = [change for change in diff.changes if change.kind in MODEL_KINDS]
    if not any(change.before for change in models):
        return frozenset()
    pairs = ((change.before.section, change.after.section) for change in models if change.before and change.after)
    paired_sections = {section for pair in pairs for section in pair}
    sides = ([change.before for change in models], [change.after for change in models])
    sections_by_side = (list(dict.fromkeys(row.section for row in side if row)) for side in sides)
    return frozenset(paired_sections.union(*map(select_loaded_sections, sections_by_side)))


def _build_issue(subject: Subject, change: Change, text: str, help: str | None = None) -> Issue:
    side = subject.state if change.after or subject.reference_diff is None else subject.reference_diff.before
    section = f"{change.section}." if len(side.sections) > 1 else ""
    return Issue(f"{section}{change.fqn}: {text}", change.fqn, change.section, help)


def _name_reference(subject: Subject) -> str:
    return subject.reference_diff.before.target if subject.reference_diff else ""


def _describe_reference(subject: Subject, change: Change) -> str:
    has_sections = subject.reference_diff is not None and len(subject.reference_diff.before.sections) > 1
    return _name_reference(subject) + (f"#{change.section}" if has_sections else "")


@rule_for(MISSING_ENTRY, needs_class_or_reference)
def missing_entry(subject: Subject) -> Iterator[Issue]:
    """Yield the keys that are missing in a strict load, and the tensors that only the reference has."""
    yield from _report_load_findings(subject, MISSING_ENTRY)
    yield from _report_load_notes(subject, MISSING_ENTRY, OddityKind.NOT_SAVED_BY_CLASS, OddityKind.CONVERTED_ON_LOAD)
    for change in _select_changes(subject, status=Status.REMOVED):
        yield _build_issue(subject, change, f"missing; {_describe_reference(subject, change)} has this tensor")


@rule_for(UNEXPECTED_ENTRY, needs_class_or_reference)
def unexpected_entry(subject: Subject) -> Iterator[Issue]:
    """Yield the keys that are unexpected in a strict load, and the tensors that the reference lacks."""
    yield from _report_load_findings(subject, UNEXPECTED_ENTRY)
    yield from _report_load_notes(subject, UNEXPECTED_ENTRY, OddityKind.NOT_READ_BY_CLASS)
    for change in _select_changes(subject, status=Status.ADDED):
        yield _build_issue(subject, change, f"unexpected; {_name_reference(subject)} does not have this tensor")


def _format_shape(row: TensorInfo | None) -> str:
    return format_shape(row.shape) if row else "?"


@rule_for(SHAPE_MISMATCH, needs_class_or_reference)
def shape_mismatch(subject: Subject) -> Iterator[Issue]:
    """Yield the tensors whose shape differs from the class or from the reference checkpoint."""
    yield from _report_load_findings(subject, SHAPE_MISMATCH)
    for change in _select_changes(subject, Field.SHAPE):
        shape, reference_shape = _format_shape(change.after), _format_shape(change.before)
        yield _build_issue(
            subject, change, f"shape {shape} differs from {reference_shape} in {_name_reference(subject)}"
        )


@rule(Severity.WARNING, needs_class_or_reference, cases={"most tensors": Severity.NOTE})
def dtype_mismatch(subject: Subject) -> Iterator[Issue]:
    """A tensor's dtype differs from the model class or the reference checkpoint.

    Why: `load_state_dict` casts the tensor silently: values are rounded, or take more memory. If most floating-point
    tensors have the same two dtypes, in the checkpoint and in the class, a single note reports them. For example, a
    checkpoint in half precision usually loads into a class built in float32.

    Example: one layer was saved in float64, although the class and all other layers are float32.

    Fix: cast the whole model before saving: `model.to(torch.bfloat16)`.
    """
    yield from _report_casts(subject)
    for change in _select_changes(subject, Field.DTYPE):
        if change.before and change.after:
            text = f"dtype {change.after.dtype} differs from {change.before.dtype} in {_name_reference(subject)}"
            yield _build_issue(subject, change, text, f"cast the tensor to {change.before.dtype} before saving")


def _pair_loaded_tensors(subject: Subject) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """Yield each checkpoint tensor that a load copies, with the tensor of the class that receives the values."""
    for change in subject.load_diff.changes if subject.load_diff else ():
        if change.before and change.after and not change.before.damage:
            yield change.before, change.after


def _report_casts(subject: Subject) -> Iterator[Issue]:
    casts: dict[tuple[str, str], list[TensorInfo]] = {}
    for loaded_row, model_row in _pair_loaded_tensors(subject):
        casts.setdefault((loaded_row.dtype, model_row.dtype), []).append(loaded_row)
    model = subject.load_diff.after.target if subject.load_diff else ""
    for (saved_dtype, expected_dtype), rows in casts.items():
        if saved_dtype == expected_dtype:
            continue
        count = sum(len(others) for (_, dtype), others in casts.items() if dtype == expected_dtype)
        if len(rows) * 2 > count and is_floating(saved_dtype) and is_floating(expected_dtype):
            share = "all" if len(rows) == count else f"{len(rows):,} of"
            count_text = (
                f"{share} {count:,} tensors are" if count > 1 else f"{subject.name_of(rows[0])}: the checkpoint has"
            )
            message = (
                f"{count_text} {saved_dtype}, but {model} expects {expected_dtype}; load_state_dict casts silently"
            )
            yield Issue(message, None, rows[0].section, severity=dtype_mismatch.cases["most tensors"])
            continue
        for row in rows:
            text = (
                f"the checkpoint has {saved_dtype}, but {model} expects {expected_dtype}; load_state_dict casts "
                "silently"
            )
            yield report_tensor(subject, row, text, f"cast the tensor to {expected_dtype} before saving")


@rule(
    Severity.WARNING,
    needs_class_or_reference,
    cases={"equal bytes": Severity.NOTE, "different bytes": Severity.ERROR, "not read": Severity.NOTE},
)
def broken_tie(subject: Subject) -> Iterator[Issue]:
    """Weights are tied in the model class or the reference checkpoint, but separate in this checkpoint.

    Why: separate weights take twice the memory, and training changes each weight on its own. If the class ties them,
    `load_state_dict` copies both into the same tensor and keeps only the last weight. If values are read (`--values`),
    different bytes are an error and equal bytes are a note. Without values, the finding is a note. The rule also
    reports the opposite: weights tied in this checkpoint and separate in the reference checkpoint.

    Example: `lm_head.weight` saved as a copy of `embed.weight`.

    Fix: tie the weights again after loading (`model.tie_weights()`), and save the model again.
    """
    yield from _report_untied_tensors(subject)
    for change in _select_changes(subject, Field.TYING):
        if change.before and change.after:
            tie, reference_tie = _describe_tie(change.after), _describe_tie(change.before)
            yield _build_issue(subject, change, f"{tie}, but in {_name_reference(subject)} the tensor {reference_tie}")


def _describe_tie(row: TensorInfo) -> str:
    return f"shares memory with {', '.join(row.tied_to[:3])}" if row.tied_to else "does not share memory"


def _report_untied_tensors(subject: Subject) -> Iterator[Issue]:
    """Yield tensors that are tied in the class, but stored separately in the checkpoint."""
    groups: dict[object, list[TensorInfo]] = {}
    for loaded_row, model_row in _pair_loaded_tensors(subject):
        if loaded_row.storage is not None and model_row.storage is not None and model_row.nbytes:
            groups.setdefault(_view_key(model_row), []).append(loaded_row)
    for rows in groups.values():
        separate_rows = list({_view_key(row): row for row in reversed(rows)}.values())[::-1]
        if len(separate_rows) > 1:
            yield _build_untied_issue(subject, separate_rows)


def _view_key(row: TensorInfo) -> object:
    return row.storage, row.storage_offset, row.elements


def _build_untied_issue(subject: Subject, rows: list[TensorInfo]) -> Issue:
    first, *others = rows
    model = subject.load_diff.after.target if subject.load_diff else ""
    ties = f"{model} ties this tensor to {quoting.names([other.fqn for other in others])}"
    case, values = (
        _CASE_WITHOUT_VALUES if subject.values is None else _CASE_BY_EQUALITY[_have_same_values(subject, rows)]
    )
    severity = broken_tie.cases[case] if case else None
    text = f"{ties}, but the checkpoint has {len(rows)} separate tensors{values}"
    return report_tensor(subject, first, text, "tie the weights before saving", severity)


#: Case and text for tied weights that are saved separately, by the answer whether their bytes are equal.
_CASE_BY_EQUALITY: dict[bool | None, tuple[str | None, str]] = {
    None: (None, " whose values cannot be compared; load_state_dict keeps only the last tensor"),
    True: ("equal bytes", " with equal bytes"),
    False: ("different bytes", " with different bytes; load_state_dict silently keeps only the last tensor"),
}
_CASE_WITHOUT_VALUES = ("not read", "; load_state_dict keeps only the last tensor; add --values to compare the values")


def _have_same_values(subject: Subject, rows: list[TensorInfo]) -> bool | None:
    """Return whether the tensors have equal bytes; None if their values were not read or cannot be compared."""
    facts_by_name = {row.key: entry for row, entry in zip(subject.state.tensors, subject.values or (), strict=False)}
    facts = [facts_by_name.get(row.key) for row in rows]
    if len({row.shape for row in rows}) > 1 or any(entry is None or entry.digest is None for entry in facts):
        return None
    if len({row.dtype for row in rows}) > 1:
        return False
    return len({entry.digest for entry in facts if entry}) == 1


RULES = (missing_entry, unexpected_entry, shape_mismatch, dtype_mismatch, broken_tie)
