"""Contents of the screen as data, without widgets: rows, filter, order, open nodes, marks, and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from statecli.browse.columns import LEFT_ALIGNED, SORTED_DESCENDING, STATISTICS, ListColumn
from statecli.browse.filter import Filter
from statecli.browse.globs import GlobText, RowsByPart, write_globs
from statecli.browse.outline import NodeKey, OutlineNode, build_roots
from statecli.browse.peek import Peek
from statecli.browse.unusual import UnusualValues, describe_count
from statecli.core import sizes
from statecli.core.escaping import escape_name
from statecli.core.model_state import Kind, ModelState, Stats, TensorInfo
from statecli.core.natural_order import make_natural_key
from statecli.core.parameter_or_buffer import match_optimizer_entries
from statecli.core.selection import glob_names
from statecli.core.short_names import CommonEnds, find_common_ends, shorten_name
from statecli.core.units import format_count, format_fqn, format_kind, format_number, format_shape, format_size
from statecli.report import fold
from statecli.report.layer_roles import Role, list_roles
from statecli.report.row_order import arrange_naturally

if TYPE_CHECKING:
    from statecli.browse.difference import Difference

#: Largest number of rows of the tree at the beginning, which fit on a terminal of 24 lines.
MAX_INITIAL_ROWS = 21


#: Largest number of tensors of a module that is described again at each drawing.
MAX_DESCRIBED_AGAIN = 200

#: Smallest number of characters of a name in a message.
_MIN_NAME_CHARACTERS = 12
#: Number of significant digits of a statistic in the list.
_DIGITS_OF_STATISTICS = 4
#: Sort key of an unknown value, which comes last.
_UNKNOWN_SORT_KEY = (2, 0.0)
_Description = TypeVar("_Description")


class ListRow(msgspec.Struct, frozen=True, gc=False):
    """A line of the list: a node of the tree, or a tensor of the flat list (`node` None)."""

    depth: int
    label: str
    positions: Sequence[int]
    tensor: int | None
    node: OutlineNode | None = None


class ScreenModel:
    """Contents of the screen.

    Attributes:
        state: The target.
        tensors: Its tensors; a position is an index of this tuple.
        stats: Statistics read so far, by position.
        peeks: First values and bytes read so far, by position.
        difference: Comparison with a second target; None without one.
        unusual: Tensors with NaN, infinity, and outliers, as far as statistics were read.
        marked: Marked positions.
        filtered_positions: Positions that match the filter, in the order of the target.
        shows_stats: Whether the list has columns of statistics.
        listed: Positions whose statistics were read for the list.
        cursor: Index of the selected row.
        total_bytes: Size of all tensors, shared storage counted once.
        filter_problem: The mistake in the filter, or why no tensor matches; "" without a problem.
        name_cells: Characters of the longest name in the list, with its indent.
    """

    def __init__(self, state: ModelState, weights: RowsByPart) -> None:
        self.state, self.tensors = state, state.tensors
        self.stats: dict[int, Stats] = {}
        self.peeks: dict[int, Peek] = {}
        self.difference: Difference | None = None
        self.unusual = UnusualValues(self.tensors, self.stats)
        self.marked: set[int] = set()
        self.shows_stats = False
        self.listed: set[int] = set()
        self.cursor = 0
        self.filter_text, self.filter_problem = "", ""
        self.sort: ListColumn | None = None
        self.is_descending = False
        self.is_flat = False
        self._before_sort = 0
        self._weights = weights
        self._by_section = len(state.sections) > 1
        self._filter = Filter(state, self.unusual, self.marked)
        self.filtered_positions: Sequence[int] = list(range(len(self.tensors)))
        self._common_ends: CommonEnds | None = None
        self._roots: list[OutlineNode] = []
        self._open: set[NodeKey] = set()
        self._rows: list[tuple[int, OutlineNode]] = []
        self._positions: list[int] = []
        self._owners = match_optimizer_entries(state) if state.optimizers else {}
        owners = [f" of {owner}" if (owner := self.get_owner(n)) else "" for n in range(len(self.tensors))]
        sections = [f"{tensor.section}." if self._by_section and tensor.section else "" for tensor in self.tensors]
        self._name_lengths = [
            len(section + tensor.fqn + owner)
            for tensor, owner, section in zip(self.tensors, owners, sections, strict=True)
        ]
        self._descriptions: dict[NodeKey, Any] = {}
        self._sizes: dict[NodeKey, int] = {}
        self._dtypes: dict[NodeKey, str] = {}
        self.total_bytes = sizes.sum_bytes(self.tensors)
        self.name_cells = 0
        self._open_first_levels()
        self._update()

    # --- rows ---------------------------------------------------------------------------------------------------

    @property
    def shows_tree(self) -> bool:
        """True if the tree is shown: without a filter, not as a flat list, and not sorted except by size."""
        return not (self.filter_text.strip() or self.is_flat) and self.sort in (None, ListColumn.SIZE)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self._rows) if self.shows_tree else len(self._positions)

    def get_row(self, number: int) -> ListRow:
        """Return the row with this number, from 0."""
        if self.shows_tree:
            depth, node = self._rows[number]
            return ListRow(depth, node.label, node.positions, node.tensor, node)
        position = self._positions[number]
        return ListRow(0, self.get_name(position), (position,), position)

    @property
    def current(self) -> ListRow | None:
        """The row at the cursor, or None if the list is empty."""
        return self.get_row(min(self.cursor, self.count - 1)) if self.count else None

    def get_name(self, position: int) -> str:
        """Return the name of a tensor. If there are several sections, the section comes first."""
        tensor = self.tensors[position]
        return format_fqn(glob_names(tensor.fqn, tensor.section, by_section=self._by_section)[-1])

    def get_owner(self, position: int) -> str | None:
        """Return the recorded or guessed parameter that an optimizer tensor belongs to, or None if it is unknown."""
        tensor = self.tensors[position]
        return tensor.belongs_to or self._owners.get(tensor.key)

    def find_common_ends(self) -> CommonEnds:
        """Return the lengths of the start and the end that all listed names share. A narrow list leaves both out."""
        if self._common_ends is None:
            self._common_ends = find_common_ends(
                [escape_name(self.get_name(position)) for position in self.filtered_positions]
            )
        return self._common_ends

    def set_filter(self, text: str) -> None:
        """Show only matching tensors, or all for "". The selected tensor stays selected while it is visible."""
        current = self.current
        self.filter_text, self._before_sort = text, 0
        filter_result = self._filter.find(text)
        self.filtered_positions, self.filter_problem = filter_result.positions, filter_result.problem
        self._common_ends = None
        self._update(current)

    def sort_by(self, column: ListColumn | None, *, descending: bool | None = None) -> None:
        """Sort by a column and go to the first row. None restores the target's order."""
        current = self.current
        is_back = column is None and self.sort is not None and self.cursor == 0  # the user did not move
        if self.sort is None:
            self._before_sort = self.cursor
        self.sort = column
        self.is_descending = column in SORTED_DESCENDING if descending is None else descending
        self._update(None if is_back or column is not None else current)
        if column is not None:
            self.cursor = 0
        elif is_back:
            self.cursor = min(self._before_sort, self.count - 1)

    def describe_order(self) -> str:
        """Return a text such as `by size, largest first`, or "" for the target's order."""
        if self.sort is None:
            return ""
        if self.sort in LEFT_ALIGNED:
            return f"by {self.sort.value}, {'Z to A' if self.is_descending else 'A to Z'}"
        measure_name = "‖Δ‖/‖layer‖" if self.sort is ListColumn.CHANGE else self.sort.value
        return f"by {measure_name}, {'largest' if self.is_descending else 'smallest'} first"

    def reveal(self, position: int) -> None:
        """Select a tensor; remove the filter if the tensor is hidden."""
        if position not in self.filtered_positions:
            self.set_filter("")
        self.select_position(position)

    def list_columns(self) -> tuple[ListColumn, ...]:
        """Return the columns of the list. Statistics need values that were read, and changes need a second target."""
        hidden_columns = set() if self.shows_stats else set(STATISTICS)
        if self.difference is None:
            hidden_columns.add(ListColumn.CHANGE)
        return tuple(column for column in ListColumn if column not in hidden_columns)

    def toggle_flat(self) -> None:
        """Switch between the tree and the list of whole names."""
        current = self.current
        if self.shows_tree:
            self.is_flat = True
        else:
            self.is_flat, self.sort = False, None
        self._update(current)

    def regroup(self) -> None:
        """Sort again after values were read, and join equal modules only if their changes are similar.

        The cursor stays on its node or tensor.
        """
        current = self.current
        if self.difference is not None:
            self.difference.measure_layers()
            self._descriptions.clear()
            self._roots = build_roots(self.tensors, range(len(self.tensors)), self.difference.measure_change)
        if self.difference is not None or not self.shows_tree:
            self._update(current)

    def get_node_bytes(self, node: OutlineNode) -> int:
        """Return the bytes of a module, or of one of the joined equal modules. Shared storage counts once."""
        if node.key not in self._sizes:
            positions = node.members[0].positions if node.members else node.positions
            self._sizes[node.key] = sizes.sum_bytes(self.tensors[position] for position in positions)
        return self._sizes[node.key]

    def remember_dtype(self, node: OutlineNode) -> str:
        """Return the dtype of all tensors of a module, or `2 dtypes`."""
        if node.key not in self._dtypes:
            dtypes = {self.tensors[position].dtype for position in node.positions}
            self._dtypes[node.key] = f"{len(dtypes)} dtypes" if len(dtypes) > 1 else dtypes.pop()
        return self._dtypes[node.key]

    def _sort_nodes(self, nodes: list[OutlineNode]) -> list[OutlineNode]:
        return nodes if self.sort is None else sorted(nodes, key=self.get_node_bytes, reverse=self.is_descending)

    def remember(self, row: ListRow, describe: Callable[[], _Description]) -> _Description:
        """Return the result of `describe` for a row. It is cached for large modules, which may have 100,000 tensors."""
        if row.node is None or len(row.positions) <= MAX_DESCRIBED_AGAIN:
            return describe()
        if row.node.key not in self._descriptions:
            self._descriptions[row.node.key] = describe()
        description: _Description = self._descriptions[row.node.key]
        return description

    # --- tree ---------------------------------------------------------------------------------------------------

    def is_open(self, node: OutlineNode) -> bool:
        """Return True if the rows below the node are shown."""
        return node.key in self._open

    def toggle_node(self) -> None:
        """Open or close the node at the cursor, unless it is a tensor."""
        row = self.current
        if row is not None and row.node is not None and row.tensor is None:
            self._open ^= {row.node.key}
            self._update()

    def open_node(self) -> None:
        """Open the node at the cursor, or go to its first row if the node is open already."""
        row = self.current
        if row is not None and row.node is not None and row.tensor is None:
            if self.is_open(row.node):
                self.cursor += 1
            else:
                self.toggle_node()

    def close_node(self) -> None:
        """Close the node at the cursor, or go to its parent."""
        row = self.current
        if row is None or row.node is None:
            return
        if row.tensor is None and self.is_open(row.node):
            self.toggle_node()
            return
        for number in range(self.cursor - 1, -1, -1):
            if self._rows[number][0] < row.depth:
                self.cursor = number
                return

    def open_all(self) -> None:
        """Open all nodes below the cursor's node, or close them if all are open."""
        row = self.current
        if row is None or row.node is None or row.tensor is not None:
            return
        keys = {node.key for node in _iter_nodes(row.node, self.tensors) if node.tensor is None}
        self._open = self._open - keys if keys <= self._open else self._open | keys
        self._update()

    def select_position(self, position: int) -> None:
        """Move the cursor to a tensor that the list shows. In the tree, open the nodes above the tensor."""
        if not self.shows_tree:
            if position in self._positions:
                self.cursor = self._positions.index(position)
            return
        nodes, path = self._roots, []
        while nodes:
            node = next((node for node in nodes if position in node.positions), None)
            if node is None:
                return
            path.append(node)
            nodes = node.list_children(self.tensors)
        self._open.update(node.key for node in path[:-1])
        self._rows = list(self._list_rows())
        self.cursor = next((n for n, (_, node) in enumerate(self._rows) if node is path[-1]), 0)

    def _open_first_levels(self) -> None:
        """Open the first levels of modules while their rows fit on a small screen, because one level shows little."""
        self._roots = build_roots(self.tensors, range(len(self.tensors)))
        level, rows = self._roots, len(self._roots)
        while level:
            modules = [node for node in level if node.tensor is None]
            next_level = []
            for node in modules:
                children = [] if node.members else node.list_children(self.tensors)
                if children and rows + len(children) <= MAX_INITIAL_ROWS:
                    self._open.add(node.key)
                    rows += len(children)
                    next_level += children
            level = next_level

    def _list_rows(self) -> Iterator[tuple[int, OutlineNode]]:
        stack = [(0, node) for node in reversed(self._sort_nodes(self._roots))]
        while stack:
            depth, node = stack.pop()
            yield depth, node
            if node.tensor is None and self.is_open(node):
                children = self._sort_nodes(node.list_children(self.tensors))
                stack.extend((depth + 1, child) for child in reversed(children))

    def _select_row(self, row: ListRow) -> None:
        """Move the cursor to the row of the same node in the new tree, or to the joined modules that contain it."""
        rows = [n for n, (depth, _) in enumerate(self._rows) if depth <= row.depth]
        same_rows = (n for n in rows if row.node is not None and self._rows[n][1].key == row.node.key)
        enclosing_rows = (n for n in reversed(rows) if row.positions[0] in self._rows[n][1].positions)
        self.cursor = next(same_rows, None) or next(enclosing_rows, 0)

    def _update(self, current: ListRow | None = None) -> None:
        """List the rows again; the cursor stays on the current row."""
        if self.shows_tree:
            self._rows = list(self._list_rows())
            self.name_cells = max((2 * depth + 2 + self._measure_label(node) for depth, node in self._rows), default=0)
        else:
            self.name_cells = max((self._name_lengths[position] for position in self.filtered_positions), default=0)
            self._positions = sorted(self.filtered_positions, key=self._ranks.__getitem__)
            if self.sort is not None:
                is_reversed = self.sort in LEFT_ALIGNED and self.is_descending
                self._positions.sort(key=self._make_sort_key(self.sort), reverse=is_reversed)
        if current is not None and self.shows_tree and current.node is not None:
            self._select_row(current)
        elif current is not None:
            self.select_position(current.positions[0])
        self.cursor = max(0, min(self.cursor, self.count - 1))

    def _make_sort_key(self, column: ListColumn) -> Callable[[int], Any]:
        """Return the sort key of a position. Values that are not known come last in both directions."""
        sign, tensors = -1 if self.is_descending else 1, self.tensors
        if column is ListColumn.SIZE:
            return lambda position: sign * tensors[position].nbytes
        if column is ListColumn.ELEMENTS:
            return lambda position: sign * tensors[position].elements
        if column is ListColumn.SHAPE:
            return lambda position: tensors[position].shape or ()
        if column is ListColumn.NAME:
            return lambda position: make_natural_key(self.get_name(position))
        if column in LEFT_ALIGNED:
            return lambda position: self.format_cell(position, column)

        def make_number_key(position: int) -> object:
            value = self._get_number(position, column)
            if value is None:
                return _UNKNOWN_SORT_KEY
            # The state of an optimizer changes with each step, and says little.
            is_late = column is ListColumn.CHANGE and tensors[position].kind is Kind.OPTIMIZER
            return int(is_late), (-math.inf if math.isnan(value) else sign * value)

        return make_number_key

    def _get_number(self, position: int, column: ListColumn) -> float | None:
        if column is ListColumn.CHANGE:
            return self.difference.get_order(position) if self.difference else None
        number: float | None = getattr(self.stats.get(position), column.value, None)
        return number

    @cached_property
    def _ranks(self) -> Mapping[int, int]:
        """Rank of each position in lists. The order is the target's, but numbers in names ascend (2 before 10)."""
        positions = {id(tensor): position for position, tensor in enumerate(self.tensors)}
        return {positions[id(tensor)]: rank for rank, tensor in enumerate(arrange_naturally(self.tensors))}

    def _measure_label(self, node: OutlineNode) -> int:
        owner = self.get_owner(node.tensor) if node.tensor is not None else None
        return len(node.label) + (len(f" of {owner}") if owner else 0)

    # --- marks --------------------------------------------------------------------------------------------------

    def toggle_mark(self, number: int | None = None) -> int:
        """Mark the tensors of a row, or remove their marks if all are marked. Return the number of removed marks."""
        if not self.count:
            return 0
        positions = set(self.get_row(self.cursor if number is None else number).positions)
        return self._toggle_marks(positions)

    def find_next_row(self) -> int:
        """Return the next row that is not inside the row at the cursor, or the same row if it is the last."""
        following = range(self.cursor + 1, self.count)
        if not self.shows_tree:
            return following[0] if following else self.cursor
        depth = self._rows[self.cursor][0] if self._rows else 0
        return next((number for number in following if self._rows[number][0] <= depth), self.cursor)

    def mark_found(self) -> None:
        """Mark all tensors that the list shows; remove their marks if all of them are marked."""
        self._toggle_marks(set(self.filtered_positions))

    def _toggle_marks(self, positions: set[int]) -> int:
        if positions <= self.marked:
            self.marked -= positions
            return len(positions)
        self.marked |= positions
        return 0

    def clear_marks(self) -> int:
        """Remove all marks; return how many there were."""
        count = len(self.marked)
        self.marked.clear()
        return count

    def count_hidden_marks(self) -> int:
        """Return how many marked tensors the filter hides."""
        return len(self.marked) - self.count_marked(self.filtered_positions)

    def describe_marks(self) -> str:
        """Return `52 marked (40 hidden)` if the filter hides 40 marked tensors, or "" if nothing is marked."""
        hidden_count, count = self.count_hidden_marks(), len(self.marked)
        hidden_text = f" ({'all' if hidden_count == count else f'{hidden_count:,}'} hidden)" if hidden_count else ""
        return f"{count:,} marked{hidden_text}" if count else ""

    def count_marked(self, positions: Iterable[int]) -> int:
        """Return how many of the tensors are marked."""
        return sum(position in self.marked for position in positions) if self.marked else 0

    def list_copied(self) -> set[int]:
        """Return the tensors to copy: the marked tensors, or else the filter's matches, or else the current row's."""
        if self.marked or self.filter_text.strip():
            return self.marked or set(self.filtered_positions)
        return set(self.current.positions if self.current else ())

    def write_globs(self) -> GlobText:
        """Return globs for the tensors to copy."""
        return write_globs(self.state, self.list_copied(), self._weights)

    # --- values -------------------------------------------------------------------------------------------------

    def add_stats(self, position: int, stats: Stats) -> None:
        """Keep the statistics of a tensor."""
        self.stats[position] = stats
        self.unusual.add(position)

    def list_layers_to_read(self) -> list[int]:
        """Return the listed tensors of layers whose statistics (with a second target: changes) are not known."""
        difference = self.difference
        if difference is None:
            return [n for n in self.filtered_positions if n not in self.stats and _has_number(self.tensors[n])]
        return [n for n in difference.list_missing(self.filtered_positions) if _has_number(self.tensors[n])]

    def list_change_roles(self) -> tuple[Role, ...]:
        """Return the roles (tensors that each layer has) whose changes are known. Their `rms` contains the changes."""
        return list_roles(
            replace(tensor, stats=Stats(mean=change, std=0.0, nan=0, inf=0) if change is not None else None)
            for n, tensor in enumerate(self.tensors)
            for change in (self.difference.measure_change((n,)) if self.difference else None,)
        )

    def describe_stats(self, width: int) -> str:
        """Return `statistics of 88 read: 1 NaN in h.3.w; 2 outliers, first h.7.w`, if possible within `width`."""
        kinds = {kind: positions for kind, positions in self.unusual.list_kinds(self.listed).items() if positions}
        failed_count = sum(self.stats[position].reason is not None for position in self.listed)
        start = f"statistics of {len(self.listed):,} read: "
        end = f"; {failed_count:,} not complete" if failed_count else ""
        if not kinds:
            return f"{start}no NaN, Inf or outlier{end}"
        counts = [
            f"{describe_count(kind, len(positions))}{' in ' if len(positions) == 1 else ', first '}"
            for kind, positions in kinds.items()
        ]
        room = (width - len(start) - len(end) - len("; ".join(counts))) // len(counts)
        names = [escape_name(self.get_name(positions[0])) for positions in kinds.values()]
        texts = [
            count + shorten_name(name, CommonEnds(), max(_MIN_NAME_CHARACTERS, room))
            for count, name in zip(counts, names, strict=True)
        ]
        return f"{start}{'; '.join(texts)}{end}"

    def format_cell(self, position: int, column: ListColumn) -> str:
        """Return the text of a tensor's cell, or "" for unread values."""
        tensor = self.tensors[position]
        if column is ListColumn.KIND:
            return format_kind(tensor)
        if column is ListColumn.DTYPE:
            return tensor.dtype
        if column is ListColumn.SHAPE:
            return format_shape(tensor.shape)
        if column is ListColumn.ELEMENTS:
            return format_count(tensor.elements)
        if column is ListColumn.SIZE:
            return format_size(tensor.nbytes)
        if column is ListColumn.CHANGE:
            return self.format_change(position)
        stats = self.stats.get(position)
        return "" if stats is None else format_number(getattr(stats, column.value), _DIGITS_OF_STATISTICS)

    def format_change(self, position: int) -> str:
        """Return the text of the column `change`."""
        return self.difference.format_change(position) if self.difference else ""


def _has_number(tensor: TensorInfo) -> bool:
    return bool(fold.split_numbers(tensor.fqn)[1])


def _iter_nodes(node: OutlineNode, tensors: Sequence[TensorInfo]) -> Iterator[OutlineNode]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.list_children(tensors))
