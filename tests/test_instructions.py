"""Instructions of short commands, as a multiple of an empty Python: counts repeat on a busy machine, times do not.

The limits are 5 % above the measured counts. A lower count lowers its limit; a higher count needs a reason.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: Rows of `benchmarks/rows.py` -> multiples of the instructions of `python -c pass`, with Python 3.11.
LIMITS = {
    "start": 5.46,
    "diff-small": 7.08,
    "list-2k": 7.36,
}

pytestmark = [
    pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind: apt install valgrind"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the limits are those of Python 3.11"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def count(folder):
    """Count the instructions of a row by its name, or of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import _inputs
        import _measure
        import rows
        import run

        def count_row(name: str) -> int:
            (row,) = (row for row in rows.ROWS if row.name == name)
            for item in row.inputs:
                _inputs.MAKERS[item](folder)
            command = run.split_command(row.ours, {"d": str(folder), "url": "", "scanners": ""})
            return _measure.count_instructions(command, run.MISTAKES.get(name, (0, 1)))

        count_row.empty = _measure.count_instructions([sys.executable, "-c", "pass"])
        yield count_row


@pytest.mark.parametrize("name", LIMITS)
def test_a_command_takes_no_more_instructions_than_measured(name, count):
    """Compared with an empty Python of the same installation."""
    assert count(name) / count.empty <= LIMITS[name]
