"""Roles, such as the query weight of each layer: the RMS of their values over the layers, and the outliers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from statecli.core.model_state import Kind, TensorInfo, TensorKey
from statecli.core.parameter_or_buffer import MODEL_KINDS
from statecli.core.units import format_number
from statecli.report import Curve, fold

#: Smallest number of layers of a role that show the usual size.
MIN_LAYERS = 5
#: A layer is an outlier if its RMS differs from the median by more than this factor, and by more than
#: OUTLIER_DEVIATIONS times the median deviation of the layers (both on a logarithmic scale).
OUTLIER_FACTOR = 1.5
OUTLIER_DEVIATIONS = 9.0
#: Largest number of roles with a chart; the other roles are only in the JSON.
MAX_CHARTS = 24


class Role(msgspec.Struct, frozen=True):
    """Tensors whose names differ only in the number of the layer, such as `h.{0..11}.attn.weight`.

    Attributes:
        name: The name, with the range of the layers.
        section: Section of the tensors.
        layers: Number of each layer, in ascending order.
        tensors: Name of the tensor of each layer.
        rms: Root mean square of the finite values of each tensor; null if none is finite.
        median_rms: Median of `rms`.
        outliers: Names of the tensors whose RMS is far from the median.
    """

    name: str
    section: str
    layers: tuple[int, ...]
    tensors: tuple[str, ...]
    rms: tuple[float | None, ...]
    median_rms: float
    outliers: tuple[str, ...]

    def describe_outliers(self) -> dict[TensorKey, str]:
        """Return a text for each outlier, by section and name: `outlier: RMS 4.1, the median of 12 layers is 0.02`."""
        rms = dict(zip(self.tensors, self.rms, strict=True))
        median_text = f"the median of {len(self.layers)} layers is {format_number(self.median_rms, 3)}"
        return {
            TensorKey(self.section, name): f"outlier: RMS {format_number(rms[name], 3)}, {median_text}"
            for name in self.outliers
        }


def list_roles(tensors: Iterable[TensorInfo]) -> tuple[Role, ...]:
    """Return the roles with at least MIN_LAYERS measured layers, in the order of the target."""
    groups: dict[tuple[str, str], dict[int, TensorInfo]] = {}
    for tensor in tensors:
        if tensor.stats is None or tensor.kind not in MODEL_KINDS or tensor.kind is Kind.UNREGISTERED:
            continue
        _, numbers = fold.split_numbers(tensor.fqn)
        if numbers:
            inner_numbers = map(str, numbers[1:])
            groups.setdefault((tensor.section, fold.insert_numbers(tensor.fqn, ["#", *inner_numbers])), {})[
                numbers[0]
            ] = tensor
    roles = (_build_role(section, layers) for (section, _), layers in groups.items() if len(layers) >= MIN_LAYERS)
    return tuple(role for role in roles if role is not None)


def _build_role(section: str, layers: dict[int, TensorInfo]) -> Role | None:
    numbers = sorted(layers)
    tensors = [layers[number] for number in numbers]
    rms = tuple(map(_compute_rms, tensors))
    known_rms = [value for value in rms if value is not None]
    if len(known_rms) < MIN_LAYERS:
        return None
    median = _find_median(known_rms)
    numbers_in_name = fold.split_numbers(tensors[0].fqn)[1]
    name = fold.insert_numbers(tensors[0].fqn, [fold.format_numbers(numbers), *map(str, numbers_in_name[1:])])
    names = tuple(tensor.fqn for tensor in tensors)
    return Role(name, section, tuple(numbers), names, rms, median, _find_outliers(names, rms, median))


def _compute_rms(tensor: TensorInfo) -> float | None:
    stats = tensor.stats
    if stats is None or stats.mean is None or stats.nan is None or stats.inf is None:
        return None
    count = tensor.elements - stats.nan - stats.inf
    rms = math.hypot(stats.mean, (stats.std or 0.0) * math.sqrt(max(count - 1, 0) / count)) if count > 0 else math.nan
    return rms if math.isfinite(rms) else None


def _find_outliers(names: tuple[str, ...], rms: tuple[float | None, ...], median: float) -> tuple[str, ...]:
    distances = {
        name: _measure_distance(value, median) for name, value in zip(names, rms, strict=True) if value is not None
    }
    limit = max(math.log(OUTLIER_FACTOR), OUTLIER_DEVIATIONS * _find_median(distances.values()))
    return tuple(name for name, distance in distances.items() if distance > limit)


def _measure_distance(value: float, median: float) -> float:
    if value == median:
        return 0.0
    ratio = value / median if median else 0.0  # may be beyond float64
    return abs(math.log(ratio)) if ratio > 0 else math.inf


def build_curves(tensors: Sequence[TensorInfo]) -> tuple[Curve, ...]:
    """Return a chart for each role, at most MAX_CHARTS: roles with NaN, Inf or outliers first, constant roles last."""
    nonfinite: dict[TensorKey, list[str]] = {}
    for tensor in tensors:
        stats = tensor.stats
        if stats is not None and (stats.nan or stats.inf):
            counts = (("NaN", stats.nan), ("Inf", stats.inf))
            nonfinite[tensor.key] = [f"{count:,} {word}" for word, count in counts if count]
    curves = [_build_curve(role, nonfinite) for role in list_roles(tensors)]
    curves.sort(key=lambda curve: (not any(curve.alarms), len(set(curve.values)) == 1))
    return tuple(curves[:MAX_CHARTS])


def _build_curve(role: Role, nonfinite: Mapping[TensorKey, Sequence[str]]) -> Curve:
    """Return a chart of the RMS over the layers. Layers with NaN or infinity, and outliers, are marked as alarms."""
    outliers = role.describe_outliers()
    keys = [TensorKey(role.section, name) for name in role.tensors]
    return Curve(
        role.name if role.section in ("", "model") else f"{role.section}: {role.name}",
        role.tensors,
        tuple(map(float, role.layers)),
        tuple(math.nan if value is None else value for value in role.rms),
        tuple(", ".join(filter(None, (*nonfinite.get(key, ()), outliers.get(key, "")))) for key in keys),
        "RMS",
        "layer",
        small=True,
        tensors=tuple(keys),
    )


def _find_median(numbers: Collection[float]) -> float:
    """Return the median. An import of `statistics` would make the start of a command 3 % slower."""
    sorted_numbers = sorted(numbers)
    middle = len(sorted_numbers) // 2
    return (
        sorted_numbers[middle] if len(sorted_numbers) % 2 else (sorted_numbers[middle - 1] + sorted_numbers[middle]) / 2
    )
