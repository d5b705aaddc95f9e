"""`-f table` fits the width of the terminal and omits no text."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from statecli.commands.diff.result import Field
from statecli.core.model_state import Kind
from statecli.core.run_scope import NotChecked
from statecli.render import Output, RenderOptions, format_report, table
from statecli.render._ansi import paint as paint_ansi
from statecli.report import Group, Line, Page, Report, ReportColumn, Table, build_problem

from ..audits import failed_target, finding, render_audit as audited, target
from ..changes import add_tensor, change_metadata, diff, keep_tensor, nudge_tensor, rename_tensor, render_diff, tensor

PROBLEM = build_problem(finding())


def test_the_verdict_is_below_the_title():
    """The first two lines show the compared targets and the result."""
    assert (
        render_diff(diff(nudge_tensor("a"), keep_tensor("b")), "table").splitlines()[1] == "1 of 2 parameters changed"
    )


@pytest.mark.parametrize(
    ("problems", "status", "last"),
    [
        (None, 1, "step failed: exit status 1"),
        (None, 0, "step failed: exit status 0"),
        ((), 0, "clean: exit status 0"),
        ((PROBLEM,), 1, "1 error: exit status 1"),
        ((PROBLEM,), 2, "step failed: exit status 2"),
    ],
)
@pytest.mark.parametrize("output", [Output.TABLE, Output.PLAIN])
def test_the_last_line_is_the_result_with_the_exit_status(problems, status, last, output):
    """The last line is visible after long output. The problems may be below separate headings."""
    page = Page("", (ReportColumn("name"),), (), ("step failed",), verdict="step failed")
    group = None if problems is None else lambda: problems
    report = Report("a.pt", lambda: PROBLEM, lambda: Table((), ()), lambda: page, problems=group)
    text = format_report(report, output, RenderOptions(terminal=True, exit_status=status))
    assert text.splitlines()[-1] == last


def test_plain_lines_have_a_repeated_verdict_once():
    """The last line has the verdict and the exit status."""
    page = Page("", (ReportColumn("name"),), (), ("1 changed",), verdict="1 changed")
    report = Report("a.pt", lambda: PROBLEM, lambda: Table((), ()), lambda: page)
    text = format_report(report, Output.PLAIN, RenderOptions(terminal=False, exit_status=1))
    assert text == "1 changed: exit status 1\n"


def test_result_with_unread_values_is_not_called_clean():
    """Values that were not read may be NaN."""
    page = Page("", (ReportColumn("name"),), (), (), verdict="1 audited: no findings")
    report = Report(
        "a.pt",
        lambda: PROBLEM,
        lambda: Table((), ()),
        lambda: page,
        problems=tuple,
        not_checked=(NotChecked("tensor", 3, "values not read"),),
    )
    text = format_report(report, Output.TABLE, RenderOptions(terminal=True, exit_status=0))
    assert text.splitlines()[-1] == "no findings, 3 tensors not checked: exit status 0"


def test_a_remark_stands_in_empty_columns():
    """An added tensor needs no extra line for its dtype and shape."""
    lines = render_diff(diff(nudge_tensor("a"), add_tensor("new")), "table").splitlines()
    assert "  A new  float32 [4,4], 64 B" in lines


def test_a_remark_never_runs_into_a_long_name():
    """If a name takes the place of the columns, the remark is on the next line."""
    text = render_diff(diff(nudge_tensor("a"), add_tensor("n" * 70)), "table")
    assert "n" * 70 + "\n" in text
    assert "↳ float32 [4,4], 64 B" in text


@pytest.mark.parametrize("width", [20, 33, 60])
def test_a_cell_wider_than_the_terminal_is_broken(width):
    """No line is wider than the terminal, however narrow."""
    old, new = tensor("a", "float8_e4m3fn", (1, 2, 3)), tensor("a", "bfloat16", (3, 2, 1), Kind.BUFFER)
    actual_diff = diff(
        change_metadata("a", old, new, Field.DTYPE, Field.SHAPE, Field.KIND), rename_tensor("x" * 30, "y" * 30)
    )
    assert max(map(len, render_diff(actual_diff, "table", width=width).splitlines())) <= width


@pytest.mark.parametrize("width", [21, 40, 80])
def test_wide_characters_count_as_two_columns(width):
    """A name, a message and a remedy in Chinese or Japanese stay in the width of the terminal, and stay complete."""
    name = "重み" * 50
    problem = finding(fqn=name, help=f"rename {name}")
    text = audited("table", target("a.pt", problem), terminal=True, width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "".join(text.split()).count(name) == 2


@pytest.mark.parametrize("name", ["::error::x", "a##[group]b"])
def test_an_escaped_command_of_a_runner_does_not_move_the_columns(name):
    """The columns are laid out with the escaped name."""
    lines = (Line((name, "1 B")), Line(("a.b", "2 B")))
    page = Page("", (ReportColumn("name"), ReportColumn("size")), (Group("g", "", lines),), ())
    report = Report("t", document=dict, table=lambda: Table((), ()), page=lambda: page)
    *_, row, next_row = format_report(report, Output.TABLE, RenderOptions()).splitlines()
    assert row.index("1 B") == next_row.index("2 B")
    assert "\\x" in row


def test_a_row_without_cells_leaves_no_blank_line():
    """A rename that is too long for its column is one line."""
    text = render_diff(diff(nudge_tensor("a"), rename_tensor("x" * 40, "y" * 30)), "table")
    assert text.endswith(f"{'x' * 40} → {'y' * 30}\n")


def test_two_long_names_have_a_line_each():
    """A rename is broken at its arrow, not within a word."""
    lines = render_diff(
        diff(nudge_tensor("a"), rename_tensor("model.before." + "x" * 50, "after." + "y" * 50)), "table"
    ).splitlines()
    at = lines.index("  R model.before." + "x" * 50)
    assert lines[at + 1] == "  → after." + "y" * 50


def test_a_name_is_broken_between_its_parts():
    """A long name breaks only after a dot."""
    parts = ["module", "encoder", "layers", "attention", "projection", "weight"] * 3
    lines = render_diff(diff(nudge_tensor(".".join(parts))), "table", width=60).splitlines()
    name_lines = [line.strip() for line in lines if line.strip().split(".")[0].removeprefix("M ") in parts]
    assert "".join(name_lines) == "M " + ".".join(parts)
    assert all(line.endswith(".") for line in name_lines[:-1])


def test_further_lines_of_a_long_cell_are_indented():
    """Only the first line starts in the column of the next row, and no line ends in a space."""
    long = finding(message="tensor " + "is not registered and " * 8)
    two = (long, finding("inf"))
    lines = audited("table", target("a.pt", *two), target("b.pt"), terminal=True).splitlines()
    at = lines.index("a.pt  2 errors")
    assert [len(line) - len(line.lstrip()) for line in lines[at + 1 : at + 4]] == [0, 4, 4]
    assert not [line for line in lines if line.endswith(" ")]


@pytest.mark.parametrize("width", [30, 80])
def test_reasons_of_failed_targets_stand_in_one_column(width):
    """An entry too long for the first column has a line above; no line is wider than the terminal."""
    others = failed_target("a.pt", "is too short"), failed_target(f"runs/{'x' * 50}.pt", "is empty")
    lines = audited("table", target(), *others, terminal=True, width=width).splitlines()
    assert max(map(len, lines)) <= width
    starts = {line.index(reason) for line in lines for reason in ("is too", "is empty") if reason in line}
    assert len(starts) == 1


def test_only_the_signs_of_a_row_have_colours():
    """A red row would hide the column that failed; a row without a sign has a coloured name."""
    style = {"A": "32", "D": "31", "M": "33", "✓": "32", "✗": "31"}

    def paint(text: str, mood: str) -> str:
        return "".join(
            paint_ansi(part, of_part, True) for part, of_part in table._color_signs(text, table.STYLES[mood])
        )

    for sign in "ADM":
        assert paint(f"  {sign} fc.weight  A  12", "good") == f"  \x1b[{style[sign]}m{sign}\x1b[0m fc.weight  A  12"
    for sign in "✓✗":
        assert paint(f"  fc.weight  {sign}  –", "bad") == f"  fc.weight  \x1b[{style[sign]}m{sign}\x1b[0m  –"
    assert paint("  table  float32", "bad") == "\x1b[31m  table\x1b[0m  float32"
    assert paint("  table  float32", "") == "  table  float32"
    assert paint("  ✓ fc  float32", "dim") == "\x1b[2m  ✓ fc  float32\x1b[0m"


def render_lines(groups, columns, width=50, subtitle="module"):
    """Return the lines of a page with the given groups of rows."""
    page = Page(subtitle, columns, tuple(Group(name, "", tuple(map(Line, rows))) for name, rows in groups.items()), ())
    report = Report("a.pt", lambda: PROBLEM, lambda: Table((), ()), lambda: page)
    return format_report(report, Output.TABLE, RenderOptions(terminal=True, width=width)).splitlines()


NARROW = (ReportColumn("name"), ReportColumn("dtype", shared_format="all {}"), ReportColumn("size"))


def test_a_value_that_a_section_shares_is_in_its_heading():
    """At a narrow width, this leaves one line for each tensor; a section with two values keeps the column."""
    name = "n" * 40
    groups = {"parameters": [(name, "float32", "4 B")] * 2, "buffers": [("b", "int64", "8 B")]}
    lines = render_lines(groups, NARROW)
    assert ["parameters  all float32", f"  {name}  4 B"] == [lines[3], lines[5]]
    assert "buffers  all int64" in lines
    groups["buffers"].append(("c", "int32", "8 B"))
    assert any("dtype" in line for line in render_lines(groups, NARROW))
    assert any("float32" in line for line in render_lines(groups, NARROW, width=80))


def test_a_bar_makes_room_for_the_names():
    """The bar is left out only if all names then fit."""
    columns = (ReportColumn("name"), ReportColumn("change"), ReportColumn("bar", optional=True))
    assert render_lines({"parameters": [("n" * 36, "0.5", "####")]}, columns)[-1] == f"  {'n' * 36}  0.5"
    assert render_lines({"parameters": [("n" * 60, "0.5", "####")]}, columns)[-1].endswith("0.5     ####")


def test_common_sign_of_two_columns_is_not_broken_over_lines():
    """No line of the head begins with the sign of the line before."""
    columns = (
        ReportColumn("name"),
        *(ReportColumn(word, shared_format=f"{word}: all {{}}") for word in ("moves", "casts")),
    )
    for width in range(20, 60):
        lines = render_lines({"parameters": [("n" * 70, "✓", "✓")]}, columns, width=width)
        assert not any(line.startswith("✓") for line in lines)
    assert "module; moves, casts: all ✓" in lines


def test_the_count_of_hidden_rows_widens_no_column():
    """`… and 12 more` is not a name."""
    groups = {"parameters": [("a", "float32", "4 B"), ("… and 1,200 more", "", "")]}
    assert "  a     float32  4 B" in render_lines(groups, NARROW)
