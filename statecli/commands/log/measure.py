"""Read the values of checkpoints: the norm of each tensor, and its change since the previous checkpoint."""

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
from statecli.values.norm import compute_norm

#: Types of cached figures: norms and counts are not negative.
Norm = Annotated[float, msgspec.Meta(ge=0)]
Cosine = Annotated[float, msgspec.Meta(ge=-1, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Figures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Measurements of a tensor: the L2 norm of its finite values, and the counts of NaN and infinite values.

    `norm` is None if the values are not real numbers, or the norm is too large for a float; then `reason` is set.
    """

    norm: Norm | None = None
    nan: Count = 0
    inf: Count = 0
    reason: str | None = None


class TensorChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Change of a tensor between two checkpoints.

    Attributes:
        differs: True if the values differ; None if unknown: then `reason` is set.
        norm: L2 norm of the difference, over positions finite on both sides; None if not known.
        cosine: Cosine of the two tensors, over the same positions; 0 if a tensor is zero.
    """

    differs: bool | None = False
    norm: Norm | None = 0.0
    cosine: Cosine = 1.0
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
    """Reduce a state to the tensors of the model, without optimizer state and averaged weights.

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
    """Read a checkpoint and measure the model's tensors, or only the tensors that match `glob`.

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
    norm = compute_norm(stats, tensor.elements)
    if isinstance(norm, str) and "complex" in tensor.dtype:
        norm = f"statecli does not compute a norm of {tensor.dtype} values"
    counts = stats.nan or 0, stats.inf or 0
    return Figures(None, *counts, norm) if isinstance(norm, str) else Figures(norm, *counts)


class ComparedPair(msgspec.Struct, frozen=True, gc=False):
    """Old and new tensor, and the change between them. A tensor that a checkpoint lacks is None."""

    match: Match
    change: TensorChange


def compare_checkpoints(before: Measured, after: Measured, cache: Cache) -> list[ComparedPair]:
    """Return all pairs of tensors of two models, each with its change, in the order of the new model."""
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
        n: values.pair_plan.Pair(old, new)
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
        return TensorChange(True, None, reason="its shape changed")
    if isinstance(outcome, Delta):
        if not outcome.changed:
            return TensorChange()
        # Without a largest change and a cosine, the elements that are finite on both sides are equal, if there are any.
        has_equal_finite = outcome.max_abs is None and outcome.cosine is None and outcome.left_out < outcome.elements
        norm = 0.0 if has_equal_finite else outcome.l2
        return TensorChange(True, norm, outcome.cosine or 0.0, outcome.reason if norm is None else None)
    reason = str(outcome) if isinstance(outcome, StateError) else str(getattr(outcome, "reason", outcome))
    return TensorChange(None, None, reason=f"{match.output_row.fqn}: {reason}")


# --- norms ------------------------------------------------------------------------------------------------------------


def list_counted(measured: Measured) -> list[tuple[TensorInfo, Figures]]:
    """Return the model's parameters with their measurements. Only the first of several tied parameters is returned."""
    seen_places: set[object] = set()
    counted_tensors: list[tuple[TensorInfo, Figures]] = []
    for tensor, figures in zip(measured.model.tensors, measured.figures, strict=True):
        place = (tensor.data, tensor.parts) if tensor.data or tensor.parts else tensor.key
        is_codes = tensor.dtype in INTEGER_DTYPES  # a quantized weight has codes, whose norm says nothing
        if tensor.kind is Kind.PARAMETER and not is_codes and place not in seen_places:
            seen_places.add(place)
            counted_tensors.append((tensor, figures))
    return counted_tensors


class Distance(msgspec.Struct, frozen=True):
    """Distance of two checkpoints over the parameters that exist in both with the same shape.

    Attributes:
        change: L2 norm of the difference.
        relative_change: `change` divided by the norm before, infinite if beyond float64; None if the norm is zero.
        cosine: Cosine of the two checkpoints, over tensors that are finite in both, or None.
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
    changes: list[float] = []
    norms_before: list[float] = []
    finite_pairs: list[tuple[float, float, float]] = []  # the norm before, the norm after, and the cosine
    compared = 0
    for pair in pairs:
        old, new, difference = pair.match.before, pair.match.after, pair.change
        if old is None or new is None or id(new) not in new_figures:
            continue
        compared += 1
        before_figures, after_figures = old_figures[id(old)], new_figures[id(new)]
        norm_before, norm_after = before_figures.norm, after_figures.norm
        if difference.norm is None or norm_before is None or norm_after is None:
            continue
        changes.append(difference.norm)
        norms_before.append(norm_before)
        if not any(side.nan or side.inf for side in (before_figures, after_figures)):
            cosine = _refine_cosine(difference, norm_before, norm_after)
            finite_pairs.append((norm_before, norm_after, cosine))
    if not changes:
        return Distance()
    change, norm = math.hypot(*changes), math.hypot(*norms_before)
    return Distance(
        change, change / norm if norm else None, _combine_cosines(finite_pairs), compared - len(finite_pairs)
    )


def _refine_cosine(difference: TensorChange, before: float, after: float) -> float:
    """Return the cosine between old and new values. For a small change, the norms give a more precise cosine.

    The product of float32 values is rounded to 1e-7. The law of cosines multiplies this error by the square of the
    relative change. After a large change, it would subtract almost equal numbers.
    """
    if difference.norm is None or difference.norm >= min(before, after):
        return difference.cosine
    gap = abs(before - after)
    return 1 - (difference.norm - gap) / before * (difference.norm / after + gap / after) / 2


def _combine_cosines(pairs: Sequence[tuple[float, float, float]]) -> float | None:
    """Return the joint cosine of all tensors from their norms and cosines, or None if one side is all zero."""
    before, after = (math.hypot(*(pair[side] for pair in pairs)) for side in (0, 1))
    if not (before and after):
        return None
    # Each norm is divided before the product, because a product of two norms may be beyond float64.
    cosine = math.fsum(old / before * (new / after) * cosine for old, new, cosine in pairs)
    return max(-1.0, min(1.0, cosine))


def map_figures(measured: Measured) -> dict[int, Figures]:
    """Map the `id` of each model tensor to its `Figures`."""
    return {id(tensor): figures for tensor, figures in zip(measured.model.tensors, measured.figures, strict=True)}
