"""Tensors whose bytes could not be read: no rule has judged their values, and so their target has failed.

That is no finding, which --ignore, a severity or a baseline could take back: what is not known of a checkpoint is no
property that it has, and what was not looked at has not passed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli.core.error_causes import group_by_cause
from statecli.core.errors import ChecksumMismatch, StateError
from statecli.core.state import Oddity, TensorInfo
from statecli.core.units import plural
from statecli.rules.rule import AuditRule
from statecli.rules.subject import Subject, needs_values

if TYPE_CHECKING:
    from statecli.values.summary import Facts

#: The rule that judges whether bytes are those that were saved: where they are not, it has judged them.
SUMS = ChecksumMismatch.rule
#: It judges values where they were read, and other things where they were not.
TOO = "broken-tie"
#: Why a rule about values that found nothing in such a target has not passed.
NOT_ALL = "not all of the values could be read"


def known(tensor: TensorInfo, facts: Facts, errors: Sequence[StateError]) -> Facts:
    """The facts of a tensor; none where its bytes are not those that were saved: they would be of other values."""
    if not errors or facts.damaged:
        return facts
    return replace(type(facts)(tensor.elements), digest=None, reason=str(errors[0]), damaged=True)


def found(subject: Subject, ran: Collection[AuditRule]) -> tuple[Oddity, ...]:
    """Each tensor that contradicts its file, or whose values one of the rules that ran could not judge, and why.

    Pickles that could not be read are told first.
    """
    pickles = (Oddity("unread", one) for one in (subject.unscanned,) if one)
    damaged = (Oddity("unread", one.damage, one.fqn) for one in subject.state.tensors if one.damage)
    judges = {rule.name for rule in ran if needs_values in rule.needs or rule.name == TOO}
    return (*pickles, *damaged, *_unjudged(subject, judges))


def _unjudged(subject: Subject, judges: set[str]) -> Iterator[Oddity]:
    damages = subject.damages or ((),) * len(subject.values or ())
    for tensor, facts, errors in zip(subject.state.tensors, subject.values or (), damages, strict=bool(subject.values)):
        is_judged = judges <= {SUMS} and (not judges or _are_sums(errors))
        if facts.damaged and not tensor.damage and not is_judged:
            yield Oddity("unread", _located(subject, tensor, facts.reason or ""), tensor.fqn)


def _are_sums(errors: Sequence[StateError]) -> bool:
    return bool(errors) and all(isinstance(error, ChecksumMismatch) for error in errors)


def _located(subject: Subject, tensor: TensorInfo, reason: str) -> str:
    """The reason behind file and tensor, which that of a worker that was killed does not name."""
    files = tuple(where.path for where in tensor.ranges if where.path)
    return reason if reason.startswith((subject.target, *files)) else f"{subject.target}: {tensor.fqn}: {reason}"


def told(unread: Sequence[Oddity]) -> str | None:
    """All of them in a line: the first cause, and how many tensors have others; None where there is none."""
    causes = group_by_cause([(one.fqn or "", one.message) for one in unread])
    rest = sum(count for _, count in causes[1:])
    more = f"; {plural(rest, 'other tensor')} could not be read either" if rest else ""
    return causes[0][0] + more if causes else None
