"""Repeated layers shown once, and never more joined than is equal."""

from __future__ import annotations

import re
from itertools import product

import hypothesis.strategies as st
from hypothesis import example, given
from msgspec.structs import replace

from statecli.core.error_causes import Failure, FailureGroup, group_by_cause
from statecli.core.finding import Finding, Severity
from statecli.report import Line, fold


def names(*rows):
    return [
        line.cells[0] for line in fold.fold_lines([Line(row if isinstance(row, tuple) else (row, "x")) for row in rows])
    ]


def test_two_numbers_fold_together():
    """Experts inside layers are one line of two ranges."""
    rows = [f"layers.{a}.experts.{b}.w" for a, b in product(range(4), range(8))]
    assert names(*rows) == ["layers.{0..3}.experts.{0..7}.w"]


def test_layer_of_another_shape_has_its_own_row():
    """A layer of another shape is not hidden in the range."""
    rows = [(f"h.{n}.w", "[9]" if n == 5 else "[3]") for n in range(8)]
    assert names(*rows) == ["h.{0..4,6,7}.w", "h.5.w"]


def test_remarks_that_differ_keep_rows_apart():
    """A tied layer is not folded with untied layers."""
    rows = [Line(("h.0.w", "x"), "= emb.w"), Line(("h.1.w", "x")), Line(("h.2.w", "x"))]
    assert [line.cells[0] for line in fold.fold_lines(rows)] == ["h.0.w", "h.{1,2}.w"]


number = st.integers(0, 5)


def expand_name(name):
    """Return every name of a folded name."""
    parts = re.split(r"\{([^}]*)\}", name)
    choices = []
    for position, part in enumerate(parts):
        if position % 2 == 0:
            choices.append([part])
            continue
        values = []
        for run in part.split(","):
            first, _, last = run.partition("..")
            values += [str(n) for n in range(int(first), int(last or first) + 1)]
        choices.append(values)
    return {"".join(choice) for choice in product(*choices)}


@given(st.sets(st.tuples(number, number), min_size=1), st.sampled_from(["x", "y"]))
def test_folded_rows_have_each_name_exactly_once(pairs, cell):
    """The folded rows stand for exactly the given names, each once."""
    rows = [Line((f"a.{i}.b.{j}.w", cell)) for i, j in sorted(pairs)]
    stood_for = [name for line in fold.fold_lines(rows) for name in expand_name(line.cells[0])]
    assert sorted(stood_for) == sorted(row.cells[0] for row in rows)


def test_findings_of_repeated_layers_fold_however_many_they_are():
    """Seventy layers left on the CPU are one line, and two layers are one line too."""
    findings = [Finding("left-behind", Severity.ERROR, f"h.{n}.t: stays", "x", f"h.{n}.t") for n in range(70)]
    assert [finding.message for finding in fold.fold_findings(findings)] == ["h.{0..69}.t: stays"]
    assert [finding.message for finding in fold.fold_findings(findings[:2])] == ["h.{0,1}.t: stays"]
    assert fold.fold_findings(findings[:1]) == tuple(findings[:1])


def test_rows_with_different_counts_in_remarks_do_not_fold():
    """A count in a remark is a fact of its row, not a layer's number."""
    rows = [Line((f"l.{n}.w", "x"), f"{n % 3} nan") for n in range(9)]
    folded = fold.fold_lines(rows)
    assert {line.remark for line in folded} == {"0 nan", "1 nan", "2 nan"}
    assert {line.cells[0] for line in folded} == {"l.{0,3,6}.w", "l.{1,4,7}.w", "l.{2,5,8}.w"}


def test_remark_with_the_layer_number_of_its_row_folds():
    """`= h.3.b` next to `h.3.a` is the same fact in each layer."""
    rows = [Line((f"h.{n}.a", "x"), f"= h.{n}.b") for n in range(5)]
    assert [(line.cells[0], line.remark) for line in fold.fold_lines(rows)] == [("h.{0..4}.a", "= h.{0..4}.b")]


def test_remarks_with_different_layer_numbers_do_not_fold():
    """`= emb.0.w` and `= emb.1.w` are different remarks, so rows with them do not fold together."""
    rows = [Line((f"h.{n}.a", "x"), f"= emb.{n % 2}.w") for n in range(2, 8)]
    assert {line.remark for line in fold.fold_lines(rows)} == {"= emb.0.w", "= emb.1.w"}


def test_rows_with_equal_names_are_both_shown():
    """Rows with equal names are both shown."""
    assert names("h.0.w", "h.0.w") == ["h.0.w", "h.0.w"]


def test_name_with_a_number_sign_does_not_fold_with_numbers():
    """`a.#.w` is not a layer of `a.5.w`."""
    rows = [Line((name, "x")) for name in ("a.#.w", "a.5.w", "a.6.w")]
    assert [line.cells[0] for line in fold.fold_lines(rows)] == ["a.#.w", "a.{5,6}.w"]


def test_folded_line_lists_the_indexes_of_its_rows():
    """Every row is in exactly one line, in the order of its first row."""
    rows = [Line((name, "x")) for name in ("a.0", "b", "a.1", "a.3")]
    assert [(line.cells[0], indexes) for line, indexes in fold.fold_rows(rows)] == [
        ("a.{0,1,3}", [0, 2, 3]),
        ("b", [1]),
    ]


def test_errors_with_one_cause_are_one_line():
    """Different figures are left out, equal figures are kept; other causes and files are separate."""
    messages = [Failure(f"w{n}", f"a: b.pt: w{n}: 0x{n:08x} of 7 bytes") for n in range(3)]
    rest = [Failure("w3", "a: b.pt: w3: cut short"), Failure("w4", "c.pt: w4: 0x00000009 of 7 bytes")]
    assert group_by_cause([*messages, *rest]) == [
        FailureGroup("a: b.pt: w0 and 2 more tensors: … of 7 bytes", 3),
        FailureGroup("a: b.pt: w3: cut short", 1),
        FailureGroup("c.pt: w4: 0x00000009 of 7 bytes", 1),
    ]


@given(st.lists(st.text("a[]…0 1", max_size=6), max_size=4))
@example(["a [0]", "a []"])
def test_counts_of_causes_add_up_to_the_errors(causes):
    """Causes with more figures, or with fewer, are other causes."""
    groups = group_by_cause([Failure(f"w{n}", f"x.pt: w{n}: {cause}") for n, cause in enumerate(causes)])
    assert sum(group.size for group in groups) == len(causes)


def test_tied_tensors_have_one_message():
    """The message names the first tensor; a message without any of the names is not changed."""
    named, unnamed = "f: a: bad 1", "f: bad"
    for message, line in ((named, "f: a and 1 more tensor: bad 1"), (unnamed, unnamed)):
        assert group_by_cause([Failure("a", message), Failure("b", message)]) == [FailureGroup(line, 2)]


@given(st.data())
def test_rows_that_share_lines_fold_like_separate_lines(data):
    """Names, numbers and remarks are arbitrary."""
    lines = [Line(("", cell), remark) for cell in "xy" for remark in ("", "= layers.1.b", "tied")]
    kinds = data.draw(st.lists(st.integers(0, len(lines) - 1), max_size=40))
    part = st.sampled_from(("layers", "0", "1", "2", "3", "#", "w"))
    names = [".".join(data.draw(st.lists(part, min_size=1, max_size=4))) for _ in kinds]
    separate_lines = [
        replace(lines[kind], cells=(name, *lines[kind].cells[1:])) for kind, name in zip(kinds, names, strict=True)
    ]
    assert fold.fold_named_rows(names, kinds, lines) == fold.fold_rows(separate_lines)
