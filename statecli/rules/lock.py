"""What is no longer as it was locked."""

from __future__ import annotations

from collections.abc import Iterator

from statecli.auditing.rule import Found, rule
from statecli.auditing.subject import Subject, a_lock
from statecli.finding import Severity
from statecli.locking.file import LockedTensor
from statecli.locking.holding import Held
from statecli.state import TensorInfo


@rule(Severity.ERROR, a_lock)
def lock_mismatch(subject: Subject) -> Iterator[Found]:
    """A tensor is not what the lock file says: it moved, changed its dtype, shape, kind or requires_grad, came or went.

    Why: a lock is a promise that these are the weights that were reviewed. A checkpoint that was trained further,
    converted with a loss, taken from another run or tampered with loads as well as the right one.

    Example: `encoder.weight` was fine-tuned by one step although it is frozen: its digest is another.

    Fix: restore the checkpoint that was locked; if the change was meant, run `statecli lock` again and have the lock
    file's lines reviewed.
    """
    for pair in subject.lock or ():
        shown = pair.tensor or pair.locked
        if shown is None or (pair.differ == () and pair.tensor is not None and pair.locked is not None):
            continue
        name = shown.fqn if len(subject.state.sections) < 2 else f"{shown.section}.{shown.fqn}"
        help = "restore it; if it was meant to change, lock again"
        yield Found(f"{name}: {_said(pair)}", shown.fqn, shown.section, help)


def _said(pair: Held) -> str:
    tensor, line = pair.tensor, pair.locked
    if line is None:
        return "is not in the lock"
    if tensor is None:
        return f"is missing, locked as {line.dtype} {_shape(line)}"
    return "; ".join(_field(field, tensor, line, pair.digest) for field in pair.differ)


def _field(field: str, tensor: TensorInfo, line: LockedTensor, digest: str | None) -> str:
    if field == "values" and digest is None:
        return f"its values cannot be read: {tensor.damage or 'they are not in the file'}"
    if field == "values":
        found, wanted = (str(one)[:12] for one in (digest, line.digest))
        return f"its values are not those that were locked (digest {found}…, not {wanted}…)"
    if field == "shape":
        return f"has shape {_shape(tensor)}, locked with {_shape(line)}"
    if field == "kind":
        return f"is of kind {tensor.kind.value}, locked as {line.kind.value if line.kind else None}"
    if field == "requires_grad":
        return "requires grad, locked as frozen" if tensor.requires_grad else "is frozen, locked as requiring grad"
    return f"is {tensor.dtype}, locked as {line.dtype}"


def _shape(one: TensorInfo | LockedTensor) -> str:
    return "unknown" if one.shape is None else str(list(one.shape))


RULES = (lock_mismatch,)
