"""Recognise pickles, archives and arrays in the bytes of a record by their first bytes and their headers."""

from __future__ import annotations

import re

from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.formats.shared import npy_array
from statecli.formats.shared.npy_array import MAGIC
from statecli.pickle_scan.one_pickle import FIRST_WINDOW_BYTES, Region
from statecli.pickle_scan.step_budget import Budget

PICKLE_BEGINNING = compile_on_use(
    rb"\x80[\x00-\x05][^\x00]|[()\]}]{0,16}[ci][A-Za-z_][\w.]{0,200}\r?\n[A-Za-z_][\w.]{0,200}\r?\n", re.ASCII
)
ZIP_START = b"PK\3\4"
_OLD_END_RECORD_BYTES = 22
#: Bytes of the three end records of an archive that torch writes: the zip64 record, its locator, the original record.
_END_RECORDS_BYTES = 56 + 20 + _OLD_END_RECORD_BYTES
_STORAGE = compile_on_use(r"(?:\A|/)(?:data|constants|tensors)/[^/]+\Z")
#: The headers that numpy writes for numbers, text and fields of them.
_DESCR = rb"'[<>|=]?[?biufcSUVmM]\d*(?:\[\w+\])?'"
_FIELD = rb"\('\w*', " + _DESCR + rb"(?:, \([\d, ]*\))?\)"
PLAIN_ARRAY = compile_on_use(
    rb"\{'descr': (?:" + _DESCR + rb"|\[(?:" + _FIELD + rb"(?:, )?)*\])"
    rb", 'fortran_order': (?:True|False), 'shape': \([\dL, ]*\),? ?\}\s*"
)


def split_consecutive_archives(region: Region) -> list[Region]:
    """Split bytes into consecutive archives, one for each tensor, as written by torch.distributed.checkpoint.

    The end records of an archive give its beginning. The result is [] unless each byte belongs to an archive.
    """
    parts: list[Region] = []
    end = region.size
    while end >= _END_RECORDS_BYTES and len(parts) < Budget.PICKLES.limit:
        tail = region.read(end - _END_RECORDS_BYTES, _END_RECORDS_BYTES)
        length = int.from_bytes(tail[64:72], "little") + _END_RECORDS_BYTES
        if (tail[:4], tail[56:60], tail[76:80]) != (b"PK\6\6", b"PK\6\7", b"PK\5\6") or length > end:
            return []
        end -= length
        parts.append(region.get_part(end, length))
    return parts[::-1] if end == 0 else []


def find_local_header(region: Region, at: int) -> int:
    """Return the offset of the next zip local header from `at` on; -1 if not found."""
    step = 2**20
    while at < region.size:
        offset = region.read(at, min(step + 3, region.size - at)).find(ZIP_START)
        if offset >= 0:
            return at + offset
        at += step
    return -1


def may_hold_objects(region: Region) -> bool:
    """Return True if an array of numpy may contain pickled objects, or if statecli cannot read its header."""
    try:
        return npy_array.read_header(lambda size: region.read(0, min(size, region.size))).element.has_objects
    except UnreadableError:
        return True


def may_be_pickle(name: str, head: bytes, size: int) -> bool:
    """Return True for a small record that is not a storage, and for bytes that begin a pickle, archive or array."""
    small = size <= FIRST_WINDOW_BYTES and not _STORAGE.search(name)
    return small or PICKLE_BEGINNING.match(head) is not None or head.startswith((ZIP_START, MAGIC))


def is_plain_array(head: bytes) -> bool:
    """Return True if the bytes begin with the header of a numpy array without objects."""
    start = 8 + (4 if head[6:7] != b"\1" else 2)
    end = start + int.from_bytes(head[8:start], "little")
    return head.startswith(MAGIC) and end <= len(head) and PLAIN_ARRAY.fullmatch(head[start:end]) is not None
