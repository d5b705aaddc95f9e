"""How two tensors are compared, and how their values differ."""

from __future__ import annotations

import msgspec


class How(msgspec.Struct, frozen=True):
    """When two elements are equal.

    Exactly by default: NaN equals NaN in the same place and -0.0 equals 0.0, of a complex value part by part.
    `bitwise`: only equal bits are equal, and only where they mean the same (scale, lazy conjugation, negation).
    Else |after - before| <= atol + rtol * |before|, as `torch.isclose(after, before)` has it.
    `device`: "cpu" computes with numpy, "cuda" and "cuda:N" with torch on that device.
    """

    bitwise: bool = False
    atol: float = 0.0
    rtol: float = 0.0
    device: str = "cpu"


class Delta(msgspec.Struct, frozen=True, gc=False):
    """How the values of one tensor differ; Δ is after - before, in float64.

    `elements` is how many the tensor has, `changed` how many differ, `first` the index of the first of these in C
    order. `max_abs`, `mean_abs`, `l2` (of Δ), `relative_l2` (l2 of Δ over l2 of before) and `cosine` are over the
    positions that are finite on both sides, `mean_abs` over all of them, changed or not; `left_out` counts the
    others. Null where undefined (no such position, a norm of zero) or beyond float64; then `reason` says why.
    `nan_*` and `inf_*` count elements of each side.
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
    first: tuple[int, ...] | None = None
    reason: str | None = None
