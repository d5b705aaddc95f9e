"""Run Python code in a process of its own that has imported torch already, as `python -c CODE` would.

Importing torch takes more than a second of CPU, and files that do harm must not be loaded in the process of the tests.
One server imports the libraries once; each run is a fork of it, which executes the code as `__main__`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Ends a run that takes longer.
TIMEOUT_S = 120

_SERVER = """
import json, os, signal, sys, traceback, warnings
import torch, torch.distributed.checkpoint, torch.export, numpy
warnings.simplefilter("ignore")
print("ready", flush=True)

def run(job):
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["cwd"])
    sys.argv = ["-c", *job["args"]]
    sys.path.insert(0, "")
    signal.alarm(job["timeout"])
    status = 0
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    try:
        exec(compile(job["code"], "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        run(job)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ForkedPython:
    """The server. `run` takes the code, the working directory and `sys.argv[1:]`."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read_line() == "ready"

    def run(self, code: str, *args: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Return what the code printed and its exit status, negative if a signal ended it."""
        assert self._server.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            outputs = {name: os.path.join(folder, name) for name in ("stdout", "stderr")}
            job = {"code": code, "args": [*map(str, args)], "cwd": str(cwd or os.getcwd()), "timeout": TIMEOUT_S}
            print(json.dumps({**job, **outputs}), file=self._server.stdin, flush=True)
            status = int(self._read_line())
            texts = {name: Path(path).read_text(errors="replace") for name, path in outputs.items()}
        assert status != -signal.SIGALRM, f"took more than {TIMEOUT_S} s"
        return subprocess.CompletedProcess(["python", "-c", code], status, texts["stdout"], texts["stderr"])

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait()

    def _read_line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()
