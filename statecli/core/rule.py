"""Rule: a kind of finding, with its name, default severity and explanation. Commands build findings from rules.

`statecli.rules` joins the rules of all commands in one dictionary. A module that reports findings imports its rules
from a lower module, so listing a checkpoint does not import the rules of `audit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import UNSET, UnsetType

from statecli.core.finding import Finding, Severity, Wording
from statecli.core.model_state import Origin, Place
from statecli.core.severity import decide_severity

#: Former name of a rule by its present name. Fingerprints keep the former name; options, configurations and baselines
#: accept both names.
FORMER_NAMES: dict[str, str] = {
    "untied-by-move": "broken-tie",
    "untied-by-copy": "broken-tie",
    "frozen-updated": "frozen-changed",
    "inconsistent-module": "module-size-mismatch",
    "move-unknown": "cannot-tell",
    "other-way-to-load": "other-lines",
    "to-returns-no-model": "lost-by-move",
}


def list_present_names(former: str) -> list[str]:
    """Return the present names of the rules that were formerly reported as `former`."""
    return [present_name for present_name, name in FORMER_NAMES.items() if name == former]


class Rule(msgspec.Struct, frozen=True):
    """Kind of finding, with its explanation: an entry of `statecli rules`.

    Attributes:
        name: Name in findings, in the configuration and in `statecli rules NAME`.
        group: Group in the list of `statecli rules`; for a rule of `audit` its module.
        commands: Commands that report the rule.
        severity: Severity, unless the finding is a case in `cases`.
        summary: The reported problem, in one sentence.
        why: The consequence for the user.
        example: A reported case.
        fix: The remedy.
        cases: Severity of each case with another severity, by the name of the case. `core/severity.py` decides about
            tensors that are not registered or do not move.
        plugin: The module or file that defines an organisation's own rule, as the user named it.
        heading: Heading of several findings with one cause; "" for a heading made of the summary. The first `{}` is the
            number of tensors, the second the class or the options.
    """

    name: str
    group: str
    commands: tuple[str, ...]
    severity: Severity
    summary: str
    why: str
    example: str
    fix: str
    cases: Mapping[str, Severity] = {}
    plugin: str | None = None
    heading: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def explanation(self) -> str:
        """Summary and three labelled paragraphs (why, example, fix), as Markdown."""
        return f"{self.summary}\n\nWhy: {self.why}\n\nExample: {self.example}\n\nFix: {self.fix}"

    def finding(
        self,
        message: str | Wording,
        *,
        target: str,
        fqn: str | None = None,
        section: str | None = None,
        help: str | None = None,
        severity: Severity | None = None,
        configured: Severity | None = None,
        origin: Origin | UnsetType = UNSET,
        place: Place | UnsetType = UNSET,
        about: str | UnsetType = UNSET,
        content: str | UnsetType = UNSET,
    ) -> Finding:
        """Build a finding of this rule. Its severity is `configured`, else `severity`, else the default of the rule."""
        decided_severity = decide_severity(self.severity, severity, configured)
        text = message.message if isinstance(message, Wording) else message
        finding = Finding(self.name, decided_severity, text, target, fqn, help, section, origin, place, about, content)
        return finding.reword(message) if isinstance(message, Wording) else finding


def find_rules(name: str, known_rules: Iterable[Rule], command: str) -> list[Rule]:
    """Return the rule or the rules of the group with this name. Otherwise return the rules that formerly had the name.

    A name with both meanings stands for the rules that the command reports.
    """
    known_rules, present_names = tuple(known_rules), list_present_names(name)
    matching_rules = [rule for rule in known_rules if name in (rule.name, rule.group)]
    renamed_rules = [rule for rule in known_rules if rule.name in present_names]
    is_renamed = any(command in rule.commands for rule in renamed_rules)
    return (
        renamed_rules
        if is_renamed and not any(command in rule.commands for rule in matching_rules)
        else matching_rules or renamed_rules
    )
