"""Assign tasks to shards of nearly equal size. All processes with the same tasks compute the same assignment."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from statecli.core.errors import UsageError, option
from statecli.workers.pool import TASK_OVERHEAD_BYTES

#: Runs of adjacent tasks that each shard gets in a pass. More runs make shards more even, fewer runs need fewer seeks.
RUNS_PER_SHARD = 16

#: Maximum number of shards, far beyond any real number of processes.
MAX_SHARDS = 100_000


class ShardNumber(NamedTuple):
    """Number of a shard, counted from 1, and total number of shards."""

    number: int
    total: int


def parse_shard(text: str) -> ShardNumber:
    """Parse the number of a shard, such as `2/8`. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count <= MAX_SHARDS:
        form = f"write I/N, e.g. 2/8 for the second of 8 shards (at most {MAX_SHARDS} shards)"
        raise UsageError(f"{option('--shard', text)}: {form}")
    return ShardNumber(index, count)


class Partition:
    """Select the tasks of one shard in all passes of a command. Each pass evens out the loads of earlier passes."""

    def __init__(self, index: int, count: int) -> None:
        self._index = index
        self._loads = [(0, shard) for shard in range(1, count + 1)]

    def select_tasks(self, sizes: Sequence[int], group_keys: Sequence[object] | None) -> list[int]:
        """Return the indexes of this shard's tasks, given all tasks' sizes. Tasks with equal keys stay in one shard."""
        own_tasks: list[int] = []
        # Assign the largest runs first, each to the shard with the fewest bytes.
        for size, tasks in sorted(self._group_into_runs(sizes, group_keys), key=lambda run: -run[0]):
            load, index = self._loads[0]
            heapq.heapreplace(self._loads, (load + size, index))
            own_tasks += tasks if index == self._index else ()
        return sorted(own_tasks)

    def _group_into_runs(
        self, sizes: Sequence[int], group_keys: Sequence[object] | None
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the size and the task indexes of each run of adjacent tasks. Tasks with equal keys are in one run."""
        groups: dict[object, list[int]] = {}
        for n, key in enumerate(group_keys if group_keys is not None else range(len(sizes))):
            groups.setdefault(key, []).append(n)
        enough = sum(size + TASK_OVERHEAD_BYTES for size in sizes) // (len(self._loads) * RUNS_PER_SHARD)
        run: list[int] = []
        size = 0
        for group in groups.values():
            run += group
            size += sum(sizes[n] + TASK_OVERHEAD_BYTES for n in group)
            if size >= enough:
                yield size, run
                run, size = [], 0
        if run:
            yield size, run
