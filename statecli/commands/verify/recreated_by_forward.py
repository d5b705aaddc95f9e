"""Find tensors that each forward creates again, such as attention maps and caches for a device.

Both kinds are measured. statecli overwrites an attention map, and the next forward must replace it. A forward on
another device or in another dtype must not read a cache, but store another cache next to it or in its place. A tensor
that every forward adds (a history) is not a cache.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from statecli.commands.verify import check_builder
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.core.errors import ModelError
from statecli.live import fake_gpu, fake_gpu_values, measure, tensor_bits
from statecli.live.device_rules import DeviceWatch
from statecli.live.move_model import move_model
from statecli.live.tensors import identify_storage

if TYPE_CHECKING:
    from statecli.commands.verify.inputs import Call

REPLACED_EACH_TIME_REASON = "every forward replaces the tensor without reading the old value"
REPLACED_REASON = "forward replaces the tensor without reading the old value"
REPLACED_ON_CHANGE_REASON = "forward replaces the tensor when the {} changes"
_RECREATE_HELP = "create the tensor again in forward when the {0} changes, or keep one tensor per {0}"
_COPY_HELP = (
    "copy the tensor with .to(x.{0}) where forward reads the tensor; forward cannot create the tensor again, because "
    "its values depend on the input"
)


def suggest_recreation(subject: ModelUnderTest, fqn: str, change: str) -> str:
    """Return the fix for a tensor that forward creates only once, even if the device or dtype (`change`) changes."""
    return (_COPY_HELP if fqn in subject.input_dependent else _RECREATE_HELP).format(change)


def find_recreated_each_time(subject: ModelUnderTest) -> frozenset[str]:
    """Overwrite the tensors that forward created. Return the tensors that the next forward restores bit for bit."""
    try:
        module = subject.build_used(values=True)
    except ModelError:
        return frozenset()
    tensors = measure.map_tensors(module)
    created = {name: tensors[name] for name in subject.created_by_forward if name in tensors}
    values_before = {name: (tensor, check_builder.copy_values(tensor)) for name, tensor in created.items()}
    put_back = tensor_bits.build_restore(
        created.values()
    )  # all instances, also the user's, share tensors in a memo or in a dict of the class
    try:
        tensor_bits.perturb(created.values())
        subject.call(module)
    except ModelError:
        return frozenset()  # forward reads the overwritten values
    finally:
        put_back()
    after = measure.map_tensors(module)
    return frozenset(
        name
        for name, (tensor, values) in values_before.items()
        if name in after
        and after[name] is not tensor
        and values is not None
        and tensor_bits.is_same(values, after[name])
    )


# --- on another device, of another dtype ------------------------------------------------------------------------------


@dataclass
class RecreatedTensors:
    """Result of a second forward, after a cast or move: which tensors of the first forward it creates again or reads.

    `recreated`: tensors created again. `read_names`: tensors read. `reason`: why the others are inconclusive.
    """

    recreated: frozenset[str] = frozenset()
    read_names: set[str] = field(default_factory=set)
    reason: str | None = None


class Recreation:
    """Tensors that forward creates again: at each call, or after a change of `aspect` ("device" or "dtype").

    Both are measured when the first tensor created by forward needs them; `measure_change` measures the change.
    """

    def __init__(self, subject: ModelUnderTest, aspect: str, measure_change: Callable[[], RecreatedTensors]) -> None:
        self._subject, self._aspect, self._measure_change = subject, aspect, measure_change

    @functools.cached_property
    def _each_time(self) -> frozenset[str]:
        return find_recreated_each_time(self._subject)

    @functools.cached_property
    def _after_change(self) -> RecreatedTensors:
        return self._measure_change()

    def explain_harmless(self, fqn: str) -> str | None:
        """Return how forward replaces a tensor that it created. Return None if forward does not replace the tensor."""
        if fqn not in self._subject.created_by_forward:
            return None
        if fqn in self._each_time:
            return REPLACED_EACH_TIME_REASON
        return REPLACED_ON_CHANGE_REASON.format(self._aspect) if fqn in self._after_change.recreated else None

    def explain_unknown(self, fqn: str) -> str | None:
        """Return why it is unknown whether forward replaces a tensor, or None if that is known."""
        if fqn not in self._subject.created_by_forward:
            return None
        if self._after_change.reason is None or fqn in self._after_change.read_names:
            return None
        return f"statecli does not know whether forward creates the tensor again: {self._after_change.reason}"


@dataclass(frozen=True)
class _Conversion:
    """A move or cast of a model.

    Attributes:
        destination: The device or dtype.
        description: The move or cast in words.
        has_arrived: Returns True for a tensor at the destination.
        context: Context of the forward there.
    """

    destination: torch.device | torch.dtype
    description: str
    has_arrived: Callable[[torch.Tensor], bool]
    context: Callable[[], AbstractContextManager[object]]
    values: bool = True


def convert_inputs(call: Call, destination: torch.device | torch.dtype) -> Call:
    """Return the arguments of a call, cast to a dtype or moved to a device. Any object with a `.to` method is moved."""

    def convert(leaf: Any) -> Any:
        if isinstance(destination, torch.dtype):
            return leaf.to(destination) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        return leaf.to(destination) if callable(getattr(leaf, "to", None)) else leaf

    args, kwargs = tree_map(convert, call)
    return args, kwargs


def find_recreated_for_dtype(subject: ModelUnderTest, dtype: torch.dtype) -> RecreatedTensors:
    """Find the tensors that forward creates again after the model and its inputs were cast to `dtype`."""
    return _try_conversions(
        subject, [_Conversion(dtype, f"as {dtype}", lambda tensor: tensor.dtype == dtype, torch.no_grad)]
    )


def find_recreated_on_device(subject: ModelUnderTest, device_name: str) -> RecreatedTensors:
    """Find the tensors that forward creates again on another device: a requested real GPU, or a fake GPU."""
    is_fake = device_name in (fake_gpu.DISPLAY_NAME, "cpu", "meta")
    device = fake_gpu.DEVICE if is_fake else torch.device(device_name)
    contexts: list[tuple[fake_gpu.FakeGpuContext, bool]] = [(fake_gpu.use_real_gpu, True)]
    if is_fake:
        contexts = [(fake_gpu.use_fake_gpu, False), (fake_gpu_values.use_fake_gpu_with_values, True)]

    def has_arrived(tensor: torch.Tensor) -> bool:
        return fake_gpu.get_true_device(tensor) == device

    description = f"on {fake_gpu.DISPLAY_NAME if is_fake else device_name}"
    return _try_conversions(
        subject,
        [
            _Conversion(device, description, has_arrived, functools.partial(context, DeviceWatch(device)), values)
            for context, values in contexts
        ],
    )


def _try_conversions(subject: ModelUnderTest, conversions: Iterable[_Conversion]) -> RecreatedTensors:
    """Return the result of the first conversion after which forward runs without an error."""
    result = RecreatedTensors()
    for conversion in conversions:
        result = RecreatedTensors()
        try:
            result.recreated = _find_recreated(subject, conversion, result.read_names)
            break
        except ModelError as error:
            result.reason = fake_gpu.describe_failure(check_builder.get_reason(subject, error), error.__cause__)
    result.recreated -= result.read_names
    return result


def _find_recreated(subject: ModelUnderTest, conversion: _Conversion, read_names: set[str]) -> frozenset[str]:
    module = subject.build_used(values=conversion.values)
    with check_builder.keep_class_attributes(module), conversion.context(), torch.no_grad():
        with subject.user_code("moving the model"):
            module = move_model(module, conversion.destination)
        before = measure.map_tensors(module)
        left_behind = {
            name: before[name]
            for name in subject.created_by_forward
            if name in before and not conversion.has_arrived(before[name])
        }
        with subject.user_code(f"calling the model {conversion.description}"), ReadRecorder(left_behind, read_names):
            call = subject.inputs.make_call(seed=0)  # type: ignore[union-attr]
            args, kwargs = convert_inputs(call, conversion.destination)
            module.eval()(*args, **kwargs)
        after = measure.map_tensors(module)
    known_ids = {id(tensor) for tensor in before.values()}
    new = {
        name: tensor for name, tensor in after.items() if id(tensor) not in known_ids and conversion.has_arrived(tensor)
    }
    in_place = {name for name in left_behind if name in new}
    new_counts = Counter(
        _get_pattern_and_shape(name, tensor) for name, tensor in new.items() if name not in left_behind
    )
    needed_counts = Counter(
        _get_pattern_and_shape(name, tensor) for name, tensor in left_behind.items() if name not in in_place
    )
    growing = _find_growing_containers(subject) if needed_counts else frozenset()
    candidates = {name for name in left_behind if name not in in_place and _get_pattern(name) not in growing}
    return frozenset(
        in_place
        | {
            n
            for n in candidates
            if new_counts[_get_pattern_and_shape(n, left_behind[n])]
            >= needed_counts[_get_pattern_and_shape(n, left_behind[n])]
        }
    )


def _get_pattern(name: str) -> str:
    """Return the name without the keys of containers: `cache[]` for `cache['cpu']`."""
    return re.sub(r"\[[^\]]*\]", "[]", name)


def _get_pattern_and_shape(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return _get_pattern(name), tuple(tensor.shape)


def _find_growing_containers(subject: ModelUnderTest) -> frozenset[str]:
    """Return the containers that get a new entry in each forward."""
    module = subject.build_used()
    before = measure.map_tensors(module)
    subject.call(module)
    return frozenset(_get_pattern(name) for name in measure.map_tensors(module) if name not in before)


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
