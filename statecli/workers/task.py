"""Input of a worker: a task, and the byte ranges in files that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from statecli.core.errors import StateError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Task(Protocol):
    """Unit of work on tensor values: a frozen struct of plain data, with a small result.

    Workers receive pickled tasks. The package that plans a task also has the function that runs it.
    """

    @property
    def name(self) -> str:
        """Name of the tensor, for messages."""

    @property
    def size(self) -> int:
        """Maximum number of bytes that the task reads. For a comparison, this is the size of only one tensor."""

    @property
    def paths(self) -> Iterable[str]:
        """Paths of the files that the task reads. A path may occur more than once."""

    @property
    def identity(self) -> object:
        """Plain data that is equal for equal tasks of two runs. Its digest identifies a result in a shard file."""


class WholeTask(msgspec.Struct, frozen=True, gc=False):
    """Base class of tasks that a shard file identifies by all their fields."""

    @property
    def identity(self) -> object:
        """The task itself."""
        return self


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Place of the elements of a contiguous tensor: they begin at byte `offset` of the file `path`."""

    path: str
    offset: int
    dtype: str


def catch_error(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **keywords: _Arguments.kwargs
) -> _Result | StateError:
    """Return the result of a call, or the StateError that the call raised, because an error is a task's result too."""
    try:
        return function(*arguments, **keywords)
    except StateError as error:
        return error
