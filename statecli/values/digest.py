"""A digest of each tensor's elements, which says what they are and nothing of how they are stored.

It is that of the logical elements in C order, each as its dtype has it, little-endian: strides, shards, byte order and
shared storages leave no trace; conjugation and negation that torch has put off are done. Bits count: -0.0 is not 0.0.
A tensor that is no single strided view has the digest of a text with a line a part, in the order of their names:

    indices int64 [2, 5] 1f3a…
    values float32 [5] 77b0…

where compressed columns begin with a line of their layout; and a quantized one that of its codes, its scheme, and its
scale and zero point, or those of each channel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from statecli.core.errors import MissingDependency, StateError, UnreadableError
from statecli.core.float_mode import with_denormals
from statecli.core.state import Quantizer, TensorData, TensorInfo
from statecli.values import pool
from statecli.values.algorithm import Algorithm
from statecli.values.elements import COMPLEX, DIRECT, Array, element
from statecli.values.ggml_blocks import as_stored
from statecli.values.ranges import contiguous_strides, in_file_order, reading
from statecli.values.read import Strided, opened, overlap, packed, stored

#: Bytes read and hashed at a time; more or less is no faster.
BLOCK = 256 << 10
#: Called with a tensor's name and the bytes of it, and of those handed out with it, that were read.
Progress = Callable[[str, int], None]


@with_denormals
def digests(
    tensors: Sequence[TensorInfo],
    algorithm: Algorithm,
    *,
    jobs: int = 0,
    progress: Progress | None = None,
    derived: bool = False,
) -> list[str | None]:
    """The digest of each tensor, in hexadecimal; None where its source has no values for it.

    What is tied is read once. `jobs` 0: the cores. Raises `UnreadableError` or `MalformedError`, with file and tensor,
    for one whose elements cannot be read, and `MissingDependency` without the package of the algorithm.
    """
    hasher(algorithm)
    first: dict[Any, TensorInfo] = {}
    for tensor in tensors:
        if tensor.data is not None or tensor.parts:
            first.setdefault(_content(tensor), tensor)

    def done(batch: Sequence[TensorInfo]) -> None:
        if progress:
            progress(batch[-1].fqn, sum(tensor.nbytes for tensor in batch))

    ordered = in_file_order(list(first.values()), lambda tensor: tensor.ranges)
    found = pool.run(
        digest_batch,
        algorithm,
        ordered,
        size_of=lambda tensor: tensor.nbytes,
        jobs=jobs,
        done=done,
        absent="",
        derived=derived,
        whole=True,
    )
    known = dict(zip(map(_content, ordered), map(str, found), strict=True))
    return [known.get(_content(tensor)) for tensor in tensors]


def hasher(algorithm: Algorithm) -> Callable[[], Any]:
    """What makes a new hash, as those of `hashlib` are. Raises `MissingDependency`."""
    if algorithm is Algorithm.SHA256:
        return hashlib.sha256
    try:
        from blake3 import blake3
    except ImportError as missing:  # pragma: no cover - a dependency; this is for trimmed installations
        raise MissingDependency("digests of blake3 need it: pip install blake3 (or --digest sha256)") from missing
    return blake3


@with_denormals
def digest_batch(algorithm: Algorithm, tensors: Sequence[TensorInfo]) -> list[str | StateError]:
    """The digest of each tensor, or what went wrong with it."""
    new = hasher(algorithm)
    datas = (data for tensor in tensors for _, data in (("", tensor.data), *tensor.parts) if data is not None)
    with reading(*datas):
        return [_of_tensor_or_error(tensor, new) for tensor in tensors]


def _of_tensor_or_error(tensor: TensorInfo, new: Callable[[], Any]) -> str | StateError:
    try:
        return _of_tensor(tensor, new)
    except StateError as error:
        return error


def _content(tensor: TensorInfo) -> Any:
    return tensor.data, tensor.parts, tensor.layout


def _of_tensor(tensor: TensorInfo, new: Callable[[], Any]) -> str:
    if tensor.data is not None:
        return _of_data(as_stored(tensor.data), tensor.fqn, new)
    parts = sorted(tensor.parts, key=lambda part: part[0])
    lines = [_line(name, data, f"{tensor.fqn}: {name}", new) for name, data in parts]
    # Compressed columns have parts of the same names and shapes as compressed rows, and are the transposed matrix.
    return _of_text([tensor.layout, *lines] if tensor.layout in ("sparse_csc", "sparse_bsc") else lines, new)


def _of_data(data: TensorData, what: str, new: Callable[[], Any]) -> str:
    codes = msgspec.structs.replace(data, quantizer=None)
    if data.quantizer is None:
        return _of_elements(codes, what, new)
    return _of_text([_line("codes", codes, what, new), *_quantized(data.quantizer, what, new)], new)


def _quantized(how: Quantizer, what: str, new: Callable[[], Any]) -> Iterator[str]:
    scale = "-" if how.scale is None else float(how.scale).hex()
    yield f"{how.scheme} {scale} {how.zero_point} {how.axis}"
    for name, data in (("scales", how.scales), ("zero_points", how.zero_points)):
        if data is not None:
            yield _line(name, data, f"{what}: {name}", new)


def _line(name: str, data: TensorData, what: str, new: Callable[[], Any]) -> str:
    return f"{name} {data.dtype} {list(data.shape)} {_of_data(data, what, new)}"


def _of_text(lines: Iterable[str], new: Callable[[], Any]) -> str:
    made = new()
    made.update("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))
    return str(made.hexdigest())


# --- elements --------------------------------------------------------------------------------------------------------


def _of_elements(data: TensorData, what: str, new: Callable[[], Any]) -> str:
    made = new()
    with opened(data, what) as view:
        reason = overlap(view) if element(view.dtype) else f"{view.dtype} elements are not known to this version"
        if reason:
            raise UnreadableError(f"{data.storage.path}: {what}: {reason}; leave it out with -x")
        for block in _in_one_piece(view) if _is_one_piece(view) else _one_by_one(view):
            made.update(block.data)
    return str(made.hexdigest())


def _is_one_piece(view: Strided) -> bool:
    """Whether its bytes, as they lie there, are what is hashed."""
    plain = view.strides == contiguous_strides(view.shape) and not packed(view.dtype)
    return plain and 0 not in view.shape and not (view.big_endian or view.conjugate or view.negative)


def _in_one_piece(view: Strided) -> Iterator[Array]:
    kind = element(view.dtype)
    assert kind is not None  # noqa: S101 - narrows the type
    size = kind.size
    start, end = view.offset * size, (view.offset + view.elements) * size
    if isinstance(view.memory, np.ndarray):
        yield view.memory[start:end]
        return
    buffer = np.empty(min(BLOCK, end - start), np.uint8)
    for at in range(start, end, BLOCK):
        block = buffer[: min(BLOCK, end - at)]
        view.memory.read(at, block)
        yield block


def _one_by_one(view: Strided) -> Iterator[Array]:
    for items in stored(view):
        yield (_resolved(view, items) if view.conjugate or view.negative else items).view(np.uint8)


def _resolved(view: Strided, items: Array) -> Array:
    """With conjugation and negation done, as torch does them: a float's is its sign's bit, NaN or not."""
    if DIRECT.get(view.dtype, "f")[0] in "iu":
        return np.negative(items)
    parts = items.view(f"u{_component(view.dtype)}").copy()
    sign = parts.dtype.type(1 << (8 * parts.itemsize - 1))
    if view.negative:
        parts ^= sign
    if view.conjugate and view.dtype in COMPLEX:
        parts[1::2] ^= sign
    return parts


def _component(dtype: str) -> int:
    """Bytes of one real number of it."""
    kind = element(dtype)
    assert kind is not None  # noqa: S101 - it has been stored
    return np.dtype(kind.stored).itemsize // (2 if kind.stored.startswith("c") else 1)
