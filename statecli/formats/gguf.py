"""GGUF, the file format of llama.cpp: a header with metadata and tensor entries, then the tensors' bytes.

Format: docs/gguf.md of ggml, gguf.cpp of llama.cpp and the package gguf 0.19 (versions 2 and 3, either byte order).
Only the header is read. Arrays of the metadata, for example the vocabulary, are skipped and shown as a count and a
digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import msgspec

from statecli.core import quoting
from statecli.core.errors import MalformedError
from statecli.core.format_traits import FormatTraits
from statecli.core.ggml_types import BLOCK_SIZES, PACKING_PREFIX, QUANTIZED_TYPES, TORCH_TYPES
from statecli.core.model_state import (
    ByteRange,
    ChatTemplate,
    ModelState,
    Oddity,
    Packing,
    Place,
    Scalar,
    TensorData,
    TensorInfo,
)
from statecli.core.oddity_kind import OddityKind
from statecli.formats.shared.gguf_header import Header, decode_text, read_metadata
from statecli.formats.shared.joined_states import mark_unreadable
from statecli.storage.byte_source import ByteSource

NAME = "gguf"
TRAITS = FormatTraits(
    mixed_dtypes="each tensor of a GGUF file has its own dtype, and the loading program chooses the compute dtype",
    settings_vocabulary=NAME,
)

#: Maximum number of tensors and of keys in a file, and of dimensions of a tensor.
MAX_TENSORS = 1_000_000
MAX_KEYS = 100_000
MAX_DIMS = 31


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the file begins with the magic of GGUF, in either byte order."""
    return head.startswith(b"GGUF")


def read(path: str, section: str | None = None) -> ModelState:  # noqa: ARG001  # a file has one section
    """Read the header of one file. The format records neither devices nor requires_grad.

    Shapes are in torch's order: the file has the fastest dimension first. A quantized tensor has as many elements as
    values; `nbytes` is its size in the file. A tensor of unknown type, with incomplete blocks, or with shared or
    missing bytes is damaged, and the rest is read. Raises UnreadableError and MalformedError, without the path, for an
    unreadable header.
    """
    with ByteSource(path) as source:
        header = Header(source)
        tensors, keys = _read_counts(header)
        oddities: list[Oddity] = []
        templates: list[ChatTemplate] = []
        settings = read_metadata(header, keys, oddities, templates)
        metadata = settings.values
        entries = _read_lines(header, tensors)
        alignment = _read_alignment(metadata)
        start = _pad(header.at, alignment)
        sized_entries = [(line, _build_row(line, path, start, header.is_big_endian)) for line in entries]
        lines, twice = _drop_repeats(entries)
        rows: dict[str, TensorInfo] = {}
        for _, row in sized_entries:
            rows.setdefault(row.fqn, row)
        spans = sorted((line.offset, line.offset + rows[line.name].nbytes, line.name) for line in lines)
        damaged_list = _find_damaged_list(sized_entries, source.size - start, alignment)
        for name, why in (twice | _find_misplaced(spans, start, source.size) | damaged_list).items():
            rows[name] = mark_unreadable(rows[name], path, why)
        oddities += _find_misaligned(spans, alignment)
        if not any(row.damage for row in rows.values()):
            oddities += _find_gaps(spans, source, start, alignment)
    return ModelState(
        path,
        NAME,
        tuple(rows.values()),
        metadata=settings,
        oddities=(*oddities, *_note_part(metadata)),
        traits=TRAITS,
        chat_templates=tuple(templates),
    )


def _read_counts(header: Header) -> tuple[int, int]:
    """Read the numbers of tensors and of metadata keys."""
    tensors = header.read_number("Q", "the number of tensors")
    keys = header.read_number("Q", "the number of metadata keys")
    if tensors > MAX_TENSORS or keys > MAX_KEYS:
        raise MalformedError(
            f"the header claims {tensors} tensors and {keys} metadata keys, but statecli's limits are "
            f"{MAX_TENSORS} and {MAX_KEYS}"
        )
    return tensors, keys


# --- metadata --------------------------------------------------------------------------------------------------------


def _read_alignment(metadata: Mapping[str, Scalar]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise MalformedError(
            f"the metadata key general.alignment is {quoting.value(alignment)}, but must be a power of two"
        )
    return alignment


def _note_part(metadata: Mapping[str, Scalar]) -> list[Oddity]:
    count, number, total = (metadata.get(f"split.{key}") for key in ("count", "no", "tensors.count"))
    if type(count) is not int or type(number) is not int or count < 2:
        return []
    total_text = f" (the shards have {total:,} tensors in total)" if type(total) is int else ""
    message = f"this file is shard {number + 1} of {count}{total_text}; give the folder to read all shards as one model"
    return [Oddity(OddityKind.ONE_PART.value, message)]


# --- tensors ---------------------------------------------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True):
    """Header entry of a tensor. `offset` counts from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_lines(header: Header, count: int) -> list[_Line]:
    lines = []
    for n in range(count):
        label = f"entry {n + 1} of {count} in the list of tensors"
        lines.append(_read_line(header, decode_text(header.read_text(label), label)))
    return lines


def _drop_repeats(entries: Sequence[_Line]) -> tuple[list[_Line], dict[str, str]]:
    """Return the first entry of each name, and an error message for each name that has several entries."""
    counts = Counter(line.name for line in entries)
    first_lines = {line.name: line for line in reversed(entries)}
    message = (
        "the header lists this tensor {} times; different programs may read different entries: convert the model again"
    )
    repeats = {name: message.format(count) for name, count in counts.items() if count > 1}
    return [first_lines[name] for name in counts], repeats


def _read_line(header: Header, name: str) -> _Line:
    """Read the rest of a tensor's entry after its name."""
    label = f"the header entry of {quoting.name(name)}"
    dims = header.read_number("I", label)
    if dims > MAX_DIMS:
        raise MalformedError(f"{quoting.name(name)}: claims {dims} dimensions, but ggml has at most 4")
    shape = header.read_numbers("Q", dims, label)[::-1]
    if max(shape, default=0) >= 2**63 or prod(shape) >= 2**63:
        raise MalformedError(f"{quoting.name(name)}: shape {quoting.shape(shape)} is impossible: 2^63 elements or more")
    return _Line(name, shape, *header.read_pair(label))


def _build_row(line: _Line, path: str, start: int, is_big_endian: bool) -> TensorInfo:
    elements = prod(line.shape)
    data: TensorData | None = None
    if line.kind in TORCH_TYPES:
        dtype, size = TORCH_TYPES[line.kind]
        storage = ByteRange(path, start + line.offset, elements * size, big_endian=is_big_endian and size > 1)
        data = TensorData(storage, dtype, line.shape)
        return TensorInfo(line.name, dtype, line.shape, elements, elements * size, saved=True, data=data)
    name = QUANTIZED_TYPES.get(line.kind)
    if name is None:
        return _build_damaged_row(
            line, path, f"type {line.kind}", f"type {line.kind} is unknown; a newer llama.cpp may have written the file"
        )
    values, size = BLOCK_SIZES[name]
    if not line.shape or line.shape[-1] % values:
        rows = f"its last dimension must be a multiple of {values}"
        return _build_damaged_row(line, path, name, f"{name} {quoting.shape(line.shape)}: {rows}")
    nbytes = elements // values * size
    note = f"{values} values in {size} bytes"
    if is_big_endian:
        # Byte order within a block is unknown: it differs between the programs that write such files.
        note += ", big-endian: statecli does not read the values"
    else:
        storage = ByteRange(path, start + line.offset, elements * 4, packing=Packing(f"{PACKING_PREFIX}{name}", nbytes))
        data = TensorData(storage, "float32", line.shape)
    return TensorInfo(line.name, name, line.shape, elements, nbytes, saved=True, note=note, data=data)


def _build_damaged_row(line: _Line, path: str, dtype: str, why: str) -> TensorInfo:
    return mark_unreadable(TensorInfo(line.name, dtype, line.shape, prod(line.shape), 0, saved=True), path, why)


#: Begin and end of a tensor, in bytes from the first tensor's first byte, and the tensor's name.
_Span = tuple[int, int, str]


def _find_damaged_list(entries: Sequence[tuple[_Line, TensorInfo]], data_bytes: int, alignment: int) -> dict[str, str]:
    """Return a message for all tensors if the last entry is unreadable and contradicts the entry before.

    A tensor begins where the tensor before ends, with or without padding. Otherwise the list may have lost or gained a
    byte, so that the place of the first tensor is unknown. `entries`: all entries, even those with a repeated name.
    """
    ends = [0, *(line.offset + row.nbytes for line, row in entries)]
    if not entries or ends[-2] > data_bytes or any(row.damage for _, row in entries[-2:-1]):
        return {}
    (line, row), end_before = entries[-1], ends[-2]
    is_outside = row.damage or line.offset < end_before or ends[-1] > data_bytes
    if not is_outside or line.offset in (end_before, _pad(end_before, alignment)):
        return {}
    reason = (
        f"the list of tensors is damaged: {quoting.name(line.name)} begins at byte {line.offset} of the data, not "
        f"{_pad(end_before, alignment)}; copy or download the file again"
    )
    return {other.name: reason for other, _ in entries}


def _pad(end: int, alignment: int) -> int:
    return -(-end // alignment) * alignment


def _find_misplaced(spans: list[_Span], start: int, size: int) -> dict[str, str]:
    """Return messages for tensors beyond the end of the file and for overlapping tensors."""
    beyond = {
        name: (
            f"ends at byte {start + stop}, but the file has {size} bytes: truncated, {start + stop - size} "
            "bytes are missing; copy or download the file again"
        )
        for begin, stop, name in spans
        if stop > begin and start + stop > size
    }
    problems = dict(beyond)
    last: _Span = (0, 0, "")
    for span in spans:
        if span[0] == span[1] or span[2] in beyond:
            continue
        if span[0] < last[1]:
            # Report the overlap for both tensors, because the header does not show which of them is wrong.
            problems.setdefault(last[2], _describe_overlap(last, span))
            problems[span[2]] = _describe_overlap(span, last)
        last = max(last, span, key=lambda span: span[1])
    return problems


def _describe_overlap(span: _Span, other: _Span) -> str:
    return f"its bytes {span[0]} to {span[1]} overlap bytes {other[0]} to {other[1]} of {quoting.name(other[2])}"


def _find_misaligned(spans: list[_Span], alignment: int) -> Iterator[Oddity]:
    names = [name for begin, _, name in spans if begin % alignment]
    if names:
        message = (
            f"these tensors do not start at a multiple of {alignment} bytes, so llama.cpp refuses them: "
            f"{quoting.names(names)}"
        )
        yield Oddity("askew", message, names[0])


def _find_gaps(spans: list[_Span], source: ByteSource, start: int, alignment: int) -> Iterator[Oddity]:
    """Yield oddities for unused bytes between and after the tensors, if they are longer than padding."""
    ends = [(0, "the header"), *((stop, name) for _, stop, name in spans)]
    begins = [*(begin for begin, _, _ in spans), source.size - start]
    holes = [
        (quoting.name(name), Place(source.path, start + stop, begin - stop))
        for (stop, name), begin in zip(ends, begins, strict=True)
        if begin >= stop + alignment
    ]
    trailing_hole = holes.pop() if holes and holes[-1][1].offset + holes[-1][1].length == source.size else None
    if holes:
        (name, place), total = holes[0], sum(place.length for _, place in holes)
        position = f"in {len(holes)} places, the first after {name}," if len(holes) > 1 else f"after {name}"
        yield Oddity(OddityKind.GAP.value, f"{total} bytes {position} belong to no tensor", place=place)
    if trailing_hole:
        yield Oddity(
            OddityKind.SUFFIXED.value,
            f"{trailing_hole[1].length} bytes follow the last tensor, {trailing_hole[0]}",
            place=trailing_hole[1],
        )
