"""Read the device that a command-line option names."""

from __future__ import annotations

import torch

from statecli.core.errors import UsageError, option
from statecli.core.units import plural


def parse_device(flag: str, text: str, *, devices: str, anywhere: str) -> torch.device:
    """Return the device that `text` names, with its index. Raises UsageError if this machine does not have the device.

    `devices` lists values of the option, `anywhere` is the value that works on any machine.
    """
    option_text = option(flag, text)
    instead = f"{option(flag, anywhere)} runs the same check on any machine"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise UsageError(f"{option_text}: torch does not know this device; write {devices}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{option_text}: CUDA is not available on this machine; {instead}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        devices_found = plural(torch.cuda.device_count(), "CUDA device")
        raise UsageError(f"{option_text}: this machine has {devices_found}, numbered from 0")
    try:
        return torch.empty(0, device=device).device  # "cuda" is the current device, "cuda:0"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"{option_text}: this machine does not have this device; {instead}") from error
