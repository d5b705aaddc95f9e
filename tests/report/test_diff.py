"""The report of a diff: its rows, sums and names."""

from __future__ import annotations

import csv
import io
import json
import math
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from statecli import render
from statecli.commands.diff.result import Broken, Field, Histogram, ScalarChange, Status
from statecli.commands.diff.rules import CHANGED
from statecli.core.finding import Finding, Severity, Wording
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import Kind, Oddity
from statecli.core.output import ChangeOrder
from statecli.render import Output
from statecli.report import Bars, Spread, change_text as changed, diff as diffing, diff_table
from statecli.report.diff import build_diff_report
from statecli.report.diff_view import DiffView, NameList
from statecli.report.documents import diff as documents
from statecli.values.delta import CompareOptions

from ..changes import (
    add_tensor,
    change_metadata,
    diff,
    keep_tensor,
    nudge_tensor,
    page,
    remove_tensor,
    rename_tensor,
    render_diff,
    rows,
    tensor,
)


def verdict(*changes, **facts):
    view = facts.pop("view", {})
    return page(diff(*changes, **facts), **view).verdict


def test_equal_states_are_identical_with_count_and_size():
    """One line reports identical tensors, their number and their size."""
    assert verdict(keep_tensor("a"), keep_tensor("b")) == "identical: 2 tensors, 128 B"
    assert rows(diff(keep_tensor("a"))) == {}


def test_identical_within_a_tolerance_says_so():
    """Tensors equal only because of --atol are called identical with --atol."""
    facts = {"how": CompareOptions(atol=1e-6), "ignored": (Field.DTYPE,)}
    assert verdict(keep_tensor("a"), **facts) == "identical with --atol 1e-06 --ignore dtype: 1 tensor, 64 B"


def test_metadata_only_diff_is_not_called_identical():
    """With --metadata-only the values were not read."""
    note = Oddity("values-not-compared", "values are not compared: --metadata-only")
    text = verdict(keep_tensor("a"), notes=(note,))
    assert "identical" not in text
    assert "values not compared" in text


def test_diff_with_uncompared_tensors_is_not_called_identical():
    """A pair without verdict, or with a broken file, spoils the "identical"."""
    text = verdict(keep_tensor("a"), keep_tensor("b", not_compared="no values on meta"))
    assert text == "no difference found in 2 tensors; values of 1 tensor not compared"
    text = verdict(keep_tensor("a"), broken=(Broken("b", "model", "a.pt: b: cut short"),))
    assert text == "no difference found in 1 tensor; 1 tensor could not be compared"


def test_verdict_counts_parameters_and_buffers_separately():
    """A changed counter is not counted among the weights."""
    changes = [
        nudge_tensor("w"),
        keep_tensor("v"),
        nudge_tensor("n", kind=Kind.BUFFER),
        keep_tensor("m", kind=Kind.BUFFER),
        add_tensor("x"),
    ]
    assert verdict(*changes) == "1 of 2 parameters changed, 1 added; 1 of 2 buffers changed"


def test_verdict_of_added_and_removed_tensors_has_no_total():
    """Without any on both sides there is no "of"."""
    assert verdict(add_tensor("x")) == "1 parameter added"
    assert verdict(add_tensor("x"), add_tensor("y"), remove_tensor("z")) == "2 parameters added, 1 removed"


def test_verdict_counts_renamed_parameters():
    """Renamed tensors are on both sides."""
    assert verdict(rename_tensor("a", "b"), keep_tensor("c")) == "1 of 2 parameters renamed"


def test_changed_metadata_has_a_row_and_is_in_the_verdict():
    """A changed epoch is a row, and in the verdict."""
    actual_diff = diff(keep_tensor("a"), scalars=(ScalarChange("epoch", Status.CHANGED, 3, 4),))
    assert rows(actual_diff) == {"metadata": [(("M epoch", "3 → 4"), "")]}
    assert page(actual_diff).verdict == "metadata: 1 changed"


def test_long_setting_does_not_move_the_column_of_short_settings():
    """A long setting is next to its name, or below; short settings are next to their names."""
    long = ScalarChange("prompt", Status.CHANGED, "x" * 50, "y" * 50)
    actual_diff = diff(keep_tensor("a"), scalars=(ScalarChange("epoch", Status.CHANGED, 3, 4), long))
    lines = render_diff(actual_diff, "table").splitlines()
    assert "  M epoch   3 → 4" in lines
    assert lines[lines.index("  M epoch   3 → 4") + 1] == "  M prompt"


def test_changed_row_has_counts_largest_and_relative_change_and_bar():
    """The row has a status letter, the number of elements, the largest and the relative change, and a bar."""
    assert rows(diff(nudge_tensor("fc.weight"))) == {
        "parameters": [(("M fc.weight", "3/16", "0.5", "0.001", "██████▎"), "")]
    }


def test_cell_says_all_only_if_all_elements_changed():
    """The cell has "all" only if all elements changed."""
    cells = [line[0] for line in rows(diff(nudge_tensor("a", changed=16), nudge_tensor("b", changed=15)))["parameters"]]
    assert [cell[1] for cell in cells] == ["all 16", "15/16"]


def test_changed_dtype_is_a_remark_next_to_changed_values():
    """A changed dtype is given next to the changed values."""
    old, new = tensor("a"), tensor("a", "bfloat16")
    values = nudge_tensor("a").values
    actual_diff = diff(change_metadata("a", old, new, Field.DTYPE, Field.VALUES, values=values))
    assert rows(actual_diff)["parameters"][0][1] == "dtype float32 → bfloat16"


@pytest.mark.parametrize(
    ("field", "before", "after", "text"),
    [
        (Field.DTYPE, {"dtype": "int8"}, {"dtype": "int64"}, "dtype int8 → int64"),
        (Field.SHAPE, {"shape": (2, 3)}, {"shape": ()}, "shape [2,3] → []"),
        (Field.KIND, {"kind": Kind.BUFFER}, {"kind": Kind.PARAMETER}, "kind buffer → parameter"),
        (Field.REQUIRES_GRAD, {"requires_grad": True}, {"requires_grad": False}, "requires_grad yes → no"),
        (Field.DEVICE, {"device": "cpu"}, {"device": "cuda:0"}, "device cpu → cuda:0"),
        (Field.TYING, {}, {"tied_to": ("b",)}, "now tied"),
        (Field.TYING, {"tied_to": ("b",)}, {}, "no longer tied"),
        (Field.TYING, {"tied_to": ("b",)}, {"tied_to": ("c",)}, "tied to different tensors"),
    ],
)
def test_remark_has_both_sides_of_each_field(field, before, after, text):
    """Both sides of each difference are shown."""
    change = change_metadata("a", tensor("a", **before), tensor("a", **after), field)
    (((_, remark), _),) = next(iter(rows(diff(change)).values()))
    assert remark == text


def test_remark_has_old_and_new_tied_names():
    """The row has the former and the present tied names."""
    change = change_metadata("a", tensor("a", tied_to=("b",)), tensor("a", tied_to=("c",)), Field.TYING)
    assert rows(diff(change))["parameters"][0][1] == "was tied to b, = c"


def test_a_rename_shows_both_names():
    """The names are written as git writes a rename."""
    assert rows(diff(rename_tensor("old", "new")))["parameters"] == [(("R old → new", ""), "")]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([0.05] * 7 + [5.0] + [0.05] * 4, "model.layers.7 changed 100 times as much as the median of 12 layers"),
        ([0.05] * 7 + [0.4] + [0.05] * 4, None),
        ([0.05, 0.05, 5.0], None),
        ([0.01 * 4**n for n in range(12)], None),
        (
            [0.5, 7.0, *[0.05] * 10],
            "model.layers.1 changed 140 times as much as the median of 12 layers, model.layers.0 10 times",
        ),
    ],
)
def test_the_headline_names_a_layer_that_changed_ten_times_more(sizes, text):
    """A layer is compared with the median of its siblings: one or a few layers are named, not a trend over all."""
    changes = [
        nudge_tensor(f"model.layers.{n}.{name}", size) for n, size in enumerate(sizes) for name in ("a.w", "b.w")
    ]
    parts = verdict(*changes, nudge_tensor("head", 0.01)).split("; ")
    assert [part for part in parts if "times as much" in part] == ([text] if text else [])


def set_norms(change, relative, before, elements=100):
    """The change with norms: `before` is the root mean square of the old values."""
    norm = before * math.sqrt(elements)
    values = replace(change.values, relative_l2=relative, l2=relative * norm, elements=elements)
    return replace(change, values=values)


def list_layers(unusual=(3, 8)):
    """Twelve layers whose bias starts near zero, a first and a last module."""
    changes = [set_norms(nudge_tensor("inp.weight"), 2e-4, 0.1)]
    for n in range(12):
        changes.append(set_norms(nudge_tensor(f"blocks.{n}.norm.bias"), 0.9, 1e-5))
        changes.append(set_norms(nudge_tensor(f"blocks.{n}.up.weight"), 0.08 if n in unusual else 3e-4, 0.1))
    return [*changes, set_norms(nudge_tensor("out.weight"), 0.09, 0.1), set_norms(nudge_tensor("scale"), 0.9, 1e-6)]


def test_the_headline_names_each_unusual_module():
    """Layers and other modules are named, but no tensor that starts near zero; the JSON has the same numbers."""
    actual_diff = diff(*list_layers())
    text = "out changed 287 times as much as the median of 12 layers, blocks.3 255 times, blocks.8 255 times"
    assert text in verdict(*list_layers())
    modules = json.loads(render_diff(actual_diff, "json"))["summary"]["modules"]
    assert [m["name"] for m in modules if "times_median" in m] == ["blocks.3", "blocks.8", "out"]
    assert modules[0] == {"name": "inp", "section": "model", "relative_l2": 2e-4}
    changes = [set_norms(nudge_tensor(f"m{n}.w"), 0.1, 0.1) for n in range(20)]
    assert verdict(*list_layers(()), *changes).count(" times") == 9
    assert "13 more at least 10 times" in verdict(*list_layers(()), *changes)


def test_a_layer_is_one_bar():
    """The bar is in the place of the layer, with a mark if unusual; small values before do not hide other layers."""
    (bars,) = build_diff_report(diff(*list_layers()), DiffView()).charts()
    assert bars.labels == ("inp", *(f"blocks.{n}" for n in range(12)), "out", "scale")
    assert [label for label, unusual in zip(bars.labels, bars.unusual, strict=True) if unusual] == [
        "blocks.3",
        "blocks.8",
        "out",
    ]
    assert bars.values[1:5] == pytest.approx([3e-4, 3e-4, 3e-4, 0.08], rel=0.1)
    assert bars.tensors[4] == ("model", "blocks.3.up.weight")


def test_bar_of_a_layer_names_parameters_without_a_measure():
    """A parameter without a measure is counted in words; NaN stays NaN; a layer without a measure has only words."""
    reshaped = [
        change_metadata(f"h.{n}.b", tensor("b"), tensor("b", shape=(2, 4)), Field.SHAPE, not_compared="shapes")
        for n in (0, 1)
    ]
    actual_diff = diff(
        nudge_tensor("h.0.a", 0.5),
        *reshaped,
        nudge_tensor("h.2.a", None, max_abs=None, nan_after=3),
        keep_tensor("h.3.a"),
    )
    (bars,) = build_diff_report(actual_diff, DiffView()).charts()
    assert bars.labels == ("h.0", "h.1", "h.2", "h.3")
    assert (bars.values[0], bars.values[1], bars.values[3]) == (0.5, math.inf, 0.0)
    assert math.isnan(bars.values[2])
    assert bars.words == ("1 of another shape", "of another shape", "", "")


def test_a_bar_leads_to_its_row():
    """Equal layers share the row."""
    text = render_diff(diff(*list_layers()), "html")
    ids = re.findall(r'<tr id="(row-\d+)"[^>]*>\s*<td class="name">([^<]*)', text)
    row_of = {name: row for row, name in ids}
    assert text.count(f'<a href="#{row_of["M blocks.{3,8}.up.weight"]}"') == 2


def test_a_page_sorts_its_rows_by_the_change():
    """New NaN comes first, then changes without a measure, then the largest change; a table keeps the file's order."""
    nan = nudge_tensor("e", nan_after=1, relative=None)
    changes = [nudge_tensor("a", 0.1), nudge_tensor("b", 0.5), add_tensor("c"), nan, nudge_tensor("d", 0.3)]
    text = render_diff(diff(*changes), "html")
    places = [text.index(name) for name in ("M e<", "A c<", "M b<", "M d<", "M a<")]
    assert places == sorted(places)
    assert '<th scope="col" class="n" aria-sort="descending">rel. change</th>' in text
    lines = [line.split()[:2] for line in render_diff(diff(*changes), "table").splitlines()]
    assert [name for letter, name in filter(lambda line: len(line) == 2, lines) if letter in "MA"][:2] == ["e", "a"]
    assert '" aria-sort' not in render_diff(diff(*changes), "html", sort=ChangeOrder.NAME)


def test_lost_tie_is_not_counted_as_a_changed_value():
    """Tensors that differ only in their ties are counted as a tie; the headline, the group and the tree agree."""
    names = ("emb", "head", "third")
    tied = [
        change_metadata(name, tensor(name, tied_to=tuple({*names} - {name})), tensor(name), Field.TYING)
        for name in names
    ]
    other = nudge_tensor("w")
    for actual, text in (
        ([*tied, other], "1 of 4 parameters changed, 1 tie lost (3 tensors)"),
        (tied, "1 tie lost (3 tensors)"),
        ([replace(tied[0], before=tied[0].after, after=tied[0].before)], "1 tie added (1 tensor)"),
    ):
        assert page(diff(*actual)).verdict == text
        assert page(diff(*actual)).groups[0].summary == text.replace(" parameters", "")
    (group,) = page(diff(*tied, other), tree=True).groups
    assert group.summary == "1/4 parameters, 1 tie lost (3 tensors)"


def test_remark_has_nan_and_inf_counts_of_both_sides():
    """The numbers of both sides are shown, and a row with new NaN or Inf is marked as bad."""
    actual_diff = diff(nudge_tensor("a", nan_after=3, inf_before=2), nudge_tensor("b", nan_before=1, nan_after=1))
    first, second = page(actual_diff).groups[0].lines
    assert (first.remark, first.mood) == ("NaN 0 → 3, Inf 2 → 0", "bad")
    assert (second.remark, second.mood) == ("NaN 1 → 1", "")


def test_an_undefined_change_has_no_number_and_a_reason():
    """Relative to zero is no 0."""
    actual_diff = diff(nudge_tensor("a", None, reason="before is all zeros"))
    assert rows(actual_diff)["parameters"] == [(("M a", "3/16", "0.5", "-", ""), "before is all zeros")]


def test_values_that_could_not_be_compared_say_why():
    """A dtype differs, and the values could not be read."""
    change = change_metadata("a", tensor("a"), tensor("a", "quint8"), Field.DTYPE, not_compared="quint8 has no scale")
    assert rows(diff(change))["parameters"][0][1] == "values not compared: quint8 has no scale"


def test_verbose_shows_the_first_changed_index_and_statistics():
    """-v: the index of the first, and the other statistics."""
    assert (
        rows(diff(nudge_tensor("a")), verbose=True)["parameters"][0][1]
        == "first [0,1], mean |Δ| 0.1, L2 0.7, cosine 0.99"
    )


LAYERS = [nudge_tensor(f"layers.{n}.{name}", 10.0**-n) for n in range(8) for name in "abcdefg"]


def test_layers_with_similar_changes_fold_into_one_row():
    """56 rows are 7, with the range of the change, the sum of elements and the largest Δ."""
    folded = rows(diff(*LAYERS))["parameters"]
    assert len(folded) == 7
    assert folded[0] == (("M layers.{0..7}.a", "24/128", "0.5", "1e-07..1", "██████████"), "")


def test_two_layers_fold_into_one_row():
    """Folding does not depend on the number of differences."""
    folded = rows(diff(nudge_tensor("l.0.w"), nudge_tensor("l.1.w"), nudge_tensor("l.w")))["parameters"]
    assert [cells[0] for cells, _ in folded] == ["M l.{0,1}.w", "M l.w"]


def test_layers_of_different_shapes_do_not_fold():
    """Layers of an nn.Sequential with similar names but different shapes are not a repetition."""
    changes = [nudge_tensor("net.0.w"), nudge_tensor("net.2.w")]
    changes[1] = replace(changes[1], before=tensor("net.2.w", shape=(2, 8)), after=tensor("net.2.w", shape=(2, 8)))
    assert [cells[0] for cells, _ in rows(diff(*changes))["parameters"]] == ["M net.0.w", "M net.2.w"]


@pytest.mark.parametrize("view", [{"sort": ChangeOrder.CHANGE}, {"lines": 9}, {"top": 9}, {"verbose": True}])
def test_ordered_differences_do_not_fold(view):
    """An order of differences is of single tensors."""
    (group_rows,) = rows(diff(nudge_tensor("l.0.w"), nudge_tensor("l.1.w")), **view).values()
    assert [cells[0] for cells, _ in group_rows] == ["M l.0.w", "M l.1.w"]


def test_a_tensor_of_zeros_before_has_no_remark():
    """A zero bias before is ordinary: its column has "from zero"."""
    zeros = [nudge_tensor(f"{name}.b", None, reason="all old values are zero") for name in "xy"]
    assert rows(diff(*zeros))["parameters"] == [((f"M {n}.b", "3/16", "0.5", "from zero", ""), "") for n in "xy"]


def test_equal_remark_of_all_rows_is_in_the_heading():
    """The heading has the common remark; rows with different remarks have their own."""
    sides = tensor("x"), tensor("x", "int8")
    recasts = [
        change_metadata(name, *sides, Field.DTYPE, Field.VALUES, values=nudge_tensor("x").values) for name in "xy"
    ]
    (group,) = page(diff(*recasts)).groups
    assert group.summary == "2 of 2 changed; dtype float32 → int8"
    assert {line.remark for line in group.lines} == {""}
    mixed_rows = rows(diff(*recasts, nudge_tensor("z")))["parameters"]
    assert [remark for _, remark in mixed_rows] == ["dtype float32 → int8", "dtype float32 → int8", ""]


def test_a_tie_of_folded_layers_is_named():
    """Layers tied to the same tensor share a line with its name."""
    before, after = tensor("x"), replace(tensor("x"), tied_to=("emb.w",))
    tied = [change_metadata(f"l.{n}.w", before, after, Field.TYING) for n in range(2)]
    ((cells, remark),) = rows(diff(*tied))["parameters"]
    assert (cells[0], cells[1], remark) == ("M l.{0,1}.w", "now tied", "= emb.w")


def test_unfolded_each_layer_has_its_row():
    """--all, and -v whose remarks differ by layer."""
    assert len(rows(diff(*LAYERS), unfold=True)["parameters"]) == len(LAYERS)
    assert len(rows(diff(*LAYERS), verbose=True)["parameters"]) == len(LAYERS)


def test_renamed_layers_fold():
    """A number in both names is one number."""
    actual_diff = diff(*(rename_tensor(f"{n}.w", f"layers.{n}.w") for n in range(50)))
    assert rows(actual_diff)["parameters"] == [(("R {0..49}.w → layers.{0..49}.w", ""), "")]


def test_different_changes_do_not_fold():
    """A layer whose dtype changed too stands by itself."""
    recast = change_metadata(
        "layers.9.a", tensor("x"), tensor("x", "int8"), Field.DTYPE, Field.VALUES, values=nudge_tensor("x").values
    )
    assert [cells[0] for cells, _ in rows(diff(*LAYERS, recast))["parameters"]].count("M layers.9.a") == 1


def test_lines_limits_each_group():
    """-n 2: two rows of each role, how many more, and the verdict of all."""
    actual_diff = diff(*LAYERS[:10], *(nudge_tensor(f"b{n}", kind=Kind.BUFFER) for n in range(2)))
    groups = rows(actual_diff, lines=2)
    assert [len(lines) for lines in groups.values()] == [3, 2]
    assert groups["parameters"][-1][0][0] == "… and 8 more"
    assert page(actual_diff, lines=2).verdict == page(actual_diff).verdict


def test_lines_never_hides_a_finding():
    """A failed expectation is shown, whatever the limit of -n."""
    finding = Finding("frozen", Severity.ERROR, "layers.7.g: changed, and is frozen", "b.pt", "layers.7.g")
    actual_diff = diff(*LAYERS, findings=(finding,), expected=True)
    for output in ("table", "plain", "markdown"):
        assert "frozen" in render_diff(actual_diff, output, lines=0)


def test_shown_and_hidden_rows_are_all_rows():
    """The shown rows and the counted rows are all rows: -n counts differences, not layers."""
    all_rows = rows(diff(*LAYERS), unfold=True)["parameters"]
    for lines in (0, 1, 9, 54, 55):
        limited_rows = rows(diff(*LAYERS), lines=lines)["parameters"]
        assert [line[0] for line in limited_rows[:-1]] == [line[0] for line in all_rows[:lines]]
        assert limited_rows[-1][0][0] == f"… and {56 - lines} more"
    for lines in (56, 57):
        assert rows(diff(*LAYERS), lines=lines)["parameters"] == all_rows


def test_headings_name_the_section():
    """The moving average next to the model is distinguished."""
    actual_diff = diff(nudge_tensor("w"), nudge_tensor("w", section="ema"))
    assert list(rows(actual_diff)) == ["model: parameters", "ema: parameters"]


def test_the_tree_sums_by_module():
    """Each module has its number of changes and its largest change; identical modules are not shown."""
    actual_diff = diff(nudge_tensor("a.x", 0.5), keep_tensor("a.y"), keep_tensor("b.z"))
    (group,) = page(actual_diff, tree=True).groups
    assert group.summary == "1/3 parameters"
    cells = [line.cells[:3] for line in group.lines]
    assert cells == [("a", "1/2 parameters", "0.5"), ("  M x", "values 3/16", "0.5")]


def test_the_tree_folds_layers():
    """Layers with the same changes are one branch; --all shows each layer."""
    names = [line.cells[0] for line in page(diff(*LAYERS), tree=True).groups[0].lines]
    assert names[:3] == ["layers", "  {0..7}", "    M a"]
    assert len(page(diff(*LAYERS), tree=True, unfold=True).groups[0].lines) == 1 + 8 + 56


def test_name_status_lists_letters_and_names():
    """--name-status: a letter and the name, two names of a rename, nothing identical."""
    scalars = (ScalarChange("epoch", Status.CHANGED, 1, 2),)
    actual_diff = diff(
        nudge_tensor("m"),
        keep_tensor("i"),
        rename_tensor("old", "new"),
        add_tensor("x"),
        remove_tensor("gone"),
        scalars=scalars,
    )
    assert render_diff(actual_diff, "plain", names=NameList.STATUS) == "M\tm\nR\told\tnew\nA\tx\nD\tgone\nM\tepoch\n"
    assert render_diff(actual_diff, "plain", names=NameList.ONLY) == "m\nnew\nx\ngone\nepoch\n"


def test_names_have_their_section_where_there_are_several():
    """Two entries of one name are different lines."""
    actual_diff = diff(nudge_tensor("w"), nudge_tensor("w", section="ema"))
    assert render_diff(actual_diff, "plain", names=NameList.ONLY) == "model.w\nema.w\n"


def test_line_breaks_and_tabs_of_a_name_are_escaped():
    """A line break or a tab in a name makes no second line and no second field."""
    assert render_diff(diff(nudge_tensor("a\n\tb\x1b[31m")), "plain", names=NameList.STATUS) == "M\ta\\n\\tb\\x1b[31m\n"


@pytest.mark.parametrize(
    "output", [output.value for output in Output if output.value not in ("sarif", "github", "gitlab")]
)
def test_every_output_of_rows_has_every_change(output):
    """Added, removed, changed, renamed and metadata, in each output."""
    actual_diff = diff(
        nudge_tensor("moved"),
        add_tensor("fresh"),
        remove_tensor("gone"),
        rename_tensor("old", "new"),
        scalars=(ScalarChange("epoch", Status.CHANGED, 1, 2),),
    )
    text = render_diff(actual_diff, output)
    assert all(name in text for name in ("moved", "fresh", "gone", "old", "new", "epoch"))


@pytest.mark.parametrize("output", ["table", "plain", "markdown"])
def test_finding_of_a_changed_tensor_does_not_repeat_its_row(output):
    """The finding of a changed tensor is its row."""
    assert render_diff(diff(nudge_tensor("moved")), output).count("moved") == 1


@pytest.mark.parametrize("output", ["table", "plain", "markdown"])
def test_quiet_shows_findings_and_no_rows(output):
    """-q: the findings alone."""
    text = render_diff(diff(nudge_tensor("moved")), output, quiet=True)
    assert "error[changed]" in text
    assert "3/16" not in text


@pytest.mark.parametrize("output", [output.value for output in Output])
def test_a_failed_expectation_is_in_every_output(output):
    """Every output has the reason of exit status 1, even if no tensor differs."""
    finding = Finding("changed", Severity.ERROR, "head.*: no matching tensor changed", "b.pt")
    actual_diff = diff(keep_tensor("head.w"), findings=(finding,), expected=True)
    assert "no matching tensor changed" in render_diff(actual_diff, output)


def test_allowed_changes_do_not_fail():
    """--may-change is fulfilled: rows are shown and the command exits with 0."""
    report = build_diff_report(diff(nudge_tensor("a"), findings=(), expected=True), DiffView())
    assert not report.has_failed()
    assert report.page().groups
    assert report.page().verdict == "1 of 1 parameters changed: all changes are allowed"


def test_plain_output_through_a_pipe_does_not_fold():
    """Through a pipe nothing is folded, and each row is one line."""
    lines = render_diff(diff(*LAYERS), "plain", terminal=False).splitlines()
    assert len(lines) == 1 + len(LAYERS) + 2


def test_plain_of_equal_states_is_one_line():
    """No header over nothing."""
    assert render_diff(diff(keep_tensor("a")), "plain") == "identical: 1 tensor, 64 B\n"


def test_csv_has_the_columns_of_a_spreadsheet():
    """Each number in a column of its own, both sides of each fact, metadata too."""
    actual_diff = diff(nudge_tensor("a"), scalars=(ScalarChange("epoch", Status.CHANGED, 1, 2),))
    first, second = csv.DictReader(io.StringIO(render_diff(actual_diff, "csv")))
    assert (first["status"], first["fqn"], first["changed"], first["elements"]) == ("changed", "a", "3", "16")
    assert (first["dtype_before"], first["shape_after"], first["max_abs"]) == ("float32", "[4,4]", "0.5")
    assert (second["kind"], second["fqn"], second["change"]) == ("metadata", "epoch", "1 → 2")


def test_json_lists_changes_and_counts_identical_tensors():
    """Identical pairs are in the summary alone."""
    actual_diff = diff(
        nudge_tensor("a"), keep_tensor("b"), add_tensor("c"), notes=(Oddity("prefix", "looked through module."),)
    )
    document = json.loads(render_diff(actual_diff, "json"))
    assert document["schema"] == "statecli.diff/1"
    counts = ("added", "removed", "changed", "renamed", "identical")
    assert [document["summary"][name] for name in counts] == [1, 0, 1, 0, 1]
    assert [row["fqn"] for row in document["changes"]] == ["a", "c"]
    assert document["changes"][1]["before"] is None
    assert document["notes"][0]["name"] == "prefix"


def test_jsonl_types_each_line():
    """A change has the type `change`, so programs can filter a stream."""
    actual_diff = diff(nudge_tensor("a"), scalars=(ScalarChange("epoch", Status.CHANGED, 1, 2),))
    types = [json.loads(line)["type"] for line in render_diff(actual_diff, "jsonl").splitlines()]
    assert types == ["target", "change", "finding", "finding", "metadata"]


def test_depth_is_drawn_of_parameters_in_order():
    """Each parameter has a bar, unchanged parameters at zero; buffers are left out."""
    actual_diff = diff(
        nudge_tensor("b", 0.5), nudge_tensor("a", 0.1), nudge_tensor("n", kind=Kind.BUFFER), keep_tensor("s")
    )
    (bars,) = build_diff_report(actual_diff, DiffView()).charts()
    assert isinstance(bars, Bars)
    assert (bars.labels, bars.values) == (("b", "a", "s"), (0.5, 0.1, 0.0))


def test_bar_of_a_change_from_zero_differs_from_that_of_nan():
    """A zero bias before has a finite Δ but no ratio: its bar differs from the bar of a NaN."""
    actual_diff = diff(
        nudge_tensor("zero", None),
        nudge_tensor("nan", None, max_abs=None, nan_after=3),
        nudge_tensor("one", 0.1, inf_after=1),
    )
    (bars,) = build_diff_report(actual_diff, DiffView()).charts()
    assert bars.values[0] == math.inf
    assert all(map(math.isnan, bars.values[1:]))
    assert bars.words == ("no relative change, because all old values are zero", "", "")


def test_tensors_without_a_measure_are_not_drawn_as_unchanged():
    """Another shape, uncompared values and a damaged file have their own words, in their own places."""
    reshaped = change_metadata(
        "b", tensor("b"), tensor("b", shape=(2, 4)), Field.SHAPE, not_compared="the shapes differ"
    )
    cast = change_metadata("e", tensor("e"), tensor("e", "float16"), Field.DTYPE)
    change = diff(nudge_tensor("a", 0.5), reshaped, keep_tensor("d", not_compared="sparse"), cast)
    change = replace(change, broken=(Broken("c", "model", "b.pt: c: checksum wrong"),))
    tensors = list(change.after.tensors)
    tensors.insert(2, tensor("c"))
    (bars,) = build_diff_report(
        replace(change, after=replace(change.after, tensors=tuple(tensors))), DiffView()
    ).charts()
    assert bars.labels == ("a", "b", "c", "d", "e")
    assert bars.values == (0.5, math.inf, math.inf, math.inf, 0.0)
    assert bars.words == ("", "of another shape", "not compared", "not compared", "")


def test_histograms_are_drawn():
    """Each histogram is one picture, under its name."""
    actual_diff = diff(nudge_tensor("a"), histograms=(Histogram("a", "model", (0.0, 1.0), (3,)),))
    *_, spread = build_diff_report(actual_diff, DiffView()).charts()
    assert isinstance(spread, Spread)
    assert (spread.title, spread.counts) == ("a", (3,))


def test_equal_states_have_no_chart():
    """No empty picture of equal states."""
    assert build_diff_report(diff(keep_tensor("a")), DiffView()).charts() == ()


def test_an_outline_through_a_pipe_keeps_remarks():
    """--tree as plain text has added tensors and changed metadata."""
    actual_diff = diff(nudge_tensor("a.b"), add_tensor("a.c"), scalars=(ScalarChange("epoch", Status.CHANGED, 1, 2),))
    text = render_diff(actual_diff, "plain", tree=True)
    assert "float32 [4,4], 64 B" in text
    assert "1 → 2" in text


def test_folded_branch_has_the_combined_change_of_its_layers():
    """Under `{0..7}` each line has the sum of the elements, and the combined change of all eight layers."""
    lines = {line.cells[0]: line.cells for line in page(diff(*LAYERS), tree=True).groups[0].lines}
    assert lines["    M a"][1] == "values 24/128"
    norms = [(3.0, 4.0), (5.0, 12.0)]  # of the difference, and of before
    layers = [nudge_tensor(f"layers.{n}.a", l2 / before, l2=l2) for n, (l2, before) in enumerate(norms)]
    lines = {line.cells[0]: line.cells for line in page(diff(*layers), tree=True).groups[0].lines}
    assert lines["    M a"][2] == lines["layers"][2] == f"{math.sqrt((9 + 25) / (16 + 144)):.2g}"


@given(st.lists(st.tuples(*[st.floats(1e-150, 1e150)] * 2), min_size=1, max_size=6))
def test_combined_change_equals_the_change_of_one_joined_tensor(norms):
    """The combined change equals the change of all values in one tensor."""
    together = changed.combine_relative_change(
        [nudge_tensor("a", l2 / before, l2=l2) for l2, before in norms if l2 / before > 0]
    )
    l2, before = (math.hypot(*numbers) for numbers in zip(*norms, strict=True))
    assert together == pytest.approx(l2 / before, rel=1e-9)


def test_a_change_without_a_norm_is_left_out_of_the_sum():
    """A tensor of zeros before has no ratio; a difference only in bits has a ratio of zero."""
    assert changed.combine_relative_change([nudge_tensor("a", 0.5, l2=1.0), nudge_tensor("b", None, l2=9.0)]) == 0.5
    assert changed.combine_relative_change([nudge_tensor("a", 0.0, l2=0.0, max_abs=0.0)]) == 0.0
    assert changed.combine_relative_change([nudge_tensor("a", None)]) is None


def test_norms_beyond_float64_have_a_combined_change():
    """Two tensors with norms of 1e311 before, and changes of a thousandth of the norms."""
    assert changed.combine_relative_change([nudge_tensor("a", 1e-3, l2=1e308)] * 2) == pytest.approx(1e-3)


def test_total_includes_tensors_that_cannot_be_read():
    """Both sides have four tensors, and one tensor cannot be read: two of four changed."""
    change = diff(
        nudge_tensor("a"), nudge_tensor("b"), keep_tensor("c"), broken=(Broken("d", "model", "b.pt: d: cut short"),)
    )
    after = replace(change.after, tensors=(*change.after.tensors, tensor("d")))
    assert page(replace(change, after=after)).verdict.startswith("2 of 4 parameters changed; 1 tensor could not")
    assert page(replace(change, after=after)).groups[0].summary == "2 of 4 changed"


def test_empty_name_is_shown_as_two_quotes():
    """Two quotes stand for the empty name, in each output for people."""
    actual_diff = diff(
        nudge_tensor(""),
        rename_tensor("", "x"),
        findings=(CHANGED.finding(Wording("values differ", ""), target="b", fqn=""),),
    )
    plain = render_diff(actual_diff, "plain")
    assert [line.split()[2] for line in plain.splitlines()[1:3]] == ["''", "x"]
    assert plain.splitlines()[2].split()[3] == "''"
    assert {line.cells[0] for line in page(actual_diff).groups[0].lines} == {"M ''", "R '' → x"}
    assert "M ''" in render_diff(actual_diff, "plain", tree=True)
    assert render_diff(actual_diff, "plain", names=NameList.ONLY).splitlines() == ["''", "x"]
    assert render_diff(actual_diff, "plain", quiet=True) == "error[changed]: '': values differ\n"


def test_findings_and_damage_have_their_section_where_there_are_several():
    """The section is written as by `--name-only`; JSON has section and name apart."""
    texts = tuple(
        CHANGED.finding(Wording("values differ", "w"), target="b", fqn="w", section=text) for text in ("model", "ema")
    )
    damage = (Broken("u", "ema", "b.pt: u: cut short"),)
    actual_diff = diff(nudge_tensor("w"), nudge_tensor("w", section="ema"), findings=texts, broken=damage)
    expected_text = (
        "error[changed]: model.w: values differ, by at most 0.5\nerror[changed]: ema.w: values differ, by at most 0.5\n"
    )
    assert render_diff(actual_diff, "plain", quiet=True) == expected_text
    assert "- `error[changed]: ema.w: values differ, by at most 0.5`" in render_diff(
        actual_diff, "markdown", quiet=True
    )
    assert rows(actual_diff)["not compared"] == [(("? ema.u", "", "", "", ""), "b.pt: ema.u: cut short")]
    json_findings = json.loads(render_diff(actual_diff, "json"))["findings"]
    assert [finding["message"] for finding in json_findings] == ["w: values differ", "w: values differ"]
    assert all("wording" not in finding for finding in json_findings)
    (bars,) = build_diff_report(actual_diff, DiffView()).charts()
    assert bars.labels == ("model.w", "ema.w")


def test_lines_limit_tensors_that_could_not_be_compared():
    """-n 2 limits tensors that could not be compared, as in other groups; without -n, repeated layers fold."""
    damage = tuple(Broken(f"l.{n}.w", "", f"b.pt: l.{n}.w: cut short") for n in range(50))
    actual_diff = diff(keep_tensor("a"), broken=damage)
    assert [cells[0] for cells, _ in rows(actual_diff, lines=2)["not compared"]] == ["? l.{0..49}.w"]
    assert len(rows(actual_diff, lines=2, unfold=True)["not compared"]) == 3
    plain = render_diff(actual_diff, "plain", lines=2)
    assert plain.count("cut short") == 2
    assert plain.endswith("… and 48 more (-n 2)\n")
    assert render_diff(actual_diff, "plain").count("cut short") == 50


def test_tree_has_nan_counts_and_old_names_as_remarks():
    """Facts without a column in the tree are remarks there too."""
    lines = page(
        diff(nudge_tensor("a", nan_after=1, max_abs=0.0, relative=0.0, left_out=1), rename_tensor("x", "y")), tree=True
    )
    assert [line.remark for line in lines.groups[0].lines] == ["NaN 0 → 1", "was x"]


def test_row_with_only_a_new_nan_has_no_size_of_change():
    """If only a NaN is new, the finite values did not change: no number gives the size of a change."""
    actual_diff = diff(nudge_tensor("a", 0.0, max_abs=0.0, nan_after=1, left_out=1))
    assert rows(actual_diff)["parameters"] == [(("M a", "3/16", "-", "-", ""), "NaN 0 → 1")]


def test_plain_output_leaves_out_an_empty_change_column():
    """Plain text has the column "change" if any change is not of values; CSV always has the column."""
    assert "change " not in render_diff(diff(nudge_tensor("a")), "plain").splitlines()[0] + " "
    assert render_diff(diff(nudge_tensor("a"), add_tensor("b")), "plain").splitlines()[0].endswith("  change")
    assert render_diff(diff(nudge_tensor("a")), "csv").splitlines()[0].endswith(",change,finding")


def test_cell_says_all_but_n_if_few_elements_are_unchanged():
    """If both numbers would look equal, the number of unchanged elements follows the large number."""
    text = rows(diff(nudge_tensor("a", elements=2_345_678, changed=2_345_617)))["parameters"][0][0][1]
    assert text == "all 2.35 M but 61"
    assert rows(diff(nudge_tensor("a", elements=2_345_678, changed=2_300_000)))["parameters"][0][0][1] == "2.3 M/2.35 M"


def test_one_left_out_position_is_singular():
    """-v counts the positions left out of the statistics."""
    for count, text in ((1, "1 position left out"), (2, "2 positions left out")):
        assert rows(diff(nudge_tensor("a", left_out=count)), verbose=True)["parameters"][0][1].endswith(f", {text}")


def test_verbose_plain_output_has_a_column_for_each_statistic():
    """-v through a pipe: where first, mean, L2, cosine in columns of their own; how many elements there are always."""
    head, row, *_ = render_diff(diff(nudge_tensor("a")), "plain").splitlines()
    assert head.split() == ["status", "kind", "fqn", "elements", "changed", "relative_l2", "max_abs"]
    head, row, *_ = render_diff(diff(nudge_tensor("a")), "plain", verbose=True).splitlines()
    assert head.split()[3:] == [
        "elements",
        "changed",
        "relative_l2",
        "max_abs",
        "mean_abs",
        "l2",
        "cosine",
        "rank",
        "first",
    ]
    assert row.split()[3:] == ["16", "3", "0.001", "0.5", "0.1", "0.7", "0.99", "-", "[0,1]"]


EXPECTED = [Finding("frozen-changed", Severity.ERROR, f"w{n}x: changed", "b.pt", f"w{n}x") for n in range(9)]


@pytest.mark.parametrize("output", ["table", "plain", "markdown"])
def test_lines_limit_findings_too(output):
    """-n 2 shows two findings next to the rows, and counts the others; with -q, findings are one line."""
    option = "--must-not-change '*'"
    findings = tuple(
        problem.reword(Wording(f"changed, but matches {option}: dtype {n}", problem.fqn, option, f"dtype {n}"))
        for n, problem in enumerate(EXPECTED)
    )
    text = render_diff(diff(*LAYERS, findings=findings, expected=True), output, lines=2)
    assert [n for n in range(9) if f"w{n}x" in text] == [0, 1]
    assert "… and 7 more (-n 2)" in text
    quiet_text = render_diff(diff(*LAYERS, findings=findings, expected=True), output, quiet=True, lines=2)
    assert quiet_text.count("error[") == 1


def diff_with_class(*changes, **facts):
    """A diff of a class and a checkpoint."""
    change = diff(*changes, **facts)
    return replace(
        change, before=replace(change.before, target="net.py:Net", format="module", traits=FormatTraits(is_class=True))
    )


def test_a_load_that_fails_is_not_called_without_difference():
    """Only the names differ, by a prefix: the verdict reports this, although no row differs."""
    note = Oddity("values-not-compared", "values are not compared: Net is a class")
    finding = Finding("wrapper-prefix", Severity.ERROR, "the names differ by 'module.'", "b.pt")
    text = render_diff(diff_with_class(keep_tensor("a"), findings=(finding,), notes=(note,)), "plain")
    assert text.startswith("no tensor differs, but load_state_dict would fail (1 finding): 1 tensor, 64 B\n")
    assert "nothing differs" not in text
    assert render_diff(diff_with_class(keep_tensor("a"), notes=(note,)), "plain").startswith("nothing differs")


@pytest.mark.parametrize("output", ["table", "plain", "markdown"])
def test_dtype_that_a_load_casts_is_a_finding_of_every_output(output):
    """The dtype is named too, although load_state_dict accepts and casts the tensor."""
    half = change_metadata("a", tensor("a"), tensor("a", "float16"), Field.DTYPE)
    finding = Finding("changed", Severity.ERROR, "a: dtype: float32 → float16", "b.pt", "a")
    assert "error[changed]" in render_diff(diff_with_class(half, findings=(finding,)), output)


# --- parts that are not built -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["plain", "json", "jsonl", "csv"])
def test_flat_outputs_build_no_page_and_locate_no_finding(monkeypatch, output):
    """For 300,000 changed tensors both would take as long as the comparison, and the rows have all facts."""
    monkeypatch.delattr(diffing, "build_groups")
    monkeypatch.setattr(diffing, "add_places", lambda *_: pytest.fail("a finding was located"))
    assert "layers.7.w" in render_diff(diff(*(nudge_tensor(f"layers.{n}.w") for n in range(50))), output)


@pytest.mark.parametrize("output", ["json", "jsonl"])
def test_a_row_of_json_is_built_when_it_is_written(monkeypatch, output):
    """At most the rows of one write are kept, however many rows there are."""
    built, written_after = [], []
    build = documents._build_diff_row
    monkeypatch.setattr(documents, "_build_diff_row", lambda change: built.append(change.fqn) or build(change))
    report = build_diff_report(diff(*(nudge_tensor(f"layers.{n}.w") for n in range(300))), DiffView())

    class Sink:
        def utf8(self, raw):
            written_after.extend([len(built)] * (b'"status":' in raw))

    render.write(report, Output(output), Sink(), render.RenderOptions())
    assert written_after == ([128, 256, 300] if output == "json" else list(range(1, 301)))


def test_plain_text_reads_each_row_once(monkeypatch):
    """Plain text does not compute the columns for programs."""
    read = []
    monkeypatch.setattr(diff_table, "_get_side_field", lambda *facts: read.append(facts))
    monkeypatch.setattr(diff_table, "_get_measure", lambda name, change: read.append((name, change.fqn)))
    render_diff(diff(*(nudge_tensor(f"layers.{n}.w") for n in range(50))), "plain", terminal=False)
    assert len(read) == 4 * 50
