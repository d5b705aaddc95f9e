"""safetensors: eight bytes of length, a JSON header, the tensors' bytes without holes.

Format: the safetensors README and its Rust validator (version 0.8), whose every check is repeated here; where the
validator accepts what readers disagree on (one name twice), this reader refuses. Nothing but the header is read.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

from msgspec.structs import replace

from statecli.errors import MalformedError
from statecli.formats._source import Source
from statecli.state import ByteRange, ModelState, Oddity, TensorData, TensorInfo

NAME = "safetensors"

#: safetensors' own limit.
MAX_HEADER = 100_000_000

#: Name in the header -> (torch's name, bits an element).
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


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001  # every format has the same signature
    """Whether the eighth byte starts a JSON object, after a length that is not absurd."""
    return len(head) > 8 and head[8:].lstrip(b" \n\r\t")[:1] == b"{" and int.from_bytes(head[:8], "little") < 2**40


def read(path: str) -> ModelState:
    """The header of one file as a `ModelState`: no device, no requires_grad, since the format records neither."""
    with Source(path) as source:
        header, start = _header(source)
        oddities: list[Oddity] = []
        metadata = _metadata(header.pop("__metadata__", None))
        tensors = _tensors(header, path, start, source.size)
    if source.head[8:9] != b"{":
        oddities.append(Oddity("padded-header", "white space before the header's first brace: other readers refuse it"))
    if start % 8:
        oddities.append(Oddity("misaligned", f"the tensors start at byte {start}, no multiple of 8"))
    return ModelState(path, NAME, tuple(_with_aliases(metadata, tensors)), metadata=metadata, oddities=tuple(oddities))


def _header(source: Source) -> tuple[dict[str, Any], int]:
    if source.size < 8:
        raise MalformedError(f"is truncated: {source.size} bytes, the header's length alone takes 8")
    length = int.from_bytes(source.read(0, 8), "little")
    if length > MAX_HEADER:
        raise MalformedError(f"its header claims {length} bytes, more than safetensors' limit of {MAX_HEADER}")
    if 8 + length > source.size:
        raise MalformedError(
            f"is truncated: its header claims {length} bytes, {source.size - 8} follow; copy or download it again"
        )
    raw = source.read(8, length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise MalformedError(f"its header is no valid UTF-8 near byte {8 + error.start}") from error
    except RecursionError as error:
        raise MalformedError("its header nests too deep to be one of safetensors") from error
    except ValueError as error:
        raise MalformedError(f"its header is no valid JSON: {error}") from error
    if type(header) is not dict:
        raise MalformedError("its header is no JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedError(f"its header names {twice!r} twice: readers disagree on which counts")
    return found


def _no_constant(text: str) -> None:
    raise MalformedError(f"its header holds {text}, which is no JSON")


def _metadata(node: Any) -> dict[str, Any]:
    if node is None:
        return {}
    if type(node) is not dict or any(type(value) is not str for value in node.values()):
        raise MalformedError("its __metadata__ holds something else than text")
    return node


def _tensors(header: dict[str, Any], path: str, start: int, size: int) -> list[TensorInfo]:
    tensors: list[TensorInfo] = []
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, bits, shape, begin, end = _entry(name, entry)
        elements = prod(shape)
        if elements * bits != (end - begin) * 8:
            raise MalformedError(
                f"{name}: {dtype} {list(shape)} takes {-(-elements * bits // 8)} bytes, its offsets hold {end - begin}"
            )
        note = None
        if dtype == "float4_e2m1fn":
            dtype, shape, elements, note = _packed(name, shape)
        data = TensorData(ByteRange(path, start + begin, end - begin), dtype, shape)
        # The format shares nothing: no two tensors may overlap, so each name is its own storage.
        tensors.append(TensorInfo(name, dtype, shape, elements, end - begin, saved=True, note=note, data=data))
        spans.append((begin, end, name))
    _tile(spans, size - start)
    return tensors


def _packed(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int, str]:
    """safetensors counts 4-bit values, torch counts the bytes that hold two of them; shown as torch does."""
    if not shape or shape[-1] % 2:
        raise MalformedError(f"{name}: F4 {list(shape)} does not fill whole bytes in its last dimension")
    packed = (*shape[:-1], shape[-1] // 2)
    return "float4_e2m1fn_x2", packed, prod(packed), f"stored as F4 {list(shape)}"


def _entry(name: str, entry: Any) -> tuple[str, int, tuple[int, ...], int, int]:
    if type(entry) is not dict:
        raise MalformedError(f"{name}: its header entry is no object")
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as error:
        raise MalformedError(f"{name}: its header entry has no {error.args[0]}") from error
    known = DTYPES.get(dtype) if type(dtype) is str else None
    if known is None:
        raise MalformedError(f"{name}: unknown dtype {str(dtype)[:40]!r}: written by a newer safetensors?")
    if type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        raise MalformedError(f"{name}: its shape or its offsets are no list")
    product = 1
    for number in (*shape, *offsets):
        if type(number) is not int or not 0 <= number < 2**63:
            raise MalformedError(f"{name}: its shape or its offsets hold {str(number)[:40]}")
    for number in shape:
        product *= number
        if product >= 2**64:
            raise MalformedError(f"{name}: shape {shape[:8]} is impossible: more than 2^64 elements")
    if offsets[1] < offsets[0]:
        raise MalformedError(f"{name}: its offsets run backwards: {offsets[0]} to {offsets[1]}")
    return known[0], known[1], tuple(shape), offsets[0], offsets[1]


def _tile(spans: list[tuple[int, int, str]], size: int) -> None:
    """The bytes after the header belong to exactly one tensor each: no hole, no overlap, nothing behind."""
    spans.sort()
    at, before = 0, "the header"
    for begin, end, name in spans:
        if begin < at:
            raise MalformedError(f"{name}: its bytes {begin} to {end} overlap those of {before}, which end at {at}")
        if begin > at:
            raise MalformedError(f"{name}: starts at byte {begin}, {before} ends at {at}: a hole that no tensor owns")
        at, before = end, name
    if at > size:
        raise MalformedError(
            f"{before}: ends at byte {at}, the file holds {size} bytes of tensors: "
            f"truncated, {at - size} bytes are missing"
        )
    if at < size:
        raise MalformedError(f"{size - at} bytes follow the last tensor ({before}): they belong to none")


def _with_aliases(metadata: dict[str, Any], tensors: list[TensorInfo]) -> list[TensorInfo]:
    """`save_model` drops the second name of a tied tensor and notes it in the metadata: dropped name -> kept name."""
    if not metadata:
        return tensors
    names = {tensor.fqn for tensor in tensors}
    dropped = {name: kept for name, kept in metadata.items() if kept in names and name not in names}
    if not dropped:
        return tensors
    targets = set(dropped.values())
    tied = {t.fqn: replace(t, storage=t.fqn, storage_bytes=t.nbytes) for t in tensors if t.fqn in targets}
    note = "dropped by save_model, kept under its other name"
    return [tied.get(t.fqn, t) for t in tensors] + [
        replace(tied[kept], fqn=name, note=note) for name, kept in dropped.items()
    ]
