"""The input of all rules: a target with its contents, and the class, checkpoint and lock to compare with."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from statecli.commands.diff.result import Diff
from statecli.commands.lock.companion_files import CompanionChanges
from statecli.commands.lock.compare_lock import LockMatch
from statecli.core.errors import StateError
from statecli.core.model_state import ModelState, Oddity, Place, ScannedPickle, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import format_fqn
from statecli.rules.digest_names import CheckedFile
from statecli.rules.policy_config import Policy
from statecli.rules.settings_file import SettingsFile
from statecli.rules.storage_views import Storage, group_by_storage
from statecli.storage import files
from statecli.targets.section_of_target import split_section

if TYPE_CHECKING:
    from statecli.values.summary import Facts


class Subject(msgspec.Struct, frozen=True, dict=True):
    """A target, with all data that rules need.

    `state` is the target, `policy` the project's policy. `module` is the state of the class: the target itself for a
    class, None for a checkpoint without `--model`. `load_diff` is the result of a strict load into the class,
    `reference_diff` the difference from the reference checkpoint. `unfiltered_state` is the state before filters and
    the choice of a section. `values` are facts about the values of each tensor of `state`, None for unread values.
    """

    target: str
    state: ModelState
    policy: Policy = msgspec.field(default_factory=Policy)
    module: ModelState | None = None
    #: Reason why the target is not compared with class and reference: it has no model, or belongs to another model.
    not_compared_because: str | None = None
    unfiltered_state: ModelState | None = None
    load_diff: Diff | None = None
    reference_diff: Diff | None = None
    #: Pairs of a locked tensor and a tensor of the target, with `--lock`.
    lock: tuple[LockMatch, ...] | None = None
    #: Settings and files that differ from the lock; None if they were not compared.
    companions: CompanionChanges | None = None
    #: Reason why no part of the target is compared with the given lock.
    not_locked_because: str | None = None
    values: tuple[Facts, ...] | None = None
    #: Reason why the values were not read although rules need them.
    unread_because: str | None = None
    #: Whether the values were requested, and not only read by default.
    values_requested: bool = False
    #: All pickles of the target's files, even if the tensors could not be listed.
    pickles: tuple[ScannedPickle, ...] = ()
    #: The files of the target whose names are digests of their bytes.
    digest_files: tuple[CheckedFile, ...] = ()
    #: The target, if it is a settings file or a chat template of a model folder.
    settings_file: SettingsFile | None = None
    #: Reason why the pickles could not be read although the tensors could be listed.
    pickles_unread_because: str | None = None
    #: Errors of the checksums of each tensor in `state`, if values were read.
    checksum_errors: tuple[tuple[StateError, ...], ...] | None = None

    def name_of(self, tensor: TensorInfo) -> str:
        """Return the name of a tensor for messages, with its section if there are several."""
        name = format_fqn(tensor.fqn)
        return name if len(self.state.sections) < 2 or not tensor.section else f"{tensor.section}.{name}"

    def member(self, place: Place | None) -> str:
        """Return the path of the file in `place`, relative to the target's folder; "" if that file is the target."""
        path, _ = split_section(self.target)
        if place is None or not place.path or place.path == path:
            return ""
        return files.make_relative(place.path, path if files.is_folder(path) else files.get_folder(path))

    @property
    def section_notes(self) -> tuple[Oddity, ...]:
        """Return the notes about sections that were paired or left out in a comparison."""
        notes = (note for diff in (self.load_diff, self.reference_diff) if diff is not None for note in diff.notes)
        return tuple(note for note in notes if note.kind in (OddityKind.SECTIONS_LEFT_OUT, OddityKind.SECTIONS_PAIRED))

    @property
    def full_state(self) -> ModelState:
        """Return the state before the filters, because tensors that the filters remove use bytes of the file too."""
        return self.unfiltered_state or self.state

    @cached_property
    def divided_storages(self) -> list[Storage]:
        """Return the storages that are not filled by exactly one tensor. They are computed once for all rules."""
        return [storage for storage in group_by_storage(self.full_state) if not storage.plain]

    @cached_property
    def has_plain_names(self) -> bool:
        """Return True if the names of all tensors consist of printable ASCII characters."""
        names = "".join([tensor.fqn for tensor in self.state.tensors])
        return names.isascii() and names.isprintable()


#: Reason why rules about values did not run.
NO_VALUES = "no values were read: give --values"


def needs_module(subject: Subject) -> str | None:
    """Return why rules about registration cannot run; None if the subject has a module."""
    return None if subject.module is not None else "needs a model class: give --model file.py:Class"


def needs_class_or_reference(subject: Subject) -> str | None:
    """Return why the target is not compared with a class or a reference; None if it is compared."""
    if subject.load_diff is not None or subject.reference_diff is not None:
        return None
    text = "needs a class or a reference: give --model file.py:Class or --against CHECKPOINT"
    return subject.not_compared_because or text


def needs_file(subject: Subject) -> str | None:
    """Return a reason if the target is a class instead of a checkpoint; else None."""
    return "a class is not a checkpoint" if subject.state.traits.is_class else None


def needs_pickles(subject: Subject) -> str | None:
    """Return a reason if the pickles of the target could not be read; else None."""
    return "the pickles of the target could not be read" if subject.pickles_unread_because else None


def needs_values(subject: Subject) -> str | None:
    """Return why no values were read; None if values were read."""
    if subject.values is not None:
        return None
    if subject.state.traits.is_class:
        return "a class has only initial values; audit a checkpoint"
    return subject.unread_because or NO_VALUES


def needs_lock(subject: Subject) -> str | None:
    """Return why the target is not compared with a lock; None if it is compared."""
    return None if subject.lock is not None else subject.not_locked_because or "needs a lock file: give --lock FILE"


def needs_locked_companions(subject: Subject) -> str | None:
    """Return a reason if settings and files are not compared with the lock; else None."""
    return None if subject.companions is not None else "only weights are compared with the lock"


def needs_digest_as_name(subject: Subject) -> str | None:
    """Return why no file can be compared with the digest in its name; None if at least one file can."""
    if not subject.digest_files:
        return (
            "no file of the target is stored under the digest of its content: audit a snapshot or a blob of the Hub's "
            "cache"
        )
    reasons = [file.unread_because for file in subject.digest_files]
    return None if None in reasons else reasons[0]
