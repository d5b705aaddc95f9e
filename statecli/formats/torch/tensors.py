"""Convert torch's rebuild calls, recorded by the pickle machine, to checked facts about a tensor.

torch pickles a tensor as a call of `torch._utils._rebuild_*` with a storage and a geometry. The calls are never made;
their arguments are read, and each number is checked against the bytes in the file: `torch.load(mmap=True)` itself
accepts a storage larger than its record, and then shows the neighbour's bytes. Argument orders: torch/_utils.py and
torch/_tensor.py of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import msgspec

from statecli.core import quoting
from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES, VALUES_PER_BYTE, contiguous_strides, nbytes
from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ByteRange, NoteKind, Quantizer, TensorData
from statecli.formats.torch.arguments import (
    check_device,
    compute_last,
    count_elements,
    decode_device,
    decode_dtype,
    decode_ints,
    decode_lazy_flags,
    require_arguments,
    truncate_value,
)
from statecli.formats.torch.checkpoint_pickle import REPLACING_ATTRIBUTES
from statecli.formats.torch.numpy_dtypes import format_array_dtype
from statecli.formats.torch.storages import find_disputed, select_view
from statecli.pickles.graph import (
    append_key,
    as_sequence,
    get_attributes,
    get_name,
    get_state_attributes,
    get_text_items,
    iter_entries,
    read_raw_bytes,
)
from statecli.pickles.nodes import Global, Obj, Persistent
from statecli.pickles.numpy_types import read_number_type

#: Maximum depth of nested tensors: a Parameter of a subclass of a sparse tensor of plain tensors has depth 4.
MAX_NESTING = 16
#: Maximum number of parts of a tensor.
MAX_PARTS = 1_000
#: Maximum number of list and dict entries in the attributes of all tensors (entries of a shared list count each time).
MAX_ENTRIES = 2_000_000

#: Layouts of sparse tensors that TorchScript saves: number in C++ -> name and number of parts.
_SCRIPT_LAYOUTS = {1: ("sparse_coo", 2), 2: ("sparse_csr", 3)}
#: Consequence of replacing a tensor after its call, for the error message.
_NEVER_WRITTEN = (
    "; torch.save never writes this, so a load may give other values than statecli shows: do not load the file"
)

#: Function that builds a tensor from a rebuild call's arguments and the FQN.
Builder = Callable[[tuple[Any, ...], str], "Tensor"]


class Tensor(msgspec.Struct, gc=False):
    """Checked facts of one rebuild call. The fields have the meanings of `TensorInfo`."""

    dtype: str
    shape: tuple[int, ...] | None
    elements: int
    nbytes: int
    device: str | None
    requires_grad: bool
    layout: str = "strided"
    is_parameter: bool = False
    is_buffer: bool = False
    persistent: bool | None = None
    note: str | None = None
    storage: int | str | None = None
    storage_bytes: int | None = None
    data: TensorData | None = None
    parts: tuple[tuple[str, TensorData], ...] = ()
    damage: str | None = None
    note_kind: NoteKind | None = None


class _StoredAs(NamedTuple):
    """Storage of the file. `storage` is None on meta; `length` is in bytes."""

    key: str
    dtype: str
    device: str
    storage: ByteRange | None
    length: int


class ContiguousLayout(NamedTuple):
    """Facts shared by tensors that have all elements of their storage in order, as nearly all tensors of a file do.

    `length` is the size of the storage in bytes.
    """

    dtype: str
    device: str
    length: int
    shape: tuple[int, ...]
    elements: int


#: Layout, place of the elements, key of the storage, and whether the tensor requires a gradient.
WholeTensor = tuple[ContiguousLayout, TensorData, str, bool]


class TensorDecoder:
    """Decoder of rebuild calls, which checks them against the storages of one file.

    `storages` maps a storage key to the place of its bytes, `dtypes` the class of a storage to its element type.
    `persistent` are all storages that the pickle names, for a loader that uses the first description of each. Each call
    node is decoded once, because a tied Parameter is the same node under two names. All errors are `MalformedError`,
    and name the FQN and both numbers.
    """

    def __init__(
        self,
        storages: Mapping[str, ByteRange],
        dtypes: Mapping[str, str] = STORAGE_DTYPES,
        persistent: Iterable[Persistent] = (),
    ) -> None:
        self.storages, self.dtypes = storages, dtypes
        self.disputed = find_disputed(persistent)
        self.checked: dict[int, _StoredAs] = {}
        #: Ids of the persistent ids of storages that some tensor has as a whole.
        self.whole_storages: set[int] = set()
        #: Layouts by class, device and elements of the storage, and by size and stride.
        self.layouts: dict[tuple[int, int, int, int, int], ContiguousLayout] = {}
        # The keys are ids of nodes, which stay unique because the pickle's graph keeps the nodes alive.
        self.geometries: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...] | None, int, int]] = {}
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

    def tensor(self, node: Any, fqn: str) -> Tensor | None:
        """Return the tensor that `node` rebuilds, or a storage saved alone as a tensor of its dtype; None for other
        nodes.

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
        """Decode, once per node, a tensor made of tensors: a Parameter around its data, sparse parts, a subclass."""
        if self.depth == MAX_NESTING:
            raise MalformedError(f"{fqn}: nests tensors more than {MAX_NESTING} levels deep, the limit of statecli")
        self.depth += 1
        try:
            if builder == self._build_old_parameter:
                return self._build_old_parameter(node.args, fqn, node.state)
            if node.state is not None and (builder or _LEGACY_CLASS.fullmatch(get_name(node.cls))):
                raise MalformedError(
                    f"{fqn}: the pickle replaces the values or the shape of this tensor after creating "
                    f"it{_NEVER_WRITTEN}"
                )
            return builder(node.args, fqn) if builder else _decode_numpy(node)
        finally:
            self.depth -= 1

    def is_tensor(self, node: Any) -> bool:
        """Return whether `tensor` would find a tensor, without reading or checking."""
        if type(node) is not Obj:
            return type(node) in (Persistent, Tensor)
        return self.is_torch(node) or _is_numpy(node)

    def is_torch(self, node: Any) -> bool:
        """Return whether the node becomes a torch.Tensor, as `load_state_dict` requires, not an array or a storage."""
        node = node.pid if type(node) is Persistent else node
        return type(node) is Tensor or (type(node) is Obj and self._find_builder(node.cls) is not None)

    def is_plain(self, node: Any) -> bool:
        """Return whether the node is rebuilt from a storage alone, as nearly all tensors of a file are."""
        return type(node) is Obj and self._find_builder(node.cls) is self._plain

    def get_attributes(self, node: Any, depth: int = 0) -> dict[str, Any]:
        """Return the Python attributes of a tensor: of a Parameter, of a subclass, or set by hand.

        A placeholder replaces each tensor among the attributes, because tensors are compared as parts. Torch's marks of
        parameters and buffers are left out (they are facts of the tensor), and a distributed tensor has none (its
        attributes are its place among processes).
        """
        if type(node) is not Obj or depth == MAX_NESTING:
            return {}
        builder, args = self._find_builder(node.cls), node.args
        if builder == self._build_parameter and args:
            parameter_attributes = self._select_attributes(args[3]) if len(args) > 3 else {}
            return {**self.get_attributes(args[0], depth + 1), **parameter_attributes}
        cls = get_name(args[1]) if builder == self._build_subclass and len(args) > 3 else ""
        if not cls or cls.startswith("torch.distributed."):
            return {}
        attributes = self._select_attributes(args[3])
        if cls.startswith("torch.nested."):  # only attributes other than parts and caches are settings
            return {name: value for name, value in attributes.items() if name == "_ragged_idx"}
        is_wrapper = self._find_builder(args[0]) == self._build_wrapper
        return {name: value for name, value in attributes.items() if not (is_wrapper and value is _TENSOR_PLACEHOLDER)}

    def _select_attributes(self, state: Any) -> dict[str, Any]:
        """Select from the state of a rebuild call; a class with its own `__getstate__` may give the state any type."""
        attributes = get_state_attributes(state)
        if not attributes:
            return {"__state__": state} if state else {}
        marks = _MARK_ATTRIBUTES if attributes.get("_is_buffer") is True else _MARK_ATTRIBUTES[:2]
        return {
            name: _TENSOR_PLACEHOLDER if self.is_tensor(value) else value
            for name, value in attributes.items()
            if name not in marks and not name.startswith(_TRANSIENT_MARKS)
        }

    def _find_builder(self, cls: Any) -> Builder | None:
        key = id(cls)
        if key not in self.builders:
            self.builders[key] = self.builders_by_name.get(get_name(cls))
        return self.builders[key]

    def check_storages(self, storages: Iterable[Persistent]) -> None:
        """Raise MalformedError for a storage that contradicts the file, used by a tensor or not."""
        for storage in storages:
            pid = storage.pid
            if id(pid) not in self.whole_storages and type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage":
                self._resolve_storage(storage, "data.pkl")

    def require_tensor(self, node: Any, fqn: str, label: str) -> Tensor:
        tensor = self.tensor(node, fqn)
        if tensor is None:
            raise MalformedError(f"{fqn}: its {label} is not a tensor")
        return tensor

    def _decode_bare_storage(self, node: Persistent, fqn: str) -> Tensor:
        key, dtype, device, storage, length = self._resolve_storage(node, fqn)
        elements = length * 8 // ELEMENT_BITS[dtype] * VALUES_PER_BYTE.get(dtype, 1)
        data = TensorData(storage, dtype, (elements,)) if storage is not None else None
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
            data=data,
        )

    # One method for each rebuild function; argument orders as in torch.

    def find_whole(self, node: Any) -> WholeTensor | None:
        """Return the tensor that `node` rebuilds if it has all elements of its storage and a layout seen before.

        Returns None for all other nodes, which `tensor` decodes.
        """
        if type(node) is not Obj or node.state is not None or self._find_builder(node.cls) is not self._plain:
            return None
        return self._match_layout(node.args)

    def _build_whole(self, args: tuple[Any, ...]) -> Tensor | None:
        whole = self._match_layout(args)
        if whole is None:
            return None
        (dtype, device, length, shape, elements), data, key, grad = whole
        return Tensor(dtype, shape, elements, length, device, grad, storage=key, storage_bytes=length, data=data)

    def _match_layout(self, args: tuple[Any, ...]) -> WholeTensor | None:
        """Return a tensor with all elements of its storage and the layout of an earlier tensor; None if it differs.

        This method checks each value that differs between the tensors of a file; the layout gives the other values.
        """
        if len(args) != 6 or type(args[0]) is not Persistent or args[1] != 0 or type(args[1]) is not int:
            return None
        pid, grad = args[0].pid, args[4]
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[4]) is not int:
            return None
        layout = self.layouts.get((id(pid[1]), id(pid[3]), pid[4], id(args[2]), id(args[3])))
        key = pid[2]
        if layout is None or type(key) is not str or key in self.disputed or (grad is not False and grad is not True):
            return None
        storage = self.storages.get(key)
        if storage is None or storage.length != layout.length or storage.big_endian:
            return None
        self.whole_storages.add(id(pid))
        return layout, TensorData(storage, layout.dtype, layout.shape), key, grad

    def _keep_layout(self, args: tuple[Any, ...], tensor: Tensor) -> None:
        """Keep the layout of a decoded tensor that has all elements of its storage."""
        pid, data, shape = args[0].pid, tensor.data, tensor.shape
        if data is not None and shape is not None and len(args) == 6 and len(pid) == 5:
            is_whole = tensor.nbytes == tensor.storage_bytes and not tensor.note
            if is_whole and data == TensorData(data.storage, tensor.dtype, shape) and tensor.device is not None:
                self.layouts[id(pid[1]), id(pid[3]), pid[4], id(args[2]), id(args[3])] = ContiguousLayout(
                    tensor.dtype, tensor.device, tensor.nbytes, shape, tensor.elements
                )

    def _build_plain(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 4, fqn)
        flags = args[6] if len(args) > 6 else None
        tensor = self._build_strided(args, None, args[4] if len(args) > 4 else False, flags, fqn)
        self._keep_layout(args, tensor)
        return tensor

    def _build_with_dtype(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 7, fqn)
        return self._build_strided(args, decode_dtype(args[6], fqn), args[4], args[7] if len(args) > 7 else None, fqn)

    def _build_strided(self, args: tuple[Any, ...], dtype: str | None, grad: Any, flags: Any, fqn: str) -> Tensor:
        key, stored_dtype, device, storage, length = self._resolve_storage(args[0], fqn)
        dtype = dtype or stored_dtype
        if storage is not None and storage.big_endian:
            _refuse_other_swap(dtype, stored_dtype, key, fqn)
        shape, strides, elements, last = self._compute_geometry(args[2], args[3], fqn)
        offset = args[1]
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
        conjugate, negative = decode_lazy_flags(flags, fqn)
        data = TensorData(storage, dtype, shape, offset, strides, conjugate, negative) if storage is not None else None
        size = nbytes(dtype, elements)
        note = None
        if size < length and elements < capacity:
            note = f"view: {elements} of the {capacity} elements of its storage"
        elif elements > capacity:
            note = f"expanded: {elements} elements share {capacity} stored elements"
        return Tensor(
            dtype, shape, elements, size, device, grad, note=note, storage=key, storage_bytes=length, data=data
        )

    def _compute_geometry(
        self, size: Any, stride: Any, fqn: str
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None, int, int]:
        """Return (shape, strides or None if contiguous, element count, offset of the last element), cached per pair."""
        cached = self.geometries.get((id(size), id(stride)))
        if cached is not None:
            return cached
        shape, strides = decode_ints(size, "shape", fqn), decode_ints(stride, "strides", fqn)
        elements = count_elements(shape, fqn)
        # A shape without strides means contiguous, as in torch.
        is_dense = not strides or strides == contiguous_strides(shape)
        last = elements - 1 if is_dense else compute_last(shape, strides, fqn)
        geometry = (shape, None if is_dense else strides, elements, last)
        self.geometries[id(size), id(stride)] = geometry
        return geometry

    def _resolve_storage(self, node: Any, fqn: str) -> _StoredAs:
        """Return the storage of a persistent id, which is checked once."""
        pid = node.pid if type(node) is Persistent else None
        cached = self.checked.get(id(pid))
        if cached is not None:
            return cached
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage":
            raise MalformedError(
                f"{fqn}: its storage is not recorded in the form that torch writes; save the checkpoint again"
            )
        cls, key, location, numel = pid[1], pid[2], pid[3], pid[4]
        dtype = self.dtypes.get(cls.name) if type(cls) is Global else None
        if dtype is None or type(key) is not str or type(location) is not str:
            raise MalformedError(
                f"{fqn}: its storage is not recorded in the form that torch writes "
                f"({truncate_value(get_name(cls) or cls)}); save the checkpoint again"
            )
        check_device(location, fqn)
        if type(numel) is not int or numel < 0:
            raise MalformedError(
                f"{fqn}: storage {truncate_value(key)} claims {truncate_value(numel)} elements; "
                "expected an integer of 0 or more"
            )
        length = numel * ELEMENT_BITS[dtype] // 8
        self._refuse_disputed(pid, fqn)
        storage = self.storages.get(key)
        if storage is None and location != "meta":
            raise MalformedError(
                f"{fqn}: storage {truncate_value(key)} is not in the file; "
                "copy the file again, or save the checkpoint again"
            )
        if storage is not None and storage.length != length:
            raise MalformedError(
                f"{fqn}: storage {quoting.name(key)} has {storage.length} bytes in the file, but the pickle claims "
                f"{truncate_value(length)}; copy or download the file again"
            )
        if len(pid) > 5 and pid[5] is not None and storage is not None:
            storage = select_view(storage, pid[5], ELEMENT_BITS[dtype] // 8, fqn)
            length = storage.length
        # Keep the bytes of a "meta" storage, because torch.load reads them if map_location names another device.
        stored_as = _StoredAs(key, dtype, location, storage, length)
        self.checked[id(pid)] = stored_as
        return stored_as

    def _refuse_disputed(self, pid: tuple[Any, ...], fqn: str) -> None:
        view = pid[5] if len(pid) > 5 and type(pid[5]) is tuple else ()
        for key in (pid[2], *view[:1]):
            if type(key) is str and key in self.disputed:
                raise MalformedError(
                    f"{fqn}: the pickle describes storage {truncate_value(key)} in two ways: "
                    f"{self.disputed[key]}; torch uses the first for all tensors"
                )

    def _build_parameter(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 2, fqn)
        inner = self.require_tensor(args[0], fqn, "data")
        tensor = msgspec.structs.replace(inner, is_parameter=True, requires_grad=args[1] is True)
        if len(args) > 3:
            attributes = self._drop_own_data(get_state_attributes(args[3]), tensor, fqn)
            _refuse_replaced(attributes, fqn)
            _copy_marks(tensor, attributes)
            tensor.parts = tensor.parts or self._collect_inner(attributes, fqn)
        return tensor

    def _build_old_parameter(self, args: tuple[Any, ...], fqn: str, state: Any = None) -> Tensor:
        """Build a Parameter of torch before 0.4, around its data. The state is (requires_grad, volatile, hooks)."""
        grad = args[1] if len(args) > 1 else True
        if state is not None:
            if type(state) is not tuple or len(state) != 3:
                raise MalformedError(
                    f"{fqn}: the pickle replaces the data of this tensor after creating it{_NEVER_WRITTEN}"
                )
            grad = state[0]
        inner = self.require_tensor(args[0] if args else None, fqn, "data")
        return msgspec.structs.replace(inner, is_parameter=True, requires_grad=grad is True)

    def _build_subclass(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 4, fqn)
        builder = self._find_builder(args[0])
        if builder is None or type(args[2]) is not tuple:
            raise MalformedError(
                f"{fqn}: statecli does not know the function that rebuilds this tensor, "
                f"{truncate_value(get_name(args[0]) or args[0])}"
            )
        if builder == self._build_subclass:
            raise MalformedError(
                f"{fqn}: this tensor subclass wraps another tensor subclass, which statecli does not read"
            )
        tensor = msgspec.structs.replace(builder(args[2], fqn))
        attributes = get_state_attributes(args[3])
        _refuse_replaced(attributes, fqn)
        _copy_marks(tensor, attributes)
        cls = get_name(args[1])
        if cls not in _PLAIN_CLASSES and tensor.layout != "jagged":
            tensor.note = _describe_subclass(cls, attributes, self, fqn)
        tensor.is_parameter |= cls == "torch.nn.parameter.Parameter"
        tensor.parts = tensor.parts or self._collect_inner(attributes, fqn)
        return tensor

    def _drop_own_data(self, attributes: Mapping[str, Any], tensor: Tensor, fqn: str) -> Mapping[str, Any]:
        """Return the attributes without `data` and `requires_grad` if these equal the tensor's own values.

        `Params4bit.__getstate__` of bitsandbytes 0.50 adds them, and also `module`, the layer with the parameter.
        """
        node, grad = attributes.get("data"), attributes.get("requires_grad")
        data = self.tensor(node, f"{fqn}.data") if node is not None and grad is tensor.requires_grad else None
        if data is None or data.data is None or (data.data, data.shape) != (tensor.data, tensor.shape):
            return attributes
        own_names = ("data", "requires_grad", "module")
        return {name: value for name, value in attributes.items() if name not in own_names}

    def _collect_inner(self, attributes: Mapping[str, Any], fqn: str) -> tuple[tuple[str, TensorData], ...]:
        """Collect the tensors among a tensor's attributes, also in lists and dicts, each with its parts."""
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
        require_arguments(args, 8, fqn)
        shape = decode_ints(args[2], "shape", fqn)
        return _build_without_bytes(
            decode_dtype(args[1], fqn), shape, fqn, device=decode_device(args[6], fqn), grad=args[7] is True
        )

    def _build_meta(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 4, fqn)
        return _build_without_bytes(
            decode_dtype(args[0], fqn), decode_ints(args[1], "shape", fqn), fqn, device="meta", grad=args[3] is True
        )

    def _build_quantized(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 6, fqn)
        tensor = self._build_strided(args, None, args[5] if type(args[5]) is bool else False, None, fqn)
        scheme = args[4]
        if type(scheme) is not tuple or len(scheme) < 3:
            raise MalformedError(f"{fqn}: its quantizer is not a tuple of scheme, scale and zero point")
        name = get_name(scheme[0]).removeprefix("torch.")
        tensor.layout = "quantized"
        tensor.note = "; ".join(filter(None, (name.replace("_", " "), tensor.note))) or None
        if tensor.data is not None:
            tensor.data = msgspec.structs.replace(tensor.data, quantizer=self._read_quantizer(name, scheme, fqn))
        return tensor

    def _read_quantizer(self, name: str, scheme: tuple[Any, ...], fqn: str) -> Quantizer:
        if len(scheme) == 3:
            if type(scheme[1]) not in (float, int) or type(scheme[2]) is not int:
                raise MalformedError(f"{fqn}: the scale or zero point of its quantizer is not a number")
            return Quantizer(name, scale=float(scheme[1]), zero_point=scheme[2])
        scales, zeros = (self._read_channel_numbers(node, fqn) for node in scheme[1:3])
        return Quantizer(name, axis=scheme[3] if type(scheme[3]) is int else None, scales=scales, zero_points=zeros)

    def _read_channel_numbers(self, node: Any, fqn: str) -> TensorData | None:
        """Read the scales or zero points of the channels. They are read whole, because torch stores each of them."""
        tensor = self.require_tensor(node, fqn, "quantizer")
        if tensor.data is not None and tensor.nbytes > tensor.data.storage.length:
            stored = f"but the storage has {tensor.data.storage.length}"
            raise MalformedError(
                f"{fqn}: its quantizer needs {tensor.nbytes} bytes for {tensor.elements} numbers, {stored}"
            )
        return tensor.data

    def _build_sparse(self, args: tuple[Any, ...], fqn: str) -> Tensor:
        require_arguments(args, 2, fqn)
        if type(args[0]) is int and args[0] in _SCRIPT_LAYOUTS:
            # TorchScript: (layout, sizes, requires_grad, parts, hooks).
            layout_name, count = _SCRIPT_LAYOUTS[args[0]]
            args = (Global("torch", layout_name, 0), (*args[3 : 3 + count], args[1]))
        layout = args[0].args[0] if type(args[0]) is Obj and args[0].args else get_name(args[0])
        fields = args[1]
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
        return self._build_ragged(
            "nested", dict(zip(("values", "sizes", "strides", "offsets"), args, strict=False)), fqn
        )

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
        require_arguments(args, 4, fqn)
        tensor = self.require_tensor(args[0], fqn, "data")
        dtype = decode_dtype(args[1], fqn)
        # XLA saves bfloat16 as float32, because numpy does not support bfloat16.
        if tensor.dtype != dtype and (tensor.dtype, tensor.layout, dtype) != ("float32", "numpy", "bfloat16"):
            raise MalformedError(
                f"{fqn}: has the dtype {dtype}, but its data is {tensor.dtype}; torch.save does not write this: do not "
                "load the file"
            )
        return msgspec.structs.replace(
            tensor,
            dtype=dtype,
            device=decode_device(args[2], fqn),
            requires_grad=args[3] is True,
            note=None,
        )

    def _build_uninitialized(self, args: tuple[Any, ...], fqn: str) -> Tensor:  # noqa: ARG002  # one signature for all
        note = "uninitialized (lazy): it has no shape before the first forward"
        grad, kind = bool(args and args[0] is True), NoteKind.UNINITIALIZED
        return Tensor("unknown", None, 0, 0, None, grad, is_parameter=True, note=note, note_kind=kind)


def _refuse_other_swap(dtype: str, stored_dtype: str, key: str, fqn: str) -> None:
    """Refuse a dtype whose byte order torch.load gets wrong, because it swaps bytes by the dtype of the storage."""
    if dtype != stored_dtype and max(ELEMENT_BITS[dtype], ELEMENT_BITS[stored_dtype]) > 8:
        raise MalformedError(
            f"{fqn}: the values depend on the loading machine: the tensor is {dtype}, but torch.load swaps the bytes "
            f"of this big-endian file in units of {stored_dtype}, the dtype of storage {truncate_value(key)}"
        )


_PLAIN_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def _refuse_replaced(attributes: Mapping[str, Any], fqn: str) -> None:
    """Refuse attributes that torch does not save as Python attributes, because setting them changes values."""
    replaced = REPLACING_ATTRIBUTES.intersection(attributes)
    if replaced:
        raise MalformedError(
            f"{fqn}: the pickle sets the attribute {min(replaced)} of this tensor after creating it{_NEVER_WRITTEN}"
        )


#: Names of tensor classes in files of torch before 0.1.10, which set the storage of such an object.
_LEGACY_CLASS = compile_on_use(r"torch\.(?:cuda\.)?\w*Tensor")


#: Attributes with which torch marks a parameter, a buffer, and a persistent buffer.
_MARK_ATTRIBUTES = ("_is_param", "_is_buffer", "persistent")
#: Placeholder for a tensor among the attributes of a tensor.
_TENSOR_PLACEHOLDER = Global("torch", "Tensor", 0)
#: Prefixes of attributes of torch.compile (varying sizes) and transformers (initialized tensors).
_TRANSIENT_MARKS = ("_dynamo_", "_has_dynamo_", "_specialize_on", "_is_hf_initialized")


def _copy_marks(tensor: Tensor, attributes: Mapping[str, Any]) -> None:
    """Copy the marks of nn.Buffer and of subclass parameters from Python attributes to the tensor."""
    if attributes.get("_is_param") is True:
        tensor.is_parameter = True
    if attributes.get("_is_buffer") is True:
        tensor.is_buffer = True
        if type(attributes.get("persistent")) is bool:
            tensor.persistent = attributes["persistent"]


def _describe_subclass(cls: str, state: Mapping[str, Any], decoder: TensorDecoder, fqn: str) -> str:
    name = cls.rpartition(".")[2] or "tensor subclass"
    local = decoder.tensor(state.get("_local_tensor"), fqn)
    if local is None or local.shape is None:
        return name
    placements = as_sequence(get_attributes(state.get("_spec")).get("placements")) or ()
    placement_text = ", ".join(_describe_placement(node) for node in placements)
    return f"{name}: local shape {list(local.shape)}" + (f", {placement_text}" if placement_text else "")


def _describe_placement(node: Any) -> str:
    name = get_name(node.cls).rpartition(".")[2] if type(node) is Obj else "?"
    dim = get_attributes(node).get("dim")
    if dim is None and type(node) is Obj and node.args and type(node.args[0]) is int:
        dim = node.args[0]
    return f"{name}({dim})" if type(dim) is int else name


def _is_numpy(node: Obj) -> bool:
    name = get_name(node.cls)
    if not name.startswith("numpy.") or not name.endswith("._reconstruct"):
        return False
    return type(node.state) is tuple and len(node.state) >= 5 and type(node.state[1]) is tuple


def _decode_numpy(node: Obj) -> Tensor | None:
    """Decode a numpy array in a pickle. Its BUILD state is (version, shape, dtype, order, bytes)."""
    if not _is_numpy(node):
        return None
    state = node.state
    descr = state[2].args[0] if type(state[2]) is Obj and state[2].args else None
    name = descr if type(descr) is str else get_name(descr).removeprefix("numpy.") or "of no name"
    dtype = _NUMPY_DTYPES.get(name) or format_array_dtype(state[2])
    if name in _NUMPY_DTYPES and read_number_type(state[2]) is None:
        raise MalformedError(f"a numpy array has dtype {truncate_value(name)} in a form that numpy does not write")
    shape = decode_ints(state[1], "shape", "numpy array")
    elements = count_elements(shape, "numpy array")
    raw = read_raw_bytes(state[4])
    size = elements * (ELEMENT_BITS.get(dtype, 0) // 8) if raw is None else len(raw)
    data = None if raw is None else _build_inline(raw, dtype, shape, elements, state)
    return Tensor(dtype, shape, elements, size, "cpu", False, layout="numpy", note="numpy array", data=data)


def _build_inline(
    raw: bytes, dtype: str, shape: tuple[int, ...], elements: int, state: tuple[Any, ...]
) -> TensorData | None:
    """Locate the elements in `raw`. Elements other than numbers (text, records) can only be compared for equality."""
    is_known = dtype in ELEMENT_BITS
    if is_known and len(raw) * 8 != elements * ELEMENT_BITS[dtype]:
        raise MalformedError(
            f"a numpy array of {elements} {dtype} elements takes "
            f"{elements * ELEMENT_BITS[dtype] // 8} bytes, but has {len(raw)}"
        )
    order = state[2].state[1:2] if type(state[2]) is Obj and type(state[2].state) is tuple else ()
    storage = ByteRange("", 0, len(raw), big_endian=order in ((">",), (b">",)))
    if type(state[3]) is not bool:
        raise MalformedError(
            f"a numpy array has memory order {truncate_value(state[3])}; expected True (Fortran) or False (C)"
        )
    strides = tuple(accumulate(shape, mul, initial=1))[:-1] if state[3] else None
    return TensorData(storage, dtype, shape, strides=strides, inline=raw)


_NUMPY_DTYPES: dict[str, str] = {
    "b1": "bool",
    **{f"i{size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"c{size}": f"complex{8 * size}" for size in (8, 16)},
    # longdouble and clongdouble of numpy, whose sizes depend on the machine.
    **{f"f{size}": f"numpy float{8 * size}" for size in (12, 16)},
    **{f"c{size}": f"numpy complex{8 * size}" for size in (24, 32)},
}


def _build_without_bytes(dtype: str, shape: tuple[int, ...], fqn: str, *, device: str | None, grad: bool) -> Tensor:
    elements = count_elements(shape, fqn)
    return Tensor(dtype, shape, elements, nbytes(dtype, elements), device, grad)
