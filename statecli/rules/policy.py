"""Rules about the policy: required metadata, and tensors that must or must not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from statecli.commands.diff.result import Change, Status
from statecli.core.finding import Severity
from statecli.core.model_state import Scalar
from statecli.core.selection import glob_names, matches_any, suggest_glob
from statecli.rules.audit_rule import Issue, rule
from statecli.rules.audit_subject import Subject, needs_file

_SAVE = "save the key with the checkpoint, next to the tensors or in __metadata__"
_GLOB = "correct the glob: it must match full names, as `statecli inspect` shows them"


def needs_required_metadata(subject: Subject) -> str | None:
    """Return why no metadata is required; None if `policy.require-metadata` is configured."""
    return None if subject.policy.require_metadata else "policy.require-metadata is not configured"


def needs_metadata(subject: Subject) -> str | None:
    """Return why the target has no metadata; None for a file that contains a model."""
    return subject.not_compared_because or (needs_file(subject) and "a class has no metadata: audit a checkpoint")


def needs_must_change(subject: Subject) -> str | None:
    """Return why `policy.must-change` does not apply; None if both the policy and a reference are configured."""
    return _needs_policy_and_reference(subject, bool(subject.policy.must_change), "policy.must-change")


def needs_must_not_change(subject: Subject) -> str | None:
    """Return why `policy.must-not-change` does not apply; None if both the policy and a reference are configured."""
    return _needs_policy_and_reference(subject, bool(subject.policy.must_not_change), "policy.must-not-change")


def _needs_policy_and_reference(subject: Subject, configured: bool, key: str) -> str | None:
    if not configured:
        return f"{key} is not configured"
    if subject.reference_diff is not None:
        return None
    if subject.not_compared_because is not None:
        return subject.not_compared_because
    if subject.state.traits.is_class:
        return "a class has only initial values; audit a checkpoint"
    return f"{key} needs a reference checkpoint: configure policy.reference, or give --against"


def _select_changes(subject: Subject, glob: str) -> list[Change]:
    by_section = len(subject.state.sections) > 1
    changes = subject.reference_diff.changes if subject.reference_diff else ()
    return [
        change
        for change in changes
        if matches_any(glob_names(change.fqn, change.section, by_section=by_section), (glob,))
    ]


def _report_unmatched(key: str, glob: str, subject: Subject) -> Issue:
    names = [change.fqn for change in subject.reference_diff.changes] if subject.reference_diff else ()
    problem = f"{key} {glob!r} matches no tensor of the target or the reference"
    return Issue(problem + suggest_glob(glob, names), help=_GLOB)


@rule(Severity.ERROR, needs_required_metadata, needs_metadata)
def missing_metadata(subject: Subject) -> Iterator[Issue]:
    """A key required by the policy is not in the checkpoint's metadata, or has no value.

    Why: without the epoch, the commit or the licence required by a registry, users cannot identify the checkpoint
    later.

    Example: `policy.require-metadata = ["license"]`, and `__metadata__` has no `license`.

    Fix: `safetensors.torch.save_file(state, path, metadata={"license": "apache-2.0"})`.
    """
    for key in subject.policy.require_metadata:
        values = _select_settings(key, subject.full_state.metadata.values)
        if not values:
            message = f"{key}: required by policy.require-metadata, but missing from the checkpoint's metadata"
            yield Issue(message, help=_SAVE)
        elif all(value is None or (isinstance(value, str) and not value.strip()) for value in values.values()):
            message = f"{key}: required by policy.require-metadata, but {next(iter(values))} has no value"
            yield Issue(message, help=_SAVE)


def _select_settings(key: str, metadata: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the metadata that a key selects. `epoch` also selects `args.epoch` if the key `epoch` does not exist."""
    if key in metadata:
        return {key: metadata[key]}
    return {} if "." in key else {name: value for name, value in metadata.items() if name.endswith(f".{key}")}


@rule(Severity.ERROR, needs_must_change)
def unchanged_tensor(subject: Subject) -> Iterator[Issue]:
    """Tensors that must change according to the policy are equal to the reference.

    Why: a layer that should have been trained was not: the layer was frozen by mistake, left out of the optimizer, or
    not saved.

    Example: `policy.must-change = ["head.*"]` after fine-tuning a head.

    Fix: run `statecli verify --check step` to see whether the layer gets a gradient and an update.
    """
    for glob in subject.policy.must_change:
        changes = _select_changes(subject, glob)
        if not changes:
            yield _report_unmatched("policy.must-change", glob, subject)
        is_changed = any(change.status is not Status.IDENTICAL and change.not_compared is None for change in changes)
        if changes and not is_changed:
            named = changes[0].fqn if len(changes) == 1 else None
            not_compared = [f"{change.fqn}: {change.not_compared}" for change in changes if change.not_compared]
            unknown = f"; {len(not_compared):,} could not be compared: {not_compared[0]}" if not_compared else ""
            message = f"policy.must-change {glob!r}: no matching tensor changed ({len(changes):,} match){unknown}"
            help = "run `statecli verify --check step` to see whether the tensors are trained"
            yield Issue(message, named, help=help)


@rule(Severity.ERROR, needs_must_not_change)
def changed_tensor(subject: Subject) -> Iterator[Issue]:
    """Tensors that must not change according to the policy differ from the reference.

    Why: a backbone that should be frozen was trained, or comes from another run.

    Example: `policy.must-not-change = ["encoder.*"]` after training a head on the encoder.

    Fix: call `requires_grad_(False)` and `eval()` on the frozen part. In training mode, BatchNorm updates its
    statistics even if its parameters are frozen.
    """
    for glob in subject.policy.must_not_change:
        changes = _select_changes(subject, glob)
        if not changes:
            yield _report_unmatched("policy.must-not-change", glob, subject)
        for change in changes:
            if change.not_compared is not None:
                message = f"{change.fqn}: cannot check policy.must-not-change {glob!r}: {change.not_compared}"
                help = "compare the tensor by hand, or change the glob so that it does not match"
                yield Issue(message, change.fqn, change.section, help)
            elif change.status is not Status.IDENTICAL:
                message = f"{change.fqn}: {_describe_change(change)}, which policy.must-not-change {glob!r} forbids"
                help = "freeze the tensor with requires_grad_(False) and eval()"
                yield Issue(message, change.fqn, change.section, help)


def _describe_change(change: Change) -> str:
    fields = ", ".join(field.value for field in change.fields)
    return f"{change.status.value} ({fields})" if fields else change.status.value


RULES = (missing_metadata, unchanged_tensor, changed_tensor)
