"""Fold repeated layers into a line: `layers.0.weight` … `layers.11.weight` as `layers.{0..11}.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod

import msgspec

from statecli.core.finding import Finding
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.report import Line

_NUMBER = compile_on_use(r"(?:(?<=^)|(?<=[.\[]))(0|[1-9]\d{0,8})(?=[.\]:]|$)")
#: Characters at the end of a name that cannot belong to a number.
_NON_DIGITS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ._"
#: Number of a layer in a remark, where a name may also end at a comma or a space.
_NUMBER_IN_REMARK = compile_on_use(r"(?<=[.\[])(?:0|[1-9]\d{0,8})(?=[.\],: ]|$)")

#: Names that differ only in their numbers: an axis for each number in the name, with the numbers along this axis.
Box = tuple[tuple[int, ...], ...]
#: Positions of the rows of each box, in order.
Boxes = dict[Box, list[int]]
#: Rows that differ only in their numbers: the numbers, and the positions among all rows.
_AlikeRows = tuple[list[tuple[int, ...]], list[int]]


def fold_lines(rows: Sequence[Line]) -> list[Line]:
    """Join the rows that differ only in their layers' numbers, in the order of first appearance."""
    return [row for row, _ in fold_rows(rows)]


def fold_names(names: Iterable[str]) -> list[str]:
    """Fold names as `fold_lines` folds rows."""
    return [line.cells[0] for line in fold_lines([Line((name,)) for name in names])]


def fold_rows(rows: Sequence[Line]) -> list[tuple[Line, list[int]]]:
    """Fold rows as `fold_lines` does. Return each line with the positions of its rows, in order."""
    return fold_named_rows([row.cells[0] for row in rows], range(len(rows)), rows)


def fold_named_rows(names: Sequence[str], kinds: Sequence[int], lines: Sequence[Line]) -> list[tuple[Line, list[int]]]:
    """Fold many rows as `fold_rows` does. Each row has its own name, but shares its other cells with many rows.

    Row `i` is the line `lines[kinds[i]]` with the name `names[i]`.
    """
    tails: dict[tuple[tuple[str, ...], str, str], int] = {}
    #: Equal numbers for lines that differ only in the name; -1 if the remark may have numbers of the row's layers.
    tail_of = [-1 if line.remark else tails.setdefault((line.cells[1:], "", line.mood), len(tails)) for line in lines]
    alike: dict[tuple[str, str, int, int], _AlikeRows] = {}
    remarks: dict[int, str] = {}
    for position, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        # Split the numbers here, without `split_numbers`, because there may be a million names.
        end = len(name.rstrip(_NON_DIGITS)) + 1
        template, numbers = _split_beginning(name[:end])
        tail = tail_of[kind]
        if tail < 0:
            line = lines[kind]
            remark = _make_remark_template(line.remark, list(map(str, numbers)))
            tail = tails.setdefault((line.cells[1:], remark, line.mood), len(tails))
            remarks[tail] = remark
        # The number of numbers is part of the key, because a name may contain `#` itself.
        key = template, name[end:], len(numbers), tail
        rows = alike.get(key)
        if rows is None:
            rows = alike[key] = [], []
        rows[0].append(numbers)
        rows[1].append(position)
    folded_rows: list[tuple[Line, list[int]]] = []
    for (*_, tail), rows in alike.items():
        folded_rows.extend(_join_rows(rows, remarks.get(tail, ""), names, kinds, lines))
    return sorted(folded_rows, key=lambda pair: pair[1][0])


def split_numbers(name: str) -> tuple[str, tuple[int, ...]]:
    """Replace the layers' numbers in a name by `#`. Return this text and the numbers."""
    end = len(name.rstrip(_NON_DIGITS)) + 1
    template, numbers = _split_beginning(name[:end])
    return template + name[end:], numbers


@lru_cache(maxsize=1024)
def _split_beginning(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the text with `#` for each number, and the numbers. Cached, because many names have the same start."""
    parts = _NUMBER.split(text)
    return "#".join(parts[::2]), tuple(map(int, parts[1::2]))


def insert_numbers(name: str, numbers: Iterable[str]) -> str:
    """Replace the layers' numbers in a name by the given texts."""
    remaining_numbers = iter(numbers)
    return _NUMBER.sub(lambda _: next(remaining_numbers), name)


def _make_remark_template(remark: str, own_numbers: list[str]) -> str:
    """Return the remark with placeholders for numbers of the row's name: the 3 in "= layers.3.b" for `layers.3.a`."""
    return _NUMBER_IN_REMARK.sub(
        lambda match: f"\0{own_numbers.index(match[0])}\0" if match[0] in own_numbers else match[0], remark
    )


#: Size of a change at the end of a message, which may differ between repeated layers.
_LARGEST_CHANGE = compile_on_use(r"(?<=, by at most )\d+(?:\.\d+)?(?:e[+-]?\d+)?\Z")


def fold_messages(rows: Sequence[Line]) -> Iterator[tuple[Line, list[int]]]:
    """Fold rows whose first cell is a message, as `fold_rows` does. Different largest changes become a range."""
    rows_without_figures = [
        msgspec.structs.replace(row, cells=(_LARGEST_CHANGE.sub("", row.cells[0]), *row.cells[1:])) for row in rows
    ]
    for line, positions in fold_rows(rows_without_figures):
        figures = [match[0] for n in positions if (match := _LARGEST_CHANGE.search(rows[n].cells[0]))]
        ends = dict.fromkeys((min(figures, key=float), max(figures, key=float)) if figures else ())
        yield msgspec.structs.replace(line, cells=(line.cells[0] + "..".join(ends), *line.cells[1:])), positions


def fold_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Join the findings of repeated layers."""
    rows = [Line((finding.message, finding.rule, finding.severity.value)) for finding in findings]
    first = {finding.message: finding for finding in reversed(findings)}
    joined_findings = []
    for line, positions in fold_messages(rows):
        message = line.cells[0]
        joined_findings.append(first.get(message) or findings[positions[0]].summarize(message, findings[0].target))
    return tuple(joined_findings)


#: Largest number of notes with the same name; a model without biases has hundreds of the same kind.
MAX_NOTES_PER_NAME = 3


def limit_notes(oddities: Sequence[Oddity], verbose: bool) -> tuple[Oddity, ...]:
    """Return the first notes of each kind (`Oddity.name`) and a count of the rest. With `verbose`, return all notes.

    Only `verbose` lists parameters registered as None, because most models have several on purpose.
    """
    if verbose:
        return tuple(oddities)
    limited_oddities: list[Oddity] = []
    listed_oddities = [oddity for oddity in oddities if oddity.kind is not OddityKind.NONE_PARAMETER]
    for name, same_name in group_by(listed_oddities, lambda oddity: oddity.name).items():
        limited_oddities.extend(same_name[:MAX_NOTES_PER_NAME])
        if len(same_name) > MAX_NOTES_PER_NAME:
            limited_oddities.append(
                Oddity(name, f"and {len(same_name) - MAX_NOTES_PER_NAME} more of this kind (-v lists each)")
            )
    return tuple(limited_oddities)


def _join_rows(
    alike: _AlikeRows, template: str, names: Sequence[str], kinds: Sequence[int], lines: Sequence[Line]
) -> Iterator[tuple[Line, list[int]]]:
    """Join rows that differ only in their numbers. Yield each folded line with the positions of its rows."""
    numbers, positions = alike

    def build_line(position: int, box: Box | None = None) -> Line:
        line, name = lines[kinds[position]], names[position]
        if box is None:
            return line if line.cells[0] == name else msgspec.structs.replace(line, cells=(name, *line.cells[1:]))
        name = insert_numbers(name, map(format_numbers, box))
        remark = re.sub("\0(\\d+)\0", lambda match: format_numbers(box[int(match[1])]), template)
        return msgspec.structs.replace(line, cells=(name, *line.cells[1:]), remark=remark)

    if len(numbers) == 1 or len(set(numbers)) < len(numbers):  # rows with the same name stay separate
        yield from ((build_line(position), [position]) for position in positions)
        return
    common_box = tuple(tuple(sorted(set(axis))) for axis in zip(*numbers, strict=True))
    if prod(map(len, common_box)) == len(numbers):
        yield build_line(positions[0], common_box), positions
        return
    boxes: Boxes = {
        tuple((n,) for n in row_numbers): [position] for row_numbers, position in zip(numbers, positions, strict=True)
    }
    for axis in range(len(common_box) - 1, -1, -1):
        boxes = _merge_boxes(boxes, axis)
    for box, own_positions in boxes.items():
        yield build_line(own_positions[0], box if len(own_positions) > 1 else None), own_positions


def _merge_boxes(boxes: Boxes, axis: int) -> Boxes:
    """Merge boxes that differ only on `axis`. A box has the numbers of folded names, by their position in the name."""
    merged_boxes = {}
    for (before, after), lane in group_by(boxes, lambda box: (box[:axis], box[axis + 1 :])).items():
        merged_axis = tuple(sorted(n for box in lane for n in box[axis]))
        positions = sorted(position for box in lane for position in boxes[box])
        merged_boxes[(*before, merged_axis, *after)] = positions
    return merged_boxes


def format_numbers(numbers: Sequence[int]) -> str:
    """Format numbers as `3`, `{0..11}` or `{0..3,8..11}`. Show at most six runs, and then the total: `… 40 in all`."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = list_runs(numbers)
    return "{" + ",".join(runs[:6]) + (f",… {len(numbers)} in all" if len(runs) > 6 else "") + "}"


def list_runs(numbers: Sequence[int]) -> list[str]:
    """Format consecutive numbers as runs, in order: `0..3`, `5`, `8,9`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return [f"{a}..{b}" if b > a + 1 else f"{a},{b}" if b > a else str(a) for a, b in runs]
