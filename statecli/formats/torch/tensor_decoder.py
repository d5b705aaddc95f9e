"""Convert torch's rebuild calls, as recorded from a pickle, to checked facts about a tensor.

torch pickles a tensor as a call of `torch._utils._rebuild_*` with a storage and a geometry. The calls are never made;
their arguments are read, and each number is checked against the bytes in the file: `torch.load(mmap=True)` itself
accepts a storage larger than its record, and then shows the neighbour's bytes. Argument orders: torch/_utils.py and
torch/_tensor.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES, VALUES_PER_BYTE, contiguous_strides, nbytes
from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ByteRange, NoteKind, Quantizer, TensorData
from statecli.formats.torch.arguments import (
    ParameterCall,
    StridedCall,
    compute_last,
    count_elements,
    decode_device,
    decode_dtype,
    decode_ints,
    decode_lazy_flags,
    require_arguments,
    truncate_value,
)
from statecli.formats.torch.checkpoint_pickle import REFUSAL_REASON
from statecli.formats.torch.numpy_arrays import decode_array, is_array
from statecli.formats.torch.storages import StorageId, StorageResolver
from statecli.formats.torch.subclasses import (
    PLAIN_CLASSES,
    TENSOR_PLACEHOLDER,
    apply_marks,
    describe_wrapper,
    select_attributes,
)
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import append_key, get_name, get_state_attributes, get_text_items, iter_entries
from statecli.pickles.nodes import Global, Obj, Persistent

#: Maximum depth of nested tensors. Depth 4: a Parameter around a subclass around a sparse tensor of plain tensors.
MAX_NESTING = 16
#: Maximum number of parts of a tensor.
MAX_PARTS = 1_000
#: Maximum number of list and dict entries in the attributes of all tensors (entries of a shared list count each time).
MAX_ENTRIES = 2_000_000

#: Layouts of sparse tensors that TorchScript saves: number in C++ -> name and number of parts.
_SCRIPT_LAYOUTS = {1: ("sparse_coo", 2), 2: ("sparse_csr", 3)}
#: Names of tensor classes in files of torch before 0.1.10, which set the storage of such an object.
_LEGACY_CLASS = compile_on_use(r"torch\.(?:cuda\.)?\w*Tensor")

#: Function that builds a tensor from a rebuild call's arguments and the FQN.
Builder = Callable[[tuple[Any, ...], str], Tensor]


class ContiguousLayout(NamedTuple):
    """Properties shared by tensors that have all elements of their storage in order, as nearly all tensors do.

    `length` is the size of the storage in bytes.
    """

    dtype: str
    device: str
    length: int
    shape: tuple[int, ...]
    elements: int


class WholeTensor(msgspec.Struct, gc=False):
    """Tensor that has all elements of its storage in order. `storage` is the key of the storage."""

    layout: ContiguousLayout
    data: TensorData
    storage: str
    requires_grad: bool


class LayoutKey(msgspec.Struct, frozen=True, gc=False):
    """Key of a ContiguousLayout: the element count, and `id()` of the objects that define the layout."""

    storage_class: int
    location: int
    elements: int
    size: int
    stride: int


class Geometry(NamedTuple):
    """Shape of a tensor, strides (None if contiguous), number of elements, and offset of the last element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    elements: int
    last: int


class TensorDecoder:
    """Decoder of rebuild calls. It checks each call against the storages of one file.

    The storages and their `dtypes` are those of `StorageResolver`. Each call is decoded once, because a tied Parameter
    is the same call under two names. All errors are `MalformedError`, and name the FQN and both numbers.
    """

    def __init__(
        self,
        storages: Mapping[str, ByteRange],
        dtypes: Mapping[str, str] = STORAGE_DTYPES,
        persistent: Iterable[Persistent] = (),
    ) -> None:
        self.storages = StorageResolver(storages, dtypes, persistent)
        #: `id()` of the persistent id of each storage that a tensor uses as a whole.
        self.whole_storages: set[int] = set()
        self.layouts: dict[LayoutKey, ContiguousLayout] = {}
        # The keys are ids of nodes, which stay unique because the pickle's graph keeps the nodes alive.
        self.geometries: dict[tuple[int, int], Geometry] = {}
        self.decoded: dict[int, Tensor | None] = {}
        self.depth = self.entries = 0
        self.builders: dict[int, Builder | None] = {}
        #: FQNs of storages that were saved without a tensor.
        self.bare_storages: list[str] = []
        self._plain: Builder = self._build_plain
        self.builders_by_name: dict[str, Builder] = {
            "torch._utils._rebuild_tensor": self._plain,
            "torch._utils._rebuild_tensor_v2": self._plain,
            "torch._utils._rebuild_tensor_v3": self._build_with_dtype,
            "torch._utils._rebuild_parameter": self._build_parameter,
            "torch._utils._rebuild_parameter_with_state": self._build_parameter,
            "torch._utils._rebuild_qtensor": self._build_quantized,
            "torch._utils._rebuild_sparse_tensor": self._build_sparse,
            "torch._utils._rebuild_meta_tensor_no_storage": self._build_meta,
            "torch._utils._rebuild_wrapper_subclass": self._build_wrapper,
            "torch._tensor._rebuild_from_type": self._build_subclass,
            "torch._tensor._rebuild_from_type_v2": self._build_subclass,
            "torch._utils._rebuild_nested_tensor": self._build_nested,
            "torch.nested._internal.nested_tensor._rebuild_njt": self._build_jagged,
            "torch._utils._rebuild_device_tensor_from_cpu_tensor": self._build_from_cpu,
            "torch._utils._rebuild_device_tensor_from_numpy": self._build_from_cpu,
            "torch._utils._rebuild_xla_tensor": self._build_from_cpu,
            "torch.nn.parameter.Parameter": self._build_old_parameter,
            "torch.nn.parameter.UninitializedParameter": self._build_uninitialized,
            "torch.nn.parameter.UninitializedBuffer": self._build_uninitialized,
        }

    def tensor(self, node: object, fqn: str) -> Tensor | None:
        """Return the tensor that a call rebuilds, or a bare storage as a flat tensor. Return None for other objects.

        For a format without rebuild calls, tensors in the graph are returned unchanged.
        """
        if type(node) is Tensor:
            if node.damage is not None:
                raise MalformedError(f"{fqn}: {node.damage}")
            return node
        if type(node) is not Obj:
            return self._decode_bare_storage(node, fqn) if type(node) is Persistent else None
        builder = self._find_builder(node.cls)
        if builder is self._plain and node.state is None:
            return self._build_whole(node.args) or self._build_plain(node.args, fqn)
        if id(node) not in self.decoded:
            self.decoded[id(node)] = self._decode_composed(node, builder, fqn)
        return self.decoded[id(node)]

    def _decode_composed(self, node: Obj, builder: Builder | None, fqn: str) -> Tensor | None:
        """Decode a tensor made of other tensors: a Parameter around its data, a sparse tensor, a subclass."""
        if self.depth == MAX_NESTING:
            raise MalformedError(f"{fqn}: nests tensors more than {MAX_NESTING} levels deep, the limit of statecli")
        self.depth += 1
        try:
            if builder == self._build_old_parameter:
                return self._build_old_parameter(node.args, fqn, node.state)
            if node.state is not None and (builder or _LEGACY_CLASS.fullmatch(get_name(node.cls))):
                raise MalformedError(
                    f"{fqn}: the pickle replaces the values or the shape of this tensor after creating "
                    f"it; {REFUSAL_REASON}"
                )
            return builder(node.args, fqn) if builder else decode_array(node)
        finally:
            self.depth -= 1

    def is_tensor(self, node: object) -> bool:
        """Return whether `tensor` would return a tensor for the node, without decoding or checking the node."""
        if type(node) is not Obj:
            return type(node) in (Persistent, Tensor)
        return self.is_torch(node) or is_array(node)

    def is_torch(self, node: object) -> bool:
        """Return whether the object becomes a torch.Tensor and not an array. `load_state_dict` requires a tensor."""
        node = node.pid if type(node) is Persistent else node
        return type(node) is Tensor or (type(node) is Obj and self._find_builder(node.cls) is not None)

    def is_plain(self, node: object) -> bool:
        """Return whether the object is a tensor rebuilt from a storage alone, as nearly all tensors of a file are."""
        return type(node) is Obj and self._find_builder(node.cls) is self._plain

    def get_attributes(self, node: object, depth: int = 0) -> dict[str, Any]:
        """Return the Python attributes that the pickle saves for a tensor, mostly a Parameter or a subclass.

        A placeholder replaces each tensor among the attributes, because tensors are compared as parts. Torch's marks of
        parameters and buffers are left out, because they are facts of the tensor. A distributed tensor has no
        attributes here: they give its place among processes.
        """
        if type(node) is not Obj or depth == MAX_NESTING:
            return {}
        builder, args = self._find_builder(node.cls), node.args
        if builder == self._build_parameter and args:
            call = ParameterCall(*args[:4])
            return {**self.get_attributes(call.data, depth + 1), **select_attributes(call.state, self.is_tensor)}
        if builder != self._build_subclass or len(args) < 4:
            return {}
        function, cls_node, _, state = args[:4]
        cls = get_name(cls_node)
        if not cls or cls.startswith("torch.distributed."):
            return {}
        attributes = select_attributes(state, self.is_tensor)
        if cls.startswith("torch.nested."):  # only attributes other than parts and caches are settings
            return {name: value for name, value in attributes.items() if name == "_ragged_idx"}
        is_wrapper = self._find_builder(function) == self._build_wrapper
        return {name: value for name, value in attributes.items() if not (is_wrapper and value is TENSOR_PLACEHOLDER)}

    def _find_builder(self, cls: object) -> Builder | None:
        key = id(cls)
        if key not in self.builders:
            self.builders[key] = self.builders_by_name.get(get_name(cls))
        return self.builders[key]

    def check_storages(self, storages: Iterable[Persistent]) -> None:
        """Raise MalformedError for a storage that contradicts the file, whether a tensor uses it or not."""
        for storage in storages:
            storage_id = StorageId.read(storage.pid) if id(storage.pid) not in self.whole_storages else None
            if storage_id is not None and storage_id.word == "storage":
                self.storages.resolve(storage, "data.pkl")

    def require_tensor(self, node: object, fqn: str, label: str) -> Tensor:
        tensor = self.tensor(node, fqn)
        if tensor is None:
            raise MalformedError(f"{fqn}: its {label} is not a tensor")
        return tensor

    def _decode_bare_storage(self, node: Persistent, fqn: str) -> Tensor:
        key, dtype, device, place, length = self.storages.resolve(node, fqn)
        elements = length * 8 // ELEMENT_BITS[dtype] * VALUES_PER_BYTE.get(dtype, 1)
        self.bare_storages.append(fqn)
        return Tensor(
            dtype,
            (elements,),
            elements,
            length,
            device,
            False,
            note="storage",
            storage=key,
            storage_bytes=length,
            data=TensorData(place, dtype, (elements,)) if place is not None else None,
        )

    def find_whole(self, node: object) -> WholeTensor | None:
        """Return the tensor that `node` rebuilds, if it has all elements of its storage and a known layout.

        Returns None for all other nodes, which `tensor` decodes.
        """
        if type(node) is not Obj or node.state is not None or self._find_builder(node.cls) is not self._plain:
            return None
        return self._match_layout(node.args)

    def _build_whole(self, args: tuple[Any, ...]) -> Tensor | None:
        whole = self._match_layout(args)
        if whole is None:
            return None
        dtype, device, length, shape, elements = whole.layout
        tensor = Tensor(dtype, shape, elements, length, device, whole.requires_grad, storage_bytes=length)
        tensor.storage, tensor.data = whole.storage, whole.data
        return tensor

    def _match_layout(self, args: tuple[Any, ...]) -> WholeTensor | None:
        """Return the tensor if it has all elements of its storage and a layout in `layouts`. Otherwise, return None.

        This method checks each value that differs between the tensors of a file; the layout gives the other values.
        """
        if len(args) != 6:
            return None
        node, offset, size, stride, grad, _ = args
        if type(node) is not Persistent or type(offset) is not int or offset != 0:
            return None
        pid = node.pid
        if type(pid) is not tuple or len(pid) != 5:
            return None
        word, cls, key, location, elements = pid
        if word != "storage" or type(elements) is not int or (grad is not False and grad is not True):
            return None
        layout = self.layouts.get(LayoutKey(id(cls), id(location), elements, id(size), id(stride)))
        if layout is None or type(key) is not str or key in self.storages.disputed:
            return None
        place = self.storages.places.get(key)
        if place is None or place.length != layout.length or place.big_endian:
            return None
        self.whole_storages.add(id(pid))
        return WholeTensor(layout, TensorData(place, layout.dtype, layout.shape), key, grad)

    def _keep_layout(self, args: tuple[Any, ...], tensor: Tensor) -> None:
        """Store the layout of a decoded tensor in `layouts`, if the tensor has all elements of its storage."""
        data, shape = tensor.data, tensor.shape
        if data is None or shape is None or tensor.device is None or len(args) != 6:
            return
        node, _, size, stride, _, _ = args
        if len(node.pid) != 5:
            return
        _, cls, _, location, elements = node.pid
        is_whole = tensor.nbytes == tensor.storage_bytes and not tensor.note
        if is_whole and data == TensorData(data.storage, tensor.dtype, shape):
            self.layouts[LayoutKey(id(cls), id(location), elements, id(size), id(stride))] = ContiguousLayout(
                tensor.dtype, tensor.device, tensor.nbytes, shape, tensor.elements
            )

    # One method for each rebuild function.

    def _build_plain(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 4, fqn)
        tensor = self._build_strided(StridedCall(*args[:7]), fqn)
        self._keep_layout(args, tensor)
        return tensor

    def _build_with_dtype(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        storage, offset, size, stride, grad, hooks, dtype = require_arguments(args, 7, fqn)
        call = StridedCall(storage, offset, size, stride, grad, hooks, *args[7:8])
        return self._build_strided(call, fqn, decode_dtype(dtype, fqn))

    def _build_strided(self, call: StridedCall, fqn: str, dtype: str | None = None) -> Tensor:
        key, stored_dtype, device, place, length = self.storages.resolve(call.storage, fqn)
        dtype = dtype or stored_dtype
        if place is not None and place.big_endian:
            _refuse_other_swap(dtype, stored_dtype, key, fqn)
        shape, strides, elements, last = self._compute_geometry(call.size, call.stride, fqn)
        offset, grad = call.offset, call.requires_grad
        if grad is not False and grad is not True:
            raise MalformedError(f"{fqn}: requires_grad is recorded as {truncate_value(grad)}, not as a bool")
        if type(offset) is not int or offset < 0:
            raise MalformedError(
                f"{fqn}: its offset into storage {quoting.name(key)} is {truncate_value(offset)}; "
                "expected an integer of 0 or more"
            )
        capacity = length * 8 // ELEMENT_BITS[dtype] * VALUES_PER_BYTE.get(dtype, 1)
        if elements and offset + last >= capacity:
            raise MalformedError(
                f"{fqn}: shape {truncate_value(list(shape))} at offset {offset} needs {offset + last + 1} elements, "
                f"but storage {quoting.name(key)} has {capacity} {dtype} elements"
            )
        flags = decode_lazy_flags(call.flags, fqn)
        size = nbytes(dtype, elements)
        note = None
        if size < length and elements < capacity:
            note = f"view: {elements} of the {capacity} elements of its storage"
        elif elements > capacity:
            note = f"expanded: {elements} elements share {capacity} stored elements"
        tensor = Tensor(dtype, shape, elements, size, device, grad, note=note, storage=key, storage_bytes=length)
        if place is not None:
            tensor.data = TensorData(place, dtype, shape, offset, strides, flags.conjugate, flags.negative)
        return tensor

    def _compute_geometry(self, size: object, stride: object, fqn: str) -> Geometry:
        """Compute the geometry from a size and a stride, only once for each pair of these objects."""
        cached = self.geometries.get((id(size), id(stride)))
        if cached is not None:
            return cached
        shape, strides = decode_ints(size, "shape", fqn), decode_ints(stride, "stride", fqn)
        elements = count_elements(shape, fqn)
        # A shape without strides means contiguous, as in torch.
        is_dense = not strides or strides == contiguous_strides(shape)
        last = elements - 1 if is_dense else compute_last(shape, strides, fqn)
        geometry = Geometry(shape, None if is_dense else strides, elements, last)
        self.geometries[id(size), id(stride)] = geometry
        return geometry

    def _build_parameter(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 2, fqn)
        call = ParameterCall(*args[:4])
        inner = self.require_tensor(call.data, fqn, "data")
        tensor = msgspec.structs.replace(inner, is_parameter=True, requires_grad=call.requires_grad is True)
        attributes = self._drop_own_data(get_state_attributes(call.state), tensor, fqn)
        apply_marks(tensor, attributes, fqn)
        tensor.parts = tensor.parts or self._collect_inner(attributes, fqn)
        return tensor

    def _build_old_parameter(self, args: tuple[Any, ...], fqn: str, state: object = None) -> Tensor:
        """Build a Parameter that torch before 0.4 pickled as a call with its data."""
        data, grad = args[:2] if len(args) > 1 else (args[0] if args else None, True)
        if state is not None:
            if type(state) is not tuple or len(state) != 3:
                raise MalformedError(
                    f"{fqn}: the pickle replaces the data of this tensor after creating it; {REFUSAL_REASON}"
                )
            grad, _volatile, _hooks = state
        inner = self.require_tensor(data, fqn, "data")
        return msgspec.structs.replace(inner, is_parameter=True, requires_grad=grad is True)

    def _build_subclass(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        function, cls_node, inner_args, state = require_arguments(args, 4, fqn)
        builder = self._find_builder(function)
        if builder is None or type(inner_args) is not tuple:
            raise MalformedError(
                f"{fqn}: statecli does not know the function that rebuilds this tensor, "
                f"{truncate_value(get_name(function) or function)}"
            )
        if builder == self._build_subclass:
            raise MalformedError(
                f"{fqn}: this tensor subclass wraps another tensor subclass, which statecli does not read"
            )
        tensor = msgspec.structs.replace(builder(inner_args, fqn))
        attributes = get_state_attributes(state)
        apply_marks(tensor, attributes, fqn)
        cls = get_name(cls_node)
        if cls not in PLAIN_CLASSES and tensor.layout != "jagged":
            local = self.tensor(attributes.get("_local_tensor"), fqn)
            tensor.note = describe_wrapper(cls, local, attributes.get("_spec"))
        tensor.is_parameter |= cls == "torch.nn.parameter.Parameter"
        tensor.parts = tensor.parts or self._collect_inner(attributes, fqn)
        return tensor

    def _drop_own_data(self, attributes: Mapping[str, Any], tensor: Tensor, fqn: str) -> Mapping[str, Any]:
        """Return a tensor's attributes without `data` and `requires_grad`, if both equal the tensor's own values.

        `Params4bit.__getstate__` of bitsandbytes 0.50 adds them, and also `module`, the layer with the parameter.
        """
        node, grad = attributes.get("data"), attributes.get("requires_grad")
        data = self.tensor(node, f"{fqn}.data") if node is not None and grad is tensor.requires_grad else None
        if data is None or data.data is None or (data.data, data.shape) != (tensor.data, tensor.shape):
            return attributes
        own_names = ("data", "requires_grad", "module")
        return {name: value for name, value in attributes.items() if name not in own_names}

    def _collect_inner(self, attributes: Mapping[str, Any], fqn: str) -> tuple[tuple[str, TensorData], ...]:
        """Collect the tensors in a tensor's attributes, also inside lists and dicts, and the parts of these tensors."""
        parts: list[tuple[str, TensorData]] = []
        # Limited by depth, because attributes of parameters may be parameters that have attributes, and so on.
        pending_values = list(attributes.items()) if self.depth < MAX_NESTING else []
        seen = set()
        for name, value in pending_values:
            inner = self.tensor(value, f"{fqn}.{name}")
            if inner is not None:
                parts += [(name, inner.data)] if inner.data is not None else []
                parts += [(f"{name}.{part}", data) for part, data in inner.parts]
            elif id(value) not in seen:
                seen.add(id(value))
                entries = [(append_key(name, key), node) for key, node in iter_entries(value)]
                self.entries += len(entries)
                if self.entries > MAX_ENTRIES:
                    raise MalformedError(
                        f"{fqn}: the attributes of all tensors together have more than {MAX_ENTRIES:,} entries, the "
                        "limit of statecli"
                    )
                pending_values += entries
            if len(parts) > MAX_PARTS:
                raise MalformedError(f"{fqn}: consists of more than {MAX_PARTS:,} tensors, the limit of statecli")
        return tuple(parts)

    def _build_wrapper(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        _cls, dtype, size, _stride, _offset, _layout, device, grad = require_arguments(args, 8, fqn)
        shape = decode_ints(size, "shape", fqn)
        return _build_without_bytes(
            decode_dtype(dtype, fqn), shape, fqn, device=decode_device(device, fqn), grad=grad is True
        )

    def _build_meta(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        dtype, size, _stride, grad = require_arguments(args, 4, fqn)
        return _build_without_bytes(
            decode_dtype(dtype, fqn), decode_ints(size, "shape", fqn), fqn, device="meta", grad=grad is True
        )

    def _build_quantized(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        storage, offset, size, stride, scheme, grad = require_arguments(args, 6, fqn)
        tensor = self._build_strided(StridedCall(storage, offset, size, stride, grad is True), fqn)
        if type(scheme) is not tuple or len(scheme) < 3:
            raise MalformedError(f"{fqn}: its quantizer is not a tuple of scheme, scale and zero point")
        name = get_name(scheme[0]).removeprefix("torch.")
        tensor.layout = "quantized"
        tensor.note = "; ".join(filter(None, (name.replace("_", " "), tensor.note))) or None
        if tensor.data is not None:
            tensor.data = msgspec.structs.replace(tensor.data, quantizer=self._read_quantizer(name, scheme, fqn))
        return tensor

    def _read_quantizer(self, name: str, scheme: tuple[Any, ...], fqn: str) -> Quantizer:
        _, scale, zero_point, *rest = scheme
        if not rest:
            if type(scale) not in (float, int) or type(zero_point) is not int:
                raise MalformedError(f"{fqn}: the scale or zero point of its quantizer is not a number")
            return Quantizer(name, scale=float(scale), zero_point=zero_point)
        scales, zeros = (self._read_channel_numbers(node, fqn) for node in (scale, zero_point))
        return Quantizer(name, axis=rest[0] if type(rest[0]) is int else None, scales=scales, zero_points=zeros)

    def _read_channel_numbers(self, node: object, fqn: str) -> TensorData | None:
        """Return the scales or zero points of all channels. Raises MalformedError if their storage is too short."""
        tensor = self.require_tensor(node, fqn, "quantizer")
        if tensor.data is not None and tensor.nbytes > tensor.data.storage.length:
            stored = f"but the storage has {tensor.data.storage.length}"
            raise MalformedError(
                f"{fqn}: its quantizer needs {tensor.nbytes} bytes for {tensor.elements} numbers, {stored}"
            )
        return tensor.data

    def _build_sparse(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        layout, fields = require_arguments(args, 2, fqn)
        if type(layout) is int and layout in _SCRIPT_LAYOUTS:
            # TorchScript: (layout, sizes, requires_grad, parts, hooks).
            layout_name, count = _SCRIPT_LAYOUTS[layout]
            layout, fields = Global("torch", layout_name, 0), (*args[3 : 3 + count], fields)
        layout = layout.args[0] if type(layout) is Obj and layout.args else get_name(layout)
        if type(layout) is not str or type(fields) is not tuple or len(fields) < 3:
            raise MalformedError(f"{fqn}: its sparse layout and parts are not recorded in the form that torch writes")
        layout = layout.removeprefix("torch.")
        coordinates = layout == "sparse_coo"
        names = ("indices", "values") if coordinates else ("compressed_indices", "plain_indices", "values")
        if len(fields) <= len(names):
            raise MalformedError(
                f"{fqn}: its {layout} record has {len(fields)} fields, but torch writes at least {len(names) + 1}"
            )
        inner_tensors = [
            (name, self.require_tensor(node, fqn, name)) for name, node in zip(names, fields, strict=False)
        ]
        values = inner_tensors[-1][1]
        shape = decode_ints(fields[len(names)], "shape", fqn)
        uncoalesced = coordinates and len(fields) > 3 and fields[3] is False
        return Tensor(
            values.dtype,
            shape,
            count_elements(shape, fqn),
            sum(tensor.nbytes for _, tensor in inner_tensors),
            values.device,
            values.requires_grad,
            layout=layout,
            note=f"{values.elements} values stored" + (", uncoalesced" if uncoalesced else ""),
            storage=values.storage,
            storage_bytes=values.storage_bytes,
            parts=tuple((name, tensor.data) for name, tensor in inner_tensors if tensor.data is not None),
            note_kind=NoteKind.UNCOALESCED if uncoalesced else None,
        )

    def _build_nested(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 1, fqn)
        parts = dict(zip(("values", "sizes", "strides", "offsets"), args, strict=False))
        return self._build_ragged("nested", parts, fqn)

    def _build_jagged(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        attributes = get_text_items(args[0]) if args else {}
        parts = {name: attributes.get(name, attributes.get(f"_{name}")) for name in ("values", "offsets", "lengths")}
        tensor = self._build_ragged("jagged", parts, fqn)
        return msgspec.structs.replace(tensor, requires_grad=attributes.get("requires_grad") is True)

    def _build_ragged(self, layout: str, parts: Mapping[str, Any], fqn: str) -> Tensor:
        # Inner shapes are not shown, because they are stored as tensor data and a listing does not read tensor data.
        note = "nested: the inner shapes are unknown, because they are stored as tensor data"
        values = self.require_tensor(parts["values"], fqn, "values")
        inner_data = (
            (name, self.require_tensor(node, fqn, name).data) for name, node in parts.items() if node is not None
        )
        inner_parts = tuple((name, data) for name, data in inner_data if data is not None)
        return msgspec.structs.replace(values, shape=None, layout=layout, note=note, data=None, parts=inner_parts)

    def _build_from_cpu(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        data, dtype_node, device, grad = require_arguments(args, 4, fqn)
        tensor, dtype = self.require_tensor(data, fqn, "data"), decode_dtype(dtype_node, fqn)
        # XLA saves bfloat16 as float32, because numpy does not support bfloat16.
        if tensor.dtype != dtype and (tensor.dtype, tensor.layout, dtype) != ("float32", "numpy", "bfloat16"):
            raise MalformedError(
                f"{fqn}: has the dtype {dtype}, but its data is {tensor.dtype}; torch.save does not write this: do not "
                "load the file"
            )
        return msgspec.structs.replace(
            tensor,
            dtype=dtype,
            device=decode_device(device, fqn),
            requires_grad=grad is True,
            note=None,
        )

    def _build_uninitialized(self, args: tuple[Any, ...], fqn: str) -> Tensor:  # noqa: ARG002  # one signature for all
        note = "uninitialized (lazy): it has no shape before the first forward"
        grad, kind = bool(args and args[0] is True), NoteKind.UNINITIALIZED
        return Tensor("unknown", None, 0, 0, None, grad, is_parameter=True, note=note, note_kind=kind)


def _refuse_other_swap(dtype: str, stored_dtype: str, key: str, fqn: str) -> None:
    """Refuse a tensor whose dtype differs from its storage's, because torch.load swaps bytes by the storage's dtype."""
    if dtype != stored_dtype and max(ELEMENT_BITS[dtype], ELEMENT_BITS[stored_dtype]) > 8:
        raise MalformedError(
            f"{fqn}: the values depend on the loading machine: the tensor is {dtype}, but torch.load swaps the bytes "
            f"of this big-endian file in units of {stored_dtype}, the dtype of storage {truncate_value(key)}"
        )


def _build_without_bytes(dtype: str, shape: tuple[int, ...], fqn: str, *, device: str | None, grad: bool) -> Tensor:
    elements = count_elements(shape, fqn)
    return Tensor(dtype, shape, elements, nbytes(dtype, elements), device, grad)
