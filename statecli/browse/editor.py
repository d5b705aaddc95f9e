"""The command that opens a source line in the user's editor."""

from __future__ import annotations

import os
import shlex

from statecli.core.model_state import Origin

#: Option before `file:line` by editor, for editors that take this form.
_COLON_EDITORS = {
    "code": ("-g",),
    "codium": ("-g",),
    "cursor": ("-g",),
    "windsurf": ("-g",),
    "subl": (),
    "hx": (),
    "helix": (),
    "zed": (),
}


def find_editor() -> list[str]:
    """Return the editor's command as words, from `$VISUAL` or `$EDITOR`. The default is `vi`."""
    text = os.environ.get("VISUAL", "").strip() or os.environ.get("EDITOR", "").strip() or "vi"
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return [text]


def describe_editor() -> str:
    """Return the name of the editor."""
    return os.path.basename(find_editor()[0])


def build_command(origin: Origin) -> list[str]:
    """Return the command that opens the source line. The path is absolute, so that no editor reads it as an option."""
    words, path = find_editor(), os.path.abspath(origin.file)
    name = os.path.basename(words[0])
    if name in _COLON_EDITORS:
        return [*words, *_COLON_EDITORS[name], f"{path}:{origin.line}"]
    return [*words, f"+{origin.line}", path]
