"""One run of `lock`: targets are read, their values hashed, and what is known of each tensor becomes a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from statecli import live
from statecli.commands.diff.pairing import counted
from statecli.commands.lock import rules
from statecli.commands.lock.companion_files import companion_digests, lock_settings, pipeline_folders
from statecli.commands.lock.lock_file import SCHEMA, Lock, LockedTarget, LockedTensor, refuse_twins
from statecli.core.errors import BarePickle, FilteredOut, NothingMatched, UnreadableError
from statecli.core.finding import Finding, Severity
from statecli.core.selection import Selection, select
from statecli.core.state import Evidence, Kind, ModelState, TensorInfo
from statecli.storage import files
from statecli.storage.file_version import FileVersion, read_versions, refuse_changed
from statecli.targets import expand as targets
from statecli.targets import load as target
from statecli.targets.location import named
from statecli.targets.outcome import Status
from statecli.values.algorithm import Algorithm
from statecli.values.require_numpy import require_numpy

if TYPE_CHECKING:
    from statecli.core.progress import Progress

#: Evidence that is knowledge; a convention is a guess, which another format may not allow.
KNOWN = frozenset([Evidence.REGISTERED, Evidence.TYPE, Evidence.OPTIMIZER])


class Request(msgspec.Struct, frozen=True):
    """What the user asked of `lock`. `jobs` 0: the cores; `folder` is where the lock file will lie."""

    targets: tuple[str, ...]
    digest: Algorithm = Algorithm.BLAKE3
    jobs: int = 0
    init_device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    folder: str = "."
    weights_only: bool = False


class Read(msgspec.Struct, frozen=True):
    """One target as it was read, the name that it has in the lock, and the stamps of its files before.

    `unlocked` says why nothing of it is in the lock, which is no failure where there are others; `kept` is how many
    tensors callbacks keep, which are left out.
    """

    state: ModelState
    name: str | None
    stamps: dict[str, FileVersion | None]
    unlocked: str | None = None
    kept: int = 0


def read(request: Request) -> list[Read]:
    """Every target, filtered, those too of which nothing is left. Raises `StateError` for the first that cannot be read
    whole, and where there is nothing to lock.
    """
    found = [one for text in _expanded(request.targets) if (one := _read(text, request)) is not None]
    if all(one.unlocked for one in found):
        what = found[0].unlocked if found else f"{' '.join(request.targets)}: no checkpoint there, nothing to lock"
        raise NothingMatched(what)
    alone = len(found) == 1 and found[0].name == named(request.targets[0], request.folder)
    if alone:
        return [msgspec.structs.replace(found[0], name=None)]
    refuse_twins([str(one.name) for one in found], "the lock would hold")
    return sorted(found, key=lambda one: str(one.name))


def _expanded(texts: Sequence[str]) -> Iterable[str]:
    """As `audit` does it, so that what is locked is what is audited. What is no checkpoint is no part of either."""
    for one in targets.expand(texts):
        if isinstance(one, str):
            yield one
        elif one.status is Status.FAILED:
            raise UnreadableError(one.reason or one.target)
        elif one.target in texts and not (one.reason or "").startswith(targets.SAME):
            raise UnreadableError(f"{one.target}: {one.reason}")


def _read(text: str, request: Request) -> Read | None:
    """Return one target; None for a pickle that is not a checkpoint, which is locked as a file of its folder."""
    with files.record_opened_files() as opened:
        before = read_versions([target.split(text)[0]])
        try:
            found = _read_target(text, request)
        except BarePickle:
            if text in request.targets or targets.is_called_weights(text):
                raise
            return None
    return msgspec.structs.replace(found, stamps={**before, **opened})


def _read_target(text: str, request: Request) -> Read:
    spec = target.spec_of(text)
    if spec is None:
        state = target.part(target.whole(text), text)
    else:
        state = live.read(target.model(spec, init_device=request.init_device, values=False), text)
    tensors = tuple(tensor for tensor in state.tensors if not is_bookkeeping(tensor))
    kept = len(state.tensors) - len(tensors)
    state = msgspec.structs.replace(state, tensors=tensors) if kept else state
    what = "nothing but what callbacks keep" if kept else "no tensor"
    unlocked = None if tensors else f"{text}: holds {what}, nothing to lock"
    try:
        selection = Selection(request.include, request.exclude, request.kind)
        state = state if unlocked else select(state, selection, text)
    except FilteredOut as error:
        # A filter is of some of the files in a folder; whoever names a file means that one.
        if text in request.targets:
            raise
        return Read(state, named(text, request.folder), {}, f"{error}: nothing to lock", kept)
    for tensor in state.tensors:
        if tensor.damage is not None:
            raise UnreadableError(f"{tensor.damage}; leave it out with -x {tensor.fqn!r}, or copy the file again")
    refuse_twins([f"{tensor.section}.{tensor.fqn}" for tensor in state.tensors], f"{text}: has")
    return Read(state, named(text, request.folder), {}, unlocked, kept)


def lock(found: Sequence[Read], request: Request, progress: Progress | None = None) -> Lock:
    """The lock of what was read. Raises as `values.digest.digests` does, and for a file whose checksums are wrong or
    that changed meanwhile.
    """
    with require_numpy():
        from statecli.values.compare import damages
        from statecli.values.digest import digests

    found = [one for one in found if one.unlocked is None]
    tensors = [tensor for one in found for tensor in one.state.tensors]
    tell = progress(sum(tensor.nbytes for tensor in tensors)) if progress else None
    made = iter(digests(tensors, request.digest, jobs=request.jobs, progress=tell))
    for error in (one for several in damages(tensors, jobs=request.jobs) for one in several):
        raise error
    pipelines = () if request.weights_only else tuple(_locked_pipelines(found, request))
    for one in found:
        refuse_changed(one.stamps)
    return Lock(
        SCHEMA,
        request.digest,
        (*(_locked_target(one, [next(made) for _ in one.state.tensors], request) for one in found), *pipelines),
    )


def _locked_target(one: Read, digests: Sequence[str | None], request: Request) -> LockedTarget:
    target = LockedTarget(one.name, locked(one.state, digests))
    if request.weights_only or one.state.traits.is_class:
        return target
    companions = companion_digests(one.state.target, request.digest)
    return msgspec.structs.replace(target, settings=lock_settings(one.state), files=companions)


def _locked_pipelines(found: Sequence[Read], request: Request) -> Iterator[LockedTarget]:
    """Yield a target for the files of each diffusers pipeline around the checkpoints."""
    for folder in pipeline_folders([one.state.target for one in found], request.targets):
        digests = companion_digests(folder, request.digest)
        yield LockedTarget(named(folder, request.folder), (), files=digests)


def without_values(found: Sequence[Read], lock: Lock) -> Iterator[Finding]:
    """Notes of the targets that are not in the lock, whole or in part, or some of whose values are not, as there are
    none: a class's are random.
    """
    for one in found:
        if one.unlocked is not None:
            yield rules.NOTHING_TO_LOCK.finding(one.unlocked, target=one.state.target)
        elif one.kept:
            message = f"{one.state.target}: {counted(one.kept)} that callbacks keep are not locked: they are no weights"
            yield rules.CALLBACKS_NOT_LOCKED.finding(message, target=one.state.target)
    for one, lines in zip((one for one in found if one.unlocked is None), lock.targets, strict=True):
        count = sum(line.digest is None for line in lines.tensors)
        if count:
            why = "a class has those of its constructor" if one.state.traits.is_class else "they are not in the file"
            message = f"{one.state.target}: the values of {count} of {len(lines.tensors)} tensors are not locked: {why}"
            yield rules.VALUES_NOT_LOCKED.finding(message, target=one.state.target, severity=Severity.NOTE)


def locked(state: ModelState, digests: Sequence[str | None]) -> tuple[LockedTensor, ...]:
    """The lines of a state, sorted by section and name."""
    ties = _ties(state)
    lines = [
        LockedTensor(
            tensor.fqn,
            tensor.section,
            tensor.kind if tensor.evidence in KNOWN else None,
            tensor.dtype,
            tensor.shape,
            tensor.requires_grad,
            digest,
            ties.get((tensor.section, view_of(tensor))) if tensor.tied_to else None,
            not is_beside(tensor),
        )
        for tensor, digest in zip(state.tensors, digests, strict=True)
    ]
    return tuple(sorted(lines, key=lambda line: (line.section, line.fqn)))


def is_beside(tensor: TensorInfo) -> bool:
    """Whether no state_dict has it, only the class or the module pickled whole."""
    return tensor.kind is Kind.UNREGISTERED or tensor.persistent is False or tensor.saved is False


def is_bookkeeping(tensor: TensorInfo) -> bool:
    """Whether a callback keeps it beside the weights: a score, by the path that its checkpoint had on that machine."""
    return tensor.kind is Kind.OTHER and tensor.section.partition(".")[0] == "callbacks"


def view_of(tensor: TensorInfo) -> Any:
    """What two names of one section have in common where they are one tensor, not only parts of one storage."""
    if tensor.data is not None or tensor.parts:
        return tensor.data, tensor.parts
    return tensor.storage, tensor.storage_offset, tensor.dtype, tensor.shape


def _ties(state: ModelState) -> dict[tuple[str, Any], str]:
    """The first name of each view that several names of a section have."""
    names: dict[tuple[str, Any], list[str]] = {}
    for tensor in state.tensors:
        if tensor.tied_to:
            names.setdefault((tensor.section, view_of(tensor)), []).append(tensor.fqn)
    return {key: min(group) for key, group in names.items() if len(group) > 1}
