"""`-f junit`: JUnit's XML, as Jenkins, GitLab and pytest understand it; a suite a target, a case all that was tried.

What XML 1.0 has no place for is written as an escape. `-q` leaves nothing out: it is read by programs.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from statecli.core.escaping import escape_name, escape_sentence
from statecli.report import Case, Outcome, Report, scope_notes

if TYPE_CHECKING:
    from statecli.render import Look, Sink

#: The element that says how a case went; one that passed has none.
_ELEMENTS = {Outcome.FAILED: "failure", Outcome.ERROR: "error", Outcome.SKIPPED: "skipped"}


def write(report: Report, sink: Sink, look: Look) -> None:  # noqa: ARG001  # every output has the same signature
    suites: dict[str, list[Case]] = {}
    for case in report.cases():
        suites.setdefault(case.suite, []).append(case)
    everything = [case for cases in suites.values() for case in cases]
    sink.utf8(b'<?xml version="1.0" encoding="UTF-8"?>\n')
    _put(sink, f'<testsuites name="statecli"{_counted(everything)}>\n')
    properties = "".join(
        f'   <property name="{_name(note.rule)}" value="{_written(note.message)}"/>\n' for note in scope_notes(report)
    )
    for number, (suite, cases) in enumerate(suites.items()):
        skipped = sum(case.outcome is Outcome.SKIPPED for case in cases)
        _put(sink, f' <testsuite name="{_name(suite)}"{_counted(cases)} skipped="{skipped}">\n')
        if properties and number == 0:
            _put(sink, f"  <properties>\n{properties}  </properties>\n")
        for case in cases:
            _put(sink, _case(case))
        _put(sink, " </testsuite>\n")
    _put(sink, "</testsuites>\n")


def _counted(cases: Sequence[Case]) -> str:
    counts = Counter(case.outcome for case in cases)
    return f' tests="{len(cases)}" failures="{counts[Outcome.FAILED]}" errors="{counts[Outcome.ERROR]}"'


def _case(case: Case) -> str:
    start = f'  <testcase classname="{_name(case.suite)}" name="{_name(case.name)}"'
    text = _lines(case.text)
    element = _ELEMENTS.get(case.outcome)
    if element is not None:
        opened = f'<{element} message="{_written(case.message)}"'
        inside = f"{opened}>{text}</{element}>" if text else f"{opened}/>"
    elif text:
        inside = f"<system-out>{text}</system-out>"
    else:
        return f"{start}/>\n"
    return f"{start}>{inside}</testcase>\n"


def _lines(text: Iterable[str]) -> str:
    return "\n".join(map(_written, text))


def _name(text: str) -> str:
    return _escaped(escape_name(text))


def _written(text: str) -> str:
    return _escaped(escape_sentence(text))


def _escaped(text: str) -> str:
    return html.escape(text)


def _put(sink: Sink, text: str) -> None:
    sink.utf8(text.encode("utf-8"))
