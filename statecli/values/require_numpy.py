"""Import numpy where values are read, or name the package to install."""

from __future__ import annotations

import _thread
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from statecli.core.errors import MissingDependency


@contextmanager
def require_numpy() -> Iterator[None]:
    """Let the block import modules that read values. Raises MissingDependency if numpy is not installed."""
    if "numpy" not in sys.modules and not _can_start_thread():
        # OpenBLAS raises SIGINT if it cannot start its threads, as if the user had pressed Ctrl-C.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise MissingDependency("reading values needs numpy, which is not installed: pip install numpy") from error


def _can_start_thread() -> bool:
    """Whether the system has room for a thread (`ulimit -u`)."""
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:
        return False
    return True
