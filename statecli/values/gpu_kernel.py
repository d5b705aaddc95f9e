"""The same comparison with the arithmetic on a GPU, by torch.

Bytes are read and compared here; blocks that differ are sent over as they are stored, widened to float64 there and
summed there. Whatever needs more than plain sums (NaN, infinities, integers, complex values, extreme sizes) is done by
the numpy kernels, so that the two agree on every count, and on every sum but for the order of its additions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from statecli.core.errors import MissingDependency, StateError, UsageError
from statecli.core.float_mode import with_denormals
from statecli.values.compare_task import BLOCK, Found, Task, Worker
from statecli.values.delta import How
from statecli.values.elements import Array
from statecli.values.tally import SAFE, Tally, Wide

#: Types that torch widens to float64 exactly.
_FLOATS = frozenset(
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)


def device(name: str) -> Any:
    """The torch device that `--device` names. Raises UsageError where it is not there."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency(f"--device {name} needs torch, which is not installed: pip install torch") from error
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: torch knows no such device; cpu, cuda and cuda:1 are devices") from error
    if found.type != "cuda":
        raise UsageError(f"--device {name}: values are compared on cpu or cuda")
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: there is no CUDA here; leave it out to compare on the CPU")
    if (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return found


class DeviceWorker(Worker):
    """A worker that adds up on `device`; its blocks are larger, since each costs a transfer."""

    block = 16 * BLOCK

    def __init__(self, how: How, device: Any) -> None:
        super().__init__(how)
        self.device = device

    def _tally(self, a: Array, one: str, b: Array, two: str, start: int) -> Tally:
        plain = one in _FLOATS and two in _FLOATS and not (self.how.bitwise and one == two)
        found = self._sums(self._sent(a, one), self._sent(b, two)) if plain else None
        return super()._tally(a, one, b, two, start) if found is None else found.moved(start)

    def _sent(self, stored: Array, dtype: str) -> Any:
        import torch

        raw = torch.from_numpy(stored.view(np.uint8))
        return raw.to(self.device).view(getattr(torch, dtype)).to(torch.float64)

    def _sums(self, a: Any, b: Any) -> Tally | None:
        """None where the sums need more care than float64 takes by itself."""
        import torch

        gap = (b - a).abs_()
        limit = self.how.atol + self.how.rtol * a.abs() if self.how.atol or self.how.rtol else 0
        changed = gap > limit
        largest = torch.stack([a.abs().max(), b.abs().max(), gap.max()]).tolist()
        if not all(size == 0 or 1 / SAFE < size < SAFE for size in largest):
            return None
        sum_abs, squares, before, after, product = torch.stack([gap.sum(), gap @ gap, a @ a, b @ b, a @ b]).tolist()
        count = int(changed.sum())
        return Tally(
            changed=count,
            first=int(changed.to(torch.uint8).argmax()) if count else None,
            finite=a.numel(),
            max_abs=largest[2],
            sum_abs=Wide(sum_abs),
            squares=Wide(squares),
            before=Wide(before),
            after=Wide(after),
            product=Wide(product),
        )


@with_denormals
def run_on(how: How, tasks: tuple[Task, ...], device: Any) -> list[Found | StateError]:
    """What `run.run_batch` does, on a device of torch."""
    with DeviceWorker(how, device) as worker:
        return worker.results(tasks)
