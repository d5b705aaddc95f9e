"""The list of the screen: only the visible rows are drawn, so that 100,000 tensors scroll as fast as twelve."""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from statecli.browse.columns import LEFT_ALIGNED, ListColumn, choose_columns, list_widths
from statecli.browse.screen_state import ListRow, ScreenModel
from statecli.core import sizes
from statecli.core.escaping import escape_name, truncate_middle
from statecli.core.short_names import CommonEnds, shorten_name
from statecli.core.units import format_count, format_fqn, format_size, plural

_CURSOR = Style(reverse=True)
_PLAIN = Style()
_HEADING = Style(bold=True, underline=True)
_DIM = Style(dim=True)
_MODULE = Style(bold=True)
_BAD = Style(color="red")
#: Width in cells of the cursor and the mark before the names.
_GUTTER = 2
_MAX_INDENT = 16
#: Width in cells of ` ! outlier` after a name, and smallest width of a list with this space.
_SIGN_CELLS, _MIN_WIDTH_WITH_SIGNS = 10, 80
#: Smallest width in cells of the name of an optimizer tensor's parameter.
_MIN_OWNER_CELLS = 14
#: Smallest width in cells of a list with sizes such as `36 × 56.5 kB`.
_MIN_WIDTH_OF_TREE_SIZES = 38


class TensorList(ScrollView, can_focus=True):
    """Widget that shows the rows of the screen model below a heading."""

    DEFAULT_CSS = "TensorList { scrollbar-size-vertical: 1; overflow-x: hidden; overflow-y: auto; }"

    class Moved(Message):
        """Message that the cursor is on another row."""

    class Activated(Message):
        """Message that the row at the cursor was clicked again."""

    class Heading(Message):
        """Message that the heading of a column was clicked."""

        def __init__(self, column: ListColumn) -> None:
            super().__init__()
            self.column = column

    def __init__(self, model: ScreenModel) -> None:
        super().__init__()
        self._model = model
        self._elements: dict[object, int] = {}

    def show_rows(self) -> None:
        """Draw the rows again after they changed."""
        self.virtual_size = Size(self.size.width, self._model.count + 1)
        self._show_cursor()
        self.refresh()

    def move(self, by: int) -> None:
        """Move the cursor by the given number of rows, up if it is negative."""
        self._model.cursor = max(0, min(self._model.count - 1, self._model.cursor + by))
        self._show_cursor()
        self.refresh()
        self.post_message(self.Moved())

    @property
    def page(self) -> int:
        """Number of rows that are visible at once."""
        return max(1, self.size.height - 1)

    def _show_cursor(self) -> None:
        # The heading covers the first line, so a row is visible if the line before it is.
        self.scroll_to_region(
            Region(0, self._model.cursor, 1, 2), animate=False, force=True, immediate=True, x_axis=False
        )

    def on_resize(self) -> None:
        """Keep the cursor visible in the new size."""
        self.show_rows()

    def on_click(self, event: events.Click) -> None:
        """Handle a click: sort by a heading, mark a row at its left edge, select a row, or open the selected row."""
        if event.y == 0:
            column = self._find_column(event.x)
            if column is not None:
                self.post_message(self.Heading(column))
            return
        row = self.scroll_offset.y + event.y - 1
        if row >= self._model.count:
            return
        if event.x < _GUTTER:
            self._model.toggle_mark(row)
        elif row == self._model.cursor:
            self.post_message(self.Activated())
        self._model.cursor = row
        self.refresh()
        self.post_message(self.Moved())

    def _find_column(self, x: int) -> ListColumn | None:
        columns = self._choose_columns()
        start = self._content_width() - sum(self._widths[column] + 1 for column in columns)
        if x < start:
            return ListColumn.NAME
        for column in columns:
            start += self._widths[column] + 1
            if x < start:
                return column
        return None

    # --- drawing ------------------------------------------------------------------------------------------------

    def _content_width(self) -> int:
        return self.scrollable_content_region.width

    def _choose_columns(self) -> list[ListColumn]:
        model = self._model
        width = self._content_width() - _GUTTER
        sign = _SIGN_CELLS if model.shows_stats and width >= _MIN_WIDTH_WITH_SIGNS else 0
        return choose_columns(width, model.name_cells + sign, model.list_columns(), model.sort, self._widths)

    @property
    def _widths(self) -> Mapping[ListColumn, int]:
        # A second target adds a column.
        difference_cells = 12 if self._model.difference is not None else 0
        is_wide = self._content_width() >= _MIN_WIDTH_OF_TREE_SIZES + difference_cells
        return list_widths(is_tree=self._model.shows_tree and is_wide)

    def render_line(self, y: int) -> Strip:
        """Return a line of the widget."""
        width, columns = self._content_width(), self._choose_columns()
        if y == 0:
            return self._draw_heading(width, columns)
        number = self.scroll_offset.y + y - 1
        if number >= self._model.count:
            return Strip.blank(width)
        row = self._model.get_row(number)
        is_current = number == self._model.cursor
        style = _CURSOR if is_current else _PLAIN
        cells = self._format_cells(row, columns)
        name_width = width - _GUTTER - sum(self._widths[column] + 1 for column in columns)
        unusual = self._format_unusual(row, name_width)
        label_width = name_width - len(unusual)
        name, name_style = self._format_name(row, label_width)
        gutter = ("›" if is_current else " ") + self._format_mark(row)
        segments = [Segment(gutter, style), Segment(name, style + name_style)]
        owner = self._format_owner(row, label_width - cell_len(name.rstrip()))
        if unusual or owner:
            name = name.rstrip()
            segments[1:] = [
                Segment(name, style + name_style),
                Segment(unusual, style + _BAD),
                Segment(owner, style + _DIM),
                Segment(" " * (label_width - cell_len(name) - cell_len(owner)), style),
            ]
        for column, text in zip(columns, cells, strict=True):
            segments.append(Segment(" ", style))
            segments.append(
                Segment(_align(text, column, self._widths[column]), style + self._choose_style(row, column, text))
            )
        return Strip(segments, width).adjust_cell_length(width, style)

    def _draw_heading(self, width: int, columns: list[ListColumn]) -> Strip:
        name = self._format_heading(ListColumn.NAME)
        name_width = width - _GUTTER - sum(self._widths[column] + 1 for column in columns)
        texts = [" " * _GUTTER + name.ljust(name_width)]
        texts += [" " + _align(self._format_heading(column), column, self._widths[column]) for column in columns]
        return Strip([Segment("".join(texts), _HEADING)], width).adjust_cell_length(width)

    def _format_heading(self, column: ListColumn) -> str:
        if column is not self._model.sort:
            return column.value
        return column.value + ("▼" if self._model.is_descending else "▲")

    def _format_mark(self, row: ListRow) -> str:
        marked_count = self._model.count_marked(row.positions)
        return "●" if marked_count and marked_count == len(row.positions) else "◐" if marked_count else " "

    def _format_name(self, row: ListRow, width: int) -> tuple[str, Style]:
        label = escape_name(row.label)
        if row.node is None:
            ends = self._model.find_common_ends() if len(label) > width else CommonEnds()
            return _fit_text(shorten_name(label, ends, width), width), _PLAIN
        sign = "  " if row.tensor is not None else "▾ " if self._model.is_open(row.node) else "▸ "
        start = " " * min(2 * row.depth, _MAX_INDENT) + sign
        short = shorten_name(label, CommonEnds(), width - len(start))
        # A name of one or two long parts would be cut to `…`; its middle is cut instead. So is a list of numbers.
        label = short if 2 * len(short) >= min(len(label), width - len(start)) and not row.node.members else label
        return start + _fit_text(label, width - len(start)), _PLAIN if row.tensor is not None else _MODULE

    def _format_owner(self, row: ListRow, room: int) -> str:
        """Return ` of h.3.mlp.weight`, the parameter of an optimizer tensor, or "" if it is unknown or does not fit."""
        owner = self._model.get_owner(row.tensor) if row.tensor is not None else None
        if owner is None or room < _MIN_OWNER_CELLS:
            return ""
        return f" of {shorten_name(escape_name(format_fqn(owner)), CommonEnds(), room - 4)}"

    def _format_unusual(self, row: ListRow, width: int) -> str:
        """Return ` ! NaN` to append to the name of a row. If it does not fit, or the module is open, return ` !`."""
        if row.node is None:
            sign = self._model.unusual.sign(None, row.positions)
            return f" {sign}" if sign and 2 * len(sign) < width else " !" if sign else ""
        sign = self._model.unusual.sign(row.node.key, row.positions)
        if sign and row.tensor is None and self._model.is_open(row.node):
            return " !"
        label = min(2 * row.depth, _MAX_INDENT) + 2 + cell_len(escape_name(row.label))
        return "" if not sign else f" {sign}" if label + 1 + len(sign) <= width else " !"

    def _format_cells(self, row: ListRow, columns: list[ListColumn]) -> list[str]:
        if row.tensor is not None:
            return [escape_name(self._model.format_cell(row.tensor, column)) for column in columns]
        return [self._format_module_cell(row, column) for column in columns]

    def _format_module_cell(self, row: ListRow, column: ListColumn) -> str:
        if row.node is None:
            return ""
        if column is ListColumn.SIZE:
            size, times = self._model.get_node_bytes(row.node), max(len(row.node.members), 1)
            text = f"{times} × {format_size(size)}" if times > 1 else format_size(size)
            return text if len(text) <= self._widths[ListColumn.SIZE] else format_size(times * size)
        if column is ListColumn.SHAPE:
            return plural(len(row.positions), "tensor")
        if column is ListColumn.DTYPE:
            return self._model.remember_dtype(row.node)
        if column is ListColumn.CHANGE:
            difference = self._model.difference
            return difference.format_changes(row.positions) if difference is not None else ""
        if column is ListColumn.ELEMENTS:
            return format_count(self._sum_elements(row))
        return ""

    def _sum_elements(self, row: ListRow) -> int:
        """Return the number of elements in a module's tensors. Shared storage counts once."""
        key = row.node.key if row.node is not None else None
        if key not in self._elements:
            by_kind = sizes.sum_by_kind([self._model.tensors[position] for position in row.positions])
            self._elements[key] = sum(total.elements for total in by_kind.values())
        return self._elements[key]

    def _choose_style(self, row: ListRow, column: ListColumn, text: str) -> Style:
        if row.tensor is None:
            return _DIM
        is_bad = column in (ListColumn.NAN, ListColumn.INF) and text not in ("", "0", "-")
        return _BAD if is_bad or self._model.tensors[row.tensor].damage is not None else _PLAIN


def _fit_text(text: str, width: int) -> str:
    """Return the text in exactly `width` cells. The middle of a longer text is left out."""
    if text.isascii():
        return truncate_middle(text, width).ljust(width)
    while cell_len(text) > width and len(text) > 1:
        text = truncate_middle(text, min(width, len(text) - 1))
    return set_cell_size(text, max(width, 0))


def _align(text: str, column: ListColumn, width: int) -> str:
    text = _fit_text(text, width) if cell_len(text) > width else text
    return text.ljust(width) if column in LEFT_ALIGNED else text.rjust(width)
