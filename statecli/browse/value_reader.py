"""Read values in a thread, so that the screen stays responsive: first the selected tensor, then long lists."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

#: Function that changes the model, for the thread of the screen.
Apply = Callable[[], None]
#: Seconds of work on a list between two results.
SLICE_S = 0.1


class ReaderThread:
    """Thread that runs the steps of a list; before the next step, it runs the job of the selected tensor.

    The thread is a daemon: quitting does not wait for a read of many gigabytes.
    """

    def __init__(self, deliver: Callable[[Apply], object]) -> None:
        self._deliver = deliver
        self._job_condition = threading.Condition()
        self._job: Callable[[], Apply] | None = None
        self._list: Iterator[Apply] | None = None
        self._ends = self._is_running = False
        self._thread: threading.Thread | None = None

    def read(self, job: Callable[[], Apply]) -> None:
        """Run the job. The job replaces a waiting job, because the cursor has left the tensor of the waiting job."""
        with self._job_condition:
            self._job = job
            self._start()

    def read_list(self, steps: Iterator[Apply] | None) -> None:
        """Replace the list of steps to run by a new list. If `steps` is None, only stop the present list."""
        with self._job_condition:
            self._list = steps
            self._start()

    @property
    def reads_list(self) -> bool:
        """True while a list is read."""
        return self._list is not None

    @property
    def is_busy(self) -> bool:
        """True while a job or a list of steps is running or waiting."""
        return self._is_running or self._job is not None or self._list is not None

    def close(self) -> None:
        """End the thread after its present step, without waiting for the step."""
        with self._job_condition:
            self._ends = True
            self._job_condition.notify()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="statecli-browse-reader", daemon=True)
            self._thread.start()
        self._job_condition.notify()

    def _run(self) -> None:
        while True:
            with self._job_condition:
                while not (self._ends or self._job or self._list):
                    self._is_running = False
                    self._job_condition.wait()
                self._is_running = True
                if self._ends:
                    return
                job, steps = self._job, self._list
                self._job = None
            try:
                apply = job() if job is not None else self._take_steps(steps) if steps is not None else None
            except Exception as error:  # noqa: BLE001 - an internal error ends the screen, not the thread alone
                apply = partial(_raise, error)
            if apply is not None and not self._ends:
                self._deliver(apply)

    def _take_steps(self, steps: Iterator[Apply]) -> Apply:
        end = time.monotonic() + SLICE_S
        changes: list[Apply] = []
        while time.monotonic() < end and self._list is steps and self._job is None:
            apply = next(steps, None)
            if apply is None:
                with self._job_condition:
                    self._list = None if self._list is steps else self._list
                break
            changes.append(apply)

        def apply_all() -> None:
            for change in changes:
                change()

        return apply_all


def _raise(error: Exception) -> None:
    raise error
