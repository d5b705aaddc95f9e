"""The report of the proofs: rows, reasons, lines, and status 2."""

from __future__ import annotations

import csv
import io
import json
from functools import cache

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import given, settings
from msgspec import UNSET
from msgspec.structs import replace

from statecli import render
from statecli.commands.verify.result import Cell, Check, Column, Name, Verdict, Verification
from statecli.core.finding import Finding, Severity
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import Evidence, Kind, ModelState, Oddity, Origin, TensorInfo
from statecli.core.units import format_origin
from statecli.render import Output, RenderOptions
from statecli.report import View
from statecli.report.documents import schemas
from statecli.report.problems import group_findings
from statecli.report.verify import SIGNS, build_verify_report, list_inconclusive

from ..published import junit

PASSED, FAILED, SKIPPED, UNSURE = Verdict.PASSED, Verdict.FAILED, Verdict.SKIPPED, Verdict.INCONCLUSIVE
FIX = 'self.register_buffer("table", torch.ones(3))'
NO_INPUT = "no input given: --input 2x3"


def tensor(fqn, kind=Kind.PARAMETER, **facts):
    return TensorInfo(fqn, "float32", (3,), 3, 12, kind=kind, evidence=Evidence.REGISTERED, **facts)


def run(*checks, rows=(), notes=()):
    return Verification(
        ModelState("net.py:Net", "module", tuple(rows), traits=FormatTraits(is_class=True)), checks, notes
    )


def finding(fqn, rule="left-behind", help=None, origin=UNSET):
    return Finding(rule, Severity.ERROR, f"{fqn}: stays on cpu", "net.py:Net", fqn, help, origin=origin)


def move_check(verdict=None, **cells):
    """Return a move with a cell for each tensor, and a finding for each failed tensor."""
    findings = tuple(finding(fqn, help=f"net.py:9: {FIX}") for fqn, cell in cells.items() if cell.verdict is FAILED)
    verdict = verdict or (FAILED if findings else PASSED)
    return Check(Name.MOVE, verdict, '.to("meta")', columns=(Column("moves", cells),), findings=findings)


def passed_cell(**facts):
    return Cell(PASSED, **facts)


def render_result(result, output="table", *, width=100, quiet=False, **view):
    look = RenderOptions(terminal=output == "table", width=width, quiet=quiet)
    return render.format_report(build_verify_report(result, View(**view)), Output(output), look)


def page(result, **view):
    return build_verify_report(result, View(**view)).page()


def lines(result, **view):
    """The rows for people: name -> (signs, remark)."""
    groups = page(result, **view).groups
    return {line.cells[0]: ("".join(line.cells[1:]), line.remark) for group in groups for line in group.lines}


def list_outcomes(result):
    return [(line.cells[0], line.remark) for line in page(result).outcomes.lines]


TABLE = tensor("table", Kind.UNREGISTERED, origin=Origin("net.py", 9), fix=FIX)
BROKEN = run(move_check(w=passed_cell(), table=Cell(FAILED, "cpu", "cpu", "stays on cpu")), rows=(tensor("w"), TABLE))


# Rows.


def test_tensor_that_passed_every_check_has_no_remark():
    """A row of ticks needs no remark."""
    assert lines(BROKEN)["w"] == ("✓", "")


def test_verbose_row_of_a_failed_tensor_has_the_assigning_line():
    """The problem below has the line and the cause; the row does not repeat them."""
    assert lines(BROKEN)["table"] == ("✗", "")
    assert lines(BROKEN, verbose=True)["table"][1].endswith("net.py:9")


def test_failure_without_a_finding_keeps_its_reason():
    """A cross always has a cause; the heading has the cause if several rows share it."""
    cells = {name: Cell(FAILED, reason="stays on cpu") for name in "wv"}
    check = Check(Name.MOVE, FAILED, columns=(Column("moves", {"w": cells["w"]}),))
    assert lines(run(check, rows=[tensor("w")], notes=())) == {"w": ("✗", "moves: stays on cpu")}
    same = Check(Name.MOVE, FAILED, columns=(Column("moves", cells),))
    assert lines(run(same, rows=[tensor("w"), tensor("v")], notes=())) == {"w": ("✗", ""), "v": ("✗", "")}
    heading = page(run(same, rows=[tensor("w"), tensor("v")])).groups[0].summary
    assert heading == "2 tensors, 2 failed; moves: stays on cpu"
    mixed_lines = lines(run(check, rows=[tensor("w"), tensor("v")]))
    assert mixed_lines == {"w": ("✗", "moves: stays on cpu"), "v": ("–", "")}


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_a_sign_of_its_own(verdict):
    """No two can be taken for each other."""
    result = run(move_check(w=Cell(verdict)), rows=[tensor("w")])
    assert lines(result)["w"][0] == SIGNS[verdict]
    assert sorted(map(len, SIGNS.values())) == [1, 1, 1, 1]
    assert len(set(SIGNS.values())) == 4


def test_a_tensor_without_a_cell_is_drawn_as_skipped():
    """A tensor outside a proof has a dash, not an empty cell."""
    assert lines(run(move_check(w=passed_cell()), rows=[tensor("w"), tensor("v")]))["v"] == ("–", "")


def test_common_reason_of_two_columns_is_written_once():
    """The columns are named before the reason."""
    cells = {"w": Cell(SKIPPED, reason="frozen"), "v": passed_cell()}
    check = Check(Name.STEP, PASSED, columns=(Column("gradient", cells), Column("updated", cells)))
    assert lines(run(check, rows=[tensor("w"), tensor("v")]))["w"] == ("––", "gradient, updated: frozen")


def test_common_reason_of_a_group_is_in_its_heading():
    """Twelve rows do not repeat the reason."""
    rows = [tensor(f"b{n}", Kind.BUFFER) for n in range(12)]
    cells = {row.fqn: Cell(SKIPPED, reason="a buffer") for row in rows}
    result = run(Check(Name.STEP, SKIPPED, columns=(Column("gradient", cells),)), rows=rows)
    assert page(result).groups[0].summary == "12 tensors; gradient: a buffer"
    assert {remark for _, remark in lines(result).values()} == {""}


def test_reason_of_a_whole_check_is_only_in_the_line_of_the_check():
    """If backward fails, every cell has the same reason."""
    cells = {"w": Cell(UNSURE, reason="no backward"), "v": passed_cell()}
    check = Check(Name.STEP, UNSURE, "one step", "no backward", columns=(Column("gradient", cells),))
    result = run(check, rows=[tensor("w"), tensor("v")])
    assert lines(result)["w"] == ("?", "")
    assert list_outcomes(result) == [("? step", "one step: no backward")]


def test_passed_tensor_with_a_reason_has_a_remark():
    """A harmless tensor left on the CPU has the reason."""
    result = run(move_check(w=passed_cell(reason="forward moves it"), v=passed_cell()), rows=[tensor("w"), tensor("v")])
    assert lines(result)["w"] == ("✓", "moves: forward moves it")


def test_passed_tensor_keeps_the_note_of_its_row():
    """The note of a row is kept, also for a passed tensor."""
    result = run(move_check(w=passed_cell()), rows=[tensor("w", note="created by the first forward")])
    assert lines(result)["w"] == ("✓", "created by the first forward")


def test_verbose_row_has_the_devices_before_and_after():
    """-v: before and after, for each column with a measurement."""
    result = run(
        move_check(w=passed_cell(before="cpu", after="cuda:0"), v=passed_cell()), rows=[tensor("w"), tensor("v")]
    )
    assert lines(result, verbose=True) == {"w": ("✓", "moves: cpu → cuda:0"), "v": ("✓", "")}


def test_repeated_layers_fold_and_all_shows_each():
    """Many rows fold if they agree in every sign; --all has each row."""
    rows = [tensor(f"layers.{n}.w") for n in range(50)]
    cells = {row.fqn: passed_cell() for row in rows}
    cells["layers.7.w"] = Cell(UNSURE)
    result = run(move_check(UNSURE, **cells), rows=rows)
    assert lines(result) == {"layers.{0..6,8..49}.w": ("✓", ""), "layers.7.w": ("?", "")}
    assert len(lines(result, unfold=True)) == 50


def test_rows_are_grouped_by_kind_in_order():
    """The order is parameters, buffers, unregistered, whatever the order of the source."""
    result = run(move_check(), rows=[TABLE, tensor("b", Kind.BUFFER), tensor("w")])
    assert [group.heading for group in page(result).groups] == ["parameters", "buffers", "unregistered"]


def test_columns_with_equal_names_get_the_name_of_the_check():
    """Two proofs with a column `moves` have different headings."""
    two = (move_check(w=passed_cell()), Check(Name.FORWARD, PASSED, columns=(Column("moves", {"w": Cell(UNSURE)}),)))
    report = build_verify_report(run(*two, rows=[tensor("w")]), View())
    assert [column.name for column in report.page().columns] == ["name", "moves", "moves (forward)"]
    names = [column.name for column in report.table().columns]
    assert len(set(names)) == len(names)


# The proofs' own lines, and the verdict.


def test_every_check_has_a_line():
    """The line has the operation and its result, with the number of failed and tried tensors."""
    checks = (
        *BROKEN.checks,
        Check(Name.COPY, PASSED, "deepcopy, pickle"),
        Check(Name.STEP, SKIPPED, reason=NO_INPUT),
        Check(Name.FORWARD, UNSURE, "on fake-cuda", "net.py:7: data-dependent"),
    )
    assert list_outcomes(run(*checks, rows=BROKEN.state.tensors)) == [
        ("✗ move", '1 of 2 failed: .to("meta")'),
        ("✓ copy", "deepcopy, pickle"),
        ("– step", NO_INPUT),
        ("? forward", "on fake-cuda: net.py:7: data-dependent"),
    ]


def test_failed_names_without_a_row_are_listed():
    """A failed second name is named next to the count; the count is of the rows of the table."""
    cells = {"a": Cell(FAILED), "b": passed_cell(), "old": Cell(FAILED), "older": Cell(FAILED)}
    assert list_outcomes(run(move_check(**cells), rows=map(tensor, "ab"))) == [
        ("✗ move", '1 of 2 and old, older failed: .to("meta")')
    ]
    assert list_outcomes(run(move_check(a=passed_cell(), old=Cell(FAILED)), rows=[tensor("a")])) == [
        ("✗ move", 'old failed: .to("meta")')
    ]


def test_a_note_is_not_counted_as_a_failure():
    """The note is about a scalar left on the CPU."""
    note = replace(finding("b"), severity=Severity.NOTE)
    check = replace(move_check(a=Cell(FAILED), b=Cell(SKIPPED)), findings=(finding("a"), note))
    assert list_outcomes(run(check, rows=map(tensor, "ab"))) == [("✗ move", '1 of 1 failed: .to("meta")')]


def test_common_sign_of_all_rows_names_a_failed_name_without_a_row():
    """Otherwise a column of ticks would contradict its failed proof."""
    first, second = "layers.first.attention.output.weight", "layers.second.attention.output.weight"
    cells = {first: passed_cell(), second: passed_cell(), "x.{old}": Cell(FAILED)}
    text = render_result(run(move_check(**cells), rows=map(tensor, (first, second))), width=40)
    assert "moves: all ✓ except x.{old}" in " ".join(text.split())


def test_the_verdict_counts_the_tensors_of_all_proofs():
    """Each proof has its own count, which may be smaller."""
    rows = [*map(tensor, "ab")]
    step_check = replace(move_check(a=Cell(FAILED), b=Cell(FAILED)), check=Name.STEP)
    assert page(run(move_check(a=Cell(FAILED), b=passed_cell()), step_check, rows=rows)).verdict == (
        "1 error: 2 of 2 tensors failed one or more of move, step"
    )


def test_a_proof_that_is_unsure_of_some_tensors_names_the_first():
    """The proof as a whole has no reason, so the reason of a tensor is shown."""
    result = run(
        move_check(UNSURE, a=Cell(UNSURE, reason="sparse"), b=Cell(UNSURE), c=passed_cell()), rows=map(tensor, "abc")
    )
    assert list_outcomes(result) == [("? move", '.to("meta"): a: sparse; 1 more tensor inconclusive')]


def test_verdict_starts_with_the_failed_check():
    """One line has all results, in the order of importance."""
    rest = [Check(Name.COPY, PASSED), Check(Name.STEP, UNSURE), Check(Name.FORWARD, SKIPPED)]
    text = page(run(*rest, *BROKEN.checks, rows=BROKEN.state.tensors)).verdict
    assert text == "1 error: 1 of 2 tensors failed move; step inconclusive; copy passed; forward skipped"


def test_verdict_of_a_clean_model_names_passed_checks():
    """Only passed proofs are named."""
    assert (
        page(run(move_check(w=passed_cell()), Check(Name.COPY, PASSED), rows=[tensor("w")])).verdict
        == "move, copy passed"
    )


def test_failed_check_without_failed_tensors_has_no_count():
    """A forward that raises is not a failure of a tensor."""
    check = Check(Name.FORWARD, FAILED, "on cuda", findings=(finding(None),))
    result = run(check, rows=[tensor("w")])
    assert page(result).verdict == "1 error: forward failed"
    assert list_outcomes(result) == [("✗ forward", "failed: on cuda")]


# Fixes and notes.


def format_place(problem):
    return None if problem.origin is UNSET else format_origin(problem.origin)


def test_two_findings_with_one_fix_are_one_problem():
    """Three failed proofs for one tensor are one problem, mended in one line of source."""
    checks = (*BROKEN.checks, Check(Name.SAVE, FAILED, findings=(finding("table", "not-saved", f"net.py:9: {FIX}"),)))
    (problem,) = page(run(*checks, rows=BROKEN.state.tensors)).problems
    assert (problem.rule, format_place(problem), problem.help) == ("unregistered-tensor", "net.py:9", FIX)
    assert problem.effects == ("stays on cpu",)
    assert len(problem.findings) == 2


def test_advice_in_words_stands_below_the_problem():
    """Line by line."""
    check = Check(Name.MOVE, FAILED, findings=(finding("w", help="tie them again\nafter the move"),))
    (problem,) = page(run(check, rows=[tensor("w")])).problems
    assert (format_place(problem), problem.help) == (None, "tie them again\nafter the move")


@pytest.mark.parametrize(
    ("help", "origin", "advice"),
    [
        ("use it; assigned at m.py:9", Origin("m.py", 9), "use it"),
        ("use it; assigned at my models/m.py:9", Origin("my models/m.py", 9), "use it"),
        ("assigned at m.py:9", Origin("m.py", 9), None),
        ("m.py:3: let Net._apply call super()", Origin("m.py", 3), "let Net._apply call super()"),
        ("a:1: keep this text", Origin("m.py", 3), "a:1: keep this text"),
        ("save it with save_model", UNSET, "save it with save_model"),
    ],
)
def test_the_help_of_a_problem_does_not_repeat_its_line(help, origin, advice):
    """The line of the finding, and no other text that looks like a line."""
    check = Check(Name.STEP, FAILED, findings=(finding("w", help=help, origin=origin),))
    (problem,) = page(run(check, rows=[tensor("w")])).problems
    assert (problem.origin, problem.help) == (origin, advice)


def test_problem_of_a_second_name_has_its_own_line():
    """The second name has no row, and its finding has the line."""
    actual_finding = finding("w", "stale-view", "a property", Origin("m.py", 7))
    (problem,) = page(run(Check(Name.MOVE, FAILED, findings=(actual_finding,)), rows=[TABLE])).problems
    assert (format_place(problem), problem.help) == ("m.py:7", "a property")


def test_note_about_a_finding_of_a_check_is_left_out():
    """The note is only a suspicion, and the proof has a finding for it."""
    notes = (Oddity("left-behind", "table: stays", "table"), Oddity("lazy", "w: has no shape yet", "w"))
    report = build_verify_report(run(*BROKEN.checks, rows=BROKEN.state.tensors, notes=notes), View())
    assert [note.name for note in report.notes] == ["lazy"]


# Results with exit status 2.


def test_module_that_packs_its_weights_is_named():
    """A quantized model has weights, but none is visible."""
    notes = (
        Oddity("packed-params", "0._packed_params._packed_params holds weights", "0._packed_params._packed_params"),
    )
    (line,) = list_inconclusive(run(Check(Name.MOVE, SKIPPED), notes=notes), ())
    assert line == (
        "net.py:Net: the model has no tensors that statecli can see (0 packs its weights in C++), so there is nothing "
        "to check"
    )


def test_only_requested_checks_are_inconclusive_if_skipped():
    """Without an input, step and forward are reported and do not fail the command."""
    result = run(move_check(w=passed_cell()), Check(Name.STEP, SKIPPED, reason=NO_INPUT), rows=[tensor("w")])
    assert list_inconclusive(result, ()) == ()
    assert list_inconclusive(result, (Name.MOVE,)) == ()
    assert list_inconclusive(result, (Name.STEP,)) == (f"net.py:Net: step: {NO_INPUT}",)


def test_inconclusive_check_is_listed_without_a_request():
    """Asked for by name or not."""
    result = run(move_check(w=passed_cell()), Check(Name.STEP, UNSURE, reason="net.py:4: no"), rows=[tensor("w")])
    assert list_inconclusive(result, ()) == ("net.py:Net: step: net.py:4: no",)


def test_proofs_that_fail_for_one_reason_are_one_line():
    """The step calls forward in train mode: the same error of forward is reported once, for both proofs."""
    reasons = ("calling the model in train mode raised TypeError: no", "calling the model raised TypeError: no")
    checks = [
        Check(name, UNSURE, reason=reason) for name, reason in zip((Name.STEP, Name.FORWARD), reasons, strict=True)
    ]
    result = run(move_check(w=passed_cell()), *checks, rows=[tensor("w")])
    assert list_inconclusive(result, ()) == (f"net.py:Net: step, forward: {reasons[1]}",)
    other = run(
        move_check(w=passed_cell()), checks[0], Check(Name.FORWARD, UNSURE, reason="no such layer"), rows=[tensor("w")]
    )
    assert list_inconclusive(other, ()) == (
        f"net.py:Net: step: {reasons[0]}",
        "net.py:Net: forward: no such layer",
    )


def test_run_without_a_finished_check_is_inconclusive():
    """If every proof was skipped, or there is no tensor, the exit status is not 0."""
    skipped = [Check(name, SKIPPED, reason=NO_INPUT) for name in (Name.STEP, Name.FORWARD)]
    assert list_inconclusive(run(*skipped, rows=[tensor("w")]), ()) == (
        "net.py:Net: no check ran: step, forward skipped",
    )
    (line,) = list_inconclusive(run(move_check(), rows=[]), ())
    assert "no tensor" in line


# Every output.

#: `net.py:9` in the form of each output.
LINES = (
    "net.py:9",
    '{"file":"net.py","line":9}',
    "file=net.py,line=9",
    '{"path":"net.py","lines":{"begin":9}}',
    '{"uri":"net.py"},"region":{"startLine":9}',
)


#: Outputs that show problems; the other outputs show each finding.
GROUPED = ("table", "plain", "markdown", "html", "json", "jsonl", "sarif", "junit", "github", "gitlab")


@pytest.mark.parametrize("output", [output.value for output in Output])
def test_every_output_has_the_failed_tensor_and_its_fix(output):
    """Every output has the tensor, the rule and the line of the tensor, and the fix where it has room."""
    text = render_result(BROKEN, output)
    assert ("unregistered-tensor" if output in GROUPED else "left-behind") in text
    assert "table" in text
    assert any(line in text for line in LINES)
    if output != "csv":
        assert "self.register_buffer(" in text


def test_verification_without_an_executed_check_is_an_error_in_junit():
    """The exit status is 2, so a test runner must not show only skipped cases."""
    root = junit(render_result(run(Check(Name.MOVE, SKIPPED, reason=NO_INPUT), rows=[tensor("w")]), "junit"))
    (error,) = root.iter("error")
    assert error.get("message") == "net.py:Net: no check ran: move skipped"


@pytest.mark.parametrize("output", ["table", "plain", "markdown", "html", "json", "jsonl"])
def test_every_output_says_why_a_proof_was_skipped(output):
    """No silent skip."""
    result = run(move_check(w=passed_cell()), Check(Name.STEP, SKIPPED, reason=NO_INPUT), rows=[tensor("w")])
    assert NO_INPUT in render_result(result, output)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_a_table_is_never_wider_than_its_terminal(width):
    """Without room, names are above their signs, and equal columns are given once above the table."""
    rows = [tensor(f"encoder.layers.{n}.attention.query.weight") for n in range(3)]
    columns = ("moves", "casts", "saved", "restored", "copies", "gradient", "updated")
    cells = {row.fqn: passed_cell() for row in rows}
    check = Check(Name.STEP, PASSED, "x " * 60, columns=tuple(Column(name, cells) for name in columns))
    text = render_result(run(check, rows=rows), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert all(name in text for name in columns)


def test_narrow_table_moves_uniform_columns_to_the_headings():
    """A column with one sign in each group is written in the headings; a column with two signs in a group stays."""
    rows = [tensor("encoder.weight"), tensor("encoder.bias"), TABLE]
    cells = {"encoder.weight": passed_cell(), "encoder.bias": passed_cell(), "table": Cell(SKIPPED)}
    columns = tuple(Column(name, cells) for name in ("saved", "restored"))
    moves = {**cells, "encoder.bias": Cell(FAILED)}
    result = run(move_check(**moves), Check(Name.SAVE, PASSED, columns=columns), rows=rows)
    text = render_result(result, width=29).replace("\n  ", " ")
    assert "saved: all ✓, restored: all ✓" in " ".join(text.split())
    assert "saved: all –, restored: all –" in " ".join(text.split())
    assert "name            moves" in text
    assert "saved:" not in render_result(result, width=60)


def test_narrow_table_reduces_column_gaps_before_breaking_rows():
    """A slightly too wide table keeps one line a tensor."""
    cells = {"w": Cell(FAILED), "v": passed_cell()}
    columns = tuple(Column(f"column{n}", cells) for n in range(6))
    result = run(Check(Name.SAVE, FAILED, columns=columns), rows=map(tensor, "wv"))
    assert "\n  w     ✗        ✗  " in render_result(result, width=60)
    assert "\n  w    ✗       ✗  " in render_result(result, width=56)
    assert "\n  w\n    ✗        ✗  " in render_result(result, width=50)


def test_quiet_prints_only_failures():
    """A gate: nothing at all for a clean model."""
    assert render_result(run(move_check(w=passed_cell()), rows=[tensor("w")]), quiet=True) == ""
    text = "error[unregistered-tensor]: table: is a plain attribute, not registered (float32 [3])"
    assert render_result(BROKEN, quiet=True, width=140).split("  ")[0] == text
    assert render_result(BROKEN, "plain", quiet=True) == f"{text} [net.py:9]\n"


def test_plain_row_of_a_failed_tensor_is_one_line():
    """Each tensor is one line, each verdict one word."""
    (row,) = [
        line for line in render_result(BROKEN, "plain").splitlines() if " failed " in line and "move:" not in line
    ][:1]
    assert row.split() == ["unregistered", "table", "failed", "moves:", "stays", "on", "cpu"]


def test_csv_has_each_measurement_in_its_cell():
    """Each column has its verdict, before and after; the finding is in the row of the tensor."""
    rows = {row["fqn"]: row for row in csv.DictReader(io.StringIO(render_result(BROKEN, "csv")))}
    assert rows["table"]["moves"] == "failed"
    assert (rows["table"]["moves_before"], rows["table"]["moves_after"]) == ("cpu", "cpu")
    assert rows["table"]["finding"] == "left-behind: table: stays on cpu"
    assert rows["w"]["finding"] == ""


def test_json_has_the_fields_of_the_schema():
    """checks[].check, .passed and .tensors[] with fqn, before and after; the rows as inspect has them."""
    document = json.loads(render_result(BROKEN, "json"))
    assert document["schema"] == "statecli.verify/1"
    (check,) = document["checks"]
    assert (check["check"], check["passed"], check["how"]) == ("move", False, '.to("meta")')
    measured = {"before": "cpu", "after": "cpu", "reason": "stays on cpu"}
    assert check["tensors"][1] == {"fqn": "table", "column": "moves", "verdict": "failed", **measured}
    assert [row["kind"] for row in document["tensors"]] == ["parameter", "unregistered"]
    assert document["summary"]["checks"] == {"passed": 0, "failed": 1, "skipped": 0, "inconclusive": 0}
    assert document["summary"]["tensors"] == {"passed": 1, "failed": 1, "skipped": 0, "inconclusive": 0}
    assert [finding["rule"] for finding in document["findings"]] == ["left-behind"]


@pytest.mark.parametrize(("verdict", "passed"), [(PASSED, True), (FAILED, False), (SKIPPED, None), (UNSURE, None)])
def test_passed_field_follows_the_verdict(verdict, passed):
    """A skipped or inconclusive proof is neither passed nor failed."""
    document = json.loads(render_result(run(Check(Name.STEP, verdict), rows=[tensor("w")]), "json"))
    assert document["checks"][0]["passed"] is passed


CELLS = st.builds(
    Cell,
    st.sampled_from(Verdict),
    st.sampled_from([None, "cpu"]),
    st.sampled_from([None, "cuda:0"]),
    st.none() | st.integers(1000, 9999).map("r{}q | not\n<b>".format),
)
NAMES = ["w", "layers.0.b", "layers.1.b", "cache['cos']"]


@st.composite
def runs(draw):
    """Any verdicts for any tensors, in any columns."""
    rows = [tensor(fqn, draw(st.sampled_from(list(Kind)))) for fqn in NAMES]
    checks = []
    for name in draw(st.lists(st.sampled_from(Name), unique=True)):
        heads = draw(st.lists(st.sampled_from(["moves", "saved"]), unique=True))
        columns = tuple(Column(head, draw(st.dictionaries(st.sampled_from(NAMES), CELLS))) for head in heads)
        findings = tuple(map(finding, draw(st.sets(st.sampled_from([None, *NAMES])))))
        reason = draw(st.sampled_from([None, "why", "because"]))
        checks.append(Check(name, draw(st.sampled_from(Verdict)), "done", reason, columns, findings))
    return run(*checks, rows=rows)


@cache
def _schema_validator():
    """Return a validator for the printed schema; the schema is checked and compiled once."""
    schema = json.loads(schemas.encode_schema("verify"))
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


@settings(max_examples=30, deadline=None)
@given(runs(), st.sampled_from(["table", "plain", "markdown", "html", "csv", "jsonl"]))
def test_any_run_fits_the_schema_and_is_whole_in_every_output(verification, output):
    """Each failure is in each output; each reason of a cell is in its row, its group, its proof's line or a finding."""
    _schema_validator().validate(json.loads(render_result(verification, "json")))
    text = render_result(verification, output)
    problems = group_findings(verification.findings, verification.state.tensors)
    rules = (
        {problem.rule for problem in problems}
        if output in GROUPED
        else {finding.rule for finding in verification.findings}
    )
    assert all(rule in text for rule in rules)
    text = render_result(verification, unfold=True)
    for check in verification.checks:
        fqns = {finding.fqn for finding in check.findings}
        for column in check.columns:
            for fqn, cell in column.cells.items():
                if cell.reason and not (cell.verdict is FAILED and fqn in fqns) and cell.reason != check.reason:
                    assert cell.reason.split()[0] in text


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_plain_output_has_columns_for_the_measurement(verbose):
    """The devices before and after and the line, in columns of their own."""
    row = tensor("table", origin=Origin("net.py", 9))
    result = run(move_check(table=passed_cell(before="cpu", after="meta")), rows=[row])
    head, first = render_result(result, "plain", verbose=verbose).splitlines()[:2]
    extra = {"origin": "net.py:9", "moves_before": "cpu", "moves_after": "meta"}
    assert set(extra) & set(head.split()) == (set(extra) if verbose else set())
    assert set(extra.values()) & set(first.split()) == (set(extra.values()) if verbose else set())
