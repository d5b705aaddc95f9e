"""A tensor that `pickle.dump` wrote is clean if the pickle inside its storage is."""

from __future__ import annotations

import functools
import io
import os
import pickle

import pytest
import torch
from torch import nn
from torch.storage import _load_from_bytes

import statecli

from ..formats.attacks import Called


def find_rules(path, content):
    """Write the pickle, and return the rules of the audit's findings, and their messages."""
    path.write_bytes(content)
    findings = statecli.audit(str(path), no_config=True).findings
    return {finding.rule for finding in findings}, " ".join(finding.message for finding in findings)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickled_tensors_are_clean(tmp_path, protocol):
    """Each storage is a file of torch.save inside the pickle, which the audit scans."""
    content = {"w": torch.ones(3), "p": nn.Parameter(torch.ones(2)), "view": torch.arange(6).reshape(2, 3).t()}
    assert find_rules(tmp_path / "w.pkl", pickle.dumps(content, protocol)) == (set(), "")


def test_pickled_module_is_clean_but_for_its_class(tmp_path):
    """A whole module holds the same storages."""
    assert find_rules(tmp_path / "w.pkl", pickle.dumps(nn.Linear(2, 2)))[0] == {"whole-module-pickle"}


def save_legacy(content):
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


STORAGE = save_legacy(torch.ones(2).untyped_storage())
HARM = pickle.dumps(os.system, 2)
#: The pickles of the file: magic number, version, machine, storage, keys.
STARTS = [at for at in range(len(STORAGE)) if STORAGE.startswith(b"\x80\x02", at)]
LOADED_BYTES = {
    "an object that is not a storage": save_legacy({"w": torch.ones(2)}),
    "an archive": b"PK\3\4" + STORAGE,
    "a second pickle before the storage": HARM + STORAGE,
    "no file of torch": b"abcdefgh",
}
OTHER_USES = {
    **{name: Called(_load_from_bytes, (data,)) for name, data in LOADED_BYTES.items()},
    "two arguments": Called(_load_from_bytes, (STORAGE, 1)),
    "computed bytes": Called(_load_from_bytes, (Called(bytes, ([1, 2],)),)),
    "a call put off": functools.partial(_load_from_bytes, STORAGE),
    "the function as a value": [Called(_load_from_bytes, (STORAGE,)), _load_from_bytes],
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_other_uses_of_the_storage_loader_are_unsafe(tmp_path, name):
    """The function unpickles any bytes, so all other uses stay errors."""
    rules, messages = find_rules(tmp_path / "w.pkl", pickle.dumps(OTHER_USES[name]))
    assert "unsafe-global" in rules
    assert "torch.storage._load_from_bytes" in messages


def test_harm_in_the_file_of_a_storage_is_found(tmp_path):
    """torch.load reads five pickles, not only that of the storage."""
    _, _, machine, storage, keys = STARTS
    for data in (STORAGE[:machine] + HARM + STORAGE[storage:], STORAGE[:keys] + HARM + STORAGE[keys:]):
        rules, messages = find_rules(tmp_path / "w.pkl", pickle.dumps(Called(_load_from_bytes, (data,))))
        assert "unsafe-global" in rules
        assert "posix.system" in messages
