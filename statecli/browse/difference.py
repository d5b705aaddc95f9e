"""Compare the tensors of two targets: names and headers at once, the values of a tensor when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from statecli.browse.peek import Versions
from statecli.commands.diff.result import Change, Status
from statecli.commands.diff.run import Request, compare_states
from statecli.core.errors import StateError
from statecli.core.model_state import ModelState
from statecli.core.units import format_number
from statecli.report.change_text import STATUS_LETTERS, combine_relative_change
from statecli.report.tie_changes import describe_ties
from statecli.values.compare import NotCompared, Pair, compare_pairs
from statecli.values.delta import CompareOptions, Delta

#: How the values of a pair differ, or why that is not known.
Outcome = Delta | NotCompared | StateError


#: Tensors of the largest module whose changes are combined: it is done each time the row is drawn.
MAX_COMBINED = 1000


class Difference:
    """The difference of the target (before) with another one (after), as `statecli diff TARGET OTHER`.

    Attributes:
        other: Text of the other target.
        only_after: Names that only the other target has.
        outcomes: What was found about the values, by position in the target.
    """

    def __init__(self, other: str, changes: dict[int, Change], only_after: tuple[str, ...], versions: Versions) -> None:
        self.other, self.only_after, self._versions = other, only_after, versions
        self.outcomes: dict[int, Outcome] = {}
        self._changes = changes

    def get_change(self, position: int) -> Change | None:
        """Return the change of names and headers."""
        return self._changes.get(position)

    def has_pair(self, position: int) -> bool:
        """Return True if the values of the tensor can be compared with those of another."""
        change = self._changes.get(position)
        return change is not None and change.before is not None and change.after is not None

    def compare(self, position: int) -> Outcome:
        """Compare the values of a tensor with those after. Requires `has_pair`."""
        change = self._changes[position]
        assert change.before is not None  # noqa: S101 - see `has_pair`
        assert change.after is not None  # noqa: S101
        if change.before.shape != change.after.shape:
            return NotCompared("the shapes differ", reshaped=True)
        # One job: workers are forked, and a fork of a process with a screen and threads may hang.
        pairs = [Pair(change.before, change.after)]
        (outcome,) = compare_pairs(pairs, CompareOptions(), jobs=1, seen=self._versions.known)
        return outcome

    def get_size(self, position: int) -> float | None:
        """Return the relative change, for the order; infinity for a change without one, None if not known."""
        if not self.has_pair(position):
            return math.inf
        outcome = self.outcomes.get(position)
        if not isinstance(outcome, Delta):
            return None
        if not outcome.changed:
            return 0.0
        return math.inf if outcome.relative_l2 is None or _changes_nonfinite(outcome) else outcome.relative_l2

    def format_change(self, position: int) -> str:
        """Return the relative change, `=` for equal values, `?` for values not compared yet, after git's letter."""
        change = self._changes.get(position)
        if change is None or change.after is None:
            return STATUS_LETTERS[Status.REMOVED]
        outcome = self.outcomes.get(position)
        if outcome is None:
            sign = "?"
        elif not isinstance(outcome, Delta):
            sign = "-"
        elif not outcome.changed:
            sign = "="
        elif outcome.relative_l2 is None or _changes_nonfinite(outcome):
            sign = "nan/inf" if _changes_nonfinite(outcome) else STATUS_LETTERS[Status.CHANGED]
        else:
            sign = format_number(outcome.relative_l2, 3)
        letter = STATUS_LETTERS[change.status].strip() if isinstance(outcome, Delta) or sign != "=" else ""
        return sign if sign[0].isdigit() or sign == "nan/inf" else f"{letter} {sign}".strip()

    def format_changes(self, positions: Sequence[int]) -> str:
        """Return the relative change of a module's changed tensors together, `=` for equal values.

        "" if some were not compared.
        """
        if len(positions) > MAX_COMBINED:
            return ""
        outcomes = [self.outcomes.get(position) for position in positions if self.has_pair(position)]
        deltas = [outcome for outcome in outcomes if isinstance(outcome, Delta)]
        if len(deltas) < len(positions):
            return ""
        if any(map(_changes_nonfinite, deltas)):
            return "nan/inf"
        changes = [
            msgspec.structs.replace(self._changes[position], values=self.outcomes[position]) for position in positions
        ]
        if not any(delta.changed for delta in deltas):
            return "="
        return format_number(combine_relative_change(changes), 3)

    def describe_outcomes(self) -> str:
        """Return `87 compared: 2 changed, 1 not compared, 1 tie lost (2 tensors)`, in the words of `statecli diff`."""
        outcomes = self.outcomes.values()
        differ = sum(isinstance(outcome, Delta) and bool(outcome.changed) for outcome in outcomes)
        failed = sum(not isinstance(outcome, Delta) for outcome in outcomes)
        texts = [f"{differ:,} changed", *([f"{failed:,} not compared"] if failed else [])]
        ties = describe_ties(self._changes.values())
        return f"{len(outcomes):,} compared: {', '.join([*texts, *ties])}"


def _changes_nonfinite(delta: Delta) -> bool:
    return delta.nan_before != delta.nan_after or delta.inf_before != delta.inf_after


def pair_states(before: ModelState, after: ModelState, versions: Versions) -> Difference:
    """Pair the tensors of both targets by name, prefix and shape; no values are read."""
    request = Request(before.target, after.target, values=False, jobs=1)
    diff = compare_states(request, before, after, {}, {})
    positions = {(tensor.section, tensor.fqn): n for n, tensor in enumerate(before.tensors)}
    changes: dict[int, Change] = {}
    for change in diff.changes:
        if change.before is not None and (key := (change.before.section, change.before.fqn)) in positions:
            changes[positions[key]] = change
    only_after = tuple(change.fqn for change in diff.changes if change.before is None)
    return Difference(after.target, changes, only_after, versions)
