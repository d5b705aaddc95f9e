"""The JSON of each command, as types: what is encoded, and what `statecli schema` prints the JSON Schema of.

The rows of tensors are `Rows` where the type says tuple: each is encoded when it is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from statecli.commands.audit.result import Audit
from statecli.commands.diff.result import Broken, Change, Diff, Field, ScalarChange, Status
from statecli.commands.inspect.run import Inspection
from statecli.commands.lock.lock_file import Lock
from statecli.commands.verify.result import Check, Name, Verdict, Verification
from statecli.core.errors import UsageError
from statecli.core.finding import Finding, Severity
from statecli.core.scope import Configuration, NotChecked
from statecli.core.sizes import Totals
from statecli.core.state import After, Evidence, Kind, Oddity, Origin, Scalar, Stats, TensorInfo
from statecli.core.version import __version__
from statecli.report import Rows, RuleText
from statecli.targets.location import fingerprint
from statecli.targets.outcome import Skipped
from statecli.targets.outcome import Status as AuditStatus
from statecli.values.delta import CompareOptions, Delta


class TensorRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tensor in the JSON of `inspect`. The keys after `layout` are left out where they say nothing."""

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
    aliases: tuple[str, ...] = ()
    belongs_to: str | None = None
    note: str | None = None
    fix: str | None = None
    after: After | UnsetType = UNSET
    stats: Stats | UnsetType = UNSET
    appeared: bool = False


class InspectDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """`statecli inspect -f json`. Consumers ignore keys they do not know.

    `inputs` says what forward was called with, in words; where it was not called the key is left out.
    """

    schema: str
    statecli: str
    target: str
    format: str
    sections: tuple[str, ...]
    summary: dict[str, Totals]
    tensors: tuple[TensorRow, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...] = ()
    metadata: Mapping[str, Scalar] = {}
    to: str | UnsetType = UNSET
    inputs: str | UnsetType = UNSET
    verdict: str = ""


class Counts(msgspec.Struct, frozen=True):
    """How many tensors became what."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    renamed: int = 0
    identical: int = 0


class DiffSummary(Counts, frozen=True):
    """The same for all tensors and by kind. `not_compared` are pairs whose values could not be compared, `broken`
    those whose file failed; `metadata` counts the entries beside the tensors that differ.
    """

    not_compared: int = 0
    broken: int = 0
    metadata: int = 0
    by_kind: dict[str, Counts] = {}


class Side(msgspec.Struct, frozen=True, gc=False):
    """One tensor as one of the two states has it."""

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
    """One tensor that is not identical. `before` is null where it was added, `after` where it was removed."""

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


class Compared(msgspec.Struct, frozen=True):
    """What counted as equal: `values` false where none were read, else when two elements are equal (`How`)."""

    values: bool
    bitwise: bool
    atol: float
    rtol: float
    ignored: tuple[Field, ...]


class DiffDocument(msgspec.Struct, frozen=True):
    """`statecli diff -f json`. Consumers ignore keys they do not know."""

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


class CellRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tensor in one column of a proof. `before` and `after` are what was measured there, null where nothing was."""

    fqn: str
    column: str
    verdict: Verdict
    before: str | None
    after: str | None
    reason: str | None = None


class CheckRow(msgspec.Struct, frozen=True):
    """One proof. `passed` is null where it was skipped or cannot be told; `how` says what was done.

    `tensors` has an entry for each tensor and column that the proof has something to say of.
    """

    check: Name
    passed: bool | None
    verdict: Verdict
    how: str
    reason: str | None
    columns: tuple[str, ...]
    tensors: tuple[CellRow, ...]


class VerifySummary(msgspec.Struct, frozen=True):
    """How many proofs ended how; of how many tensors nothing (`passed`) or something (`failed`) was proved false.

    A tensor of which a column is inconclusive, and none failed, is in `inconclusive`; one without any verdict in
    `skipped`.
    """

    checks: dict[str, int]
    tensors: dict[str, int]


class VerifyDocument(msgspec.Struct, frozen=True):
    """`statecli verify -f json`. Consumers ignore keys they do not know. `tensors` are as in `inspect`."""

    schema: str
    statecli: str
    target: str
    summary: VerifySummary
    checks: tuple[CheckRow, ...]
    tensors: tuple[TensorRow, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...] = ()
    verdict: str = ""
    not_checked: tuple[NotChecked, ...] = ()


class AuditSummary(msgspec.Struct, frozen=True):
    """How many targets became what, and how many findings there are of each severity; accepted ones apart."""

    audited: int
    failed: int
    skipped: int
    error: int
    warning: int
    note: int
    accepted: int


class TargetRow(msgspec.Struct, frozen=True):
    """One target: what became of it and why, and how much of it there is."""

    target: str
    status: AuditStatus
    reason: str | None
    format: str | None
    tensors: int
    bytes: int


class AcceptedRow(msgspec.Struct, frozen=True):
    """A finding that is accepted, and the reason that was given."""

    rule: str
    target: str
    fqn: str | None
    fingerprint: str
    reason: str


class AuditDocument(msgspec.Struct, frozen=True):
    """`statecli audit -f json`. Consumers ignore keys they do not know.

    `passed` is what the exit code says: no finding is of `fail_on` or worse, and no target failed. `notes` are told on
    standard error too: what is of no one target, and accepted findings that are fixed. `verdict` is the line that ends
    the text output; `not_checked` lists what no rule has looked at.
    """

    schema: str
    statecli: str
    passed: bool
    fail_on: Severity
    summary: AuditSummary
    targets: tuple[TargetRow, ...]
    findings: tuple[Finding, ...]
    ran: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    accepted: tuple[AcceptedRow, ...] = ()
    notes: tuple[Finding, ...] = ()
    verdict: str = ""
    not_checked: tuple[NotChecked, ...] = ()
    configuration: Configuration = Configuration()


class RuleRow(msgspec.Struct, frozen=True):
    """One rule. `explanation` has the parts what, why, example and fix, a paragraph each."""

    name: str
    severity: Severity
    about: str
    summary: str
    explanation: str
    #: The commands that report it.
    commands: tuple[str, ...]


class RulesDocument(msgspec.Struct, frozen=True):
    """`statecli rules -f json`. Consumers ignore keys they do not know."""

    schema: str
    statecli: str
    rules: tuple[RuleRow, ...]


class SettingRow(msgspec.Struct, frozen=True):
    """One key of the configuration."""

    key: str
    value: bool | int | float | str | list[Any] | dict[str, Any] | None
    source: str


class ConfigDocument(msgspec.Struct, frozen=True):
    """`statecli config -f json`. `file` is null where no configuration was found."""

    schema: str
    statecli: str
    file: str | None
    settings: tuple[SettingRow, ...]


#: Command -> the type of its JSON document; `statecli schema COMMAND` prints it.
DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "inspect": InspectDocument,
    "diff": DiffDocument,
    "verify": VerifyDocument,
    "audit": AuditDocument,
    "rules": RulesDocument,
    "config": ConfigDocument,
    "lock": Lock,
}


def schema(command: str) -> bytes:
    """The JSON Schema (2020-12) of a command's document, generated from its type."""
    if command not in DOCUMENTS:
        raise UsageError(f"no command {command!r} has a schema; those that have: {', '.join(DOCUMENTS)}")
    described = msgspec.json.schema(DOCUMENTS[command])
    described = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
    return msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n"


def of_config(settings: Sequence[tuple[str, object, str]], path: str | None) -> ConfigDocument:
    """The document of the configuration: each key, its value, and where that comes from."""
    rows = tuple(SettingRow(key, msgspec.to_builtins(value), source) for key, value, source in settings)
    return ConfigDocument("statecli.config/1", __version__, path, rows)


def of_rules(texts: Sequence[RuleText]) -> RulesDocument:
    """The document of these rules."""
    rows = (RuleRow(one.name, one.severity, one.about, one.summary, one.explanation, one.commands) for one in texts)
    return RulesDocument("statecli.rules/1", __version__, tuple(rows))


def of_inspection(found: Inspection, summary: dict[str, Totals], verdict: str) -> InspectDocument:
    """The document of one inspection."""
    state = found.state
    return InspectDocument(
        "statecli.inspect/1",
        __version__,
        state.target,
        state.format,
        state.sections,
        summary,
        cast("tuple[TensorRow, ...]", Rows(_row, state.tensors)),
        found.findings,
        state.oddities,
        state.metadata.values,
        found.to if found.to is not None else UNSET,
        found.inputs if found.inputs is not None else UNSET,
        verdict,
    )


def _row(t: TensorInfo) -> TensorRow:
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
    )


def of_diff(diff: Diff, verdict: str, not_checked: tuple[NotChecked, ...] = ()) -> DiffDocument:
    """The document of one diff; pairs that are identical are only counted."""
    return DiffDocument(
        "statecli.diff/1",
        __version__,
        diff.before.target,
        diff.after.target,
        counted(diff),
        cast("tuple[DiffRow, ...]", Rows(_change, [c for c in diff.changes if c.status is not Status.IDENTICAL])),
        diff.findings,
        diff.scalars,
        diff.notes,
        diff.broken,
        _compared(diff),
        verdict,
        not_checked,
    )


def _compared(diff: Diff) -> Compared:
    how = diff.how or CompareOptions()
    return Compared(diff.how is not None, how.bitwise, how.atol, how.rtol, diff.ignored)


def counted(diff: Diff) -> DiffSummary:
    """How many became what, of all and of each kind that there is."""
    kinds: dict[str, Counter[str]] = {kind.value: Counter() for kind in Kind}
    for (kind, status), count in Counter((change.kind, change.status) for change in diff.changes).items():
        kinds[kind.value][status.value] = count
    of_all = sum(kinds.values(), Counter())
    return DiffSummary(
        **of_all,
        not_compared=sum(change.not_compared is not None for change in diff.changes),
        broken=len(diff.broken),
        metadata=len(diff.scalars),
        by_kind={kind: Counts(**counts) for kind, counts in kinds.items() if counts},
    )


def _change(change: Change) -> DiffRow:
    return DiffRow(
        change.fqn,
        change.section,
        change.status,
        change.kind,
        change.fields,
        change.renamed_from,
        _side(change.before),
        _side(change.after),
        change.values,
        change.not_compared,
    )


def _side(t: TensorInfo | None) -> Side | None:
    if t is None:
        return None
    tied = t.tied_to + t.aliases
    return Side(t.dtype, t.shape, t.kind, t.requires_grad, t.device, tied, t.elements, t.nbytes, t.section)


def of_verification(found: Verification, verdict: str, not_checked: tuple[NotChecked, ...] = ()) -> VerifyDocument:
    """The document of one run of the proofs."""
    return VerifyDocument(
        "statecli.verify/1",
        __version__,
        found.state.target,
        proved(found),
        tuple(map(_check, found.checks)),
        tuple(map(_row, found.state.tensors)),
        found.findings,
        found.notes,
        verdict,
        not_checked,
    )


def proved(found: Verification) -> VerifySummary:
    """How many proofs and how many tensors there are of each verdict."""
    worst = worst_of(found)
    return VerifySummary(
        _counted(check.verdict for check in found.checks),
        _counted(worst[tensor.fqn] for tensor in found.state.tensors),
    )


#: Worst first: what is said of a tensor, or of several, as a whole.
_WORST = (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED, Verdict.SKIPPED)


def worst_of(found: Verification) -> dict[str, Verdict]:
    """The worst that any column or finding says of each tensor; SKIPPED where none says anything."""
    said: dict[str, set[Verdict]] = {tensor.fqn: {Verdict.SKIPPED} for tensor in found.state.tensors}
    for check in found.checks:
        for column in check.columns:
            for fqn, cell in column.cells.items():
                said.setdefault(fqn, set()).add(cell.verdict)
    for finding in found.findings:
        if finding.fqn is not None:
            said.setdefault(finding.fqn, set()).add(Verdict.FAILED)
    return {fqn: next(one for one in _WORST if one in verdicts) for fqn, verdicts in said.items()}


def _counted(verdicts: Iterable[Verdict]) -> dict[str, int]:
    counts = Counter(verdicts)
    return {verdict.value: counts[verdict] for verdict in Verdict}


def _check(check: Check) -> CheckRow:
    return CheckRow(
        check.check,
        {Verdict.PASSED: True, Verdict.FAILED: False}.get(check.verdict),
        check.verdict,
        check.how,
        check.reason,
        tuple(column.name for column in check.columns),
        tuple(
            CellRow(fqn, column.name, cell.verdict, cell.before, cell.after, cell.reason)
            for column in check.columns
            for fqn, cell in column.cells.items()
        ),
    )


def of_audit(found: Audit, verdict: str, notes: Sequence[Finding] = ()) -> AuditDocument:
    """The document of one audit, with notes that are none of its findings."""
    counts = Counter(finding.severity for finding in found.findings)
    statuses = Counter(target.status for target in found.targets)
    accepted = tuple(
        AcceptedRow(one.finding.rule, target.target, one.finding.fqn, fingerprint(one.finding), one.reason)
        for target in found.targets
        for one in target.accepted
    )
    summary = AuditSummary(
        **{status.value: statuses[status] for status in AuditStatus},
        **{severity.value: counts[severity] for severity in Severity},
        accepted=len(accepted),
    )
    targets = tuple(
        TargetRow(one.target, one.status, one.own_reason, one.format, one.tensors, one.bytes) for one in found.targets
    )
    passed = not found.failing and not statuses[AuditStatus.FAILED] and bool(found.ran) and not found.unheld
    return AuditDocument(
        "statecli.audit/1",
        __version__,
        passed,
        found.fail_on,
        summary,
        targets,
        found.findings,
        found.ran,
        found.skipped,
        accepted,
        tuple(notes),
        verdict,
        found.not_checked,
        found.configuration,
    )
