"""`statecli browse` in a terminal of tmux: the screen, the keys, and the terminal afterwards."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("textual")
if shutil.which("tmux") is None:
    pytest.skip("tmux is not installed", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent
NET = """\
import torch
from torch import nn

print("printed by the model")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.mask = torch.ones(2)
"""


class Terminal:
    """A terminal of 80 columns and 24 lines, with a server of its own."""

    def __init__(self, folder, line, environment):
        self._socket = folder / "tmux"
        python = f"{shlex.quote(sys.executable)} -m statecli"
        shell = f"{line.replace('statecli', python, 1)}; echo status $?; sleep 60"
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), **environment}
        self._run("new", "-d", "-x", "80", "-y", "24", shell, env=environment, cwd=folder)

    def _run(self, *words, **options):
        command = ["tmux", "-f", os.devnull, "-S", self._socket, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout

    def press(self, *keys):
        self._run("send-keys", *keys)

    def wait_for(self, text):
        """Return the screen as soon as it contains the text."""
        end = time.monotonic() + 60
        while text not in (screen := self._run("capture-pane", "-p")):
            assert time.monotonic() < end, screen
            time.sleep(0.05)
        return screen

    def close(self):
        self._run("kill-server")


@pytest.fixture
def open_terminal(tmp_path):
    opened = []

    def run(line, **environment):
        opened.append(Terminal(tmp_path, line, environment))
        return opened[-1]

    yield run
    for terminal in opened:
        terminal.close()


def test_a_checkpoint_is_browsed(open_terminal, first, second):
    """Filter, difference, globs; after q the screen is as before, with the globs, and the status is 0."""
    terminal = open_terminal("statecli browse first.safetensors second.safetensors", NO_COLOR="1")
    terminal.wait_for("{0..3}")
    terminal.press("/", "q", "_", "p", "r", "o", "j")
    terminal.wait_for("filter q_proj: 4")
    terminal.press("Enter", "Down", "Down")
    terminal.wait_for("values: 64 of 64 differ")
    terminal.press("a", "y")
    terminal.wait_for("-i 'model.layers.*.attn.q_proj.weight'")
    terminal.press("x")
    terminal.wait_for("filter q_proj: 4")
    terminal.press("q")
    screen = terminal.wait_for("status 0")
    assert screen.splitlines()[0] == "-i 'model.layers.*.attn.q_proj.weight'"
    assert "filter q_proj" not in screen
    assert first.exists()
    assert second.exists()


def test_a_class_is_browsed_and_e_opens_the_editor(open_terminal, tmp_path):
    """Model code runs in a child process; its screen works as well, and the editor has the line."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "editor").write_text('#!/bin/sh\necho "$@" > opened\n')
    (tmp_path / "editor").chmod(0o755)
    terminal = open_terminal("statecli browse net.py:Net", EDITOR="./editor", VISUAL="")
    terminal.wait_for(" …")  # building the model, importing torch, or the next stage
    terminal.press("d", "/", "x")  # discarded, because the screen is not there yet
    terminal.wait_for("mask")
    terminal.press("End")
    terminal.wait_for("assigned at net.py:11")
    terminal.press("e")
    end = time.monotonic() + 30
    while not (tmp_path / "opened").exists() and time.monotonic() < end:
        time.sleep(0.05)
    terminal.wait_for("assigned at net.py:11")
    terminal.press("q")
    screen = terminal.wait_for("status 0")
    assert "printed by the model" in screen
    assert (tmp_path / "opened").read_text() == f"+11 {tmp_path / 'net.py'}\n"


def test_unreadable_target_is_an_error_line(open_terminal, tmp_path):
    """Before the screen opens."""
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    screen = open_terminal("statecli browse broken.safetensors").wait_for("status 2")
    assert screen.startswith("statecli: broken.safetensors: ")
