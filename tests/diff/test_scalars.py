"""Numbers and words beside the tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from statecli.diff import Request, compare, scalars
from statecli.diff.result import ScalarChange, Status
from statecli.state import Kind, ModelState

from .conftest import notes

W = {"w": torch.arange(3.0)}


def between(before: dict, after: dict, formats: tuple[str, str] = ("torch-zip", "torch-zip"), **more) -> list:
    """The scalars that differ, and the notes, of two states that hold nothing else."""
    states = [
        ModelState(n, format, (), metadata=m) for n, format, m in zip("ab", formats, (before, after), strict=True)
    ]
    found, notes = scalars.changed_scalars(*states, more.get("cut", (None, None)), more.get("wanted", lambda _: True))
    return [*found, *notes]


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@given(st.dictionaries(st.sampled_from("abcd"), VALUES), st.dictionaries(st.sampled_from("abcd"), VALUES))
def test_every_difference_once(before, after):
    """Added, removed and changed keys, each once; NaN is no difference from itself."""

    def same(one, two):
        if isinstance(one, bool) or isinstance(two, bool):
            return one is two
        return one == two or (isinstance(one, float) and isinstance(two, float) and math.isnan(one) and math.isnan(two))

    expected = {key: Status.REMOVED for key in before if key not in after}
    expected |= {key: Status.ADDED for key in after if key not in before}
    expected |= {key: Status.CHANGED for key in before if key in after and not same(before[key], after[key])}
    found = between(before, after)
    assert {one.key: one.status for one in found} == expected
    assert len(found) == len(expected)
    assert all((one.before, one.after) == (before.get(one.key), after.get(one.key)) for one in found)


def test_a_missing_entry_is_not_null():
    """None that was there, and none that was, are two things."""
    assert between({"a": None}, {}) == [ScalarChange("a", Status.REMOVED, None, None)]
    assert between({"a": None}, {"a": None}) == []


def test_nan_in_a_file(diff):
    """A loss of NaN is the same on both sides, and infinity another one."""
    assert not diff({**W, "loss": math.nan}, {**W, "loss": math.nan}).scalars
    assert [one.key for one in diff({**W, "loss": math.nan}, {**W, "loss": math.inf}).scalars] == ["loss"]


def test_metadata_of_safetensors(save, tmp_path):
    """`__metadata__` is compared between two files of the format."""
    for name, metadata in (("a", {"format": "pt", "run": "1"}), ("b", {"format": "pt", "run": "2"}), ("c", None)):
        save_file(W, tmp_path / f"{name}.safetensors", metadata)
    paths = {name: str(tmp_path / f"{name}.safetensors") for name in "abc"}
    assert compare(Request(paths["a"], paths["b"])).scalars == (ScalarChange("run", Status.CHANGED, "1", "2"),)
    assert {one.key for one in compare(Request(paths["a"], paths["c"])).scalars} == {"format", "run"}


def test_what_only_a_format_records(save, tmp_path):
    """`format: pt` beside a .pt is no difference, and said; another entry is one."""
    save_file(W, tmp_path / "a.safetensors", {"format": "pt"})
    save_file(W, tmp_path / "b.safetensors", {"format": "pt", "run": "1"})
    one = save(W, "c.pt")
    same = compare(Request(str(tmp_path / "a.safetensors"), one))
    assert (same.scalars, same.findings) == ((), ())
    assert "format-metadata" in notes(same)
    assert [s.key for s in compare(Request(one, str(tmp_path / "b.safetensors"))).scalars] == ["run"]


@pytest.mark.parametrize("key", ["total_size", "total_parameters"])
def test_what_only_an_index_records(key):
    """The sums that an index of shards holds have no place in a single file; between two indices they count."""
    formats = ("sharded safetensors", "safetensors")
    assert [note.name for note in between({key: 5}, {}, formats)] == ["format-metadata"]
    assert [note.name for note in between({}, {key: 5}, formats[::-1])] == ["format-metadata"]
    assert [one.status for one in between({key: 5}, {key: 6}, (formats[0], formats[0]))] == [Status.CHANGED]


def test_text_of_numbers():
    """safetensors holds nothing but text: against another format, 3 is "3"; within one format it is not."""
    assert between({"epoch": 3}, {"epoch": "3"}, ("torch-zip", "safetensors")) == []
    assert len(between({"epoch": 3}, {"epoch": "4"}, ("torch-zip", "safetensors"))) == 1
    assert len(between({"epoch": 3}, {"epoch": "3"})) == 1


def test_a_section_has_its_own():
    """Of `train.ckpt#optimizer` only what lies below it counts, by its path from there."""
    before = {"epoch": 1, "optimizer.lr": 0.1, "optimizer.eps": 1}
    after = {"epoch": 2, "optim.lr": 0.2, "optim.eps": 1}
    assert between(before, after, cut=("optimizer", "optim")) == [ScalarChange("lr", Status.CHANGED, 0.1, 0.2)]


def test_filters(diff):
    """The globs are of their paths too; --kind asks for tensors."""
    before, after = {**W, "epoch": 1, "lr": 0.1}, {**W, "epoch": 2, "lr": 0.2}
    assert [one.key for one in diff(before, after, exclude=("epoch",)).scalars] == ["lr"]
    assert not diff(before, after, include=("w",)).scalars
    assert not diff(before, after, kind=(Kind.PARAMETER,)).scalars


def test_in_words():
    """One line each."""
    found = [ScalarChange("a", Status.ADDED, None, 1), ScalarChange("b", Status.REMOVED, "x", None)]
    assert [scalars.described(one) for one in found] == ["a: added: 1", "b: removed: 'x'"]
    assert scalars.described(ScalarChange("lr", Status.CHANGED, 0.1, 0.2)) == "lr: 0.1 → 0.2"


def test_settings_of_paired_sections(diff):
    """`optimizer.param_groups` against `optimizer_states.0.param_groups` of another framework's layout."""
    group = {"lr": 0.1, "params": [0]}
    moments = {0: {"exp_avg": torch.ones(2, 2)}}
    one = {"model": {"a.w": torch.ones(2, 2)}, "optimizer": {"state": moments, "param_groups": [group]}}
    two = {"model": {"a.w": torch.ones(2, 2)}, "optim": {"state": moments, "param_groups": [{**group, "lr": 0.2}]}}
    found = diff(one, two)
    assert [(s.key, s.before, s.after) for s in found.scalars] == [("optim.param_groups.0.lr", 0.1, 0.2)]


def test_arrays_are_compared_by_value(diff):
    """numpy arrays beside the model: equal ones are identical, others are told."""
    import numpy as np

    state = {"model": {"a.w": torch.ones(2)}, "mean": np.arange(3.0)}
    assert not diff(state, state).findings
    found = diff(state, {**state, "mean": np.array([0.0, 1.0, 5.0])})
    assert [(f.rule, f.fqn) for f in found.findings] == [("changed", "mean")]
    assert next(c for c in found.changes if c.fqn == "mean").values.max_abs == 3
