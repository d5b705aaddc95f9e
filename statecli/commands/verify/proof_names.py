"""Names of the proofs."""

from __future__ import annotations

from enum import Enum


class Name(str, Enum):
    """Names of the proofs, in running order."""

    MOVE = "move"
    CAST = "cast"
    SAVE = "save"
    COPY = "copy"
    STEP = "step"
    FORWARD = "forward"
