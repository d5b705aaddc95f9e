"""Which tasks are whose: as even in bytes as tasks allow, and the same for all who plan the same tasks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from statecli.values.pool import OVERHEAD

#: Runs of neighbouring tasks that each share gets of a pass: more are more even, fewer are read with fewer leaps.
RUNS = 16

#: More shards than anybody has processes.
MAX_SHARDS = 100_000


class Cut:
    """One share of all passes of a command. What one pass gave to each is evened out by the next."""

    def __init__(self, index: int, count: int) -> None:
        self._index = index
        self._loads = [(0, one) for one in range(1, count + 1)]

    def own(self, sizes: Sequence[int], together: Sequence[object] | None) -> list[int]:
        """Which of these tasks, of so many bytes each, this share does. Those of one key are all in one share."""
        mine: list[int] = []
        # The largest go first, each to the share that has the least.
        for size, tasks in sorted(self._runs(sizes, together), key=lambda run: -run[0]):
            load, index = self._loads[0]
            heapq.heapreplace(self._loads, (load + size, index))
            mine += tasks if index == self._index else ()
        return sorted(mine)

    def _runs(self, sizes: Sequence[int], together: Sequence[object] | None) -> Iterator[tuple[int, list[int]]]:
        """The tasks in runs, in order, each with its bytes."""
        groups: dict[object, list[int]] = {}
        for n, key in enumerate(together if together is not None else range(len(sizes))):
            groups.setdefault(key, []).append(n)
        enough = sum(size + OVERHEAD for size in sizes) // (len(self._loads) * RUNS)
        run: list[int] = []
        size = 0
        for group in groups.values():
            run += group
            size += sum(sizes[n] + OVERHEAD for n in group)
            if size >= enough:
                yield size, run
                run, size = [], 0
        if run:
            yield size, run
