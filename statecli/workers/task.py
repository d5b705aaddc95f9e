"""What a worker is given: a task, and the places in files that tasks name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec


class Task(Protocol):
    """One unit of work on tensor values: a frozen struct of plain data, with a small result.

    Workers receive tasks pickled. The room that plans a task also has the function that does it.
    """

    @property
    def name(self) -> str:
        """Name of the tensor, for messages."""

    @property
    def size(self) -> int:
        """Bytes that the task reads, at most; of two compared tensors those of one side."""

    @property
    def paths(self) -> Iterable[str]:
        """Files that the task reads; one that is read twice may be listed twice."""

    @property
    def identity(self) -> object:
        """Plain data that is equal for equal tasks of two runs: a shard file looks results up by its digest."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Byte `offset` of `path`, where the elements of a contiguous tensor begin."""

    path: str
    offset: int
    dtype: str
