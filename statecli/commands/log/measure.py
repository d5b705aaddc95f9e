"""Read the values of checkpoints: the norm of each tensor, and its change since the checkpoint before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec.structs import replace

from statecli import values
from statecli.commands.diff.pairing import Match, pair_tensors
from statecli.commands.log.cache import Cache
from statecli.commands.log.checkpoints import read_state
from statecli.core.dtypes import INTEGER_DTYPES
from statecli.core.errors import StateError, UnreadableError
from statecli.core.model_state import Kind, ModelState, Stats, TensorInfo
from statecli.core.parameter_or_buffer import MODEL_KINDS, list_model_sections, select_loaded_sections
from statecli.core.selection import matches_any
from statecli.storage import files
from statecli.storage.file_version import read_versions, refuse_changed
from statecli.storage.store import FileVersion
from statecli.values.delta import CompareOptions, Delta
from statecli.values.norm import sum_squares

#: Types of cached figures: sums of squares and counts are not negative.
Square = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Figures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Figures of a tensor: the sum of the squares of its finite values, and the number of all other values.

    `squares` is None if the values are not real numbers, or the sum is too large for a float; then `reason` is set.
    """

    squares: Square | None = None
    nan: Count = 0
    inf: Count = 0
    reason: str | None = None


class TensorChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Change of a pair of tensors.

    Attributes:
        differs: True if the values differ; None if unknown: then `reason` is set.
        squares: Sum of the squares of the difference, over positions finite on both sides; None if not known.
    """

    differs: bool | None = False
    squares: Square | None = 0.0
    reason: str | None = None


class Measured(msgspec.Struct, frozen=True):
    """A checkpoint whose values were read.

    Attributes:
        state: All sections and settings of the checkpoint.
        model: The tensors of the model only.
        versions: Versions of its files when they were opened.
        figures: Figures of each tensor of `model`, in order.
    """

    state: ModelState
    model: ModelState
    versions: Mapping[str, FileVersion | None]
    figures: tuple[Figures, ...]


def select_model(state: ModelState) -> ModelState:
    """Return the state with the tensors of the model only: no optimizer, no average of the weights.

    Raises UnreadableError without tensors of a model.
    """
    loaded_sections = select_loaded_sections(list_model_sections(state))
    tensors = tuple(
        tensor for tensor in state.tensors if tensor.section in loaded_sections and tensor.kind in MODEL_KINDS
    )
    if not tensors:
        raise UnreadableError(f"{state.target}: contains no tensors of a model")
    return replace(state, tensors=tensors, sections=tuple(loaded_sections))


def measure_checkpoint(path: str, cache: Cache, *, glob: str | None = None, reads_values: bool = True) -> Measured:
    """Read the checkpoint, and the figures of each tensor of its model; with `glob`, only of matching tensors.

    If `reads_values` is False, the figures are empty. Raises StateError if a tensor of the model cannot be read,
    because the norm is then unknown.
    """
    with files.record_opened_files() as opened_files:
        state = read_state(path)
        model = select_model(state)
        if glob is not None:
            model = replace(model, tensors=tuple(row for row in model.tensors if matches_any((row.fqn,), [glob])))
        damage = next((tensor.damage for tensor in model.tensors if tensor.damage), None)
        if damage is not None:
            raise UnreadableError(damage)
        paths = {byte_range.path for tensor in model.tensors for byte_range in tensor.ranges if byte_range.path}
        versions = {**read_versions(paths), **opened_files}
        key = cache.make_key([model], versions)
        figures = cache.load(key, Figures, len(model.tensors)) if reads_values else [Figures()] * len(model.tensors)
        if figures is None:
            figures = [_convert_to_figures(tensor) for tensor in values.stats.fill_stats(model).tensors]
            refuse_changed({path: version for path, version in versions.items() if version is not None})
            cache.store(key, figures)
    return Measured(state, model, versions, tuple(figures))


def _convert_to_figures(tensor: TensorInfo) -> Figures:
    stats = tensor.stats or Stats()
    squares = sum_squares(stats, tensor.elements)
    counts = stats.nan or 0, stats.inf or 0
    return Figures(None, *counts, squares) if isinstance(squares, str) else Figures(squares, *counts)


class ComparedPair(msgspec.Struct, frozen=True, gc=False):
    """A tensor before and now, None for a side without the tensor, and its change."""

    match: Match
    change: TensorChange


def compare_checkpoints(before: Measured, after: Measured, cache: Cache) -> list[ComparedPair]:
    """Return each pair of tensors of the two models with its change, in the order of after."""
    pairing = pair_tensors(before.model, after.model, ())
    common_matches = [match for match in pairing.matches if match.before is not None and match.after is not None]
    key = cache.make_key([before.model, after.model], {**before.versions, **after.versions})
    changes = cache.load(key, TensorChange, len(common_matches))
    if changes is None:
        changes = _read_changes(common_matches, {**before.versions, **after.versions})
        if not any(change.differs is None for change in changes):
            cache.store(key, changes)
    remaining_changes = iter(changes)
    return [
        ComparedPair(
            match, next(remaining_changes) if match.before is not None and match.after is not None else TensorChange()
        )
        for match in pairing.matches
    ]


def _read_changes(matches: Sequence[Match], versions: Mapping[str, FileVersion | None]) -> list[TensorChange]:
    pairs = {
        n: values.compare.Pair(old, new)
        for n, match in enumerate(matches)
        if (old := match.before) and (new := match.after) and old.shape == new.shape
    }
    compared = values.compare.compare_pairs(
        list(pairs.values()), CompareOptions(bitwise=True), header_versions=versions
    )
    outcomes = dict(zip(pairs, compared, strict=True))
    return [_convert_to_change(outcomes.get(n), match) for n, match in enumerate(matches)]


def _convert_to_change(outcome: object, match: Match) -> TensorChange:
    if outcome is None:
        return TensorChange(True, None, "its shape changed")
    if isinstance(outcome, Delta):
        if not outcome.changed:
            return TensorChange()
        squares = None if outcome.l2 is None else outcome.l2**2
        is_known = squares is not None and math.isfinite(squares)
        return TensorChange(True, squares, None) if is_known else TensorChange(True, None, outcome.reason)
    reason = str(outcome) if isinstance(outcome, StateError) else str(getattr(outcome, "reason", outcome))
    return TensorChange(None, None, f"{match.output_row.fqn}: {reason}")


# --- sums -------------------------------------------------------------------------------------------------------------


def list_counted(measured: Measured) -> list[tuple[TensorInfo, Figures]]:
    """Return the parameters of the model with their figures; of tied tensors, only the first."""
    seen_places: set[object] = set()
    counted_tensors: list[tuple[TensorInfo, Figures]] = []
    for tensor, figures in zip(measured.model.tensors, measured.figures, strict=True):
        place = (tensor.data, tensor.parts) if tensor.data or tensor.parts else (tensor.section, tensor.fqn)
        is_codes = tensor.dtype in INTEGER_DTYPES  # a quantized weight has codes, whose norm says nothing
        if tensor.kind is Kind.PARAMETER and not is_codes and place not in seen_places:
            seen_places.add(place)
            counted_tensors.append((tensor, figures))
    return counted_tensors


class Distance(msgspec.Struct, frozen=True):
    """Distance of two checkpoints over the parameters present on both sides with the same shape.

    Attributes:
        change: L2 norm of the difference.
        relative_change: `change` divided by the norm before; None if the norm is zero.
        cosine: Cosine of the two, over tensors finite on both sides, or None.
        left_out: Number of tensors left out of the cosine.
    """

    change: float | None = None
    relative_change: float | None = None
    cosine: float | None = None
    left_out: int = 0


def compute_distance(before: Measured, after: Measured, pairs: Sequence[ComparedPair]) -> Distance:
    """Return the distance of two models, from the figures and changes of their parameters."""
    old_figures = map_figures(before)
    new_figures = {id(tensor): figures for tensor, figures in list_counted(after)}
    change = norm_before = finite_before = finite_after = finite_change = 0.0
    compared = count = finite_count = 0
    for pair in pairs:
        old, new, difference = pair.match.before, pair.match.after, pair.change
        if old is None or new is None or id(new) not in new_figures:
            continue
        compared += 1
        figures = old_figures[id(old)], new_figures[id(new)]
        if difference.squares is None or figures[0].squares is None or figures[1].squares is None:
            continue
        count += 1
        change += difference.squares
        norm_before += figures[0].squares
        if not any(side.nan or side.inf for side in figures):
            finite_count += 1
            finite_before += figures[0].squares
            finite_after += figures[1].squares
            finite_change += difference.squares
    if not count:
        return Distance()
    relative = math.sqrt(change / norm_before) if norm_before else None
    cosine = None
    if finite_count and finite_before and finite_after:
        product = (finite_before + finite_after - finite_change) / 2
        cosine = max(-1.0, min(1.0, product / math.sqrt(finite_before) / math.sqrt(finite_after)))
    return Distance(math.sqrt(change), relative, cosine, compared - finite_count)


def map_figures(measured: Measured) -> dict[int, Figures]:
    """Return the figures of each tensor of the model by its `id`."""
    return {id(tensor): figures for tensor, figures in zip(measured.model.tensors, measured.figures, strict=True)}
