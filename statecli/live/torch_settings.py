"""torch's settings of the whole process that a model's constructor may set.

The rule: what the user's file sets while it is imported holds for everything. Each instance is built from there; what
its constructor sets is taken back afterwards, and holds again while the model's own code runs (forward may rely on
it), each time as the constructor left it. So no instance and no call is other than the first.

The grad mode is set by each proof as that needs it. What a constructor makes of it is taken back and not given again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: The default dtype and device (None: no one has set it), how deterministic algorithms are, the number of threads.
Settings = tuple[Any, ...]


def read_settings() -> Settings:
    """Those in force."""
    device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # torch's own getter may see an outer `with`
    return (
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
def keep_settings(inside: Settings | None = None) -> Iterator[None]:
    """In the block those `inside`, or the same as before it; after it as before, whatever the block set."""
    before = read_settings()
    if inside is not None:
        apply_settings(inside)
    try:
        yield
    finally:
        apply_settings(before)


def apply_settings(settings: Settings) -> None:
    """From now on these."""
    for setter, value, current in zip(_SETTERS, settings, read_settings(), strict=True):
        if value != current:
            setter(value)


@contextmanager
def keep_settings_and_grad_mode() -> Iterator[None]:
    """Around a constructor: the grad mode is taken back too."""
    with keep_settings(), torch.set_grad_enabled(torch.is_grad_enabled()):
        yield
