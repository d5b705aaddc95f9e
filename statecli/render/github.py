"""`-f github`: annotations of a workflow's run, read by the runner from the step's standard output.

All findings of a source line share an annotation, and repeated layers are folded. GitHub shows ten errors, ten
warnings and ten notices of a step and drops the rest silently. So if there are more than ten, findings in files without
lines share an annotation for each rule, at the first of their targets. If there are still more than ten, the last
annotation counts the rest. An incompletely checked target is a warning, because the exit status does not show the
omission. `-q` leaves only failures and these warnings; the last line then shows the unchecked parts, and a
configuration that weakens checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import msgspec

from statecli.core.escaping import escape, escape_name, escape_path, escape_sentence
from statecli.core.finding import Finding, Severity
from statecli.core.grouping import group_by
from statecli.core.units import join_names, plural
from statecli.render import RenderOptions, Sink
from statecli.report import Line, Report, Trouble, fold, label_help
from statecli.storage import files
from statecli.targets.location import Location, find_file, locate

#: Largest number of annotations of each level that GitHub shows for a step.
MAX_ANNOTATIONS = 10
#: Largest number of findings in an annotation.
MAX_LISTED_FINDINGS = 10
#: Largest number of findings in an annotation that shows the help of each finding.
MAX_OWN_HELPS = 3

LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


class _Annotation(msgspec.Struct, frozen=True):
    """An annotation for `count` findings of a rule or a source line."""

    rule: str
    message: str
    location: Location | None
    count: int = 1
    target: str = ""


def write(report: Report, sink: Sink, options: RenderOptions) -> None:
    findings = [problem.merge_findings() for problem in report.list_problems(quiet=options.quiet)]
    troubles = [trouble for trouble in report.troubles if not any(map(trouble.is_reported_by, findings))]
    troubles += report.partly_checked
    for severity, level in LEVELS.items():
        annotations = _annotate_troubles(trouble for trouble in troubles if trouble.severity is severity)
        annotations += _annotate_findings([finding for finding in findings if finding.severity is severity])
        for annotation in _limit_annotations(annotations):
            sink.text(_format_command(level, annotation))
    verdict = report.page().verdict
    last = report.describe_scope() if options.quiet else verdict
    if last:
        sink.text(f"statecli: {_escape_old_command(escape_sentence(last))}\n")


def list_annotated_messages(report: Report) -> set[str]:
    """Return the messages of failed targets that get annotations. Return an empty set for too many messages."""
    messages = {trouble.message for trouble in report.troubles if trouble.severity is Severity.ERROR}
    return messages if len(messages) <= MAX_ANNOTATIONS else set()


def _annotate_troubles(troubles: Iterable[Trouble]) -> list[_Annotation]:
    """Return an annotation for each target. Failed targets with the same message share an annotation."""
    trouble_by_cause = {
        trouble.message if trouble.severity is Severity.ERROR else trouble.target: trouble
        for trouble in reversed(tuple(troubles))
    }
    return [
        _Annotation(
            trouble.rule.name,
            escape_sentence(trouble.message),
            Location(find_file(trouble.target)),
            1,
            trouble.target,
        )
        for trouble in reversed(trouble_by_cause.values())
    ]


def _annotate_findings(findings: Sequence[Finding]) -> list[_Annotation]:
    """Return annotations for findings. Repeated layers with the same target and source line share an annotation."""
    annotations = []
    for same_line in group_by(findings, lambda finding: _find_source_line(locate(finding))).values():
        rows = [Line((finding.message, finding.rule, finding.target, finding.help or "")) for finding in same_line]
        for line, positions in fold.fold_messages(rows):
            message, rule, target, help = line.cells
            text = "\n".join(map(escape_sentence, (message, *label_help(help).splitlines())))
            annotations.append(_Annotation(rule, text, locate(same_line[positions[0]]), len(positions), target))
    return annotations


def _find_source_line(location: Location | None) -> tuple[str, int] | None:
    return None if location is None or location.line is None else (location.path, location.line)


def _limit_annotations(annotations: list[_Annotation]) -> list[_Annotation]:
    """Return at most MAX_ANNOTATIONS annotations; the last counts the rest."""
    groups: dict[object, list[_Annotation]]
    groups = group_by(annotations, lambda annotation: _find_source_line(annotation.location) or id(annotation))
    if len(groups) > MAX_ANNOTATIONS:
        groups = group_by(annotations, lambda annotation: _find_source_line(annotation.location) or annotation.rule)
    merged_annotations = [
        _merge_annotations(", ".join(dict.fromkeys(annotation.rule for annotation in group)), group)
        for group in groups.values()
    ]
    if len(merged_annotations) <= MAX_ANNOTATIONS:
        return merged_annotations
    further_annotations = merged_annotations[MAX_ANNOTATIONS - 1 :]
    count = sum(annotation.count for annotation in further_annotations)
    lines = [
        f"{line[0]}:{line[1]}"
        for annotation in further_annotations
        if (line := _find_source_line(annotation.location)) is not None
    ]
    rules = ", ".join(annotation.rule for annotation in further_annotations)
    group_text = f"{plural(len(further_annotations), 'more rule')}: {rules}"
    message = f"and {plural(count, 'finding')} of {group_text}"
    if lines:
        group_text = f"{plural(len(further_annotations), 'more place')}: {join_names(lines, MAX_LISTED_FINDINGS)}"
        message = f"and {plural(count, 'finding')} at {group_text}"
    return [*merged_annotations[: MAX_ANNOTATIONS - 1], _Annotation("more", message, None, count)]


def _merge_annotations(rule: str, annotations: Sequence[_Annotation]) -> _Annotation:
    """Merge annotations into one. Messages that differ only in their target share a line."""
    if len(annotations) == 1:
        return annotations[0]
    is_mixed = len({annotation.target for annotation in annotations}) > 1

    def get_line(annotation: _Annotation) -> str:
        line = annotation.message.partition("\n")[0]
        return line.removeprefix(f"{annotation.target}: ") if is_mixed else line

    by_line = group_by(annotations, get_line)
    helps = {annotation.message.partition("\n")[2] for annotation in annotations}
    # A help shared by all findings comes after the last finding.
    has_own_helps = len(helps) > 1 and len(by_line) <= MAX_OWN_HELPS
    entries = list(by_line.items())
    lines = []
    for line, same_line in entries[:MAX_LISTED_FINDINGS]:
        lines.append(f"{_join_targets(same_line)}: {line}" if is_mixed else line)
        lines += [same_line[0].message.partition("\n")[2]] if has_own_helps else []
    further_count = sum(annotation.count for _, same_line in entries[MAX_LISTED_FINDINGS:] for annotation in same_line)
    lines += [f"… and {further_count:,} more"] if further_count else []
    lines += helps if len(helps) == 1 else []
    text = "\n".join(filter(None, lines))
    count = sum(annotation.count for annotation in annotations)
    return _Annotation(rule, text, annotations[0].location, count, "" if is_mixed else annotations[0].target)


def _join_targets(annotations: Sequence[_Annotation]) -> str:
    """Return the names of the first targets as one text, without duplicates."""
    targets = dict.fromkeys(annotation.target for annotation in annotations)
    return join_names([escape_name(target) for target in targets], MAX_LISTED_FINDINGS)


def _format_command(level: str, annotation: _Annotation) -> str:
    properties, message = {}, annotation.message
    # A remote file is not a file of the repository, so its annotation has no file.
    if annotation.location is not None and files.is_remote(annotation.location.path):
        target = escape_name(annotation.target)
        message = message if target in message else f"{target}: {message}"
    elif annotation.location is not None:
        properties["file"] = escape_path(annotation.location.path.replace(os.sep, "/"))
        if annotation.location.line is not None:
            properties["line"] = str(max(1, annotation.location.line))
    count = f" ({annotation.count:,})" if annotation.count > 1 else ""
    properties["title"] = f"statecli {escape(annotation.rule)}{count}"
    properties_text = ",".join(f"{key}={_escape_property(value)}" for key, value in properties.items())
    return f"::{level} {properties_text}::{_escape_data(message)}\n"


def _escape_data(text: str) -> str:
    return _escape_old_command(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _escape_old_command(text: str) -> str:
    """Escape `##[`, which begins an old-style command of the runner anywhere in a line."""
    return text.replace("##[", "# #[")
