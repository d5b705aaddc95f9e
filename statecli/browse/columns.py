"""Columns of the list: their widths, their orders, and which columns fit."""

from __future__ import annotations

import enum
from collections.abc import Mapping


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


#: Columns of statistics, which are read on request.
STATISTICS = (Column.NAN, Column.INF, Column.ZEROS, Column.MIN, Column.MAX, Column.MEAN, Column.STD)
#: Width of each column in cells; the name has the remaining width.
WIDTHS = {
    Column.KIND: 12,
    Column.DTYPE: 9,
    Column.SHAPE: 13,
    Column.ELEMENTS: 9,
    Column.SIZE: 8,  # TREE_SIZE_CELLS in the tree
    Column.NAN: 7,
    Column.INF: 7,
    Column.ZEROS: 8,
    Column.MIN: 10,
    Column.MAX: 10,
    Column.MEAN: 10,
    Column.STD: 10,
    Column.CHANGE: 9,
}
#: Width in cells of a size in the tree, which may be `36 × 56.5 kB`.
TREE_SIZE_CELLS = 12
#: Columns with texts aligned left.
LEFT_ALIGNED = frozenset([Column.NAME, Column.KIND, Column.DTYPE, Column.SHAPE])
#: Columns that are sorted in descending order.
SORTED_DESCENDING = frozenset(Column) - LEFT_ALIGNED - {Column.MIN}
#: Columns in the order of their priority in a narrow list.
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
#: Columns in the order in which they are offered for sorting.
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
#: Smallest width of names in cells, and largest fraction of the list for longer names.
MIN_NAME_CELLS, MAX_NAME_SHARE = 14, 0.62


def list_widths(*, is_tree: bool) -> Mapping[Column, int]:
    """Return the cells of each column, in the tree or in a list of tensors."""
    return {**WIDTHS, Column.SIZE: TREE_SIZE_CELLS} if is_tree else WIDTHS


def choose_columns(
    width: int,
    names: int,
    available_columns: tuple[Column, ...],
    sort: Column | None,
    widths: Mapping[Column, int] = WIDTHS,
) -> list[Column]:
    """Return the columns that fit, in order; the sorted column and the change are always included.

    Args:
        width: Cells of the list.
        names: Characters of the longest name.
    """
    first = [column for column in (sort, Column.CHANGE) if column in available_columns and column is not Column.NAME]
    chosen_columns: list[Column] = []
    cells_left = width - max(MIN_NAME_CELLS, min(names, int(width * MAX_NAME_SHARE)))
    for column in dict.fromkeys([*first, *_PRIORITY]):
        if column not in available_columns:
            continue
        if widths[column] + 1 <= cells_left or column in first or not chosen_columns:
            chosen_columns.append(column)
            cells_left -= widths[column] + 1
    return [column for column in available_columns if column in chosen_columns]
