"""Any `concurrent.futures.Executor` as an engine: it is given parcels, and may be anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from typing import Any

from statecli.core.errors import EngineError, StateError, UnreadableError
from statecli.core.version import __version__
from statecli.values import pool
from statecli.values.pool import Function, Place, uninterrupted
from statecli.workers.executors.batch import Parcel, do, pack, unpack

#: Bytes of small tasks in a parcel, at most: one takes half a millisecond to another process of this machine or a rank
#: of MPI, and comparing these a hundred times as long.
GRAIN = 128 << 20
#: Parcels for each worker, at least, where there is so much to do: none is idle long while another does its last one.
EACH = 4
#: Workers of an engine that does not say how many it has.
MANY = 64
#: Seconds between two looks at whether anybody is left to wait for.
LOOK = 1.0


class Elsewhere:
    """Its futures are those of an executor, of so many `workers`, 0: nobody knows.

    `lost` says, while they are waited for, that nobody will do them.
    """

    def __init__(
        self,
        executor: Executor,
        name: str,
        workers: int,
        grain: int | None = None,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._executor, self._name, self._workers, self._lost = executor, name, workers or MANY, lost
        self._grain = GRAIN if grain is None else grain

    def grain(self, size: int) -> int:
        """As `Engine.grain`."""
        return max(min(self._grain, size // (EACH * self._workers)), pool.BATCH)

    def run(self, function: Function[Any, Any, Any], shared: Any, batches: Sequence[Any], place: Place) -> None:
        """As `Engine.run`. Raises `EngineError` for a worker of another statecli, or of none."""
        waiting: dict[Future[bytes | str], int] = {}
        try:
            with uninterrupted():
                for n, batch in enumerate(batches):
                    waiting[self._submitted(pack(function, shared, batch))] = n
            self._wait(waiting, place)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise

    def _submitted(self, parcel: Parcel) -> Future[bytes | str]:
        try:
            return self._executor.submit(do, parcel)
        except RuntimeError as why:  # it is broken, or was shut down
            raise EngineError(f"--executor {self._name}: takes no work: {why}") from why

    def _wait(self, waiting: dict[Future[bytes | str], int], place: Place) -> None:
        left = set(waiting)
        while left:
            done, left = wait(left, timeout=LOOK, return_when="FIRST_COMPLETED")
            for future in sorted(done, key=waiting.__getitem__):
                place(waiting[future], self._results(future))
            why = self._lost() if left and not done else None
            if why is not None:
                for future in left:
                    future.cancel()
                    place(waiting[future], UnreadableError(f"--executor {self._name}: {why}"))
                return

    def _results(self, future: Future[bytes | str]) -> Sequence[Any] | StateError:
        try:
            answer = future.result()
        except CancelledError:
            return UnreadableError(f"--executor {self._name}: it gave the work up: it has ended, or was told to")
        except Exception as error:
            if _has_no_statecli(error):
                why = f"a worker has no statecli, or an older one: install statecli {__version__} where workers run"
                raise EngineError(f"--executor {self._name}: {why}") from error
            return UnreadableError(f"--executor {self._name}: a worker was lost ({type(error).__name__})")
        try:
            return unpack(answer)
        except EngineError as refused:
            raise EngineError(f"--executor {self._name}: {refused}") from None


def _has_no_statecli(error: BaseException | None) -> bool:
    """Whether it is what Python says of a module that it cannot import, or what an engine makes of that."""
    while error is not None:
        if isinstance(error, (ImportError, AttributeError)) and "statecli" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
