"""A GPU that is not there: tensors that claim to be on it and hold no data.

FakeTensorMode computes shapes only. Its device is `lazy:0`, one that every build of torch knows and none implements:
on `cuda:0` a build without CUDA aborts the process. A `Watch` above it knows CUDA's rules. The model's own code is told
`cuda:0` when it asks a tensor for its device, and what it then says of `cuda` is about that device.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from statecli.live.build import text_of
from statecli.live.device_rules import Watch, Watching
from statecli.live.tensor_sources import Place, is_theirs
from statecli.live.tensors import is_lazy

#: The device that stands for cuda:0.
DEVICE = torch.device("lazy", 0)
_NAMED = torch.device("cuda", 0)
#: How it is shown.
SHOWN = "cuda:0 (fake)"
#: What torch says of a tensor on a GPU that is to become an array.
NO_NUMPY = "device type tensor to numpy"
_UNKNOWN = re.compile(r"Could not run '(aten::\w+)\S*' with arguments from the 'Lazy' backend")
_DEVICE: Any = torch.Tensor.device
_IS_CUDA: Any = torch.Tensor.is_cuda
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
#: A GPU of 2020: kernels that ask for less than it has are taken.
_ANSWERS = {
    "get_device_capability": (8, 0),
    "current_device": 0,
    "device_count": 1,
    "is_bf16_supported": True,
    "synchronize": None,
    "empty_cache": None,
}
_LOGGERS = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")


def why(reason: str, cause: BaseException | None) -> str:
    """`reason`, shorter where it is no more than that tensors have no data, or that torch knows no such device."""
    if "DataDependent" in type(cause).__name__ or "DynamicOutputShape" in type(cause).__name__:
        return "without data it cannot be told what the model does: it decides by the values of a tensor"
    unknown = _UNKNOWN.search(text_of(cause))
    return f"{unknown[1]} cannot be pretended" if unknown else reason.replace(str(DEVICE), "cuda:0")


def device_after(tensor: torch.Tensor, kept: Kept) -> str:
    """Return the device of a tensor after a move; a registered lazy parameter follows on CUDA and holds nothing."""
    return SHOWN if tensor in kept or is_lazy(tensor) else shown(tensor)


def has_followed(tensor: torch.Tensor, kept: Kept) -> bool:
    """Whether `tensor` is on the fake device after a move of the model that holds it."""
    return device_after(tensor, kept) == SHOWN


def on_gpu(stage: Stage) -> contextlib.AbstractContextManager[Kept]:
    """`stage` for a move alone."""
    return stage(Watch(DEVICE))


def shown(tensor: torch.Tensor) -> str:
    """The device of `tensor` in words."""
    device = true_device(tensor)
    return SHOWN if device == DEVICE else str(device)


def true_device(tensor: torch.Tensor) -> torch.device:
    """`DEVICE` of a tensor that is on it, also where the model's code would be told otherwise."""
    with torch._C.DisableTorchFunction():
        return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


@dataclass
class Kept:
    """What a pretended move did to Parameters whose identity it could not keep: the old objects, and their successors.

    On CUDA a Parameter stays the object that it is, so that each other name of it follows. `replaced` says of which
    objects that could not be pretended. `asked` are the lines of the model's that asked whether there is a GPU at all.
    """

    release: Callable[[], None]
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    asked: list[Place] = field(default_factory=list)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.replaced


#: A context in which tensors may pretend to be elsewhere.
Stage = Callable[[Watch], contextlib.AbstractContextManager[Kept]]


@contextlib.contextmanager
def faked(watch: Watch) -> Iterator[Kept]:
    """Until the block ends, tensors that are made or moved hold no data and may be on `DEVICE`; `watch` looks on."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True, shape_env=shapes)
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo
    with _quiet(), mode, _Faking(watch, mode), pretending(memo.clear) as kept:
        yield kept


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What cannot be told without data is tried with data: torch need not log it."""
    loggers = [logging.getLogger(f"torch.{name}") for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


class _Faking(Watching):  # type: ignore[no-untyped-call]
    """Makes real tensors fake itself: FakeTensorMode computes with real ones where it can, and would go to `DEVICE`."""

    def __init__(self, watch: Watch, mode: FakeTensorMode) -> None:
        super().__init__(watch)
        self._mode = mode

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in self._mode.lift_fns:
            args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        return func(*args, **kwargs)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)


@contextlib.contextmanager
def pretending(release: Callable[[], None] = lambda: None) -> Iterator[Kept]:
    """Until the block ends, modules move as they do on CUDA, and autocast knows the device. All is put back.

    `release` drops the weak references to new tensors: torch swaps none that has one.
    """
    kept = Kept(release)
    with contextlib.ExitStack() as stack:
        cuda = _Cuda()
        stack.enter_context(_replaced(FakeTensor, "device", _told(cuda)))
        stack.enter_context(cuda)
        stack.enter_context(_lifted())
        stack.enter_context(_gpu(kept))
        stack.enter_context(_replaced(nn.Module, "_apply", _apply_of(kept)))
        stack.enter_context(_replaced(torch.amp.autocast_mode.autocast, "__init__", _autocast()))
        # `torch.cuda` of this device: what checkpointing asks for streams and random states.
        stack.enter_context(_replaced(torch, DEVICE.type, torch.cpu))
        for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
            stack.enter_context(_replaced(torch, name, _on_cpu(getattr(torch, name))))
        yield kept


@contextlib.contextmanager
def _gpu(kept: Kept) -> Iterator[None]:
    """What code asks `torch.cuda` about the one GPU. Whether there is one is answered truly, and the line is noted.

    Saying yes would be remembered beyond the block, by each library that asks once.
    """
    there = torch.cuda.is_available

    def is_available() -> bool:
        frame = sys._getframe(1)
        filename, found = frame.f_code.co_filename, there()
        if not found and is_theirs(filename) and "-packages" not in filename:
            kept.asked.append((filename, frame.f_lineno))
        return found

    with contextlib.ExitStack() as stack:
        if not there():
            for name, answer in _ANSWERS.items():
                stack.enter_context(_replaced(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(_replaced(torch.cuda, "is_available", is_available))
        yield


@contextlib.contextmanager
def _lifted() -> Iterator[None]:
    """Python lists become tensors on the CPU first, also where torch makes them in C++ (`x[[0, 1]]`, `new_tensor`)."""
    if not hasattr(torch._C, "_set_only_lift_cpu_tensors"):  # before torch 2.5
        yield
        return
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Cuda(TorchFunctionMode):
    """What code says to a GPU by name: `.cuda()`, `device="cuda"`, `.numpy()`; and torch.tensor, which asks no mode.

    And what it is told: `.device` is cuda:0, `.is_cuda` is true. torch's own code, which takes another path for CUDA
    than for this device, is told the truth: `busy` is above 0 while an operator is running.
    """

    busy = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.busy += 1
        try:
            return self._answered(func, args, dict(kwargs or {}))
        finally:
            self.busy -= 1

    def _answered(self, func: Any, args: Any, kwargs: Any) -> Any:
        asked = getattr(func, "__self__", None)
        if asked is _DEVICE:
            return _NAMED if args[0].device == DEVICE and _asked_by_theirs() else args[0].device
        if asked is _IS_CUDA:
            return args[0].is_cuda or (args[0].device == DEVICE and _asked_by_theirs())
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE)
        if func in _TO_NUMPY and args[0].device == DEVICE and not kwargs.get("force"):
            raise TypeError(f"can't convert cuda:0 {NO_NUMPY}. Use Tensor.cpu() first")
        if func is torch.Tensor.tolist and args[0].device == DEVICE:
            return args[0].to("cpu").tolist()
        if func is torch.Tensor.new and args[0].device == DEVICE:
            return _new(*args, **kwargs)
        if func is torch.Tensor.__format__ and not args[0].dim() and not isinstance(args[0], nn.Parameter):
            return format(args[0].item(), *args[1:])  # torch writes the number of a plain tensor only
        if "device" in kwargs:
            kwargs["device"] = _pretended(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_pretended, args[1:]))
        if func in (torch.ctc_loss, nn.functional.ctc_loss):  # lengths may be anywhere, and subclasses divide by them
            args = (*args[:2], *(_beside(args[0], one) for one in args[2:4]), *args[4:])
        if func in (torch.tensor, torch.as_tensor) and _is_there(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


def _told(cuda: _Cuda) -> property:
    """`FakeTensor.device`, which asks no mode: the model's code is told what it is of others, torch's the truth."""
    true = FakeTensor.__dict__["device"].fget

    def device(self: FakeTensor) -> torch.device:
        found: torch.device = true(self)
        outside = not cuda.busy and found == DEVICE
        return _NAMED if outside and _asked_by_theirs() else found

    return property(device)


def _asked_by_theirs() -> bool:
    """Whether the code that asks for a property is neither torch's nor ours; both getters lie in this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and is_theirs(frame.f_code.co_filename)


def _new(like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The old `Tensor.new`: torch's own makes it on a device without an index, which `DEVICE` is not."""
    if not args:
        return like.new_empty(kwargs.pop("size", 0), **kwargs)
    if issubclass(type(args[0]), torch.Tensor):
        alias: torch.Tensor = args[0].to(like.device, like.dtype)
        return alias
    if issubclass(type(args[0]), int) or isinstance(args[0], torch.Size):
        return like.new_empty(args[0] if isinstance(args[0], torch.Size) else args, **kwargs)
    return like.new_tensor(args[0], **kwargs)


def _pretended(device: Any) -> Any:
    named = type(device) is str and device.partition(":")[0] == "cuda"
    return DEVICE if named or (isinstance(device, torch.device) and device.type == "cuda") else device


def _beside(tensor: torch.Tensor, lengths: Any) -> Any:
    return lengths.to(tensor.device) if isinstance(lengths, torch.Tensor) else lengths


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


@contextlib.contextmanager
def _replaced(holder: Any, name: str, new: Any) -> Iterator[None]:
    missing = object()
    old = getattr(holder, name, missing)
    setattr(holder, name, new)
    try:
        yield
    finally:
        delattr(holder, name) if old is missing else setattr(holder, name, old)


def _autocast() -> Callable[..., None]:
    """autocast raises for a device type that it does not know; here it is off, as it would not change a device."""
    original = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type not in (DEVICE.type, _NAMED.type):
            return original(self, device_type, *args, **kwargs)
        return original(self, "cpu", enabled=False)

    return init


def _on_cpu(ask: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any) -> Any:
        return ask(*("cpu" if arg == DEVICE.type else arg for arg in args))

    return asked


def _apply_of(kept: Kept) -> Callable[..., nn.Module]:
    """`nn.Module._apply` as it is for a move to CUDA: a Parameter stays the object that it is, a buffer does not."""

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                self._parameters[name] = _renewed(parameter, fn, kept)  # type: ignore[assignment]
        for name, buffer in self._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                self._buffers[name] = fn(buffer)
        return self

    return _apply


def _renewed(parameter: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor], kept: Kept) -> torch.Tensor:
    """`parameter` with the data that `fn` gives, the same object wherever torch can swap it."""
    from torch.utils._python_dispatch import _disable_current_modes

    if parameter in kept:
        return kept.replaced[id(parameter)][1]
    with _disable_current_modes():
        # An alias: FakeTensorMode keeps weak references to what it converts, and such a tensor cannot be swapped.
        alias = parameter.data
    with torch.no_grad():
        data = fn(alias)
        if data is alias:
            return parameter
        new = nn.Parameter(data, parameter.requires_grad)
    vars(new).update({name: value for name, value in vars(parameter).items() if name not in vars(new)})
    kept.release()
    try:
        torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
    except RuntimeError:  # an autograd graph, a view or a weak reference holds on to it
        kept.replaced[id(parameter)] = (parameter, new)
        return new
    return parameter
