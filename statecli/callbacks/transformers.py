"""Callback for the Trainer of transformers.

from statecli.callbacks.transformers import StatecliCallback

trainer = Trainer(model, args, callbacks=[StatecliCallback()], …)
"""

# ruff: noqa: ARG002 - the hooks have the signatures of the library

from __future__ import annotations

import os
from glob import escape, glob
from typing import Any

from transformers import TrainerCallback

from statecli.callbacks.training_check import TrainingCheck


class StatecliCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # transformers has no types for mypy
    """Report tensors without an update, frozen tensors that changed, and differences between saved files and the model.

    The callback compares the model after the first optimizer step with a snapshot before the step. For this time the
    callback needs as much additional memory as the model. A parameter without a gradient, or with a gradient or a
    learning rate of zero, is compared again in later steps. At each save the callback compares the file with the model.

    Args:
        fail: End the training with AssertionError at a finding; False warns.

    Attributes:
        check: `check.findings` has the reported lines.
    """

    def __init__(self, *, fail: bool = False) -> None:
        self.check = TrainingCheck(fail=fail)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Take a snapshot of the model."""
        if state.is_world_process_zero:
            self.check.start(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        """Record the learning rates."""
        self.check.record_rates([] if optimizer is None else [optimizer])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Compare the model with the snapshot."""
        self.check.finish_step(model)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Report the parameters that no step has changed."""
        self.check.finish(model)

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Compare the saved file with the model."""
        if not state.is_world_process_zero:
            return
        name = f"checkpoint-{state.global_step}"
        # Each trial of a search for hyperparameters saves in a folder that only the Trainer knows.
        trials = glob(os.path.join(escape(args.output_dir), "*", name)) if state.is_hyper_param_search else []
        folder = max(trials, key=os.path.getmtime, default=os.path.join(args.output_dir, name))
        self.check.check_folder(folder, model)
