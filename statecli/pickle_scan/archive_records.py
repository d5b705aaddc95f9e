"""Classify the records of an archive by the way in which torch's loaders use them.

`torch.export.load` unpickles every record below `data/` that a configuration does not declare as a plain storage, and
loads every record below `models/` as a program, under any name. The loader of AOTInductor extracts everything below
`data/aotinductor` and `data/constants`, and compiles or opens the files found there. torch.package imports any Python
file and unpickles any record of an archive with a list of external modules, even if the archive has another format too.
Names are compared without case and up to a NUL, because torch's zip reader ignores case and takes C strings. Sources:
torch/export/pt2_archive/_package.py, torch/export/__init__.py (`load`), torch/package/package_importer.py and
torch/csrc/inductor/aoti_package/model_package_loader.cpp of torch 2.13; torch/csrc/jit/serialization/import.cpp.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Mapping, Set
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage import json_object
from statecli.storage.zip_archive import Archive
from statecli.storage.zip_directory import Record

#: Largest configuration of weights or constants that is read, in bytes.
MAX_CONFIG_BYTES = 128 * 2**20


class LoaderUse(Enum):
    """Ways in which torch's loaders use a record of an archive."""

    #: Unpickled by torch.load or pickle.loads, from the first byte on.
    PICKLE = auto()
    #: Storage whose bytes torch copies.
    STORAGE = auto()
    #: Program of torch.export.
    PROGRAM = auto()
    #: Source code of TorchScript.
    SCRIPT = auto()
    #: Operators of the lite interpreter.
    BYTECODE = auto()
    #: Archive of TorchScript written by torch 1.0, whose code may be in any record.
    OLD_SCRIPT = auto()
    #: Extracted, compiled and opened as a library by AOTInductor.
    COMPILED = auto()
    #: Python module that torch.package runs when any record of the archive imports it.
    MODULE = auto()
    #: Not opened by any known loader.
    OTHER = auto()


_FORMAT = "archive_format"
_CONFIG = compile_on_use(r"data/(weights|constants)/.*_\1_config\.json", re.DOTALL)
_PAYLOAD = compile_on_use(r"data/(?:weights|constants|sample_inputs)/.*", re.DOTALL)
#: Archives of torch.save in a plain zip, written at its top level by torch 2.7 and older.
_OLD_PAYLOAD = compile_on_use(r"serialized_(?:state_dict|constants|example_inputs)\.(?:pt|json)")
_OLD_PROGRAM = "serialized_exported_program.json"
_PROGRAMS = "models/"
#: Prefixes of compiled records. They have no slash at the end, because the loader compares them in this form.
_COMPILED = "data/aotinductor"
_COMPILED_CONSTANTS = "data/constants"
#: Words in these prefixes; a record name may have them in upper or lower case.
_COMPILED_WORDS = ("aotinductor", "constants")
#: Suffixes of the files that the loader of AOTInductor compiles, links or opens.
_MACHINE_CODE = compile_on_use(r"\.(?:so|dll|dylib|pyd|cpp|o|obj)\Z")
_SCRIPT = compile_on_use(r"(?:\.data/ts_code/(?:.+/)?)?code/.+\.py", re.DOTALL)
#: Name of a storage of torch.save, in a folder whose name has no character that loaders read as another folder or as
#: the end of the name.
_NUMBERED_STORAGE = compile_on_use(r"[^/\\\0]+/data/[0-9]+")
#: Records that torch.export.load unpickles before it reads a configuration.
_ALL_TENSORS = compile_on_use(r"data/(?:weights|constants)/.*\.pt", re.DOTALL)
#: Record that makes PackageImporter accept any archive; and the folder from which it never takes modules or objects.
_PACKAGE = ".data/extern_modules"
_NOT_PACKAGED = ".data/"
#: Prefix of the names of constants that are storages; all other constants are objects.
_TENSOR_CONSTANT = "tensor_"


class RecordUses(NamedTuple):
    """Use of each record of an archive by torch's loaders. `unreadable_config`: why a configuration is unreadable.

    `zeros` is the number of elements in an exported program's tensors with empty records, which torch fills with zeros.
    `numbered_storages` are the names of storages written by torch.save; their use is `LoaderUse.OTHER`.
    """

    use_of: Callable[[Record], LoaderUse]
    unreadable_config: str | None
    zeros: int
    numbered_storages: Set[str]


def classify_records(archive: Archive) -> RecordUses:
    """Return how loaders use each record. If a configuration is unreadable, treat all except code as pickles."""
    folder = _normalize_name(f"{archive.folder}/")
    numbered_storages = _list_numbered_storages(archive)
    names = {
        name: _normalize_name(name).removeprefix(folder) for name in archive.records if name not in numbered_storages
    }
    exported = _FORMAT in names.values()
    packaged = _PACKAGE in names.values()
    declared, unreadable_config = _read_declared(archive, names) if exported else (_Declared(set(), set(), {}), None)
    if packaged or declared is None:  # a loader may unpickle any record of these archives
        names.update((name, _normalize_name(name).removeprefix(folder)) for name in numbered_storages)
        numbered_storages = frozenset()

    def use_of(record: Record) -> LoaderUse:
        if record.name in numbered_storages:
            return LoaderUse.OTHER
        name = names[record.name]
        if _is_compiled(record.name):
            return LoaderUse.COMPILED
        if name == _OLD_PROGRAM or (exported and name.startswith(_PROGRAMS)):
            return LoaderUse.PROGRAM
        script = _classify_script_record(name)
        if packaged and not name.startswith(_NOT_PACKAGED):
            otherwise = script if script in (LoaderUse.BYTECODE, LoaderUse.OLD_SCRIPT) else LoaderUse.PICKLE
            return LoaderUse.MODULE if name.endswith(".py") else otherwise
        if declared is None:  # the lite interpreter ignores the configuration
            return LoaderUse.PICKLE if script is LoaderUse.OTHER else script
        if name in declared.objects or _OLD_PAYLOAD.fullmatch(name):
            return LoaderUse.PICKLE
        if exported and _ALL_TENSORS.fullmatch(name):
            return LoaderUse.PICKLE
        if exported and _PAYLOAD.fullmatch(name) and not _CONFIG.fullmatch(name):
            return LoaderUse.STORAGE if name in declared.storages else LoaderUse.PICKLE
        return script

    zeros = sum(declared.zeros.values()) if declared is not None else 0
    return RecordUses(use_of, unreadable_config, zeros, numbered_storages)


def _list_numbered_storages(archive: Archive) -> Set[str]:
    """Return the names of records like `<folder>/data/0`: torch.save gives such names to storages."""
    is_numbered, prefix = _NUMBERED_STORAGE.fullmatch, f"{archive.folder}/data/"
    return {name for name in archive.records if is_numbered(name) and name.startswith(prefix)}


def _classify_script_record(name: str) -> LoaderUse:
    if _SCRIPT.fullmatch(name):
        return LoaderUse.SCRIPT
    return {"bytecode.pkl": LoaderUse.BYTECODE, "model.json": LoaderUse.OLD_SCRIPT}.get(name, LoaderUse.OTHER)


def _is_compiled(name: str) -> bool:
    """Return True if AOTInductor's loader compiles, links or opens the record. `name` includes the archive's folder.

    The archive's folder is the name of the first record up to a slash, or the whole name without a slash. The loader
    reads consecutive slashes as one slash.
    """
    if not any(word in name.lower() for word in _COMPILED_WORDS):  # true for nearly all names
        return False
    name = re.sub(r"[\\/]+", "/", _normalize_name(name))
    return _COMPILED in name or (_COMPILED_CONSTANTS in name and _MACHINE_CODE.search(name) is not None)


def _normalize_name(name: str) -> str:
    """Return a record's name as torch's zip reader compares names: up to the first NUL, with ASCII in lower case."""
    name = name.partition("\0")[0]
    return name.lower() if name.isascii() else name.translate(_ASCII_LOWER_CASE)


#: Translation of ASCII letters to lower case; torch's reader leaves all other letters.
_ASCII_LOWER_CASE = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


class _Declared(msgspec.Struct, frozen=True):
    """Records named in the configurations of weights and constants; the names are normalized as torch compares them.

    `zeros` has the number of elements of each tensor whose record is empty, by folder and key.
    """

    storages: set[str]
    objects: set[str]
    zeros: dict[tuple[str, str], int]


def _read_declared(archive: Archive, names: Mapping[str, str]) -> tuple[_Declared | None, str | None]:
    """Return (records that the configurations declare, None), or (None, reason) for an unreadable configuration.

    `names`: the records' names below the archive's folder, as torch compares names, without numbered storages.
    """
    declared = _Declared(set(), set(), {})
    empty = {name for record_name, name in names.items() if not archive.records[record_name].size}
    for record_name, own_name in names.items():
        record, config = archive.records[record_name], _CONFIG.fullmatch(own_name)
        if config is None:
            continue
        try:
            document = json_object.parse_unique_object(archive.read(record, MAX_CONFIG_BYTES), record.name)
        except UnreadableError as error:
            return None, str(error)
        entries = document.get("config")
        for key, entry in entries.items() if type(entries) is dict else ():
            name = _resolve_payload(config[1], entry)
            if name in empty:
                declared.zeros[config[1], key] = _count_elements(entry.get("tensor_meta"))
            if name is not None:
                (declared.storages if _is_storage(config[1], entry) else declared.objects).add(name)
    return declared, None


def _resolve_payload(folder: str, entry: object) -> str | None:
    """Return the normalized path of the record named by an entry of a configuration; None if the entry has no name."""
    name = entry.get("path_name") if type(entry) is dict else None
    return _normalize_name(posixpath.join(f"data/{folder}/", name)) if type(name) is str else None


def _is_storage(folder: str, entry: dict[str, Any]) -> bool:
    is_tensor = folder == "weights" or entry["path_name"].startswith(_TENSOR_CONSTANT)
    return is_tensor and not entry.get("use_pickle")


def _count_elements(meta: object) -> int:
    """Return the number of elements of a tensor, from its `tensor_meta` in a configuration."""
    sizes = meta.get("sizes") if type(meta) is dict else None
    numbers = [size.get("as_int") if type(size) is dict else None for size in sizes] if type(sizes) is list else []
    return math.prod(number for number in numbers if type(number) is int and number >= 0)
