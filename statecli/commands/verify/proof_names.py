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
    MATERIALIZE = "materialize"


#: Proofs that run unless proofs are requested by name. Few programs build a model on meta.
DEFAULT_PROOFS = tuple(name for name in Name if name is not Name.MATERIALIZE)
