"""Targets beside the lock that is given: what became of each, and what was locked and is not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from statecli.commands.audit import references
from statecli.commands.lock import compare_lock
from statecli.commands.lock.companion_files import compare_companions, compare_files, find_pipeline_folders
from statecli.core.state import ModelState
from statecli.core.units import plural
from statecli.live import spec
from statecli.rules.rule import Issue
from statecli.rules.subject import Subject
from statecli.storage import files
from statecli.targets import load
from statecli.targets.expand import is_reached
from statecli.targets.location import named, unnamed

if TYPE_CHECKING:
    from statecli.commands.audit.request import Request
    from statecli.core.progress import Progress

#: The rule that holds targets to a lock.
RULE = "lock-mismatch"
#: The rule about what a lock holds next to the tensors.
SETTINGS_RULE = "settings-mismatch"
#: What to do about a locked file that is not there.
HELP = "restore it; if it was meant to go, lock again"


def of(subject: Subject, request: Request, progress: Progress | None) -> Subject:
    """The subject with what became of what the lock has of it; a class that only others are held to has nothing locked.

    Raises as `locking.holding.lines` and `held` do.
    """
    text, lock = subject.target, request.lock
    if lock is None or not request.is_locking or (text == request.model and text not in request.targets):
        return subject
    if lock.has_no_names and subject.beside in references.NO_MODEL:
        return dataclasses.replace(subject, unlocked=subject.beside)
    by_name = subject.beside is not None
    if not subject.everything.tensors and lock.of(text, request.lock_folder, by_name=by_name) is None:
        return dataclasses.replace(subject, lock=())
    asked = _asked(request, by_name)
    state, lines = load.part(subject.everything, text), compare_lock.select_target(text, asked)
    found = compare_lock.compare_with_lock(state, lines, asked, progress)
    only_tensors = request.weights_only or request.frozen_only
    companions = None if only_tensors else compare_companions(state, lines, lock.digest)
    return dataclasses.replace(subject, lock=found, companions=companions)


def _asked(request: Request, by_name: bool) -> compare_lock.Request:
    assert request.lock is not None  # noqa: S101 - whoever asks has one
    return compare_lock.Request(
        request.lock,
        request.frozen_only,
        request.policy.frozen,
        request.include,
        request.exclude,
        request.kind,
        request.jobs,
        request.lock_folder,
        by_name,
    )


def gone(request: Request, met: Collection[str], same: Mapping[str, str]) -> Iterator[tuple[str, Issue]]:
    """What the lock has of what was asked for, and was not met there; with what is said of it.

    `met` are the targets that were audited or failed, `same` those that were not because they are the same file as
    another, with the words that say so: under that name the file was compared with other lines of the lock.
    """
    if request.lock is None or not request.is_locking or request.lock.has_no_names:
        return
    known = {named(text, request.lock_folder) for text in met}
    aliases = {named(text, request.lock_folder): text for text in same}
    for one in request.lock.targets:
        alias = aliases.get(str(one.target))
        text = alias or unnamed(str(one.target), request.lock_folder)
        is_asked = alias is not None or _would_be_found(text, request.targets)
        if one.target not in known and is_asked and (count := _held(text, request)):
            why = same.get(text, "was not found")
            yield text, Issue(f"the lock has {plural(count, 'tensor')} of it, and it {why}", help=HELP)


def _held(text: str, request: Request) -> int:
    """How many tensors of a target that is not there would have been held: the filters may leave none."""
    asked = _asked(request, by_name=True)
    return len(compare_lock.compare_with_lock(ModelState(text, "", ()), compare_lock.select_target(text, asked), asked))


def pipelines(request: Request, audited: Collection[str]) -> Iterator[Subject]:
    """Yield each diffusers pipeline around the `audited` targets or of the lock, with the files that changed in it."""
    lock = request.lock
    if lock is None or lock.has_no_names or request.weights_only or request.frozen_only:
        return
    locked = {str(one.target): one.files for one in lock.targets if one.is_pipeline}
    present = find_pipeline_folders(audited, request.targets) if locked else []
    folders = {named(folder, request.lock_folder): folder for folder in present}
    for name in locked.keys() - folders.keys():
        folder = unnamed(name, request.lock_folder)
        if _would_be_found(folder, request.targets):
            folders[name] = folder
    for name, folder in sorted(folders.items()):
        changes = compare_files(folder, locked.get(name, {}), lock.digest)
        yield Subject(folder, ModelState(folder, "", ()), request.policy, lock=(), companions=changes)


def _would_be_found(text: str, asked: Sequence[str]) -> bool:
    """Whether a walk or a glob would have come to it; no class, and no section of a file that is there."""
    path, section = load.split(text)
    if spec.parse_spec(text) is not None or (section is not None and files.exists(path)):
        return False
    return is_reached(path, asked)
