"""Audits made by hand, for the tests of what is said of them."""

from __future__ import annotations

from statecli import render
from statecli.commands.audit.result import Audit
from statecli.core.finding import Finding, Severity
from statecli.render import Look, Output
from statecli.report import View
from statecli.report.audit import of_audit
from statecli.targets.outcome import Accepted, Skipped, Status, Target

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def finding(rule="nan", severity=ERROR, target="a.pt", fqn="fc.weight", message=None, **facts):
    return Finding(rule, severity, message or f"{fqn}: is {rule}", target, fqn, **facts)


def target(name="a.pt", *findings, ran=("nan", "inf"), **facts):
    """One that was audited, its findings as of it."""
    return Target(name, Status.AUDITED, None, "torch-zip", 2, 64, findings, ran=ran, **facts)


def failed(name, reason="is empty"):
    return Target(name, Status.FAILED, f"{name}: {reason}")


def skipped(name, reason="is a text file"):
    return Target(name, Status.SKIPPED, reason)


def accepted(reason, *findings):
    return tuple(Accepted(one, reason) for one in findings)


def unheard(rule, reason):
    return Skipped(rule, reason)


class Sink:
    def __init__(self):
        self.parts = []
        self.text = self.parts.append

    def utf8(self, raw):
        self.parts.append(raw.decode("utf-8"))


def written(output, *targets, fail_on=WARNING, view=None, **look):
    """What the output has of an audit of these targets."""
    sink = Sink()
    report = of_audit(Audit(targets, fail_on), view or View())
    render.write(report, Output(output), sink, Look(**look))
    return "".join(sink.parts)
