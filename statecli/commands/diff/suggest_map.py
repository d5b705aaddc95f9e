"""What to give to `--map` where one prefix keeps the names of two checkpoints apart."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from statecli.commands.diff import pairing
from statecli.commands.diff.pairing import Match, counted
from statecli.core.errors import UsageError
from statecli.core.state import ModelState, Oddity

#: Where a tensor may find its like: the section after, a name and a shape.
_Key = tuple[str | None, str, tuple[int, ...] | None]


def of_prefix(
    matches: Sequence[Match],
    sections: Mapping[str, str],
    before: ModelState,
    after: ModelState,
    rules: Sequence[str],
    *,
    prefixes: bool,
) -> list[Oddity]:
    """A note on the `--map` that would pair most of the tensors left without a partner, two at least; else none.

    `rules` are those already given, `prefixes` as of `pairing.matched`. It is tried before it is told, so that nothing
    that has a partner loses it.
    """
    apart = [match for match in matches if match.before is None or match.after is None]
    if not apart:
        return []
    names = dict(zip(map(id, before.tensors), pairing.renamed(before, rules), strict=True))
    gone = {(sections.get(row.section), names[id(row)], row.shape) for match in apart if (row := match.before)}
    new = {(row.section, row.fqn, row.shape) for match in apart if (row := match.after)}
    own, other = _prefixes(gone, new), _prefixes(new, gone)
    ranked = [
        (count, prefix, side) for side, found in enumerate((own, other)) for prefix, count in found.most_common(1)
    ]
    for count, prefix, side in sorted(ranked, reverse=True)[:1]:
        if count < 2 or 2 * count <= min(len(gone), len(new)):
            continue
        rule = _adding(prefix, gone, new, names.values()) if side else f"^{re.escape(prefix)}="
        pairs = partial(_pairs, before, after, prefixes=prefixes)
        if pairs((*rules, rule)) >= pairs(rules) + count:
            long, short = (after, before) if side else (before, after)
            message = f"{counted(count)} of {long.target} would be those of {short.target} but for {prefix!r} in front"
            return [Oddity("prefix-apart", f"{message}: give --map {shlex.quote(rule)}")]
    return []


def _prefixes(rows: Iterable[_Key], others: Collection[_Key]) -> Counter[str]:
    """Each beginning of a name without which it is a name, in the same section and of the same shape, of the others."""
    return Counter(
        prefix
        for section, name, shape in rows
        for prefix in _beginnings(name)
        if (section, name[len(prefix) :], shape) in others
    )


def _beginnings(name: str) -> Iterator[str]:
    cut = name.find(".") + 1
    while cut:
        yield name[:cut]
        cut = name.find(".", cut) + 1


def _adding(prefix: str, gone: Collection[_Key], new: Collection[_Key], names: Collection[str]) -> str:
    """The rule that puts the prefix before the names that lack it, and before no other."""
    lacking = {name for section, name, shape in gone if (section, prefix + name, shape) in new}
    replacement = prefix.replace("\\", r"\\")
    if lacking.issuperset(names):
        return f"^={replacement}"
    heads = "|".join(map(re.escape, sorted({name.partition(".")[0] for name in lacking})))
    return f"^(?=({heads})([.]|$))={replacement}"


def _pairs(before: ModelState, after: ModelState, rules: Sequence[str], *, prefixes: bool) -> int:
    """How many tensors have a partner by name."""
    try:
        matches = pairing.matched(before, after, rules, prefixes=prefixes).matches
    except UsageError:  # it makes two names one
        return 0
    return sum(match.before is not None and match.after is not None for match in matches)
