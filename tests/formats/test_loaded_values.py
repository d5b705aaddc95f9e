"""A tensor of a hostile file has the values that torch.load gives, or is reported as unknown."""

from __future__ import annotations

import math
import pickle
import struct
import time
import warnings

import numpy as np
import pytest
import torch

from statecli import formats
from statecli.core.errors import MalformedError
from statecli.values.read import read_all_values

from . import attacks
from .attacks import Called, build_pickle, call_function, numbers, tensor, text

ORDERED_DICT = b"ccollections\nOrderedDict\n)R"
PARAMETER = b"ctorch.nn.parameter\nParameter\n"
REBUILD_PARAMETER = b"ctorch._utils\n_rebuild_parameter\n"
WITH_STATE = b"ctorch._utils\n_rebuild_parameter_with_state\n"
FROM_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
REBUILD_FROM_CPU = b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n"
TENSOR_TYPE = b"ctorch\nTensor\n"
STORAGES = {"0": struct.pack("<4f", 1, 2, 3, 4), "1": struct.pack("<4f", 90, 91, 92, 93)}


def storage(key: str = "0", kind: str = "FloatStorage", numel: int = 4, location: str = "cpu") -> bytes:
    """Return the persistent id of a storage."""
    module = "torch.storage" if kind == "UntypedStorage" else "torch"
    kind_and_key = text("storage") + f"c{module}\n{kind}\n".encode() + text(key) + text(location)
    return b"(" + kind_and_key + attacks.number(numel) + b"tQ"


def arguments(offset: int = 0, size: bytes = numbers(4), stride: bytes = numbers(1), flags: bytes = b"") -> bytes:
    """Return the pickled tuple of arguments for `_rebuild_tensor_v2`."""
    return b"(" + storage() + attacks.number(offset) + size + stride + b"\x89" + ORDERED_DICT + flags + b"t"


def items(*pairs: tuple[bytes, bytes]) -> bytes:
    """Return a dict with these items."""
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def tree(**values: bytes) -> bytes:
    return items(*((text(name), value) for name, value in values.items()))


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def write_archive(tmp_path, body: bytes, *, legacy: bool = False, storages: dict[str, bytes] = STORAGES) -> str:
    path = tmp_path / "a.pt"
    if legacy:
        body = body.replace(b"tQ", b"NtQ")
        used = [(key, len(data) // 4, data) for key, data in storages.items() if text(key) in body]
        path.write_bytes(attacks.legacy(build_pickle(body), used))
    else:
        path.write_bytes(attacks.build(attacks.records(build_pickle(body), storages)))
    return str(path)


def load_with_torch(path: str, *, everything: bool = False) -> dict[str, list[float]]:
    """Return the tensors that torch.load gives, under the names of statecli; `everything` turns weights_only off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.load(path, weights_only=not everything)
    return {key if type(key) is str else f"[{key!r}]": value.tolist() for key, value in loaded.items()}


def read_with_statecli(path: str) -> dict[str, list[float] | str | None]:
    """Return each tensor as statecli shows the tensor: values, the reason for unknown values, or None without data."""
    state = formats.read(path)
    return {
        row.fqn: row.damage or (read_all_values(row.data).reshape(row.shape).tolist() if row.data else None)
        for row in state.tensors
    }


TENSORS_SET_TWICE = {
    "set_": tensor() + b"(" + storage("1") + b"K\0" + numbers(2) + numbers(2) + b"tb",
    "set_ of a Parameter": (
        call_function(REBUILD_PARAMETER, tensor(), b"\x89", ORDERED_DICT)
        + b"(" + storage("1") + b"K\0" + numbers(2) + numbers(2) + b"tb"
    ),
    "data of a Parameter": (
        call_function(REBUILD_PARAMETER, tensor(), b"\x88", ORDERED_DICT)
        + b"(" + tensor("1") + b"N" + ORDERED_DICT + b"\x89\x89tb"
    ),
    "data of an old Parameter": PARAMETER + tensor() + b"\x85R(" + tensor("1") + b"N" + ORDERED_DICT + b"\x89\x89tb",
    "a class of torch before": b"ctorch\nFloatTensor\n)R(" + storage("1") + b"K\0" + numbers(2) + numbers(2) + b"tb",
    "attribute data": call_function(FROM_TYPE, REBUILD, TENSOR_TYPE, arguments(), tree(data=tensor("1"))),
    "attribute data of slots":
        call_function(FROM_TYPE, REBUILD, TENSOR_TYPE, arguments(), b"N" + tree(data=tensor("1")) + b"\x86"),
    "attribute data of a Parameter": call_function(WITH_STATE, tensor(), b"\x88", ORDERED_DICT, tree(data=tensor("1"))),
}  # fmt: skip


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", TENSORS_SET_TWICE)
def test_tensor_changed_after_creation_has_no_values(tmp_path, name, legacy):
    """torch gives other values than the values at the creation of the tensor; statecli shows a reason and no values."""
    path = write_archive(tmp_path, tree(w=TENSORS_SET_TWICE[name], v=tensor("1")), legacy=legacy)
    assert load_with_torch(path)["w"] != [1, 2, 3, 4]
    values = read_with_statecli(path)
    assert "w: the pickle " in values["w"]
    assert "of this tensor after creating it; torch.save never writes this" in values["w"]
    assert values["v"] == [90, 91, 92, 93]


def test_parameter_that_saves_its_own_data_is_readable(tmp_path):
    """`Params4bit` of bitsandbytes saves its own data and requires_grad among its attributes."""
    attributes = tree(data=tensor(), requires_grad=b"\x88", module=b"N", bits=b"K\4")
    parameter = call_function(WITH_STATE, tensor(), b"\x88", ORDERED_DICT, attributes)
    path = write_archive(tmp_path, tree(w=parameter))
    assert read_with_statecli(path) == load_with_torch(path) == {"w": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    "attributes",
    [
        tree(data=tensor("1"), requires_grad=b"\x88"),
        tree(data=tensor(), requires_grad=b"\x89"),
        tree(data=tensor(), requires_grad=b"K\1"),
        tree(data=tensor()),
        tree(data=tensor(size=(2,)), requires_grad=b"\x88"),
        tree(data=tensor(stride=(0,)), requires_grad=b"\x88"),
        tree(data=tensor(size=(3,), offset=1), requires_grad=b"\x88"),
        tree(requires_grad=b"\x88"),
    ],
)
def test_parameter_with_other_data_in_its_state_has_no_values(tmp_path, attributes):
    """The state that is set has another storage, view or requires_grad than the Parameter, or is incomplete."""
    path = write_archive(tmp_path, tree(w=call_function(WITH_STATE, tensor(), b"\x88", ORDERED_DICT, attributes)))
    assert "of this tensor after creating it" in read_with_statecli(path)["w"]


def test_quantized_tensor_with_changed_scales_has_no_values(tmp_path):
    """torch compares the number of scales with the channels before the scales change."""
    scales = tensor("1", 4, kind="DoubleStorage") + b"q\1"
    changed = b"h\1(" + storage("2", "DoubleStorage", 1) + b"K\0" + numbers(4) + numbers(0) + b"tb"
    scheme = b"(ctorch\nper_channel_affine\n" + scales + tensor("3", kind="LongStorage") + b"K\0t"
    body = call_function(
        b"ctorch._utils\n_rebuild_qtensor\n",
        *(storage("0", "QInt8Storage"), b"K\0", numbers(4, 1), numbers(1, 1), scheme, b"\x89", ORDERED_DICT),
    )
    data = {"0": b"\1" * 4, "1": struct.pack("<4d", 1, 2, 3, 4), "2": struct.pack("<d", 9), "3": bytes(32)}
    path = write_archive(tmp_path, tree(q=body, scales=changed), storages=data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.load(path)["scales"].tolist() == [9, 9, 9, 9]
    values = read_with_statecli(path)
    assert "of this tensor after creating it" in values["q"]
    assert "of this tensor after creating it" in values["scales"]


LATER_CHANGES = {
    "an item of a tensor": (tree(w=tensor() + b"K\0" + real(7) + b"s"), "sets an item of a tensor"),
    "items of a tensor": (tree(w=tensor() + b"(K\0" + real(7) + b"K\1" + real(7) + b"u"), "sets an item of a tensor"),
    "an item of a tensor that is dropped": (
        tensor() + b"K\0" + real(7) + b"s0" + tree(w=tensor()),
        "sets an item of a tensor",
    ),
    "the real part of a tensor that is dropped": (
        call_function(FROM_TYPE, REBUILD, TENSOR_TYPE, arguments(), tree(real=tensor("1"))) + b"0" + tree(w=tensor()),
        "overwrites the attribute 'real' of a tensor",
    ),
    "a tensor by another call that gives it": (
        tensor() + b"q\1" + call_function(REBUILD_FROM_CPU, b"h\1", b"ctorch\nfloat32\n", text("cpu"), b"\x89")
        + b"(" + storage("1") + b"K\0" + numbers(2) + numbers(2) + b"tb00" + tree(w=b"h\1"),
        "changes a tensor after creating it",
    ),
    "data by another call that gives the tensor": (
        tensor() + b"q\1"
        + call_function(
            FROM_TYPE,
            REBUILD_FROM_CPU,
            TENSOR_TYPE,
            b"(h\1ctorch\nfloat32\n" + text("cpu") + b"\x89t",
            tree(data=tensor("1")),
        )
        + b"00" + tree(w=b"h\1"),
        "overwrites the attribute 'data' of a tensor",
    ),
    "a shape": (
        call_function(REBUILD, storage(), b"K\0", b"](K\2eq\1", b"](K\1eq\2", b"\x89", ORDERED_DICT)
        + b"q\3" + b"0h\1(K\2e0h\2(K\0e0" + tree(w=b"h\3"),
        "changes a list or a dict after building",
    ),
    "a torch.Size": (
        call_function(REBUILD, storage(), b"K\0", b"ctorch\nSize\n](K\2eq\1\x85R", numbers(1), b"\x89", ORDERED_DICT)
        + b"q\3" + b"0h\1K\0b0" + tree(w=b"h\3"),
        "the pickle sets the state of a list, but Python's pickle sets the state only of an object that a call created",
    ),
    "flags": (
        call_function(REBUILD, storage(), b"K\0", numbers(4), numbers(1), b"\x89", ORDERED_DICT, b"}q\1")
        + b"q\3" + b"0h\1" + text("neg") + b"\x88s0" + tree(w=b"h\3"),
        "changes a list or a dict after building",
    ),
    "what an OrderedDict was made of": (
        b"ccollections\nOrderedDict\n](" + text("w") + tensor() + b"\x86eq\1\x85Rq\2"
        + b"0h\1(" + text("w") + tensor("1") + b"\x86e0h\2",
        "changes a list or a dict after building",
    ),
    "a state": (
        b"cnowhere\nThing\n)\x81" + tree(w=tensor()) + b"q\1bq\2" + b"0h\1" + text("w") + tensor("1") + b"s0h\2",
        "changes a list or a dict after building",
    ),
    "a second state": (
        b"cnowhere\nThing\n)\x81" + tree(w=tensor()) + b"b" + tree(v=tensor("1")) + b"b",
        "sets the contents of an object twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER_CHANGES)
def test_later_change_of_an_object_is_refused(tmp_path, name):
    """The final graph of a pickle has no time: an object changed later is not the object that a call received."""
    body, reason = LATER_CHANGES[name]
    path = write_archive(tmp_path, body)
    with pytest.raises(MalformedError, match=reason):
        formats.read(path)


@pytest.mark.parametrize(
    "name",
    [
        *("an item of a tensor that is dropped", "the real part of a tensor that is dropped"),
        *("a tensor by another call that gives it", "data by another call that gives the tensor"),
    ],
)
def test_dropped_object_changes_a_kept_tensor_in_torch(tmp_path, name):
    """torch.load gives changed values for some of the files that the test above refuses."""
    path = write_archive(tmp_path, LATER_CHANGES[name][0])
    assert load_with_torch(path, everything=True)["w"] != [1, 2, 3, 4]


@pytest.mark.parametrize("state", [b"\x88\x89", b"\x89\x89"])
def test_old_parameter_takes_requires_grad_from_its_state(tmp_path, state):
    """torch before 0.4 set (requires_grad, volatile, hooks) on a Parameter."""
    path = write_archive(tmp_path, tree(w=PARAMETER + tensor() + b"\x85R(" + state + ORDERED_DICT + b"tb"), legacy=True)
    (row,) = formats.read(path).tensors
    assert row.requires_grad is torch.load(path)["w"].requires_grad
    assert read_with_statecli(path) == load_with_torch(path)


def test_attributes_of_python_stay_readable(tmp_path):
    """Buffers, and attributes of tensors and of Parameters, are pickled by torch as a state and stay readable."""
    marked, parameter = torch.arange(4.0), torch.nn.Parameter(torch.arange(3.0))
    marked.note, parameter.note = "mine", [1]
    values = {"b": torch.nn.Buffer(torch.arange(2.0)), "t": marked, "p": parameter}
    torch.save(values, tmp_path / "a.pt")
    assert read_with_statecli(str(tmp_path / "a.pt")) == {name: value.tolist() for name, value in values.items()}


NAN = real(math.nan)
EQUAL_KEYS = {
    "int and float": (b"K\1", real(1.0)),
    "float and int": (real(1.0), b"K\1"),
    "int and bool": (b"K\1", b"\x88"),
    "float and bool": (real(0.0), b"\x89"),
    "zeros of either sign": (real(0.0), real(-0.0)),
    "floats": (real(0.5), real(0.5)),
    "other floats": (real(0.5), real(0.25)),
    "NaN": (NAN, NAN),
    "one NaN": (NAN + b"q\x09", b"h\x09"),
    "infinities": (real(math.inf), real(math.inf)),
    "tuples": (numbers(1, 2), numbers(1, 2)),
    "tuples of other types": (numbers(1, 0), b"(" + real(1.0) + b"\x89t"),
    "tuples of zeros": (b"(" + real(0.0) + b"t", b"(" + real(-0.0) + b"t"),
    "tuples of NaN": (b"(" + NAN + b"t", b"(" + NAN + b"t"),
    "tuples of one NaN": (b"(" + NAN + b"q\x09t", b"(h\x09t"),
    "other tuples": (numbers(1, 2), numbers(2, 1)),
    "nested tuples": (b"(" + numbers(1) + text("a") + b"t", b"(" + numbers(1) + text("a") + b"t"),
    "tuples nested otherwise": (b"(" + numbers(1, 2) + b"t", numbers(1, 2)),
    "long tuples": (numbers(*range(1000)), numbers(*range(1000))),
    "long texts in tuples": (b"(" + text("a" * 999) + b"t", b"(" + text("a" * 999) + b"t"),
    "shape and tuple": (b"ctorch\nSize\n" + numbers(1, 2) + b"\x85R", numbers(1, 2)),
    "large ints": (attacks.number(2**70), attacks.number(2**70)),
    "large int and float": (attacks.number(2**70), real(2.0**70)),
    "other large ints": (attacks.number(2**70), attacks.number(2**70 + 1)),
    "negative ints": (attacks.number(-(2**70)), attacks.number(2**70)),
    "complex and int": (b"cbuiltins\ncomplex\n" + b"K\1K\0\x86R", b"K\1"),
    "complex": (b"cbuiltins\ncomplex\n" + b"K\1K\2\x86R", b"cbuiltins\ncomplex\n" + b"K\1K\2\x86R"),
    "bytes": (b"c_codecs\nencode\n" + text("a") + text("latin1") + b"\x86R",) * 2,
    "bytes and text": (b"c_codecs\nencode\n" + text("a") + text("latin1") + b"\x86R", text("a")),
    "types of two names": (b"ctorch\nfloat32\n",) * 2,
    "None": (b"N", b"N"),
    "empty tuples": (b")", b")"),
}


@pytest.mark.parametrize("name", EQUAL_KEYS)
def test_keys_equal_in_python_are_merged(tmp_path, name):
    """The first of two equal keys keeps its place and gets the last value; torch has as many keys."""
    first, second = EQUAL_KEYS[name]
    path = write_archive(tmp_path, items((first, tensor("0")), (text("w"), tensor("1")), (second, tensor("1"))))
    expected = load_with_torch(path)
    values = read_with_statecli(path)
    assert list(values.values()) == list(expected.values())
    assert [key for key in values if not key.startswith("[#")] == [
        key for key, other in zip(expected, values, strict=True) if not other.startswith("[#")
    ]


@pytest.mark.parametrize("name", ["int and float", "tuples", "large ints"])
def test_ordered_dict_of_pairs_has_the_keys_of_python(tmp_path, name):
    """A call builds the OrderedDict from pairs, as Python 2 pickled an OrderedDict."""
    first, second = EQUAL_KEYS[name]
    pairs = (
        b"]("
        + b"".join(key + tensor(storage_key) + b"\x86" for key, storage_key in ((first, "0"), (second, "1")))
        + b"e"
    )
    path = write_archive(tmp_path, b"ccollections\nOrderedDict\n" + pairs + b"\x85R")
    assert list(read_with_statecli(path).values()) == list(load_with_torch(path).values()) == [[90, 91, 92, 93]]


def test_key_computed_by_str_equals_the_text(tmp_path):
    """A key that `str` computes is the same key as the equal text, and has the same name."""
    computed = b"cbuiltins\nstr\n" + text("w") + b"\x85R"
    path = write_archive(tmp_path, items((text("w"), tensor("0")), (computed, tensor("1"))))
    assert read_with_statecli(path) == load_with_torch(path, everything=True) == {"w": [90, 91, 92, 93]}


@pytest.mark.parametrize("scalar", [np.int64(1), np.uint8(1), np.float64(1), np.float32(1), np.bool_(True)], ids=repr)
def test_numbers_of_numpy_are_numbers(tmp_path, scalar):
    """numpy.int64(1) equals the key 1, and protocol 2 writes its bytes as text."""
    key = pickle.dumps(scalar, 2)[2:-1]
    path = write_archive(tmp_path, items((b"K\1", tensor("0")), (key, tensor("1")), (b"K\2", tensor("0"))))
    assert (
        read_with_statecli(path)
        == load_with_torch(path, everything=True)
        == {"[1]": [90, 91, 92, 93], "[2]": [1, 2, 3, 4]}
    )


@pytest.mark.parametrize("call", [b"cbuiltins\nstr\nK\1\x85R", b"cbuiltins\nint\n" + text("1") + b"\x85R"])
def test_key_from_another_call_is_refused(tmp_path, call):
    """statecli does not evaluate the call, so that neither the key nor an equal key can be recognised."""
    path = write_archive(tmp_path, items((text("w"), tensor("0")), (call, tensor("1"))))
    with pytest.raises(MalformedError, match="a dictionary key is the result of calling builtins"):
        formats.read(path)


def test_shared_tuple_key_is_read_once(tmp_path):
    """A tuple that is a key many times is read once; so are nested tuples, and a long text in many tuples."""
    chain = b")q\1" + b"".join(b"0h\1\x85q\1" for _ in range(9_000)) + b"0"
    long_text = text("a" * 4_000_000) + b"q\2" + b"0"
    entries = b"h\1N" * 20_000 + b"h\2K\1\x86N" * 20_000
    path = write_archive(tmp_path, chain + long_text + b"}(" + entries + text("w") + tensor() + b"u")
    begin = time.process_time()
    assert read_with_statecli(path) == {"w": [1, 2, 3, 4]}
    assert time.process_time() - begin < 10


def test_a_key_that_python_cannot_hash_is_refused(tmp_path):
    """Hashing overflows Python's stack at some depth, and two keys of this depth could not be distinguished."""
    path = write_archive(tmp_path, b"})" + b"\x85" * 20_000 + tensor() + b"s")
    with pytest.raises(
        MalformedError, match="a dictionary key has more than 10,000 nested tuples, the limit of statecli"
    ):
        formats.read(path)


DESCRIPTIONS = {
    "types": (storage(), storage(kind="IntStorage")),
    "types in the other order": (storage(kind="IntStorage"), storage()),
    "devices": (storage(), storage(location="meta")),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("is_dropped", [False, True], ids=["both", "first dropped"])
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_storage_with_two_descriptions_has_no_values(tmp_path, name, is_dropped, legacy):
    """torch takes the first description for all tensors of a storage, even if the first tensor was dropped."""
    first, second = (tensor().replace(storage(), description) for description in DESCRIPTIONS[name])
    body = first + b"0" + tree(b=second) if is_dropped else tree(a=first, b=second)
    path = write_archive(tmp_path, body, legacy=legacy)
    reasons = read_with_statecli(path).values()
    assert all("the pickle describes storage '0' in two ways" in reason for reason in reasons)


def test_empty_storages_may_have_two_types(tmp_path):
    """torch saves an empty tensor and its view of another dtype with the same storage, and loads both dtypes."""
    empty = torch.empty(0)
    torch.save({"a": empty, "b": empty.view(torch.int32)}, tmp_path / "a.pt")
    rows = formats.read(str(tmp_path / "a.pt")).tensors
    assert [(row.fqn, row.dtype, row.damage) for row in rows] == [("a", "float32", None), ("b", "int32", None)]


def test_storage_and_view_with_one_key_have_no_values(tmp_path):
    """torch caches a view under its key, so that a storage with this key has the values of the view."""
    view = storage("1")[:-2] + b"(" + text("0") + b"K\0K\4ttQ"
    body = tree(a=tensor().replace(storage(), view), b=tensor().replace(storage(), storage()[:-2] + b"NtQ"))
    path = tmp_path / "a.pt"
    data = [("0", 4, STORAGES["0"]), ("1", 4, STORAGES["1"])]
    path.write_bytes(attacks.legacy(build_pickle(body), data))
    assert load_with_torch(str(path))["b"] == load_with_torch(str(path))["a"]
    reasons = read_with_statecli(str(path))
    assert "its storage is a view of a storage" in reasons["a"]
    assert "a storage and a view of a storage" in reasons["b"]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_tensor_on_meta_has_the_bytes_of_the_file(tmp_path, legacy):
    """torch.load gives a tensor on meta; with a map_location the tensor has the values of its storage."""
    path = write_archive(
        tmp_path,
        tree(w=tensor().replace(storage(), storage(location="meta"))),
        legacy=legacy,
        storages={"0": STORAGES["0"]},
    )
    (row,) = formats.read(path).tensors
    assert torch.load(path)["w"].is_meta
    assert (row.device, row.shape, row.damage) == ("meta", (4,), None)
    assert read_all_values(row.data).tolist() == torch.load(path, map_location="cpu")["w"].tolist()


def write_with_byteorder(tmp_path, body: bytes, order: bytes, data: bytes) -> str:
    """Write an archive with one storage, `data`, and `order` in its byteorder record; return the path."""
    members = attacks.records(build_pickle(body), {"0": data})
    for member in members:
        if member.name.endswith("byteorder"):
            member.data = order
    path = tmp_path / "a.pt"
    path.write_bytes(attacks.build(members))
    return str(path)


def rebuild_typed(kind: str, numel: int, dtype: str, size: int) -> bytes:
    """Return the opcodes of `_rebuild_tensor_v3`: a storage of one class, viewed as a dtype."""
    call_arguments = (storage("0", kind, numel), b"K\0", numbers(size), numbers(1), b"\x89", ORDERED_DICT)
    return call_function(b"ctorch._utils\n_rebuild_tensor_v3\n", *call_arguments, f"ctorch\n{dtype}\n".encode())


MISMATCHED_DTYPES = {
    "bytes as float32": ("UntypedStorage", 16, "float32", 4),
    "bytes as uint16": ("UntypedStorage", 16, "uint16", 8),
    "int16 as float32": ("ShortStorage", 8, "float32", 4),
    "int16 as uint8": ("ShortStorage", 8, "uint8", 16),
    "complex64 as float64": ("ComplexFloatStorage", 2, "float64", 2),
}
VALUES = struct.pack("<4f", 1.5, 2.5, 3.5, 4.5)


@pytest.mark.parametrize("case", MISMATCHED_DTYPES)
def test_big_endian_tensor_of_another_dtype_has_no_values(tmp_path, case):
    """torch swaps bytes by the element size of the storage, whatever the dtype of the tensor is."""
    body = tree(w=rebuild_typed(*MISMATCHED_DTYPES[case]))
    path = write_with_byteorder(tmp_path, body, b"little", VALUES)
    assert read_with_statecli(path) == load_with_torch(path)
    assert (
        "w: the values depend on the loading machine"
        in read_with_statecli(write_with_byteorder(tmp_path, body, b"big", VALUES))["w"]
    )


@pytest.mark.parametrize(("kind", "dtype", "size"), [("UntypedStorage", "int8", 16), ("FloatStorage", "float32", 4)])
def test_big_endian_values_equal_torch(tmp_path, kind, dtype, size):
    """float32 elements are swapped by four bytes; int8 elements do not change."""
    path = write_with_byteorder(tmp_path, tree(w=rebuild_typed(kind, size, dtype, size)), b"big", VALUES)
    assert read_with_statecli(path) == load_with_torch(path)


def test_the_byte_order_in_upper_case_is_refused(tmp_path):
    """torch finds a record whatever the case of its name."""
    members = attacks.records(build_pickle(tree(w=tensor())), {"0": VALUES})
    for member in members:
        if member.name.endswith("byteorder"):
            member.name, member.data = "archive/ByteOrder", b"big"
    path = tmp_path / "a.pt"
    path.write_bytes(attacks.build(members))
    assert load_with_torch(str(path))["w"] != [1.5, 2.5, 3.5, 4.5]
    with pytest.raises(MalformedError, match="byteorder record with upper-case letters in its name"):
        formats.read(str(path))


@pytest.mark.parametrize("order", [b"\x88", b"\x89", b"N"], ids=["little", "big", "unknown"])
def test_byte_order_recorded_in_a_stream_is_ignored(tmp_path, order):
    """torch ignores the description of the machine."""
    path = tmp_path / "a.pt"
    stream = attacks.legacy(build_pickle(tree(w=tensor().replace(b"tQ", b"NtQ"))), [("0", 4, VALUES)])
    path.write_bytes(stream.replace(text("little_endian") + b"\x88", text("little_endian") + order))
    assert read_with_statecli(str(path)) == load_with_torch(str(path)) == {"w": [1.5, 2.5, 3.5, 4.5]}


def test_device_data_of_another_dtype_has_no_values(tmp_path):
    """torch saves the data of a device in the tensor's dtype; for another dtype a load converts the data."""

    def write_cast(dtype: str) -> str:
        ints = tensor(kind="IntStorage")
        return write_archive(
            tmp_path, tree(w=call_function(REBUILD_FROM_CPU, ints, f"ctorch\n{dtype}\n".encode(), text("cpu"), b"\x89"))
        )

    path = write_cast("int32")
    assert read_with_statecli(path) == load_with_torch(path)
    path = write_cast("float32")
    assert load_with_torch(path)["w"] != [1, 2, 3, 4]
    assert "w: has the dtype float32, but its data is int32" in read_with_statecli(path)["w"]


def test_an_array_of_float32_may_be_a_bfloat16_of_xla(tmp_path):
    """numpy has no bfloat16, so torch saves a bfloat16 tensor of XLA as float32."""
    array = torch.tensor([1.0, 2.0]).numpy()
    moved_array = Called(torch._utils._rebuild_device_tensor_from_numpy, (array, torch.bfloat16, "cpu", False))
    torch.save({"w": moved_array}, tmp_path / "a.pt")
    path = str(tmp_path / "a.pt")
    assert read_with_statecli(path) == load_with_torch(path, everything=True)
    assert formats.read(path).tensors[0].dtype == "bfloat16"
