"""Which tensor before is which tensor after: sections, `--map`, exact names, prefixes of wrappers, dropped ties."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from statecli.core.errors import UsageError
from statecli.core.kinds import MODEL_KINDS, WRAPPER_ATTRIBUTES, WRAPPER_PREFIXES, select_loaded_sections
from statecli.core.model_kinds import find_common_prefix
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import Kind, ModelState, Oddity, TensorInfo


class Way(str, Enum):
    """By what two tensors were found to be the same one."""

    NAME = "name"
    PREFIX = "prefix"
    TIE = "tie"
    BYTES = "bytes"


class Match(msgspec.Struct, frozen=True, gc=False):
    """A tensor before and what it is after; None where that side has none.

    `stripped` is what was looked through at either end, for `Way.PREFIX`.
    """

    before: TensorInfo | None
    after: TensorInfo | None
    way: Way = Way.NAME
    stripped: tuple[str, str] | None = None

    @property
    def shown(self) -> TensorInfo:
        """The side whose name the pair goes by."""
        found = self.after or self.before
        assert found is not None  # noqa: S101 - one of the two is always there
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sides that are there."""
        return tuple(side.fqn for side in (self.before, self.after) if side is not None)


class Matched(msgspec.Struct, frozen=True):
    """Every tensor of both sides once, and what must be said of how they were matched.

    `sections` are those compared with each other, by their name before.
    """

    matches: list[Match]
    sections: dict[str, str]
    notes: tuple[Oddity, ...] = ()


def matched(before: ModelState, after: ModelState, rules: Sequence[str], *, prefixes: bool = True) -> Matched:
    """Pair the tensors of two states, by nothing but their names.

    `rules` are `--map`'s; `prefixes`: those of wrappers are looked through. Order: that of after, with the removed ones
    where they stood before. Raises UsageError for a rule that is no regular expression, that matches nothing, or that
    makes two names equal.
    """
    names = renamed(before, rules)
    sections, notes = paired_sections(before, after)
    one, two = _rows(before), _rows(after)
    pairs: list[Match] = []
    for section, other in sections.items():
        own, others = one.pop(section, []), two.pop(other, [])
        sides = [before.tensors[n] for n in own], [names[n] for n in own], [after.tensors[n] for n in others]
        pairs += _section(*sides, prefixes=prefixes)
    pairs += [Match(before.tensors[n], None) for rows in one.values() for n in rows]
    pairs += [Match(None, after.tensors[n]) for rows in two.values() for n in rows]
    pairs, ties = _restored(pairs, before, after)
    notes = [*notes, *_mapped_note(before, names), *_prefix_notes(pairs, before, after), *ties]
    return Matched(in_order(pairs, before, after), sections, tuple(notes))


def _rows(state: ModelState) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for n, tensor in enumerate(state.tensors):
        rows.setdefault(tensor.section, []).append(n)
    return rows


def in_order(pairs: Iterable[Match], before: ModelState, after: ModelState) -> list[Match]:
    """The order of after, and what was removed behind what it stood behind.

    Where after is ordered as text (layer 10 before layer 2) or, as safetensors is, by dtype first, that says nothing of
    the module: the numbers in the names do.
    """
    pairs = list(pairs)
    if len(pairs) == len(after.tensors) and all(map(_is_of, pairs, after.tensors)):
        return pairs if _has_own_order(after) else _by_number(pairs)
    position = {id(tensor): n for n, tensor in enumerate(after.tensors)}
    of_before = {id(match.before): match for match in pairs}
    of_after = {id(match.after): match for match in pairs}
    behind: dict[int, list[Match]] = {}
    last = -1
    for tensor in before.tensors:
        match = of_before.get(id(tensor))
        if match is None:
            continue
        if id(match.after) in position:
            last = position[id(match.after)]
        else:
            behind.setdefault(last, []).append(match)
    ordered = behind.get(-1, [])
    for n, tensor in enumerate(after.tensors):
        match = of_after.get(id(tensor))
        if match is not None:
            ordered.append(match)
        ordered.extend(behind.get(n, ()))
    return ordered if _has_own_order(after) else _by_number(ordered)


def _is_of(match: Match, tensor: TensorInfo) -> bool:
    return match.after is tensor


def _has_own_order(state: ModelState) -> bool:
    names = [tensor.fqn for tensor in state.tensors]
    return state.traits.keeps_order and any(map(operator.gt, names, names[1:]))


def _by_number(matches: list[Match]) -> list[Match]:
    """By section in order of first appearance, then by name, with the numbers in it as numbers."""
    first = {section: n for n, section in enumerate(dict.fromkeys(match.shown.section for match in matches))}
    ordered = sorted(matches, key=lambda match: _natural(match.shown.fqn))
    return ordered if len(first) == 1 else sorted(ordered, key=lambda match: first[match.shown.section])


_NUMBER = re.compile(r"0*([0-9]+)")


def _natural(name: str) -> str:
    """A name that as text stands where its numbers put it: of two numbers the one with more digits is the larger."""
    return _NUMBER.sub(lambda match: f"{len(match[1]):c}{match[1]}", name)


# --- sections --------------------------------------------------------------------------------------------------------


def paired_sections(before: ModelState, after: ModelState) -> tuple[dict[str, str], list[Oddity]]:
    """Sections of the same name; else the only ones left on either side that hold a model, or an optimizer.

    Where no model has a partner by name, it is the one that a load would take. Where more are left, which belongs to
    which cannot be told, and a note says what to write.
    """
    pairs = {section: section for section in before.sections if section in after.sections}
    notes: list[Oddity] = []
    if len(before.sections) == len(after.sections) == 1 and not pairs:
        kinds: tuple[tuple[Kind, ...], ...] = (tuple(Kind),)
    else:
        kinds = (MODEL_KINDS, (Kind.OPTIMIZER,))
    for kind in kinds:
        left = [s for s in _holding(before, kind) if s not in pairs]
        right = [s for s in _holding(after, kind) if s not in pairs.values()]
        if kind is MODEL_KINDS and not set(_holding(before, kind)).intersection(pairs):
            left, right = select_loaded_sections(left), select_loaded_sections(right)
        if len(left) == len(right) == 1:
            pairs[left[0]] = right[0]
            notes.append(
                Oddity(OddityKind.SECTIONS_PAIRED.value, f"section {left[0]!r} is compared with section {right[0]!r}")
            )
        elif left and right:
            notes.append(Oddity(OddityKind.SECTIONS_APART.value, _apart(before, left, after, right)))
    return pairs, notes


def _apart(before: ModelState, left: list[str], after: ModelState, right: list[str]) -> str:
    which = f"which section of {before.target} ({', '.join(left)}) is which of {after.target} ({', '.join(right)})"
    return f"cannot tell {which}: name one of each, as {before.target.partition('#')[0]}#{left[0]}"


def _holding(state: ModelState, kinds: Sequence[Kind]) -> list[str]:
    """The sections with a tensor of one of these kinds."""
    return list(dict.fromkeys(tensor.section for tensor in state.tensors if tensor.kind in kinds))


# --- --map -----------------------------------------------------------------------------------------------------------


def renamed(state: ModelState, rules: Sequence[str]) -> list[str]:
    """The names of the state's tensors after every rule in turn. Raises UsageError as `matched` says."""
    names = [tensor.fqn for tensor in state.tensors]
    for rule in rules:
        names = _applied(rule, names, state.target)
    if rules:
        _refuse_clash(state, names)
    return names


def _applied(rule: str, names: list[str], target: str) -> list[str]:
    # A replacement rarely holds a "=", a regular expression often does: (?=...).
    pattern, equals, replacement = rule.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"--map {rule!r}: write REGEX=REPLACEMENT, as in --map '^model[.]='")
    try:
        regex = re.compile(pattern)
        mapped = [regex.sub(replacement, name) for name in names]
        found = any(map(regex.search, names))
    except (re.error, IndexError, RecursionError, OverflowError) as error:
        raise UsageError(f"--map {rule!r}: is no regular expression and replacement: {error}") from error
    if not found:
        raise UsageError(f"--map {rule!r}: matches none of the {len(names)} names of {target}")
    return mapped


def _refuse_clash(state: ModelState, names: list[str]) -> None:
    first: dict[tuple[str, str], TensorInfo] = {}
    for tensor, name in zip(state.tensors, names, strict=True):
        other = first.setdefault((tensor.section, name), tensor)
        if other is not tensor and other.fqn != tensor.fqn:
            raise UsageError(f"--map makes {name!r} of both {other.fqn} and {tensor.fqn} of {state.target}")


def _mapped_note(state: ModelState, names: list[str]) -> list[Oddity]:
    count = sum(name != tensor.fqn for tensor, name in zip(state.tensors, names, strict=True))
    return [Oddity("mapped", f"--map renames {counted(count)} of {state.target}")] if count else []


def counted(count: int) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} tensor" if count == 1 else f"{count} tensors"


# --- names -----------------------------------------------------------------------------------------------------------


def _section(before: list[TensorInfo], names: list[str], after: list[TensorInfo], *, prefixes: bool) -> list[Match]:
    links = (by_name if prefixes else _equal)(names, [tensor.fqn for tensor in after])
    pairs = []
    for one, two, stripped in links:
        pairs.append(Match(before[one], after[two], Way.PREFIX if stripped else Way.NAME, stripped))
    linked = {one for one, _, _ in links}, {two for _, two, _ in links}
    pairs += [Match(tensor, None) for n, tensor in enumerate(before) if n not in linked[0]]
    pairs += [Match(None, tensor) for n, tensor in enumerate(after) if n not in linked[1]]
    return pairs


#: Positions of a name before and of its name after, and what was looked through at either end.
Link = tuple[int, int, tuple[str, str] | None]


def by_name(before: Sequence[str], after: Sequence[str]) -> list[Link]:
    """Which names are the same: equal ones, then those that are equal without wrappers' prefixes.

    A prefix is looked through only where what is left is unique on both sides, all names counted. `model.` comes
    last: it is also a common name of one's own. Where no name is found so, a prefix of all names of one side is
    tried (`net.` of a LightningModule).
    """
    links: list[Link] = _equal(before, after)
    for strip in (_without_outer, _without_all):
        left, right = _open(before, after, links)
        if not left or not right:
            return links
        links += _through(strip, (before, after), (left, right))
    return links or _common(before, after)


def _open(before: Sequence[str], after: Sequence[str], links: list[Link]) -> tuple[set[int], set[int]]:
    done = {one for one, _, _ in links}, {two for _, two, _ in links}
    return set(range(len(before))) - done[0], set(range(len(after))) - done[1]


def _equal(before: Sequence[str], after: Sequence[str]) -> list[Link]:
    at = {key: n for n, key in enumerate(_keys(before))}
    return [(at[key], n, None) for n, key in enumerate(_keys(after)) if key in at]


def _keys(names: Sequence[str]) -> Sequence[Hashable]:
    """The names; one that stands there again (two paths of a pickle may be written alike) with its count."""
    if len(set(names)) == len(names):
        return names
    seen: Counter[str] = Counter()
    keys: list[Hashable] = []
    for name in names:
        keys.append((name, seen[name]) if name in seen else name)
        seen[name] += 1
    return keys


def _through(
    strip: Callable[[str], str], names: tuple[Sequence[str], Sequence[str]], open_: tuple[set[int], set[int]]
) -> list[Link]:
    one, two = (_unique(list(map(strip, side))) for side in names)
    found: list[Link] = []
    for core, n in one.items():
        other = two.get(core)
        if n is not None and other is not None and n in open_[0] and other in open_[1]:
            found.append((n, other, _stripped(names[0][n], names[1][other], core)))
    return found


def _unique(cores: list[str]) -> dict[str, int | None]:
    """Where each core stands; None where it stands twice."""
    at: dict[str, int | None] = {}
    for n, core in enumerate(cores):
        at[core] = None if core in at else n
    return at


def _common(before: Sequence[str], after: Sequence[str]) -> list[Link]:
    for swapped, (one, two) in enumerate(((before, after), (after, before))):
        known = dict.fromkeys(two)
        prefix = find_common_prefix(list(one), known)
        if prefix:
            links = _equal([name[len(prefix) :] for name in one], two)
            return [(b, a, ("", prefix)) if swapped else (a, b, (prefix, "")) for a, b, _ in links]
    return []


_OUTER = WRAPPER_PREFIXES[:-1]


def _without_outer(name: str) -> str:
    return _without(name, _OUTER)


def _without_all(name: str) -> str:
    return _without(name, WRAPPER_PREFIXES)


def _without(name: str, prefixes: tuple[str, ...]) -> str:
    if "_mod" in name:
        *path, last = name.split(".")
        name = ".".join([part for part in path if part not in WRAPPER_ATTRIBUTES] + [last])
    while name.startswith(prefixes):
        name = name.partition(".")[2]
    return name


def _stripped(before: str, after: str, core: str) -> tuple[str, str]:
    """The parts of two names that the other lacks, `module._orig_mod.` and ``."""
    if before.endswith(core) and after.endswith(core):
        return _parts_apart(before[: len(before) - len(core)], after[: len(after) - len(core)])
    return _parts_apart(before, after)


@lru_cache(maxsize=256)
def _parts_apart(before: str, after: str) -> tuple[str, str]:
    one, two = Counter(before.split(".")), Counter(after.split("."))
    return _joined((one - two).elements()), _joined((two - one).elements())


def _joined(parts: Iterable[str]) -> str:
    return "".join(f"{part}." for part in parts if part)


def _prefix_notes(pairs: list[Match], before: ModelState, after: ModelState) -> list[Oddity]:
    counts = (Counter[str](), Counter[str]())
    for match in pairs:
        for side, prefix in enumerate(match.stripped or ()):
            if prefix:
                counts[side][prefix] += 1
    return [
        Oddity(
            OddityKind.WRAPPER_PREFIX.value,
            f"looked through {prefix!r} in the names of {counted(count)} of {state.target}",
        )
        for state, found in zip((before, after), counts, strict=True)
        for prefix, count in found.items()
    ]


# --- ties that a format drops ----------------------------------------------------------------------------------------


def _restored(pairs: list[Match], before: ModelState, after: ModelState) -> tuple[list[Match], list[Oddity]]:
    """Entries that one side leaves out since it keeps them under a name they are tied to: compared with that one."""
    gone = [match for match in pairs if match.after is None and match.shown.tied_to]
    new = [match for match in pairs if match.before is None and match.shown.tied_to]
    if not gone and not new:
        return pairs, []
    replaced: dict[int, Match] = {}
    notes: list[Oddity] = []
    for matches, state, has in ((gone, after, "before"), (new, before, "after")):
        kept = {_row_key(row): match for match in pairs if (row := getattr(match, has)) is not None} if matches else {}
        for match in matches:
            found = _kept(match.shown, kept, has)
            if found is None:
                continue
            row = match.shown
            other = replace(found, fqn=row.fqn, section=found.section)
            replaced[id(match)] = Match(*((row, other) if has == "before" else (other, row)), Way.TIE)
            message = (
                f"leaves {row.fqn} out, which is tied to {found.fqn}: compared with that; a strict load_state_dict"
            )
            notes.append(Oddity("tied-entry-left-out", f"{state.target} {message} calls it missing", row.fqn))
    return [replaced.get(id(match), match) for match in pairs], notes


def _row_key(row: TensorInfo) -> tuple[str, str]:
    return row.section, row.fqn


def _kept(row: TensorInfo, kept: dict[tuple[str, str], Match], has: str) -> TensorInfo | None:
    """What the other side, whose format records no ties, has for a name that `row` is tied to; None if nothing."""
    for name in row.tied_to:
        match = kept.get((row.section, name))
        if match is None or match.before is None or match.after is None:
            continue
        own, other = (match.before, match.after) if has == "before" else (match.after, match.before)
        same = own.shape == row.shape and own.storage_offset == row.storage_offset and own.dtype == row.dtype
        if same and _geometry(own) == _geometry(row) and other.storage is None and other.device is None:
            return other
    return None


def _geometry(row: TensorInfo) -> tuple[int, ...] | None:
    return row.data.strides if row.data else None
