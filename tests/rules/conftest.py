"""Fixtures for the tests of rules: audit a single target with a single rule and return the findings."""

from __future__ import annotations

import pytest
import torch

from statecli.commands.audit.run import Request, audit
from statecli.targets.target_result import TargetStatus


@pytest.fixture
def run_rule():
    """`run_rule("nan", path, values=True)` runs only this rule and returns its findings; options as in Request."""

    def run(rule, target, **options):
        targets = audit(Request((str(target),), select=(rule,), **options)).targets
        (result,) = (target for target in targets if target.status is not TargetStatus.SKIPPED)
        assert result.status is TargetStatus.AUDITED, result.reason
        assert result.ran == (rule,), result.skipped
        assert {finding.rule for finding in result.findings} <= {rule}
        return result.findings

    return run


@pytest.fixture
def list_fqns():
    """`list_fqns("missing-entry", path, model="net.py:Net")` returns the sorted FQNs of the rule's findings."""

    def names(rule, target, **options):
        result = audit(Request((str(target),), select=(rule,), **options)).targets[-1]
        assert result.status is TargetStatus.AUDITED, result.reason
        assert result.ran == (rule,), result.skipped
        return sorted(finding.fqn for finding in result.findings)

    return names


@pytest.fixture
def save_checkpoint(tmp_path):
    """`save_checkpoint(state, "b.pt")` saves with torch and returns the path; options as in torch.save."""

    def save(state, name="a.pt", **options):
        torch.save(state, tmp_path / name, **options)
        return tmp_path / name

    return save
