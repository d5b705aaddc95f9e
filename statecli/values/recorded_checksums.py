"""Compare the bytes of tensors with the checksums that their files record."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError
from statecli.core.model_state import ByteRange, TensorInfo
from statecli.storage import files
from statecli.values.neighbours import MAX_TENSOR_BYTES, Neighbour, read_neighbours
from statecli.values.pair_plan import Pair
from statecli.values.ranges import check_crc, locate_storage, prefetch, sort_by_place
from statecli.workers import pool
from statecli.workers.task import WholeTask, catch_error


def have_different_checksums(pair: Pair) -> bool:
    """Return whether the files record different checksums. If they do and the bytes are equal, a file is damaged."""
    before_ranges, after_ranges = pair.before.ranges, pair.after.ranges
    return len(before_ranges) == len(after_ranges) and any(
        before.length == after.length
        and None not in (sums := (_get_recorded_checksum(before), _get_recorded_checksum(after)))
        and sums[0] != sums[1]
        for before, after in zip(before_ranges, after_ranges, strict=True)
    )


def _get_recorded_checksum(byte_range: ByteRange) -> int | None:
    try:
        return locate_storage(byte_range, "storage").crc32
    except StateError:
        return None


def check_checksums(tensors: Sequence[TensorInfo], *, jobs: int = 0) -> list[tuple[StateError, ...]]:
    """Return for each tensor the errors of its storages whose bytes do not match the recorded checksum."""
    errors = find_damage(tensors, jobs)
    return [
        tuple(dict.fromkeys(errors[storage] for storage in tensor.ranges if storage in errors)) if errors else ()
        for tensor in tensors
    ]


def find_damage(
    tensors: Sequence[TensorInfo], jobs: int, *, derived: bool = False
) -> dict[str | ByteRange, StateError]:
    """Verify all storages that have a checksum, are deflated or are in an archive. Return the errors by storage."""
    ranges: dict[ByteRange, str] = {}
    for tensor in tensors:
        for storage in tensor.ranges:
            if storage.crc32 is not None or storage.packing is not None:
                ranges.setdefault(storage, tensor.fqn)
    checks = sort_by_place([ChecksumTask(*item) for item in ranges.items()], lambda task: (task.storage,))
    errors = pool.run_tasks(check_batch, None, checks, jobs=jobs, absent=None, derived=derived)
    return {task.storage: error for task, error in zip(checks, errors, strict=True) if error is not None}


class ChecksumTask(WholeTask, frozen=True, array_like=True, gc=False):
    """Read a storage of tensor `name`, and compare its bytes with the checksum that the archive records."""

    storage: ByteRange
    name: str

    @property
    def size(self) -> int:
        """Size of the unpacked storage in bytes."""
        return self.storage.length

    @property
    def paths(self) -> Iterable[str]:
        """File of the storage, or the folder if the storage is in several files."""
        return (storage.path for storage in (self.storage,) if storage.path)


@with_denormals
def check_batch(_: None, tasks: Sequence[ChecksumTask]) -> list[StateError | None]:
    """Return the error of each storage, or None if the storage's bytes match the checksum."""
    intact = _find_intact_neighbours(tasks)
    remaining_tasks = [task for n, task in enumerate(tasks) if n not in intact]
    with prefetch(*(task.storage for task in remaining_tasks)):
        errors = iter([catch_error(check_crc, task.storage, task.name) for task in remaining_tasks])
    return [None if n in intact else next(errors) for n in range(len(tasks))]


def _find_intact_neighbours(tasks: Sequence[ChecksumTask]) -> set[int]:
    """Return the indexes of tasks with a correct checksum. Only small adjacent storages in local files are checked."""
    neighbours = [
        Neighbour(storage.path, storage.offset, storage.length, n)
        for n, storage in enumerate(task.storage for task in tasks)
        if storage.boxes is None
        and storage.packing is None
        and 0 < storage.length <= MAX_TENSOR_BYTES
        and not files.reads_are_requests(storage.path)
    ]
    return {n for n, data in read_neighbours(neighbours) if zlib.crc32(data) == tasks[n].storage.crc32}
