"""Assertions for tests of models: the state follows the model, a step changes only some tensors, a load is complete.

    from statecli.testing import assert_state_follows

    def test_state():
        assert_state_follows(Net(), inputs="2x3", device="fake-cuda")

`assert_only_changed` compares a model with its state before, `assert_loaded` compares it with a checkpoint. The pytest
fixture `assert_state_follows` is the function of this name, without an import. Only a call imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import statecli
from statecli import render
from statecli.api import calls, errors
from statecli.api.calls import build_options
from statecli.api.rendered_results import build_report
from statecli.commands.diff.result import Field, Status, TransformationKind
from statecli.commands.verify.result import Verdict
from statecli.core.finding import Severity
from statecli.core.model_state import Kind
from statecli.core.units import join_names, plural
from statecli.report import View, verify
from statecli.requests.options import VerifyOptions

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

    from statecli import CheckName, KindName, LiveObject, SeverityName, Snapshot, Target
    from statecli.commands.diff.result import Change, Diff
    from statecli.commands.verify.result import Name, Verification
    from statecli.report import Report

__all__ = ["assert_loaded", "assert_only_changed", "assert_state_follows"]


def assert_state_follows(
    model: str | nn.Module,
    *,
    checks: Iterable[Name | CheckName] | CheckName | None = (),
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    optimizer: str | type[torch.optim.Optimizer] | None = None,
    inputs: Any = None,
    ignore: Iterable[str] | None = (),
    include: Iterable[str] | None = (),
    exclude: Iterable[str] | None = (),
    kind: Iterable[Kind | KindName] | KindName | None = (),
    config_json: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    fail_on: Severity | SeverityName = "warning",
) -> Verification:
    """Verify a model, and raise AssertionError if a check finds a problem with its tensors.

    The default of `fail_on` is "warning", and "error" on the command line: a test builds the model itself, so statecli
    cannot build it again to learn whether an unregistered value is random.

    Args:
        model: An nn.Module, or a spec such as "file.py:Class".
        checks: Checks to run, as in `statecli.verify`. A check that is named here must not be skipped.
        device: Device to move to, as in `statecli.verify`.
        dtype: Dtype to cast to.
        optimizer: Optimizer of the training step.
        inputs: Arguments of forward, as in `statecli.verify`. Without inputs some checks are skipped.
        ignore: Rules or rule groups that are not reported.
        include: Globs; only tensors whose name matches one are tested.
        exclude: Globs; tensors whose name matches one are left out.
        kind: Kinds to test, as in `statecli.inspect`.
        config_json: File with the settings of a class, as in `statecli.inspect`.
        trust_remote_code: Run the Python files of a checkpoint, as in `statecli.inspect`.
        fail_on: Lowest severity that fails: "note", "warning" or "error".

    Returns:
        The result of `statecli.verify`.

    Raises:
        AssertionError: A finding has the severity of `fail_on` or a higher one, a check is inconclusive, a check in
            `checks` was skipped, or all were. The message is the table of `statecli verify`.
        StateError: The model could not be tested.
    """
    arguments = dict(locals())
    del arguments["fail_on"]
    __tracebackhide__ = True  # pytest shows the caller's line
    requested = build_options(VerifyOptions, {"target": "", "check": checks}).check
    verification = statecli.verify(**arguments | {"checks": requested})
    message = describe_failure(verification, requested, Severity(fail_on))
    if message:
        raise AssertionError(message)
    return verification


def assert_only_changed(
    before: Target | Snapshot,
    after: Target | Snapshot,
    *globs: str,
    allow_unchanged: bool = False,
    exclude: Iterable[str] | None = (),
) -> Diff:
    """Raise AssertionError if a tensor changed whose name matches no glob, or if no tensor of a glob changed.

        before = statecli.Snapshot(model)
        train_step(model)
        assert_only_changed(before, model, "adapter.*")

    Any difference is a change: values, dtype, shape, an added or a removed tensor. Buffers count too: each forward in
    training mode changes the running statistics of BatchNorm.

    Args:
        before: Snapshot, live object, path, URL or spec, as in `statecli.diff`.
        after: The state to compare with `before`, in any of these forms.
        globs: Names of tensors that may change; without globs, no tensor may change.
        allow_unchanged: Do not require that a tensor of each glob changed.
        exclude: Globs; tensors whose name matches one are not compared.

    Returns:
        The result of `statecli.diff`.

    Raises:
        AssertionError: As described, or a tensor could not be compared. The message ends with the table of
            `statecli diff`.
        StateError: Nothing could be compared, or a glob matches no tensor.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    options = {"only": globs, "changed": () if allow_unchanged else globs, "exclude": exclude}
    names = {"only": "globs", "changed": "globs"}
    diff = errors.call(calls.diff, {"before": before, "after": after, **options}, names)
    problems = [finding.message for finding in diff.findings] + [pair.message for pair in diff.broken]
    if problems:
        message = _describe_diff_failure(diff, problems)
        raise AssertionError(message.replace("--may-change", "globs").replace("--must-change", "globs"))
    return diff


def assert_loaded(
    model: LiveObject, checkpoint: Target, *, exclude: Iterable[str] | None = (), map: Iterable[str] | None = ()
) -> Diff:
    """Raise AssertionError unless the model and the checkpoint have the same tensors, with the same values.

        model.load_state_dict(torch.load("net.pt"), strict=False)
        assert_loaded(model, "net.pt", exclude="head.*")  # the new head is not in the checkpoint

    `load_state_dict(strict=False)` ignores missing and unexpected keys silently. These tensors count as loaded:

    - a value cast to the dtype of the model, each value rounded to the nearest
    - a tensor that is missing in the checkpoint and shares its storage with a loaded one (tied weights)
    - a tensor whose name differs by the prefix of a wrapper (`module.`)

    The optimizer and the settings of a training checkpoint are not compared.

    Args:
        model: The model, or an optimizer for "train.pt#optimizer".
        checkpoint: What was loaded: a path, a URL, or a state_dict.
        exclude: Globs; tensors whose name matches one are not compared.
        map: "REGEX=REPLACEMENT" texts that rename the tensors of the checkpoint first.

    Returns:
        The result of `statecli.diff`.

    Raises:
        AssertionError: As described. The message lists missing and unexpected keys and other values, and the table.
        StateError: Nothing could be compared.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    diff = statecli.diff(
        checkpoint,
        model,
        map=map,
        exclude=exclude,
        ignore=("kind", "requires_grad", "device", "tying"),
        no_renames=False,
    )
    problems = describe_unloaded(diff)
    if problems:
        raise AssertionError(_describe_diff_failure(diff, problems))
    return diff


def describe_unloaded(diff: Diff) -> list[str]:
    """Return a line for each kind of difference between a checkpoint (before) and the model that loaded it (after)."""
    is_optimizer_only = all(change.kind is Kind.OPTIMIZER for change in diff.changes)
    changes = [c for c in diff.changes if is_optimizer_only or c.kind is not Kind.OPTIMIZER]
    loaded = {change.fqn for change in changes if _is_loaded(change)}
    kinds: dict[str, list[str]] = {"missing key": [], "unexpected key": [], "key": [], "tensor": []}
    for change in changes:
        if change.fqn in loaded:
            continue
        if change.status is Status.ADDED:
            ties = change.after.tied_to if change.after else ()
            if loaded.isdisjoint(ties):
                kinds["missing key"].append(change.fqn)
        elif change.status is Status.REMOVED:
            kinds["unexpected key"].append(change.fqn)
        elif change.status is Status.RENAMED:
            kinds["key"].append(f"{change.renamed_from} as {change.fqn}")
        else:
            kinds["tensor"].append(change.fqn)
    reasons = {
        "missing key": f"in the model and not in {diff.before.target}",
        "unexpected key": f"in {diff.before.target} and not in the model",
        "key": "loaded under a name that differs from the checkpoint",
        "tensor": "with other values, shapes or dtypes than the checkpoint",
    }
    lines = [
        f"{plural(len(names), kind)} {reasons[kind]}: {join_names(names, 5)}" for kind, names in kinds.items() if names
    ]
    return [*lines, *(pair.message for pair in diff.broken)]


def _is_loaded(change: Change) -> bool:
    """Return True for equal tensors, and for values cast to another dtype without an exception."""
    transformation = change.transformation
    is_cast = (
        transformation is not None and transformation.kind is TransformationKind.CAST and not transformation.exceptions
    )
    is_cast = is_cast or (change.fields == (Field.DTYPE,) and change.not_compared is None)
    return change.status is Status.IDENTICAL or (change.status is Status.CHANGED and is_cast)


def _describe_diff_failure(diff: Diff, problems: list[str]) -> str:
    """Return the problems, then the table that a terminal shows."""
    lines = problems[:_PROBLEM_LINES]
    if len(problems) > len(lines):
        lines.append(f"and {len(problems) - len(lines):,} more")
    return "\n".join([*lines, "", _format_table(build_report(diff))]).rstrip()


def describe_failure(verification: Verification, requested: Iterable[Name], fail_on: Severity) -> str:
    """Return the verdict and the table that a terminal shows; "" if no check failed or is inconclusive."""
    inconclusive = verify.list_inconclusive(verification, tuple(requested))
    failing = [finding for finding in verification.findings if finding.severity.is_at_least(fail_on)]
    bad = bool(failing) or any(check.verdict is Verdict.INCONCLUSIVE for check in verification.checks)
    if not (bad or inconclusive):
        return ""
    report = verify.build_verify_report(verification, View())
    verdict = f"{verification.state.target}: {report.page().verdict}"
    return "\n".join([verdict, "", _format_table(report), *(() if bad else inconclusive)]).rstrip()


#: Largest number of problems that a message lists.
_PROBLEM_LINES = 20
#: Columns of the table; pytest puts four in front of each line.
_TABLE_COLUMNS = 100


def _format_table(report: Report) -> str:
    options = render.RenderOptions(terminal=True, width=_TABLE_COLUMNS)
    return render.format_report(report, render.Output.TABLE, options)
