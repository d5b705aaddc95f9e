"""Rows that the documents of several commands have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from statecli.core.finding import Finding, Severity, WordedFinding
from statecli.core.model_state import After, Evidence, Kind, Origin, Stats, TensorInfo, TensorKey
from statecli.core.value_distribution import Distribution
from statecli.core.value_spectrum import Spectrum
from statecli.report import Problem
from statecli.targets.location import compute_fingerprint

if TYPE_CHECKING:
    from statecli.targets.target_result import Accepted


class TensorRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tensor in the JSON of `inspect`. The keys after `layout` are left out if they have no value."""

    fqn: str
    section: str
    kind: Kind
    evidence: Evidence
    persistent: bool | None
    dtype: str
    shape: tuple[int, ...] | None
    elements: int
    bytes: int
    device: str | None
    requires_grad: bool | None
    tied_to: tuple[str, ...]
    saved: bool | None
    moves: bool | None
    origin: Origin | None
    layout: str
    #: The names in `tied_to` without a row of their own (`lstm._flat_weights[0]`).
    aliases: tuple[str, ...] = ()
    belongs_to: str | None = None
    note: str | None = None
    fix: str | None = None
    after: After | UnsetType = UNSET
    stats: Stats | UnsetType = UNSET
    appeared: bool = False
    #: The quantized weight that the tensor is a part of, as in `quantized`.
    part_of: str | None = None
    distribution: Distribution | UnsetType = UNSET
    spectrum: Spectrum | UnsetType = UNSET


class ProblemRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Findings that a single change would fix.

    `tensors` are the names of tensors, `effects` the consequences, `help` lines to paste or the remedy, `source` the
    text of the line `origin`. `findings` counts the problem's entries in the list `findings`.
    """

    rule: str
    severity: Severity
    message: str
    target: str
    findings: int
    tensors: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    help: str | None = None
    origin: Origin | UnsetType = UNSET
    source: str = ""


class AcceptedRow(msgspec.Struct, frozen=True):
    """An accepted finding, with the reason."""

    rule: str
    target: str
    fqn: str | None
    fingerprint: str
    reason: str


class Counts(msgspec.Struct, frozen=True):
    """Numbers of tensors by result."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    renamed: int = 0
    identical: int = 0


def build_problem_row(problem: Problem) -> ProblemRow:
    """Return the row of a problem, with its findings."""
    return ProblemRow(
        problem.rule,
        problem.severity,
        problem.message,
        problem.target,
        len(problem.findings),
        tuple(problem.list_names()),
        problem.effects,
        problem.help,
        problem.origin,
        problem.source,
    )


def strip_wordings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings without `wording` (the parts of a message), because documents contain whole messages."""
    return tuple(finding.strip_wording() if isinstance(finding, WordedFinding) else finding for finding in findings)


def build_accepted_rows(accepted: Iterable[Accepted]) -> tuple[AcceptedRow, ...]:
    """Return the rows of accepted findings."""
    return tuple(
        AcceptedRow(
            entry.finding.rule,
            entry.finding.target,
            entry.finding.fqn,
            compute_fingerprint(entry.finding),
            entry.reason,
        )
        for entry in accepted
    )


def build_tensor_row(
    t: TensorInfo,
    owners: Mapping[TensorKey, str] | None = None,
    distributions: Mapping[TensorKey, Distribution] | None = None,
    spectra: Mapping[TensorKey, Spectrum] | None = None,
) -> TensorRow:
    """Return the row of a tensor.

    `owners` has the quantized weight of each part, `distributions` the distribution of a tensor's values, and `spectra`
    their singular values, each by section and name.
    """
    return TensorRow(
        t.fqn,
        t.section,
        t.kind,
        t.evidence,
        t.persistent,
        t.dtype,
        t.shape,
        t.elements,
        t.nbytes,
        t.device,
        t.requires_grad,
        t.tied_to + t.aliases,
        t.saved,
        t.moves,
        t.origin,
        t.layout,
        t.aliases,
        t.belongs_to,
        t.note,
        t.fix,
        t.after if t.after is not None else UNSET,
        t.stats if t.stats is not None else UNSET,
        t.appeared,
        owners.get(t.key) if owners else None,
        distributions.get(t.key, UNSET) if distributions else UNSET,
        spectra.get(t.key, UNSET) if spectra else UNSET,
    )
