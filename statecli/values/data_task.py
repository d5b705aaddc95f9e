"""Base classes of tasks that read tensor elements, and functions that run batches of these tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from msgspec.structs import astuple

from statecli.core.denormals import with_denormals
from statecli.core.errors import StateError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.values.elements import require_element
from statecli.values.ranges import iter_paths, prefetch
from statecli.workers import pool
from statecli.workers.task import Task, WholeTask, catch_error

_Result_co = TypeVar("_Result_co", covariant=True)


class DataTask(WholeTask, frozen=True, gc=False):
    """Base class of tasks. A task reads all elements of each tensor in its fields."""

    name: str

    @property
    def all_data(self) -> tuple[TensorData, ...]:
        """Tensors of the task."""
        return tuple(value for value in astuple(self) if isinstance(value, TensorData))

    @property
    def size(self) -> int:
        """Size of all tensors in bytes."""
        return sum(math.prod(data.shape) * require_element(data.dtype).size for data in self.all_data)

    @property
    def paths(self) -> Iterable[str]:
        """Files of all tensors."""
        return iter_paths(*self.all_data)


class TensorTask(WholeTask, frozen=True, gc=False):
    """Base class of tasks that read a single tensor of a checkpoint."""

    tensor: TensorInfo

    @property
    def name(self) -> str:
        """FQN of the tensor."""
        return self.tensor.fqn

    @property
    def size(self) -> int:
        """Size of the tensor in bytes."""
        return self.tensor.nbytes

    @property
    def paths(self) -> Iterable[str]:
        """Files of the tensor."""
        return (storage.path for storage in self.tensor.ranges if storage.path)


class ComputedTask(Task, Protocol[_Result_co]):
    """Protocol that adds the result type to `DataTask`. msgspec 0.18 refuses a generic struct with gc=False."""

    @property
    def all_data(self) -> tuple[TensorData, ...]:
        """Tensors of the task."""

    def compute(self) -> _Result_co:
        """Return the result. Raises StateError if a tensor cannot be read."""


@with_denormals
def derived_batch(_: None, tasks: Sequence[ComputedTask[_Result_co]]) -> list[_Result_co | StateError]:
    """Return the result or the error of each task of a batch. The bytes of all tasks are prefetched together."""
    with prefetch(*(data for task in tasks for data in task.all_data)):
        return [catch_error(task.compute) for task in tasks]


def compute_derived(tasks: Sequence[ComputedTask[_Result_co]], jobs: int) -> list[_Result_co | StateError]:
    """Run tasks that depend on results of earlier tasks. Return the result or the error of each task, in order."""
    if not tasks:
        return []
    results: list[Any] = pool.run_tasks(derived_batch, None, tasks, jobs=jobs, absent=None, derived=True)
    return results
