"""The report of `statecli fix`: a unified diff, and a problem for each defect with the checks that its fix passes."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix

from msgspec import UNSET

from statecli.commands.fix.line_diff import format_unified_diff
from statecli.commands.fix.result import ChangedFile, Edit, Fixes
from statecli.commands.fix.rules import NOT_FIXED, PROPOSED_FIX, WRITTEN_FIX
from statecli.commands.verify.result import Verdict
from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Oddity, Origin
from statecli.core.units import join_names, plural
from statecli.report import Cell, Page, Problem, Report, ReportColumn, Table, View, fold, junit_cases, rule_texts
from statecli.report.documents.fix import build_fix_document

_COLUMNS = tuple(map(ReportColumn, ("names", "rule", "file", "line", "status", "proofs", "reason")))
#: Largest number of names of a defect in its message.
MAX_NAMES = 3
#: The module at the beginning of several names: `layers` of `layers.` and of `layers[1`.
_MODULE = compile_on_use(r"(.+)[.\[]")


def build_fix_report(fixes: Fixes, target: str, view: View) -> Report:
    """Return the report about the edits of the model `target`."""
    problems = tuple(_build_problem(edit, fixes, target) for edit in fixes.edits)
    findings = tuple(finding for problem in problems for finding in problem.findings)
    patch = tuple(line for file in fixes.files for line in format_patch(file))
    verdict = describe_verdict(fixes)
    return Report(
        title=target,
        document=lambda: build_fix_document(fixes, patch, findings, verdict, target),
        table=lambda: Table(_COLUMNS, tuple(_list_rows(fixes.edits, fixes.written)), has_findings=False),
        short_table=lambda: Table(_COLUMNS, (), has_findings=False),  # the problems have the same sentences
        page=lambda: Page("", (ReportColumn("name"),), (), (verdict,), problems=problems, verdict=verdict),
        findings=findings,
        notes=tuple(Oddity("fix", note) for note in (*fixes.inconclusive, *fixes.notes)),
        fail_on=Severity.WARNING,
        show_all=view.unfold,
        problems=lambda: problems,
        rules=lambda: rule_texts.list_rule_texts(problems),
        cases=lambda: junit_cases.build_cases(
            target, (p for p in problems if p.rule != WRITTEN_FIX.name), "nothing to fix"
        ),
        patch=patch,
    )


def describe_verdict(fixes: Fixes) -> str:
    """Describe in one line how many fixes were found or written."""
    kept_count = sum(edit.kept for edit in fixes.edits)
    remaining = len(fixes.edits) - kept_count
    count = "1 fix" if kept_count == 1 else f"{kept_count:,} fixes"
    parts = []
    if kept_count and fixes.written:
        parts.append(f"{count} written to {join_names([file.name for file in fixes.files], MAX_NAMES)}")
    elif kept_count:
        parts.append(f"{count} found; add --write to write {'the fix' if kept_count == 1 else 'the fixes'}")
    if remaining:
        parts.append(f"{plural(remaining, 'defect')} {'has' if remaining == 1 else 'have'} no fix")
    nothing = "nothing found to fix, but not all checks have a result" if fixes.inconclusive else "nothing to fix"
    return "; ".join(parts) or nothing


def format_patch(file: ChangedFile) -> Iterator[str]:
    """Yield the lines of a unified diff that `git apply` and `patch -p1` accept."""
    encoding = tokenize.detect_encoding(io.BytesIO(file.before).readline)[0]
    before, after = (_split_lines(data.decode(encoding)) for data in (file.before, file.after))
    old, new = (file.name,) * 2 if file.name.startswith("/") else (f"a/{file.name}", f"b/{file.name}")
    for line in format_unified_diff(before, after, old, new):
        yield line.removesuffix("\n")
        if not line.endswith("\n"):
            yield "\\ No newline at end of file"


def _split_lines(text: str) -> list[str]:
    """Return the lines with their line ends. Only a line feed ends a line, as in git."""
    return list(io.StringIO(text, newline="\n"))


def _describe_subject(edit: Edit) -> str:
    return _shorten_names(edit.names) if edit.names else edit.message


def _shorten_names(names: Sequence[str]) -> str:
    """Shorten a name of repeated layers to `layers.{0..11}.mask (12 tensors)`, and many names to their `module.*`."""
    if len(names) <= MAX_NAMES:
        return join_names(names, MAX_NAMES)
    folded_names = fold.fold_names(names)
    module = _MODULE.match(commonprefix(names))  # noqa: RUF071  # names, not paths
    text = folded_names[0] if len(folded_names) == 1 else f"{module[1]}.*" if module else None
    return f"{text} ({plural(len(names), 'tensor')})" if text is not None else join_names(names, MAX_NAMES)


def _build_problem(edit: Edit, fixes: Fixes, target: str) -> Problem:
    rule = NOT_FIXED if not edit.kept else WRITTEN_FIX if fixes.written else PROPOSED_FIX
    passed_proofs = [change.proof.value for change in edit.proofs if change.after is Verdict.PASSED]
    failed_proofs = [change.proof.value for change in edit.proofs if change.after is not Verdict.PASSED]
    if edit.kept:
        verb = "pass" if len(passed_proofs) > 1 else "passes"
        message = f"{_describe_subject(edit)}: {', '.join(passed_proofs)} {verb} with the fix"
    else:
        verb = "fail" if len(failed_proofs) > 1 else "fails"
        message = f"{_describe_subject(edit)}: {', '.join(failed_proofs)} {verb} ({edit.rule})"
    effects = []
    if edit.kept and failed_proofs:
        effects.append(f"not repaired: {', '.join(failed_proofs)}")
    if edit.new_keys:
        names = _shorten_names(edit.new_keys)
        effects.append(
            f"older checkpoints lack {names}; load such checkpoints with model.load_state_dict(state, strict=False); "
            "the missing tensors keep their initial values"
        )
    if edit.reason:
        effects.append(f"no fix: {edit.reason}")
    fqn = edit.names[0] if edit.names else None
    origin = Origin(edit.file, edit.line) if edit.file and edit.line else UNSET
    finding = rule.finding("; ".join([message, *effects]), target=target, fqn=fqn, origin=origin)
    help = edit.advice or None
    return Problem(rule.name, finding.severity, message, target, (finding,), tuple(effects), help, origin)


def _list_rows(edits: Iterable[Edit], is_written: bool) -> Iterator[tuple[Cell, ...]]:
    for edit in edits:
        status = "written" if edit.kept and is_written else "proved" if edit.kept else "no edit"
        proofs = ", ".join(
            f"{change.proof.value}: {change.before.value} -> {change.after.value}" for change in edit.proofs
        )
        yield ", ".join(edit.names), edit.rule, edit.file, edit.line, status, proofs, edit.reason
