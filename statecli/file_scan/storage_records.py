"""Find storages whose size in the pickle differs from the record's size. torch's C++ reader does not check this."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from statecli.core.dtypes import ELEMENT_BITS, SCRIPT_STORAGE_DTYPES
from statecli.pickle_scan.script_types import ScriptTypes
from statecli.pickles.nodes import Global, Persistent, Value

_SUFFIX = ".pkl"
#: Folder of the storages of bytecode.pkl.
_CONSTANTS = "constants"
#: Pickle whose storages may be empty: torch.jit.save writes the example inputs of a trace without their values, and
#: torch.jit.load does not read them.
_EMPTY_STORAGE_PICKLE = "traced_inputs.pkl"
#: Modules of storage classes in pickles; torch's reader in C++ knows only the first.
_STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")


class ArchiveRecords(msgspec.Struct, frozen=True):
    """Name of a pickle's record, and the sizes of all records in the archive, keyed by lower-case name.

    `types` are the classes of a TorchScript archive, None of other archives.
    """

    record_name: str
    sizes: Mapping[str, int]
    types: ScriptTypes | None = None


class Misfit(msgspec.Struct, frozen=True):
    """Storage whose size in the pickle differs from its record's size. `claimed` is -1 for an unknown storage class."""

    record: str
    claimed: int
    recorded: int


def find_misfits(storages: Iterable[Persistent], records: ArchiveRecords, *, in_cpp: bool) -> Iterator[Misfit]:
    """Yield the storages whose size in the pickle differs from the record's size. `in_cpp`: the reader is in C++.

    `torch.load` compares both. `torch.jit.load` and `torch.export.load` (torch/csrc/jit/serialization/unpickler.cpp,
    opcode BINPERSID) make a storage of the claimed size over the record, so that its tensor reads and writes other
    memory of the process. Storages in keys of dicts, and in other values where no reader looks for tensors, count too.
    """
    pickle_name = records.record_name.lower()
    if not pickle_name.endswith(_SUFFIX):
        return
    modules = _STORAGE_MODULES[:1] if in_cpp else _STORAGE_MODULES
    is_empty_allowed = posixpath.basename(pickle_name) == _EMPTY_STORAGE_PICKLE
    folders = (pickle_name.removesuffix(_SUFFIX), posixpath.join(posixpath.dirname(pickle_name), _CONSTANTS))
    checked: set[Value] = set()
    sizes, first_folder, bits_by_class = records.sizes, folders[0], dict[int, int | None]()
    for storage in storages:
        pid = storage.pid if type(storage.pid) is tuple else ()
        if len(pid) < 5 or type(pid[1]) is not Global or type(pid[2]) is not str or type(pid[4]) is not int:
            continue
        description = (id(pid[1]), pid[2], pid[4])
        if description in checked:
            continue
        checked.add(description)
        if id(pid[1]) not in bits_by_class:
            # torch's reader in C++ uses the number of any other name as a dtype.
            dtype = SCRIPT_STORAGE_DTYPES.get(pid[1].name) if pid[1].module in modules else None
            bits_by_class[id(pid[1])] = ELEMENT_BITS[dtype] if dtype is not None else None
        bits = bits_by_class[id(pid[1])]
        claimed = pid[4] * bits // 8 if bits is not None else -1
        key = pid[2] if pid[2].isdecimal() else pid[2].partition("\0")[0].lower()
        name = f"{first_folder}/{key}"
        if sizes.get(name) == claimed:
            continue
        names = [f"{folder}/{key}" for folder in folders]
        record = next((name for name in names if name in sizes), None)
        if record is None or sizes[record] == claimed or (is_empty_allowed and not sizes[record]):
            continue
        yield Misfit(record, claimed, sizes[record])


def is_of_script(records: ArchiveRecords) -> bool:
    """Return True if the pickle is in a TorchScript archive, which torch reads in C++."""
    return f"{posixpath.dirname(records.record_name.lower())}/{_CONSTANTS}{_SUFFIX}" in records.sizes
