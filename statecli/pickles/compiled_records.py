"""The compiled reader of tensor records (`_native.c`); `native` is None if the module was not compiled."""

from __future__ import annotations

from typing import Any

#: Version of the interface that the machine uses. A build of another version is ignored; `pip install -e .` builds the
#: module again.
VERSION = 1

native: Any
try:
    from statecli.pickles import _native as native
except ImportError:
    native = None
else:
    native = native if getattr(native, "VERSION", None) == VERSION else None
