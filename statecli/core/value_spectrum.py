"""Singular values of a matrix, as plain data."""

from __future__ import annotations

import msgspec


class Spectrum(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Singular values of a tensor, reshaped to a matrix: the first axis by all other axes.

    Attributes:
        count: Number of singular values: the smaller side of the matrix.
        ranks: Places of `values` among all singular values, from the largest: 1 to `count`. For a large matrix, evenly
            spaced places.
        values: The singular values at these places.
        rank: Number of singular values above the rounding of float64, as numpy.linalg.matrix_rank counts them.
        stable_rank: Sum of the squares of all singular values, divided by the largest square; null if all are zero.
        reason: Why the singular values were not computed.
    """

    count: int | None = None
    ranks: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    rank: int | None = None
    stable_rank: float | None = None
    reason: str | None = None
