"""Run batches with `mpi4py.futures` on the MPI ranks 1, 2, and so on. This process is rank 0 of the MPI job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from statecli.core.errors import MissingDependency, UsageError, option
from statecli.core.installed_package import install_extra
from statecli.workers.executors.futures import ExecutorEngine
from statecli.workers.pool import Engine

START_COMMAND = "mpiexec -n 3 python -m mpi4py.futures -m statecli …"


@contextmanager
def use_mpi() -> Iterator[Engine]:
    """Yield the engine that runs batches on the other MPI ranks.

    Raises `MissingDependency` without mpi4py, and `UsageError` if the job has no other ranks.
    """
    flag = option("--executor", "mpi")
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPIPoolExecutor, _core
    except (ImportError, RuntimeError) as error:  # RuntimeError if no MPI library is installed
        raise MissingDependency(f"{flag} needs mpi4py and an MPI library: {install_extra('mpi')}") from error
    # Without a shared pool, mpi4py would itself start processes, which few schedulers allow, and wait for them forever.
    if _core.SharedPool is None or MPI.COMM_WORLD.Get_size() < 2:
        raise UsageError(f"{flag}: found no other MPI ranks; start statecli with: {START_COMMAND}")
    # mpi4py aborts for every nonzero exit status. Status 1 of statecli must not abort, so that the other ranks end
    # normally.
    MPI._set_abort_status = lambda status: None  # noqa: ARG005 - its own name
    with MPIPoolExecutor() as executor:
        try:
            yield ExecutorEngine(executor, "mpi", MPI.COMM_WORLD.Get_size() - 1)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
