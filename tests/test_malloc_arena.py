"""Threads that read remote files share one arena of the C library, so freed values are not kept once per thread."""

from __future__ import annotations

import ctypes

import pytest

from statecli.core import posix

from .forked_python import run_python

CODE = """
import sys
from statecli.core import posix
posix.use_one_malloc_arena = lambda: print("one arena", file=sys.stderr)
from statecli.__main__ import command
command()
"""


class Library:
    """A fake C library that records the calls of `mallopt`."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def mallopt(self, option: int, value: int) -> None:
        self.calls.append((option, value))


def test_glibc_is_given_one_arena(monkeypatch):
    """M_ARENA_MAX is -8 in malloc.h."""
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    posix.use_one_malloc_arena()
    assert library.calls == [(-8, 1)]


@pytest.mark.parametrize("error", [None, TypeError, OSError])
def test_missing_mallopt_is_not_an_error(error, monkeypatch):
    """musl and macOS have no `mallopt`; Windows does not open the library without a name."""

    def open_library(name):
        if error is not None:
            raise error
        return object()

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    posix.use_one_malloc_arena()


@pytest.mark.parametrize(("target", "expected"), [("http://127.0.0.1:1/a.safetensors", 1), ("a.safetensors", 0)])
def test_only_a_command_line_with_a_url_is_limited(target, expected, monkeypatch):
    """A model class, for example, runs threads of torch."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    ran = run_python(["-c", CODE, "inspect", target])
    assert ran.stderr.count("one arena") == expected
