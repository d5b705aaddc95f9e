"""Find weights that only the file or only the class computes from input tensors, as weight_norm does.

`weight_norm` computes a weight from a gain and a direction, `spectral_norm` and pruning from the original and a vector
or a mask. An input has the shape of the weight, but a model that loads the input as the weight gives wrong values.
Sources: torch/nn/utils: weight_norm.py, spectral_norm.py, prune.py, parametrizations.py, parametrize.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from statecli.core.lazy_pattern import compile_on_use

_PARAMETRIZED = compile_on_use(r"(?P<module>.*?)\.?parametrizations\.(?P<tensor>[^.]+)\.original(?P<part>\d*)")


class ComputedWeight(msgspec.Struct, frozen=True):
    """A computed weight: its name, the name of an input tensor (`part`), and the function that computes the weight."""

    name: str
    part: str
    function: str


class ComputedWeights(msgspec.Struct, frozen=True):
    """Weights whose input tensors only the file stores, and weights whose input tensors only the class has."""

    in_file: list[ComputedWeight]
    in_class: list[ComputedWeight]


def find_computed_weights(
    pairs: Mapping[str, str], stored: Collection[str], registered: Collection[str]
) -> ComputedWeights:
    """Find pairs (file, class) in which one tensor is an input of a computed weight and its partner is not.

    `pairs`: name in the file -> name in the class.
    """
    weights = ComputedWeights([], [])
    for name, registered_name in pairs.items():
        parts = _find_part(name, stored), _find_part(registered_name, registered)
        if parts[0] is not None and parts[1] is None:
            weights.in_file.append(ComputedWeight(registered_name, name, parts[0]))
        elif parts[1] is not None and parts[0] is None:
            weights.in_class.append(ComputedWeight(name, registered_name, parts[1]))
    return weights


def _find_part(name: str, names: Collection[str]) -> str | None:
    """Return the name of the function that computes a weight from this tensor, such as weight_norm, or None."""
    match = _PARAMETRIZED.fullmatch(name)
    if match is not None:
        if match["part"]:
            return "weight_norm"
        return "spectral_norm" if f"{name.removesuffix('original')}0._u" in names else "a parametrization"
    for suffix, companion_suffix, function in (
        ("_v", "_g", "weight_norm"),
        ("_g", "_v", "weight_norm"),
        ("_orig", "_mask", "prune"),
        ("_orig", "_u", "spectral_norm"),
    ):
        if name.endswith(suffix) and name.removesuffix(suffix) + companion_suffix in names:
            return function
    return None
