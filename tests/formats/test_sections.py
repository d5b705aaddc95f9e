"""`file#dotted.path`: any container inside a file, by its keys."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import nn

from statecli.core.errors import UnreadableError
from statecli.core.model_state import Kind
from statecli.targets import load


@pytest.fixture
def read_section(tmp_path):
    """Save an object and return the state of one section."""

    def read(checkpoint, section, **options):
        path = str(tmp_path / "file.pt")
        torch.save(checkpoint, path, **options)
        return load.read_checkpoint(f"{path}#{section}")

    return read


def weights(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2).state_dict()


def names(state):
    return [(tensor.section, tensor.fqn) for tensor in state.tensors]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("checkpoint", "section"),
    [
        ({"a": {"net": weights(), "ema": weights(1)}, "step": 1}, "a.net"),
        ({"state": {"model": weights(), "optimizer": {}}}, "state.model"),
        ({"x": {"y": [1, weights()]}}, "x.y.1"),
        ({"x": {3: {None: weights()}}}, "x.3.None"),
        ({"a.b": {"c.d": weights()}, "a": {"q": torch.ones(1)}}, "a.b.c.d"),
        ({"model": {"inner": weights(), "w": torch.ones(1)}}, "model.inner"),
    ],
    ids=["one of two", "below an unknown word", "in a list", "odd keys", "keys with dots", "inside a section"],
)
def test_path_selects_the_tensors_of_a_container(read_section, checkpoint, section, legacy):
    """The state has only the tensors of the container, under their names in the container."""
    state = read_section(checkpoint, section, _use_new_zipfile_serialization=not legacy)
    assert names(state) == [(section, "weight"), (section, "bias")]
    assert all(tensor.tied_to == () for tensor in state.tensors)
    assert [tensor.section for tensor in state.state_dicts if tensor.section in state.sections] == [section]


def test_container_of_models_has_a_section_for_each(read_section):
    """`#a` of {"a": {"net": …, "ema": …}} gives two sections, as for a file with nothing else."""
    state = read_section({"a": {"net": weights(), "ema": weights(1)}, "step": 1}, "a")
    assert state.sections == ("a.net", "a.ema")


def test_section_of_an_optimizer_has_no_parameters(read_section):
    """`#optimizer.state` has no parameters."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    state = read_section({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "optimizer.state")
    assert {tensor.kind for tensor in state.tensors} == {Kind.OPTIMIZER}
    assert len(state.tensors) == 6


@pytest.mark.parametrize("section", ["a.nothing", "a.net.weight", "a.args", "net", "a.net.", ".a"])
def test_path_without_a_container_of_tensors_is_refused(read_section, section):
    """A tensor is not a container, and a container without tensors is not a section."""
    with pytest.raises(UnreadableError, match="has no section"):
        read_section({"a": {"net": weights(), "args": {"lr": 1}}}, section)


KEYS = st.text("ab.1", min_size=1, max_size=3) | st.integers(0, 3)


@settings(max_examples=60, deadline=None)
@example({1: {"1": "leaf"}, "1": "leaf"})
@given(st.recursive(st.just("leaf"), lambda below: st.dictionaries(KEYS, below, min_size=1, max_size=3), max_leaves=8))
def test_equal_paths_select_the_tensors_of_all_containers(tmp_path_factory, tree):
    """For any nested keys, the section has as many tensors as all containers with the name of the path."""
    if tree == "leaf":
        return
    count = iter(range(1000))

    def build_node(node):
        return torch.tensor(next(count)) if node == "leaf" else {key: build_node(child) for key, child in node.items()}

    checkpoint = build_node(tree)
    path = str(tmp_path_factory.mktemp("sections") / "file.pt")
    torch.save(checkpoint, path)
    below, leaves = {}, {}
    stack = [("", checkpoint)]
    while stack:
        section, node = stack.pop()
        if isinstance(node, dict):
            below.setdefault(section, []).append(len(torch.utils._pytree.tree_leaves(node)))
            leaves.setdefault(section, set()).update(map(int, torch.utils._pytree.tree_leaves(node)))
            stack += [(f"{section}.{key}" if section else str(key), child) for key, child in node.items()]
    for section, counts in below.items():
        if section:
            # "1." is a separate key, as is the empty key below "1": keys with the same path are a single section.
            alike = set().union(*(numbers for name, numbers in leaves.items() if f"{name}.".startswith(f"{section}.")))
            assert len(load.read_checkpoint(f"{path}#{section}").tensors) in (*counts, sum(counts), len(alike))


def test_diff_of_a_section_ignores_other_sections(statecli, tmp_path):
    """Two files that differ in another section are identical in this section; a change in a section is reported."""
    a, b = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    torch.save({"a": {"net": weights(), "ema": weights()}}, a)
    torch.save({"a": {"net": weights(), "ema": weights(1)}}, b)
    assert statecli("diff", f"{a}#a.net", f"{b}#a.net").out == "identical: 2 tensors, 32 B: exit status 0\n"
    changed = statecli("diff", f"{a}#a.ema", f"{b}#a.ema", "-f", "json")
    assert changed.code == 1
    assert [change["fqn"] for change in changed.json["changes"]] == ["weight", "bias"]


def test_diff_compares_a_class_with_a_section(statecli, tmp_path):
    """The section has its own names, without the path."""
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef Net():\n    return nn.Linear(3, 2)\n")
    torch.save({"state": {"model": weights()}}, tmp_path / "file.pt")
    result = statecli("diff", f"{tmp_path / 'net.py'}:Net", f"{tmp_path / 'file.pt'}#state.model")
    assert (result.code, result.err) == (0, "")
