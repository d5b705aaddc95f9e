"""The dictionary of findings: every rule of every command, and the rules of `audit`.

Other commands define their rules in their own package or in `core`, so that a command imports only its own rules.
`tests/rules/test_dictionary.py` checks for missing rules.
"""

from __future__ import annotations

from statecli.commands.bisect import rules as bisect
from statecli.commands.diff import rules as diff
from statecli.commands.explain import rules as explain
from statecli.commands.fix import rules as fix
from statecli.commands.inspect import rules as inspect
from statecli.commands.lock import rules as locking
from statecli.commands.log import rules as logging
from statecli.commands.resume_check import rules as resume_check
from statecli.commands.verify import rules as verify
from statecli.core import load_rules, move_rules, output_rules
from statecli.core.rule import Rule
from statecli.rules import (
    against,
    audit_run,
    contents,
    gradients,
    layout,
    lock,
    model_code,
    module_sizes,
    names,
    pickles,
    placement,
    policy,
    registration,
    siblings,
    storage,
    values,
    weights,
)
from statecli.rules.audit_rule import AuditRule

#: Rules of `audit`, in the order of their list. A tuple, because an audit without a rule would pass if rules were
#: registered by imports and an import was missing.
RULES: tuple[AuditRule, ...] = (
    *registration.RULES,
    *against.RULES,
    *module_sizes.RULES,
    *gradients.RULES,
    *policy.RULES,
    *values.RULES,
    *weights.RULES,
    *siblings.RULES,
    *placement.RULES,
    *storage.RULES,
    *contents.RULES,
    *layout.RULES,
    *names.RULES,
    *pickles.RULES,
    *model_code.RULES,
    *lock.RULES,
)

_OTHERS = (
    *(*load_rules.RULES, *move_rules.RULES, *inspect.RULES, *diff.RULES, *explain.RULES, *verify.RULES, *locking.RULES),
    *(*fix.RULES, *logging.RULES, *bisect.RULES, *resume_check.RULES, *audit_run.RULES, *output_rules.RULES),
)
_OF_AUDIT: dict[str, Rule] = {rule.name: rule for rule in RULES}
#: Rule by name, of all commands, the rules of `audit` first. If `audit` shares a rule with another command, the entry
#: is the rule of `audit`.
DICTIONARY: dict[str, Rule] = _OF_AUDIT | {rule.name: rule for rule in _OTHERS} | _OF_AUDIT
