"""The compiled kernel (`_native.c`); `native` is None if there was no compiler when statecli was installed."""

from __future__ import annotations

from typing import Any

#: The interface that the callers use. An older build is not used: `pip install -e .` builds the kernel again.
VERSION = 3

native: Any
try:
    from statecli.values import _native as native
except ImportError:
    native = None
else:
    native = native if getattr(native, "VERSION", None) == VERSION else None
