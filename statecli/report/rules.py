"""The report of `statecli rules`: a list of the rules of all commands, or the explanation of a rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from statecli.core.documentation import is_published, rule_url
from statecli.core.errors import UsageError, option
from statecli.core.finding import Severity
from statecli.core.rule import Rule, find_rules, list_present_names
from statecli.core.units import plural
from statecli.report import Group, Line, Page, Report, ReportColumn, RuleText, Table
from statecli.report.documents.rules import build_rules_document
from statecli.report.rule_texts import describe_rule, read_rule_texts

MOODS = {Severity.ERROR: "bad", Severity.WARNING: "warn", Severity.NOTE: ""}
#: Longest line of an explanation, because longer lines are hard to read on any terminal.
MAX_TEXT_WIDTH = 100


def list_rules(plugin_rules: Iterable[Rule] = ()) -> tuple[RuleText, ...]:
    """Return the rules of all commands: first those of `audit`, in running order, and last those of plugins."""
    return (*read_rule_texts().values(), *map(describe_rule, plugin_rules))


def explain_rule(name: str, rules: Sequence[RuleText]) -> RuleText:
    """Return the rule of this name. Raises UsageError, with similar names, for an unknown name."""
    from difflib import get_close_matches

    by_name = {rule.name: rule for rule in rules}
    possible_names = [name, *list_present_names(name)]
    text = next((by_name[word] for word in possible_names if word in by_name), None)
    if text is None:
        similar_names = get_close_matches(name.lower(), by_name, n=3, cutoff=0.75)
        list_hint = (
            f"run statecli rules for the list; add {option('--plugin', 'MODULE')} for the rules of a plugin; some "
            "notes do not come from a rule"
        )
        hint = f"did you mean {', '.join(similar_names)}?" if similar_names else list_hint
        raise UsageError(f"unknown rule {name!r}; {hint}")
    return text


def describe_former_name(name: str) -> str | None:
    """Return a warning if other rules were once reported as `name`, or None otherwise."""
    texts = read_rule_texts()
    renamed_rules = [texts[new] for new in list_present_names(name)]
    if not renamed_rules:
        return None
    reporters = dict.fromkeys(command for rule in renamed_rules for command in rule.commands)
    if name in texts:  # audit always reported these rules under their present names
        reporters.pop("audit", None)
    commands = " and ".join(reporters)
    new_names = " or ".join(rule.name for rule in renamed_rules)
    return f"{name}: findings of {commands} with this name are now called {new_names}"


def describe_former_names(names: Iterable[str], known_rules: Collection[Rule], command: str) -> str | None:
    """Return a warning about names of rules that the command has renamed, or None if all names are current."""
    former = [
        name
        for name in dict.fromkeys(names)
        if not any(name in (rule.name, rule.group) for rule in find_rules(name, known_rules, command))
    ]
    return "; ".join(filter(None, map(describe_former_name, former))) or None


def build_rules_report(texts: Sequence[RuleText]) -> Report:
    """Return the report that lists the rules."""
    columns = (ReportColumn("rule"), ReportColumn("severity"))
    return Report(
        title="the rules of statecli",
        document=lambda: build_rules_document(texts),
        table=lambda: Table(
            (*columns, ReportColumn("about"), ReportColumn("commands"), ReportColumn("summary")),
            tuple(
                (rule.name, rule.severity.value, rule.about, ", ".join(rule.commands), rule.summary) for rule in texts
            ),
            has_findings=False,
        ),
        page=lambda: Page(
            subtitle=plural(len(texts), "rule"),
            columns=(*columns, ReportColumn("commands")),
            groups=_build_groups(texts),
            totals=(),
        ),
        rules=lambda: tuple(texts),
    )


def _build_groups(texts: Sequence[RuleText]) -> tuple[Group, ...]:
    groups: dict[str, list[Line]] = {}
    for rule in texts:
        cells = (rule.name, rule.severity.value, ", ".join(rule.commands))
        groups.setdefault(rule.about, []).append(Line(cells, rule.summary, MOODS[rule.severity]))
    return tuple(Group(name, plural(len(lines), "rule"), tuple(lines)) for name, lines in groups.items())


def format_explanation(rule: RuleText, width: int) -> str:
    """Format the whole explanation, wrapped at the width. The words `Why`, `Example` and `Fix` stand out.

    The last line is the address of the rule's page, if the site is published; a rule of a plugin has no page.
    """
    width = max(20, min(width, MAX_TEXT_WIDTH))
    first, *paragraphs = rule.explanation.split("\n\n")
    heading = f"{rule.name} ({rule.severity.value})\nreported by {', '.join(rule.commands)}"
    parts = [_fill(first, width, ""), *(_fill(part, width, "  ") for part in paragraphs)]
    page = [rule_url(rule.name)] if rule.plugin is None and is_published() else []
    return "\n\n".join((heading, *parts, *page)) + "\n"


def _fill(text: str, width: int, indent: str) -> str:
    import textwrap

    words = " ".join(text.split())
    return textwrap.fill(words, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
