"""Flax's msgpack: the arrays equal `flax.serialization.msgpack_restore`, and nothing in a file is trusted."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import numpy
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from statecli import formats
from statecli.core import parameter_or_buffer
from statecli.core.errors import UnreadableError
from statecli.formats import flax_msgpack
from statecli.storage import msgpack
from statecli.values.read import open_view, read_all_values, read_items

from .msgpacks import Extension, Raw, array, chunk_array, pack
from .test_any_bytes import read_or_refuse


class Adam(NamedTuple):
    """The state of optax's Adam."""

    count: Any
    mu: Any
    nu: Any


class Empty(NamedTuple):
    """State of an optimizer transformation without values."""


@pytest.fixture
def flax():
    """`flax.serialization`."""
    return pytest.importorskip("flax.serialization")


def write_msgpack(tmp_path, content: object, name: str = "model.msgpack") -> str:
    """Write `content`, packed unless `content` is bytes; return the path."""
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else pack(content))
    return str(tmp_path / name)


def tensors(path: str, section: str | None = None) -> dict[tuple[str, str], Any]:
    """Return the tensors by section and name."""
    return {(tensor.section, tensor.fqn): tensor for tensor in formats.read(path, section).tensors}


def list_leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the arrays of a tree restored by Flax, by dotted path."""
    if isinstance(tree, dict):
        return {name: leaf for key, child in tree.items() for name, leaf in list_leaves(child, (*path, key)).items()}
    return {".".join(path): tree} if hasattr(tree, "shape") else {}


def read_stored_bytes(tensor: Any) -> bytes:
    """Return the stored bytes of the tensor's elements."""
    with open_view(tensor.data) as view:
        return b"".join(block.tobytes() for block in read_items(view))


# Files of the library.

DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128"
SMALL_DTYPES = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"


@pytest.mark.parametrize("dtype", [*DTYPES.split(), *SMALL_DTYPES.split()])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)], ids=str)
def test_each_dtype_equals_the_array_of_flax(flax, tmp_path, dtype, shape):
    """Names, shapes, dtypes and bytes agree for every type that Flax can save."""
    library = pytest.importorskip("ml_dtypes")
    array = numpy.arange(6).reshape(2, 3)[: shape[0] if shape else 1].reshape(-1)[: numpy.prod(shape, dtype=int)]
    array = array.reshape(shape).astype(getattr(library, dtype, dtype))
    path = write_msgpack(tmp_path, flax.to_bytes({"layer": {"kernel": array}}))
    loaded = flax.msgpack_restore((tmp_path / "model.msgpack").read_bytes())["layer"]["kernel"]
    (tensor,) = formats.read(path).tensors
    assert (tensor.fqn, tensor.dtype, tensor.shape) == ("layer.kernel", str(loaded.dtype), loaded.shape)
    assert tensor.nbytes == loaded.nbytes
    if shape != (0, 4):
        assert read_stored_bytes(tensor) == loaded.tobytes()


def train_state(flax) -> dict[str, Any]:
    """Return the saved form of a TrainState, built from a dict with the same fields."""
    ones = numpy.ones((2, 3), numpy.float32)
    params = {"Dense_0": {"kernel": ones, "bias": ones[0]}, "BatchNorm_0": {"scale": ones[0]}}
    zeros = {"Dense_0": {"kernel": ones * 0, "bias": ones[0] * 0}, "BatchNorm_0": {"scale": ones[0] * 0}}
    moments = (Adam(numpy.zeros((), numpy.int32), zeros, zeros), Empty())
    return flax.to_state_dict(
        {
            "step": numpy.asarray(7),
            "params": params,
            "opt_state": moments,
            "batch_stats": {"BatchNorm_0": {"mean": ones[0]}},
        }
    )


def test_train_state_has_sections_and_moments(flax, tmp_path):
    """The fields are sections; a parameter with optimizer moments is trained, and each moment names its parameter."""
    path = write_msgpack(tmp_path, flax.to_bytes(train_state(flax)), "checkpoint_7")
    state = parameter_or_buffer.classify_tensors(formats.read(path))
    assert state.format == "flax-msgpack"
    assert set(state.sections) == {"", "params", "opt_state", "batch_stats"}
    rows = {(tensor.section, tensor.fqn): tensor for tensor in state.tensors}
    kernel, mean = rows["params", "Dense_0.kernel"], rows["batch_stats", "BatchNorm_0.mean"]
    assert (kernel.kind, kernel.evidence) == ("parameter", "optimizer")
    assert (mean.kind, mean.evidence) == ("buffer", "convention")
    moment = rows["opt_state", "0.nu.Dense_0.kernel"]
    assert (moment.kind, moment.belongs_to) == ("optimizer", "Dense_0.kernel")
    assert rows["opt_state", "0.count"].belongs_to is None
    assert rows["", "step"].kind == "other"
    restored = list_leaves(flax.msgpack_restore((tmp_path / "checkpoint_7").read_bytes()))
    assert {".".join(filter(None, key)) for key in rows} == set(restored)
    for key, row in rows.items():
        restored_array = restored[".".join(filter(None, key))]
        assert numpy.array_equal(read_all_values(row.data).reshape(restored_array.shape), restored_array)
    assert not any((tensor.device, tensor.requires_grad) != (None, None) for tensor in state.tensors)


def test_models_in_a_map_have_separate_sections(flax, tmp_path):
    """Collections with Flax's names are recognised anywhere in the map, except below parameters."""
    ones = numpy.ones(2, numpy.float32)
    inner = {"params": {"w": ones, "cache": {"v": ones}}, "cache": {"k": ones}}
    path = write_msgpack(tmp_path, flax.to_bytes({"generator": inner, "rng": ones, "ema": {"w": ones}}))
    assert {key: tensor.kind.value for key, tensor in tensors(path).items()} == {
        ("generator.params", "w"): "parameter",
        ("generator.params", "cache.v"): "parameter",
        ("generator.cache", "k"): "buffer",
        ("", "rng"): "other",
        ("ema", "w"): "parameter",
    }


def test_params_may_contain_all_collections(flax, tmp_path):
    """`TrainState.create(params=model.init(...))` keeps the collections one level below `params`."""
    ones = numpy.ones(2, numpy.float32)
    variables = {"params": {"w": ones}, "batch_stats": {"mean": ones}}
    moments = {"0": {"mu": variables}}
    path = write_msgpack(tmp_path, flax.to_bytes({"params": variables, "opt_state": moments}))
    actual = tensors(path)
    assert set(actual) == {
        ("params.params", "w"),
        ("params.batch_stats", "mean"),
        ("opt_state", "0.mu.params.w"),
        ("opt_state", "0.mu.batch_stats.mean"),
    }
    assert actual["opt_state", "0.mu.params.w"].belongs_to == "w"


def test_named_container_is_a_section(flax, tmp_path):
    """`#params.Dense_0` makes the container a section; all other tensors keep their section."""
    path = write_msgpack(tmp_path, flax.to_bytes(train_state(flax)))
    actual = tensors(path, "params.Dense_0")
    assert {("params.Dense_0", "kernel"), ("params.Dense_0", "bias"), ("params", "BatchNorm_0.scale")} <= set(actual)


def test_flax_model_of_transformers_is_one_section(flax, tmp_path):
    """`flax_model.msgpack` has only the parameters, and identifies the format of its folder."""
    ones = numpy.ones((2, 2), numpy.float32)
    content = flax.to_bytes({"transformer": {"h": {"0": {"attn": {"kernel": ones}}}}})
    write_msgpack(tmp_path, content, "flax_model.msgpack")
    (tmp_path / "config.json").write_text("{}")
    assert set(tensors(str(tmp_path))) == {("model", "transformer.h.0.attn.kernel")}


def test_sharded_flax_model_is_read(flax, tmp_path):
    """The index of a sharded Flax model has slashes where names have dots."""
    ones = numpy.ones((2, 2), numpy.float32)
    for n, layer in enumerate(("embed", "head"), 1):
        write_msgpack(tmp_path, flax.to_bytes({layer: {"kernel": ones}}), f"flax_model-0000{n}-of-00002.msgpack")
    shards = {f"{layer}/kernel": f"flax_model-0000{n}-of-00002.msgpack" for n, layer in ((1, "embed"), (2, "head"))}
    index = {"metadata": {"total_size": 32}, "weight_map": shards}
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    state = formats.read(str(tmp_path))
    assert {tensor.fqn for tensor in state.tensors} == {"embed.kernel", "head.kernel"}
    assert (state.format, state.oddities) == ("sharded flax-msgpack", ())


def test_chunked_array_is_one_tensor(flax, tmp_path, monkeypatch):
    """An array that Flax splits into flat chunks is a single tensor; reading the values joins the chunks."""
    monkeypatch.setattr(flax, "MAX_CHUNK_SIZE", 64)
    array = numpy.arange(60, dtype=numpy.float32).reshape(3, 20)
    path = write_msgpack(tmp_path, flax.msgpack_serialize({"params": {"big": array, "small": array[0, :4]}}))
    big = tensors(path)["params", "big"]
    assert (big.shape, big.note) == ((3, 20), "in 4 chunks")
    assert numpy.array_equal(read_all_values(big.data), array.reshape(-1))


def test_values_that_are_not_arrays_are_settings(flax, tmp_path):
    """Numbers of Python and numpy, texts, complex numbers and bytes are settings; items of lists have their index."""
    content = {
        "w": numpy.ones(2),
        "lr": numpy.float32(0.5),
        "half": numpy.float16(2),
        "n": 3,
        "big": 2**63,
        "negative": -40,
        "on": True,
        "none": None,
        "name": "adam",
        "c": 1 + 2j,
        "list": [1, "two"],
        "raw": b"abc",
    }
    state = formats.read(write_msgpack(tmp_path, flax.msgpack_serialize(content)))
    values = state.metadata.values
    assert [tensor.fqn for tensor in state.tensors] == ["w"]
    assert {key: values[key] for key in ("lr", "half", "n", "negative", "on", "none", "name", "c")} == {
        "lr": 0.5,
        "half": 2.0,
        "n": 3,
        "negative": -40,
        "on": True,
        "none": None,
        "name": "adam",
        "c": "(1+2j)",
    }
    assert (values["big"], values["list.0"], values["list.1"]) == (str(2**63), 1, "two")
    assert str(values["raw"]).startswith("3 bytes, sha256 ")


def test_bfloat16_scalar_is_shown_by_its_bits(flax, tmp_path):
    """A number without an exact Python type is shown by its bits."""
    library = pytest.importorskip("ml_dtypes")
    path = write_msgpack(tmp_path, flax.msgpack_serialize({"w": numpy.ones(2), "x": library.bfloat16(1)}))
    assert formats.read(path).metadata.values["x"] == "bfloat16 0x3f80"


def test_end_of_a_long_scalar_is_part_of_the_setting(flax, tmp_path):
    """Flax saves a long text of numpy as a scalar."""
    values = []
    for text in ("x" * 100, "x" * 99 + "y"):
        path = write_msgpack(tmp_path, flax.msgpack_serialize({"w": numpy.ones(2), "run": numpy.str_(text)}))
        values.append(formats.read(path).metadata.values["run"])
    assert values[0] != values[1]


def test_scalar_with_a_shape_is_a_tensor(flax, tmp_path):
    """Flax loads the elements of such a scalar as an array."""
    content = pack({"w": Extension(3, array([2], "float32", struct.pack("<2f", 1, 2)).data)})
    path = write_msgpack(tmp_path, content)
    assert flax.msgpack_restore(content)["w"].tolist() == [1, 2]
    (row,) = formats.read(path).tensors
    assert (row.fqn, read_all_values(row.data).tolist()) == ("w", [1, 2])


#: Values of every width of lengths and numbers that the library chooses.
WIDTHS = [
    *(sign * (2**bits + step) for bits in (5, 7, 8, 15, 16, 31, 32, 63) for sign in (1, -1) for step in (-1, 0)),
    2**64 - 1,
    *(kind * length for kind in ("x", b"x", [None]) for length in (0, 15, 16, 31, 32, 255, 256, 65_535, 65_536)),
    *(dict.fromkeys(map(str, range(length))) for length in (0, 15, 16, 65_536)),
]


@example(WIDTHS)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40) | st.binary(),
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
        max_leaves=40,
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_parser_agrees_with_msgpack(tmp_path, value):
    """The values cover every kind, and every width of lengths and numbers that the library chooses."""
    library = pytest.importorskip("msgpack")
    path = tmp_path / "value"
    path.write_bytes(library.packb(value))

    def plain(node):
        if isinstance(node, msgpack.Blob):
            return path.read_bytes()[node.offset : node.offset + node.length]
        if isinstance(node, dict):
            return {key: plain(child) for key, child in node.items()}
        return [plain(child) for child in node] if isinstance(node, list) else node

    with flax_msgpack.ByteSource(str(path)) as source:
        parser = msgpack.Parser(source)
        assert repr(plain(parser.value())) == repr(value)
        assert parser.at == source.size


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 8, 15, 16, 17, 300, 70_000])
def test_extension_of_each_length_is_parsed(tmp_path, length):
    """msgpack has five fixed lengths and three widths for other lengths."""
    library = pytest.importorskip("msgpack")
    path = tmp_path / "value"
    path.write_bytes(library.packb(library.ExtType(5, bytes(length))))
    with flax_msgpack.ByteSource(str(path)) as source:
        result = msgpack.Parser(source).value()
    assert (result.code, result.length, result.offset + length) == (5, length, path.stat().st_size)


# Names.


def test_second_of_two_equal_names_has_its_keys(tmp_path):
    """A key may have a dot: the second of two equal names is shown with its keys."""
    path = write_msgpack(tmp_path, {"a": {"b": array([1])}, "a.b": array([2])})
    assert {key: tensor.shape for key, tensor in tensors(path).items()} == {
        ("model", "a.b"): (1,),
        ("model", "['a.b']"): (2,),
    }


def test_number_keys_and_list_indexes_are_parts_of_names(tmp_path):
    """Flax restores numbers as keys, and lists of arrays."""
    path = write_msgpack(tmp_path, {"layers": {0: array([1]), 1: array([2])}, "list": [array([3])]})
    assert set(tensors(path)) == {("model", "layers.0"), ("model", "layers.1"), ("model", "list.0")}


# Files that are not a checkpoint of Flax, or a damaged checkpoint.

INVALID_CONTENTS = {
    "nothing but a map": (b"\x80", "is a msgpack file without a Flax array, so statecli finds no tensor"),
    "no array": ({"params": {}}, "is a msgpack file without a Flax array, so statecli finds no tensor"),
    "bytes behind it": (
        pack({"a": array([1])}) + b"xyz",
        "3 bytes follow the state, which ends at byte 49; Flax refuses such a file",
    ),
    "a key twice": (
        b"\x82" + pack("a") + pack(1) + pack("a") + pack(2),
        "a map has the key 'a' twice; programs may read either value",
    ),
    "a key that is a list": (
        b"\x82" + pack("a") + pack(1) + pack([1]) + pack(2),
        "a map has a key that is not a string or",
    ),
    "a reserved byte": ({"a": Raw(b"\xc1")}, "is not msgpack: a value cannot begin with 0xc1 (byte 7)"),
    "a text that is no UTF-8": ({"a": Raw(b"\xa2\xff\xff")}, "contains a string that is not valid UTF-8 near byte 8"),
    "a lone surrogate": ({"a": "\ud800"}, "contains a string that is not valid UTF-8 near byte 8"),
    "a map of 4 billion": ({"a": Raw(b"\xdf" + b"\xff" * 4)}, "is truncated: 4294967295 entries should follow"),
    "a list of 4 billion": ({"a": Raw(b"\xdd" + b"\xff" * 4)}, "is truncated: 4294967295 entries should follow"),
    "a text of 4 billion": (
        {"a": Raw(b"\xdb" + b"\xff" * 4)},
        "has more than 67108864 bytes of text, the limit of statecli",
    ),
    "bytes of 4 billion": ({"a": Raw(b"\xc6" + b"\xff" * 4)}, "is truncated: bytes 12 to 4294967307 are needed"),
    "an array of 4 billion": ({"a": Raw(b"\xc9" + b"\xff" * 4 + b"\1")}, "is truncated: bytes 13 to 4294967308"),
    "lists in lists": ({"a": Raw(b"\x91" * 100_000)}, "nests more than 100 levels deep"),
    "maps in maps": ({"a": Raw(b"\x81\xa1a" * 100_000)}, "nests more than 100 levels deep"),
    "a complex number of one part": (
        {"a": Extension(2, pack([1.0]))},
        "a complex number is not stored as a pair of floats",
    ),
    "a scalar without its bytes": ({"a": Extension(3, pack([[], "float32", b""]))}, "float32 [] takes 4 bytes"),
}


@pytest.mark.parametrize("case", sorted(INVALID_CONTENTS))
def test_invalid_content_is_reported_in_one_line(case, tmp_path, line):
    """Content that another program would read otherwise, or that claims more bytes than the file has, is refused."""
    content, expected = INVALID_CONTENTS[case]
    path = write_msgpack(tmp_path, content)
    assert expected in line(path)


NOT_A_LIST = "its array is not recorded in the form that Flax writes, a list of shape, dtype and bytes"
DAMAGED_ARRAYS = {
    "lists in lists": (Extension(1, b"\x91" * 5000), "nests more than 100 levels deep"),
    "no list": (Extension(1, pack({"a": 1})), NOT_A_LIST),
    "two of three": (Extension(1, pack([[1], "float32"])), NOT_A_LIST),
    "a dtype that is a number": (array([1], 5), NOT_A_LIST),
    "text for bytes": (array([1], "float32", "abcd"), NOT_A_LIST),
    "a shape that is text": (array("12"), "its shape is not a list of sizes"),
    "a negative size": (array([-1], data=b""), "its shape is not a list of sizes"),
    "a size that is true": (array([True]), "its shape is not a list of sizes"),
    "too many dimensions": (array([1] * 1025), "its shape has 1025 dimensions, more than statecli's limit of 1024"),
    "2^66 elements": (array([2**33, 2**33], data=b""), "is impossible: 2^63 elements or more"),
    "too few bytes": (array([3], data=bytes(8)), "float32 [3] takes 12 bytes, but the array has 8"),
    "too many bytes": (array([3], data=bytes(16)), "float32 [3] takes 12 bytes, but the array has 16"),
    "bytes that break off": (Extension(1, pack([[1], "float32", bytes(4)])[:-2]), "is truncated"),
    "pieces that are too few": (chunk_array((5,), array([2]), array([2])), "has 5 elements, but its chunks have 4"),
    "pieces of two dtypes": (
        chunk_array((4,), array([2]), array([2], "int32")),
        "its chunks are not one-dimensional arrays of one numeric dtype",
    ),
    "a piece that is no array": (
        chunk_array((4,), array([2]), 5),
        "its chunks are not a map of arrays",
    ),
    "a damaged piece": (
        chunk_array((4,), array([2]), array([2], data=b"")),
        "float32 [2] takes 8 bytes, but the array has 0",
    ),
    "objects": (array([1], "object", bytes(8)), "has dtype object: its bytes are memory addresses of the process"),
    "2^40 elements of nothing": (
        array([2**40], "|V0", b""),
        "0 bytes do not fit 1099511627776 elements",
    ),
    "five bytes for two": (
        array([2], "<U1", bytes(5)),
        "numpy <U1 [2]: 5 bytes do not fit 2 elements",
    ),
    "no pieces": (chunk_array((0,)), "its chunks are not a map of arrays"),
    "pieces without a shape": ({"__msgpack_chunked_array__": True, "chunks": {"0": array([2])}}, "not a list of sizes"),
}


@pytest.mark.parametrize("case", sorted(DAMAGED_ARRAYS))
def test_inconsistent_array_spoils_no_other_array(case, tmp_path, inspect):
    """The damaged array is listed with the reason, the other array is listed too, and the exit status is 2."""
    node, expected = DAMAGED_ARRAYS[case]
    path = write_msgpack(tmp_path, {"bad": node, "good": array([2])})
    actual = tensors(path)
    assert expected in actual["model", "bad"].damage
    assert actual["model", "good"].shape == (2,)
    code, out, err = inspect(path)
    assert (code, err.count("\n")) == (2, 1)
    assert "good" in out


def test_unknown_dtype_is_named(tmp_path, inspect):
    """An unknown dtype is named, and the values are not read."""
    path = write_msgpack(tmp_path, {"a": array([2], "float8_e9m9", b"ab")})
    assert [(tensor.dtype, tensor.nbytes) for tensor in formats.read(path).tensors] == [("numpy float8_e9m9", 2)]
    assert inspect(path, "--stats")[0] == 0


def test_bytes_outside_arrays_have_a_budget(tmp_path, line, monkeypatch):
    """The bytes are read to compute their digest."""
    monkeypatch.setattr(flax_msgpack, "_MAX_RAW_BYTES", 10)
    path = write_msgpack(tmp_path, {"a": array([1]), "b": b"12345678", "c": b"123"})
    assert line(path) == "has more than 10 bytes outside arrays, the limit of statecli"


def test_entries_have_a_budget(tmp_path, line, monkeypatch):
    """A megabyte of empty values would be a million objects."""
    monkeypatch.setattr(msgpack, "MAX_ENTRIES", 10)
    assert line(write_msgpack(tmp_path, {"a": [None] * 20})) == "has more than 10 entries, the limit of statecli"


def test_names_have_a_budget(tmp_path, line, monkeypatch):
    """Each name repeats the names above, so the total length is limited."""
    monkeypatch.setattr(flax_msgpack, "MAX_CHARACTERS", 1000)
    path = write_msgpack(tmp_path, {"x" * 400: {str(n): array([1]) for n in range(9)}})
    assert line(path).startswith("the tensor names have more than ")


@given(
    data=st.binary(max_size=200), start=st.sampled_from([b"\x81\xa1a", b"\x82\xa6params", b"\xde\x00\x01\xa1k", b""])
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_read_or_refused(tmp_path, data, start):
    """Any bytes are read, or refused in one line."""
    path = tmp_path / "any.msgpack"
    path.write_bytes(start + data)
    read_or_refuse(path)


def test_truncated_file_has_a_damaged_entry(tmp_path):
    """In a file truncated at any byte, the tensors before the end are read, and one entry is damaged."""
    first, last = {"a": array([2])}, {"params": {"a": array([2]), "b": array([3])}, "step": 3, "name": "x"}
    content = pack(last)
    path = tmp_path / "cut.msgpack"
    # The key of the map, then the key of the first array, each with its length; then the array.
    read_from = 5 + 7 + 5 + len(pack(first)) - 5
    for end in range(len(content)):
        path.write_bytes(content[:end])
        if end < read_from:
            with pytest.raises(UnreadableError):
                formats.read(str(path))
            continue
        state = formats.read(str(path))
        assert ("params", "a") in {(tensor.section, tensor.fqn) for tensor in state.tensors if not tensor.damage}
        (damaged,) = (tensor for tensor in state.tensors if tensor.damage)
        assert f"{damaged.fqn}: is truncated: " in damaged.damage


def test_entries_before_a_truncation_are_listed(tmp_path, inspect):
    """The tensors before the end have values and settings; the truncated entry is named, and the exit status is 2."""
    content = pack({"step": 3, "params": {"a": array([2]), "b": array([3])}, "batch_stats": {"m": array([1])}})
    path = tmp_path / "cut.msgpack"
    for cut_length, name in ((4, "m"), (60, "(the rest)"), (75, "b")):
        path.write_bytes(content[:-cut_length])
        state = formats.read(str(path))
        assert state.metadata.values["step"] == 3
        actual = {tensor.fqn: tensor for tensor in state.tensors}
        assert (actual["a"].shape, actual["a"].damage) == ((2,), None)
        assert [tensor.fqn for tensor in state.tensors if tensor.damage] == [name]
        code, out, err = inspect(path, "--stats")
        assert (code, err) == (2, f"statecli: {actual[name].damage}\n")
        assert "a" in out.split()


def test_truncated_list_keeps_its_complete_items(tmp_path):
    """The chunks of an incomplete array are not an array; complete items of an incomplete list are tensors."""
    for node, names in (
        ([array([1]), array([2])], ["x.0"]),
        (chunk_array((4,), array([2]), array([2])), []),
    ):
        path = write_msgpack(tmp_path, pack({"first": array([1]), "x": node})[:-3])
        actual_tensors = formats.read(path).tensors
        assert [tensor.fqn for tensor in actual_tensors if not tensor.damage] == ["first", *names]
        (damaged,) = (tensor for tensor in actual_tensors if tensor.damage)
        assert "is truncated: bytes" in damaged.damage


# Recognition by content.


@pytest.mark.parametrize(
    "head",
    [
        b"\x80\x02}q\x00.",
        b"\x81",
        b"\x81\xa0",
        b"\x81\xa3ab",
        b"\x81\xa3a\0bc",
        b"\x81\xa2\xff\xffx",
        b"\x81\xa1a",
        b"\x81\xa1a\xc1",
        b"\x81\x05\x05",
        struct.pack("<Q", 0x61A181) + b"{" + b" " * 50,
        b"\x82\xa0\x82\xb1 (text in Shift JIS)",
    ],
    ids=repr,
)
def test_head_without_a_map_of_names_is_not_msgpack(head):
    """A file without the suffix is taken for msgpack only if its content begins with a map, a name and a value."""
    assert not flax_msgpack.sniff("model.bin", head)


def test_the_first_key_may_be_long(tmp_path):
    """The first key has more than 31 bytes, in a file without a suffix."""
    name = "x" * 40
    path = write_msgpack(tmp_path, b"\x81\xd9\x28" + name.encode() + pack(array([1])), "checkpoint")
    assert set(tensors(path)) == {("model", name)}


# Keys that dotted names do not distinguish.

SAME_NAMES = {
    "a dot": ({"params": {"a": {"b": array([2])}}}, {"params": {"a.b": array([2])}}),
    "a dot without sections": ({"a": {"b": array([2])}}, {"a.b": array([2])}),
    "a dot of a section": ({"x": {"y_params": {"b": array([2])}}}, {"x.y_params": {"b": array([2])}}),
    "a number": ({"params": {"0": array([2])}}, {"params": {0: array([2])}}),
    "a list": ({"params": {"a": {"0": array([2])}}}, {"params": {"a": [array([2])]}}),
    "two dots": ({"params": {"a.b": {"c": array([2])}}}, {"params": {"a": {"b.c": array([2])}}}),
}


@pytest.mark.parametrize("section", ["", "#params"])
@pytest.mark.parametrize("case", SAME_NAMES)
def test_diff_reports_keys_with_equal_names(tmp_path, statecli, case, section):
    """Flax loads either file only where the other fails, though names and values are equal."""
    paths = [write_msgpack(tmp_path, content, f"{n}.msgpack") for n, content in enumerate(SAME_NAMES[case])]
    names = [sorted(tensor.fqn for tensor in formats.read(path).tensors) for path in paths]
    assert names[0] == names[1]
    if section and "params" in formats.read(paths[0]).sections:
        paths = [path + section for path in paths]
    assert statecli("diff", *paths).code == statecli("diff", *reversed(paths)).code == 1
    assert statecli("diff", paths[1], paths[1]).code == 0


def test_file_cannot_forge_the_setting_of_unusual_keys(tmp_path):
    """A file can neither forge nor hide the setting."""
    actual = formats.read(write_msgpack(tmp_path, {"params": {"a.b": array([2])}})).metadata.values["params.(keys)"]
    forged = {"params": {"a": {"b": array([2])}, "(keys)": actual}}
    assert formats.read(write_msgpack(tmp_path, forged)).metadata.values["params.(keys)"] == f"'{actual}'"
    hidden = {"params": {"a.b": array([2]), "(keys)": 1}}
    assert formats.read(write_msgpack(tmp_path, hidden)).metadata.values == {
        "params.(keys)": 1,
        "params.(keys)'": actual,
    }


def test_lock_records_unusual_keys(tmp_path, statecli):
    """The audit of the other file fails; a lock without settings cannot show whether the keys were different."""
    nested, dotted = SAME_NAMES["a dot"]
    for locked, other, code, text in (
        (dotted, nested, 1, "setting differs from the lock: params.(keys)"),
        (nested, dotted, 0, "not checked: 1 setting"),
    ):
        path = write_msgpack(tmp_path, locked)
        assert statecli("lock", path, "-o", tmp_path / "lock.json").code == 0
        assert "not checked" not in statecli("audit", path, "--lock", tmp_path / "lock.json").out
        write_msgpack(tmp_path, other)
        result = statecli("audit", path, "--lock", tmp_path / "lock.json")
        assert (result.code, text in result.out) == (code, True)


def test_diff_with_another_format_does_not_compare_keys(tmp_path, statecli):
    """Dotted keys of msgpack equal the names of safetensors."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"a.b": torch.zeros(2)}, tmp_path / "a.safetensors")
    result = statecli("diff", write_msgpack(tmp_path, {"a.b": array([2])}), tmp_path / "a.safetensors")
    assert result.code == 0
    assert (
        "statecli did not compare these settings, because only one of the two formats records them: (keys)"
        in result.out
    )
