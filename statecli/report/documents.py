"""JSON of each command, as types for encoding; `statecli schema` prints their JSON Schema.

Rows of tensors are `Rows` in fields of type tuple, because each row is encoded only on writing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from statecli.commands.audit.result import Audit
from statecli.commands.bisect.result import Answer, Bisection, Probe
from statecli.commands.diff.result import Broken, Change, Diff, Field, ScalarChange, Status, Transformation
from statecli.commands.explain.result import Diagnosis, Explanation
from statecli.commands.inspect.quantized import fold_tensors, select_weights
from statecli.commands.inspect.run import Inspection
from statecli.commands.lock.lock_file import Lock
from statecli.commands.log.result import CheckpointRow, Log, ModuleRow
from statecli.commands.verify.result import WORST_FIRST, Check, Name, Verdict, Verification
from statecli.core.errors import UsageError
from statecli.core.finding import Finding, Severity
from statecli.core.logical_weights import LogicalWeight
from statecli.core.model_state import After, Evidence, Kind, Oddity, Origin, Scalar, Stats, TensorInfo
from statecli.core.quantized_weights import Layout
from statecli.core.run_scope import Configuration, NotChecked
from statecli.core.sizes import Totals, sum_by_kind
from statecli.core.version import __version__
from statecli.report import Problem, Rows, RuleText
from statecli.report.change_totals import ChangeTotals, sum_changes
from statecli.targets.location import compute_fingerprint
from statecli.targets.target_result import Accepted, Skipped
from statecli.targets.target_result import Status as AuditStatus
from statecli.values.delta import CompareOptions, Delta


class TensorRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tensor in the JSON of `inspect`. The keys after `layout` are left out without a value."""

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


class QuantizedRow(msgspec.Struct, frozen=True):
    """One quantized weight. `tensors` are its tensors, the codes first; `bytes` is the size of all of them.

    `dtype` and `bits` describe a code. `shape` is null if the checkpoint does not store it; `elements` is then an upper
    limit, or null. `defect` says what is wrong with the tensors.
    """

    fqn: str
    section: str
    layout: Layout
    dtype: str
    bits: int | None
    shape: tuple[int, ...] | None
    elements: int | None
    bytes: int
    tensors: tuple[str, ...]
    defect: str | None


class WeightTotals(msgspec.Struct, frozen=True):
    """Sums over a checkpoint with quantized weights, each counted as one weight.

    `parameters` is the number of elements of all parameters; `quantized` the number of quantized weights, `tensors`
    that of their tensors. `unknown_shapes` weights do not store their shape: `parameters` is then an upper limit, less
    `unknown_elements` weights that are not counted.
    """

    parameters: int
    quantized: int
    tensors: int
    unknown_shapes: int
    unknown_elements: int


class ProblemRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Findings that one change would mend.

    `tensors` are their names, `effects` the consequences, `help` lines to paste or the remedy, `source` the text of the
    line `origin`. `findings` counts the problem's entries in the list `findings`.
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


class InspectDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """`statecli inspect -f json`. Consumers ignore keys they do not know.

    `inputs` describes the arguments of forward; the key is left out if forward was not called.
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
    problems: tuple[ProblemRow, ...] = ()
    accepted: tuple[AcceptedRow, ...] = ()
    quantized: tuple[QuantizedRow, ...] = ()
    weights: WeightTotals | UnsetType = UNSET


class Counts(msgspec.Struct, frozen=True):
    """Numbers of tensors by result."""

    added: int = 0
    removed: int = 0
    changed: int = 0
    renamed: int = 0
    identical: int = 0


class DiffSummary(Counts, frozen=True):
    """Numbers of tensors by result, in all and by kind.

    `not_compared` counts pairs whose values could not be compared, `broken` pairs whose file could not be read, and
    `metadata` the differing settings next to the tensors. `values` are totals of the values that changed.
    """

    not_compared: int = 0
    broken: int = 0
    metadata: int = 0
    by_kind: dict[str, Counts] = {}
    values: ChangeTotals = ChangeTotals()


class Side(msgspec.Struct, frozen=True, gc=False):
    """Tensor of either state."""

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
    """Different tensor, with `--unchanged` any. `before` is null for an added tensor, `after` for a removed tensor."""

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
    """How values were compared; `values` is false if none were read."""

    values: bool
    bitwise: bool
    atol: float
    rtol: float
    ignored: tuple[Field, ...]


class DiffDocument(msgspec.Struct, frozen=True):
    """`statecli diff -f json`. Consumers ignore keys they do not know.

    `diagnosis` is why a class does not load a checkpoint, as in `statecli explain`.
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


class CellRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tensor in one column of a proof. `before` and `after` are the measured values, or null."""

    fqn: str
    column: str
    verdict: Verdict
    before: str | None
    after: str | None
    reason: str | None = None


class CheckRow(msgspec.Struct, frozen=True):
    """One proof. `passed` is null if the proof was skipped or is inconclusive; `how` describes the operation.

    `tensors` has an entry for each tensor and column with a verdict.
    """

    check: Name
    passed: bool | None
    verdict: Verdict
    how: str
    reason: str | None
    columns: tuple[str, ...]
    tensors: tuple[CellRow, ...]


class VerifySummary(msgspec.Struct, frozen=True):
    """Numbers of proofs and of tensors by verdict.

    A tensor is `failed` if any proof failed for it, else `inconclusive` if any proof was, else `passed`. A tensor
    without a verdict is `skipped`.
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
    problems: tuple[ProblemRow, ...] = ()
    accepted: tuple[AcceptedRow, ...] = ()


class AuditSummary(msgspec.Struct, frozen=True):
    """Numbers of targets by status, and of findings by severity; accepted findings are counted separately."""

    audited: int
    failed: int
    skipped: int
    error: int
    warning: int
    note: int
    accepted: int


class TargetRow(msgspec.Struct, frozen=True):
    """One target: its status with the reason, and the size of its tensors."""

    target: str
    status: AuditStatus
    reason: str | None
    format: str | None
    tensors: int
    bytes: int


class AuditDocument(msgspec.Struct, frozen=True):
    """`statecli audit -f json`. Consumers ignore keys they do not know.

    `passed` is true for exit status 0: no finding has the severity of `fail_on` or higher, and no target failed.
    `notes` are printed on standard error too: notes about the whole run, and fixed accepted findings. `verdict` is the
    last line of the text output; `not_checked` lists files and tensors that no rule checked.
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
    problems: tuple[ProblemRow, ...] = ()


class RuleRow(msgspec.Struct, frozen=True):
    """One rule. `explanation` has four paragraphs: summary, why, example and fix."""

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


class ExplainDocument(msgspec.Struct, frozen=True):
    """`statecli explain -f json`. `model` and `checkpoint` are null for an error text.

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


class ConfigDocument(msgspec.Struct, frozen=True):
    """`statecli config -f json`. `file` is null if no configuration was found."""

    schema: str
    statecli: str
    file: str | None
    settings: tuple[SettingRow, ...]


class LogDocument(msgspec.Struct, frozen=True):
    """`statecli log -f json`.

    `checkpoints` are in the order of their steps; the lists `norms` and `relative_changes` of a module have an entry
    for each. `last_moved` is an index of that list too. `changing_settings` changed in every checkpoint.
    """

    schema: str
    statecli: str
    target: str
    checkpoints: tuple[CheckpointRow, ...]
    modules: tuple[ModuleRow, ...]
    changing_settings: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...]


class BisectDocument(msgspec.Struct, frozen=True):
    """`statecli bisect -f json`.

    `first` is the first checkpoint where the condition holds, `last_before` the one before it; `between` are the
    checkpoints between the two that could not be read. `probes` are in the order of reading.
    """

    schema: str
    statecli: str
    target: str
    condition: str
    answer: Answer
    checkpoints: int
    first: Probe | None
    last_before: Probe | None
    between: tuple[str, ...]
    probes: tuple[Probe, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Oddity, ...]


#: Command -> the type of its JSON document; `statecli schema COMMAND` prints it.
DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "inspect": InspectDocument,
    "diff": DiffDocument,
    "verify": VerifyDocument,
    "audit": AuditDocument,
    "explain": ExplainDocument,
    "rules": RulesDocument,
    "config": ConfigDocument,
    "lock": Lock,
    "log": LogDocument,
    "bisect": BisectDocument,
}


def encode_schema(command: str) -> bytes:
    """Return the JSON Schema (2020-12) of a command's document, generated from its type."""
    if command not in DOCUMENTS:
        raise UsageError(f"the command {command!r} has no schema; commands with a schema: {', '.join(DOCUMENTS)}")
    schema = msgspec.json.schema(DOCUMENTS[command])
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"


def build_log_document(log: Log) -> LogDocument:
    """Return the document of a log."""
    return LogDocument(
        "statecli.log/1",
        __version__,
        log.target,
        log.rows,
        log.modules,
        log.changing,
        log.findings,
        log.notes,
    )


def build_bisect_document(bisection: Bisection) -> BisectDocument:
    """Return the document of a search."""
    return BisectDocument(
        "statecli.bisect/1",
        __version__,
        bisection.target,
        bisection.condition,
        bisection.answer,
        bisection.checkpoints,
        bisection.first,
        bisection.last_before,
        bisection.between,
        bisection.probes,
        bisection.findings,
        bisection.notes,
    )


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
        explanation.notes,
        verdict,
    )


def build_config_document(settings: Sequence[tuple[str, object, str]], path: str | None) -> ConfigDocument:
    """Return the document of the configuration: each key, its value, and its source."""
    rows = tuple(SettingRow(key, msgspec.to_builtins(value), source) for key, value, source in settings)
    return ConfigDocument("statecli.config/1", __version__, path, rows)


def build_rules_document(texts: Sequence[RuleText]) -> RulesDocument:
    """Return the document of these rules."""
    rows = (
        RuleRow(rule.name, rule.severity, rule.about, rule.summary, rule.explanation, rule.commands) for rule in texts
    )
    return RulesDocument("statecli.rules/1", __version__, tuple(rows))


def _build_problem_row(problem: Problem) -> ProblemRow:
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


def _build_accepted_rows(accepted: Iterable[Accepted]) -> tuple[AcceptedRow, ...]:
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


def build_inspect_document(
    inspection: Inspection,
    problems: Iterable[Problem],
    summary: dict[str, Totals],
    verdict: str,
    accepted: Iterable[Accepted] = (),
) -> InspectDocument:
    """Return the document of an inspection."""
    state = inspection.state
    weights = select_weights(state.tensors, inspection.weights)
    owners = {(part.section, part.fqn): weight.fqn for weight in weights for part in weight.parts[1:]}
    owners |= {(w.codes.section, w.codes.fqn): w.fqn for w in weights if len(w.parts) > 1}
    build_row = partial(_build_tensor_row, owners=owners) if owners else _build_tensor_row
    return InspectDocument(
        "statecli.inspect/1",
        __version__,
        state.target,
        state.format,
        state.sections,
        summary,
        cast("tuple[TensorRow, ...]", Rows(build_row, state.tensors)),
        inspection.findings,
        state.oddities,
        state.metadata.values,
        inspection.to if inspection.to is not None else UNSET,
        inspection.inputs if inspection.inputs is not None else UNSET,
        verdict,
        tuple(map(_build_problem_row, problems)),
        _build_accepted_rows(accepted),
        cast("tuple[QuantizedRow, ...]", Rows(_build_quantized_row, weights)) if weights else (),
        _sum_weights(state.tensors, weights) if weights else UNSET,
    )


def _build_quantized_row(weight: LogicalWeight) -> QuantizedRow:
    return QuantizedRow(
        fqn=weight.fqn,
        section=weight.codes.section,
        layout=weight.layout,
        dtype=weight.dtype,
        bits=weight.bits,
        shape=weight.shape,
        elements=weight.elements,
        bytes=weight.nbytes,
        tensors=tuple(part.fqn for part in weight.parts),
        defect=weight.defect or None,
    )


def _sum_weights(tensors: Iterable[TensorInfo], weights: Sequence[LogicalWeight]) -> WeightTotals:
    return WeightTotals(
        parameters=sum_by_kind(fold_tensors(tensors, weights))[Kind.PARAMETER.value].elements,
        quantized=len(weights),
        tensors=sum(len(weight.parts) for weight in weights),
        unknown_shapes=sum(weight.shape is None for weight in weights),
        unknown_elements=sum(weight.elements is None for weight in weights),
    )


def _build_tensor_row(t: TensorInfo, owners: Mapping[tuple[str, str], str] | None = None) -> TensorRow:
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
        owners.get((t.section, t.fqn)) if owners else None,
    )


def build_diff_document(
    diff: Diff, verdict: str, not_checked: tuple[NotChecked, ...] = (), *, unchanged: bool = False
) -> DiffDocument:
    """Return the document of a diff; identical pairs are only counted, unless `unchanged` lists them too."""
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
        diff.findings,
        diff.scalars,
        diff.notes,
        diff.broken,
        _build_compared(diff),
        verdict,
        not_checked,
        diff.loading.diagnosis if diff.loading else None,
    )


def _build_compared(diff: Diff) -> Compared:
    how = diff.how or CompareOptions()
    return Compared(diff.how is not None, how.bitwise, how.atol, how.rtol, diff.ignored)


def count_changes(diff: Diff) -> DiffSummary:
    """Return the number of tensors by status, in all and for each kind."""
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
    tied = t.tied_to + t.aliases
    return Side(t.dtype, t.shape, t.kind, t.requires_grad, t.device, tied, t.elements, t.nbytes, t.section)


def build_verify_document(
    verification: Verification,
    problems: Iterable[Problem],
    verdict: str,
    not_checked: tuple[NotChecked, ...] = (),
    accepted: Iterable[Accepted] = (),
) -> VerifyDocument:
    """Return the document of a run of the proofs."""
    return VerifyDocument(
        "statecli.verify/1",
        __version__,
        verification.state.target,
        count_verdicts(verification),
        tuple(map(_build_check_row, verification.checks)),
        tuple(map(_build_tensor_row, verification.state.tensors)),
        verification.findings,
        verification.notes,
        verdict,
        not_checked,
        tuple(map(_build_problem_row, problems)),
        _build_accepted_rows(accepted),
    )


def count_verdicts(verification: Verification) -> VerifySummary:
    """Return the number of proofs and of tensors for each verdict."""
    worst = find_worst_verdicts(verification)
    return VerifySummary(
        _count_by_verdict(check.verdict for check in verification.checks),
        _count_by_verdict(worst[tensor.fqn] for tensor in verification.state.tensors),
    )


def find_worst_verdicts(verification: Verification) -> dict[str, Verdict]:
    """Return the worst verdict of each tensor in any column or finding; SKIPPED without a verdict."""
    verdicts_by_fqn: dict[str, set[Verdict]] = {tensor.fqn: {Verdict.SKIPPED} for tensor in verification.state.tensors}
    for check in verification.checks:
        for column in check.columns:
            for fqn, cell in column.cells.items():
                verdicts_by_fqn.setdefault(fqn, set()).add(cell.verdict)
    for finding in verification.findings:
        if finding.fqn is not None and finding.severity is not Severity.NOTE:
            verdicts_by_fqn.setdefault(finding.fqn, set()).add(Verdict.FAILED)
    return {fqn: min(verdicts, key=WORST_FIRST.index) for fqn, verdicts in verdicts_by_fqn.items()}


def _count_by_verdict(verdicts: Iterable[Verdict]) -> dict[str, int]:
    counts = Counter(verdicts)
    return {verdict.value: counts[verdict] for verdict in Verdict}


def _build_check_row(check: Check) -> CheckRow:
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


def build_audit_document(
    audit: Audit, problems: Iterable[Problem], verdict: str, notes: Sequence[Finding] = ()
) -> AuditDocument:
    """Return the document of an audit. `notes` are not among its findings."""
    counts = Counter(finding.severity for finding in audit.findings)
    statuses = Counter(target.status for target in audit.targets)
    accepted = _build_accepted_rows(entry for target in audit.targets for entry in target.accepted)
    summary = AuditSummary(
        **{status.value: statuses[status] for status in AuditStatus},
        **{severity.value: counts[severity] for severity in Severity},
        accepted=len(accepted),
    )
    targets = tuple(
        TargetRow(target.target, target.status, target.own_reason, target.format, target.tensors, target.bytes)
        for target in audit.targets
    )
    passed = not audit.failing and not statuses[AuditStatus.FAILED] and bool(audit.ran) and not audit.unused_reference
    return AuditDocument(
        "statecli.audit/1",
        __version__,
        passed,
        audit.fail_on,
        summary,
        targets,
        audit.findings,
        audit.ran,
        audit.skipped_rules,
        accepted,
        tuple(notes),
        verdict,
        audit.not_checked,
        audit.configuration,
        tuple(map(_build_problem_row, problems)),
    )
