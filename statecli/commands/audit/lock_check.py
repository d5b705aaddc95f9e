"""Compare targets with the lock file, and find targets that are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli.commands.audit import references
from statecli.commands.lock import compare_lock
from statecli.commands.lock.companion_files import compare_companions, compare_files, find_pipeline_folders
from statecli.commands.lock.compare_lock import LockMatch
from statecli.core.model_state import ModelState, Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import join_names, plural
from statecli.live import spec
from statecli.rules.audit_rule import Issue
from statecli.rules.audit_subject import Subject
from statecli.storage import files
from statecli.targets import load
from statecli.targets.expand import is_reached
from statecli.targets.location import make_relative_name, resolve_name
from statecli.targets.section_of_target import split_section
from statecli.targets.target_result import LockCount

if TYPE_CHECKING:
    from statecli.commands.audit.request import Request
    from statecli.core.progress import Progress

#: The rule that compares tensors with the lock.
LOCK_RULE = "lock-mismatch"
#: The rule that compares settings and companion files with the lock.
SETTINGS_RULE = "settings-mismatch"
#: Help of the finding about a missing locked file.
MISSING_FILE_HELP = "restore the target; if the removal is intended, run `statecli lock` again"


def check_lock(subject: Subject, request: Request, progress: Progress | None) -> Subject:
    """Add the differences between target and lock to the subject. The reference class of `--model` is not compared.

    Raises as `compare_lock.select_target` and `compare_with_lock` do.
    """
    text, lock = subject.target, request.lock
    if lock is None or not request.checks_lock or (text == request.model and text not in request.targets):
        return subject
    if lock.has_no_names and subject.not_compared_because in references.REASONS_WITHOUT_MODEL:
        return replace(subject, not_locked_because=subject.not_compared_because)
    by_name = subject.not_compared_because is not None
    if not subject.full_state.tensors and lock.find_target(text, request.lock_folder, by_name=by_name) is None:
        return replace(subject, lock=())
    lock_request = _build_lock_request(request, by_name)
    state, lines = load.select_section(subject.full_state, text), compare_lock.select_target(text, lock_request)
    differences = compare_lock.compare_with_lock(state, lines, lock_request, progress)
    only_tensors = request.weights_only or request.frozen_only
    companions = None if only_tensors else compare_companions(state, lines, lock.digest, request.lock_file)
    return replace(subject, lock=differences, companions=companions)


def _build_lock_request(request: Request, by_name: bool) -> compare_lock.Request:
    assert request.lock is not None  # noqa: S101 - every caller has checked it
    return compare_lock.Request(
        request.lock,
        request.frozen_only,
        request.policy.frozen,
        request.selection,
        request.jobs,
        request.lock_folder,
        by_name,
    )


def count_matches(pairs: Sequence[LockMatch]) -> LockCount:
    """Count the tensors compared with the lock, and the matches. A tensor missing on one side does not match."""
    compared = [pair for pair in pairs if pair.differ != compare_lock.SECTION_NOT_IN_LOCK]
    return LockCount(len(compared), sum(pair.agrees for pair in compared))


def list_unlocked_sections(pairs: Sequence[LockMatch]) -> tuple[Oddity, ...]:
    """Return a note about sections, such as an optimizer, that the lock of a model leaves out, or ()."""
    sections = {
        pair.tensor.section: None for pair in pairs if pair.tensor and pair.differ == compare_lock.SECTION_NOT_IN_LOCK
    }
    message = f"{join_names(tuple(sections))}: not part of a model and not in the lock, so not compared"
    return (Oddity(OddityKind.NOT_LOCKED.value, message),) if sections else ()


def find_missing(
    request: Request, audited: Collection[str], duplicate_reasons: Mapping[str, str]
) -> Iterator[tuple[str, Issue]]:
    """Yield each locked target that is missing among the audited targets, with the issue to report.

    `audited` are the audited and the failed targets. `duplicate_reasons` maps skipped duplicates of a file to the
    reason; under the other name the file was compared with other lines of the lock.
    """
    if request.lock is None or not request.checks_lock or request.lock.has_no_names:
        return
    names = {make_relative_name(text, request.lock_folder) for text in audited}
    aliases = {make_relative_name(text, request.lock_folder): text for text in duplicate_reasons}
    for locked in request.lock.targets:
        alias = aliases.get(str(locked.target))
        text = alias or resolve_name(str(locked.target), request.lock_folder)
        is_expected = alias is not None or _is_expected(text, request.targets)
        if locked.target not in names and is_expected and (tensor_count := _count_locked_tensors(text, request)):
            reason = duplicate_reasons.get(text, "was not found")
            message = f"the lock has {plural(tensor_count, 'tensor')} of this target, but the target {reason}"
            yield text, Issue(message, help=MISSING_FILE_HELP)


def _count_locked_tensors(text: str, request: Request) -> int:
    """Return how many locked tensors of a missing target pass the filters."""
    lock_request = _build_lock_request(request, by_name=True)
    lines = compare_lock.select_target(text, lock_request)
    return len(compare_lock.compare_with_lock(ModelState(text, "", ()), lines, lock_request))


def compare_pipelines(request: Request, audited: Collection[str]) -> Iterator[Subject]:
    """Yield each diffusers pipeline that contains audited targets or is in the lock, with its changed files."""
    lock = request.lock
    if lock is None or lock.has_no_names or request.weights_only or request.frozen_only:
        return
    locked = {str(target.target): target.files for target in lock.targets if target.is_pipeline}
    present = find_pipeline_folders(audited, request.targets) if locked else []
    folders = {make_relative_name(folder, request.lock_folder): folder for folder in present}
    for name in locked.keys() - folders.keys():
        folder = resolve_name(name, request.lock_folder)
        if _is_expected(folder, request.targets):
            folders[name] = folder
    for name, folder in sorted(folders.items()):
        changes = compare_files(folder, locked.get(name, {}), lock.digest, request.lock_file)
        yield Subject(folder, ModelState(folder, "", ()), request.policy, lock=(), companions=changes)


def _is_expected(text: str, requested: Sequence[str]) -> bool:
    """Return whether a requested folder or glob contains `text`. Return False for a class or a file's section."""
    path, section = split_section(text)
    if spec.parse_spec(text) is not None or (section is not None and files.exists(path)):
        return False
    return is_reached(path, requested)
