"""Compare the tensors of two targets: names and headers immediately, values only on request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from statecli import values
from statecli.browse.peek import Versions
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Change, Diff, Field, Status
from statecli.commands.diff.run import compare_states
from statecli.core.errors import MissingDependency, StateError
from statecli.core.model_state import ModelState
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import format_number
from statecli.report.change_text import STATUS_LETTERS, combine_relative_change
from statecli.report.diff import summarize_diff
from statecli.report.tie_changes import describe_ties
from statecli.values.delta import CompareOptions, Delta

if TYPE_CHECKING:
    from statecli.values.compare import PairOutcome

#: Section and name of a layer.
LayerKey = tuple[str, str]
#: Largest number of tensors of a module whose changes are combined, because each drawing of the row combines them
#: again.
MAX_COMBINED_TENSORS = 1000


class Difference:
    """Difference between the target (before) and another target (after), as in `statecli diff TARGET OTHER`.

    Attributes:
        other_target: Text of the other target. only_after: Names that only the other target has.
        changes: Changes of names and headers, by position in the target.
        outcomes: Results for the values, by position in the target.
        summary: The summary line of `statecli diff`; "" before all pairs were compared.
    """

    def __init__(self, diff: Diff, changes: dict[int, Change], versions: Versions) -> None:
        self.other_target, self._diff, self._versions = diff.after.target, diff, versions
        self.only_after = tuple(change.fqn for change in diff.changes if change.before is None)
        self.outcomes: dict[int, PairOutcome] = {}
        self.summary = ""
        self.changes = changes
        self._layer_norms: dict[LayerKey, float] = {}

    def has_pair(self, position: int) -> bool:
        """Return True if the values of the tensor can be compared with another tensor."""
        change = self.changes.get(position)
        return change is not None and change.before is not None and change.after is not None

    def list_missing(self, positions: Iterable[int]) -> list[int]:
        """Return the positions of tensors that were not compared with their pair yet."""
        return [n for n in positions if self.has_pair(n) and n not in self.outcomes]

    def compare(self, position: int) -> PairOutcome:
        """Compare the values of a tensor with those in the other target. Requires `has_pair`."""
        change = self.changes[position]
        assert change.before is not None  # noqa: S101 - see `has_pair`
        assert change.after is not None  # noqa: S101
        try:
            if change.before.shape != change.after.shape:
                return values.pair_plan.NotCompared("the shapes differ", reshaped=True)
            # A single job, because workers are forked, and a fork of a process with a screen and threads may hang.
            pairs = [values.pair_plan.Pair(change.before, change.after)]
            (outcome,) = values.compare.compare_pairs(
                pairs, CompareOptions(), jobs=1, header_versions=self._versions.by_path
            )
        except MissingDependency as error:  # names and headers are compared without numpy
            return error
        return outcome

    def measure_change(self, positions: Sequence[int]) -> float | None:
        """Return the combined relative change of the changed tensors: 0.0 for equal values, infinity if undefined.

        Returns None if some of the tensors were not compared.
        """
        outcomes = [self.outcomes.get(position) for position in positions if self.has_pair(position)]
        deltas = [outcome for outcome in outcomes if isinstance(outcome, Delta)]
        if len(deltas) < len(positions):
            return None
        if any(map(_changes_nonfinite, deltas)):
            return math.inf
        if not any(delta.changed for delta in deltas):
            return 0.0
        changes = [
            msgspec.structs.replace(self.changes[position], values=self.outcomes[position]) for position in positions
        ]
        combined = combine_relative_change(changes)
        return math.inf if combined is None else combined

    def get_share_of_layer(self, position: int) -> float | None:
        """Return the norm of the change divided by the norm of the layer's changed tensors, or None if unknown.

        A tensor near zero at the start, for example the bias of a norm, has a large relative change and a small share.
        """
        outcome = self.outcomes.get(position)
        if not isinstance(outcome, Delta) or outcome.l2 is None:
            return None
        norm = self._layer_norms.get(self._find_layer(position))
        return outcome.l2 / norm if norm else None

    def measure_layers(self) -> None:
        """Compute the norm of each layer from the norms of its changed tensors."""
        norms: dict[LayerKey, list[float]] = {}
        for position, outcome in self.outcomes.items():
            if isinstance(outcome, Delta) and outcome.l2 and outcome.relative_l2:
                norms.setdefault(self._find_layer(position), []).append(outcome.l2 / outcome.relative_l2)
        self._layer_norms = {layer: math.hypot(*tensor_norms) for layer, tensor_norms in norms.items()}

    def _find_layer(self, position: int) -> LayerKey:
        """Return the tensor's section and layer. The layer is the name up to the first number, or the module's name."""
        change = self.changes[position]
        parts = change.fqn.split(".")
        end = next((n for n, part in enumerate(parts[:-1], 1) if part.isdecimal()), len(parts) - 1)
        return change.section, ".".join(parts[:end])

    def get_order(self, position: int) -> float | None:
        """Return the tensor's share of its layer's change, to sort by: infinity if undefined, None if unknown."""
        if not self.has_pair(position):
            return math.inf
        outcome = self.outcomes.get(position)
        if not isinstance(outcome, Delta):
            return None
        if not outcome.changed:
            return 0.0
        share = self.get_share_of_layer(position) or outcome.relative_l2
        return math.inf if share is None or _changes_nonfinite(outcome) else share

    def format_change(self, position: int) -> str:
        """Return the relative change, or git's status letter with a sign: `=` equal, `?` not compared, `-` failed."""
        change = self.changes.get(position)
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
        letter = STATUS_LETTERS[change.status].strip()
        return sign if sign[0].isdigit() or sign == "nan/inf" else f"{letter} {sign}".strip()

    def format_changes(self, positions: Sequence[int]) -> str:
        """Return the combined relative change of a module's changed tensors, or `=` for equal values.

        Returns "" if some of the tensors were not compared.
        """
        if len(positions) > MAX_COMBINED_TENSORS:
            return ""
        change = self.measure_change(positions)
        if change is None:
            return ""
        if change == math.inf:
            outcomes = (self.outcomes[position] for position in positions)
            has_nonfinite = any(isinstance(outcome, Delta) and _changes_nonfinite(outcome) for outcome in outcomes)
            return "nan/inf" if has_nonfinite else STATUS_LETTERS[Status.CHANGED]
        return format_number(change, 3) if change else "="

    def describe_outcomes(self) -> str:
        """Return `87 compared: 2 changed`. Once all pairs are compared, the summary of the diff follows the colon."""
        pairs = sum(map(self.has_pair, self.changes))
        outcomes = self.outcomes.values()
        if len(outcomes) == pairs:
            self.summary = summarize_diff(self._build_diff())
            return f"{pairs:,} compared: {self.summary}"
        changed_count = sum(isinstance(outcome, Delta) and bool(outcome.changed) for outcome in outcomes)
        failed_count = sum(not isinstance(outcome, Delta) for outcome in outcomes)
        texts = [f"{changed_count:,} changed", *([f"{failed_count:,} not compared"] if failed_count else [])]
        ties = describe_ties(self.changes.values())
        return f"{len(outcomes):,} compared: {', '.join([*texts, *ties])}"

    def _build_diff(self) -> Diff:
        """Return the diff as `statecli diff` builds it, with the results for the values."""
        outcomes = {id(self.changes[position]): outcome for position, outcome in self.outcomes.items()}
        changes = tuple(_add_outcome(change, outcomes.get(id(change))) for change in self._diff.changes)
        notes = tuple(note for note in self._diff.notes if note.kind is not OddityKind.VALUES_NOT_COMPARED)
        return msgspec.structs.replace(self._diff, changes=changes, notes=notes)


def _add_outcome(change: Change, outcome: PairOutcome | None) -> Change:
    if outcome is None:
        return change
    if isinstance(outcome, StateError):
        return msgspec.structs.replace(change, not_compared=str(outcome))
    if isinstance(outcome, values.pair_plan.NotCompared):
        return change if outcome.reshaped else msgspec.structs.replace(change, not_compared=outcome.reason)
    if not outcome.changed:
        return change
    status = Status.CHANGED if change.status is Status.IDENTICAL else change.status
    return msgspec.structs.replace(change, values=outcome, status=status, fields=(*change.fields, Field.VALUES))


def _changes_nonfinite(delta: Delta) -> bool:
    return delta.nan_before != delta.nan_after or delta.inf_before != delta.inf_after


def pair_states(before: ModelState, after: ModelState, versions: Versions) -> Difference:
    """Pair the tensors of both targets by name, prefix and shape. Does not read values."""
    request = Request(before.target, after.target, values=False, jobs=1)
    diff = compare_states(request, before, after, {}, {})
    positions = {tensor.key: n for n, tensor in enumerate(before.tensors)}
    changes: dict[int, Change] = {}
    for change in diff.changes:
        if change.before is not None and (key := change.before.key) in positions:
            changes[positions[key]] = change
    return Difference(diff, changes, versions)
