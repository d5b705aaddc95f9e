"""The format of `torch.save` before torch 0.1.10 (March 2017): a tar archive of pickles, still loaded by torch 2.13.

Three members count. `storages` is a number of storages, for each of them a pickle of (key, location, type), an int64
number of elements and the elements, and then a pickle of the views (key, root key, offset, size). `tensors` is a number
of tensors, for each of them a pickle of (key, storage key, type), the number of dimensions as an int32 and four
unused bytes, sizes, strides and the offset as int64. `pickle` is the object; its persistent ids are keys of tensors or
storages as text, or (class, file, source). `sys_info` is not read by torch 2.13.
Only plain members are read: tarfile takes names, sizes and bytes from links, holes and extended headers too.
Sources: torch/serialization.py of torch 2.13 (`legacy_load` in `_legacy_load`), Python's tarfile.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from statecli.core import quoting
from statecli.core.dtypes import STORAGE_DTYPES, nbytes
from statecli.core.errors import MalformedError
from statecli.core.format_traits import FormatTraits, Legacy
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ByteRange, ModelState
from statecli.formats.torch.objects import build_state
from statecli.formats.torch.reading import MAX_ROWS
from statecli.formats.torch_legacy import read_pickle_at
from statecli.pickles.nodes import Global, Obj, Persistent, Pickle
from statecli.storage.byte_source import Source

if TYPE_CHECKING:
    from tarfile import TarInfo

NAME = "torch-tar"
TRAITS = FormatTraits(legacy=frozenset((Legacy.TAR,)))

BLOCK = 512
#: The members that torch loads, and all that torch.save wrote.
LOADED = ("storages", "tensors", "pickle")
WRITTEN = (*LOADED, "sys_info")
#: The name of the first header: of a member, or of an extended header as tarfile writes it.
_BEGINNINGS = tuple(f"{name}\0".encode() for name in (*WRITTEN, "././@PaxHeader"))
#: Bytes of an extended header, and headers of one archive: torch.save wrote eight.
_MAX_EXTENDED = 8192
_MAX_HEADERS = 1000
#: Headers until which an archive of other files is walked.
_MAX_WALKED = 100_000
#: Types of headers that describe the next header, and of members without data, in tarfile.
_EXTENDED = (b"x", b"g", b"X", b"L", b"K")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
#: Extended headers that give the next member a size, the name `storages`, or holes.
_SIZES = compile_on_use(rb" size=([^\n]*)")
_PLAIN_SIZE = compile_on_use(rb"\d{1,19}")
_RENAMED = compile_on_use(rb"(?:path|name)=storages|[\0\n]storages/*[\0\n]|\nstorages/*\Z|GNU\.sparse")
#: Extended records that say nothing of a member's name, size or bytes.
_HARMLESS = frozenset(["mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment"])
_RECORD = compile_on_use(rb"(\d{1,5}) ([^=\n]{1,100})=")
#: A checksum that tarfile may read as a number: base 256, or what Python's int takes as octal up to a NUL.
_MAY_BE_NUMBER = compile_on_use(rb"[\x80\xff]|[\s\x1c-\x1f+\-0-7_oO]*(?:\0|\Z)")
_FIRST_WINDOW = 1024
_MAX_DIMENSIONS = 64
_REBUILD = Global("torch._utils", "_rebuild_tensor", 0)


class Member(NamedTuple):
    """A file in the archive: its name and its bytes."""

    name: str
    offset: int
    size: int


class Span(NamedTuple):
    """Byte range of a pickle for torch, and the name of its member."""

    member: str
    offset: int
    length: int


def parse_header(block: bytes) -> TarInfo | None:
    """Parse a header of 512 bytes as Python's tarfile does; None for a header refused by tarfile."""
    if len(block) != BLOCK or not _MAY_BE_NUMBER.match(block[148:156]):
        return None
    import tarfile  # takes as long to import as all of statecli, and nearly no file needs it

    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return None


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the first member of a tar archive has a name of torch.save's, and no other format matches."""
    if not head.startswith(_BEGINNINGS):
        return False
    at = 0
    while head[at + 257 : at + 262] == b"ustar" and (header := parse_header(head[at : at + BLOCK])):
        if header.isreg():
            return header.name in WRITTEN
        at = next_header(at, header.size)
    return False


def has_pickles(source: Source) -> bool:
    """Return whether torch.load may unpickle a member of the archive: any called `storages` by tarfile.

    True if tarfile may find other members than the walk.
    """
    try:
        return any(
            (member.header.name.rstrip("/") == "storages" and not member.header.isdir())
            or _RENAMED.search(member.extended)
            for member in iter_members(source.read_up_to)
        )
    except MalformedError:
        return True


class FoundMember(NamedTuple):
    """A member of any tar archive: its header, what extended headers say of it, and the place of its data."""

    header: TarInfo
    extended: bytes
    offset: int
    size: int


def _ambiguity_error(what: str) -> MalformedError:
    return MalformedError(
        f"its tar archive has {what}, which torch.save never writes, so programs may read different contents; save "
        "the checkpoint again"
    )


def iter_members(read: Callable[[int, int], bytes]) -> Iterator[FoundMember]:
    """Yield the members found by tarfile; `read` returns fewer bytes at the end, and is called in rising order.

    The walk follows tarfile, not torch.save. Raises MalformedError where tarfile may find other members.
    """
    at, size_of_next, extended = 0, None, b""
    for _ in range(_MAX_WALKED):
        header = parse_header(read(at, BLOCK))
        if header is None:
            return
        if header.size < 0 or header.type == b"S":
            raise _ambiguity_error("a file of negative size" if header.size < 0 else "a sparse file")
        if header.type in _EXTENDED:
            data = read(at + BLOCK, min(header.size, _MAX_EXTENDED))
            sizes = _SIZES.findall(data)
            if header.size > _MAX_EXTENDED or len(sizes) > (header.type != b"g"):
                what = "sets a size for all files" if header.type == b"g" else "sets a size twice"
                what = "is too long" if header.size > _MAX_EXTENDED else what
                raise _ambiguity_error(f"an extended header (pax) that {what}")
            if not all(map(_PLAIN_SIZE.fullmatch, sizes)):
                raise _ambiguity_error("an extended header (pax) that sets a size to a text that is not a number")
            size_of_next = int(sizes[0]) if sizes else size_of_next
            extended += b"\n" + data  # each header is read by itself
            at = next_header(at, header.size)
            continue
        size = header.size if size_of_next is None else size_of_next
        size = size if header.isreg() or header.type not in _WITHOUT_DATA else 0
        yield FoundMember(header, extended, at + BLOCK, size)
        at = next_header(at, size)
        size_of_next, extended = None, b""
    raise MalformedError(f"its tar archive has more than {_MAX_WALKED} files, the limit of statecli")


def read(path: str, section: str | None = None) -> ModelState:
    """The state in one archive. Raises MalformedError for a damaged archive, or one with more than plain members."""
    with Source(path) as source:
        contents = _Contents(source)
        contents.read()
        pickle = contents.pickle()
    return build_state(pickle, contents.storages, target=path, format=NAME, traits=TRAITS, oddities=[], wanted=section)


def read_pickles(source: Source) -> tuple[list[Span], MalformedError | None]:
    """Return the pickles loaded by torch, in torch's order, and the reason for an incomplete list."""
    contents = _Contents(source)
    member = contents.members["pickle"]
    try:
        contents.read()
    except MalformedError as error:
        return [*contents.spans, Span("pickle", member.offset, member.size)], error
    return [*contents.spans, Span("pickle", member.offset, member.size)], None


def list_members(source: Source) -> dict[str, Member]:
    """The files of the archive. Raises MalformedError for anything but plain files, each name once."""
    members: dict[str, Member] = {}
    at = 0
    for _ in range(_MAX_HEADERS):
        block = source.read(at, BLOCK) if at + BLOCK <= source.size else b""
        if not block.strip(b"\0"):
            break
        header = parse_header(block)
        if header is None:
            raise MalformedError(f"its tar archive is damaged at byte {at}; copy or download the file again")
        member = Member(header.name, at + BLOCK, header.size)
        if header.size < 0 or member.offset + member.size > source.size:
            raise MalformedError(
                f"is truncated: {quoting.name(member.name)} needs bytes up to {member.offset + member.size}, but "
                f"the file has {source.size}; copy or download the file again"
            )
        if header.type == b"x":
            _check_extended(source.read(member.offset, min(member.size, _MAX_EXTENDED + 1)))
        elif header.type not in (b"0", b"\0"):
            raise MalformedError(
                f"its tar archive contains {quoting.name(member.name)}, which is not a plain file; save the "
                "checkpoint again"
            )
        elif members.setdefault(member.name, member) is not member:
            raise MalformedError(
                f"two files in its tar archive are named {quoting.quote(member.name)}, and programs may read either "
                "of them; save the checkpoint again"
            )
        at = next_header(at, header.size)
    else:
        raise MalformedError(f"its tar archive has more than {_MAX_HEADERS} entries, the limit of statecli")
    for name in LOADED:
        if name not in members:
            raise MalformedError(
                f"its tar archive has no file {name}: the save did not finish; save the checkpoint again"
            )
    return members


def next_header(at: int, size: int) -> int:
    """Where the header after a member of `size` bytes is, whose own header is at byte `at`."""
    return at + BLOCK + -(-size // BLOCK) * BLOCK


def _check_extended(data: bytes) -> None:
    """Raise MalformedError for an extended header with more than times and owners."""
    at, end = 0, len(data.rstrip(b"\0"))
    while at < end and len(data) <= _MAX_EXTENDED:
        record = _RECORD.match(data, at)
        if record is None or record[2].decode("latin-1") not in _HARMLESS or not int(record[1]):
            break
        at += int(record[1])
    if at != end:
        raise _ambiguity_error("an extended header (pax) with other fields than times and owners")


class _Contents:
    """The storages and tensors of an archive, and the places of their pickles."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.members = list_members(source)
        self.spans: list[Span] = []
        self.storages: dict[str, ByteRange] = {}
        #: Persistent ids as torch writes them since, by the keys of storages; calls that rebuild tensors, by theirs.
        self.ids: dict[int, tuple[Any, ...]] = {}
        self.tensors: dict[int, Obj] = {}

    def read(self) -> None:
        """Find the storages, then the tensors."""
        self._read_storages(_Stream(self, self.members["storages"]))
        self._read_tensors(_Stream(self, self.members["tensors"]))

    def pickle(self) -> Pickle:
        """The object's pickle, with the named storage or tensor for each of its persistent ids."""
        member = self.members["pickle"]
        pickle = _Stream(self, member).pickle()
        for persistent in pickle.persistent:
            if type(persistent.pid) not in (int, str, bytes):  # torch gives back the first part of a tuple
                raise MalformedError(
                    "the file `pickle` in its tar archive refers to a tensor or a storage by a value that torch "
                    "never writes as a key; do not load the checkpoint"
                )
            key = _key(persistent.pid)
            persistent.pid = self.tensors.get(key) or self.ids.get(key)
        return pickle

    def _read_storages(self, stream: _Stream) -> None:
        for _ in range(stream.count("storages")):
            key, location, kind = stream.entry(3)
            dtype = STORAGE_DTYPES.get(kind.name) if type(kind) is Global else None
            if dtype is None or type(key) is not int or kind.module.partition(".")[0] != "torch":
                raise stream.error("a storage has no valid key, or a type that is not a storage class of torch")
            (numel,) = stream.numbers("<q")
            if numel < 0:
                raise stream.error(f"a storage claims {numel} elements; expected 0 or more")
            length = nbytes(dtype, numel)
            self.storages[str(key)] = ByteRange(self.source.path, stream.at, length)
            self.ids[key] = ("storage", kind, str(key), location, numel, None)
            stream.skip(length)
        for view in stream.list("views of storages"):
            self._add_view(view, stream)

    def _add_view(self, view: Any, stream: _Stream) -> None:
        if type(view) is not tuple or len(view) != 4 or any(type(number) is not int for number in view):
            raise stream.error("a storage view is not recorded as four integers (key, storage, offset, size)")
        key, root, offset, size = view
        if root not in self.ids:
            raise stream.error("a storage view refers to a storage that is not in the archive")
        self.ids[key] = (*self.ids[root][:5], (str(key), offset, size))

    def _read_tensors(self, stream: _Stream) -> None:
        for _ in range(stream.count("tensors")):
            key, storage, _kind = stream.entry(3)
            dimensions, _unused = stream.numbers("<ii")
            if type(key) is not int or not 0 <= dimensions <= _MAX_DIMENSIONS:
                what = f"a tensor has {dimensions} dimensions; expected 0 to {_MAX_DIMENSIONS}"
                raise stream.error(what if type(key) is int else "the key of a tensor is not an integer")
            size = stream.numbers(f"<{dimensions}q")
            stride = stream.numbers(f"<{dimensions}q")
            (offset,) = stream.numbers("<q")
            pid = self.ids.get(storage) if type(storage) is int else None
            self.tensors[key] = Obj(_REBUILD, (Persistent(pid), offset, size, stride))


class _Stream:
    """Pickles and numbers of a member, in order."""

    def __init__(self, contents: _Contents, member: Member) -> None:
        self.contents, self.member = contents, member
        self.at, self.end = member.offset, member.offset + member.size

    def error(self, what: str) -> MalformedError:
        return MalformedError(f"{self.member.name}: {what}; save the checkpoint again")

    def pickle(self) -> Pickle:
        """The next pickle, whose span is noted as loaded by torch."""
        pickle = read_pickle_at(self.contents.source, self.at, self.member.name, _FIRST_WINDOW)
        self.contents.spans.append(Span(self.member.name, self.at, pickle.end))
        self.skip(pickle.end)
        return pickle

    def count(self, what: str) -> int:
        number = self.pickle().root
        if type(number) is not int or not 0 <= number <= MAX_ROWS:
            raise self.error(
                f"the number of {what} is {quoting.value(number)}; expected an integer from 0 to {MAX_ROWS}"
            )
        return number

    def list(self, what: str) -> list[Any]:
        root = self.pickle().root
        if type(root) is not list:
            raise self.error(f"the {what} are not a list")
        return root

    def entry(self, length: int) -> tuple[Any, ...]:
        entry = self.pickle().root
        if type(entry) is not tuple or len(entry) != length:
            raise self.error(f"an entry is not a tuple of {length} values, as torch writes them")
        return entry

    def numbers(self, layout: str) -> tuple[int, ...]:
        length = struct.calcsize(layout)
        data = self.contents.source.read(self.at, length)
        self.skip(length)
        return struct.unpack(layout, data)

    def skip(self, length: int) -> None:
        self.at += length
        if self.at > self.end:
            raise self.error(
                f"the member is truncated: byte {self.at} is needed, but the member ends at byte {self.end}"
            )


def _key(pid: Any) -> int:
    """Return the key in a persistent id, as torch reads ids; -1 for no key."""
    if type(pid) is int:
        return pid
    text = str(pid, "latin-1") if type(pid) is bytes else pid
    return int(text) if type(text) is str and re.fullmatch(r"\d{1,20}", text, re.ASCII) else -1
