"""Annotations of a GitHub workflow are escaped as the runner reads them, and are as few as GitHub shows."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from statecli.core.model_state import Origin

from ..audits import ERROR, NOTE, WARNING, failed_target, finding, render_audit, skipped_target, target
from ..published import github


def notes(*targets, **options):
    return github(render_audit("github", *targets, **options))


@pytest.mark.parametrize("line", ["::error::x", "::error file=a:b::x", "  ::debug::x", "a ##[error]b"])
def test_reader_of_annotations_rejects_invalid_lines(line):
    """The reader of these tests can fail."""
    with pytest.raises(AssertionError):
        github(line + "\n")


def test_an_annotation_has_its_file_line_and_rule():
    """A class is annotated at the line that assigned the tensor; the message also has the remedy."""
    actual = finding("unregistered-tensor", WARNING, origin=Origin("net.py", 9), message="t: stays", help="register it")
    assert notes(target("net.py:Net", actual)) == [
        (
            "warning",
            {"file": "net.py", "line": "9", "title": "statecli unregistered-tensor"},
            "t: stays\nhelp: register it",
        )
    ]


@pytest.mark.parametrize(("severity", "level"), [(ERROR, "error"), (WARNING, "warning"), (NOTE, "notice")])
def test_severity_sets_the_level_of_the_annotation(severity, level):
    """A note becomes a notice."""
    assert [note[0] for note in notes(target("a.pt", finding(severity=severity)))] == [level]


def test_repeated_layers_are_one_annotation():
    """The folded name shows the number of layers."""
    numbers = [finding(fqn=f"layers.{n}.weight") for n in range(48)]
    assert notes(target("a.pt", *numbers)) == [
        ("error", {"file": "a.pt", "title": "statecli nan"}, "layers.{0..47}.weight: each is nan")
    ]


def test_more_than_ten_of_a_rule_are_one_annotation():
    """The annotation has the first ten findings and the number of the others."""
    numbers = [finding(fqn=f"name{'x' * n}", help=str(n)) for n in range(25)]
    ((_, properties, message),) = notes(target("a.pt", *numbers))
    assert properties == {"file": "a.pt", "title": "statecli nan (25)"}
    assert message.splitlines()[9:] == ["namexxxxxxxxx: is nan", "… and 15 more"]


def test_equal_remedy_of_many_findings_is_written_once():
    """The remedy is written once if it is the same for all findings; otherwise it would seem to apply to all."""
    same = [finding(fqn=f"name{'x' * n}", help="go back") for n in range(25)]
    ((_, _, message),) = notes(target("a.pt", *same))
    assert message.splitlines() == ["name, namex, namexx and 22 more: each is nan", "help: go back"]


def test_ten_findings_have_ten_annotations():
    """GitHub shows ten annotations."""
    numbers = [finding(fqn=f"name{'x' * n}", help=str(n)) for n in range(10)]
    assert len(notes(target("a.pt", *numbers))) == 10


def test_more_than_ten_rules_end_with_how_many_more():
    """Nine rules have an annotation and the tenth names the rest, because GitHub would drop the rest silently."""
    numbers = [finding(f"rule{'x' * n}") for n in range(14)]
    annotations = notes(target("a.pt", *numbers))
    assert len(annotations) == 10
    assert annotations[-1][2] == "and 5 findings of 5 more rules: " + ", ".join(f"rule{'x' * n}" for n in range(9, 14))


def test_each_level_has_at_most_ten_annotations():
    """Errors do not crowd out warnings."""
    findings = [finding(f"r{'x' * n}", level) for level in (ERROR, WARNING, NOTE) for n in range(20)]
    levels = [note[0] for note in notes(target("a.pt", *findings))]
    assert {level: levels.count(level) for level in levels} == {"error": 10, "warning": 10, "notice": 10}


def build_findings_by_line(count, each=1):
    """Return findings of a class: `each` findings at each of `count` lines."""
    return [
        finding(f"rule{k}", fqn=f"{'x' * n}t", origin=Origin("net.py", n))
        for k in range(each)
        for n in range(1, count + 1)
    ]


def test_each_source_line_has_its_own_annotation():
    """More than ten findings at three lines are three annotations, each at its line."""
    annotations = notes(target("net.py:Net", *build_findings_by_line(3, each=5)))
    assert [annotation[1]["line"] for annotation in annotations] == ["1", "2", "3"]
    assert [annotation[2].count("\n") for annotation in annotations] == [4, 4, 4]


def test_two_findings_of_one_line_are_one_annotation():
    """GitHub would show two annotations on top of each other. Each finding is followed by its own help."""
    where = Origin("net.py", 9)
    texts = [
        finding("left-behind", fqn=name, origin=where, help=f"# at the end of __init__:\nself.register({name})")
        for name in ("a", "b")
    ]
    ((_, properties, message),) = notes(target("net.py:Net", *texts))
    assert properties == {"file": "net.py", "line": "9", "title": "statecli left-behind (2)"}
    assert message.splitlines() == [
        *("a: is left-behind", "fix:", "# at the end of __init__:", "self.register(a)"),
        *("b: is left-behind", "fix:", "# at the end of __init__:", "self.register(b)"),
    ]


def test_no_finding_is_annotated_at_another_line():
    """Of 145 findings at 145 lines nine are shown, each at its own line; the last annotation has no line."""
    *line_annotations, last = notes(target("net.py:Net", *build_findings_by_line(145)))
    assert [annotation[1]["line"] for annotation in line_annotations] == [str(n) for n in range(1, 10)]
    assert last[2].startswith("and 136 findings at 136 more places: net.py:10, net.py:11, ")
    assert "line" not in last[1]


def test_repeated_layers_at_two_lines_are_two_annotations():
    """A fold over layers from different lines would name only one line."""
    numbers = [finding(fqn=f"layers.{n}.weight", origin=Origin("net.py", 5 + n % 2)) for n in range(8)]
    assert [note[1]["line"] for note in notes(target("net.py:Net", *numbers))] == ["5", "6"]


def test_findings_of_several_targets_are_at_the_first():
    """A thousand targets have one annotation: the message with the first ten names and the number of the rest."""
    names = [f"{'x' * n}.pt" for n in range(1, 1_001)]
    ((_, properties, message),) = notes(*(target(name, finding(target=name)) for name in names))
    assert properties == {"file": "x.pt", "title": "statecli nan (1,000)"}
    assert message == f"{', '.join(names[:10])} and 990 more: fc.weight: is nan"


def test_message_about_several_targets_starts_with_their_names():
    """Each message is one line, with ten lines at most; unreadable targets are named in one line."""
    numbers = [target(f"{n}.pt", finding(target=f"{n}.pt", message=f"w: {n // 2} NaN")) for n in range(24)]
    ((_, _, message),) = notes(*numbers)
    assert message.splitlines()[::10] == ["0.pt, 1.pt: w: 0 NaN", "… and 4 more"]
    ((_, properties, message),) = notes(*(failed_target(f"{n}.pt") for n in range(12)))
    assert properties == {"file": "0.pt", "title": "statecli cannot-read (12)"}
    assert message == f"{', '.join(f'{n}.pt' for n in range(10))} and 2 more: is empty"


def test_a_target_that_failed_is_an_error():
    """A skipped target is a notice: a step without either annotation would look clean."""
    assert notes(failed_target("no.pt"), skipped_target("README.md")) == [
        ("error", {"file": "no.pt", "title": "statecli cannot-read"}, "no.pt: is empty"),
        ("notice", {"file": "README.md", "title": "statecli skipped"}, "is a text file"),
    ]


def test_a_damaged_file_has_one_annotation():
    """The finding says more than the reason of the failure."""
    unscanned_pickle = finding("unscanned-pickle", target="no.pt", message="the file: not scanned to the end: is empty")
    failed = msgspec.structs.replace(failed_target("no.pt"), findings=(unscanned_pickle,))
    assert [properties["title"] for _, properties, _ in notes(failed)] == ["statecli unscanned-pickle"]
    other = msgspec.structs.replace(failed, findings=(finding("unsafe-global", target="no.pt"),))
    assert [properties["title"] for _, properties, _ in notes(other)] == [
        "statecli cannot-read",
        "statecli unsafe-global",
    ]


def test_targets_that_failed_for_a_common_reason_have_one_annotation():
    """The class of --model cannot be built, so no file was compared with the class."""
    reason = "--model net.py:Net: the constructor needs config"
    failed = [msgspec.structs.replace(failed_target(name), reason=reason) for name in ("net.py:Net", "a.pt", "b.pt")]
    assert notes(*failed) == [("error", {"file": "net.py", "title": "statecli cannot-read"}, reason)]


def test_the_last_line_is_the_verdict():
    """The verdict is for readers of the log and is not a workflow command."""
    assert render_audit("github", target()).splitlines() == ["statecli: 1 audited: clean; 2 rules ran"]


def test_quiet_shows_only_findings_that_fail():
    """-q: no notice, no verdict."""
    text = render_audit("github", target("a.pt", finding(severity=NOTE), finding("inf", WARNING)), quiet=True)
    assert [annotation[1]["title"] for annotation in github(text)] == ["statecli inf"]
    assert text.count("\n") == 1
    assert render_audit("github", target(), quiet=True) == ""


@given(st.text(st.characters(), max_size=60), st.text(st.characters(), min_size=1, max_size=30))
def test_annotation_with_any_name_is_one_line(fqn, name):
    """An annotation is one line, whatever its text, and reads back unchanged."""
    text = render_audit("github", target(name, finding(fqn=fqn, message=f"{fqn}: x", target=name), ran=()))
    assert text.count("\n") == 2
    assert len(github(text)) == 1


def test_percent_is_escaped_once():
    """`%0A` in a name is not a line break, and reads back unchanged."""
    ((_, _, message),) = notes(target("a.pt", finding(message="a%0A::error::b%25: x")))
    assert message == "a%0A::error::b%25: x"


def test_a_path_with_a_line_break_is_the_path_of_the_file():
    """The runner decodes the line break; a text `\\n` would name no file of the repository."""
    ((_, properties, _),) = notes(target("a\nb.pt", finding(target="a\nb.pt")))
    assert properties["file"] == "a\nb.pt"
