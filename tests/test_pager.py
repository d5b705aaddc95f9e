"""Only a result longer than the terminal is shown in a pager."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios

import pytest
import torch

from .forked_python import start_python

ROWS = 20
_UNSET = ("CI", "STATECLI_PAGER", "PAGER", "LESS", "COLUMNS")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of 30 tensors, a checkpoint of 2 tensors, and a class of 30 tensors."""
    folder = tmp_path_factory.mktemp("pager")
    torch.save({f"weight_{n:02}": torch.ones(n + 1) for n in range(30)}, folder / "long.pt")
    torch.save({"a": torch.ones(1), "b": torch.ones(2)}, folder / "short.pt")
    lines = "".join(f"        self.weight_{n:02} = nn.Parameter(torch.ones({n + 1}))\n" for n in range(30))
    head = "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
    (folder / "net.py").write_text(f"{head}        super().__init__()\n{lines}")
    return folder


def run_on_terminal(folder, *words, libraries="statecli", **environment) -> tuple[int, str]:
    """Return the exit status and the text on a terminal of 20 lines after `statecli WORD...`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, 100, 0, 0))
    settings = {name: value for name, value in os.environ.items() if name not in _UNSET}
    settings |= {"TERM": "xterm", "NO_COLOR": "1", **environment}
    process = start_python(
        ["-m", "statecli", *words],
        libraries,
        session="terminal",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=settings,
    )
    os.close(theirs)
    output = b""
    try:
        while data := os.read(ours, 1 << 16):
            output += data
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    without_progress = re.sub(r"\r\x1b\[2K[^\r]*\r", "", output.decode().replace("\r\n", "\n"))
    return process.wait(timeout=60), without_progress


PAGER = "sed 's/^/paged: /'"


@pytest.mark.parametrize("target", ["long.pt", "net.py:Net"])
def test_a_long_result_is_paged_whole(target, folder):
    """A checkpoint, and a class, whose result the supervising process writes; the exit status is statecli's."""
    libraries = "torch" if target.endswith("Net") else "statecli"
    code, output = run_on_terminal(folder, "inspect", target, libraries=libraries, PAGER=PAGER)
    lines = output.splitlines()
    assert code == 0
    assert all(line.startswith("paged: ") for line in lines)
    assert [n for n in range(30) if f"weight_{n:02}" not in output] == []


def test_a_short_result_is_not_paged(folder):
    """The result fits on the screen."""
    code, output = run_on_terminal(folder, "inspect", "short.pt", PAGER=PAGER)
    assert code == 0
    assert "paged" not in output
    assert "2 tensors" in output


@pytest.mark.parametrize(
    "environment",
    [
        {"PAGER": PAGER, "CI": "true"},
        {"PAGER": PAGER, "TERM": "dumb"},
        {"PAGER": PAGER, "STATECLI_PAGER": ""},
        {"PAGER": "cat"},
        {"PAGER": "no-such-pager-here 2>/dev/null"},
    ],
    ids=lambda environment: "-".join(environment.values()),
)
def test_a_pager_that_is_off_or_missing_loses_nothing(environment, folder):
    """In CI, for example, no key is pressed."""
    code, output = run_on_terminal(folder, "inspect", "long.pt", **environment)
    assert code == 0
    assert "paged" not in output
    assert [n for n in range(30) if f"weight_{n:02}" not in output] == []


def test_statecli_pager_is_preferred_over_pager(folder):
    """`STATECLI_PAGER` may differ from the pager of other programs."""
    _, output = run_on_terminal(folder, "inspect", "long.pt", PAGER="cat", STATECLI_PAGER=PAGER)
    assert output.startswith("paged: ")


def test_a_pager_that_quits_early_changes_no_exit_status(folder):
    """The pager quits early, as after `q` in less."""
    torch.save({"a": torch.tensor([float("nan")]), **{f"b{n}": torch.ones(n + 1) for n in range(30)}}, folder / "n.pt")
    code, output = run_on_terminal(folder, "audit", "n.pt", "-f", "json", PAGER="head -1")
    assert code == 1
    assert len(output.splitlines()) == 1


def test_a_pipe_is_never_paged(statecli, folder, monkeypatch):
    """The output of a script is data."""
    monkeypatch.setenv("PAGER", PAGER)
    assert "paged" not in statecli("inspect", str(folder / "long.pt"), "-f", "table").out
