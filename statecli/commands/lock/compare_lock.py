"""What became of a checkpoint since it was locked: each tensor beside its line of the lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from statecli.commands.diff.pairing import paired_sections
from statecli.commands.lock.lock_file import Lock, LockedTarget, LockedTensor
from statecli.commands.lock.run import KNOWN, is_beside, is_bookkeeping, view_of
from statecli.core.errors import NothingMatched
from statecli.core.kinds import MODEL_KINDS
from statecli.core.selection import Selection, glob_names, matches_any
from statecli.core.state import Kind, ModelState, TensorInfo
from statecli.storage import files
from statecli.targets.location import named
from statecli.values.require_numpy import require_numpy

if TYPE_CHECKING:
    from statecli.core.progress import Progress


#: What stands for the fields of a tensor that is of no model, where the lock has nothing of its section.
BESIDE = ("beside",)
#: What to do about a target that nobody locked.
NEW = "take it away if it is not meant to be here, else lock again"
#: What to do about a copy on the other side: on disk of what was locked behind URLs, or the other way round.
ELSEWHERE = (
    "URLs are compared whole, files by their way from the lock; to hold a copy that lies elsewhere, lock each target "
    "alone, or lock them on disk and keep the lock file beside them"
)


class Held(msgspec.Struct, frozen=True, gc=False):
    """A line of the lock and the tensor that it is held to; None where that side has none.

    `differ` are the fields of the line that the tensor contradicts, or `BESIDE`; `digest` is the tensor's, None where
    none was made: dtype or shape differ already, or one side has no values.
    """

    locked: LockedTensor | None
    tensor: TensorInfo | None
    differ: tuple[str, ...] = ()
    digest: str | None = None


class Request(msgspec.Struct, frozen=True):
    """What a target is held to. With `frozen_only` to what must not train: `frozen` are globs that say so too.

    `folder` is where the lock lies, from which its names are meant. `by_name`: it is a file beside a model, which a
    lock of one target alone does not mean.
    """

    lock: Lock
    frozen_only: bool = False
    frozen: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    jobs: int = 0
    folder: str = "."
    by_name: bool = False


def lines(text: str, request: Request) -> LockedTarget:
    """What the target that was typed so is held to. Raises `NothingMatched` where that is nothing."""
    target = request.lock.of(text, request.folder, by_name=request.by_name)
    if target is None:
        advice = ELSEWHERE if _is_elsewhere(text, request.lock) else NEW
        raise NothingMatched(f"{text}: is not in the lock, which {_has(text, request)}: {advice}")
    if not request.frozen_only:
        return target
    kept = tuple(line for line in target.tensors if _is_frozen(line, request.frozen))
    if not kept and not request.by_name:
        message = "--frozen-only: no tensor of the lock is known to be frozen, and policy.frozen names none of them"
        raise NothingMatched(f"{text}: {message}")
    return replace(target, tensors=kept)


def _is_elsewhere(text: str, lock: Lock) -> bool:
    """Whether nothing of the lock lies where the target does: on disk, or behind URLs."""
    return not lock.has_no_names and all(
        files.is_remote(str(one.target)) != files.is_remote(text) for one in lock.targets
    )


def _has(text: str, request: Request) -> str:
    """What the lock has in the place of a target."""
    if request.lock.has_no_names:
        return "is of one target alone"
    names = [str(one.target) for one in request.lock.targets]
    near = (get_close_matches(named(text, request.folder), names, n=1) or names)[0]
    return f"has {near} and {len(names) - 1} more" if len(names) > 1 else f"has {near} alone"


def _is_frozen(line: LockedTensor, globs: Sequence[str]) -> bool:
    """A buffer never requires grad, which says nothing of it: only a glob can."""
    parameter = line.kind in (None, Kind.PARAMETER) and line.requires_grad is False
    return parameter or matches_any((line.fqn, f"{line.section}.{line.fqn}"), globs)


def held(
    state: ModelState, target: LockedTarget, request: Request, progress: Progress | None = None
) -> tuple[Held, ...]:
    """Each line of `target` that filters leave, in order, then what the state has more. `state` is not filtered yet.

    Values are read where dtype and shape agree. Raises as `values.digest.digests` does, and `NothingMatched` where the
    filters leave nothing.
    """
    pairs = [pair for pair in _pairs(state, target, request) if _is_wanted(pair, state, request)]
    if not pairs and not request.by_name:
        raise NothingMatched(f"{state.target}: the filters leave nothing that is locked")
    return tuple(_with_values(pairs, state, request, progress))


def _pairs(state: ModelState, target: LockedTarget, request: Request) -> Iterator[Held]:
    sections, _ = paired_sections(_as_state(target), state)
    rows: dict[tuple[str, str], TensorInfo] = {}
    twins = [one for one in state.tensors if rows.setdefault((one.section, one.fqn), one) is not one]
    ties = _by_tie(target, sections)
    taken = set()
    for line in target.tensors:
        section = sections.get(line.section, line.section)
        tensor = rows.get((section, line.fqn))
        if tensor is not None:
            taken.add((section, line.fqn))
            yield Held(line, tensor, tuple(_differ(line, tensor)))
        elif line.persistent and not any(_drops_ties(rows.get(key)) for key in ties.get((section, line.tied), ())):
            yield Held(line, None)
    if request.frozen_only:
        return
    known = {(key[0], view_of(rows[key])) for key in taken}
    locked = {sections.get(line.section, line.section) for line in target.tensors}
    for tensor in (*(row for key, row in rows.items() if key not in taken), *twins):
        if is_beside(tensor) or is_bookkeeping(tensor):
            continue
        if tensor.kind not in MODEL_KINDS and tensor.section not in locked:
            yield Held(None, tensor, BESIDE)
        elif not (tensor.tied_to and (tensor.section, view_of(tensor)) in known):
            yield Held(None, tensor)


def _as_state(target: LockedTarget) -> ModelState:
    """The lines as a state, of which sections are paired as those of two checkpoints are."""
    rows = tuple(
        TensorInfo(
            line.fqn, line.dtype, line.shape, prod(line.shape or ()), 0, line.section, line.kind or Kind.PARAMETER
        )
        for line in target.tensors
    )
    return ModelState("", "lock", rows, tuple(dict.fromkeys(row.section for row in rows)))


def _by_tie(target: LockedTarget, sections: dict[str, str]) -> dict[tuple[str, str | None], list[tuple[str, str]]]:
    """The names that are one tensor, by the first of them; sections are called as in the checkpoint."""
    found: dict[tuple[str, str | None], list[tuple[str, str]]] = {}
    for line in target.tensors:
        section = sections.get(line.section, line.section)
        if line.tied is not None:
            found.setdefault((section, line.tied), []).append((section, line.fqn))
    return found


def _drops_ties(row: TensorInfo | None) -> bool:
    """Whether it is there, and of a format that has no ties: safetensors, whose writers keep one name of several."""
    return row is not None and row.storage is None and row.device is None


def _differ(line: LockedTensor, tensor: TensorInfo) -> Iterator[str]:
    """What the line contradicts of all but the values. What either side does not know contradicts nothing."""
    if line.dtype != tensor.dtype:
        yield "dtype"
    if line.shape != tensor.shape:
        yield "shape"
    if tensor.evidence in KNOWN and line.kind not in (None, tensor.kind):
        yield "kind"
    if None not in (line.requires_grad, tensor.requires_grad) and line.requires_grad != tensor.requires_grad:
        yield "requires_grad"


def _is_wanted(pair: Held, state: ModelState, request: Request) -> bool:
    row = pair.tensor or pair.locked
    assert row is not None  # noqa: S101 - one of the two is always there
    kinds = (None, *request.kind) if pair.tensor is None else request.kind
    names = glob_names(row.fqn, row.section, by_section=len(state.sections) > 1)
    return (not request.kind or row.kind in kinds) and Selection(request.include, request.exclude).selects_name(names)


def _with_values(
    pairs: Sequence[Held], state: ModelState, request: Request, progress: Progress | None
) -> Iterator[Held]:
    compared = [pair for pair in pairs if _has_values(pair, state)]
    tensors = [pair.tensor for pair in compared if pair.tensor is not None]
    if not tensors:
        yield from pairs
        return
    with require_numpy():
        from statecli.values.digest import digests

    tell = progress(sum(tensor.nbytes for tensor in tensors)) if progress else None
    made = digests(tensors, request.lock.digest, jobs=request.jobs, progress=tell)
    found = {id(tensor): digest for tensor, digest in zip(tensors, made, strict=True)}
    for pair in pairs:
        yield _compared(pair, found[id(pair.tensor)]) if id(pair.tensor) in found else pair


def _has_values(pair: Held, state: ModelState) -> bool:
    """Whether both sides can have values to compare; those of a class are not those of a checkpoint."""
    if pair.locked is None or pair.tensor is None or pair.locked.digest is None or state.traits.is_class:
        return False
    return "dtype" not in pair.differ and "shape" not in pair.differ


def _compared(pair: Held, digest: str | None) -> Held:
    assert pair.locked is not None  # noqa: S101 - it has values
    differ = pair.differ if digest == pair.locked.digest else (*pair.differ, "values")
    return replace(pair, differ=differ, digest=digest)
