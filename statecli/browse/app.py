"""Screen of `statecli browse`: the list on the left, the panel on the right, and below them the filter and messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widgets import Input, Static

from statecli.browse import editor, peek
from statecli.browse.columns import SORT_ORDER, ListColumn
from statecli.browse.difference import Difference, pair_states
from statecli.browse.help import format_help
from statecli.browse.key_actions import ACTIONS, CLOSING_KEYS, LINE_ACTIONS, MODEL_CHANGES
from statecli.browse.layers import VALUE_MEASURES, LayerMeasure, build_tables
from statecli.browse.overlays import LayerView, Overlay
from statecli.browse.panel import PanelLine, describe_row, explain_no_values
from statecli.browse.peek import Versions
from statecli.browse.screen_state import ScreenModel
from statecli.browse.scroll_track import TrackRender
from statecli.browse.tensor_list import TensorList
from statecli.browse.value_reader import Apply, ReaderThread
from statecli.core import sizes
from statecli.core.errors import StateError
from statecli.core.escaping import escape_name, escape_sentence
from statecli.core.model_state import ModelState
from statecli.core.units import format_size, plural
from statecli.report.layer_roles import MIN_LAYERS

#: Function that reads a second target. Raises StateError.
ReadOther = Callable[[str], ModelState]

#: Seconds that the cursor rests on a row before values are read.
CURSOR_REST_S = 0.12
#: Smallest width of a screen with a panel, in cells.
MIN_WIDTH_WITH_PANEL = 72
#: Smallest height of a screen with messages of several lines, and largest number of lines of a message.
MIN_HEIGHT_WITH_LINES, MAX_MESSAGE_LINES = 16, 3
#: Smallest and largest width of the panel in cells, and its fraction of the screen.
MIN_PANEL_CELLS, MAX_PANEL_CELLS, PANEL_SHARE = 38, 90, 0.45
#: Largest width of the panel if the list has columns of statistics, because the list then needs more room.
MAX_PANEL_CELLS_WITH_STATS = 60

_STYLES = {"bold": "bold", "dim": "dim", "bad": "red", "good": "green", "": ""}
_KEYS_LINE = "/ filter  space mark  y copy  d diff  S stats  L layers  o sort  ? help  q quit"


_COPIED = """\
statecli sent the globs of {count} to the clipboard of the terminal:
{marks}
{text}

If the text is not in the clipboard, select the text with the mouse (in some
terminals with Shift). If you quit, statecli prints the text. esc: back"""
#: Line below the first line of `_COPIED` if the filter hides marked tensors.
_HIDDEN_MARKS = "{shown:,} shown and {hidden:,} hidden tensors are marked; u clears all marks\n"


class Browser(App[None]):
    """App that shows the screen.

    Attributes:
        model: Contents of the screen.
        copied_text: The text that was copied last. failure: The internal error that closed the screen, or None.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    * { scrollbar-color: ansi_bright_black; scrollbar-color-hover: ansi_bright_black;
        scrollbar-color-active: ansi_bright_black; scrollbar-background: ansi_default;
        scrollbar-background-hover: ansi_default; scrollbar-background-active: ansi_default; }
    #title { height: 1; width: 100%; text-style: bold; }
    #status { height: 1; width: 100%; }
    #line { height: 1; border: none; padding: 0; background: ansi_default; color: ansi_default; }
    #panel { border-left: solid ansi_bright_black; padding: 0 0 0 1; overflow-x: hidden;
        scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    #panel > Static { width: 100%; height: auto; }
    TensorList { width: 1fr; }
    """

    class Read(Message):
        """Message that values were read. `apply` puts the values into the screen model."""

        def __init__(self, apply: Apply) -> None:
            super().__init__()
            self.apply = apply

    def __init__(
        self, model: ScreenModel, versions: Versions, read_other: ReadOther, other_state: ModelState | None = None
    ) -> None:
        super().__init__(ansi_color=True)
        self.model, self.copied_text = model, ""
        self.failure: Exception | None = None
        self._versions, self._read_other, self._other_state = versions, read_other, other_state
        self._reader = ReaderThread(lambda apply: self.post_message(self.Read(apply)))
        self._list = TensorList(model)
        self._line = Input(id="line", select_on_focus=False)
        self._facts = Static(id="facts")
        self._panel = VerticalScroll(self._facts, id="panel", can_focus=False)
        self._title, self._status = Static(id="title"), Static(id="status")
        self._shows_panel: bool | None = None
        self._asks_for_target = False
        self._message = ""
        self._progress = ""
        #: Position of the tensor that is being read; positions whose statistics and histogram were read.
        self._position_being_read: int | None = None
        self._complete: set[int] = set()
        self._total = sizes.describe_size(model.tensors)

    def compose(self) -> ComposeResult:
        """Build the widgets."""
        yield self._title
        yield Horizontal(self._list, self._panel)
        yield self._line
        yield self._status

    def on_mount(self) -> None:
        """Show the first screen, and start to read the second target if one is given."""
        self.theme = "ansi-dark"
        for widget in (self._list, self._panel):
            widget.vertical_scrollbar.renderer = TrackRender  # type: ignore[misc] # of this bar only
        self._rest_timer = self.set_timer(CURSOR_REST_S, self._read_current)
        self._line.display = False
        self._list.focus()
        if self._other_state is not None:
            self._pair(lambda: self._other_state)  # type: ignore[arg-type,return-value]
        self._lay_out()

    def on_resize(self) -> None:
        """Lay out the widgets for the new size."""
        self.call_after_refresh(self._lay_out)

    def on_unmount(self) -> None:
        """End the thread that reads values."""
        self._reader.close()

    def _handle_exception(self, error: Exception) -> None:
        # The caller reports an internal error in one line, as for every command.
        self.failure = self.failure or error
        self.exit(return_code=2)

    async def on_event(self, event: events.Event) -> None:
        """Handle each key immediately, because a slow connection may send several keys together, such as `/q`."""
        if not isinstance(event, events.Key) or len(self.screen_stack) > 1:
            await super().on_event(event)
        elif event.key in ("ctrl+c", "ctrl+q"):
            self.exit()
        elif self._line.display:
            await self._type(event)
        else:
            await self._act(event.key)

    async def _act(self, key: str) -> None:
        if key in MODEL_CHANGES:
            MODEL_CHANGES[key](self.model)
            self._show()
        elif key in ACTIONS:
            await self.run_action(ACTIONS[key])

    # --- drawing ------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        width = self.size.width
        panel = self._panel
        panel.display = self._has_panel()
        cells = min(int(width * PANEL_SHARE), MAX_PANEL_CELLS_WITH_STATS if self.model.shows_stats else MAX_PANEL_CELLS)
        panel.styles.width = max(cells, MIN_PANEL_CELLS) if panel.display else 0
        self._show()
        self.call_after_refresh(self._show_panel)

    def _has_panel(self) -> bool:
        return self.size.width >= MIN_WIDTH_WITH_PANEL if self._shows_panel is None else self._shows_panel

    def _show(self) -> None:
        """Draw the screen again. If the cursor rests for CURSOR_REST_S, read the values of its tensor."""
        self._list.show_rows()
        self._show_lines()
        self._show_panel()
        self._rest_timer.stop()
        self._rest_timer = self.set_timer(CURSOR_REST_S, self._read_current)

    def _show_lines(self) -> None:
        model = self.model
        matches = len(model.filtered_positions)
        target = escape_name(model.state.target)
        if model.difference is not None:
            target += f" → {escape_name(model.difference.other_target)}"
        parts = [target, self._total]
        if model.filter_text.strip():
            parts.append(f"filter {escape_name(model.filter_text.strip())}: {matches:,}")
        if model.sort is not None:
            parts.append(model.describe_order())
        if model.marked:
            parts.append(model.describe_marks())
        self._title.update(Text("  ".join(parts), no_wrap=True, overflow="ellipsis"), layout=False)
        problem = "" if self._progress else escape_sentence(model.filter_problem)
        hints = self._message or _KEYS_LINE
        wraps = self.size.height >= MIN_HEIGHT_WITH_LINES and not self._progress
        width = max(self.size.width, 8)
        text = Text(overflow="ellipsis", no_wrap=True)
        if problem:
            lines = textwrap.wrap(problem, width, max_lines=MAX_MESSAGE_LINES - 1, placeholder=" …")
            text.append("\n".join(lines) if wraps else problem, style=_STYLES["bad"])
            text.append(f"\n{hints}" if wraps else "")
        elif wraps and self._message:
            text.append("\n".join(textwrap.wrap(hints, width, max_lines=MAX_MESSAGE_LINES, placeholder=" …")))
        else:
            text.append(self._progress or hints)
        height = text.plain.count("\n") + 1
        styles = self._status.styles
        if styles.height is None or styles.height.value != height:
            styles.height = height
        self._status.update(text, layout=False)

    def _show_panel(self) -> None:
        panel = self._panel
        if not panel.display:
            return
        row = self.model.current
        if row is None:
            lines = [
                PanelLine(self.model.filter_problem or "the target has no tensors", "dim"),
                PanelLine("esc removes the filter", "dim"),
            ]
        else:
            width = max(panel.scrollable_content_region.width, 8)
            lines = describe_row(self.model, row, width, is_reading=row.tensor == self._position_being_read)
        text = Text(no_wrap=False, overflow="fold")
        for line in lines:
            text.append(f"{line.text}\n", style=_STYLES[line.style])
        self._facts.update(text)

    def _say(self, message: str) -> None:
        self._message = message
        self._show_lines()

    # --- reading ------------------------------------------------------------------------------------------------

    def on_browser_read(self, message: Browser.Read) -> None:
        """Put values that were read into the screen model, and show them."""
        message.apply()
        self._list.refresh()
        self._show_panel()
        self._show_lines()

    def _read_current(self) -> None:
        """Read the missing values of the tensor at the cursor, because the cursor rests there."""
        row = self.model.current
        if row is None or row.tensor is None or not self._has_panel():
            return
        position, tensor = row.tensor, self.model.tensors[row.tensor]
        if (not tensor.ranges and tensor.data is None) or position == self._position_being_read:
            return  # no values to read, or a job reads them already
        difference, is_automatic = self.model.difference, peek.reads_automatically(tensor)
        with_stats = is_automatic and position not in self._complete
        compares = is_automatic and difference is not None and bool(difference.list_missing([position]))
        if position not in self.model.peeks or compares or with_stats:
            self._position_being_read = position if compares or with_stats else None
            self._reader.read(partial(self._read_values, position, with_stats=with_stats, compares=compares))
            self._show_panel()

    def _read_values(self, position: int, *, with_stats: bool, compares: bool) -> Apply:
        tensor, difference = self.model.tensors[position], self.model.difference
        new_peek = self.model.peeks.get(position) or peek.read_peek(tensor, self._versions)
        stats = self.model.stats.get(position)
        if with_stats:
            stats = stats or peek.read_statistics(tensor, self._versions)
            histogram = peek.read_histogram(tensor, stats, self._versions)
            unusual = peek.read_first_unusual(tensor, stats, self._versions)
            new_peek = replace(new_peek, histogram=histogram, first_unusual=unusual)
        outcome = difference.compare(position) if compares and difference is not None else None

        def apply() -> None:
            self.model.peeks[position] = new_peek
            if stats is not None:
                self.model.add_stats(position, stats)
            if with_stats:
                self._complete.add(position)
            if difference is not None and outcome is not None:
                difference.outcomes[position] = outcome
            if self._position_being_read == position:
                self._position_being_read = None

        return apply

    def _read_list(
        self, verb: str, positions: Sequence[int], read_tensor: Callable[[int], Apply], end: Callable[[], str]
    ) -> None:
        """Call `read_tensor` for each position, and show the progress in the last line; esc stops the reading.

        `end` returns the message after the last tensor.
        """
        if not positions:
            self._say(f"{verb}: statecli has already read all listed tensors")
            return
        total = sum(self.model.tensors[position].nbytes for position in positions)

        def format_progress(number: int, size: int) -> str:
            progress_text = f"{number:,} of {len(positions):,} tensors, {format_size(size)} of {format_size(total)}"
            return f"{verb}: {progress_text}  esc: stop"

        def steps() -> Iterator[Apply]:
            size = 0
            for number, position in enumerate(positions, 1):
                size += self.model.tensors[position].nbytes
                yield partial(self._apply_step, read_tensor(position), format_progress(number, size))
            yield partial(self._end_list, end)

        self._progress = format_progress(0, 0)
        self._reader.read_list(steps())
        self._show_lines()

    def _apply_step(self, apply: Apply, progress: str) -> None:
        apply()
        if self._reader.reads_list:
            self._progress = progress

    def _end_list(self, end: Callable[[], str]) -> None:
        self._progress = ""
        self.model.unusual.find_outliers()
        self.model.regroup()
        self._message = end()
        self._list.show_rows()

    # --- the second target --------------------------------------------------------------------------------------

    def _pair(self, read_state: Callable[[], ModelState], position_to_compare: int | None = None) -> None:
        """Read the second target and pair the tensors. Then compare the tensor at `position_to_compare`, if set."""
        self._progress = "reading the second target …"

        def job() -> Apply:
            try:
                difference = pair_states(self.model.state, read_state(), self._versions)
            except StateError as error:
                return partial(self._end_pairing, escape_sentence(str(error)))

            def apply() -> None:
                self.model.difference = difference
                extra_count = len(difference.only_after)
                extra_text = f" ({plural(extra_count, 'tensor')} only in the second target)" if extra_count else ""
                self._end_pairing(
                    f"second target: {escape_name(difference.other_target)}{extra_text}; press D to compare all values"
                )
                if position_to_compare is not None:
                    self._compare(position_to_compare)

            return apply

        self._reader.read_list(job() for _ in range(1))  # a generator, because the thread runs its steps

    def _end_pairing(self, message: str) -> None:
        self._progress, self._message = "", message
        self._list.show_rows()
        self._rest_timer = self.set_timer(CURSOR_REST_S, self._read_current)

    def _compare(self, position: int) -> None:
        difference = self.model.difference
        if difference is None or not difference.list_missing([position]):
            return
        self._rest_timer.stop()  # the job of the timer would replace this job
        self._position_being_read = position
        self._reader.read(partial(self._read_values, position, with_stats=False, compares=True))
        self._show_panel()

    def action_diff(self) -> None:
        """Compare the tensor at the cursor with the second target; ask for the target if it is missing."""
        row = self.model.current
        if self.model.difference is None and not self._progress:
            self._ask(asks_for_target=True)
        elif row is not None and row.tensor is not None:
            self._compare(row.tensor)
        else:
            self._say("move to a tensor and press d, or press D to compare all listed tensors")

    def action_list_diff(self) -> None:
        """Compare the values of all listed tensors."""
        difference = self.model.difference
        if difference is None:
            self.action_diff()
            return
        self._compare_list(
            difference, difference.list_missing(self.model.filtered_positions), difference.describe_outcomes
        )

    def _compare_list(self, difference: Difference, positions: Sequence[int], end: Callable[[], str]) -> None:
        def read(position: int) -> Apply:
            outcome = difference.compare(position)
            return lambda: difference.outcomes.update({position: outcome})

        self._read_list("comparing", positions, read, end)

    # --- actions ------------------------------------------------------------------------------------------------

    def action_stats(self) -> None:
        """Read the statistics of the tensor at the cursor."""
        row = self.model.current
        if row is None or row.tensor is None:
            self._say("move to a tensor and press s, or press S to read all listed tensors")
            return
        if not self.model.tensors[row.tensor].ranges and self.model.tensors[row.tensor].data is None:
            return
        self._rest_timer.stop()
        self._position_being_read = row.tensor
        self._reader.read(partial(self._read_values, row.tensor, with_stats=True, compares=False))
        self._show_panel()

    def action_list_stats(self) -> None:
        """Read the statistics of all listed tensors."""
        model = self.model
        self._read_stats([n for n in model.filtered_positions if n not in model.listed], self._describe_stats)
        model.shows_stats = True
        self._lay_out()

    def _describe_stats(self) -> str:
        lines = MAX_MESSAGE_LINES - 1 if self.size.height >= MIN_HEIGHT_WITH_LINES else 1
        return self.model.describe_stats(lines * self.size.width)

    def _read_stats(self, positions: Sequence[int], end: Callable[[], str]) -> None:
        model = self.model
        readable = [position for position in positions if model.tensors[position].ranges]
        if positions and not readable:
            self._say(explain_no_values(model, model.tensors[positions[0]]))
            return

        def read(position: int) -> Apply:
            stats = model.stats.get(position) or peek.read_statistics(model.tensors[position], self._versions)

            def apply() -> None:
                model.add_stats(position, stats)
                model.listed.add(position)

            return apply

        self._read_list("reading statistics", readable, read, end)

    def action_layers(self) -> None:
        """Read or compare the missing values of the listed tensors in layers. Then show the table of layers."""
        model, missing = self.model, self.model.list_layers_to_read()
        if model.difference is not None and missing:
            self._compare_list(model.difference, missing, self._show_layers)
        elif missing and (not model.stats or any(model.tensors[position].ranges for position in missing)):
            self._read_stats(missing, self._show_layers)
        else:
            model.unusual.find_outliers()
            self._say(self._show_layers())

    def _show_layers(self) -> str:
        model = self.model
        measures = VALUE_MEASURES if model.difference is None else (LayerMeasure.CHANGE,)
        roles = model.unusual.list_roles() if model.difference is None else model.list_change_roles()
        tables = build_tables(model.tensors, roles, measures)
        if not tables:
            return (
                f"no layers found: a layer table needs {MIN_LAYERS} or more tensors with names that differ only "
                "in a number"
            )

        def go(position: int | None) -> None:
            if position is not None:
                model.reveal(position)
                self._show()

        self.push_screen(LayerView(model, tables), go)
        return ""

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        self._message = ""
        self._list.move(by)

    def action_page(self, by: int) -> None:
        """Move the cursor by `by` pages, up if `by` is negative."""
        self.action_move(by * self._list.page)

    def action_end(self, by: int) -> None:
        """Move the cursor to the first or the last row."""
        self.action_move(by * self.model.count)

    def on_tensor_list_moved(self) -> None:
        """Show the row at the cursor."""
        self._panel.scroll_home(animate=False)
        self._show()

    def on_tensor_list_activated(self) -> None:
        """Open or close the module that was clicked."""
        self.model.toggle_node()
        self._show()

    def on_tensor_list_heading(self, message: TensorList.Heading) -> None:
        """Sort by the column whose heading was clicked, or reverse its order."""
        is_same = message.column is self.model.sort
        self.model.sort_by(message.column, descending=not self.model.is_descending if is_same else None)
        self._show()

    def action_scroll_panel(self, by: int) -> None:
        """Scroll the panel."""
        self._panel.scroll_relative(y=by * 8, animate=False)

    def action_sort(self, by: int) -> None:
        """Sort by the next column. After the last column, show the tree again."""
        available_columns = self.model.list_columns()
        columns = [None, *(column for column in SORT_ORDER if column in available_columns)]
        at = columns.index(self.model.sort) if self.model.sort in columns else 0
        at = (at + by) % len(columns)
        self.model.sort_by(columns[at])
        following, previous = columns[(at + 1) % len(columns)], columns[at - 1]
        names = ["tree" if column is None else f"by {column.value}" for column in (following, previous)]
        order = f"{self.model.describe_order()}  o: {names[0]}  O: {names[1]}  r: reverse  esc: tree"
        self._message = order if columns[at] else "tree, in the order in which the target lists the tensors"
        self._show()

    def action_reverse(self) -> None:
        """Reverse the order."""
        sort = self.model.sort or ListColumn.NAME
        self.model.sort_by(sort, descending=not self.model.is_descending)
        self._message = f"{self.model.describe_order()}  r: reverse  esc: tree"
        self._show()

    def action_mark(self) -> None:
        """Mark the row and go to the next row. After an open module, skip the rows inside it."""
        removed_count = self.model.toggle_mark()
        self.action_move(self.model.find_next_row() - self.model.cursor)
        if removed_count:
            self._say(f"{plural(removed_count, 'mark')} removed")

    def action_clear_marks(self) -> None:
        """Remove all marks, including the marks of hidden tensors."""
        count = self.model.clear_marks()
        self._message = f"{plural(count, 'mark')} cleared" if count else "nothing is marked"
        self._show()

    def action_copy(self) -> None:
        """Copy the marked names as globs, and show them."""
        name_globs = self.model.write_globs()
        if not name_globs.globs:
            self._say(
                f"the globs would match {name_globs.extra:,} other tensors too; mark more or fewer tensors"
                if name_globs.extra
                else "found no globs that match only these tensors; mark other tensors"
            )
            return
        self.copied_text = name_globs.text
        self.copy_to_clipboard(name_globs.text)
        count, is_marked = len(self.model.list_copied()), bool(self.model.marked)
        hidden_count = self.model.count_hidden_marks()
        marks = _HIDDEN_MARKS.format(shown=count - hidden_count, hidden=hidden_count) if hidden_count else ""
        if not is_marked and self.model.filter_text.strip():
            marks = "to copy fewer, mark them with space\n"
        noun = "marked tensor" if is_marked else "listed tensor" if marks else "tensor"
        self._open_overlay(_COPIED.format(count=plural(count, noun), marks=marks, text=name_globs.text))

    def action_edit(self) -> None:
        """Open the source line of the tensor in the editor."""
        row = self.model.current
        origin = None if row is None else self.model.tensors[row.positions[0]].origin
        if origin is None:
            self._say("this row has no source line; statecli finds source lines only for a model class")
            return
        command = editor.build_command(origin)
        try:
            with self.suspend():
                subprocess.run(command, check=False)  # noqa: S603 - the editor of the user
        except OSError as error:
            self._say(f"{escape_name(command[0])}: {error.strerror}; set EDITOR")
        self.refresh()

    def action_suspend(self) -> None:
        """Suspend the whole process group, as programs do at Ctrl-Z, because model code runs in a child process."""
        if sys.platform != "win32":
            with self.suspend():
                os.kill(0, signal.SIGTSTP)
            self.refresh(layout=True)

    def action_panel(self) -> None:
        """Show or hide the panel."""
        self._shows_panel = not self._has_panel()
        self._lay_out()

    def action_help(self) -> None:
        """Show the keys."""
        self._open_overlay(format_help())

    def _open_overlay(self, text: str) -> None:
        """Show a text over the screen. Any key closes the text. If the key has an action, the action runs too."""

        def act(key: str | None) -> None:
            if key is not None and key not in CLOSING_KEYS:
                self.call_later(self._act, key)

        self.push_screen(Overlay(text), act)

    def action_escape(self) -> None:
        """Stop reading a list. If no list is read, undo the sorting. If nothing is sorted, remove the filter."""
        if self._reader.reads_list:
            self._reader.read_list(None)
            self._end_list(lambda: "stopped")
            self._show()
            return
        if self.model.sort is not None:
            self.model.sort_by(None)
        else:
            self.model.set_filter("")
        self._message = ""
        self._show()

    # --- the line for filter and target -------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Open the input line for a filter."""
        self._ask(asks_for_target=False)

    def _ask(self, *, asks_for_target: bool) -> None:
        self._asks_for_target = asks_for_target
        line = self._line
        line.placeholder = "file, folder or URL to compare with" if asks_for_target else "name, glob, dtype, size>1MB"
        line.value = "" if asks_for_target else self.model.filter_text
        line.select_all()  # typing replaces the previous filter
        line.display = True
        self.screen.set_focus(line)  # immediately, because `focus` takes effect after waiting keys
        self._say(
            "enter: compare   esc: cancel" if asks_for_target else "enter: keep the filter   esc: remove it   ↓: list"
        )

    async def _type(self, event: events.Key) -> None:
        """Handle a key that is pressed in the input line."""
        if event.key == "enter":
            self._submit()
        elif event.key in ("escape", "down"):
            if not self._asks_for_target:
                self._filter("" if event.key == "escape" else self._line.value)
            self._close_line()
        elif event.key in LINE_ACTIONS:
            await self._line.run_action(LINE_ACTIONS[event.key])
        elif event.is_printable and event.character is not None:
            if not self._line.selection.is_empty:
                self._line.delete_selection()
            self._line.insert_text_at_cursor(event.character)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        if self._line.display and not self._asks_for_target and event.value == self._line.value:
            self._filter(event.value)

    def _filter(self, text: str) -> None:
        if text != self.model.filter_text:
            self.model.set_filter(text)
            self._show()

    def _submit(self) -> None:
        """Close the input line. Apply its filter, or read the second target that it names."""
        text = self._line.value
        self._close_line()
        if not self._asks_for_target:
            self._filter(text)
        elif text.strip():
            row = self.model.current
            self._pair(partial(self._read_other, text.strip()), row.tensor if row is not None else None)
            self._show_lines()

    def _close_line(self) -> None:
        self._line.display = False
        self.screen.set_focus(self._list)
        self._say("")
