"""Find tensors of the first forward, such as caches, that forward still reads after a move or cast of the model.

A move does not reach such a tensor. The old tensor is harmless if a forward on the other device, or in the other dtype,
does not read it: forward replaces an attention map at each call, and stores another cache next to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from statecli.commands.verify import check_builder
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.result import Cell
from statecli.core.errors import ModelError
from statecli.live import fake_gpu, fake_gpu_values, measure
from statecli.live.device_rules import DeviceWatch
from statecli.live.move_model import move_model
from statecli.live.tensors import identify_storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statecli.commands.verify.inputs import Call

NOT_READ_REASON = "after a change of the {}, forward does not read the tensor"
_RECREATE_HELP = "create the tensor again in forward when the {0} changes, or keep one tensor per {0}"
_COPY_HELP = (
    "copy the tensor with .to(x.{0}) where forward reads the tensor; forward cannot create the tensor again, because "
    "its values depend on the input"
)


def suggest_recreation(subject: ModelUnderTest, fqn: str, change: str) -> str:
    """Return the fix for a tensor that forward creates only once, even if the device or dtype (`change`) changes."""
    return (_COPY_HELP if fqn in subject.input_dependent else _RECREATE_HELP).format(change)


class Reads(msgspec.Struct, frozen=True):
    """Tensors of the first forward that a second forward reads. `error`: why the second forward raised, or None."""

    names: frozenset[str]
    error: str | None = None


class Excuses:
    """Reasons why a tensor may keep its `aspect` ("device" or "dtype") when the model is moved or cast.

    The second forward (`measure_reads`) runs when the first tensor created by forward needs it.
    """

    def __init__(self, subject: ModelUnderTest, aspect: str, measure_reads: Callable[[], Reads]) -> None:
        self._subject, self._aspect, self._measure_reads = subject, aspect, measure_reads
        self._memos = check_builder.find_memos(subject)

    @functools.cached_property
    def _reads(self) -> Reads:
        return self._measure_reads()

    def build_cell(self, fqn: str, recomputed: frozenset[str], **measured: str | None) -> Cell | None:
        """Return a skipped or inconclusive cell, or None if keeping the device or dtype is a fault."""
        if fqn in recomputed:
            return check_builder.skip_cell(check_builder.RECOMPUTED_REASON, **measured)
        if fqn in self._memos:
            return check_builder.skip_cell(check_builder.MEMO_REASON, **measured)
        if fqn not in self._subject.created_by_forward or fqn in self._reads.names:
            return None
        if self._reads.error is None:
            return check_builder.skip_cell(NOT_READ_REASON.format(self._aspect), **measured)
        reason = f"statecli does not know whether forward still reads the tensor: {self._reads.error}"
        return check_builder.build_inconclusive_cell(reason, **measured)


def convert_inputs(call: Call, destination: torch.device | torch.dtype) -> Call:
    """Return the arguments of a call, cast to a dtype or moved to a device. Any object with a `.to` method is moved."""

    def convert(leaf: Any) -> Any:
        if isinstance(destination, torch.dtype):
            return leaf.to(destination) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        return leaf.to(destination) if callable(getattr(leaf, "to", None)) else leaf

    args, kwargs = tree_map(convert, call)
    return args, kwargs


def find_reads_as(subject: ModelUnderTest, dtype: torch.dtype) -> Reads:
    """Find the tensors of the first forward that forward reads after the model and its inputs were cast."""
    return _find_reads(
        subject, dtype, f"as {dtype}", lambda tensor: tensor.dtype == dtype, torch.no_grad(), values=True
    )


def find_reads_on(subject: ModelUnderTest, device_name: str) -> Reads:
    """Find the tensors of the first forward that forward reads on a requested GPU, or on a fake GPU."""
    is_fake = device_name in (fake_gpu.DISPLAY_NAME, "cpu", "meta")
    device = fake_gpu.DEVICE if is_fake else torch.device(device_name)
    description = f"on {fake_gpu.DISPLAY_NAME if is_fake else device_name}"

    def has_arrived(tensor: torch.Tensor) -> bool:
        return fake_gpu.get_true_device(tensor) == device

    def find(context: fake_gpu.FakeGpuContext, *, values: bool) -> Reads:
        return _find_reads(subject, device, description, has_arrived, context(DeviceWatch(device)), values=values)

    if not is_fake:
        return find(fake_gpu.use_real_gpu, values=True)
    reads = find(fake_gpu.use_fake_gpu, values=False)
    return reads if reads.error is None else find(fake_gpu_values.use_fake_gpu_with_values, values=True)


def _find_reads(
    subject: ModelUnderTest,
    destination: torch.device | torch.dtype,
    description: str,
    has_arrived: Callable[[torch.Tensor], bool],
    context: AbstractContextManager[object],
    *,
    values: bool,
) -> Reads:
    read_names: set[str] = set()
    try:
        module = subject.build_used(values=values)
        with check_builder.keep_class_attributes(module), context, torch.no_grad():
            with subject.user_code("moving the model"):
                module = move_model(module, destination)
            tensors = measure.map_tensors(module)
            old = {name: tensors[name] for name in subject.created_by_forward if name in tensors}
            old = {name: tensor for name, tensor in old.items() if not has_arrived(tensor)}
            with subject.user_code(f"calling the model {description}"), ReadRecorder(old, read_names):
                args, kwargs = convert_inputs(subject.inputs.make_call(seed=0), destination)  # type: ignore[union-attr]
                module.eval()(*args, **kwargs)
    except ModelError as error:
        text = check_builder.get_reason(subject, error)
        return Reads(frozenset(read_names), fake_gpu.describe_failure(text, error.__cause__))
    return Reads(frozenset(read_names))


class ReadRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that adds to `read_names` each tensor that an operator reads, directly or through a view."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], read_names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_get_key(tensor): name for name, tensor in tensors.items()}
        self._read_names = read_names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # an operator of `prim` is a query
            keys = (_get_key(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor))
            self._read_names.update(self._names[key] for key in keys if key in self._names)
        return func(*args, **(kwargs or {}))


def _get_key(tensor: torch.Tensor) -> object:
    """Return a key shared by a tensor and its views. A fake tensor has a key of its own."""
    return (id(tensor), FakeTensor) if isinstance(tensor, FakeTensor) else identify_storage(tensor)
