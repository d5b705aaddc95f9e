"""Recognise fused tensors: tensors concatenated along the rows, and stacks of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, islice, permutations
from math import gcd, lgamma, log, prod
from typing import NamedTuple

from msgspec.structs import replace

from statecli.commands.diff.result import Change, Status, Transformation, TransformationKind
from statecli.commands.diff.transformations.evidence import MIN_BITS, count_bits, is_evident
from statecli.commands.diff.transformations.views import (
    get_data,
    locate,
    name_rounding,
    narrow,
    permute,
    select,
    split_rows,
    take_rows,
)
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import TensorData, TensorInfo
from statecli.values.element_checks import MAX_LISTED_ROWS, CheckResult, CheckTask, Operation, can_copy, check_elements
from statecli.values.row_digests import RowTask, compute_row_digests

#: Largest number of tensors of a module that are tried as parts of a join, and largest number of parts of a join.
_MAX_CANDIDATES = 12
_MAX_JOINED = 4
#: Smallest number of parts of a join in which one part may differ wholly.
_MIN_PARTS_WITH_WRONG = 3
#: Smallest fraction of the rows of a part that must be in the fused tensor.
_MIN_ROW_SHARE = 0.5
#: Largest number of items in a stack, such as the experts of a layer.
_MAX_STACKED = 1024
_NUMBER = compile_on_use(r"(?<=\.)[0-9]{1,6}(?=\.)|^[0-9]{1,6}(?=\.)")


class _Row(NamedTuple):
    """A tensor that exists on only one side. `number` is the index of its change; `data` has strides."""

    number: int
    row: TensorInfo
    data: TensorData

    @property
    def fqn(self) -> str:
        return self.row.fqn

    @property
    def rows(self) -> int:
        """Size of the first dimension; 0 for a scalar."""
        return self.data.shape[0] if self.data.shape else 0


def find_joins(changes: Sequence[Change], *, jobs: int) -> dict[int, Transformation]:
    """Return the joined and split tensors, keyed by the index of the fused tensor in `changes`.

    The parts are tensors of the other side with the same numbers in their names. The join may be transposed as a
    whole, and the values of the parts may have been rounded to another dtype. At least one part is exact, and in every
    part at least half of the rows are equal.
    """
    added_rows, removed_rows = _list_rows(changes, Status.ADDED), _list_rows(changes, Status.REMOVED)
    joins: dict[int, Transformation] = {}
    datas: dict[int, TensorData] = {}
    for wholes, parts, kinds in (
        (added_rows, removed_rows, (TransformationKind.JOINED, TransformationKind.STACKED)),
        (removed_rows, added_rows, (TransformationKind.SPLIT, TransformationKind.UNSTACKED)),
    ):
        joins |= _find_fused(wholes, parts, kinds[0], jobs)
        joins |= _find_stacks([row for row in wholes if row.number not in joins], parts, kinds[1], jobs)
        datas |= {row.number: row.data for row in wholes}
    return {
        n: join
        for n, join in joins.items()
        if is_evident(datas[n], changes[n].fqn, join.elements, join.exceptions, 1 + len(changes))
    }


def _list_rows(changes: Sequence[Change], status: Status) -> list[_Row]:
    rows = []
    for n, change in enumerate(changes):
        side = change.after if status is Status.ADDED else change.before
        if change.status is status and side is not None and (data := get_data(side)) is not None:
            rows.append(_Row(n, side, locate(data, side.fqn)))
    return rows


# --- rows of several tensors one after the other ---------------------------------------------------------------------


def _find_fused(
    wholes: Sequence[_Row], parts: Sequence[_Row], kind: TransformationKind, jobs: int
) -> dict[int, Transformation]:
    """Find fused tensors, then transposes of fused tensors."""
    by_numbers = _group_by_numbers(parts)
    transposes = [whole._replace(data=permute(whole.data, (1, 0))) for whole in wholes if _is_matrix(whole)]
    joins: dict[int, Transformation] = {}
    for is_transposed, tested_wholes in ((False, wholes), (True, transposes)):
        candidates = [(whole, _list_fitting(whole, by_numbers)) for whole in tested_wholes if whole.number not in joins]
        concatenations = _find_concatenations(candidates, kind, jobs)
        joins |= {n: replace(join, is_transposed=is_transposed) for n, join in concatenations.items()}
    return joins


def _is_matrix(row: _Row) -> bool:
    return len(row.data.shape) == 2 and min(row.data.shape) > 1


def _find_concatenations(
    candidates: Sequence[tuple[_Row, Sequence[_Row]]], kind: TransformationKind, jobs: int
) -> dict[int, Transformation]:
    """Return the concatenations among `candidates` (fused tensor, possible parts). All parts have the same dtype."""
    fitting_of = [
        (whole, same_dtype_rows)
        for whole, rows in candidates
        for same_dtype_rows in _group_by_dtype(rows)
        if len(same_dtype_rows) > 1
    ]
    rows_by_key: dict[_DigestKey, _Row] = {}
    for whole, fitting in fitting_of:
        rows_by_key |= {_build_digest_key(row, whole, fitting[0], kind): row for row in (whole, *fitting)}
    digests = _read_digests(rows_by_key, jobs)
    joins: dict[int, Transformation] = {}
    for whole, fitting in fitting_of:
        of_rows = {
            row.number: rows
            for row in (whole, *fitting)
            if (rows := digests.get(_build_digest_key(row, whole, fitting[0], kind))) is not None
        }
        counts = Counter(of_rows.get(whole.number, ()))
        # Rows that occur once show the order of the parts; other rows may be anywhere.
        places = {digest: n for n, digest in enumerate(of_rows.get(whole.number, ())) if counts[digest] == 1}
        related = [
            row for row in fitting if places and _compute_share(of_rows.get(row.number, ()), counts) >= _MIN_ROW_SHARE
        ]
        for parts in (*_list_combinations(whole, related), *_list_with_wrong_part(whole, related, fitting)):
            layout = _find_layout(of_rows[whole.number], parts, of_rows, places)
            transformation = _check_layout(whole, layout, kind, jobs) if layout else None
            if transformation is not None:
                joins[whole.number] = transformation
                break
    return joins


def _group_by_dtype(rows: Sequence[_Row]) -> list[list[_Row]]:
    groups = group_by(rows, lambda row: row.data.dtype)
    return list(groups.values())


#: Number of a tensor, and the dtype to which its values are rounded for its digests.
_DigestKey = tuple[int, str | None]


def _build_digest_key(row: _Row, whole: _Row, part: _Row, kind: TransformationKind) -> _DigestKey:
    if whole.data.dtype == part.data.dtype:
        return row.number, None
    return row.number, (part if kind in _SPLITTING_KINDS else whole).data.dtype


def _read_digests(rows: Mapping[_DigestKey, _Row], jobs: int) -> dict[_DigestKey, tuple[int, ...]]:
    """Return the checksums of the rows of each readable tensor."""
    results = compute_row_digests([RowTask(row.fqn, row.data, dtype) for (_, dtype), row in rows.items()], jobs=jobs)
    return {key: result for key, result in zip(rows, results, strict=True) if isinstance(result, tuple)}


def _compute_share(digests: Sequence[int], whole: Container[int]) -> float:
    return sum(digest in whole for digest in digests) / len(digests) if digests else 0.0


def _group_by_numbers(parts: Sequence[_Row]) -> dict[tuple[tuple[str, ...], str], list[_Row]]:
    """Group tensors by the numbers in their names, and by the last name component."""
    return group_by(parts, lambda row: (_list_numbers(row.fqn), row.fqn.rpartition(".")[2]))


def _list_fitting(whole: _Row, by_numbers: Mapping[tuple[tuple[str, ...], str], Sequence[_Row]]) -> list[_Row]:
    """Return the tensors with the same numbers in their names, such as the layer's, that may be in the fused tensor."""
    leaf = whole.fqn.rpartition(".")[2]
    leaves = dict.fromkeys((leaf, leaf.rpartition("_")[2]))  # in_proj_weight has the rows of q_proj.weight
    rows = [row for name in leaves for row in by_numbers.get((_list_numbers(whole.fqn), name), ())]
    return [row for row in rows if _may_be_part(row, whole)]


def _may_be_part(row: _Row, whole: _Row) -> bool:
    is_same_kind = can_copy(row.data.dtype, whole.data.dtype) and row.data.shape[1:] == whole.data.shape[1:]
    return is_same_kind and len(row.data.shape) == len(whole.data.shape) and row.rows < whole.rows


def _list_combinations(whole: _Row, related: Sequence[_Row]) -> Iterator[tuple[_Row, ...]]:
    """Yield the tensors that together have as many rows as the fused tensor."""
    for count in range(2, _MAX_JOINED + 1) if len(related) <= _MAX_CANDIDATES else ():
        for combination in combinations(related, count):
            if sum(row.rows for row in combination) == whole.rows:
                yield combination


def _list_with_wrong_part(whole: _Row, related: Sequence[_Row], fitting: Sequence[_Row]) -> Iterator[tuple[_Row, ...]]:
    """Yield the related tensors plus an unrelated tensor, if it is the only one with the missing number of rows."""
    if not 2 <= len(related) < _MAX_JOINED:
        return
    rows = whole.rows - sum(row.rows for row in related)
    others = [row for row in fitting if row not in related and row.rows == rows]
    if len(others) == 1:
        yield (*related, *others)


class _Layout(NamedTuple):
    """Order of the parts in a fused tensor: a block of each part, starting at `starts`, and then `repeats` - 1 more.

    Concatenated parts have one repetition. q, k and v that alternate have a repetition for each head. `wrong_rows` are
    the rows of each part that are not at their place.
    """

    parts: list[_Row]
    starts: list[int]
    repeats: int
    wrong_rows: list[list[int]]


def _find_layout(
    whole: Sequence[int], parts: Sequence[_Row], digests: Mapping[int, Sequence[int]], places: Mapping[int, int]
) -> _Layout | None:
    """Return the layout with the fewest wrong rows, by the checksums of all rows, or None if parts have no place."""
    divisor = gcd(*(part.rows for part in parts))
    best, fewest = None, len(whole)
    for repeats in [n for n in range(1, divisor + 1) if divisor % n == 0]:
        ordered_parts = _order_parts(parts, repeats, places, digests)
        starts = list(accumulate((part.rows // repeats for part in ordered_parts), initial=0))
        wrong_rows = []
        for part, start in zip(ordered_parts, starts, strict=False):
            rows, period = part.rows // repeats, starts[-1]
            part_places = (repeat * period + start + n for repeat in range(repeats) for n in range(rows))
            pairs = zip(part_places, digests.get(part.number, ()), strict=False)
            wrong_rows.append([n for n, (place, digest) in enumerate(pairs) if whole[place] != digest])
        count = sum(map(len, wrong_rows))
        if ordered_parts and count < fewest:
            best, fewest = _Layout(ordered_parts, starts[:-1], repeats, wrong_rows), count
        if best is not None and not fewest:
            break
    return best


def _order_parts(
    parts: Sequence[_Row], repeats: int, places: Mapping[int, int], digests: Mapping[int, Sequence[int]]
) -> list[_Row]:
    """Return the parts in the order of their rows. A single part without a row in `places` takes the remaining place.

    Return [] if several parts have no place.
    """
    period = sum(part.rows for part in parts) // repeats
    start_of: dict[int, int] = {}
    for part in parts:
        found = ((n, places[digest]) for n, digest in enumerate(digests.get(part.number, ())) if digest in places)
        for n, place in islice(found, 1):
            start_of[part.number] = place % period - n % (part.rows // repeats)
    unplaced_parts = [part for part in parts if part.number not in start_of]
    if len(unplaced_parts) > 1:
        return []
    ordered_parts = sorted((part for part in parts if part.number in start_of), key=lambda part: start_of[part.number])
    for part in unplaced_parts:
        ends = accumulate((other.rows // repeats for other in ordered_parts), initial=0)
        places_of_gaps = (
            n for n, (other, end) in enumerate(zip(ordered_parts, ends, strict=False)) if start_of[other.number] != end
        )
        ordered_parts.insert(next(places_of_gaps, len(ordered_parts)), part)
    return ordered_parts


#: Kinds of transformations that split an old fused tensor into new parts.
_SPLITTING_KINDS = frozenset((TransformationKind.SPLIT, TransformationKind.UNSTACKED))


def _build_copy_task(name: str, part: TensorData, of_whole: TensorData, kind: TransformationKind) -> CheckTask:
    """Return the check that a slice of the fused tensor equals `part`, after rounding to the new dtype."""
    sides = (of_whole, part) if kind in _SPLITTING_KINDS else (part, of_whole)
    return CheckTask(name, Operation.COPY, *sides)


def _check_layout(whole: _Row, layout: _Layout, kind: TransformationKind, jobs: int) -> Transformation | None:
    """Check every element of the parts. Return the join, or None for too many exceptions."""
    tasks = []
    period = sum(part.rows for part in layout.parts) // layout.repeats
    for part, start in zip(layout.parts, layout.starts, strict=True):
        rows = part.rows // layout.repeats
        part_view, of_whole = part.data, narrow(whole.data, 0, start, rows)
        if layout.repeats > 1:
            part_view, of_whole = split_rows(part.data, rows), narrow(split_rows(whole.data, period), 1, start, rows)
        tasks.append(_build_copy_task(whole.fqn, part_view, of_whole, kind))
    results = check_elements(tasks, jobs=jobs)
    if layout.repeats > 1:  # the checks count the blocks of a part, not its rows
        results = [
            replace(result, rows=len(wrong_rows), first_rows=tuple(wrong_rows[:MAX_LISTED_ROWS]))
            for result, wrong_rows in zip(results, layout.wrong_rows, strict=True)
            if isinstance(result, CheckResult)
        ]
    join = _judge(results, tasks, [part.rows for part in layout.parts], [part.fqn for part in layout.parts], kind)
    if join is None or layout.repeats == 1:
        return join
    return replace(join, blocks=tuple(part.rows // layout.repeats for part in layout.parts))


def _judge(
    results: Sequence[object],
    tasks: Sequence[CheckTask],
    sizes: Sequence[int],
    names: Sequence[str],
    kind: TransformationKind,
) -> Transformation | None:
    """Return the join if at least one part is exact and, in each part, at least half of the rows are equal.

    One of three or more parts, or a quarter of many parts, may differ completely if all other parts are exact.
    """
    checked = [result for result in results if isinstance(result, CheckResult) and result.elements]
    if len(checked) < len(tasks) or all(result.exceptions for result in checked):
        return None
    different_count = sum(2 * result.rows > size for result, size in zip(checked, sizes, strict=True))
    exact_count = sum(not result.exceptions for result in checked)
    if different_count and (len(tasks) < _MIN_PARTS_WITH_WRONG or exact_count + different_count < len(tasks)):
        return None
    if different_count > max(1, len(tasks) // 4):
        return None
    wrong_results = [(name, result) for name, result in zip(names, checked, strict=True) if result.exceptions]
    return Transformation(
        kind,
        sum(result.elements for result in checked),
        sum(result.exceptions for result in checked),
        sources=tuple(names),
        differing=tuple(name for name, _ in wrong_results),
        rows=sum(result.rows for _, result in wrong_results),
        first_rows=wrong_results[0][1].first_rows if len(wrong_results) == 1 else (),
        rounding=name_rounding(tasks[0].before.dtype, tasks[0].after.dtype),
    )


# --- stacks ----------------------------------------------------------------------------------------------------------


def _find_stacks(
    wholes: Sequence[_Row], parts: Sequence[_Row], kind: TransformationKind, jobs: int
) -> dict[int, Transformation]:
    """Find fused tensors that are stacks of tensors (or of pairs of tensors) whose names differ only in a number."""
    groups: dict[tuple[str, str], dict[int, _Row]] = {}
    for row in parts:
        for number in _NUMBER.finditer(row.fqn):
            template = row.fqn[: number.start()], row.fqn[number.end() :]
            groups.setdefault(template, {})[int(number[0])] = row
    lists: dict[tuple[str, ...], list[list[_Row]]] = {}
    for (start, end), items in groups.items():
        if 1 < len(items) <= _MAX_STACKED and sorted(items) == list(range(len(items))):
            lists.setdefault(_list_numbers(start + end), []).append([items[n] for n in range(len(items))])
    stacks: dict[int, Transformation] = {}
    for whole in wholes:
        items_of = [items for items in lists.get(_list_numbers(whole.fqn), ()) if len(items) == whole.rows]
        pairs = permutations(items_of, 2) if len(items_of) <= _MAX_CANDIDATES else ()
        for item_lists in (*((items,) for items in items_of), *pairs):
            transformation = _check_stack(whole, list(zip(*item_lists, strict=True)), kind, jobs)
            if transformation is not None:
                stacks[whole.number] = transformation
                break
    return stacks


def _list_numbers(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part.isdecimal())


def _check_stack(
    whole: _Row, items: Sequence[tuple[_Row, ...]], kind: TransformationKind, jobs: int
) -> Transformation | None:
    """Return the stack if each item equals one tensor or two concatenated tensors, else None."""
    rows = [row for item in items for row in item]
    shape = whole.data.shape[1:]
    axes = list(range(len(shape)))
    if len({row.data.dtype for row in rows}) > 1 or not can_copy(rows[0].data.dtype, whole.data.dtype):
        return None
    if any(len(row.data.shape) != len(shape) for row in rows) or not prod(shape):
        return None
    orders = [axes] if len(shape) != 2 else [axes, [1, 0]]  # the items of a stack may be transposed
    for order in orders:
        tasks = list(_build_stack_tasks(whole, items, order, kind))
        numbers = _order_items(whole.fqn, tasks[:: len(items[0])], kind, jobs) if len(tasks) == len(rows) else []
        ordered_items = [items[n] for n in numbers]
        tasks = list(_build_stack_tasks(whole, ordered_items, order, kind))
        if not numbers or len(tasks) < len(rows):
            continue
        sizes = [(task.after.shape or (1,))[0] for task in tasks]
        names = [row.fqn for item in ordered_items for row in item]
        stack = _judge(check_elements(tasks, jobs=jobs), tasks, sizes, names, kind)
        ways = lgamma(len(items) + 1) / log(2) if numbers != sorted(numbers) else 0
        if stack is not None and count_bits(whole.data, whole.fqn, stack.elements, stack.exceptions) >= MIN_BITS + ways:
            return replace(stack, is_transposed=order != axes)
    return None


def _order_items(name: str, tasks: Sequence[CheckTask], kind: TransformationKind, jobs: int) -> list[int]:
    """Return the tensors' numbers in the order of the stack's items, which may be the text order (10 before 2).

    Checksums of the first elements of each item decide; items without a place take the remaining places. Return [] if
    most items have no place. `tasks`: the check of each item with the tensor of its number.
    """
    sides = [[_add_axis(take_rows(side)) for side in (task.before, task.after)] for task in tasks]
    dtypes = [None if before.dtype == after.dtype else after.dtype for before, after in sides]
    digest_tasks = [
        RowTask(name, sides[n][side], dtypes[n], is_strong=True) for side in (0, 1) for n in range(len(sides))
    ]
    digests = compute_row_digests(digest_tasks, jobs=jobs)
    old, new = digests[: len(tasks)], digests[len(tasks) :]
    of_whole, of_parts = (old, new) if kind in _SPLITTING_KINDS else (new, old)
    places: dict[object, list[int]] = {}
    for n, digest in enumerate(of_parts):
        places.setdefault(digest if isinstance(digest, tuple) else None, []).append(n)
    numbers = [
        places[digest].pop(0) if isinstance(digest, tuple) and places.get(digest) else None for digest in of_whole
    ]
    remaining_numbers = iter(sorted(n for unused in places.values() for n in unused))
    is_known = 2 * sum(number is not None for number in numbers) >= len(tasks)
    return [next(remaining_numbers) if number is None else number for number in numbers] if is_known else []


def _add_axis(data: TensorData) -> TensorData:
    assert data.strides is not None  # noqa: S101 - narrows the type
    return replace(data, shape=(1, *data.shape), strides=(0, *data.strides))


def _build_stack_tasks(
    whole: _Row, items: Sequence[tuple[_Row, ...]], order: Sequence[int], kind: TransformationKind
) -> Iterator[CheckTask]:
    """Yield a check for each tensor of a stack, up to the first tensor whose shape does not fit."""
    axis = order.index(0) if order else 0
    for n, item in enumerate(items):
        target, start = select(whole.data, n), 0
        for row in item:
            view = permute(row.data, order)
            target_view = target
            if len(item) > 1:
                size = view.shape[axis] if view.shape else 0
                if not size or start + size > target.shape[axis]:
                    return
                target_view = narrow(target, axis, start, size)
                start += size
            if view.shape != target_view.shape:
                return
            yield _build_copy_task(whole.fqn, view, target_view, kind)
        if len(item) > 1 and start != target.shape[axis]:
            return
