"""What a target is held to, as a diff: a class that is to load it, and another checkpoint."""

from __future__ import annotations

from statecli.comparison.result import Diff
from statecli.comparison.run import Request, compare


def to_class(text: str, model: str, init_device: str) -> Diff:
    """What a strict load of the checkpoint `text` into the class `model` says. Raises StateError."""
    return compare(Request(text, model, values=False, init_device=init_device))


def to_checkpoint(text: str, reference: str, *, values: bool, jobs: int = 0) -> Diff:
    """How the checkpoint `text` differs from `reference`; in its values too where `values`. Raises StateError."""
    return compare(Request(reference, text, values=values, renames=False, jobs=jobs))
