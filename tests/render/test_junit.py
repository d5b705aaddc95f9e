"""JUnit XML has a suite for each target and a case for each rule, without characters that XML forbids."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from statecli.commands.diff.result import ScalarChange, Status
from statecli.core.finding import Severity

from .. import changes
from ..audits import (
    NOTE,
    WARNING,
    accept_findings,
    failed_target,
    finding,
    render_audit,
    skipped_rule,
    skipped_target,
    target,
)
from ..published import junit


def cases(*targets, **options):
    """Map (suite, case) to its elements: a list of (tag, message, text), empty if the case passed."""
    root = junit(render_audit("junit", *targets, **options))
    return {
        (suite.get("name"), case.get("name")): [(element.tag, element.get("message"), element.text) for element in case]
        for suite in root
        for case in suite
    }


@pytest.mark.parametrize(
    "text",
    [
        "<testsuites tests='1' failures='0' errors='0'/>",
        "<testsuites><testsuite name='a' tests='0' failures='0' errors='0'><x/></testsuite></testsuites>",
        "<testsuites tests='0' failures='0' errors='0' color='red'/>",
    ],
)
def test_validator_of_junit_rejects_invalid_documents(text):
    """The validator of these tests can fail: on a count, an element or an attribute."""
    with pytest.raises((AssertionError, KeyError, TypeError)):
        junit(text)


def test_each_rule_is_a_case_of_its_target():
    """A rule without findings passed; a rule that could not run was skipped, with the reason."""
    actual = cases(
        target("a.pt", finding(), ran=("nan", "inf"), skipped=(skipped_rule("broken-tie", "give --against"),))
    )
    assert actual["a.pt", "inf"] == []
    assert actual["a.pt", "nan"] == [("failure", "fc.weight: is nan", "error[nan]: fc.weight: is nan")]
    assert actual["a.pt", "broken-tie"] == [("skipped", "give --against", None)]


def test_several_findings_of_a_rule_are_one_failure():
    """Jenkins keeps one failure for each case, so the failure has the number of findings and a line for each."""
    first, second = finding(fqn="a", help="mend it"), finding(fqn="b")
    ((tag, message, text),) = cases(target("a.pt", first, second))["a.pt", "nan"]
    assert (tag, message) == ("failure", "2 problems, the first: a: is nan")
    assert text.splitlines() == ["error[nan]: a: is nan (help: mend it)", "error[nan]: b: is nan"]


def test_a_problem_of_several_tensors_lists_each():
    """The failure has a line for the problem and a line for each tensor."""
    ((tag, message, text),) = cases(target("a.pt", finding(fqn="a"), finding(fqn="b")))["a.pt", "nan"]
    assert (tag, message) == ("failure", "a, b: each is nan")
    assert text.splitlines() == ["error[nan]: a, b: each is nan", "  nan: a: is nan", "  nan: b: is nan"]


def test_finding_below_fail_on_is_in_a_passed_case():
    """A note below --fail-on is described in the passed case."""
    actual = cases(target("a.pt", finding(severity=NOTE)))
    assert actual["a.pt", "nan"] == [("system-out", None, "note[nan]: fc.weight: is nan")]
    warned = target("a.pt", finding(severity=WARNING))
    assert cases(warned, fail_on=Severity.ERROR)["a.pt", "nan"][0][0] == "system-out"


def test_accepted_finding_is_a_passed_case_with_the_reason():
    """The passed case has the reason."""
    actual = cases(target("a.pt", accepted=accept_findings("known", finding())))
    assert actual["a.pt", "nan"] == [("system-out", None, "accepted: error[nan]: fc.weight: is nan: known")]


def test_a_target_that_was_not_audited_is_a_case():
    """A failed target is an error and a skipped target is skipped; no suite is empty."""
    actual = cases(failed_target("no.pt", "is empty"), skipped_target("README.md", "is a text file"))
    assert actual["no.pt", "audit"] == [("error", "no.pt: is empty", None)]
    assert actual["README.md", "audit"] == [("skipped", "is a text file", None)]


def test_failure_of_a_changed_tensor_has_the_size_of_the_change():
    """The text has the number of changed values, the largest change, and new NaN values."""
    diff = changes.diff(changes.nudge_tensor("w", changed=2, nan_after=1))
    (failure,) = junit(changes.render_diff(diff, "junit")).iter("failure")
    assert failure.text.splitlines()[0] == "changed: values 2/16, max |Δ| 0.5, NaN 0 → 1"


def test_each_change_of_a_diff_is_a_case():
    """The cases are tensors and settings; an expected change passed."""
    scalar = ScalarChange("epoch", Status.CHANGED, 1, 2)
    diff = changes.diff(changes.nudge_tensor("w"), changes.rename_tensor("old", "new"), scalars=(scalar,))
    root = junit(changes.render_diff(diff, "junit"))
    assert [(element.get("name"), element[0].tag) for element in root.iter("testcase")] == [
        ("w", "failure"),
        ("new", "failure"),
        ("epoch", "failure"),
    ]
    expected = changes.diff(changes.nudge_tensor("w"), findings=(), expected=True)
    (case,) = junit(changes.render_diff(expected, "junit")).iter("testcase")
    assert [element.tag for element in case] == ["system-out"]


def test_equal_states_are_one_case_that_passed():
    """Most readers treat a report without a case as an error."""
    (case,) = junit(changes.render_diff(changes.diff(changes.keep_tensor("w")), "junit")).iter("testcase")
    assert (case.get("name"), list(case)) == ("identical", [])


@given(st.text(st.characters(), max_size=40), st.text(st.characters(), max_size=40))
def test_document_with_any_name_is_valid_xml(fqn, name):
    """A parser reads a name with any characters, including lone surrogates and U+FFFF."""
    problem = finding(fqn=fqn, message=f"{fqn}: x", target=name)
    junit(
        render_audit(
            "junit",
            target(name, problem),
            failed_target(f"{name}."),
            target("b", accepted=accept_findings(fqn or "-", problem)),
        )
    )


def test_characters_that_xml_forbids_are_escaped():
    """The escape is readable, and the character itself does not reach the parser."""
    ((_, message, _),) = cases(target("a.pt", finding(message="a\x00\x1b\uffff\ud800]]>: x")))["a.pt", "nan"]
    assert message == r"a\x00\x1b\uffff\ud800]]>: x"
