"""Compute a checksum of each row of a matrix, to find rows that were moved."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence

import numpy as np

from statecli.core.errors import StateError
from statecli.core.model_state import TensorData
from statecli.values.compare_task import rechunk
from statecli.values.data_task import DataTask, compute_derived
from statecli.values.element_checks import round_to
from statecli.values.elements import Array, require_element
from statecli.values.read import open_view, read_items, read_values


class RowTask(DataTask, frozen=True, gc=False):
    """Compute the CRC-32 of each row. A row is all values with the same index along the first dimension.

    With a dtype, the values are first rounded to this float type, so that rows of different types can be equal.
    `is_strong` computes 64 bits of BLAKE2b instead, whose equality is sufficient proof of equal rows.
    """

    data: TensorData
    dtype: str | None = None
    is_strong: bool = False

    def compute(self) -> tuple[int, ...]:
        """Return the checksum of each row."""
        elements = math.prod(self.data.shape[1:])
        with open_view(self.data, self.name) as view:
            if self.dtype is None:
                rows = rechunk(read_items(view), elements * require_element(self.data.dtype).items)
            else:
                rows = rechunk((_round(block, self.dtype) for block in read_values(view)), elements)
            digest = _digest_strongly if self.is_strong else zlib.crc32
            return tuple(digest(row.data) for row in rows)


def compute_row_digests(tasks: Sequence[RowTask], *, jobs: int = 0) -> list[tuple[int, ...] | StateError]:
    """Return the checksums of each task's rows, in order, or the error of an unreadable tensor."""
    results = compute_derived(tasks, jobs)
    return [tuple(result) if isinstance(result, list) else result for result in results]  # executors return lists


def _digest_strongly(row: memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little")


def _round(values: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        rounded_values = round_to(values, dtype).astype(np.float64)
    return np.where(np.isnan(rounded_values), np.nan, rounded_values)  # because NaN has many bit patterns
