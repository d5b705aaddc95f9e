"""Tensors that modules unpickle are found under every spelling of their key, and in every mapping.

TransformerEngine unpickles the bytes of the tensors `*._extra_state` in load_state_dict. A loader looks the key up in
the mapping that torch.load returns; the audit must have read the tensor under the key.
"""

from __future__ import annotations

import copyreg
import datetime
import operator
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import ChainMap, Counter, OrderedDict, UserDict, UserString, defaultdict
from pathlib import Path

import numpy
import pytest
import torch
from torch.jit._pickle import restore_type_tag
from torch.torch_version import TorchVersion

from statecli.pickles.python2_names import MODULES

from ..formats.attacks import Call, build, build_pickle, records
from ..formats.torch_archives import read_archive, write_archive

KEY = "fc._extra_state"
STATE = torch.tensor([*b"N0cposix\nsystem\n(Vid\ntR."], dtype=torch.uint8)


class UserStringCall(Call):
    """A call with a hash in this process, so that the call can be a dictionary key."""

    def __hash__(self):
        return hash(KEY)


PAIRS = [["w", torch.ones(2)], [KEY, STATE]]
STATES = {
    "a text": {"w": torch.ones(2), KEY: STATE},
    "a text of numpy": {"w": torch.ones(2), numpy.str_(KEY): STATE},
    "a scalar of numpy": {"w": torch.ones(2), numpy.array(KEY)[()]: STATE},
    "a version of torch": {"w": torch.ones(2), TorchVersion(KEY): STATE},
    "a call of str": {"w": torch.ones(2), UserStringCall(str, KEY): STATE},
    "a call of numpy.str_": {"w": torch.ones(2), UserStringCall(numpy.str_, KEY): STATE},
    "a user's text": {"w": torch.ones(2), UserString(KEY): STATE},
    "a text by copyreg": {"w": torch.ones(2), UserStringCall(copyreg._reconstructor, TorchVersion, str, KEY): STATE},
    "a tagged text": {"w": torch.ones(2), UserStringCall(restore_type_tag, KEY, "str"): STATE},
    "an element of a list": {"w": torch.ones(2), UserStringCall(operator.getitem, [KEY], 0): STATE},
    "an OrderedDict": OrderedDict(PAIRS),
    "a call of OrderedDict": Call(OrderedDict, PAIRS),
    "a call of dict": Call(dict, PAIRS),
    "a defaultdict": Call(defaultdict, None, PAIRS),
    "a Counter": Call(Counter, dict(PAIRS)),
    "a user's dict": UserDict(PAIRS),
    "a call of UserDict": Call(UserDict, PAIRS),
    "a dict by copyreg": Call(copyreg._reconstructor, dict, dict, PAIRS),
    "a chain": ChainMap(dict(PAIRS)),
    "a call of a chain": Call(ChainMap, {}, Call(OrderedDict, PAIRS)),
    "a chain of a call of UserDict": ChainMap({}, Call(UserDict, PAIRS)),
    "a pair that is a dict": Call(OrderedDict, [PAIRS[0], {KEY: 0, STATE: 0}]),
    "a dict of a UserDict": Call(OrderedDict, Call(UserDict, PAIRS)),
}


#: States with a key that the audit cannot compute.
NOT_READ = ("a user's text", "a text by copyreg", "a tagged text")


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("file", ["a.pt", "custom_checkpoint_0.pkl"])
def test_extra_state_is_audited_under_every_spelling_of_its_key(name, file, tmp_path, statecli):
    """The bytes under the key are a pickle with code; the audit reports an error or does not read the file."""
    torch.save(STATES[name], tmp_path / file)
    loaded = torch.load(tmp_path / file, weights_only=False)
    assert torch.equal(loaded[KEY], STATE)
    result = statecli("audit", tmp_path / file, "--no-config")
    assert result.code == (2 if name in NOT_READ else 1), result.out


def test_omegaconf_node_as_a_key_fails(tmp_path, statecli):
    """A StringNode hashes and compares like the text in its state. omegaconf is not installed here."""
    node = b"comegaconf.nodes\nStringNode\n)\x81}X\x04\x00\x00\x00_valX\x0f\x00\x00\x00fc._extra_statesb"
    (tmp_path / "a.pt").write_bytes(build(records(build_pickle(b"}" + node + b"K\x01s"))))
    result = statecli("audit", tmp_path / "a.pt", "--no-config")
    assert result.code == 2
    assert "a dictionary key is the result of calling omegaconf.nodes.StringNode" in result.out + result.err


def test_ordinary_keys_are_clean(tmp_path, statecli):
    """The keys are numpy texts, numbers, types and tuples."""
    keys = (numpy.str_("a"), numpy.int64(3), 4, torch.float32, ("x", 1), None, 1.5, numpy.datetime64("2026-01-01"))
    keys += (torch.device("cpu"), Path("a"), datetime.date(2026, 1, 1), numpy.dtype("f4"), frozenset([1]), 2j)
    torch.save({"w": torch.ones(2), "settings": dict.fromkeys(keys, 1)}, tmp_path / "a.pt")
    assert statecli("audit", tmp_path / "a.pt", "--no-config", "--ignore", "needs-weights-only-false").code == 0


def rewrite_pickle(path, replace):
    """Write the archive again as torch does, with a changed data.pkl."""
    records = read_archive(path)
    write_archive({**records, "data.pkl": replace(records["data.pkl"])}, str(path))


@pytest.mark.parametrize("module", ["UserDict", "UserList", "UserString"])
def test_containers_with_python_2_names_are_audited(module, tmp_path, statecli):
    """Python and torch map each name in these Python 2 modules to `collections`, also with weights_only."""
    path = tmp_path / "a.pt"
    torch.save(Call(OrderedDict, PAIRS), path)
    rewrite_pickle(path, lambda data: data.replace(b"ccollections\nOrderedDict", f"c{module}\nOrderedDict".encode()))
    assert torch.equal(torch.load(path)[KEY], STATE)
    result = statecli("audit", path, "--no-config")
    assert result.code == 1
    assert "posix.system" in result.out


@pytest.mark.parametrize("name", ["unicode", "basestring"])
def test_texts_with_python_2_names_are_audited(name, tmp_path, statecli):
    """Python loads both names as `str`."""
    path = tmp_path / "custom_checkpoint_0.pkl"
    torch.save(STATES["a call of str"], path)
    rewrite_pickle(path, lambda data: data.replace(b"c__builtin__\nunicode", f"c__builtin__\n{name}".encode()))
    assert torch.equal(torch.load(path, weights_only=False)[KEY], STATE)
    assert statecli("audit", path, "--no-config").code == 1


def test_python_2_modules_equal_the_table_of_python():
    """statecli copies the table, because importing Python's own table would slow down each command."""
    assert {module for module, _ in NAME_MAPPING} | set(IMPORT_MAPPING) == MODULES


@pytest.mark.parametrize("zipped", [True, False])
def test_bytes_of_a_storage_on_meta_are_audited(zipped, tmp_path, statecli):
    """torch.load with a map_location reads the record of the storage and ignores the location in the file."""
    torch.save({"w": torch.ones(2), KEY: STATE}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    data = (tmp_path / "a.pt").read_bytes().replace(b"X\3\0\0\0cpu", b"X\4\0\0\0meta")
    if zipped:
        rewrite_pickle(tmp_path / "a.pt", lambda pickle: pickle.replace(b"X\3\0\0\0cpu", b"X\4\0\0\0meta"))
    else:
        (tmp_path / "a.pt").write_bytes(data)
    assert torch.equal(torch.load(tmp_path / "a.pt", map_location="cpu")[KEY], STATE)
    result = statecli("audit", tmp_path / "a.pt", "--no-config")
    assert result.code == 1
    assert "posix.system" in result.out
