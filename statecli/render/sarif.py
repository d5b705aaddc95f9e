"""`-f sarif`: SARIF 2.1.0 for code scanning. It has a result for each problem, on a line of its own.

A finding of a model class points at the source line; a tensor is a logical location, with its bytes if known. Relative
paths stay relative. Accepted findings are suppressed results. An unreadable target is a notification, and marks the run
as not successful. `-q` leaves nothing out, because programs read this output.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from statecli.core.documentation import rule_url
from statecli.core.escaping import escape_name, escape_sentence
from statecli.core.finding import Finding
from statecli.core.grouping import group_by
from statecli.core.json_text import encode_json
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.output_rules import CONFIGURATION, NOT_CHECKED
from statecli.core.version import __version__
from statecli.render import RenderOptions, Sink
from statecli.report import Problem, Report, RuleText, Trouble, build_problem, build_scope_notes, label_help
from statecli.targets.location import locate, number_fingerprints

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: Key of the partial fingerprint that GitHub uses.
GITHUB_FINGERPRINT = "primaryLocationLineHash"

_URL = compile_on_use(r"[a-zA-Z][a-zA-Z0-9+.-]+://")


def write(report: Report, sink: Sink, options: RenderOptions) -> None:  # noqa: ARG001  # every output has the same signature
    rules = {rule.name: rule for rule in report.rules()}
    problems = (*report.list_problems(), *(build_problem(finding) for finding, _ in report.accepted))
    for problem in problems:
        rules.setdefault(problem.rule, RuleText(problem.rule, problem.severity, problem.rule))
    index = {rule: n for n, rule in enumerate(rules)}
    sink.utf8(b'{"$schema":' + encode_json(SCHEMA) + b',"version":"2.1.0","runs":[{\n"tool":{"driver":')
    driver = {"name": "statecli", "version": __version__, "semanticVersion": __version__}
    sink.utf8(encode_json({**driver, "rules": [_describe_rule(rule) for rule in rules.values()]}))
    sink.utf8(b'},\n"invocations":[' + encode_json(_describe_invocation(report)) + b'],\n"results":[')
    separator = b"\n"
    for result in _build_results(report, problems, index):
        sink.utf8(separator + encode_json(result))
        separator = b",\n"
    sink.utf8(b"]}]}\n")


def _describe_rule(rule: RuleText) -> dict[str, Any]:
    """Return a rule as SARIF. Its `help` in Markdown is the explanation, with backticks and paragraphs."""
    first_paragraph, _, remainder = rule.explanation.partition("\n\n")
    full_description = " ".join((first_paragraph, *remainder.partition("\n\n")[0].split()))
    description: dict[str, Any] = {
        "id": rule.name,
        "name": "".join(part.capitalize() for part in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": full_description.strip() or rule.summary},
        "help": {"text": rule.explanation or rule.summary, "markdown": rule.explanation or rule.summary},
        **({"helpUri": rule_url(rule.name)} if rule.plugin is None else {}),
        "defaultConfiguration": {"level": rule.severity.value},
    }
    return {**description, "properties": {"tags": [rule.about]}} if rule.about else description


def _describe_invocation(report: Report) -> dict[str, Any]:
    notes = group_by(build_scope_notes(report), lambda note: note.rule)
    notifications = [*map(_build_notification, report.troubles)]
    has_errors = any(notification["level"] == "error" for notification in notifications)
    notifications += [
        {"level": note.severity.value, "message": {"text": _escape_text(note.message)}}
        for note in notes.get(NOT_CHECKED.name, ())
    ]
    configuration_notes = [
        Trouble(note.target, note.message, CONFIGURATION) for note in notes.get(CONFIGURATION.name, ())
    ]
    invocation = {"executionSuccessful": not has_errors, "toolExecutionNotifications": notifications}
    return invocation | (
        {"toolConfigurationNotifications": [*map(_build_notification, configuration_notes)]}
        if configuration_notes
        else {}
    )


def _build_notification(trouble: Trouble) -> dict[str, Any]:
    return {
        "level": trouble.severity.value,
        "message": {"text": _escape_text(trouble.message)},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": make_uri(trouble.target)}}}],
    }


def _build_results(report: Report, problems: Sequence[Problem], index: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield a result for each problem. The last problems are the accepted findings.

    If any result is suppressed, all other results have an empty `suppressions`, as the standard requires.
    """
    reasons = [*[None] * (len(problems) - len(report.accepted)), *(reason for _, reason in report.accepted)]
    merged_findings = number_fingerprints(problem.merge_findings() for problem in problems)
    for problem, reason, (finding, fingerprint, number) in zip(problems, reasons, merged_findings, strict=True):
        result = _build_result(finding, index[finding.rule])
        if len(problem.findings) > 1:
            related = [_build_related_location(part) for part in problem.findings]
            # The schema does not allow equal entries; equal findings are possible.
            result["relatedLocations"] = list({encode_json(location): location for location in related}.values())
        result["partialFingerprints"] = {GITHUB_FINGERPRINT: f"{fingerprint}:{number}", "statecli/v1": fingerprint}
        if report.accepted:
            result["suppressions"] = (
                [] if reason is None else [{"kind": "external", "justification": _escape_text(reason)}]
            )
        yield result


def _build_result(finding: Finding, index: int) -> dict[str, Any]:
    help = "".join(f"\n{escape_sentence(line)}" for line in label_help(finding.help or "").splitlines())
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity.value,
        "message": {"text": _escape_text(finding.message) + _escape_links(help)},
        "locations": [_build_location(finding)],
    }


def _build_related_location(finding: Finding) -> dict[str, Any]:
    """Return the location of one finding of a problem, with the finding's own message."""
    return {**_build_location(finding), "message": {"text": _escape_text(f"{finding.rule}: {finding.message}")}}


def _build_location(finding: Finding) -> dict[str, Any]:
    location = locate(finding)
    physical: dict[str, Any] = {"artifactLocation": {"uri": make_uri(location.path)}}
    if location.line is not None:
        physical["region"] = {"startLine": max(1, location.line)}
    elif location.bytes is not None:
        physical["region"] = {"byteOffset": location.bytes.offset, "byteLength": location.bytes.length}
    sarif_location: dict[str, Any] = {"physicalLocation": physical}
    if finding.fqn is not None:
        section = f"{finding.section}." if finding.section and finding.section != "model" else ""
        logical_location = {
            "name": escape_name(finding.fqn),
            "fullyQualifiedName": escape_name(section + finding.fqn),
            "kind": "member",
        }
        sarif_location["logicalLocations"] = [logical_location]
    return sarif_location


def _escape_text(text: str) -> str:
    return _escape_links(escape_sentence(text))


def _escape_links(text: str) -> str:
    """Escape `[text](target)`, because this is a link even in the plain text of a message."""
    return text.replace("](", "\\](")


def make_uri(path: str) -> str:
    """Return a path as a URI reference with `/` as separator and escapes; a relative path stays relative."""
    from urllib.parse import quote  # only this output needs the import, which takes 3 ms

    if _URL.match(path):
        return quote(_encode_path(path), safe="/:?#[]@!$&'()*+,;=%~")
    normalized = path.replace(os.sep, "/")
    if os.altsep:
        normalized = normalized.replace(os.altsep, "/")
    quoted_path = quote(_encode_path(normalized), safe="/~@+,=")
    return f"file://{quoted_path}" if normalized.startswith("/") else quoted_path.removeprefix("./")


def _encode_path(path: str) -> bytes:
    """Encode a file name. If any lone surrogate does not stand for a byte, write all lone surrogates as escapes."""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return path.encode("utf-8", "backslashreplace")
