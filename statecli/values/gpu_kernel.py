"""Compare blocks on a GPU with torch, with the same counts as the kernels for the CPU.

Bytes are read and compared on the CPU. Differing blocks are transferred as stored, then widened to float64 and summed
on the GPU. Blocks that need more than plain sums (NaN, infinities, integers, complex values, extreme sizes) are summed
by the numpy kernels. Therefore all counts agree, and sums differ only by the order of additions.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from statecli.core.denormals import with_denormals
from statecli.core.errors import MissingDependency, StateError, UsageError, option
from statecli.core.installed_package import install_extra
from statecli.core.units import plural
from statecli.values.compare_task import CompareTask, Comparison, Worker
from statecli.values.delta import CompareOptions
from statecli.values.elements import MAX_UNSCALED, Array
from statecli.values.tally import BLOCK_ELEMENTS, Tally, Wide

if TYPE_CHECKING:
    import torch

#: Types that torch widens to float64 exactly.
_WIDENED_TYPES = frozenset(
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)


def resolve_device(name: str) -> torch.device:
    """Return the torch device that `--device` names. Raises UsageError if the device is not available."""
    try:
        import torch
    except ModuleNotFoundError as error:
        advice = install_extra("torch")
        raise MissingDependency(f"{option('--device', name)} needs torch, which is not installed: {advice}") from error
    try:
        device = torch.device(name)
    except RuntimeError as error:
        problem = "torch does not know this device; use cpu, cuda or cuda:N"
        raise UsageError(f"{option('--device', name)}: {problem}") from error
    if device.type != "cuda":
        raise UsageError(f"{option('--device', name)}: values can be compared only on cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError(
            f"{option('--device', name)}: CUDA is not available on this machine; leave the option out to compare "
            "on the CPU"
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"{option('--device', name)}: the device does not exist, because this machine has "
            f"{plural(torch.cuda.device_count(), 'CUDA device')}"
        )
    return device


class DeviceWorker(Worker):
    """Worker that sums differences on `device`. Blocks are larger than on the CPU, because transfers take time."""

    block = 16 * BLOCK_ELEMENTS

    def __init__(self, options: CompareOptions, device: torch.device) -> None:
        super().__init__(options)
        self.device = device

    def _tally_block(self, before: Array, before_type: str, after: Array, after_type: str, start: int) -> Tally:
        is_widened = before_type in _WIDENED_TYPES and after_type in _WIDENED_TYPES
        tally = None
        if is_widened and not (self.options.bitwise and before_type == after_type):
            tally = self._sum_on_device(self._send(before, before_type), self._send(after, after_type))
        if tally is None:
            return super()._tally_block(before, before_type, after, after_type, start)
        return tally.shift(start)

    def _send(self, stored_items: Array, dtype: str) -> torch.Tensor:
        import torch

        raw = torch.from_numpy(stored_items.view(np.uint8))
        return raw.to(self.device).view(getattr(torch, dtype)).to(torch.float64)

    def _sum_on_device(self, a: torch.Tensor, b: torch.Tensor) -> Tally | None:
        """Return the tally of two flat float64 blocks, or None if float64 cannot represent the sums without scaling."""
        import torch

        gap = (b - a).abs_()
        limit = self.options.atol + self.options.rtol * a.abs() if self.options.atol or self.options.rtol else 0
        changed_mask = gap > limit
        largest = torch.stack([a.abs().max(), b.abs().max(), gap.max()]).tolist()
        if not all(size == 0 or 1 / MAX_UNSCALED < size < MAX_UNSCALED for size in largest):
            return None
        sum_abs, squares, before, after, product = torch.stack([gap.sum(), gap @ gap, a @ a, b @ b, a @ b]).tolist()
        count = int(changed_mask.sum())
        return Tally(
            changed=count,
            first=int(changed_mask.to(torch.uint8).argmax()) if count else None,
            finite=a.numel(),
            max_abs=largest[2],
            sum_abs=Wide(sum_abs),
            squares=Wide(squares),
            before=Wide(before),
            after=Wide(after),
            product=Wide(product),
        )


@with_denormals
def run_batch_on_device(
    options: CompareOptions, tasks: tuple[CompareTask, ...], device: torch.device
) -> list[Comparison | StateError]:
    """Return the result or the error of each comparison task, computed on a torch device."""
    with closing(DeviceWorker(options, device)) as worker:
        return worker.compare_all(tasks)
