"""Check that the dates and times in a pickle are as Python writes them.

Python builds them from their bytes, and its C code checks only the month. The weekday of a date in the year 0 is read
outside a table (`datetime.date(b"\\0\\0\\1\\0").ctime()`).
"""

from __future__ import annotations

import datetime

from statecli.pickles.graph import read_raw_bytes
from statecli.pickles.nodes import Obj

#: Number of bytes in the argument that `__reduce_ex__` returns for a value.
_PICKLED_LENGTHS = {"datetime.date": 4, "datetime.datetime": 10, "datetime.time": 6}
#: Bit of the month of a datetime, or of the hour of a time, that stands for `fold=1`.
_FOLD_BIT = 0x80


def has_valid_value(name: str, call: Obj) -> bool:
    """Return True unless the call creates a date or time from invalid bytes.

    Numbers instead of bytes are checked by the constructor itself.
    """
    length = _PICKLED_LENGTHS.get(name)
    if length is None or all(type(value) is int for value in call.args):
        return True
    # Python 2 writes the bytes as text, a character each.
    first = call.args[0]
    data = first.encode("latin-1", "replace") if type(first) is str else read_raw_bytes(first)
    return data is not None and len(data) == length and _is_value(name, data)


def _is_value(name: str, data: bytes) -> bool:
    try:
        if name == "datetime.date":
            _build_date(*data)
        elif name == "datetime.time":
            _build_time(data[0] & ~_FOLD_BIT, *data[1:])
        else:
            _build_date(data[0], data[1], data[2] & ~_FOLD_BIT, data[3])
            _build_time(*data[4:])
    except ValueError:
        return False
    return True


def _build_date(high: int, low: int, month: int, day: int) -> datetime.date:
    return datetime.date(high * 256 + low, month, day)


def _build_time(hour: int, minute: int, second: int, high: int, middle: int, low: int) -> datetime.time:
    return datetime.time(hour, minute, second, int.from_bytes((high, middle, low), "big"))
