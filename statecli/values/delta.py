"""Options for comparing two tensors, and the difference of their values."""

from __future__ import annotations

import msgspec

#: Reason for a missing relative change.
ZERO_BEFORE = "all old values are zero"
#: Maximum of the estimated rank: 128 means 128 or more.
MAX_RANK = 128


class CompareOptions(msgspec.Struct, frozen=True):
    """Conditions for equality of two elements.

    By default, the values must be equal. NaN equals NaN at the same position, -0.0 equals 0.0, complex values are
    compared part by part.

    Attributes:
        bitwise: Elements are equal if their bits and the meaning of the bits are equal (scale, lazy conjugation,
        negation).
        atol: Absolute tolerance: |after - before| <= atol + rtol * |before|, as in `torch.isclose(after, before)`.
        rtol: Relative tolerance.
        device: "cpu" computes with numpy; "cuda" and "cuda:N" compute with torch on this device.
    """

    bitwise: bool = False
    atol: float = 0.0
    rtol: float = 0.0
    device: str = "cpu"


class Delta(msgspec.Struct, frozen=True, gc=False):
    """Difference of the values of a tensor; Δ is after - before, in float64.

    A value is None if it is undefined (no position is finite on both sides, a norm is zero) or beyond float64; `reason`
    then says why.

    Attributes:
        elements: Number of elements of the tensor.
        changed: Number of differing elements.
        max_abs, mean_abs, l2: Largest and mean |Δ| and L2 norm of Δ, over all positions that are finite on both sides.
        relative_l2: L2 norm of Δ divided by the L2 norm of before.
        cosine: Cosine similarity of before and after over the same positions.
        nan_before, nan_after, inf_before, inf_after: Number of NaN and of infinite values on each side.
        left_out: Number of positions that are not finite on at least one side.
        rank: Numerical rank of Δ of a matrix (128 means 128 or more); None if not estimated.
        first: Index of the first differing element, in C order.
    """

    elements: int = 0
    changed: int = 0
    max_abs: float | None = None
    mean_abs: float | None = None
    l2: float | None = None
    relative_l2: float | None = None
    cosine: float | None = None
    nan_before: int = 0
    nan_after: int = 0
    inf_before: int = 0
    inf_after: int = 0
    left_out: int = 0
    rank: int | None = None
    first: tuple[int, ...] | None = None
    reason: str | None = None
