"""Digests of a state's tensors, from which a later diff finds changed tensors without the old values.

A digest covers the bits: -0.0 differs from 0.0. Digests do not show the size of a change.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from statecli import values
from statecli.core.digest_algorithm import Algorithm
from statecli.core.errors import UsageError, option
from statecli.core.model_state import ModelState, TensorInfo

#: Algorithm of the digests. Snapshots are never stored, so any algorithm will do.
_ALGORITHM = Algorithm.BLAKE3
#: Note on the facts that a diff with a snapshot cannot show.
NOTE = (
    "a snapshot has only digests: the diff shows which tensors changed, but not how much; to keep the values, use "
    "Snapshot(model, values=True)"
)


class StateDigests(msgspec.Struct, frozen=True):
    """A state and the digests of its tensors, in the order of `state.tensors`. A tensor without values has no digest.

    The offsets of the bytes in `state` are no longer valid.
    """

    state: ModelState
    digests: tuple[str | None, ...]


def take_digests(state: ModelState) -> StateDigests:
    """Read all values of a state, and return their digests. Raises UnreadableError."""
    return StateDigests(state, tuple(compute_digests(state.tensors)))


def compute_digests(tensors: Sequence[TensorInfo]) -> list[str | None]:
    """Return the digest of each tensor, or None for a tensor without values. Raises UnreadableError."""
    return values.digest.compute_digests(tensors, _ALGORITHM)


class SnapshotDigests:
    """Lookup of the digests of all tensors in a diff's snapshots."""

    def __init__(self, snapshots: Sequence[StateDigests]) -> None:
        # By `id`, because pairing keeps the rows of a state.
        self._digests = {
            id(tensor): digest
            for snapshot in snapshots
            for tensor, digest in zip(snapshot.state.tensors, snapshot.digests, strict=True)
        }
        self._rows = [snapshot.state.tensors for snapshot in snapshots]  # keeps the rows alive, and so their ids

    def __bool__(self) -> bool:
        return bool(self._rows)

    def find_digests(self, tensors: Sequence[TensorInfo]) -> list[str | None]:
        """Return the digest of each tensor. Digests of tensors outside the snapshots are computed now."""
        new_digests = iter(compute_digests([tensor for tensor in tensors if id(tensor) not in self._digests]))
        return [self._digests[id(tensor)] if id(tensor) in self._digests else next(new_digests) for tensor in tensors]


def refuse_value_options(options: Sequence[tuple[str, object]]) -> None:
    """Raise UsageError for an option that needs values, which a snapshot lacks. `options`: pairs of flag and value."""
    for flag, value in options:
        if value:
            raise UsageError(
                f"{option(flag)}: needs values, but the snapshot has only digests; use Snapshot(model, values=True)"
            )
