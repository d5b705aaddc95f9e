"""Find, for each of several tensors, the most similar tensor of another checkpoint, by comparing samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from statecli.core.model_state import TensorInfo
from statecli.values.elements import Array
from statecli.values.read import read_all_values

#: Minimum number of elements of a sample, because few numbers correlate by chance.
_MIN_ELEMENTS = 64
#: Minimum correlation of two similar samples, and its minimum lead over the second best.
_MIN_CORRELATION, _MIN_LEAD = 0.8, 0.25


def find_most_similar(samples: Sequence[TensorInfo], candidates: Sequence[TensorInfo]) -> list[int | None]:
    """Return, for each sample, the index of the candidate with the clearly best correlation, or None.

    All samples must have real numbers and the same shape. Raises UnreadableError as `read_all_values` does.
    """
    sample_rows, other_rows = _read_centred(samples), _read_centred(candidates)
    if sample_rows is None or other_rows is None:
        return [None] * len(samples)
    similar: list[int | None] = []
    for row in sample_rows @ other_rows.T:
        best = int(np.argmax(row))
        lead = row[best] - np.max(np.delete(row, best), initial=0.0)
        similar.append(best if row[best] >= _MIN_CORRELATION and lead >= _MIN_LEAD else None)
    return similar


def _read_centred(samples: Sequence[TensorInfo]) -> Array | None:
    """Return the samples as rows with mean 0 and norm 1, or None if they have too few elements."""
    rows = []
    for sample in samples:
        if sample.elements < _MIN_ELEMENTS or sample.data is None:
            return None
        with np.errstate(all="ignore"):
            values = read_all_values(sample.data, sample.fqn).astype(np.float64)
            values -= values.mean()
            values /= np.linalg.norm(values)
        rows.append(np.where(np.isfinite(values), values, 0.0))
    return np.stack(rows) if rows else None
