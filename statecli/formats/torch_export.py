"""torch.export: the `.pt2` archive of a program, with the role of each tensor in the module.

A zip archive in torch's layout, `archive_format` "pt2". `models/M.json` is program M, whose signature names parameters,
buffers (persistent or not) and lifted constants. `data/weights/M_weights_config.json`, and the same file for
`constants`, locate each tensor: dtype, sizes, strides and a record. The record is a plain storage or an archive of
torch.save (`use_pickle`). torch 2.8 wrote one archive of torch.save for all tensors (`data/weights/M.pt`). torch 2.7
and older wrote a plain zip of `serialized_exported_program.json`, `serialized_state_dict.pt` and other records. Example
inputs (`sample_inputs`) are not state, and not listed. Sources: torch/export/pt2_archive/_package.py and
torch/_export/serde/schema.py of torch 2.13.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Evidence, Kind, ModelState, Oddity, Scalar, Settings, StateDict, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.formats import torch_zip
from statecli.formats.torch.archive import (
    check_folder,
    check_version,
    find_gaps,
    find_record,
    find_unused_records,
    locate_storages,
    read_word,
    refuse_big_endian,
)
from statecli.formats.torch.exported_metadata import (
    REBUILD_EMPTY,
    build_call,
    build_node,
    describe_difference,
    refuse_other_type,
)
from statecli.formats.torch.exported_program import (
    Role,
    collect_roles,
    collect_stated_metas,
    describe_program,
    read_major_version,
)
from statecli.formats.torch.objects import build_info, name_globals
from statecli.formats.torch.reading import MAX_ROWS, DecodedTensor, Reading, build_row, mark_damaged
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import get_text_items
from statecli.pickles.nodes import Obj
from statecli.storage import json_object as _json
from statecli.storage.byte_source import ByteSource, add_subject_to_errors
from statecli.storage.zip_archive import Archive, mentions
from statecli.storage.zip_directory import STORED, Record

NAME = "torch-export"
TRAITS = FormatTraits(
    is_program=True,
    never_mapped="torch.export never memory-maps its archives, so alignment does not matter",
    settings_vocabulary=NAME,
    settings_describe_program=True,
)

#: Maximum size of a program's JSON in bytes; a model of a thousand layers takes 30 MB.
MAX_JSON_BYTES = 128 * 2**20
#: The only known `archive_version`. An archive without a version was written before torch recorded it.
ARCHIVE_VERSION = "0"
#: Major version of the schema that torch 2.13 writes. torch 2.2 introduced major versions; torch loads version 0 and
#: its own.
SCHEMA_VERSION = 8
#: Names of records that some version of torch writes into the archive.
_RECORDS = (
    *("archive_format", "archive_version", "version", "byteorder", ".format_version", ".storage_alignment"),
    *(".data/version", ".data/serialization_id", "data/", "models/", "extra/", "xl_model_weights/"),
)
_FOLDERS = ("weights", "constants")
_OLD_PROGRAM = "serialized_exported_program.json"
_OLD_PICKLES = ("state_dict", "constants", "example_inputs")
_OLD_RECORDS = (
    *(_OLD_PROGRAM, "version", "extra_files/"),
    *(f"serialized_{part}.{suffix}" for part in _OLD_PICKLES for suffix in ("pt", "json")),
)
_COMPILED = "data/aotinductor/"
#: File with the location of weights or constants.
_PAYLOAD_FILE = compile_on_use(
    r"data/(?P<folder>weights|constants)/(?P<model>.+?)(?:_(?P=folder)_config\.json|\.pt)", re.DOTALL
)
#: Names that torch.export gives to tensors from literals in code; no attribute of a module has such a name.
_LITERAL_NAME = compile_on_use(r"(?:.*\.)?_?(?:lifted_tensor_|_?tensor_constant)\d+", re.DOTALL)
#: Prefixes of constants' records that torch unpickles instead of reading their bytes as a tensor.
_OBJECT_PREFIXES = ("custom_obj_", "opaque_obj_")
_CONSTANT_NOTE = "a constant of the code"


def sniff(path: str, head: bytes) -> bool:
    """Return whether the file is a zip archive with the record `archive_format` or an exported program at its root."""
    return head.startswith(b"PK\3\4") and mentions(path, b"/archive_format", _OLD_PROGRAM.encode())


def read(path: str, section: str | None = None) -> ModelState:  # noqa: ARG001  # sections are programs
    """Read the tensors of each program as a section of its own. The program's signature shows their kinds.

    Raises UnreadableError for an archive of another version, MalformedError for contradictions.
    """
    with ByteSource(path) as source:
        archive = Archive(source)
        archive.prefetch(lambda name: name.endswith(".json") or "/data/" not in name)
        reader = _Reader(archive)
        if _OLD_PROGRAM in archive.records:
            reader.read_old()
        else:
            _check(archive)
            reader.read_new()
        return reader.build_state()


def _check(archive: Archive) -> None:
    check_folder(archive)
    check_version(archive)
    refuse_big_endian(archive)
    kind, version = read_word(archive, "archive_format"), read_word(archive, "archive_version")
    if kind != "pt2":
        raise UnreadableError(f"the archive_format record contains {kind!r}; statecli knows only 'pt2'")
    if version not in (None, ARCHIVE_VERSION):
        raise UnreadableError(
            f"the archive_version record contains {version!r}: a newer torch wrote the file; statecli knows only "
            f"{ARCHIVE_VERSION!r}"
        )


class _Payload(msgspec.Struct):
    """Tensor of the archive. `is_weight` is False for a constant. `is_parameter` is None if it is not recorded."""

    tensor: Tensor
    is_weight: bool
    is_parameter: bool | None = None


_Payloads = dict[str, _Payload]


class _Reader:
    def __init__(self, archive: Archive) -> None:
        self.archive, self.path = archive, archive.path
        self.oddities = archive.oddities
        self.tensors: list[TensorInfo] = []
        self.metadata: dict[str, Scalar] = {}
        self.state_dicts: list[StateDict] = []
        self.globals: list[tuple[str, int]] = []
        #: Number of values in all JSON read so far.
        self.values = 0
        #: Content of each record that is an archive of torch.save, because several names may refer to one record.
        self.singles: dict[str, Tensor | str] = {}
        #: Nodes kept alive, because the decoder identifies calls by their ids.
        self.nodes: list[Obj] = []

    def build_state(self) -> ModelState:
        self.oddities.extend(find_gaps(self.archive))
        if not self.tensors and not any(oddity.kind is OddityKind.NO_TENSORS for oddity in self.oddities):
            self._add_oddity(
                OddityKind.NO_TENSORS.value, "contains no tensor: its programs have no weights and no constants"
            )
        return ModelState(
            self.path,
            NAME,
            tuple(self.tensors),
            tuple(dict.fromkeys(tensor.section for tensor in self.tensors)),
            Settings(self.metadata),
            tuple(self.oddities),
            tuple(dict.fromkeys(self.globals)),
            (),
            tuple(self.state_dicts),
            TRAITS,
        )

    def _add_oddity(self, name: str, message: str, fqn: str | None = None) -> None:
        self.oddities.append(Oddity(name, message, fqn))

    # --- layouts ----------------------------------------------------------------------------------------------------

    def read_old(self) -> None:
        """Read an archive of torch 2.7 and older."""
        program = self._read_json(_OLD_PROGRAM)
        self.oddities.extend(find_unused_records(self.archive, *_OLD_RECORDS, prefix=""))
        payloads: _Payloads = {}
        for part, is_weight in (("state_dict", True), ("constants", False)):
            # Both suffixes, because the first releases named archives of torch.save .json.
            names = [f"serialized_{part}.{suffix}" for suffix in ("pt", "json")]
            record = next((self.archive.records[name] for name in names if name in self.archive.records), None)
            if record is None:
                raise MalformedError(f"contains no {names[0]}: the export did not finish; export the program again")
            self._read_pickled(record, payloads, is_weight=is_weight)
        self._read_program("model", program, payloads)

    def read_new(self) -> None:
        """Read an archive of torch 2.8 and later: any number of programs and compiled libraries."""
        prefix = f"{self.archive.folder}/models/"
        names = [name.removeprefix(prefix) for name in self.archive.records if name.startswith(prefix)]
        models = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        self._check_programs(models)
        for model in models:
            payloads: _Payloads = {}
            for folder in _FOLDERS:
                record = find_record(self.archive, f"data/{folder}/{model}.pt")
                if record is not None:
                    self._read_pickled(record, payloads, is_weight=folder == "weights")
                else:
                    self._read_configured(model, folder, payloads)
            self._read_program(
                model, self._read_json(f"{prefix}{model}.json"), payloads, has_several_models=len(models) > 1
            )
        self._read_compiled()
        self.oddities.extend(find_unused_records(self.archive, *_RECORDS))

    def _check_programs(self, models: list[str]) -> None:
        """Raise MalformedError for weights or constants of a missing program."""
        for name in self.archive.records:
            of = _PAYLOAD_FILE.fullmatch(name.removeprefix(f"{self.archive.folder}/"))
            if of and of["model"] not in models:
                whose = f"{of['folder']} of {quoting.quote(of['model'])}"
                raise MalformedError(
                    f"contains {whose}, but no models/{quoting.name(of['model'])}.json; export the program again"
                )

    def _read_json(self, name: str) -> dict[str, Any]:
        record = self.archive.records.get(name)
        record_name = name.removeprefix(f"{self.archive.folder}/")
        if record is None:
            raise MalformedError(f"contains no {record_name}: the export did not finish; export the program again")
        data = self.archive.read(record, MAX_JSON_BYTES)
        self.values += data.count(b",")
        if self.values > _json.MAX_VALUES:
            raise MalformedError(f"its JSON has more than {_json.MAX_VALUES} values in total, the limit of statecli")
        return _json.parse_unique_object(data, record_name)

    # --- tensors ----------------------------------------------------------------------------------------------------

    def _read_configured(self, model: str, folder: str, payloads: _Payloads) -> None:
        """Read the weights or constants of a program. The program's config file names the record of each tensor."""
        name = f"data/{folder}/{model}_{folder}_config.json"
        entries = self._read_json(f"{self.archive.folder}/{name}").get("config")
        if type(entries) is not dict:
            raise MalformedError(f"{name} has no JSON object under 'config'")
        folder_path = f"data/{folder}"
        storages = {
            f"{folder_path}/{key}": storage
            for key, storage in locate_storages(self.archive, folder=folder_path).items()
        }
        reading, first = Reading(TensorDecoder(storages), self.oddities), dict[str, dict[str, Any]]()
        for fqn, entry in entries.items():
            try:
                tensor = self._read_tensor(fqn, _read_object(entry, fqn, "entry"), folder_path, reading, first)
            except MalformedError as error:
                tensor = mark_damaged(fqn, error)
            if tensor is not None:
                flag = entry.get("is_param") if type(entry) is dict else None
                payload = _Payload(tensor, folder == "weights", flag if type(flag) is bool else None)
                _add_payload(payloads, fqn, payload)

    def _read_tensor(
        self, fqn: str, entry: dict[str, Any], folder_path: str, reading: Reading, first: dict[str, dict[str, Any]]
    ) -> Tensor | None:
        """Return the tensor of an entry, or None for other objects. `first` maps a record to its first tensor_meta."""
        name = entry.get("path_name")
        if type(name) is not str:
            raise MalformedError(f"{fqn}: its path_name is {quoting.value(name)}, not a string")
        for key in ("use_pickle", "is_param"):
            if type(entry.get(key)) is not bool:
                raise MalformedError(f"{fqn}: its {key} is {quoting.value(entry.get(key))}, not a bool")
        if folder_path.endswith("constants") and name.startswith(_OBJECT_PREFIXES):
            self._load_object(fqn, f"{folder_path}/{name}")
            return None
        if entry["use_pickle"]:
            return self._read_single(f"{folder_path}/{name}", fqn)
        meta = _read_object(entry.get("tensor_meta"), fqn, "tensor_meta")
        refuse_other_type(meta, first.setdefault(name, meta), fqn, name)
        node = build_node(meta, f"{folder_path}/{name}", reading, fqn)
        self.nodes.append(node)
        tensor = reading.tensor(node, fqn)
        if tensor is not None and node.cls is REBUILD_EMPTY:
            tensor.note = "saved without values (fake tensor)"
        return tensor

    def _load_object(self, fqn: str, record_name: str) -> None:
        message = f"{quoting.name(fqn)} is an object, not a tensor: statecli does not list its contents ({record_name})"
        self._add_oddity("custom-object", message, fqn)

    def _read_single(self, name: str, fqn: str) -> Tensor:
        """Read a tensor from a nested archive of torch.save, in which torch.export saves tensor subclasses."""
        if name not in self.singles:
            self.singles[name] = self._open_single(name)
        contents = self.singles[name]
        if isinstance(contents, str):
            raise MalformedError(f"{fqn}: {contents}")
        return contents

    def _open_single(self, name: str) -> Tensor | str:
        """Return the tensor in a nested archive, or the reason why it cannot be read."""
        record = find_record(self.archive, name)
        if record is None:
            return f"record {name!r} is not in the file"
        try:
            root, reading = self._read_inner(record)
            return _rename_storage(reading.decoder.require_tensor(root, name, "archive"), name)
        except UnreadableError as error:
            return quoting.append_reason(f"record {name!r}", error)

    def _read_pickled(self, record: Record, payloads: _Payloads, *, is_weight: bool) -> None:
        """Read a record that is an archive of torch.save and has a dict of tensors by name."""
        if not record.size:  # torch wrote None as an empty record
            return
        with add_subject_to_errors(f"record {record.name!r}"):
            root, reading = self._read_inner(record)
        for fqn, node in get_text_items(root).items():
            tensor = reading.tensor(node, fqn)
            if tensor is None:
                self._load_object(fqn, record.name)
            else:
                payload = _Payload(_rename_storage(tensor, record.name), is_weight, tensor.is_parameter or None)
                _add_payload(payloads, fqn, payload)

    def _read_inner(self, record: Record) -> tuple[Any, Reading]:
        """Return the root object of a nested archive, and the `Reading` that decodes its tensors."""
        if record.method != STORED:
            raise MalformedError("is compressed; save the program again with torch")
        pickle, storages, oddities = torch_zip.read_contents(self.path, record.data_offset, record.size)
        reading = Reading(TensorDecoder(storages, persistent=pickle.persistent), self.oddities)
        self.oddities.extend(oddity for oddity in oddities if oddity not in self.oddities)
        self.globals.extend((mention.qualified, mention.position) for mention in pickle.globals)
        name_globals(pickle, reading)
        return pickle.root, reading

    # --- programs ---------------------------------------------------------------------------------------------------

    def _read_program(
        self, model: str, program: dict[str, Any], contents: _Payloads, *, has_several_models: bool = False
    ) -> None:
        """Append the tensor rows of a program in the order of its signature, then the tensors outside the signature."""
        self._check_schema(model, program)
        roles = dict(collect_roles(program))
        for fqn, meta in collect_stated_metas(program):
            if fqn in contents and (difference := describe_difference(contents[fqn].tensor, meta)):
                contents[fqn].tensor = mark_damaged(fqn, MalformedError(f"{fqn}: {difference}"))
        missing_tensors = {
            fqn: mark_damaged(fqn, MalformedError(_MISSING_TENSOR)) for fqn in roles if fqn not in contents
        }
        payloads = {**{fqn: _Payload(tensor, False) for fqn, tensor in missing_tensors.items()}, **contents}
        for fqn in (*roles, *(fqn for fqn in contents if fqn not in roles)):
            self.tensors.append(build_info(_build_row(fqn, payloads[fqn], roles.get(fqn)), model, self.path))
        if len(self.tensors) > MAX_ROWS:
            raise MalformedError(f"contains more than {MAX_ROWS} tensors, the limit of statecli")
        self.state_dicts.append(StateDict(model, is_module=True))
        for key, value in describe_program(program):
            self.metadata[f"{model}.{key}" if has_several_models else key] = value

    def _check_schema(self, model: str, program: dict[str, Any]) -> None:
        """Refuse a program with a newer schema. Note an older schema, because torch 2.13 does not load it."""
        major = read_major_version(program)
        if major is not None and major > SCHEMA_VERSION:
            raise UnreadableError(
                f"program {quoting.quote(model)} has schema_version {major}: a newer torch wrote the program; statecli "
                f"knows only versions up to {SCHEMA_VERSION}"
            )
        if major not in (None, 0, SCHEMA_VERSION):
            message = f"program {quoting.quote(model)} has schema_version {major}"
            self._add_oddity("schema-version", f"{message}, but torch 2.13 loads only {SCHEMA_VERSION}")

    def _read_compiled(self) -> None:
        """Read programs compiled by AOTInductor. Only weights outside the compiled library are listed."""
        prefix = f"{self.archive.folder}/{_COMPILED}"
        files = [name.removeprefix(prefix) for name in self.archive.records if name.startswith(prefix)]
        models = list(dict.fromkeys(name.partition("/")[0] for name in files))
        for model in models:
            if f"{model}/weights_config.json" in files:
                self._read_next_to_library(model, self._read_json(f"{prefix}{model}/weights_config.json"))
        if models:
            count = "1 file is" if len(files) == 1 else f"{len(files)} files are"
            message = f"{count} compiled by AOTInductor ({quoting.names(models)})"
            self._add_oddity(
                "aotinductor", f"{message}; statecli does not list the constants inside the compiled library"
            )
            if not self.tensors:
                self._add_oddity(
                    OddityKind.NO_TENSORS.value,
                    f"has tensors only in the compiled library, which statecli does not read: {message}",
                )

    def _read_next_to_library(self, model: str, config: dict[str, Any]) -> None:
        """Add the weights of a compiled program, which are views of stored tensors (record, shape, strides, offset)."""
        for fqn, view in config.items():
            try:
                tensor = self._build_view(fqn, view)
            except MalformedError as error:
                tensor = mark_damaged(fqn, error)
            row = build_row(fqn, tensor, Kind.PARAMETER, Evidence.ASSUMED)
            self.tensors.append(build_info(row, f"aotinductor.{model}", self.path))

    def _build_view(self, fqn: str, view: object) -> Tensor:
        if type(view) is not list or len(view) != 4 or type(view[0]) is not str:
            raise MalformedError(f"{fqn}: its entry is not a list of record, shape, strides and offset")
        whole = self._read_single(f"data/weights/{view[0]}", fqn)
        if whole.data is None:
            raise MalformedError(f"{fqn}: record {view[0]} does not contain a plain tensor")
        name = f"data/weights/{view[0]}"
        decoder = TensorDecoder({name: whole.data.storage})
        node = build_call(
            whole.dtype, name, whole.data.storage.length, whole.device or "cpu", view[3], view[1], view[2]
        )
        return decoder.require_tensor(node, fqn, "entry")


_MISSING_TENSOR = "the program needs this tensor, but no weight and no constant of the archive has its name"


def _add_payload(payloads: _Payloads, fqn: str, payload: _Payload) -> None:
    if payloads.setdefault(fqn, payload) is not payload:
        raise MalformedError(
            f"{quoting.name(fqn)}: is in both the weights and the constants; expected only one of the two"
        )


def _read_object(node: object, fqn: str, label: str) -> dict[str, Any]:
    if type(node) is not dict:
        raise MalformedError(f"{fqn}: its {label} is not a JSON object but {quoting.value(node)}")
    return node


def _rename_storage(tensor: Tensor, record: str) -> Tensor:
    """Prefix the storage key with the record's name, because each nested archive numbers its storages from 0."""
    return tensor if tensor.storage is None else replace(tensor, storage=f"{record}/{tensor.storage}")


def _build_row(fqn: str, payload: _Payload, role: Role | None) -> DecodedTensor:
    tensor = payload.tensor
    if role is None:
        return _build_unnamed_row(fqn, payload)
    saved = {Kind.PARAMETER: True, Kind.BUFFER: role.persistent}.get(role.kind, False)
    literal = role.kind is Kind.UNREGISTERED and _LITERAL_NAME.fullmatch(fqn) is not None
    evidence = Evidence.ASSUMED if literal else Evidence.REGISTERED
    note = _CONSTANT_NOTE if literal else None
    return DecodedTensor(fqn, tensor, role.kind, evidence, role.persistent, saved, tensor.requires_grad, note=note)


def _build_unnamed_row(fqn: str, payload: _Payload) -> DecodedTensor:
    """Build the tensor row of a tensor outside the signature. The tensor's archive entry determines its kind."""
    if not payload.is_weight:
        return DecodedTensor(fqn, payload.tensor, Kind.UNREGISTERED, Evidence.ASSUMED, saved=False)
    if payload.is_parameter is None:
        return build_row(fqn, payload.tensor, Kind.PARAMETER, Evidence.ASSUMED)
    kind = Kind.PARAMETER if payload.is_parameter else Kind.BUFFER
    persistent = None if payload.is_parameter else True
    grad = payload.tensor.requires_grad
    return DecodedTensor(fqn, payload.tensor, kind, Evidence.REGISTERED, persistent, requires_grad=grad)
