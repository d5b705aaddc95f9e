"""The progress display while bytes travel: files, then bytes of values; without a terminal there is no display."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess

import pytest
import torch
from safetensors.torch import save_file

from ..forked_python import run_python, start_python
from .server import Delay
from .test_requests import write_shards

COMMAND = ["-m", "statecli"]


def capture_terminal_stderr(*args: str, libraries: str = "statecli") -> str:
    """Return the command's output on stderr, which is a terminal; stdout is discarded."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    streams = {"stdout": subprocess.DEVNULL, "stderr": theirs}
    child = start_python([*COMMAND, *args], libraries, env=environment, **streams)
    os.close(theirs)
    out = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            block = os.read(ours, 1 << 16)
        except OSError:  # the last process with the terminal open has ended
            break
        out += block
    os.close(ours)
    assert child.wait(60) == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.decode())


@pytest.fixture
def net_url(file_server) -> str:
    write_shards(file_server.folder / "net", 40)
    file_server.listing = "python"
    return file_server.url("net/")


def test_files_are_counted_on_a_terminal(net_url):
    """The display counts the headers of 40 files; the last line shows all of them."""
    assert "40/40 files" in capture_terminal_stderr("inspect", net_url)


def test_bytes_of_a_large_tensor_are_counted_during_transfer(file_server):
    """The display counts to 12 MB, not 0 until the tensor is finished; no `?` stands for a speed not yet known."""
    save_file({"a": torch.zeros(3_000_000)}, file_server.folder / "m.safetensors")
    file_server.behave("m.safetensors", Delay(0.2))
    output = capture_terminal_stderr("inspect", "--stats", file_server.url("m.safetensors"))
    counts = {float(count) for count in re.findall(r"([\d.]+)/12\.0 MB", output)}
    assert [count for count in counts if 0 < count < 12]
    assert "?" not in output


def test_no_progress_option_disables_the_display(net_url):
    """--no-progress leaves standard error empty, while headers and then values are read."""
    assert capture_terminal_stderr("inspect", net_url, "--no-progress", "--stats") == ""


def test_pipe_gets_no_progress_display(net_url):
    """Progress bars are not for logs."""
    result = run_python([*COMMAND, "inspect", "--stats", net_url], "statecli", text=False, check=True)
    assert result.stderr == b""


NET = """import torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
"""


def test_stages_that_take_seconds_are_named(tmp_path):
    """Importing torch takes two seconds and more, and a constructor may take any time.

    Here torch is imported already: the stages are the same, and each stage writes a line.
    """
    (tmp_path / "net.py").write_text(NET)
    words = ("verify", "--check", "move", f"{tmp_path}/net.py:Net")
    output = capture_terminal_stderr(*words, libraries="torch")
    places = [output.find(stage) for stage in ("importing torch", "net.py", "building Net", "check move")]
    assert -1 not in places
    assert places == sorted(places)
    assert capture_terminal_stderr(*words, "--no-progress", libraries="torch") == ""
