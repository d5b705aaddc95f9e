"""What is wrong with names."""

from __future__ import annotations

from collections.abc import Iterator

from statecli.auditing.rule import Found, rule
from statecli.auditing.subject import Subject
from statecli.finding import Severity


@rule(Severity.WARNING)
def case_collision(subject: Subject) -> Iterator[Found]:
    """Two tensors' names differ in upper and lower case alone.

    Why: files on macOS and Windows, and tools that fold case, take the one for the other: one of the two is lost
    without a word when the checkpoint is unpacked or converted.

    Example: `head.Weight` beside `head.weight`.

    Fix: rename one of them where it is registered, and save again.
    """
    known: dict[tuple[str, str], str] = {}
    for tensor in subject.state.tensors:
        other = known.setdefault((tensor.section, tensor.fqn.casefold()), tensor.fqn)
        if other != tensor.fqn:
            message = f"{subject.called(tensor)}: differs from {other} in case alone"
            yield Found(message, tensor.fqn, tensor.section, "rename one of the two")


RULES = (case_collision,)
