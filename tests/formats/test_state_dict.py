"""Contents of a section for load_state_dict besides its tensors: keys of other values, `_metadata`."""

from __future__ import annotations

import json
from collections import OrderedDict

import torch
from torch import nn

from statecli import formats
from statecli.core.model_state import StateDict


def read(path, checkpoint, **options):
    torch.save(checkpoint, path, **options)
    return formats.read(str(path))


def test_metadata_equals_that_of_torch(tmp_path):
    """The `_metadata` of `state_dict()` (a record for each module) is read unchanged from either container."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.utils.spectral_norm(nn.Linear(2, 2)), nn.MultiheadAttention(2, 1))
    state = net.state_dict()
    for zipped in (True, False):
        (actual,) = read(
            tmp_path / "a.pt", {"epoch": 1, "model": state}, _use_new_zipfile_serialization=zipped
        ).state_dicts
        assert actual == StateDict("model", dict(state._metadata), keys=("model",))
        assert actual.metadata["1"]["spectral_norm"] == {"weight.version": 1}


def test_plain_dict_has_no_metadata(tmp_path):
    """A missing `_metadata` is not an empty `_metadata`: modules check whether their version is recorded."""
    assert read(tmp_path / "a.pt", {"w": torch.ones(1)}).state_dicts == (StateDict("model", keys=()),)


def test_keys_of_other_values_are_listed(tmp_path):
    """Keys of numbers and of containers with tensors inside are listed in the order of the file."""
    state = {"a": 3, "w": torch.ones(1), "b": {"c": torch.ones(1)}, "d": None}
    (actual,) = read(tmp_path / "a.pt", state).state_dicts
    assert (actual.others, actual.holders) == (("a", "b", "d"), ("b",))


def test_pickled_module_has_no_keys_or_metadata(tmp_path):
    """The pickle of a module has neither versions nor extra states."""
    assert read(tmp_path / "a.pt", nn.Linear(1, 1)).state_dicts == (StateDict("model", is_module=True, keys=()),)


def test_metadata_of_another_type_is_reported(tmp_path):
    """Metadata that is not a number, a text or a dict of them is left out and reported as an oddity."""
    state = OrderedDict(w=torch.ones(1))
    state._metadata = {"": {"version": 1, "shape": torch.Size([1])}, "a": 3}
    actual_state = read(tmp_path / "a.pt", state)
    assert actual_state.state_dicts[0].metadata == {"": {"version": 1}}
    assert [oddity.message for oddity in actual_state.oddities if oddity.name == "state-dict-metadata"]


def test_shards_have_no_metadata(tmp_path):
    """Shards become one dict without `_metadata`; the keys of other values of all shards are listed."""
    net = nn.Linear(1, 1)
    for n, name in enumerate(("weight", "bias")):
        state = net.state_dict()
        state[f"extra{n}"] = n
        del state["bias" if name == "weight" else "weight"]
        torch.save(state, tmp_path / f"pytorch_model-{n}.bin")
    names = {"weight": "pytorch_model-0.bin", "bias": "pytorch_model-1.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (actual,) = formats.read(str(index)).state_dicts
    assert actual == StateDict("model", None, ("extra0", "extra1"), keys=())
