"""A call that torch's compiler of TorchScript sees is found by the scan, however the text is spelt."""

from __future__ import annotations

import random

import pytest

from fuzz import __main__, script_code
from statecli.pickle_scan import script_code as scan

CASES = 4000


def test_call_is_found_under_random_spellings(capfd):
    """Thousands of statements with other pieces before the call, the same in every run."""
    __main__.check_cases(script_code, CASES, random.Random(1))  # noqa: S311  # the same cases in every run
    assert f"{CASES} cases" in capfd.readouterr().out


def test_the_comparison_notices_a_scan_that_reads_words(monkeypatch):
    """A seed of the comparison is a call without a space in front."""
    search = scan.find_calls
    monkeypatch.setattr(scan, "find_calls", lambda *a: (call for call in search(*a) if call.module != "TorchScript"))
    with pytest.raises(AssertionError, match="torch calls save in"):
        __main__.check_cases(script_code, 0, random.Random(1))  # noqa: S311  # the same cases in every run
