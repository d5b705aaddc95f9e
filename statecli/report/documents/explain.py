"""JSON document of `explain`."""

from __future__ import annotations

import msgspec

from statecli.commands.explain.result import Diagnosis, Explanation
from statecli.core.model_state import Oddity
from statecli.core.version import __version__


class ExplainDocument(msgspec.Struct, frozen=True):
    """`statecli explain -f json`. `model` and `checkpoint` are null if an error text was explained.

    `diagnosis` is null if the class loads the checkpoint; `alternatives` has other lines that load the checkpoint.
    """

    schema: str
    statecli: str
    model: str | None
    checkpoint: str | None
    loads: bool
    diagnosis: Diagnosis | None
    alternatives: tuple[Diagnosis, ...]
    notes: tuple[Oddity, ...]
    verdict: str


def build_explain_document(explanation: Explanation, verdict: str) -> ExplainDocument:
    """Return the document of an explanation."""
    return ExplainDocument(
        "statecli.explain/1",
        __version__,
        explanation.model,
        explanation.checkpoint,
        explanation.loads,
        explanation.diagnosis,
        explanation.alternatives,
        (),
        verdict,
    )
