"""Functions of Python that exist only on POSIX systems, each with its replacement on Windows.

Other modules use these functions instead of `os.pread` and the like. `cli.supervisor`, which forks, is imported only if
`CAN_FORK`.
"""

from __future__ import annotations

import _thread
import os

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

#: Whether this system has `os.fork`.
CAN_FORK = hasattr(os, "fork")

#: Number of the option of glibc's `mallopt` that limits the number of arenas.
_M_ARENA_MAX = -8

#: Lock from the seek to the read on systems that cannot do both in one call.
_seek_lock = _thread.allocate_lock()


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Read `length` bytes from byte `offset` of an open file, or fewer at the file's end. Works in any thread."""
    data = _read_once(descriptor, length, offset)
    if len(data) == length or not data:
        return data
    # The kernel returns at most 2 GiB in a call.
    parts, have = [data], len(data)
    while have < length and (part := _read_once(descriptor, length - have, offset + have)):
        parts.append(part)
        have += len(part)
    return b"".join(parts)


def fill_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Read into a buffer from byte `offset` of an open file, in any thread. Return the number of bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], offset)
    data = _read_once(descriptor, len(into), offset)
    into[: len(data)] = data
    return len(data)


def _read_once(descriptor: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, offset)
    with _seek_lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def use_one_malloc_arena() -> None:
    """Let all threads of the process allocate from a single glibc arena. Other C libraries lack the setting.

    Otherwise each thread has an arena, and each arena keeps the memory of freed values: 40 MB in 16 threads.
    """
    import contextlib  # not at the top, because the shortest start runs without contextlib
    import ctypes

    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def call_after_fork_in_child(function: Callable[[], object]) -> None:
    """Call the function in each child that this process forks from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def count_usable_cores() -> int:
    """Return the number of cores that this process may use, or of all cores if the first number is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def is_own_file(status: os.stat_result) -> bool:
    """Return True if the file belongs to this user. Windows itself keeps other users out of a user's folders."""
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def discard_typed_keys(terminal: IO[str]) -> None:
    """Discard the keys that were typed but not read yet. Does nothing on Windows."""
    try:
        import termios
    except ImportError:
        return
    import contextlib

    with contextlib.suppress(termios.error, OSError, ValueError):
        termios.tcflush(terminal, termios.TCIFLUSH)
