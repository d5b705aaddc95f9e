"""Columns of the list: their widths, their orders, and which columns fit."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class ListColumn(str, enum.Enum):
    """Columns of the list. The enum values are the headings of the columns."""

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
STATISTICS = (
    ListColumn.NAN,
    ListColumn.INF,
    ListColumn.ZEROS,
    ListColumn.MIN,
    ListColumn.MAX,
    ListColumn.MEAN,
    ListColumn.STD,
)
#: Width of each column in cells; the name has the remaining width.
WIDTHS = {
    ListColumn.KIND: 12,
    ListColumn.DTYPE: 9,
    ListColumn.SHAPE: 13,
    ListColumn.ELEMENTS: 9,
    ListColumn.SIZE: 8,  # TREE_SIZE_CELLS in the tree
    ListColumn.NAN: 7,
    ListColumn.INF: 7,
    ListColumn.ZEROS: 8,
    ListColumn.MIN: 10,
    ListColumn.MAX: 10,
    ListColumn.MEAN: 10,
    ListColumn.STD: 10,
    ListColumn.CHANGE: 9,
}
#: Width in cells of a size in the tree, which may be `36 × 56.5 kB`.
TREE_SIZE_CELLS = 12
#: Columns with texts aligned left.
LEFT_ALIGNED = frozenset([ListColumn.NAME, ListColumn.KIND, ListColumn.DTYPE, ListColumn.SHAPE])
#: Columns that are first sorted in descending order.
SORTED_DESCENDING = frozenset(ListColumn) - LEFT_ALIGNED - {ListColumn.MIN}
#: Columns in the order of their priority in a narrow list.
_PRIORITY = (
    ListColumn.SIZE,
    ListColumn.SHAPE,
    ListColumn.DTYPE,
    ListColumn.CHANGE,
    ListColumn.NAN,
    ListColumn.MIN,
    ListColumn.MAX,
    ListColumn.MEAN,
    ListColumn.STD,
    ListColumn.INF,
    ListColumn.ZEROS,
    ListColumn.KIND,
    ListColumn.ELEMENTS,
)
#: Columns in the order in which they are offered for sorting.
SORT_ORDER = (
    ListColumn.CHANGE,
    ListColumn.SIZE,
    ListColumn.NAN,
    ListColumn.NAME,
    ListColumn.DTYPE,
    ListColumn.SHAPE,
    ListColumn.KIND,
    ListColumn.ELEMENTS,
    *(column for column in STATISTICS if column is not ListColumn.NAN),
)
#: Smallest width of names in cells, and largest fraction of the list for longer names.
MIN_NAME_CELLS, MAX_NAME_SHARE = 14, 0.62


def list_widths(*, is_tree: bool) -> Mapping[ListColumn, int]:
    """Return the width of each column in terminal cells, for the tree or for a list of tensors."""
    return {**WIDTHS, ListColumn.SIZE: TREE_SIZE_CELLS} if is_tree else WIDTHS


def choose_columns(
    width: int,
    names: int,
    available_columns: tuple[ListColumn, ...],
    sort: ListColumn | None,
    widths: Mapping[ListColumn, int] = WIDTHS,
) -> list[ListColumn]:
    """Return the columns that fit, in order. The sorted column and the column `change` are always included.

    Args:
        width: Cells of the list.
        names: Characters of the longest name.
    """
    first = [
        column for column in (sort, ListColumn.CHANGE) if column in available_columns and column is not ListColumn.NAME
    ]
    chosen_columns: list[ListColumn] = []
    cells_left = width - max(MIN_NAME_CELLS, min(names, int(width * MAX_NAME_SHARE)))
    for column in dict.fromkeys([*first, *_PRIORITY]):
        if column not in available_columns:
            continue
        if widths[column] + 1 <= cells_left or column in first or not chosen_columns:
            chosen_columns.append(column)
            cells_left -= widths[column] + 1
    return [column for column in available_columns if column in chosen_columns]
