"""Hide lines that installed libraries print, because they would come before the result or the error.

A library prints during its import (a missing extension, a deprecated call), and torch.hub before each download. Lines
of the user's own code stay, also lines printed through a library such as rich.
"""

from __future__ import annotations

import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TextIO

from statecli.live.attribute_patch import replace_attribute
from statecli.live.installed_code import PACKAGE_FOLDER, STANDARD_LIBRARY, is_installed_file

_SITE = f"{os.sep}site-packages{os.sep}"
#: Folder of torch, whose lines are never the user's.
_TORCH = f"{os.sep}torch{os.sep}"


@contextmanager
def hide_library_lines() -> Iterator[None]:
    """Drop libraries' lines on stderr, warnings, and log entries below ERROR while the block runs."""
    stderr, handle, show = sys.stderr, logging.Logger.handle, warnings.showwarning

    def handle_unless_by_library(self: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or not _is_by_library(sys._getframe(1)):
            handle(self, record)

    def show_unless_by_library(*args: Any, **kwargs: Any) -> None:
        if not _is_by_library(sys._getframe(1)):
            show(*args, **kwargs)

    with (
        replace_attribute(sys, "stderr", None if stderr is None else _OwnLines.wrap(stderr)),
        replace_attribute(logging.Logger, "handle", handle_unless_by_library),
        replace_attribute(warnings, "showwarning", show_unless_by_library),
    ):
        yield


class _OwnLines:
    """Stream that passes the user's lines on to stderr and drops the lines of libraries.

    The latest object is kept: `print` in a thread of the model may still use the stream after the block. Python before
    3.14 does not keep the stream for `print` (github.com/python/cpython/issues/130163).
    """

    _latest: ClassVar[_OwnLines | None] = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @classmethod
    def wrap(cls, stream: Any) -> Any:
        """Return the stream without the lines of libraries. Wrapping the same stream again returns the same object."""
        if isinstance(stream, cls):
            return stream
        latest = cls._latest
        if latest is None or latest._stream is not stream:
            latest = cls._latest = cls(stream)
        return latest

    def write(self, text: str) -> int:
        return len(text) if _is_by_library(sys._getframe(1)) else self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            if not _is_by_library(sys._getframe(1)):
                self._stream.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_by_library(frame: types.FrameType | None) -> bool:
    """Return True if the printed line comes from torch, from a library that statecli called, or from an import.

    If the user's code imports the library, a frame `<module>` is between the frames of both.
    """
    is_import = False
    library = ""
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path.startswith(PACKAGE_FOLDER):
            return bool(library)
        is_standard = path.startswith(STANDARD_LIBRARY) and _SITE not in path
        if not path.startswith("<") and not is_standard:
            if not is_installed_file(path):
                return is_import or _TORCH in library
            library = library or path
            is_import = is_import or code.co_name == "<module>"
        frame = frame.f_back
    return False
