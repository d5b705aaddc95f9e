"""The compiled reader of records (`_native.c`); `native` is None if there was no compiler at the installation."""

from __future__ import annotations

from typing import Any

#: The interface that the machine uses. An older build is not used: `pip install -e .` builds the module again.
VERSION = 1

native: Any
try:
    from statecli.pickles import _native as native
except ImportError:
    native = None
else:
    native = native if getattr(native, "VERSION", None) == VERSION else None
