"""What stands beside the tensors: told as numbers and words, or as a digest, and never passed over."""

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


def settings(tmp_path, **beside):
    path = str(tmp_path / "file.pt")
    torch.save({"model": {"a.weight": torch.ones(2)}, **beside}, path)
    state = formats.read(path)
    return dict(state.metadata), state


PLAIN = {"epoch": 3, "name": "run", "best": 0.5, "done": True, "none": None}


def test_plain_ones_are_themselves(tmp_path):
    """Numbers, text, bools and None; containers by dotted path."""
    found, _ = settings(tmp_path, **PLAIN, args={"lr": 0.1, "betas": (0.9, 0.99)})
    assert found == {**PLAIN, "args.lr": 0.1, "args.betas.0": 0.9, "args.betas.1": 0.99}


@pytest.mark.parametrize(
    ("one", "two", "told"),
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
def test_whatever_it_is_two_of_them_can_be_told_apart(tmp_path, one, two, told):
    """A word says what it is, and no two contents look the same."""
    first, second = settings(tmp_path, x=one)[0]["x"], settings(tmp_path, x=two)[0]["x"]
    assert first != second
    assert first == settings(tmp_path, x=one)[0]["x"]
    assert first == told if not isinstance(told, str) else told in str(first)


def test_attributes_of_objects_are_settings(tmp_path):
    """argparse.Namespace holds the arguments of many a run."""
    found, _ = settings(tmp_path, args=argparse.Namespace(lr=0.1, layers=[1, 2]))
    assert found == {"args.lr": 0.1, "args.layers.0": 1, "args.layers.1": 2}


def test_numbers_beside_a_models_tensors(tmp_path):
    """A dict of tensors may hold a scale or an extra state as well."""
    path = str(tmp_path / "file.pt")
    torch.save({"model": {"a.weight": torch.ones(2), "scale": 1.5, "a._extra_state": {"v": 2}}}, path)
    assert formats.read(path).metadata == {"model.scale": 1.5, "model.a._extra_state.v": 2}


def test_two_paths_that_read_the_same_stay_apart(tmp_path):
    """{'a.b': 1, 'a': {'b': 2}} has two entries."""
    found, _ = settings(tmp_path, **{"a.b": 1, "a": {"b": 2}})
    assert sorted(found.values()) == [1, 2]


def test_a_container_that_is_shared_is_listed_each_time(tmp_path):
    """One dict under two names is two equal dicts."""
    shared = {"lr": 1}
    found, _ = settings(tmp_path, a=shared, b=shared)
    assert found == {"a.lr": 1, "b.lr": 1} == settings(tmp_path, a={"lr": 1}, b={"lr": 1})[0]


def test_deep_ones_are_digested(tmp_path):
    """Below eight levels the rest is one digest, and differs where the depth does."""

    def nested(value):
        for _ in range(20):
            value = {"d": value}
        return value

    one, two = settings(tmp_path, x=nested(1))[0], settings(tmp_path, x=nested(2))[0]
    assert one != two
    assert len(one) == 1


def test_the_order_of_a_set_means_nothing(tmp_path):
    """Python orders text in a set by a hash that is another in each process."""
    state = "{'w': torch.ones(1), 's': set('abcdefgh'), 'f': {frozenset('xyz')}}"
    code = f"import sys, torch; torch.save({state}, sys.argv[1])"
    found = []
    for seed in ("1", "2"):
        path = str(tmp_path / f"{seed}.pt")
        subprocess.run([sys.executable, "-c", code, path], check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        found.append(formats.read(path).metadata)
    assert found[0] == found[1]


def test_sharing_without_end_ends(tmp_path):
    """Forty dicts that each hold the next twice have 2 ** 40 paths."""
    node = {"v": 1}
    for _ in range(40):
        node = {"a": node, "b": node}
    found, _ = settings(tmp_path, x=node)
    assert len(found) < 1000


def test_a_container_in_itself_ends(tmp_path):
    """A list that holds itself is told once."""
    loop = [1]
    loop.append(loop)
    assert settings(tmp_path, x=loop)[0]


def test_many_are_cut_to_a_digest_that_tells_them_apart(tmp_path):
    """Beyond twenty thousand the rest stands as one digest of all."""
    one = settings(tmp_path, x={str(n): n for n in range(30_000)})[0]
    two = settings(tmp_path, x={str(n): n + (n == 29_999) for n in range(30_000)})[0]
    assert len(one) == 20_001
    assert one["(and more)"] != two["(and more)"]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", ">f4", "i8", "u2", "b1", "c16"])
def test_arrays_inside_the_pickle_have_values(tmp_path, dtype, order):
    """numpy arrays lie in the pickle itself; their elements are read from there, whatever their order."""
    pytest.importorskip("numpy")
    from statecli.values.read import all_values

    array = np.asarray(np.arange(6).reshape(2, 3) % 2, dtype=dtype, order=order)
    path = str(tmp_path / "array.pt")
    torch.save({"a": array, "w": torch.ones(1)}, path)
    row = next(t for t in formats.read(path).tensors if t.fqn == "a")
    assert row.shape == (2, 3)
    assert all_values(row.data).tolist() == array.astype(array.dtype.newbyteorder("=")).reshape(-1).tolist()


def test_arrays_without_numbers_are_bytes_to_compare(tmp_path):
    """Text and records have a row and content."""
    path = str(tmp_path / "array.pt")
    torch.save({"a": np.array(["x", "yz"]), "w": torch.ones(1)}, path)
    row = next(t for t in formats.read(path).tensors if t.fqn == "a")
    assert row.dtype.startswith("numpy")
    assert row.data.inline == np.array(["x", "yz"]).tobytes()


def test_an_ordered_dict_of_numbers(tmp_path):
    """collections.OrderedDict and defaultdict are containers like any."""
    found, _ = settings(tmp_path, o=collections.OrderedDict(a=1), d=collections.defaultdict(int, b=2))
    assert found == {"o.a": 1, "d.b": 2}


def long(*entries):
    """A list that is too long to be listed."""
    return [*entries, *range(100)]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([{"a": 1}] * 70, [{"a": 1} for _ in range(70)]),
        (long({"a": 1, "b": 2}), long({"b": 2, "a": 1})),
        (long({"a": 1}), long(collections.OrderedDict(a=1))),
        (long(1, 2), long(1.0, np.int64(2))),
        (long((1, 2)), long([1, 2])),
        (long(torch.ones(4, 4)), long(torch.ones(4, 4).t())),
    ],
    ids=["shared", "order", "ordered", "numbers", "tuple", "tensors"],
)
def test_equal_contents_have_equal_digests(tmp_path, one, two):
    """However they were put together; what tensors hold is compared as such."""
    assert settings(tmp_path, x=one)[0] == settings(tmp_path, x=two)[0]


def test_what_is_not_read_is_said(tmp_path, monkeypatch):
    """Beyond the budget of digests an oddity says so, which a diff ends 2 for."""
    from statecli.formats import _digests

    monkeypatch.setattr(_digests, "MAX_DIGESTED", 50)
    _, state = settings(tmp_path, x=list(range(200)))
    assert "metadata-cut" in [odd.name for odd in state.oddities]


def test_settings_of_a_module_in_a_section(tmp_path):
    """The probability of a dropout is a setting, wherever its module is."""
    path = str(tmp_path / "file.pt")
    torch.save({"model": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.25)), "epoch": 1}, path)
    found = formats.read(path).metadata
    assert 0.25 in found.values()
    assert found["epoch"] == 1
