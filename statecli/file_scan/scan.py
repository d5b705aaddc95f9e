"""Find the Python names that the pickles of a file would import, even if the file is damaged.

Listing tensors requires an undamaged file; this module reports the code that loading runs. The module also reads bytes
that no reader of tensors opens: each record of an archive, bytes after a STOP, and arrays of objects. It reads pickles
and archives inside strings and records, and archives with a false directory. Anything not read to its end is reported
(`ScannedPickle.unread`). `imported_names.Scanner` reads each pickle.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from msgspec import structs

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError, strip_copy_advice
from statecli.core.garbage_collector import pause_gc
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Bomb, Hazard, Place, ScannedPickle
from statecli.file_scan.code_scan import CodeScan
from statecli.file_scan.compressed_records import ARRAY_HEADER_BYTES, inflate, inflate_beginning
from statecli.file_scan.record_contents import (
    PICKLE_BEGINNING,
    PLAIN_ARRAY,
    ZIP_START,
    find_local_header,
    is_plain_array,
    may_be_pickle,
    may_hold_objects,
    split_consecutive_archives,
)
from statecli.file_scan.record_hazards import RecordUse, find_hazards, find_misfit
from statecli.file_scan.scan_result import Piece, ScanResult, hash_regions
from statecli.file_scan.scanned_files import find_stored_archives, is_empty, is_system_error, list_scanned_files
from statecli.file_scan.storage_records import ArchiveRecords
from statecli.formats import dcp, safetensors, torch_legacy, unsupported
from statecli.formats.flax_msgpack import MSGPACK_SUFFIXES
from statecli.formats.shared import tar_archive
from statecli.formats.shared.dcp_metadata import Stored
from statecli.formats.shared.npy_array import MAGIC
from statecli.pickle_scan import known_names
from statecli.pickle_scan.archive_records import LoaderUse, classify_records
from statecli.pickle_scan.code_in_text import find_code_in_text
from statecli.pickle_scan.imported_names import Scanner
from statecli.pickle_scan.module_search import AdjacentFiles
from statecli.pickle_scan.one_pickle import (
    FIRST_WINDOW_BYTES,
    REGION_HEAD_BYTES,
    FetchError,
    PickleReader,
    Region,
    is_harmless,
    may_equal_magic_number,
)
from statecli.pickle_scan.step_budget import Budget, OutOfSteps, Steps
from statecli.pickles.nodes import Persistent
from statecli.storage import files
from statecli.storage.byte_source import ByteSource
from statecli.storage.checkpoint_names import METADATA
from statecli.storage.store import Extent
from statecli.storage.zip_archive import BEGINNING_BYTES, Archive, ends_as_zip, find_zip_end
from statecli.storage.zip_directory import STORED, Record

#: Largest nesting of archives in archives, and of pickles in strings of pickles.
MAX_NESTING = 4
#: Largest number of small pickles of one file that are cached.
MAX_CACHED_PICKLES = 4096
#: Bytes to which compressed records may inflate at any ratio, and largest ratio above this size.
_MIN_BOMB_BYTES = 256 * 2**20
_MIN_BOMB_RATIO = 200
#: Number of archives of a single tensor that are prefetched, and bytes of the beginning and of the end of each.
_PREFETCHED_ARCHIVES, _FIRST_BYTES, _LAST_BYTES = 8192, 2048, 1024
#: First bytes of pickles (see `PICKLE_BEGINNING`), of archives and of numpy arrays.
_BEGINNINGS = frozenset(bytes([byte]) for byte in b"\x80()]}ciP\x93")
#: Contents of the small records of torch's archives; digits are not opcodes that import anything.
_INERT_CONTENTS = compile_on_use(rb"[\d\n]{0,64}|little|big")
_MAX_INERT_BYTES = 64
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
#: Name of a record that numpy writes, without NUL, because zipfile ends a name there.
_ARRAY_NAME = compile_on_use(r"[^\0]*\.npy")
_PICKLE_SUFFIX = compile_on_use(r"\.(?:\w*pkl|pickle|pck|pcl|joblib|dill)\Z", re.IGNORECASE)
#: Pickles in the top folder of torch's own archives.
_USUAL_PICKLES = frozenset(["data.pkl", "constants.pkl", "attributes.pkl"])
#: Further pickles in archives of TorchScript.
_TORCHSCRIPT_PICKLES = compile_on_use(
    r"bytecode\.pkl|mobile_debug_handles\.pkl|traced_inputs\.pkl|code/__torch__[^\0]*\.py\.debug_pkl"
    r"|callstack_debug_map\.pkl|delegated_backends\.debug_pkl"
)
#: Message about an archive without a readable directory.
_SEARCHED_PART = "statecli scanned only the records that it found by searching for headers"
#: Folder of a compiled model in an archive.
_COMPILED_FOLDER = compile_on_use(r".*?data/(?:aotinductor/[^/]*|constants[^/]*)", re.DOTALL | re.IGNORECASE)
#: Class after whose object joblib writes the data of an array, in the middle of a pickle.
_JOBLIB_ARRAY = "joblib.numpy_pickle.NumpyArrayWrapper"
_JOBLIB_REASON = "joblib writes the data of an array into the pickle, and statecli cannot read on after these data"
_TAR_REASON = "torch.load unpickles the members of this tar archive"
#: Number of pickles that torch.load reads from a legacy file; any bytes may follow.
_LEGACY_PICKLES = 5
#: Largest number of consecutive pickles that are read if the next bytes do not begin like a pickle.
_MAX_CONSECUTIVE_PICKLES = 64
#: Largest part of the header of a numpy array that is read, in bytes.
_MAX_ARRAY_HEADER_BYTES = 2**20


def scan_pickles(path: str) -> tuple[ScannedPickle, ...]:
    """Return every pickle of a file, or of the files of a folder or an index.

    A file that cannot be opened has no pickles: the reader of its tensors reports the same error. Raises
    UnreadableError, with the file, if bytes could not be fetched, because a server may answer the next time.
    """
    pickles: list[ScannedPickle] = []
    with pause_gc():
        places, unreadable_files = find_stored_archives(path)
        for file in list_scanned_files(path):
            pickles.extend(_scan_file(file, places.pop(file, ())))
        for file, stored in places.items():
            pickles.extend(_scan_file(file, stored, only_stored=True))
    for file, reason in unreadable_files:
        why = f"statecli cannot locate the archives in the file: {reason}"
        pickles.append(ScannedPickle("the file", Place(file, 0, 0), unread=why))
    return tuple(pickles)


def scan_bytes(place: Place, where: str, data: bytes) -> list[ScannedPickle]:
    """Return the pickles in `data`, the bytes that a loader reads at a place in a file."""
    with pause_gc(), ByteSource(place.path) as source:
        scan = FileScan(source)
        scan.pieces.append(Piece(Region(source, place.offset, place.length, data), where, 0, hidden=False))
        return scan.scan_stored(())


def _find_other_uses(file_region: Region, *, has_zip_at_end: bool) -> Iterator[Hazard]:
    """Yield the hazards of a file that some loaders read as another format, because of its name or its bytes."""
    head = file_region.head
    if (reason := find_code_in_text(file_region.path, file_region)) is not None:
        yield Hazard(reason, help="remove the file unless you trust its author")
    if file_region.path.lower().endswith(MSGPACK_SUFFIXES) and safetensors.sniff("", head):
        yield Hazard(_MSGPACK_USE, help="rename the file to .safetensors")
    if unsupported.is_compiled(head):
        use = "reads the file as a cache of compiled code and unpickles its contents"
        help = "do not load the file as a cache unless you created it"
        yield Hazard(f"torch.compiler.load_cache_artifacts {use}", help=help)
    if unsupported.is_flatbuffer(head):
        use = "torch.jit.load reads the file as a flatbuffer and runs the code in it"
        yield Hazard(use, help="do not load the file with torch.jit.load unless you created it")
    if has_zip_at_end:
        yield Hazard(
            "the file ends with a zip archive, and torch.hub and pandas read this archive instead of the tensors",
            help=_ZIP_HELP,
        )


def _is_in_zip_member(tar: Region, at: int) -> bool:
    """Return True if byte `at` of a tar archive is in a member that begins as a zip; NeMo packs checkpoints so."""
    with suppress(MalformedError):
        for member in islice(tar_archive.iter_members(tar.read_up_to), Budget.PICKLES.limit):
            if member.offset <= at < member.offset + member.size:
                return tar.read_up_to(member.offset, len(ZIP_START)) == ZIP_START
    return False


def _scan_file(path: str, places: Collection[Stored] = (), *, only_stored: bool = False) -> list[ScannedPickle]:
    """Return the pickles of a file and of the archives at `places`; if `only_stored`, skip the rest of the file."""
    try:
        with ByteSource(path) as source:
            source.prefetch(
                extent for archive in islice(places, _PREFETCHED_ARCHIVES) for extent in _list_ends(archive)
            )
            scan = FileScan(source)
            if not only_stored:
                scan.scan()
            return scan.scan_stored(places)
    except FetchError as error:
        raise UnreadableError(f"{path}: {error}") from error
    except UnreadableError as error:  # the server or the system may answer the next time
        if (files.reads_are_requests(path) and not is_empty(path)) or is_system_error(error):
            raise UnreadableError(f"{path}: {error}") from error
        return []


def _list_ends(archive: Stored) -> list[Extent]:
    """Return the byte ranges at the beginning and the end of a stored archive, which are prefetched."""
    return [
        Extent(archive.offset, _FIRST_BYTES),
        Extent(archive.offset + max(0, archive.length - _LAST_BYTES), _LAST_BYTES),
    ]


_MSGPACK_USE = (
    "libraries such as RLlib read the file as msgpack because of its name, but statecli checked the file as safetensors"
)
_ZIP_HELP = "save the tensors again in a new file, and contact the publisher of this file"
_LONE_FILE_REASON = (
    "the zip archive contains only the file {}; torch.hub overwrites any file of this name in its cache folder"
)
#: Limit of the zeros that torch.export.load may create for tensors with empty records: a fixed part, and a part for
#: each byte of the file.
_MAX_ZEROS, _MAX_ZEROS_PER_BYTE = 16 * 2**20, 1032
#: Largest file that is digested as a whole, and largest part of a file that is searched for headers, in bytes: on disk
#: (10 to 40 seconds), and behind a URL (a download).
_MAX_READ_BYTES, _MAX_READ_REMOTE_BYTES = 1 << 34, 1 << 28


class FileScan:
    """Scanner that scans a file piece by piece."""

    def __init__(self, source: ByteSource) -> None:
        self.file_region = Region(source, 0, source.size)
        self.pieces: deque[Piece] = deque()
        self.steps = Steps()
        self.result = ScanResult(self.steps)
        self.code = CodeScan(self.result)
        self.reader = PickleReader(source.path, self.steps)
        self.adjacent_files = AdjacentFiles(source.path)
        #: Whether torch may take the last scanned pickle for the magic number of a legacy file.
        self.last_may_be_magic = False
        self.file_digest: str | None = None
        #: Small pickles that were read to their end, with their storages, by `_read_cache_key`.
        self.cached_pickles: dict[tuple[RecordUse, bytes], tuple[ScannedPickle, tuple[Persistent, ...]]] = {}
        #: Small records by name in lower case, because torch's reader ignores case; None for large, compressed and
        #: ambiguous records.
        self.small_records: dict[str, Region | None] = {}
        #: Archives whose records are not in `small_records` yet.
        self.unlisted: deque[tuple[Piece, Archive]] = deque()
        #: Offset and length of each archive whose records were scanned.
        self.archives: set[tuple[int, int]] = set()

    def scan(self) -> list[ScannedPickle]:
        """Scan the file; return all pickles and code found."""
        head = self.file_region.head
        header = safetensors.sniff("", head) and int.from_bytes(head[:8], "little") <= self.file_region.size - 8
        is_metadata = files.get_name(self.file_region.path).endswith(METADATA)
        is_pickle = is_metadata or (head[:1] == b"\x80" and not header)
        first = Piece(self.file_region, "the file", 0, is_pickle=is_pickle, hidden=False)
        has_zip_at_end = False
        with self._within_budgets():
            end = find_zip_end(self.file_region) if not head.startswith(ZIP_START) else None
            is_tar = tar_archive.parse_header(head) is not None and not head.startswith(ZIP_START)
            has_zip_at_end = end is not None and not (is_tar and _is_in_zip_member(self.file_region, end))
            if has_zip_at_end:
                self._scan_archive(first._replace(hidden=True))
            if is_tar:
                self._scan_tar(first)
            self.pieces.append(first)
        pickles = _mark_loaded_by_torch(self._scan_pieces(), self.file_region)
        for hazard in _find_other_uses(self.file_region, has_zip_at_end=has_zip_at_end):
            pickles.append(
                ScannedPickle("the file", self.file_region.span, hazards=(hazard,), digest=self._digest_file())
            )
        return pickles

    def scan_stored(self, places: Iterable[Stored]) -> list[ScannedPickle]:
        """Scan the archives stored inside the file (torch.distributed.checkpoint), unless `scan` has scanned them."""
        file_piece = Piece(self.file_region, "the file", 0, is_pickle=True, hidden=False)
        transformed = [archive for archive in places if archive.transforms]
        if transformed:
            self.result.add_unread(
                file_piece,
                f"statecli cannot read {len(transformed)} of the values: torch.distributed.checkpoint stored them with "
                f"the transform {quoting.names(transformed[0].transforms)}, which statecli cannot reverse",
            )
        for archive in places:
            length = min(archive.length, self.file_region.size - archive.offset)
            if length > 0 and not archive.transforms and (archive.offset, length) not in self.archives:
                self.archives.add((archive.offset, length))
                part = self.file_region.get_part(archive.offset, length)
                self.pieces.append(file_piece._replace(region=part, where=_describe_archive(file_piece, part)))
        return self._scan_pieces()

    def _scan_pieces(self) -> list[ScannedPickle]:
        """Scan the queued pieces until none is left or a budget is exceeded."""
        with self._within_budgets():
            while self.pieces:
                if self.steps.exceeded:
                    raise self.steps.exceeded
                self.steps.take(Budget.PIECES)
                self._scan_piece(self.pieces.popleft())
        self._widen_digests()
        return self.result.pickles

    def _widen_digests(self) -> None:
        """Replace the digest of each harmful pickle that uses storages by the digest of the whole file.

        `exec` of a storage runs other code if only the storage changes, and `from_file` of TorchScript reads another
        path if only an attribute does.
        """
        is_script = any(pickle.where.lower().endswith("/constants.pkl") for pickle in self.result.pickles)
        for n, pickle in enumerate(self.result.pickles):
            if pickle.uses_storages and pickle.digest != self.file_digest and _is_harmful(pickle, is_script):
                if self.file_digest is None:
                    self.file_digest = self._digest_file()
                self.result.pickles[n] = structs.replace(pickle, digest=self.file_digest)

    def _digest_file(self) -> str:
        """Return the SHA-256 of the whole file; "" if the file is too large."""
        is_small = self.file_region.size <= self._get_read_limit()
        return hash_regions([self.file_region], ()) if is_small else ""

    def _get_read_limit(self) -> int:
        return _MAX_READ_REMOTE_BYTES if self.file_region.reads_are_requests else _MAX_READ_BYTES

    @contextmanager
    def _within_budgets(self) -> Iterator[None]:
        """Catch the error of an exceeded budget in the block, and report that the rest of the file was not read."""
        try:
            yield
        except OutOfSteps as error:
            self.pieces.clear()
            why = f"{error}, and did not read the rest of the file"
            self.result.pickles.append(ScannedPickle("the file", self.file_region.span, unread=why))

    def _scan_piece(self, piece: Piece) -> None:
        """Scan a piece as an archive, an array or a stream of pickles, depending on its first bytes."""
        head = piece.region.head
        if piece.depth > MAX_NESTING:
            why = f"pickles and archives are nested more than {MAX_NESTING} levels deep, the limit of statecli"
            self.result.add_unread(piece, why)
        elif head.startswith(ZIP_START):
            self._scan_archive(piece)
        elif head.startswith(MAGIC):
            self._scan_array(piece)
        else:
            self._scan_stream(piece)

    def _scan_stream(self, piece: Piece) -> None:
        """Scan consecutive pickles, because a program that loads the first may load the rest.

        torch.load reads the first five pickles of a legacy file; storages follow.
        """
        at, count, size = 0, 0, piece.region.size
        is_legacy = piece.is_pickle and torch_legacy.sniff("", piece.region.head)
        while at < size and (end := self._scan_pickle(piece, at)):
            at, count = at + end, count + 1
            if count == 1 and self.last_may_be_magic and (piece.is_pickle or piece.region is self.file_region):
                is_legacy, piece = True, piece._replace(is_pickle=True)
            if not is_legacy or count >= _LEGACY_PICKLES:
                following_bytes = piece.region.read(at, min(REGION_HEAD_BYTES, size - at))
                begins_as_pickle = PICKLE_BEGINNING.match(following_bytes) is not None
                piece = piece._replace(is_pickle=piece.is_pickle and begins_as_pickle)
                if not begins_as_pickle and (is_legacy or count >= _MAX_CONSECUTIVE_PICKLES):
                    if not is_legacy and following_bytes:
                        why = f"statecli stopped after {count} pickles in a row, its limit, and did not read the rest"
                        self.result.add_unread(piece, why)
                    break

    def _scan_pickle(self, piece: Piece, at: int) -> int:
        """Scan the pickle at byte `at` and return its length; 0 if its end was not found."""
        use = RecordUse.from_place(piece.where)
        is_script = piece.records is not None and piece.records.types is not None
        key = None if at or is_script or not piece.is_pickle else _read_cache_key(piece.region, use)
        cached, storages = self.cached_pickles.get(key, (None, ())) if key else (None, ())
        records = piece.records
        if cached is not None and (records is None or find_misfit(storages, use, records, self.steps) is None):
            self.result.add(structs.replace(cached, where=piece.where, place=piece.region.span, hidden=piece.hidden))
            return cached.place.length
        where = f"{piece.where}, the pickle at byte {at}" if at else piece.where
        is_length_known = piece.is_pickle and piece.region is not self.file_region
        scanner, scan_error = self.reader.read(
            piece.region, at, where, piece.region.size if is_length_known else FIRST_WINDOW_BYTES
        )
        self.last_may_be_magic = may_equal_magic_number(scanner)
        region = piece.region.get_part(at, scanner.end or len(scanner.data))
        read_keys: list[str] = []
        scanner.flow.read_storage = lambda key: self._read_storage(piece, key, read_keys)
        mentions, modules = tuple(scanner.iter_mentions()), tuple(dict.fromkeys(scanner.module_classes))
        bombs = scanner.find_bombs(self.file_region.size)
        hazards = find_hazards(scanner, use, piece.records)
        has_nested_data = bool(scanner.nested_data or scanner.flow.computed_data)
        if (
            piece.is_pickle
            or ((bombs or hazards) and not scan_error)
            or not is_harmless(scanner, scan_error, self.adjacent_files, is_storage=piece.is_storage)
        ):
            scan_error = scan_error or scanner.unfollowed
            why, exact = _explain_unread(scanner, scan_error), region.base is not None
            protocol = scanner.data[1] if scanner.data[:1] == b"\x80" and len(scanner.data) > 1 else 0
            bounds = region if scanner.end and not scan_error else piece.region.get_part(at, piece.region.size - at)
            pickle = ScannedPickle(
                where,
                region.span,
                mentions,
                modules,
                piece.hidden,
                exact,
                why,
                protocol=protocol,
                bombs=bombs,
                hazards=hazards,
                uses_storages=bool(scanner.persistent),
                sparse_tensors=scanner.count_sparse_tensors(),
                digest=self.result.compute_digest([bounds]),
                refused_opcode=scanner.refused_opcode,
            )
            self.result.add(pickle)
            if (
                key
                and region.size == piece.region.size
                and not (has_nested_data or scan_error or read_keys or hazards)  # a hazard names its place
                and len(self.cached_pickles) < MAX_CACHED_PICKLES
            ):
                self.cached_pickles[key] = pickle, tuple(scanner.persistent)
        self._add_nested_data(scanner, region, piece, where)
        return scanner.end

    def _add_nested_data(self, scanner: Scanner, region: Region, piece: Piece, where: str) -> None:
        """Queue the strings of a pickle that may be pickles, and the storages of tensors that the pickle loads."""
        for start, data in scanner.nested_data:
            is_loaded = bool(scanner.storage_data) and data in scanner.storage_data
            nested = Piece(region.with_data(data), f"{where}, the string at byte {start}", piece.depth + 1, is_loaded)
            self.pieces.append(nested._replace(hidden=piece.hidden or not is_loaded))
        for data in scanner.flow.computed_data:
            name = f"{where}, the bytes that a call computes"
            self.pieces.append(Piece(region.with_data(data), name, piece.depth + 1))

    def _read_storage(self, piece: Piece, key: str, read_keys: list[str]) -> bytes | None:
        """Return the bytes of the small storage with this key; None if unreadable. Append the key to `read_keys`."""
        read_keys.append(key)
        folder, _, suffix = piece.where.rpartition(".")
        records = self._list_small_records()
        region = records.get(f"{folder}/{key}".lower()) if suffix == "pkl" and not piece.depth else None
        order = f"{folder.rpartition('/')[0]}/byteorder".lower()
        if order in records:
            record = records[order]
            if record is None or record.head != b"little":  # torch.load swaps the numbers
                return None
        return region.read(0, region.size) if region else None

    def _list_small_records(self) -> dict[str, Region | None]:
        """Return the small records of the opened archives by name; None for large, compressed and ambiguous records."""
        while self.unlisted:
            piece, archive = self.unlisted.popleft()
            for record in archive.records.values():
                name = self._name_record(piece, record).lower()
                is_small = record.method == STORED and record.compressed_size <= _MAX_INERT_BYTES
                part = piece.region.get_part(record.data_offset, record.compressed_size) if is_small else None
                self.small_records[name] = part if name not in self.small_records else None
        return self.small_records

    def _scan_array(self, piece: Piece) -> None:
        """Scan a numpy array: an array of objects has a pickle after its header."""
        head, width = piece.region.head, 4 if piece.region.head[6:7] != b"\1" else 2
        length = int.from_bytes(head[8 : 8 + width], "little")
        start, objects_size = 8 + width + length, piece.region.size - 8 - width - length
        if objects_size > 0:
            header = piece.region.read(8 + width, min(length, _MAX_ARRAY_HEADER_BYTES))
            is_pickle = may_hold_objects(piece.region)
            if is_pickle or not PLAIN_ARRAY.fullmatch(header):
                region = piece.region.get_part(start, objects_size)
                self.pieces.append(
                    piece._replace(region=region, where=f"{piece.where}, its objects", is_pickle=is_pickle)
                )

    # Archives.

    def _scan_tar(self, piece: Piece) -> None:
        """Scan the members of a tar, as saved by torch up to 0.1.9. Report the file as not read to its end.

        torch.load tries tarfile first, for every file. In `storages` and `tensors`, torch.load unpickles more data than
        the first pickles.
        """
        region = piece.region
        self.result.add_unread(piece, f"{_TAR_REASON}, and statecli may not have found all of them")
        with suppress(MalformedError):
            for member in islice(tar_archive.iter_members(region.read_up_to), Budget.PICKLES.limit):
                size = max(0, min(member.size, region.size - member.offset))
                part = region.get_part(member.offset, size)
                self.pieces.append(Piece(part, member.name, 1, member.is_loaded, hidden=not member.is_loaded))

    def _scan_archive(self, piece: Piece) -> None:
        try:
            archive = Archive(piece.region, looked_at=BEGINNING_BYTES)
        except UnreadableError as error:
            # A loader that takes these bytes as one archive reads the last end records, and counts from the first byte.
            is_loaded_by_place = piece.region is self.file_region and self.file_region.path.endswith(dcp.SUFFIX)
            parts = split_consecutive_archives(piece.region) if is_loaded_by_place else []
            if len(parts) > 1:
                self.pieces.extend(piece._replace(region=part, where=_describe_archive(piece, part)) for part in parts)
                return
            self._salvage(piece, strip_copy_advice(str(error)))
            return
        if piece.region.base is not None:
            self.archives.add((piece.region.base, piece.region.size))
        self._report_inflation(piece, archive)
        if piece.region is self.file_region and len(archive.records) == 1 and not self._is_npz(archive):
            hazards = (Hazard(_LONE_FILE_REASON.format(quoting.quote(next(iter(archive.records)))), help=_ZIP_HELP),)
            self.result.add(ScannedPickle("the file", piece.region.span, hazards=hazards, digest=self._digest_file()))
        top = archive.folder or ""
        if "\0" in top:
            torch_name = quoting.quote(top.partition("\0")[0])
            self.result.add_unread(
                piece,
                "the folder name in the archive has a NUL character; torch cuts each record name there, so torch "
                f"reads {torch_name} in place of each record",
            )
        if not piece.depth:
            self.unlisted.append((piece, archive))
        use_of, unreadable_config, zeros, numbered_storages = classify_records(archive)
        inert_storages = self._find_idle_storages(piece.region, archive, numbered_storages)
        self._report_zeros(piece, zeros)
        if unreadable_config is not None:
            self.result.add_unread(piece, f"{unreadable_config}, and any record may contain a pickle")
        sizes = {record.name.lower(): record.size for record in archive.records.values()}
        uses = {name: use_of(record) for name, record in archive.records.items() if name not in inert_storages}
        scripts = [
            (self._read_code(piece, record, name := self._name_record(piece, record)), name)
            for record in archive.records.values()
            if uses.get(record.name) is LoaderUse.SCRIPT
        ]
        types = self.code.scan_scripts(scripts)
        compiled: dict[str, list[Piece]] = {}
        modules: list[Piece] = []
        for record in archive.records.values():
            if record.name in inert_storages:
                continue
            use, name = uses[record.name], self._name_record(piece, record)
            self._scan_record(piece._replace(records=ArchiveRecords(record.name, sizes, types)), archive, record, use)
            if use is LoaderUse.COMPILED or use is LoaderUse.MODULE:
                region = piece.region.get_part(record.data_offset, record.compressed_size)
                folder = _COMPILED_FOLDER.match(name)
                group = modules if use is LoaderUse.MODULE else compiled.setdefault(folder[0] if folder else name, [])
                group.append(Piece(region, name, piece.depth))
        for folder_name, pieces in compiled.items():
            self.code.report_compiled(folder_name, pieces)
        if modules:
            self.code.report_modules(modules)
        self.steps.take(Budget.PIECES, sum(inert_storages.values()))  # last, so that no limit hides code

    def _report_zeros(self, piece: Piece, zeros: int) -> None:
        if zeros > _MAX_ZEROS + _MAX_ZEROS_PER_BYTE * self.file_region.size:
            bomb = Bomb(
                f"creates {zeros:,} zeros in total for tensors whose records are empty; this may fill the memory", 0
            )
            self.result.add(ScannedPickle(piece.where, piece.region.span, hidden=piece.hidden, bombs=(bomb,)))

    @staticmethod
    def _find_idle_storages(region: Region, archive: Archive, numbered_storages: Collection[str]) -> dict[str, int]:
        """Return the numbered storages that do not begin like a pickle, an archive or an array.

        Each value is the number of pieces that the storage counts as: 0 for inert contents such as digits, else 1.
        """
        if len(archive.records) == 1:  # torch.hub gives the only record to torch.load
            return {}
        piece_counts: dict[str, int] = {}
        read = archive.open_window(region).read
        for name, record in archive.records.items():
            if name not in numbered_storages:
                continue
            size = record.compressed_size
            head = read(record.data_offset, min(size, _MAX_INERT_BYTES))
            if record.method == STORED and head[:1] not in _BEGINNINGS:
                piece_counts[name] = size > _MAX_INERT_BYTES or not _INERT_CONTENTS.fullmatch(head)
        return piece_counts

    def _is_npz(self, archive: Archive) -> bool:
        """Return True if the file and its records have the names that numpy writes (`.npz`, `.npy`)."""
        is_named = self.file_region.path.lower().endswith(".npz")
        return is_named and all(_ARRAY_NAME.fullmatch(name) for name in archive.records)

    def _report_inflation(self, piece: Piece, archive: Archive) -> None:
        """Report compressed records whose compression ratio and inflated size are far beyond those of honest data."""
        compressed = [record for record in archive.records.values() if record.method != STORED]
        compressed_size = sum(record.compressed_size for record in compressed)
        size = sum(record.size for record in compressed)
        if size > _MIN_BOMB_BYTES and size > _MIN_BOMB_RATIO * compressed_size:
            text = f"unpacks {compressed_size:,} bytes of compressed data to {size:,} bytes in total"
            bomb = Bomb(f"{text}, which may fill the memory", 0)
            self.result.add(ScannedPickle(piece.where, piece.region.span, hidden=piece.hidden, bombs=(bomb,)))

    @staticmethod
    def _name_record(piece: Piece, record: Record) -> str:
        return record.name if piece.where == "the file" else f"{piece.where}, {record.name}"

    def _scan_record(self, piece: Piece, archive: Archive, record: Record, use: LoaderUse) -> None:
        name = self._name_record(piece, record)
        region = piece.region.get_part(record.data_offset, record.compressed_size)
        if record.method == STORED and region.size <= _MAX_INERT_BYTES and _INERT_CONTENTS.fullmatch(region.head):
            return
        local_name = record.name.removeprefix(f"{archive.folder}/")
        if piece.depth:  # an archive of torch.save in an archive of torch.export
            is_usual = local_name in _USUAL_PICKLES and not piece.hidden
        else:
            is_usual = (
                local_name in _USUAL_PICKLES
                or _TORCHSCRIPT_PICKLES.fullmatch(local_name) is not None
                or use is LoaderUse.PICKLE
            )
        is_loaded = use is LoaderUse.PICKLE and not piece.depth
        # zipfile ends a name at a NUL.
        is_pickle = is_loaded or _PICKLE_SUFFIX.search(record.name.partition("\0")[0]) is not None
        is_storage = use is LoaderUse.STORAGE and not piece.depth
        self._add_member(
            Piece(region, name, piece.depth, is_pickle, not is_usual, is_storage, piece.records),
            deflated=record.method != STORED,
            # torch.hub takes any file that ends as a zip with one member, and gives the member to torch.load.
            is_only_record=len(archive.records) == 1 and not piece.depth,
        )
        if use is LoaderUse.BYTECODE:
            self.code.scan_bytecode(self._read_code(piece, record, name), name)
        elif use is LoaderUse.OLD_SCRIPT:
            why = "statecli cannot read the code of TorchScript files from torch 1.0"  # which may be in any record
            self.code.report_unread_code(self._read_code(piece, record, name), name, why)
        elif use is LoaderUse.PROGRAM and not piece.depth:  # torch loads no program in an archive inside an archive
            self.code.scan_program(self._read_code(piece, record, name), name)

    def _read_code(self, piece: Piece, record: Record, name: str) -> Region:
        """Return the content of a code record; report a record that zlib cannot inflate, because torch may."""
        region = piece.region.get_part(record.data_offset, record.compressed_size)
        if record.method == STORED:
            return region
        inflated, reason = inflate(region, self.steps)
        if reason:
            self.code.report_unread_code(region, name, reason)
        return inflated

    def _add_member(
        self, piece: Piece, *, deflated: bool, is_only_record: bool = False, is_salvaged: bool = False
    ) -> None:
        """Queue a record that is a pickle, begins like a pickle, or is the only record of its archive."""
        region, name, is_pickle = piece.region, piece.where, piece.is_pickle
        reason, opening = None, b""
        self.steps.take(Budget.PIECES)
        if is_only_record:
            self._scan_lone_tar(region, name, deflated)
        if deflated:
            # A record that a loader opens is scanned even if it begins like an array, because its end may be an
            # archive.
            if not is_pickle and any(
                is_plain_array(inflate_beginning(region, size, self.steps))
                for size in (REGION_HEAD_BYTES, ARRAY_HEADER_BYTES)
            ):
                return
            # A storage that does not begin like a pickle is not inflated further, because each inflated record costs
            # time.
            opening = inflate_beginning(region, FIRST_WINDOW_BYTES, self.steps, FIRST_WINDOW_BYTES + 1)
            if opening and not (is_pickle or is_only_record or may_be_pickle(name, opening, len(opening))):
                return
            region, reason = inflate(region, self.steps)
            self.steps.take(Budget.BYTES, region.size)
        is_archive = region.head.startswith(ZIP_START)
        piece = piece._replace(region=region, depth=piece.depth + is_archive)
        if is_pickle and not is_archive and not is_salvaged and ends_as_zip(region):
            # The reader of `torch._C._pickle_load_obj` looks for the last end record, whatever the first bytes are.
            self.result.add_unread(
                piece,
                "the record ends with a zip archive; some programs load this archive, others load the data before it",
            )
            self._scan_archive(piece._replace(hidden=True, depth=piece.depth + 1))
        if is_pickle or is_only_record or (reason and not opening) or may_be_pickle(name, region.head, region.size):
            if reason:
                self.result.add_unread(piece, reason)
            self.pieces.append(piece)

    def _scan_lone_tar(self, region: Region, name: str, deflated: bool) -> None:
        """Scan an archive's only record as a tar: torch.hub gives the record to torch.load, which tries tar first."""
        # `inflate_beginning` returns at least half of the size, which is one block, and inflates an honest array no
        # further.
        head = inflate_beginning(region, 2 * tar_archive.BLOCK, self.steps) if deflated else region.head
        if tar_archive.parse_header(head[: tar_archive.BLOCK]) is not None:
            content = inflate(region, self.steps)[0] if deflated else region
            self._scan_tar(Piece(content, name, 0, is_pickle=True, hidden=False))

    def _salvage(self, piece: Piece, why: str) -> None:
        """Report why the archive's directory cannot be read, and queue every record that has a local header."""
        region, at, limit = piece.region, 0, self._get_read_limit()
        searched_region = region.get_part(0, limit) if region.size > limit else region
        part = f" in the first {limit:,} bytes" if region.size > limit else ""
        self.result.add_unread(piece, f"{why}; {_SEARCHED_PART}{part}")
        is_other_format = self.file_region.head[:1] == b"\x80" or safetensors.sniff("", self.file_region.head)
        usual_names = set() if piece.depth or is_other_format else set(_USUAL_PICKLES)
        while (at := find_local_header(searched_region, at)) >= 0 and len(self.pieces) < Budget.PICKLES.limit:
            if at + _LOCAL_HEADER.size > region.size:
                break
            fields = _LOCAL_HEADER.unpack(region.read(at, _LOCAL_HEADER.size))
            start = at + _LOCAL_HEADER.size + fields[-2] + fields[-1]
            is_deflated = fields[3] != STORED
            # An empty record, or an archive in the archive: the search finds each of the following headers anyway.
            if start < region.size and (is_deflated or region.read(start, len(ZIP_START)) != ZIP_START):
                raw = region.read(at + _LOCAL_HEADER.size, fields[-2])
                following_region = region.get_part(start, region.size - start)
                name = str(raw, "utf-8", "backslashreplace")
                base_name = name.rpartition("/")[2]
                is_pickle = _PICKLE_SUFFIX.search(name) is not None
                member = Piece(following_region, name, piece.depth, is_pickle, base_name not in usual_names)
                self._add_member(member, deflated=is_deflated, is_salvaged=True)
                usual_names.discard(base_name)
            at += 4


def _is_harmful(pickle: ScannedPickle, is_script: bool) -> bool:
    """Return True if loading the pickle calls a name with a known harm, or uses harmful data."""
    if pickle.doer:
        return any(mention.misuse for mention in pickle.names)
    names = (known_names.find_harm(mention) for mention in pickle.names)
    is_class = not is_script and any(mention.module.partition(".")[0] == "__torch__" for mention in pickle.names)
    return is_class or any(names) or any(hazard.is_error for hazard in pickle.hazards)


def _mark_loaded_by_torch(pickles: list[ScannedPickle], file_region: Region) -> list[ScannedPickle]:
    """Set `by_torch_load` on the pickles that `torch.load` unpickles if it loads the file.

    The pickles are `data.pkl` of an archive without `constants.pkl` (torch.jit.load reads an archive with
    `constants.pkl`), or the first five pickles of a legacy file.
    """
    visible = [n for n, pickle in enumerate(pickles) if not pickle.hidden and pickle.doer is None]
    if file_region.head.startswith(ZIP_START):
        is_script = any(pickles[n].where.lower().endswith("/constants.pkl") for n in visible)
        loaded_by_torch = [n for n in visible if not is_script and re.fullmatch(r"[^/]+/data\.pkl", pickles[n].where)]
    else:
        loaded_by_torch = visible[:_LEGACY_PICKLES] if torch_legacy.sniff("", file_region.head) else []
    for n in loaded_by_torch:
        pickles[n] = structs.replace(pickles[n], by_torch_load=True)
    return pickles


def _explain_unread(scanner: Scanner, error: MalformedError | None) -> str | None:
    if error is None:
        return None
    is_joblib = any(name.qualified == _JOBLIB_ARRAY for name in scanner.globals.values())
    return _JOBLIB_REASON if is_joblib else str(error)


def _read_cache_key(region: Region, use: RecordUse) -> tuple[RecordUse, bytes] | None:
    """Return a small pickle's cache key; else None. Pickles are cached because many tensors have equal pickles.

    The key has the bytes, and the use of the pickle by a program according to the record's name.
    """
    if region.base is None or region.size > ARRAY_HEADER_BYTES or use.is_example:
        return None
    return use, region.read(0, region.size)


def _describe_archive(piece: Piece, part: Region) -> str:
    return f"{piece.where}, the archive at byte {part.span.offset}"
