"""Tell the dates and times that Python pickles from others.

They are built of their bytes, of which C checks the month alone: the weekday of a date in the year 0 is read beside a
table (`datetime.date(b"\\0\\0\\1\\0").ctime()`).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

from statecli.pickles.nodes import Obj, Value

#: Bytes of the pickled value, in the words of `__reduce_ex__`.
_LENGTHS = {"datetime.date": 4, "datetime.datetime": 10, "datetime.time": 6}
#: Bit of the month of a datetime, or of the hour of a time, that stands for `fold=1`.
_FOLD = 0x80


def has_valid_value(name: str, call: Obj, root_name: Callable[[Value], str | None]) -> bool:
    """Return True if the bytes of a date or time are a value that Python has; any call of other names is valid.

    Numbers instead of bytes are checked by the constructor itself.
    """
    length = _LENGTHS.get(name)
    if length is None or all(type(value) is int for value in call.args):
        return True
    data = _read_bytes(call.args[0], root_name)
    return data is not None and len(data) == length and _is_value(data)


def _is_value(data: bytes) -> bool:
    try:
        if len(data) != _LENGTHS["datetime.time"]:
            datetime.date(int.from_bytes(data[:2], "big"), data[2] & ~(_FOLD * (len(data) > 4)), data[3])
        if len(data) != _LENGTHS["datetime.date"]:
            *_, hour, minute, second, high, middle, low = data
            is_time = len(data) == _LENGTHS["datetime.time"]
            datetime.time(hour & ~(_FOLD * is_time), minute, second, int.from_bytes((high, middle, low), "big"))
    except ValueError:
        return False
    return True


def _read_bytes(value: Value, root_name: Callable[[Value], str | None]) -> bytes | None:
    """Return bytes, or a text that Latin-1 encodes to them, as protocol 2 and Python 2 write them."""
    if type(value) is bytes:
        return value
    if type(value) is Obj and root_name(value) == "_codecs.encode":
        match value.args:
            case (str(text), "latin1"):
                value = text
    if type(value) is not str:
        return None
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return None
