"""Suggest a `--map` if one prefix keeps the names of two checkpoints apart."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from statecli.commands.diff import pairing
from statecli.commands.diff.pairing import Match, count_tensors
from statecli.core.errors import UsageError
from statecli.core.model_state import ModelState, Oddity
from statecli.core.name_pairs import MAX_PREFIX_PARTS

#: What equal tensors have in common: the section after, a name and a shape.
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
    """Return a note on the `--map` to pair most of the tensors without a partner, two at least; else nothing.

    `rules` are the rules already given, `prefixes` as in `pairing.pair_tensors`. The rule is tried first, so that no
    tensor loses its partner.
    """
    unpaired = [match for match in matches if match.before is None or match.after is None]
    if not unpaired:
        return []
    names = dict(zip(map(id, before.tensors), pairing.apply_map(before, rules), strict=True))
    gone = {(sections.get(row.section), names[id(row)], row.shape) for match in unpaired if (row := match.before)}
    new = {(row.section, row.fqn, row.shape) for match in unpaired if (row := match.after)}
    old_prefixes, new_prefixes = _count_prefixes(gone, new), _count_prefixes(new, gone)
    ranked = [
        (count, prefix, side)
        for side, counts in enumerate((old_prefixes, new_prefixes))
        for prefix, count in counts.most_common(1)
    ]
    for count, prefix, side in sorted(ranked, reverse=True)[:1]:
        if count < 2 or 2 * count <= min(len(gone), len(new)):
            continue
        rule = _build_prefix_rule(prefix, gone, new, names.values()) if side else f"^{re.escape(prefix)}="
        pairs = partial(_count_pairs, before, after, prefixes=prefixes)
        if pairs((*rules, rule)) >= pairs(rules) + count:
            long, short = (after, before) if side else (before, after)
            message = (
                f"the names of {count_tensors(count)} of {long.target} differ from those of {short.target} "
                f"only by the prefix {prefix!r}"
            )
            return [Oddity("prefix-apart", f"{message}; to compare them, add --map {shlex.quote(rule)}")]
    return []


def _count_prefixes(rows: Iterable[_Key], others: Collection[_Key]) -> Counter[str]:
    """Count each prefix without which a name is a name of the other side, in the same section and of the same shape."""
    return Counter(
        prefix
        for section, name, shape in rows
        for prefix in islice(_iter_prefixes(name), MAX_PREFIX_PARTS)
        if (section, name[len(prefix) :], shape) in others
    )


def _iter_prefixes(name: str) -> Iterator[str]:
    cut = name.find(".") + 1
    while cut:
        yield name[:cut]
        cut = name.find(".", cut) + 1


def _build_prefix_rule(prefix: str, gone: Collection[_Key], new: Collection[_Key], names: Collection[str]) -> str:
    """Return the rule that adds the prefix to exactly the names without the prefix."""
    lacking = {name for section, name, shape in gone if (section, prefix + name, shape) in new}
    replacement = prefix.replace("\\", r"\\")
    if lacking.issuperset(names):
        return f"^={replacement}"
    heads = "|".join(map(re.escape, sorted({name.partition(".")[0] for name in lacking})))
    return f"^(?=({heads})([.]|$))={replacement}"


def _count_pairs(before: ModelState, after: ModelState, rules: Sequence[str], *, prefixes: bool) -> int:
    """Return how many tensors have a partner by name."""
    try:
        matches = pairing.pair_tensors(before, after, rules, prefixes=prefixes).matches
    except UsageError:  # the rule makes two names equal
        return 0
    return sum(match.before is not None and match.after is not None for match in matches)
