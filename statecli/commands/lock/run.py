"""Run `lock`: read targets, hash their values, and write a line for each tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from statecli import live, values
from statecli.commands.lock import rules
from statecli.commands.lock.companion_files import compute_companion_digests, find_pipeline_folders, lock_settings
from statecli.commands.lock.lock_file import SCHEMA, Lock, LockedTarget, LockedTensor, refuse_twins
from statecli.core import quoting
from statecli.core.digest_algorithm import Algorithm, load_hasher
from statecli.core.errors import BarePickle, FilteredOut, NothingMatched, UnreadableError, option
from statecli.core.finding import Finding
from statecli.core.model_state import Evidence, Kind, ModelState, TensorInfo
from statecli.core.selection import Selection, select
from statecli.core.units import plural
from statecli.storage import files
from statecli.storage.file_version import FileVersion, read_versions, refuse_changed
from statecli.targets import expand, load
from statecli.targets.location import make_relative_name, resolve_name
from statecli.targets.section_of_target import split_section
from statecli.targets.target_result import TargetStatus
from statecli.values.plain_bytes import read_plain_bytes
from statecli.workers import pool

if TYPE_CHECKING:
    from statecli.core.progress import Progress

#: Evidence of a known kind. A kind by convention is a guess, which another format may not support.
RELIABLE_EVIDENCE = frozenset([Evidence.REGISTERED, Evidence.TYPE, Evidence.OPTIMIZER])


class Request(msgspec.Struct, frozen=True):
    """A request to lock. `jobs`: number of workers (0 for one per core). `lock_file`: path of the output."""

    targets: tuple[str, ...]
    digest: Algorithm = Algorithm.BLAKE3
    jobs: int = 0
    init_device: str | None = None
    selection: Selection = Selection()
    lock_file: str | None = None
    weights_only: bool = False

    @property
    def folder(self) -> str:
        """The folder of the lock file."""
        return os.path.dirname(self.lock_file or "") or "."


class LockInput(msgspec.Struct, frozen=True):
    """A target that was read for the lock file.

    Attributes:
        name: Name in the lock.
        stamps: Versions of the files before they were read.
        unlocked: Reason why nothing of the target is locked. It is an error only if nothing of any target is locked.
        bookkeeping_count: Number of left out tensors that callbacks keep.
    """

    state: ModelState
    name: str | None
    stamps: dict[str, FileVersion | None]
    unlocked: str | None = None
    bookkeeping_count: int = 0


def read_targets(request: Request) -> list[LockInput]:
    """Read every target and apply the filters, which may leave a target without tensors.

    Raises `StateError` for the first target not read completely, and if there is nothing to lock.
    """
    texts = _expand_targets(request.targets)
    inputs = [item for text in texts if (item := _read_checkpoint(text, request)) is not None]
    if all(item.unlocked for item in inputs):
        message = f"{' '.join(request.targets)}: no checkpoint found, nothing to lock"
        raise NothingMatched((inputs[0].unlocked if inputs else None) or message)
    if len(inputs) == 1 and inputs[0].name == make_relative_name(request.targets[0], request.folder):
        return [msgspec.structs.replace(inputs[0], name=None)]
    refuse_twins([str(item.name) for item in inputs], "the lock would contain")
    return sorted(inputs, key=lambda item: str(item.name))


def _expand_targets(texts: Sequence[str]) -> Iterable[str]:
    """Yield the targets that `audit` would find, and skip files that are not checkpoints.

    Raises UnreadableError for a typed folder without a checkpoint, unless there is no checkpoint at all.
    """
    targets = []
    for expanded in expand.expand_targets(texts):
        targets.append(expanded)
        if isinstance(expanded, str):
            yield expanded
        elif expanded.status is TargetStatus.FAILED:
            raise UnreadableError(expanded.reason or expanded.target)
        elif expanded.target in texts and expanded.same_as is None:
            raise UnreadableError(f"{expanded.target}: {expanded.reason}")
    folders = expand.list_folders_without_checkpoints(texts, targets)
    if folders and any(isinstance(target, str) for target in targets):
        raise UnreadableError(f"{quoting.names(folders)}: contains no checkpoint, nothing to lock")


def _read_checkpoint(text: str, request: Request) -> LockInput | None:
    """Read a target. Return None for a pickle that is not a checkpoint: the lock covers it as a file of its folder."""
    with files.record_opened_files() as opened_files:
        before = read_versions([split_section(text)[0]])
        try:
            target_input = _read_target(text, request)
        except BarePickle:
            if text in request.targets or expand.is_named_as_checkpoint(text):
                raise
            return None
    return msgspec.structs.replace(target_input, stamps={**before, **opened_files})


def _read_target(text: str, request: Request) -> LockInput:
    spec = load.find_class_spec(text)
    if spec is None:
        state = load.select_section(load.read_whole_checkpoint(text), text)
    else:
        built_model = live.build.build(spec, init_device=request.init_device)  # raises MissingDependency without torch
        state = live.model_reader.read(built_model, text)
    tensors = tuple(tensor for tensor in state.tensors if not is_bookkeeping(tensor))
    bookkeeping_count = len(state.tensors) - len(tensors)
    state = msgspec.structs.replace(state, tensors=tensors) if bookkeeping_count else state
    contents = "only the state of callbacks" if bookkeeping_count else "no tensor"
    skip_reason = None if tensors else f"{text}: contains {contents}, so there is nothing to lock"
    try:
        state = state if skip_reason else select(state, request.selection, text)
    except FilteredOut as error:
        # A filter may leave no tensor of a file in a folder, but must leave some of a named file.
        if text in request.targets:
            raise
        return LockInput(
            state, make_relative_name(text, request.folder), {}, f"{error}: nothing to lock", bookkeeping_count
        )
    for tensor in state.tensors:
        if tensor.damage is not None:
            exclude = option("-x", tensor.fqn, quoted=True)
            raise UnreadableError(f"{tensor.damage}; exclude the tensor with {exclude}, or copy the file again")
    refuse_twins([f"{tensor.section}.{tensor.fqn}" for tensor in state.tensors], f"{text}: has")
    return LockInput(state, make_relative_name(text, request.folder), {}, skip_reason, bookkeeping_count)


def build_lock(inputs: Sequence[LockInput], request: Request, progress: Progress | None = None) -> Lock:
    """Hash the tensors of the targets, and return the lock.

    Raises as `digest.compute_digests` does, and for a file with wrong checksums or changes meanwhile.
    """
    inputs = [item for item in inputs if item.unlocked is None]
    tensors = [tensor for item in inputs for tensor in item.state.tensors]
    digests = iter(_compute_digests(tensors, request, progress))
    pipelines = () if request.weights_only else tuple(_lock_pipelines(inputs, request))
    for item in inputs:
        refuse_changed(item.stamps)
    return Lock(
        SCHEMA,
        request.digest,
        (*(_lock_target(item, [next(digests) for _ in item.state.tensors], request) for item in inputs), *pipelines),
    )


def _compute_digests(
    tensors: Sequence[TensorInfo], request: Request, progress: Progress | None
) -> Sequence[str | None]:
    contents = None if pool.is_distributed() else read_plain_bytes(tensors)
    if contents is not None:
        new = load_hasher(request.digest)
        return [new(content).hexdigest() for content in contents]
    report = progress(sum(tensor.nbytes for tensor in tensors)) if progress else None
    digests = values.digest.compute_digests(tensors, request.digest, jobs=request.jobs, progress=report)
    for error in (
        error for errors in values.recorded_checksums.check_checksums(tensors, jobs=request.jobs) for error in errors
    ):
        raise error
    return digests


def _lock_target(item: LockInput, digests: Sequence[str | None], request: Request) -> LockedTarget:
    target = LockedTarget(item.name, lock_tensors(item.state, digests))
    if request.weights_only or item.state.traits.is_class:
        return target
    companions = compute_companion_digests(item.state.target, request.digest, request.lock_file)
    return msgspec.structs.replace(target, settings=lock_settings(item.state), files=companions)


def _lock_pipelines(inputs: Sequence[LockInput], request: Request) -> Iterator[LockedTarget]:
    """Yield a locked target for each diffusers pipeline that contains the checkpoints."""
    for folder in find_pipeline_folders([item.state.target for item in inputs], request.targets):
        digests = compute_companion_digests(folder, request.digest, request.lock_file)
        yield LockedTarget(make_relative_name(folder, request.folder), (), files=digests)


def list_companion_files(inputs: Sequence[LockInput], lock: Lock, request: Request) -> Iterator[str]:
    """Yield the path of each locked file that is not a checkpoint."""
    places = {item.name: split_section(item.state.target)[0] for item in inputs}
    for target in lock.targets:
        folder = places.get(target.target) or resolve_name(target.target or "", request.folder)
        yield from (files.join(folder, name) for name in target.files or ())


def report_unlocked(inputs: Sequence[LockInput], lock: Lock) -> Iterator[Finding]:
    """Yield notes on targets and values that the lock does not contain.

    A class has no locked values, because its values are random.
    """
    for item in inputs:
        if item.unlocked is not None:
            yield rules.NOTHING_TO_LOCK.finding(item.unlocked, target=item.state.target)
        elif item.bookkeeping_count:
            tensors = plural(item.bookkeeping_count, "tensor")
            message = (
                f"{item.state.target}: {tensors} of callbacks are not locked, because these tensors are not weights"
            )
            yield rules.CALLBACKS_NOT_LOCKED.finding(message, target=item.state.target)
    locked = [item for item in inputs if item.unlocked is None]
    # The last targets of the lock are folders of pipelines, which have no tensors.
    for item, lines in zip(locked, lock.targets[: len(locked)], strict=True):
        count = sum(line.digest is None for line in lines.tensors)
        if count:
            reason = "the values are not in the file, or are Python objects"
            if item.state.traits.is_class:
                reason = "a class has only initial values"
            message = (
                f"{item.state.target}: the values of {count} of {len(lines.tensors)} tensors are not locked: {reason}"
            )
            severity = rules.VALUES_NOT_LOCKED.cases["on writing"]
            yield rules.VALUES_NOT_LOCKED.finding(message, target=item.state.target, severity=severity)


def lock_tensors(state: ModelState, digests: Sequence[str | None]) -> tuple[LockedTensor, ...]:
    """Return the lines of a lock for the tensors of a state, sorted by section and name."""
    ties = _find_ties(state)
    lines = [
        LockedTensor(
            tensor.fqn,
            tensor.section,
            tensor.kind if tensor.evidence in RELIABLE_EVIDENCE else None,
            tensor.dtype,
            tensor.shape,
            tensor.requires_grad,
            digest,
            ties.get((tensor.section, make_view_key(tensor))) if tensor.tied_to else None,
            tensor.is_in_state_dict,
        )
        for tensor, digest in zip(state.tensors, digests, strict=True)
    ]
    return tuple(sorted(lines, key=attrgetter("section", "fqn")))


def is_bookkeeping(tensor: TensorInfo) -> bool:
    """Return True for a tensor that belongs to a training callback, such as a checkpoint's score."""
    return tensor.kind is Kind.OTHER and tensor.section.partition(".")[0] == "callbacks"


def make_view_key(tensor: TensorInfo) -> object:
    """Return a key that all names of a tensor in a section share. Different views of a storage have different keys."""
    if tensor.data is not None or tensor.parts:
        return tensor.data, tensor.parts
    return tensor.storage, tensor.storage_offset, tensor.dtype, tensor.shape


def _find_ties(state: ModelState) -> dict[tuple[str, object], str]:
    """Map each tensor view that has several names in a section to the alphabetically first of these names.

    Equal values are not a tie: two biases of zeros are two tensors, and a checkpoint may lack either.
    """
    names: dict[tuple[str, object], list[str]] = {}
    for tensor in state.tensors:
        if tensor.tied_to:
            names.setdefault((tensor.section, make_view_key(tensor)), []).append(tensor.fqn)
    return {key: min(group) for key, group in names.items() if len(group) > 1}
