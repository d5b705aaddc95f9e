"""Errors of the system name the affected file, standard output, or the working directory."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli import formats
from statecli.cli import process_exit
from statecli.core.errors import OutputError, UnreadableError
from statecli.file_scan.scan import scan_pickles
from statecli.workers import pool


@pytest.fixture(autouse=True)
def _checkpoints(in_tmp_path):
    """Two checkpoints of equal shapes and other values, in each of two formats."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        state = {"w": torch.full((300, 300), value), "v": torch.arange(7.0) + value}
        torch.save(state, f"{name}.pt")
        save_file(state, f"{name}.safetensors")


@pytest.fixture
def fail_reads(monkeypatch):
    """Return a function that makes reads of a file fail with an error number, after a number of reads."""

    def fail(name, number=errno.EIO, after=0):
        reads = 0

        def wrap_read(read):
            def fail_read(descriptor, *rest):
                nonlocal reads
                if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) == name:
                    reads += 1
                    if reads > after:
                        raise OSError(number, os.strerror(number))
                return read(descriptor, *rest)

            return fail_read

        for call in ("pread", "preadv"):
            monkeypatch.setattr(os, call, wrap_read(getattr(os, call)))

    return fail


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc names the file of a descriptor")
COMMANDS = {
    "inspect": "inspect {}",
    "stats": "inspect {} --stats",
    "diff-before": "diff {} b.pt",
    "diff-after": "diff b.pt {} --jobs 1",
    "metadata": "diff {} b.safetensors --metadata-only",
    "audit": "audit {}",
    "audit-values": "audit {} --values",
    "audit-against": "audit b.pt --against {}",
    "lock": "lock {} -o -",
}


@linux
@pytest.mark.parametrize(
    ("command", "name", "number"),
    [
        *((command, name, errno.EIO) for command in COMMANDS for name in ("a.pt", "a.safetensors")),
        *(("stats", "a.pt", number) for number in (errno.ESTALE, errno.EAGAIN)),
    ],
)
def test_a_read_that_fails_names_its_file(statecli, fail_reads, command, name, number):
    """Each command exits with 2 with the file and the reason; the line does not name standard output."""
    fail_reads(name, number)
    result = statecli(*COMMANDS[command].format(name).split())
    assert result.code == 2
    output = result.out + result.err
    assert f"{name}: cannot be " in output
    assert os.strerror(number).lower() in output
    assert "standard output" not in output


@linux
@pytest.mark.parametrize("after", range(1, 12, 2))
@pytest.mark.parametrize("command", ["stats", "diff-before", "audit-values", "lock"])
def test_a_read_that_fails_later_names_its_file(statecli, fail_reads, command, after):
    """The read fails in the middle of the headers or of the values."""
    fail_reads("a.pt", after=after)
    result = statecli(*COMMANDS[command].format("a.pt").split())
    output = result.out + result.err
    if result.code == 2:
        assert "a.pt" in output
        assert "input/output error" in output
    assert "standard output" not in output


@linux
@pytest.mark.parametrize("arguments", [(), ("--values",)])
def test_the_other_files_of_an_audit_go_on(statecli, fail_reads, arguments):
    """One target fails; the findings of the other targets are shown."""
    torch.save({"w": torch.full((3,), float("nan"))}, "c.pt")
    fail_reads("a.pt")
    result = statecli("audit", ".", "--values", "-f", "json", *arguments)
    assert result.code == 2
    statuses = {target["target"]: target["status"] for target in result.json["targets"]}
    assert statuses["a.pt"] == "failed"
    assert set(statuses) == {"a.pt", "a.safetensors", "b.pt", "b.safetensors", "c.pt"}
    assert any(finding["rule"] == "nan" for finding in result.json["findings"])


@linux
def test_a_read_that_fails_once_is_not_a_clean_scan(fail_reads):
    """The listing may succeed a moment later: the pickles were not judged all the same."""
    fail_reads("a.pt")
    with pytest.raises(UnreadableError, match=r"a\.pt: cannot be read: input/output error"):
        scan_pickles("a.pt")


@linux
def test_a_shard_that_cannot_be_read_is_named(fail_reads):
    """The error has the path of the shard and not of the index."""
    save_file({"w": torch.ones(2)}, "model-00001-of-00001.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    Path("model.safetensors.index.json").write_text(json.dumps(index))
    fail_reads("model-00001-of-00001.safetensors")
    with pytest.raises(UnreadableError, match=r"model-00001-of-00001\.safetensors: cannot be read: input/output error"):
        formats.read("model.safetensors.index.json")


def _program(body, **options):
    path = str(Path(__file__).parents[1])
    program = [sys.executable, "-c", body]
    return subprocess.run(
        program, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}, **options
    )


MAIN = "import sys; from statecli.__main__ import command; sys.argv = ['statecli', *{}]; command()"


def test_a_working_directory_that_was_removed_has_a_line_of_its_own():
    """A relative name cannot be looked up any more."""
    body = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
    process = _program(body + MAIN.format(["audit", "."]))
    assert process.returncode == 2
    assert "standard output" not in process.stderr
    assert "working directory no longer exists" in process.stderr
    assert process.stderr.count("\n") == 1


def test_only_a_write_to_standard_output_is_an_error_of_standard_output():
    """An error of the system from anywhere else is not."""
    for error, line in (
        (OSError(errno.ENOSPC, "No space left on device"), "the system reported an error: no space left on device"),
        (OSError(errno.EACCES, "Permission denied", "x.json"), "x.json: permission denied"),
        (MemoryError(), "not enough memory; there is no result"),
    ):
        given = (*error.args, *filter(None, [getattr(error, "filename", None)]))
        raised = f"raise {type(error).__name__}{given!r}"
        program = f"from statecli.cli import process_exit\ndef run(): {raised}\n"
        process = _program(program + "process_exit.run_body_and_exit(run, debug=False)")
        assert (process.returncode, process.stderr.count("\n")) == (2, 1)
        assert process.stderr.startswith(f"statecli: {line}")


def test_output_error_is_the_line_about_standard_output(capsys):
    """The error is that of a full disk."""

    def run():
        raise OutputError("cannot write to standard output: No space left on device")

    with pytest.raises(SystemExit) as done:
        process_exit.run_body_and_exit(run, debug=False)
    assert done.value.code == 2
    assert capsys.readouterr().err == "statecli: cannot write to standard output: No space left on device\n"


# --- processes and memory --------------------------------------------------------------------------------------------


class Large(int):
    """A task that is a batch of its own."""

    size = pool.MIN_BATCH_BYTES


def double(shared, batch):
    return [shared * number for number in batch]


def refuse_fork(*_, **__):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize("where", ["fork", "semaphore"])
def test_tasks_run_in_this_process_if_no_process_can_be_started(monkeypatch, where):
    """The causes are `ulimit -u` and a full /dev/shm: the result is the same."""
    if where == "fork":
        monkeypatch.setattr(os, "fork", refuse_fork)
    else:
        from multiprocessing import synchronize

        monkeypatch.setattr(synchronize._multiprocessing, "SemLock", refuse_fork)
    with pool.use_engine(pool.Processes(2)):
        assert pool.run_tasks(double, 2, [Large(1), Large(2), Large(3)], absent=None) == [2, 4, 6]
    with pool.run_in_background(len, "four") as length:
        assert length() == 4


@pytest.mark.parametrize("threads", range(5))
def test_tasks_run_if_few_threads_can_be_started(monkeypatch, threads, capsys):
    """A container may limit threads: the pool of processes needs one thread, and this thread needs another thread."""
    start, left = threading.Thread.start, [threads]

    def start_or_refuse(thread):
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    with pool.use_engine(pool.Processes(2)):
        assert pool.run_tasks(double, 2, [Large(1), Large(2), Large(3)], absent=None) == [2, 4, 6]
    left[0] = threads
    with pool.run_in_background(len, "four") as length:
        assert length() == 4
    assert "Traceback" not in capsys.readouterr().err


def test_a_library_that_does_not_fit_into_memory_is_one_line():
    """The error of the loader is an ImportError."""
    body = "import sys\nclass Finder:\n    def find_spec(name, *_):\n"
    body += "        if name == 'numpy': raise ImportError('numpy.so: failed to map segment from shared object')\n"
    process = _program(body + "sys.meta_path.insert(0, Finder)\n" + MAIN.format(["inspect", "a.pt", "--stats"]))
    assert (process.returncode, process.stderr) == (2, "statecli: not enough memory; there is no result\n")


@pytest.mark.parametrize(
    ("error", "where"),
    [
        ("MemoryError()", "parser.parse"),
        ("OSError(11, 'no')", "parser.parse"),
        ("ImportError('no')", "interrupts.handle_interrupts"),
        ("MemoryError()", "command_runner.execute"),
        ("RecursionError('deep')", "command_runner.execute"),
        ("OSError(11, 'no')", "command_runner.execute"),
    ],
)
def test_crash_exits_with_2_and_one_line(error, where):
    """A crash in any step gives one line and status 2."""
    module, function = where.split(".")
    body = f"import statecli.cli.{module} as module\ndef fail(*_): raise {error}\nmodule.{function} = fail\n"
    process = _program(body + MAIN.format(["inspect", "a.pt"]))
    assert (process.returncode, process.stdout, process.stderr.count("\n")) == (2, "", 1)
    assert process.stderr.startswith("statecli: ")


def test_failed_fork_for_model_code_exits_with_2():
    """The line of `os.fork`'s own error."""
    body = "import os\ndef fail(): raise BlockingIOError(11, 'Resource temporarily unavailable')\nos.fork = fail\n"
    process = _program(body + MAIN.format(["inspect", "net.py:Net"]))
    assert process.returncode == 2
    assert process.stderr == "statecli: cannot run: BlockingIOError: [Errno 11] Resource temporarily unavailable\n"


NO_THREAD = (
    'import _thread\ndef fail(*_): raise RuntimeError("can\'t start new thread")\n_thread.start_new_thread = fail\n'
)


def test_inspect_works_without_threads():
    """Listing a checkpoint needs none."""
    process = _program(NO_THREAD + MAIN.format(["inspect", "a.pt"]))
    assert (process.returncode, process.stderr) == (0, "")


def test_blas_uses_one_thread_if_no_thread_can_be_started():
    """OpenBLAS raises SIGINT otherwise, and the command ended with 130."""
    body = "import atexit, os, sys\nos.environ.pop('OPENBLAS_NUM_THREADS', None)\n"
    body += "atexit.register(lambda: print(os.environ.get('OPENBLAS_NUM_THREADS')))\n"
    process = _program(body + NO_THREAD + MAIN.format(["inspect", "a.pt", "--stats"]))
    assert (process.returncode, process.stderr) == (0, "1\n")


def test_memory_error_at_the_start_exits_with_2():
    """The supervisor is the first import of a process with `ulimit -v`, and its import fails."""
    body = "import sys\nfrom statecli import __main__\n"
    body += "class Finder:\n    def find_spec(*_): raise MemoryError\n"
    body += "sys.modules.pop('statecli.cli.supervisor', None)\nsys.meta_path.insert(0, Finder)\n"
    process = _program(body + MAIN.format(["inspect", "net.py:Net"]))
    assert (process.returncode, process.stderr) == (2, "statecli: not enough memory; there is no result\n")


@linux
@pytest.mark.parametrize("megabytes", [100, 150, 200, 300, 400])
@pytest.mark.parametrize("line", [["inspect", "a.pt", "--stats"], ["diff", "a.pt", "a.pt"]])
def test_low_memory_exits_with_0_or_2(line, megabytes):
    """The limit is `ulimit -v`. Without memory, BLAS of numpy would end the process with status 1."""
    limit = megabytes << 20
    process = _program(MAIN.format(line), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert process.returncode in (0, 2)
    assert process.returncode == 0 or process.stderr.splitlines()[-1].startswith("statecli: ")
