"""A task on the elements of several tensors: its size and its files, by which the pool plans it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from statecli.core.model_state import TensorData
from statecli.values.elements import require_element
from statecli.values.ranges import iter_paths


class DataTask(msgspec.Struct, frozen=True, gc=False):
    """Base of tasks that read all elements of the tensors of `all_data`."""

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
