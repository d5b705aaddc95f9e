"""Every command runs without the names that Python has only on POSIX systems, as on Windows.

This is a simulation: paths, `os.name` and the file system are still those of POSIX. No test of this project has run on
Windows itself, as docs/reference/platforms.md states.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .forked_python import run_python

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX: names to remove")

#: Names that the documentation of Python marks "Availability: Unix" or "not Windows", and modules that Windows lacks.
REMOVE = """
import os, select, signal, socket, sys, mmap
import asyncio, concurrent.futures, json, multiprocessing, subprocess, tempfile, typing, zipfile  # they run on Windows
import shutil
{libraries}
shutil._USE_CP_SENDFILE = False
OS = '''
chown chroot confstr copy_file_range ctermid eventfd fchdir fchmod fchown fdatasync fork forkpty fpathconf fstatvfs
getegid geteuid getgid getgrouplist getgroups getloadavg getpgid getpgrp getpriority getresgid getresuid getsid getuid
getxattr initgroups killpg lchown listxattr lockf login_tty major makedev memfd_create minor mkfifo mknod nice openpty
pathconf pidfd_open pipe2 posix_fadvise posix_fallocate posix_openpt posix_spawn posix_spawnp pread preadv pwrite
pwritev readv register_at_fork removexattr sched_get_priority_max sched_get_priority_min sched_getaffinity
sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler
sched_yield sendfile setegid seteuid setgid setgroups setns setpgid setpgrp setpriority setregid setresgid setresuid
setreuid setsid setuid setxattr splice statvfs sync sysconf tcgetpgrp tcsetpgrp truncate ttyname uname unshare wait
wait3 wait4 waitid writev O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_EVTONLY O_LARGEFILE O_NDELAY O_NOATIME
O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_RSYNC O_SYNC O_TMPFILE
'''
SIGNAL = '''
ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGPWR
SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH alarm getitimer pause
pidfd_send_signal pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait sigwaitinfo
SIG_BLOCK SIG_SETMASK
'''
for module, names in (os, OS), (signal, SIGNAL), (select, "poll epoll kqueue"), (socket, "AF_UNIX"):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in [name for name in dir(mmap) if name.startswith(("MAP_", "PROT_", "MADV_"))]:
    delattr(mmap, name)
LACKING = {{"crypt", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "spwd", "syslog", "termios", "tty"}}
for name in LACKING - {{"posix"}}:
    sys.modules[name] = None
multiprocessing.get_all_start_methods = lambda: ["spawn"]
def get_context(method=None, _get=multiprocessing.get_context):
    if method not in (None, "spawn"):
        raise ValueError(f"cannot find context for {{method!r}}")
    return _get("spawn")
multiprocessing.get_context = get_context
"""
#: Import statecli again, without the names, because the process is a fork of a server that has imported statecli.
FORGET = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "statecli"]:
    del sys.modules[name]
"""
RUN = REMOVE + "from statecli.__main__ import command\ncommand()"
NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.table = torch.randn(2)
    def forward(self, x):
        return self.layer(x) + self.table
"""


def run(folder, *words, libraries="import numpy"):
    """Run a command in a Python without the names; Python and the given libraries have imported them before."""
    code = FORGET + RUN.format(libraries=libraries)
    server = "torch" if "torch" in libraries else "statecli"
    return run_python(["-W", "ignore", "-c", code, *words], server, cwd=folder, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints that differ in a value, in two formats, and a class."""
    folder = tmp_path_factory.mktemp("windows")
    state = {"a": torch.ones(2000, 300), "b": torch.zeros(3)}
    for name, other in (("before", state), ("after", state | {"b": torch.ones(3)})):
        torch.save(other, folder / f"{name}.pt")
        torch.save(other, folder / f"{name}-legacy.pt", _use_new_zipfile_serialization=False)
        save_file(other, folder / f"{name}.safetensors")
    (folder / "net.py").write_text(NET)
    torch.save({"layer.weight": torch.ones(2, 2), "table": torch.ones(2)}, folder / "net.pt")
    subprocess.run(["git", "init", "-q", folder], check=False)
    return folder


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--version -v", 0),
        ("--help", 0),
        ("inspect before.pt", 0),
        ("inspect before-legacy.pt -f json", 0),
        ("inspect before.safetensors --stats", 0),
        ("diff before.pt after.pt", 1),
        ("diff before.safetensors after-legacy.pt --jobs 2", 1),
        ("diff before.safetensors before.pt", 0),
        ("audit before.pt --values --no-config", 0),
        ("lock before.pt -o before.lock.json", 0),
        ("audit before.pt --lock before.lock.json --no-config", 0),
        ("rules", 0),
        ("config", 0),
        ("schema diff", 0),
        ("completion powershell", 0),
        ("samples samples", 0),
        ("log .", 0),
        ("bisect . --condition nan", 1),
        ("git difftool before.pt after.pt", 0),
        ("git external-diff a.pt before.pt 0 100644 after.pt 0 100644", 0),
        ("git setup", 0),
        ("git textconv before.pt", 0),
        ("report before.pt --stats -o page.html", 0),
        ("watch . --history --count 2 --interval 1", 0),
        ("inspect missing.pt", 2),
    ],
)
def test_command_runs(folder, words, status):
    """The exit status is the same as on POSIX, and no crash is reported."""
    process = run(folder, *words.split())
    assert process.returncode == status, process.stderr
    assert "Traceback" not in process.stderr
    assert "error:" not in process.stderr
    assert process.stderr.count("\n") == (1 if status == 2 else 0), process.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("explain net.pt net.py:Net -f json", 1),
        ("fix net.py:Net --input 4x2", 1),
        ("inspect net.py:Net --to meta -f json", 1),
        ("verify net.py:Net --input 4x2 -f json", 1),
    ],
)
def test_class_is_built_in_this_process(folder, words, status, statecli, monkeypatch):
    """Without os.fork nothing supervises a model; the findings are the same."""
    process = run(folder, *words.split(), libraries="import torch")
    assert (process.returncode, process.stderr) == (status, "")
    monkeypatch.chdir(folder)
    assert process.stdout == statecli(*words.split()).out
    assert "table" in process.stdout


def test_parts_are_merged(folder):
    """The parts of two jobs are also merged without the names."""
    for number in (1, 2):
        process = run(folder, *f"diff before.pt after.pt --shard {number}/2 -o part{number}.jsonl".split())
        assert (process.returncode, process.stderr) == (0, "")
    merged = run(folder, *["merge", "part1.jsonl", "part2.jsonl", "-f", "json"])
    assert (merged.returncode, merged.stderr) == (1, "")
    assert merged.stdout == run(folder, *["diff", "before.pt", "after.pt", "-f", "json"]).stdout


def test_a_training_is_resumed(folder, monkeypatch):
    """resume-check starts other processes; they lack the names too."""
    (folder / "sitecustomize.py").write_text(REMOVE.format(libraries="import torch"))
    shutil.copy(ROOT / "tests" / "resume_check" / "script.py", folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    process = run(folder, "resume-check", "script.py::main", "--steps", "4", libraries="import torch")
    assert (process.returncode, process.stderr) == (0, "")
    verdict = "a training run resumed from step 2 of 4 equals the uninterrupted run: exit status 0"
    assert process.stdout.splitlines()[-1] == verdict


#: Presses keys on a screen without a terminal. The loop of asyncio is that of POSIX, and needs a pair of sockets.
BROWSE = """
import _socket, selectors
selectors.DefaultSelector, socket.AF_UNIX = selectors.SelectSelector, _socket.AF_UNIX
from statecli.requests import browse
browse._check_terminal = lambda caller: None
from statecli.browse.app import Browser
async def press_keys(self):
    async with self.run_test() as pilot:
        await pilot.press("down", "enter", "v", "q")
Browser.run = lambda self: asyncio.run(press_keys(self))
"""


def test_a_checkpoint_is_browsed(folder):
    """The screen opens, takes keys and closes."""
    pytest.importorskip("textual")
    code = REMOVE.format(libraries="import numpy, textual.app, textual.drivers.linux_driver") + BROWSE
    code += "from statecli.__main__ import command\ncommand()"
    line = [sys.executable, "-W", "ignore", "-c", code, "browse", "before.pt", "after.pt"]
    process = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert (process.returncode, process.stderr) == (0, "")


def test_documents_are_the_same_without_os_pread(folder, statecli, monkeypatch):
    """Every number is the same where files are read without os.pread."""
    monkeypatch.chdir(folder)
    for words in ("diff before.pt after.safetensors -f json", "lock before.pt", "inspect after.pt --stats -f json"):
        expected = statecli(*words.split()).out
        assert run(folder, *words.split()).stdout == expected
        assert expected.startswith("{")


def test_names_are_removed():
    """The simulation lacks the names that Windows lacks."""
    code = (
        REMOVE.format(libraries="")
        + "print(hasattr(os, 'pread'), hasattr(os, 'fork'), hasattr(signal, 'SIGHUP'))\nimport fcntl"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout == "False False False\n"
    assert "import of fcntl halted" in process.stderr


def test_names_of_posix_are_in_one_module():
    """Only posix.py, the supervisor and two guarded modules use names of POSIX; the supervisor needs os.fork."""
    names = re.search(r"OS = '''(.*?)'''", REMOVE, re.DOTALL).group(1).split()
    use = rf"\bos\.(?:{'|'.join(names)})\b"
    pattern = re.compile(rf"{use}|^\s*(?:import|from) (?:fcntl|grp|pty|pwd|resource|termios)\b", re.MULTILINE)
    paths = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "statecli").rglob("*.py")
        if pattern.search(re.sub(r'"""(?:.|\n)*?"""', "", path.read_text("utf-8")))
    }
    # `resource` is imported after CAN_FORK; `os.chown` is caught.
    assert paths == {
        *("statecli/core/posix.py", "statecli/cli/supervisor.py"),
        *("statecli/__main__.py", "statecli/storage/replace_file.py"),
    }
