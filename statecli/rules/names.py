"""Rules about names of tensors and sections."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from statecli.core import quoting, unicode_forms
from statecli.core.escaping import escape
from statecli.core.finding import Finding, Severity
from statecli.core.load_rules import WRAPPER_PREFIX
from statecli.core.model_state import REGISTERED_KINDS, TensorKey
from statecli.core.parameter_or_buffer import WRAPPER_ATTRIBUTES, WRAPPER_PREFIXES
from statecli.core.wrapper_prefix import PrefixedName, report_prefixes
from statecli.rules.audit_rule import Issue, convert_finding, rule, rule_for
from statecli.rules.audit_subject import Subject, needs_file

#: Prefixes that only wrappers use.
_WRAPPER_ONLY_PREFIXES = WRAPPER_PREFIXES[:-1]


@rule(Severity.WARNING)
def case_collision(subject: Subject) -> Iterator[Issue]:
    """The names of two tensors differ only in upper and lower case, or in the Unicode encoding of the same letters.

    Why: macOS, Windows and tools that fold case or normalize text treat the two names as equal. One of the two tensors
    is lost silently when the checkpoint is unpacked or converted. A name with more than 30 combining marks in a row is
    reported too: such names exist in no language, and their normalization can take minutes.

    Example: `head.Weight` next to `head.weight`.

    Fix: rename one of the tensors where it is registered, and save again.
    """
    tensors = subject.state.tensors
    if subject.has_plain_names and len({tensor.fqn.lower() for tensor in tensors}) == len(tensors):
        return
    first_names: dict[TensorKey, str] = {}
    for tensor in tensors:
        if unicode_forms.has_too_many_marks(tensor.fqn):
            message = f"{escape(subject.name_of(tensor))}: has {_TOO_MANY_MARKS}"
            yield Issue(message, tensor.fqn, tensor.section, "rename the tensor")
        first_name = first_names.setdefault(TensorKey(tensor.section, _fold_case(tensor.fqn)), tensor.fqn)
        if first_name != tensor.fqn:
            section = f"{escape(tensor.section)}." if len(subject.state.sections) > 1 else ""
            yield Issue(section + _describe_collision(tensor.fqn, first_name), tensor.fqn, tensor.section, _RENAME)


_RENAME = "rename one of the two tensors"
_TOO_MANY_MARKS = (
    f"more than {unicode_forms.MAX_MARKS} combining marks in a row; statecli compares the name without normalizing it"
)


def _fold_case(name: str) -> str:
    """Return the name as file systems of macOS and Windows compare it; unlike `str.casefold`, `ß` stays `ß`."""
    return name.lower() if name.isascii() else _normalize(_normalize(name).lower())


def _normalize(name: str) -> str:
    return unicode_forms.normalize("NFC", name)


def _describe_collision(name: str, first_name: str) -> str:
    """Describe two names that collide. Names that look the same are written as code points."""
    if _normalize(name) == _normalize(first_name):
        return f"{ascii(name)[1:-1]}: same letters as {ascii(first_name)[1:-1]}, written with other code points"
    return f"{escape(name)}: differs from {escape(first_name)} only in upper and lower case"


@rule_for(WRAPPER_PREFIX, needs_file)
def wrapper_prefix(subject: Subject) -> Iterator[Issue]:
    """Yield an issue for each section whose names have a prefix that a wrapper added."""
    findings = subject.load_diff.findings if subject.load_diff else ()
    prefix_findings = [item for item in findings if item.rule == WRAPPER_PREFIX.name]
    loaded_sections = _list_loaded_sections(subject) if prefix_findings else ()
    reported = {item.prefix for item in subject.load_diff.stripped} if subject.load_diff and prefix_findings else set()
    for section in subject.state.sections:
        if section not in loaded_sections and section not in subject.state.whole_modules:
            prefixed = _list_prefixed_names(subject, section)
            reported.update(item.extra for item in prefixed)
            if prefixed:
                yield convert_finding(_report_own_prefix(subject, section, prefixed))
    yield from map(convert_finding, prefix_findings)
    yield from _report_stripped_prefixes(subject, reported)


def _list_loaded_sections(subject: Subject) -> set[str]:
    return {
        change.before.section for change in (subject.load_diff.changes if subject.load_diff else ()) if change.before
    }


def _report_stripped_prefixes(subject: Subject, reported: Container[str]) -> Iterator[Issue]:
    """Yield an issue for each prefix stripped for the comparison: a note if only the reference has the prefix."""
    for stripped in subject.reference_diff.stripped if subject.reference_diff else ():
        if stripped.prefix not in reported:
            message = f"{stripped.describe()} for the comparison; a strict load_state_dict does not strip the prefix"
            yield Issue(message, severity=wrapper_prefix.cases["of the reference"] if stripped.is_before else None)


def _list_registered_names(subject: Subject) -> set[TensorKey]:
    pairs = [(change.before, change.after) for change in (subject.load_diff.changes if subject.load_diff else ())]
    return {row.key for row, class_row in pairs if row and class_row and row.fqn == class_row.fqn}


def _list_model_names(subject: Subject, section: str) -> list[str]:
    return [row.fqn for row in subject.state.tensors if row.section == section and row.kind in REGISTERED_KINDS]


def _list_prefixed_names(subject: Subject, section: str) -> list[PrefixedName]:
    """Return the names with a prefix that only wrappers use, except names that the class registers."""
    names = _list_model_names(subject, section)
    prefix = next((outer for outer in _WRAPPER_ONLY_PREFIXES if all(name.startswith(outer) for name in names)), "")
    registered = _list_registered_names(subject)
    return [
        PrefixedName(name, "", extra=extra)
        for name in names
        if (extra := prefix + _join_wrappers(name.removeprefix(prefix))) and (section, name) not in registered
    ]


def _report_own_prefix(subject: Subject, section: str, prefixed: Sequence[PrefixedName]) -> Finding:
    """Return the finding about a wrapper prefix in a section that is not loaded into a class."""
    return report_prefixes(
        prefixed,
        _list_model_names(subject, section),
        target=subject.target,
        state_dict=subject.state.find_state_dict(section),
        section_text="" if subject.state.sections == ("model",) else f" in section {section!r}",
        is_refused=False,
    )


def _join_wrappers(name: str) -> str:
    """Return the wrapper parts of a name as a prefix: `_orig_mod.` for `_orig_mod.fc.weight`."""
    parts = name.split(".")[:-1] if "_mod" in name else ()
    return "".join(f"{part}." for part in parts if part in WRAPPER_ATTRIBUTES)


@rule(Severity.WARNING)
def control_characters(subject: Subject) -> Iterator[Issue]:
    """A name contains invisible characters: control, bidirectional or zero-width characters, or a lone surrogate.

    Why: such a name can look like another name or be invisible. The name can also colour or overwrite lines in a
    terminal, add lines to a log, or reverse text.

    Example: `fc.weight` with an added zero-width space next to `fc.weight`; a name with a line break.

    Fix: rename the tensor, and ask where the file comes from.
    """
    for section in subject.state.sections:
        if escape(section) != section:
            message = f"section {quoting.quote(section)}: its name contains invisible characters"
            yield Issue(message, None, section, "rename the section")
    for tensor in () if subject.has_plain_names else subject.state.tensors:
        if escape(tensor.fqn) != tensor.fqn:
            message = (
                f"{escape(subject.name_of(tensor))}: its name contains invisible characters, shown here as escapes"
            )
            yield Issue(message, tensor.fqn, tensor.section, "rename the tensor")


RULES = (wrapper_prefix, control_characters, case_collision)
