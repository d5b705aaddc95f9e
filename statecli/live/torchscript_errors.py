"""Shorten errors of TorchScript's interpreter, because their text contains a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from statecli.core.lazy_pattern import compile_on_use
from statecli.live.source_line import SourceLine

_TRACEBACK = "Traceback of TorchScript"
#: Frames of Python in scripted code (the deepest last), and in a trace (the deepest first).
_SCRIPTED = compile_on_use(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
_TRACED = compile_on_use(r"^(\S.*)\((\d+)\): ", re.MULTILINE)
#: The error below the frames; source lines are indented.
_ERROR = compile_on_use(r"^(?:builtins\.)?([A-Za-z_][\w.]*)(?:: (.*))?\Z", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class ScriptError:
    """Name and message of the error, and file and line of the code that raised the error."""

    text: str
    place: SourceLine | None


def parse_script_error(error: BaseException, is_library: Callable[[str], bool]) -> ScriptError | None:
    """Parse the message of a TorchScript interpreter error. Prefer the user's lines. Return None for other errors."""
    text = str(error).strip() if type(error).__module__ in ("builtins", "torch.jit") else ""
    if _TRACEBACK not in text:
        return None
    match = _ERROR.search(text)
    frames = _SCRIPTED.findall(text) or _TRACED.findall(text)[::-1]
    places = [SourceLine(file, int(line)) for file, line in frames]
    own_places = [place for place in places if not is_library(place.file)] or places
    name, message = match.groups() if match else (type(error).__name__, None)
    message_text = " ".join((message or "TorchScript gives no reason").split())
    return ScriptError(f"{name}: {message_text}", own_places[-1] if own_places else None)
