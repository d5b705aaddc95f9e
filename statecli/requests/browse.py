"""Run `statecli browse`: show the screen, and then print the text that the user copied last."""

from __future__ import annotations

import os
import sys
from functools import partial

from statecli.browse.run import Request, browse
from statecli.core.errors import UsageError
from statecli.requests.options import BrowseOptions
from statecli.requests.outcome import Caller, Outcome


def run(options: BrowseOptions, caller: Caller) -> Outcome[str]:
    """Show the screen until the user quits."""
    _check_terminal(caller)
    request = Request(options.target, options.other, options.model, options.init_device)
    text = browse(request, partial(caller.progress, values=False))
    return Outcome(text, text=(lambda _: f"{text}\n") if text else None)


def _check_terminal(caller: Caller) -> None:
    """Raise UsageError unless stdin, stdout and stderr are a terminal that can move its cursor."""
    if os.environ.get("TERM") == "dumb":
        raise UsageError("browse: this terminal cannot move the cursor (TERM=dumb); use statecli inspect")
    has_input, has_errors = (stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
    for is_terminal, name in ((has_input, "input"), (caller.is_terminal(), "output"), (has_errors, "error")):
        if not is_terminal:
            raise UsageError(f"browse: standard {name} is not a terminal; use statecli inspect")
