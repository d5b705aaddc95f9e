"""`-f junit`: JUnit's XML for Jenkins, GitLab and pytest. It has a suite for each target and a case for each check.

Characters that XML 1.0 does not allow are escaped. `-q` leaves nothing out, because programs read this output.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence

from statecli.core.escaping import escape_name, escape_sentence
from statecli.core.grouping import group_by
from statecli.render import RenderOptions, Sink
from statecli.report import Case, CaseOutcome, Report, build_scope_notes

#: XML element of an outcome; a passed case has none.
_ELEMENTS = {CaseOutcome.FAILED: "failure", CaseOutcome.ERROR: "error", CaseOutcome.SKIPPED: "skipped"}


def write(report: Report, sink: Sink, options: RenderOptions) -> None:  # noqa: ARG001  # every output has the same signature
    all_cases = report.cases()
    sink.utf8(b'<?xml version="1.0" encoding="UTF-8"?>\n')
    _write(sink, f'<testsuites name="statecli"{_format_counts(all_cases)}>\n')
    properties = "".join(
        f'   <property name="{_escape_name(note.rule)}" value="{_escape_text(note.message)}"/>\n'
        for note in build_scope_notes(report)
    )
    for suite, cases in group_by(all_cases, lambda case: case.suite).items():
        skipped_count = sum(case.outcome is CaseOutcome.SKIPPED for case in cases)
        _write(sink, f' <testsuite name="{_escape_name(suite)}"{_format_counts(cases)} skipped="{skipped_count}">\n')
        if properties:
            _write(sink, f"  <properties>\n{properties}  </properties>\n")
            properties = ""  # only the first suite has properties
        for case in cases:
            _write(sink, _format_case(case))
        _write(sink, " </testsuite>\n")
    _write(sink, "</testsuites>\n")


def _format_counts(cases: Sequence[Case]) -> str:
    counts = Counter(case.outcome for case in cases)
    return f' tests="{len(cases)}" failures="{counts[CaseOutcome.FAILED]}" errors="{counts[CaseOutcome.ERROR]}"'


def _format_case(case: Case) -> str:
    start = f'  <testcase classname="{_escape_name(case.suite)}" name="{_escape_name(case.name)}"'
    text = "\n".join(map(_escape_text, case.text))
    element = _ELEMENTS.get(case.outcome)
    if element is not None:
        opening = f'<{element} message="{_escape_text(case.message)}"'
        content = f"{opening}>{text}</{element}>" if text else f"{opening}/>"
    elif text:
        content = f"<system-out>{text}</system-out>"
    else:
        return f"{start}/>\n"
    return f"{start}>{content}</testcase>\n"


def _escape_name(text: str) -> str:
    return html.escape(escape_name(text))


def _escape_text(text: str) -> str:
    return html.escape(escape_sentence(text))


def _write(sink: Sink, text: str) -> None:
    sink.utf8(text.encode("utf-8"))
