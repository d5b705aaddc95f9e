"""Snapshot of a live object (a model, an optimizer or a state_dict), for a later comparison."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from statecli.api.live_targets import SavedObjects, is_live, name_object, use_saved_objects
from statecli.commands.diff.snapshot import StateDigests, take_digests
from statecli.core.errors import UsageError
from statecli.targets import load

if TYPE_CHECKING:
    from statecli import LiveObject

__tracebackhide__ = True  # pytest shows the caller's line


class Snapshot:
    """State of a model, an optimizer or a state_dict at the time of the call, for `statecli.diff`.

        before = statecli.Snapshot(model)
        optimizer.step()
        print(statecli.diff(before, model))  # the tensors that the step changed

    A snapshot keeps a digest of each tensor (64 bytes), its name, dtype and shape. So a diff shows which tensors
    changed, bit for bit: -0.0 differs from 0.0. A diff does not show the size of a change, and does not find renamed or
    transformed tensors. With `values=True`, the snapshot keeps a copy of all values in memory, and a diff shows
    everything.
    """

    def __init__(self, target: LiveObject, *, values: bool = False) -> None:
        """Read the values of the object once (see the class).

        Raises:
            UsageError: The target is not a live object, or cannot be saved.
            MalformedError: The object contains no tensor.
        """
        if not is_live(target):
            raise UsageError(
                f"a snapshot needs an nn.Module, an optimizer or a state_dict, not {type(target).__name__}; "
                "pass the path of a checkpoint to diff instead"
            )
        #: Name in results.
        self.name = name_object(target) + " (snapshot)"
        #: None if the values are kept.
        self.digests: StateDigests | None = None
        #: The file with the values, which exists as long as the snapshot; None without values.
        self.path: str | None = None
        if values:
            saved_objects = SavedObjects()
            weakref.finalize(self, saved_objects.close)
            self.path = saved_objects.save(target)
            return
        with use_saved_objects() as saved_objects:
            state = load.read_checkpoint(saved_objects.save(target))
            self.digests = saved_objects.rename(take_digests(state))

    def __repr__(self) -> str:
        return f"<{self.name}>"
