"""Run tasks on tensor values and return their results in order.

A task is a frozen struct (`task.py`). Small tasks are batched to at least 16 MiB, so that sending them costs little.
This module has three engines: serial, forked processes, threads. `executors` adds Dask, MPI, Ray and any
`concurrent.futures.Executor`. The result does not depend on the engine.

Forked processes are the default, because a kernel makes twenty short numpy calls per block. Two threads lose more time
to the interpreter lock than they gain. A forked process starts in milliseconds with numpy already imported. Threads are
used for remote files, and on systems without fork.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from statecli.core import posix
from statecli.core.errors import StateError, UnreadableError
from statecli.storage import files
from statecli.workers.task import Task

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

#: Minimum size of a batch of small tasks in bytes. Each task counts TASK_OVERHEAD_BYTES more than it reads.
MIN_BATCH_BYTES = 16 << 20
TASK_OVERHEAD_BYTES = 16 << 10
#: Size of the work in bytes below which starting workers takes longer than doing the work in this process.
MIN_BYTES_FOR_WORKERS = 64 << 20
#: Number of threads that read remote files.
REMOTE_READ_THREADS = 16
#: Maximum time in seconds to wait for a killed process.
KILLED_WORKER_JOIN_TIMEOUT_S = 2.0
#: Interval in seconds between checks of the thread that delivers the results of processes.
MANAGER_CHECK_S = 1.0

_Task = TypeVar("_Task", bound=Task)
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
_Shared = TypeVar("_Shared")

#: Function that runs a batch. It gets the data that all tasks share, and the tasks; it returns a result or an error for
#: each task, in order.
Function = Callable[[_Shared, tuple[_Task, ...]], Sequence[_Result | StateError]]
#: Function called with the name of a batch's last tensor and the number of bytes read.
Progress = Callable[[str, int], None]
#: Function called with the number of a batch and its outcome: a result for each task, or one error for all.
Deliver = Callable[[int, "Sequence[Any] | StateError"], None]


class Engine(Protocol):
    """Engine for batches of tasks: serial or parallel, on this machine or on others."""

    def min_batch_bytes(self, total: int) -> int:
        """Return the minimum size of a batch in bytes, for tasks of `total` bytes. 0 means MIN_BATCH_BYTES."""

    def run(self, function: Function[Any, Any, Any], shared: object, batches: Sequence[Any], deliver: Deliver) -> None:
        """Run the batches. Call `deliver` once for each in this thread, in any order. Its exceptions end the run.

        Errors of a task or a worker are delivered. Raises `StateError` if no worker can do any batch.
        """


_engine: ContextVar[Engine | None] = ContextVar("engine", default=None)


@contextmanager
def use_engine(engine: Engine | None) -> Iterator[None]:
    """Run all tasks with `engine` while the block runs. None means the default: processes if the work is large."""
    before = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(before)


class Work(msgspec.Struct, frozen=True):
    """Arguments of `run_tasks` that describe the work and not the workers."""

    function: Function[Any, Any, Any]
    shared: Any
    tasks: Sequence[Task]
    absent: Any
    derived: bool
    group_keys: Sequence[object] | None
    on_batch: Callable[[Sequence[Any]], None] | None


class ResultStore(Protocol):
    """Store of task results. It selects the tasks of this process, and may have results of other tasks."""

    #: False if some results are `absent`, because other processes do these tasks.
    is_complete: bool

    def results(self, work: Work, do: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """Return the result of each task, in order. `do` runs the given tasks, and returns results and errors."""


_result_store: ContextVar[ResultStore | None] = ContextVar("result_store", default=None)


def _choose_default_engine(size: int, jobs: int) -> Engine:
    """Return the default engine for tasks of `size` bytes in total."""
    if files.is_anything_remote() and jobs != 1:
        # Threads, because a fork does not inherit connections. More than cores, because they mostly wait for bytes.
        return Threads(jobs or REMOTE_READ_THREADS)
    return _Serial() if jobs == 1 or size < MIN_BYTES_FOR_WORKERS else Processes(jobs or posix.count_usable_cores())


@contextmanager
def use_result_store(store: ResultStore) -> Iterator[None]:
    """Look up and record task results in `store` while the block runs."""
    before = _result_store.set(store)
    try:
        yield
    finally:
        _result_store.reset(before)


def is_partial() -> bool:
    """Return whether other processes do some of the tasks, so that this process's results alone are not conclusive."""
    store = _result_store.get()
    return store is not None and not store.is_complete


def is_distributed() -> bool:
    """Return whether a result store or an engine was set: for a shard, a merge or an executor."""
    return _result_store.get() is not None or _engine.get() is not None


def split_into_batches(tasks: Iterable[_Task], min_bytes: int = 0) -> Iterator[tuple[_Task, ...]]:
    """Yield the tasks in batches of at least `min_bytes` (0: MIN_BATCH_BYTES), except for the last batch."""
    batch: list[_Task] = []
    size = 0
    for task in tasks:
        batch.append(task)
        size += task.size + TASK_OVERHEAD_BYTES
        if size >= (min_bytes or MIN_BATCH_BYTES):
            yield tuple(batch)
            batch, size = [], 0
    if batch:
        yield tuple(batch)


def run_tasks(
    function: Function[_Shared, _Task, _Result],
    shared: _Shared,
    tasks: Sequence[_Task],
    *,
    absent: _Result,
    jobs: int = 0,
    on_batch: Callable[[Sequence[_Task]], None] | None = None,
    derived: bool = False,
    group_keys: Sequence[object] | None = None,
    raise_errors: bool = False,
) -> list[_Result | StateError]:
    """Run the tasks in batches with `function(shared, batch)`, and return the result of each task, in order.

    `function` must be importable by its name; `shared`, tasks and results are plain data. `jobs` is the number of
    workers: 0 for a worker per core, 1 for this process. `on_batch` is called with the tasks of each batch, in any
    order. `absent` stands for the result of a task done by another process. `derived`: the tasks follow from the
    results of earlier tasks. Tasks with equal `group_keys` (one key per task) are run by the same shard.

    An error of a task is its result. If a worker is killed, an error is the result of its tasks, and all other tasks
    are run. With `raise_errors`, the first error is raised. Ctrl-C stops all workers.
    """

    def do(some: Sequence[_Task], *, raise_errors: bool = False) -> list[Any]:
        return _run_batches(function, shared, some, absent, jobs, on_batch, raise_errors=raise_errors)

    store = _result_store.get()
    if store is None:
        return do(tasks, raise_errors=raise_errors)
    results = store.results(Work(function, shared, tasks, absent, derived, group_keys, on_batch), do)
    _raise_first_error(results if raise_errors else ())
    return results


def report_batches(progress: Progress | None) -> Callable[[Sequence[Task]], None]:
    """Return a function that reports each batch as progress, under the name of its last task."""

    def report(batch: Sequence[Task]) -> None:
        if progress:
            progress(batch[-1].name, sum(task.size for task in batch))

    return report


def _run_batches(
    function: Function[_Shared, _Task, _Result],
    shared: _Shared,
    tasks: Sequence[_Task],
    absent: _Result,
    jobs: int,
    on_batch: Callable[[Sequence[_Task]], None] | None,
    *,
    raise_errors: bool,
) -> list[Any]:
    size = sum(task.size for task in tasks)
    engine = _engine.get() if jobs != 1 else None
    if engine is None:
        engine = _choose_default_engine(size, jobs)
    batches = list(split_into_batches(tasks, engine.min_batch_bytes(size + TASK_OVERHEAD_BYTES * len(tasks))))
    results: list[Any] = [[absent] * len(batch) for batch in batches]

    def deliver(n: int, outcome: Sequence[Any] | StateError) -> None:
        results[n] = [outcome] * len(batches[n]) if isinstance(outcome, StateError) else outcome
        _raise_first_error(results[n] if raise_errors else ())
        if on_batch:
            on_batch(batches[n])

    if batches:
        engine.run(function, shared, batches, deliver)
    return [result for batch_results in results for result in batch_results]


def _raise_first_error(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, StateError):
            raise result


def can_fork() -> bool:
    """Return whether another process can start in milliseconds and has a core of its own."""
    return sys.platform == "linux" and posix.count_usable_cores() > 1


@contextmanager
def run_in_background(function: Callable[[_Argument], _Result], argument: _Argument) -> Iterator[Callable[[], _Result]]:
    """Run `function(argument)` in another process while the block runs.

    Yields a function that waits for the result and returns it, or raises the error of `function`.
    """
    with ExitStack() as stack:
        try:
            executor, future = stack.enter_context(_submit_to_process(function, argument))
        except _NoWorkers:
            yield lambda: function(argument)
            return

        def wait_for_result() -> _Result:
            from concurrent.futures import BrokenExecutor

            try:
                return next(_iter_completed(executor, [future])).result()
            except BrokenExecutor as error:
                raise UnreadableError(WORKER_KILLED) from error
            except _NoWorkers:
                return function(argument)

        yield wait_for_result


@contextmanager
def _submit_to_process(
    function: Callable[[_Argument], _Result], argument: _Argument
) -> Iterator[tuple[Executor, Future[_Result]]]:
    """Start `function(argument)` in another process. Yield its executor and its future. Raises _NoWorkers."""
    with _process_executor(1) as executor:
        with defer_interrupt(), _detect_no_workers():
            future = executor.submit(function, argument)
        yield executor, future


def _iter_completed(executor: Executor, futures: Collection[Future[_Result]]) -> Iterator[Future[_Result]]:
    """Yield each future when it completes. Raises _NoWorkers if the thread that completes futures has ended.

    The delivering thread starts another thread. If the system refuses more threads, the delivering thread ends, and the
    futures never complete.
    """
    from concurrent.futures import FIRST_COMPLETED, wait

    waiting = set(futures)
    while waiting:
        manager = getattr(executor, "_executor_manager_thread", None)
        is_alive = manager is None or manager.is_alive()
        completed, waiting = wait(waiting, MANAGER_CHECK_S, FIRST_COMPLETED)
        if waiting and not completed and not is_alive:
            raise _NoWorkers
        yield from completed


class _NoWorkers(Exception):
    """Error: the system cannot start a process (limit on processes, no memory, or no room in /dev/shm for locks)."""


@contextmanager
def _detect_no_workers() -> Iterator[None]:
    """Raise _NoWorkers if starting workers fails."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_refused_thread(error):
            raise
        raise _NoWorkers from error


#: Error of the tasks whose worker was killed.
WORKER_KILLED = "a worker process was killed, perhaps for lack of memory"


def run_or_error(do: Callable[[], Sequence[Any]]) -> Sequence[Any] | StateError:
    """Return the results of `do()`, or the `StateError` raised by `do()`."""
    try:
        return do()
    except StateError as error:
        return error


class _LocalEngine:
    """Base class of the engines on this machine."""

    def __init__(self, jobs: int = 1) -> None:
        self._jobs = jobs

    def min_batch_bytes(self, total: int) -> int:  # noqa: ARG002 - as `Engine`
        return 0


class _Serial(_LocalEngine):
    """Engine that runs batches one after the other in this process."""

    def run(self, function: Function[Any, Any, Any], shared: object, batches: Sequence[Any], deliver: Deliver) -> None:
        for n, batch in enumerate(batches):
            deliver(n, run_or_error(lambda batch=batch: function(shared, batch)))  # type: ignore[misc]


class Processes(_LocalEngine):
    """Engine that runs batches in forked processes, or in threads on systems without fork."""

    def run(self, function: Function[Any, Any, Any], shared: object, batches: Sequence[Any], deliver: Deliver) -> None:
        """See `Engine.run`. Retries batches of killed workers one by one, because parallel workers share the memory.

        If the system starts no process, this process does all batches.
        """
        pending = dict(enumerate(batches))

        def deliver_pending(n: int, outcome: Sequence[Any] | StateError) -> None:
            del pending[n]
            deliver(n, outcome)

        try:
            self._run_with_retry(function, shared, pending, deliver_pending)
        except _NoWorkers:
            numbers = sorted(pending)
            batches = [pending[n] for n in numbers]
            _Serial().run(function, shared, batches, lambda n, outcome: deliver_pending(numbers[n], outcome))

    def _run_with_retry(
        self, function: Function[Any, Any, Any], shared: object, pending: dict[int, Any], deliver: Deliver
    ) -> None:
        """Run all pending batches, and retry those of killed workers. Call `deliver` for each. Raises _NoWorkers."""
        while pending and not self._run_once(function, shared, pending, deliver):
            # In order, because the first pending batches are those that the killed workers had.
            for n in sorted(pending)[: self._jobs]:
                if not Processes(1)._run_once(function, shared, {n: pending[n]}, deliver):
                    deliver(n, UnreadableError(WORKER_KILLED))

    def _run_once(
        self, function: Function[Any, Any, Any], shared: object, batches: dict[int, Any], deliver: Deliver
    ) -> bool:
        """Run the batches. Return False if a worker was killed, so that some batches were not delivered."""
        from concurrent.futures import BrokenExecutor

        try:
            with _process_executor(min(self._jobs, len(batches))) as executor:
                with defer_interrupt(), _detect_no_workers():
                    numbers = {executor.submit(function, shared, batch): n for n, batch in batches.items()}
                for future in _iter_completed(executor, numbers):
                    deliver(numbers[future], run_or_error(future.result))
        except BrokenExecutor:
            return False
        return True


class Threads(_LocalEngine):
    """Engine that runs batches in threads of this process."""

    def run(self, function: Function[Any, Any, Any], shared: object, batches: Sequence[Any], deliver: Deliver) -> None:
        from concurrent.futures import as_completed

        with _thread_executor(self._jobs) as executor:
            with defer_interrupt():
                numbers = {executor.submit(function, shared, batch): n for n, batch in enumerate(batches)}
            for future in as_completed(numbers):
                deliver(numbers[future], run_or_error(future.result))


@contextmanager
def _thread_executor(jobs: int) -> Iterator[Executor]:
    from concurrent.futures import ThreadPoolExecutor

    threads = ThreadPoolExecutor(jobs)
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    threads.shutdown()


@contextmanager
def _process_executor(jobs: int) -> Iterator[Executor]:
    if sys.platform != "linux" or not posix.CAN_FORK:
        with _thread_executor(jobs) as threads:
            yield threads
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("fork")
    with _detect_no_workers():
        pipe = os.pipe()
    try:
        with _detect_no_workers():
            processes = ProcessPoolExecutor(jobs, mp_context=context, initializer=_exit_with_parent, initargs=pipe)
    except _NoWorkers:
        for end in pipe:
            os.close(end)
        raise
    try:
        with _hide_refused_threads():
            yield processes
    except BaseException:
        workers = list((processes._processes or {}).values())
        for process in workers:
            process.kill()
        for process in workers:
            process.join(KILLED_WORKER_JOIN_TIMEOUT_S)
        # Without waiting, because a killed worker may have held the lock of the queue.
        processes.shutdown(wait=False, cancel_futures=True)
        raise
    else:
        processes.shutdown()
    finally:
        for end in pipe:
            os.close(end)


@contextmanager
def _hide_refused_threads() -> Iterator[None]:
    """Suppress the traceback of a thread that could not start another thread. `_iter_completed` detects this case."""
    before = threading.excepthook

    def print_others(error: threading.ExceptHookArgs) -> None:
        if not _is_refused_thread(error.exc_value):
            before(error)

    threading.excepthook = print_others
    try:
        yield
    finally:
        threading.excepthook = before


def _is_refused_thread(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Deliver Ctrl-C after the block, because an interrupted start would leave some workers running."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_with_parent(read_end: int, write_end: int) -> None:
    """Initialize a worker: ignore Ctrl-C, and exit when the parent is gone.

    Ctrl-C reaches every process of the group, and the parent ends the workers without tracebacks. A killed parent
    cannot end its workers, but its end of a pipe closes, so the worker reads the end of the pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(write_end)

    def exit_after_parent() -> None:
        os.read(read_end, 1)
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()
