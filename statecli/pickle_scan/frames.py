"""The opcodes that CPython's C unpickler reads from a pickle whose frames no pickler wrote.

A frame is a request to read that many bytes at once. Until CPython 3.13.15 and 3.14.7 the C unpickler does not keep
opcodes within it: if an opcode needs more bytes than the frame has left, the unpickler drops the rest of the frame and
reads on after the frame. So the same bytes have two meanings, depending on their source:

- bytes in memory (`pickle.loads`): all of them are in the buffer, and nothing is dropped;
- a file that is read frame by frame (`io.BytesIO`, which torch gives `data.pkl` in; an unbuffered file; any object
  without `peek`): what is left of a frame is dropped.

A buffered file lets the unpickler look ahead, so that each frame is as the first or as the second, by how many bytes
its buffer has left. Newer versions, and the unpickler in Python, refuse such a pickle.

Source: Modules/_pickle.c of CPython 3.11 (`_Unpickler_Read`, `_Unpickler_ReadInto`, `_Unpickler_Readline`,
`_Unpickler_ReadFromFile`, `load_frame`). `Machine` refuses every pickle of which the two differ; the scan uses this
module to name the imports of both.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

#: Opcodes of one reading: those of the largest `.metadata` that a person has reason to write take more time.
MAX_OPCODES = 1_000_000
_FRAME = 0x95
_STOP = 0x2E
#: The number of bytes after each opcode that has a fixed number of them.
_ARGUMENT_BYTES = {
    **dict.fromkeys(b"Khq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"Jjr\x84", 4),
    **dict.fromkeys(b"G", 8),
    **dict.fromkeys(b"().012NQR]abdelostu}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98", 0),
}
#: The number of lines.
_ARGUMENT_LINES = {**dict.fromkeys(b"FILPSVgp", 1), **dict.fromkeys(b"ci", 2)}
#: The width of the length that comes before the bytes.
_LENGTH_BYTES = {
    **dict.fromkeys(b"CU\x8a\x8c", 1),
    **dict.fromkeys(b"BTX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
#: Whose bytes are read into the new object: first what is left of the frame, then what follows the frame.
_OPCODES_READ_WHOLE = frozenset(b"BC\x8e\x96")


class Reading(NamedTuple):
    """Opcodes read, without FRAME, up to STOP or to an unreadable byte.

    `dropped`: True if bytes of a frame were dropped. `end`: the byte where the next unpickler starts. `pieces`: for
    each piece of data in the opcodes, its offset in the opcodes and in the data.
    """

    opcodes: bytes
    dropped: bool
    end: int
    pieces: list[tuple[int, int]]

    def locate(self, at: int) -> int:
        """Return where in the data the byte `at` of the opcodes is."""
        begins_in_opcodes, begins_in_data = self.pieces[bisect_left(self.pieces, (at + 1,)) - 1]
        return begins_in_data + at - begins_in_opcodes


def read_as_file(data: bytes) -> Reading:
    """Read the pickle at the start of `data` as from a file without lookahead."""
    return _Reader(data, 0).read()


def read_in_memory(data: bytes) -> Reading:
    """Read the pickle at the start of `data` as `pickle.loads` does."""
    return _Reader(data, len(data)).read()


class _EndOfData(Exception):
    """The data ends too early."""


class _Reader:
    """The buffer of the unpickler with the bytes from `at` to `filled`; the file goes on at `filled`."""

    def __init__(self, data: bytes, filled: int) -> None:
        self.data = data
        self.at = 0
        self.filled = filled
        self.dropped = False
        self.opcodes = bytearray()
        self.pieces = [(0, 0)]

    def read(self) -> Reading:
        """Read opcodes up to STOP, or up to the first opcode refused by the unpickler."""
        try:
            for _ in range(MAX_OPCODES):
                if self._read_opcode():
                    break
        except _EndOfData:
            pass
        end = self.filled if self.filled < len(self.data) else self.at
        return Reading(bytes(self.opcodes), self.dropped, end, self.pieces)

    def _read_opcode(self) -> bool:
        """Read one opcode with its argument; return True for the last."""
        opcode = self._read_bytes(1)
        (op,) = opcode
        if op == _FRAME:
            self._fill_buffer(int.from_bytes(self._read_bytes(8), "little"))
            return False
        self._add_opcodes(opcode)
        if op in _ARGUMENT_BYTES:
            self._add_opcodes(self._read_bytes(_ARGUMENT_BYTES[op]))
        elif op in _ARGUMENT_LINES:
            for _ in range(_ARGUMENT_LINES[op]):
                self._add_opcodes(self._read_line())
        elif op in _LENGTH_BYTES:
            length = self._read_bytes(_LENGTH_BYTES[op])
            self._add_opcodes(length)
            read = self._read_whole if op in _OPCODES_READ_WHOLE else self._read_bytes
            self._add_opcodes(read(int.from_bytes(length, "little")))
        else:
            return True
        return op == _STOP

    def _add_opcodes(self, taken: bytes) -> None:
        """Add the bytes read last to the opcodes."""
        begin = self.at - len(taken)
        if begin - len(self.opcodes) != self.pieces[-1][1] - self.pieces[-1][0]:
            self.pieces.append((len(self.opcodes), begin))
        self.opcodes += taken

    def _fill_buffer(self, length: int) -> None:
        """Fill the buffer with at least so many bytes; drop its content if there is less."""
        if length <= self.filled - self.at:
            return
        if length > len(self.data) - self.filled:
            raise _EndOfData
        self.dropped |= self.at < self.filled
        self.at = self.filled
        self.filled += length

    def _read_bytes(self, length: int) -> bytes:
        self._fill_buffer(length)
        return self._take(self.at + length)

    def _read_whole(self, length: int) -> bytes:
        if length > len(self.data) - self.at:
            raise _EndOfData
        self.filled = max(self.filled, self.at + length)
        return self._take(self.at + length)

    def _read_line(self) -> bytes:
        """Read a line of the buffer if a line ends there, else a line at the position of the file."""
        end = self.data.find(b"\n", self.at, self.filled) + 1
        if not end:
            self.dropped |= self.at < self.filled
            self.at = self.filled
            end = self.data.find(b"\n", self.at) + 1
            if not end:
                raise _EndOfData
            self.filled = end
        return self._take(end)

    def _take(self, end: int) -> bytes:
        taken = self.data[self.at : end]
        self.at = end
        return taken
