"""JSON document of `fix`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from statecli.commands.fix.result import Edit, Fixes
from statecli.core.finding import Finding
from statecli.core.version import __version__


class FixDocument(msgspec.Struct, frozen=True):
    """`statecli fix -f json`.

    `edits` has a record for each defect: a fix that passes the checks, or the reason why there is no such fix. `patch`
    is the unified diff of all fixes; `written`: whether `files` contain the fixes. `skipped` are the checks that did
    not run, and `inconclusive` has a line for the checks without a result.
    """

    schema: str
    statecli: str
    target: str
    written: bool
    files: tuple[str, ...]
    edits: tuple[Edit, ...]
    patch: str
    skipped: tuple[str, ...]
    inconclusive: tuple[str, ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    verdict: str


def build_fix_document(
    fixes: Fixes, patch: Sequence[str], findings: tuple[Finding, ...], verdict: str, target: str
) -> FixDocument:
    """Return the document of the edits of a model's source."""
    return FixDocument(
        "statecli.fix/1",
        __version__,
        target,
        fixes.written,
        tuple(file.name for file in fixes.files),
        fixes.edits,
        "".join(f"{line}\n" for line in patch),
        fixes.not_checked,
        fixes.inconclusive,
        fixes.notes,
        findings,
        verdict,
    )
