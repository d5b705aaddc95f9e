"""A GPU that is not there, for code that looks at values: tensors with data that lie on the CPU and deny it.

FakeTensorMode cannot say what `nonzero()` finds or what `.item()` is. A `Pretended` can: each operator runs on the data
it carries, and what comes out claims to be on the same device as before. There is no autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from statecli.live.device_rules import FREE, Watch, Watching, name_of
from statecli.live.fake_gpu import DEVICE, Kept, pretending


def _laid_out(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.layout is not torch.strided:
        return {}
    return {"strides": tensor.stride(), "storage_offset": tensor.storage_offset()}


class Pretended(torch.Tensor):
    """A tensor that claims to be on `DEVICE`, and does all that is asked of it with `beneath`, which is on the CPU."""

    beneath: torch.Tensor

    @staticmethod
    def __new__(cls, beneath: torch.Tensor) -> Pretended:
        """Wrap `beneath`; both change together."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            beneath.size(),
            **_laid_out(beneath),
            dtype=beneath.dtype,
            layout=beneath.layout,
            device=DEVICE,
            requires_grad=False,
        )
        self.beneath = beneath
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """An operator outside `pretended()`, where nobody asks whether it is legal."""
        return _run(func, args, kwargs or {})


class _Pretending(Watching):  # type: ignore[no-untyped-call]
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return _run(func, args, kwargs)


@contextlib.contextmanager
def pretended(watch: Watch) -> Iterator[Kept]:
    """Until the block ends, tensors that are made or moved may claim to be on `DEVICE`; `watch` looks on."""
    with _Pretending(watch), pretending() as kept, torch.no_grad():
        yield kept


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of the data; results that are arguments (in place, out=) are the very same tensors."""
    there = _destination(func, args, kwargs)
    wrappers = {id(one.beneath): one for one in tree_iter((args, kwargs)) if isinstance(one, Pretended)}
    given = {id(one) for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)}
    args, kwargs = tree_map_only(Pretended, lambda one: one.beneath, (args, kwargs))
    args, kwargs = tree_map_only(torch.device, _real, (args, kwargs))
    out = _computed(func, args, kwargs)

    def wrapped(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in wrappers:
            return _unchanged(wrappers[id(tensor)], func)
        return Pretended(tensor) if there and id(tensor) not in given else tensor

    if name_of(func) == "_pack_padded_sequence":
        return wrapped(out[0]), out[1]  # the batch sizes are on the CPU on CUDA too
    return tree_map_only(torch.Tensor, wrapped, out)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Where the CPU lacks a kernel of this dtype that CUDA may have, in float64 and back: it is about devices here."""
    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if "not implemented for '" not in str(error) or func._schema.is_mutable:
            raise
    dtype = next(one.dtype for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor))
    args, kwargs = tree_map_only(torch.Tensor, lambda one: one.double() if one.dtype is dtype else one, (args, kwargs))
    out = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.dtype is torch.float64 else one, out)


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == DEVICE.type else device


def _destination(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the results are on `DEVICE`: as asked for, else as `self` where devices are free to mix, else as any."""
    asked = kwargs.get("device")
    if asked is not None:
        return torch.device(asked).type == DEVICE.type
    if name_of(func) == "device_put":
        return torch.device(args[1]).type == DEVICE.type
    tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
    if name_of(func) in FREE:
        tensors = tensors[:1]
    return any(isinstance(one, Pretended) for one in tensors)


def _unchanged(wrapper: Pretended, func: Any) -> Pretended:
    if wrapper.size() != wrapper.beneath.size() or (
        wrapper.beneath.layout is torch.strided and wrapper.stride() != wrapper.beneath.stride()
    ):
        raise NotImplementedError(f"{name_of(func)} gives a tensor another shape in place, which cannot be pretended")
    return wrapper
