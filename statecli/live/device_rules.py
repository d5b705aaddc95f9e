"""Find operators that CUDA would refuse because their tensors are on different devices, and name these tensors.

A `DeviceWatch` checks every operator run by forward, above FakeTensorMode, wrapper tensors or a GPU. The rules of eager
CUDA apply:

- An elementwise operator of two tensors takes a 0-dim CPU tensor as a number, but not as its output.
- CPU indices into a table on the device are legal; indices on the device into a table on the CPU are not.
- Copies may go from any device to any device.
- All other operators need every tensor on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from statecli.live import tensor_sources
from statecli.live.source_line import SourceLine
from statecli.live.tensor_sources import CallStack, CudaRefusal, Fault, How, Mismatch, TensorSource


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators that take tensors of any device: copies, and operators that read only a shape, a length or a number.
ANY_DEVICE_OPERATORS = _split_words(
    "copy copy_ _to_copy _copy_from _copy_from_and_resize _foreach_copy_ _foreach_copy lift lift_fresh lift_fresh_copy "
    "device_put resize_as_ resize_as set_ fill fill_ is_same_size is_set_to _has_compatible_shallow_copy_type "
    "_pack_padded_sequence _pad_packed_sequence tensor_split slice_scatter select_scatter diagonal_scatter "
    "as_strided_scatter _ctc_loss ctc_loss record_stream _assert_async _assert_tensor_metadata bernoulli_ "
    "linspace logspace"
)
#: Types of arguments without tensors. Most arguments have such a type, and torch's search for tensors takes 10 us.
PLAIN_TYPES = frozenset(
    [int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)
#: Operators that read `self` at indices, which may be on the CPU while `self` is not.
_INDEXING_OPERATORS = _split_words(
    "index index_put index_put_ _index_put_impl _index_put_impl_ _unsafe_index _unsafe_index_put "
    "_unsafe_masked_index _unsafe_masked_index_put_accumulate"
)
#: Operators whose argument `batch_sizes` (elements per step) is on the CPU by design.
_RNN_OPERATORS = _split_words("lstm gru rnn_tanh rnn_relu _cudnn_rnn")
#: Elementwise operators whose CUDA kernels take one 0-dim tensor of the CPU, on either side: `device_check: NoCheck` in
#: torch's native_functions.yaml, and a kernel "with scalars". The in-place variants end in an underscore.
ONE_CPU_SCALAR_OPERATORS = _split_words(
    "add sub rsub mul div true_divide floor_divide remainder fmod pow atan2 arctan2 hypot copysign xlogy heaviside "
    "ldexp maximum minimum fmax fmin eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or "
    "bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ "
    "__iand__ __ior__ __ixor__ __ilshift__ __irshift__ dist special_zeta special_xlogy special_xlog1py "
    "special_chebyshev_polynomial_t "
    "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w "
    "special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l "
    "special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
    "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w"
)
#: Arguments that may be 0-dim CPU tensors next to tensors of another device, because the operator moves the tensor or
#: reads the number.
CPU_SCALAR_ARGUMENTS = {
    "where": _split_words("condition self other"),
    "masked_fill": _split_words("value"),
    "index_fill": _split_words("value"),
    "addcmul": _split_words("tensor2"),
    "lerp": _split_words("weight"),
    "binary_cross_entropy_with_logits": _split_words("weight pos_weight"),
    "soft_margin_loss": _split_words("target"),
    "allclose": _split_words("self other"),
}
#: Argument of the `_foreach_` operators with a number for each tensor of a list, on the CPU.
_SCALARS_ARGUMENT = "scalars"

#: Torch's error message for tensors of several devices.
_SAME_DEVICE_MESSAGE = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
#: Arguments that an operator requires on the CPU, with torch's error message for other devices.
CPU_ONLY_ARGUMENTS = {
    "_pack_padded_sequence": (
        "lengths",
        "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor",
    ),
}
#: Operators on a tensor that Python has just created from a list, which no variable can hold.
_LIFT_OPERATORS = _split_words("lift lift_fresh lift_fresh_copy")


@dataclass
class DeviceWatch:
    """Check the device of each tensor that the operators of a forward pass use.

    A refused operator raises `CudaRefusal`, or is recorded in `mismatches` to let forward go on.

    Attributes:
        device: The device of the moved model.
        copied_by_forward: The model's tensors copied to the device by forward, with the line.
        read_elsewhere: The model's tensors read by forward on another device.
        taken_from_elsewhere: Tensors accepted by an operator from another device, with operator and line.
    """

    device: torch.device
    mismatches: list[Mismatch] = field(default_factory=list)
    copied_by_forward: dict[str, SourceLine | None] = field(default_factory=dict)
    read_elsewhere: set[str] = field(default_factory=set)
    taken_from_elsewhere: dict[str, tuple[str, SourceLine | None]] = field(default_factory=dict)
    #: Mismatches to record so that forward continues; other mismatches are raised. None: raise only those in `caught`.
    carried_over: frozenset[Mismatch] | None = None
    #: Call stacks in which a mismatch ended an earlier run. The model does not catch errors there, so further
    #: mismatches in these calls are recorded, not raised.
    uncaught_calls: frozenset[CallStack] = frozenset()
    caught: frozenset[Mismatch] = frozenset()
    raised: set[Mismatch] = field(default_factory=set)
    _excused: set[str] = field(default_factory=set)
    # By the id of the tensor, which is kept so that no id is used twice: a weak reference would prevent torch's swap.
    _sources: dict[int, tuple[torch.Tensor, TensorSource]] = field(default_factory=dict)

    def excuse(self, names: Iterable[str]) -> None:
        """Ignore device errors of the named tensors, because the fake move failed to move them."""
        self._excused.update(names)

    def add_names(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record each name as the source of its tensor. A tensor keeps its first name."""
        for fqn, tensor in names:
            source = self.get_source(tensor)
            if source is None or source.fqn is None:
                self._sources[id(tensor)] = (tensor, TensorSource(fqn))

    def get_source(self, tensor: torch.Tensor) -> TensorSource | None:
        """Return the recorded source of `tensor`, or None if no source is recorded."""
        entry = self._sources.get(id(tensor))
        return None if entry is None else entry[1]

    def _find_source(self, tensor: torch.Tensor) -> TensorSource | None:
        """Return the recorded source of `tensor`, or else a variable in the model's file, or else None."""
        source = self.get_source(tensor)
        variable = tensor_sources.find_file_variable(tensor) if source is None else None
        if variable is None:
            return source
        return self._sources.setdefault(id(tensor), (tensor, TensorSource(file_variable=variable)))[1]

    def find_refused(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the tensors on a wrong device for the operator. Record a mismatch for each, or raise `CudaRefusal`."""
        tensors = list_tensors(*args, *kwargs.values())
        off_device_tensors = [tensor for tensor in tensors if tensor.device != self.device]
        if not off_device_tensors:
            return []
        self._record_reads(func, off_device_tensors, kwargs)
        strays = find_strays(func, args, kwargs, self.device)
        if strays:
            self._blame_strays(func, strays, tensors)
        elif len(off_device_tensors) < len(tensors):
            self._record_taken(func, off_device_tensors)
        return strays

    def find_off_cpu(self, func: object, args: object, kwargs: object) -> list[torch.Tensor]:
        """Return tensors on the device that the operator needs on the CPU. Record them, or raise `CudaRefusal`."""
        name = get_operator_name(func)
        if name not in CPU_ONLY_ARGUMENTS:
            return []
        argument_name, message = CPU_ONLY_ARGUMENTS[name]
        values = [value for argument, value in _bind_arguments(func, args, kwargs) if argument.name == argument_name]
        tensors_on_device = [tensor for tensor in list_tensors(*values) if tensor.device == self.device]
        place = tensor_sources.find_user_place()
        sources = [self.get_source(tensor) or TensorSource() for tensor in tensors_on_device]
        faults = [Mismatch(value, "", argument_name, name.strip("_"), place, Fault.NOT_ON_CPU) for value in sources]
        self._record_or_raise(faults, message)
        return tensors_on_device

    def refuses_generator(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return True if CUDA would refuse the operator's generator, and record the refusal."""
        generator = kwargs.get("generator")
        if generator is None or generator.device.type == self.device.type:
            return False
        tensors = list_tensors(*args, *kwargs.values())
        if kwargs.get("device") != self.device and all(tensor.device != self.device for tensor in tensors):
            return False
        operator, place = get_operator_name(func).strip("_"), tensor_sources.find_user_place()
        fault = Mismatch(TensorSource(), str(generator.device), "", operator, place, Fault.GENERATOR)
        message = f"Expected a 'cuda' device type for generator but found '{generator.device.type}'"
        self._record_or_raise([fault], message)
        return True

    def record_results(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the sources of an operator's results. A tensor written in place also gets sources of the inputs."""
        tensors = list_tensors(out)
        if not tensors:
            return
        inputs = [] if get_operator_name(func) in _LIFT_OPERATORS else list_tensors(*args, *kwargs.values())
        is_drawn = kwargs.get("generator") is not None
        for tensor in tensors:
            source = self.get_source(tensor) or self._derive_source(func, tensor, inputs, is_drawn)
            if source is not None:
                self._sources[id(tensor)] = (tensor, source)
                companions = self._find_companions(func, args, kwargs, tensor, inputs)
                if companions:
                    self._add_sources(tensor, companions, in_place=any(tensor_in is tensor for tensor_in in inputs))

    def _add_sources(self, tensor: torch.Tensor, companions: list[TensorSource], *, in_place: bool) -> None:
        """Add sources to `tensor` and, after a write in place, to tensors in the same memory."""
        memory = _get_storage_id(tensor) if in_place else None
        for key, (recorded_tensor, source) in list(self._sources.items()) if memory else ():
            if (
                recorded_tensor is not tensor
                and recorded_tensor.device == tensor.device
                and _get_storage_id(recorded_tensor) == memory
            ):
                self._sources[key] = (recorded_tensor, source.combine_with(companions))
        self._sources[id(tensor)] = (tensor, self._sources[id(tensor)][1].combine_with(companions))

    def _find_companions(
        self, func: object, args: object, kwargs: object, out: torch.Tensor, inputs: list[torch.Tensor]
    ) -> list[TensorSource]:
        """Return the sources of inputs that CUDA would refuse if only the first known input were on the device."""
        if out.device == self.device or len(inputs) < 2:
            return []
        first = next((tensor for tensor in inputs if self.get_source(tensor) is not None), None)
        if first is None:
            return []
        strays = find_strays(func, args, kwargs, self.device, id(first))
        return [source for source in map(self._find_source, strays) if source is not None]

    def _derive_source(
        self, func: object, tensor: torch.Tensor, inputs: list[torch.Tensor], is_drawn: bool
    ) -> TensorSource | None:
        is_on_device = tensor.device == self.device
        get_source = self.get_source if is_on_device else self._find_source
        sources = (get_source(item) for item in inputs if item.device == tensor.device)
        source = next((item for item in sources if item is not None), None)
        is_view = getattr(func, "is_view", False)
        if is_on_device:
            return source if is_view else None
        if source is not None:
            return replace(source, derived=source.derived or not is_view)
        has_input_on_device = any(item.device == self.device for item in inputs)
        how = How.BROUGHT if has_input_on_device else How.COMPUTED if inputs else How.DRAWN if is_drawn else How.MADE
        return TensorSource(place=tensor_sources.find_user_place(), how=how)

    def _record_reads(self, func: Any, off_device_tensors: list[torch.Tensor], kwargs: Any) -> None:
        for tensor in off_device_tensors:
            source = self.get_source(tensor)
            if source is None or source.fqn is None:
                continue
            self.read_elsewhere.add(source.fqn)
            if get_operator_name(func) == "_to_copy" and kwargs.get("device") == self.device:
                self.copied_by_forward.setdefault(source.fqn, tensor_sources.find_user_place())

    def _record_taken(self, func: Any, off_device_tensors: list[torch.Tensor]) -> None:
        """Record the tensors that the operator accepts although they are on another device."""
        for source in map(self.get_source, off_device_tensors):
            if source is not None and source.fqn is not None:
                operator = get_operator_name(func).strip("_")
                self.taken_from_elsewhere.setdefault(source.fqn, (operator, tensor_sources.find_user_place()))

    def _blame_strays(self, func: object, strays_: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        frame = tensor_sources.find_user_frame()
        tensor_on_device = next(tensor for tensor in tensors if tensor.device == self.device)
        name_on_device = (self.get_source(tensor_on_device) or TensorSource()).fqn
        if name_on_device is None:
            name_on_device = tensor_sources.find_local_name(frame, tensor_on_device) or ""
        operator, place = get_operator_name(func).strip("_"), tensor_sources.get_place(frame)
        mismatches = [
            Mismatch(source, str(tensor.device).replace("meta", "cpu"), name_on_device, operator, place)
            for tensor in strays_
            for source in (self._find_source(tensor) or TensorSource()).all_sources
            if source.fqn not in self._excused
        ]
        self._record_or_raise(mismatches, _SAME_DEVICE_MESSAGE)

    def _record_or_raise(self, mismatches: list[Mismatch], message: str) -> None:
        """Record the mismatches so that forward continues, or raise `CudaRefusal` as CUDA would."""
        if any(self._must_raise(mismatch) for mismatch in mismatches):
            calls = tensor_sources.list_user_calls()
            if calls not in self.uncaught_calls:
                self.raised.update(mismatches)
                raise CudaRefusal(message, mismatches, calls)
        for mismatch in mismatches:
            if not any(mismatch.is_same_mistake_as(recorded) for recorded in self.mismatches):
                self.mismatches.append(mismatch)

    def _must_raise(self, mismatch: Mismatch) -> bool:
        if self.carried_over is None:
            return mismatch in self.caught
        return not any(mismatch.is_same_mistake_as(carried) for carried in self.carried_over)


def find_strays(func: Any, args: Any, kwargs: Any, device: torch.device, moved_id: int = 0) -> list[torch.Tensor]:
    """Return the tensors that `func` needs on `device`, but that are elsewhere, or [] if CUDA accepts the call.

    The tensor with the id `moved_id` counts as on the device.
    """
    name = get_operator_name(func)
    if name in ANY_DEVICE_OPERATORS or name.endswith("_like") or name.startswith("new_"):
        return []
    tensors = list_tensors(*args, *kwargs.values())
    if name.startswith("_foreach_"):
        return _find_strays_in_lists(func, args, kwargs, device, moved_id)
    if name in _INDEXING_OPERATORS:
        tensors = _select_for_indexing(args, kwargs, device, tensors, moved_id)
    elif name in _RNN_OPERATORS:
        tensors = [tensor for tensor in tensors if tensor.dtype is not torch.int64]
    off_device_tensors = [tensor for tensor in tensors if not _is_on_device(tensor, device, moved_id)]
    if len(off_device_tensors) == len(tensors):
        return []
    numbers = _find_scalar_ids(func, args, kwargs, off_device_tensors)
    return [tensor for tensor in off_device_tensors if id(tensor) not in numbers]


def _is_on_device(tensor: torch.Tensor, device: torch.device, moved_id: int) -> bool:
    return tensor.device == device or id(tensor) == moved_id


def _find_scalar_ids(func: Any, args: Any, kwargs: Any, off_device_tensors: list[torch.Tensor]) -> set[int]:
    """Return the ids of off-device 0-dim inputs that the operator reads as plain numbers."""
    name = get_operator_name(func).removeprefix("_foreach_")
    base_name = name if name in ONE_CPU_SCALAR_OPERATORS else name.removesuffix("_")
    bound = _bind_arguments(func, args, kwargs)
    values = {argument.name: value for argument, value in bound if not _is_written(argument)}
    scalar_arguments: Iterable[str] = values.keys()  # unknown for operators of other libraries
    if func.namespace == "aten" and not name.endswith("_backward") and base_name not in ONE_CPU_SCALAR_OPERATORS:
        scalar_arguments = CPU_SCALAR_ARGUMENTS.get(base_name, frozenset())
    scalars = (tensor for key in scalar_arguments for tensor in list_tensors(values.get(key)) if not tensor.dim())
    ids = {id(tensor) for tensor in off_device_tensors} & set(map(id, scalars))
    return ids if base_name not in ONE_CPU_SCALAR_OPERATORS or len(ids) < 2 else set()  # "too many CPU scalars"


def _bind_arguments(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Pair the operator's schema arguments with the values of this call."""
    schema_arguments = func._schema.arguments
    arguments_by_name = {argument.name: argument for argument in schema_arguments}
    return [
        *zip(schema_arguments, args, strict=False),
        *((arguments_by_name[key], value) for key, value in kwargs.items() if key in arguments_by_name),
    ]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _find_strays_in_lists(
    func: object, args: object, kwargs: object, device: torch.device, moved_id: int
) -> list[torch.Tensor]:
    """Return the off-device tensors of a `_foreach_` operator. Check the items at one index of all lists together."""
    bound = _bind_arguments(func, args, kwargs)
    values = {argument.name: value for argument, value in bound if argument.name != _SCALARS_ARGUMENT}
    lists = [list_tensors(value) for value in values.values() if isinstance(value, (list, tuple))]
    strays_by_id: dict[int, torch.Tensor] = {}
    for index in range(max(map(len, lists), default=0)):

        def pick(value: object, index: int = index) -> Any:
            return value[index] if isinstance(value, (list, tuple)) and index < len(value) else value

        call = {name: pick(value) for name, value in values.items()}
        tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
        off_device_tensors = [value for value in tensors if not _is_on_device(value, device, moved_id)]
        if len(off_device_tensors) < len(tensors):
            numbers = _find_scalar_ids(func, (), call, off_device_tensors)
            strays_by_id.update({id(value): value for value in off_device_tensors if id(value) not in numbers})
    return list(strays_by_id.values())


def _select_for_indexing(
    args: Any, kwargs: Any, device: torch.device, tensors: list[torch.Tensor], moved_id: int
) -> list[torch.Tensor]:
    """Return tensors of an indexing call that must share a device. If the table is on `device`, skip the indices."""
    table = args[0] if args else kwargs["self"]
    if not _is_on_device(table, device, moved_id):
        # The indices are legal: the table, and the values written to the table, are on the wrong device.
        return [table, *(tensor for tensor in tensors if _is_on_device(tensor, device, moved_id))]
    values = list_tensors(*args[2:], kwargs.get("values"))
    return [table, *(tensor for tensor in values if tensor.dim())]


class DeviceWatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that checks each operator with `watch`. A refused operator raises, or runs on moved copies."""

    def __init__(self, watch: DeviceWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a query, not an operator
        if torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # only inference mode passes composite operators
                return func.decompose(*args, **kwargs)
        strays = self._watch.find_refused(func, args, kwargs)
        if strays:
            args, kwargs = self._carry_over((args, kwargs), strays, self._watch.device)
        off_cpu = self._watch.find_off_cpu(func, args, kwargs)
        if off_cpu:
            args, kwargs = self._carry_over((args, kwargs), off_cpu, torch.device("cpu"))
        if self._watch.refuses_generator(func, args, kwargs):
            kwargs = {**kwargs, "generator": None}
        out = self.run_operator(func, args, kwargs)
        self._watch.record_results(func, args, kwargs, out)
        return out

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator after its arguments have been moved to legal devices."""
        return func(*args, **kwargs)

    def _carry_over(self, tree: object, tensors: list[torch.Tensor], device: torch.device) -> Any:
        """Return the operator's arguments `tree` with the given tensors copied to `device`."""
        ids = {id(tensor) for tensor in tensors}

        def copy_to_device(tensor: torch.Tensor) -> Any:
            # Not `.to`, because below autograd `.to` would not yet be a copy.
            to_copy = torch.ops.aten._to_copy.default
            return self.run_operator(to_copy, (tensor,), {"device": device}) if id(tensor) in ids else tensor

        return tree_map_only(torch.Tensor, copy_to_device, tree)


def _get_storage_id(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def list_tensors(*values: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operator, also those inside lists."""
    tensors: list[torch.Tensor] = []
    for value in values:
        kind = type(value)
        if kind in PLAIN_TYPES:
            continue
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif kind is list or kind is tuple:
            tensors += list_tensors(*value)
        else:
            tensors += [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]
    return tensors


def get_operator_name(func: Any) -> str:
    """Return the operator's name without its overload: `add` for `aten.add.Tensor`."""
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else str(func.__name__)
