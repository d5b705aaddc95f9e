"""Repeated layers shown once: `layers.0.weight` … `layers.11.weight` as `layers.{0..11}.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from statecli.finding import Finding, Severity
from statecli.report import Line

_NUMBER = re.compile(r"(?:(?<=^)|(?<=[.\[]))\d{1,9}(?=[.\]:]|$)")

#: Findings that are told one by one even when they could be folded.
FEW_FINDINGS = 8

#: The numbers that vary along each axis -> (position and row of the first of them, how many rows).
Boxes = dict[tuple[tuple[int, ...], ...], tuple[int, Line, int]]


def lines(rows: Sequence[Line]) -> list[Line]:
    """The same rows, those that differ in nothing but numbers of their names joined, in order of first appearance."""
    alike: dict[tuple[object, ...], list[tuple[int, tuple[int, ...], Line]]] = {}
    for position, row in enumerate(rows):
        numbers = tuple(map(int, _NUMBER.findall(row.cells[0])))
        # A remark may name a layer itself ("= layers.0.weight"), so it is compared without its numbers.
        key = (_NUMBER.sub("#", row.cells[0]), row.cells[1:], re.sub(r"\d+", "#", row.remark), row.mood)
        alike.setdefault(key, []).append((position, numbers, row))
    folded: list[tuple[int, Line]] = []
    for same in alike.values():
        folded.extend(_joined(same))
    return [row for _, row in sorted(folded, key=lambda pair: pair[0])]


def findings(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """The same findings, those of repeated layers told once; few enough stay as they are."""
    if len(found) <= FEW_FINDINGS:
        return tuple(found)
    folded = lines([Line((one.message, one.rule, one.severity.value)) for one in found])
    first = {one.message: one for one in reversed(found)}
    told = []
    for line in folded:
        message, rule, severity = line.cells
        known = first.get(message)
        told.append(known or Finding(rule, Severity(severity), message, found[0].target))
    return tuple(told)


def _joined(same: list[tuple[int, tuple[int, ...], Line]]) -> Iterable[tuple[int, Line]]:
    if len(same) == 1:
        yield same[0][0], same[0][2]
        return
    boxes: Boxes = {tuple((n,) for n in numbers): (position, row, 1) for position, numbers, row in same}
    for axis in range(len(same[0][1]) - 1, -1, -1):
        boxes = _merge(boxes, axis)
    for box, (position, row, count) in boxes.items():
        yield position, _renamed(row, box) if count > 1 else row


def _merge(boxes: Boxes, axis: int) -> Boxes:
    """Boxes that agree on every axis but one become one box."""
    lanes: dict[tuple[object, ...], list[tuple[tuple[int, ...], ...]]] = {}
    for box in boxes:
        lanes.setdefault((box[:axis], box[axis + 1 :]), []).append(box)
    merged = {}
    for lane in lanes.values():
        along = tuple(sorted(n for box in lane for n in box[axis]))
        found = [boxes[box] for box in lane]
        position, row, _ = min(found, key=lambda entry: entry[0])
        merged[(*lane[0][:axis], along, *lane[0][axis + 1 :])] = (position, row, sum(entry[2] for entry in found))
    return merged


def _renamed(row: Line, box: tuple[tuple[int, ...], ...]) -> Line:
    numbers = iter(box)
    name = _NUMBER.sub(lambda _: span(next(numbers)), row.cells[0])
    return msgspec.structs.replace(row, cells=(name, *row.cells[1:]))


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
