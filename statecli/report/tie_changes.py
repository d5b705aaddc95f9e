"""Changes of tied weights between two checkpoints, such as `1 tie lost (2 tensors)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from statecli.commands.diff.result import Change, Field, Status
from statecli.core.model_state import TensorInfo
from statecli.core.units import plural


def is_tie_only(change: Change) -> bool:
    """Return True if only the set of tensors tied to this tensor differs, not the tensor itself."""
    return change.status is Status.CHANGED and change.fields == (Field.TYING,)


def describe_ties(changes: Iterable[Change]) -> list[str]:
    """Describe changes of tied weights: `1 tie lost (2 tensors)` or `2 tensors tied to different tensors`."""
    untied_tensors, newly_tied_tensors, retied_count = [], [], 0
    for change in changes:
        if Field.TYING not in change.fields or change.before is None or change.after is None:
            continue
        if not change.after.tied_to:
            untied_tensors.append(change.before)
        elif not change.before.tied_to:
            newly_tied_tensors.append(change.after)
        else:
            retied_count += 1
    texts = [
        f"{plural(_count_groups(tensors), 'tie')} {word} ({plural(len(tensors), 'tensor')})"
        for tensors, word in ((untied_tensors, "lost"), (newly_tied_tensors, "added"))
        if tensors
    ]
    return texts + ([f"{plural(retied_count, 'tensor')} tied to different tensors"] if retied_count else [])


def _count_groups(tensors: Sequence[TensorInfo]) -> int:
    """Return the number of groups of tied tensors. `tied_to` may name only some tensors of a group."""
    group_of: dict[str, str] = {}

    def find(name: str) -> str:
        while group_of.setdefault(name, name) != name:
            name = group_of[name]
        return name

    for tensor in tensors:
        for tied_name in tensor.tied_to:
            group_of[find(tied_name)] = find(tensor.fqn)
    return len({find(tensor.fqn) for tensor in tensors})
