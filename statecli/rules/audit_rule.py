"""A rule of `audit`: an entry of the dictionary of findings, with a generator of findings about a target.

A rule never reads a file: readers have recorded oddities, and `Subject` has all contents of the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from statecli.core.finding import Finding, Severity, Wording
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Origin, Place, TensorInfo
from statecli.core.rule import Rule

if TYPE_CHECKING:
    from statecli.rules.audit_subject import Subject


class Issue(msgspec.Struct, frozen=True):
    """One result of a rule. `message` is one line with the tensor's name. `severity` None: the rule's default.

    `content` is a digest of the checked data, if the message does not show all of the data. A baseline accepts a
    finding only with the same content, or else with the same message. `wording` has the parts of the message, if they
    are known.
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
    wording: Wording | None = None


def report_tensor(
    subject: Subject,
    tensor: TensorInfo,
    text: str,
    help: str,
    severity: Severity | None = None,
    *,
    origin: Origin | None = None,
    place: Place | None = None,
) -> Issue:
    """Return an issue about a tensor. The message is the name of the tensor, then `text`."""
    message = f"{subject.name_of(tensor)}: {text}"
    return Issue(message, tensor.fqn, tensor.section, help, severity, origin, place)


def convert_finding(finding: Finding) -> Issue:
    """Convert a finding of another command's rule to an issue of this rule in `audit`."""
    origin = None if finding.origin is UNSET else finding.origin
    facts = finding.message, finding.fqn, finding.section, finding.help, finding.severity, origin
    return Issue(*facts, wording=finding.wording)


def compute_text_digest(text: str) -> str:
    """Return the SHA-256 of a text, as the content of an issue."""
    import hashlib  # loads OpenSSL, which most audits do not need

    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


#: Function that returns why a subject lacks data that a rule needs, with a short remedy; None if nothing is lacking.
Need = Callable[["Subject"], str | None]
Find = Callable[["Subject"], Iterator[Issue]]


class AuditRule(Rule, frozen=True, kw_only=True):
    """Rule of `audit`. `find` yields its issues. Each function in `needs` returns why a subject cannot be checked."""

    find: Find
    needs: tuple[Need, ...] = ()

    def why_not(self, subject: Subject) -> str | None:
        """Return why the rule cannot check this subject; None if it can."""
        return next((reason for need in self.needs if (reason := need(subject))), None)

    def build_finding(self, issue: Issue, target: str, configured: Severity | None = None) -> Finding:
        """Return the finding for an issue of the rule. `configured` is the severity in the user's configuration."""
        return self.finding(
            issue.wording or issue.message,
            target=target,
            fqn=issue.fqn,
            section=issue.section,
            help=issue.help,
            severity=issue.severity,
            configured=configured,
            origin=issue.origin or UNSET,
            place=issue.place or UNSET,
            about=issue.about or UNSET,
            content=UNSET if issue.content is None else issue.content,
        )


_EXPLANATION = compile_on_use(r"(.+?)\n\nWhy: (.+?)\n\nExample: (.+?)\n\nFix: (.+)", re.DOTALL)


def rule(
    severity: Severity,
    *needs: Need,
    commands: tuple[str, ...] = ("audit",),
    cases: Mapping[str, Severity] | None = None,
    heading: str = "",
) -> Callable[[Find], AuditRule]:
    """Turn a generator function into a rule with the function's name (with dashes) and the texts of its docstring.

    The docstring has a summary and three paragraphs, which begin with `Why: `, `Example: ` and `Fix: `, in this order.
    Raises ValueError for another docstring. `needs` are functions that return why a subject cannot be checked.
    `commands` report the rule. `cases` are the severities of cases with another severity, by their names. `heading` is
    the heading of several findings, see `Rule`.
    """

    def build(find: Find) -> AuditRule:
        name, group = find.__name__.strip("_").replace("_", "-"), find.__module__.rpartition(".")[2]
        explanation = _EXPLANATION.fullmatch(_dedent(find.__doc__ or ""))
        if explanation is None:
            form = "a summary, and then paragraphs that begin with 'Why: ', 'Example: ' and 'Fix: '"
            raise ValueError(f"the docstring of {find.__name__} must have {form}")
        summary, why, example, fix = explanation.groups()
        texts = (name, group, commands, severity, summary, why, example, fix, cases or {})
        return AuditRule(*texts, heading=heading, find=find, needs=needs)

    return build


def _dedent(docstring: str) -> str:
    """Return a docstring without the indentation of the source, as `inspect.cleandoc` does."""
    first, *lines = docstring.strip().splitlines() or [""]
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join([first, *(line[margin:] for line in lines)])


def rule_for(entry: Rule, *needs: Need) -> Callable[[Find], AuditRule]:
    """Return a decorator for a function with which `audit` reports findings of another command's rule."""

    def build(find: Find) -> AuditRule:
        return AuditRule(*msgspec.structs.astuple(entry), find=find, needs=needs)

    return build
