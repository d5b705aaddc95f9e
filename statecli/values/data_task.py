"""Bases of tasks on the elements of tensors: their sizes and files, by which the pool plans them, and their batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from statecli.core.errors import StateError
from statecli.core.model_state import TensorData, TensorInfo
from statecli.values.elements import require_element
from statecli.values.ranges import iter_paths, prefetch
from statecli.workers import pool

_Task = TypeVar("_Task", bound="DataTask")
_Result = TypeVar("_Result")


class DataTask(msgspec.Struct, frozen=True, gc=False):
    """Base of tasks that read all elements of the tensors of `all_data`."""

    name: str

    @property
    def all_data(self) -> tuple[TensorData, ...]:
        """All tensors of the task."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(data.shape) * require_element(data.dtype).size for data in self.all_data)

    @property
    def paths(self) -> Iterable[str]:
        """Files of all tensors."""
        return iter_paths(*self.all_data)

    @property
    def identity(self) -> object:
        """The task itself."""
        return self


class TensorTask(msgspec.Struct, frozen=True, gc=False):
    """Base of tasks that read one tensor of a checkpoint."""

    tensor: TensorInfo

    @property
    def name(self) -> str:
        """FQN of the tensor."""
        return self.tensor.fqn

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.nbytes

    @property
    def paths(self) -> Iterable[str]:
        """Files of the tensor."""
        return (where.path for where in self.tensor.ranges if where.path)

    @property
    def identity(self) -> object:
        """The task itself."""
        return self


def run_derived(
    function: pool.Function[None, _Task, _Result | None], tasks: Sequence[_Task], jobs: int
) -> list[_Result | StateError | None]:
    """Return the result of each task, in order. The tasks follow from the results of earlier tasks."""
    return pool.run_tasks(function, None, tasks, jobs=jobs, absent=None, derived=True) if tasks else []


def run_each(function: Callable[[_Task], _Result], tasks: Sequence[_Task]) -> list[_Result]:
    """Return the result of each task of a batch; the bytes of all tasks are requested together."""
    with prefetch(*(data for task in tasks for data in task.all_data)):
        return [function(task) for task in tasks]
