"""Properties of a tensor that `diff` compares."""

from __future__ import annotations

from enum import Enum


class Field(str, Enum):
    """Property of a tensor that can differ, as named by `diff --ignore`."""

    DTYPE = "dtype"
    SHAPE = "shape"
    KIND = "kind"
    REQUIRES_GRAD = "requires_grad"
    DEVICE = "device"
    LAYOUT = "layout"
    TYING = "tying"
    VALUES = "values"
