"""The format of `torch.save` since torch 1.6: a zip archive with a pickle of the object and a record per storage.

All records lie in one top folder: `data.pkl`, `data/0`, `data/1`…, `version`, and in newer files `byteorder`,
`.format_version`, `.storage_alignment` and `.data/serialization_id`. Sources: torch/serialization.py (`_save`,
`_load`) and caffe2/serialize/inline_container.cc of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import ByteRange, ModelState, Oddity, TensorData
from statecli.formats.torch.archive import (
    check_folder,
    check_version,
    find_gaps,
    find_misplaced_storage,
    find_record,
    find_unused_records,
    find_unused_storages,
    is_big_endian,
    locate_storages,
    prefetch,
    read_pickle,
)
from statecli.formats.torch.objects import build_state
from statecli.formats.torch.reading import Contents
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.pickles.nodes import Pickle
from statecli.storage import checkpoint_folder, files
from statecli.storage.byte_source import ByteSource
from statecli.storage.zip_archive import Archive

NAME = "torch-zip"
TRAITS = FormatTraits(may_hold_settings_alone=True)

#: Names of records other than storages that some version of torch.save writes.
_RECORDS = ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id")
#: Names of records that only programs have.
_PROGRAM_RECORDS = ("constants.pkl", "archive_format", "serialized_exported_program.json")


def sniff(path: str, head: bytes) -> bool:
    """Return whether the file starts as a zip archive. `read` refuses other kinds of zip archives."""
    return head.startswith(b"PK\3\4") and not files.get_name(path).endswith(".distcp")


def read(path: str, section: str | None = None) -> ModelState:
    """Read the state of one archive. Raises UnreadableError for other zip archives and damaged archives."""
    pickle, storages, oddities = read_contents(path)
    return build_state(
        pickle,
        storages,
        target=path,
        format=NAME,
        traits=TRAITS,
        oddities=oddities,
        requested_section=section,
        reads_all_storages=True,
    )


def read_single(path: str, base: int, length: int) -> TensorData:
    """Read the single tensor of a nested archive, which has `length` bytes from byte `base` of the file.

    Raises as `read` does, and MalformedError for an archive with anything else.
    """
    pickle, storages, _ = read_contents(path, base, length)
    tensor = TensorDecoder(storages, persistent=pickle.persistent).tensor(pickle.root, "tensor")
    if tensor is None or tensor.data is None:
        raise MalformedError("contains no tensor with values")
    return tensor.data


def read_contents(path: str, base: int = 0, length: int | None = None) -> Contents:
    """Return an archive's pickle, storages and oddities. Keep no central directory: it takes 30 MB per 100,000 records.

    `base` and `length` are the position and size of a nested archive.
    """
    with ByteSource(path, base, length) as source:
        archive = Archive(source)
        _check_kind(archive)
        prefetch(archive, "data")
        check_folder(archive)
        check_version(archive)
        storages = locate_storages(archive, base, big_endian=is_big_endian(archive))
        pickle = read_pickle(archive)
        oddities = [*archive.oddities, *_find_unused(archive, pickle, storages)]
        if not base:  # torch opens a nested archive as a file of its own
            oddities += find_misplaced_storage(archive, pickle)
        return Contents(pickle, storages, oddities)


def _check_kind(archive: Archive) -> None:
    """Refuse zip archives that torch.save did not write. The names of the records show the kind of archive."""
    records = archive.records
    ends = {name.rpartition("/")[2] for name in records if not name[-1:].isdigit()}  # skip numbers: nearly all names
    if ends.intersection(_PROGRAM_RECORDS):
        raise UnreadableError("is a program of TorchScript or torch.export; an archive of torch.save is needed")
    if find_record(archive, "data.pkl") is not None:
        return
    if find_record(archive, "version") is not None:
        raise MalformedError("contains no data.pkl: the save did not finish; save the checkpoint again")
    if "data.pkl" in ends:
        raise MalformedError(
            "its record data.pkl is not in the folder of the archive's first record, where torch looks for data.pkl; "
            "save the checkpoint again"
        )
    entries = [name for name in records if not name.endswith("/")]
    packed_names = [name for name in entries if name.endswith((*checkpoint_folder.WEIGHTS, ".npz", ".zip", ".tar"))]
    if packed_names:
        raise UnreadableError(f"is a zip archive that contains {quoting.names(packed_names)}: unpack it first (unzip)")
    raise UnreadableError(
        f"is a zip archive, but torch.save did not write it: it contains {quoting.names(entries) or 'no file'}"
    )


def _find_unused(archive: Archive, pickle: Pickle, storages: dict[str, ByteRange]) -> Iterator[Oddity]:
    """Yield oddities for bytes of the archive that no loader reads: storages, other records, gaps between records."""
    yield from find_unused_storages(pickle, storages)
    yield from find_unused_records(archive, *_RECORDS, "data/")
    yield from find_gaps(archive)
