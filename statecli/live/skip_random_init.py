"""Building without drawing the large random initial values.

Nine tenths of the time it takes to construct a large model go into random numbers that `inspect` never shows: names,
kinds, shapes, dtypes, storages and lines are the same whatever was drawn. So while a model is built only to be looked
at, `normal_`, `uniform_` and `nn.init.trunc_normal_` do nothing to a large `nn.Parameter`; its memory is fresh zero
pages, which cost nothing until somebody touches them. Where the allocator handed out used memory, it is zeroed, so
that nobody computes with garbage. Small parameters, plain tensors and subclasses are drawn as ever: user code decides
things by them. `--stats` draws everything.

On meta there is nothing to fill, and yet the first `normal_` there imports some 800 modules of torch's Python
decompositions, 0.8 s: no Parameter on meta is filled at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: Elements. Below this a fill takes microseconds and is not worth skipping.
LARGE_PARAMETER_ELEMENTS = 65_536
_FILLS = ("normal_", "uniform_")


@dataclass
class SkippedFills:
    """How many fills were skipped: where it is 0, skipping cannot be why something failed."""

    count: int = 0


@contextmanager
def skip_random_fills(skipped: SkippedFills) -> Iterator[None]:
    """Until the block ends, random fills of large Parameters are no-ops. All is put back, whatever happens."""
    active = [True]
    truncated = nn.init._no_grad_trunc_normal_
    for name in _FILLS:
        setattr(torch.Tensor, name, _wrap_fill(getattr(torch.Tensor, name), skipped, active))
    nn.init._no_grad_trunc_normal_ = _wrap_fill(truncated, skipped, active)
    try:
        yield
    finally:
        active[0] = False  # for whoever kept a reference to a wrapper
        for name in _FILLS:
            delattr(torch.Tensor, name)
        nn.init._no_grad_trunc_normal_ = truncated


def _wrap_fill(fill: Callable[..., Any], skipped: SkippedFills, active: list[bool]) -> Callable[..., Any]:
    def fill_unless_large(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active[0] and type(self) is nn.Parameter:
            if self.device.type == "meta":
                return self
            if self.device.type == "cpu" and self.numel() > LARGE_PARAMETER_ELEMENTS:
                skipped.count += 1
                return _zero_used_memory(self)
        return fill(self, *args, **kwargs)

    return fill_unless_large


def _zero_used_memory(parameter: nn.Parameter) -> nn.Parameter:
    """`parameter`, zeroed only where 64 samples say that its memory is not fresh: a fill touches every page."""
    data = parameter.detach()
    if not data.is_contiguous() or data.view(-1)[:: data.numel() // 64].ne(0).any():
        data.zero_()
    return parameter
