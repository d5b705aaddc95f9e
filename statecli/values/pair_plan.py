"""Plan the comparison of a pair of tensors: the tasks, or the reason why the values cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from statecli import values
from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import StateError, UnreadableError
from statecli.core.ggml_types import BLOCK_SIZES
from statecli.core.model_state import TensorData, TensorInfo
from statecli.values import sparse
from statecli.values.compare_task import TASK_ELEMENTS, CompareTask
from statecli.values.delta import CompareOptions, Delta
from statecli.values.elements import find_element
from statecli.values.ggml_blocks import find_ggml_type, list_stored_data, to_readable, to_stored_blocks
from statecli.values.ranges import get_element_width, is_run, prefetch_archive_ends, resolve_data
from statecli.values.read import explain_not_numeric, find_piece, is_plain
from statecli.workers.task import Piece

#: Number of pairs that are planned together, so that the ends of all their remote archives are fetched at once.
PAIRS_PLANNED_TOGETHER = 512


class Pair(msgspec.Struct, frozen=True, gc=False):
    """Two tensors of equal shape whose values are compared."""

    before: TensorInfo
    after: TensorInfo


class NotCompared(msgspec.Struct, frozen=True, gc=False):
    """Reason why the values of a pair could not be compared.

    `reshaped`: the shapes differ.
    """

    reason: str
    reshaped: bool = False


Plan = list[CompareTask] | Delta | NotCompared | StateError


def is_suspect(plan: Plan) -> bool:
    """Return whether a result found without comparing values may come from a damaged file."""
    return isinstance(plan, StateError) or (isinstance(plan, Delta) and plan.changed > 0)


def plan_pairs(pairs: Sequence[Pair], options: CompareOptions) -> Iterator[Plan]:
    """Yield the plan of each pair, in order: tasks, a result without tasks, or the reason for no comparison."""
    for start in range(0, len(pairs), PAIRS_PLANNED_TOGETHER):
        chunk = pairs[start : start + PAIRS_PLANNED_TOGETHER]
        datas = [data for pair in chunk for tensor in (pair.before, pair.after) for data in list_stored_data(tensor)]
        with prefetch_archive_ends(*datas):
            yield from (_plan_or_error(start + n, pair, options) for n, pair in enumerate(chunk))


def _plan_or_error(number: int, pair: Pair, options: CompareOptions) -> Plan:
    try:
        return _plan_pair(number, pair, options)
    except StateError as error:
        # Keep a MalformedError, a subclass of UnreadableError: it means that a file is damaged.
        return NotCompared(str(error)) if type(error) is UnreadableError else error


def _plan_pair(number: int, pair: Pair, options: CompareOptions) -> Plan:
    if pair.before.layout.startswith("sparse") and pair.before.layout == pair.after.layout:
        return _compare_sparse(pair, options)
    parts = _match_parts(pair)
    if isinstance(parts, NotCompared):
        return parts
    tasks: list[CompareTask] = []
    for name, before, after in parts:
        reason = _explain_incomparable(before, after)
        if reason:
            return NotCompared(reason)
        tasks += _build_tasks(number, name, before, after)
    return tasks


def _compare_sparse(pair: Pair, options: CompareOptions) -> Delta | NotCompared:
    needed_parts = sparse.PARTS_OF_LAYOUT.get(pair.after.layout, ("values",))
    if not all({name for name, _ in tensor.parts}.issuperset(needed_parts) for tensor in (pair.before, pair.after)):
        return NotCompared("its values or indices are missing from the file")
    return sparse.compare_sparse(pair.before, pair.after, options)


#: Layouts of nested tensors -> two groups of part names: parts with the inner shapes, and parts with the positions of
#: the inner tensors in the values.
RAGGED_PARTS = {"nested": (("sizes",), ("strides", "offsets")), "jagged": (("offsets", "lengths"), ())}


def _match_ragged(pair: Pair) -> list[tuple[str, TensorData, TensorData]] | NotCompared:
    """Return the values of two nested tensors. If inner tensors differ in shape or order, return this difference."""
    before, after = dict(pair.before.parts), dict(pair.after.parts)
    if "values" not in after:
        return NotCompared("its values are not in the file")
    for names, outcome in zip(RAGGED_PARTS[pair.after.layout], (_RESHAPED, _REORDERED), strict=True):
        for name in after.keys() & set(names):
            if not sparse.is_same_data(before[name], after[name], f"{pair.after.fqn}: {name}"):
                return outcome
    return [(pair.after.fqn, before["values"], after["values"])]


_RESHAPED = NotCompared("the shapes of its inner tensors differ", reshaped=True)
_REORDERED = NotCompared("its inner tensors have another order than before")


def _match_parts(pair: Pair) -> list[tuple[str, TensorData, TensorData]] | NotCompared:
    """Return the named strided tensors to compare: the tensor itself, or the parts of a sparse tensor or subclass."""
    before, after = pair.before, pair.after
    if before.dtype != after.dtype and "numpy" in (before.dtype + after.dtype):
        return NotCompared(f"statecli does not compare {before.dtype} with {after.dtype}")
    if before.data is not None and after.data is not None:
        # Here the parts are attributes that are tensors. A name on one side only is compared as a setting.
        attributes = dict(before.parts)
        pairs = [(f"{after.fqn}: {name}", attributes[name], new) for name, new in after.parts if name in attributes]
        if mismatched_name := next((name for name, old, new in pairs if old.shape != new.shape), None):
            return NotCompared(f"the shape of its attribute {mismatched_name.removeprefix(f'{after.fqn}: ')} differs")
        return [(after.fqn, *_convert_alike(before.data, after.data)), *pairs]
    names = [name for name, _ in before.parts]
    if before.parts and after.parts and before.layout == after.layout and names == [name for name, _ in after.parts]:
        if before.layout in RAGGED_PARTS:
            return _match_ragged(pair)
        part_pairs = zip(names, before.parts, after.parts, strict=True)
        return [(f"{after.fqn}: {name}", old, new) for name, (_, old), (_, new) in part_pairs]
    if before.layout != after.layout:
        return NotCompared(f"the layout changed from {before.layout} to {after.layout}")
    return NotCompared(
        next(filter(None, map(_explain_no_values, (before, after))), "the two tensors have different inner tensors")
    )


def _convert_alike(before: TensorData, after: TensorData) -> tuple[TensorData, TensorData]:
    """Return both tensors as quantized blocks if their ggml types are equal. Otherwise decode each if gguf can."""
    convert = to_stored_blocks if find_ggml_type(before.storage) == find_ggml_type(after.storage) else to_readable
    return convert(before), convert(after)


def _explain_no_values(tensor: TensorInfo) -> str | None:
    return None if tensor.data is not None or tensor.parts else values.stats.explain_no_data(tensor)


def _explain_incomparable(before: TensorData, after: TensorData) -> str | None:
    """Return why two tensors cannot be compared element by element, or None if they can be compared.

    Elements other than numbers can be compared bit for bit.
    """
    if before.dtype != after.dtype and BLOCK_SIZES.keys() & {before.dtype, after.dtype}:
        return explain_not_numeric_data(before) or explain_not_numeric_data(after)
    if before.shape != after.shape:
        return (
            f"its inner tensors have the shape {list(before.shape)} in the first checkpoint, but {list(after.shape)} "
            "in the second"
        )
    elements = find_element(before.dtype), find_element(after.dtype)
    reason = explain_not_numeric_data(before) or explain_not_numeric_data(after)
    if before.dtype == after.dtype and None not in elements and (before.quantizer is None) is (after.quantizer is None):
        return None
    if reason is None and elements[0] and elements[1] and elements[0].values != elements[1].values:
        return f"an element of {before.dtype} and an element of {after.dtype} contain different numbers of values"
    return reason


def explain_not_numeric_data(data: TensorData) -> str | None:
    """Return why the elements of a stored tensor are not numbers, or None if they are."""
    return explain_not_numeric(data.dtype, data.quantizer is not None)


def _build_tasks(number: int, name: str, before: TensorData, after: TensorData) -> Iterator[CompareTask]:
    elements = math.prod(after.shape)
    before_pieces, after_pieces = _find_pieces(before, name), _find_pieces(after, name)
    if not before_pieces or not after_pieces:
        yield CompareTask(number, name, 0, elements, before, after)
        return
    starts = sorted({*before_pieces, *after_pieces, *range(0, elements, TASK_ELEMENTS)})
    before_piece, after_piece = before_pieces[0], after_pieces[0]
    for start, stop in zip(starts, [*starts[1:], elements], strict=True):
        before_piece, after_piece = before_pieces.get(start, before_piece), after_pieces.get(start, after_piece)
        yield CompareTask(number, name, start, stop - start, before_piece, after_piece)


def _find_pieces(data: TensorData, name: str) -> dict[int, Piece]:
    """Return the contiguous pieces of a tensor. The key of a piece is the index of its first element.

    The offset of each piece is the offset that element 0 would have in this piece's file. Return an empty dict if the
    elements are in another order, or if the stored bytes are not the elements themselves.
    """
    data = resolve_data(data, name)
    boxes = data.storage.boxes
    if boxes is None:
        single_piece = find_piece(data)
        return {0: single_piece} if single_piece and math.prod(data.shape) else {}
    if not is_plain(data) or data.offset or math.prod(data.shape) != math.prod(boxes.shape):
        return {}
    pieces: dict[int, Piece] = {}
    strides = contiguous_strides(boxes.shape)
    for box in sorted(boxes.boxes, key=lambda box: box.start):
        start, count = sum(at * step for at, step in zip(box.start, strides, strict=True)), math.prod(box.data.shape)
        piece = find_piece(resolve_data(box.data, name)) if is_run(box.data.shape, boxes.shape) else None
        if count and piece is None:
            return {}
        if count and piece:
            pieces[start] = Piece(piece.path, piece.offset - start * get_element_width(data.dtype), data.dtype)
    return pieces
