"""Action of each key of `statecli browse`: on the list, in the input line, and on a text over the list."""

from __future__ import annotations

from collections.abc import Callable

from statecli.browse.screen_state import ScreenModel

#: Keys that only close a text over the list.
CLOSING_KEYS = ("q", "escape", "enter", "question_mark")
#: Action of each key on the list.
ACTIONS = {
    "q": "quit",
    "ctrl+z": "suspend",
    "down": "move(1)",
    "j": "move(1)",
    "up": "move(-1)",
    "k": "move(-1)",
    "pagedown": "page(1)",
    "ctrl+f": "page(1)",
    "pageup": "page(-1)",
    "ctrl+b": "page(-1)",
    "home": "end(-1)",
    "g": "end(-1)",
    "end": "end(1)",
    "G": "end(1)",
    "left_square_bracket": "scroll_panel(-1)",
    "right_square_bracket": "scroll_panel(1)",
    "slash": "filter",
    "escape": "escape",
    "o": "sort(1)",
    "O": "sort(-1)",
    "r": "reverse",
    "s": "stats",
    "S": "list_stats",
    "L": "layers",
    "d": "diff",
    "D": "list_diff",
    "space": "mark",
    "u": "clear_marks",
    "y": "copy",
    "e": "edit",
    "v": "panel",
    "question_mark": "help",
}
#: Key on the list -> method that changes the model, for keys that do nothing else.
MODEL_CHANGES: dict[str, Callable[[ScreenModel], None]] = {
    "right": ScreenModel.open_node,
    "l": ScreenModel.open_node,
    "left": ScreenModel.close_node,
    "h": ScreenModel.close_node,
    "enter": ScreenModel.toggle_node,
    "asterisk": ScreenModel.open_all,
    "t": ScreenModel.toggle_flat,
    "a": ScreenModel.mark_found,
}
#: Action of each key in the input line.
LINE_ACTIONS = {
    "backspace": "delete_left",
    "delete": "delete_right",
    "ctrl+h": "delete_left",
    "ctrl+u": "delete_left_all",
    "ctrl+w": "delete_left_word",
    "left": "cursor_left",
    "right": "cursor_right",
    "home": "home",
    "ctrl+a": "home",
    "end": "end",
    "ctrl+e": "end",
}
