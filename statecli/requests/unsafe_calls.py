"""Report the calls of a checkpoint's pickles that `audit` reports as errors, in `inspect`."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from statecli import file_scan, pickle_scan, rules
from statecli.commands.inspect.run import Inspection
from statecli.core.finding import Finding
from statecli.core.model_state import ModelState
from statecli.targets.section_of_target import split_section


def add_unsafe_calls(inspection: Inspection) -> Inspection:
    """Add a finding for each harmful function that loading the file imports or calls.

    Call it for a file with names that torch does not know. Only a file with a harmful name among them is scanned,
    because a scan costs more than the list of tensors.
    Raises UnreadableError if bytes of a remote file could not be fetched.
    """
    state = inspection.state
    if not _may_be_unsafe(state):
        return inspection
    return replace(inspection, findings=(*inspection.findings, *_find_unsafe_calls(state)))


def _may_be_unsafe(state: ModelState) -> bool:
    return any(pickle_scan.known_names.may_be_harmful(qualified) for qualified, _ in state.globals)


def _find_unsafe_calls(state: ModelState) -> Iterator[Finding]:
    unsafe_global = rules.pickles.unsafe_global
    path, _ = split_section(state.target)
    subject = rules.audit_subject.Subject(state.target, state, pickles=file_scan.scan.scan_pickles(path))
    return (unsafe_global.build_finding(issue, state.target) for issue in unsafe_global.find(subject))
