"""Columns of the list: the text of each cell, the key of each order, and which columns fit."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from statecli.core.model_state import Kind, Stats, TensorInfo
from statecli.core.natural_order import make_natural_key
from statecli.core.units import format_count, format_kind, format_number, format_shape, format_size

#: Significant digits of a statistic in the list.
DIGITS = 4


class Column(str, enum.Enum):
    """Columns of the list; the value is the heading."""

    NAME = "name"
    KIND = "kind"
    DTYPE = "dtype"
    SHAPE = "shape"
    ELEMENTS = "elements"
    SIZE = "size"
    NAN = "nan"
    INF = "inf"
    ZEROS = "zeros"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"
    STD = "std"
    CHANGE = "change"


class Contents(Protocol):
    """Contents of the cells: the model of the screen."""

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """The tensors of the target."""

    @property
    def stats(self) -> Mapping[int, Stats]:
        """Statistics that were read, by position."""

    def get_name(self, position: int, /) -> str:
        """Return the name of a tensor."""

    def get_number(self, position: int, column: Column, /) -> float | None:
        """Return the number of a statistic or of the change."""

    def format_change(self, position: int, /) -> str:
        """Return the text of the change."""


#: Columns of the statistics, which are read on demand.
STATISTICS = (Column.NAN, Column.INF, Column.ZEROS, Column.MIN, Column.MAX, Column.MEAN, Column.STD)
#: Cells of each column; the name has the rest.
WIDTHS = {
    Column.KIND: 12,
    Column.DTYPE: 9,
    Column.SHAPE: 13,
    Column.ELEMENTS: 9,
    Column.SIZE: 8,  # in the tree TREE_SIZE_CELLS
    Column.NAN: 7,
    Column.INF: 7,
    Column.ZEROS: 8,
    Column.MIN: 10,
    Column.MAX: 10,
    Column.MEAN: 10,
    Column.STD: 10,
    Column.CHANGE: 9,
}
#: Cells of a size in the tree, which may be `36 × 56.5 kB`.
TREE_SIZE_CELLS = 12
#: Columns whose texts begin at the left.
LEFT = frozenset([Column.NAME, Column.KIND, Column.DTYPE, Column.SHAPE])
#: Columns that are sorted from the largest value.
DESCENDING = frozenset(Column) - LEFT - {Column.MIN}
#: Which columns are shown first when the list is narrow.
_PRIORITY = (
    Column.SIZE,
    Column.SHAPE,
    Column.DTYPE,
    Column.CHANGE,
    Column.NAN,
    Column.MIN,
    Column.MAX,
    Column.MEAN,
    Column.STD,
    Column.INF,
    Column.ZEROS,
    Column.KIND,
    Column.ELEMENTS,
)
#: The order in which columns are offered for sorting.
SORT_ORDER = (
    Column.CHANGE,
    Column.SIZE,
    Column.NAN,
    Column.NAME,
    Column.DTYPE,
    Column.SHAPE,
    Column.KIND,
    Column.ELEMENTS,
    *(column for column in STATISTICS if column is not Column.NAN),
)
#: Cells for names, at least, and their largest share of the list if a name is longer.
MIN_NAME_CELLS, MAX_NAME_SHARE = 14, 0.62


def list_widths(*, is_tree: bool) -> Mapping[Column, int]:
    """Return the cells of each column, in the tree or in a list of tensors."""
    return {**WIDTHS, Column.SIZE: TREE_SIZE_CELLS} if is_tree else WIDTHS


def choose_columns(
    width: int,
    names: int,
    available: tuple[Column, ...],
    sort: Column | None,
    widths: Mapping[Column, int] = WIDTHS,
) -> list[Column]:
    """Return the columns that fit, in order; the sorted column and the change are always included.

    Args:
        width: Cells of the list.
        names: Characters of the longest name.
    """
    first = [column for column in (sort, Column.CHANGE) if column in available and column is not Column.NAME]
    chosen: list[Column] = []
    rest = width - max(MIN_NAME_CELLS, min(names, int(width * MAX_NAME_SHARE)))
    for column in dict.fromkeys([*first, *_PRIORITY]):
        if column is None or column not in available or column is Column.NAME:
            continue
        if widths[column] + 1 <= rest or column in first or not chosen:
            chosen.append(column)
            rest -= widths[column] + 1
    return [column for column in available if column in chosen]


def format_cell(contents: Contents, position: int, column: Column) -> str:
    """Return the text of a tensor's cell; "" for unread values."""
    tensor = contents.tensors[position]
    if column is Column.KIND:
        return format_kind(tensor)
    if column is Column.DTYPE:
        return tensor.dtype
    if column is Column.SHAPE:
        return format_shape(tensor.shape)
    if column is Column.ELEMENTS:
        return format_count(tensor.elements)
    if column is Column.SIZE:
        return format_size(tensor.nbytes)
    if column is Column.CHANGE:
        return contents.format_change(position)
    stats = contents.stats.get(position)
    return "" if stats is None else format_number(getattr(stats, column.value), DIGITS)


#: Sort key of a value that is not known: behind all others.
_LAST = (2, 0.0)


def make_sort_key(contents: Contents, column: Column, *, descending: bool) -> Callable[[int], object]:
    """Return the sort key of a position. Values that are not known come last in both directions."""
    sign = -1 if descending else 1
    tensors = contents.tensors
    if column is Column.SIZE:
        return lambda position: sign * tensors[position].nbytes
    if column is Column.ELEMENTS:
        return lambda position: sign * tensors[position].elements
    if column is Column.CHANGE or column in STATISTICS:

        def make_number_key(position: int) -> object:
            value = contents.get_number(position, column)
            if value is None:
                return _LAST
            # The state of an optimizer changes with each step, and says little.
            is_late = column is Column.CHANGE and tensors[position].kind is Kind.OPTIMIZER
            return int(is_late), (-math.inf if math.isnan(value) else sign * value)

        return make_number_key
    if column is Column.SHAPE:
        return lambda position: tensors[position].shape or ()
    if column is Column.NAME:
        return lambda position: make_natural_key(contents.get_name(position))
    return lambda position: format_cell(contents, position, column)
