"""Fixtures of the reader tests: run the command line, and get the line with which a target is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from statecli import formats
from statecli.core.errors import UnreadableError

#: Runs `statecli inspect`; returns the exit status, stdout and stderr.
Inspect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inspect(statecli) -> Inspect:
    """Run `statecli inspect` in this process; return the exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        result = statecli("inspect", *map(str, arguments))
        return result.code, result.out, result.err

    return run


@pytest.fixture
def run(statecli) -> Callable[..., tuple[int, str]]:
    """Run the command line in this process; return the exit status and the output."""

    def run(*arguments: object) -> tuple[int, str]:
        result = statecli(*map(str, arguments))
        return result.code, result.out + result.err

    return run


@pytest.fixture
def line(inspect) -> Callable[[str | Path], str]:
    """Return the line with which a target is refused, without its path; reader and command line agree on the line."""

    def refuse(target: str | Path) -> str:
        target = os.fspath(target)
        with pytest.raises(UnreadableError) as error:
            formats.read(target)
        message = str(error.value)
        assert len(message.splitlines()) == 1
        code, out, err = inspect(target)
        assert (code, out) == (2, "")
        assert err == f"statecli: {message}\n"
        assert message.startswith((f"{target}: ", os.path.join(target, "")))
        return message.removeprefix(f"{target}: ")

    return refuse
