"""TorchScript: what `torch.jit.save` writes of a scripted, traced or frozen module, and `_save_for_lite_interpreter`.

A zip archive of torch's. `data.pkl` is the module, made of objects whose classes are text in `code/__torch__/…/*.py`;
`data/N` are its storages, `constants.pkl` and `constants/N` the tensors that the code names. Which attributes of a
class are parameters and which are buffers stands in two lines of its text. These are read, and nothing of it is run.
Sources: torch/csrc/jit/serialization of torch 2.13 (export_module.cpp, python_print.cpp, pickler.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import SCRIPT_STORAGE_DTYPES
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import ByteRange, Evidence, Kind, ModelState, Scalar, TensorInfo
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
from statecli.formats.torch.objects import info_of, state_of
from statecli.formats.torch.reading import MAX_ROWS, Reading, Row
from statecli.formats.torch.tensors import Decoder
from statecli.pickles.graph import mapping, name_of
from statecli.pickles.machine import Global, Obj, Pickle
from statecli.storage.source import Source
from statecli.storage.zip_archive import Archive, mentions

NAME = "torchscript"

#: The section of the tensors that the code names, and what is said of each.
CONSTANTS = "constants"
_NOTE = "a constant of the code"
#: What torch writes into such an archive, in one version or another.
_RECORDS = (
    *("data.pkl", "constants.pkl", "bytecode.pkl", "mobile_debug_handles.pkl", "traced_inputs.pkl", "version"),
    *("byteorder", ".format_version", ".storage_alignment", ".data/version", ".data/serialization_id"),
    *("data/", "constants/", "code/", "bytecode/", "traced_inputs/", "extra/"),
)
#: Bytes of class texts that are read.
MAX_CODE = 64 * 2**20
#: Where classes live that C++ defines, which have no text: quantized layers keep their packed weights in one.
_IN_CPP = "__torch__.torch.classes."
_CLASS = re.compile(r"class (\w+)(?:\((\w+)\))?:")
_LINE = re.compile(r"  __(parameters|buffers)__ = \[(.*)\]$")
#: What makes two classes of one name differ, counted through the process that wrote them.
_MANGLED = re.compile(r"\.___torch_mangle_\d+")
_STORAGES = frozenset(f"torch.{name}" for name in SCRIPT_STORAGE_DTYPES)
_QUOTED = re.compile(r'"([^"]*)"')


def sniff(path: str, head: bytes) -> bool:
    """Whether it is a zip archive with a `constants.pkl`, which torch.save does not write."""
    return head.startswith(b"PK\3\4") and mentions(path, b"/constants.pkl")


def read(path: str, section: str | None = None) -> ModelState:
    """The module's tensors, grouped by their classes, and the constants of its code.

    Raises UnreadableError for an archive that is none of torch.jit.save, or a damaged one.
    """
    with Source(path) as source:
        archive = Archive(source)
        prefetch(archive, "data", CONSTANTS)
        check_folder(archive)
        check_version(archive)
        module, constants = _part(archive, "data"), _part(archive, CONSTANTS)
        root = _Modules(archive).converted(module.pickle.root)
        told = _code(archive)
        oddities = [
            *archive.oddities,
            *module.idle(),
            *constants.idle(),
            *gaps_of(archive),
            *unused_of(archive, *_RECORDS),
        ]
    pickle = replace(module.pickle, root=root, globals=_names(module.pickle) + _names(constants.pickle))
    dtypes = SCRIPT_STORAGE_DTYPES
    state = state_of(
        pickle, module.storages, target=path, format=NAME, oddities=oddities, wanted=section, dtypes=dtypes
    )
    return _with_constants(state, constants, told)


class _Part(NamedTuple):
    """A pickle and its storages, `folder/N`."""

    pickle: Pickle
    storages: dict[str, ByteRange]
    folder: str

    def idle(self) -> Iterator[Any]:
        return idle_of(self.pickle, self.storages, self.folder)


def _part(archive: Archive, name: str) -> _Part:
    if record_of(archive, f"{name}.pkl") is None:
        raise UnreadableError(f"is no whole TorchScript archive: it holds no {name}.pkl; save it again")
    return _Part(pickle_of(archive, f"{name}.pkl"), storages_of(archive, folder=name), name)


def _names(pickle: Pickle) -> list[Global]:
    """The names that are no class of the archive's own code: torch.jit.load knows no module of Python."""
    own = ("__torch__.", "torch.jit._pickle.")
    return [one for one in pickle.globals if not one.qualified.startswith(own) and one.qualified not in _STORAGES]


def _code(archive: Archive) -> dict[str, Scalar]:
    """How much code there is. An attribute's name has no space."""
    prefix = f"{archive.folder}/code/"
    sizes = [one.size for name, one in archive.records.items() if name.startswith(prefix) and name.endswith(".py")]
    bytecode = record_of(archive, "bytecode.pkl")
    told: dict[str, Scalar] = {"code files": len(sizes), "code bytes": sum(sizes)}
    return told | ({"bytecode bytes": bytecode.size} if bytecode else {})


class _Class(NamedTuple):
    """What a class's text says: whether it is a module, and its registered names.

    `buffers` is None in archives of torch before 1.6, to which every tensor that is no parameter was a buffer.
    """

    is_module: bool
    parameters: frozenset[str]
    buffers: frozenset[str] | None


class _Modules:
    """TorchScript's objects as the `__dict__` that the same module has in Python, as far as the pickle says it."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.classes: dict[str, dict[str, _Class]] = {}
        self.read = 0
        self.made: dict[int, Obj] = {}

    def converted(self, root: Any) -> Any:
        """The root with every module below it in its Python form; what is no module is left as it is."""
        if not self._is_module(root):
            raise MalformedError("its data.pkl holds no TorchScript module")
        stack = [root]
        while stack:
            stack.extend(self._fill(stack.pop()))
        return self._made(root)

    def _made(self, node: Obj) -> Obj:
        """A class of the name that it has in Python: torch's quantized ones are known by it."""
        if id(node) not in self.made:
            cls = node.cls
            module = _MANGLED.sub("", cls.module).removeprefix("__torch__.")
            self.made[id(node)] = Obj(Global(module, cls.name, cls.position), ())
        return self.made[id(node)]

    def _fill(self, node: Obj) -> Iterator[Obj]:
        """Give the made object its attributes; the modules among them that are not made yet."""
        held, known = mapping(node.state), self._class(node)
        made = self._made(node)
        if held is None or known is None:  # the class has a `__getstate__` of its own
            made.state = node.state
            return
        groups: dict[str, dict[str, Any]] = {"_parameters": {}, "_buffers": {}, "_modules": {}}
        plain: dict[Any, Any] = {}
        for name, value in held.items():
            if self._is_module(value):
                if id(value) not in self.made:
                    yield value
                groups["_modules"][name] = self._made(value)
            elif name in known.parameters:
                groups["_parameters"][name] = value
            elif _is_tensor(value) if known.buffers is None else name in known.buffers:
                groups["_buffers"][name] = value
            else:
                plain[name] = _untagged(value)
        made.state = {**plain, **groups}

    def _is_module(self, node: Any) -> bool:
        known = self._class(node)
        return known is not None and known.is_module

    def _class(self, node: Any) -> _Class | None:
        """None for what is no object of the archive's code."""
        if type(node) is not Obj or not name_of(node.cls).startswith("__torch__."):
            return None
        cls = node.cls
        if cls.qualified.startswith(_IN_CPP):
            return None
        if cls.module not in self.classes:
            self.classes[cls.module] = dict(_classes(self._text(cls.module)))
        if cls.name not in self.classes[cls.module]:
            raise MalformedError(f"holds an object of {quoting.name(cls.qualified)}, which is no class of its code")
        return self.classes[cls.module][cls.name]

    def _text(self, module: str) -> str:
        record = record_of(self.archive, f"code/{module.replace('.', '/')}.py")
        if record is None:
            return ""
        self.read += record.size
        if self.read > MAX_CODE:
            raise MalformedError(f"its code has more than {MAX_CODE:,} bytes: refused")
        return self.archive.read(record, MAX_CODE).decode("utf-8", "replace")


def _untagged(value: Any) -> Any:
    """The same without the calls that say the types of lists and dicts; of a C++ object, what it is made of.

    Lists and dicts are changed where they are, and a tuple becomes a list.
    """
    top = [value]
    stack: list[tuple[Any, Any]] = [(top, 0)]
    seen: dict[int, tuple[Any, Any]] = {}
    while stack:
        holder, key = stack.pop()
        node = holder[key] = _bare(holder[key])
        if type(node) not in (list, tuple, dict):
            continue
        if id(node) not in seen:
            made = list(node) if type(node) is tuple else node
            seen[id(node)] = made, node  # both stay, or another object could get the identity of one
            stack.extend((made, below) for below in (made if type(made) is dict else range(len(made))))
        holder[key] = seen[id(node)][0]
    return top[0]


#: Calls whose first argument is what they make.
_TAGS = frozenset(
    ["torch.jit._pickle.restore_type_tag"]
    + [f"torch.jit._pickle.build_{kind}list" for kind in ("tensor", "int", "double", "bool")]
)


def _bare(node: Any) -> Any:
    while type(node) is Obj and name_of(node.cls) in _TAGS and node.args:
        node = node.args[0]
    return node.state if type(node) is Obj and name_of(node.cls).startswith(_IN_CPP) else node


def _is_tensor(value: Any) -> bool:
    return type(value) is Obj and name_of(value.cls).startswith("torch._utils._rebuild_")


def _classes(text: str) -> Iterator[tuple[str, _Class]]:
    """Each class with what stands at the top of it; a line of a function is indented further."""
    name = ""
    known = _NOTHING
    for line in text.splitlines():
        if found := _CLASS.match(line):
            if name:
                yield name, known
            name, known = found[1], _NOTHING._replace(is_module=found[2] == "Module")
        elif found := _LINE.match(line):
            names = frozenset(_QUOTED.findall(found[2]))
            known = known._replace(parameters=names) if found[1] == "parameters" else known._replace(buffers=names)
    if name:
        yield name, known


_NOTHING = _Class(False, frozenset(), None)


_REGISTERED = (Kind.PARAMETER, Kind.BUFFER)


def _with_constants(state: ModelState, part: _Part, told: dict[str, Scalar]) -> ModelState:
    """The state with the constants as a section.

    Which buffers were persistent is not recorded: the module's own state_dict has all of them, and no attribute.
    """
    reading = Reading(Decoder(part.storages, SCRIPT_STORAGE_DTYPES), list(state.oddities))
    constants = [_constant(info_of(row, CONSTANTS, state.target)) for row in _rows(part.pickle.root, reading)]
    oddities = [one for one in reading.oddities if not constants or one.name != "no-tensors"]
    tensors = (replace(one, persistent=None, saved=one.kind in _REGISTERED) for one in state.tensors)
    values = state.metadata.values
    own = {key: value for key, value in values.items() if not _is_usual(key, value, values)}
    return replace(
        state,
        metadata=replace(state.metadata, values={**own, **told}),
        tensors=(*tensors, *constants),
        sections=(*state.sections, *([CONSTANTS] if constants else [])),
        oddities=tuple(oddities),
    )


def _is_usual(key: str, value: Scalar, settings: Mapping[str, Scalar]) -> bool:
    """What every module has: no hook, and the mode of the module that it is in."""
    name = key.rpartition(".")[2]
    return name == "_is_full_backward_hook" or (name == "training" != key and value == settings.get("training"))


def _rows(root: Any, reading: Reading) -> Iterator[Row]:
    """The constants under the names that the code has for them. What each was to the module is not recorded."""
    for count, node in enumerate(root if type(root) is tuple else ()):
        for path, _, tensor in reading.below(_untagged(node), f"c{count}"):
            if tensor is not None:
                grad = tensor.requires_grad
                yield Row(
                    path, tensor, Kind.UNREGISTERED, Evidence.ASSUMED, saved=False, requires_grad=grad, note=_NOTE
                )
        if count > MAX_ROWS:
            raise MalformedError(f"holds more than {MAX_ROWS} tensors")


def _constant(tensor: TensorInfo) -> TensorInfo:
    """Storages of constants are numbered by themselves."""
    return tensor if tensor.storage is None else replace(tensor, storage=f"{CONSTANTS}/{tensor.storage}")
