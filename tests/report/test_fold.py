"""Repeated layers shown once, and never more joined than is equal."""

from __future__ import annotations

import re
from itertools import product

import hypothesis.strategies as st
from hypothesis import given

from statecli.finding import Finding, Severity
from statecli.report import Line, fold


def names(*rows):
    return [line.cells[0] for line in fold.lines([Line(row if isinstance(row, tuple) else (row, "x")) for row in rows])]


def test_layers_fold_to_a_range():
    """Twelve equal layers are one line."""
    assert names(*[f"layers.{n}.weight" for n in range(12)]) == ["layers.{0..11}.weight"]


def test_two_numbers_fold_together():
    """Experts inside layers are one line of two ranges."""
    rows = [f"layers.{a}.experts.{b}.w" for a, b in product(range(4), range(8))]
    assert names(*rows) == ["layers.{0..3}.experts.{0..7}.w"]


def test_an_odd_layer_stands_apart():
    """A layer of another shape is not hidden in the range."""
    rows = [(f"h.{n}.w", "[9]" if n == 5 else "[3]") for n in range(8)]
    assert names(*rows) == ["h.{0..4,6,7}.w", "h.5.w"]


def test_numbers_inside_words_are_names():
    """conv1 and conv2 are different layers, not a repetition."""
    assert names("conv1.weight", "conv2.weight") == ["conv1.weight", "conv2.weight"]


def test_subscripts_fold():
    """Tensors of a Python list are a repetition too."""
    assert names("anchors[0]", "anchors[1]", "anchors[2]") == ["anchors[{0..2}]"]


def test_remarks_that_differ_keep_rows_apart():
    """A tied layer is not folded with layers that are not."""
    rows = [Line(("h.0.w", "x"), "= emb.w"), Line(("h.1.w", "x")), Line(("h.2.w", "x"))]
    assert [line.cells[0] for line in fold.lines(rows)] == ["h.0.w", "h.{1,2}.w"]


number = st.integers(0, 5)


def expanded(name):
    """Every name that a folded one stands for."""
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
def test_folding_loses_and_invents_nothing(pairs, cell):
    """The names that the folded rows stand for are exactly the rows, each once."""
    rows = [Line((f"a.{i}.b.{j}.w", cell)) for i, j in sorted(pairs)]
    stood_for = [name for line in fold.lines(rows) for name in expanded(line.cells[0])]
    assert sorted(stood_for) == sorted(row.cells[0] for row in rows)


def test_many_findings_fold_and_few_do_not():
    """Seventy left-behind layers are told in one line, three are told one by one."""
    many = [Finding("left-behind", Severity.ERROR, f"h.{n}.t: stays", "x", f"h.{n}.t") for n in range(70)]
    assert [one.message for one in fold.findings(many)] == ["h.{0..69}.t: stays"]
    assert fold.findings(many[:3]) == tuple(many[:3])
