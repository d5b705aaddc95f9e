"""Names of the checks that `verify` runs; the code calls them proofs."""

from __future__ import annotations

from enum import Enum


class Name(str, Enum):
    """Names of the checks of `verify`, in the order in which the checks run."""

    MOVE = "move"
    CAST = "cast"
    SAVE = "save"
    COPY = "copy"
    STEP = "step"
    FORWARD = "forward"
    MATERIALIZE = "materialize"
    EXPORT = "export"
    COMPILE = "compile"
    SHARD = "shard"
    RESUME = "resume"


#: Name of the option field whose value a proof uses.
OPTION_OF_PROOF = {
    Name.MOVE: "device",
    Name.CAST: "dtype",
    Name.STEP: "optimizer",
    Name.FORWARD: "device",
    Name.RESUME: "optimizer",
}
#: Proofs that run only on request, because few programs build a model on meta, capture its graph, run on several GPUs,
#: or are interrupted.
PROOFS_ON_REQUEST = (Name.MATERIALIZE, Name.EXPORT, Name.COMPILE, Name.SHARD, Name.RESUME)
#: Proofs that run if no proof is requested by name.
DEFAULT_PROOFS = tuple(name for name in Name if name not in PROOFS_ON_REQUEST)
