"""Report, in `inspect`, the calls of a checkpoint's pickles that `audit` reports as errors."""

from __future__ import annotations

from msgspec.structs import replace

from statecli import file_scan, pickle_scan, rules
from statecli.commands.inspect.run import Inspection
from statecli.targets.section_of_target import split_section


def add_unsafe_calls(inspection: Inspection) -> Inspection:
    """Add a finding for each harmful function that loading the file imports or calls.

    Call this for a file whose pickles import names that torch does not know. Only a file with a possibly harmful name
    is scanned, because a scan costs more than listing the tensors.
    Raises UnreadableError if bytes of a remote file could not be fetched.
    """
    state = inspection.state
    if not any(pickle_scan.known_names.may_be_harmful(qualified) for qualified, _ in state.globals):
        return inspection
    path, _ = split_section(state.target)
    subject = rules.audit_subject.Subject(state.target, state, pickles=file_scan.scan.scan_pickles(path))
    rule = rules.pickles.unsafe_global
    findings = (rule.build_finding(issue, state.target) for issue in rule.find(subject))
    return replace(inspection, findings=(*inspection.findings, *findings))
