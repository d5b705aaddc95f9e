"""`-f sarif`: SARIF 2.1.0, for code scanning and whatever else reads it; one result a line.

A model class points at the source line; a tensor is a logical location, with its bytes where they are known. Paths are
relative references wherever the user's are. What is accepted is there, suppressed; what could not be read is a
notification, and the run was then not successful. `-q` leaves nothing out: it is read by programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from statecli.core.escaping import escape_name, escape_sentence
from statecli.core.finding import Finding
from statecli.core.json_text import encode_json
from statecli.core.output_rules import CONFIGURATION, NOT_CHECKED
from statecli.core.version import __version__
from statecli.report import Report, RuleText, Trouble, scope_notes
from statecli.targets.location import fingerprinted, of

if TYPE_CHECKING:
    from statecli.render import Look, Sink

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: Of the partial fingerprints this is the one that GitHub goes by.
GITHUBS = "primaryLocationLineHash"

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def write(report: Report, sink: Sink, look: Look) -> None:  # noqa: ARG001  # every output has the same signature
    rules = {rule.name: rule for rule in report.rules()}
    for finding in (*report.findings, *(one for one, _ in report.accepted)):
        rules.setdefault(finding.rule, RuleText(finding.rule, finding.severity, finding.rule))
    index = {rule: n for n, rule in enumerate(rules)}
    sink.utf8(b'{"$schema":' + encode_json(SCHEMA) + b',"version":"2.1.0","runs":[{\n"tool":{"driver":')
    driver = {"name": "statecli", "version": __version__, "semanticVersion": __version__}
    sink.utf8(encode_json({**driver, "rules": [_rule(rule) for rule in rules.values()]}))
    sink.utf8(b'},\n"invocations":[' + encode_json(_invocation(report)) + b'],\n"results":[')
    before = b"\n"
    for result in _results(report, index):
        sink.utf8(before + encode_json(result))
        before = b",\n"
    sink.utf8(b"]}]}\n")


def _rule(rule: RuleText) -> dict[str, Any]:
    """`help` in Markdown is the explanation as it stands; its backticks and paragraphs are Markdown's."""
    what, _, rest = rule.explanation.partition("\n\n")
    why = " ".join((what, *rest.partition("\n\n")[0].split()))
    described: dict[str, Any] = {
        "id": rule.name,
        "name": "".join(part.capitalize() for part in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": why.strip() or rule.summary},
        "help": {"text": rule.explanation or rule.summary, "markdown": rule.explanation or rule.summary},
        "defaultConfiguration": {"level": rule.severity.value},
    }
    return {**described, "properties": {"tags": [rule.about]}} if rule.about else described


def _invocation(report: Report) -> dict[str, Any]:
    notes = scope_notes(report)
    told = [*map(_notification, report.troubles)]
    failed = any(one["level"] == "error" for one in told)
    told += [
        {"level": "note", "message": {"text": _words(one.message)}} for one in notes if one.rule == NOT_CHECKED.name
    ]
    configured = [Trouble(one.target, one.message, one.severity) for one in notes if one.rule == CONFIGURATION.name]
    invocation = {"executionSuccessful": not failed, "toolExecutionNotifications": told}
    return invocation | ({"toolConfigurationNotifications": [*map(_notification, configured)]} if configured else {})


def _notification(trouble: Trouble) -> dict[str, Any]:
    return {
        "level": trouble.severity.value,
        "message": {"text": _words(trouble.message)},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri(trouble.target)}}}],
    }


def _results(report: Report, index: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Where any is suppressed, the others say that they are not, as the standard asks."""
    reasons = dict.fromkeys(range(len(report.findings))) | {
        len(report.findings) + n: reason for n, (_, reason) in enumerate(report.accepted)
    }
    both = (*report.described_findings(), *(finding for finding, _ in report.accepted))
    for n, (finding, fingerprint, which) in enumerate(fingerprinted(both)):
        result = _result(finding, index[finding.rule])
        result["partialFingerprints"] = {GITHUBS: f"{fingerprint}:{which}", "statecli/v1": fingerprint}
        reason = reasons[n]
        if report.accepted:
            result["suppressions"] = [] if reason is None else [{"kind": "external", "justification": _words(reason)}]
        yield result


def _result(finding: Finding, index: int) -> dict[str, Any]:
    help = f"\n{escape_sentence(finding.help)}" if finding.help else ""
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity.value,
        "message": {"text": _words(finding.message) + _unlinked(help)},
        "locations": [_location(finding)],
    }


def _location(finding: Finding) -> dict[str, Any]:
    where = of(finding)
    physical: dict[str, Any] = {"artifactLocation": {"uri": uri(where.path)}}
    if where.line is not None:
        physical["region"] = {"startLine": max(1, where.line)}
    elif where.bytes is not None:
        physical["region"] = {"byteOffset": where.bytes.offset, "byteLength": where.bytes.length}
    location: dict[str, Any] = {"physicalLocation": physical}
    if finding.fqn is not None:
        section = f"{finding.section}." if finding.section and finding.section != "model" else ""
        named = {
            "name": escape_name(finding.fqn),
            "fullyQualifiedName": escape_name(section + finding.fqn),
            "kind": "member",
        }
        location["logicalLocations"] = [named]
    return location


def _words(text: str) -> str:
    return _unlinked(escape_sentence(text))


def _unlinked(text: str) -> str:
    """`[text](target)` is a link in a message's plain text too, unless its bracket is escaped."""
    return text.replace("](", "\\](")


def uri(path: str) -> str:
    """A path as a URI reference: relative where it is, `/` for the system's separator, all that is special escaped."""
    from urllib.parse import quote  # 3 ms that only this output needs

    if _URL.match(path):
        return quote(_raw(path), safe="/:?#[]@!$&'()*+,;=%~")
    steps = path.replace(os.sep, "/")
    if os.altsep:
        steps = steps.replace(os.altsep, "/")
    quoted = quote(_raw(steps), safe="/~@+,=")
    return f"file://{quoted}" if steps.startswith("/") else quoted.removeprefix("./")


def _raw(path: str) -> bytes:
    """The bytes of a file name; a lone surrogate that stands for no byte is none of a file system's."""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return path.encode("utf-8", "backslashreplace")
