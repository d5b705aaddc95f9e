"""Compute a digest of each tensor's elements that does not depend on the storage of the elements.

The digest hashes the logical elements in C order, each in its dtype, little-endian. Strides, shards, byte order and
shared storages have no effect; torch's lazy conjugation and negation are applied. -0.0 and 0.0 differ. A
tensor other than a single strided view has the digest of a text with one line per part, sorted by name:

    indices int64 [2, 5] 1f3a…
    values float32 [5] 77b0…

For compressed columns, the text begins with a line that names the layout. A quantized tensor has the digest of its
codes, its scheme, and its scale and zero point, per tensor or per channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.digest_algorithm import Algorithm, NewHasher, load_hasher
from statecli.core.dtypes import contiguous_strides
from statecli.core.errors import StateError, UnreadableError, option
from statecli.core.model_state import Quantizer, TensorData, TensorInfo
from statecli.values.data_task import TensorTask
from statecli.values.elements import COMPLEX, NUMPY_TYPES, Array, find_element, require_element
from statecli.values.ggml_blocks import to_stored_blocks
from statecli.values.neighbours import find_neighbour, read_neighbours
from statecli.values.ranges import prefetch, sort_by_place
from statecli.values.read import Strided, explain_overlap, is_packed, open_view, read_items
from statecli.workers import pool
from statecli.workers.task import catch_error

#: Number of bytes read and hashed at a time; measured: neither more nor less is faster.
BLOCK_BYTES = 256 << 10


@with_denormals
def compute_digests(
    tensors: Sequence[TensorInfo],
    algorithm: Algorithm,
    *,
    jobs: int = 0,
    progress: pool.Progress | None = None,
    derived: bool = False,
) -> list[str | None]:
    """Return the digest of each tensor in hexadecimal, or None if the tensor has no values.

    Tied tensors are read once. `jobs` is the number of workers, 0 for a worker per core. `derived`: see
    `pool.run_tasks`.

    Raises:
        UnreadableError, MalformedError: The elements of a tensor cannot be read; names file and tensor.
        MissingDependency: The package of the algorithm is not installed.
    """
    load_hasher(algorithm)
    first: dict[object, TensorInfo] = {}
    for tensor in tensors:
        if tensor.data is not None or tensor.parts:
            first.setdefault(_content_key(tensor), tensor)

    tasks = sort_by_place([DigestTask(tensor) for tensor in first.values()], lambda task: task.tensor.ranges)
    digests = pool.run_tasks(
        digest_batch,
        algorithm,
        tasks,
        jobs=jobs,
        on_batch=pool.report_batches(progress),
        absent="",
        derived=derived,
        raise_errors=True,
    )
    digest_of_content = {_content_key(task.tensor): str(digest) for task, digest in zip(tasks, digests, strict=True)}
    return [digest_of_content.get(_content_key(tensor)) for tensor in tensors]


class DigestTask(TensorTask, frozen=True, gc=False):
    """Compute the digest of a tensor."""

    @property
    def identity(self) -> object:
        """The tensor, which identifies the task."""
        return self.tensor


@with_denormals
def digest_batch(algorithm: Algorithm, tasks: Sequence[DigestTask]) -> list[str | StateError]:
    """Return the digest or the error of each tensor."""
    new_hasher = load_hasher(algorithm)
    tensors = [task.tensor for task in tasks]
    digests = _digest_neighbours(tensors, new_hasher)
    remaining_tensors = (tensor for n, tensor in enumerate(tensors) if n not in digests)
    parts = (data for tensor in remaining_tensors for _, data in (("", tensor.data), *tensor.parts) if data is not None)
    with prefetch(*parts):
        return [
            digests[n] if n in digests else catch_error(_digest_tensor, tensor, new_hasher)
            for n, tensor in enumerate(tensors)
        ]


def _digest_neighbours(tensors: Sequence[TensorInfo], new: NewHasher) -> dict[int, str]:
    """Return the digests of small tensors that are adjacent in a local file, by index in `tensors`.

    Other tensors are left out. Tensors of a file with an error are left out, too: the caller reads them one by one to
    name the damaged tensor.
    """
    neighbours = [
        neighbour
        for n, tensor in enumerate(tensors)
        if tensor.data is not None and not tensor.parts and (neighbour := find_neighbour(n, tensor.data)) is not None
    ]
    return {number: str(new(data).hexdigest()) for number, data in read_neighbours(neighbours)}


def _content_key(tensor: TensorInfo) -> object:
    return tensor.data, tensor.parts, tensor.layout


def _digest_tensor(tensor: TensorInfo, new: NewHasher) -> str:
    data_digest = "" if tensor.data is None else _digest_data(to_stored_blocks(tensor.data), tensor.fqn, new)
    if data_digest and not tensor.parts:
        return data_digest
    parts = sorted(tensor.parts, key=lambda part: part[0])
    lines = [_describe_part(name, data, f"{tensor.fqn}: {name}", new) for name, data in parts]
    if data_digest:  # the parts are then attributes
        return _digest_lines([data_digest, *lines], new)
    # Distinguish compressed columns by the layout: they are the transpose of compressed rows with equal parts.
    return _digest_lines([tensor.layout, *lines] if tensor.layout in ("sparse_csc", "sparse_bsc") else lines, new)


def _digest_data(data: TensorData, name: str, new: NewHasher) -> str:
    codes = msgspec.structs.replace(data, quantizer=None)
    if data.quantizer is None:
        return _digest_elements(codes, name, new)
    return _digest_lines(
        [_describe_part("codes", codes, name, new), *_describe_quantizer(data.quantizer, name, new)], new
    )


def _describe_quantizer(quantizer: Quantizer, tensor: str, new: NewHasher) -> Iterator[str]:
    scale = "-" if quantizer.scale is None else float(quantizer.scale).hex()
    yield f"{quantizer.scheme} {scale} {quantizer.zero_point} {quantizer.axis}"
    for name, data in (("scales", quantizer.scales), ("zero_points", quantizer.zero_points)):
        if data is not None:
            yield _describe_part(name, data, f"{tensor}: {name}", new)


def _describe_part(name: str, data: TensorData, message_name: str, new: NewHasher) -> str:
    return f"{name} {data.dtype} {list(data.shape)} {_digest_data(data, message_name, new)}"


def _digest_lines(lines: Iterable[str], new: NewHasher) -> str:
    digest = new()
    digest.update("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
    return str(digest.hexdigest())


# --- elements --------------------------------------------------------------------------------------------------------


def _digest_elements(data: TensorData, name: str, new: NewHasher) -> str:
    digest = new()
    with open_view(data, name) as view:
        reason = (
            explain_overlap(view)
            if find_element(view.dtype)
            else f"this version of statecli does not support {view.dtype} elements"
        )
        if reason:
            raise UnreadableError(f"{data.storage.path}: {name}: {reason}; exclude the tensor with {option('-x')}")
        for block in _read_contiguous(view) if _is_contiguous(view) else _read_items(view):
            digest.update(block.data)
    return str(digest.hexdigest())


def _is_contiguous(view: Strided) -> bool:
    """Return whether the stored bytes of the view can be hashed without a conversion."""
    is_plain = view.strides == contiguous_strides(view.shape) and not is_packed(view.dtype)
    return is_plain and 0 not in view.shape and not (view.big_endian or view.conjugate or view.negative)


def _read_contiguous(view: Strided) -> Iterator[Array]:
    size = require_element(view.dtype).size
    start, end = view.offset * size, (view.offset + view.elements) * size
    if isinstance(view.memory, np.ndarray):
        yield view.memory[start:end]
        return
    buffer = np.empty(min(BLOCK_BYTES, end - start), np.uint8)
    for position in range(start, end, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, end - position)]
        view.memory.read(position, block)
        yield block


def _read_items(view: Strided) -> Iterator[Array]:
    for items in read_items(view):
        yield (_apply_lazy_signs(view, items) if view.conjugate or view.negative else items).view(np.uint8)


def _apply_lazy_signs(view: Strided, items: Array) -> Array:
    """Apply conjugation and negation as torch does: for a float, flip the sign bit, even of NaN."""
    if NUMPY_TYPES.get(view.dtype, "f")[0] in "iu":
        return np.negative(items)
    parts = items.view(f"u{_get_component_size(view.dtype)}").copy()
    sign = parts.dtype.type(1 << (8 * parts.itemsize - 1))
    if view.negative:
        parts ^= sign
    if view.conjugate and view.dtype in COMPLEX:
        parts[1::2] ^= sign
    return parts


def _get_component_size(dtype: str) -> int:
    """Return the size in bytes of the real numbers in a dtype. A complex element contains two real numbers."""
    stored_dtype = require_element(dtype).stored
    return np.dtype(stored_dtype).itemsize // (2 if stored_dtype.startswith("c") else 1)
