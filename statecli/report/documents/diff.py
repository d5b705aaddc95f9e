"""JSON document of `diff`."""

from __future__ import annotations

from collections import Counter
from typing import cast

import msgspec

from statecli.commands.diff.result import Broken, Change, Diff, Field, ScalarChange, Status, Transformation
from statecli.commands.explain.result import Diagnosis
from statecli.core.finding import Finding
from statecli.core.model_state import Kind, Oddity, TensorInfo
from statecli.core.run_scope import NotChecked
from statecli.core.version import __version__
from statecli.report import Rows
from statecli.report.change_totals import ChangeTotals, sum_changes
from statecli.report.documents.shared import Counts, strip_wordings
from statecli.report.layer_changes import ModuleChange, list_module_changes
from statecli.values.delta import CompareOptions, Delta


class DiffSummary(Counts, frozen=True):
    """Numbers of tensors by result, in total and by kind.

    `not_compared` counts pairs whose values could not be compared, `broken` pairs whose file could not be read, and
    `metadata` the differing settings next to the tensors. `values` are totals of the values that changed.
    `modules` has the change of each layer, and of each module outside of the layers, whose parameters changed.
    """

    not_compared: int = 0
    broken: int = 0
    metadata: int = 0
    by_kind: dict[str, Counts] = {}  # noqa: RUF012  # msgspec copies it
    values: ChangeTotals = ChangeTotals()
    modules: tuple[ModuleChange, ...] = ()


class Side(msgspec.Struct, frozen=True, gc=False):
    """A tensor in one of the two checkpoints."""

    dtype: str
    shape: tuple[int, ...] | None
    kind: Kind
    requires_grad: bool | None
    device: str | None
    tied_to: tuple[str, ...]
    elements: int
    bytes: int
    section: str


class DiffRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tensor that differs or, with `--unchanged`, any tensor. `before` is null if added, `after` if removed."""

    fqn: str
    section: str
    status: Status
    kind: Kind
    fields: tuple[Field, ...]
    renamed_from: str | None
    before: Side | None
    after: Side | None
    values: Delta | None
    not_compared: str | None = None
    transformation: Transformation | None = None


class Compared(msgspec.Struct, frozen=True):
    """How values were compared. `values` is false if none were read."""

    values: bool
    bitwise: bool
    atol: float
    rtol: float
    ignored: tuple[Field, ...]


class DiffDocument(msgspec.Struct, frozen=True):
    """`statecli diff -f json`. Consumers ignore keys they do not know.

    `diagnosis` says why a class does not load a checkpoint, as in `statecli explain`.
    """

    schema: str
    statecli: str
    before: str
    after: str
    summary: DiffSummary
    changes: tuple[DiffRow, ...]
    findings: tuple[Finding, ...]
    metadata: tuple[ScalarChange, ...] = ()
    notes: tuple[Oddity, ...] = ()
    broken: tuple[Broken, ...] = ()
    compared: Compared | None = None
    verdict: str = ""
    not_checked: tuple[NotChecked, ...] = ()
    diagnosis: Diagnosis | None = None


def build_diff_document(
    diff: Diff, verdict: str, not_checked: tuple[NotChecked, ...] = (), *, unchanged: bool = False
) -> DiffDocument:
    """Return the document of a diff. Identical tensors are only counted, unless `unchanged` lists them too."""
    return DiffDocument(
        "statecli.diff/1",
        __version__,
        diff.before.target,
        diff.after.target,
        count_changes(diff),
        cast(
            "tuple[DiffRow, ...]",
            Rows(_build_diff_row, [c for c in diff.changes if unchanged or c.status is not Status.IDENTICAL]),
        ),
        strip_wordings(diff.findings),
        diff.scalars,
        diff.notes,
        diff.broken,
        _build_compared(diff),
        verdict,
        not_checked,
        diff.loading.diagnosis if diff.loading else None,
    )


def _build_compared(diff: Diff) -> Compared:
    compare_options = diff.how or CompareOptions()
    return Compared(
        diff.how is not None, compare_options.bitwise, compare_options.atol, compare_options.rtol, diff.ignored
    )


def count_changes(diff: Diff) -> DiffSummary:
    """Return the number of tensors by status, in total and for each kind."""
    kinds: dict[str, Counter[str]] = {kind.value: Counter() for kind in Kind}
    for (kind, status), count in Counter((change.kind, change.status) for change in diff.changes).items():
        kinds[kind.value][status.value] = count
    totals = sum(kinds.values(), Counter())
    return DiffSummary(
        **totals,
        not_compared=sum(change.not_compared is not None for change in diff.changes),
        broken=len(diff.broken),
        metadata=len(diff.scalars),
        by_kind={kind: Counts(**counts) for kind, counts in kinds.items() if counts},
        values=sum_changes(diff),
        modules=list_module_changes(diff.changes),
    )


def _build_diff_row(change: Change) -> DiffRow:
    return DiffRow(
        change.fqn,
        change.section,
        change.status,
        change.kind,
        change.fields,
        change.renamed_from,
        _build_side(change.before),
        _build_side(change.after),
        change.values,
        change.not_compared,
        change.transformation,
    )


def _build_side(t: TensorInfo | None) -> Side | None:
    if t is None:
        return None
    tied_names = t.tied_to + t.aliases
    return Side(t.dtype, t.shape, t.kind, t.requires_grad, t.device, tied_names, t.elements, t.nbytes, t.section)
