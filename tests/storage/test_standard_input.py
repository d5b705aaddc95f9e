"""Standard input as a target: `-` is a checkpoint from a pipe or a redirected file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def checkpoint():
    """a.pt with a model and an optimizer, and b.safetensors with the same model."""
    weights = {"fc.weight": torch.arange(6.0).reshape(2, 3)}
    torch.save({"model": weights, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2, 3)}}}}, "a.pt")
    save_file(weights, "b.safetensors")


def run_statecli(*words, stdin=None, data=None, **options):
    """Run statecli in a separate process, because the descriptor belongs to the process."""
    command = [sys.executable, "-m", "statecli", *words]
    return subprocess.run(command, stdin=stdin, input=data, capture_output=True, timeout=60, check=False, **options)


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def test_pipe_and_redirected_file_are_read_like_the_file(checkpoint):
    """A pipe is copied first, because zip archives are read from their end."""
    expected = run_statecli("inspect", "a.pt", "-f", "json").stdout.replace(b'"a.pt"', b'"-"')
    assert run_statecli("inspect", "-", "-f", "json", data=read_bytes("a.pt")).stdout == expected
    with open("a.pt", "rb") as file:
        assert run_statecli("inspect", "-", "-f", "json", stdin=file).stdout == expected


def test_each_command_accepts_standard_input(checkpoint):
    """A section as a side of a diff, the target of an audit and the target of a lock come from a pipe."""
    process = run_statecli("diff", "-#model", "b.safetensors", data=read_bytes("a.pt"))
    assert (process.returncode, process.stdout.splitlines()[0][:9]) == (0, b"identical")
    assert run_statecli("audit", "-", data=read_bytes("b.safetensors")).returncode == 0
    assert b"fc.weight" in run_statecli("lock", "-", data=read_bytes("b.safetensors")).stdout


def test_copy_is_removed(checkpoint, tmp_path):
    """The temporary file has no name, so a killed process leaves no file."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    process = run_statecli("inspect", "-", data=read_bytes("a.pt"), env={**os.environ, "TMPDIR": str(folder)})
    assert process.returncode == 0
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("words", "data", "message"),
    [
        (("inspect", "-"), b"", "-: is an empty file"),
        (("inspect", "-"), b"import os\n", "-: is not a checkpoint (text file)"),
        (
            ("diff", "-", "-"),
            b"",
            "-: standard input is given twice but contains only one checkpoint; save the other checkpoint to a file",
        ),
        (("audit", "-", "--values", "--shard", "1/2"), b"", "--shard: other processes cannot read standard input"),
        (("verify", "-"), b"", "-: is not a model class"),
    ],
)
def test_errors_name_standard_input(words, data, message):
    process = run_statecli(*words, data=data)
    assert process.returncode == 2
    assert message in (process.stdout + process.stderr).decode()


def test_closed_standard_input_does_not_block():
    """The descriptor may then belong to another file, to which nobody writes."""
    script = f"exec {sys.executable} -m statecli inspect - <&-"
    process = subprocess.run(["sh", "-c", script], capture_output=True, timeout=60, check=False)
    assert process.returncode == 2
    assert process.stderr == b"statecli: -: standard input is closed: pipe a checkpoint into statecli\n"


def test_full_disk_is_reported(checkpoint):
    """The copy needs disk space, and the message names the full folder."""
    process = run_statecli("inspect", "-", data=read_bytes("a.pt"), preexec_fn=_limit_files)
    assert process.returncode == 2
    assert b"cannot copy standard input to " in process.stderr
    assert b"set TMPDIR to another folder" in process.stderr


def _limit_files():
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
