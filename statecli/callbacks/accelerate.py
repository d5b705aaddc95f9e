"""Tracker for the Accelerator of accelerate.

from statecli.callbacks.accelerate import StatecliTracker

tracker = StatecliTracker(model, optimizer)
accelerator = Accelerator(log_with=tracker)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.init_trackers("run")
…
accelerator.save_state("checkpoint-500")
tracker.check_saved("checkpoint-500")
accelerator.end_training()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accelerate.tracking import GeneralTracker

from statecli.callbacks.training_check import TrainingCheck

if TYPE_CHECKING:
    import torch
    from torch import nn


class StatecliTracker(GeneralTracker):  # type: ignore[misc, unused-ignore]  # accelerate has no types for mypy
    """Report tensors without an update, frozen tensors that changed, and differences between saved files and the model.

    The tracker compares the model after the first optimizer step with a snapshot before the step, like the callbacks of
    transformers and Lightning. The tracker logs no values.

    Args:
        model: The model, not wrapped: before `prepare`, or `accelerator.unwrap_model(model)`.
        optimizers: The optimizers of torch, before `prepare`.
        fail: End the training with AssertionError at a finding; False warns.

    Attributes:
        check: `check.findings` has the reported lines.
    """

    name = "statecli"
    requires_logging_directory = False

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, fail: bool = False) -> None:
        super().__init__()
        self.check = TrainingCheck(fail=fail)
        self.model = model
        self._optimizers = optimizers

    @property
    def tracker(self) -> TrainingCheck:
        """The `TrainingCheck` of this tracker."""
        return self.check

    def start(self) -> None:
        """Take a snapshot of the model. `Accelerator.init_trackers` calls this once."""
        self.check.start(self.model)
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(lambda stepping, *_: self.check.record_step(stepping, self._optimizers))
            optimizer.register_step_post_hook(lambda *_: self.check.finish_round(self.model, self._optimizers))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Ignore the hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        """Ignore the values."""

    def finish(self) -> None:
        """Report the parameters that no step has changed. `Accelerator.end_training` calls this."""
        self.check.finish(self.model)

    def check_saved(self, folder: str | os.PathLike[str]) -> None:
        """Compare the model with its file in a folder that `Accelerator.save_state` has just written."""
        self.check.check_folder(folder, self.model)
