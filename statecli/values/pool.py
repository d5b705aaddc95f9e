"""Tasks -> their results: here, in other processes, or by the engine that was asked for.

A task is plain data, of some millions of elements at most, and its result is small. Small ones are handed out together,
so that handing them out costs nothing beside doing them. What comes of each does not depend on who does it.

Threads will not do without being asked for: a kernel makes twenty short numpy calls a block, and two threads spend more
time on handing the interpreter lock to each other than they gain. A forked process starts in milliseconds with numpy
already imported; where there is no fork, threads are the next best.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from statecli.core.errors import StateError, UnreadableError
from statecli.storage import files

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

#: Bytes of small tasks that are handed out together; each counts OVERHEAD more than it has.
BATCH = 16 << 20
OVERHEAD = 16 << 10
#: Bytes up to which starting workers takes longer than doing it here.
ALONE = 64 << 20
#: Threads that read what is remote.
FAR = 16
#: Seconds that a killed process is waited for.
GONE = 2.0

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_Shared = TypeVar("_Shared")

#: What does a batch: the results of its tasks, in order, each its own result or its own error.
Function = Callable[[_Shared, tuple[_Task, ...]], Sequence[_Result | StateError]]
#: Takes the number of a batch and what came of it: of each task, or one error for all of them.
Place = Callable[[int, "Sequence[Any] | StateError"], None]


class Engine(Protocol):
    """What does batches of tasks, one after another or many at once, anywhere."""

    def grain(self, size: int) -> int:
        """Bytes of small tasks that it is given together, at least, where all have so many; 0: BATCH."""

    def run(self, function: Function[Any, Any, Any], shared: Any, batches: Sequence[Any], place: Place) -> None:
        """Calls `place` once for each batch, in any order, in this thread. Whatever is raised ends all of them.

        What one task or one worker does wrong is placed. Raises `StateError` where no worker can do any of it.
        """


_engine: ContextVar[Engine | None] = ContextVar("engine", default=None)


@contextmanager
def using(engine: Engine | None) -> Iterator[None]:
    """Around what is to be done by `engine`, whatever its size; None: by processes of this machine, where it pays."""
    before = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(before)


class Work(NamedTuple):
    """All that `run` is given but for who does it."""

    function: Function[Any, Any, Any]
    shared: Any
    tasks: Sequence[Any]
    size_of: Callable[[Any], int]
    absent: Any
    derived: bool
    together: Sequence[object] | None
    done: Callable[[Sequence[Any]], None] | None


class Ledger(Protocol):
    """Says which of the tasks are done here, and what is known of the others."""

    #: Whether something is known of each: where not, `absent` stands for what others do.
    whole: bool

    def results(self, work: Work, do: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """The result of each task, in order. `do` gives those of some tasks, errors among them."""


_ledger: ContextVar[Ledger | None] = ContextVar("ledger", default=None)


def _default(size: int, jobs: int) -> Engine:
    """What does tasks of so many bytes together."""
    if files.is_anything_remote() and jobs != 1:
        # Waiting for bytes is most of it: more threads than cores, and none of them needs an interpreter of its own.
        return Threads(jobs or FAR)
    return _Here() if jobs == 1 or size < ALONE else Processes(jobs or cores())


@contextmanager
def kept(ledger: Ledger) -> Iterator[None]:
    """Around what is done by this ledger."""
    before = _ledger.set(ledger)
    try:
        yield
    finally:
        _ledger.reset(before)


def is_share() -> bool:
    """Whether others do a part of the tasks, so that nothing follows from the results that are here."""
    ledger = _ledger.get()
    return ledger is not None and not ledger.whole


def is_divided() -> bool:
    """Return whether somebody else does tasks or knows their results: a share, a merge, workers of an executor."""
    return _ledger.get() is not None or _engine.get() is not None


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def batches(tasks: Iterable[_Task], size_of: Callable[[_Task], int], grain: int = 0) -> Iterator[tuple[_Task, ...]]:
    """Small tasks together. `size_of` one in bytes; `grain` of a batch, 0: that of processes of this machine."""
    batch: list[_Task] = []
    size = 0
    for task in tasks:
        batch.append(task)
        size += size_of(task) + OVERHEAD
        if size >= (grain or BATCH):
            yield tuple(batch)
            batch, size = [], 0
    if batch:
        yield tuple(batch)


def run(
    function: Function[_Shared, _Task, _Result],
    shared: _Shared,
    tasks: Sequence[_Task],
    *,
    size_of: Callable[[_Task], int],
    absent: _Result,
    jobs: int = 0,
    done: Callable[[Sequence[_Task]], None] | None = None,
    derived: bool = False,
    together: Sequence[object] | None = None,
    whole: bool = False,
) -> list[_Result | StateError]:
    """The result of each task, in order: what `function(shared, batch)` gives for the batch that it is in.

    `function` can be imported by its name; `shared`, tasks and results are plain data. `jobs` workers, 0: the cores,
    1: always here. `done` is called with the tasks of each batch, in any order. `absent` is the result that stands for
    a task that is not done; `derived` are tasks which only the results of earlier ones say that there are. Tasks with
    the same key in `together`, a key a task, are done by the same share of a command.

    What goes wrong with a task is its result. A worker that is killed is that of the tasks that it had, and all others
    are done; with `whole`, whatever goes wrong is raised at once. Ctrl-C stops all workers.
    """

    def do(some: Sequence[_Task], *, whole: bool = False) -> list[Any]:
        return _run(function, shared, some, size_of, absent, jobs, done, whole=whole)

    ledger = _ledger.get()
    if ledger is None:
        return do(tasks, whole=whole)
    found = ledger.results(Work(function, shared, tasks, size_of, absent, derived, together, done), do)
    _refuse_errors(found if whole else ())
    return found


def _run(
    function: Function[_Shared, _Task, _Result],
    shared: _Shared,
    tasks: Sequence[_Task],
    size_of: Callable[[_Task], int],
    absent: _Result,
    jobs: int,
    done: Callable[[Sequence[_Task]], None] | None,
    *,
    whole: bool,
) -> list[Any]:
    engine = _engine.get() if jobs != 1 else None
    if engine is None:
        engine = _default(sum(map(size_of, tasks)), jobs)
    cut = list(batches(tasks, size_of, engine.grain(sum(size_of(task) + OVERHEAD for task in tasks))))
    found: list[Any] = [[absent] * len(batch) for batch in cut]

    def place(n: int, results: Sequence[Any] | StateError) -> None:
        found[n] = [results] * len(cut[n]) if isinstance(results, StateError) else results
        _refuse_errors(found[n] if whole else ())
        if done:
            done(cut[n])

    if cut:
        engine.run(function, shared, cut, place)
    return [one for results in found for one in results]


def _refuse_errors(results: Sequence[Any]) -> None:
    for error in results:
        if isinstance(error, StateError):
            raise error


def forks() -> bool:
    """Whether a process more starts in milliseconds, and there is a core for it."""
    return sys.platform == "linux" and cores() > 1


@contextmanager
def beside(function: Callable[[_Task], _Result], work: _Task) -> Iterator[Callable[[], _Result]]:
    """`function(work)` in another process while the block runs; what is given waits for its result, or raises it."""
    with ExitStack() as stack:
        try:
            executor = stack.enter_context(_executor(1))
            with uninterrupted(), _no_workers():
                future = executor.submit(function, work)
        except _NoWorkers:
            yield lambda: function(work)
            return
        yield lambda: _result(future)


def _result(future: Future[_Result]) -> _Result:
    from concurrent.futures import BrokenExecutor

    try:
        return future.result()
    except BrokenExecutor as why:
        raise UnreadableError(KILLED) from why


class _NoWorkers(Exception):
    """The system starts no process: a limit on processes, no memory, or no room in /dev/shm for their locks."""


@contextmanager
def _no_workers() -> Iterator[None]:
    """Raise _NoWorkers for an error of starting workers."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        raise _NoWorkers from error


#: What is said of work whose worker is gone.
KILLED = "a worker process was killed, perhaps for lack of memory"


def attempt(do: Callable[[], Sequence[Any]]) -> Sequence[Any] | StateError:
    """What it gives, or the error of ours that it raises."""
    try:
        return do()
    except StateError as error:
        return error


class _Here:
    """This process."""

    def grain(self, size: int) -> int:  # noqa: ARG002 - as `Engine`
        return 0

    def run(self, function: Function[Any, Any, Any], shared: Any, batches: Sequence[Any], place: Place) -> None:
        for n, batch in enumerate(batches):
            place(n, attempt(lambda batch=batch: function(shared, batch)))  # type: ignore[misc]


class Processes:
    """Forked processes of this machine; threads where there is no fork."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def grain(self, size: int) -> int:  # noqa: ARG002 - as `Engine`
        """As `Engine.grain`."""
        return 0

    def run(self, function: Function[Any, Any, Any], shared: Any, batches: Sequence[Any], place: Place) -> None:
        """As `Engine.run`. What a killed worker had is tried once more, alone: it may have been short of memory.

        Where the system starts no process, all is done in this one.
        """
        left = dict(enumerate(batches))

        def placed(n: int, results: Sequence[Any] | StateError) -> None:
            del left[n]
            place(n, results)

        try:
            self._in_workers(function, shared, left, placed)
        except _NoWorkers:
            numbers = sorted(left)
            _Here().run(function, shared, [left[n] for n in numbers], lambda at, found: placed(numbers[at], found))

    def _in_workers(self, function: Function[Any, Any, Any], shared: Any, left: dict[int, Any], place: Place) -> None:
        """Do all batches that are left; `place` takes each out of them. Raises _NoWorkers."""
        while left and not self._together(function, shared, left, place):
            # Batches are taken in their order, so that these are what the workers had.
            for n in sorted(left)[: self._jobs]:
                if not Processes(1)._together(function, shared, {n: left[n]}, place):
                    place(n, UnreadableError(KILLED))

    def _together(self, function: Function[Any, Any, Any], shared: Any, batches: dict[int, Any], place: Place) -> bool:
        """False where a worker was killed, and some batches were not placed."""
        from concurrent.futures import BrokenExecutor, as_completed

        try:
            with _executor(min(self._jobs, len(batches))) as executor:
                with uninterrupted(), _no_workers():
                    waiting = {executor.submit(function, shared, batch): n for n, batch in batches.items()}
                for future in as_completed(waiting):
                    place(waiting[future], attempt(future.result))
        except BrokenExecutor:
            return False
        return True


class Threads:
    """Threads of this process."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def grain(self, size: int) -> int:  # noqa: ARG002 - as `Engine`
        """As `Engine.grain`."""
        return 0

    def run(self, function: Function[Any, Any, Any], shared: Any, batches: Sequence[Any], place: Place) -> None:
        """As `Engine.run`."""
        from concurrent.futures import as_completed

        with _threads(self._jobs) as executor:
            with uninterrupted():
                waiting = {executor.submit(function, shared, batch): n for n, batch in enumerate(batches)}
            for future in as_completed(waiting):
                place(waiting[future], attempt(future.result))


@contextmanager
def _threads(jobs: int) -> Iterator[Executor]:
    from concurrent.futures import ThreadPoolExecutor

    threads = ThreadPoolExecutor(jobs)
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    threads.shutdown()


@contextmanager
def _executor(jobs: int) -> Iterator[Executor]:
    if sys.platform != "linux":
        with _threads(jobs) as threads:
            yield threads
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("fork")
    with _no_workers():
        ends = os.pipe()
    try:
        with _no_workers():
            processes = ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_the_parent, initargs=ends)
    except _NoWorkers:
        for end in ends:
            os.close(end)
        raise
    try:
        yield processes
    except BaseException:
        workers = list((processes._processes or {}).values())
        for process in workers:
            process.kill()
        for process in workers:
            process.join(GONE)
        # Waiting could be for ever: a killed worker may have held the lock of the queue.
        processes.shutdown(wait=False, cancel_futures=True)
        raise
    else:
        processes.shutdown()
    finally:
        for end in ends:
            os.close(end)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C comes after the block: in the middle of starting threads and processes it would leave half of them."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_the_parent(read: int, write: int) -> None:
    """A worker's first act. Ctrl-C reaches every process of the group: the parent ends the others, without tracebacks.

    A parent that is killed ends nobody, but its end of a pipe, that nobody writes to, is closed with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(write)

    def wait() -> None:
        os.read(read, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
