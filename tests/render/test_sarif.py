"""SARIF 2.1.0 is valid by the published schema, and each finding has a location."""

from __future__ import annotations

import os
from urllib.parse import unquote, unquote_to_bytes

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import example, given

from statecli.core.documentation import DOCUMENTATION_URL
from statecli.core.model_state import Origin, Place
from statecli.render.sarif import make_uri
from statecli.rules.dictionary import RULES
from statecli.targets.location import compute_fingerprint

from ..audits import ERROR, NOTE, WARNING, accept_findings, failed_target, finding, render_audit, skipped_target, target
from ..published import sarif


def run(*targets):
    return sarif(render_audit("sarif", *targets))


def location(problem):
    """Return the location of the only result for this finding."""
    (result,) = run(target("a.pt", problem))["results"]
    (where,) = result["locations"]
    return where


def test_validator_of_sarif_rejects_an_invalid_result():
    """The validator of these tests can fail."""
    with pytest.raises(jsonschema.ValidationError):
        sarif('{"version": "2.1.0", "runs": [{"tool": {"driver": {"name": "x", "rules": []}}, "results": [{}]}]}')


def test_a_rule_has_its_explanation():
    """The rule has a name, a summary, a reason, the full explanation as text and as Markdown, and a default level."""
    (rule,) = (rule for rule in run(target())["tool"]["driver"]["rules"] if rule["id"] == "nan")
    (registered_rule,) = (rule for rule in RULES if rule.name == "nan")
    assert rule["shortDescription"]["text"] == registered_rule.summary
    assert rule["help"] == {"text": registered_rule.explanation, "markdown": registered_rule.explanation}
    assert rule["helpUri"] == f"{DOCUMENTATION_URL}reference/rules/nan.html"
    assert rule["defaultConfiguration"] == {"level": "error"}
    assert rule["properties"] == {"tags": [registered_rule.group]}
    assert "\n" not in rule["fullDescription"]["text"]
    assert rule["fullDescription"]["text"].startswith(f"{registered_rule.summary} Why: ")


def test_rules_that_ran_and_found_nothing_are_listed():
    """The report shows which rules were checked."""
    assert {rule["id"] for rule in run(target(ran=("nan", "inf")))["tool"]["driver"]["rules"]} == {"nan", "inf"}


@pytest.mark.parametrize(("severity", "level"), [(ERROR, "error"), (WARNING, "warning"), (NOTE, "note")])
def test_level_of_a_result_is_the_severity_of_the_finding(severity, level):
    """The level does not depend on the default level of the rule."""
    (result,) = run(target("a.pt", finding(severity=severity)))["results"]
    assert (result["ruleId"], result["level"]) == ("nan", level)


def test_message_has_the_remedy_on_its_second_line():
    """The second line of the message is the remedy."""
    (result,) = run(target("a.pt", finding(help="go back one epoch")))["results"]
    assert result["message"]["text"] == "fc.weight: is nan\nhelp: go back one epoch"


def test_brackets_in_a_message_are_escaped():
    """`[text](target)` is a link in a plain message too, unless its bracket is escaped (SARIF 2.1.0, 3.11.6)."""
    (result,) = run(target("a.pt", finding(message="[click](http://x.y)[1](2): is nan")))["results"]
    assert result["message"]["text"] == r"[click\](http://x.y)[1\](2): is nan"


def test_a_source_line_is_a_region():
    """The region of a class is the line that assigned the tensor."""
    where = location(finding(origin=Origin("pkg/net.py", 9)))
    assert where["physicalLocation"] == {"artifactLocation": {"uri": "pkg/net.py"}, "region": {"startLine": 9}}


def test_bytes_are_a_region():
    """The region of a tensor of a file is its bytes in its shard."""
    where = location(finding(place=Place("m/model-1.safetensors", 64, 128)))
    file = {"uri": "m/model-1.safetensors"}
    assert where["physicalLocation"] == {"artifactLocation": file, "region": {"byteOffset": 64, "byteLength": 128}}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a.pt", "a.pt"),
        ("./a.pt", "a.pt"),
        ("../a.pt", "../a.pt"),
        ("train.ckpt#optimizer", "train.ckpt"),
        ("net.py:Net(4, 'a#b:c')", "net.py"),
        ("pkg.mod:Net", "pkg/mod.py"),
        ("/tmp/a.pt", "file:///tmp/a.pt"),
        ("hf://org/re po@main/m", "hf://org/re%20po@main/m"),
        ("a:b.pt", "a%3Ab.pt"),
    ],
)
def test_a_target_is_a_file(text, path):
    """The URI is the checkpoint without its section or the file of the class, and absolute only if typed absolute."""
    (result,) = run(target(text, finding(target=text)))["results"]
    assert result["locations"][0]["physicalLocation"] == {"artifactLocation": {"uri": path}}


def test_a_tensor_is_a_logical_location():
    """A tensor has its name, after the section if the section is not the model."""
    assert location(finding(section="model"))["logicalLocations"] == [
        {"name": "fc.weight", "fullyQualifiedName": "fc.weight", "kind": "member"}
    ]
    named = location(finding(fqn="state[0]['step']", section="optimizer"))["logicalLocations"][0]
    assert named["fullyQualifiedName"] == "optimizer.state[0]['step']"


def test_finding_without_a_tensor_has_no_logical_location():
    """Such a finding does not have a logical location."""
    assert "logicalLocations" not in location(finding(fqn=None, message="is a legacy file"))


def test_line_hash_distinguishes_findings_with_one_fingerprint():
    """The fingerprint is the finding's own; GitHub's hash also distinguishes two findings of one tensor and rule."""
    first, second = finding(message="fc.weight: 1 NaN"), finding(message="fc.weight: 2 NaN", help="other")
    results = run(target("a.pt", first, second))["results"]
    assert [result["partialFingerprints"]["statecli/v1"] for result in results] == [compute_fingerprint(first)] * 2
    githubs = [result["partialFingerprints"]["primaryLocationLineHash"] for result in results]
    assert githubs == [f"{compute_fingerprint(first)}:1", f"{compute_fingerprint(first)}:2"]


def test_equal_findings_are_one_related_location():
    """The schema requires different entries."""
    (result,) = run(target("a.pt", finding(fqn="a"), finding(fqn="b"), finding(fqn="b")))["results"]
    assert [part["logicalLocations"][0]["name"] for part in result["relatedLocations"]] == ["a", "b"]


def test_a_problem_of_several_tensors_is_one_result():
    """Each tensor is a related location with its own message."""
    (result,) = run(target("a.pt", finding(fqn="a"), finding(fqn="b")))["results"]
    assert result["message"]["text"] == "a, b: each is nan"
    related = result["relatedLocations"]
    assert [finding["message"]["text"] for finding in related] == ["nan: a: is nan", "nan: b: is nan"]
    assert [location_["logicalLocations"][0]["name"] for location_ in related] == ["a", "b"]
    assert "logicalLocations" not in result["locations"][0]


def test_two_problems_of_one_rule_have_different_fingerprints():
    """The names of the tensors distinguish the problems, in any order of the findings."""
    lists = [[finding(fqn=f"{name}.{n}", help=name) for n in range(5)] for name in ("a", "b")]
    first = [
        result["partialFingerprints"]["statecli/v1"] for result in run(target("a.pt", *lists[0], *lists[1]))["results"]
    ]
    reversed_order = [
        result["partialFingerprints"]["statecli/v1"] for result in run(target("a.pt", *lists[1], *lists[0]))["results"]
    ]
    assert len(set(first)) == 2
    assert first == reversed_order[::-1]


def test_accepted_finding_is_suppressed_with_its_reason():
    """An accepted finding has its reason, and any other finding has an empty list of suppressions."""
    accepted = accept_findings("known since v1", finding("inf"))
    results = run(target("a.pt", finding(), accepted=accepted))["results"]
    assert [(result["ruleId"], result["suppressions"]) for result in results] == [
        ("nan", []),
        ("inf", [{"kind": "external", "justification": "known since v1"}]),
    ]


def test_results_have_no_suppressions_without_a_baseline():
    """The results then have no suppressions."""
    (result,) = run(target("a.pt", finding()))["results"]
    assert "suppressions" not in result


def test_a_target_that_failed_is_a_notification():
    """The run was not successful, and the notification names the file and the reason."""
    (invocation,) = run(target(), failed_target("no.pt", "is empty"))["invocations"]
    assert invocation["executionSuccessful"] is False
    (notification,) = invocation["toolExecutionNotifications"]
    assert (notification["level"], notification["message"]["text"]) == ("error", "no.pt: is empty")
    assert notification["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "no.pt"


def test_a_target_that_was_skipped_is_a_note():
    """A skipped target does not make the run fail."""
    (invocation,) = run(target(), skipped_target("README.md"))["invocations"]
    assert invocation["executionSuccessful"] is True
    assert [notification["level"] for notification in invocation["toolExecutionNotifications"]] == ["note"]


def test_a_clean_run_has_no_result():
    """A clean run has an empty list of results, because the rules were run."""
    assert run(target())["results"] == []


def test_quiet_keeps_all_results():
    """The report stays complete, because programs read it."""
    assert render_audit("sarif", target("a.pt", finding(severity=NOTE)), quiet=True) == render_audit(
        "sarif", target("a.pt", finding(severity=NOTE))
    )


def test_one_result_is_one_line():
    """A line can be read, searched with grep and compared with diff."""
    text = render_audit("sarif", target("a.pt", finding(), finding("inf")))
    assert [line[:11] for line in text.splitlines()].count('{"ruleId":"') == 2


@given(st.text(min_size=1).filter(lambda path: "://" not in path and "\0" not in path))
@example("a%20b.pt")
@example("a//b?c#d.pt")
@example("C:a.pt")
def test_unquoted_uri_is_the_path(path):
    """The unquoted URI is the path, and no part of the URI is a scheme, a query or a fragment."""
    if any("\ud800" <= char <= "\udfff" for char in path):
        return
    text = make_uri(path)
    assert text.isascii()
    assert not set(text.removeprefix("file://")) & set(':?#[]\\ "<>')
    assert unquote(text.removeprefix("file://")) == path.removeprefix("./")


@given(st.binary(min_size=1).filter(lambda raw: b"\0" not in raw and b"://" not in raw))
def test_a_uri_has_the_bytes_of_the_file_name(raw):
    """The bytes need not be UTF-8."""
    assert unquote_to_bytes(make_uri(os.fsdecode(raw)).removeprefix("file://")) == raw.removeprefix(b"./")
