"""JSON document of `bisect`."""

from __future__ import annotations

import msgspec
from msgspec.structs import asdict

from statecli.commands.bisect.result import BisectAnswer, Bisection, Probe
from statecli.core.finding import Finding
from statecli.core.model_state import Oddity
from statecli.core.version import __version__


class BisectDocument(msgspec.Struct, frozen=True):
    """`statecli bisect -f json`.

    `first` is the first checkpoint where the condition holds, `last_before` the checkpoint before `first`; `between`
    are unreadable checkpoints between the two. `probes` are in the order of reading.
    """

    schema: str
    statecli: str
    target: str
    condition: str
    answer: BisectAnswer
    checkpoints: int
    first: Probe | None
    last_before: Probe | None
    between: tuple[str, ...]
    probes: tuple[Probe, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...]


def build_bisect_document(bisection: Bisection) -> BisectDocument:
    """Return the document of a search: all fields of the result."""
    return BisectDocument("statecli.bisect/1", __version__, **asdict(bisection))
