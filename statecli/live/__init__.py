"""Live model classes -> ModelState: build, walk, what registers, what moves, where each tensor was assigned.

Importing this package does not import torch; calling anything in it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from statecli.core.state import ModelState, Stats
from statecli.live.load_state_dict_api import Answer, Entries

if TYPE_CHECKING:
    import torch

    from statecli.live.build import Built

__all__ = ["Answer", "Entries", "listed", "load", "move", "read"]


def read(built: Built, target: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None) -> ModelState:
    """Every tensor of a built model: registered ones in the order of its state_dict, then the unregistered.

    `moves` and `saved` are measured, and the measuring overwrites the values of the instance: it is no use afterwards.
    `stats_of` is called with each tensor before that. Raises ModelError.
    """
    import torch

    from statecli.live import model_state

    with torch._C.DisableTorchFunctionSubclass():
        return model_state.read(built, target, stats_of=stats_of)


def listed(
    built: Built, target: str, why_not: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """`read`, of a model that is not ours and of which there is no copy: what moves is not measured, for that reason.

    Nothing of it is changed. Raises ModelError.
    """
    import torch

    from statecli.live import model_state

    with torch._C.DisableTorchFunctionSubclass():
        return model_state.listed(built, target, why_not, stats_of=stats_of)


def move(
    built: Built, target: str, device: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """`read`, then really `module.to(device)`, with `after` filled for each tensor.

    Raises UsageError where the move would prove nothing or the device is not there, ModelError where the model's own
    code fails.
    """
    import torch

    from statecli.live import model_state

    with torch._C.DisableTorchFunctionSubclass():
        return model_state.move(built, target, device, stats_of=stats_of)


def load(built: Built, entries: Entries) -> Answer:
    """What a strict `load_state_dict` says to a state_dict of these names, shapes and dtypes.

    The module's own hooks and overrides run; no element of it changes that code of torch would copy. Raises ModelError
    where that code fails on tensors without values, or torch has no such tensor: then it cannot be told.
    """
    from statecli.live import load_state_dict

    return load_state_dict.load(built, entries)
