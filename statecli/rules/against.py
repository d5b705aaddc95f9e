"""What a checkpoint lacks, has too much of, or has otherwise than a class or another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from statecli.auditing.rule import Found, rule
from statecli.auditing.subject import Subject, a_reference, something_to_hold_to
from statecli.comparison.result import Change, Diff, Field, Status
from statecli.finding import Finding, Severity
from statecli.report.text import shape_text
from statecli.state import TensorInfo


def _loading(subject: Subject, name: str) -> Iterator[Found]:
    """What a strict load into the class says under that rule's name."""
    for one in subject.load.findings if subject.load else ():
        if one.rule == name:
            yield _said(one)


def _said(one: Finding) -> Found:
    origin = one.origin if one.origin is not UNSET else None
    return Found(one.message, one.fqn, one.section, one.help, origin=origin)


def _changes(subject: Subject, field: Field | None = None, status: Status | None = None) -> Iterator[Change]:
    for one in subject.reference.changes if subject.reference else ():
        if one.status is status if field is None else field in one.fields:
            yield one


def _of(subject: Subject, change: Change, what: str, help: str | None = None) -> Found:
    section = f"{change.section}." if len(subject.state.sections) > 1 else ""
    return Found(f"{section}{change.fqn}: {what}", change.fqn, change.section, help)


def _name(diff: Diff | None) -> str:
    return diff.before.target if diff else ""


@rule(Severity.ERROR, something_to_hold_to)
def missing_entry(subject: Subject) -> Iterator[Found]:
    """An entry that the class, or the checkpoint it is held to, has is not there.

    Why: `load_state_dict(strict=True)` refuses it; with `strict=False` the tensor silently keeps its initial values.

    Example: a head that was renamed in the code after the checkpoint was written.

    Fix: save it again from the class as it is now, or map the old name to the new one before loading.
    """
    yield from _loading(subject, "missing-entry")
    for change in _changes(subject, status=Status.REMOVED):
        yield _of(subject, change, f"missing: {_name(subject.reference)} has it")


@rule(Severity.ERROR, something_to_hold_to)
def unexpected_entry(subject: Subject) -> Iterator[Found]:
    """There is an entry that the class, or the checkpoint it is held to, does not have.

    Why: `load_state_dict(strict=True)` refuses it; with `strict=False` it is silently left out.

    Example: the weights of an auxiliary loss in a checkpoint that is to be served.

    Fix: leave it out when saving, or give the class what it is for.
    """
    yield from _loading(subject, "unexpected-entry")
    for change in _changes(subject, status=Status.ADDED):
        yield _of(subject, change, f"unexpected: {_name(subject.reference)} has no such tensor")


def _shape(row: TensorInfo | None) -> str:
    return shape_text(row.shape) if row else "?"


@rule(Severity.ERROR, something_to_hold_to)
def shape_mismatch(subject: Subject) -> Iterator[Found]:
    """A tensor has another shape than the class registers, or than the checkpoint it is held to has.

    Why: `load_state_dict` refuses it, with or without `strict`.

    Example: an embedding for 30,522 words where the class was built for 30,528.

    Fix: build the class with the sizes of the checkpoint, or resize the tensor before saving.
    """
    yield from _loading(subject, "shape-mismatch")
    for change in _changes(subject, Field.SHAPE):
        what = f"is {_shape(change.after)}, and {_shape(change.before)} in {_name(subject.reference)}"
        yield _of(subject, change, what)


@rule(Severity.WARNING, a_reference)
def dtype_mismatch(subject: Subject) -> Iterator[Found]:
    """A tensor has another dtype than in the checkpoint it is held to.

    Why: `load_state_dict` casts it without a word: values are rounded, or take twice the memory.

    Example: one layer saved in float32 among bfloat16.

    Fix: cast the whole model before saving: `model.to(torch.bfloat16)`.
    """
    for change in _changes(subject, Field.DTYPE):
        if change.before and change.after:
            what = f"is {change.after.dtype}, and {change.before.dtype} in {_name(subject.reference)}"
            yield _of(subject, change, what, f"cast it to {change.before.dtype} before saving")


@rule(Severity.WARNING, a_reference)
def broken_tie(subject: Subject) -> Iterator[Found]:
    """Tensors that share their memory in the checkpoint it is held to are separate ones here, or the other way round.

    Why: tied weights that were parted learn apart from then on, and take twice the memory.

    Example: `lm_head.weight` saved as a copy of `embed.weight`.

    Fix: tie them again after loading (`model.tie_weights()`), and save from there.
    """
    for change in _changes(subject, Field.TYING):
        if change.before and change.after:
            yield _of(
                subject, change, f"{_tied(change.after)}, and {_tied(change.before)} in {_name(subject.reference)}"
            )


def _tied(row: TensorInfo) -> str:
    return f"shares its memory with {', '.join(row.tied_to[:3])}" if row.tied_to else "shares its memory with nothing"


RULES = (missing_entry, unexpected_entry, shape_mismatch, dtype_mismatch, broken_tie)
