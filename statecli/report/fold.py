"""Repeated layers shown once: `layers.0.weight` … `layers.11.weight` as `layers.{0..11}.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from statecli.core.finding import Finding
from statecli.core.state import Oddity
from statecli.report import Line

_NUMBER = re.compile(r"(?:(?<=^)|(?<=[.\[]))(?:0|[1-9]\d{0,8})(?=[.\]:]|$)")
#: The same inside a remark, where a name ends at a comma or a space too.
_IN_REMARK = re.compile(r"(?<=[.\[])(?:0|[1-9]\d{0,8})(?=[.\],: ]|$)")

#: Rows above which repeated layers are folded.
ABOVE = 40

#: Findings that are told one by one even when they could be folded.
FEW_FINDINGS = 8

#: The numbers that vary along each axis -> (row of the first of them, the positions of all).
Boxes = dict[tuple[tuple[int, ...], ...], tuple[Line, list[int]]]


def lines(rows: Sequence[Line]) -> list[Line]:
    """The same rows, those that differ in nothing but their layers' numbers joined, in order of first appearance."""
    return [row for row, _ in joined(rows)]


def joined(rows: Sequence[Line]) -> list[tuple[Line, list[int]]]:
    """The same as `lines`, each with the positions of the rows that it stands for, in order."""
    alike: dict[tuple[str, int, tuple[str, ...], str, str], list[tuple[int, tuple[int, ...], Line]]] = {}
    for position, row in enumerate(rows):
        name, numbers = template(row.cells[0])
        # A name may hold the sign for a number itself: how many there are tells it apart.
        key = (name, len(numbers), row.cells[1:], _remark_template(row.remark, list(map(str, numbers))), row.mood)
        alike.setdefault(key, []).append((position, numbers, row))
    folded: list[tuple[Line, list[int]]] = []
    for (*_, remark, _), same in alike.items():
        folded.extend(_joined(same, remark))
    return sorted(folded, key=lambda pair: pair[1][0])


def template(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with its layers' numbers left open, and the numbers."""
    return _NUMBER.sub("#", name), tuple(map(int, _NUMBER.findall(name)))


def numbered(name: str, numbers: Iterable[str]) -> str:
    """The name with its numbers, in order, written as these."""
    rest = iter(numbers)
    return _NUMBER.sub(lambda _: next(rest), name)


def _remark_template(remark: str, own: list[str]) -> str:
    """A remark that names the row's own layer ("= layers.3.b" beside layers.3.a) with that number left open."""
    return _IN_REMARK.sub(lambda match: f"\0{own.index(match[0])}\0" if match[0] in own else match[0], remark)


#: How much a value changed, at the end of a message: what repeated layers need not have in common.
_LARGEST = re.compile(r"(?<=, by at most )\d+(?:\.\d+)?(?:e[+-]?\d+)?\Z")


def messages(rows: Sequence[Line]) -> Iterator[tuple[Line, list[int]]]:
    """The same as `joined`, of rows that begin with a message: where their figures differ, the smallest and largest."""
    plain = [msgspec.structs.replace(row, cells=(_LARGEST.sub("", row.cells[0]), *row.cells[1:])) for row in rows]
    for line, positions in joined(plain):
        figures = [match[0] for n in positions if (match := _LARGEST.search(rows[n].cells[0]))]
        ends = dict.fromkeys((min(figures, key=float), max(figures, key=float)) if figures else ())
        yield msgspec.structs.replace(line, cells=(line.cells[0] + "..".join(ends), *line.cells[1:])), positions


def findings(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """The same findings, those of repeated layers told once; few enough stay as they are."""
    if len(found) <= FEW_FINDINGS:
        return tuple(found)
    folded = list(messages([Line((one.message, one.rule, one.severity.value)) for one in found]))
    first = {one.message: one for one in reversed(found)}
    told = []
    for line, positions in folded:
        message = line.cells[0]
        told.append(first.get(message) or found[positions[0]].summarize(message, found[0].target))
    return tuple(told)


#: Notes of one name that are told one by one; a model with bias=False throughout has hundreds of one kind.
FEW_NOTES = 3


def notes(oddities: Sequence[Oddity], verbose: bool) -> tuple[Oddity, ...]:
    """The first few of each name, and how many more there are; all where `verbose`."""
    if verbose:
        return tuple(oddities)
    told: list[Oddity] = []
    for name, several in _by_name(oddities).items():
        told.extend(several[:FEW_NOTES])
        if len(several) > FEW_NOTES:
            told.append(Oddity(name, f"and {len(several) - FEW_NOTES} more of this kind (-v tells each)"))
    return tuple(told)


def _by_name(oddities: Sequence[Oddity]) -> dict[str, list[Oddity]]:
    names: dict[str, list[Oddity]] = {}
    for odd in oddities:
        names.setdefault(odd.name, []).append(odd)
    return names


def _joined(same: list[tuple[int, tuple[int, ...], Line]], template: str) -> Iterable[tuple[Line, list[int]]]:
    if len({numbers for _, numbers, _ in same}) < len(same) or len(same) == 1:
        yield from ((row, [position]) for position, _, row in same)  # one name twice is two rows
        return
    boxes: Boxes = {tuple((n,) for n in numbers): (row, [position]) for position, numbers, row in same}
    for axis in range(len(same[0][1]) - 1, -1, -1):
        boxes = _merge(boxes, axis)
    for box, (row, positions) in boxes.items():
        yield _renamed(row, box, template) if len(positions) > 1 else row, positions


def _merge(boxes: Boxes, axis: int) -> Boxes:
    """Boxes that agree on every axis but one become one box."""
    lanes: dict[tuple[object, ...], list[tuple[tuple[int, ...], ...]]] = {}
    for box in boxes:
        lanes.setdefault((box[:axis], box[axis + 1 :]), []).append(box)
    merged = {}
    for lane in lanes.values():
        along = tuple(sorted(n for box in lane for n in box[axis]))
        found = [boxes[box] for box in lane]
        row, _ = min(found, key=lambda entry: entry[1][0])
        positions = sorted(position for _, those in found for position in those)
        merged[(*lane[0][:axis], along, *lane[0][axis + 1 :])] = (row, positions)
    return merged


def _renamed(row: Line, box: tuple[tuple[int, ...], ...], template: str) -> Line:
    name = numbered(row.cells[0], map(span, box))
    remark = re.sub("\0(\\d+)\0", lambda match: span(box[int(match[1])]), template)
    return msgspec.structs.replace(row, cells=(name, *row.cells[1:]), remark=remark)


def span(numbers: Sequence[int]) -> str:
    """`3`, `{0..11}`, `{0..3,8..11}`; at most a handful of runs, then how many there are."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = [f"{a}..{b}" if b > a + 1 else f"{a},{b}" if b > a else str(a) for a, b in runs[:6]]
    return "{" + ",".join(shown) + (f",… {len(numbers)} in all" if len(runs) > 6 else "") + "}"
