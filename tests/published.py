"""Checks of documents: published schemas, and the grammar of GitHub's workflow commands."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import jsonschema

DATA = Path(__file__).parent / "data"
XS = "{http://www.w3.org/2001/XMLSchema}"

#: A workflow command for the runner: properties until the second `::`; `%`, in values also `:` and `,`, is escaped.
COMMAND = re.compile(r"::(error|warning|notice) ((?:[a-z]+=[^:,\r\n]*)(?:,[a-z]+=[^:,\r\n]*)*)::([^\r\n]*)")
ESCAPES = {"%25": "%", "%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ","}


@cache
def _sarif():
    return jsonschema.Draft4Validator(json.loads((DATA / "sarif-2.1.0.json").read_text("utf-8-sig")))


def sarif(text):
    """Check that the document is valid SARIF 2.1.0; return its only run."""
    document = json.loads(text)
    _sarif().validate(document)
    (run,) = document["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    return run


@cache
def _elements():
    """Return (attributes, required attributes, children) of each element of the schema."""
    top = ElementTree.parse(DATA / "junit-10.xsd").getroot()  # noqa: S314  # our own file
    rules_by_name = {}
    for element in top.findall(f"{XS}element"):
        attributes = {child.get("name"): child.get("use") == "required" for child in element.iter(f"{XS}attribute")}
        children = {child.get("ref") for child in element.iter(f"{XS}element")} - {None}
        rules_by_name[element.get("name")] = (
            set(attributes),
            {name for name in attributes if attributes[name]},
            children,
        )
    return rules_by_name


def junit(text):
    """Check the elements, attributes and counts against the schema; return the root."""
    root = ElementTree.fromstring(text)  # noqa: S314  # our own output; expat refuses what XML 1.0 forbids
    assert root.tag == "testsuites"
    for element in root.iter():
        allowed, required, children = _elements()[element.tag]
        assert required <= set(element.attrib) <= allowed
        assert {child.tag for child in element} <= children
    for suite in (root, *root.iter("testsuite")):
        assert int(suite.get("tests")) == len(list(suite.iter("testcase")))
        assert int(suite.get("failures")) == len(list(suite.iter("failure")))
        assert int(suite.get("errors")) == len(list(suite.iter("error")))
    return root


def _unescape(text):
    assert not re.search(r"%(?!25|0D|0A|3A|2C)", text)
    return re.sub("%25|%0D|%0A|%3A|%2C", lambda match: ESCAPES[match[0]], text)


def github(text):
    """Return (level, properties, message) of each annotation; no other line is a command, of the older kind either."""
    actual = []
    for line in text.splitlines():
        match = COMMAND.fullmatch(line)
        assert (match is not None) == line.lstrip().startswith("::"), line
        assert "##[" not in line
        if match:
            level, properties, message = match.groups()
            pairs = (part.split("=", 1) for part in properties.split(","))
            actual.append((level, {key: _unescape(value) for key, value in pairs}, _unescape(message)))
    for level in ("error", "warning", "notice"):
        assert sum(entry[0] == level for entry in actual) <= 10
    return actual


def gitlab(text):
    """Check that each issue has the keys of GitLab's format and a fingerprint of its own; return the issues."""
    issues = json.loads(text)
    for issue in issues:
        assert issue["description"]
        assert issue["check_name"]
        assert issue["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert issue["location"]["path"]
        assert issue["location"]["lines"]["begin"] >= 1
    assert len({issue["fingerprint"] for issue in issues}) == len(issues)
    return issues
