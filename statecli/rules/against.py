"""What a checkpoint lacks, has too much of, or has otherwise than a class or another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from statecli.commands.diff.result import Change, Diff, Field, Status
from statecli.core import quoting
from statecli.core.dtypes import is_floating
from statecli.core.finding import Finding, Severity
from statecli.core.kinds import MODEL_KINDS, meant
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import Kind, TensorInfo
from statecli.core.units import shape_text
from statecli.rules.rule import Found, rule
from statecli.rules.subject import Subject, something_to_hold_to


def _loading(subject: Subject, name: str) -> Iterator[Found]:
    """What a strict load into the class says under that rule's name."""
    for one in subject.load.findings if subject.load else ():
        if one.rule == name:
            yield _said(one)


def _noted(subject: Subject, *kinds: OddityKind) -> Iterator[Found]:
    """What its class loads though a strict load would not."""
    for note in subject.load.notes if subject.load else ():
        if note.kind in kinds:
            yield Found(note.message, severity=Severity.NOTE)


def _said(one: Finding) -> Found:
    origin = one.origin if one.origin is not UNSET else None
    return Found(one.message, one.fqn, one.section, one.help, origin=origin)


def _changes(subject: Subject, field: Field | None = None, status: Status | None = None) -> Iterator[Change]:
    """What differs from the checkpoint it is held to, of the models alone where that has one."""
    diff = subject.reference
    if diff is None:
        return
    wanted = _sections(diff)
    for one in diff.changes:
        differs = one.status is status if field is None else field in one.fields
        if differs and (not wanted or _is_of(one, wanted) or (one.kind is Kind.OPTIMIZER and field in _OF_A_PAIR)):
            yield one


#: What is told of an optimizer's tensor too, which both sides then have.
_OF_A_PAIR = (Field.SHAPE, Field.DTYPE)


def _sections(diff: Diff) -> frozenset[str]:
    """The sections of both sides that are held to each other: those of models that both have, and what a load takes.

    An average beside the model of one side alone is nobody's duty, nor is what is no model. Empty where the reference
    has no model: then all of it is meant.
    """
    models = [one for one in diff.changes if one.kind in MODEL_KINDS]
    if not any(one.before for one in models):
        return frozenset()
    pairs = ((one.before.section, one.after.section) for one in models if one.before and one.after)
    both = {section for pair in pairs for section in pair}
    sides = ([one.before for one in models], [one.after for one in models])
    held = (list(dict.fromkeys(row.section for row in side if row)) for side in sides)
    return frozenset(both.union(*map(meant, held)))


def _is_of(change: Change, sections: frozenset[str]) -> bool:
    return change.kind in MODEL_KINDS and change.section in sections


def _of(subject: Subject, change: Change, what: str, help: str | None = None) -> Found:
    side = subject.state if change.after or subject.reference is None else subject.reference.before
    section = f"{change.section}." if len(side.sections) > 1 else ""
    return Found(f"{section}{change.fqn}: {what}", change.fqn, change.section, help)


def _name(diff: Diff | None) -> str:
    return diff.before.target if diff else ""


def _holder(subject: Subject, change: Change) -> str:
    """The reference, and the section of it that is meant where it has several."""
    several = subject.reference is not None and len(subject.reference.before.sections) > 1
    return _name(subject.reference) + (f"#{change.section}" if several else "")


@rule(Severity.ERROR, something_to_hold_to)
def missing_entry(subject: Subject) -> Iterator[Found]:
    """An entry that the class, or the checkpoint it is held to, has is not there.

    Why: `load_state_dict(strict=True)` refuses it; with `strict=False` the tensor silently keeps its initial values.

    Example: a head that was renamed in the code after the checkpoint was written.

    Fix: save it again from the class as it is now, or map the old name to the new one before loading.
    """
    yield from _loading(subject, "missing-entry")
    yield from _noted(subject, OddityKind.NOT_SAVED_BY_CLASS, OddityKind.CONVERTED_ON_LOAD)
    for change in _changes(subject, status=Status.REMOVED):
        yield _of(subject, change, f"missing: {_holder(subject, change)} has it")


@rule(Severity.ERROR, something_to_hold_to)
def unexpected_entry(subject: Subject) -> Iterator[Found]:
    """There is an entry that the class, or the checkpoint it is held to, does not have.

    Why: `load_state_dict(strict=True)` refuses it; with `strict=False` it is silently left out.

    Example: the weights of an auxiliary loss in a checkpoint that is to be served.

    Fix: leave it out when saving, or give the class what it is for.
    """
    yield from _loading(subject, "unexpected-entry")
    yield from _noted(subject, OddityKind.NOT_READ_BY_CLASS)
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


@rule(Severity.WARNING, something_to_hold_to)
def dtype_mismatch(subject: Subject) -> Iterator[Found]:
    """A tensor has another dtype than the class registers, or than in the checkpoint it is held to.

    Why: `load_state_dict` casts it without a word: values are rounded, or take twice the memory. Where most of a model
    is of one floating-point type and its class registers another, that is told once, as a note: so every checkpoint in
    half precision loads into a class that is built in float32.

    Example: one layer saved in float64 where the class and all other layers are float32.

    Fix: cast the whole model before saving: `model.to(torch.bfloat16)`.
    """
    yield from _cast_by_loading(subject)
    for change in _changes(subject, Field.DTYPE):
        if change.before and change.after:
            what = f"is {change.after.dtype}, and {change.before.dtype} in {_name(subject.reference)}"
            yield _of(subject, change, what, f"cast it to {change.before.dtype} before saving")


def _loaded(subject: Subject) -> Iterator[tuple[TensorInfo, TensorInfo]]:
    """What a load would copy: the tensor here, and the one of the class that it goes into."""
    for change in subject.load.changes if subject.load else ():
        if change.before and change.after and not change.before.damage:
            yield change.before, change.after


def _cast_by_loading(subject: Subject) -> Iterator[Found]:
    casts: dict[tuple[str, str], list[TensorInfo]] = {}
    for here, there in _loaded(subject):
        casts.setdefault((here.dtype, there.dtype), []).append(here)
    registers = f"{subject.load.after.target if subject.load else ''} registers"
    for (held, wanted), rows in casts.items():
        if held == wanted:
            continue
        count = sum(len(same) for (_, one), same in casts.items() if one == wanted)
        if len(rows) * 2 > count and is_floating(held) and is_floating(wanted):
            share = "all" if len(rows) == count else f"{len(rows):,} of"
            what = f"{share} {count:,} tensors are" if count > 1 else f"{subject.called(rows[0])}: is"
            message = f"{what} {held}, where {registers} {wanted}: a load casts without a word"
            yield Found(message, None, rows[0].section, severity=Severity.NOTE)
            continue
        for row in rows:
            message = f"{subject.called(row)}: is {held}, and {registers} {wanted}: a load casts it without a word"
            yield Found(message, row.fqn, row.section, f"cast it to {wanted} before saving")


@rule(Severity.WARNING, something_to_hold_to)
def broken_tie(subject: Subject) -> Iterator[Found]:
    """Tensors that share their memory in what it is held to are separate ones here; of a checkpoint, or the other way.

    Why: tied weights that were parted learn apart from then on, and take twice the memory. Into a class that ties them
    `load_state_dict` copies one after the other and keeps the last: where their bytes differ that is an error, where
    they are the same a note. Which of the two it is only `--values` tells; without it, a note says so.

    Example: `lm_head.weight` saved as a copy of `embed.weight`.

    Fix: tie them again after loading (`model.tie_weights()`), and save from there.
    """
    yield from _parted(subject)
    for change in _changes(subject, Field.TYING):
        if change.before and change.after:
            yield _of(
                subject, change, f"{_tied(change.after)}, and {_tied(change.before)} in {_name(subject.reference)}"
            )


def _tied(row: TensorInfo) -> str:
    return f"shares its memory with {', '.join(row.tied_to[:3])}" if row.tied_to else "shares its memory with nothing"


def _parted(subject: Subject) -> Iterator[Found]:
    """What the class ties and the checkpoint has apart."""
    groups: dict[object, list[TensorInfo]] = {}
    for here, there in _loaded(subject):
        if here.storage is not None and there.storage is not None and there.nbytes:
            groups.setdefault(_view(there), []).append(here)
    for rows in groups.values():
        apart = list({_view(row): row for row in reversed(rows)}.values())[::-1]
        if len(apart) > 1:
            yield _told(subject, apart)


def _view(row: TensorInfo) -> object:
    return row.storage, row.storage_offset, row.elements


def _told(subject: Subject, rows: list[TensorInfo]) -> Found:
    first, *others = rows
    ties = (
        f"{subject.load.after.target if subject.load else ''} ties it to {quoting.names([one.fqn for one in others])}"
    )
    severity, values = _UNREAD if subject.values is None else _SAME[_are_same(subject, rows)]
    message = f"{subject.called(first)}: {ties}, and here they are {len(rows)} tensors{values}"
    return Found(message, first.fqn, first.section, "tie them before saving", severity)


#: How bad it is that tied weights are apart, by whether they are the same bytes.
_SAME: dict[bool | None, tuple[Severity, str]] = {
    None: (Severity.WARNING, ": whether they differ cannot be told; a load keeps the last"),
    True: (Severity.NOTE, " of the same bytes"),
    False: (Severity.ERROR, " of other bytes: a load keeps the last without a word"),
}
_UNREAD = (Severity.NOTE, ": whether they differ cannot be told without --values; a load keeps the last")


def _are_same(subject: Subject, rows: list[TensorInfo]) -> bool | None:
    """None where their values were not read, or are no bytes to compare."""
    known = {(row.section, row.fqn): one for row, one in zip(subject.state.tensors, subject.values or (), strict=False)}
    facts = [known.get((row.section, row.fqn)) for row in rows]
    if len({row.shape for row in rows}) > 1 or any(one is None or one.digest is None for one in facts):
        return None
    if len({row.dtype for row in rows}) > 1:
        return False
    return len({one.digest for one in facts if one}) == 1


RULES = (missing_entry, unexpected_entry, shape_mismatch, dtype_mismatch, broken_tie)
