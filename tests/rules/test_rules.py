"""Every rule of `audit` is listed, and has a sample with a finding and a near miss without a finding."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from statecli import rules
from statecli.rules.audit_rule import AuditRule
from statecli.rules.dictionary import RULES

HERE = Path(__file__).parent
NAMES = {
    name
    for path in HERE.glob("test_*.py")
    for name in re.findall(r"^def (\w+)\(", path.read_text("utf-8"), re.MULTILINE)
}


def test_every_rule_in_the_folder_is_listed():
    """A rule missing from RULES would silently never run."""
    modules = [
        importlib.import_module(f"statecli.rules.{module.name}") for module in pkgutil.iter_modules(rules.__path__)
    ]
    defined_rules = [value for module in modules for value in vars(module).values() if isinstance(value, AuditRule)]
    assert {id(rule_) for rule_ in defined_rules} == {id(rule) for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("part", ["finds", "spares"])
def test_a_rule_has_a_sample_and_a_near_miss(part):
    """`test_RULE_finds_…` has a sample with a finding, `test_RULE_spares_…` a similar sample without a finding."""
    for rule in RULES:
        prefix = f"test_{rule.name.replace('-', '_')}_{part}_"
        assert any(name.startswith(prefix) for name in NAMES), prefix
