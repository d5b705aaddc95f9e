"""safetensors: the header's length in eight bytes, a JSON header, then the tensors' bytes without gaps.

Format: the safetensors README and its Rust validator (version 0.8). All checks of the validator are repeated here. A
file that the validator accepts but programs read differently (one name twice) is refused. Only the header is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import MalformedError
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import ByteRange, ModelState, NoteKind, Oddity, Settings, TensorData, TensorInfo
from statecli.storage import files, json_object
from statecli.storage.byte_source import ByteSource

NAME = "safetensors"
TRAITS = FormatTraits(
    keeps_order=False,
    settings_are_text=True,
    drops_tied_names=True,
    own_settings=frozenset(("format",)),  # the framework that wrote the tensors
    is_header_and_tensors=True,
)

#: Maximum size of the header in bytes: the limit of safetensors.
MAX_HEADER_BYTES = 100_000_000
#: Maximum depth of nested containers, including the header itself: the limit of serde_json, the parser of safetensors.
MAX_DEPTH = 127
#: Note of the row for the dropped name of a tied tensor.
_DROPPED_NOTE = "save_model stored this shared tensor under another name"

#: Name of a dtype in the header -> (torch's name, bits per element).
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "F4": ("float4_e2m1fn", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "F32": ("float32", 32),
    "C64": ("complex64", 64),
    "F64": ("float64", 64),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
}


def sniff(path: str, head: bytes) -> bool:
    """Return whether the file begins like safetensors: an eight-byte length that is not text, then a JSON object.

    A file shorter than eight bytes is recognised by name.
    """
    if len(head) <= 8:
        return files.get_name(path).endswith(".safetensors")
    if not head[8:].lstrip(b"\xef\xbb\xbf \n\r\t").startswith(b"{"):
        return False
    return int.from_bytes(head[:8], "little") < 2**40 or not head[:8].isascii()


def read(path: str, section: str | None = None) -> ModelState:  # noqa: ARG001  # a file has one section
    """Read the header of one file. The format records neither devices nor requires_grad.

    Each name of a tied tensor that `save_model` moved to `__metadata__` becomes a row of its own. Raises
    UnreadableError and MalformedError, without the path.
    """
    with ByteSource(path) as source:
        raw, start = _read_raw_header(source)
        try:
            metadata, entries = _parse_plain_header(raw)
            del raw  # free the memory, because `raw` is as large as a fifth of the rows
            tensors = _build_tensors(entries, path, start, source.size)
            repeats: list[json_object.Repeat] = []
        except (_NotPlain, MalformedError, msgspec.MsgspecError, RecursionError):
            # The strict parser reads unusual headers too, and has an error message for every fault.
            raw, start = _read_raw_header(source)
            parsed = json_object.parse_object(raw, "its header")
            del raw
            header, repeats = parsed.document, parsed.repeats
            metadata = _check_metadata(header.pop("__metadata__", None))
            json_object.refuse_repeats((repeat for repeat in repeats if repeat.owner is not metadata), "its header")
            tensors = _build_tensors(_check_entries(header), path, start, source.size)
    keys = (quoting.quote(repeat.key) for repeat in repeats)
    oddities = [Oddity("metadata-set-twice", f"__metadata__ sets {key} twice") for key in keys]
    if source.head[8:9] != b"{":
        oddities.append(Oddity("padded-header", "the header starts with white space; other readers refuse such a file"))
    if start % 8:
        oddities.append(
            Oddity(
                "misaligned",
                f"the tensor data starts at byte {start}, not at a multiple of 8; memory-mapped tensors may be "
                "misaligned, which is slow, or fails on some machines",
            )
        )
    return ModelState(
        path,
        NAME,
        tuple(_add_aliases(metadata, tensors)),
        metadata=Settings(metadata),
        oddities=tuple(oddities),
        traits=TRAITS,
    )


def _read_raw_header(source: ByteSource) -> tuple[bytes, int]:
    """Return the header's bytes and the offset of the first tensor."""
    if source.size < 8:
        raise MalformedError(
            f"is truncated: the file has {source.size} bytes, but a safetensors file begins with 8 bytes for the "
            "length of its header; copy or download the file again"
        )
    length = int.from_bytes(source.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise MalformedError(f"its header claims {length} bytes, more than safetensors' limit of {MAX_HEADER_BYTES}")
    if 8 + length > source.size:
        raise MalformedError(
            f"is truncated: its header claims {length} bytes, but {source.size - 8} follow; copy or download the "
            "file again"
        )
    return source.read(8, length), 8 + length


def _check_metadata(node: object) -> dict[str, Any]:
    if node is None:
        return {}
    if type(node) is not dict:
        raise MalformedError(f"its __metadata__ is not a JSON object but {quoting.value(node)}")
    for key, value in node.items():
        if type(value) is not str:
            raise MalformedError(
                f"its __metadata__ maps {quoting.quote(key)} to {quoting.value(value)}, not to a string"
            )
    return node


class HeaderEntry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Header entry of one tensor. `data_offsets`: begin and end in bytes, from the first byte of the tensor data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _NotPlain(Exception):
    """Error: the header has an escape, a repeated key or non-ASCII text, and needs the strict parser."""


_RAW_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(HeaderEntry)
_METADATA = msgspec.json.Decoder(dict[str, str])


def _parse_plain_header(raw: bytes) -> tuple[dict[str, str], Iterator[tuple[str, HeaderEntry]]]:
    """Parse a header in the form that libraries write. This takes a quarter of the strict parser's time and memory.

    Raises `_NotPlain`, MalformedError or msgspec's errors for any other header, even if the strict parser would accept
    the header. msgspec silently keeps the last of two equal keys. Colons reveal equal keys: each key has a colon, and
    all others are in names and metadata texts. No text with a backslash (an escape) is accepted.
    """
    if not raw.isascii() or b"\\" in raw:
        raise _NotPlain
    json_object.check_brackets(raw, "its header")
    entries = _RAW_ENTRIES.decode(raw)
    metadata = _METADATA.decode(entries.pop("__metadata__")) if "__metadata__" in entries else None
    texts = "".join([*entries, *(metadata or {}), *(metadata or {}).values()])
    pairs = 4 * len(entries) + (0 if metadata is None else 1 + len(metadata))
    if raw.count(b":") != pairs + texts.count(":"):
        raise _NotPlain
    names, decoded = list(entries), list(map(_ENTRY.decode, entries.values()))
    decoded.reverse()
    # `pop` frees the memory of an entry for the next row: 100,000 entries take 50 MB, and so do their rows.
    return metadata or {}, ((name, decoded.pop()) for name in names)


def _check_entries(header: dict[str, Any]) -> Iterator[tuple[str, HeaderEntry]]:
    for name in list(header):
        yield name, _check_entry(name, header.pop(name))


def _build_tensors(entries: Iterator[tuple[str, HeaderEntry]], path: str, start: int, size: int) -> list[TensorInfo]:
    tensors: list[TensorInfo] = []
    at, is_adjacent = 0, True
    #: Shared objects for tensors of equal dtype and shape, because most tensors have the dtype and shape of other
    #: tensors.
    layouts: dict[tuple[str, tuple[int, ...]], _Layout] = {}
    for name, entry in entries:
        begin, end = entry.data_offsets
        layout = layouts.get((entry.dtype, entry.shape))
        if layout is None:
            layout = layouts[entry.dtype, entry.shape] = _check_layout(name, entry)
        if not 0 <= begin <= end < 2**63:
            _check_offsets(name, begin, end)
        if layout.bits != (end - begin) * 8:
            raise _create_size_error(name, layout, end - begin)
        is_adjacent = is_adjacent and begin == at
        at = begin + layout.nbytes
        data = TensorData(ByteRange(path, start + begin, layout.nbytes), layout.dtype, layout.shape)
        # Each name is its own storage, because tensors of a file may not overlap.
        tensors.append(
            TensorInfo(
                name,
                layout.dtype,
                layout.shape,
                layout.elements,
                layout.nbytes,
                saved=True,
                note=layout.note,
                data=data,
            )
        )
    # Fast check: libraries write each tensor at the end of the previous tensor.
    if not (is_adjacent and tensors and at == size - start):
        spans = _list_spans(tensors, start)
        _check_coverage(spans if is_adjacent else sorted(spans), size - start)
    return tensors


class _Layout(msgspec.Struct, gc=False):
    """Properties shared by all tensors of one dtype and shape. `bits` is the size of all elements together."""

    dtype: str
    shape: tuple[int, ...]
    elements: int
    bits: int
    nbytes: int
    note: str | None = None


def _check_layout(name: str, entry: HeaderEntry) -> _Layout:
    if entry.dtype not in DTYPES:
        raise _create_dtype_error(name, entry.dtype)
    dtype, bits = DTYPES[entry.dtype]
    shape = entry.shape
    _check_dims(name, shape)
    elements = prod(shape)
    layout = _Layout(dtype, shape, elements, elements * bits, elements * bits // 8)
    if bits != 4 or elements % 2:
        return layout
    # safetensors counts 4-bit values, torch counts bytes (two values each). The row shows torch's count.
    if not shape or shape[-1] % 2:
        raise MalformedError(
            f"{quoting.name(name)}: F4 {quoting.shape(shape)} does not fill whole bytes, because its last "
            "dimension is odd"
        )
    packed_shape = (*shape[:-1], shape[-1] // 2)
    note = f"stored as F4 {quoting.shape(shape)}"
    return _Layout("float4_e2m1fn_x2", packed_shape, prod(packed_shape), layout.bits, layout.nbytes, note)


def _create_size_error(name: str, layout: _Layout, nbytes_stored: int) -> MalformedError:
    takes = f"{layout.bits // 8} bytes" if layout.bits % 8 == 0 else f"{layout.bits} bits"
    return MalformedError(
        f"{quoting.name(name)}: {layout.dtype} {quoting.shape(layout.shape)} takes {takes}, but its data_offsets "
        f"cover {nbytes_stored} bytes"
    )


def _create_dtype_error(name: str, dtype: object) -> MalformedError:
    return MalformedError(
        f"{quoting.name(name)}: unknown dtype {quoting.value(dtype)}; a newer safetensors may have written the file"
    )


def _check_entry(name: str, entry: object) -> HeaderEntry:
    """Check the types in a header entry from the strict parser, and return the entry."""
    if type(entry) is not dict:
        raise MalformedError(f"{quoting.name(name)}: its header entry is not a JSON object but {quoting.value(entry)}")
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as error:
        raise MalformedError(f"{quoting.name(name)}: its header entry has no {error.args[0]}") from error
    if type(dtype) is not str or dtype not in DTYPES:
        raise _create_dtype_error(name, dtype)
    if type(shape) is not list:
        raise MalformedError(f"{quoting.name(name)}: its shape is not a list but {quoting.value(shape)}")
    _check_dims(name, shape)
    if type(offsets) is not list or len(offsets) != 2:
        raise MalformedError(f"{quoting.name(name)}: its data_offsets are not a list of two numbers")
    _check_offsets(name, *offsets)
    if len(entry) > 3 and json_object.is_deeper(entry, MAX_DEPTH - 1):
        raise MalformedError(f"{quoting.name(name)}: its header entry is nested too deeply")
    return HeaderEntry(dtype, tuple(shape), (offsets[0], offsets[1]))


def _check_dims(name: str, shape: Sequence[Any]) -> None:
    _check_numbers(name, shape, "shape")
    product = 1
    for dim in shape:
        product *= dim
        # Checked for each product, because safetensors multiplies in 64 bits and stops here even if a later size is 0.
        if product >= 2**64:
            raise MalformedError(
                f"{quoting.name(name)}: shape {quoting.shape(shape)} is impossible: over 2^64 elements"
            )


def _check_offsets(name: str, begin: Any, end: Any) -> None:
    _check_numbers(name, (begin, end), "data_offsets")
    if end < begin:
        raise MalformedError(f"{quoting.name(name)}: its data_offsets begin at {begin}, but end at {end}")


def _check_numbers(name: str, numbers: Sequence[Any], label: str) -> None:
    for number in numbers:
        if type(number) is not int or not 0 <= number < 2**63:
            raise MalformedError(
                f"{quoting.name(name)}: its {label} contains {quoting.value(number)}; expected integers of 0 or more"
            )


def _list_spans(tensors: Iterable[TensorInfo], start: int) -> Iterator[tuple[int, int, str]]:
    for tensor in tensors:
        if tensor.data is not None:
            storage = tensor.data.storage
            yield storage.offset - start, storage.offset - start + storage.length, tensor.fqn


def _check_coverage(spans: Iterable[tuple[int, int, str]], size: int) -> None:
    """Check that each byte after the header belongs to exactly one tensor: no hole, no overlap, no trailing bytes."""
    at, previous_name = 0, None
    for begin, end, name in spans:
        if begin != at:
            raise _create_gap_error(name, begin, end, at, previous_name)
        at, previous_name = end, name
    preceding = "the header" if previous_name is None else quoting.name(previous_name)
    if at > size:
        raise MalformedError(
            f"{preceding}: ends at byte {at}, but the file has {size} bytes of tensors: truncated, {at - size} bytes "
            "are missing; copy or download the file again"
        )
    if at < size:
        raise MalformedError(
            f"{size - at} bytes at the end of the file belong to no tensor: {preceding} ends at byte "
            f"{at} of {size} bytes of tensor data"
        )


def _create_gap_error(name: str, begin: int, end: int, at: int, previous_name: str | None) -> MalformedError:
    preceding = "the header" if previous_name is None else quoting.name(previous_name)
    if begin < at:
        return MalformedError(
            f"{quoting.name(name)}: its bytes {begin} to {end} overlap {preceding}, which ends at byte {at}"
        )
    return MalformedError(
        f"{quoting.name(name)}: starts at byte {begin}, but {preceding} ends at byte {at}: the {begin - at} bytes "
        "between belong to no tensor"
    )


def _may_be_dropped(name: str, kept_name: str) -> bool:
    """Return whether `save_model` may have dropped the tensor `name` and kept its values under the name `kept_name`.

    Both names must have the same last part (`weight`). All other metadata are settings.
    """
    return name.rpartition(".")[2] == kept_name.rpartition(".")[2]


def _add_aliases(metadata: dict[str, Any], tensors: list[TensorInfo]) -> list[TensorInfo]:
    """Add a tensor row for each tied name that `save_model` dropped. The metadata maps the name to the stored name."""
    metadata = {name: kept_name for name, kept_name in metadata.items() if _may_be_dropped(name, kept_name)}
    if not metadata:
        return tensors
    names = {tensor.fqn for tensor in tensors}
    dropped_names = {
        name: kept_name for name, kept_name in metadata.items() if kept_name in names and name not in names
    }
    if not dropped_names:
        return tensors
    targets = set(dropped_names.values())
    tied_rows = {t.fqn: replace(t, storage=t.fqn, storage_bytes=t.nbytes) for t in tensors if t.fqn in targets}
    return [tied_rows.get(t.fqn, t) for t in tensors] + [
        replace(tied_rows[kept_name], fqn=name, note=_DROPPED_NOTE, note_kind=NoteKind.STORED_ELSEWHERE)
        for name, kept_name in dropped_names.items()
    ]
