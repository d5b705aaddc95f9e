"""Fingerprints of tensors: CRC-32 of the elements, to find equal values under other names."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence

from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError, UnreadableError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.values.elements import find_element
from statecli.values.ggml_blocks import list_stored_data
from statecli.values.neighbours import find_neighbour, read_neighbours
from statecli.values.ranges import get_element_width, iter_paths, prefetch
from statecli.values.read import explain_overlap, find_piece, open_view, read_items
from statecli.workers import pool
from statecli.workers.task import WholeTask, catch_error


def compute_fingerprints(
    tensors: Sequence[TensorInfo],
    *,
    jobs: int = 0,
    group_keys: Sequence[object] | None = None,
    derived: bool = False,
) -> list[int | StateError | None]:
    """Return the CRC-32 of each tensor's elements (C order, little-endian), or None if a tensor has none to read.

    The parts of a composed tensor are concatenated. Equal fingerprints are only a hint, to be confirmed by
    `compare_pairs`. A zip archive's checksum of a whole storage is used instead of computing it. If a tensor cannot be
    read or its worker fails, the error is its result. `group_keys` and `derived`: see `pool.run_tasks`.
    """
    tasks = [FingerprintTask(tensor.nbytes, tensor.fqn, tuple(list_stored_data(tensor))) for tensor in tensors]
    return pool.run_tasks(
        fingerprint_batch, None, tasks, jobs=jobs, absent=None, group_keys=group_keys, derived=derived
    )


class FingerprintTask(WholeTask, frozen=True, array_like=True, gc=False):
    """Compute the CRC-32 of the elements of tensor `name`, which has `size` bytes in `parts`."""

    size: int
    name: str
    parts: tuple[TensorData, ...]

    @property
    def paths(self) -> Iterable[str]:
        """Files that contain the tensor's parts."""
        return iter_paths(*self.parts)


@with_denormals
def fingerprint_batch(_: None, tasks: Sequence[FingerprintTask]) -> list[int | StateError | None]:
    """Return the fingerprint or the error of each tensor, or None for a tensor without readable elements."""
    fingerprints = _find_fingerprints_of_neighbours(tasks)
    remaining_tasks = [task for n, task in enumerate(tasks) if n not in fingerprints]
    with prefetch(*(data for task in remaining_tasks for data in task.parts)):
        computed = iter([catch_error(_compute_fingerprint, task) for task in remaining_tasks])
    return [fingerprints[n] if n in fingerprints else next(computed) for n in range(len(tasks))]


def _find_fingerprints_of_neighbours(tasks: Sequence[FingerprintTask]) -> dict[int, int]:
    """Return the fingerprints of small adjacent tensors, by task index. A single read serves many tensors."""
    neighbours = [
        neighbour
        for n, task in enumerate(tasks)
        if len(task.parts) == 1
        and task.parts[0].storage.crc32 is None
        and (neighbour := find_neighbour(n, task.parts[0])) is not None
    ]
    return {n: zlib.crc32(data) for n, data in read_neighbours(neighbours)}


def _compute_fingerprint(task: FingerprintTask) -> int | None:
    checksums = [_compute_crc(data, task.name) for data in task.parts]
    if not checksums or None in checksums:
        return None
    return checksums[0] if len(checksums) == 1 else zlib.crc32(repr(checksums).encode())


def _compute_crc(data: TensorData, name: str) -> int | None:
    if data.quantizer is not None or find_element(data.dtype) is None:
        return None
    storage = data.storage
    if (
        find_piece(data)
        and storage.crc32 is not None
        and math.prod(data.shape) * get_element_width(data.dtype) == storage.length
    ):
        return storage.crc32
    try:
        with open_view(data, name) as view:
            if explain_overlap(view):
                return None
            checksum = 0
            for block in read_items(view):
                checksum = zlib.crc32(block.data, checksum)
    except UnreadableError as error:
        # An error without a cause means that the bytes cannot be read as elements. An error of a file or store has a
        # cause.
        if type(error) is UnreadableError and error.__cause__ is None:
            return None
        raise
    return checksum
