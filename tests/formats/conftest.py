"""What the tests of the readers share: writing bytes to a file, reading it, and the line it is refused with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from statecli import __main__, formats
from statecli.core.errors import UnreadableError

#: Runs `statecli inspect`; gives the exit code, stdout and stderr.
Inspect = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inspect(monkeypatch, capfd) -> Inspect:
    """The command line in this process, as a user meets it."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["statecli", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            __main__.main()
        out, err = capfd.readouterr()
        return left.value.code, out, err

    return run


@pytest.fixture
def run(monkeypatch, capfd) -> Callable[..., tuple[int, str]]:
    """The command line in this process: its exit code and its output."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["statecli", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            __main__.main()
        out, err = capfd.readouterr()
        return left.value.code, out + err

    return run


@pytest.fixture
def line(inspect) -> Callable[[str | Path], str]:
    """The line a target is refused with, its path taken off; the reader and the command line say the same."""

    def refuse(target: str | Path) -> str:
        target = os.fspath(target)
        with pytest.raises(UnreadableError) as refused:
            formats.read(target)
        message = str(refused.value)
        assert len(message.splitlines()) == 1
        code, out, err = inspect(target)
        assert (code, out) == (2, "")
        assert err == f"statecli: {message}\n"
        assert message.startswith((f"{target}: ", os.path.join(target, "")))
        return message.removeprefix(f"{target}: ")

    return refuse
