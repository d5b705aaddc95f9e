"""Callback for the Trainer of Lightning.

from statecli.callbacks.lightning import StatecliCallback

trainer = lightning.Trainer(callbacks=[StatecliCallback()], …)
"""

# ruff: noqa: ARG002 - the hooks have the signatures of the library

from __future__ import annotations

import os
from typing import Any

from statecli import Snapshot
from statecli.callbacks.training_check import TrainingCheck

try:
    from lightning.pytorch import Callback
except ImportError:  # the package of older projects
    from pytorch_lightning import Callback


class StatecliCallback(Callback):  # type: ignore[misc, unused-ignore]  # Lightning may be missing where mypy runs
    """Report tensors without an update, frozen tensors that changed, and differences between saved files and the model.

    The checks are the same as in `statecli.callbacks.transformers.StatecliCallback`. Files of `ModelCheckpoint` are
    checked when the next batch begins or the training ends; files of `trainer.save_checkpoint(path)` are not.

    Args:
        fail: End the training with AssertionError at a finding; False warns.

    Attributes:
        check: `check.findings` has the reported lines.
    """

    def __init__(self, *, fail: bool = False) -> None:
        super().__init__()
        self.check = TrainingCheck(fail=fail)
        self._step = 0
        self._saved: Snapshot | None = None
        self._checked: dict[str, int] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take a snapshot of the model."""
        self._step = trainer.global_step
        if trainer.is_global_zero:
            self.check.start(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Check the files that were written since the previous batch began."""
        self._check_files(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Record the learning rates."""
        self.check.record_rates([optimizer])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compare the model with the snapshot, if the batch ended with an optimizer step."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.check.finish_step(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the parameters that no step has changed."""
        self.check.finish(pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take a snapshot of the model. Lightning then writes a file, which must contain the values of the snapshot."""
        if trainer.is_global_zero:
            self._saved = Snapshot(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Check the files that were written since the last batch began."""
        self._check_files(trainer)

    def _check_files(self, trainer: Any) -> None:
        if self._saved is None:
            return
        expected, self._saved = self._saved, None
        for callback in trainer.checkpoint_callbacks:
            for path in dict.fromkeys((callback.last_model_path, callback.best_model_path)):
                if path and os.path.isfile(path) and self._checked.get(path) != os.stat(path).st_mtime_ns:
                    self._checked[path] = os.stat(path).st_mtime_ns
                    self.check.check_file(f"{path}#state_dict", expected)
