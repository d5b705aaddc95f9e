"""Build models without drawing the large random initial values.

Random numbers take nine tenths of the time to construct a large model. Names, kinds, shapes, dtypes, storages and lines
do not depend on random numbers. So during a build `normal_`, `uniform_` and `nn.init.trunc_normal_` skip large
`nn.Parameter`s; their memory is fresh zero pages, free until the first access. Reused memory is zeroed, so that no code
computes with garbage. Small parameters, plain tensors and subclasses are drawn, because user code may branch on them.
`--stats` draws everything.

On meta no Parameter is filled, because the first `normal_` imports some 800 modules of torch's Python decompositions,
0.8 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from statecli.live.attribute_patch import replace_attribute

#: Smallest number of elements of a large parameter. Below this a fill takes microseconds and is not worth skipping.
LARGE_PARAMETER_ELEMENTS = 65_536
_FILLS = ((torch.Tensor, "normal_"), (torch.Tensor, "uniform_"), (nn.init, "_no_grad_trunc_normal_"))


@dataclass
class SkippedFills:
    """Number of skipped fills. If the number is 0, a failure of the constructor has another cause."""

    count: int = 0


@contextmanager
def skip_random_fills(skipped_fills: SkippedFills) -> Iterator[None]:
    """Skip random fills of large Parameters while the block runs. Afterwards torch's functions are always restored."""
    active_flag = [True]
    with ExitStack() as stack:
        for owner, name in _FILLS:
            fill = _wrap_fill(getattr(owner, name), skipped_fills, active_flag)
            stack.enter_context(replace_attribute(owner, name, fill))
        stack.callback(active_flag.clear)  # for code that kept a reference to a wrapper
        yield


def _wrap_fill(fill: Callable[..., Any], skipped_fills: SkippedFills, active_flag: list[bool]) -> Callable[..., Any]:
    def fill_unless_large(self: object, *args: Any, **kwargs: Any) -> Any:
        if active_flag and type(self) is nn.Parameter:
            if self.device.type == "meta":
                return self
            if self.device.type == "cpu" and self.numel() > LARGE_PARAMETER_ELEMENTS:
                skipped_fills.count += 1
                return _zero_used_memory(self)
        return fill(self, *args, **kwargs)

    return fill_unless_large


def _zero_used_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Set `parameter` to zero unless 64 samples are zero already, because writing touches every page of memory."""
    data = parameter.detach()
    if not data.is_contiguous() or data.view(-1)[:: data.numel() // 64].ne(0).any():
        data.zero_()
    return parameter
