"""Write few globs for `-i` that select exactly the marked tensors."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

import msgspec

from statecli.core.errors import FilteredOut
from statecli.core.escaping import escape
from statecli.core.model_state import ModelState, TensorInfo, TensorKey
from statecli.core.selection import Selection, glob_names, select
from statecli.report import fold

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
        [glob for _, glob in covering_globs],
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


def _cover(names: Sequence[str], marked: Set[int]) -> list[tuple[int, str]]:
    """Return globs that cover the marked names, each with the position of its first name.

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
    return sorted(globs)


def _join_numbers(globs: Sequence[tuple[int, str]]) -> list[str]:
    """Join globs that differ only in a number with braces: `layers.{3..5}.*`. Return all globs."""
    max_numbers = max(len(fold.split_numbers(glob)[1]) for _, glob in globs)
    joined_globs = list(globs)
    for axis in range(max_numbers - 1, -1, -1):
        groups: dict[tuple[str, ...], list[tuple[int, int, str]]] = {}
        for position, glob in joined_globs:
            numbers = [str(number) for number in fold.split_numbers(glob)[1]]
            if axis < len(numbers):
                template = fold.insert_numbers(glob, ["#" if n == axis else text for n, text in enumerate(numbers)])
                groups.setdefault((template,), []).append((position, int(numbers[axis]), glob))
            else:
                groups.setdefault((glob, ""), []).append((position, 0, glob))
        joined_globs = sorted(_join_group(group, axis) for group in groups.values())
    return [glob for _, glob in joined_globs]


def _join_group(group: Sequence[tuple[int, int, str]], axis: int) -> tuple[int, str]:
    position, _, glob = min(group)
    if len(group) == 1:
        return position, glob
    texts = [str(number) for number in fold.split_numbers(glob)[1]]
    runs = fold.list_runs(sorted(number for _, number, _ in group))
    texts[axis] = f"{{{','.join(runs)}}}"
    return position, fold.insert_numbers(glob, texts)


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
