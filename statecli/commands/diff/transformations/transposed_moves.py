"""Recognise matrices that were transposed and renamed, as conversions from TensorFlow, Flax and GPT-2 do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from statecli.commands.diff.result import Change, Transformation, TransformationKind
from statecli.commands.diff.transformations.moves import find_moves
from statecli.commands.diff.transformations.views import get_data, is_cheap_to_sample, locate, permute
from statecli.core.part_rows import replace_data


def find_transposed_moves(
    changes: Sequence[Change], all_changes: Sequence[Change], sections: Mapping[str, str], *, jobs: int
) -> dict[int, Transformation]:
    """Return the matrices that were transposed and moved, keyed by index in `changes`.

    `changes`, `all_changes` and `sections`: see `find_moves`, which searches the transposes of all matrices before.
    """
    transposes = {id(change): turned for change in all_changes if (turned := _transpose_before(change)) is not None}
    moves = find_moves(
        [transposes.get(id(change), change) for change in changes],
        list(transposes.values()),
        sections,
        jobs=jobs,
        looks_at_renames=True,
    )
    return {n: replace(move, is_transposed=True) for n, move in moves.items() if move.kind is TransformationKind.MOVED}


def _transpose_before(change: Change) -> Change | None:
    """Return the change with its old matrix transposed, or None for other shapes and for single rows or columns."""
    row = change.before
    data = get_data(row)
    if row is None or data is None or len(data.shape) != 2 or min(data.shape) == 1 or not is_cheap_to_sample(row):
        return None
    return replace(change, before=replace_data(row, permute(locate(data, row.fqn), (1, 0))))
