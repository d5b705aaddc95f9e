"""Hand-written diffs for the tests of their reports."""

from __future__ import annotations

import math

from statecli import render
from statecli.commands.diff.result import Change, Diff, Field, Status
from statecli.core.finding import Finding, Severity
from statecli.core.model_state import Kind, ModelState, TensorInfo
from statecli.render import Output, RenderOptions
from statecli.report.diff import build_diff_report
from statecli.report.diff_view import DiffView
from statecli.values.delta import Delta


def tensor(fqn, dtype="float32", shape=(4, 4), kind=Kind.PARAMETER, **facts):
    elements = math.prod(shape)
    return TensorInfo(fqn, dtype, shape, elements, elements * 4, kind=kind, **facts)


def delta(relative=0.001, *, elements=16, changed=3, max_abs=0.5, **facts):
    facts = {"mean_abs": 0.1, "l2": 0.7, "cosine": 0.99, "first": (0, 1), **facts}
    return Delta(elements, changed, max_abs, relative_l2=relative, **facts)


def nudge_tensor(fqn, relative=0.001, kind=Kind.PARAMETER, section="model", **facts):
    """Return a change of a tensor: only the values differ."""
    side = tensor(fqn, kind=kind, section=section)
    values = delta(relative, **facts)
    return Change(fqn, section, Status.CHANGED, kind, (Field.VALUES,), before=side, after=side, values=values)


def change_metadata(fqn, before, after, *fields, **facts):
    """Return a change of a tensor: the metadata differ."""
    return Change(fqn, "model", Status.CHANGED, after.kind, fields, before=before, after=after, **facts)


def keep_tensor(fqn, kind=Kind.PARAMETER, **facts):
    side = tensor(fqn, kind=kind)
    return Change(fqn, "model", Status.IDENTICAL, kind, before=side, after=side, **facts)


def rename_tensor(before, after):
    old, new = tensor(before), tensor(after)
    return Change(after, "model", Status.RENAMED, Kind.PARAMETER, renamed_from=before, before=old, after=new)


def add_tensor(fqn, kind=Kind.PARAMETER):
    return Change(fqn, "model", Status.ADDED, kind, after=tensor(fqn, kind=kind))


def remove_tensor(fqn, kind=Kind.PARAMETER):
    return Change(fqn, "model", Status.REMOVED, kind, before=tensor(fqn, kind=kind))


def diff(*changes, **facts):
    """Return a diff with a finding for each difference, as `compare` creates them, unless findings are given."""
    rows = [(change.status, change.fqn) for change in changes if change.status is not Status.IDENTICAL]
    rows += [("metadata", scalar.key) for scalar in facts.get("scalars", ())]
    findings = tuple(
        Finding(getattr(rule, "value", rule), Severity.ERROR, f"{fqn}: {rule}", "b", fqn) for rule, fqn in rows
    )
    before = ModelState("a.pt", "torch", tuple(change.before for change in changes if change.before))
    after = ModelState("b.pt", "safetensors", tuple(change.after for change in changes if change.after))
    return Diff(before, after, changes, **{"findings": findings, **facts})


def page(diff_result, **view):
    return build_diff_report(diff_result, DiffView(**view)).page()


def rows(diff_result, **view):
    """(cells, remark) of each line of the page, by group."""
    return {
        group.heading: [(line.cells, line.remark) for line in group.lines] for group in page(diff_result, **view).groups
    }


def render_diff(diff_result, output, *, width=80, terminal=True, **view):
    """Render the diff in an output format."""
    look = RenderOptions(terminal, width, False, view.pop("quiet", False))
    return render.format_report(build_diff_report(diff_result, DiffView(**view)), Output(output), look)
