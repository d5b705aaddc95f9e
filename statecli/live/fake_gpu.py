"""Fake a CUDA device without values: tensors claim to be on the device, but have no data.

FakeTensorMode computes shapes only. The device is `lazy:0`, known to every build of torch and implemented by none: on
`cuda:0` a build without CUDA aborts the process. A `DeviceWatch` above the mode checks CUDA's rules. The model's own
code reads `cuda:0` as the device of a tensor, and `cuda` in calls of the model's code means the fake device.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from statecli.core.lazy_pattern import compile_on_use
from statecli.live.attribute_patch import replace_attribute
from statecli.live.device_rules import PLAIN_TYPES, DeviceWatch, DeviceWatchMode
from statecli.live.exception_text import get_exception_text
from statecli.live.installed_code import is_installed_file
from statecli.live.source_line import SourceLine, get_current_line
from statecli.live.tensor_sources import is_user_code
from statecli.live.tensors import is_lazy

#: The device that stands for cuda:0.
DEVICE = torch.device("lazy", 0)
_CUDA_DEVICE = torch.device("cuda", 0)
#: Name of the fake device in reports.
DISPLAY_NAME = "cuda:0 (fake)"
#: Part of torch's error for a tensor on a GPU that is read as an array.
NUMPY_ERROR = "device type tensor to numpy"
_UNKNOWN_OPERATOR = compile_on_use(r"Could not run '(aten::\w+)\S*' with arguments from the 'Lazy' backend")
_DEVICE: Any = torch.Tensor.device
_IS_CUDA: Any = torch.Tensor.is_cuda
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
#: Torch's function that calls the C++ engine for `torch.autograd.backward` and `grad`.
_RUN_BACKWARD = "_engine_run_backward"
#: Answers of `torch.cuda` functions, as on a GPU of 2020: a model then chooses kernels that such a GPU supports.
_CUDA_ANSWERS = {
    "get_device_capability": (8, 0),
    "current_device": 0,
    "device_count": 1,
    "is_bf16_supported": True,
    "synchronize": None,
    "empty_cache": None,
}
_LOGGERS = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")


def describe_failure(reason: str, cause: BaseException | None) -> str:
    """Return a short reason if the fake device lacks tensor values or an operator, otherwise `reason`."""
    if "DataDependent" in type(cause).__name__ or "DynamicOutputShape" in type(cause).__name__:
        return "the model's control flow depends on tensor values, which a fake CUDA device does not have"
    match = _UNKNOWN_OPERATOR.search(get_exception_text(cause))
    return f"{match[1]} cannot run on a fake CUDA device" if match else reason.replace(str(DEVICE), "cuda:0")


def describe_device_after_move(tensor: torch.Tensor, record: MoveRecord) -> str:
    """Return the device of a tensor after a fake move. Replaced and lazy parameters count as moved, as on CUDA."""
    return DISPLAY_NAME if tensor in record or is_lazy(tensor) else describe_device(tensor)


def follows_device(tensor: torch.Tensor, record: MoveRecord) -> bool:
    """Return True if `tensor` is on the fake device after a move of its model."""
    return describe_device_after_move(tensor, record) == DISPLAY_NAME


def watch_move(context: FakeGpuContext) -> contextlib.AbstractContextManager[MoveRecord]:
    """Return a context manager in which a model can be moved to a fake GPU, without a call of forward."""
    return context(DeviceWatch(DEVICE))


def describe_device(tensor: torch.Tensor) -> str:
    """Return the device of `tensor` as shown in reports: `cuda:0 (fake)` for the fake device."""
    device = get_true_device(tensor)
    return DISPLAY_NAME if device == DEVICE else str(device)


def get_true_device(tensor: torch.Tensor) -> torch.device:
    """Return the true device of `tensor`: `DEVICE` for a tensor on the fake GPU (`cuda:0` for the model's code)."""
    with torch._C.DisableTorchFunction():
        return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


@dataclass
class MoveRecord:
    """Parameters that a fake move replaced with other objects, and lines where the model's code asked for a GPU.

    Attributes:
        release: Drops weak references to new tensors, because torch cannot swap a tensor that has one.
        successors: By id, each replaced Parameter and its successor. On CUDA a Parameter stays the same object, so
            that its other names follow.
        cuda_checks: Lines of the model's code that called `torch.cuda.is_available()`.
    """

    release: Callable[[], None]
    successors: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    cuda_checks: list[SourceLine] = field(default_factory=list)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.successors


#: A context manager in which tensors may claim to be on the fake device.
FakeGpuContext = Callable[[DeviceWatch], contextlib.AbstractContextManager[MoveRecord]]


@contextlib.contextmanager
def use_fake_gpu(watch: DeviceWatch) -> Iterator[MoveRecord]:
    """Inside the block, fake a GPU without values: tensors on it hold no data, and `watch` checks each operator."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True, shape_env=shapes)
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo
    with _silence_torch_loggers(), mode, _FakeTensorWatchMode(watch, mode), patch_torch(memo.clear) as record:
        yield record


@contextlib.contextmanager
def use_real_gpu(watch: DeviceWatch) -> Iterator[MoveRecord]:
    """Inside the block, watch forward on a real GPU. Move arguments that CUDA would refuse, as the fake GPU does."""
    with DeviceWatchMode(watch):
        yield MoveRecord(lambda: None)


@contextlib.contextmanager
def _silence_torch_loggers() -> Iterator[None]:
    """Silence torch's messages about operators that need data, because statecli then runs them with data."""
    with contextlib.ExitStack() as stack:
        for name in _LOGGERS:
            stack.enter_context(replace_attribute(logging.getLogger(f"torch.{name}"), "disabled", True))
        yield


class _FakeTensorWatchMode(DeviceWatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that makes real tensors fake, because FakeTensorMode would compute with real tensors."""

    def __init__(self, watch: DeviceWatch, mode: FakeTensorMode) -> None:
        super().__init__(watch)
        self._mode = mode

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in self._mode.lift_fns and _has_real_tensor((*args, *kwargs.values())):
            args, kwargs = tree_map_only(torch.Tensor, self._convert, (args, kwargs))
        return func(*args, **kwargs)

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)


def _has_real_tensor(values: Iterable[Any]) -> bool:
    """Return True if an operator's arguments contain a real tensor or an unknown object, also inside lists."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor or kind in PLAIN_TYPES:
            continue
        if (kind is not list and kind is not tuple) or _has_real_tensor(value):
            return True
    return False


@contextlib.contextmanager
def patch_torch(release: Callable[[], None] = lambda: None) -> Iterator[MoveRecord]:
    """Inside the block, patch torch so that modules move as on CUDA and autocast accepts the fake device."""
    record = MoveRecord(release)
    with contextlib.ExitStack() as stack:
        cuda = _CudaCallMode()
        stack.enter_context(replace_attribute(FakeTensor, "device", _build_device_property(cuda)))
        stack.enter_context(cuda)
        if hasattr(torch.autograd, _RUN_BACKWARD):  # from torch 2.3 on
            run_backward = cuda.build_run_backward(getattr(torch.autograd, _RUN_BACKWARD))
            stack.enter_context(replace_attribute(torch.autograd, _RUN_BACKWARD, run_backward))
        stack.enter_context(_lift_lists_on_cpu())
        stack.enter_context(_patch_cuda_queries(record))
        stack.enter_context(replace_attribute(nn.Module, "_apply", _build_apply(record)))
        stack.enter_context(replace_attribute(torch.amp.autocast_mode.autocast, "__init__", _build_autocast_init()))
        # Checkpointing asks the module of the device type, as torch.cuda, for streams and random states.
        stack.enter_context(replace_attribute(torch, DEVICE.type, torch.cpu))
        for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
            stack.enter_context(replace_attribute(torch, name, _query_for_cpu(getattr(torch, name))))
        yield record


@contextlib.contextmanager
def _patch_cuda_queries(record: MoveRecord) -> Iterator[None]:
    """Answer `torch.cuda` queries as if one GPU existed. `is_available` keeps its answer; user calls are recorded.

    Libraries call `is_available` once and would remember a wrong answer after the block.
    """
    torch_is_available = torch.cuda.is_available

    def is_available() -> bool:
        frame = sys._getframe(1)
        place, is_available_ = get_current_line(frame), torch_is_available()
        if not is_available_ and is_user_code(place.file) and not is_installed_file(place.file):
            record.cuda_checks.append(place)
        return is_available_

    with contextlib.ExitStack() as stack:
        if not torch_is_available():
            for name, answer in _CUDA_ANSWERS.items():
                stack.enter_context(replace_attribute(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(replace_attribute(torch.cuda, "is_available", is_available))
        yield


@contextlib.contextmanager
def _lift_lists_on_cpu() -> Iterator[None]:
    """Create tensors from Python lists on the CPU first, also where C++ code creates them (`x[[0, 1]]`)."""
    if not hasattr(torch._C, "_set_only_lift_cpu_tensors"):  # before torch 2.5
        yield
        return
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _CudaCallMode(TorchFunctionMode):
    """Emulate CUDA in calls that name CUDA (`.cuda()`, `device="cuda"`) or depend on the device (`.numpy()`).

    User code reads cuda:0 as `.device` and True as `.is_cuda`. torch's own code has another path for CUDA and reads
    the true device: `busy` is above 0 while an operator runs.
    """

    busy = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.busy += 1
        try:
            return self._handle_call(func, args, dict(kwargs or {}))
        finally:
            self.busy -= 1

    def build_run_backward(self, run_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward function that runs under this mode, because `torch.autograd` would disable the mode."""

        def run_backward_under_mode(*args: Any, **kwargs: Any) -> Any:
            busy, self.busy = self.busy, 0
            try:
                with self:
                    return run_backward(*args, **kwargs)
            finally:
                self.busy = busy

        return run_backward_under_mode

    def _handle_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        getter_owner = getattr(func, "__self__", None)
        if getter_owner is _DEVICE:
            return _CUDA_DEVICE if args[0].device == DEVICE and _is_called_by_user_code() else args[0].device
        if getter_owner is _IS_CUDA:
            return args[0].is_cuda or (args[0].device == DEVICE and _is_called_by_user_code())
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE)
        if func in _TO_NUMPY and args[0].device == DEVICE and not kwargs.get("force"):
            raise TypeError(f"can't convert cuda:0 {NUMPY_ERROR}. Use Tensor.cpu() first")
        if func is torch.Tensor.tolist and args[0].device == DEVICE:
            return args[0].to("cpu").tolist()
        if func is torch.Tensor.new and args[0].device == DEVICE:
            return _emulate_new(*args, **kwargs)
        if func is torch.Tensor.__format__ and not args[0].dim() and not isinstance(args[0], nn.Parameter):
            return format(args[0].item(), *args[1:])  # torch writes the number of a plain tensor only
        if "device" in kwargs:
            kwargs["device"] = _replace_cuda(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_replace_cuda, args[1:]))
        if func in (torch.ctc_loss, nn.functional.ctc_loss):  # lengths may be anywhere, and subclasses divide by them
            args = (*args[:2], *(_move_lengths(args[0], lengths) for lengths in args[2:4]), *args[4:])
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == DEVICE.type:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


def _build_device_property(cuda: _CudaCallMode) -> property:
    """Build the property `FakeTensor.device`: user code reads cuda:0, torch's own code reads the true device."""
    get_fake_device = FakeTensor.__dict__["device"].fget

    def device(self: FakeTensor) -> torch.device:
        actual: torch.device = get_fake_device(self)
        is_asked_outside = not cuda.busy and actual == DEVICE
        return _CUDA_DEVICE if is_asked_outside and _is_called_by_user_code() else actual

    return property(device)


def _is_called_by_user_code() -> bool:
    """Return True if user code reads the device. Frames of this file are skipped, because they are property getters."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and is_user_code(frame.f_code.co_filename)


def _emulate_new(like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Emulate the legacy `Tensor.new`, because torch's version creates a tensor on a device without index."""
    if not args:
        return like.new_empty(kwargs.pop("size", 0), **kwargs)
    if issubclass(type(args[0]), torch.Tensor):
        alias: torch.Tensor = args[0].to(like.device, like.dtype)
        return alias
    if issubclass(type(args[0]), int) or isinstance(args[0], torch.Size):
        return like.new_empty(args[0] if isinstance(args[0], torch.Size) else args, **kwargs)
    return like.new_tensor(args[0], **kwargs)


def _replace_cuda(device: object) -> Any:
    is_cuda_text = type(device) is str and device.partition(":")[0] == "cuda"
    return DEVICE if is_cuda_text or (isinstance(device, torch.device) and device.type == "cuda") else device


def _move_lengths(tensor: torch.Tensor, lengths: object) -> Any:
    return lengths.to(tensor.device) if isinstance(lengths, torch.Tensor) else lengths


def _build_autocast_init() -> Callable[..., None]:
    """Build an `autocast.__init__` that disables autocast on the fake device, because torch refuses its device type."""
    original = torch.amp.autocast_mode.autocast.__init__

    def init_unless_fake(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type in (DEVICE.type, _CUDA_DEVICE.type):
            device_type, args, kwargs = "cpu", (), {"enabled": False}
        return original(self, device_type, *args, **kwargs)

    return init_unless_fake


def _query_for_cpu(query: Callable[..., Any]) -> Callable[..., Any]:
    def ask_about_cpu(*args: Any) -> Any:
        return query(*("cpu" if arg == DEVICE.type else arg for arg in args))

    return ask_about_cpu


def _build_apply(record: MoveRecord) -> Callable[..., nn.Module]:
    """Build `nn.Module._apply` as for a move to CUDA: Parameter objects stay and buffers are replaced."""

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                self._parameters[name] = _apply_to_parameter(parameter, fn, record)  # type: ignore[assignment]
        for name, buffer in self._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                self._buffers[name] = fn(buffer)
        return self

    return _apply


def _apply_to_parameter(
    parameter: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor], record: MoveRecord
) -> torch.Tensor:
    """Give `parameter` the data that `fn` returns. Return the same object if torch can swap its content."""
    from torch.utils._python_dispatch import _disable_current_modes

    if parameter in record:
        return record.successors[id(parameter)][1]
    with _disable_current_modes():
        # An alias: FakeTensorMode keeps weak references to converted tensors, and such a tensor cannot be swapped.
        alias = parameter.data
    with torch.no_grad():
        data = fn(alias)
        if data is alias:
            return parameter
        successor = nn.Parameter(data, parameter.requires_grad)
    vars(successor).update({name: value for name, value in vars(parameter).items() if name not in vars(successor)})
    record.release()
    hooks = {name: getattr(parameter, name, None) for name in _HOOKS}
    try:
        torch.utils.swap_tensors(parameter, successor)  # type: ignore[no-untyped-call]
    except RuntimeError:  # an autograd graph, a view or a weak reference uses the tensor
        record.successors[id(parameter)] = (parameter, successor)
        parameter, successor = successor, parameter
    for name, functions in hooks.items():  # hooks are part of the content that was swapped
        if functions is not None:
            setattr(successor, name, None)
            setattr(parameter, name, functions)
    return parameter


#: Attributes with the hooks of a tensor through which backward calls functions of the model.
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has backward hooks."""
    return any(getattr(tensor, name, None) for name in _HOOKS)
