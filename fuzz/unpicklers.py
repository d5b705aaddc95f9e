"""CPython's unpicklers against the scan: a name that an unpickler imports is reported, or the pickle is unscanned.

The file is read as torch reads a legacy checkpoint: five pickles one after another, from each kind of file object.
Nothing is executed: `find_class` records the name and returns a class that accepts everything.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from statecli.file_scan import scan

#: Pickles that torch reads from a legacy file.
PICKLES = 5
PROTO, FRAME, STOP = b"\x80", b"\x95", b"."
#: Bytes of the smallest buffer: frames lie at its end without a long text before them.
SMALL_BUFFER = 16

Name = tuple[str, str]


class Metaclass(type):
    """Lets items be set on the class itself."""

    def __setitem__(cls, key: Any, value: Any) -> None:
        """Accept anything."""


class Anything(metaclass=Metaclass):
    """Stands for whatever a pickle names, calls, changes and calls again."""

    made: ClassVar[int] = 0

    def __new__(cls, *_: Any, **__: Any) -> Anything:
        Anything.made += 1
        return super().__new__(cls)

    def __call__(self, *_: Any, **__: Any) -> Anything:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accept anything."""

    @staticmethod
    def accept(*_: Any) -> None:
        """Do nothing."""

    append = extend = add = update = __setstate__ = accept


def record_names(unpickler: type) -> Callable[[Any], list[Name]]:
    """Return what lists the names that this class of unpickler imports from a file."""

    class Recorder(unpickler):
        names: list[Name]

        def find_class(self, module: str, name: str) -> type[Anything]:
            self.names.append((module, name))
            return Anything

        def persistent_load(self, pid: Any) -> Anything:
            if type(pid) is not tuple:  # torch's raise here
                raise TypeError
            return Anything()

    def imported(file: Any) -> list[Name]:
        names: list[Name] = []
        for _ in range(PICKLES):
            recorder = Recorder(file)
            recorder.names = names
            try:
                recorder.load()
            except Exception:  # noqa: BLE001 - whatever stops the unpickler stops the attack
                break
        return names

    return imported


in_c, in_python = record_names(pickle.Unpickler), record_names(pickle._Unpickler)


class Plain:
    """A file object that has nothing but `read` and `readline`."""

    def __init__(self, data: bytes) -> None:
        file = io.BytesIO(data)
        self.read, self.readline = file.read, file.readline


def buffered(data: bytes, size: int = SMALL_BUFFER) -> io.BufferedReader:
    """A file object with `peek`."""
    return io.BufferedReader(io.BytesIO(data), size)  # type: ignore[type-var, arg-type]


def opened(data: bytes, buffering: int, path: Path = Path("fuzz.pkl")) -> Any:
    """A file on disk, as `open` gives it."""
    path.write_bytes(data)
    return path.open("rb", buffering=buffering)


READERS: dict[str, Callable[[bytes], list[Name]]] = {
    "io.BytesIO": lambda data: in_c(io.BytesIO(data)),
    "a buffered file": lambda data: in_c(opened(data, -1)),
    "an unbuffered file": lambda data: in_c(opened(data, 0)),
    "a small buffer": lambda data: in_c(buffered(data)),
    "a buffer of 1000 bytes": lambda data: in_c(buffered(data, 1000)),
    "read and readline": lambda data: in_c(Plain(data)),
    "Python's unpickler": lambda data: in_python(io.BytesIO(data)),
}


class Missed(AssertionError):
    """An unpickler imports a name that the scan does not report."""


def check(data: bytes) -> None:
    """Raise Missed where an unpickler imports what a scan of the same bytes does not report.

    They are scanned as the data.pkl of an archive, and as a file: only what begins as one of torch does is surely a
    pickle, and of the others a plain name that is called is reported.
    """
    with zipfile.ZipFile("fuzz.pt", "w") as archive:
        archive.writestr("archive/data.pkl", data)
    Path("fuzz.legacy.pt").write_bytes(data)
    scans = [
        found for found in map(scan.scan_pickles, ["fuzz.pt", "fuzz.legacy.pt"]) if not any(one.unread for one in found)
    ]
    for reader, read in READERS.items() if scans else ():
        Anything.made = 0
        imported = dict.fromkeys(read(data))
        is_attack = Anything.made and any(all(map(IDENTIFIER.fullmatch, name)) for name in imported)
        for found in scans:
            if not (found or is_attack):
                continue
            reported = {(one.module, one.name) for scanned in found for one in scanned.names}
            missed = [name for name in imported if name not in reported]
            if missed:
                raise Missed(f"{reader} imports {missed[:3]}; reported: {sorted(reported)[:5]}; the file: {data!r}")


class Named:
    """An object whose pickle names, calls, builds and fills."""

    def __reduce__(self) -> Any:
        return Named, (1, "a"), {"state": 1.5}, iter([1, 2]), iter({"k": b"v"}.items())


def seeds() -> Iterator[bytes]:
    """Yield pickles of every protocol that name something, and some with frames that no pickler writes."""
    values = [
        [Named(), OrderedDict(a=1), partial(print, "x"), complex(1, 2), date(2020, 1, 1), {1, 2}, frozenset("ab")],
        {"text": "é" * 40, "bytes": bytes(range(256)), "ints": [0, -1, 2**40, 2**80], "f": 0.5, "n": None, "t": True},
        (Named, Named, [Named()] * 3, bytearray(b"abc"), ((), [], {})),
    ]
    for value in values:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            yield pickle.dumps(value, protocol)
    yield b"".join(pickle.dumps(value, 4) for value in values)
    yield b"(imodule\nname\n0(cm\nn\noI1\n\x88\x82\x01" + STOP
    for line in (
        b"I\n",
        b"I\0z\n",
        b"I010\n",
        b"I 1\r\n",
        b"L1\0z\n",
        b"L0x1fL\n",
        b"F1\0z\n",
        b"Np1\0z\n",
        b"Np 0\ng+0\n",
    ):
        yield line + b"0cm\nn\n(tR" + STOP
    yield b"(im\nnamed"
    yield b"\x80\x04" + framed(2, b"B\x20") + bytes(4) + b"cm\nn\n0".ljust(0x1F, b"(") + STOP


def framed(length: int, content: bytes) -> bytes:
    """FRAME with that length before the content."""
    return FRAME + length.to_bytes(8, "little") + content


def without_frames(data: bytes) -> bytes:
    """The bytes without the frames of the first pickle."""
    opcodes, at = b"", 0
    with suppress(ValueError):
        for opcode, _, position in pickletools.genops(data):
            if position is not None and opcode.name == "FRAME":
                opcodes, at = opcodes + data[at:position], position + len(framed(0, b""))
    return opcodes + data[at:]


def mutate(data: bytes, dice: random.Random, others: list[bytes]) -> bytes:
    """Change bytes, frames or the order of pickles."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        kind = dice.randrange(9)
        at = dice.randrange(len(data) + 1)
        if kind < 3:
            data = reframe(data, dice)
        elif kind == 3:
            data = data[:at] + bytes([dice.choice(OPCODES)]) + data[at + dice.randrange(2) :]
        elif kind == 4:
            data = data[:at] + data[at + dice.randrange(1, 9) :]
        elif kind == 5:
            data = data[:at] + b"(cm\nf\noVx\n0"[dice.randrange(6) :] + data[at:]
        elif kind == 6:
            data = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
        elif kind == 7:
            data = data[:at] + number_line(dice) + data[at:]
        else:
            other = dice.choice(others)
            start = dice.randrange(len(other))
            data = data[:at] + other[start : start + dice.randrange(1, 100)] + data[at:]
    return data[:100_000]


def number_line(dice: random.Random) -> bytes:
    """Return an opcode whose number is a line of text, which unpicklers parse in several ways."""
    number = b"".join(dice.choice(IN_NUMBERS) for _ in range(dice.randrange(4)))
    return dice.choice((b"I", b"L", b"F", b"Np", b"Np0\ng")) + number + b"\n" + dice.choice((b"", b"0"))


def reframe(data: bytes, dice: random.Random) -> bytes:
    """Put frames in random places, of a random length, most of them short; take the others out now and then."""
    if dice.randrange(2):
        data = without_frames(data) or data
    for _ in range(dice.choice((1, 1, 2, 3))):
        at = dice.randrange(len(data) + 1)
        length = dice.choice((dice.randrange(24), dice.randrange(len(data) + 1), len(data) - at))
        data = data[:at] + framed(max(length, 0), b"") + data[at:]
    return data


#: The names of what is not surely a pickle are reported where one is of this form; else it is text, or numbers.
IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*")
#: Parts of number lines: the C unpickler stops at a NUL, and takes spaces, underscores and other bases in some places.
IN_NUMBERS = (
    *(b"0", b"1", b"7", b"010", b"0x1f", b"0b1", b"0o7", b"1" * 300, b"0" * 300, b"1" * 3000),
    *(b"\0", b"\0junk", b" ", b"\t", b"\r", b"\x0b", b"_", b"+", b"-", b"L", b".", b"e5", b"inf", b"nan", b"z"),
)
OPCODES = [ord(one.code) for one in pickletools.opcodes]
