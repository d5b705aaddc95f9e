"""The report of `statecli rules`: what the rules of an audit are; and one of them, explained."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from difflib import get_close_matches

from statecli.core.errors import UsageError
from statecli.core.finding import Severity
from statecli.core.units import plural
from statecli.report import Column, Group, Line, Page, Report, RuleText, Table, documents, rule_texts
from statecli.rules import RULES

MOODS = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: ""}
#: A line of text that is wider than this is hard to read, however wide the terminal.
WIDEST = 100


def every() -> tuple[RuleText, ...]:
    """The rules of an audit, in the order in which they run."""
    return tuple(map(rule_texts.text, RULES))


def named(name: str) -> RuleText:
    """The rule, or what another command calls so. Raises UsageError, with the near names, where there is none."""
    known = {rule.name: rule for rule in every()}
    for other, summary in rule_texts.TEXTS.items():
        known.setdefault(other, RuleText(other, Severity.ERROR, summary))
    if name not in known:
        near = get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "statecli rules lists them"
        raise UsageError(f"there is no rule {name!r}; {hint}")
    return known[name]


def of_rules(texts: Sequence[RuleText]) -> Report:
    """The rules as a list, for any output."""
    columns = (Column("rule"), Column("severity"))
    return Report(
        title="the rules of statecli audit",
        document=lambda: documents.of_rules(texts),
        table=lambda: Table(
            (*columns, Column("about"), Column("summary")),
            tuple((one.name, one.severity.value, one.about, one.summary) for one in texts),
            told=False,
        ),
        page=lambda: Page(
            subtitle=plural(len(texts), "rule"),
            columns=columns,
            groups=_groups(texts),
            totals=(),
        ),
        rules=lambda: tuple(texts),
    )


def _groups(texts: Sequence[RuleText]) -> tuple[Group, ...]:
    about: dict[str, list[Line]] = {}
    for one in texts:
        about.setdefault(one.about, []).append(Line((one.name, one.severity.value), one.summary, MOODS[one.severity]))
    return tuple(Group(name, plural(len(lines), "rule"), tuple(lines)) for name, lines in about.items())


def explained(rule: RuleText, width: int) -> str:
    """The whole explanation, each paragraph filled to the width; `Why`, `Example` and `Fix` stand out."""
    width = max(20, min(width, WIDEST))
    first, *rest = (rule.explanation or rule.summary).split("\n\n")
    parts = [f"{rule.name} ({rule.severity.value})", _filled(first, width, "")]
    return "\n\n".join((*parts, *(_filled(part, width, "  ") for part in rest))) + "\n"


def _filled(text: str, width: int, indent: str) -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
