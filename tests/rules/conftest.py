"""What the tests of rules have in common: one audit of one target, and what a rule said of it."""

from __future__ import annotations

import pytest

from statecli.commands.audit.run import Request, audit
from statecli.targets.target_result import Status


@pytest.fixture
def run_rule():
    """`run_rule("nan", path, values=True)`: what that rule alone, which has run, says; options as in Request."""

    def run(rule, target, **options):
        targets = audit(Request((str(target),), select=(rule,), **options)).targets
        (result,) = (target for target in targets if target.status is not Status.SKIPPED)
        assert result.status is Status.AUDITED, result.reason
        assert result.ran == (rule,), result.skipped
        assert {finding.rule for finding in result.findings} <= {rule}
        return result.findings

    return run


@pytest.fixture
def list_fqns():
    """`list_fqns("missing-entry", path, model="net.py:Net")`: the FQNs that the rule names."""

    def names(rule, target, **options):
        result = audit(Request((str(target),), select=(rule,), **options)).targets[-1]
        assert result.status is Status.AUDITED, result.reason
        assert result.ran == (rule,), result.skipped
        return sorted(finding.fqn for finding in result.findings)

    return names
