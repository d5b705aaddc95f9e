"""What a rule is: a name for what it flags, how bad that is, what it needs to judge, and a generator of findings.

A rule never reads a file: readers have recorded what is odd, and `Subject` has all that was read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from statecli.core.finding import Severity
from statecli.core.state import Origin, Place

if TYPE_CHECKING:
    from statecli.rules.subject import Subject


class Found(msgspec.Struct, frozen=True):
    """What a rule says: `message` is one line that names the tensor; `severity` None is the rule's own.

    `content` is a digest of what the rule judged, where the message does not say all of it. A baseline accepts a
    finding only with the same content, or else with the same message.
    """

    message: str
    fqn: str | None = None
    section: str | None = None
    help: str | None = None
    severity: Severity | None = None
    origin: Origin | None = None
    place: Place | None = None
    about: str | None = None
    content: str | None = None


#: Why a subject lacks what a rule needs, in a few words with what to do; None where it has it.
Need = Callable[["Subject"], str | None]


class Rule(msgspec.Struct, frozen=True):
    """`about` is the module that has it (`storage`), `explanation` its docstring: what, why, example, fix."""

    name: str
    about: str
    severity: Severity
    explanation: str
    find: Callable[[Subject], Iterator[Found]]
    needs: tuple[Need, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of the explanation."""
        return self.explanation.partition("\n")[0]

    def why_not(self, subject: Subject) -> str | None:
        """Why it cannot judge this subject; None where it can."""
        return next((reason for need in self.needs if (reason := need(subject))), None)


def rule(severity: Severity, *needs: Need) -> Callable[[Callable[[Subject], Iterator[Found]]], Rule]:
    """Makes a `Rule` of a generator function: its name with dashes is the rule's, its docstring the explanation."""

    def made(find: Callable[[Subject], Iterator[Found]]) -> Rule:
        name, about = find.__name__.strip("_").replace("_", "-"), find.__module__.rpartition(".")[2]
        return Rule(name, about, severity, inspect.cleandoc(find.__doc__ or ""), find, needs)

    return made
