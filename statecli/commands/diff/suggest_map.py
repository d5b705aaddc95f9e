"""Suggest `--map` rules if the names of two checkpoints differ only in a prefix or in a few components."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, islice, product

from statecli.commands.diff import pairing
from statecli.commands.diff.pairing import Match
from statecli.core.errors import UsageError
from statecli.core.model_state import ModelState, Oddity
from statecli.core.name_pairs import MAX_PREFIX_PARTS
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import plural

#: Kinds of notes that are omitted if the cause is known.
NOTE_KINDS = frozenset((OddityKind.PREFIX_APART, OddityKind.COMPONENTS_APART))
#: Key of tensors that may be equal: new section, name and shape.
_Key = tuple[str | None, str, tuple[int, ...] | None]


def suggest_prefix_rule(
    matches: Sequence[Match],
    sections: Mapping[str, str],
    before: ModelState,
    after: ModelState,
    rules: Sequence[str],
    *,
    prefixes: bool,
) -> list[Oddity]:
    """Return a note with the `--map` rule that pairs most of the unpaired tensors, or [] if no rule pairs enough.

    `rules` are the rules already given, `prefixes` as in `pairing.pair_tensors`. The rule is tried first, so that no
    tensor loses its partner.
    """
    import shlex

    names = pairing.apply_map(before, rules)
    removed_keys, new = map(set, _list_unpaired(matches, sections, before, names))
    candidates = [
        (count, prefix, side)
        for side, counts in enumerate((_count_prefixes(removed_keys, new), _count_prefixes(new, removed_keys)))
        for prefix, count in counts.most_common(1)
    ]
    count, prefix, side = max(candidates, default=(0, "", 0))
    if count < 2 or 2 * count <= min(len(removed_keys), len(new)):
        return []
    rule = _build_prefix_rule(prefix, removed_keys, new, names) if side else f"^{re.escape(prefix)}="
    pairs = partial(_count_pairs, before, after, prefixes=prefixes)
    if pairs((*rules, rule)) < pairs(rules) + count:
        return []
    long, short = (after, before) if side else (before, after)
    message = (
        f"{plural(count, 'tensor')} of {long.target} have the same names as in {short.target}, except for the "
        f"prefix {prefix!r}"
    )
    advice = f"to compare these tensors, add --map {shlex.quote(rule)}"
    return [Oddity(OddityKind.PREFIX_APART.value, f"{message}; {advice}")]


def _list_unpaired(
    matches: Sequence[Match], sections: Mapping[str, str], before: ModelState, names: Sequence[str]
) -> tuple[list[_Key], list[_Key]]:
    """Return (section, name, shape) of the unpaired tensors of each side. `names` are the mapped names of `before`."""
    name_of = dict(zip(map(id, before.tensors), names, strict=True))
    removed_keys = [row for match in matches if match.after is None and (row := match.before)]
    new = [row for match in matches if match.before is None and (row := match.after)]
    return (
        [(sections.get(row.section), name_of[id(row)], row.shape) for row in removed_keys],
        [(row.section, row.fqn, row.shape) for row in new],
    )


def _count_prefixes(rows: Iterable[_Key], others: Collection[_Key]) -> Counter[str]:
    """Count each prefix whose removal turns a name into a name in `others` with the same section and shape."""
    return Counter(
        prefix
        for section, name, shape in rows
        for prefix in islice(_iter_prefixes(name), MAX_PREFIX_PARTS)
        if (section, name[len(prefix) :], shape) in others
    )


def _iter_prefixes(name: str) -> Iterator[str]:
    prefix_length = name.find(".") + 1
    while prefix_length:
        yield name[:prefix_length]
        prefix_length = name.find(".", prefix_length) + 1


def _build_prefix_rule(
    prefix: str, removed_keys: Collection[_Key], new: Collection[_Key], names: Collection[str]
) -> str:
    """Return the `--map` rule that adds the prefix to exactly those names that lack it."""
    lacking = {name for section, name, shape in removed_keys if (section, prefix + name, shape) in new}
    replacement = prefix.replace("\\", r"\\")
    if lacking.issuperset(names):
        return f"^={replacement}"
    heads = "|".join(map(re.escape, sorted({name.partition(".")[0] for name in lacking})))
    return f"^(?=({heads})([.]|$))={replacement}"


def _count_pairs(before: ModelState, after: ModelState, rules: Sequence[str], *, prefixes: bool) -> int:
    """Return how many tensors are paired by name under these `--map` rules."""
    try:
        matches = pairing.pair_tensors(before, after, rules, prefixes=prefixes).matches
    except UsageError:  # the rule makes two names equal
        return 0
    return sum(match.before is not None and match.after is not None for match in matches)


# --- a component of the names ----------------------------------------------------------------------------------------

#: Largest number of rules in a note: a longer list means another model.
_MAX_RULES = 6
#: Names of the scale and the shift of a norm in TensorFlow and old BERT checkpoints, by the names in torch, and the
#: reverse.
_SYNONYMS = {"gamma": "weight", "beta": "bias", "weight": "gamma", "bias": "beta"}
#: Largest number of components that one rule replaces together: `encoder.layer` by `enc.block`.
_MAX_REPLACED = 3


def suggest_component_rules(
    matches: Sequence[Match],
    sections: Mapping[str, str],
    before: ModelState,
    after: ModelState,
    rules: Sequence[str],
    *,
    prefixes: bool,
) -> list[Oddity]:
    """Return a note with `--map` rules that replace components of names, such as `encoder` by `enc`.

    Two tensors may be partners if their names differ in one to three neighbouring components and their shapes are
    equal. If several tensors differ in the same place, the order of saving decides, if both files keep the order. At
    least two tensors follow each rule, and together the rules pair most of the tensors without a partner. The rules
    were tried: no tensor loses its partner. Arguments as `suggest_prefix_rule`.
    """
    import shlex

    removed_keys, new = _list_unpaired(matches, sections, before, pairing.apply_map(before, rules))
    counts = _count_replacements(removed_keys, new, has_order=before.traits.keeps_order and after.traits.keeps_order)
    suggested: list[str] = []
    replaced: set[str] = set()
    expected = 0
    # The most frequent rules come first; of equally frequent rules, the shortest.
    for (old, component), count in sorted(counts.items(), key=lambda item: (-item[1], len(item[0][0]))):
        if count < 2 or not replaced.isdisjoint(old.split(".")) or len(suggested) >= _MAX_RULES:
            continue
        replaced.update(old.split("."))
        suggested += _build_component_rules(old, component, [name for _, name, _ in removed_keys])
        expected += count
    if not suggested or 2 * expected <= min(len(removed_keys), len(new)):
        return []
    pairs = partial(_count_pairs, before, after, prefixes=prefixes)
    if pairs((*rules, *suggested)) < pairs(rules) + expected:
        return []
    lines = " ".join(f"--map {shlex.quote(rule)}" for rule in suggested)
    message = f"{plural(expected, 'tensor')} may have new names: both sides have unpaired tensors of equal shapes"
    return [Oddity(OddityKind.COMPONENTS_APART.value, f"{message}; to compare these tensors, add {lines}")]


def _count_replacements(
    removed_keys: Sequence[_Key], new: Sequence[_Key], *, has_order: bool
) -> Counter[tuple[str, str]]:
    """Count how often replacing some components turns an old name into a new name.

    Candidates have the same other components and the same shape. Synonyms that libraries use decide, then the order of
    saving if the files keep this order.
    """
    # Tensors by place: a place is a name without some of its components (section, the parts before and after) and a
    # shape.
    places: dict[tuple[object, ...], tuple[list[str], list[str]]] = {}
    for side, rows in enumerate((removed_keys, new)):
        for section, name, shape in rows:
            parts = name.split(".")[:MAX_PREFIX_PARTS]
            for start, stop in combinations(range(len(parts) + 1), 2):
                if stop - start <= _MAX_REPLACED and not any(map(str.isdigit, parts[start:stop])):
                    place = section, tuple(parts[:start]), tuple(parts[stop:]), shape
                    places.setdefault(place, ([], []))[side].append(".".join(parts[start:stop]))
    counts: Counter[tuple[str, str]] = Counter()
    for old_components, new_components in places.values():
        synonyms = [
            (first, second)
            for first, second in product(old_components, new_components)
            if _SYNONYMS.get(first, "") == second
        ]
        counts.update(synonyms)
        left = [name for name in old_components if all(name != first for first, _ in synonyms)]
        right = [name for name in new_components if all(name != second for _, second in synonyms)]
        if len(left) == len(right) and (has_order or len(left) == 1):
            counts.update(zip(left, right, strict=True))
    return counts


def _build_component_rules(old: str, new: str, names: Sequence[str]) -> list[str]:
    """Return the shortest `--map` rules that replace a component at the start, in the middle or at the end of names."""
    text, replacement = re.escape(old), new.replace("\\", r"\\")
    rules = []
    if any(name.startswith(f"{old}.") for name in names):
        rules.append(rf"^{text}\.={replacement}.")
    if any(f".{old}." in name for name in names):
        rules.append(rf"\.{text}\.=.{replacement}.")
    if any(name.endswith(f".{old}") for name in names):
        rules.append(rf"\.{text}$=.{replacement}")
    return rules
