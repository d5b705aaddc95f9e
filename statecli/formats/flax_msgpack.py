"""Flax's msgpack (`flax.serialization.to_bytes`): nested maps of arrays, such as a TrainState or a model's variables.

An array is an extension of type 1 with [shape, name of the dtype, bytes]. An array of a gigabyte and more is cut into
flat pieces. Type 2 is a complex number, type 3 a scalar of numpy. Lists and tuples become maps of "0", "1"... Source:
flax/serialization.py of flax 0.12. Arrays are skipped and located by their positions; their values are not loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from math import prod
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS
from statecli.core.errors import MalformedError, UnreadableError
from statecli.core.format_traits import FormatTraits
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import (
    Box,
    Boxes,
    ByteRange,
    Evidence,
    Kind,
    ModelState,
    OptimizerFacts,
    OptimizerGroup,
    Scalar,
    Settings,
    TensorData,
    TensorInfo,
)
from statecli.formats import safetensors as _safetensors
from statecli.formats.torch.arguments import MAX_DIMENSIONS, MAX_ELEMENTS
from statecli.formats.torch.objects import build_info
from statecli.formats.torch.reading import MAX_CHARACTERS, MAX_ROWS, DecodedTensor, Reading, build_row, mark_damaged
from statecli.formats.torch.sections import OTHER_WORDS
from statecli.formats.torch.settings import collect_settings
from statecli.formats.torch.settings_digest import compute_text_digest
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.formats.torch.tensors import Tensor
from statecli.storage import files
from statecli.storage.byte_source import ByteSource
from statecli.storage.msgpack import Blob, Parser, Truncation

NAME = "flax-msgpack"
#: Suffixes of msgpack files. Only Ray's RLlib writes the second suffix.
MSGPACK_SUFFIXES = (".msgpack", RLLIB_SUFFIX := ".msgpck")
TRAITS = FormatTraits(
    never_mapped="numpy and Flax never memory-map .npz and msgpack files, so alignment does not matter",
    has_collections=True,
    key_setting="(keys)",
)

#: Names of variable collections and of fields of a TrainState; each is a section.
_PARAMS = compile_on_use(r"(?:^|_)params(?:$|_)")
_OPTIMIZER = compile_on_use(r"(?:^|_)(?:opt|optimizer|opt_state|optimizer_state)(?:$|_)")
#: Collections that layers update themselves and no optimizer trains.
_BUFFERS = frozenset(["batch_stats", "cache", "constants", "intermediates", "spectral_stats"])
#: Keys that mark a level of sections, even without `params`, because no other dict uses these names.
_SECTION_KEYS = frozenset(["batch_stats", "opt_state"])
#: Maximum depth of maps that may be sections: {"generator": {"params": ...}}.
_MAX_SECTION_DEPTH = 4

_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
#: Maximum length of a dtype's name (`datetime64[ns]`), in characters.
_MAX_DTYPE_CHARS = 64
#: Maximum length of the keys of a tensor in a setting, in characters.
_MAX_PATH_CHARS = 200
#: Maximum total size of byte strings outside arrays that are read (and reported by digest), in bytes.
_MAX_RAW_BYTES = 64 << 20
#: Maximum size of a scalar that is shown as its bits, in bytes.
_MAX_SHOWN_SCALAR_BYTES = 64
#: First bytes of a map that is not empty, and of a short text.
_MAP_FIRST_BYTES = frozenset([*range(0x81, 0x90), 0xDE, 0xDF])
_TEXT_FIRST_BYTES = range(0xA1, 0xC0)
_NUMBERS = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "bool": "<?",
    **{f"int{8 << n}": f"<{code}" for n, code in enumerate("bhiq")},
    **{f"uint{8 << n}": f"<{code}" for n, code in enumerate("BHIQ")},
}


def sniff(path: str, head: bytes) -> bool:
    """Return whether the file begins with a msgpack map. Without msgpack's suffix, the first key must be text."""
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1) if head else 0
    if not head or head[0] not in _MAP_FIRST_BYTES or len(head) <= at or _safetensors.sniff(path, head):
        return files.get_name(path).endswith(MSGPACK_SUFFIXES) and head[:1] == b"\x80"
    if files.get_name(path).endswith(MSGPACK_SUFFIXES):
        return True
    if head[at] == 0xD9 and len(head) > at + 1:
        length, start = head[at + 1], at + 2
    else:
        length, start = head[at] - 0xA0 if head[at] in _TEXT_FIRST_BYTES else 0, at + 1
    key, after = head[start : start + length], head[start + length : start + length + 1]
    try:
        return len(key) == length > 0 and key.decode("utf-8").isprintable() and after not in (b"", b"\xc1")
    except UnicodeDecodeError:
        return False


def read(path: str, section: str | None = None) -> ModelState:
    """Read the arrays of one file into sections (`params`, `opt_state`), and the other values as settings.

    Raises UnreadableError for a file of RLlib or without a Flax array, MalformedError for contradictions outside
    arrays. A contradictory array has `damage`, as has the entry at which a truncated file ends; the rest is read.
    """
    if path.lower().endswith(RLLIB_SUFFIX):
        raise UnreadableError(
            "is a state of Ray RLlib, which statecli does not read: RLlib unpickles text in this file, and this can "
            "run code; load the file only if you trust its author"
        )
    with ByteSource(path) as source:
        parser = Parser(source, mends=True)
        root = parser.value()
        if parser.at < source.size and not parser.truncation:
            raise MalformedError(
                f"{source.size - parser.at} bytes follow the state, which ends at byte {parser.at}; Flax refuses "
                "such a file"
            )
        tree = _Tree(source)
        root = tree.convert(root, "")
        if not tree.arrays and parser.truncation:
            raise MalformedError(parser.truncation.why)
        if not tree.arrays:
            raise UnreadableError("is a msgpack file without a Flax array, so statecli finds no tensor")
    reading = Reading(TensorDecoder({}), [])
    leaves = _move_into_section(list(_find_leaves(root, ())), section)
    settings = _add_keys(collect_settings(root, reading), leaves)
    tensors = _assign_owners([build_info(row, section_name, path) for section_name, row in _build_rows(leaves)])
    return ModelState(
        path,
        NAME,
        tuple(tensors),
        sections=tuple(dict.fromkeys(tensor.section for tensor in tensors)),
        metadata=settings,
        oddities=tuple(reading.oddities),
        optimizers=tuple(_collect_optimizer_facts(tensors)),
        traits=TRAITS,
    )


# --- arrays ----------------------------------------------------------------------------------------------------------


class _Tree:
    """Converter that replaces the encoded arrays in nested maps with tensors."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self.arrays = self._bytes = 0

    def convert(self, node: object, path: str) -> Any:
        """Replace the encoded arrays below `node` with tensors. `path` is the node's dotted name in the file."""
        if isinstance(node, Truncation):
            return mark_damaged(path, MalformedError(node.why))
        if isinstance(node, Blob):
            return self._decode_blob(node, path)
        if type(node) is list:
            return [self.convert(child, f"{path}.{n}") for n, child in enumerate(node)]
        if type(node) is not dict:
            return node
        children = {key: self.convert(child, f"{path}.{key}" if path else str(key)) for key, child in node.items()}
        return self._build_tensor(path, _join_parts, children) if _CHUNKED in children else children

    def _decode_blob(self, blob: Blob, path: str) -> Any:
        if blob.code == _ARRAY:
            self._count_array()
            return self._build_tensor(path, self._decode_array, blob)
        if blob.code == _COMPLEX:
            return self._decode_complex(blob)
        return self._decode_scalar(blob, path) if blob.code == _SCALAR else self._read_raw(blob.offset, blob.length)

    def _count_array(self) -> None:
        self.arrays += 1
        if self.arrays > MAX_ROWS:
            raise MalformedError(f"contains more than {MAX_ROWS} arrays, the limit of statecli")

    def _build_tensor(self, path: str, decode: Callable[[Any], Tensor], node: object) -> Tensor:
        """Decode a tensor. If its array is malformed, the tensor's `damage` has the reason."""
        try:
            return decode(node)
        except MalformedError as error:
            return mark_damaged(path, error)

    def _decode_array(self, blob: Blob) -> Tensor:
        value = Parser(self._source, blob.offset, blob.offset + blob.length).value()
        if type(value) is not list or len(value) != 3 or type(value[1]) is not str or not isinstance(value[2], Blob):
            raise MalformedError(
                "its array is not recorded in the form that Flax writes, a list of shape, dtype and bytes"
            )
        shape, name, data = _read_shape(value[0]), value[1], value[2]
        elements, size = prod(shape), data.length
        if name == "object":
            raise MalformedError(
                "has dtype object: its bytes are memory addresses of the process that wrote the file, not values"
            )
        if len(name) > _MAX_DTYPE_CHARS:
            raise MalformedError(
                f"its dtype name has {len(name):,} characters, more than statecli's limit of {_MAX_DTYPE_CHARS}"
            )
        dtype = name if name in ELEMENT_BITS else f"numpy {name}"
        if dtype is not name and elements and (size % elements or not size):
            raise MalformedError(f"{dtype} {quoting.shape(shape)}: {size} bytes do not fit {elements} elements")
        if dtype is name and elements * ELEMENT_BITS[name] // 8 != size:
            raise MalformedError(
                f"{name} {quoting.shape(shape)} takes {elements * ELEMENT_BITS[name] // 8} bytes, but the array "
                f"has {size}"
            )
        storage = ByteRange(self._source.path, data.offset, size)
        return Tensor(dtype, shape, elements, size, None, False, data=TensorData(storage, dtype, shape))

    def _decode_scalar(self, blob: Blob, path: str) -> Tensor | Scalar | bytes:
        """Decode a numpy scalar to a number. A scalar of any other type becomes text, or bytes if it is long.

        A scalar with a shape is a tensor, because Flax loads it as an array.
        """
        tensor = self._build_tensor(path, self._decode_array, blob)
        if tensor.data is None:
            raise MalformedError(tensor.damage or f"{path}: is not a scalar")
        if tensor.shape:
            self._count_array()
            return tensor
        raw = self._read_raw(tensor.data.storage.offset, tensor.nbytes)
        if len(raw) > _MAX_SHOWN_SCALAR_BYTES:
            return raw
        code = _NUMBERS.get(tensor.dtype)
        if code is not None:
            number: Scalar = struct.unpack(code, raw)[0]
            return number
        return f"{tensor.dtype} 0x{raw[::-1].hex()}"

    def _decode_complex(self, blob: Blob) -> str:
        value = Parser(self._source, blob.offset, blob.offset + blob.length).value()
        if type(value) is not list or len(value) != 2 or any(type(part) is not float for part in value):
            raise MalformedError("a complex number is not stored as a pair of floats")
        return str(complex(*value))

    def _read_raw(self, offset: int, length: int) -> bytes:
        self._bytes += length
        if self._bytes > _MAX_RAW_BYTES:
            raise MalformedError(f"has more than {_MAX_RAW_BYTES} bytes outside arrays, the limit of statecli")
        return self._source.read(offset, length)


def _read_shape(node: object) -> tuple[int, ...]:
    if type(node) is not list or any(type(size) is not int or size < 0 for size in node):
        raise MalformedError("its shape is not a list of sizes")
    if len(node) > MAX_DIMENSIONS:
        raise MalformedError(f"its shape has {len(node)} dimensions, more than statecli's limit of {MAX_DIMENSIONS}")
    if max(node, default=0) > MAX_ELEMENTS or prod(node) > MAX_ELEMENTS:
        raise MalformedError(f"shape {quoting.shape(node)} is impossible: 2^63 elements or more")
    return tuple(node)


def _list_numbered(node: object) -> list[Any] | None:
    """Return the items of a tuple that Flax saved as a map with the keys "0", "1"..., or None for any other map."""
    if type(node) is not dict or any(str(n) not in node for n in range(len(node))):
        return None
    return [node[str(n)] for n in range(len(node))]


def _iter_parts(node: dict[str, Any]) -> Iterator[Any]:
    for child in node.values():
        yield from child.values() if type(child) is dict else (child,)


def _join_parts(node: dict[str, Any]) -> Tensor:
    """Join an array that was cut into flat pieces."""
    if damage_note := next(
        (piece.note for piece in _iter_parts(node) if type(piece) is Tensor and piece.damage and piece.note), None
    ):
        raise MalformedError(damage_note.removeprefix("cannot be read: "))
    shape, pieces = _read_shape(_list_numbered(node.get("shape"))), _list_numbered(node.get("chunks"))
    if not pieces or any(type(piece) is not Tensor or piece.data is None for piece in pieces):
        raise MalformedError("Flax splits this large array into chunks, but its chunks are not a map of arrays")
    dtype, elements = pieces[0].dtype, sum(piece.elements for piece in pieces)
    if any(piece.dtype != dtype or len(piece.shape) != 1 for piece in pieces) or dtype not in ELEMENT_BITS:
        raise MalformedError("its chunks are not one-dimensional arrays of one numeric dtype")
    if elements != prod(shape):
        raise MalformedError(f"shape {quoting.shape(shape)} has {prod(shape)} elements, but its chunks have {elements}")
    starts = accumulate((piece.elements for piece in pieces), initial=0)
    boxes = tuple(Box((start,), piece.data) for start, piece in zip(starts, pieces, strict=False))
    size = elements * ELEMENT_BITS[dtype] // 8
    storage = ByteRange(pieces[0].data.storage.path, 0, size, boxes=Boxes((elements,), ELEMENT_BITS[dtype] // 8, boxes))
    note = f"in {len(pieces)} chunks"
    return Tensor(dtype, shape, elements, size, None, False, note=note, data=TensorData(storage, dtype, shape))


# --- sections --------------------------------------------------------------------------------------------------------


class _Leaf(msgspec.Struct, frozen=True):
    """Tensor of the file, with the keys of its section (`section`) and its keys inside the section (`keys`)."""

    section: tuple[str, ...]
    keys: tuple[str, ...]
    tensor: Tensor
    #: Keys of the file that lead to the tensor; `section` and `keys` are their texts.
    path: tuple[Any, ...]
    #: Whether the tensor is next to sections, for example the step of a TrainState.
    is_loose: bool = False

    @property
    def title(self) -> str:
        """Name of the section. If the whole file is a single section, its name is "model"."""
        return ".".join(self.section) if self.section or self.is_loose else "model"


def _find_leaves(root: Any, path: tuple[Any, ...]) -> Iterator[_Leaf]:
    """Yield all tensors. A map that contains a collection of Flax (`params`) is split into a section for each entry."""
    section = tuple(map(str, path))
    if not _is_split(root):
        for keys, tensor in _find_model_level(root):
            yield _Leaf(section, tuple(map(str, keys)), tensor, path + keys)
        return
    for key, child in root.items():
        if type(child) is Tensor:
            yield _Leaf(section, (str(key),), child, (*path, key), is_loose=True)
        elif _is_whole(str(key), child):
            for keys, tensor in _find_model_level(child):
                yield _Leaf((*section, str(key)), tuple(map(str, keys)), tensor, (*path, key, *keys))
        else:
            yield from _find_leaves(child, (*path, key))


def _is_split(node: object, depth: int = 0) -> bool:
    if type(node) is not dict or depth == _MAX_SECTION_DEPTH:
        return False
    container_keys = (key for key, child in node.items() if type(child) in (dict, list))
    if any(_PARAMS.search(str(key)) or key in _SECTION_KEYS for key in container_keys):
        return True
    return any(_is_split(child, depth + 1) for child in node.values())


def _is_whole(key: str, node: object) -> bool:
    """Return whether a map is a single section. In a TrainState, {"params": {"params": ...}} is a map of sections."""
    is_params_map = _PARAMS.search(key) is not None and type(node) is dict and "params" not in node
    return is_params_map or _OPTIMIZER.search(key) is not None or not _is_split(node)


def _find_model_level(root: object) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield each tensor below `root` in file order, with the keys that lead to the tensor."""
    stack: list[tuple[tuple[Any, ...], Any]] = [((), root)]
    while stack:
        keys, node = stack.pop()
        if type(node) is Tensor:
            yield keys, node
        items: Iterable[tuple[Any, Any]] = node.items() if type(node) is dict else ()
        items = enumerate(node) if type(node) is list else items
        stack.extend(reversed([((*keys, key), child) for key, child in items]))


def _move_into_section(leaves: list[_Leaf], section_path: str | None) -> list[_Leaf]:
    """Move the tensors whose names begin with `section_path` into a new section, unless this section exists."""
    if not section_path or any(f"{leaf.title}.".startswith(f"{section_path}.") for leaf in leaves):
        return leaves
    keys = tuple(section_path.split("."))
    paths = [(leaf, (*leaf.section, *leaf.keys)) for leaf in leaves]
    return [
        _Leaf(keys, path[len(keys) :], leaf.tensor, leaf.path)
        if path[: len(keys)] == keys and len(path) > len(keys)
        else leaf
        for leaf, path in paths
    ]


def _build_rows(leaves: list[_Leaf]) -> Iterator[tuple[str, DecodedTensor]]:
    """Yield a tensor row for each tensor. If the dotted name `a.b.c` is already used, the name is `['a']['b.c']`."""
    used_names: set[tuple[str, str]] = set()
    characters = 0
    for leaf in leaves:
        fqn = ".".join(leaf.keys) or "tensor"
        if (leaf.title, fqn) in used_names:
            fqn = "".join(f"[{key!r}]" for key in leaf.keys)
        used_names.add((leaf.title, fqn))
        characters += len(fqn)
        if characters > MAX_CHARACTERS:
            raise MalformedError(
                f"the tensor names have more than {MAX_CHARACTERS} characters in total, the limit of statecli; the "
                f"name beyond the limit begins with {fqn[:40]!r}"
            )
        yield leaf.title, _build_row(fqn, leaf)


def _add_keys(settings: Settings, leaves: list[_Leaf]) -> Settings:
    """For each section with ambiguous dotted names, add a setting that shows the keys of these tensors.

    Such keys contain dots or are numbers: `{"a.b": x}` and `{"a": {"b": x}}` both have the tensor `a.b`, but Flax does
    not load one into a model that has the other.
    """
    unusual_paths: dict[str, list[str]] = {}
    for leaf in leaves:
        if any(type(key) is not str or "." in key for key in leaf.path):
            start = f"{leaf.title}." if leaf.section else ""
            unusual_paths.setdefault(start, []).append("".join(f"[{_format_key(key)}]" for key in leaf.path))
    values = dict(settings.values)
    for start, paths in unusual_paths.items():
        key = f"{start}{TRAITS.key_setting}"
        while key in values:
            key += "'"
        first_path = paths[0] if len(paths[0]) <= _MAX_PATH_CHARS else f"{paths[0][:_MAX_PATH_CHARS]}..."
        more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        # The value has the form of a digest, because no text of the file is shown in this form.
        values[key] = f"{first_path}{more}, {compute_text_digest(' '.join(sorted(paths)))}"
    return replace(settings, values=values)


def _format_key(key: object) -> str:
    return repr(key) if type(key) in (str, int, float, bool, bytes, type(None)) else type(key).__name__


def _build_row(fqn: str, leaf: _Leaf) -> DecodedTensor:
    name = leaf.section[-1] if leaf.section else ""
    if leaf.is_loose or (OTHER_WORDS.search(name) and not _PARAMS.search(name)):
        return build_row(fqn, leaf.tensor, Kind.OTHER, Evidence.CONVENTION)
    if any(map(_OPTIMIZER.search, leaf.section)):
        return build_row(fqn, leaf.tensor, Kind.OPTIMIZER, Evidence.OPTIMIZER)
    if name in _BUFFERS:
        return DecodedTensor(fqn, leaf.tensor, Kind.BUFFER, Evidence.CONVENTION, persistent=True)
    return build_row(fqn, leaf.tensor, Kind.PARAMETER, Evidence.ASSUMED)


def _assign_owners(tensors: list[TensorInfo]) -> list[TensorInfo]:
    """Set the owner (a parameter) of each optimizer tensor, by the end of its name (`0.mu.Dense_0.kernel`)."""
    names = {tensor.fqn for tensor in tensors if tensor.kind is Kind.PARAMETER}
    return [
        replace(tensor, belongs_to=_find_owner(tensor.fqn, names)) if tensor.kind is Kind.OPTIMIZER else tensor
        for tensor in tensors
    ]


def _find_owner(fqn: str, names: set[str]) -> str | None:
    suffix = fqn
    while suffix:
        if suffix in names:
            return suffix
        suffix = suffix.partition(".")[2]
    return None


def _collect_optimizer_facts(tensors: list[TensorInfo]) -> Iterator[OptimizerFacts]:
    sections = dict.fromkeys(tensor.section for tensor in tensors if tensor.kind is Kind.OPTIMIZER)
    for section in sections:
        owners = {
            tensor.belongs_to: tensor.shape for tensor in tensors if tensor.section == section and tensor.belongs_to
        }
        names = tuple(name for name in owners if name)
        if names:
            yield OptimizerFacts(section, (OptimizerGroup(names, names, tuple(owners.values())),))
