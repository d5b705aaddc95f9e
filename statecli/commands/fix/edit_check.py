"""Decide whether to keep an edit: it must fix failed checks, worsen no result, and load old state_dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from statecli.commands.fix.defects import Defect, DefectCause, find_defects
from statecli.commands.fix.measure import Measurement, is_same_output
from statecli.commands.fix.result import ProofChange
from statecli.commands.verify.result import Check, Name, Verdict, Verification
from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind
from statecli.core.registration_rules import UNREGISTERED_MODULE
from statecli.core.units import join_names

#: Checks that stop at their first failure, so that a repair may reveal the next failure.
_EARLY_STOPPING_PROOFS = frozenset((Name.FORWARD, Name.STEP))
#: Checks that an edit must repair if they failed, by cause. Edits of other causes must repair all failed checks.
_PROOFS_BY_CAUSE = {
    DefectCause.UNREGISTERED: frozenset((Name.MOVE, Name.CAST, Name.SAVE, Name.FORWARD, Name.MATERIALIZE)),
    DefectCause.CUT_GRAPH: frozenset((Name.STEP,)),
}
_BAD_VERDICTS = (Verdict.FAILED, Verdict.INCONCLUSIVE)


class EditVerdict(msgspec.Struct, frozen=True):
    """Result of an edit. `reason` says why the edit is refused, or is "". `new_keys` are added to the state_dict."""

    reason: str = ""
    new_keys: tuple[str, ...] = ()


def judge(
    defects: Sequence[Defect], before: Measurement, after: Measurement, old: Measurement, repaired: Iterable[str]
) -> EditVerdict:
    """Decide whether to keep an edit, from measurements of the model before and after the edit.

    `before` is the measurement without the edit, `old` the measurement of the user's files. `repaired`: names of all
    defects repaired so far, which may be new in the state_dict.
    """
    named = TensorNames(name for defect in defects for name in defect.names)
    revealed = {name for defect in defects for name in _list_revealed(defect, after.verification)}
    allowed_names = TensorNames((*named.names, *repaired))
    reason = (
        _find_remaining(defects, before, after)
        or _find_worse_proof(before.verification, after.verification, named, revealed)
        or _find_lost_attribute(old, after)
        or _describe_load(after, allowed_names)
        or _describe_output(old, after)
    )
    return EditVerdict(reason, after.load.missing)


def compare_proofs(defect: Defect, before: Measurement, after: Measurement) -> tuple[ProofChange, ...]:
    """Return the verdict, before and after the edit, of each check that failed for the defect's tensors."""
    return tuple(
        ProofChange(proof, Verdict.FAILED, _get_verdict_for(defect, proof, before.verification, after.verification))
        for proof in defect.proofs
    )


def normalize(name: str) -> str:
    """Return the name with `_` for all separators: `heads['a'].w` and `heads.a.w` both become `heads_a_w`."""
    return _SEPARATORS.sub("_", name).strip("_")


_SEPARATORS = compile_on_use(r"[\W_]+")


class TensorNames:
    """Set of tensor names. `in` ignores separators and container keys: `blocks.0.w` is in a set with `blocks[0].w`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._normalized = {normalize(name) for name in self.names}
        self._containers = tuple(f"{normalize(name.partition('[')[0])}_" for name in self.names if "[" in name)

    def __contains__(self, name: object) -> bool:
        text = normalize(str(name))
        return text in self._normalized or text.startswith(self._containers)


def _list_revealed(defect: Defect, verification: Verification) -> set[str]:
    """Return the tensors that stay unregistered inside modules that the edit registers; a later edit repairs them."""
    if defect.rule != UNREGISTERED_MODULE.name:
        return set()
    named = TensorNames(defect.names)
    rows = {row.fqn: row for row in verification.state.tensors}
    failed_names = {finding.fqn for check in verification.checks for finding in check.findings if finding.fqn in named}
    return {
        normalize(fqn)
        for fqn in failed_names
        if fqn and fqn not in defect.names and (fqn not in rows or rows[fqn].kind is Kind.UNREGISTERED)
    }


def _get_verdict_for(defect: Defect, proof: Name, before: Verification, verification: Verification) -> Verdict:
    """Return the worst verdict of a check for the defect's tensors, or PASSED if the check reports none of them."""
    check = _get_check(verification, proof)
    if check is None or check.verdict is Verdict.SKIPPED:
        return Verdict.SKIPPED
    all_verdicts = _list_verdicts(check)
    if check.verdict is Verdict.INCONCLUSIVE and Verdict.INCONCLUSIVE not in all_verdicts.values():
        old = _get_check(before, proof)
        if old is None or _drop_counts(old.reason) != _drop_counts(check.reason):
            return Verdict.INCONCLUSIVE  # for a new reason that concerns every tensor
    if not defect.names:
        has_same_defect = any(other.key == defect.key for other in find_defects(verification) if proof in other.proofs)
        return Verdict.FAILED if has_same_defect else Verdict.PASSED
    named, revealed = TensorNames(defect.names), _list_revealed(defect, verification)
    defect_verdicts = {name: verdict for name, verdict in all_verdicts.items() if name in named}
    verdicts = {verdict for name, verdict in defect_verdicts.items() if name not in revealed}
    return next((verdict for verdict in _BAD_VERDICTS if verdict in verdicts), Verdict.PASSED)


def _get_check(verification: Verification, proof: Name) -> Check | None:
    return next((check for check in verification.checks if check.check is proof), None)


def _drop_counts(reason: str | None) -> str:
    """Return the reason without counts such as `5 more values`, because each repaired tensor changes them."""
    return _COUNT.sub("", reason or "")


_COUNT = compile_on_use(r"\b\d+ more \w+")


def _list_verdicts(check: Check) -> Mapping[str, Verdict]:
    """Return the worst verdict of a check for each tensor, from the check's columns and findings."""
    verdicts: dict[str, Verdict] = {}
    cells = [(fqn, cell.verdict) for column in check.columns for fqn, cell in column.cells.items()]
    findings = [
        (finding.fqn, Verdict.FAILED)
        for finding in check.findings
        if finding.fqn is not None and finding.severity is not Severity.NOTE
    ]
    order = (*_BAD_VERDICTS, Verdict.PASSED, Verdict.SKIPPED)
    for fqn, verdict in (*cells, *findings):
        name = normalize(fqn)
        verdicts[name] = min(verdicts.get(name, Verdict.SKIPPED), verdict, key=order.index)
    return verdicts


def _find_remaining(defects: Sequence[Defect], before: Measurement, after: Measurement) -> str:
    changes = [(defect, change) for defect in defects for change in compare_proofs(defect, before, after)]
    for defect, change in changes:
        is_next = change.proof in _EARLY_STOPPING_PROOFS and change.after is Verdict.INCONCLUSIVE
        is_required = change.proof in _PROOFS_BY_CAUSE.get(defect.cause, Name) and not is_next
        if is_required and change.after is not Verdict.PASSED:
            result = _describe(change.after, change.proof, after.verification, TensorNames(defect.names))
            return f"with the fix, the check {change.proof.value} {result}"
    is_any_fixed = any(change.after is Verdict.PASSED for _, change in changes)
    return "" if is_any_fixed else "with the fix, the failed checks still do not pass"


def _describe(verdict: Verdict, proof: Name, verification: Verification, named: TensorNames | None = None) -> str:
    check = _get_check(verification, proof)
    findings = check.findings if check is not None else ()
    about = [finding for finding in findings if named is None or finding.fqn in named] or findings
    finding = about[0].message if about else check and check.reason
    text = "fails" if verdict is Verdict.FAILED else f"is {verdict.value}"
    return f"{text}: {finding}" if finding else text


def _find_worse_proof(before: Verification, after: Verification, named: TensorNames, revealed: set[str]) -> str:
    old_checks = {check.check: check for check in before.checks}
    for check in after.checks:
        old = old_checks[check.check]
        stopped = check.check in _EARLY_STOPPING_PROOFS and old.verdict in _BAD_VERDICTS
        if check.verdict in _BAD_VERDICTS and old.verdict not in _BAD_VERDICTS:
            result = _describe(check.verdict, check.check, after)
            return f"the check {check.check.value} passes without the fix, but with the fix {result}"
        if old.verdict is Verdict.PASSED and check.verdict is not Verdict.PASSED:
            return f"the check {check.check.value} passes without the fix, but is skipped with the fix"
        old_verdicts, verdicts = _list_verdicts(old), _list_verdicts(check)
        worse = [
            name
            for name, verdict in verdicts.items()
            if verdict in _BAD_VERDICTS
            and old_verdicts.get(name) not in _BAD_VERDICTS
            and not stopped
            and name not in revealed
        ]
        if worse:
            return f"with the fix, the check {check.check.value} fails for {join_names(worse, 3)}"
        old_rules = {finding.rule for finding in old.findings if finding.fqn is None}
        new_findings = [
            finding
            for finding in check.findings
            if finding.fqn is None and finding.severity is not Severity.NOTE and finding.rule not in old_rules
        ]
        if new_findings and not stopped:
            return f"with the fix, the check {check.check.value} fails: {new_findings[0].message}"
    present_names = {normalize(row.fqn) for row in after.state.tensors}
    aliases = {normalize(alias) for row in after.state.tensors for alias in row.aliases}
    missing_names = [
        row.fqn
        for row in before.state.tensors
        if row.fqn not in named and normalize(row.fqn) not in present_names | aliases
    ]
    return f"the fixed class lacks the tensors {join_names(missing_names, 3)}" if missing_names else ""


def _find_lost_attribute(old: Measurement, after: Measurement) -> str:
    for module, names in old.attributes.items():
        missing_names = sorted(names - after.attributes.get(module, frozenset()))
        if missing_names:
            return f"the fixed class lacks the attribute {'.'.join(filter(None, (module, missing_names[0])))}"
    return ""


def _describe_load(after: Measurement, allowed_names: TensorNames) -> str:
    if after.load.error:
        return after.load.error
    unknown = [name for name in after.load.missing if name not in allowed_names]
    return f"older state_dicts lack {join_names(unknown, 3)}, which the fixed class expects" if unknown else ""


def _describe_output(old: Measurement, after: Measurement) -> str:
    if old.output is None:
        return ""
    if after.output is None:
        return "forward of the fixed model raises an error"
    return "" if is_same_output(old.output, after.output) else "forward of the fixed model returns other values"
