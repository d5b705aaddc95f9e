"""Compute as IEEE 754 defines, even if the calling process treats denormal numbers as zero.

`torch.set_flush_denormal(True)`, and libraries built with -ffast-math, make the processor treat denormal numbers as
zero: 2e-39 and 3e-39 are then equal in C, numpy and Python. The mode belongs to a thread; new threads and forked
processes inherit it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from statecli.core.errors import StateError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Bytes that hold any platform's `fenv_t`.
FENV_BYTES = 512
_SMALLEST_NORMAL = sys.float_info.min


def flushes_denormals() -> bool:
    """Return True if this thread computes with zero in place of denormal numbers."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


@contextmanager
def keep_denormals() -> Iterator[None]:
    """Compute with denormal numbers in this thread while the block runs.

    Raises StateError if the mode cannot be changed, because the results would be wrong.
    """
    if not flushes_denormals():
        yield
        return
    library, default, caller = _read_environment()
    library.fesetenv(default)
    try:
        if flushes_denormals():
            raise StateError(
                "cannot compare values, because this thread treats denormal (very small) numbers as zero; "
                "call torch.set_flush_denormal(False) first"
            )
        yield
    finally:
        library.fesetenv(caller)


def with_denormals(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function so that it computes with denormal numbers (see `keep_denormals`)."""

    @wraps(function)
    def with_denormals_kept(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with keep_denormals():
            return function(*args, **kwargs)

    return with_denormals_kept


def _read_environment() -> tuple[Any, Any, Any]:
    """Return the C library, its default environment (FE_DFL_ENV) and a copy of this thread's environment."""
    import ctypes

    library = ctypes.CDLL(None)
    caller = ctypes.create_string_buffer(FENV_BYTES)
    library.fegetenv(caller)
    if sys.platform == "darwin":
        return library, ctypes.byref(ctypes.c_char.in_dll(library, "_FE_DFL_ENV")), caller
    return library, ctypes.c_void_p(-1), caller
