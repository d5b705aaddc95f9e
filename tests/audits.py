"""Audits made by hand, for tests of their outputs."""

from __future__ import annotations

from statecli import render
from statecli.commands.audit.result import Audit
from statecli.core.finding import Finding, Severity
from statecli.render import Output, RenderOptions
from statecli.report import View
from statecli.report.audit import build_audit_report
from statecli.targets.target_result import Accepted, Skipped, TargetResult, TargetStatus

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def finding(rule="nan", severity=ERROR, target="a.pt", fqn="fc.weight", message=None, **facts):
    return Finding(rule, severity, message or f"{fqn}: is {rule}", target, fqn, **facts)


def target(name="a.pt", *findings, ran=("nan", "inf"), **facts):
    """Return an audited target with the given findings."""
    return TargetResult(name, TargetStatus.AUDITED, None, "torch-zip", 2, 64, findings, ran=ran, **facts)


def failed_target(name, reason="is empty"):
    return TargetResult(name, TargetStatus.FAILED, f"{name}: {reason}")


def skipped_target(name, reason="is a text file"):
    return TargetResult(name, TargetStatus.SKIPPED, reason)


def accept_findings(reason, *findings):
    return tuple(Accepted(finding, reason) for finding in findings)


def skipped_rule(rule, reason):
    return Skipped(rule, reason)


def render_audit(output, *targets, fail_on=WARNING, view=None, model=None, **options):
    """Return an audit of the targets, rendered in the output format."""
    report = build_audit_report(Audit(targets, fail_on, model=model), view or View())
    return render.format_report(report, Output(output), RenderOptions(**options))
