"""A fork of a server behaves as a newly started process of Python."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from .forked_python import run_python, start_python, write_command

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX: os.fork")

#: Code and the status with which Python ends.
ENDS = {
    "nothing": ("", 0),
    "a number": ("raise SystemExit(3)", 3),
    "a number of more than a byte": ("raise SystemExit(258)", 2),
    "None": ("raise SystemExit", 0),
    "a text": ("raise SystemExit('why')", 1),
    "an error": ("1 / 0", 1),
    "os._exit": ("import os; os._exit(5)", 5),
    "a signal": ("import os; os.kill(os.getpid(), 9)", -9),
    "an interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "a closed standard output": ("import os; print('x'); os.close(1)", 120),
}


def start_new_process(words, **options):
    """Run a newly started process without imported libraries."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("name", ENDS)
def test_the_exit_status_is_that_of_python(name, monkeypatch):
    """A number, an error, a signal; the last line on standard error is the same too."""
    code, status = ENDS[name]
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # nothing would be left to write at the end
    forked, expected = run_python(["-c", code], "statecli"), start_new_process(["-c", code])
    assert forked.returncode == expected.returncode == status
    assert forked.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_a_fork_has_its_own_words_folder_variables_and_input(tmp_path, monkeypatch):
    """PYTHONPATH and the encoding of the streams too."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_here.py").write_text("")
    code = (
        "import codecs, os, sys, only_here\n"
        "print(sys.argv, os.getcwd(), os.environ['A'], input(), sys.path[:2], __name__)\n"
        "print(codecs.lookup(sys.stdout.encoding).name)"
    )
    environment = {**os.environ, "A": "b", "PYTHONPATH": "lib", "PYTHONIOENCODING": "latin-1"}
    words = ["-c", code, "x", "y z"]
    options = {"cwd": tmp_path, "env": environment, "encoding": "latin-1"}
    forked, expected = run_python(words, given="né\n", **options), start_new_process(words, input="né\n", **options)
    assert (forked.returncode, forked.stdout, forked.stderr) == (0, expected.stdout, "")


def test_threads_and_exit_handlers_end_before_the_process():
    """The output of threads and exit handlers is complete."""
    code = (
        "import atexit, threading, time\natexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    )
    assert run_python(["-c", code]).stdout == start_new_process(["-c", code]).stdout == "thread\nhandler\n"


def test_a_fork_has_only_the_libraries_that_it_asks_for():
    """Otherwise torch would always be imported in a command that needs no torch."""
    code = "import sys; print('torch' in sys.modules)"
    assert [run_python(["-c", code], libraries).stdout for libraries in ("torch", "statecli")] == ["True\n", "False\n"]


def test_signals_reach_a_fork():
    """The process id is that of the fork, and a wait can time out."""
    process = start_python(["-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    process.stdout.close()


def test_standard_input_may_be_the_terminal_of_a_new_session():
    """Ctrl-C reaches the process from the terminal."""
    ours, terminal = pty.openpty()
    code = "import os, sys, time; print(os.ttyname(0), os.getsid(0) == os.getpid(), flush=True); time.sleep(60)"
    streams = {"stdin": terminal, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = start_python(["-c", code], session="terminal", **streams)
    assert process.stdout.readline().decode() == f"{os.ttyname(terminal)} True\n"
    os.write(ours, b"\x03")
    assert process.wait(30) == -signal.SIGINT
    for stream in (ours, terminal):
        os.close(stream)
    process.stdout.close()


def test_a_command_in_a_shell_ends_as_its_process(tmp_path):
    """The command has its own streams, arguments, status and signals."""
    write_command(tmp_path / "python", "-c")
    line = f"cd {tmp_path} && echo given | ./python 'import sys; print(input(), sys.argv[1]); sys.exit(3)' 'a b' | cat"
    process = subprocess.run(
        ["bash", "-c", f"{line}; echo ${{PIPESTATUS[1]}}"], capture_output=True, text=True, check=True
    )
    assert process.stdout == "given a b\n3\n"
    killed = subprocess.run([tmp_path / "python", "import os; os.kill(os.getpid(), 15)"], check=False)
    assert killed.returncode == -15


def test_variable_that_only_a_new_python_reads_is_refused(monkeypatch):
    """A fork would ignore the setting."""
    monkeypatch.setenv("PYTHONDEVMODE", "")
    with pytest.raises(AssertionError, match="PYTHONDEVMODE needs a newly started process"):
        run_python(["-c", ""], env={**os.environ, "PYTHONDEVMODE": "1"})
