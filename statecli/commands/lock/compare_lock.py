"""Compare a checkpoint with its lock, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from statecli import values
from statecli.commands.diff.pairing import pair_sections
from statecli.commands.lock.lock_file import Lock, LockedTarget, LockedTensor
from statecli.commands.lock.run import RELIABLE_EVIDENCE, is_bookkeeping, make_view_key
from statecli.core.errors import NothingMatched, option
from statecli.core.model_state import Kind, ModelState, TensorInfo, TensorKey
from statecli.core.parameter_or_buffer import MODEL_KINDS
from statecli.core.selection import Selection, glob_names, matches_any
from statecli.storage import files
from statecli.targets.location import make_relative_name

if TYPE_CHECKING:
    from statecli.core.progress import Progress


#: Fields of a `LockMatch` for a tensor outside of the model, in a section that the lock does not have.
SECTION_NOT_IN_LOCK = ("section",)
#: Remedy for a target that is not in the lock.
NEW_TARGET_ADVICE = (
    "if you expect this target, run `statecli lock` again; otherwise leave the target out, or delete the file"
)
#: Remedy for a local copy of a target locked by URL, or the reverse.
OTHER_SIDE_ADVICE = (
    "this target is a {}, but the targets of the lock are {}s; lock this target alone, because a lock file with one "
    "target does not compare paths"
)


class LockMatch(msgspec.Struct, frozen=True, gc=False):
    """A line of the lock and its tensor. `locked` or `tensor` is None if the lock or the checkpoint lacks the tensor.

    `differ`: fields in which the tensor contradicts the line, or `SECTION_NOT_IN_LOCK`. `digest`: digest of the tensor.
    It is None if dtype or shape differ, or if the lock or the checkpoint has no values.
    """

    locked: LockedTensor | None
    tensor: TensorInfo | None
    differ: tuple[str, ...] = ()
    digest: str | None = None

    @property
    def agrees(self) -> bool:
        """True if the lock and the checkpoint have the tensor, and no field of the line differs."""
        return self.locked is not None and self.tensor is not None and not self.differ


class Request(msgspec.Struct, frozen=True):
    """A request to compare a target with a lock.

    Attributes:
        frozen_only: Compare only tensors that must not train; `frozen` are globs of further frozen tensors.
        folder: Folder of the lock, the base of its relative names.
        by_name: The target is a file next to a model, not covered by the lock of a single target.
    """

    lock: Lock
    frozen_only: bool = False
    frozen: tuple[str, ...] = ()
    selection: Selection = Selection()
    jobs: int = 0
    folder: str = "."
    by_name: bool = False


def select_target(text: str, request: Request) -> LockedTarget:
    """Return the locked target for a target that the user typed. Raises `NothingMatched` if the lock lacks it."""
    target = request.lock.find_target(text, request.folder, by_name=request.by_name)
    if target is None:
        kinds = ("URL", "local path") if files.is_remote(text) else ("local path", "URL")
        advice = OTHER_SIDE_ADVICE.format(*kinds) if _is_on_other_side(text, request.lock) else NEW_TARGET_ADVICE
        raise NothingMatched(f"{text}: is not in the lock, which {_describe_lock(text, request)}: {advice}")
    if not request.frozen_only:
        return target
    frozen_lines = tuple(line for line in target.tensors if _is_frozen(line, request.frozen))
    if not frozen_lines and not request.by_name:
        message = "the lock has no frozen tensors: no tensor has requires_grad=False or matches policy.frozen"
        raise NothingMatched(f"{text}: {option('--frozen-only')}: {message}")
    return replace(target, tensors=frozen_lines)


def _is_on_other_side(text: str, lock: Lock) -> bool:
    """Return True if this target is a URL and all locked targets are local, or if all are URLs and it is local."""
    return not lock.has_no_names and all(
        files.is_remote(str(target.target)) != files.is_remote(text) for target in lock.targets
    )


def _describe_lock(text: str, request: Request) -> str:
    from difflib import get_close_matches

    if request.lock.has_no_names:
        return "has only one target"
    names = [str(target.target) for target in request.lock.targets]
    closest_name = (get_close_matches(make_relative_name(text, request.folder), names, n=1) or names)[0]
    return f"has {closest_name} and {len(names) - 1} more" if len(names) > 1 else f"has only {closest_name}"


def _is_frozen(line: LockedTensor, globs: Sequence[str]) -> bool:
    """Return True for a parameter with requires_grad=False, and for a name that matches a glob.

    A buffer never requires grad: only a glob decides.
    """
    parameter = line.kind in (None, Kind.PARAMETER) and line.requires_grad is False
    return parameter or matches_any((line.fqn, f"{line.section}.{line.fqn}"), globs)


def compare_with_lock(
    state: ModelState, target: LockedTarget, request: Request, progress: Progress | None = None
) -> tuple[LockMatch, ...]:
    """Return a match for each selected line of the locked `target`, then for each further tensor of `state`.

    `state` is not filtered. Values are read if dtype and shape agree. Raises as `digest.compute_digests` does, and
    `NothingMatched` if the filters leave nothing.
    """
    pairs = [pair for pair in _match_lines(state, target, request) if _is_wanted(pair, state, request)]
    if not pairs and not request.by_name:
        raise NothingMatched(f"{state.target}: the filters exclude all locked tensors, so nothing was compared")
    return tuple(_compare_values(pairs, state, request, progress))


def _match_lines(state: ModelState, target: LockedTarget, request: Request) -> Iterator[LockMatch]:
    """Yield a match for each line of the lock, then for each tensor without a line.

    A tensor outside of the state_dict is compared only if present on both sides. A missing name is reported unless the
    lock ties this name to a present name, in a format that keeps only one of several names.
    """
    sections = pair_sections(_to_state(target), state).by_section
    rows: dict[TensorKey, TensorInfo] = {}
    twins = [row for row in state.tensors if rows.setdefault(row.key, row) is not row]
    ties = _group_ties(target, sections)
    matched_keys: set[TensorKey] = set()
    for line in target.tensors:
        section = sections.get(line.section, line.section)
        key = TensorKey(section, line.fqn)
        tensor = rows.get(key)
        if tensor is not None:
            matched_keys.add(key)
            yield LockMatch(line, tensor, tuple(_find_differing(line, tensor)))
        elif line.persistent and not any(_has_no_ties(rows.get(key)) for key in ties.get((section, line.tied), ())):
            yield LockMatch(line, None)
    if request.frozen_only:
        return
    matched_views = {(key.section, make_view_key(rows[key])) for key in matched_keys}
    locked_sections = {sections.get(line.section, line.section) for line in target.tensors}
    for tensor in (*(row for key, row in rows.items() if key not in matched_keys), *twins):
        if not tensor.is_in_state_dict or is_bookkeeping(tensor):
            continue
        if tensor.kind not in MODEL_KINDS and tensor.section not in locked_sections:
            yield LockMatch(None, tensor, SECTION_NOT_IN_LOCK)
        elif not (tensor.tied_to and (tensor.section, make_view_key(tensor)) in matched_views):
            yield LockMatch(None, tensor)


def _to_state(target: LockedTarget) -> ModelState:
    """Convert the lines of a lock to a state, so that its sections can be paired with those of a checkpoint."""
    rows = tuple(
        TensorInfo(
            line.fqn, line.dtype, line.shape, prod(line.shape or ()), 0, line.section, line.kind or Kind.PARAMETER
        )
        for line in target.tensors
    )
    return ModelState("", "lock", rows, tuple(dict.fromkeys(row.section for row in rows)))


def _group_ties(target: LockedTarget, sections: dict[str, str]) -> dict[tuple[str, str | None], list[TensorKey]]:
    """Group the locked names of tied tensors by the first name of the tie. Sections have the checkpoint's names."""
    names_of_tie: dict[tuple[str, str | None], list[TensorKey]] = {}
    for line in target.tensors:
        section = sections.get(line.section, line.section)
        if line.tied is not None:
            names_of_tie.setdefault((section, line.tied), []).append(TensorKey(section, line.fqn))
    return names_of_tie


def _has_no_ties(row: TensorInfo | None) -> bool:
    """Return True if the tensor's format, such as safetensors, does not record tied weights."""
    return row is not None and row.storage is None and row.device is None


def _find_differing(line: LockedTensor, tensor: TensorInfo) -> Iterator[str]:
    """Yield the fields, except values, in which the tensor contradicts the line of the lock.

    An unknown field contradicts nothing.
    """
    if line.dtype != tensor.dtype:
        yield "dtype"
    if line.shape != tensor.shape:
        yield "shape"
    if tensor.evidence in RELIABLE_EVIDENCE and line.kind not in (None, tensor.kind):
        yield "kind"
    if None not in (line.requires_grad, tensor.requires_grad) and line.requires_grad != tensor.requires_grad:
        yield "requires_grad"


def _is_wanted(pair: LockMatch, state: ModelState, request: Request) -> bool:
    row = pair.tensor or pair.locked
    assert row is not None  # noqa: S101 - one of the two is always there
    selection = request.selection
    # A tensor without a kind in the lock file matches every --kind.
    is_kind = row.kind is None or selection.selects_kind(row.kind)
    names = glob_names(row.fqn, row.section, by_section=len(state.sections) > 1)
    return is_kind and selection.selects_name(names)


def _compare_values(
    pairs: Sequence[LockMatch], state: ModelState, request: Request, progress: Progress | None
) -> Iterator[LockMatch]:
    compared = [pair for pair in pairs if _has_values(pair, state)]
    tensors = [pair.tensor for pair in compared if pair.tensor is not None]
    if not tensors:
        yield from pairs
        return
    report = progress(sum(tensor.nbytes for tensor in tensors)) if progress else None
    digests = values.digest.compute_digests(tensors, request.lock.digest, jobs=request.jobs, progress=report)
    digest_of_tensor = {id(tensor): digest for tensor, digest in zip(tensors, digests, strict=True)}
    for pair in pairs:
        if pair.locked is None or id(pair.tensor) not in digest_of_tensor:
            yield pair
            continue
        digest = digest_of_tensor[id(pair.tensor)]
        differ = pair.differ if digest == pair.locked.digest else (*pair.differ, "values")
        yield replace(pair, differ=differ, digest=digest)


def _has_values(pair: LockMatch, state: ModelState) -> bool:
    """Return True if values can be compared: the lock and the checkpoint have values, with equal dtype and shape."""
    if pair.locked is None or pair.tensor is None or pair.locked.digest is None or state.traits.is_class:
        return False
    return "dtype" not in pair.differ and "shape" not in pair.differ
