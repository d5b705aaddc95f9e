"""Rules about the lock file: tensors and settings that differ from the lock, and values missing in the lock."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from statecli.commands.diff.settings import describe_setting_change
from statecli.commands.lock.companion_files import CompanionChanges, FileChange
from statecli.commands.lock.compare_lock import SECTION_NOT_IN_LOCK, LockMatch
from statecli.commands.lock.lock_file import LockedTensor
from statecli.commands.lock.rules import VALUES_NOT_LOCKED
from statecli.core.finding import Severity, Wording
from statecli.core.model_state import TensorInfo
from statecli.core.units import format_fqn, join_names
from statecli.rules.audit_rule import Issue, compute_text_digest, rule, rule_for
from statecli.rules.audit_subject import Subject, needs_lock, needs_locked_companions

_RESTORE_FILE = "restore the file, or run `statecli lock` again if the change is intended"


@rule(Severity.ERROR, needs_lock, heading="{} tensors do not match the lock")
def lock_mismatch(subject: Subject) -> Iterator[Issue]:
    """A tensor is not in the lock file, is missing from the checkpoint, or differs from the lock file.

    Why: a lock records the values, dtype, shape, kind and requires_grad of the reviewed weights. A checkpoint still
    loads after further training, a loss of precision in a conversion or a manipulation, or if it comes from another
    run.

    Example: `encoder.weight` is frozen, but has another digest after a step of fine-tuning.

    Fix: restore the locked checkpoint. If the change is intended, run `statecli lock` again and have the changed lines
    of the lock file reviewed.
    """
    for pair in subject.lock or ():
        row = pair.tensor or pair.locked
        if row is None or pair.agrees or pair.differ == SECTION_NOT_IN_LOCK:
            continue
        name = row.fqn if len(subject.state.sections) < 2 else f"{row.section}.{row.fqn}"
        wording = Wording(_describe_pair(pair), name, short=_describe_only_values(pair))
        content = _compute_content(pair)
        yield Issue(wording.message, row.fqn, row.section, _RESTORE_FILE, content=content, wording=wording)


@rule(Severity.ERROR, needs_lock, needs_locked_companions)
def settings_mismatch(subject: Subject) -> Iterator[Issue]:
    """A setting, or a file of the model such as its configuration or tokenizer, differs from the lock.

    Why: the same weights give other results with another `rms_norm_eps`, tokenizer or `modeling_*.py`. A lock of the
    tensors alone does not detect the change.

    Example: `rms_norm_eps` in `config.json` was 1e-06 when the folder was locked, and is 0.1 now.

    Fix: restore the locked file. If the change is intended, run `statecli lock` again and have the changed lines of the
    lock file reviewed. To compare only tensors, use `--tensors-only`.
    """
    changes = subject.companions or CompanionChanges()
    for setting in changes.settings:
        message = f"setting differs from the lock: {describe_setting_change(setting)}"
        yield Issue(message, help=_RESTORE_FILE, content=_digest_values(setting))
    for file in changes.files:
        message = f"{format_fqn(file.name)}: {_describe_file(file)}"
        yield Issue(message, help=_RESTORE_FILE, content=_digest_values(file))


@rule_for(VALUES_NOT_LOCKED, needs_lock)
def values_not_locked(subject: Subject) -> Iterator[Issue]:
    """Yield an issue if the lock has no digest for tensors that have values."""
    pairs = [(pair.locked, pair.tensor) for pair in subject.lock or () if pair.locked and pair.tensor]
    unlocked_names = [
        subject.name_of(tensor) for line, tensor in pairs if line.digest is None and (tensor.data or tensor.parts)
    ]
    if unlocked_names:
        count = f"{len(unlocked_names):,} of {len(pairs):,} tensors"
        message = f"the values of {count} are not locked: {join_names(unlocked_names)}"
        yield Issue(message, help="run `statecli lock` on the checkpoint again")


def _describe_file(change: FileChange) -> str:
    if change.locked is None:
        return "not in the lock"
    if change.actual is None:
        return "in the lock but missing"
    return f"content differs from the lock: digest {change.actual[:12]}…, but the lock has {change.locked[:12]}…"


def _compute_content(pair: LockMatch) -> str | None:
    """Return a digest of a tensor's differences from the lock and of its actual values.

    None if it has no values; "" if its values have no digest, so that a baseline never accepts the finding.
    """
    line = pair.locked
    if pair.digest:
        sides = [(field, getattr(line, field, None), getattr(pair.tensor, field, None)) for field in pair.differ]
        return compute_text_digest(repr(msgspec.to_builtins((sides, line and line.digest, pair.digest))))
    return "" if pair.tensor is not None and (pair.tensor.data or pair.tensor.parts) else None


def _digest_values(change: msgspec.Struct) -> str:
    """Return a digest of the values without field names, so that a renamed field does not change a baseline."""
    return compute_text_digest(repr(msgspec.structs.astuple(change)))


def _describe_pair(pair: LockMatch) -> str:
    tensor, line = pair.tensor, pair.locked
    if line is None:
        return "not in the lock"
    if tensor is None:
        return f"missing from the checkpoint; the lock has {line.dtype} {_format_shape(line)}"
    return "; ".join(_describe_field(field, tensor, line, pair.digest) for field in pair.differ)


def _describe_only_values(pair: LockMatch) -> str | None:
    """Describe a difference in values as a line below the rule's heading; None if other fields differ too."""
    if pair.locked is None or pair.digest is None or pair.differ != ("values",):
        return None
    return f"values differ: {_describe_digests(pair.locked, pair.digest)}"


def _describe_digests(line: LockedTensor, digest: str) -> str:
    return f"digest {digest[:12]}…, but the lock has {str(line.digest)[:12]}…"


def _describe_field(field: str, tensor: TensorInfo, line: LockedTensor, digest: str | None) -> str:
    if field == "values" and digest is None:
        return f"values cannot be read: {tensor.damage or 'they are not in the file'}"
    if field == "values":
        return f"values differ from the lock: {_describe_digests(line, str(digest))}"
    if field == "shape":
        return f"shape is {_format_shape(tensor)}, but the lock has {_format_shape(line)}"
    if field == "kind":
        return f"kind is {tensor.kind.value}, but the lock has {line.kind.value if line.kind else None}"
    if field == "requires_grad":
        return f"requires_grad is {tensor.requires_grad}, but the lock has {line.requires_grad}"
    return f"dtype is {tensor.dtype}, but the lock has {line.dtype}"


def _format_shape(tensor: TensorInfo | LockedTensor) -> str:
    return "unknown" if tensor.shape is None else str(list(tensor.shape))


RULES = (lock_mismatch, settings_mismatch, values_not_locked)
