"""What is wrong with names."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator

from statecli.core import quoting
from statecli.core.escaping import visible
from statecli.core.finding import Severity
from statecli.core.kinds import INNER, WRAPPERS
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import Kind, TensorInfo
from statecli.rules.rule import Found, rule
from statecli.rules.subject import Subject

#: What a model loads.
MODEL = (Kind.PARAMETER, Kind.BUFFER)
#: What wrappers put in front, and nobody else.
_OUTER = WRAPPERS[:-1]


@rule(Severity.WARNING)
def case_collision(subject: Subject) -> Iterator[Found]:
    """Two tensors' names differ in upper and lower case alone, or in how Unicode writes the same letters.

    Why: files on macOS and Windows, and tools that fold case or normalize text, take the one for the other: one of the
    two is lost without a word when the checkpoint is unpacked or converted.

    Example: `head.Weight` beside `head.weight`.

    Fix: rename one of them where it is registered, and save again.
    """
    known: dict[tuple[str, str], str] = {}
    for tensor in subject.state.tensors:
        other = known.setdefault((tensor.section, _folded(tensor.fqn)), tensor.fqn)
        if other != tensor.fqn:
            section = f"{visible(tensor.section)}." if len(subject.state.sections) > 1 else ""
            yield Found(section + _alike(tensor.fqn, other), tensor.fqn, tensor.section, _RENAME)


_RENAME = "rename one of the two"


def _folded(name: str) -> str:
    """As a file system on macOS or Windows has it: `ß` is not `ss`, as it is to `str.casefold`."""
    return name.lower() if name.isascii() else _normal(_normal(name).lower())


def _normal(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _alike(name: str, other: str) -> str:
    """What looks the same is shown by its code points."""
    if _normal(name) == _normal(other):
        return f"{ascii(name)[1:-1]}: is {ascii(other)[1:-1]} written with other code points"
    return f"{visible(name)}: differs from {visible(other)} in case alone"


def _saved_without_class(subject: Subject) -> str | None:
    return "a class's names are what they are" if subject.state.traits.is_class else None


@rule(Severity.WARNING, _saved_without_class)
def wrapper_prefix(subject: Subject) -> Iterator[Found]:
    """Names have in them what a wrapper added: `module.`, `_orig_mod.`, `_fsdp_wrapped_module.`, `_forward_module.`.

    Why: the plain model knows none of these names. A strict load raises, and a load with `strict=False` leaves every
    weight as it was initialised and says nothing. Names that the class given with `--model` registers are its own.

    Example: `torch.save(ddp_model.state_dict(), …)` of a DistributedDataParallel or a compiled model.

    Fix: save the wrapped module's own state_dict (`ddp_model.module`, `compiled._orig_mod`), or strip the prefix.
    """
    whole, told = subject.state.whole_modules, set[str]()
    registered = _registered(subject)
    for section in subject.state.sections:
        rows = [one for one in subject.state.tensors if one.section == section and one.kind in MODEL]
        if not rows or section in whole:
            continue
        prefix = next((one for one in _OUTER if all(row.fqn.startswith(one) for row in rows)), None)
        marked = [row for row in rows if (prefix or _wrapper_in(row.fqn)) and (section, row.fqn) not in registered]
        if marked:
            added = prefix or f"{_wrapper_in(marked[0].fqn)}."
            told.add(added)
            yield _wrapped(subject, added, marked, len(rows))
    yield from _beside_reference(subject, told)


def _beside_reference(subject: Subject, told: Collection[str]) -> Iterator[Found]:
    """What was looked through to hold it to another checkpoint; of what that one has alone nothing need be done."""
    for note in subject.reference.notes if subject.reference else ():
        if note.kind is OddityKind.WRAPPER_PREFIX and not any(f"{prefix!r}" in note.message for prefix in told):
            own = note.message.endswith(f" of {subject.target}")
            message = f"{note.message}, to hold the one to the other: a strict load does not"
            yield Found(message, severity=Severity.WARNING if own else Severity.NOTE)


def _registered(subject: Subject) -> set[tuple[str, str]]:
    """What the class that it is held to registers by the very name that it has here."""
    pairs = [(one.before, one.after) for one in (subject.load.changes if subject.load else ())]
    return {(here.section, here.fqn) for here, there in pairs if here and there and here.fqn == there.fqn}


def _wrapper_in(fqn: str) -> str | None:
    """The part of a path that nobody but a wrapper is called by."""
    return next((part for part in fqn.split(".")[:-1] if part in INNER), None) if "_mod" in fqn else None


def _wrapped(subject: Subject, added: str, marked: list[TensorInfo], count: int) -> Found:
    first, section = marked[0], marked[0].section
    share = f"all {count:,} names" if len(marked) == count else f"{len(marked):,} of {count:,} names"
    message = f"{subject.called(first)}: {share} of {section} have {added!r} in them, which a wrapper added"
    bare = f"removeprefix({added!r})" if first.fqn.startswith(added) else f"replace({added!r}, '')"
    help = f"load {{k.{bare}: v for k, v in state.items()}}, or save the module inside the wrapper"
    return Found(message, None, section, help)


@rule(Severity.WARNING)
def control_characters(subject: Subject) -> Iterator[Found]:
    """A name has characters in it that cannot be seen: control, bidirectional, zero-width, half of a pair.

    Why: such a name shows as another one, or as none: it colours or overwrites a terminal's lines, adds lines to a log,
    turns text around, or equals a well-known name for every reader but a computer.

    Example: `fc.weight` with a zero-width space in it beside `fc.weight`; a name with a line break.

    Fix: rename it, and ask where the file comes from.
    """
    for section in subject.state.sections:
        if visible(section) != section:
            message = f"section {quoting.quoted(section)} has characters in its name that cannot be seen"
            yield Found(message, None, section, "rename it")
    for tensor in subject.state.tensors:
        if visible(tensor.fqn) != tensor.fqn:
            message = f"{visible(subject.called(tensor))}: its name has characters that cannot be seen, here escaped"
            yield Found(message, tensor.fqn, tensor.section, "rename it")


RULES = (wrapper_prefix, control_characters, case_collision)
