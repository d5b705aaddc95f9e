"""Decide which pairs of names are certain. A pair is undecided if a third name with the same shape fits equally well.

Shapes alone cannot distinguish query and key. A pair is certain if no other pairing of the names has the same shape and
shares as many components or words. Numbers of modules keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import pairwise, product

import msgspec

from statecli.commands.explain.align import Shape
from statecli.commands.explain.name_words import split_meaningful_words
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use

#: Largest number of comparisons between names without a partner and pairs. Beyond it, the pairs count as undecided.
MAX_COMPARISONS = 20_000
#: Stands for the components of two names that share no words.
_DIFFERING_PART = "*"
#: A number at the end of a component: `0`, `layer1`.
_NUMBER = compile_on_use(r"(?<!\d)\d{1,9}(?=\.|$)")


class UndecidedPair(msgspec.Struct, frozen=True):
    """A pair of names, and other names of the class or of the checkpoint that match equally well."""

    name: str
    registered: str
    rivals: tuple[str, ...]


class Matching(msgspec.Struct, frozen=True):
    """Result of the matching: pairs (name in the checkpoint -> name in the class), and names without a partner.

    `transposed`: the pairs whose matrix has rows and columns exchanged. `shapes`: the shapes in the class.
    `own_shapes`: the shapes in the checkpoint; for transposed pairs, those in the class. `mismatched`: the pairs of
    another shape, which are not in `pairs`. `ties`: names of the class that share the storage of another name, which
    has a partner.
    """

    pairs: dict[str, str]
    transposed: dict[str, str]
    mismatched: dict[str, str]
    unexpected: tuple[str, ...]
    missing: tuple[str, ...]
    ties: tuple[tuple[str, str], ...]
    own_shapes: dict[str, Shape]
    shapes: dict[str, Shape]


def list_undecided_pairs(names: Matching) -> list[UndecidedPair]:
    """Return the pairs that are not certain, because other names of the same shape match equally well."""
    groups: dict[tuple[tuple[str, ...], Shape], list[str]] = {}
    for name, registered in names.pairs.items():
        common_parts = _find_common(name, registered)
        if name != registered:
            groups.setdefault((common_parts, names.shapes[registered]), []).append(name)
    undecided = [pair for members in groups.values() for pair in _compare_members(members, names.pairs)]
    undecided += _compare_numbers(names)
    undecided += _compare_leftovers(names)
    return list({pair.name: pair for pair in reversed(undecided)}.values())[::-1]


def _compare_members(members: Sequence[str], pairs: Mapping[str, str]) -> Iterator[UndecidedPair]:
    """Yield all pairs of a group as undecided, unless the numbers in the names have the same order on both sides."""
    if len(members) < 2 or _keep_order([(name, pairs[name]) for name in members]):
        return
    yield from _list_rivals(members, pairs)


def _list_rivals(members: Sequence[str], pairs: Mapping[str, str]) -> Iterator[UndecidedPair]:
    for name in members:
        yield UndecidedPair(name, pairs[name], tuple(pairs[other] for other in members if other != name))


def _keep_order(pairs: Sequence[tuple[str, str]]) -> bool:
    """Return True if the names on each side differ in a single number, and both sides order these numbers equally."""
    numbers = []
    for names in zip(*pairs, strict=True):
        components = [name.split(".") for name in names]
        if len({len(parts) for parts in components}) > 1:
            return False
        differing = [place for place in zip(*components, strict=True) if len(set(place)) > 1]
        if len(differing) != 1 or not all(part.isdigit() for part in differing[0]):
            return False
        numbers.append([int(part) for part in differing[0]])
    stored, registered = numbers
    order = sorted(range(len(stored)), key=stored.__getitem__)
    return order == sorted(range(len(stored)), key=registered.__getitem__)


def _compare_numbers(names: Matching) -> Iterator[UndecidedPair]:
    """Yield the pairs of numbered modules whose order changes, as when modules 1 and 2 become modules 1 and 0."""
    families: dict[tuple[str, str, str, str, Shape], list[tuple[int, int, str]]] = {}
    for name, registered in names.pairs.items():
        shape = names.shapes[registered]
        for old, new in product(_NUMBER.finditer(name), _NUMBER.finditer(registered)):
            key = name[: old.start()], name[old.end() :], registered[: new.start()], registered[new.end() :], shape
            families.setdefault(key, []).append((int(old[0]), int(new[0]), name))
    for members in families.values():
        members.sort()
        if any(first[1] > second[1] for first, second in pairwise(members)):
            yield from _list_rivals([name for *_, name in members], names.pairs)


def _compare_leftovers(names: Matching) -> Iterator[UndecidedPair]:
    """Yield each pair of names for which an unpaired name of the same shape would match equally well."""
    unexpected = group_by(names.unexpected, names.own_shapes.__getitem__)
    missing = group_by(names.missing, names.shapes.__getitem__)
    budget = MAX_COMPARISONS
    for name, registered in names.pairs.items():
        shape = names.shapes[registered]
        unexpected_names, missing_names = unexpected.get(shape, ()), missing.get(shape, ())
        if name == registered or not (unexpected_names or missing_names):
            continue
        budget -= len(unexpected_names) + len(missing_names)
        score = _count_common(name, registered)
        rivals = [other for other in unexpected_names if budget < 0 or _count_common(other, registered) >= score]
        rivals += [other for other in missing_names if budget < 0 or _count_common(name, other) >= score]
        if rivals:
            yield UndecidedPair(name, registered, tuple(rivals))


# --- what two names have in common -----------------------------------------------------------------------------------


def _count_common(name: str, registered: str) -> int:
    return sum(component != _DIFFERING_PART for component in _find_common(name, registered))


@lru_cache(maxsize=1 << 16)
def _find_common(name: str, registered: str) -> tuple[str, ...]:
    """Return the components that both names share, with `*` for differing components: `("encoder", "*", "weight")`.

    Components with other spellings of the same words, such as `q_proj` and `query`, are shared too.
    """
    stored_parts, registered_parts = name.split("."), registered.split(".")
    common_parts: list[str] = []
    for tag, start, stop, new_start, new_stop in SequenceMatcher(
        None, stored_parts, registered_parts, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            common_parts += stored_parts[start:stop]
            continue
        words = split_meaningful_words(".".join(registered_parts[new_start:new_stop]))
        has_same_words = words and words == split_meaningful_words(".".join(stored_parts[start:stop]))
        common_parts.append("+".join(sorted(words)) if has_same_words else _DIFFERING_PART)
    return tuple(common_parts)
