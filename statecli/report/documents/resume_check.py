"""JSON document of `resume-check`."""

from __future__ import annotations

import msgspec
from msgspec.structs import asdict

from statecli.commands.resume_check.result import ResumeAnswer, ResumeCheck, StateRow
from statecli.core.finding import Finding
from statecli.core.model_state import Oddity
from statecli.core.version import __version__


class ResumeCheckDocument(msgspec.Struct, frozen=True):
    """`statecli resume-check -f json`.

    `steps` are the optimizer steps of the uninterrupted training, `saved_at` is the step of the checkpoint at the start
    of the resumed training. `states` are the states at the first step after the resume. `reason`: why the answer is
    inconclusive.
    """

    schema: str
    statecli: str
    target: str
    steps: int
    saved_at: int
    answer: ResumeAnswer
    states: tuple[StateRow, ...]
    reason: str | None
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...]


def build_resume_check_document(result: ResumeCheck) -> ResumeCheckDocument:
    """Return the document of a comparison: all fields of the result."""
    return ResumeCheckDocument("statecli.resume-check/1", __version__, **asdict(result))
