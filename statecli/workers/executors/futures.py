"""Run batches with any `concurrent.futures.Executor`, on this machine or on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from typing import Any

from statecli.core.errors import EngineError, StateError, UnreadableError, option
from statecli.core.version import __version__
from statecli.workers import pool
from statecli.workers.executors.batch import PackedBatch, pack, run_packed_batch, unpack
from statecli.workers.pool import Deliver, Function, defer_interrupt

#: Maximum size of a batch of small tasks in bytes. Sending a batch to another process or an MPI rank takes half a
#: millisecond; comparing this many bytes takes a hundred times as long.
MAX_BATCH_BYTES = 128 << 20
#: Minimum number of batches per worker for large work, so that no worker is idle for long while another finishes.
MIN_BATCHES_PER_WORKER = 4
#: Assumed number of workers of an executor that does not report its number.
ASSUMED_WORKERS = 64
#: Interval in seconds between checks whether any worker is left.
POLL_INTERVAL_S = 1.0


class ExecutorEngine:
    """Engine that submits batches to an executor.

    Attributes of the constructor:
        workers: Number of workers; 0 if unknown.
        why_lost: Function that returns why no worker will finish the batches, or None; called during the wait.
    """

    def __init__(
        self,
        executor: Executor,
        name: str,
        workers: int,
        max_batch_bytes: int | None = None,
        why_lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._executor, self._why_lost = executor, why_lost
        self._option = option("--executor", name)
        self._workers = workers or ASSUMED_WORKERS
        self._max_batch_bytes = MAX_BATCH_BYTES if max_batch_bytes is None else max_batch_bytes

    def min_batch_bytes(self, total: int) -> int:
        equal_share = total // (MIN_BATCHES_PER_WORKER * self._workers)
        return max(min(self._max_batch_bytes, equal_share), pool.MIN_BATCH_BYTES)

    def run(self, function: Function[Any, Any, Any], shared: object, batches: Sequence[Any], deliver: Deliver) -> None:
        """See `Engine.run`. Raises `EngineError` for a worker without statecli or with a different statecli build."""
        numbers: dict[Future[bytes | str], int] = {}
        try:
            with defer_interrupt():
                for n, batch in enumerate(batches):
                    numbers[self._submit(pack(function, shared, batch))] = n
            self._deliver_all(numbers, deliver)
        except BaseException:
            for future in numbers:
                future.cancel()
            raise

    def _submit(self, batch: PackedBatch) -> Future[bytes | str]:
        try:
            return self._executor.submit(run_packed_batch, batch)
        except RuntimeError as error:  # the executor failed or was shut down
            raise EngineError(f"{self._option}: the executor does not accept work: {error}") from error

    def _deliver_all(self, numbers: dict[Future[bytes | str], int], deliver: Deliver) -> None:
        pending = set(numbers)
        while pending:
            finished, pending = wait(pending, timeout=POLL_INTERVAL_S, return_when="FIRST_COMPLETED")
            for future in sorted(finished, key=numbers.__getitem__):
                deliver(numbers[future], self._get_results(future))
            reason = self._why_lost() if pending and not finished else None
            if reason is not None:
                for future in pending:
                    future.cancel()
                    deliver(numbers[future], UnreadableError(f"{self._option}: {reason}"))
                return

    def _get_results(self, future: Future[bytes | str]) -> Sequence[Any] | StateError:
        try:
            answer = future.result()
        except CancelledError:
            return UnreadableError(f"{self._option}: the executor cancelled the task; it may have been shut down")
        except Exception as error:
            if _lacks_statecli(error):
                reason = f"a worker has no statecli or an old version; install statecli {__version__} on all workers"
                raise EngineError(f"{self._option}: {reason}") from error
            return UnreadableError(f"{self._option}: a worker stopped during a task ({type(error).__name__})")
        try:
            return unpack(answer)
        except EngineError as refusal:
            raise EngineError(f"{self._option}: {refusal}") from None


def _lacks_statecli(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, shows that Python could not import statecli."""
    while error is not None:
        if isinstance(error, (ImportError, AttributeError)) and "statecli" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
