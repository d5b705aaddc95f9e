"""TorchScript: scripted, traced or frozen modules saved by `torch.jit.save` or `_save_for_lite_interpreter`.

A zip archive in torch's layout. `data.pkl` is the module; the classes of its objects are text in `code/__torch__/…`;
`data/N` are its storages, `constants.pkl` and `constants/N` the constants of the code. Two lines in the text of a class
list its parameters and its buffers; only these lines are parsed, and no code is run. Sources:
torch/csrc/jit/serialization of torch 2.13 (export_module.cpp, python_print.cpp, pickler.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import SCRIPT_STORAGE_DTYPES
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import REGISTERED_KINDS, ByteRange, Evidence, Kind, ModelState, Scalar, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.formats.torch.archive import (
    check_folder,
    check_version,
    find_gaps,
    find_record,
    find_unused_records,
    find_unused_storages,
    locate_storages,
    prefetch,
    read_pickle,
    refuse_big_endian,
)
from statecli.formats.torch.objects import build_info, build_state
from statecli.formats.torch.reading import MAX_ROWS, DecodedTensor, Reading
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.pickles.graph import as_mapping, get_name
from statecli.pickles.nodes import Global, Obj, Pickle
from statecli.storage.byte_source import ByteSource
from statecli.storage.zip_archive import Archive, mentions

NAME = "torchscript"
TRAITS = FormatTraits(
    is_program=True,
    own_settings=frozenset(("code files", "code bytes", "code sha256", "bytecode bytes")),
    settings_are_compiled=True,
)

#: Section of the constants in the code, and the note of each constant.
CONSTANTS = "constants"
_CONSTANT_NOTE = "a constant of the code"
#: Names of records that some version of torch writes into the archive.
_RECORDS = (
    *("data.pkl", "constants.pkl", "bytecode.pkl", "mobile_debug_handles.pkl", "traced_inputs.pkl", "version"),
    *("callstack_debug_map.pkl", "delegated_backends.debug_pkl"),
    *("byteorder", ".format_version", ".storage_alignment", ".data/version", ".data/serialization_id"),
    *("data/", "constants/", "code/", "bytecode/", "traced_inputs/", "extra/"),
)
#: Maximum size of class texts that are read, in bytes.
MAX_CODE_BYTES = 64 * 2**20
#: Prefix of classes that C++ defines, which have no text. Quantized layers keep their packed weights in an object of
#: such a class.
_CPP_PREFIX = "__torch__.torch.classes."
_CLASS = compile_on_use(r"class (\w+)(?:\((\w+)\))?:")
#: Settings that torch compiles into the class of a module, and that its kernels rely on.
_SETTING_LINE = compile_on_use(
    r"  (?:(hidden_size|input_size|proj_size|num_heads|head_dim) : Final\[int\] = (-?\d{1,18})"
    r'|(mode) : Final\[str\] = "(\w+)")$'
)
_REGISTERED_LINE = compile_on_use(r"  __(parameters|buffers)__ = \[(.*)\]$")
#: Part of a class name that distinguishes classes of the same name; its number counts up in the process that wrote
#: them.
_MANGLING = compile_on_use(r"\.___torch_mangle_\d+")
_STORAGES = frozenset(f"torch.{name}" for name in SCRIPT_STORAGE_DTYPES)
_QUOTED = compile_on_use(r'"([^"]*)"')


def sniff(path: str, head: bytes) -> bool:
    """Return whether the file is a zip archive with a `constants.pkl`, which torch.save does not write."""
    return head.startswith(b"PK\3\4") and mentions(path, b"/constants.pkl")


def read(path: str, section: str | None = None) -> ModelState:
    """Read the module's tensors and the constants of its code. The text of the classes shows the tensors' kinds.

    Raises UnreadableError for archives of other writers and damaged archives.
    """
    with ByteSource(path) as source:
        archive = Archive(source)
        prefetch(archive, "data", CONSTANTS)
        check_folder(archive)
        check_version(archive)
        refuse_big_endian(archive)
        module, constants = _read_part(archive, "data"), _read_part(archive, CONSTANTS)
        root = _Modules(archive).convert(module.pickle.root)
        sizes = _measure_code(archive)
        oddities = [
            *archive.oddities,
            *module.find_unused(),
            *constants.find_unused(),
            *find_gaps(archive),
            *find_unused_records(archive, *_RECORDS),
        ]
    pickle = replace(
        module.pickle, root=root, globals=_list_foreign_names(module.pickle) + _list_foreign_names(constants.pickle)
    )
    dtypes = SCRIPT_STORAGE_DTYPES
    state = build_state(
        pickle,
        module.storages,
        target=path,
        format=NAME,
        traits=TRAITS,
        oddities=oddities,
        requested_section=section,
        dtypes=dtypes,
    )
    return _add_constants(state, constants, sizes)


class _Part(msgspec.Struct, frozen=True):
    """A pickle of the archive, and its storages in the records `folder/N`."""

    pickle: Pickle
    storages: dict[str, ByteRange]
    folder: str

    def find_unused(self) -> Iterator[Any]:
        return find_unused_storages(self.pickle, self.storages, self.folder)


def _read_part(archive: Archive, name: str) -> _Part:
    if find_record(archive, f"{name}.pkl") is None:
        raise UnreadableError(f"is an incomplete TorchScript archive without {name}.pkl; save the program again")
    return _Part(read_pickle(archive, f"{name}.pkl"), locate_storages(archive, folder=name), name)


def _list_foreign_names(pickle: Pickle) -> list[Global]:
    """List the names that a pickle uses, except the archive's own classes and names that torch.jit writes."""
    own_prefixes = ("__torch__.", "torch.jit._pickle.")
    return [
        mention
        for mention in pickle.globals
        if not mention.qualified.startswith(own_prefixes) and mention.qualified not in _STORAGES
    ]


def _measure_code(archive: Archive) -> dict[str, Scalar]:
    """Return the size and the digest of the code as settings. Their names contain spaces, unlike attribute names."""
    import hashlib

    prefix = f"{archive.folder}/code/"
    records = {name: record for name, record in sorted(archive.records.items()) if name.startswith(prefix)}
    sources = {name: record for name, record in records.items() if name.endswith(".py")}
    bytecode = find_record(archive, "bytecode.pkl")
    digest = hashlib.sha256()
    for name, record in (*sources.items(), *([("bytecode.pkl", bytecode)] if bytecode else [])):
        if record.size > MAX_CODE_BYTES:
            raise MalformedError(f"its code has more than {MAX_CODE_BYTES:,} bytes, the limit of statecli")
        content = archive.read(record, MAX_CODE_BYTES)
        digest.update(f"{name.removeprefix(prefix)}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        digest.update(content)
    code: dict[str, Scalar] = {"code files": len(sources), "code bytes": sum(r.size for r in sources.values())}
    code |= {"bytecode bytes": bytecode.size} if bytecode else {}
    return {**code, "code sha256": digest.hexdigest()}


class _Class(NamedTuple):
    """Declarations in the text of a class: whether it is a module, and the names of its parameters and buffers.

    `buffers` is None in archives of torch before 1.6; there, every tensor except a parameter is a buffer. `settings`
    are the matches of `_SETTING_LINE`.
    """

    is_module: bool
    parameters: frozenset[str]
    buffers: frozenset[str] | None
    settings: Mapping[str, Scalar] = {}


class _Modules:
    """Converter of TorchScript objects to pickled Python modules, with the recorded attributes as their `__dict__`."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.classes: dict[str, dict[str, _Class]] = {}
        self.code_bytes = 0
        self.created: dict[int, Obj] = {}

    def convert(self, root: Any) -> Any:
        """Convert the root and every module below to the Python form. Other objects stay unchanged."""
        if not self._is_module(root):
            raise MalformedError("its data.pkl does not contain a TorchScript module")
        stack = [root]
        while stack:
            stack.extend(self._fill(stack.pop()))
        return self._convert_object(root)

    def _convert_object(self, node: Obj) -> Obj:
        """Create the Python form of an object: its class gets the Python name, which identifies quantized classes."""
        if id(node) not in self.created:
            cls = node.cls
            module = _MANGLING.sub("", cls.module).removeprefix("__torch__.")
            self.created[id(node)] = Obj(Global(module, cls.name, cls.position), ())
        return self.created[id(node)]

    def _fill(self, node: Obj) -> Iterator[Obj]:
        """Set the attributes of a converted object. Yield the modules among them that are not converted yet."""
        attributes, script_class = as_mapping(node.state), self._find_class(node)
        converted = self._convert_object(node)
        if attributes is None or script_class is None:  # the class has its own `__getstate__`
            converted.state = node.state
            return
        groups: dict[str, dict[str, Any]] = {"_parameters": {}, "_buffers": {}, "_modules": {}}
        plain_attributes: dict[Any, Any] = {}
        for name, value in attributes.items():
            if self._is_module(value):
                if id(value) not in self.created:
                    yield value
                groups["_modules"][name] = self._convert_object(value)
            elif name in script_class.parameters:
                groups["_parameters"][name] = value
            elif _is_tensor(value) if script_class.buffers is None else name in script_class.buffers:
                groups["_buffers"][name] = value
            else:
                plain_attributes[name] = _strip_tag(value)
        plain_attributes.update(script_class.settings)
        converted.state = {**plain_attributes, **groups}

    def _is_module(self, node: object) -> bool:
        script_class = self._find_class(node)
        return script_class is not None and script_class.is_module

    def _find_class(self, node: object) -> _Class | None:
        """Return the class of an object, or None if the archive's code does not define this class."""
        if type(node) is not Obj or not get_name(node.cls).startswith("__torch__."):
            return None
        cls = node.cls
        if cls.qualified.startswith(_CPP_PREFIX):
            return None
        if cls.module not in self.classes:
            self.classes[cls.module] = dict(_parse_classes(self._read_text(cls.module)))
        if cls.name not in self.classes[cls.module]:
            raise MalformedError(
                f"contains an object of class {quoting.name(cls.qualified)}, but its code does not define this class"
            )
        return self.classes[cls.module][cls.name]

    def _read_text(self, module: str) -> str:
        record = find_record(self.archive, f"code/{module.replace('.', '/')}.py")
        if record is None:
            return ""
        self.code_bytes += record.size
        if self.code_bytes > MAX_CODE_BYTES:
            raise MalformedError(f"its code has more than {MAX_CODE_BYTES:,} bytes, the limit of statecli")
        return self.archive.read(record, MAX_CODE_BYTES).decode("utf-8", "replace")


def _strip_tag(value: object) -> Any:
    """Remove calls that record the types of lists and dicts, and replace a C++ object by its state.

    Lists and dicts are changed in place; a tuple becomes a list.
    """
    top = [value]
    stack: list[tuple[Any, Any]] = [(top, 0)]
    converted: dict[int, tuple[Any, Any]] = {}
    while stack:
        holder, key = stack.pop()
        node = holder[key] = _strip_annotation(holder[key])
        if type(node) not in (list, tuple, dict):
            continue
        if id(node) not in converted:
            items = list(node) if type(node) is tuple else node
            converted[id(node)] = (
                items,
                node,
            )  # keep the node alive, so that no other object gets the same id
            stack.extend((items, index) for index in (items if type(items) is dict else range(len(items))))
        holder[key] = converted[id(node)][0]
    return top[0]


#: Functions that return their first argument, with a tag.
_TAG_FUNCTIONS = frozenset(
    ["torch.jit._pickle.restore_type_tag"]
    + [f"torch.jit._pickle.build_{kind}list" for kind in ("tensor", "int", "double", "bool")]
)


def _strip_annotation(node: object) -> Any:
    while type(node) is Obj and get_name(node.cls) in _TAG_FUNCTIONS and node.args:
        node = node.args[0]
    return node.state if type(node) is Obj and get_name(node.cls).startswith(_CPP_PREFIX) else node


def _is_tensor(value: object) -> bool:
    return type(value) is Obj and get_name(value.cls).startswith("torch._utils._rebuild_")


def _parse_classes(text: str) -> Iterator[tuple[str, _Class]]:
    """Parse the declarations at the top of each class. Lines of functions are indented more and do not match."""
    name = ""
    script_class = _NOTHING
    for line in text.splitlines():
        if match := _CLASS.match(line):
            if name:
                yield name, script_class
            name, script_class = match[1], _NOTHING._replace(is_module=match[2] == "Module")
        elif match := _SETTING_LINE.match(line):
            setting = {match[1]: int(match[2])} if match[1] else {match[3]: match[4]}
            script_class = script_class._replace(settings={**script_class.settings, **setting})
        elif match := _REGISTERED_LINE.match(line):
            names = frozenset(_QUOTED.findall(match[2]))
            script_class = (
                script_class._replace(parameters=names)
                if match[1] == "parameters"
                else script_class._replace(buffers=names)
            )
    if name:
        yield name, script_class


_NOTHING = _Class(False, frozenset(), None)


def _add_constants(state: ModelState, part: _Part, sizes: dict[str, Scalar]) -> ModelState:
    """Return the state with the constants as a section.

    `persistent` is unknown for buffers: the module's state_dict has all buffers, but no plain attributes.
    """
    reading = Reading(TensorDecoder(part.storages, SCRIPT_STORAGE_DTYPES), list(state.oddities))
    constants = [
        _mark_constant(build_info(row, CONSTANTS, state.target))
        for row in _build_constant_rows(part.pickle.root, reading)
    ]
    oddities = [oddity for oddity in reading.oddities if not constants or oddity.kind is not OddityKind.NO_TENSORS]
    tensors = (replace(tensor, persistent=None, saved=tensor.kind in REGISTERED_KINDS) for tensor in state.tensors)
    values = state.metadata.values
    own_values = {key: value for key, value in values.items() if not _is_usual(key, value, values)}
    return replace(
        state,
        metadata=replace(state.metadata, values={**own_values, **sizes}),
        tensors=(*tensors, *constants),
        sections=(*state.sections, *([CONSTANTS] if constants else [])),
        oddities=tuple(oddities),
    )


def _is_usual(key: str, value: Scalar, settings: Mapping[str, Scalar]) -> bool:
    """Return whether a setting is uninformative: `_is_full_backward_hook`, or a `training` mode equal to the root's."""
    name = key.rpartition(".")[2]
    return name == "_is_full_backward_hook" or (name == "training" != key and value == settings.get("training"))


def _build_constant_rows(root: object, reading: Reading) -> Iterator[DecodedTensor]:
    """Build the tensor rows of the constants, with their names in the code. Their role in the module is unknown."""
    nodes = enumerate(root if type(root) is tuple else ())
    entries = (part for n, node in nodes for part in reading.walk(_strip_tag(node), f"c{n}"))
    for count, child in enumerate(entries):
        if count > MAX_ROWS:
            raise MalformedError(f"contains more than {MAX_ROWS} tensors, the limit of statecli")
        tensor = child.tensor
        if tensor is not None:
            yield DecodedTensor(
                child.path,
                tensor,
                Kind.UNREGISTERED,
                Evidence.ASSUMED,
                saved=False,
                requires_grad=tensor.requires_grad,
                note=_CONSTANT_NOTE,
            )


def _mark_constant(tensor: TensorInfo) -> TensorInfo:
    """Prefix the storage key, because the constants' storages are numbered separately from the module's."""
    return tensor if tensor.storage is None else replace(tensor, storage=f"{CONSTANTS}/{tensor.storage}")
