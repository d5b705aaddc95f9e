"""What `torch.save` writes since torch 1.6: a zip archive with a pickle of the object and a record for each storage.

All records lie in one top folder: `data.pkl`, `data/0`, `data/1`…, `version`, and in newer files `byteorder`,
`.format_version`, `.storage_alignment` and `.data/serialization_id`. Sources: torch/serialization.py (`_save`,
`_load`) and caffe2/serialize/inline_container.cc of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from statecli.errors import MalformedError, UnreadableError
from statecli.formats import _shown
from statecli.formats._pickle import Pickle, load
from statecli.formats._source import Source
from statecli.formats._tensors import Decoder
from statecli.formats._torch_objects import state_of
from statecli.formats._zip import MAX_PADDING, STORED, Archive, Record
from statecli.state import ByteRange, ModelState, Oddity, Place, TensorData

NAME = "torch-zip"

#: Bytes of data.pkl; torch writes 115 to 128 for each tensor.
MAX_PICKLE = 256 * 2**20
#: The newest file format that torch 2.13 reads (kMaxSupportedFileFormatVersion).
MAX_VERSION = 10
_MAX_WORD = 64
#: What torch.save writes beside the storages, in one version or another.
_RECORDS = ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id")


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Whether it starts as a zip archive does. `read` says what other kind of archive it is."""
    return head.startswith(b"PK\3\4")


def read(path: str, section: str | None = None) -> ModelState:
    """The state in one archive. Raises UnreadableError for a zip that is none of torch.save, or a damaged one."""
    pickle, storages, oddities = contents(path)
    return state_of(pickle, storages, target=path, format=NAME, oddities=oddities, wanted=section)


def single(path: str, base: int, length: int) -> TensorData:
    """The tensor that an archive of `length` bytes inside the file, from byte `base`, holds by itself.

    Raises as `read` does, and MalformedError for one that holds anything else.
    """
    pickle, storages, _ = contents(path, base, length)
    tensor = Decoder(storages).tensor(pickle.root, "tensor")
    if tensor is None or tensor.data is None:
        raise MalformedError("holds no tensor with values")
    return tensor.data


def contents(path: str, base: int = 0, length: int | None = None) -> tuple[Pickle, dict[str, ByteRange], list[Oddity]]:
    """All that is needed of the archive; its directory, 30 MB for 100,000 records, is free again afterwards.

    `base` and `length` say where it is in a file that holds it among others.
    """
    with Source(path, base, length) as source:
        archive = Archive(source)
        _check_kind(archive)
        _check_folder(archive)
        _check_version(archive)
        storages = _storages(archive, base, _is_big_endian(archive))
        pickle = _pickle(archive)
        return pickle, storages, [*archive.oddities, *_unused(archive, pickle, storages)]


def _record(archive: Archive, name: str) -> Record | None:
    return archive.records.get(f"{archive.folder}/{name}")


def _word(archive: Archive, name: str) -> str | None:
    """The text in a small record; None where there is no such record."""
    record = _record(archive, name)
    if record is None:
        return None
    content = archive.read(record, _MAX_WORD)
    return content.decode("ascii", "backslashreplace").strip()


def _check_kind(archive: Archive) -> None:
    """Refuse by name the other archives that are zips. Their first records tell; their folder rules differ."""
    records = archive.records
    ends = {name.rpartition("/")[2] for name in records}
    if "constants.pkl" in ends:
        raise UnreadableError("is a TorchScript archive (torch.jit.save), which this version does not read")
    if "archive_format" in ends or "serialized_exported_program.json" in ends:
        raise UnreadableError("is a torch.export archive (.pt2), which this version does not read")
    if _record(archive, "data.pkl") is not None:
        return
    if records and all(name.endswith(".npy") for name in records):
        raise UnreadableError("is a numpy archive (.npz), which this version does not read")
    if _record(archive, "version") is not None:
        raise MalformedError("holds no data.pkl: the save did not finish; save it again")
    if "data.pkl" in ends:
        raise MalformedError("records outside the archive's folder: its data.pkl is not in the folder of the first")
    raise UnreadableError("is a zip archive, but not of torch.save")


def _check_folder(archive: Archive) -> None:
    prefix = f"{archive.folder}/"
    for name in archive.records:
        if not name.startswith(prefix):
            raise MalformedError(
                f"records outside the archive's folder: {name!r} is not in {prefix!r}; torch refuses it"
            )


def _check_version(archive: Archive) -> None:
    text = _word(archive, "version")
    if text is None:
        raise MalformedError("holds no version record: torch refuses it; save it again")
    if not (text.isdecimal() and text.isascii()) or int(text) == 0:
        raise MalformedError(f"version record says {text!r}, which is no version")
    if int(text) > MAX_VERSION:
        raise UnreadableError(
            f"version record says {text}: written by a newer torch; statecli knows up to {MAX_VERSION}"
        )
    layout = _word(archive, ".format_version")
    if layout not in (None, "1"):
        archive.oddities.append(
            Oddity("format-version", f".format_version record says {layout!r}, and only '1' is known")
        )


def _is_big_endian(archive: Archive) -> bool:
    """Files older than the record are little-endian: torch on big-endian machines came with it."""
    order = _word(archive, "byteorder")
    if order not in (None, "little", "big"):
        raise MalformedError(f"byteorder record says {order!r}, neither 'little' nor 'big'")
    return order == "big"


def _pickle(archive: Archive) -> Pickle:
    record = archive.records[f"{archive.folder}/data.pkl"]
    if not record.crc32 and record.size:
        archive.oddities.append(Oddity("no-checksums", "data.pkl has no checksum recorded"))
    data = archive.read(record, MAX_PICKLE)
    pickle = load(data)
    if pickle.end < len(data):
        message = f"{len(data) - pickle.end} bytes follow the pickle in data.pkl"
        # Of a compressed record, the bytes behind the pickle are nowhere by themselves.
        place = Place(archive.path, record.data_offset + pickle.end, record.size - pickle.end)
        archive.oddities.append(Oddity("pickle-trailing", message, place=place if record.method == STORED else UNSET))
    return pickle


def _storages(archive: Archive, base: int, big_endian: bool) -> dict[str, ByteRange]:
    """Storage key -> where its bytes are. A recorded checksum of 0 counts for an empty storage only."""
    prefix = f"{archive.folder}/data/"
    skip = len(prefix)
    storages = {}
    for name, record in archive.records.items():
        if not name.startswith(prefix):
            continue
        if record.method != STORED:
            raise MalformedError(f"{name!r} is compressed; re-save it with torch.save")
        crc = record.crc32 if record.crc32 or not record.size else None
        storages[name[skip:]] = ByteRange(archive.path, base + record.data_offset, record.size, crc, big_endian)
    return storages


def _unused(archive: Archive, pickle: Pickle, storages: dict[str, ByteRange]) -> Iterator[Oddity]:
    """Bytes of the archive that loading it never looks at: storages, other records, what lies between records."""
    pids = (one.pid for one in pickle.persistent if type(one.pid) is tuple and len(one.pid) > 2)
    used = {pid[2] for pid in pids if type(pid[2]) is str}
    idle = [key for key, where in storages.items() if key not in used and where.length]
    if idle:
        total, first = sum(storages[key].length for key in idle), storages[idle[0]]
        message = f"{total} bytes are of storages that no tensor uses: {_shown.names([f'data/{key}' for key in idle])}"
        yield Oddity("unused-storages", message, place=Place(first.path, first.offset, first.length))
    yield from _strangers(archive)
    yield from _gaps(archive)


def _strangers(archive: Archive) -> Iterator[Oddity]:
    prefix = f"{archive.folder}/"
    known = {prefix + name for name in _RECORDS}
    records = (one for name, one in archive.records.items() if name not in known)
    others = [one for one in records if one.size and not one.name.startswith(f"{prefix}data/")]
    if others:
        shown = _shown.names([one.name.removeprefix(prefix) for one in others])
        message = f"{sum(one.compressed_size for one in others)} bytes are of records that torch does not know: {shown}"
        first = others[0]
        yield Oddity("unused-records", message, place=Place(archive.path, first.data_offset, first.compressed_size))


def _gaps(archive: Archive) -> Iterator[Oddity]:
    if not archive.spaces:
        return
    alignment = _word(archive, ".storage_alignment") or ""
    padding = int(alignment) if alignment.isascii() and alignment.isdecimal() else 0
    gaps = [(name, place) for name, place in archive.spaces if place.length > padding + MAX_PADDING]
    if gaps:
        (name, place), total = gaps[0], sum(place.length for _, place in gaps)
        behind = _shown.name(name) + (f" and {len(gaps) - 1} other records" if len(gaps) > 1 else "")
        yield Oddity("gap", f"{total} bytes behind {behind} belong to no record", place=place)
