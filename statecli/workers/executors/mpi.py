"""MPI: the other ranks of the job that this process is rank 0 of, by `mpi4py.futures`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from statecli.core.errors import MissingDependency, UsageError
from statecli.values.pool import Engine
from statecli.workers.executors.futures import Elsewhere

START = "mpiexec -n 3 python -m mpi4py.futures -m statecli …"


@contextmanager
def ranks() -> Iterator[Engine]:
    """Raises `MissingDependency`, and `UsageError` where this process has no ranks to give work to."""
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPIPoolExecutor, _core
    except (ImportError, RuntimeError) as missing:  # a RuntimeError where there is no MPI library
        raise MissingDependency("--executor mpi needs mpi4py and an MPI: pip install 'statecli[mpi]'") from missing
    # Without it mpi4py would start processes itself, which few schedulers allow, and wait for them for ever.
    if _core.SharedPool is None or MPI.COMM_WORLD.Get_size() < 2:
        raise UsageError(f"--executor mpi: this process has no other ranks: start it with {START}")
    # mpi4py makes an abort of every exit code but 0, which 1 is not: the other ranks are ended in order.
    MPI._set_abort_status = lambda status: None  # noqa: ARG005 - its own name
    with MPIPoolExecutor() as executor:
        try:
            yield Elsewhere(executor, "mpi", MPI.COMM_WORLD.Get_size() - 1)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
