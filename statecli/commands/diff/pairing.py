"""Pair old with new tensors by section, `--map`, equal names, stripped prefixes and tied names."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec
from msgspec.structs import replace

from statecli.core.errors import UsageError, option
from statecli.core.model_state import Kind, ModelState, Oddity, TensorInfo
from statecli.core.name_pairs import match_equal_names, match_names
from statecli.core.natural_order import make_natural_key
from statecli.core.oddity_kind import OddityKind
from statecli.core.parameter_or_buffer import MODEL_KINDS, select_loaded_sections
from statecli.core.units import join_names, plural

#: Largest number of names in a finding or a note.
MAX_LISTED_NAMES = 3


class MatchedBy(str, Enum):
    """Way in which two tensors were matched."""

    NAME = "name"
    PREFIX = "prefix"
    TIE = "tie"
    BYTES = "bytes"


class Match(msgspec.Struct, frozen=True, gc=False):
    """A pair of an old and a new tensor; a missing tensor is None. `stripped`: prefixes removed from the two names."""

    before: TensorInfo | None
    after: TensorInfo | None
    matched_by: MatchedBy = MatchedBy.NAME
    stripped: tuple[str, str] | None = None

    @property
    def output_row(self) -> TensorInfo:
        """The tensor whose name the output shows for the pair."""
        tensor = self.after or self.before
        assert tensor is not None  # noqa: S101 - one of the two is always there
        return tensor

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the pair's tensors: one name if a tensor is missing, otherwise two."""
        return tuple(side.fqn for side in (self.before, self.after) if side is not None)


class StrippedPrefix(msgspec.Struct, frozen=True, gc=False):
    """A prefix that was stripped from `count` names of `target`."""

    prefix: str
    count: int
    target: str
    is_before: bool

    def describe(self) -> str:
        """Describe the stripped prefix in one line."""
        return f"stripped the prefix {self.prefix!r} from the names of {plural(self.count, 'tensor')} of {self.target}"


class SectionPairs(msgspec.Struct, frozen=True):
    """Map of old sections to new sections, and notes on sections that were not paired by equal names."""

    by_section: dict[str, str]
    notes: list[Oddity]


class NotedMatches(msgspec.Struct, frozen=True):
    """Pairs of tensors, and notes on how the pairs were found."""

    matches: list[Match]
    notes: list[Oddity]


class Pairing(msgspec.Struct, frozen=True):
    """Matches that contain every tensor of both sides exactly once, and notes on how they were matched.

    `sections`: names of the compared sections, before -> after.
    """

    matches: list[Match]
    sections: dict[str, str]
    notes: tuple[Oddity, ...] = ()
    stripped: tuple[StrippedPrefix, ...] = ()


def pair_tensors(before: ModelState, after: ModelState, rules: Sequence[str], *, prefixes: bool = True) -> Pairing:
    """Pair the tensors of two states by their names.

    The order is that of the new state, with removed tensors at their old places. Raises UsageError for a rule that is
    invalid, matches nothing, or makes two names equal.

    Args:
        rules: Rules of `--map`.
        prefixes: Strip the prefixes of wrappers.
    """
    names = apply_map(before, rules)
    section_pairs = pair_sections(before, after)
    sections = section_pairs.by_section
    old_rows, new_rows = _group_by_section(before), _group_by_section(after)
    pairs: list[Match] = []
    for section, partner in sections.items():
        section_rows, partner_rows = old_rows.pop(section, []), new_rows.pop(partner, [])
        sides = (
            [before.tensors[n] for n in section_rows],
            [names[n] for n in section_rows],
            [after.tensors[n] for n in partner_rows],
        )
        pairs += _pair_section(*sides, prefixes=prefixes)
    pairs += [Match(before.tensors[n], None) for rows in old_rows.values() for n in rows]
    pairs += [Match(None, after.tensors[n]) for rows in new_rows.values() for n in rows]
    restored = _restore_ties(pairs, before, after)
    stripped = _list_stripped_prefixes(restored.matches, before, after)
    prefix_notes = (Oddity("wrapper-prefix", prefix.describe()) for prefix in stripped)
    notes = (*section_pairs.notes, *_map_note(before, names), *prefix_notes, *restored.notes)
    return Pairing(sort_matches(restored.matches, before, after), sections, notes, stripped)


def _group_by_section(state: ModelState) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for n, tensor in enumerate(state.tensors):
        rows.setdefault(tensor.section, []).append(n)
    return rows


def sort_matches(pairs: Iterable[Match], before: ModelState, after: ModelState) -> list[Match]:
    """Sort matches in the order of the new checkpoint. A removed tensor stays after its predecessor in `before`.

    The numbers in the names decide if the new checkpoint is ordered as text (layer 10 before layer 2) or by dtype, as
    safetensors is. Such an order says nothing about the module.
    """
    pairs = list(pairs)
    if len(pairs) == len(after.tensors) and all(map(operator.is_, (match.after for match in pairs), after.tensors)):
        return pairs if _has_own_order(after) else _sort_by_number(pairs)
    position = {id(tensor): n for n, tensor in enumerate(after.tensors)}
    of_before = {id(match.before): match for match in pairs}
    of_after = {id(match.after): match for match in pairs}
    removed_after: dict[int, list[Match]] = {}
    last = -1
    for tensor in before.tensors:
        match = of_before.get(id(tensor))
        if match is None:
            continue
        if id(match.after) in position:
            last = position[id(match.after)]
        else:
            removed_after.setdefault(last, []).append(match)
    ordered_matches = removed_after.get(-1, [])
    for n, tensor in enumerate(after.tensors):
        match = of_after.get(id(tensor))
        if match is not None:
            ordered_matches.append(match)
        ordered_matches.extend(removed_after.get(n, ()))
    return ordered_matches if _has_own_order(after) else _sort_by_number(ordered_matches)


def _has_own_order(state: ModelState) -> bool:
    names = [tensor.fqn for tensor in state.tensors]
    return state.traits.keeps_order and any(map(operator.gt, names, names[1:]))


def _sort_by_number(matches: list[Match]) -> list[Match]:
    """Sort matches by section in order of appearance, then by name. Numbers in names are ordered as numbers."""
    tensors = [match.output_row for match in matches]
    keys = [make_natural_key(tensor.fqn) for tensor in tensors]
    order = sorted(range(len(matches)), key=keys.__getitem__)
    first = {section: n for n, section in enumerate(dict.fromkeys([tensor.section for tensor in tensors]))}
    if len(first) > 1:
        order.sort(key=lambda n: first[tensors[n].section])
    return [matches[n] for n in order]


# --- sections --------------------------------------------------------------------------------------------------------


def pair_sections(before: ModelState, after: ModelState) -> SectionPairs:
    """Pair sections with equal names. Then pair the remaining model (or optimizer) section if each side has only one.

    If no model section has a partner by name, the section that a load would use is paired. If several sections are
    left, all stay unpaired, and a note names the option that pairs them.
    """
    pairs = {section: section for section in before.sections if section in after.sections}
    notes: list[Oddity] = []
    if len(pairs) in (len(before.sections), len(after.sections)):
        return SectionPairs(pairs, notes)
    if len(before.sections) == len(after.sections) == 1 and not pairs:
        kinds: tuple[tuple[Kind, ...], ...] = (tuple(Kind),)
    else:
        kinds = (MODEL_KINDS, (Kind.OPTIMIZER,))
    for kind in kinds:
        left = [s for s in _list_sections_with(before, kind) if s not in pairs]
        right = [s for s in _list_sections_with(after, kind) if s not in pairs.values()]
        if kind is MODEL_KINDS and not set(_list_sections_with(before, kind)).intersection(pairs):
            left, right = select_loaded_sections(left), select_loaded_sections(right)
        if len(left) == len(right) == 1:
            pairs[left[0]] = right[0]
            notes.append(
                Oddity(OddityKind.SECTIONS_PAIRED.value, f"section {left[0]!r} is compared with section {right[0]!r}")
            )
        elif left and right:
            notes.append(Oddity(OddityKind.SECTIONS_APART.value, _describe_unpaired(before, left, after, right)))
    return SectionPairs(pairs, notes)


def _describe_unpaired(before: ModelState, left: list[str], after: ModelState, right: list[str]) -> str:
    sections_text = f"{', '.join(left)} of {before.target} and {', '.join(right)} of {after.target}"
    example = f"{before.target.partition('#')[0]}#{left[0]}"
    return (
        f"statecli does not know which sections belong together: {sections_text}; give one section of each target, "
        f"such as {example}"
    )


def _list_sections_with(state: ModelState, kinds: Sequence[Kind]) -> list[str]:
    return list(dict.fromkeys(tensor.section for tensor in state.tensors if tensor.kind in kinds))


# --- --map -----------------------------------------------------------------------------------------------------------


def apply_map(state: ModelState, rules: Sequence[str]) -> list[str]:
    """Return the tensors' names after applying the `--map` rules one after another. Raises UsageError."""
    names = [tensor.fqn for tensor in state.tensors]
    for rule in rules:
        names = _apply_rule(rule, names, state.target)
    if rules:
        _refuse_clash(state, names)
    return names


def _apply_rule(rule: str, names: list[str], target: str) -> list[str]:
    # Split at the last "=", because a regular expression often has one: (?=...).
    pattern, equals, replacement = rule.rpartition("=")
    if not equals or not pattern:
        example = option("--map", "^model[.]=", quoted=True)
        raise UsageError(f"{option('--map', rule, quoted=True)}: write REGEX=REPLACEMENT, as in {example}")
    try:
        regex = re.compile(pattern)
        mapped = [regex.sub(replacement, name) for name in names]
        matches = any(map(regex.search, names))
    except (re.error, IndexError, RecursionError, OverflowError) as error:
        problem = f"the regular expression or the replacement is not valid: {error}"
        raise UsageError(f"{option('--map', rule, quoted=True)}: {problem}") from error
    if not matches:
        raise UsageError(f"{option('--map', rule, quoted=True)}: matches none of the {len(names)} names of {target}")
    return mapped


def _refuse_clash(state: ModelState, names: list[str]) -> None:
    first: dict[tuple[str, str], TensorInfo] = {}
    for tensor, name in zip(state.tensors, names, strict=True):
        first_tensor = first.setdefault((tensor.section, name), tensor)
        if first_tensor is not tensor and first_tensor.fqn != tensor.fqn:
            raise UsageError(
                f"{option('--map')} renames both {first_tensor.fqn} and {tensor.fqn} of {state.target} to {name!r}"
            )


def _map_note(state: ModelState, names: list[str]) -> list[Oddity]:
    count = sum(name != tensor.fqn for tensor, name in zip(state.tensors, names, strict=True))
    return [Oddity("mapped", f"--map renames {plural(count, 'tensor')} of {state.target}")] if count else []


def list_names(names: Sequence[str]) -> str:
    """Join the first MAX_LISTED_NAMES names, and add the number of the remaining names."""
    return join_names(names, MAX_LISTED_NAMES)


# --- names -----------------------------------------------------------------------------------------------------------


def _pair_section(
    before: list[TensorInfo], names: list[str], after: list[TensorInfo], *, prefixes: bool
) -> list[Match]:
    links = (match_names if prefixes else match_equal_names)(names, [tensor.fqn for tensor in after])
    pairs = [
        Match(before[old], after[new], MatchedBy.PREFIX, stripped) if stripped else Match(before[old], after[new])
        for old, new, stripped in links
    ]
    if len(links) < len(before):
        linked = {old for old, _, _ in links}
        pairs += [Match(tensor, None) for n, tensor in enumerate(before) if n not in linked]
    if len(links) < len(after):
        linked = {new for _, new, _ in links}
        pairs += [Match(None, tensor) for n, tensor in enumerate(after) if n not in linked]
    return pairs


def _list_stripped_prefixes(pairs: list[Match], before: ModelState, after: ModelState) -> tuple[StrippedPrefix, ...]:
    counts = (Counter[str](), Counter[str]())
    for match in pairs:
        for side, prefix in enumerate(match.stripped or ()):
            if prefix:
                counts[side][prefix] += 1
    return tuple(
        StrippedPrefix(prefix, count, state.target, state is before)
        for state, prefixes in zip((before, after), counts, strict=True)
        for prefix, count in prefixes.items()
    )


# --- ties that a format drops ----------------------------------------------------------------------------------------


def _restore_ties(pairs: list[Match], before: ModelState, after: ModelState) -> NotedMatches:
    """If a side lacks a tied name, pair the name with the tensor that this side stores under a different tied name."""
    removed_ties = [match for match in pairs if match.after is None and match.output_row.tied_to]
    new = [match for match in pairs if match.before is None and match.output_row.tied_to]
    if not removed_ties and not new:
        return NotedMatches(pairs, [])
    replaced: dict[int, Match] = {}
    notes: list[Oddity] = []
    for matches, state, present_side in ((removed_ties, after, "before"), (new, before, "after")):
        match_of_row = (
            {row.key: match for match in pairs if (row := getattr(match, present_side)) is not None} if matches else {}
        )
        for match in matches:
            tied_row = _find_tied(match.output_row, match_of_row, present_side)
            if tied_row is None:
                continue
            row = match.output_row
            restored = replace(tied_row, fqn=row.fqn)
            sides = (row, restored) if present_side == "before" else (restored, row)
            replaced[id(match)] = Match(*sides, MatchedBy.TIE)
            message = (
                f"{state.target} does not have {row.fqn}; statecli compares the tied tensor {tied_row.fqn} instead"
            )
            effect = f"a strict load_state_dict reports {row.fqn} as missing"
            notes.append(Oddity("tied-entry-left-out", f"{message}; {effect}", row.fqn))
    return NotedMatches([replaced.get(id(match), match) for match in pairs], notes)


def _find_tied(row: TensorInfo, match_of_row: dict[tuple[str, str], Match], present_side: str) -> TensorInfo | None:
    """Return the tensor that the other side stores under one of the names tied to `row`, or None."""
    for name in row.tied_to:
        match = match_of_row.get((row.section, name))
        if match is None or match.before is None or match.after is None:
            continue
        same_side, other_side = (match.before, match.after) if present_side == "before" else (match.after, match.before)
        is_same_view = (
            same_side.shape == row.shape
            and same_side.storage_offset == row.storage_offset
            and same_side.dtype == row.dtype
        )
        if (
            is_same_view
            and _get_strides(same_side) == _get_strides(row)
            and other_side.storage is None
            and other_side.device is None
        ):
            return other_side
    return None


def _get_strides(row: TensorInfo) -> tuple[int, ...] | None:
    return row.data.strides if row.data else None
