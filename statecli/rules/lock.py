"""Rules about the lock file: tensors and settings that differ from it, and values that it does not cover."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from statecli.commands.diff.settings import describe_setting_change
from statecli.commands.lock.companion_files import CompanionChanges, FileChange
from statecli.commands.lock.compare_lock import OTHER_SECTION, LockMatch
from statecli.commands.lock.lock_file import LockedTensor
from statecli.commands.lock.rules import VALUES_NOT_LOCKED
from statecli.core.finding import Severity
from statecli.core.state import TensorInfo
from statecli.core.units import format_fqn, join_names
from statecli.rules.rule import Issue, judges, rule
from statecli.rules.subject import Subject, needs_lock, needs_locked_companions


@rule(Severity.ERROR, needs_lock)
def lock_mismatch(subject: Subject) -> Iterator[Issue]:
    """A tensor is not what the lock file says: it moved, changed its dtype, shape, kind or requires_grad, came or went.

    Why: a lock is a promise that these are the weights that were reviewed. A checkpoint that was trained further,
    converted with a loss, taken from another run or tampered with loads as well as the right one.

    Example: `encoder.weight` was fine-tuned by one step although it is frozen: its digest is another.

    Fix: restore the checkpoint that was locked; if the change was meant, run `statecli lock` again and have the lock
    file's lines reviewed.
    """
    for pair in subject.lock or ():
        shown = pair.tensor or pair.locked
        agrees = pair.differ == () and pair.tensor is not None and pair.locked is not None
        if shown is None or agrees or pair.differ == OTHER_SECTION:
            continue
        name = shown.fqn if len(subject.state.sections) < 2 else f"{shown.section}.{shown.fqn}"
        help = "restore it; if it was meant to change, lock again"
        yield Issue(f"{name}: {_describe_pair(pair)}", shown.fqn, shown.section, help, content=_compute_content(pair))
    beside = {pair.tensor.section: None for pair in subject.lock or () if pair.tensor and pair.differ == OTHER_SECTION}
    if beside:
        message = f"{join_names(tuple(beside))}: of no model and not in the lock, which has no such section"
        yield Issue(message, severity=Severity.NOTE)


@rule(Severity.ERROR, needs_lock, needs_locked_companions)
def settings_mismatch(subject: Subject) -> Iterator[Issue]:
    """A setting, or a file next to the weights that changes the model, differs from the lock.

    Why: the same weights compute something else with another `rms_norm_eps`, tokenizer or `modeling_*.py`. A lock that
    holds the tensors alone passes such a change.

    Example: `rms_norm_eps` in `config.json` was 1e-06 when the folder was locked, and is 0.1 now.

    Fix: restore the file that was locked; if the change is intended, run `statecli lock` again and have the lock file's
    lines reviewed. `--weights-only` compares tensors only.
    """
    changes = subject.companions or CompanionChanges()
    help = "restore it, or run `statecli lock` again if the change is intended"
    for setting in changes.settings:
        yield Issue(
            f"setting differs from the lock: {describe_setting_change(setting)}",
            help=help,
            content=_sha256(repr(setting)),
        )
    for file in changes.files:
        yield Issue(f"{format_fqn(file.name)}: {_describe_file(file)}", help=help, content=_sha256(repr(file)))


@judges(VALUES_NOT_LOCKED, needs_lock)
def values_not_locked(subject: Subject) -> Iterator[Issue]:
    """Yield a result if the lock has no digest of tensors that have values."""
    pairs = [(pair.locked, pair.tensor) for pair in subject.lock or () if pair.locked and pair.tensor]
    free = [subject.name_of(tensor) for line, tensor in pairs if line.digest is None and (tensor.data or tensor.parts)]
    if free:
        message = f"the values of {len(free):,} of {len(pairs):,} tensors are not locked: {join_names(free)}"
        yield Issue(message, help="lock the checkpoint again")


def _describe_file(change: FileChange) -> str:
    if change.locked is None:
        return "is not in the lock"
    if change.found is None:
        return "is in the lock and is missing"
    return f"content differs from the lock (digest {change.found[:12]}…, expected {change.locked[:12]}…)"


def _compute_content(pair: LockMatch) -> str | None:
    """Return a digest of what differs from the lock, with the values that were found.

    None without values, and "" for values without a digest: nothing accepts them, because any values would pass.
    """
    if pair.digest:
        return _sha256(f"{_describe_pair(pair)}; {pair.digest}")
    return "" if pair.tensor is not None and (pair.tensor.data or pair.tensor.parts) else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _describe_pair(pair: LockMatch) -> str:
    tensor, line = pair.tensor, pair.locked
    if line is None:
        return "is not in the lock"
    if tensor is None:
        return f"is missing, locked as {line.dtype} {_format_shape(line)}"
    return "; ".join(_describe_field(field, tensor, line, pair.digest) for field in pair.differ)


def _describe_field(field: str, tensor: TensorInfo, line: LockedTensor, digest: str | None) -> str:
    if field == "values" and digest is None:
        return f"its values cannot be read: {tensor.damage or 'they are not in the file'}"
    if field == "values":
        actual, expected = (str(text)[:12] for text in (digest, line.digest))
        return f"its values are not those that were locked (digest {actual}…, not {expected}…)"
    if field == "shape":
        return f"has shape {_format_shape(tensor)}, locked with {_format_shape(line)}"
    if field == "kind":
        return f"is of kind {tensor.kind.value}, locked as {line.kind.value if line.kind else None}"
    if field == "requires_grad":
        return "requires grad, locked as frozen" if tensor.requires_grad else "is frozen, locked as requiring grad"
    return f"is {tensor.dtype}, locked as {line.dtype}"


def _format_shape(tensor: TensorInfo | LockedTensor) -> str:
    return "unknown" if tensor.shape is None else str(list(tensor.shape))


RULES = (lock_mismatch, settings_mismatch, values_not_locked)
