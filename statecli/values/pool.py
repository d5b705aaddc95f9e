"""Work in other processes, for what one core is not fast enough for.

Threads will not do: a kernel makes twenty short numpy calls a block, and two threads spend more time on handing the
interpreter lock to each other than they gain. A forked process starts in milliseconds with numpy already imported;
where there is no fork, threads are the next best.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from statecli.errors import UnreadableError

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

#: Bytes of small tasks that are handed out together; each counts OVERHEAD more than it has.
BATCH = 16 << 20
OVERHEAD = 16 << 10
#: Seconds that a killed process is waited for.
GONE = 2.0

_Work = TypeVar("_Work")
_Result = TypeVar("_Result")


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def batches(works: Iterable[_Work], size_of: Callable[[_Work], int]) -> Iterator[tuple[_Work, ...]]:
    """Small works together, so that handing them out costs nothing beside doing them. `size_of` one in bytes."""
    batch: list[_Work] = []
    size = 0
    for work in works:
        batch.append(work)
        size += size_of(work) + OVERHEAD
        if size >= BATCH:
            yield tuple(batch)
            batch, size = [], 0
    if batch:
        yield tuple(batch)


def run(
    function: Callable[[_Work], _Result],
    works: Sequence[_Work],
    jobs: int,
    done: Callable[[_Work], None] = lambda _: None,
) -> list[_Result]:
    """`function` of each of `works`, in order; `done` is called as each is finished, in any order.

    `jobs` workers, here if that is one or there is but one thing to do. `function` must be importable by name, and its
    argument and result picklable. Whatever it raises is raised; Ctrl-C stops all workers at once.
    """
    if jobs <= 1 or len(works) <= 1:
        return [_here(function, work, done) for work in works]
    from concurrent.futures import as_completed

    results: list[Any] = [None] * len(works)
    with _executor(min(jobs, len(works))) as executor:
        with _uninterrupted():
            waiting: dict[Future[_Result], int] = {executor.submit(function, work): n for n, work in enumerate(works)}
        for future in as_completed(waiting):
            n = waiting[future]
            results[n] = _result(future)
            done(works[n])
    return results


def forks() -> bool:
    """Whether a process more starts in milliseconds, and there is a core for it."""
    return sys.platform == "linux" and cores() > 1


@contextmanager
def beside(function: Callable[[_Work], _Result], work: _Work) -> Iterator[Callable[[], _Result]]:
    """`function(work)` in another process while the block runs; what is given waits for its result, or raises it."""
    with _executor(1) as executor:
        with _uninterrupted():
            future = executor.submit(function, work)
        yield lambda: _result(future)


def _here(function: Callable[[_Work], _Result], work: _Work, done: Callable[[_Work], None]) -> _Result:
    result = function(work)
    done(work)
    return result


def _result(future: Future[_Result]) -> _Result:
    from concurrent.futures import BrokenExecutor

    try:
        return future.result()
    except BrokenExecutor as why:
        raise UnreadableError("a worker process was killed, perhaps for lack of memory; try --jobs 1") from why


@contextmanager
def _executor(jobs: int) -> Iterator[Executor]:
    from concurrent.futures import ThreadPoolExecutor

    if sys.platform != "linux":
        with ThreadPoolExecutor(jobs) as threads:
            try:
                yield threads
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("fork")
    ends = os.pipe()
    processes = ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_the_parent, initargs=ends)
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
def _uninterrupted() -> Iterator[None]:
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
