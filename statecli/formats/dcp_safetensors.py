"""Shards written by `torch.distributed.checkpoint.HuggingFaceStorageWriter`: each has one rank's pieces of tensors.

`shard-00001-model-00001-of-00001.safetensors` and so on, without an index. The header's `DCP_SHARDING_INFO` says at
which offset of its tensor each piece begins; the tensor's shape is the extent of its pieces, as for torch's own reader,
and the number of shards is not recorded. Source: torch/distributed/checkpoint/hf_storage.py of torch 2.13.
"""

from __future__ import annotations

from math import prod

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS, nbytes
from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import (
    Box,
    Boxes,
    ByteRange,
    ModelState,
    Oddity,
    ReadFile,
    Settings,
    TensorData,
    TensorInfo,
)
from statecli.formats.safetensors import TRAITS as SHARD_TRAITS
from statecli.formats.shared.joined_states import build_unreadable_row
from statecli.formats.shared.tiling import Chunk, find_fault
from statecli.storage import checkpoint_folder, files, json_object

NAME = "dcp-safetensors"
TRAITS = replace(SHARD_TRAITS, is_header_and_tensors=False, is_in_pieces=True)

_SHARD = compile_on_use(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
#: Key of `__metadata__` with the offsets of the pieces, and all keys that torch writes. The other keys only name the
#: format.
SHARDING_INFO_KEY = "DCP_SHARDING_INFO"
_METADATA_KEYS = (SHARDING_INFO_KEY, "DCP_VERSION", "format")


def sniff(path: str, head: bytes) -> bool:  # noqa: ARG001
    """Return whether the path is a folder of HuggingFaceStorageWriter shards."""
    return files.is_folder(path) and bool(members(path))


def members(path: str) -> tuple[str, ...]:
    """List the names of the shards. Raises UnreadableError for a folder that cannot be listed."""
    return tuple(name for name in checkpoint_folder.list_files(path) if _SHARD.fullmatch(name))


def read(path: str, read_file: ReadFile) -> ModelState:
    """Read the shards and join the pieces of each tensor. Raises MalformedError for a shard without piece offsets."""
    names = members(path)
    files.prefetch(files.join(path, name) for name in names)
    pieces: dict[str, list[Box]] = {}
    metadata = {}
    for name in names:
        state = read_file(files.join(path, name))
        starts = _read_offsets(state, name)
        for tensor in state.tensors:
            pieces.setdefault(tensor.fqn, []).append(_build_piece(tensor, starts.get(tensor.fqn), name))
        metadata.update({key: value for key, value in state.metadata.values.items() if key not in _METADATA_KEYS})
    tensors = tuple(_join_pieces(path, fqn, boxes) for fqn, boxes in sorted(pieces.items()))
    count = f"{len(names)} shard{'s' * (len(names) > 1)}"
    oddity = Oddity(
        "shards-uncounted",
        f"statecli read {count}; no file records the number of shards, so statecli cannot detect a missing shard",
    )
    return ModelState(path, NAME, tensors, metadata=Settings(metadata), oddities=(oddity,), traits=TRAITS)


def _read_offsets(state: ModelState, name: str) -> dict[str, tuple[int, ...]]:
    """Return the start of the shard's piece of each tensor, by tensor name: an offset for each dimension."""
    text = state.metadata.values.get(SHARDING_INFO_KEY)
    if type(text) is not str:
        raise MalformedError(
            f"the header of {name} has no {SHARDING_INFO_KEY}, so the positions of its tensor slices are unknown"
        )
    label = f"{SHARDING_INFO_KEY} of {name}"
    document = json_object.parse_object(text.encode("utf-8", "surrogatepass"), label).document
    offsets = {}
    for fqn, entry in document.items():
        start = entry.get("saved_offsets") if type(entry) is dict else None
        if type(start) is list and all(type(n) is int and 0 <= n < 2**63 for n in start):
            offsets[fqn] = tuple(start)
    return offsets


def _build_piece(tensor: TensorInfo, start: tuple[int, ...] | None, name: str) -> Box:
    data = tensor.data
    if data is None or start is None or len(start) != len(data.shape):
        raise MalformedError(
            f"{quoting.name(tensor.fqn)}: {SHARDING_INFO_KEY} of {name} does not record the offset of this tensor slice"
        )
    return Box(start, data)


def _join_pieces(path: str, fqn: str, boxes: list[Box]) -> TensorInfo:
    """Join the pieces of a tensor. If pieces are missing, overlap or disagree, the tensor row is unreadable."""
    dtype = boxes[0].data.dtype
    chunks = [Chunk(box.start, box.data.shape) for box in boxes]
    parts = tuple(box for box in boxes if 0 not in box.data.shape)
    shape = tuple(map(max, zip(*(chunk.stop for chunk in chunks), strict=False)))
    fault = _find_disagreement(boxes)
    if fault is None and 0 not in shape:
        fault = find_fault(shape, [chunk for chunk in chunks if 0 not in chunk.shape])
    if fault:
        return build_unreadable_row(fqn, path, f"{fault}; copy the folder again, or save the checkpoint again")
    elements = prod(shape)
    storage = ByteRange(path, 0, nbytes(dtype, elements), boxes=Boxes(shape, ELEMENT_BITS[dtype] // 8, parts))
    data = parts[0].data if len(parts) == 1 else TensorData(storage, dtype, shape)
    note = f"{len(parts)} chunks" if len(parts) > 1 else None
    return TensorInfo(fqn, dtype, shape, elements, nbytes(dtype, elements), saved=True, note=note, data=data)


def _find_disagreement(boxes: list[Box]) -> str | None:
    kinds = list(dict.fromkeys(f"{box.data.dtype} with {len(box.data.shape)} dimensions" for box in boxes))
    return f"the tensor is {kinds[0]} in one shard, but {kinds[1]} in another" if len(kinds) > 1 else None
