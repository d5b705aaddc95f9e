"""Flax's msgpack (`flax.serialization.to_bytes`): nested maps of arrays, as of a TrainState or of a model's variables.

An array is an extension of type 1 that holds [shape, name of the dtype, bytes]; one of a gigabyte and more is cut into
flat pieces. Type 2 is a complex number, type 3 a scalar of numpy. Lists and tuples become maps of "0", "1"...
Source: flax/serialization.py of flax 0.12. Arrays are passed over by their positions; nothing is loaded.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import BITS
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.state import (
    Box,
    Boxes,
    ByteRange,
    Evidence,
    Kind,
    ModelState,
    OptimizerFacts,
    OptimizerGroup,
    Scalar,
    TensorData,
    TensorInfo,
)
from statecli.formats import safetensors as _safetensors
from statecli.formats.torch.objects import info_of
from statecli.formats.torch.reading import MAX_CHARACTERS, MAX_ROWS, Reading, Row, damaged, row_of
from statecli.formats.torch.sections import OTHER_WORDS
from statecli.formats.torch.settings import scalars
from statecli.formats.torch.tensors import MAX_DIMENSIONS, MAX_ELEMENTS, Decoder, Tensor
from statecli.storage import files
from statecli.storage.msgpack import Blob, Cut, Parser
from statecli.storage.source import Source

NAME = "flax-msgpack"

#: Collections of variables, and fields of a TrainState, each a section of its own.
_PARAMS = re.compile(r"(?:^|_)params(?:$|_)")
_OPTIMIZER = re.compile(r"(?:^|_)(?:opt|optimizer|opt_state|optimizer_state)(?:$|_)")
#: Collections of what layers keep and no optimizer trains.
_BUFFERS = frozenset(["batch_stats", "cache", "constants", "intermediates", "spectral_stats"])
#: Those of them, beside parameters, that nothing else is called.
_SIGNS = frozenset(["batch_stats", "opt_state"])
#: Maps inside one another that may be sections: {"generator": {"params": ...}}.
_MAX_SECTION_DEPTH = 4

_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
#: Bytes that are told by their digest.
_MAX_BYTES = 64 << 20
#: The first byte of a map with an entry, and of a text that is short.
_MAP = frozenset([*range(0x81, 0x90), 0xDE, 0xDF])
_TEXT = range(0xA1, 0xC0)
_NUMBERS = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "bool": "<?",
    **{f"int{8 << n}": f"<{code}" for n, code in enumerate("bhiq")},
    **{f"uint{8 << n}": f"<{code}" for n, code in enumerate("BHIQ")},
}


def sniff(path: str, head: bytes) -> bool:
    """Whether it begins with a map whose first key is a text that can be shown; a `.msgpack` may have any map."""
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1) if head else 0
    if not head or head[0] not in _MAP or len(head) <= at or _safetensors.sniff(path, head):
        return files.name(path).endswith(".msgpack") and head[:1] == b"\x80"
    if files.name(path).endswith(".msgpack"):
        return True
    if head[at] == 0xD9 and len(head) > at + 1:
        length, start = head[at + 1], at + 2
    else:
        length, start = head[at] - 0xA0 if head[at] in _TEXT else 0, at + 1
    key, after = head[start : start + length], head[start + length : start + length + 1]
    try:
        return len(key) == length > 0 and key.decode("utf-8").isprintable() and after not in (b"", b"\xc1")
    except UnicodeDecodeError:
        return False


def read(path: str, section: str | None = None) -> ModelState:
    """The arrays of one file, in sections as flax names them, and what is beside them as settings.

    Raises UnreadableError for msgpack without an array of flax's, MalformedError for what contradicts itself. An array
    that does is damaged, and the others are read; so is the entry in which a file breaks off, behind those before it.
    """
    with Source(path) as source:
        parser = Parser(source, mends=True)
        root = parser.value()
        if parser.at < source.size and not parser.cut:
            raise MalformedError(
                f"{source.size - parser.at} bytes follow its map, which ends at byte {parser.at}: flax refuses it"
            )
        tree = _Tree(source)
        root = tree.node(root, "")
        if not tree.arrays and parser.cut:
            raise MalformedError(parser.cut.why)
        if not tree.arrays:
            raise UnreadableError("is msgpack without an array of flax: nothing that statecli reads")
    reading = Reading(Decoder({}), [])
    found = _moved(list(_found(root, ())), section)
    tensors = _owned([info_of(row, one, path) for one, row in _rows(found)])
    return ModelState(
        path,
        NAME,
        tuple(tensors),
        sections=tuple(dict.fromkeys(tensor.section for tensor in tensors)),
        metadata=scalars(root, reading),
        oddities=tuple(reading.oddities),
        optimizers=tuple(_facts(tensors)),
    )


# --- arrays ----------------------------------------------------------------------------------------------------------


class _Tree:
    """Puts tensors in the place of what stands for them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.arrays = self._bytes = 0

    def node(self, node: Any, path: str) -> Any:
        """What `node` is, with all below it; `path` is its dotted name."""
        if isinstance(node, Cut):
            return damaged(path, MalformedError(node.why))
        if isinstance(node, Blob):
            return self._blob(node, path)
        if type(node) is list:
            return [self.node(child, f"{path}.{n}") for n, child in enumerate(node)]
        if type(node) is not dict:
            return node
        below = {key: self.node(child, f"{path}.{key}" if path else str(key)) for key, child in node.items()}
        return self._tensor(path, _joined, below) if _CHUNKED in below else below

    def _blob(self, blob: Blob, path: str) -> Any:
        if blob.code == _ARRAY:
            self.arrays += 1
            if self.arrays > MAX_ROWS:
                raise MalformedError(f"holds more than {MAX_ROWS} arrays")
            return self._tensor(path, self._array, blob)
        if blob.code == _COMPLEX:
            return self._complex(blob)
        return self._scalar(blob, path) if blob.code == _SCALAR else self._raw(blob)

    def _tensor(self, path: str, made: Any, node: Any) -> Tensor:
        """As `made` makes it; one that contradicts itself is there, and says how."""
        try:
            tensor: Tensor = made(node)
        except MalformedError as error:
            return damaged(path, error)
        return tensor

    def _array(self, blob: Blob) -> Tensor:
        held = Parser(self._source, blob.offset, blob.offset + blob.length).value()
        if type(held) is not list or len(held) != 3 or type(held[1]) is not str or not isinstance(held[2], Blob):
            raise MalformedError("its extension is no list of shape, dtype and bytes")
        shape, name, data = _shape(held[0]), held[1], held[2]
        elements, size = prod(shape), data.length
        if name == "object":
            raise MalformedError(
                "is of dtype object: its bytes are addresses of the process that wrote it, and no values"
            )
        dtype = name if name in BITS else f"numpy {name[:64]}"
        if dtype is not name and elements and (size % elements or not size):
            raise MalformedError(
                f"{dtype} {quoting.shape(shape)}: its {size} bytes are no whole number for each element"
            )
        if dtype is name and elements * BITS[name] // 8 != size:
            raise MalformedError(
                f"{name} {quoting.shape(shape)} takes {elements * BITS[name] // 8} bytes, it has {size}"
            )
        where = ByteRange(self._source.path, data.offset, size)
        return Tensor(dtype, shape, elements, size, None, False, data=TensorData(where, dtype, shape))

    def _scalar(self, blob: Blob, path: str) -> Scalar:
        """A scalar of numpy as a number; of another type as text."""
        tensor = self._tensor(path, self._array, blob)
        if tensor.data is None:
            raise MalformedError(tensor.damage or f"{path}: is no scalar")
        raw = self._source.read(tensor.data.storage.offset, min(tensor.nbytes, 64))
        code = _NUMBERS.get(tensor.dtype)
        if code is not None and tensor.elements == 1:
            number: Scalar = struct.unpack(code, raw)[0]
            return number
        return f"{tensor.dtype} 0x{raw[::-1].hex()}"

    def _complex(self, blob: Blob) -> str:
        held = Parser(self._source, blob.offset, blob.offset + blob.length).value()
        if type(held) is not list or len(held) != 2 or any(type(part) is not float for part in held):
            raise MalformedError("a complex number is no pair of floats")
        return str(complex(*held))

    def _raw(self, blob: Blob) -> bytes:
        self._bytes += blob.length
        if self._bytes > _MAX_BYTES:
            raise MalformedError(f"has more than {_MAX_BYTES} bytes that are of no array")
        return self._source.read(blob.offset, blob.length)


def _shape(node: Any) -> tuple[int, ...]:
    if type(node) is not list or any(type(size) is not int or size < 0 for size in node):
        raise MalformedError("its shape is no list of sizes")
    if len(node) > MAX_DIMENSIONS:
        raise MalformedError(f"its shape has {len(node)} dimensions, more than {MAX_DIMENSIONS}")
    if max(node, default=0) > MAX_ELEMENTS or prod(node) > MAX_ELEMENTS:
        raise MalformedError(f"shape {quoting.shape(node)} is impossible: more than 2^63 elements")
    return tuple(node)


def _numbered(node: Any) -> list[Any] | None:
    """The values of a map of "0", "1"..., which is what flax makes of a tuple; None for anything else."""
    if type(node) is not dict or any(str(n) not in node for n in range(len(node))):
        return None
    return [node[str(n)] for n in range(len(node))]


def _parts(node: dict[str, Any]) -> Iterator[Any]:
    """The values of a map, and those of the maps in it."""
    for child in node.values():
        yield from child.values() if type(child) is dict else (child,)


def _joined(node: dict[str, Any]) -> Tensor:
    """An array that is cut into flat pieces."""
    if cut := next((one.note for one in _parts(node) if type(one) is Tensor and one.damage and one.note), None):
        raise MalformedError(cut.removeprefix("cannot be read: "))
    shape, pieces = _shape(_numbered(node.get("shape"))), _numbered(node.get("chunks"))
    if not pieces or any(type(piece) is not Tensor or piece.data is None for piece in pieces):
        raise MalformedError("its chunks are no map of arrays")
    dtype, held = pieces[0].dtype, sum(piece.elements for piece in pieces)
    if any(piece.dtype != dtype or len(piece.shape) != 1 for piece in pieces) or dtype not in BITS:
        raise MalformedError("its chunks are no flat arrays of one dtype")
    if held != prod(shape):
        raise MalformedError(f"shape {quoting.shape(shape)} has {prod(shape)} elements, its chunks have {held}")
    boxes, at = [], 0
    for piece in pieces:
        boxes.append(Box((at,), piece.data))
        at += piece.elements
    size = held * BITS[dtype] // 8
    whole = ByteRange(pieces[0].data.storage.path, 0, size, boxes=Boxes((held,), BITS[dtype] // 8, tuple(boxes)))
    note = f"in {len(pieces)} chunks"
    return Tensor(dtype, shape, held, size, None, False, note=note, data=TensorData(whole, dtype, shape))


# --- sections --------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A tensor, the keys that lead to its section, and those that lead on from there."""

    section: tuple[str, ...]
    keys: tuple[str, ...]
    tensor: Tensor
    #: Whether it lies beside sections, as the step of a TrainState does.
    is_loose: bool = False

    @property
    def title(self) -> str:
        """The section's name: the model, where it is the whole file."""
        return ".".join(self.section) if self.section or self.is_loose else "model"


def _found(root: Any, path: tuple[str, ...]) -> Iterator[_Found]:
    """All tensors; the maps that hold them are sections where some of them are named as flax names its collections."""
    if not _is_split(root):
        yield from (_Found(path, keys, tensor) for keys, tensor in _below(root))
        return
    for key, child in root.items():
        if type(child) is Tensor:
            yield _Found(path, (str(key),), child, is_loose=True)
        elif _is_whole(str(key), child):
            yield from (_Found((*path, str(key)), keys, tensor) for keys, tensor in _below(child))
        else:
            yield from _found(child, (*path, str(key)))


def _is_split(node: Any, depth: int = 0) -> bool:
    if type(node) is not dict or depth == _MAX_SECTION_DEPTH:
        return False
    named = (key for key, child in node.items() if type(child) in (dict, list))
    if any(_PARAMS.search(str(key)) or key in _SIGNS for key in named):
        return True
    return any(_is_split(child, depth + 1) for child in node.values())


def _is_whole(key: str, node: Any) -> bool:
    """Whether a map is one section; the params of a TrainState may be all variables: {"params": {"params": ...}}."""
    alone = _PARAMS.search(key) is not None and type(node) is dict and "params" not in node
    return alone or _OPTIMIZER.search(key) is not None or not _is_split(node)


def _below(root: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Each tensor in the order of the file, with the keys that lead to it."""
    stack: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while stack:
        keys, node = stack.pop()
        if type(node) is Tensor:
            yield keys, node
        items: Iterable[tuple[Any, Any]] = node.items() if type(node) is dict else ()
        items = enumerate(node) if type(node) is list else items
        stack.extend(reversed([((*keys, str(key)), child) for key, child in items]))


def _moved(found: list[_Found], wanted: str | None) -> list[_Found]:
    """The same, with what lies at the dotted path `wanted` in a section of its own, if no section is there."""
    if not wanted or any(f"{one.title}.".startswith(f"{wanted}.") for one in found):
        return found
    keys = tuple(wanted.split("."))
    paths = [(one, (*one.section, *one.keys)) for one in found]
    return [
        _Found(keys, path[len(keys) :], one.tensor) if path[: len(keys)] == keys and len(path) > len(keys) else one
        for one, path in paths
    ]


def _rows(found: list[_Found]) -> Iterator[tuple[str, Row]]:
    """Each as a row of its section. Of two that read the same, a key may have dots, the second is spelled out."""
    taken: set[tuple[str, str]] = set()
    characters = 0
    for one in found:
        fqn = ".".join(one.keys) or "tensor"
        if (one.title, fqn) in taken:
            fqn = "".join(f"[{key!r}]" for key in one.keys)
        taken.add((one.title, fqn))
        characters += len(fqn)
        if characters > MAX_CHARACTERS:
            raise MalformedError(f"its names would take more than {MAX_CHARACTERS} characters, at {fqn[:40]!r}…")
        yield one.title, _row(fqn, one)


def _row(fqn: str, one: _Found) -> Row:
    name = one.section[-1] if one.section else ""
    if one.is_loose or (OTHER_WORDS.search(name) and not _PARAMS.search(name)):
        return row_of(fqn, one.tensor, Kind.OTHER, Evidence.CONVENTION)
    if any(map(_OPTIMIZER.search, one.section)):
        return row_of(fqn, one.tensor, Kind.OPTIMIZER, Evidence.OPTIMIZER)
    if name in _BUFFERS:
        return Row(fqn, one.tensor, Kind.BUFFER, Evidence.CONVENTION, persistent=True)
    return row_of(fqn, one.tensor, Kind.PARAMETER, Evidence.ASSUMED)


def _owned(tensors: list[TensorInfo]) -> list[TensorInfo]:
    """The optimizer's tensors with the parameter whose whole name each one's name ends in (`0.mu.Dense_0.kernel`)."""
    names = {tensor.fqn for tensor in tensors if tensor.kind is Kind.PARAMETER}
    return [replace(one, belongs_to=_owner(one.fqn, names)) if one.kind is Kind.OPTIMIZER else one for one in tensors]


def _owner(fqn: str, names: set[str]) -> str | None:
    rest = fqn
    while rest:
        if rest in names:
            return rest
        rest = rest.partition(".")[2]
    return None


def _facts(tensors: list[TensorInfo]) -> Iterator[OptimizerFacts]:
    sections = dict.fromkeys(tensor.section for tensor in tensors if tensor.kind is Kind.OPTIMIZER)
    for section in sections:
        owners = {one.belongs_to: one.shape for one in tensors if one.section == section and one.belongs_to}
        names = tuple(name for name in owners if name)
        if names:
            yield OptimizerFacts(section, (OptimizerGroup(names, names, tuple(owners.values())),))
