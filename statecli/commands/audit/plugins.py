"""Plugins of an audit: modules with an organisation's own rules, in addition to the rules of statecli.

Plugins are values of a run, not of a registry: two calls of the Python API do not share plugins.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from statecli.core.rule import Rule
from statecli.rules.audit_rule import AuditRule
from statecli.rules.dictionary import RULES


class Plugin(msgspec.Struct, frozen=True):
    """A module with rules: the name that the user typed or configured, and the rules in the order of the module."""

    name: str
    rules: tuple[AuditRule, ...]


class PluginRequest(msgspec.Struct, frozen=True):
    """Plugins that a run requests, and the facts that decide whether each plugin may be imported.

    Attributes:
        typed: Modules and files typed by the user.
        configured: Modules named by the configuration.
        config_path: The file of the configuration.
        is_judged: Whether the configuration may be from the author of a target.
    """

    typed: tuple[str, ...] = ()
    configured: tuple[str, ...] = ()
    config_path: str = ""
    is_judged: bool = False


def join_rules(plugins: Iterable[Plugin]) -> tuple[AuditRule, ...]:
    """Return the rules of statecli, and then the rules of the plugins."""
    return (*RULES, *(rule for plugin in plugins for rule in plugin.rules))


def list_entries(plugins: Iterable[Plugin]) -> tuple[Rule, ...]:
    """Return the rules of the plugins as plain `Rule` objects, as `statecli rules` lists them."""
    fields = Rule.__struct_fields__
    return tuple(Rule(*(getattr(rule, field) for field in fields)) for plugin in plugins for rule in plugin.rules)
