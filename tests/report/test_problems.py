"""Problems: findings grouped by their common cause in the source."""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from statecli.core.finding import Consequence, Finding, Severity, Wording
from statecli.core.model_state import Evidence, Kind, Origin, TensorInfo
from statecli.report import count_shown_effects, problems
from statecli.report.problems import format_severities, group_findings
from statecli.rules.dictionary import DICTIONARY

LIST = "self.blocks = nn.ModuleList([Block() for _ in range(2)])"


def row(fqn, line, within=None, requires_grad=False, fix=None, kind=Kind.UNREGISTERED, container="list"):
    return TensorInfo(
        fqn,
        "float32",
        (2, 2),
        4,
        16,
        kind=kind,
        evidence=Evidence.REGISTERED,
        device="cpu",
        requires_grad=requires_grad,
        saved=False,
        moves=False,
        origin=Origin("net.py", line),
        within=within,
        container=container,
        fix=fix,
    )


def build_block_rows():
    """Two modules in a plain list, with a parameter and a tensor each, and one attribute."""
    for n in range(2):
        yield row(f"blocks[{n}].fc.weight", 7, f"blocks[{n}].fc", requires_grad=True, fix=LIST)
        yield row(f"blocks[{n}].mask", 7, fix=LIST)
    yield row("table", 6, fix="self.register_buffer('table', table)")


def build_findings(rule, rows, what, severity=Severity.ERROR):
    return [Finding(rule, severity, f"{row.fqn}: {what}", "net.py:Net", row.fqn) for row in rows]


def build_worded_finding(rule, consequence, name="table", severity=Severity.ERROR):
    wording = Wording(consequence.message, name, consequence=consequence)
    return Finding(rule, severity, "", "net.py:Net", name).reword(wording)


@pytest.fixture
def source(tmp_path, in_tmp_path):
    """The file named by the rows."""
    (tmp_path / "net.py").write_text("\n" * 5 + "self.table = table\n  self.blocks = [Block() for _ in range(2)]\n")


def test_one_line_of_source_is_one_problem(source):
    """Findings of any rule are one problem, by one name, with each consequence once and one fix."""
    rows = list(build_block_rows())
    findings = build_findings("left-behind", rows, "stays on cpu") + build_findings(
        "keeps-dtype", rows, "is float32 after .half()"
    )
    module, tensor = group_findings(findings, rows)
    assert (module.rule, tensor.rule) == ("unregistered-module", "unregistered-tensor")
    assert module.message == "blocks: 2 modules are kept in a plain list (2 parameters, 2 other tensors)"
    assert module.source == "self.blocks = [Block() for _ in range(2)]"
    assert module.effects == tensor.effects == ("stays on cpu", "is float32 after .half()")
    assert (module.help, module.origin.line) == (LIST, 7)
    assert (tensor.message, tensor.source) == (
        "table: is a plain attribute, not registered (float32 [2,2])",
        "self.table = table",
    )
    assert [len(problem.findings) for problem in (module, tensor)] == [8, 2]


def test_the_rules_of_audit_say_their_consequences():
    """The message of the rule names the cause; the problem lists the consequences."""
    rows = list(build_block_rows())
    (problem,) = group_findings(build_findings("unregistered-module", rows[:1], "is no registered module"), rows)
    assert problem.message == "blocks: 2 modules are kept in a plain list (2 parameters, 2 other tensors)"
    assert problem.effects == (
        "not in state_dict()",
        "left on cpu by .to()",
        "not in model.parameters(), so not trained",
    )
    assert problem.source == ""  # there is no such file


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [row("heads['a'].weight", 3, "heads['a']", True, container="dict")],
            "heads: 1 module is kept in a plain dict (1 parameter)",
        ),
        (
            [row("heads[0].weight", 3, "heads[0]", True, container="tuple")],
            "heads: 1 module is kept in a plain tuple (1 parameter)",
        ),
        ([row("helper.net.weight", 3, "helper.net")], "helper.net: 1 module is kept in an object that is not a module"),
        ([row("scale", 3, None, True)], "scale: is a plain attribute, not registered (float32 [2,2])"),
        (
            [row("masks[0]", 3), row("masks[1]", 3)],
            "masks[{0,1}]: 2 plain attributes are not registered (float32 [2,2])",
        ),
    ],
    ids=["a dict", "a tuple", "an object", "a parameter", "a list of tensors"],
)
def test_message_names_the_container_or_the_attribute(rows, message):
    """The cause depends on the container of the tensors."""
    (problem,) = group_findings(build_findings("left-behind", rows, "stays on cpu"), rows)
    assert problem.message.startswith(message)


def test_findings_of_registered_tensors_keep_their_rule():
    """Findings are grouped by rule, file, severity and advice."""
    rows = [row("a", 1, kind=Kind.PARAMETER), row("b", 2, kind=Kind.PARAMETER)]
    same = group_findings(build_findings("zero-gradient", rows, "its gradient is zero"), rows)
    assert [problem.message for problem in same] == ["a, b: its gradient is zero"]
    (problem,) = group_findings(
        [
            *build_findings("nan", rows[:1], "1 of 4 values is NaN"),
            *build_findings("nan", rows[1:], "all 4 values are NaN"),
        ]
    )
    assert problem.effects == ("a: 1 of 4 values is NaN", "b: all 4 values are NaN")
    assert "(2 findings)" in problem.message
    assert problem.origin is UNSET


def test_the_worst_problem_stands_first():
    """The worst problem is first, and each severity is counted."""
    rows = [row("a", 1, kind=Kind.PARAMETER)]
    problems = group_findings(
        [
            *build_findings("x", rows, "is odd", Severity.NOTE),
            *build_findings("nan", rows, "is NaN"),
            *build_findings("y", rows, "m", Severity.WARNING),
        ]
    )
    assert [problem.severity for problem in problems] == [Severity.ERROR, Severity.WARNING, Severity.NOTE]
    assert format_severities(problems) == "1 error, 1 warning, 1 note"
    assert format_severities([]) == "clean"


def test_every_help_of_a_tensor_without_a_fix_is_shown():
    """A cache of forward breaks the cast and the copy, and each has a remedy of its own."""
    rows = [row("cache", 3)]
    cast, copied = (
        build_findings("keeps-dtype", rows, "is float32"),
        build_findings("non-leaf-attribute", rows, "is not a leaf"),
    )
    findings = [
        replace(cast[0], help="create the tensor again; assigned at net.py:3", origin=rows[0].origin),
        replace(copied[0], help="detach"),
    ]
    (problem,) = group_findings([*findings, *findings], rows)
    assert problem.help == "create the tensor again\ndetach"


def test_tensors_with_one_method_to_fix_are_one_problem():
    """It drops two tensors, which other lines assign."""
    rows = [row("a", 3, kind=Kind.BUFFER), row("b", 4, kind=Kind.BUFFER)]
    findings = [
        replace(finding, help="net.py:9: call super()", origin=Origin("net.py", 9))
        for finding in build_findings("lost-by-saving", rows, "registered, but not in state_dict()")
    ]
    (problem,) = group_findings(findings, rows)
    assert (problem.message, problem.help) == ("a, b: registered, but not in state_dict()", "call super()")
    assert problem.origin == Origin("net.py", 9)


def test_the_place_of_several_fixes_is_written_once():
    """Two tensors of one line, registered at the end of the constructor."""
    place = "# at the end of __init__:\n"
    rows = [row(name, 3, fix=f"{place}register({name})") for name in "ab"]
    (problem,) = group_findings(build_findings("left-behind", rows, "stays on cpu"), rows)
    assert problem.help == f"{place}register(a)\nregister(b)"


@pytest.mark.parametrize(
    ("lines", "source"),
    [
        (["x = [", "    a(1),  # one", "    b,", "]"], "x = [a(1), b,]"),
        (["x = f(", '    "# no comment",', ")"], 'x = f("# no comment",)'),
        (["x = a + \\", "    b"], "x = a + b"),
        (["x = 1  # kept"], "x = 1  # kept"),
        (["x = ["] + ["    1,"] * 20 + ["]"], "x = [ …"),
        (["x = [", "    1"], "x = [ …"),
        (['    "a": 1},', "y = 2"], '"a": 1},'),
    ],
)
def test_a_statement_on_several_lines_is_shown_as_one(tmp_path, in_tmp_path, lines, source):
    """Comments are removed; for a long or unreadable statement only the first line is shown."""
    (tmp_path / "net.py").write_text("\n".join(["if True:", *(f"    {line}" for line in lines), ""]))
    rows = [row("x", 2)]
    assert group_findings(build_findings("left-behind", rows, "stays on cpu"), rows)[0].source == source


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("gets no gradient: not used in forward", "each gets no gradient: not used in forward"),
        ("still points to the memory of the original", "each still points to the memory of the original"),
        ("gradient is all zeros", "gradient is all zeros"),
        ("unexpected: Net does not register this tensor", "unexpected: Net does not register these tensors"),
        ("island", "island"),
    ],
)
def test_sentence_about_several_tensors_is_about_each(text, joined):
    """One problem has one sentence for all its tensors."""
    rows = [row(name, None, kind=Kind.PARAMETER) for name in "ab"]
    one, both = (group_findings(build_findings("x", some, text))[0].message for some in (rows[:1], rows))
    assert (one, both) == (f"a: {text}", f"a, b: {joined}")


def test_one_more_consequence_is_shown_not_counted():
    """The line with the count would replace exactly one line."""
    assert [count_shown_effects(["effect"] * n) for n in (8, 9, 10, 30)] == [8, 9, 8, 8]


def test_operators_of_one_line_are_one_consequence():
    """The lines of one operator are joined too; operators of two files are separate."""
    rows = [row("table", 6)]
    calls = (("mul", "net.py", 9), ("addmm", "net.py", 9), ("mul", "net.py", 12), ("mul", "base.py", 9))
    findings = [
        build_worded_finding("device-mismatch", Consequence("on cpu", (operator,), file, (line,)))
        for operator, file, line in calls
    ]
    (problem,) = group_findings(findings, rows)
    assert problem.effects == (
        "on cpu, in mul at net.py:9, 12",
        "on cpu, in addmm at net.py:9",
        "on cpu, in mul at base.py:9",
    )
    (problem,) = group_findings(findings[:2], rows)
    assert problem.effects == ("on cpu, in mul, addmm at net.py:9",)


def test_consequences_of_repeated_layers_are_one_line():
    """The layers' numbers are joined; other numbers, such as lines of a file, belong to the text."""
    rows = [row(f"blocks[{n}].mask", 7) for n in (0, 1, 2)]
    findings = [
        build_worded_finding(
            "device-mismatch", Consequence(f"computed from {tensor.fqn}", ("mul",), "net.py", (9,)), tensor.fqn
        )
        for tensor in rows
    ]
    (problem,) = group_findings(findings, rows)
    assert problem.effects[0] == "computed from blocks[{0..2}].mask, in mul at net.py:9"


def test_remarks_on_the_cause_are_consequences():
    """A remark of only the worst tensors is left out for another tensor of the line."""
    rows, rule = [row("table", 6), row("mask", 6)], "unregistered-tensor"
    worst, other = (Consequence(f"left out: {text} values", of_worst=True) for text in ("random", "equal"))
    findings = [
        build_worded_finding(rule, worst),
        build_worded_finding(rule, other, "mask", Severity.WARNING),
        build_worded_finding(rule, Consequence("exported as a constant"), "mask", Severity.WARNING),
        *build_findings(rule, rows, "is not registered; forward ran without an error"),
    ]
    (problem,) = group_findings(findings, rows)
    assert problem.effects[:3] == ("left out: random values", "exported as a constant", "not in state_dict()")
    (problem,) = group_findings(findings[1:2], rows)
    assert problem.effects[0] == "left out: equal values"


def test_a_module_that_a_function_captures_is_in_a_closure():
    """A closure is not a container."""
    name = "f.__closure__['inner']"
    rows = [row(f"{name}.{part}", 7, name, requires_grad=True, container=None) for part in ("weight", "bias")]
    (problem,) = group_findings(build_findings("left-behind", rows, "stays on cpu"), rows)
    assert problem.message == "f.__closure__: 1 module is kept in a closure (2 parameters)"


def find_import(rule, severity, message, about):
    return Finding(rule, severity, message, "evil.pt", about=about)


def test_an_import_that_torch_load_refuses_is_one_problem():
    """A refused import is a problem of its own only if it is not named by the first problem."""
    unsafe = find_import("unsafe-global", Severity.ERROR, "loading the file calls posix.system", "posix.system")
    refusal = "torch.load refuses the file by default: imports it"
    refused = find_import("needs-weights-only-false", Severity.WARNING, refusal, "posix.system")
    effect = "torch.load does this only with weights_only=False; the default since torch 2.6 refuses the file"
    for findings in ((unsafe, refused), (refused, unsafe)):
        (problem,) = group_findings(findings)
        assert (problem.rule, problem.severity) == ("unsafe-global", Severity.ERROR)
        assert (problem.message, problem.effects) == (unsafe.message, (effect,))
        assert set(map(id, problem.findings)) == {id(unsafe), id(refused)}
    (only_problem,) = group_findings([refused])
    assert only_problem.message == refused.message
    wider_refusal = replace(refused, about="posix.system, argparse.Namespace")
    assert [problem.rule for problem in group_findings([unsafe, wider_refusal])] == [
        "unsafe-global",
        "needs-weights-only-false",
    ]


def test_the_rules_of_imports_exist():
    """Problems name them, because a list of a checkpoint does not import the rules."""
    assert {*problems._IMPORT_RULES, problems._REFUSED_LOAD} <= DICTIONARY.keys()
