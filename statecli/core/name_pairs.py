"""Pair the names of two checkpoints or models: equal names, and names that differ only by a wrapper's prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Sequence
from functools import lru_cache

from statecli.core.parameter_or_buffer import WRAPPER_ATTRIBUTES, WRAPPER_PREFIXES

#: Largest number of parts of a prefix to look for, because each costs a pass over all names, perhaps a million.
MAX_PREFIX_PARTS = 32
#: Positions of two paired names, before and after; the prefixes stripped from them, or None.
Link = tuple[int, int, tuple[str, str] | None]


def match_names(before: Sequence[str], after: Sequence[str]) -> list[Link]:
    """Return the pairs of names: equal names, then names that are equal without the prefixes of wrappers.

    A prefix is stripped only if the rest is unique among all names of each side. `model.` is stripped last, because the
    name is also common inside models. If no names match, a prefix of all names of one side is tried (`net.` of a
    LightningModule).
    """
    links: list[Link] = match_equal_names(before, after)
    if len(links) in (len(before), len(after)):
        return links
    for prefixes in (WRAPPER_PREFIXES[:-1], WRAPPER_PREFIXES):
        unlinked_before = set(range(len(before))).difference(old for old, _, _ in links)
        unlinked_after = set(range(len(after))).difference(new for _, new, _ in links)
        if not unlinked_before or not unlinked_after:
            return links
        links += _match_cores(prefixes, (before, after), (unlinked_before, unlinked_after))
    return links or _match_common_prefix(before, after)


def match_equal_names(before: Sequence[str], after: Sequence[str]) -> list[Link]:
    """Return the pairs of equal names."""
    if before == after:
        return [(n, n, None) for n in range(len(before))]
    at = {key: n for n, key in enumerate(_list_unique_keys(before))}
    return [(at[key], n, None) for n, key in enumerate(_list_unique_keys(after)) if key in at]


def _list_unique_keys(names: Sequence[str]) -> Sequence[Hashable]:
    """Return a unique key for each name. A repeated name gets a counter: two paths of a pickle may look alike."""
    if len(set(names)) == len(names):
        return names
    counts: Counter[str] = Counter()
    keys: list[Hashable] = []
    for name in names:
        keys.append((name, counts[name]) if name in counts else name)
        counts[name] += 1
    return keys


def _match_cores(
    prefixes: tuple[str, ...], names: tuple[Sequence[str], Sequence[str]], open_: tuple[set[int], set[int]]
) -> list[Link]:
    old_cores, new_cores = (_index_unique([_strip_prefixes(name, prefixes) for name in side]) for side in names)
    links: list[Link] = []
    for core, n in old_cores.items():
        partner = new_cores.get(core)
        if n is not None and partner is not None and n in open_[0] and partner in open_[1]:
            links.append((n, partner, _find_stripped_parts(names[0][n], names[1][partner], core)))
    return links


def _index_unique(cores: list[str]) -> dict[str, int | None]:
    """Map each core (name without wrapper prefixes) to its position, or to None if it occurs several times."""
    at: dict[str, int | None] = {}
    for n, core in enumerate(cores):
        at[core] = None if core in at else n
    return at


def _match_common_prefix(before: Sequence[str], after: Sequence[str]) -> list[Link]:
    for is_swapped, (names, other_names) in enumerate(((before, after), (after, before))):
        other_names_in_order = dict.fromkeys(other_names)
        prefix = _find_common_prefix(list(names), other_names_in_order)
        if prefix:
            links = match_equal_names([name[len(prefix) :] for name in names], other_names)
            return [(b, a, ("", prefix)) if is_swapped else (a, b, (prefix, "")) for a, b, _ in links]
    return []


def _strip_prefixes(name: str, prefixes: tuple[str, ...]) -> str:
    if "_mod" in name:
        *path, last = name.split(".")
        name = ".".join([part for part in path if part not in WRAPPER_ATTRIBUTES] + [last])
    while name.startswith(prefixes):
        name = name.partition(".")[2]
    return name


def _find_stripped_parts(before: str, after: str, core: str) -> tuple[str, str]:
    """Return the wrapper parts that only the first name has, and the parts that only the second name has."""
    if before.endswith(core) and after.endswith(core):
        return _compare_parts(before[: len(before) - len(core)], after[: len(after) - len(core)])
    return _compare_parts(before, after)


@lru_cache(maxsize=256)
def _compare_parts(before: str, after: str) -> tuple[str, str]:
    old_parts, new_parts = Counter(before.split(".")), Counter(after.split("."))
    return _join_parts((old_parts - new_parts).elements()), _join_parts((new_parts - old_parts).elements())


def _join_parts(parts: Iterable[str]) -> str:
    return "".join(f"{part}." for part in parts if part)


def _find_common_prefix(names: Sequence[str], registered: Container[str]) -> str:
    """Return the shortest common prefix after which the rest of a name is registered, or "" if no prefix fits."""
    prefix = ""
    for _ in range(MAX_PREFIX_PARTS):
        if not names or any(name[len(prefix) :] in registered for name in names):
            return prefix
        first, dot, _ = names[0][len(prefix) :].partition(".")
        if not dot or not all(name.startswith(prefix + first + dot) for name in names):
            return ""
        prefix += first + dot
    return ""
