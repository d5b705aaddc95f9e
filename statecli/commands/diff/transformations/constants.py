"""Find tensors that are not constant. Two equal constant tensors do not show that a tensor was transformed."""

from __future__ import annotations

from collections.abc import Sequence

from statecli.commands.diff.renames import is_constant
from statecli.commands.diff.transformations.views import narrow, take_sample
from statecli.core.model_state import TensorInfo
from statecli.core.part_rows import replace_data
from statecli.values.compare import compare_pairs
from statecli.values.delta import CompareOptions, Delta
from statecli.values.pair_plan import Pair


def select_varied(rows: Sequence[TensorInfo], jobs: int) -> set[int]:
    """Return the indexes of the tensors that are not constant. A sample is enough to show this for most tensors."""
    pairs = {n: pair for n, row in enumerate(rows) if (pair := _pair_neighbours(take_sample(row))) is not None}
    outcomes = compare_pairs(list(pairs.values()), CompareOptions(bitwise=True), jobs=jobs, derived=True)
    varied = {n for n, outcome in zip(pairs, outcomes, strict=True) if isinstance(outcome, Delta) and outcome.changed}
    return varied | {n for n, row in enumerate(rows) if n not in varied and not is_constant(row)}


def _pair_neighbours(sample: TensorInfo) -> Pair | None:
    """Pair each element with the next element along the first axis of size 2 or more."""
    data = sample.data
    axis = next((n for n, size in enumerate(data.shape) if size > 1), None) if data is not None else None
    if data is None or axis is None:
        return None
    size = data.shape[axis] - 1
    before, after = (replace_data(sample, narrow(data, axis, start, size)) for start in (0, 1))
    return Pair(before, after)
