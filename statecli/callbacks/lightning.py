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
    from lightning.pytorch.callbacks import ModelCheckpoint
except ImportError:  # the package of older projects
    from pytorch_lightning import Callback
    from pytorch_lightning.callbacks import ModelCheckpoint


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
        """Take a snapshot of the model, and note the files of an earlier fit, which have the values of other steps."""
        self._step = trainer.global_step
        self._checked |= _list_versions(trainer)
        if trainer.is_global_zero:
            self.check.start(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Check the files that were written since the previous batch began."""
        self._check_files(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Record the learning rates."""
        self.check.record_step(optimizer, trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compare the model with the snapshot, if the batch ended with an optimizer step."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.check.finish_round(pl_module, trainer.optimizers)

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
        for path, version in _list_versions(trainer).items():
            if self._checked.get(path) != version:
                self._checked[path] = version
                self.check.check_file(f"{path}#state_dict", expected)


def _list_versions(trainer: Any) -> dict[str, int]:
    """Return the existing files of `ModelCheckpoint`, each with the time of its last change in nanoseconds."""
    # Other callbacks that save, such as OnExceptionCheckpoint, do not name their files.
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    paths = (
        path
        for callback in callbacks
        for path in (callback.last_model_path, callback.best_model_path, *callback.best_k_models)
    )
    return {path: os.stat(path).st_mtime_ns for path in paths if path and os.path.isfile(path)}
