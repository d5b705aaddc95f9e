"""The report of `statecli explain`: the causes, the result of the test, and the Python code that loads the file."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from statecli.commands.explain.result import Diagnosis, Explanation
from statecli.commands.explain.rules import DOES_NOT_LOAD, OTHER_WAY_TO_LOAD
from statecli.core.finding import Finding
from statecli.core.quoting import quote_for_shell
from statecli.core.rule import Rule
from statecli.core.units import join_names, plural
from statecli.report import Cell, Page, Problem, Report, ReportColumn, Table, View, junit_cases, rule_texts
from statecli.report.documents.explain import build_explain_document

_COLUMNS = (ReportColumn("cause"), ReportColumn("names", right=True), ReportColumn("message"), ReportColumn("example"))


def build_explain_report(explanation: Explanation, view: View) -> Report:
    """Return the report of an explanation."""
    problems = build_problems(explanation)
    title = " → ".join(filter(None, (explanation.checkpoint, explanation.model))) or "error text"
    verdict = describe_verdict(explanation)
    return Report(
        title=title,
        document=lambda: build_explain_document(explanation, verdict),
        table=lambda: Table(_COLUMNS, tuple(_list_rows(explanation)), has_findings=False),
        short_table=lambda: Table(_COLUMNS, (), has_findings=False),  # the problem has the same sentences
        page=lambda: Page("", (ReportColumn("name"),), (), (verdict,), problems=problems, verdict=verdict),
        findings=tuple(finding for problem in problems for finding in problem.findings),
        show_all=view.unfold,
        problems=lambda: problems,
        rules=lambda: rule_texts.list_rule_texts(problems),
        cases=lambda: junit_cases.build_cases(title, problems, "loads"),
    )


def describe_verdict(explanation: Explanation) -> str:
    """Describe in one line whether the class loads the checkpoint."""
    diagnosis = explanation.diagnosis
    if explanation.loads:
        return "loads as it is: a strict load on the meta device accepts the checkpoint" + _describe_untied(explanation)
    if diagnosis is None or not diagnosis.code:
        return "does not load"
    certainty = "tested, but" if diagnosis.proved else "not certain, and"
    if diagnosis.warnings:
        return f"does not load; the code below is {certainty} leaves {join_names(diagnosis.initial)} at initial values"
    return f"does not load; the code below is {certainty.partition(',')[0]}"


def _describe_untied(explanation: Explanation) -> str:
    """Return a warning about tied weights that the checkpoint stores separately: a load keeps only the last tensor."""
    if not explanation.untied:
        return ""
    names = " and ".join(explanation.untied[0][:2]) + (", …" if explanation.untied[0][2:] else "")
    further_ties = f" (and {plural(len(explanation.untied) - 1, 'more tie')})" if explanation.untied[1:] else ""
    checkpoint, model = (quote_for_shell(text or "") for text in (explanation.checkpoint, explanation.model))
    return (
        f", but the class ties {names}{further_ties} and the checkpoint has a tensor for each name: the load keeps "
        f"only the last tensor; to compare the values, run: statecli audit {checkpoint} --model {model} --values"
    )


def build_problems(explanation: Explanation) -> tuple[Problem, ...]:
    """Return a problem that explains the failing load, and a problem for each other way to load the checkpoint."""
    if explanation.diagnosis is None:
        return ()
    target = explanation.checkpoint or "error text"
    first = _build_problem(DOES_NOT_LOAD, explanation.diagnosis, target)
    return (
        first,
        *(_build_problem(OTHER_WAY_TO_LOAD, alternative, target) for alternative in explanation.alternatives),
    )


def list_problems_of_diff(explanation: Explanation | None, findings: tuple[Finding, ...]) -> tuple[Problem, ...]:
    """Return the problem behind findings about loading, for `statecli diff`, or () if the cause is unknown."""
    if explanation is None or explanation.diagnosis is None:
        return ()
    problem = _build_problem(DOES_NOT_LOAD, explanation.diagnosis, explanation.checkpoint or "")
    texts = [quote_for_shell(text) for text in (explanation.model, explanation.checkpoint) if text]
    explain_text = f"to see other code that loads the checkpoint, run: statecli explain {' '.join(texts)}"
    effects = (*problem.effects, explain_text) if explanation.alternatives else problem.effects
    return (replace(problem, effects=effects, findings=findings or problem.findings),)


def _build_problem(rule: Rule, diagnosis: Diagnosis, target: str) -> Problem:
    first, *other_causes = diagnosis.causes
    code = "\n".join(diagnosis.code) or None
    proof = diagnosis.proof
    if diagnosis.code and not proof.startswith("not tested"):
        proof = f"{'tested' if diagnosis.proved else 'not certain'}: {proof}"
    warnings = [f"warning: {warning}" for warning in diagnosis.warnings]
    example = f"example: {first.example}" if first.example else ""
    effects = (*(evidence.message for evidence in other_causes), proof, *warnings)
    finding = rule.finding("; ".join([first.message, *effects]), target=target, help=code)
    effects = tuple(filter(None, (example, *effects)))
    return Problem(rule.name, finding.severity, first.message, target, (finding,), effects, code)


def _list_rows(explanation: Explanation) -> Iterable[tuple[Cell, ...]]:
    for evidence in explanation.diagnosis.causes if explanation.diagnosis is not None else ():
        yield evidence.cause.value, evidence.names, evidence.message, evidence.example
