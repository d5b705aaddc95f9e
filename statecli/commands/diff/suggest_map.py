"""Suggest `--map` rules if the names of two checkpoints differ only in a prefix or in a few components."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, product

from statecli.commands.diff import pairing
from statecli.commands.diff.pairing import Match
from statecli.core.errors import UsageError
from statecli.core.model_state import ModelState, Oddity
from statecli.core.name_pairs import MAX_PREFIX_PARTS
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import plural

#: Kinds of notes that are omitted if the cause is known.
NOTE_KINDS = frozenset((OddityKind.PREFIX_APART, OddityKind.COMPONENTS_APART))
#: Largest number of rules in a note: a longer list means another model.
_MAX_RULES = 6
#: Names of the scale and the shift of a norm in TensorFlow and old BERT checkpoints, by the names in torch, and the
#: reverse.
_SYNONYMS = {"gamma": "weight", "beta": "bias", "weight": "gamma", "bias": "beta"}
#: Largest number of components that one rule replaces together: `encoder.layer` by `enc.block`.
_MAX_REPLACED = 3
#: Key of tensors that may be equal: new section, name and shape.
_Key = tuple[str | None, str, tuple[int, ...] | None]
#: Components of an old name, and the components that replace them. A prefix is replaced by "", or replaces "".
_Replacement = tuple[str, str]


def suggest_rules(
    matches: Sequence[Match],
    sections: Mapping[str, str],
    before: ModelState,
    after: ModelState,
    rules: Sequence[str],
    *,
    prefixes: bool,
) -> list[Oddity]:
    """Return a note with `--map` rules that pair most of the tensors without a partner, or [] without such rules.

    Two tensors may be partners if their shapes are equal and their names differ in a prefix, or in one to three
    neighbouring components. If several tensors differ in the same place, the order of saving decides, if both files
    keep the order. At least two tensors follow each rule. The rules were tried: no tensor loses its partner.

    Args:
        rules: The rules already given.
        prefixes: As in `pairing.pair_tensors`.
    """
    import shlex

    names = pairing.apply_map(before, rules)
    removed_keys, new_keys = _list_unpaired(matches, sections, before, names)
    counts = _count_replacements(
        removed_keys, new_keys, has_order=before.traits.keeps_order and after.traits.keeps_order
    )
    replacements = _select_replacements(counts)
    expected = sum(counts[replacement] for replacement in replacements)
    if not replacements or 2 * expected <= min(len(removed_keys), len(new_keys)):
        return []
    old, new = replacements[0]
    suggested = (
        [_build_prefix_rule(f"{new}.", set(removed_keys), set(new_keys), names)]
        if not old
        else [rule for replacement in replacements for rule in _build_rules(*replacement, removed_keys)]
    )
    paired_count = _count_pairs(before, after, rules, prefixes=prefixes)
    if _count_pairs(before, after, (*rules, *suggested), prefixes=prefixes) < paired_count + expected:
        return []
    advice = f"to compare these tensors, add {' '.join(f'--map {shlex.quote(rule)}' for rule in suggested)}"
    if old and new:
        message = f"{plural(expected, 'tensor')} may have new names: both sides have unpaired tensors of equal shapes"
        return [Oddity(OddityKind.COMPONENTS_APART.value, f"{message}; {advice}")]
    long, short = (before, after) if old else (after, before)
    difference = f"have the same names as in {short.target}, except for the prefix {f'{old or new}.'!r}"
    message = f"{plural(expected, 'tensor')} of {long.target} {difference}"
    return [Oddity(OddityKind.PREFIX_APART.value, f"{message}; {advice}")]


def _list_unpaired(
    matches: Sequence[Match], sections: Mapping[str, str], before: ModelState, names: Sequence[str]
) -> tuple[list[_Key], list[_Key]]:
    """Return (section, name, shape) of the unpaired tensors of each side. `names` are the mapped names of `before`."""
    name_of = dict(zip(map(id, before.tensors), names, strict=True))
    removed_rows = [row for match in matches if match.after is None and (row := match.before)]
    new_rows = [row for match in matches if match.before is None and (row := match.after)]
    return (
        [(sections.get(row.section), name_of[id(row)], row.shape) for row in removed_rows],
        [(row.section, row.fqn, row.shape) for row in new_rows],
    )


def _count_replacements(
    removed_keys: Sequence[_Key], new_keys: Sequence[_Key], *, has_order: bool
) -> Counter[_Replacement]:
    """Count how often replacing some components turns an old name into a new name.

    Candidates have the same other components and the same shape. A prefix and the synonyms that libraries use decide,
    then the order of saving if the files keep this order. Numbers are replaced only as a prefix.
    """
    # Tensors by place: a place is a name without some of its components (section, the parts before and after) and a
    # shape.
    places: dict[tuple[object, ...], tuple[list[str], list[str]]] = {}
    for side, rows in enumerate((removed_keys, new_keys)):
        for section, name, shape in rows:
            parts = name.split(".")[:MAX_PREFIX_PARTS]
            for start, stop in [(0, 0), *combinations(range(len(parts) + 1), 2)]:
                if stop - start <= _MAX_REPLACED and (start == 0 or not _has_number(parts[start:stop])):
                    place = section, tuple(parts[:start]), tuple(parts[stop:]), shape
                    places.setdefault(place, ([], []))[side].append(".".join(parts[start:stop]))
    counts: Counter[_Replacement] = Counter()
    for old_components, new_components in places.values():
        pairs = [
            (old, new)
            for old, new in product(old_components, new_components)
            if not old or not new or _SYNONYMS.get(old) == new
        ]
        counts.update(pairs)
        left = [name for name in old_components if all(name != old for old, _ in pairs)]
        right = [name for name in new_components if all(name != new for _, new in pairs)]
        if len(left) == len(right) and (has_order or len(left) == 1):
            counts.update(pair for pair in zip(left, right, strict=True) if not _has_number(".".join(pair).split(".")))
    return counts


def _has_number(parts: Iterable[str]) -> bool:
    return any(map(str.isdigit, parts))


def _select_replacements(counts: Counter[_Replacement]) -> list[_Replacement]:
    """Return the most frequent replacements, at most one for each component, or only a prefix if that comes first."""
    selected: list[_Replacement] = []
    replaced: set[str] = set()
    # Of equally frequent replacements, the shortest comes first.
    for (old, new), count in sorted(counts.items(), key=lambda item: (-item[1], len(item[0][0]))):
        if count < 2 or len(selected) == _MAX_RULES:
            break
        if not (old and new):
            if not selected:
                return [(old, new)]
        elif replaced.isdisjoint(old.split(".")):
            replaced.update(old.split("."))
            selected.append((old, new))
    return selected


def _build_prefix_rule(
    prefix: str, removed_keys: Collection[_Key], new_keys: Collection[_Key], names: Collection[str]
) -> str:
    """Return the `--map` rule that adds the prefix to exactly those names that lack it."""
    lacking = {name for section, name, shape in removed_keys if (section, prefix + name, shape) in new_keys}
    replacement = prefix.replace("\\", r"\\")
    if lacking.issuperset(names):
        return f"^={replacement}"
    heads = "|".join(map(re.escape, sorted({name.partition(".")[0] for name in lacking})))
    return f"^(?=({heads})([.]|$))={replacement}"


def _build_rules(old: str, new: str, keys: Iterable[_Key]) -> list[str]:
    """Return the shortest `--map` rules that replace a component at the start, in the middle or at the end of names."""
    text, replacement = re.escape(old), new.replace("\\", r"\\")
    if not new:
        return [rf"^{text}\.="]
    names = [name for _, name, _ in keys]
    rules = []
    if any(name.startswith(f"{old}.") for name in names):
        rules.append(rf"^{text}\.={replacement}.")
    if any(f".{old}." in name for name in names):
        rules.append(rf"\.{text}\.=.{replacement}.")
    if any(name.endswith(f".{old}") for name in names):
        rules.append(rf"\.{text}$=.{replacement}")
    return rules


def _count_pairs(before: ModelState, after: ModelState, rules: Sequence[str], *, prefixes: bool) -> int:
    """Return how many tensors are paired by name under these `--map` rules."""
    try:
        matches = pairing.pair_tensors(before, after, rules, prefixes=prefixes).matches
    except UsageError:  # the rule makes two names equal
        return 0
    return sum(match.before is not None and match.after is not None for match in matches)
