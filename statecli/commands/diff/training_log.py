"""Compare the training logs of two checkpoints of transformers' Trainer: what was added, and how the loss went on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statecli.core.errors import UnreadableError
from statecli.core.units import format_number

#: The setting that stands for the log.
LOG_KEY = "trainer_state.log_history"


def describe_log_change(before: str, after: str) -> str | None:
    """Describe how the log in a folder became that in another: `+10 entries, the first 10 unchanged; loss 1.8 → 1.6`.

    None without a log on both sides.
    """
    from statecli.formats.shared.config_files import read_training_log

    try:
        old, new = read_training_log(before), read_training_log(after)
    except UnreadableError:
        return None
    if not old or not new:
        return None
    shared = min(len(old), len(new))
    common = next((n for n in range(shared) if old[n] != new[n]), shared)
    added = len(new) - len(old)
    parts = [f"{added:+,} {'entry' if abs(added) == 1 else 'entries'}"] if added else []
    if common == shared:
        parts.append("the only common entry is unchanged" if common == 1 else f"the first {common:,} unchanged")
    else:
        parts.append(f"the first difference is in entry {common + 1:,}")
    losses = [loss for log in (old, new) if (loss := _find_last_loss(log)) is not None]
    loss_text = f"; loss {' → '.join(format_number(loss, 4) for loss in losses)}" if len(losses) == 2 else ""
    return ", ".join(parts) + loss_text


def _find_last_loss(log: Sequence[Any]) -> float | None:
    """Return the loss of the last entry with one."""
    for entry in reversed(log):
        loss = entry.get("loss") if isinstance(entry, Mapping) else None
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            return float(loss)
    return None
