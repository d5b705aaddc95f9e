"""Settings next to the tensors of a file: each is listed as a number, a text or a digest, and none is left out."""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from statecli import formats
from statecli.formats.torch import settings_digest, tensor_decoder
from statecli.values.read import read_all_values

from .attacks import Called, build, records, state_dict, tensor


def read_settings(tmp_path, **entries):
    path = str(tmp_path / "file.pt")
    torch.save({"model": {"a.weight": torch.ones(2)}, **entries}, path)
    state = formats.read(path)
    return dict(state.metadata.values), state


PLAIN = {"epoch": 3, "name": "run", "best": 0.5, "done": True, "none": None}


def test_plain_values_are_listed_unchanged(tmp_path):
    """Numbers, texts, bools and None are listed as they are; entries of containers by dotted path."""
    actual, _ = read_settings(tmp_path, **PLAIN, args={"lr": 0.1, "betas": (0.9, 0.99)})
    assert actual == {**PLAIN, "args.lr": 0.1, "args.betas.0": 0.9, "args.betas.1": 0.99}


@pytest.mark.parametrize(
    ("value", "changed", "description"),
    [
        (2**70, 2**70 + 1, str(2**70)),
        (2**5000, 2**5000 + 1, "an integer of 5001 bits"),
        ("a" * 2000, "a" * 1999 + "b", "2000 characters"),
        ([float(n) for n in range(100)], [float(n) for n in range(99)] + [0.0], "list of 100"),
        (tuple(range(65)), (*range(64), 0), "list of 65"),
        (b"abc", b"abd", "3 bytes"),
        ({1, 2}, {1, 3}, "set of 2"),
        (np.float64(0.5), np.float64(0.6), 0.5),
        (np.float32(0.5), np.float32(0.25), 0.5),
        (np.int64(7), np.int64(8), 7),
        (np.bool_(True), np.bool_(False), True),
        (torch.device("cuda", 0), torch.device("cuda", 1), "torch.device('cuda', 0)"),
        (pathlib.PurePosixPath("a/b"), pathlib.PurePosixPath("a/c"), "pathlib.PurePosixPath('a', 'b')"),
        (complex(1, 2), complex(1, 3), "complex(1.0, 2.0)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_values_have_different_texts(tmp_path, value, changed, description):
    """The text of a setting names its type, and two different contents have different texts."""
    first, second = read_settings(tmp_path, x=value)[0]["x"], read_settings(tmp_path, x=changed)[0]["x"]
    assert first != second
    assert first == read_settings(tmp_path, x=value)[0]["x"]
    assert first == description if not isinstance(description, str) else description in str(first)


def test_attributes_of_objects_are_settings(tmp_path):
    """The attributes of an argparse.Namespace, in which many programs save their arguments, are settings."""
    actual, _ = read_settings(tmp_path, args=argparse.Namespace(lr=0.1, layers=[1, 2]))
    assert actual == {"args.lr": 0.1, "args.layers.0": 1, "args.layers.1": 2}


def test_values_in_a_dict_of_tensors_are_settings(tmp_path):
    """A dict of tensors may hold a scale or an extra state as well."""
    path = str(tmp_path / "file.pt")
    torch.save({"model": {"a.weight": torch.ones(2), "scale": 1.5, "a._extra_state": {"v": 2}}}, path)
    assert formats.read(path).metadata.values == {"model.scale": 1.5, "model.a._extra_state.v": 2}


def test_a_container_that_is_shared_is_listed_each_time(tmp_path):
    """A dict under two names is listed as two equal dicts."""
    shared = {"lr": 1}
    actual, _ = read_settings(tmp_path, a=shared, b=shared)
    assert actual == {"a.lr": 1, "b.lr": 1} == read_settings(tmp_path, a={"lr": 1}, b={"lr": 1})[0]


def test_deeply_nested_values_become_a_digest(tmp_path):
    """Contents nested deeper than eight levels become one digest, which differs if the contents differ."""

    def nest_value(value):
        for _ in range(20):
            value = {"d": value}
        return value

    first, second = read_settings(tmp_path, x=nest_value(1))[0], read_settings(tmp_path, x=nest_value(2))[0]
    assert first != second
    assert len(first) == 1


def test_set_order_does_not_change_the_digest(tmp_path):
    """Equal sets have equal digests, although Python orders a set of texts differently in each process."""
    code = (
        "import pickle, sys; pickler = pickle.Pickler(sys.stdout.buffer, 2); pickler.fast = True; "
        "pickler.dump({'s': set('abcdefgh'), 'f': {frozenset('xyz')}})"
    )
    sets, actual = [], []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        process = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
        sets.append(process.stdout[2:-1])  # without PROTO and STOP
        path = tmp_path / f"{seed}.pt"
        path.write_bytes(build(records(state_dict(w=tensor(), x=sets[-1]))))
        actual.append(formats.read(str(path)).metadata.values)
    assert sets[0] != sets[1]
    assert actual[0] == actual[1]
    assert len(actual[0]) == 2


def test_shared_dicts_give_a_short_list(tmp_path):
    """Forty dicts, each with the next dict under two keys, have 2 ** 40 paths; the list of settings stays short."""
    node = {"v": 1}
    for _ in range(40):
        node = {"a": node, "b": node}
    actual, _ = read_settings(tmp_path, x=node)
    assert len(actual) < 1000


def test_settings_beyond_the_limit_become_a_digest(tmp_path):
    """After the first 20,000 settings, a digest of the whole file stands for the rest."""
    setting = read_settings(tmp_path, x={str(n): n for n in range(20_010)})[0]
    other_setting = read_settings(tmp_path, x={str(n): n + (n == 20_009) for n in range(20_010)})[0]
    assert len(setting) == 20_001
    assert setting["(and more)"] != other_setting["(and more)"]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", ">f4", "i8", "u2", "b1", "c16"])
def test_arrays_inside_the_pickle_have_values(tmp_path, dtype, order):
    """The elements of numpy arrays are stored in the pickle and read from there, in C order and in Fortran order."""
    array = np.asarray(np.arange(6).reshape(2, 3) % 2, dtype=dtype, order=order)
    path = str(tmp_path / "array.pt")
    torch.save({"a": array, "w": torch.ones(1)}, path)
    row = next(t for t in formats.read(path).tensors if t.fqn == "a")
    assert row.shape == (2, 3)
    assert read_all_values(row.data).tolist() == array.astype(array.dtype.newbyteorder("=")).reshape(-1).tolist()


def test_arrays_without_numbers_are_bytes_to_compare(tmp_path):
    """Text and records have a row and content."""
    path = str(tmp_path / "array.pt")
    torch.save({"a": np.array(["x", "yz"]), "w": torch.ones(1)}, path)
    row = next(t for t in formats.read(path).tensors if t.fqn == "a")
    assert row.dtype.startswith("numpy")
    assert row.data.inline == np.array(["x", "yz"]).tobytes()


def test_dict_subclasses_are_containers(tmp_path):
    """OrderedDict, defaultdict and Counter (pickled as a call with a dict) are containers like any other."""
    actual, _ = read_settings(
        tmp_path,
        o=collections.OrderedDict(a=1),
        d=collections.defaultdict(int, b=2),
        c=collections.Counter({30: 1, 80: 2}),
        e=collections.Counter(),
    )
    assert actual == {"o.a": 1, "d.b": 2, "c.30": 1, "c.80": 2, "e": "{}"}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((collections.OrderedDict, ([["a", 1], [2, 3]],)), {"x.a": 1, "x.2": 3}),
        ((collections.OrderedDict, ((("a", 1), ["b", 2]),)), {"x.a": 1, "x.b": 2}),
        ((collections.OrderedDict, ({"a": 1},)), {"x.a": 1}),
        ((collections.OrderedDict, ({"a": 1, "b": 0},), None, None, iter([("b", 2)])), {"x.a": 1, "x.b": 2}),
        ((collections.defaultdict, (int, {"a": 1})), {"x.a": 1}),
        ((collections.Counter, ({"a": 1},), None, None, iter([("b", 2)])), {"x.a": 1, "x.b": 2}),
    ],
    ids=["pairs", "pairs in a tuple", "dict", "dict and items", "defaultdict", "counter and items"],
)
def test_dict_has_the_entries_of_its_constructor(tmp_path, call, expected):
    """A dict contains the entries of its constructor arguments (a dict or pairs) and the items set afterwards."""
    assert read_settings(tmp_path, x=Called(*call))[0] == expected


def test_deque_has_the_elements_of_its_constructor(tmp_path):
    """The elements of a deque's constructor argument come before the appended elements."""
    called_deque = Called(collections.deque, ([1, 2],), None, iter([3]))
    assert read_settings(tmp_path, x=called_deque)[0] == read_settings(tmp_path, x=collections.deque([1, 2, 3]))[0]


def test_a_tensor_in_a_counter_is_a_tensor(tmp_path):
    """A tensor in a Counter is unusual, but has a row like any other tensor."""
    _, state = read_settings(tmp_path, c=collections.Counter(a=torch.ones(3)))
    assert {row.shape for row in state.tensors} == {(2,), (3,)}


def build_long_list(*entries):
    """Return a list with more elements than statecli lists."""
    return [*entries, *range(100)]


def test_settings_of_a_pickled_module_are_listed(tmp_path):
    """The probability of a dropout layer is a setting, also if the module is a section of the file."""
    path = str(tmp_path / "file.pt")
    torch.save({"model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.25)), "epoch": 1}, path)
    values = formats.read(path).metadata.values
    assert 0.25 in values.values()
    assert values["epoch"] == 1


TEXT = "a text of the same letters"


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), float("inf"), -float("inf"), 2**70, -(2**63) - 1, 2**5000, b"abc", {1, 2}, [0] * 100, [], {},
        "a" * 2000, torch.float32, torch.device("cuda", 0), complex(1, 2), argparse.Namespace(),
    ],
    ids=repr,
)  # fmt: skip
def test_text_equal_to_a_description_gets_quotes(tmp_path, value):
    """A text that equals the description of another value gets quotes, and a text in quotes gets a second pair."""
    values_read = []
    for _ in range(4):
        value = read_settings(tmp_path, x=value)[0]["x"]
        values_read.append(value)
    assert len(set(map(repr, values_read))) == 4
    assert values_read[3] == f"'''{values_read[0]}'''"


@pytest.mark.parametrize(
    "text", ["run", "it's", "'quoted'", "'", "''", "", "<pad>", "f (x)", "a, b", "123", "nano", "1e3"]
)
def test_unambiguous_texts_are_unchanged(tmp_path, text):
    """Texts that cannot be mistaken for another value are shown without additional quotes."""
    assert read_settings(tmp_path, x=text)[0] == {"x": text}


def test_dtypes_have_different_descriptions(tmp_path):
    """Two dtypes have different descriptions, although the pickle of a dtype has only its name."""
    assert read_settings(tmp_path, x=torch.float32)[0] == {"x": "<torch.float32>"}
    assert (
        read_settings(tmp_path, x=build_long_list(torch.float32))[0]
        != read_settings(tmp_path, x=build_long_list(torch.float16))[0]
    )


def test_empty_containers_are_settings(tmp_path):
    """An empty dict and an empty list are settings; an empty tuple is an empty list."""
    empty = collections.OrderedDict()
    actual, _ = read_settings(tmp_path, a={}, b=[], c=(), d={"e": {}}, f=empty, g=argparse.Namespace())
    assert actual == {"a": "{}", "b": "[]", "c": "[]", "d.e": "{}", "f": "{}", "g": "argparse.Namespace()"}


def test_ordinary_checkpoints_have_no_empty_settings(tmp_path):
    """A state_dict, an optimizer without state and a module (a dozen dicts of hooks) have no empty settings."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    group = torch.optim.SGD(net.parameters(), lr=0.1)
    actual, _ = read_settings(tmp_path, net=net.state_dict(), whole=net, optimizer=group.state_dict(), pickled=group)
    assert not [key for key, value in actual.items() if value in ("[]", "{}") or "of 0" in str(value)]
    assert actual["optimizer.param_groups.0.lr"] == 0.1


@pytest.mark.parametrize(
    "build_container",
    [
        lambda a, b: {1: a, "1": b},
        lambda a, b: {True: a, "True": b},
        lambda a, b: {None: a, "None": b},
        lambda a, b: {"a.b": a, "a": {"b": b}},
        lambda a, b: {"a.b.c": a, "a.b": {"c": b}, "a": {"b": {"c": "d"}}},
        lambda a, b: {(1, 2): a, "[(1, 2)]": b},
        lambda a, b: {"": {"a": a}, "a": b},
        lambda a, b: {tuple("q" * 300): a, tuple("q" * 301): b},
        lambda a, b: {2**70: a, 2**71: b},
        lambda a, b: {"(and more)": a, "b": b},
    ],
)
def test_keys_that_look_equal_are_two_settings(tmp_path, build_container):
    """Two keys that look the same are two settings, and their names do not depend on the order of the keys."""
    value = build_container("a", "b")
    setting, other = read_settings(tmp_path, x=value)[0], read_settings(tmp_path, x=dict(reversed(value.items())))[0]
    assert setting == other
    assert {"a", "b"} <= set(setting.values())
    assert read_settings(tmp_path, x=build_container("b", "a"))[0] != setting


def test_plain_paths_stay_plain(tmp_path):
    """Keys get brackets and quotes only if two keys look the same."""
    actual, _ = read_settings(tmp_path, x={1: "a", "2": "b", "c.d": "c", None: "d"})
    assert actual == {"x.1": "a", "x.2": "b", "x.c.d": "c", "x.None": "d"}


def read_digest(tmp_path, value):
    return read_settings(tmp_path, x=build_long_list(value))[0]["x"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1", 1),
        (True, 1),
        (True, "True"),
        (None, "None"),
        (b"a", "a"),
        (b"", ""),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (0.5, "0.5"),
        (255, "0xff"),
        (torch.ones(1), "tensor"),
        ({1: "a"}, {"1": "a"}),
        ({1: "a"}, {True: "a"}),
        ([1], {0: 1}),
        ([], {}),
        ([], set()),
        ({"a": 1, "b": 2}, {"a": 1, "b=i0x2": None}),
        ({"a": "1", "b": "2"}, {"a": "1['b']='2'"}),
        (["a", "b"], ["a'b"]),
        (["ab", "c"], ["a", "bc"]),
        ([["a"], "b"], [["a", "b"]]),
        ([[], []], [[[]]]),
        (argparse.Namespace(a=1), {"a": 1}),
        ({(1,) * 20: "a"}, {(2,) * 20: "a"}),
        ({2**70: "a"}, {2**70 + 1: "a"}),
        ("\ud800", "\ud801"),
        (10**30, 10**30 + 1),
        ("#" * 33, "#" * 34),
        (torch.float32, "torch.float32"),
        (collections.deque([1]), [1]),
    ],
    ids=repr,
)
def test_different_contents_have_different_digests(tmp_path, first, second):
    """The digest depends on the types, lengths and places of the values."""
    assert read_digest(tmp_path, first) != read_digest(tmp_path, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (-0.0, 0),
        (1.0, 1),
        (2, np.int64(2)),
        (1e300, int(1e300)),
        ((1, 2), [1, 2]),
        ({"a": 1}, collections.OrderedDict(a=1)),
        ([{"a": 1}] * 70, [{"a": 1} for _ in range(70)]),
        ({1: "a"}, {1.0: "a"}),
        ({(1,) * 20: "a", (2,) * 20: "b"}, {(2,) * 20: "b", (1,) * 20: "a"}),
        ({"a": 1, 1: "a", "1": 2}, {"1": 2, 1: "a", "a": 1}),
        (float("nan"), -float("nan")),
        (argparse.Namespace(a=1, b=2), argparse.Namespace(b=2, a=1)),
        ({"a"}, frozenset("a")),
        (["x" * 5000, "x" * 5000], ["x" * 5000, "".join(["x"] * 5000)]),
        (torch.ones(4, 4), torch.ones(4, 4).t()),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_equal_values_have_equal_digests(tmp_path, first, second):
    """Values that are equal in Python have equal digests, in any order and whether shared or not.

    So do a list and a tuple, and tensors with equal values.
    """
    assert read_digest(tmp_path, first) == read_digest(tmp_path, second)


def test_repeated_text_has_the_same_digest(tmp_path):
    """A long text under two names has the same digest both times."""
    actual, _ = read_settings(tmp_path, a=TEXT * 100, b=TEXT * 100)
    assert actual["a"] == actual["b"]


def build_cycle(first, second):
    """Return two dicts that contain each other."""
    first_dict, second_dict = {"n": first}, {"n": second}
    first_dict["other"], second_dict["other"] = second_dict, first_dict
    return first_dict, second_dict


def test_digest_of_a_cycle_does_not_depend_on_its_start(tmp_path):
    """Two dicts that contain each other have the same digests whichever dict is read first."""
    first, second = build_cycle(1, 2)
    setting = read_settings(tmp_path, a=build_long_list(first), b=build_long_list(second))[0]
    first, second = build_cycle(1, 2)
    assert read_settings(tmp_path, b=build_long_list(second), a=build_long_list(first))[0] == setting
    assert setting["a"] != setting["b"]
    first, second = build_cycle(1, 3)
    assert read_settings(tmp_path, a=build_long_list(first), b=build_long_list(second))[0]["a"] != setting["a"]


def test_target_of_a_cycle_changes_the_digest(tmp_path):
    """In [1, [the whole]] and [1, [itself]] an inner list refers to different lists above it, so the digests differ."""
    cyclic_list, own_list = [1], []
    cyclic_list.append([cyclic_list])
    own_list.append(own_list)
    assert read_digest(tmp_path, cyclic_list) != read_digest(tmp_path, [1, own_list])


def test_a_cycle_is_listed_once(tmp_path):
    """In a config whose nodes refer to their parents, each setting is listed by one path only."""
    first, _ = build_cycle(1, 2)
    actual, _ = read_settings(tmp_path, x=first)
    assert set(actual) == {"x.n", "x.other.n", "x.other.other"}


def test_attributes_and_arguments_are_settings(tmp_path):
    """The attributes of a dict and the constructor arguments of an object are settings."""
    pickled = {"d": DictWithAttributes(a=1), "e": ObjectWithArgument(3)}
    pickled["d"].note = "x"
    actual, _ = read_settings(tmp_path, **pickled)
    assert actual == {"d.a": 1, "d.__dict__.note": "x", "e.count": 1, "e.__args__.0": 3}


class DictWithAttributes(dict):
    """A dict with attributes."""


class ObjectWithArgument:
    """An object with a constructor argument and an attribute."""

    def __init__(self, n):
        self.n, self.count = n, 1

    def __reduce__(self):
        return ObjectWithArgument, (self.n,), {"count": 1}


def test_omitted_settings_are_one_oddity(tmp_path, monkeypatch):
    """The oddity, for which diff exits with status 2, is reported once, however many settings follow."""
    monkeypatch.setattr(settings_digest, "MAX_DIGESTED", 50)
    _, state = read_settings(tmp_path, **{f"x{n}": list(range(100)) for n in range(9)})
    assert [oddity.name for oddity in state.oddities].count("metadata-cut") == 1


def test_more_than_half_a_million_entries_are_read(tmp_path):
    """No entry is left out."""
    assert not read_settings(tmp_path, x=[1] * 500_001)[1].oddities


# Python attributes of tensors.


class Marked(torch.Tensor):
    """A subclass with its own attributes."""


def build_tensor(cls=torch.Tensor, **attributes):
    tensor = torch.ones(2) if cls is torch.Tensor else cls(torch.ones(2))
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


@pytest.mark.parametrize("cls", [torch.Tensor, torch.nn.Parameter, Marked])
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1, 1000, {"x.scale": 1}),
        ([1, {"k": 2}], [1, {"k": 3}], {"x.scale.0": 1, "x.scale.1.k": 2}),
        (None, False, {"x.scale": None}),
        ("a", 1, {"x.scale": "a"}),
    ],
    ids=["number", "nested", "none", "type"],
)
def test_attributes_of_a_tensor_are_settings(tmp_path, cls, before, after, expected):
    """pickle saves the attributes of a tensor, and a program may compute with them."""
    setting = read_settings(tmp_path, x=build_tensor(cls, scale=before))[0]
    assert setting == expected
    assert read_settings(tmp_path, x=build_tensor(cls, scale=after))[0] != setting


def test_attributes_of_tensors_in_a_long_list_are_in_its_digest(tmp_path):
    """The list and the attributes of its tensors are one setting."""
    digests = [read_settings(tmp_path, x=[torch.ones(1)] * 99 + [build_tensor(scale=n)])[0]["x"] for n in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_attributes_of_a_tensor_file_are_settings(tmp_path):
    """The tensor is the whole file."""
    torch.save(build_tensor(scale=3), tmp_path / "a.pt")
    assert formats.read(str(tmp_path / "a.pt")).metadata.values == {"scale": 3}


def test_marks_of_libraries_are_not_settings(tmp_path):
    """Attributes set by nn.Buffer, torch.compile, nested tensors and transformers are not settings."""
    compiled = torch.ones(3, 2)
    torch._dynamo.mark_dynamic(compiled, 0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    setting = read_settings(
        tmp_path, a=torch.nn.Buffer(torch.ones(2)), b=compiled, c=nested, d=torch.nn.Parameter(compiled)
    )[0]
    assert setting == {"c._ragged_idx": 1}


@pytest.mark.parametrize("cls", [torch.Tensor, torch.nn.Parameter, Marked])
def test_tensors_among_the_attributes_are_compared(tmp_path, cls, statecli):
    """Tensors among the attributes are compared by value and shape, and their names are settings."""
    tensors_by_name = {
        "one": build_tensor(cls, scale=torch.tensor([1.0])),
        "same": build_tensor(cls, scale=torch.tensor([1.0])),
        "value": build_tensor(cls, scale=torch.tensor([2.0])),
        "name": build_tensor(cls, zero=torch.tensor([1.0])),
        "none": build_tensor(cls),
        "shape": build_tensor(cls, scale=torch.ones(2)),
    }
    for name, value in tensors_by_name.items():
        torch.save({"x": value}, tmp_path / f"{name}.pt")
    codes = {name: statecli("diff", tmp_path / "one.pt", tmp_path / f"{name}.pt").code for name in tensors_by_name}
    assert codes == {"one": 0, "same": 0, "value": 1, "name": 1, "none": 1, "shape": 2}


WRAPPERS = {
    "list": lambda inner: [1, inner],
    "dict": lambda inner: {"a": {3: (inner,)}},
    "attribute": lambda inner: build_tensor(inner=inner),
    "array": lambda inner: [inner.numpy()],
    "sparse": lambda inner: [inner.to_sparse()],
}


@pytest.mark.parametrize("cls", [torch.Tensor, torch.nn.Parameter, Marked])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_tensors_inside_the_attributes_are_compared(tmp_path, statecli, cls, wrap):
    """Tensors are compared also inside lists, dicts and attributes of the attributes."""
    for name, number in {"one": 1.0, "same": 1.0, "value": 2.0}.items():
        torch.save({"x": build_tensor(cls, scale=wrap(torch.tensor([number])))}, tmp_path / f"{name}.pt")
    codes = [statecli("diff", tmp_path / "one.pt", tmp_path / f"{name}.pt").code for name in ("same", "value")]
    assert codes == [0, 1]


def test_attributes_of_all_tensors_have_a_common_limit(tmp_path, monkeypatch):
    """Attributes of all tensors have a common limit; without the limit, reading a few megabytes may take hours."""
    monkeypatch.setattr(tensor_decoder, "MAX_ENTRIES", 1000)
    shared = list(range(300))
    torch.save({"x": build_tensor(a=shared)}, tmp_path / "one.pt")
    assert formats.read(str(tmp_path / "one.pt")).tensors[0].damage is None
    torch.save({str(n): build_tensor(a=[shared]) for n in range(9)}, tmp_path / "many.pt")
    damage = formats.read(str(tmp_path / "many.pt")).tensors[-1].damage
    assert damage is not None
    assert "the attributes of all tensors together have more than 1,000 entries" in damage


def test_chain_of_parameters_in_attributes_is_read(tmp_path):
    """A chain of 40 parameters, each an attribute of the next, can be read."""
    parameter = build_tensor(torch.nn.Parameter)
    for _ in range(40):
        parameter = build_tensor(torch.nn.Parameter, previous=parameter)
    assert read_settings(tmp_path, x=parameter)[1].tensors[1].damage is None
