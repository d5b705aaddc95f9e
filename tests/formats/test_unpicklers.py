"""A name that an unpickler of CPython imports is reported, for any kind of file object."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = 500

#: Makes both machines ignore frames, as in versions of statecli that did not follow frames.
IGNORE_FRAMES = """
from statecli.pickle_scan import imported_names as _names, scanner_opcodes as _opcodes
from statecli.pickles import machine as _pickle
def ignoring(handlers):
    return (*handlers[:0x95], lambda machine, pos: pos + 8, *handlers[0x96:])
for machine in (_pickle.Machine, _names.Scanner):
    machine.handlers = ignoring(machine.handlers)
_names.WATCHING_HANDLERS = ignoring(_names.WATCHING_HANDLERS)
_opcodes.SCANNER_HANDLERS = _names.Scanner.handlers
"""


def run(cases: int, before: str = "") -> subprocess.CompletedProcess[str]:
    """Compare the unpicklers with the scan, in a process of limited memory."""
    program = f"{before}\nimport sys\nfrom fuzz import __main__\nsys.argv[1:] = ['unpicklers', '--cases', '{cases}']\n"
    command = [sys.executable, "-c", program + "__main__.main()"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_scan_reports_every_import_of_the_unpicklers():
    """500 pickles with changed frames, opcodes and bytes, the same in every run."""
    process = run(CASES)
    assert process.returncode == 0, process.stderr[-2000:]
    assert f"{CASES} cases" in process.stdout


def test_the_comparison_notices_a_machine_that_ignores_frames():
    """A seed of the comparison is a frame that ends inside a length."""
    process = run(0, IGNORE_FRAMES)
    assert process.returncode == 1
    assert "fuzz.unpicklers.Missed: io.BytesIO imports [('m', 'n')]" in process.stderr
