"""Write few globs for `-i` that select exactly the marked tensors."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import msgspec

from statecli.core.errors import FilteredOut
from statecli.core.escaping import escape
from statecli.core.model_state import ModelState, TensorInfo, TensorKey
from statecli.core.selection import Selection, glob_names, select
from statecli.report import Line, fold

#: Rows of quantized weights by section and name of their tensors, as `select` takes them.
RowsByPart = Mapping[TensorKey, TensorInfo]


_SPECIAL = frozenset("*?[{")


class GlobText(msgspec.Struct, frozen=True):
    """Globs of marked tensors.

    Attributes:
        globs: The globs; () if no globs select exactly the marked tensors.
        extra: Number of tensors without a mark that the shortest globs would select too.
    """

    globs: tuple[str, ...]
    extra: int = 0

    @property
    def text(self) -> str:
        """The globs as options for a shell."""
        return " ".join(f"-i {shlex.quote(glob)}" for glob in self.globs)


def write_globs(state: ModelState, marked: Set[int], weights: RowsByPart) -> GlobText:
    """Return globs for `-i` that select exactly the tensors of `state` at the marked positions."""
    if not marked:
        return GlobText(())
    if len(marked) == len(state.tensors):
        return GlobText(("*",))
    names = _list_names(state)
    covering_globs = _cover(names, marked)
    attempts = (
        _join_numbers(covering_globs),
        covering_globs,
        [_escape_glob(names[position]) for position in sorted(marked)],
    )
    extra = 0
    for globs in attempts:
        selected_positions = _select(state, globs, weights)
        if selected_positions == marked:
            return GlobText(tuple(globs))
        extra = len(selected_positions - marked)
    return GlobText((), extra)


def _list_names(state: ModelState) -> list[str]:
    """Return the name of each tensor as globs match it. If there are several sections, the section comes first."""
    by_section = len(state.sections) > 1
    return [glob_names(tensor.fqn, tensor.section, by_section=by_section)[-1] for tensor in state.tensors]


def _select(state: ModelState, globs: Sequence[str], weights: RowsByPart) -> set[int]:
    by_identity = {id(tensor): position for position, tensor in enumerate(state.tensors)}
    try:
        selected_tensors = select(state, Selection(include=tuple(globs)), state.target, weights).tensors
    except FilteredOut:
        return set()
    return {by_identity[id(tensor)] for tensor in selected_tensors}


def _escape_glob(name: str) -> str:
    """Return a glob that matches the name. `?` replaces control characters, because a terminal would obey them."""
    if name.isascii() and name.isprintable() and not _SPECIAL & set(name):
        return name
    return "".join(
        f"[{character}]" if character in _SPECIAL else character if escape(character) == character else "?"
        for character in name
    )


def _cover(names: Sequence[str], marked: Set[int]) -> list[str]:
    """Return globs that cover the marked names, in the order of their first names.

    Each completely marked module or set of repeated layers gets one glob. Globs for the most names are tried first.
    """
    total = Counter(glob for name in names for glob in _list_wider_globs(name))
    positions_by_glob: dict[str, list[int]] = {}
    for position in sorted(marked):
        for glob in _list_wider_globs(names[position]):
            positions_by_glob.setdefault(glob, []).append(position)
    complete_globs = {glob: positions for glob, positions in positions_by_glob.items() if len(positions) == total[glob]}
    largest_first = sorted(complete_globs.items(), key=lambda item: (-len(item[1]), len(item[0]), item[1][0]))
    globs: list[tuple[int, str]] = []
    missing = set(marked)
    for glob, positions in largest_first:
        if len(missing & set(positions)) > 1:
            globs.append((positions[0], glob))
            missing.difference_update(positions)
    globs.extend((position, _escape_glob(names[position])) for position in missing)
    return [glob for _, glob in sorted(globs)]


def _join_numbers(globs: Sequence[str]) -> list[str]:
    """Join globs that differ only in numbers with braces: `layers.{3..5}.*`. Return all globs."""
    joined_globs = []
    for _, positions in fold.fold_rows([Line((glob,)) for glob in globs]):
        numbers = zip(*(fold.split_numbers(globs[position])[1] for position in positions), strict=True)
        joined_globs.append(fold.insert_numbers(globs[positions[0]], map(_format_numbers, numbers)))
    return joined_globs


def _format_numbers(numbers: Iterable[int]) -> str:
    runs = fold.list_runs(sorted(set(numbers)))
    return runs[0] if len(runs) == 1 and runs[0].isdecimal() else f"{{{','.join(runs)}}}"


def _list_wider_globs(name: str) -> Iterator[str]:
    """Yield wider globs for a name: `*`, the name with `*` for each number, and `h.0.*` for each module `h.0`."""
    yield "*"
    escaped_name = _escape_glob(name)
    template, numbers = fold.split_numbers(escaped_name)
    if numbers and template != escaped_name:
        yield fold.insert_numbers(escaped_name, ["*"] * len(numbers))
    end = name.find(".")
    while end != -1:
        yield f"{_escape_glob(name[:end])}.*"
        end = name.find(".", end + 1)
