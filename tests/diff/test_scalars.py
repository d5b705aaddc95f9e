"""Numbers and words next to the tensors."""

from __future__ import annotations

import argparse
import collections
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from safetensors.torch import save_file

from statecli import formats
from statecli.commands.diff import settings as scalars
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import ScalarChange, Status
from statecli.commands.diff.run import compare_targets
from statecli.core.model_state import ModelState, Settings
from statecli.core.selection import Selection

from .conftest import list_notes

WEIGHTS = {"w": torch.arange(3.0)}


def compare_scalars(
    before: dict, after: dict, format_names: tuple[str, str] = ("torch-zip", "torch-zip"), **options
) -> list:
    """Return the scalars that differ, and the notes, for two states with settings only."""
    states = [
        ModelState(n, format, (), metadata=Settings(m), traits=formats.traits_of(format))
        for n, format, m in zip("ab", format_names, (before, after), strict=True)
    ]
    comparison = scalars.compare_settings(*states, options.get("sections", (None, None)))
    return [*comparison.changes, *comparison.notes]


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@example({"a": None, "b": None, "c": math.nan}, {"b": None, "c": math.nan})
@given(st.dictionaries(st.sampled_from("abcd"), VALUES), st.dictionaries(st.sampled_from("abcd"), VALUES))
def test_each_difference_is_reported_once(before, after):
    """Added, removed and changed keys are reported once each; NaN equals NaN, and None is not a missing entry."""

    def same(first, second):
        if isinstance(first, bool) or isinstance(second, bool):
            return first is second
        return first == second or (
            isinstance(first, float) and isinstance(second, float) and math.isnan(first) and math.isnan(second)
        )

    expected = {key: Status.REMOVED for key in before if key not in after}
    expected |= {key: Status.ADDED for key in after if key not in before}
    expected |= {key: Status.CHANGED for key in before if key in after and not same(before[key], after[key])}
    actual = compare_scalars(before, after)
    assert {change.key: change.status for change in actual} == expected
    assert len(actual) == len(expected)
    assert all((change.before, change.after) == (before.get(change.key), after.get(change.key)) for change in actual)


def test_metadata_of_safetensors_is_compared(tmp_path):
    """`__metadata__` is compared between two files of the format."""
    for name, metadata in (("a", {"format": "pt", "run": "1"}), ("b", {"format": "pt", "run": "2"}), ("c", None)):
        save_file(WEIGHTS, tmp_path / f"{name}.safetensors", metadata)
    paths = {name: str(tmp_path / f"{name}.safetensors") for name in "abc"}
    assert compare_targets(Request(paths["a"], paths["b"])).scalars == (ScalarChange("run", Status.CHANGED, "1", "2"),)
    assert {scalar.key for scalar in compare_targets(Request(paths["a"], paths["c"])).scalars} == {"format", "run"}


def test_format_entry_of_safetensors_is_a_note(save, tmp_path):
    """`format: pt` is not a difference from a .pt file, only a note; any other entry is a difference."""
    save_file(WEIGHTS, tmp_path / "a.safetensors", {"format": "pt"})
    save_file(WEIGHTS, tmp_path / "b.safetensors", {"format": "pt", "run": "1"})
    path = save(WEIGHTS, "c.pt")
    result = compare_targets(Request(str(tmp_path / "a.safetensors"), path))
    assert (result.scalars, result.findings) == ((), ())
    assert "format-metadata" in list_notes(result)
    assert [s.key for s in compare_targets(Request(path, str(tmp_path / "b.safetensors"))).scalars] == ["run"]


@pytest.mark.parametrize(
    ("format", "key"),
    [
        ("sharded safetensors", "total_size"),
        ("sharded safetensors", "total_parameters"),
        ("torch-export", "torch_version"),
        ("torch-export", "schema_version"),
    ],
)
def test_keys_of_one_format_are_compared_only_within_the_format(format, key):
    """The sums of an index and the versions of an export are compared only between two files of the format."""
    format_names = (format, "safetensors")
    assert [note.name for note in compare_scalars({key: 5}, {}, format_names)] == ["format-metadata"]
    assert [note.name for note in compare_scalars({}, {key: 5}, format_names[::-1])] == ["format-metadata"]
    assert [change.status for change in compare_scalars({key: 5}, {key: 6}, (format,) * 2)] == [Status.CHANGED]


def test_number_equals_its_text_only_in_safetensors():
    """safetensors holds only text: against another format, 3 equals "3"; within one format, the two differ."""
    assert compare_scalars({"epoch": 3}, {"epoch": "3"}, ("torch-zip", "safetensors")) == []
    assert len(compare_scalars({"epoch": 3}, {"epoch": "4"}, ("torch-zip", "safetensors"))) == 1
    assert len(compare_scalars({"epoch": 3}, {"epoch": "3"})) == 1


def test_section_compares_only_its_own_settings():
    """For `train.ckpt#optimizer` only the settings below `optimizer` are compared, by their path inside the section."""
    before = {"epoch": 1, "optimizer.lr": 0.1, "optimizer.eps": 1}
    after = {"epoch": 2, "optim.lr": 0.2, "optim.eps": 1}
    assert compare_scalars(before, after, sections=("optimizer", "optim")) == [
        ScalarChange("lr", Status.CHANGED, 0.1, 0.2)
    ]


def test_settings_of_paired_sections_are_compared(diff):
    """`optimizer.param_groups` against `optimizer_states.0.param_groups` of another framework's layout."""
    group = {"lr": 0.1, "params": [0]}
    moments = {0: {"exp_avg": torch.ones(2, 2)}}
    checkpoint = {"model": {"a.w": torch.ones(2, 2)}, "optimizer": {"state": moments, "param_groups": [group]}}
    other_checkpoint = {
        "model": {"a.w": torch.ones(2, 2)},
        "optim": {"state": moments, "param_groups": [{**group, "lr": 0.2}]},
    }
    actual_diff = diff(checkpoint, other_checkpoint)
    assert [(s.key, s.before, s.after) for s in actual_diff.scalars] == [("optim.param_groups.0.lr", 0.1, 0.2)]


def test_arrays_are_compared_by_value(diff):
    """Equal numpy arrays next to the model are identical, and a changed array is reported."""
    import numpy as np

    state = {"model": {"a.w": torch.ones(2)}, "mean": np.arange(3.0)}
    assert not diff(state, state).findings
    result = diff(state, {**state, "mean": np.array([0.0, 1.0, 5.0])})
    assert [(f.rule, f.fqn) for f in result.findings] == [("changed", "mean")]
    assert next(c for c in result.changes if c.fqn == "mean").values.max_abs == 3


LOOKALIKES = [
    *(0, 0.0, 1, 1.0, True, False, None, "1", "True", "None", "", "a", "a.b", 1.5, 2**70, float(2**70), str(2**70)),
    *(math.nan, math.inf, "nan", "inf", "'nan'", "''nan''", "[]", "{}", b"", b"a", "torch.float32", "<torch.float32>"),
    *(torch.float32, torch.float16, "x" * 1001, "x" * 1002),
]
KEYS = ["a", "b", "a.b", "", 1, "1", True, "True", None, "None", 1.5, "[1.5]", (1, "a"), ("q",) * 9, "(and more)"]


def draw_containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Draw settings in every container that torch.save writes."""
    mappings = st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    namespaces = st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(
        lambda value: argparse.Namespace(**value)
    )
    return (
        st.lists(inner, max_size=3) | mappings | namespaces | st.sets(st.sampled_from(["a", "1", 1, None]), max_size=3)
    )


NESTED = st.recursive(st.sampled_from(LOOKALIKES), draw_containers, max_leaves=6)
#: The value itself, in a list too long to be listed by element, and in lists too deep to be listed by element.
PLACEMENTS = [lambda value: value, lambda value: [value, *range(100)], lambda value: [[[[[[[[[[value]]]]]]]]]]]


def normalize_value(value: Any) -> Any:
    """Return a form for comparison with ==, except that nan equals nan, True differs from 1, and tuples equal lists."""
    if isinstance(value, dict):
        return "dict", frozenset((normalize_value(key), normalize_value(value)) for key, value in value.items())
    if isinstance(value, argparse.Namespace):
        return "namespace", normalize_value(vars(value))
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(normalize_value, value))
    if isinstance(value, set):
        return "set", frozenset(map(normalize_value, value))
    return ("nan",) if value != value else (type(value) if type(value) is not int else float, value)


def reorder_value(value: Any) -> Any:
    """Return the value with every dict in reverse order, tuples for lists and floats for small integers."""
    if isinstance(value, dict):
        return collections.OrderedDict((key, reorder_value(value)) for key, value in reversed(value.items()))
    if isinstance(value, argparse.Namespace):
        return argparse.Namespace(**reorder_value(vars(value)))
    if isinstance(value, list):
        return tuple(map(reorder_value, value))
    return float(value) if type(value) is int and value < 100 else value


def alter_value(value: Any, draw: Any) -> Any:
    """Return the value with one change, which in rare cases is equal to the original."""
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(list(value)))
        return {**value, key: alter_value(value[key], draw)}
    if isinstance(value, list) and value:
        return [alter_value(value[0], draw), *value[1:]]
    return draw(st.sampled_from([str(value), [value], {"a": value}, {1: value}, {"1": value}, *LOOKALIKES, [], {}]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), place=st.sampled_from(PLACEMENTS))
def test_settings_differ_exactly_if_python_values_differ(save, data, place):
    """diff reports settings as equal if and only if Python does, whatever order they were saved in."""
    value = data.draw(NESTED)
    other = alter_value(value, data.draw)
    states = [
        formats.read(save({**WEIGHTS, "x": place(content)}, "a.pt")) for content in (value, reorder_value(value), other)
    ]
    for first, second in ((0, 1), (1, 0)):
        assert compare_read_states(states[first], states[second]) == []
    for first, second in ((0, 2), (2, 0), (1, 2), (2, 1)):
        assert bool(compare_read_states(states[first], states[second])) == (
            normalize_value(value) != normalize_value(other)
        )


def compare_read_states(
    first: ModelState, second: ModelState, *sections: str | None, section_pairs: dict[str, str] | None = None
) -> list:
    """Return the scalars that differ between two loaded states, and the notes."""
    comparison = scalars.compare_settings(first, second, sections or (None, None), section_pairs or {})
    return [*comparison.changes, *comparison.notes]


@pytest.fixture
def describe_settings(save):
    """Return a function that describes the changes between the settings `x` of two files."""

    def describe_changes(before, after):
        first, second = (formats.read(save({**WEIGHTS, **value}, "a.pt")) for value in (before, after))
        return [scalars.describe_setting_change(change) for change in compare_read_states(first, second)]

    return describe_changes


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"x": math.nan}, {"x": "nan"}, ['x: "nan" → "\'nan\'"']),
        ({"x": 2**70}, {"x": str(2**70)}, [f'x: "{2**70}" → "\'{2**70}\'"']),
        ({"x": 2**70}, {"x": float(2**70)}, []),
        ({"x": 2**70}, {"x": float(2**71)}, [f'x: "{2**70}" → {2.0**71}']),
        ({}, {"x": []}, ['x: added: "[]"']),
        ({"x": {}}, {}, ['x: removed: "{}"']),
        ({"x": {}}, {"x": []}, ['x: "{}" → "[]"']),
        ({"x": {}}, {"x": {"a": 1}}, ["x.a: added: 1"]),
        ({"x": {"a": 1}}, {"x": {}}, ["x.a: removed: 1"]),
        ({"x": {1: "a"}}, {"x": {"1": "a"}}, ['x.1: removed: "a"', """x.['1']: added: "a\""""]),
        ({"x": {1: "a", "1": "b"}}, {"x": {"1": "b"}}, ['x.1: removed: "a"']),
        ({"x": {"a.b": 1}}, {"x": {"a": {"b": 1}}}, ["x.['a.b']: removed: 1", "x.a.b: added: 1"]),
        ({"x": {0: "a"}}, {"x": ["a"]}, ['x: "dict" → "list"']),
        ({"x": argparse.Namespace(a=1)}, {"x": {"a": 1}}, ['x: "argparse.Namespace" → "dict"']),
        ({"x": torch.float16}, {"x": torch.float32}, ['x: "<torch.float16>" → "<torch.float32>"']),
    ],
)
def test_setting_changes_are_described(describe_settings, before, after, expected):
    """The changes are described in exactly the expected lines."""
    assert describe_settings(before, after) == expected


@pytest.fixture
def many_settings(monkeypatch) -> dict[str, int]:
    """Return more settings than diff lists individually, with a limit of 200."""
    monkeypatch.setattr("statecli.formats.torch.settings.MAX_SETTINGS", 200)
    return {f"k{n}": n for n in range(250)}


def test_order_of_many_settings_does_not_matter(describe_settings, many_settings):
    """The order of the file decides which settings are listed, but not whether all settings are equal."""
    assert describe_settings({"x": many_settings}, {"x": dict(reversed(many_settings.items()))}) == []


def test_change_of_an_unlisted_setting_is_reported(describe_settings, many_settings):
    """A setting that was merely not listed is not reported as removed."""
    assert [
        line.split(":")[0] for line in describe_settings({"x": many_settings}, {"x": {**many_settings, "k249": 0}})
    ] == ["(and more)"]
    assert [
        line.split(":")[0] for line in describe_settings({"x": many_settings}, {"x": {**many_settings, "k0": 1}})
    ] == ["x.k0", "(and more)"]
    fewer_settings = {key: value for key, value in many_settings.items() if key != "k0"}
    assert [line.split(":")[0] for line in describe_settings({"x": many_settings}, {"x": fewer_settings})] == [
        "(and more)"
    ]


def test_change_of_an_excluded_setting_is_a_note(diff, many_settings):
    """If the globs leave the rest out, a note says that the rest differs."""
    actual_diff = diff(
        {**WEIGHTS, "x": many_settings},
        {**WEIGHTS, "x": {**many_settings, "k249": 0}},
        selection=Selection(include=("w",)),
    )
    assert actual_diff.scalars == ()
    assert "settings-left-out" in list_notes(actual_diff)


def test_nan_text_of_safetensors_equals_a_float_nan(save, tmp_path):
    """The text 'nan' in safetensors equals both a float NaN and the text 'nan' in a pickle."""
    save_file(WEIGHTS, tmp_path / "a.safetensors", {"x": "nan", "y": "z" * 2000, "z": "'nan'"})
    text = formats.read(str(tmp_path / "a.safetensors"))
    equal_state = formats.read(save({**WEIGHTS, "x": math.nan, "y": "z" * 2000, "z": "'nan'"}, "a.pt"))
    assert compare_read_states(text, equal_state) == [] == compare_read_states(equal_state, text)
    assert (
        compare_read_states(text, formats.read(save({**WEIGHTS, "x": "nan", "y": "z" * 2000, "z": "'nan'"}, "a.pt")))
        == []
    )
    different_state = formats.read(save({**WEIGHTS, "x": "'nan'", "y": "z" * 2001, "z": "nan"}, "a.pt"))
    assert {change.key for change in compare_read_states(text, different_state)} == {"x", "y", "z"}


def test_section_of_a_plain_state_dict_has_its_settings(save):
    """`a.pt#model` of a lone state_dict has the settings inside the state_dict."""
    first, second = (formats.read(save({**WEIGHTS, "scale": scale}, "a.pt")) for scale in (1.5, 2.5))
    assert compare_read_states(first, second, "model", "model") == [ScalarChange("scale", Status.CHANGED, 1.5, 2.5)]


def test_swapped_section_names_lose_no_setting(save):
    """No setting of before is lost if a section is compared under the name of another section."""
    value = {"a": {"lr": 1}, "a.b": {"lr": 2}, "c": {"lr": 3}, "d": {1: "e", "1": "f"}}
    state = formats.read(save({**WEIGHTS, **value}, "a.pt"))
    swapped_state = formats.read(
        save({**WEIGHTS, "a": {"lr": 3}, "a.b": {"lr": 2}, "c": {"lr": 1}, "d": value["d"]}, "b.pt")
    )
    assert compare_read_states(state, swapped_state, section_pairs={"a": "c", "c": "a", "a.b": "a.b"}) == []
    assert compare_read_states(state, formats.read(save({**WEIGHTS, **value}, "b.pt")), section_pairs={"a": "c"}) == []
    assert compare_read_states(state, formats.read(save({**WEIGHTS, "n": value["d"]}, "b.pt")), "d", "n") == []
    other = formats.read(save({**WEIGHTS, **{key: value[key] for key in ("a", "c", "d")}, "e.f": {"lr": 2}}, "b.pt"))
    assert compare_read_states(state, other, section_pairs={"a.b": "e.f"}) == []


@pytest.mark.parametrize(
    ("change", "start", "text"),
    [
        (ScalarChange("k", Status.CHANGED, 1, "1"), "k: ", '1 → "1"'),
        (ScalarChange("k", Status.CHANGED, None, False), "k: ", "null → false"),
        (ScalarChange("k", Status.ADDED, None, None), "k: added: ", "null"),
        (ScalarChange("k", Status.REMOVED, 0.5, None), "k: removed: ", "0.5"),
    ],
)
def test_values_are_formatted_as_json(change, start, text):
    """A text differs from a number, and null from a missing value; a finding uses the words of the table."""
    assert scalars.format_values(change) == text
    assert scalars.describe_setting_change(change) == start + text


# --- a module pickled whole ------------------------------------------------------------------------------------------


def build_module(p: float = 0.5) -> torch.nn.Module:
    """Return a module with more than its state_dict: settings, a buffer that is not saved, and a plain tensor."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(p))
    module.register_buffer("table", torch.ones(3), persistent=False)
    module[0].plain = torch.ones(2)
    return module


@pytest.mark.parametrize("names", [("a.pt", "b.pt"), ("a.legacy.pt", "b.pt"), ("a.pt", "b.safetensors")])
@pytest.mark.parametrize("is_swapped", [False, True], ids=["before", "after"])
def test_module_and_its_state_dict_do_not_differ(diff, names, is_swapped):
    """Settings that only the module records are not differences, and one note for each kind reports them."""
    pair = build_module(), build_module().state_dict()
    result = diff(*(reversed(pair) if is_swapped else pair), names=tuple(reversed(names)) if is_swapped else names)
    assert (result.findings, result.scalars, result.broken) == ((), (), ())
    assert [name for name in list_notes(result) if name != "foreign-globals"] == ["not-expected", "module-attributes"]


@pytest.mark.parametrize("section", [None, "net"])
def test_setting_next_to_a_module_is_compared(save, section):
    """A different epoch is reported wherever the module lies, and so is a changed tensor of the module."""
    a, b = (
        save({"net": build_module(), "epoch": 3}, "a.pt"),
        save({"net": build_module().state_dict(), "epoch": 4}, "b.pt"),
    )
    if section:
        diff = compare_targets(Request(f"{a}#{section}", f"{b}#{section}", jobs=1))
        assert (diff.scalars, diff.findings) == ((), ())
    else:
        assert [scalar.key for scalar in compare_targets(Request(a, b, jobs=1)).scalars] == ["epoch"]
    changed = build_module().state_dict()
    changed["0.bias"] += 1
    diff = compare_targets(Request(a, save({"net": changed, "epoch": 3}, "c.pt"), jobs=1))
    assert [(finding.rule, finding.fqn) for finding in diff.findings] == [("changed", "0.bias")]


def build_plain_net(train: bool = False) -> torch.nn.Module:
    """Return a module that every format of modules can hold."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).train(train)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Return the paths of a module pickled whole, exported, saved as TorchScript, and as a state_dict."""
    pytest.importorskip("torch.export.pt2_archive._package", reason="needs torch 2.8: archives of torch.export")
    folder = tmp_path_factory.mktemp("archives")
    net, paths = build_plain_net(), {name: str(folder / name) for name in ("whole.pt", "x.pt2", "ts.pt", "sd.pt")}
    torch.save(net, paths["whole.pt"])
    torch.export.save(torch.export.export(net, (torch.ones(3, 2),)), paths["x.pt2"])
    torch.jit.save(torch.jit.script(net), paths["ts.pt"])
    torch.save(net.state_dict(), paths["sd.pt"])
    return paths


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_module_does_not_differ_between_formats(archives):
    """Settings that only one format writes are not differences, and at most two notes report them."""
    for first in archives.values():
        for second in archives.values():
            diff = compare_targets(Request(first, second, jobs=1))
            assert (diff.findings, diff.scalars, diff.broken) == ((), (), ()), (first, second)
            note_names = [name for name in list_notes(diff) if name != "foreign-globals"]
            assert note_names == (
                []
                if first == second
                else [name for name in ("format-metadata", "module-attributes") if name in note_names]
            )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_attributes_that_two_formats_record_are_compared(archives, save, tmp_path):
    """Training mode is compared with TorchScript's evaluation mode, and the code sizes of two TorchScript files."""
    diff = compare_targets(Request(save(build_plain_net(train=True), "train.pt"), archives["ts.pt"], jobs=1))
    assert [(scalar.key, scalar.before, scalar.after) for scalar in diff.scalars] == [("training", True, False)]
    torch.jit.save(torch.jit.script(torch.nn.Sequential(*build_plain_net(), torch.nn.ReLU()).eval()), tmp_path / "b.pt")
    keys = [
        scalar.key for scalar in compare_targets(Request(archives["ts.pt"], str(tmp_path / "b.pt"), jobs=1)).scalars
    ]
    assert {"code files", "code bytes"} <= set(keys)


def test_section_without_settings_ignores_outer_settings():
    outer_settings = {"global_steps": 2, "optimizer.lr": 0.1}
    for name in ("module", "optimizer.fp32"):
        model_state = ModelState("a", "deepspeed zero-3", (), (name,), Settings(outer_settings))
        other_state = ModelState("b", "torch-zip", (), ("model",), Settings({"note": 1}))
        comparison = scalars.compare_settings(model_state, other_state, (name, None))
        assert ([change.key for change in comparison.changes], comparison.notes) == (["note"], [])
    outer_state = ModelState("a", "deepspeed zero-3", (), ("optimizer",), Settings(outer_settings))
    other = ModelState("b", "torch-zip", (), ("optimizer",), Settings({**outer_settings, "optimizer.lr": 0.2}))
    comparison = scalars.compare_settings(outer_state, other, ("optimizer", "optimizer"))
    assert [change.key for change in comparison.changes] == ["lr"]


def test_attributes_of_two_modules_are_compared(diff):
    """Both modules record the dropout and the plain tensor, so both are compared."""
    other = build_module(0.25)
    other[0].plain += 1
    result = diff(build_module(), other)
    assert [scalar.key for scalar in result.scalars] == ["_modules.1.p"]
    assert [change.fqn for change in result.changes if change.values] == ["0.plain"]


# Versions of modules.


def build_versioned_state(version):
    """Return a state_dict whose batch norm has the given version."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)))
    torch.manual_seed(0)
    state = collections.OrderedDict((name, torch.ones_like(value)) for name, value in model.state_dict().items())
    state._metadata = {**model.state_dict()._metadata, "0": {"version": version}}
    return state


@pytest.mark.parametrize("names", [(None, None), ("net", "net"), ("net", "model")])
def test_other_version_of_a_module_is_a_change(diff, names):
    """torch converts the state of an older module, so the same tensors may load as different values."""
    states = build_versioned_state(2), build_versioned_state(1)
    sides = (state if name is None else {name: state} for name, state in zip(names, states, strict=True))
    assert ScalarChange("_metadata.0.version", Status.CHANGED, 2, 1) in diff(*sides).scalars


def test_an_added_flag_in_the_metadata_is_a_change(diff):
    """load_state_dict obeys the added flag."""
    flagged = build_versioned_state(2)
    flagged._metadata = {path: {**local, "assign_to_params_buffers": True} for path, local in flagged._metadata.items()}
    change = ScalarChange("_metadata.0.assign_to_params_buffers", Status.ADDED, None, True)
    assert change in diff(build_versioned_state(2), flagged).scalars


def test_module_versions_on_one_side_are_not_a_change(diff):
    """A plain dict of the same tensors, and safetensors, have no metadata of modules."""
    state = build_versioned_state(2)
    for name in ("b.pt", "b.safetensors"):
        assert not diff(state, dict(state), names=("a.pt", name)).scalars
