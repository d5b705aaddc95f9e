"""Keep and restore torch's process-wide settings, which a model's constructor may change.

Settings made at the import of the user's file hold for all instances. Settings made by a constructor are undone
afterwards, and hold again while the model's code runs, because forward may rely on them. So no instance and no call
differs from the first.

Each check of verify sets the grad mode. A constructor's grad mode is undone and not restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Settings(NamedTuple):
    """Process-wide settings of torch. `device` is None if no default device was ever set."""

    dtype: torch.dtype
    device: torch.device | None
    deterministic_mode: int
    threads: int


def read_settings() -> Settings:
    """Return torch's current process-wide settings."""
    device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # torch's own getter may see an outer `with`
    return Settings(
        torch.get_default_dtype(),
        None if device is None else device.device,
        torch.get_deterministic_debug_mode(),
        torch.get_num_threads(),
    )


_SETTERS: tuple[Callable[[Any], object], ...] = (
    torch.set_default_dtype,
    torch.set_default_device,
    torch.set_deterministic_debug_mode,
    torch.set_num_threads,
)


@contextmanager
def keep_settings(settings: Settings | None = None) -> Iterator[None]:
    """Apply `settings`, if given, while the block runs. Afterwards restore the previous settings."""
    previous_settings = read_settings()
    if settings is not None:
        apply_settings(settings)
    try:
        yield
    finally:
        apply_settings(previous_settings)


def apply_settings(settings: Settings) -> None:
    """Apply settings to the process and leave them in force."""
    for setter, value, current in zip(_SETTERS, settings, read_settings(), strict=True):
        if value != current:
            setter(value)


@contextmanager
def keep_settings_and_grad_mode() -> Iterator[None]:
    """Undo the torch settings and the grad mode that a constructor sets in the block."""
    with keep_settings(), torch.set_grad_enabled(torch.is_grad_enabled()):
        yield
