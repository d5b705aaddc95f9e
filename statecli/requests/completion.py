"""Run `statecli completion`: print a script that completes command lines in a shell."""

from __future__ import annotations

import os

from statecli.requests.options import CompletionOptions
from statecli.requests.outcome import Caller, Outcome


def run(options: CompletionOptions, caller: Caller) -> Outcome[str]:  # noqa: ARG001 - every command has the same signature
    """Return the completion script of the shell. The script calls `statecli __complete`."""
    with open(os.path.join(os.path.dirname(__file__), f"completion.{options.shell.value}"), encoding="utf-8") as file:
        script = file.read()
    return Outcome(script, text=lambda _: script)
