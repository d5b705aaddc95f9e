"""Which Python names a file's pickles would import, in every pickle of the file, whatever else is wrong with it.

Listing tensors wants a file that is sound; this wants to know what loading it would run. So it does not depend on the
listing, and looks into what no reader asks for: each record of an archive, what follows a STOP, pickles and archives
inside a pickle's strings and inside records, arrays of objects, archives whose directory lies. What could not be read
to its end is said (`ScannedPickle.unread`), never passed over. One pickle is read by `_names.Scanner`.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from msgspec import structs

from statecli import formats
from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import Bomb, Mention, Place, ScannedPickle
from statecli.formats import dcp, torch_legacy, torch_tar
from statecli.formats.shared import npy_array
from statecli.formats.shared.dcp_metadata import Stored
from statecli.pickle_scan import frames, script_code
from statecli.pickle_scan.archive_records import Use, uses_of
from statecli.pickle_scan.export_expressions import said
from statecli.pickle_scan.imported_names import Scanner
from statecli.pickle_scan.one_pickle import FIRST_WINDOW, REGION_HEAD, PickleReader, Region, Unfetched, is_harmless
from statecli.pickle_scan.step_budget import Budget, OutOfSteps, Steps
from statecli.pickles.machine import without_gc
from statecli.storage import checkpoint_folder, files, json_object
from statecli.storage.checkpoint_names import METADATA
from statecli.storage.source import HEAD_BYTES, Source
from statecli.storage.zip_archive import BEGINNING, FARTHEST_END, STORED, Archive, Record

#: Bytes of one inflated record. What one file may cost in all is in `_steps.Budget`.
MAX_INFLATED = 64 * 2**20
#: Archives in archives in archives, and pickles in strings of pickles.
MAX_DEPTH = 4
#: Small pickles of one file that are known again.
MAX_KEPT = 4096
#: Bytes that compressed records may inflate to, whatever their ratio; and the ratio that larger ones may have.
_MAX_UNPACKED = 256 * 2**20
_MAX_RATIO = 200
#: Bytes in which the header of a numpy array ends.
_PAGE = 4096
#: Bytes that are read again of a pickle whose frames no pickler wrote.
_MAX_REREAD = 16 * 2**20
#: Archives of one tensor of which so many bytes of the beginning and of the end are fetched before any is read.
_AHEAD, _FIRST, _LAST = 8192, 2048, 1024
_BEGINS = re.compile(
    rb"\x80[\x00-\x05][^\x00]|[()\]}]{0,16}[ci][A-Za-z_][\w.]{0,200}\r?\n[A-Za-z_][\w.]{0,200}\r?\n", re.ASCII
)
#: What an archive of torch has in its small records: digits are no opcodes that import anything.
_INERT = re.compile(rb"[\d\n]{0,64}|little|big")
_LONGEST_INERT = 64
_ZIP = b"PK\3\4"
_END, _LOCATOR = 22, 20
#: Bytes of the three end records of an archive that torch writes: zip64's, its locator, the old one.
_ENDS = 56 + 20 + _END
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_NUMPY = b"\x93NUMPY"
_NAMED = re.compile(r"\.(?:pkl|pickle|pck|pcl|joblib|dill)\Z", re.IGNORECASE)
#: The pickles that an archive of torch's own has, in its top folder.
_USUAL = frozenset(["data.pkl", "constants.pkl", "attributes.pkl"])
#: Those of TorchScript next to them.
_KNOWN = re.compile(r"bytecode\.pkl|mobile_debug_handles\.pkl|traced_inputs\.pkl|code/__torch__[^\0]*\.py\.debug_pkl")
#: Bytes of a program of torch.export that are read.
_MAX_PROGRAM = 128 * 2**20
#: Texts of a program that are searched for in it, to report where they are.
_MAX_LOCATED = 100
MAX_CODE = 64 * 2**20
#: The folder of a compiled model, and what of it is opened as a library as it is.
_COMPILED_FOLDER = re.compile(r".*?data/(?:aotinductor/[^/]*|constants[^/]*)", re.DOTALL | re.IGNORECASE)
_LIBRARY = re.compile(r"\.(?:so|dll|dylib|pyd)\Z", re.IGNORECASE)
_STORAGE = re.compile(r"(?:\A|/)(?:data|constants|tensors)/[^/]+\Z")
_TAR = "is a tar archive, whose members torch.load unpickles"
#: The pickles that are read from a legacy file, whatever follows them.
_LEGACY = 5
#: Pickles one after another that are read without a sign that the next one is any.
_IN_A_ROW = 64
#: The headers that numpy writes for numbers, text and fields of them.
_KIND = rb"'[<>|=]?[?biufcSUVmM]\d*(?:\[\w+\])?'"
_FIELD = rb"\('\w*', " + _KIND + rb"(?:, \([\d, ]*\))?\)"
_PLAIN_ARRAY = re.compile(
    rb"\{'descr': (?:" + _KIND + rb"|\[(?:" + _FIELD + rb"(?:, )?)*\])"
    rb", 'fortran_order': (?:True|False), 'shape': \([\dL, ]*\),? ?\}\s*"
)
#: Bytes of a header that are read.
_MAX_HEADER = 2**20


def scan(path: str) -> tuple[ScannedPickle, ...]:
    """Every pickle of the file, or of the files that a folder or an index stands for; () where there is none.

    A file that cannot be opened has none: whoever reads its tensors meets the same, and says so. Raises
    UnreadableError, with the file, where bytes did not come: a server that refused once may answer the next time.
    """
    found: list[ScannedPickle] = []
    with without_gc():
        places, unread = _places(path)
        for file in _files(path):
            found.extend(_of_file(file, places.pop(file, ())))
        for file, stored in places.items():
            found.extend(_of_file(file, stored, alone=True))
    for file, why in unread:
        found.append(ScannedPickle("the file", Place(file, 0, 0), unread=f"where it says that archives lie: {why}"))
    return tuple(found)


def _places(path: str) -> tuple[dict[str, list[Stored]], list[tuple[str, str]]]:
    """What `dcp.places` says of the folder and of those that its model is in, by the files' paths."""
    found: dict[str, list[Stored]] = {}
    unread: list[tuple[str, str]] = []
    for way in dict.fromkeys(map(files.get_folder, ("", *_members(path)))) if files.is_folder(path) else ():
        folder = files.join(path, way) if way else path
        places, others = dcp.collect_places(folder) if dcp.sniff(folder, b"") else ({}, [])
        found.update((files.join(path, way, name), places[name]) for name in filter(_is_plain_name, places))
        outside = next((name for name in places if not _is_plain_name(name)), None)
        if outside is not None:
            others = [*others, (METADATA, f"in {quoting.quoted(outside)}, which is outside the folder")]
        unread.extend((files.join(path, way, name), why) for name, why in others)
    return found, unread


def _files(path: str) -> list[str]:
    """The files of a folder's model, an index's shards, or the file itself."""
    try:
        if files.is_folder(path):
            return [files.join(path, name) for name in _members(path)]
        return list(_shards(path)) if checkpoint_folder.INDEX.search(files.get_name(path)) else [path]
    except (OSError, UnreadableError) as error:  # whoever lists the tensors meets the same, and says so
        if files.reads_are_requests(path) or _is_of_the_system(error):
            raise UnreadableError(f"{path}: {error}") from error
        return []


def _members(path: str) -> list[str]:
    """Which files are the folder's model; all of them where that cannot be told."""
    try:
        return list(formats.members(path))
    except UnreadableError:
        return sorted(files.list_names(path))


def _shards(path: str) -> Iterator[str]:
    with Source(path) as source:
        document, _ = json_object.parse_object(source.read(0, min(source.size, 2**25)), path)
    named = document.get("weight_map")
    for name in sorted({one for one in named.values() if type(one) is str} if type(named) is dict else ()):
        file = files.join(files.get_folder(path), name)
        if files.get_name(name) == name and files.is_file(file):
            yield file


def _is_plain_name(name: str) -> bool:
    """Whether it is a file of the folder: what leads out of it is refused by whoever reads the folder."""
    return files.get_name(name) == name and "\0" not in name


def _of_file(path: str, places: Collection[Stored] = (), *, alone: bool = False) -> list[ScannedPickle]:
    """Those of a file, and of the `places` in it that are loaded as files; `alone` where nothing loads the rest."""
    try:
        with Source(path) as source:
            source.prefetch(span for one in islice(places, _AHEAD) for span in _ends(one))
            scan = _Scan(source)
            if not alone:
                scan.run()
            return scan.run_at(places)
    except Unfetched as error:
        raise UnreadableError(f"{path}: {error}") from error
    except UnreadableError as error:  # as above
        if (files.reads_are_requests(path) and not _is_empty(path)) or _is_of_the_system(error):
            raise UnreadableError(f"{path}: {error}") from error
        return []


def _is_of_the_system(error: Exception) -> bool:
    """Whether reading failed, which may succeed when the tensors are listed; a file that is missing stays missing."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


def _is_empty(path: str) -> bool:
    """Whether there is nothing in it that could have come."""
    try:
        return files.get_size(path) == 0
    except UnreadableError:
        return False


def _ends(one: Stored) -> list[tuple[int, int]]:
    """Where an archive of one tensor has all that is read of it."""
    return [(one.offset, _FIRST), (one.offset + max(0, one.length - _LAST), _LAST)]


#: Bytes of pickles and code of one file whose digests are computed, and bytes that are read at once for them.
_MAX_DIGESTED, _DIGESTED_AT_ONCE = 1 << 30, 1 << 22


class _Piece(NamedTuple):
    """What is to be looked at: `sure` where its name or its place says that it is a pickle."""

    region: Region
    where: str
    depth: int
    sure: bool = False
    hidden: bool = True
    copied: bool = False


class _Scan:
    """One file, piece by piece."""

    def __init__(self, source: Source) -> None:
        self.whole = Region(source, 0, source.size)
        self.found: list[ScannedPickle] = []
        self.pieces: deque[_Piece] = deque()
        self.steps = Steps()
        self.reader = PickleReader(source.path, self.steps)
        self.digested = 0
        #: Small pickles that were read to their end, by their bytes.
        self.read: dict[bytes, ScannedPickle] = {}
        #: Small records of the archive by name in lower case, because torch's reader ignores case; None for others.
        self.storages: dict[str, Region | None] = {}
        #: Where archives lie whose records were looked at.
        self.archives: set[tuple[int, int]] = set()
        #: The bytes of the file at which pickles were looked for because a frame ends there.
        self.read_at: set[int] = set()

    def run(self) -> list[ScannedPickle]:
        """Everything that was found."""
        head = self.whole.head
        header = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= self.whole.size - 8
        is_metadata = files.get_name(self.whole.path).endswith(METADATA)
        sure = is_metadata or (head[:1] == b"\x80" and not header)
        first = _Piece(self.whole, "the file", 0, sure=sure, hidden=False)
        with self._within_budgets():
            if not head.startswith(_ZIP) and _ends_as_zip(self.whole):
                self._archive(first._replace(hidden=True))
            if torch_tar.parse_header(head) is not None and not head.startswith(_ZIP):
                self._tar(first)
            self.pieces.append(first)
        return _mark_loaded_by_torch(self._drained(), self.whole)

    def run_at(self, places: Iterable[Stored]) -> list[ScannedPickle]:
        """What lies at places that are loaded as files of their own, by whatever name: an archive may hold another."""
        whole = _Piece(self.whole, "the file", 0, sure=True, hidden=False)
        packed = [one for one in places if one.transforms]
        if packed:
            self._unread(whole, f"{len(packed)} of its items are written through {quoting.names(packed[0].transforms)}")
        for one in places:
            length = min(one.length, self.whole.size - one.offset)
            if length > 0 and not one.transforms and (one.offset, length) not in self.archives:
                self.archives.add((one.offset, length))
                part = self.whole.part(one.offset, length)
                self.pieces.append(whole._replace(region=part, where=_at(whole, part)))
        return self._drained()

    def _drained(self) -> list[ScannedPickle]:
        """Look at each piece that waits, until there is none or a budget is exceeded."""
        with self._within_budgets():
            while self.pieces:
                if self.steps.exceeded:
                    raise self.steps.exceeded
                self.steps.take(Budget.PIECES)
                self._look(self.pieces.popleft())
        return self.found

    @contextmanager
    def _within_budgets(self) -> Iterator[None]:
        """End the scan where a budget is exceeded, and report it."""
        try:
            yield
        except OutOfSteps as error:
            self.pieces.clear()
            self.found.append(ScannedPickle("the file", self.whole.span, unread=f"{error}; the rest was not read"))

    def _add(self, pickle: ScannedPickle) -> None:
        """Keep what was found."""
        self.found.append(pickle)
        self.steps.take(Budget.PICKLES)

    def _digest(self, regions: Sequence[Region]) -> str:
        """Return the SHA-256 of these bytes; "" where the scan of the file has digested _MAX_DIGESTED without them."""
        import hashlib  # loads OpenSSL, which no other command has to wait for

        self.digested += sum(region.size for region in regions)
        if self.digested > _MAX_DIGESTED:
            return ""
        hashed = hashlib.sha256()
        for region in regions:
            hashed.update(region.size.to_bytes(8, "little"))
            for at in range(0, region.size, _DIGESTED_AT_ONCE):
                hashed.update(region.read(at, min(_DIGESTED_AT_ONCE, region.size - at)))
        return hashed.hexdigest()

    def _unread(self, piece: _Piece, why: str) -> None:
        digest = self._digest([piece.region])
        self._add(ScannedPickle(piece.where, piece.region.span, hidden=piece.hidden, unread=why, digest=digest))

    def _look(self, piece: _Piece) -> None:
        """Read one piece as what it begins like."""
        head = piece.region.head
        if piece.depth > MAX_DEPTH:
            self._unread(piece, f"nests more than {MAX_DEPTH} pickles and archives in each other")
        elif head.startswith(_ZIP):
            self._archive(piece)
        elif head.startswith(_NUMPY):
            self._array(piece)
        else:
            self._stream(piece)

    def _stream(self, piece: _Piece) -> None:
        """Pickles one after another, to what is none: whoever loads the first may load the others.

        Of a legacy file the first five are loaded, and storages follow.
        """
        at, count, size = 0, 0, piece.region.size
        legacy = piece.sure and torch_legacy.sniff("", piece.region.head)
        while at < size and (end := self._pickle(piece, at)):
            at, count = at + end, count + 1
            if not legacy or count >= _LEGACY:
                rest = piece.region.read(at, min(REGION_HEAD, size - at))
                begins = _BEGINS.match(rest) is not None
                piece = piece._replace(sure=piece.sure and begins)
                if not begins and (legacy or count >= _IN_A_ROW):
                    if not legacy and rest:
                        self._unread(piece, f"{count} pickles one behind another; what follows them was not read")
                    break

    def _pickle(self, piece: _Piece, at: int) -> int:
        """Read the pickle at byte `at`; its length, 0 where it has no end."""
        key = _key(piece.region) if piece.sure and not at else None
        if key and (again := self.read.get(key)):
            self._add(structs.replace(again, where=piece.where, place=piece.region.span, hidden=piece.hidden))
            return again.place.length
        where = f"{piece.where}, the pickle at byte {at}" if at else piece.where
        known = piece.sure and piece.region is not self.whole
        scanner, unread = self.reader.read(piece.region, at, where, piece.region.size if known else FIRST_WINDOW)
        region = piece.region.part(at, scanner.end or len(scanner.data))
        read: list[str] = []
        scanner.flow.read_storage = lambda key: self._storage(piece, key, read)
        mentions, modules = tuple(scanner.mentions()), tuple(dict.fromkeys(scanner.modules))
        bombs = scanner.bombs(self.whole.size)
        if piece.sure or (bombs and not unread) or not is_harmless(scanner, unread, copied=piece.copied):
            if unread and scanner.framed:
                mentions = self._read_frames(piece, at, scanner, mentions)
            unread = unread or scanner.unfollowed
            why, exact = str(unread) if unread else None, region.base is not None
            protocol = scanner.data[1] if scanner.data[:1] == b"\x80" and len(scanner.data) > 1 else 0
            pickle = ScannedPickle(
                where, region.span, mentions, modules, piece.hidden, exact, why, protocol=protocol, bombs=bombs
            )
            pickle = structs.replace(pickle, refused_opcode=scanner.refused_opcode)
            bounds = region if scanner.end and not unread else piece.region.part(at, piece.region.size - at)
            self._add(structs.replace(pickle, digest=self._digest([bounds])))
            if (
                key
                and region.size == piece.region.size
                and not (scanner.inner or unread or read)
                and len(self.read) < MAX_KEPT
            ):
                self.read[key] = self.found[-1]
        for start, data in scanner.inner:
            self.pieces.append(_Piece(region.made(data), f"{where}, the string at byte {start}", piece.depth + 1))
        return scanner.end

    def _storage(self, piece: _Piece, key: str, read: list[str]) -> bytes | None:
        """Return the bytes of a small storage that a pickle of the archive names; add its key to those read."""
        read.append(key)
        folder, _, suffix = piece.where.rpartition(".")
        region = self.storages.get(f"{folder}/{key}".lower()) if suffix == "pkl" and not piece.depth else None
        return region.read(0, region.size) if region else None

    def _read_frames(self, piece: _Piece, at: int, scanner: Scanner, names: tuple[Mention, ...]) -> tuple[Mention, ...]:
        """Add to the names those that unpicklers import which read other opcodes from the frames of the pickle."""
        data = piece.region.read(at, min(piece.region.size - at, _MAX_REREAD))
        uses = {structs.replace(one, position=0): one for one in names}
        for reading in (frames.read_in_memory(data), frames.read_as_file(data)):
            other, unread = self.reader.run(reading.opcodes, piece.where)
            for one in other.mentions():
                position = reading.position(one.position)
                uses.setdefault(structs.replace(one, position=0), structs.replace(one, position=position))
            end = at + reading.end
            start = piece.region.span.offset + end
            if not unread and reading.end != scanner.end and start not in self.read_at:
                self.read_at.add(start)
                rest = piece.region.part(end, piece.region.size - end)
                where = f"{piece.where}, what follows the frame at byte {end}"
                self.pieces.append(piece._replace(region=rest, where=where, depth=piece.depth + 1))
        return tuple(uses.values())

    def _array(self, piece: _Piece) -> None:
        """A numpy array: of objects it is a pickle behind the header. What is not surely none is looked at."""
        head, wide = piece.region.head, 4 if piece.region.head[6:7] != b"\1" else 2
        length = int.from_bytes(head[8 : 8 + wide], "little")
        start, left = 8 + wide + length, piece.region.size - 8 - wide - length
        if left > 0:
            header = piece.region.read(8 + wide, min(length, _MAX_HEADER))
            sure = _may_hold_objects(piece.region)
            if sure or not _PLAIN_ARRAY.fullmatch(header):
                region = piece.region.part(start, left)
                self.pieces.append(piece._replace(region=region, where=f"{piece.where}, its objects", sure=sure))

    # Archives.

    def _tar(self, piece: _Piece) -> None:
        """A tar, as torch wrote before 0.1.10: the pickles of its members, where nobody can make them lie elsewhere."""
        region = piece.region
        try:
            members = torch_tar.list_members(region)
            spans, unread = torch_tar.read_pickles(region)
        except MalformedError as error:
            self._unread(piece, f"{_TAR}: {error}; only members at usual places were read")
            self._salvage_tar(region)
            return
        if unread is not None:
            self._unread(piece, f"{_TAR}: {unread}")
        if not torch_tar.sniff("", region.read(0, min(HEAD_BYTES, region.size))):
            self._unread(piece, f"{_TAR}; it does not begin as torch.save began one")
        for span in spans:
            part = region.part(span.offset, span.length)
            self.pieces.append(_Piece(part, span.member, 1, sure=True, hidden=False))
        for member in members.values():
            if member.name not in torch_tar.LOADED:
                part = region.part(member.offset, member.size)
                self.pieces.append(_Piece(part, member.name, 1, hidden=member.name not in torch_tar.WRITTEN))

    def _salvage_tar(self, region: Region) -> None:
        """The members whose header begins at a block; tarfile takes sizes and holes from several other places."""
        at = 0
        while at + torch_tar.BLOCK <= region.size and len(self.pieces) < Budget.PICKLES.limit:
            header = torch_tar.parse_header(region.read(at, torch_tar.BLOCK))
            if header is None:
                break
            start = at + torch_tar.BLOCK
            size = min(max(header.size, 0), region.size - start)
            sure = header.name in torch_tar.LOADED
            self.pieces.append(_Piece(region.part(start, size), header.name, 1, sure, hidden=not sure))
            at = torch_tar.next_header(at, size)

    def _archive(self, piece: _Piece) -> None:
        try:
            archive = Archive(piece.region, looked_at=BEGINNING)
        except UnreadableError as error:
            parts = _in_a_row(piece.region)
            if len(parts) > 1:
                self.pieces.extend(piece._replace(region=part, where=_at(piece, part)) for part in parts)
                return
            self._unread(piece, f"{error}; its records were searched for without its directory")
            self._salvage(piece)
            return
        if piece.region.base is not None:
            self.archives.add((piece.region.base, piece.region.size))
        self._inflating(piece, archive)
        use_of = uses_of(archive)
        compiled: dict[str, list[_Piece]] = {}
        modules: list[_Piece] = []
        scripts: list[tuple[Region, str]] = []
        for record in archive.records.values():
            use = use_of(record)
            name = record.name if piece.where == "the file" else f"{piece.where}, {record.name}"
            self._record(piece, archive, record, use)
            if use is Use.SCRIPT:
                region = piece.region.part(record.data_offset, record.compressed_size)
                scripts.append((_inflated(region)[0] if record.method != STORED else region, name))
            if use is Use.COMPILED:
                region = piece.region.part(record.data_offset, record.compressed_size)
                folder = _COMPILED_FOLDER.match(name)
                compiled.setdefault(folder[0] if folder else name, []).append(_Piece(region, name, piece.depth))
            if use is Use.MODULE:
                region = piece.region.part(record.data_offset, record.compressed_size)
                modules.append(_Piece(region, name, piece.depth))
        for folder_name, pieces in compiled.items():
            self._compiled(folder_name, pieces)
        if modules:
            self._modules(modules)
        self._run_on_load([(region, name) for region, name in scripts if region.size <= MAX_CODE])

    def _inflating(self, piece: _Piece, archive: Archive) -> None:
        """Report compressed records that inflate to far more than other data does."""
        compressed = [record for record in archive.records.values() if record.method != STORED]
        packed, size = (sum(sizes) for sizes in ((r.compressed_size for r in compressed), (r.size for r in compressed)))
        if size > _MAX_UNPACKED and size > _MAX_RATIO * packed:
            bomb = Bomb(f"inflates {packed:,} bytes of compressed records to {size:,}", 0)
            self._add(ScannedPickle(piece.where, piece.region.span, hidden=piece.hidden, bombs=(bomb,)))

    def _record(self, piece: _Piece, archive: Archive, record: Record, use: Use) -> None:
        name = record.name if piece.where == "the file" else f"{piece.where}, {record.name}"
        region = piece.region.part(record.data_offset, record.compressed_size)
        if not piece.depth:
            is_small = record.method == STORED and region.size <= _LONGEST_INERT and name.lower() not in self.storages
            self.storages[name.lower()] = region if is_small else None
        if record.method == STORED and region.size <= _LONGEST_INERT and _INERT.fullmatch(region.head):
            return
        own = record.name.removeprefix(f"{archive.folder}/")
        if piece.depth:  # an archive of torch.save in an archive of torch.export
            usual = own in _USUAL and not piece.hidden
        else:
            usual = own in _USUAL or _KNOWN.fullmatch(own) is not None or use is Use.PICKLE
        is_loaded = use is Use.PICKLE and not piece.depth
        sure = is_loaded or _NAMED.search(record.name) is not None
        copied = use is Use.STORAGE and not piece.depth
        self._member(region, name, piece.depth, record.method != STORED, sure, not usual, copied)
        reads = self._readers(piece.depth).get(use)
        if reads:
            reads(_inflated(region)[0] if record.method != STORED else region, name)

    def _readers(self, depth: int) -> dict[Use, Callable[[Region, str], None]]:
        """What reads a record of code; torch loads no program in an archive inside an archive."""
        readers: dict[Use, Callable[[Region, str], None]]
        readers = {Use.SCRIPT: self._code, Use.BYTECODE: self._other_code, Use.OLD_SCRIPT: self._other_code}
        return readers if depth else {**readers, Use.PROGRAM: self._program}

    def _code(self, region: Region, where: str) -> None:
        """A text of TorchScript."""
        if region.size > MAX_CODE:
            self._unread(_Piece(region, where, 0, hidden=False), f"code of more than {MAX_CODE:,} bytes")
            return
        self.steps.take(Budget.BYTES, region.size)
        self._calls(region, where, script_code.calls(region.read(0, region.size), self.steps))

    def _run_on_load(self, scripts: list[tuple[Region, str]]) -> None:
        """What torch.jit.load itself runs of the texts of an archive."""
        codes, records = [code.read(0, code.size) for code, _ in scripts], [name for _, name in scripts]
        for number, call in script_code.calls_on_load(codes, self.steps, records):
            self._calls(*scripts[number], [call])

    def _other_code(self, region: Region, where: str) -> None:
        """What the lite interpreter runs; and what names code that lies anywhere, as torch 1.0 wrote it."""
        if where.endswith(".json"):
            self._unread(_Piece(region, where, 0, hidden=False), "TorchScript of torch 1.0, whose code is not read")
        else:
            data = region.read(0, min(region.size, MAX_CODE))
            self.steps.take(Budget.BYTES, len(data))
            self._calls(region, where, script_code.bytecode(data, self.steps))

    def _compiled(self, folder: str, pieces: list[_Piece]) -> None:
        """Files of AOTInductor: its loader opens the library, or makes one with commands that are among them."""
        escaping = [piece for piece in pieces if ".." in piece.where.split("/")]
        libraries = [piece for piece in pieces if _LIBRARY.search(piece.where)]
        sources = [piece for piece in pieces if piece.where.lower().endswith(".cpp")]
        main = (escaping or libraries or sources or pieces)[0]
        why = None if libraries else "AOTInductor's loader compiles with commands from the archive"
        why = "AOTInductor's loader writes outside its temporary folder" if escaping else why
        path, dot, suffix = main.where.rpartition(".")
        name = Mention(path if dot else folder, suffix, 0, called=True, misuse=why)
        exact = main.region.base is not None
        digest = self._digest([piece.region for piece in pieces])
        code = ScannedPickle(main.where, main.region.span, (name,), exact=exact, doer="loading it", digest=digest)
        self._add(code)

    def _modules(self, pieces: list[_Piece]) -> None:
        """Python files of torch.package, which shadow any module that a pickle of the archive names."""
        first = pieces[0]
        name = Mention(
            first.where.removesuffix(".py"),
            "py",
            0,
            called=True,
            misuse="torch.package runs as Python code",
        )
        exact, digest = first.region.base is not None, self._digest([piece.region for piece in pieces])
        self._add(ScannedPickle(first.where, first.region.span, (name,), exact=exact, doer="loading it", digest=digest))

    def _calls(self, region: Region, where: str, found: Iterable[script_code.Call]) -> None:
        digest = self._digest([region])
        for one in found:
            line = f"{where}, line {one.line}" if one.line else where
            doer = "loading it" if one.on_load else "its code"
            names = (Mention(one.module, one.name, one.at, called=True, misuse=one.why),)
            exact = region.base is not None
            self._add(ScannedPickle(line, region.span, names, exact=exact, doer=doer, digest=digest))

    def _program(self, region: Region, where: str) -> None:
        """A program of torch.export: loading it evaluates its sizes, compiles its names and imports what they say."""
        data = region.read(0, min(region.size, _MAX_PROGRAM))
        self.steps.take(Budget.BYTES, len(data))
        try:
            document, _ = json_object.parse_object(data, where)
        except MalformedError as error:
            self._unread(_Piece(region, where, 0), str(error))
            return
        digest = self._digest([region])
        for number, one in enumerate(said(document, self.steps)):
            at = max(data.find(_json_text(one.text)), 0) if number < _MAX_LOCATED else 0
            names = (Mention(one.module, one.name, at, called=one.called, misuse=one.why),)
            code = ScannedPickle(where, region.span, names, exact=region.base is not None, doer=one.doer)
            self._add(structs.replace(code, digest=digest))

    def _member(
        self, region: Region, name: str, depth: int, deflated: bool, sure: bool, hidden: bool, copied: bool = False
    ) -> None:
        """Keep a record for later if it is a pickle, or begins like one."""
        unread = None
        self.steps.take(Budget.PIECES)
        if deflated:
            if any(_is_plain_array(_beginning(region, size)) for size in (REGION_HEAD, _PAGE)):
                return
            # Each inflated record costs time: a storage that begins like no pickle is inflated no further.
            opening = _beginning(region, FIRST_WINDOW, FIRST_WINDOW + 1)
            if not (sure or _may_be_pickle(name, opening, len(opening))):
                return
            region, unread = _inflated(region)
            self.steps.take(Budget.BYTES, region.size)
        piece = _Piece(region, name, depth + 1 if region.head.startswith(_ZIP) else depth, sure, hidden, copied)
        if sure or _may_be_pickle(name, region.head, region.size):
            if unread:
                self._unread(piece, unread)
            self.pieces.append(piece)

    def _salvage(self, piece: _Piece) -> None:
        """The records that have a local header, whatever the directory says."""
        region, at = piece.region, 0
        other = self.whole.head[:1] == b"\x80" or self.whole.head[8:9] == b"{"
        own = set() if piece.depth or other else set(_USUAL)
        while (at := _next(region, at)) >= 0 and len(self.pieces) < Budget.PICKLES.limit:
            if at + _LOCAL.size > region.size:
                break
            fields = _LOCAL.unpack(region.read(at, _LOCAL.size))
            start = at + _LOCAL.size + fields[-2] + fields[-1]
            if start < region.size:
                raw = region.read(at + _LOCAL.size, fields[-2])
                rest = region.part(start, region.size - start)
                name = str(raw, "utf-8", "backslashreplace")
                last = name.rpartition("/")[2]
                sure = _NAMED.search(name) is not None
                self._member(rest, name, piece.depth, fields[3] != STORED, sure, last not in own)
                own.discard(last)
            at += 4


def _mark_loaded_by_torch(pickles: list[ScannedPickle], whole: Region) -> list[ScannedPickle]:
    """Set `by_torch_load` on the pickles that `torch.load` of the file unpickles.

    These are `data.pkl` of an archive without `constants.pkl` (torch.jit.load reads an archive that has it), or the
    first five pickles of a legacy file.
    """
    usual = [n for n, one in enumerate(pickles) if not one.hidden and one.doer is None]
    if whole.head.startswith(_ZIP):
        is_script = any(pickles[n].where.endswith("/constants.pkl") for n in usual)
        loaded = [n for n in usual if not is_script and re.fullmatch(r"[^/]+/data\.pkl", pickles[n].where)]
    else:
        loaded = usual[:_LEGACY] if torch_legacy.sniff("", whole.head) else []
    for n in loaded:
        pickles[n] = structs.replace(pickles[n], by_torch_load=True)
    return pickles


def _key(region: Region) -> bytes | None:
    """The bytes of a small pickle in the file, by which it is known again: tensors of one shape have the same."""
    return region.read(0, region.size) if region.base is not None and region.size <= _PAGE else None


def _json_text(text: str) -> bytes:
    return json.dumps(text).encode()


def _ends_as_zip(region: Region) -> bool:
    """Whether there is an end record where torch's zip reader and Python's look for it, and a directory.

    Both take the last one, whatever comes before the archive and after its end. torch's reader does not look at the
    record's comment, and reads on by whole buffers.
    """
    start = max(0, region.size - FARTHEST_END)
    tail = region.read(start, region.size - start)
    at = tail.rfind(b"PK\5\6", 0, max(0, len(tail) - _END + 4))
    if at < 0:
        return False
    if tail[max(0, at - _LOCATOR) : at].startswith(b"PK\6\7"):
        return True
    size, offset = struct.unpack_from("<II", tail, at + 12)
    begins = (offset, start + at - size)  # zipfile finds the directory by its size
    found = (region.read(begin, 4) for begin in begins if 0 <= begin <= region.size - 4)
    return b"PK\1\2" in found


def _in_a_row(region: Region) -> list[Region]:
    """The archives that fill these bytes one behind another, as torch.distributed.checkpoint puts one for each tensor.

    Each one's end records say where it begins. None unless all of the bytes are accounted for.
    """
    parts: list[Region] = []
    end = region.size
    while end >= _ENDS and len(parts) < Budget.PICKLES.limit:
        tail = region.read(end - _ENDS, _ENDS)
        length = int.from_bytes(tail[64:72], "little") + _ENDS
        if (tail[:4], tail[56:60], tail[76:80]) != (b"PK\6\6", b"PK\6\7", b"PK\5\6") or length > end:
            return []
        end -= length
        parts.append(region.part(end, length))
    return parts[::-1] if end == 0 else []


def _at(piece: _Piece, part: Region) -> str:
    return f"{piece.where}, the archive at byte {part.span.offset}"


def _next(region: Region, at: int) -> int:
    """Where the next local header is, -1 where there is none."""
    step = 2**20
    while at < region.size:
        found = region.read(at, min(step + 3, region.size - at)).find(_ZIP)
        if found >= 0:
            return at + found
        at += step
    return -1


def _may_hold_objects(region: Region) -> bool:
    """Whether numpy may unpickle what follows the header of an array; it accepts headers that statecli refuses."""
    try:
        return npy_array.read_header(lambda size: region.read(0, min(size, region.size))).element.has_objects
    except UnreadableError:
        return True


def _may_be_pickle(name: str, head: bytes, size: int) -> bool:
    """Whether a record of `size` bytes that begins with `head` is looked at: it is small, or begins like a pickle."""
    small = size <= FIRST_WINDOW and not _STORAGE.search(name)
    return small or _BEGINS.match(head) is not None or head.startswith((_ZIP, _NUMPY))


def _beginning(region: Region, size: int, most: int = _PAGE) -> bytes:
    """What the first `size` bytes of a compressed record inflate to, `most` bytes at most."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(region.read(0, min(size, region.size)), most)
    except zlib.error:
        return b""


def _is_plain_array(head: bytes) -> bool:
    """Whether a numpy array begins so that holds no objects."""
    start = 8 + (4 if head[6:7] != b"\1" else 2)
    end = start + int.from_bytes(head[8:start], "little")
    return head.startswith(_NUMPY) and end <= len(head) and _PLAIN_ARRAY.fullmatch(head[start:end]) is not None


def _inflated(region: Region) -> tuple[Region, str | None]:
    """The content of a compressed record, as much of it as is wanted, and why there is no more."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    parts, size, at = [], 0, 0
    why: str | None = None
    while at < region.size and not inflater.eof and why is None:
        step = min(2**16, region.size - at)
        try:
            parts.append(inflater.decompress(region.read(at, step), MAX_INFLATED - size + 1))
        except zlib.error as error:
            why = f"cannot be inflated to its end: {error}"
            break
        at, size = at + step, size + len(parts[-1])
        if size > MAX_INFLATED:
            why = f"is compressed and inflates to more than {MAX_INFLATED:,} bytes"
    if why is None and not inflater.eof:
        why = "is compressed and breaks off in the middle"
    return region.made(b"".join(parts)), why
