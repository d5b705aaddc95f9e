"""The subject of the rules: one target as it was read, and the class, checkpoint and lock to compare it with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from statecli.commands.diff.result import Diff
from statecli.commands.lock.companion_files import CompanionChanges
from statecli.commands.lock.compare_lock import LockMatch
from statecli.core.errors import StateError
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import ModelState, Oddity, Place, ScannedPickle, TensorInfo
from statecli.core.units import format_fqn
from statecli.rules.digest_names import CheckedFile
from statecli.rules.policy_config import Policy
from statecli.rules.storage_views import Storage, group_by_storage
from statecli.storage import files
from statecli.targets.load import split

if TYPE_CHECKING:
    from statecli.values.summary import Facts


@dataclass(frozen=True)
class Subject:
    """`state` is the target, `policy` what the project wants of it.

    `module` is the state of a class: the target itself where it is one, None for a checkpoint without `--model`.
    `load` is what a strict load of it into that class says, `reference` how it differs from a checkpoint that it is
    held to. `whole` is all that was read, of which filters or a section may have left `state` a part. `values` are
    facts of the values of each of `state`'s tensors, None where they were not read.
    """

    target: str
    state: ModelState
    policy: Policy = field(default_factory=Policy)
    module: ModelState | None = None
    #: Why it is held to nothing that the other targets are held to: it is no model, or not the one that is meant.
    beside: str | None = None
    whole: ModelState | None = None
    load: Diff | None = None
    reference: Diff | None = None
    #: What is locked of it beside what is there, with `--lock`.
    lock: tuple[LockMatch, ...] | None = None
    #: The settings and files that differ from the lock; None where they were not compared.
    companions: CompanionChanges | None = None
    #: Why nothing of it is held to a lock that is given.
    unlocked: str | None = None
    values: tuple[Facts, ...] | None = None
    #: Why the values were not read, though rules need them.
    unread_because: str | None = None
    #: Whether the values were requested, not only read by default.
    values_requested: bool = False
    #: Every pickle of the target's files; of one whose tensors could not be listed, too.
    pickles: tuple[ScannedPickle, ...] = ()
    #: The files of the target whose names are digests of their bytes.
    named_by_digest: tuple[CheckedFile, ...] = ()
    #: Why nothing is known of the pickles, though the tensors could be listed.
    unscanned: str | None = None
    #: Of each of `state`'s tensors, what its containers' checksums have against its bytes, where values were read.
    damages: tuple[tuple[StateError, ...], ...] | None = None

    def name_of(self, tensor: TensorInfo) -> str:
        """Return the name of a tensor for messages, with its section if there are several."""
        name = format_fqn(tensor.fqn)
        return name if len(self.state.sections) < 2 or not tensor.section else f"{tensor.section}.{name}"

    def member(self, place: Place | None) -> str:
        """Return the file of a place, relative to the folder of the target; "" for the target itself."""
        path, _ = split(self.target)
        if place is None or not place.path or place.path == path:
            return ""
        return files.make_relative(place.path, path if files.is_folder(path) else files.get_folder(path))

    @property
    def chosen(self) -> tuple[Oddity, ...]:
        """Return the notes about which sections were compared, if there are several."""
        notes = (note for diff in (self.load, self.reference) if diff is not None for note in diff.notes)
        return tuple(note for note in notes if note.kind in (OddityKind.SECTIONS_LEFT_OUT, OddityKind.SECTIONS_PAIRED))

    @property
    def everything(self) -> ModelState:
        """Return the unfiltered state, because filters must not hide what bytes are used for."""
        return self.whole or self.state

    @cached_property
    def storages(self) -> list[Storage]:
        """Return the storages of all tensors, computed once for all rules."""
        return group_by_storage(self.everything)


#: Why rules about values did not run.
NO_VALUES = "no values were read: give --values"


def needs_module(subject: Subject) -> str | None:
    """Return why it is unknown what is registered; None if there is a module."""
    return None if subject.module is not None else "only a class knows: give --model file.py:Class"


def needs_class_or_reference(subject: Subject) -> str | None:
    """Return why the target is compared with nothing; None if there is a class or a reference."""
    is_given = subject.load is not None or subject.reference is not None
    return (
        None
        if is_given
        else subject.beside or "nothing to hold it to: give --model file.py:Class or --against CHECKPOINT"
    )


def needs_file(subject: Subject) -> str | None:
    """Return a reason if the target is not a checkpoint."""
    return "a class is in no checkpoint" if subject.state.traits.is_class else None


def needs_pickles(subject: Subject) -> str | None:
    """Return a reason if the pickles of the target could not be read."""
    return "its pickles could not be read" if subject.unscanned else None


def needs_reference(subject: Subject) -> str | None:
    """Return why the target is compared with no checkpoint; None if there is a reference."""
    if subject.reference is not None:
        return None
    return subject.beside or "nothing to hold it to: give --against CHECKPOINT"


def needs_values(subject: Subject) -> str | None:
    """Return why no values were read; None if they were."""
    if subject.values is not None:
        return None
    is_class = subject.state.traits.is_class
    if is_class:
        return "a class has the values of its constructor: audit a checkpoint"
    return subject.unread_because or NO_VALUES


def needs_lock(subject: Subject) -> str | None:
    """Return why the target is compared with no lock; None if it is."""
    return None if subject.lock is not None else subject.unlocked or "nothing is locked: give --lock FILE"


def needs_locked_companions(subject: Subject) -> str | None:
    """Return a reason if settings and files are not compared with the lock."""
    return None if subject.companions is not None else "only weights are compared with the lock"


def needs_digest_as_name(subject: Subject) -> str | None:
    """Return why no file can be compared with the digest in its name; None if at least one can."""
    if not subject.named_by_digest:
        return "no file of it is named by its digest: audit a snapshot or a blob of the Hub's cache"
    reasons = [file.unread_because for file in subject.named_by_digest]
    return None if None in reasons else reasons[0]
