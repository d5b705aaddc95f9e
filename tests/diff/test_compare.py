"""Compare two targets end to end: equal models are identical, and each single mutation alone is reported."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file, save_model
from torch import nn

from statecli.commands.diff import run
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Field, Status
from statecli.commands.diff.run import compare_targets
from statecli.core.errors import NothingMatched, UnreadableError
from statecli.core.model_state import Kind
from statecli.core.selection import Selection
from statecli.values import compiled_kernel, plain_bytes
from statecli.values.delta import CompareOptions
from statecli.workers import pool

from .conftest import list_findings, list_notes, map_changes


class Net(nn.Module):
    """Model with parameters, statistics, a tie and a buffer that is not in state_dict()."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)


def build_training_checkpoint(net, epoch=3):
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}


def is_clean(result):
    """Return True if no result makes statecli exit with status 1 or 2."""
    return (result.findings, result.scalars, result.broken) == ((), (), ())


# --- the same ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build_content",
    [lambda net: net.state_dict(), build_training_checkpoint, lambda net: net],
    ids=["dict", "ckpt", "module"],
)
def test_diff_of_a_file_with_itself_is_empty(build_content, diff):
    """diff(A, A) is empty for a state_dict, a training checkpoint and a pickled module."""
    content = build_content(Net())
    result = diff(content, content)
    assert result.changes
    assert not map_changes(result)
    assert is_clean(result)


@pytest.mark.parametrize("zipped", [True, False])
def test_same_model_in_two_formats_is_identical(zipped, tmp_path):
    """`.pt` and `.safetensors` of one model are identical in both directions, with a tie that safetensors drops."""
    net = Net()
    torch.save(net.state_dict(), tmp_path / "net.pt", _use_new_zipfile_serialization=zipped)
    save_model(net, str(tmp_path / "net.safetensors"), metadata={"format": "pt"})
    paths = str(tmp_path / "net.pt"), str(tmp_path / "net.safetensors")
    for before, after in (paths, paths[::-1]):
        diff = compare_targets(Request(before, after))
        assert {change.status for change in diff.changes} == {Status.IDENTICAL}
        assert len(diff.changes) == 7
        assert is_clean(diff)


def test_dropped_tie_is_compared_with_the_kept_name(diff):
    """A name that safetensors drops is not removed if a tied name is kept; the values of the tensor are compared."""
    state = Net().state_dict()
    untied_state = {name: tensor.clone() for name, tensor in state.items() if name != "head.weight"}
    result = diff(state, untied_state, names=("a.pt", "b.safetensors"))
    assert not map_changes(result)
    assert "tied-entry-left-out" in list_notes(result)
    assert len(result.changes) == len(state)
    untied_state["embed.weight"][0, 0] += 1
    assert set(map_changes(diff(state, untied_state, names=("a.pt", "b.safetensors")))) == {
        "embed.weight",
        "head.weight",
    }


def test_a_dropped_name_that_was_not_tied_is_removed(diff):
    """Equal values are not a tie: a dropped name without a tie is removed."""
    actual_diff = diff({"a": torch.ones(3), "b": torch.ones(3)}, {"a": torch.ones(3)}, names=("a.pt", "b.safetensors"))
    assert list_findings(actual_diff) == [("removed", "b")]


# --- each mutation -------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES += [torch.complex64]


@st.composite
def draw_states(draw):
    """Draw distinct tensors of random dtypes, shapes and strides; no tensor is constant."""
    state = {}
    for n in range(draw(st.integers(2, 5))):
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        count = torch.Size(shape).numel()
        name = ".".join([*draw(st.lists(st.sampled_from(["a", "b", "model", "0"]), max_size=2)), f"w{n}"])
        numbers = torch.arange(count) + 10 * n + 1
        numbers[0] = 1 if count > 1 else numbers[0]  # rounded to eight bits, neighbours may be one number
        tensor = numbers.to(dtype).reshape(shape)
        state[name] = tensor.transpose(0, -1) if draw(st.booleans()) else tensor
    return state


def mutate(draw, state):
    """Return a changed copy, the changed name and the expected status and fields."""
    name = draw(st.sampled_from(sorted(state)))
    after = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}
    mutation = draw(st.sampled_from(["element", "dtype", "shape", "drop", "add", "rename", "tie"]))
    if mutation == "element":
        after[name].view(-1)[draw(st.integers(0, after[name].numel() - 1))].zero_()
        return after, name, (Status.CHANGED, (Field.VALUES,))
    if mutation == "dtype":
        real_part = after[name].real if after[name].is_complex() else after[name]
        after[name] = real_part.float() if real_part.dtype in (torch.float64, torch.int64) else real_part.double()
        return after, name, (Status.CHANGED, (Field.DTYPE,))
    if mutation == "shape":
        after[name] = after[name][None]
        return after, name, (Status.CHANGED, (Field.SHAPE,))
    if mutation == "drop":
        del after[name]
        return after, name, (Status.REMOVED, ())
    if mutation == "rename" and state[name].numel() > 1:
        after["other.name"] = after.pop(name)
        return after, "other.name", (Status.RENAMED, ())
    if mutation == "tie":
        flat = torch.stack([state[name], state[name]])
        state["twin"], after["twin"] = flat[1].clone(), flat[1]
        after[name] = flat[0]
        return after, (name, "twin"), (Status.CHANGED, (Field.TYING,))
    after["added"] = torch.arange(7.0)
    return after, "added", (Status.ADDED, ())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_single_mutation_is_found_exactly(data, diff):
    """Only the mutation of one element, dtype, shape, drop, add, rename or tie of a random state is reported."""
    state = data.draw(draw_states())
    after, name, expected = mutate(data.draw, state)
    formats = ("a.pt", "b.pt")
    if Field.TYING not in expected[1]:
        formats = data.draw(
            st.tuples(*[st.sampled_from([f"{x}.pt", f"{x}.legacy.pt", f"{x}.safetensors"]) for x in "ab"])
        )
    actual = map_changes(diff(state, after, names=formats))
    names = name if isinstance(name, tuple) else (name,)
    assert {fqn: (change.status, change.fields) for fqn, change in actual.items()} == dict.fromkeys(names, expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw_states(), draw_states())
def test_swapped_sides_swap_added_and_removed(diff, first, second):
    """Swapping the sides swaps added with removed and keeps everything else."""
    forward_diff, reverse_diff = diff(first, second), diff(second, first)
    swap = {Status.ADDED: Status.REMOVED, Status.REMOVED: Status.ADDED}
    listed_changes = {(frozenset({c.fqn, c.renamed_from or c.fqn}), c.status, c.fields) for c in forward_diff.changes}
    assert listed_changes == {
        (frozenset({c.fqn, c.renamed_from or c.fqn}), swap.get(c.status, c.status), c.fields)
        for c in reverse_diff.changes
    }


def test_diff_lists_each_tensor_once_in_the_order_of_after(diff):
    """Tensors are in the order of after, and a removed tensor follows its predecessor in before."""
    before = {name: torch.arange(4.0) + n for n, name in enumerate("abcde")}
    after = {name: before[name] for name in "eca"} | {"new": torch.zeros(2)}
    result = diff(before, after)
    assert [(c.fqn, c.status.value) for c in result.changes] == [
        ("e", "identical"),
        ("c", "identical"),
        ("d", "removed"),
        ("a", "identical"),
        ("b", "removed"),
        ("new", "added"),
    ]


# --- bytes read ----------------------------------------------------------------------------------------------------


def test_metadata_only_reads_no_values(diff):
    """With --metadata-only, other values and renames are not noticed, and a note says so."""
    actual_diff = diff(
        {"a": torch.ones(3), "b": torch.arange(3.0)}, {"a": torch.zeros(3), "c": torch.arange(3.0)}, values=False
    )
    assert list_findings(actual_diff) == [("removed", "b"), ("added", "c")]
    assert "values-not-compared" in list_notes(actual_diff)


def test_ignored_values_are_not_read(diff, monkeypatch):
    """--ignore values reads nothing, as --metadata-only does."""
    from statecli.values import compare as values

    monkeypatch.setattr(values, "compare_pairs", lambda *_, **__: pytest.fail("values were read"))
    assert not diff({"a": torch.ones(3)}, {"a": torch.zeros(3)}, ignore=(Field.VALUES,)).findings


def test_values_of_sparse_and_dense_tensors_are_inconclusive(diff):
    """The layout of a sparse tensor and a dense tensor differs; whether their values do is unknown."""
    dense = torch.eye(3)
    result = diff({"a": dense}, {"a": dense.to_sparse()})
    assert [pair.fqn for pair in result.broken] == ["a"]
    assert "statecli does not know whether the values differ" in result.broken[0].message
    assert [change.fields for change in result.changes] == [(Field.LAYOUT,)]


def test_ignored_shape_makes_values_inconclusive(diff):
    """--ignore shape alone cannot compare the values of tensors with other shapes."""
    before, after = {"a": torch.ones(3)}, {"a": torch.ones(4)}
    assert [pair.fqn for pair in diff(before, after, ignore=(Field.SHAPE,)).broken] == ["a"]
    result_without_values = diff(before, after, ignore=(Field.SHAPE, Field.VALUES))
    assert is_clean(result_without_values)


def test_tensors_without_values_compare_only_metadata(diff):
    """Meta tensors have no values on either side, so only their metadata is compared."""
    state = {"a": torch.empty(3, device="meta")}
    result = diff(state, state)
    assert is_clean(result)
    assert result.changes[0].not_compared


def test_histograms_show_the_greatest_relative_changes(diff):
    """`histograms` is the number of histograms, for the tensors with the greatest relative change first."""
    before = {name: torch.arange(1.0, 9.0) for name in "abc"}
    after = {"a": before["a"] + 1, "b": before["b"] * 9, "c": before["c"]}
    actual_diff = diff(before, after, histograms=1)
    assert [histogram.fqn for histogram in actual_diff.histograms] == ["b"]
    assert sum(actual_diff.histograms[0].counts) == 8
    assert not diff(before, after).histograms


@pytest.mark.parametrize(
    "options", [CompareOptions(), CompareOptions(atol=0.5)], ids=["small tensors together", "by tasks"]
)
def test_progress_counts_the_bytes_of_before(save, monkeypatch, options):
    """The bar gets the total size, then as many bytes in steps with a tensor name; small files have no bar."""
    first, second = (
        save({"a": torch.full((8,), value), "b": torch.ones(8)}, f"{value}.safetensors") for value in (0.0, 1.0)
    )
    totals, steps = [], []

    def bar(size):
        totals.append(size)
        return lambda *progress: steps.append(progress)

    compare_targets(Request(first, second, how=options), bar)
    assert totals == ([] if compiled_kernel.native else [64])
    totals.clear(), steps.clear()
    monkeypatch.setattr(plain_bytes, "MAX_BYTES", 0)
    compare_targets(Request(first, second, how=options), bar)
    assert totals == [64]
    assert sum(count for _, count in steps) == 64
    assert {name for name, _ in steps} == {"b"}


# --- filters -------------------------------------------------------------------------------------------------------

BEFORE = {"fc.weight": torch.arange(4.0), "fc.bias": torch.arange(3.0), "bn.running_mean": torch.arange(2.0)}
AFTER = {"fc.weight": torch.ones(4), "out.bias": torch.arange(3.0), "bn.running_mean": torch.ones(2)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"fc.weight", "out.bias", "bn.running_mean"}),
        ({"selection": Selection(include=("fc.*",))}, {"fc.weight", "out.bias"}),
        ({"selection": Selection(include=("out.*",))}, {"out.bias"}),
        ({"selection": Selection(exclude=("fc.*",))}, {"bn.running_mean"}),
        ({"selection": Selection(kind=(Kind.BUFFER,))}, {"bn.running_mean"}),
        ({"selection": Selection(kind=(Kind.PARAMETER,), exclude=("*.bias",))}, {"fc.weight"}),
    ],
)
def test_filters_match_either_name_of_a_pair(options, expected, diff):
    """A glob may match either name of a pair; the kind is the kind after."""
    assert set(map_changes(diff(BEFORE, AFTER, **options))) == expected


def test_filter_that_matches_nothing_is_an_error(diff):
    """If nothing is compared, an error repeats the options."""
    with pytest.raises(NothingMatched, match=r"none of their 4 tensors matches -i 'x\*' --kind optimizer"):
        diff(BEFORE, AFTER, selection=Selection(include=("x*",), kind=(Kind.OPTIMIZER,)))


@pytest.mark.parametrize(
    "filters",
    [
        {"selection": Selection(include=("fc.*",))},
        {"selection": Selection(kind=(Kind.PARAMETER,))},
        {"selection": Selection(exclude=("ep*",))},
    ],
)
def test_settings_that_a_filter_hides_are_noted(filters, diff):
    """A changed setting is left out of the comparison, and a note names the setting."""
    actual_diff = diff({**BEFORE, "epoch": 1, "run": "a"}, {**BEFORE, "epoch": 2, "run": "a"}, **filters)
    assert is_clean(actual_diff)
    assert [note.message for note in actual_diff.notes] == ["1 setting differs but is not selected: epoch"]


def test_glob_may_match_only_settings(diff):
    """`-i epoch` compares the setting alone; no tensor need match."""
    before, after = {**BEFORE, "epoch": 1, "run": "a"}, {**AFTER, "epoch": 2, "run": "a"}
    result = diff(before, after, selection=Selection(include=("epoch",)))
    assert ([scalar.key for scalar in result.scalars], result.changes) == (["epoch"], ())
    settings_diff = diff(before, after, selection=Selection(include=("run",)))
    assert is_clean(settings_diff)
    assert "settings-alone" in list_notes(settings_diff)
    with pytest.raises(NothingMatched):
        diff(before, after, selection=Selection(include=("runs",)))


def test_settings_are_compared_if_exclude_removes_all_tensors(statecli, save):
    """If `-x` excludes every tensor, changed settings are shown; without any setting left, diff exits with status 2."""
    first, second = (save({"w": torch.full((2,), n), "epoch": n, "run": "a"}, f"{n}.pt") for n in (1.0, 2.0))
    result = statecli("diff", first, second, "-x", "w", "-f", "json")
    assert (result.code, [change["key"] for change in result.json["metadata"]]) == (1, ["epoch"])
    assert "settings-alone" in {note["name"] for note in result.json["notes"]}
    for words in (("-x", "*"), ("-x", "w", "--kind", "parameter"), ("-x", "w", "-x", "epoch", "-x", "run")):
        result = statecli("diff", first, second, *words)
        assert (result.code, result.out) == (2, "")
        assert "none of their 1 tensors matches -x" in result.err


@pytest.mark.parametrize("name", ["a.pt", "a.legacy.pt"])
@pytest.mark.parametrize(
    "after",
    [
        torch.arange(6.0).view(3, 2).t().contiguous().t().view(3, 2),
        torch.arange(-3.0, 6.0)[3:].view(3, 2),
        torch.nn.Parameter(torch.arange(6.0).view(3, 2), requires_grad=False),
        torch.arange(6.0).view(3, 2).requires_grad_(),
    ],
    ids=["strides", "a view", "a parameter", "requires_grad"],
)
def test_a_file_that_is_one_tensor_has_no_settings(name, after, statecli, save):
    """The storage details of a single tensor are not settings."""
    before = save(torch.arange(6.0).view(3, 2), name)
    result = statecli("diff", before, save(after, f"b{name}"))
    assert (result.code, result.out) == (0, "identical: 1 tensor, 24 B: exit status 0\n")


ODDITIES = {"metadata-set-twice": "__metadata__ sets 'k' twice", "misaligned": "the tensor data starts at byte"}


def test_oddities_of_either_file_are_notes(statecli, tmp_path):
    """diff shows the notes of `inspect` for either file, with the file's name; once for a file compared with itself."""
    header = b'{"__metadata__":{"k":"1","k":"1"},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    noted_path, plain_path = tmp_path / "odd.safetensors", tmp_path / "plain.safetensors"
    noted_path.write_bytes((len(header)).to_bytes(8, "little") + header + bytes(4))
    save_file({"w": torch.zeros(1)}, plain_path, metadata={"k": "1"})
    inspected = statecli("inspect", noted_path, "-f", "json").json["notes"]
    assert {finding["name"] for finding in inspected} == set(ODDITIES)
    for words in ((noted_path, plain_path), (plain_path, noted_path), (noted_path, noted_path)):
        result = statecli("diff", *words, "-f", "json")
        assert result.code == 0
        notes = [(note["name"], note["message"]) for note in result.json["notes"]]
        assert notes == [(finding["name"], f"{noted_path}: {finding['message']}") for finding in inspected]


def test_diff_of_two_empty_files_is_an_error(diff):
    """If both sides are empty, nothing was compared, so the status is not 0; a single empty side is a difference."""
    empty = ("a.safetensors", "b.safetensors")
    with pytest.raises(NothingMatched, match="neither side contains a tensor"):
        diff({}, {}, names=empty)
    assert list_findings(diff({}, {"a": torch.ones(2)}, names=empty)) == [("added", "a")]


# --- training checkpoints ------------------------------------------------------------------------------------------


def test_the_optimizer_and_the_epoch_are_compared(diff):
    """One more training step is shown in the optimizer's tensors and in the settings."""
    net = Net()
    before = build_training_checkpoint(net)
    after = {**before, "optimizer": build_training_checkpoint(net)["optimizer"], "epoch": 4}
    after["optimizer"]["state"][0]["exp_avg"] = after["optimizer"]["state"][0]["exp_avg"] + 1
    actual_diff = diff(before, after)
    assert set(map_changes(actual_diff)) == {"state[0]['exp_avg']"}
    assert map_changes(actual_diff)["state[0]['exp_avg']"].kind is Kind.OPTIMIZER
    assert [(scalar.key, scalar.before, scalar.after) for scalar in actual_diff.scalars] == [("epoch", 3, 4)]
    assert ("metadata", "epoch") in list_findings(actual_diff)


def test_section_is_compared_with_a_file(save):
    """`train.ckpt#state_dict` equals the exported model: entries outside the section are not compared."""
    net = Net()
    first, second = save(build_training_checkpoint(net), "train.ckpt"), save(net.state_dict(), "net.pt")
    diff = compare_targets(Request(f"{first}#state_dict", second))
    assert is_clean(diff)
    assert "sections-paired" in list_notes(diff)
    whole_diff = compare_targets(Request(first, second))
    assert {rule for rule, _ in list_findings(whole_diff)} == {"removed", "metadata"}


def test_one_changed_weight_of_a_real_model_is_found(minilm, save):
    """A copy of BERT with one changed weight shows the weight and its index, and nothing else."""
    from safetensors.torch import load_file

    path = next(minilm.glob("*.safetensors"))
    state = load_file(path)
    name = "encoder.layer.3.attention.output.dense.weight"
    state[name][7, 11] += 0.5
    diff = compare_targets(Request(str(path), save(state, "nudged.pt")))
    assert list_findings(diff) == [("changed", name)]
    values = map_changes(diff)[name].values
    assert (values.changed, values.first) == (1, (7, 11))


def test_reading_in_two_processes_gives_the_same_result(diff, monkeypatch):
    """Large files are read by two processes with the same result; an unreadable file is reported in one line."""
    from statecli.commands.diff import read_targets

    state = {f"l.{i}.w": torch.randn(3) for i in range(20)}
    after = {**state, "l.3.w": torch.zeros(3)}
    serial_diff = diff(state, after)
    monkeypatch.setattr(read_targets, "MIN_BYTES_FOR_PROCESS", 0)
    monkeypatch.setattr(pool, "can_fork", lambda: True)
    paths = serial_diff.before.target, serial_diff.after.target
    parallel_diff = compare_targets(Request(*paths))
    assert (parallel_diff.changes, parallel_diff.findings, parallel_diff.after) == (
        serial_diff.changes,
        serial_diff.findings,
        serial_diff.after,
    )
    with open(paths[1], "r+b") as file:
        file.truncate(100)
    with pytest.raises(UnreadableError, match=re.escape(paths[1])):
        compare_targets(Request(*paths))


def test_lone_surrogate_is_compared_across_processes(diff, monkeypatch):
    """A lone surrogate in a text next to the tensors is compared too."""
    from statecli.commands.diff import read_targets

    monkeypatch.setattr(read_targets, "MIN_BYTES_FOR_PROCESS", 0)
    monkeypatch.setattr(pool, "can_fork", lambda: True)
    state = {"model": {"w": torch.ones(2)}, "run": "a"}
    result = diff({**state, "run": "\ud800"}, state)
    actual_diff = compare_targets(Request(result.after.target, result.before.target))
    assert [(change.key, change.before, change.after) for change in actual_diff.scalars] == [("run", "a", "\ud800")]


def test_histograms_show_parameters_first(diff):
    """A counter changes more than any weight, but its histogram is not useful."""
    before = {"bn.running_mean": torch.ones(4), "bn.num_batches_tracked": torch.tensor(1), "w": torch.ones(4)}
    after = {
        "bn.running_mean": torch.full((4,), 9.0),
        "bn.num_batches_tracked": torch.tensor(99),
        "w": torch.ones(4) * 1.01,
    }
    assert [histogram.fqn for histogram in diff(before, after, histograms=3).histograms] == ["w", "bn.running_mean"]


def test_text_of_numpy_differs_by_element(diff):
    """Texts with equal bytes are identical, others changed; the size of the difference is unknown."""
    state = {"model": {"a.w": torch.ones(2)}, "names": np.array(["x", "yz", "v"])}
    assert is_clean(diff(state, state))
    delta = map_changes(diff(state, {**state, "names": np.array(["x", "yw", "v"])}))["names"].values
    assert (delta.elements, delta.changed, delta.first, delta.max_abs, delta.cosine) == (3, 1, (1,), None, None)
    assert delta.reason == "statecli cannot read numpy U2 elements as numbers"


def test_text_in_columns_is_compared_in_its_order(diff):
    """An array with the same bytes in another order of dimensions is a different array."""
    rows = np.array([["a", "b"], ["c", "d"]])
    assert map_changes(diff({"n": rows}, {"n": np.asfortranarray(rows.T.copy().T)})) == {}
    columns = np.asfortranarray(np.array([["a", "c"], ["b", "d"]]))
    assert columns.tobytes("A") == rows.tobytes()
    delta = map_changes(diff({"n": rows}, {"n": columns}))["n"].values
    assert (delta.changed, delta.first) == (2, (0, 1))


def test_dates_are_compared_by_their_bytes(diff):
    """Dates are not numbers: a different date has different bytes."""
    before, after = (np.array(["2020", year]).astype("M8[Y]") for year in ("2021", "2022"))
    delta = map_changes(diff({"n": before}, {"n": after}))["n"].values
    assert (delta.elements, delta.changed, delta.first, delta.max_abs) == (2, 1, (1,), None)


def test_arrays_of_objects_are_inconclusive(diff):
    """Arrays of Python objects are inconclusive, not identical; the message names both files."""
    before, after = (np.array(["2020", year]).astype("O") for year in ("2021", "2022"))
    result = diff({"w": torch.ones(2), "n": before}, {"w": torch.ones(2), "n": after})
    files = f"{result.before.target} and {result.after.target}"
    assert [finding.message.partition(" whether")[0] for finding in result.broken] == [
        f"{files}: n: statecli does not know"
    ]


def test_a_file_replaced_after_its_header_was_read_is_noticed(tmp_path, monkeypatch):
    """The file version is taken before the header is read: an old header with new bytes is not a valid state."""
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        torch.save({"w": torch.full((4,), value)}, tmp_path / f"{name}.pt")
    read_both = run.read_both

    def read_and_replace(*args):
        states = read_both(*args)
        (tmp_path / "c.pt").replace(tmp_path / "b.pt")
        return states

    monkeypatch.setattr(run, "read_both", read_and_replace)
    diff = compare_targets(Request(str(tmp_path / "a.pt"), str(tmp_path / "b.pt")))
    assert [pair.fqn for pair in diff.broken] == ["w"]
    assert "b.pt: w: changed while statecli read it" in diff.broken[0].message


def touch_after_comparison(monkeypatch, path):
    """Write to `path` after the comparison and before its report."""
    original = run._Comparison._build_findings

    def touching(self, *args):
        os.utime(path, ns=(1, 1))
        return original(self, *args)

    monkeypatch.setattr(run._Comparison, "_build_findings", touching)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_changed_file_without_pairs_is_reported(name, save, monkeypatch, statecli):
    """All names differ, so no pair can notice the change: the file is checked once, and diff exits with status 2."""
    before, after = save({"x": torch.ones(2), "z": torch.ones(3)}, name), save({"y": torch.zeros(4)}, "b.pt")
    touch_after_comparison(monkeypatch, before)
    result = statecli("diff", before, after)
    assert result.code == 2
    assert result.err.splitlines() == [
        f"statecli: {before}: changed while statecli read it, so the result is not valid; compare again"
    ]


@pytest.mark.parametrize("target", ["", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("name", "is_checked"),
    [("model-2.safetensors", True), ("model.safetensors.index.json", True), ("notes.safetensors", False)],
)
def test_changed_shard_or_index_is_reported(name, is_checked, target, save, tmp_path, monkeypatch):
    """The index and each shard are checked; adjacent files that were not read are not checked."""
    for shard, key in (("model-1", "x"), ("model-2", "y"), ("notes", "z")):
        save({key: torch.ones(2)}, f"{shard}.safetensors")
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "other").mkdir()
    after = save({"other": torch.zeros(4)}, "other/b.pt")
    touch_after_comparison(monkeypatch, tmp_path / name)
    diff = compare_targets(Request(str(tmp_path / target), after))
    assert [finding.message.partition(": ")[0] for finding in diff.broken] == (
        [str(tmp_path / name)] if is_checked else []
    )


def damage_tensor(path, tensor):
    """Flip one bit of the tensor's bytes."""
    data = bytearray(Path(path).read_bytes())
    data[data.find(tensor.numpy().tobytes()) + 500] ^= 4
    Path(path).write_bytes(data)
    return path


@pytest.mark.parametrize(
    "before",
    [
        {"x.weight": torch.arange(200.0), "k": torch.ones(2)},
        {"k": torch.ones(2)},
        {"y.weight": torch.ones(3), "k": torch.ones(2)},
    ],
    ids=["renamed", "added", "shape"],
)
def test_damaged_tensor_is_reported_with_or_without_a_pair(before, save, statecli):
    """The checksum of a tensor is checked even if its values are not compared with any tensor."""
    sound = torch.arange(200.0)
    after = damage_tensor(save({"y.weight": sound, "k": torch.ones(2)}, "b.pt"), sound)
    for first, second in ((save(before, "a.pt"), after), (after, save(before, "a.pt"))):
        result = statecli("diff", first, second)
        assert result.code == 2
        (line,) = result.err.splitlines()
        assert line.startswith(f"statecli: {after}: y.weight: checksum wrong")


COMPLEX = torch.tensor([complex(1, 2), complex(3, 0)])
HIDDEN_DIFFERENCES = {
    "lazy conjugation": (COMPLEX, COMPLEX.conj(), CompareOptions(bitwise=True)),
    "NaN beside another part": (torch.tensor([complex("nan+1j")]), torch.tensor([complex("nan+2j")]), CompareOptions()),
    "a sparse -0.0": (
        torch.sparse_coo_tensor([[1]], torch.tensor([0.0]), (3,)),
        torch.sparse_coo_tensor([[1]], torch.tensor([-0.0]), (3,)),
        CompareOptions(bitwise=True),
    ),
    "expanded": (torch.ones(1).expand(5000, 5000), torch.zeros(1).expand(5000, 5000), CompareOptions()),
    "bits8": (
        torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
        torch.ones(3).byte().view(torch.bits8),
        CompareOptions(),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", HIDDEN_DIFFERENCES)
def test_subtle_differences_are_findings(case, diff):
    """The tensor differs from the changed tensor and equals itself; neither result is inconclusive."""
    before, after, options = HIDDEN_DIFFERENCES[case]
    assert list_findings(diff({"w": before}, {"w": after}, how=options)) == [("changed", "w")]
    assert is_clean(diff({"w": before}, {"w": before}, how=options))
