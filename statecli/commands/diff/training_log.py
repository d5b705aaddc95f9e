"""Compare the training logs of two checkpoints of transformers' Trainer: added entries, and how the loss changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from statecli.core.errors import UnreadableError
from statecli.core.units import format_number
from statecli.storage import files, json_object
from statecli.storage.byte_source import read_small_file
from statecli.storage.checkpoint_names import SETTINGS_FILES

#: Setting with the whole log.
LOG_KEY = "trainer_state.log_history"


class LogChange(msgspec.Struct, frozen=True):
    """Change of a training log: the number of added entries, and the number of equal entries at the start.

    `equal`: number of entries before the first difference. `shorter`: number of entries of the shorter log. `losses`:
    the newest loss before and after; () unless both logs have one.
    """

    added: int
    equal: int
    shorter: int
    losses: tuple[float, ...] = ()

    @property
    def is_growth(self) -> bool:
        """True if entries were added, and all earlier entries are unchanged."""
        return self.added > 0 and self.equal == self.shorter

    def describe(self) -> str:
        """Describe the change: `+10 entries, the first 10 unchanged; loss 1.8 → 1.6`."""
        parts = [f"{self.added:+,} {'entry' if abs(self.added) == 1 else 'entries'}"] if self.added else []
        if self.equal == self.shorter:
            parts.append(
                "the only common entry is unchanged" if self.equal == 1 else f"the first {self.equal:,} unchanged"
            )
        else:
            parts.append(f"the first difference is in entry {self.equal + 1:,}")
        losses = f"; loss {' → '.join(map(format_loss, self.losses))}" if self.losses else ""
        return ", ".join(parts) + losses


def format_loss(loss: float) -> str:
    """Return a loss with four significant digits."""
    return format_number(loss, 4)


def compare_logs(before: str, after: str) -> LogChange | None:
    """Compare the logs in two folders. Return None unless both folders have a log."""
    try:
        old, new = _read_log(before), _read_log(after)
    except UnreadableError:
        return None
    if not old or not new:
        return None
    shorter = min(len(old), len(new))
    common_length = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    losses = tuple(loss for log in (old, new) if (loss := _find_last_loss(log)) is not None)
    return LogChange(len(new) - len(old), common_length, shorter, losses if len(losses) == 2 else ())


def _read_log(folder: str) -> list[Any]:
    """Return `log_history` from trainer_state.json in the folder, or [] if the file does not exist.

    Raises UnreadableError for a file that cannot be read.
    """
    path = files.join(folder, "trainer_state.json")
    raw = read_small_file(path, SETTINGS_FILES["trainer_state"]) if files.is_file(path) else b"{}"
    entries = json_object.parse_object(raw, "it").document
    log = entries.get("log_history")
    return log if type(log) is list else []


def _find_last_loss(log: Sequence[Any]) -> float | None:
    for entry in reversed(log):
        loss = entry.get("loss") if isinstance(entry, Mapping) else None
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            return float(loss)
    return None
