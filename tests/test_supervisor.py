"""Model code ends, crashes and hangs its own process; the verdict and the exit code are the parent's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from statecli.__main__ import names_model_code
from statecli.cli import process_exit
from statecli.core.errors import UsageError
from statecli.live.spec import parse_spec

from .forked_python import run_python, start_python

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX: os.fork"),
    pytest.mark.usefixtures("in_tmp_path"),
]

#: A supervised command without torch: its result and status 1, with the added code of a model.
PROGRAM = """
import atexit, ctypes, os, posix, signal, subprocess, sys, threading, time
from statecli.cli import streams, supervisor
from statecli.core.exit_code import CommandExit
supervisor.INTERRUPT_TIMEOUT_S = 0.3  # for a loop that ignores interrupts
def overwrite():
    for n in range(3, 30):
        try:
            os.write(n, b"0" * 64)
        except OSError:
            pass
class Model:
    def __del__(self):
        {finalizer}
def command():
    supervisor.get_connection().name_model("net.py:Net")
    streams.reserve_stdout()
    model = Model()
    {code}
    streams.open_stdout().text("result\\n")
    streams.print_error("a note", debug=False)
    {late}
    raise CommandExit(1)
raise SystemExit(supervisor.run(command))
"""
#: A class that `--to meta` fails.
MODEL = """
import atexit, ctypes, os, posix, signal
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.ones(3)
        {constructor}
    {method}
"""


def start(command, **options):
    """Start a Python process with these arguments and a closed standard input."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
    return start_python(command, "statecli", **options)


def finish(process, given=None):
    """(exit code, stdout, stderr)"""
    try:
        out, err = process.communicate(given, timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()  # the child, which may be in a loop, ends too
        raise
    return process.returncode, (out or b"").decode(), (err or b"").decode()


def start_supervised(code="pass", late="pass", finalizer="pass", **options):
    return start(["-c", PROGRAM.format(code=code, late=late, finalizer=finalizer)], **options)


def inspect_model(*words, constructor="pass", method="pass"):
    Path("net.py").write_text(MODEL.format(constructor=constructor, method=method), "utf-8")
    process = run_python(["-m", "statecli", "inspect", "net.py:Net", *words], stdin=subprocess.DEVNULL, timeout=120)
    return process.returncode, process.stdout, process.stderr


AFTER_THE_VERDICT = {
    "nothing": "pass",
    "atexit": "atexit.register(lambda: os._exit(0))",
    "atexit-posix": "atexit.register(posix._exit, 0)",
    "threading-atexit": "threading._register_atexit(posix._exit, 0)",
    "kept-finalizer": "sys.kept = type('Late', (), {'__del__': lambda self: posix._exit(0)})()",
    "daemon": "threading.Thread(target=lambda: (time.sleep(1e4), posix._exit(0)), daemon=True).start()",
    "exit-hook": "sys.exit = lambda *_: posix._exit(0)",
    "closed-streams": "os.close(1); os.close(2); sys.stdout = sys.stderr = None",
    "excepthook": "sys.excepthook = sys.unraisablehook = lambda *_: posix._exit(0)",
    "os-exit-replaced": "os._exit = lambda _: posix._exit(0)",
    "os-write-replaced": "os.write = lambda *_: posix._exit(0)",
    "segfault": "atexit.register(ctypes.string_at, 0)",
    "noise": "atexit.register(lambda: [os.write(n, b'noise') for n in (0, 1)])",
    "forks": "os.fork()",
}


@pytest.mark.parametrize("case", AFTER_THE_VERDICT)
def test_code_that_runs_after_the_verdict_changes_neither_the_result_nor_the_code(case):
    """Exit handlers, finalizers, threads, replaced functions: 1 stays 1, and standard output is the result alone."""
    code, out, err = finish(start_supervised(AFTER_THE_VERDICT[case]))
    assert (code, out) == (1, "result\n")
    assert "statecli: a note\n" in err


def test_endless_thread_does_not_block_the_exit():
    """Python would wait for ever."""
    start_time = time.monotonic()
    assert finish(start_supervised("threading.Thread(target=time.sleep, args=(1e4,)).start()"))[:2] == (1, "result\n")
    assert time.monotonic() - start_time < 30


WITHOUT_A_VERDICT = {
    "exit": ("posix._exit(0)", "ended the process with status 0"),
    "exit-in-thread": ("threading.Thread(target=posix._exit, args=(0,)).start(); time.sleep(60)", "status 0"),
    "exit-in-handler": (
        "signal.signal(signal.SIGUSR1, lambda *_: posix._exit(0)); os.kill(os.getpid(), signal.SIGUSR1)",
        "ended the process with status 0",
    ),
    "segfault": ("ctypes.string_at(0)", "crashed (SIGSEGV)"),
    "abort": ("os.abort()", "crashed (SIGABRT)"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "crashed (SIGKILL)"),
    "killed-group": ("os.kill(0, signal.SIGTERM)", "crashed (SIGTERM)"),
    "closed-pipe": ("os.closerange(3, 100); posix._exit(0)", "ended the process with status 0"),
    "interrupts-itself": ("os.kill(os.getpid(), signal.SIGINT)", "(SIGINT)"),
    "exec": ("os.execv('/bin/true', ['true'])", "ended the process with status 0"),
    "pipe-overwritten": (
        "overwrite(); time.sleep(60)",
        "wrote to a file descriptor of statecli and destroyed the result",
    ),
    "daemon": ("subprocess.Popen(['sleep', '600']); posix._exit(0)", "ended the process with status 0"),
}


@pytest.mark.parametrize(
    ("case", "late"), [*((case, False) for case in WITHOUT_A_VERDICT), ("exit", True), ("segfault", True)]
)
def test_process_that_ends_without_a_verdict_exits_with_2(case, late):
    """The line names the model and the way the process ended; an earlier result is not printed."""
    code, reason = WITHOUT_A_VERDICT[case]
    code, out, err = finish(start_supervised(**{"late" if late else "code": code}))
    assert (code, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith("statecli: net.py:Net: the model's code ")
    assert line.endswith("; there is no result")
    assert reason in line


def test_exit_in_a_finalizer_after_the_result_exits_with_2():
    """The model is freed when its frame ends."""
    code, out, err = finish(start_supervised(finalizer="posix._exit(0)"))
    assert (code, out) == (2, "")
    assert "ended the process with status 0" in err


def test_a_verdict_for_another_result_is_not_accepted():
    """Length and checksum do not match the result, as after a fork of the pipe or a lost message."""
    code, out, err = finish(start_supervised(late="supervisor.get_connection()._size += 1"))
    assert (code, out) == (2, "")
    assert "there is no result" in err


def test_a_limit_ends_code_that_ignores_interrupts():
    """The code is an endless loop of Python that ignores Ctrl-C: one line, status 2, and no result."""
    limit = "supervisor.get_connection().limit_time(0.5)"
    loop = f"{limit}; signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: pass"
    start_time = time.monotonic()
    code, out, err = finish(start_supervised(loop))
    assert (code, out) == (2, "")
    assert err == "statecli: net.py:Net: stopped after 0.5 s (--timeout), before the end; there is no result\n"
    assert time.monotonic() - start_time < 30


def test_first_time_limit_cannot_be_extended():
    """The model's code cannot set another."""
    loop = "[supervisor.get_connection().limit_time(n) for n in (0.5, 1e9)]; time.sleep(60)"
    assert finish(start_supervised(loop))[0] == 2


@pytest.mark.parametrize(
    "command", ["inspect", "diff net.py:Net", "verify", "audit", "lock", "inspect -qv", "diff -qv a"]
)
def test_each_command_heeds_the_timeout(statecli, command):
    """Both parsers accept the option. A test has no parent process to end its process, and the line reports this."""
    result = statecli(*command.split(), "net.py:Net", "--timeout", "5")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("statecli: --timeout 5: works only in the statecli command on Linux or macOS")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_a_timeout_is_a_number_above_zero(statecli, seconds):
    """Anything else is refused in a line."""
    result = statecli("inspect", "net.py:Net", f"--timeout={seconds}")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "--timeout" in result.err


LOOP = """if True:
        signal.signal(signal.SIGINT, signal.{ignored})
        with open('began', 'w') as file: file.write(str(os.getpid()))
        os.rename('began', 'ready')
        while True: pass"""


def start_loop(ignored="SIG_IGN", **options):
    """Return (process, number of its child); the child runs an endless loop."""
    process = start_supervised(LOOP.format(ignored=ignored), **options)
    while not Path("ready").exists():
        time.sleep(0.02)
    return process, int(Path("ready").read_text())


@pytest.mark.parametrize("ignored", ["SIG_IGN", "default_int_handler"])
def test_ctrl_c_exits_with_130_and_prints_no_result(ignored):
    """Sent to the parent alone, while the model's code is in a loop. The code after the loop prints nothing on stderr;
    Python prints the traceback of an interrupt that the program does not catch.
    """
    process, _ = start_loop(ignored)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out) == (130, "")
    assert err == "" if ignored == "SIG_IGN" else err.startswith("Traceback") and err.endswith("KeyboardInterrupt\n")


def test_sigterm_ends_parent_and_child():
    """The signal ends the parent as without a child, and the parent ends the child."""
    process, child = start_loop()
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (-signal.SIGTERM, "", "")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: PR_SET_PDEATHSIG")
def test_the_child_of_a_killed_parent_ends():
    """SIGKILL of the parent leaves no loop running."""
    process, child = start_loop(stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    process.kill()
    process.wait(60)
    assert has_ended(child)


def has_ended(pid):
    """Return True if the process ends within half a minute; a process that is not yet waited for has ended."""
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.02)
    return time.monotonic() < deadline


def test_standard_input_reaches_the_models_code():
    """The child inherits standard input."""
    process = start_supervised("print('read', input(), file=sys.stderr)", stdin=subprocess.PIPE)
    assert "read a word" in finish(process, b"a word\n")[2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_reported_by_the_parent():
    """The line reports that the result cannot be written."""
    with open("/dev/full", "w") as full:
        code, _, err = finish(start_supervised(stdout=full))
    assert (code, err) == (2, "statecli: cannot write to standard output: No space left on device\n")


def test_closed_pipe_exits_with_141_silently():
    """The pipe is closed as by `| head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    code, _, err = finish(start_supervised(stdout=write_end))
    os.close(write_end)
    assert (code, err) == (141, "")


def test_a_terminal_keeps_its_width_and_colours():
    """The child asks the terminal before it replaces standard output."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 43, 0, 0))
    show = "sink = streams.open_stdout(); sink.text(f'{streams.get_width(sink)} {sink.is_terminal}')"
    process = start_supervised(show, stdin=theirs, stdout=theirs)
    os.close(theirs)
    state = os.read(ours, 1 << 16)
    assert finish(process)[0] == 1
    assert state.startswith(b"43 True")


# --- the command itself ----------------------------------------------------------------------------------------------


def test_an_exit_handler_of_a_model_does_not_turn_1_into_0():
    """`inspect --to meta` fails for a tensor left on the CPU."""
    options = ("--to", "meta", "--fail-on", "warning", "-f", "json")
    code, out, _ = inspect_model(*options, constructor="atexit.register(os._exit, 0)")
    assert code == 1
    assert [row["fqn"] for row in json.loads(out)["tensors"]] == ["t"]


def test_a_finalizer_of_a_model_does_not_turn_1_into_0():
    """The finalizer runs before the verdict, so the result is unknown."""
    code, out, err = inspect_model("--to", "meta", method="def __del__(self): posix._exit(0)")
    assert (code, out) == (2, "")
    assert "net.py:Net: the model's code ended the process with status 0" in err


def test_crash_of_a_model_is_one_line_and_exits_with_2():
    """The signal by its name."""
    code, out, err = inspect_model(constructor="ctypes.string_at(0)")
    expected = "statecli: net.py:Net: the model's code crashed (SIGSEGV); there is no result\n"
    assert (code, out, err) == (2, "", expected)


def test_a_model_that_loops_ends_at_the_timeout():
    """The limit applies to the whole command."""
    code, out, err = inspect_model("--timeout", "1", constructor="\n        while True: signal.sigtimedwait([], 1)")
    assert (code, out) == (2, "")
    assert err.endswith("stopped after 1 s (--timeout), before the end; there is no result\n")


def test_dev_stdout_is_standard_output():
    """`-o /dev/stdout` goes the way of the result."""
    code, out, _ = inspect_model("-o", "/dev/stdout", "-f", "json")
    assert code == 0
    assert json.loads(out)["tensors"]


def test_timeout_does_not_change_the_result_of_a_fast_command():
    """A line without code is supervised where a limit is set."""
    Path("a.npy").write_bytes(b"")
    line = ["-m", "statecli", "inspect", "a.npy"]
    assert finish(start(line)) == finish(start([*line, "--timeout", "100"]))


@given(st.text(st.sampled_from("ab.:/()= 'C\\py"), max_size=12))
@example("a.py:C")
@example("a.b:C()")
def test_each_spec_is_supervised(text):
    """Every text that names a class is found, in each spelling of an option."""
    try:
        spec = parse_spec(text)
    except UsageError:
        return
    if spec is not None:
        assert names_model_code(["inspect", text])
        assert names_model_code(["audit", "a.pt", f"--model={text}"])


def test_lines_without_code_are_not_supervised():
    """Without code of a model, the start has no additional cost."""
    assert not names_model_code(["audit", "models", "https://host/a.pt", "s3://bucket/a.pt", "-f", "json", "-x", "*.b"])
    assert names_model_code(["audit", "a.pt", "--model", "auto"])
    assert names_model_code(["audit", "a.pt", "--model=auto"])


@pytest.mark.parametrize(
    "code",
    [
        # An exit while the model is built or moved is an error of the model.
        "import traceback; reports = lambda frame: any("
        "'report' in one.f_code.co_filename for one, _ in traceback.walk_stack(frame)); "
        "signal.signal(signal.SIGALRM, lambda _, frame: reports(frame) and sys.exit(0)); "
        "signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0002)",
        "sys.settrace(lambda frame, event, value: sys.exit(0) if 'report' in frame.f_code.co_filename else None)",
        "sys.setprofile(lambda frame, event, value: sys.exit(0) if 'report' in frame.f_code.co_filename else None)",
    ],
    ids=["signal", "trace", "profile"],
)
def test_system_exit_of_model_code_does_not_set_the_status(code):
    """For example a watchdog that fires while statecli writes its report: exit code 2 and one line."""
    code_, out, err = inspect_model("--to", "meta", constructor=f"import sys; {code}")
    assert code_ == 2
    assert out == ""
    assert "there is no result" in err


def test_wrapped_system_exit_does_not_set_the_status(capsys):
    """Python 3.11 raises a RuntimeError from any error in `__set_name__` while a class is created."""

    def body():
        try:
            sys.exit(0)
        except SystemExit as done:
            raise RuntimeError("Error calling __set_name__") from done

    with pytest.raises(SystemExit) as ended:
        process_exit.run_body_and_exit(body, debug=False)
    assert ended.value.code == 2
    assert "model code raised SystemExit(0); there is no result" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc")
def test_processes_that_a_model_leaves_end_with_the_command():
    """Processes left by a model would otherwise continue the command and start more processes."""
    code = "left = os.fork(); left or time.sleep(600); open('left', 'w').write(str(left))"
    assert finish(start_supervised(code))[0] == 1
    assert has_ended(int(Path("left").read_text()))
