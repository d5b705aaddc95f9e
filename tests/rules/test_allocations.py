"""Loading a pickle can allocate or hash more than the file contains. Only child processes load the small bombs."""

from __future__ import annotations

import functools
import pickle
import re
import struct
import subprocess
import sys

import pytest
import torch

from statecli.commands.audit.run import Request, audit
from statecli.pickle_scan import allocations

from ..formats.attacks import (
    build,
    build_pickle,
    call_function,
    call_global,
    colliding_ints,
    deep_key,
    get,
    hash_bomb,
    legacy,
    number,
    numbers,
    put,
    records,
    short,
    stack_global,
    state_dict,
    tensor,
    text,
)

NDARRAY = stack_global("numpy", "ndarray")
RECONSTRUCT = stack_global("numpy.core.multiarray", "_reconstruct")


def call_builtin(name, *args):
    """Opcodes of a call of a built-in function."""
    return call_global("builtins", name, *args)


#: Positive numbers that differ by a multiple of P have the same hash.
P = 2**61 - 1


def build_colliding_numbers(n):
    """Return 13 numbers, each -1 or -2, for n below 8,192. All results have the same hash: hash(-1) == hash(-2)."""
    return [-1 - (n >> bit & 1) for bit in range(13)]


def build_scalar(dtype, data):
    """A number of numpy."""
    return call_global("numpy.core.multiarray", "scalar", call_global("numpy", "dtype", short(dtype)), short(data))


def call_rebuild(kind, *args):
    """Opcodes of a call of a `torch._utils._rebuild_*` function."""
    return call_global("torch._utils", f"_rebuild_{kind}", *args)


def repeat_elements(count, *, kind="FloatStorage", rows=()):
    """A tensor of `count` elements in each row over a storage of four elements."""
    return tensor(size=(*rows, count), stride=(0,) * (len(rows) + 1), kind=kind)


def cast_tensor(value):
    """The tensor with each element written out as a number of 8 bytes."""
    return call_rebuild("device_tensor_from_cpu_tensor", value, stack_global("torch", "float64"), short("cpu"), b"\x89")


def build_parameter(value):
    """The tensor as a parameter."""
    return call_rebuild("parameter", value, b"\x89", call_global("collections", "OrderedDict"))


def build_object(value, *state):
    """BUILD with a tuple."""
    return value + b"(" + b"".join(state) + b"tb"


def build_quantizer(scales):
    """The quantizer of each channel: scales, zero points, axis."""
    return b"(ctorch\nper_channel_affine\n" + scales + scales + number(1) + b"t"


def nest_objects(step):
    """Forty objects, each built from the previous object; the last is in the memo at 39."""
    return number(1) + put(0) + b"".join(b"0" + step(get(n - 1)) + put(n) for n in range(1, 40)) + b"0"


def build_keys(keys):
    """A dict with the given keys."""
    return b"}(" + b"".join(key + b"N" for key in keys) + b"u"


def place_in_tensor(name, *offset):
    """A key of the metadata of a distributed checkpoint."""
    index = stack_global("torch.distributed.checkpoint.metadata", "MetadataIndex")
    return index + b")\x81}(" + text("fqn") + name + text("offset") + numbers(*offset) + b"ub"


def build_masked_array(shape, kind):
    """An empty masked array of numpy."""
    masked = stack_global("numpy.ma.core", "MaskedArray")
    return call_global("numpy.ma.core", "_mareconstruct", masked, NDARRAY, shape, short(kind))


COLLIDING_KEYS_MESSAGE = "may compare each of 600 keys with all others"
HASH_STEPS_MESSAGE = "steps to hash dictionary keys"
PATTERN_STEPS_MESSAGE = "steps to compile regular expressions"
EMPTY_DICT = call_global("collections", "OrderedDict")
RANGE = call_builtin("range", number(2**40))
#: 64 nested tuples; each contains the previous tuple twice.
LAUGHS = b"N" + b"".join(put(n) + get(n) + b"\x86" for n in range(64)) + put(99) + b"0"
STORAGE = b"(" + text("storage") + b"ctorch\nQInt8Storage\n" + text("0") + text("cpu") + number(16) + b"tQ"
EMPTY_TENSOR = call_global("torch", "FloatTensor")
#: 40 nested lists; each contains the previous list twice. The last is in the memo at 39.
NESTED_LISTS = nest_objects(lambda x: b"](" + x + x + b"e")
EXPANSION_MESSAGE = "as text, for example in an error message, the containers have more than"


def build_optimizer(parameter):
    """An Adam with one parameter."""
    groups = b"](}" + text("params") + b"](" + parameter + b"ese"
    state = b"}(" + text("defaults") + b"}" + text("state") + b"}" + text("param_groups") + groups + b"u"
    return stack_global("torch.optim.adam", "Adam") + b")\x81" + state + b"b"


def build_long_integer(length):
    """An integer of this many bytes."""
    return b"\x8b" + struct.pack("<i", length) + b"\x7f" * length


def restore(module, name, state):
    """An object that is created empty and gets a state."""
    return stack_global(module, name) + b")\x81" + state + b"b"


# Name -> the opcodes of a value, and a part of the message.
BOMBS = {
    "bytes": (call_builtin("bytes", number(2**36)), "64.0 GiB in calls to builtins.bytes"),
    "bytes by NEWOBJ": (
        stack_global("builtins", "bytes") + number(2**36) + b"\x85\x81",
        "64.0 GiB in calls to builtins.bytes",
    ),
    "bytes by a copy": (
        call_global("copyreg", "__newobj__", stack_global("builtins", "bytes"), number(2**36)),
        "64.0 GiB in calls to builtins.bytes",
    ),
    "a void of numpy": (call_global("numpy", "void", number(2**31 - 1)), "2.0 GiB in calls to numpy.void"),
    "a record of numpy": (call_global("numpy", "record", number(2**31 - 1)), "2.0 GiB in calls to numpy.record"),
    "a logger and all above it": (call_global("logging", "getLogger", text("a." * 100_000)), "in calls to logging"),
    "a list copied 3,000 times": (
        b"](" + b"N" * 100_000 + b"e" + put(0) + (call_builtin("list", get(0)) + b"0") * 3000,
        "2.2 GiB in calls to builtins.list",
    ),
    "a quantized tensor larger than its storage": (
        call_rebuild(
            "qtensor",
            STORAGE,
            number(0),
            numbers(2**40),
            numbers(0),
            b"(ctorch\nper_tensor_affine\nG" + bytes(8) + b"K\0t",
            b"\x89",
            EMPTY_DICT,
        ),
        "8.0 TiB in calls to torch._utils._rebuild_qtensor",
    ),
    "a repeated tensor that is moved to a device": (
        call_rebuild(
            "device_tensor_from_cpu_tensor",
            tensor(size=(2**40,), stride=(0,)),
            stack_global("torch", "float32"),
            short("cpu"),
            b"\x89",
        ),
        "8.0 TiB in calls to torch._utils",
    ),
    "a repeated parameter that is moved": (
        cast_tensor(build_parameter(build_parameter(repeat_elements(2**40)))),
        "4.0 EiB in calls to torch._utils",
    ),
    "a repeated sparse tensor that is moved": (
        cast_tensor(
            call_rebuild(
                "sparse_tensor",
                call_global("torch.serialization", "_get_layout", short("torch.sparse_coo")),
                b"(" + repeat_elements(2**40, rows=(1,)) + repeat_elements(2**40) + numbers(2**40) + b"\x88t",
            )
        ),
        "4.0 EiB in calls to torch._utils",
    ),
    "a repeated tensor of a class that is moved": (
        cast_tensor(
            call_global(
                "torch._tensor",
                "_rebuild_from_type_v2",
                stack_global("torch._utils", "_rebuild_tensor_v2"),
                stack_global("torch", "Tensor"),
                b"(" + STORAGE + number(0) + numbers(2**40) + numbers(0) + b"\x89" + b"Nt",
                b"}",
            )
        ),
        "4.0 EiB in calls to torch._utils",
    ),
    "one storage moved 3,000 times": (
        b"](" + cast_tensor(tensor(numel=10**6, size=(10**6,))) * 3000 + b"e",
        "in calls to torch._utils",
    ),
    "repeated scales of no elements": (
        call_rebuild(
            "qtensor",
            STORAGE,
            number(0),
            numbers(0, 2**40),
            numbers(1, 1),
            build_quantizer(repeat_elements(2**40)),
            b"\x89",
            EMPTY_DICT,
        ),
        "16.0 TiB in calls to torch._utils._rebuild_qtensor",
    ),
    "repeated sizes of a nested tensor": (
        call_rebuild("nested_tensor", tensor(), *[repeat_elements(2**30, kind="LongStorage")] * 3),
        "1.9 TiB in calls to torch._utils._rebuild_nested_tensor",
    ),
    "the state of a tensor": (
        build_object(
            EMPTY_TENSOR, call_global("torch.storage", "UntypedStorage", number(4)), b"K\0", numbers(2**40), numbers(1)
        ),
        "8.0 TiB in calls to torch.FloatTensor",
    ),
    "the strides of a tensor's state": (
        build_object(
            EMPTY_TENSOR, call_global("torch.storage", "UntypedStorage", number(4)), b"K\0", numbers(2), numbers(2**40)
        ),
        "8.0 TiB in calls to torch.FloatTensor",
    ),
    "a tensor over a storage that is made": (
        call_rebuild(
            "tensor_v2",
            call_global("torch.storage", "TypedStorage", number(4)),
            number(0),
            numbers(2**40),
            numbers(1),
            b"\x89",
            b"N",
        ),
        "8.0 TiB in calls to torch._utils._rebuild_tensor_v2",
    ),
    "a memo entry": (
        b"N" + put(2**28),
        "4.0 GiB of memory, because the pickle stores an object at memo index 268,435,456",
    ),
    "an element of a set": (LAUGHS + b"\x8f(" + get(99) + b"\x90", HASH_STEPS_MESSAGE),
    "an element of a frozenset": (LAUGHS + b"(" + get(99) + b"\x91", HASH_STEPS_MESSAGE),
    "an element of a called set": (LAUGHS + call_builtin("set", b"]" + get(99) + b"a"), HASH_STEPS_MESSAGE),
    **{
        f"a key in {form} for {cls}": (
            LAUGHS + call_function(stack_global(*cls.split(".")), *first, elements),
            HASH_STEPS_MESSAGE,
        )
        for cls, first in (
            ("builtins.dict", ()),
            ("collections.OrderedDict", ()),
            ("collections.defaultdict", (stack_global("builtins", "list"),)),
        )
        for form, elements in {
            "a list of pairs": b"](" + get(99) + b"N\x86e",
            "a tuple of pairs": get(99) + b"N\x86\x85",
            "a tuple of lists": b"](" + get(99) + b"Ne\x85",
            "a deque of pairs": call_function(stack_global("collections", "deque"), get(99) + b"N\x86\x85"),
            "a list of deques": b"](" + call_function(stack_global("collections", "deque"), get(99) + b"N\x86") + b"e",
            "another dict": b"}" + get(99) + b"Ns",
        }.items()
    },
    "an element of a deque for a set": (
        LAUGHS + call_builtin("set", call_function(stack_global("collections", "deque"), get(99) + b"\x85")),
        HASH_STEPS_MESSAGE,
    ),
    "an appended element of a deque for a set": (
        LAUGHS + call_builtin("set", call_function(stack_global("collections", "deque"), b")") + b"(" + get(99) + b"e"),
        HASH_STEPS_MESSAGE,
    ),
    "complex keys with the same hash": (
        build_keys(call_builtin("complex", number(-1_000_003 * n), number(n)) for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "complex elements of a set": (
        b"\x8f(" + b"".join(call_builtin("complex", number(-1_000_003 * n), number(n)) for n in range(600)) + b"\x90",
        COLLIDING_KEYS_MESSAGE,
    ),
    "sizes of one hash": (
        build_keys(call_global("torch", "Size", numbers(*build_colliding_numbers(n))) for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "long tuples of one hash": (
        numbers(*[0] * 64)
        + put(0)
        + b"0"
        + build_keys(get(0) + numbers(*build_colliding_numbers(n)) + b"\x86" for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "named tuples of one hash": (
        build_keys(
            stack_global("torch.ao.quantization.qconfig", "QConfig")
            + numbers(*build_colliding_numbers(n))
            + b"N\x86\x81"
            for n in range(600)
        ),
        COLLIDING_KEYS_MESSAGE,
    ),
    "places in tensors of one hash": (
        build_keys(place_in_tensor(b"N", *build_colliding_numbers(n)) for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "ranges of one hash": (
        build_keys(call_builtin("range", number(P * n)) for n in range(1, 601)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "frozensets of one hash": (
        build_keys(b"(" + number(P * n) + b"\x91" for n in range(1, 601)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "frozensets of pairs of one hash": (
        build_keys(b"(" + number(n) + number(n + P) + b"\x91" for n in range(1, 601)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "frozensets of pairs of tuples of one hash": (
        build_keys(b"(" + number(n) + b"\x85" + number(n + P) + b"\x85\x91" for n in range(1, 601)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "decimals of one hash": (
        build_keys(call_global("decimal", "Decimal", text(str(P * n))) for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "tuples of integers and decimals of one hash": (
        build_keys(
            b"("
            + b"".join(
                call_global("decimal", "Decimal", text(str(P + 1))) if n >> bit & 1 else number(1) for bit in range(10)
            )
            + b"t"
            for n in range(1, 601)
        ),
        COLLIDING_KEYS_MESSAGE,
    ),
    "UUIDs of one hash": (
        build_keys(restore("uuid", "UUID", b"}" + text("int") + number(P * n) + b"s") for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "tuples of networks of one hash": (
        build_keys(call_global("ipaddress", "IPv6Network", number(P * n)) + b"\x85" for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "complex numbers of numpy": (
        build_keys(build_scalar("c16", struct.pack("<dd", -1_000_003 * n, n)) for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "fractions of one hash": (
        build_keys(call_global("fractions", "Fraction", short(f"{P * n}/1")) for n in range(600)),
        COLLIDING_KEYS_MESSAGE,
    ),
    "a pattern of 400 classes": (
        call_global("re", "_compile", text("[\u0100-\uffff]" * 400), number(2)),
        "needs more than 20,000,000 steps to compile regular expressions",
    ),
    "a pattern of 400 escaped classes": (
        call_global("re", "_compile", text(r"[\u0100-\uffff]" * 400), number(0)),
        PATTERN_STEPS_MESSAGE,
    ),
    "a pattern of 400 classes with a backslash": (
        call_global("re", "_compile", text("[\u0100-\\\uffff]" * 400), number(0)),
        PATTERN_STEPS_MESSAGE,
    ),
    "a pattern of 400 classes of named characters": (
        call_global("re", "_compile", text(r"[\N{DIGIT ZERO}-\N{YI RADICAL QOT}]" * 400), number(0)),
        PATTERN_STEPS_MESSAGE,
    ),
    "a pattern of 10,000 classes in any case": (
        call_global("re", "_compile", text("(?i)" + "[s-t]" * 10_000), number(0)),
        PATTERN_STEPS_MESSAGE,
    ),
    "patterns of 40 classes each": (
        b"".join(call_global("re", "_compile", text(f"{n}[\u0100-\uffff]" * 40), number(2)) + b"0" for n in range(10))
        + b"N",
        PATTERN_STEPS_MESSAGE,
    ),
    "a pattern of decoded bytes": (
        call_global(
            "re",
            "_compile",
            call_builtin("str", b"B" + struct.pack("<I", 3200) + "[\u0100-\uffff]".encode() * 400, short("utf-8")),
            number(2),
        ),
        PATTERN_STEPS_MESSAGE,
    ),
    "a pattern that is the text of a list": (
        call_global("re", "_compile", call_builtin("str", b"](" + text("[a]") * 9 + b"e"), number(2)),
        PATTERN_STEPS_MESSAGE,
    ),
    "a pattern of two branches": (
        call_global("re", "_compile", text("a" * 60_000 + "b|" + "a" * 60_000 + "c"), number(0)),
        PATTERN_STEPS_MESSAGE,
    ),
    "a key of tuples that calls make": (
        nest_objects(lambda x: call_builtin("tuple", b"(" + x + x + b"l")) + b"}" + get(39) + b"Ns",
        HASH_STEPS_MESSAGE,
    ),
    "a shared list as the state of a parameter": (
        NESTED_LISTS + call_rebuild("parameter_with_state", tensor(), b"\x89", EMPTY_DICT, b"(" + get(39) + b"NNt"),
        EXPANSION_MESSAGE,
    ),
    "a shared list as the state of a tensor of a class": (
        NESTED_LISTS
        + call_global(
            "torch._tensor",
            "_rebuild_from_type_v2",
            stack_global("torch._utils", "_rebuild_tensor_v2"),
            stack_global("torch", "Tensor"),
            b"(" + STORAGE + number(0) + numbers(4) + numbers(1) + b"\x89" + EMPTY_DICT + b"t",
            b"(" + get(39) + b"NNt",
        ),
        EXPANSION_MESSAGE,
    ),
    "a shared list as a quantization scheme": (
        NESTED_LISTS
        + call_rebuild("qtensor", STORAGE, number(0), numbers(4), numbers(1), get(39) + b"\x85", b"\x89", EMPTY_DICT),
        EXPANSION_MESSAGE,
    ),
    **{
        f"a shared list for {module}": (NESTED_LISTS + call_global(module, name, get(39)), EXPANSION_MESSAGE)
        for module, name in (("http", "HTTPStatus"), ("ipaddress", "IPv4Address"), ("types", "SimpleNamespace"))
    },
    "shared objects in a call": (
        nest_objects(lambda x: call_global("collections", "deque", b"](" + x + x + b"e"))
        + call_global("http", "HTTPStatus", get(39)),
        EXPANSION_MESSAGE,
    ),
    "a keyword of shared lists": (
        NESTED_LISTS + stack_global("numpy", "float64") + b")}" + text("x") + get(39) + b"s\x92",
        EXPANSION_MESSAGE,
    ),
    "a long text 1,100 times": (
        text("a" * 400_000) + put(0) + b"0" + call_global("http", "HTTPStatus", b"](" + get(0) * 1_100 + b"e"),
        EXPANSION_MESSAGE,
    ),
    "lists that contain each other": (
        b"]"
        + put(0)
        + b"]"
        + put(1)
        + b"("
        + get(0)
        + get(1)
        + b"e0"
        + b"("
        + get(0)
        + get(1)
        + b"e"
        + call_global("http", "HTTPStatus", get(0)),
        EXPANSION_MESSAGE,
    ),
    "a shared list as the state of a UUID": (
        NESTED_LISTS + restore("uuid", "UUID", b"}(" + text("int") + b"N" + text("is_safe") + get(39) + b"u"),
        EXPANSION_MESSAGE,
    ),
    "a shared tuple as the parameter of an optimizer": (LAUGHS + build_optimizer(get(99)), EXPANSION_MESSAGE),
    "type variables in shared lists": (
        nest_objects(lambda x: b"](" + x + x + b"e")
        + call_global("types", "GenericAlias", stack_global("builtins", "list"), get(39)),
        HASH_STEPS_MESSAGE,
    ),
    "a range of long integers": (
        call_builtin("range", number(0), build_long_integer(400_000), build_long_integer(200_000)),
        "steps to compute with long integers",
    ),
    "a key of aliases": (
        nest_objects(lambda x: call_global("types", "GenericAlias", x, x)) + b"}" + get(39) + b"Ns",
        HASH_STEPS_MESSAGE,
    ),
}
#: Name -> the opcodes of a large value that no pickler writes, and the misused name.
MISUSED_CALLS = {
    "a partial": (
        call_global("functools", "partial", stack_global("builtins", "bytearray"), number(2**36)),
        "builtins.bytearray",
    ),
    "a list of a range": (call_builtin("list", RANGE), "builtins.list"),
    "a list's subclass of a range": (
        call_global(
            "copyreg",
            "_reconstructor",
            stack_global("collections", "UserList"),
            stack_global("builtins", "list"),
            RANGE,
        ),
        "builtins.list",
    ),
    "a tensor of a size": (call_global("torch", "Tensor", number(2**40)), "torch.Tensor"),
    "an array of a shape": (call_function(RECONSTRUCT, NDARRAY, numbers(2**20, 2**20), short("b")), "numpy"),
    "a masked array": (build_masked_array(numbers(2**40), "b"), "numpy"),
    "a number of numpy, of a range": (call_global("numpy", "float64", RANGE), "numpy.float64"),
    "a fraction with an exponent": (call_global("fractions", "Fraction", short("1e999999999")), "fractions"),
    "a fraction of a decimal": (
        call_global("fractions", "Fraction", call_global("decimal", "Decimal", short("1e999999999"))),
        "fractions",
    ),
    "a fraction with Arabic digits": (
        call_global("fractions", "Fraction", text("1e\u0661" + "\u0660" * 9)),
        "fractions",
    ),
    "text of lists that calls make": (
        nest_objects(lambda x: call_builtin("list", b"(" + x + x + b"l")) + call_builtin("str", get(39)),
        "builtins.str",
    ),
    "text of a tuple": (LAUGHS + call_builtin("str", get(99)), "builtins.str"),
    "bytes of a number in text": (
        call_builtin("bytearray", call_builtin("int", short("68719476736"))),
        "builtins.bytearray",
    ),
    "the list of a member": (call_global("http", "HTTPStatus", b"]"), "http.HTTPStatus"),
    "an object of a member": (call_global("uuid", "SafeUUID", EMPTY_DICT), "uuid.SafeUUID"),
    "the list of an address": (call_global("ipaddress", "IPv4Address", b"]"), "ipaddress.IPv4Address"),
    "an address of a decimal": (
        restore(
            "ipaddress",
            "IPv4Network",
            b"}" + text("network_address") + call_global("decimal", "Decimal", short("1e999999999")) + b"s",
        ),
        "ipaddress.IPv4Network",
    ),
    "a decimal of an integer": (call_global("decimal", "Decimal", number(1)), "decimal.Decimal"),
    "a generator's seeds": (
        call_global("numpy.random.bit_generator", "SeedSequence", b"](" + build_long_integer(2_000) + b"e"),
        "numpy.random.bit_generator.SeedSequence",
    ),
    "a remote device": (
        call_global("torch.distributed.remote_device", "_remote_device", b"]"),
        "torch.distributed.remote_device._remote_device",
    ),
    "the list of a memory format": (
        restore(
            "torch.distributed._shard.sharded_tensor.metadata",
            "TensorProperties",
            b"(" + stack_global("torch", "float32") + stack_global("torch", "strided") + b"\x89]\x89t",
        ),
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    ),
    "the state of a UUID": (
        restore("uuid", "UUID", b"}(" + text("int") + number(1) + text("is_safe") + b"]u"),
        "uuid.UUID",
    ),
    "the state of a parameter of three parts": (
        call_rebuild("parameter_with_state", tensor(), b"\x89", EMPTY_DICT, b"(}NNt"),
        "torch._utils._rebuild_parameter_with_state",
    ),
    "an address as the parameter of an optimizer": (
        build_optimizer(call_global("ipaddress", "IPv4Address", number(1))),
        "torch.optim.adam.Adam",
    ),
    "a repeated tensor as a state": (EMPTY_DICT + repeat_elements(2**30) + b"b", "collections.OrderedDict"),
    "a repeated tensor as the fill value of a masked array": (
        build_object(
            build_masked_array(numbers(0), "d"),
            number(1),
            numbers(1),
            call_global("numpy", "dtype", short("f8")),
            b"\x89",
            short(bytes(8)),
            short(b"\0"),
            repeat_elements(2**30),
        ),
        "numpy.ma.core._mareconstruct",
    ),
    "a repeated tensor in a set": (call_builtin("set", repeat_elements(2**30)), "builtins.set"),
}
ORDINARY_CALLS = {
    "a small bytearray": call_builtin("bytearray", number(10**6)),
    "a bytearray of text": call_builtin("bytearray", text("abc"), text("latin-1")),
    "a list": call_builtin("list", b"](NNe"),
    "a range": RANGE,
    "a member": call_global("http", "HTTPStatus", number(200)),
    "a state that contains itself": restore("argparse", "Namespace", b"}" + text("x") + b"]" + put(0) + get(0) + b"as"),
    "an optimizer": build_optimizer(build_parameter(tensor())),
    "a key of numbers": b"}" + numbers(1, 2) + b"Ns",
    "600 numbers of numpy": build_keys(build_scalar("i8", struct.pack("<q", n)) for n in range(600)),
    "600 paths": build_keys(call_global("pathlib", "PosixPath", short(f"{n}.png")) for n in range(600)),
    "600 parameters": build_keys(
        call_global("torch._utils", "_rebuild_parameter", tensor(), b"\x88", b"}") for _ in range(600)
    ),
    "a key that cannot be hashed": b"}(]tNs",
    "600 places in tensors": build_keys(place_in_tensor(text(f"layers.{n}.weight"), 0, 0) for n in range(600)),
    "a long pattern": call_global("re", "_compile", text(r"\d+[a-z]|" * 200), number(32)),
    "a fraction": call_global("fractions", "Fraction", short("1/3")),
    "a logger": call_global("logging", "getLogger", short("a.b.c")),
    "a tensor that is moved": cast_tensor(tensor()),
    "a large tensor that is moved": cast_tensor(tensor(numel=10**6, size=(10**6,))),
    "repeated tensors that stay so": b"](" + build_parameter(repeat_elements(2**40)) + repeat_elements(2**40) + b"e",
    "a size": call_global("torch", "Size", b"](" + number(2**20) + number(2**20) + b"e"),
    "a quantized tensor": call_rebuild(
        "qtensor",
        STORAGE,
        number(0),
        numbers(4, 4),
        numbers(4, 1),
        build_quantizer(tensor(kind="DoubleStorage")),
        b"\x89",
        EMPTY_DICT,
    ),
    "a tensor without storage": call_rebuild(
        "meta_tensor_no_storage", stack_global("torch", "float32"), numbers(2**40), numbers(1), b"\x89"
    ),
    "an empty array": call_function(RECONSTRUCT, NDARRAY, numbers(0), short("b")),
}


def list_bombs(path, data):
    """Messages of allocation-bomb for a file with the data."""
    path.write_bytes(data)
    (target,) = audit(Request((str(path),), select=("allocation-bomb",))).targets
    return [finding.message for finding in target.findings]


def wrap_value(body):
    """An archive whose data.pkl is a dict with the given value."""
    return build(records(b"\x80\x04}" + short("x") + body + b"s."))


@pytest.fixture
def low_limits(monkeypatch):
    """Lower the limits to a tenth. `test_key_that_hangs_the_loader_is_found` checks the real limits."""
    monkeypatch.setattr(allocations, "_MAX_COLLISIONS", 500)
    monkeypatch.setattr(allocations, "_MAX_NESTING", 1_000)


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_found(name, tmp_path):
    """The single finding names the amount and the call or opcode responsible for the allocation."""
    body, expected = BOMBS[name]
    (message,) = list_bombs(tmp_path / "a.pt", wrap_value(body))
    assert expected in message


@pytest.mark.parametrize("name", MISUSED_CALLS)
def test_call_that_no_pickler_writes_is_unsafe(name, tmp_path):
    """The allocated amount need not be known."""
    body, misused_name = MISUSED_CALLS[name]
    (tmp_path / "a.pt").write_bytes(wrap_value(body))
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=("unsafe-global",))).targets
    assert misused_name in " ".join(finding.message for finding in target.findings)


@pytest.mark.parametrize(("count", "is_bomb"), [(800, False), (900, True)])
def test_the_hashes_of_all_keys_are_counted_together(count, is_bomb, tmp_path, monkeypatch):
    """A dict has the same long tuple as key many times. The limit is low, because hashes take time."""
    monkeypatch.setattr(allocations, "_MAX_HASH_STEPS", 500_000)
    body = b"(" + b"N" * 600 + b"t" + put(0) + b"0}(" + (get(0) + b"N") * count + b"u"
    actual = list_bombs(tmp_path / "a.pt", wrap_value(body))
    assert [("needs more than 500,000 steps to hash dictionary keys") in message for message in actual] == [
        True
    ] * is_bomb


#: Name -> a pattern with a place for a number, and its flags.
PATTERNS = {
    "classes": (r"(?:[a-z0-9_\-]+){}[^\s]*", 0),
    "classes in any case": (r"(?:[a-z0-9_\-]+){}[^\s]*", re.IGNORECASE),
    "letters of another script": ("[\u0430-\u044f]+{}[\u0410-\u042f]", re.IGNORECASE),
    "escaped letters": (r"[\u0430-\u044f]+{}[\u0410-\u042f]", 0),
    "a back reference": (r"([a-z-]+){}\1", 0),
    "bytes": (rb"[\x80-\xff-]+[a-z]", re.IGNORECASE),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_many_ordinary_patterns_are_not_a_bomb(name, tmp_path):
    """Each pattern compiles in less than a millisecond."""
    pattern, flags = PATTERNS[name]
    texts = [pattern + b"%d" % n if isinstance(pattern, bytes) else pattern.format(n) for n in range(1_000)]
    assert list_bombs(tmp_path / "a.pkl", pickle.dumps([re.compile(text, flags) for text in texts])) == []


class Node:
    """Object of a user, hashed by its address, that holds the previous object."""

    def __init__(self, before=None):
        self.before = before


MANY_KEYS = {
    "patterns": lambda n: re.compile(f"a{n}"),
    "partials": lambda n: functools.partial(int, n),
    "objects": lambda _: object(),
    "exceptions": lambda n: ValueError(n),
    "nested tuples": lambda n: ((n, (n - 300, 0.5)), b"a"),
    "nodes": lambda _: Node(),
}


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("name", MANY_KEYS)
def test_keys_with_different_hashes_are_not_a_bomb(name, protocol, tmp_path):
    """The hash of each key is computed from its values, or is its address."""
    keys = dict.fromkeys(map(MANY_KEYS[name], range(600)))
    assert list_bombs(tmp_path / "a.pkl", pickle.dumps(keys, protocol)) == []


def test_linked_objects_as_keys_take_no_steps_to_hash(tmp_path, monkeypatch):
    """The hash of an object is its address, so the objects that it holds do not count."""
    monkeypatch.setattr(allocations, "_MAX_HASH_STEPS", 50_000)
    nodes = [Node()]
    for _ in range(300):
        nodes.append(Node(nodes[-1]))
    assert list_bombs(tmp_path / "a.pkl", pickle.dumps(dict.fromkeys(nodes))) == []


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize("name", ORDINARY_CALLS)
def test_ordinary_data_is_not_a_bomb(name, tmp_path):
    """Picklers write calls of the same names with small arguments."""
    assert list_bombs(tmp_path / "a.pt", wrap_value(ORDINARY_CALLS[name])) == []


@pytest.mark.parametrize(
    ("pickle", "expected"),
    [
        (
            hash_bomb(),
            "loading the file needs more than 50,000,000 steps to hash dictionary keys; loading may hang "
            "(archive/data.pkl)",
        ),
        (
            deep_key(100_000),
            "loading the file hashes a key with more than 10,000 nested tuples; this crashes Python (stack overflow)",
        ),
        (
            colliding_ints(6000),
            "loading the file may compare each of 6,000 keys with all others, because all these keys may have the "
            "same hash",
        ),
    ],
    ids=["shared", "deep", "colliding"],
)
def test_key_that_hangs_the_loader_is_found(pickle, expected, tmp_path):
    """`torch.load(weights_only=True)` hashes the keys of a dict as well."""
    (message,) = list_bombs(tmp_path / "a.pt", build(records(pickle)))
    assert message.startswith(expected)


@pytest.mark.parametrize(("count", "is_bomb"), [(100, False), (200, True)])
def test_the_values_of_keys_with_the_same_hash_are_counted(count, is_bomb, tmp_path, monkeypatch):
    """Python compares the values of two long tuples one by one, also if only the last values differ."""
    monkeypatch.setattr(allocations, "_MAX_COMPARED_VALUES", 4_000_000)
    keys = build_keys(numbers(*[0] * 187, *build_colliding_numbers(n)) for n in range(count))
    assert len(list_bombs(tmp_path / "a.pt", wrap_value(keys))) == is_bomb


def test_a_thousand_colliding_keys_are_not_a_bomb(tmp_path):
    """Python compares 1,000 keys quickly."""
    assert list_bombs(tmp_path / "a.pt", build(records(colliding_ints(1000)))) == []


def test_a_storage_that_is_larger_than_its_file_is_found(tmp_path):
    """Old torch allocated the storage before the data was read."""
    (message,) = list_bombs(tmp_path / "a.pt", legacy(state_dict(w=tensor(numel=2**40)), [("0", 4, bytes(16))]))
    assert message.startswith("loading the file allocates 4.0 TiB for a storage, but the file has only ")


_STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\4NtQ"
_HOOKS = b"ccollections\nOrderedDict\n)R"


def _grow_storage(function: bytes, size: bytes, stride: bytes, offset: bytes = b"K\0", opcodes: bytes = b"") -> bytes:
    return function + b"(" + _STORAGE + offset + size + stride + opcodes + b"\x89" + _HOOKS + b"tR"


#: Tensors that reach beyond the four elements of their storage. The pickle's value does not contain the tensors.
GROWING_TENSORS = {
    "size": _grow_storage(b"ctorch._utils\n_rebuild_tensor_v2\n", numbers(2**31), numbers(1)),
    "stride": _grow_storage(b"ctorch._utils\n_rebuild_tensor_v2\n", numbers(2), numbers(2**31)),
    "offset": _grow_storage(b"ctorch._utils\n_rebuild_tensor_v2\n", numbers(1), numbers(1), number(2**31)),
    "first version": b"ctorch._utils\n_rebuild_tensor\n(" + _STORAGE + b"K\0" + numbers(2**31) + numbers(1) + b"tR",
    "type of its own": (
        b"ctorch._utils\n_rebuild_tensor_v3\n(" + _STORAGE + b"K\0" + numbers(2**31) + numbers(1)
        + b"\x89" + _HOOKS + b"ctorch\nfloat64\ntR"
    ),
    "quantized": _grow_storage(
        b"ctorch._utils\n_rebuild_qtensor\n", numbers(2), numbers(2**31), opcodes=b"(ctorch\nper_tensor_affine\nK\1K\0t"
    ),
    "set again": (
        b"ctorch._utils\n_rebuild_tensor\n(" + _STORAGE + b"K\0" + numbers(4) + numbers(1) + b"tR("
        + _STORAGE + b"K\0" + numbers(2**31) + numbers(1) + b"tb"
    ),
    "storage of two sizes": (
        _STORAGE + b"0" + _grow_storage(b"ctorch._utils\n_rebuild_tensor_v2\n", numbers(2**24), numbers(1)).replace(
            b"K\4NtQ", number(2**24) + b"NtQ"
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING_TENSORS)
def test_a_tensor_that_grows_its_storage_is_found(name, tmp_path):
    """A storage in the format before torch 1.6 grows with each of its views, even if the object lacks the view."""
    pickled_state = state_dict(w=tensor().replace(b"tQ", b"NtQ", 1))
    data = bytes(2**20) if name == "storage of two sizes" else bytes(16)
    body = pickled_state[:2] + GROWING_TENSORS[name] + b"0" + pickled_state[2:]
    (message,) = list_bombs(tmp_path / "a.pt", legacy(body, [("0", 4, data)]))
    assert " in calls to torch._utils._rebuild_" in message


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
def test_tensors_saved_by_torch_do_not_grow_their_storage(is_legacy, tmp_path):
    """Views, expanded tensors, empty tensors, packed types and types without a storage class."""
    large_tensor = torch.arange(2.0**22)
    tensors = {
        "large": large_tensor,
        "view": large_tensor[2**20 :: 3],
        "expanded": large_tensor[:1].expand(2**20, 2**10),
        "empty": large_tensor[:0],
        "transposed": large_tensor.view(2**11, -1).t(),
        "untyped": torch.zeros(2**22, dtype=torch.uint32)[7:],
        "complex": torch.zeros(2**21, dtype=torch.complex128),
        "quantized": torch.quantize_per_tensor(torch.zeros(2**22), 0.1, 0, torch.qint8),
        "packed": torch.quantize_per_channel(
            torch.zeros(2**12, 2**11), torch.ones(2**12), torch.zeros(2**12), 0, torch.quint4x2
        ),
    }
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=not is_legacy)
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=("allocation-bomb",))).targets
    assert [finding.message for finding in target.findings] == []


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("0\0{}", "loads the record 0 again for each of several storages"),
        ("0\0/{}", "loads the record 0 again for each of several storages"),
        ("00{}", " storages, but the file has only "),
    ],
    ids=["NUL", "path behind NUL", "other records"],
)
def test_storages_that_are_larger_together_than_their_file_are_found(key, expected, tmp_path):
    """The zip reader of torch ends a name at its first NUL, and torch keeps each key's storage."""
    tensors = b"".join(tensor(key.format(n), numel=10**6, size=(10**6,)) + b"0" for n in range(600))
    (message,) = list_bombs(tmp_path / "a.pt", build(records(build_pickle(tensors + b"N"))))
    assert expected in message


def test_a_storage_that_many_tensors_share_is_loaded_once(tmp_path):
    """The tensors name the storage by the same key."""
    tensors = b"](" + tensor(numel=10**6, size=(10**6,)) * 600 + b"e"
    assert list_bombs(tmp_path / "a.pt", build(records(build_pickle(tensors)))) == []


def test_compressed_records_that_inflate_a_thousand_times_are_found(tmp_path):
    """The sizes in the central directory determine the memory allocated by torch, not the compressed data."""
    members = records(build_pickle(b"N"))
    members[0].method, members[0].size = 8, 2**31
    (message,) = list_bombs(tmp_path / "a.pt", build(members))
    assert "of compressed data to 2,147,483,648" in message


def nest_in_objects(count, step):
    """Opcodes of `count` nested objects. `step` returns the opcodes of an object that contains the given object."""
    return b"N" + put(0) + b"0" + (step(get(0)) + put(0) + b"0") * count + get(0)


OBJECTS = call_global("numpy", "dtype", short("O8"))
#: Name -> an object that contains another object and is freed by recursion.
FREED_BY_RECURSION = {
    "slice": lambda x: call_builtin("slice", x),
    "deque": lambda x: call_global("collections", "deque") + x + b"a",
    "deque of a list": lambda x: call_global("collections", "deque", b"]" + x + b"a"),
    "defaultdict": lambda x: call_global("collections", "defaultdict") + b"N" + x + b"s",
    "defaultdict of a dict": lambda x: call_global("collections", "defaultdict", b"N", b"}N" + x + b"s"),
    "numpy": lambda x: build_object(
        call_function(RECONSTRUCT, NDARRAY, numbers(0), short("b")),
        number(1),
        numbers(1),
        OBJECTS,
        b"\x89",
        b"]" + x + b"a",
    ),
}


@pytest.mark.usefixtures("low_limits")
@pytest.mark.parametrize("name", FREED_BY_RECURSION)
def test_objects_that_overflow_the_stack_when_they_are_freed_are_found(name, tmp_path):
    """Python frees lists, tuples and dicts without recursion, and also the objects in these containers."""
    (message,) = list_bombs(tmp_path / "a.pt", wrap_value(nest_in_objects(1_001, FREED_BY_RECURSION[name])))
    assert (
        "creates objects nested more than 1,000 levels deep; Python crashes when it frees these objects (stack "
        "overflow)"
    ) in message
    assert list_bombs(tmp_path / "a.pt", wrap_value(nest_in_objects(900, FREED_BY_RECURSION[name]))) == []


@pytest.mark.usefixtures("low_limits")
def test_many_objects_without_nesting_are_not_a_bomb(tmp_path):
    """A list of slices, and a chain of objects, each with the previous object among its attributes."""
    slices = b"](" + call_global("builtins", "slice", number(1)) * 1_050 + b"e"
    node = stack_global("argparse", "Namespace") + b")\x81}" + short("before")
    chain = b"N" + put(0) + b"0" + (node + get(0) + b"sb" + put(0) + b"0") * 1_050 + get(0)
    assert list_bombs(tmp_path / "a.pt", wrap_value(slices)) == []
    assert list_bombs(tmp_path / "a.pt", wrap_value(chain)) == []


LOAD_WITH_LIMITED_MEMORY = """
import pickle, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for path in sys.argv[1:]:
    try:
        pickle.load(open(path, "rb"))
        sys.exit(path)
    except MemoryError:
        pass
"""


def test_bombs_exceed_the_memory_of_a_real_process(tmp_path):
    """CPython's unpickler exceeds 1 GiB with each bomb that needs no library."""
    names = ["bytes", "bytes by NEWOBJ", "a list of a range", "a memo entry"]
    paths = [tmp_path / f"{name}.pkl" for name in names]
    for name, path in zip(names, paths, strict=True):
        path.write_bytes(b"\x80\x04" + {**BOMBS, **MISUSED_CALLS}[name][0] + b".")
    subprocess.run([sys.executable, "-c", LOAD_WITH_LIMITED_MEMORY, *map(str, paths)], check=True, timeout=100)


def test_freeing_nested_slices_crashes_python(tmp_path):
    """A signal ends the process: nothing in Python catches the overflow of the stack in C."""
    path = tmp_path / "slices.pkl"
    slice_class = stack_global("builtins", "slice") + b"q\0"
    path.write_bytes(b"\x80\x04" + slice_class + b"h\0" * 899_999 + b"N" + b"\x85R" * 900_000 + b"0N.")
    code = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=100).returncode < 0
