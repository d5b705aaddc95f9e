"""Find the members of a tar archive as Python's tarfile does. torch.save wrote such archives before 0.1.10 (2017).

statecli reads no tensors of such an archive. torch.load still tries every file as a tar archive: it unpickles the
members `storages`, `tensors` and `pickle`. Sources: torch/serialization.py of torch 2.13 (`legacy_load` in
`_legacy_load`), Python's tarfile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage.byte_source import ByteSource

if TYPE_CHECKING:
    from tarfile import TarInfo

BLOCK = 512
#: Names of the members that torch unpickles, and of all members that torch.save wrote.
_LOADED_MEMBERS = ("storages", "tensors", "pickle")
_WRITTEN_MEMBERS = (*_LOADED_MEMBERS, "sys_info")
#: Possible beginnings of an archive: the name of a member, or of an extended header as tarfile writes it.
_BEGINNINGS = tuple(f"{name}\0".encode() for name in (*_WRITTEN_MEMBERS, "././@PaxHeader"))
#: Maximum size of an extended header in bytes.
_MAX_EXTENDED_BYTES = 8192
#: Maximum number of headers that are read in an archive that torch.save did not write.
_MAX_HEADERS = 100_000
#: tarfile's types of headers that describe the next header, and of members without data.
_EXTENDED_TYPES = (b"x", b"g", b"X", b"L", b"K")
_TYPES_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
#: Texts in an extended header: a size of the next member, a size without extensions, and the name `storages` or holes
#: of a sparse file.
_SIZE_FIELD = compile_on_use(rb" size=([^\n]*)")
_PLAIN_SIZE = compile_on_use(rb"\d{1,19}")
_RENAMED_OR_SPARSE = compile_on_use(rb"(?:path|name)=storages|[\0\n]storages/*[\0\n]|\nstorages/*\Z|GNU\.sparse")
#: Beginning of a checksum field that tarfile may accept as a number: base 256, or octal digits as Python's int reads
#: them. The digits end at a NUL.
_MAY_BE_NUMBER = compile_on_use(rb"[\x80\xff]|[\s\x1c-\x1f+\-0-7_oO]*(?:\0|\Z)")


def parse_header(block: bytes) -> TarInfo | None:
    """Parse a header of 512 bytes as Python's tarfile does. Return None for a header that tarfile refuses."""
    if len(block) != BLOCK or not _MAY_BE_NUMBER.match(block[148:156]):
        return None
    import tarfile  # a slow import (as slow as all of statecli), needed for very few files

    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return None


def is_written_by_torch(head: bytes) -> bool:
    """Return whether the first member of a tar archive has a name that torch.save used."""
    if not head.startswith(_BEGINNINGS):
        return False
    at = 0
    while head[at + 257 : at + 262] == b"ustar" and (header := parse_header(head[at : at + BLOCK])):
        if header.isreg():
            return header.name in _WRITTEN_MEMBERS
        at = _compute_next_header(at, header.size)
    return False


def has_pickles(source: ByteSource) -> bool:
    """Return whether torch.load may unpickle a member: the archive has a member that tarfile may read as `storages`.

    Also True if tarfile may find members that `iter_members` does not find.
    """
    try:
        return any(
            member.is_loaded and (member.name == "storages" or _RENAMED_OR_SPARSE.search(member.extended))
            for member in iter_members(source.read_up_to)
        )
    except MalformedError:
        return True


class FoundMember(NamedTuple):
    """A member of any tar archive: its header, the contents of its extended headers, and its data's byte range."""

    header: TarInfo
    extended: bytes
    offset: int
    size: int

    @property
    def name(self) -> str:
        return self.header.name.rstrip("/")

    @property
    def is_loaded(self) -> bool:
        """Whether torch may unpickle the member. An extended header may give the member another name."""
        return (self.name in _LOADED_MEMBERS and not self.header.isdir()) or _RENAMED_OR_SPARSE.search(
            self.extended
        ) is not None


def iter_members(read: Callable[[int, int], bytes]) -> Iterator[FoundMember]:
    """Yield the members that tarfile finds. `read` is called with rising offsets; at the file's end it returns less.

    Headers are read as tarfile reads them. Raises MalformedError where tarfile may find other members.
    """
    at, size_of_next, extended = 0, None, b""
    for _ in range(_MAX_HEADERS):
        header = parse_header(read(at, BLOCK))
        if header is None:
            return
        if header.size < 0 or header.type == b"S":
            break
        if header.type in _EXTENDED_TYPES:
            data = read(at + BLOCK, min(header.size, _MAX_EXTENDED_BYTES))
            sizes = _SIZE_FIELD.findall(data)
            is_plain = all(map(_PLAIN_SIZE.fullmatch, sizes)) and len(sizes) <= (header.type != b"g")
            if header.size > _MAX_EXTENDED_BYTES or not is_plain:
                break
            size_of_next = int(sizes[0]) if sizes else size_of_next
            extended += b"\n" + data  # each header is searched by itself, so a newline separates them
            at = _compute_next_header(at, header.size)
            continue
        size = header.size if size_of_next is None else size_of_next
        size = size if header.isreg() or header.type not in _TYPES_WITHOUT_DATA else 0
        yield FoundMember(header, extended, at + BLOCK, size)
        at = _compute_next_header(at, size)
        size_of_next, extended = None, b""
    raise MalformedError("tarfile may find other members than statecli finds")


def _compute_next_header(at: int, size: int) -> int:
    """Return the offset of the next header, after a member of `size` bytes whose header is at byte `at`."""
    return at + BLOCK + -(-size // BLOCK) * BLOCK
