"""The state of the screen of browse, without the screen: tree, filter, order, and globs of marked tensors."""

from __future__ import annotations

import shlex
import time

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, strategies as st

from statecli.browse.columns import ListColumn, choose_columns
from statecli.browse.globs import _select, write_globs
from statecli.browse.peek import Versions, read_histogram, read_peek, read_statistics
from statecli.browse.screen_state import ScreenModel
from statecli.core.errors import FilteredOut
from statecli.core.model_state import ModelState, Stats, TensorInfo
from statecli.core.selection import Selection, select

from .conftest import open_model

pytest.importorskip("textual")


def labels(model):
    return [model.get_row(number).label for number in range(model.count)]


def build_state(names, sections=None):
    tensors = tuple(
        TensorInfo(name, "float32", (2,), 2, 8, section=section)
        for name, section in zip(names, sections or ["model"] * len(names), strict=True)
    )
    return ModelState("x", "safetensors", tensors, tuple(dict.fromkeys(tensor.section for tensor in tensors)))


# --- tree ---------------------------------------------------------------------------------------------------------


def test_the_first_screen_joins_equal_layers(model):
    """Small modules are open, and the four layers are one row."""
    assert "{0..3}" in labels(model)
    assert "bias" in labels(model)


def test_joined_layers_open_in_numeric_order():
    """`layers.2` comes before `layers.10`, whatever the order of the file."""
    model = ScreenModel(build_state([f"layers.{n}.{name}" for n in (10, 2, 1) for name in "ab"]), {})
    model.cursor = labels(model).index("{1,2,10}")
    model.open_node()
    assert labels(model)[-3:] == ["1", "2", "10"]


def test_tensor_and_module_of_one_name_have_two_rows():
    """`a` is a tensor, and `a.b` is in a module `a`."""
    model = ScreenModel(build_state(["a", "a.b", "a.c"]), {})
    assert labels(model) == ["a", "a", "b", "c"]


def test_a_name_of_a_thousand_dots_is_a_row():
    """Nothing recurses on names."""
    name = ".".join("a" * 5000)
    model = ScreenModel(build_state([name, f"{name}.b"]), {})
    model.cursor = 0
    model.open_all()
    assert model.count


def test_every_tensor_is_in_the_open_tree_once(model):
    """Opening all shows each tensor."""
    for number in reversed(range(model.count)):
        model.cursor = number
        if not model.is_open(model.current.node):
            model.open_all()
    rows = [model.get_row(number) for number in range(model.count)]
    assert sorted(row.tensor for row in rows if row.tensor is not None) == list(range(len(model.tensors)))


def test_sections_are_the_first_level(tmp_path):
    """The sections of a training checkpoint are the model and the optimizer."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "train.pt")
    model = open_model(tmp_path / "train.pt")
    assert [model.get_row(n).label for n in range(model.count) if model.get_row(n).depth == 0] == ["model", "optimizer"]
    model.set_filter("optimizer.*")
    assert {model.tensors[position].section for position in model.filtered_positions} == {"optimizer"}


# --- filter -------------------------------------------------------------------------------------------------------


def test_a_filter_matches_globs_as_include_does(model):
    """A glob finds the tensors that `-i` selects."""
    for glob in ("*", "model.*", "*.weight", "model.layers.[0-2].*", "lm_head.?ias"):
        model.set_filter(glob)
        assert [model.tensors[n] for n in model.filtered_positions] == list(
            select(model.state, Selection(include=(glob,)), "x").tensors
        )


def test_the_selected_tensor_stays_selected(model):
    """The tensor stays selected with a filter, without a filter, and in another order."""
    model.set_filter("v_proj")
    model.cursor = 2
    name = model.current.label
    model.set_filter("")
    assert model.get_name(model.current.tensor) == name
    model.toggle_flat()
    assert model.current.label == name


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column",
    [ListColumn.NAME, ListColumn.KIND, ListColumn.DTYPE, ListColumn.SHAPE, ListColumn.ELEMENTS, ListColumn.SIZE],
)
def test_an_order_and_its_reverse_have_all_tensors(model, column):
    """Each column sorts, and the reverse begins with a last value."""
    keys = {
        ListColumn.SIZE: lambda tensor: tensor.nbytes,
        ListColumn.ELEMENTS: lambda tensor: tensor.elements,
        ListColumn.SHAPE: lambda tensor: tensor.shape,
        ListColumn.NAME: lambda tensor: tensor.fqn,
        ListColumn.KIND: lambda tensor: tensor.kind.value,
        ListColumn.DTYPE: lambda tensor: tensor.dtype,
    }
    model.toggle_flat()
    for descending in (False, True):
        model.sort_by(column, descending=descending)
        tensors = [model.tensors[model.get_row(number).tensor] for number in range(model.count)]
        values = [keys[column](tensor) for tensor in tensors]
        assert values == sorted(values, reverse=descending)
        assert len(set(map(id, tensors))) == len(model.tensors)


def test_the_order_by_size_keeps_the_tree():
    """Joined layers have the size of a single layer, so 12 small layers do not look like the largest module."""
    sizes = {f"h.{n}.{name}": 8 for n in range(12) for name in "ab"} | {"h.12.a": 20, "h.12.b": 30, "ln": 4}
    tensors = tuple(TensorInfo(name, "uint8", (size,), size, size) for name, size in sizes.items())
    model = ScreenModel(ModelState("x", "safetensors", tensors), {})
    model.sort_by(ListColumn.SIZE)
    assert labels(model) == ["h", "12", "b", "a", "{0..11}", "ln"]
    model.sort_by(ListColumn.SIZE, descending=False)
    assert labels(model) == ["ln", "h", "{0..11}", "12", "a", "b"]
    model.cursor = 2
    model.sort_by(None)
    assert (model.current.label, "0" in labels(model)) == ("{0..11}", False)
    model.sort_by(ListColumn.SIZE, descending=False)
    model.toggle_flat()
    assert labels(model)[0] == "ln"
    assert labels(model)[-1] == "h.12.b"


def test_numbers_ascend_in_lists_and_in_the_tree():
    """2 comes before 10, whatever the order of the file; the modules are in the order of the file."""
    numbers = (0, 1, 10, 11, 2, 3)
    state = build_state([f"z.{n}.{name}" for n in numbers for name in (f"w{n}", "b")] + ["a.w", "o[10]", "o[9]"])
    model = ScreenModel(state, {})
    model.cursor = 0
    model.open_all()
    model.open_all()
    assert [label for label in labels(model) if label.isdigit()] == ["0", "1", "2", "3", "10", "11"]
    model.set_filter("b")
    assert labels(model) == [f"z.{n}.b" for n in sorted(numbers)]
    model.set_filter("o[")
    assert labels(model) == ["o[9]", "o[10]"]
    model.set_filter("")
    model.toggle_flat()
    assert labels(model)[-3] == "a.w"


def test_tensor_without_statistics_sorts_last(model):
    """A tensor without statistics does not have the mean 0."""
    model.add_stats(3, read_statistics(model.tensors[3], Versions({})))
    for descending in (False, True):
        model.sort_by(ListColumn.MEAN, descending=descending)
        assert model.get_row(0).tensor == 3


def test_sorted_column_is_shown_at_any_width():
    """The sorted column is shown at any width."""
    for width in range(24, 200):
        columns = choose_columns(width, 40, tuple(ListColumn), ListColumn.MEAN)
        assert ListColumn.MEAN in columns
    assert choose_columns(200, 20, tuple(ListColumn)[:6], None) == list(ListColumn)[1:6]


# --- globs --------------------------------------------------------------------------------------------------------

PARTS = st.sampled_from(["a", "b", "layers", "0", "1", "10", "x[0]", "w*", "q?", "{0,1}", "\x1b[31m", "\u202e", ""])
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=14, unique=True)


@given(names=NAMES, data=st.data())
def test_copied_globs_select_exactly_the_marked_tensors(names, data):
    """The globs with `-i`, parsed like in a shell, select the tensors; or the browser reports that no globs do."""
    sections = data.draw(st.lists(st.sampled_from(["model", "ema", ""]), min_size=len(names), max_size=len(names)))
    state = build_state(names, sections)
    marked = data.draw(st.sets(st.integers(0, len(names) - 1), min_size=1))
    copied_globs = write_globs(state, marked, {})
    if not copied_globs.globs:
        return
    words = shlex.split(copied_globs.text)
    assert words[::2] == ["-i"] * len(copied_globs.globs)
    selected = select(state, Selection(include=tuple(words[1::2])), "x").tensors
    assert {id(tensor) for tensor in selected} == {id(state.tensors[n]) for n in marked}
    assert copied_globs.text.isprintable()


@pytest.mark.parametrize(
    ("chosen", "globs"),
    [
        (lambda name: True, ("*",)),
        (lambda name: name.startswith("layers.1."), ("layers.1.*",)),
        (lambda name: name.endswith("q.weight"), ("layers.*.q.weight",)),
        (lambda name: name.startswith(("layers.0.", "layers.1.", "layers.2.")),
         ("layers.{0..2}.*",)),
        (lambda name: name.startswith(("layers.1.q.w", "layers.2.q.w", "layers.9.q.w")),
         ("layers.{1,2,9}.q.weight",)),
        (lambda name: name == "layers.3.q.bias", ("layers.3.q.bias",)),
    ],
)  # fmt: skip
def test_globs_are_short(chosen, globs):
    """Whole modules and repeated layers are one glob."""
    names = [f"layers.{n}.{name}" for n in range(12) for name in ("q.weight", "q.bias")] + ["norm.weight"]
    state = build_state(names)
    assert write_globs(state, {n for n, name in enumerate(names) if chosen(name)}, {}).globs == globs


def test_tensors_of_a_quantized_weight_are_copied_together(tmp_path):
    """`-i` with the name of a weight selects its scales too."""
    tensors = {
        "fc.weight": np.zeros((4, 4), np.int8),
        "fc.weight_scale": np.ones((4, 1), np.float32),
        "head.weight": np.ones((2, 2), np.float32),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "q.safetensors")
    model = open_model(tmp_path / "q.safetensors")
    for n in range(3):
        model.marked = {n}
        copied_globs = model.write_globs()
        if copied_globs.globs:
            selected = select(model.state, Selection(include=copied_globs.globs), "x", model._weights).tensors
            assert [tensor.fqn for tensor in selected] == [model.tensors[n].fqn]


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "float16"])
def test_first_values_bytes_and_histogram_equal_numpy(tmp_path, dtype):
    """The values of a tensor in a file equal those of numpy."""
    array = (np.arange(60).reshape(3, 4, 5) * 3 % 17).astype(dtype)
    safetensors.numpy.save_file({"a": array}, tmp_path / "a.safetensors")
    (tensor,) = open_model(tmp_path / "a.safetensors").tensors
    peek = read_peek(tensor, Versions({}))
    assert list(peek.values) == array.reshape(-1)[:24].tolist()
    assert peek.raw == array.tobytes()[:64]
    stats = read_statistics(tensor, Versions({}))
    histogram = read_histogram(tensor, stats, Versions({}))
    counts, edges = np.histogram(array.astype(np.float64), len(histogram.counts))
    assert list(histogram.counts) == counts.tolist()
    assert np.allclose(histogram.edges, edges)


def test_first_values_of_a_transposed_tensor_are_in_logical_order(tmp_path):
    """The values are in the order in which torch prints them."""
    base = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": base.t()}, tmp_path / "a.pt")
    (tensor,) = open_model(tmp_path / "a.pt").tensors
    assert list(read_peek(tensor, Versions({})).values) == base.t().flatten().tolist()


def test_truncated_file_gives_an_error_text(tmp_path, first):
    """The first values and the statistics both report the truncation."""
    last = max(open_model(first).tensors, key=lambda tensor: tensor.data.storage.offset)
    first.write_bytes(first.read_bytes()[: last.data.storage.offset + 8])
    peek, stats = read_peek(last, Versions({})), read_statistics(last, Versions({}))
    assert "truncated" in peek.error
    assert "truncated" in stats.reason


def test_a_file_that_changed_is_not_shown(first):
    """The values of another file would be shown below the facts of this file."""
    from statecli.storage import files

    with files.record_opened_files() as opened:
        model = open_model(first)
    time.sleep(0.01)
    first.write_bytes(first.read_bytes()[::-1])
    assert "changed after statecli read its header" in read_peek(model.tensors[0], Versions(dict(opened))).error


def test_selection_without_a_match_raises_filtered_out():
    """FilteredOut does not reach the user of the screen: neither globs nor a filter without a match raise it."""
    state = build_state(["a*b", "axb"])
    assert write_globs(state, {0}, {}).globs == ("a[*]b",)
    with pytest.raises(FilteredOut):
        select(state, Selection(include=("z",)), "x")
    assert _select(state, ["z"], {}) == set()
    model = ScreenModel(state, {})
    assert find_names(model, "z") == []
    assert model.filter_problem == "z: no tensor matches"


# --- what the filter takes ---------------------------------------------------------------------------------------


def build_layers():
    return ScreenModel(build_state([f"layers.{n}.{leaf}" for n in range(12) for leaf in ("q.weight", "q.bias")]), {})


def find_names(model, text):
    model.set_filter(text)
    return [model.tensors[model.get_row(number).tensor].fqn for number in range(model.count)]


def test_large_brace_list_does_not_block_the_filter():
    """A typed text cannot stop the screen: the numbers of a range are not listed, and the filter still works."""
    model, started = build_layers(), time.process_time()
    assert find_names(model, "{0..999999}" * 4) == []
    assert find_names(model, "layers.{0..999999}.q.bias") == [f"layers.{n}.q.bias" for n in range(12)]
    assert time.process_time() - started < 5


def test_filter_by_statistics_works_after_reading():
    """Before reading, the line names the key; then the filter finds the tensor, and the line names the first one."""
    model = build_layers()
    assert find_names(model, "nan>0") == []
    assert (
        model.filter_problem == "nan>0: only 0 of 24 tensors have statistics; press esc, then S to read all statistics"
    )
    model.set_filter("")
    for position in range(24):
        model.add_stats(position, Stats(nan=int(position == 7), std=float(position)))
    model.listed = set(range(24))
    assert model.describe_stats(80) == "statistics of 24 read: 1 NaN in layers.3.q.bias"
    assert find_names(model, "nan>0") == ["layers.3.q.bias"]
    assert find_names(model, "nan:1") == ["layers.3.q.bias"]
    assert find_names(model, "std>22") == ["layers.11.q.bias"]
