"""Find tensors with unreadable bytes. No rule has checked their values, so the target has failed.

This is not a finding, because --ignore, a severity or a baseline must not accept unchecked values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli.core.error_causes import Failure, group_by_cause
from statecli.core.errors import ChecksumMismatch, StateError
from statecli.core.model_state import Oddity, TensorInfo
from statecli.core.units import plural
from statecli.rules.audit_rule import AuditRule
from statecli.rules.audit_subject import Subject, needs_values

if TYPE_CHECKING:
    from statecli.values.summary import Facts

#: Rule that compares bytes with checksums, and so checks values with a wrong checksum.
CHECKSUM_RULE = ChecksumMismatch.rule
#: Rule that needs no values, but compares values if they were read.
BROKEN_TIE_RULE = "broken-tie"
#: Reason why a rule without findings has not passed in a target with unreadable values.
NOT_ALL_READ = "some values could not be read"


def discard_corrupt_facts(tensor: TensorInfo, facts: Facts, errors: Sequence[StateError]) -> Facts:
    """Return the facts of a tensor, but without values if its bytes do not match its checksums."""
    if not errors or facts.damaged:
        return facts
    return replace(type(facts)(tensor.elements), digest=None, reason=str(errors[0]), damaged=True)


def list_unreadable(subject: Subject, ran: Collection[AuditRule]) -> tuple[Oddity, ...]:
    """Return a note for each damaged tensor, and for each tensor whose values a rule of this run could not check.

    Unreadable pickles come first.
    """
    pickles = (Oddity("unread", reason) for reason in (subject.pickles_unread_because,) if reason)
    damaged = (Oddity("unread", tensor.damage, tensor.fqn) for tensor in subject.state.tensors if tensor.damage)
    value_rules = {rule.name for rule in ran if needs_values in rule.needs or rule.name == BROKEN_TIE_RULE}
    return (*pickles, *damaged, *_iter_unchecked(subject, value_rules))


def _iter_unchecked(subject: Subject, value_rules: set[str]) -> Iterator[Oddity]:
    checksum_errors = subject.checksum_errors or ((),) * len(subject.values or ())
    for tensor, facts, errors in zip(
        subject.state.tensors, subject.values or (), checksum_errors, strict=bool(subject.values)
    ):
        is_checked = value_rules <= {CHECKSUM_RULE} and (not value_rules or _are_checksum_errors(errors))
        if facts.damaged and not tensor.damage and not is_checked:
            yield Oddity("unread", _add_location(subject, tensor, facts.reason or ""), tensor.fqn)


def _are_checksum_errors(errors: Sequence[StateError]) -> bool:
    return bool(errors) and all(isinstance(error, ChecksumMismatch) for error in errors)


def _add_location(subject: Subject, tensor: TensorInfo, reason: str) -> str:
    """Add the target and the tensor to a reason that does not name a file, such as `a worker was killed`."""
    paths = tuple(byte_range.path for byte_range in tensor.ranges if byte_range.path)
    return reason if reason.startswith((subject.target, *paths)) else f"{subject.target}: {tensor.fqn}: {reason}"


def summarize_reasons(notes: Sequence[Oddity]) -> str | None:
    """Return one line: the first reason, and the number of tensors with other reasons. Return None without notes."""
    groups = group_by_cause(Failure(note.fqn or "", note.message) for note in notes)
    other_count = sum(group.size for group in groups[1:])
    remainder_text = f"; and {plural(other_count, 'more tensor')} could not be read" if other_count else ""
    return groups[0].line + remainder_text if groups else None
