"""Texts and tables over the screen of browse."""

from __future__ import annotations

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.screen import ModalScreen
from textual.widgets import Static

from statecli.browse import layers
from statecli.browse.layers import LAYER_CELLS, LayerMeasure, LayerTable
from statecli.browse.screen_state import ScreenModel
from statecli.core.escaping import escape_name, escape_sentence, truncate_middle


class Overlay(ModalScreen[str]):
    """Text over the screen. Any key closes the text; the key is the result of the overlay.

    The text has no frame at the sides, so a mouse can select the text.
    """

    DEFAULT_CSS = """
    Overlay { align: center middle; background: transparent; }
    Overlay > Static { width: auto; max-width: 100%; max-height: 100%; padding: 0 1;
        border-top: solid ansi_default; border-bottom: solid ansi_default; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Build the widgets."""
        yield Static(Text(self._text))

    def on_key(self, event: events.Key) -> None:
        """Close the overlay."""
        event.stop()
        self.dismiss(event.key)

    def on_click(self) -> None:
        """Close the overlay."""
        self.dismiss("")


#: Number of rows and columns by which a key moves the cursor.
_MOVES = {
    "down": (1, 0),
    "j": (1, 0),
    "up": (-1, 0),
    "k": (-1, 0),
    "right": (0, 1),
    "l": (0, 1),
    "left": (0, -1),
    "h": (0, -1),
    "home": (-(10**6), 0),
    "g": (-(10**6), 0),
    "end": (10**6, 0),
    "G": (10**6, 0),
}
#: Number of lines above and below the layers.
_HEAD_LINES, _FOOT_LINES = 3, 3


def _fit_line(line: str, width: int) -> str:
    """Return the line with a line break, shortened at its end if it is wider than `width`."""
    return f"{line if len(line) <= width else f'{line[: max(0, width - 1)]}…'}\n"


class LayerView(ModalScreen[int | None]):
    """Table of the target's layers. Its result is the position of the tensor that the user selected, or None."""

    DEFAULT_CSS = """
    LayerView { background: ansi_default; color: ansi_default; }
    LayerView > Static { width: 100%; height: 100%; }
    """

    def __init__(self, model: ScreenModel, tables: tuple[LayerTable, ...]) -> None:
        super().__init__()
        self._model, self._tables = model, tables
        self._table, self._measure, self._first = 0, tables[0].measures[0], 0
        self._table_view = Static()
        self._unusual = [table.list_unusual(model.stats) for table in tables]
        self._show_table(next((number for number, cells in enumerate(self._unusual) if cells), 0))

    def compose(self) -> ComposeResult:
        """Build the widgets."""
        yield self._table_view

    def on_mount(self) -> None:
        """Draw the table."""
        self._draw()

    def on_resize(self) -> None:
        """Draw the table in the new size."""
        self._draw()

    def on_key(self, event: events.Key) -> None:
        """Move the cursor, or close the table."""
        event.stop()
        page = max(1, self.size.height - _HEAD_LINES - _FOOT_LINES)
        if event.key in _MOVES:
            self._move(*_MOVES[event.key])
        elif event.key in ("pagedown", "pageup"):
            self._move(page if event.key == "pagedown" else -page, 0)
        elif event.key == "tab":
            self._show_table((self._table + 1) % len(self._tables))
        elif event.key == "m":
            self._measure = self._next_measure()
        elif event.key == "enter":
            self.dismiss(self._tables[self._table].columns[self._column].positions[self._row])
            return
        elif event.key in ("escape", "q", "L"):
            self.dismiss(None)
            return
        self._draw()

    def on_click(self, event: events.Click) -> None:
        """Select a row."""
        self._move(event.y - _HEAD_LINES + self._first - self._row, 0)
        self._draw()

    def on_mouse_scroll_down(self) -> None:
        """Move the cursor down."""
        self._move(3, 0)
        self._draw()

    def on_mouse_scroll_up(self) -> None:
        """Move the cursor up."""
        self._move(-3, 0)
        self._draw()

    def _next_measure(self) -> LayerMeasure:
        measures = self._tables[0].measures
        return measures[(measures.index(self._measure) + 1) % len(measures)]

    def _show_table(self, number: int) -> None:
        self._table = number
        cells = self._unusual[number]
        self._row, self._column = (cells[0].row, cells[0].column) if cells else (0, 0)

    def _move(self, rows: int, columns: int) -> None:
        table = self._tables[self._table]
        self._row = max(0, min(len(table.layers) - 1, self._row + rows))
        self._column = max(0, min(len(table.columns) - 1, self._column + columns))

    def _draw(self) -> None:
        width, height = self.size.width, self.size.height
        if not width:
            return
        table = self._tables[self._table]
        room = max(1, height - _HEAD_LINES - _FOOT_LINES)
        self._first = max(min(self._first, self._row), self._row - room + 1)
        column_numbers = layers.choose_columns(table, width, self._column)
        widths = layers.list_widths(table)
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(_fit_line(self._format_title(table), width), style="bold")
        titles = [table.columns[number].title for number in column_numbers]
        end_mark = " ›" if column_numbers.stop < len(table.columns) else ""
        label = "layer ‹" if column_numbers.start else "layer"
        self._append_row(text, label, titles, [widths[number] for number in column_numbers], "bold underline", end_mark)
        medians = list(layers.iter_medians(table, column_numbers, self._measure, self._model.stats))
        self._append_row(text, "median", medians, [widths[number] for number in column_numbers], "dim")
        for row in range(self._first, min(self._first + room, len(table.layers))):
            self._append_layer(text, table, row, column_numbers)
        text.append("\n" * max(0, room - (len(table.layers) - self._first)))
        for line in self._describe_cell(table):
            text.append(_fit_line(line, width))
        next_measure = self._next_measure()
        measure = f"  m: {next_measure.value}" if next_measure is not self._measure else ""
        tables = f"  tab: next table (of {len(self._tables)})" if len(self._tables) > 1 else ""
        text.append(_fit_line(f"↑ ↓ ← →  enter: go to the tensor{measure}{tables}  esc: back", width).rstrip("\n"))
        self._table_view.update(text)

    def _format_title(self, table: LayerTable) -> str:
        """Return `h: RMS of 12 layers; 1 outlier: layer 7 q`. With a second target, add the names of both."""
        unusual = self._unusual[self._table]
        text = f"{escape_name(table.title) or 'layers'}: {self._measure.value} of {len(table.layers):,} layers"
        if self._model.difference is not None:
            names = (self._model.state.target, self._model.difference.other_target)
            text += f", {' → '.join(map(escape_name, names))}"
        return f"{text}; {table.describe(unusual)}"

    def _append_row(
        self, text: Text, label: str, cells: list[str], widths: list[int], style: str, end: str = ""
    ) -> None:
        fitted_cells = [
            f" {truncate_middle(escape_name(cell), column_width - 1):>{column_width - 1}}"
            for cell, column_width in zip(cells, widths, strict=True)
        ]
        text.append(f"{label:<{LAYER_CELLS}}{''.join(fitted_cells)}{end}\n", style=style)

    def _append_layer(self, text: Text, table: LayerTable, row: int, column_numbers: range) -> None:
        is_current = row == self._row
        unusual_rows = {cell.row for cell in self._unusual[self._table]}
        sign = "›" if is_current else " "
        text.append(f"{sign}{'!' if row in unusual_rows else ' '}{table.layers[row]:<{LAYER_CELLS - 2}}")
        widths = layers.list_widths(table)
        for number in column_numbers:
            cell = layers.format_cell(self._model, table.columns[number], row, self._measure)
            styles = ["reverse"] if is_current and number == self._column else []
            styles += ["red"] if cell.startswith("!") else []
            text.append(" ")
            text.append(f"{cell:>{widths[number] - 1}}", style=" ".join(styles))
        text.append("\n")

    def _describe_cell(self, table: LayerTable) -> tuple[str, str]:
        """Return the whole name of the tensor at the cursor, and why it is an outlier."""
        column = table.columns[self._column]
        position = column.positions[self._row]
        if position is None:
            return "this layer has no tensor in this column", ""
        name = truncate_middle(escape_name(self._model.get_name(position)), max(8, self.size.width))
        return name, escape_sentence(column.outliers.get(position, ""))
