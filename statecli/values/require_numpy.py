"""Import modules that need numpy, and name the package to install if numpy is missing."""

from __future__ import annotations

import _thread
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from statecli.core.errors import MissingDependency
from statecli.core.installed_package import install_extra
from statecli.core.lazy_pattern import compile_on_use

#: Messages of the loader of shared libraries if the memory of the process is limited (`ulimit -v`).
_MEMORY_ERROR_TEXT = compile_on_use(r"failed to map segment|cannot allocate memory", re.IGNORECASE)


@contextmanager
def require_numpy() -> Iterator[None]:
    """Convert a failed import of numpy in the block to an error that names the package to install.

    Raises MissingDependency if numpy is not installed, or MemoryError if the memory is too small for numpy.
    """
    if "numpy" not in sys.modules and not _can_start_threads(os.cpu_count() or 1):
        # OpenBLAS raises SIGINT if it cannot start its threads, as if the user had pressed Ctrl-C.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        advice = install_extra("values")
        raise MissingDependency(f"reading values needs numpy, which is not installed: {advice}") from error
    except ImportError as error:
        if not _MEMORY_ERROR_TEXT.search(str(error)):
            raise
        raise MemoryError from error


def _can_start_threads(count: int) -> bool:
    """Return whether the system allows `count` more threads at a time (`ulimit -u`, a container's limit)."""
    lock = _thread.allocate_lock()
    with lock:
        for _ in range(count):
            try:
                _thread.start_new_thread(_wait_for, (lock,))
            except RuntimeError:
                return False
    return True


def _wait_for(lock: _thread.LockType) -> None:
    with lock:
        pass
