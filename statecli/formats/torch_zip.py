"""What `torch.save` writes since torch 1.6: a zip archive with a pickle of the object and a record for each storage.

All records lie in one top folder: `data.pkl`, `data/0`, `data/1`…, `version`, and in newer files `byteorder`,
`.format_version`, `.storage_alignment` and `.data/serialization_id`. Sources: torch/serialization.py (`_save`,
`_load`) and caffe2/serialize/inline_container.cc of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import ByteRange, ModelState, Oddity, TensorData
from statecli.formats.torch.archive import (
    check_folder,
    check_version,
    gaps_of,
    idle_of,
    pickle_of,
    prefetch,
    record_of,
    storages_of,
    unused_of,
)
from statecli.formats.torch.objects import state_of
from statecli.formats.torch.tensors import Decoder
from statecli.pickles.machine import Pickle
from statecli.storage import checkpoint_folder, files
from statecli.storage.source import Source
from statecli.storage.zip_archive import Archive

NAME = "torch-zip"

#: What torch.save writes beside the storages, in one version or another.
_RECORDS = ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id")


def sniff(path: str, head: bytes) -> bool:
    """Whether it starts as a zip archive does, and is no row of them. `read` says what other kind of archive it is."""
    return head.startswith(b"PK\3\4") and not files.name(path).endswith(".distcp")


def read(path: str, section: str | None = None) -> ModelState:
    """The state in one archive. Raises UnreadableError for a zip that is none of torch.save, or a damaged one."""
    pickle, storages, oddities = contents(path)
    state = state_of(pickle, storages, target=path, format=NAME, oddities=oddities, wanted=section)
    if not any(tensor.damage for tensor in state.tensors):
        _check_storages(pickle, storages)
    return state


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
        prefetch(archive, "data")
        check_folder(archive)
        check_version(archive)
        storages = storages_of(archive, base)
        pickle = pickle_of(archive)
        return pickle, storages, [*archive.oddities, *_unused(archive, pickle, storages)]


def _check_storages(pickle: Pickle, storages: dict[str, ByteRange]) -> None:
    """Refuse a storage that contradicts its record: torch.load reads it, whether or not a tensor of the tree has it."""
    decoder, checked = Decoder(storages), set[tuple[int, ...]]()
    for storage in pickle.persistent:
        pid = storage.pid
        if type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage":
            identity = tuple(id(part) if type(part) is not int else part for part in pid)
            if identity not in checked:
                checked.add(identity)
                decoder.check_storage(storage, "data.pkl")


def _check_kind(archive: Archive) -> None:
    """Refuse by name the other archives that are zips. Their first records tell; their folder rules differ."""
    records = archive.records
    ends = {name.rpartition("/")[2] for name in records}
    if "constants.pkl" in ends:
        raise UnreadableError("is a TorchScript archive (torch.jit.save), where one of torch.save is needed")
    if "archive_format" in ends or "serialized_exported_program.json" in ends:
        raise UnreadableError("is a torch.export archive (.pt2), where one of torch.save is needed")
    if record_of(archive, "data.pkl") is not None:
        return
    if records and all(name.endswith(".npy") for name in records):
        raise UnreadableError("is a numpy archive (.npz), where one of torch.save is needed")
    if record_of(archive, "version") is not None:
        raise MalformedError("holds no data.pkl: the save did not finish; save it again")
    if "data.pkl" in ends:
        raise MalformedError("records outside the archive's folder: its data.pkl is not in the folder of the first")
    held = [name for name in records if not name.endswith("/")]
    packed = [name for name in held if name.endswith((*checkpoint_folder.WEIGHTS, ".npz", ".zip", ".tar"))]
    if packed:
        raise UnreadableError(f"is a zip archive around {quoting.names(packed)}: unpack it first (unzip)")
    raise UnreadableError(f"is a zip archive, but not of torch.save: it holds {quoting.names(held) or 'no file'}")


def _unused(archive: Archive, pickle: Pickle, storages: dict[str, ByteRange]) -> Iterator[Oddity]:
    """Bytes of the archive that loading it never looks at: storages, other records, what lies between records."""
    yield from idle_of(pickle, storages)
    yield from unused_of(archive, *_RECORDS, "data/")
    yield from gaps_of(archive)
