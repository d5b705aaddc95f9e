"""What a project's policy asks for beyond what other rules judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from statecli.commands.diff.result import Change, Status
from statecli.core.finding import Severity
from statecli.core.selection import glob_names, matches_any
from statecli.core.state import Scalar
from statecli.rules.rule import Found, rule
from statecli.rules.subject import Subject, a_file

_SAVE = "save it with the checkpoint, beside the tensors or in __metadata__"
_GLOB = "correct the glob; it is of full names, as statecli inspect shows them"


def required_metadata(subject: Subject) -> str | None:
    """Needs `policy.require-metadata`."""
    return None if subject.policy.require_metadata else "no policy.require-metadata is configured"


def metadata(subject: Subject) -> str | None:
    """Needs what has metadata: the model's file, not that of an optimizer beside it."""
    return subject.beside or (a_file(subject) and "a class has no metadata: audit a checkpoint")


def what_must_change(subject: Subject) -> str | None:
    """Needs `policy.must-change` and a reference."""
    return _of_reference(subject, bool(subject.policy.must_change), "policy.must-change")


def what_must_not_change(subject: Subject) -> str | None:
    """Needs `policy.must-not-change` and a reference."""
    return _of_reference(subject, bool(subject.policy.must_not_change), "policy.must-not-change")


def _of_reference(subject: Subject, configured: bool, key: str) -> str | None:
    if not configured:
        return f"no {key} is configured"
    if subject.reference is not None:
        return None
    if subject.beside is not None:
        return subject.beside
    if subject.state.traits.is_class:
        return "a class has the values of its constructor: audit a checkpoint"
    return f"{key} holds against a checkpoint: configure policy.reference, or give --against"


def _inside(subject: Subject, glob: str) -> list[Change]:
    several = len(subject.state.sections) > 1
    changes = subject.reference.changes if subject.reference else ()
    return [one for one in changes if matches_any(glob_names(one.fqn, one.section, by_section=several), (glob,))]


@rule(Severity.ERROR, required_metadata, metadata)
def missing_metadata(subject: Subject) -> Iterator[Found]:
    """A key that the policy requires is not in the checkpoint's metadata, or has no value.

    Why: without the epoch, the commit or the licence that a registry asks for, nobody can say later what this is.

    Example: `policy.require-metadata = ["license"]`, and `__metadata__` has no `license`.

    Fix: `safetensors.torch.save_file(state, path, metadata={"license": "apache-2.0"})`.
    """
    for key in subject.policy.require_metadata:
        meant = _meant(key, subject.everything.metadata.values)
        if not meant:
            yield Found(f"{key}: the policy requires it, and the checkpoint's metadata does not have it", help=_SAVE)
        elif all(value is None or (isinstance(value, str) and not value.strip()) for value in meant.values()):
            message = f"{key}: the policy requires it, and {next(iter(meant))} has no value in the metadata"
            yield Found(message, help=_SAVE)


def _meant(key: str, metadata: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """What the key names; a plain name that is not there is that of a deeper setting (`epoch` of `args.epoch`)."""
    if key in metadata:
        return {key: metadata[key]}
    return {} if "." in key else {name: value for name, value in metadata.items() if name.endswith(f".{key}")}


@rule(Severity.ERROR, what_must_change)
def unchanged_tensor(subject: Subject) -> Iterator[Found]:
    """What the policy says must change is what it was in the reference.

    Why: a layer that should have been trained and was not: frozen by mistake, left out of the optimizer, not saved.

    Example: `policy.must-change = ["head.*"]` after fine-tuning a head.

    Fix: find out with `statecli verify --check step` whether it gets a gradient and an update.
    """
    for glob in subject.policy.must_change:
        inside = _inside(subject, glob)
        if not inside:
            yield Found(f"policy.must-change {glob!r} matches nothing here or in the reference", help=_GLOB)
        if inside and not any(_differs(one) for one in inside):
            named = inside[0].fqn if len(inside) == 1 else None
            unknown = next((f"; {one.fqn}: {one.not_compared}" for one in inside if one.not_compared), "")
            message = f"policy.must-change {glob!r}: {_unchanged(len(inside), known=not unknown)}{unknown}"
            yield Found(message, named, help="see whether it is trained: statecli verify --check step")


def _unchanged(count: int, *, known: bool) -> str:
    if count == 1:
        return "its only tensor has not changed" if known else "its only tensor is not known to have changed"
    return f"none of its {count} tensors {'has' if known else 'is known to have'} changed"


@rule(Severity.ERROR, what_must_not_change)
def changed_tensor(subject: Subject) -> Iterator[Found]:
    """What the policy says must not change is not what it was in the reference.

    Why: a backbone that was to be frozen has drifted, or was saved from another run.

    Example: `policy.must-not-change = ["encoder.*"]` after training a head on it.

    Fix: `requires_grad_(False)` and `eval()` for it; BatchNorm changes its statistics in training mode without either.
    """
    for glob in subject.policy.must_not_change:
        inside = _inside(subject, glob)
        if not inside:
            yield Found(f"policy.must-not-change {glob!r} matches nothing here or in the reference", help=_GLOB)
        for one in inside:
            if one.not_compared is not None:
                message = f"{one.fqn}: cannot tell whether it changed ({one.not_compared}), and policy.must-not-change"
                yield Found(
                    f"{message} {glob!r}", one.fqn, one.section, "compare it by hand, or leave it out of the glob"
                )
            elif one.status is not Status.IDENTICAL:
                message = f"{one.fqn}: {_how(one)}, and policy.must-not-change {glob!r}"
                yield Found(message, one.fqn, one.section, "freeze it with requires_grad_(False) and eval()")


def _differs(change: Change) -> bool:
    return change.status is not Status.IDENTICAL and change.not_compared is None


def _how(change: Change) -> str:
    fields = ", ".join(field.value for field in change.fields)
    return f"{change.status.value} ({fields})" if fields else change.status.value


RULES = (missing_metadata, unchanged_tensor, changed_tensor)
