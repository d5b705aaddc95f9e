"""Input of a worker: a task, and the places in files named by tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from statecli.core.errors import StateError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Task(Protocol):
    """A unit of work on tensor values: a frozen struct of plain data, with a small result.

    Workers receive tasks pickled. The package that plans a task also has the function for the task.
    """

    @property
    def name(self) -> str:
        """Name of the tensor, for messages."""

    @property
    def size(self) -> int:
        """Bytes read by the task, at most; of two compared tensors the bytes of one side."""

    @property
    def paths(self) -> Iterable[str]:
        """Files read by the task; a file read twice may be listed twice."""

    @property
    def identity(self) -> object:
        """Plain data, equal for equal tasks of two runs: a shard file looks results up by the digest of this data."""


class WholeTask(msgspec.Struct, frozen=True, gc=False):
    """Base of tasks all of whose fields count for a shard file."""

    @property
    def identity(self) -> object:
        """The task itself."""
        return self


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Byte `offset` of `path`, where the elements of a contiguous tensor begin."""

    path: str
    offset: int
    dtype: str


def catch_error(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
) -> _Result | StateError:
    """Return the result of a call, or its StateError: an error of a task is the result of the task."""
    try:
        return function(*arguments, **keywords)
    except StateError as error:
        return error
