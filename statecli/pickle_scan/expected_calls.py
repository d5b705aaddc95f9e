"""Describe how picklers use names of `known_names`: which arguments they pass, which states and items they set.

`call_flow` compares each call of a pickle with these calls. Any other call may run a method of an object that the file
chooses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import known_names, packed_weights
from statecli.pickles import safe_globals
from statecli.pickles.nodes import Global, Key, Obj, Persistent, SetOf, Value

_DUNDER = compile_on_use(r"__\w+__\Z")
_FRACTION = compile_on_use(r"-?[0-9]+(?:/[0-9]+)?")
#: Attributes of Python that only record the origin of an object.
_ORIGIN_DUNDERS = frozenset(["__orig_class__", "__origin__", "__wrapped__"])
#: Classes of the dicts that hold a module's hooks, and classes of hooks.
HOOK_HOLDERS = frozenset(["collections.OrderedDict", *known_names.HOOK_CLASSES])
_SET_CLASSES = frozenset(["builtins.set", "builtins.frozenset"])
_COPYREG_FUNCTIONS = frozenset(["copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"])
#: Classes that store a function for a later call.
DEFERRING_CALLERS = frozenset(["functools.partial", "collections.defaultdict"])
#: Names that must not be passed to a function that calls its arguments.
FORBIDDEN_CALLEES = frozenset(
    [
        *known_names.CALLEE_POSITIONS,
        *known_names.SPELLING_FUNCTIONS,
        *known_names.SHARED_OBJECTS,
        *known_names.HOOK_CLASSES,
    ]
) - {"collections.defaultdict"}


@lru_cache(maxsize=1024)
def get_plain_name(name: Global) -> str:
    """Return a global's name as `known_names` lists it: `module.name`, with the public module."""
    return known_names.get_plain_name(name.module, name.name)


def is_copyreg_call(value: Obj) -> bool:
    """Return True for a call of a copyreg function that creates an object of the class in its first argument."""
    return type(value.cls) is Global and get_plain_name(value.cls) in _COPYREG_FUNCTIONS and bool(value.args)


def fills_mapping(name: str, call: Obj) -> bool:
    """Return True if a call fills a mapping from arguments that picklers never pass."""
    if name == "copyreg._reconstructor":
        base = call.args[1] if len(call.args) > 2 else None
        is_dict = type(base) is Global and get_plain_name(base) == "builtins.dict"
        return is_dict and type(call.args[2]) is not dict
    return name.endswith((".UserDict", ".AttributeDict")) and call.how != "newobj" and bool(call.args or call.kwargs)


def is_layer_count(layers: Value) -> bool:
    """Return True for a plausible `num_layers` of a recurrent module, because each layer adds several names."""
    return layers is None or (type(layers) is int and layers <= _MAX_LAYERS)


def is_packed(name: str) -> bool:
    """Return True if torch's C++ code converts the state of this class to packed weights."""
    return packed_weights.is_convolution(name) or packed_weights.is_cpp_class(name) or name == SCRIPT_OBJECT


def is_state(name: str, state: Value) -> bool:
    """Return True if picklers write this kind of state for objects of the named class.

    `__setstate__` of torch's modules and optimizers gives the state to `dict.update`, and so takes pairs as well.
    """
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    if state is not None and all(part is None or type(part) is dict for part in parts):
        return True
    of_tensors = name.startswith("torch.") and name.endswith(("Tensor", "Storage"))
    return name.startswith(_OTHER_STATE_PREFIXES) or of_tensors or (is_packed(name) and type(state) is tuple)


def list_parts(value: Any) -> Sequence[Value]:
    """Return the elements of a list, tuple or set; for a dict, its values and unwrapped `Key` objects; else ()."""
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    if type(value) is dict:
        return [*(key.value for key in value if type(key) is Key), *value.values()]
    return value.elems if type(value) is SetOf else ()


def is_packable(name: str, state: Value, read_storage: packed_weights.ReadStorage) -> bool:
    """Return True if torch's C++ code can pack weights from this state safely, or packs nothing for this class."""
    if packed_weights.is_convolution(name):
        return packed_weights.is_convolution_state(state)
    if packed_weights.is_cpp_class(name):
        return not packed_weights.is_known_class(name) or packed_weights.is_packed_state(name, state, read_storage)
    if name == SCRIPT_OBJECT:
        if type(state) is not tuple or len(state) != 2 or type(state[1]) is not str:
            return False
        return packed_weights.is_cpp_class(state[1]) and packed_weights.is_packed_state(
            state[1], state[0], read_storage
        )
    return True


def is_dunder(key: Value) -> bool:
    """Return True for the name of a method that Python itself may call, such as `__setstate__`."""
    return type(key) is str and _DUNDER.match(key) is not None and key not in _ORIGIN_DUNDERS


def is_set(value: Value) -> bool:
    """Return True for a set, which nothing can call, whatever its key is; yacs has a set at `__deprecated_keys__`."""
    return type(value) is Obj and type(value.cls) is Global and get_plain_name(value.cls) in _SET_CLASSES


@lru_cache(maxsize=1024)
def is_clean(name: str) -> bool:
    """Return True if the name, with its module, is on the list of names that only build data."""
    module, _, last = name.rpartition(".")
    return known_names.is_clean(module, last)


@lru_cache(maxsize=1024)
def may_return_shared_object(name: str) -> bool:
    """Return True for a harmless function that is not known to create a new object: its result may be shared."""
    is_function = name.rpartition(".")[2].lstrip("_")[:1].islower()
    return is_function and name not in _NEW_OBJECT_MAKERS and "._rebuild_" not in name and is_clean(name)


def keeps_arguments(how: str, name: str) -> bool:
    """Return True if a class only stores its arguments (like an exception), or if other rules check the arguments."""
    is_keeper = name.startswith(_KEEPER_PREFIXES) or name.endswith(("Error", "Exception", "Warning"))
    return is_keeper or (how == "newobj" and name.startswith("torch.ao.quantization.qconfig."))


def is_tensor_data(name: str) -> bool:
    """Return True if a tensor may be rebuilt from an object that this name creates."""
    is_class = name.startswith("torch.") and name.endswith(("Storage", "Tensor"))
    return is_class or name.startswith(_TENSOR_DATA_PREFIXES)


#: Prefixes of functions and classes that return tensors, storages, layouts or arrays.
_TENSOR_DATA_PREFIXES = (
    *("torch._utils.", "torch._tensor.", "torch.serialization.", "torch.storage.", "torch.nn.parameter."),
    *("torch.distributed.", "torch._subclasses.", "numpy."),
)
#: Prefixes of functions and classes whose objects may be arguments of a call: tensors, and values without attributes
#: that the pickle sets. Functions call methods of their arguments (`uuid.UUID` calls `replace`, the codec idna calls
#: `encode`).
ARGUMENT_PREFIXES = (
    *_TENSOR_DATA_PREFIXES,
    *("builtins.", "_codecs.encode", "collections.OrderedDict", "collections.Counter", "collections.defaultdict"),
    *("datetime.", "decimal.", "fractions.", "pathlib.", "zoneinfo.", "uuid.", "operator.", "torch.Size"),
    *("functools.reduce", "torch.device", "torch.Generator", "torchao.", "__torch__."),
)


#: Prefixes of classes and functions that only keep their arguments, or that other rules check.
_KEEPER_PREFIXES = (
    *("functools.", "operator.", "collections.defaultdict", "types.GenericAlias", "torch.jit._pickle."),
    "torch._tensor._rebuild_from_type_v2",
)
#: Names whose result is always a value that the process already has, such as a member of an enumeration. The results of
#: the excluded names depend on their arguments.
SHARED_VALUES = frozenset(
    name for name in known_names.SHARED_OBJECTS if not name.startswith(("torch.jit.", "logging.", "accelerate.state."))
)
#: Prefixes of classes whose attributes are never functions.
VALUE_PREFIXES = ("torch._utils.", "torch._tensor.", "collections.", "torch.distributed.", "torchao.")
#: Containers whose elements a function iterates over if it gets one as an argument.
ITERATED_CONTAINERS = frozenset(
    [
        *known_names.qualify_names("builtins", "list tuple set frozenset dict"),
        *known_names.qualify_names("collections", "OrderedDict Counter defaultdict deque"),
    ]
)
#: Function that rebuilds a sparse tensor.
REBUILD_SPARSE = "torch._utils._rebuild_sparse_tensor"
#: Largest number of tensors in a sparse tensor: two of indices, and the values.
MAX_SPARSE_PARTS = 3
SPARSE_CLASS = compile_on_use(r"torch\.(?:cuda\.)?sparse\.\w+Tensor")
#: Prefixes of functions that rebuild a tensor from its data and its hooks.
HOOKED_REBUILD_PREFIXES = (
    "torch._utils._rebuild_tensor_v",
    "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_parameter",
)
#: Prefixes of classes whose state may be another value than a dict of attributes or two such dicts.
_OTHER_STATE_PREFIXES = (
    *("numpy.", "random.Random", "functools.partial", "types.GenericAlias", "__torch__."),
    *("torch.ScriptObject", "torch.Generator", "torch._C.Generator", "torch.utils.hooks.RemovableHandle"),
    *("torch._utils._rebuild_", "torch._tensor._rebuild_", "torch.nn.parameter.", "torch._dynamo.decorators._DimRange"),
    *("torch.distributed._shard.sharded_tensor.api.ShardedTensor",),
    *("torch.distributed._shard.sharded_tensor.metadata.TensorProperties",),
    *("torch.distributed.checkpoint.metadata.TensorProperties",),
)
#: Depth to which the nested containers of a state that C++ packs are copied.
MAX_PACKED_STATE_DEPTH = 8
#: Methods that Python's own code calls on objects used as containers.
CONTAINER_METHODS = frozenset(name for kind in (dict, list, set) for name in dir(kind) if name[0] != "_")
#: Names that torch's own unpickler admits and that create only tensors, dicts and text.
PLAIN_DATA_NAMES = frozenset(
    name
    for name in safe_globals.list_allowed_names()
    if name not in ("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_parameter_with_state")
    and name != REBUILD_SPARSE
    and not SPARSE_CLASS.fullmatch(name)
)
#: Array classes, which pickles never call: a function of numpy creates empty arrays, and the classes themselves accept
#: a buffer of bytes as objects.
ARRAY_CLASSES = frozenset(
    ["numpy.ndarray", "numpy.recarray", "numpy.rec.recarray", "numpy.matrix", "numpy.matrixlib.defmatrix.matrix"]
)
#: Prefixes of functions that return arrays, and the array classes; all take their state with the method of an array.
ARRAY_PREFIXES = ("numpy.ma.", "numpy.core.", "numpy._core.", *ARRAY_CLASSES)
ARRAY_RECONSTRUCTORS = frozenset(
    f"numpy.{core}.{name}" for core in ("core", "_core") for name in ("multiarray._reconstruct", "numeric._frombuffer")
)
NUMPY_RANDOM_PREFIX = "numpy.random."
ORDERED_DICT = "collections.OrderedDict"
#: Methods of an OrderedDict, which its state must not replace.
DICT_METHODS = frozenset(dir(OrderedDict))
#: Class whose state has the number of a hook; and limit of this number.
HOOK_HANDLE_CLASS = "torch.utils.hooks.RemovableHandle"
MAX_HOOKS = 2**31
POLYNOMIAL_CLASS = "numpy.poly1d"
SCALAR_FUNCTIONS = frozenset(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core"))
#: Prefixes of the packages that define torch's recurrent modules.
RECURRENT_MODULE_PREFIXES = ("torch.nn.modules.", "torch.ao.nn.")
_MAX_LAYERS = 4096
GENERATOR_CLASSES = frozenset(["torch.Generator", "torch._C.Generator"])
#: Class whose state torch passes to a C++ object at once.
SCRIPT_OBJECT = "torch.ScriptObject"
#: C++ classes of objects that describe the placement of a torch.distributed tensor.
PLACEMENT_CLASSES = frozenset(
    name
    for module in ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")
    for name in known_names.qualify_names(module, "Shard Replicate Partial _Partial _StridedShard")
)
CPP_CLASSES = PLACEMENT_CLASSES | {SCRIPT_OBJECT}
#: Reasons why a name is misused: the pickle uses it in another way than the pickles of checkpoints do.
UNEXPECTED_ARGUMENTS = (
    "is called by the pickle in a way that no checkpoint needs, so statecli does not know what the call does; loading "
    "may hang, fill the memory or access other memory"
)
UNEXPECTED_STATE = (
    "is restored from a state that no checkpoint needs; using the object may run code, fill the memory or access other "
    "memory"
)
UNEXPECTED_CHANGE = (
    "builds an object that the pickle changes in a way that picklers never write; the change may run a method of the "
    "object, or affect the whole Python process"
)
UNKNOWN_CALLEE = "calls a value that is not an imported name, so statecli does not know what code runs"
UNSET = (
    "is created by the pickle without the state that picklers always write, so any use of the object may crash the "
    "process or read random memory"
)
UNEXPECTED_PLACE = (
    "is stored by the pickle where torch never stores such an object; statecli does not know which code calls the "
    "object"
)
UNCHECKED_INDICES = (
    "creates a sparse tensor whose indices neither torch nor statecli can check; an operation on this tensor may "
    "overwrite memory outside the tensor"
)
#: Types of keys and elements whose hash depends on other values.
COMPOSITE_KEY_TYPES = frozenset([Key, Obj, SetOf, tuple])
REBUILD_JAGGED = "torch.nested._internal.nested_tensor._rebuild_njt"
#: Classes whose objects get items or elements from picklers. In any other class this would run a method of the object,
#: or of the object that it stands for.
DICT_CLASSES = frozenset(
    ["collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict", *_COPYREG_FUNCTIONS]
)
ELEMENT_CONTAINERS = frozenset(["collections.deque", "builtins.list", "builtins.set"])
ITEM_CONTAINERS = DICT_CLASSES | {
    *ELEMENT_CONTAINERS,
    "torch.nn.utils.prune.PruningContainer",
    *(name for name in known_names.DATA_NAMES if name.endswith(".AttributeDict")),
}
#: Classes that build a container or a number from their argument.
CONVERTING_CLASSES = frozenset(
    [
        *known_names.qualify_names("builtins", "dict list tuple set frozenset int float bool str bytes bytearray"),
        *known_names.qualify_names("collections", "OrderedDict Counter deque ChainMap UserDict UserList UserString"),
        *("torch.Size", "torch.torch_version.TorchVersion"),
    ]
)
#: Functions whose results picklers pass to these classes, in addition to literals.
_LITERAL_FUNCTIONS = frozenset(["_codecs.encode", *SCALAR_FUNCTIONS])
#: Functions, and classes with lower-case names, that create a new object.
_NEW_OBJECT_MAKERS = frozenset(
    [
        *known_names.qualify_names("builtins", "dict list set bytearray object"),
        *("collections.deque", "collections.defaultdict", "functools.partial", "array.array", *_COPYREG_FUNCTIONS),
        *(
            "numpy.ndarray",
            "numpy.dtype",
            "numpy.poly1d",
            "numpy.recarray",
            "numpy.rec.recarray",
            "numpy.ma.core._mareconstruct",
        ),
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
        *(name for name in known_names.DATA_NAMES if name.startswith("numpy.random.")),
        "deepspeed.utils.tensor_fragment.fragment_address",
    ]
)
#: Prefixes of clean classes with slots, whose state is a pair of dicts.
SLOTTED_PREFIXES = ("torch.distributed.", "torch._dynamo.", "numpy.", "uuid.")
#: Attributes that a state must not set: the class of an object, all attributes at once, other names for attributes.
CLASS_ATTRIBUTES = frozenset(["__class__", "__dict__", "__setstate__", "attribute_map"])


def converts_object(name: str, args: tuple[Value, ...]) -> bool:
    """Return True if a class such as `dict` or `int` gets an object as argument, and so calls the object's methods.

    Picklers pass literals. A range or a tensor as argument may produce any number of elements.
    """
    return name in CONVERTING_CLASSES and any(
        type(arg) is Obj and not (type(arg.cls) is Global and get_plain_name(arg.cls) in _LITERAL_FUNCTIONS)
        for arg in args
    )


def computes_number(name: str, args: tuple[Value, ...]) -> bool:
    """Return True if `Fraction` gets an argument that Python never pickles: `1e999999999` would fill the memory."""
    return name == "fractions.Fraction" and not all(
        type(arg) is int or (type(arg) is str and _FRACTION.fullmatch(arg)) for arg in args
    )


def has_unexpected_value(name: str, args: tuple[Value, ...]) -> bool:
    """Return True if a class of single values, such as `Decimal`, gets an argument that picklers never write.

    The members of an enumeration have numbers, texts or tuples of these as values. An error message shows any other
    value, and computing with a number of the file takes any time.
    """
    if name in SHARED_VALUES:
        values = [part for arg in args for part in (arg if type(arg) is tuple else (arg,))]
        return not _SCALAR_TYPES.issuperset(map(type, values))
    types = _ARGUMENT_TYPES.get(name)
    return types is not None and not types.issuperset(map(type, args))


def has_unexpected_state(name: str, state: Value) -> bool:
    """Return True if a class that converts or prints its state gets a state that picklers never write."""
    if name == "uuid.UUID":
        parts = state if type(state) is tuple else (state,)
        values = [value for part in parts if type(part) is dict for value in part.values()]
        return not _UUID_TYPES.issuperset(map(type, values))
    if name.endswith(".metadata.TensorProperties") and type(state) is tuple:
        encoding = state[3] if len(state) == 5 else None
        root = encoding.cls if type(encoding) is Obj else encoding
        return type(root) is not Global or not get_plain_name(root).startswith(_MEMORY_FORMATS)
    return name.startswith("ipaddress.")


_SCALAR_TYPES = frozenset([int, float, bool, str, bytes, type(None)])
#: Types of the values in the state of a UUID.
_UUID_TYPES = frozenset([int, type(None)])
#: Classes of the encoded memory formats in the state of a tensor's properties.
_MEMORY_FORMATS = (
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
)
#: Types of the arguments that picklers write in a call of a class; they create objects of some classes empty.
_ARGUMENT_TYPES: dict[str, frozenset[type]] = {
    "decimal.Decimal": frozenset([str]),
    **{name: frozenset([int, str]) for name in known_names.DATA_NAMES if name.startswith("ipaddress.")},
    **dict.fromkeys(known_names.BIT_GENERATORS, frozenset()),
    **{name: frozenset() for name in known_names.DATA_NAMES if name.endswith((".SeedSequence", "._remote_device"))},
}


def has_shape(name: str, args: tuple[Value, ...]) -> bool:
    """Return True if a call creates an array with a shape; numpy passes (0,) and sets the shape in the state."""
    place = {"_reconstruct": 1, "_mareconstruct": 2}.get(name.rpartition(".")[2]) if name.startswith("numpy.") else None
    return place is not None and len(args) > place and args[place] != (0,)


#: Methods that pickle and the functions that rebuild tensors look up on their arguments.
LOOKED_UP_METHODS = frozenset(["as_subclass", "detach", "requires_grad_", "extend", "append", "add", "setdefault"])
CONTAINER_TYPES = frozenset([dict, list, tuple, SetOf, Persistent])
#: Types of objects and of containers that may hold objects.
OBJECT_AND_CONTAINER_TYPES = frozenset([dict, list, tuple, SetOf, Obj])
#: Characters of a called name that cost one step.
NAME_CHARACTERS_PER_STEP = 64
#: Bytes of an array that are swapped or reordered in one step.
COMPUTED_BYTES_PER_STEP = 8
#: Largest number of nested functions that call their arguments.
MAX_INDIRECT_CALLS = 8
#: Prefixes of the names that picklers pass as a function to call, by the caller and the position. Other clean names at
#: this position are misused; names that are not clean are reported by themselves.
EXPECTED_CALLEES = {
    ("torch._tensor._rebuild_from_type_v2", 0): ("torch._utils._rebuild_", REBUILD_JAGGED),
    ("copyreg._reconstructor", 1): ("builtins.",),
    ("array._array_reconstructor", 0): ("array.array",),
    **{(f"numpy.{core}.multiarray._reconstruct", 0): ("numpy.ma.", *ARRAY_CLASSES) for core in ("core", "_core")},
    ("numpy.ma.core._mareconstruct", 0): ("numpy.ma.",),
    ("numpy.ma.core._mareconstruct", 1): tuple(ARRAY_CLASSES),
    **{
        (constructor, 1): (known_names.BIT_GENERATOR_CONSTRUCTOR,) for constructor in known_names.GENERATOR_CONSTRUCTORS
    },
    (known_names.BIT_GENERATOR_CONSTRUCTOR, 0): known_names.BIT_GENERATORS,
    **{
        (f"numpy.random.{module}.__pyx_unpickle_SeedSequence", 0): (f"numpy.random.{module}.SeedSequence",)
        for module in ("bit_generator", "_bit_generator")
    },
}


def get_keyword_arguments(kwargs: Value) -> dict[Value, Value]:
    """Return keyword arguments as a dict. A value that is not a dict becomes the only key, which is not a text."""
    return kwargs if type(kwargs) is dict else {Key(kwargs): None}


def iter_indirect_calls(function: str, args: tuple[Value, ...]) -> Iterator[Obj]:
    """Yield the calls that a harmless function makes to its arguments, such as to the class in `copyreg.__newobj__`."""
    match function, args:
        case "copyreg.__newobj__", (cls, *rest):
            yield Obj(cls, tuple(rest), "newobj")
        case "copyreg.__newobj_ex__", (cls, rest, kwargs):
            yield Obj(cls, rest if type(rest) is tuple else (rest,), "newobj", get_keyword_arguments(kwargs))
        case "copyreg._reconstructor", (_, base, state):
            yield Obj(base, (state,))
        case "torch._tensor._rebuild_from_type_v2", (rebuild, _, rest, *_):
            yield Obj(rebuild, rest if type(rest) is tuple else (rest,))
        case known_names.BIT_GENERATOR_CONSTRUCTOR, (bit_generator, *_):
            yield Obj(bit_generator, ())
        case constructor, (bit_generator,) if constructor in known_names.GENERATOR_CONSTRUCTORS:
            yield Obj(bit_generator, ())
        case constructor, (bit_generator, create, *_) if constructor in known_names.GENERATOR_CONSTRUCTORS:
            yield Obj(create, (bit_generator,))
