"""All findings of all commands are built from the entries of a single dictionary, and each entry explains itself."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import statecli
from statecli.core.errors import StateError
from statecli.core.finding import Finding, Severity
from statecli.core.rule import FORMER_NAMES, Rule
from statecli.report.documents.schemas import DOCUMENTS
from statecli.rules.dictionary import DICTIONARY, RULES
from statecli.targets.location import compute_fingerprint

PACKAGE = Path(statecli.__file__).parent
TEXTS = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
#: Commands that report findings; the other documents are lists.
COMMANDS = DOCUMENTS.keys() - {"rules", "config"}


@functools.cache
def parse(path):
    """Return the syntax tree of a file. The result is cached."""
    return ast.parse(TEXTS[path])


@pytest.fixture(autouse=True, scope="module")
def _forget_trees():
    """Drop the trees, because the garbage collector would walk the trees in later tests."""
    yield
    parse.cache_clear()


def iter_trees(*words):
    """Yield (path, tree) of each file with at least one of the words."""
    for path, text in TEXTS.items():
        if any(word in text for word in words):
            yield path, parse(path)


def get_last_name(node):
    """`b` of `b` and of `a.b`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def iter_calls(tree, *names):
    """Yield the calls of functions or methods with the given names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and get_last_name(node.func) in names:
            yield node


def iter_defined_names(tree):
    """Yield the names of rules defined in a module: by Rule, by a helper with return type Rule, or by a decorator."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    helpers = [node.name for node in functions if node.returns and ast.unparse(node.returns) == "Rule"]
    for call in iter_calls(tree, "Rule", *helpers):
        if isinstance(call.args[0], ast.Constant):
            yield call.args[0].value
    for function in functions:
        if any(
            isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "rule"
            for decorator in function.decorator_list
        ):
            yield function.name.strip("_").replace("_", "-")


def test_every_rule_in_the_code_is_in_the_dictionary():
    """A finding of another rule could not be explained."""
    defined = [name for _, tree in iter_trees("Rule", "rule") for name in iter_defined_names(tree)]
    assert sorted(defined) == sorted(DICTIONARY)


def test_findings_are_built_only_from_rules():
    """`Rule.finding` sets the name of a finding. Only a summary of several findings copies the name from a finding."""
    built = {path for path, tree in iter_trees("Finding") for _ in iter_calls(tree, "Finding")}
    assert built == {"core/rule.py", "core/finding.py"}


def test_a_severity_is_decided_in_one_function():
    """Only `core/rule.py` calls `decide_severity`. No code sets a severity later or chooses between two severities.

    A problem has the worst severity of its findings.
    """
    deciding_modules = {
        path for path, tree in iter_trees("decide_severity") for _ in iter_calls(tree, "decide_severity")
    }
    assert deciding_modules == {"core/rule.py"}
    replaced = []
    for path, tree in iter_trees("severity"):
        # The configuration's `severity` maps rules to severities.
        for call in iter_calls(tree, "replace") if path != "commands/audit/config.py" else ():
            replaced += [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "severity"]
        for node in ast.walk(tree):
            if isinstance(node, ast.BoolOp):
                parts = set(map(get_last_name, node.values))
                assert "severity" not in parts, f"{path}:{node.lineno}"
    assert [text.partition("(")[0] for text in replaced] == ["find_worst_severity"]


def iter_lines_that_decide_again(tree):
    """Yield lines that rebuild a finding, compare a severity that was just decided, or choose the worst of several.

    Only a finding has both the target and the name of a tensor, so code that reads both builds a finding of a finding.
    """
    for call in iter_calls(tree, "finding"):
        owners = {
            keyword.arg: ast.unparse(keyword.value.value)
            for keyword in call.keywords
            if isinstance(keyword.value, ast.Attribute) and keyword.value.attr == keyword.arg
        }
        if owners.get("target", "") == owners.get("fqn"):
            yield call.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "severity":
            yield node.lineno
    for call in iter_calls(tree, "max", "min"):
        if any(isinstance(node, ast.Attribute) and node.attr == "rank" for node in ast.walk(call)):
            yield call.lineno


def test_no_finding_gets_another_severity():
    """A proof passes what it measured to `core/severity.py`, and does not look at the decision."""
    for path, tree in iter_trees("severity"):
        if path.startswith(("commands/", "rules/", "core/")) and path != "core/severity.py":
            assert [*iter_lines_that_decide_again(tree)] == [], path


@pytest.mark.parametrize(
    "text",
    [
        "RULE.finding(text, target=finding.target, fqn=finding.fqn, severity=severity)",
        "if severity is Severity.WARNING:\n    severity = RULE.cases['kept']",
        "max(severities, key=lambda severity: severity.rank)",
    ],
)
def test_a_severity_that_is_decided_again_is_found(text):
    """A rebuilt finding, a second decision and a maximum."""
    assert [*iter_lines_that_decide_again(ast.parse(text))]


def test_configured_severity_overrides_case_and_default():
    """The configuration comes first, then the case, then the default."""
    rule = DICTIONARY["left-behind"]
    for severity, configured, expected_severity in (
        (None, None, Severity.ERROR),
        (Severity.WARNING, None, Severity.WARNING),
        (Severity.WARNING, Severity.NOTE, Severity.NOTE),
    ):
        finding = rule.finding("message", target="a.pt", severity=severity, configured=configured)
        assert finding.severity is expected_severity


def test_every_rule_has_a_summary_and_an_explanation():
    """An entry has a one-line summary, a reason, an example, a fix, and the commands that report the rule."""
    for rule in DICTIONARY.values():
        assert rule.summary.endswith("."), rule.name
        assert "\n" not in rule.summary, rule.name
        assert all(text.strip() == text and len(text) > 10 for text in (rule.why, rule.example, rule.fix)), rule.name
        assert set(rule.commands) <= COMMANDS, rule.name
        assert rule.commands, rule.name
        parts = [part for part in ("Why: ", "Example: ", "Fix: ") if f"\n\n{part}" in rule.explanation]
        assert parts == ["Why: ", "Example: ", "Fix: "], rule.name


def test_a_rule_of_audit_is_in_the_group_of_its_module():
    """So `--select GROUP` and the list of rules mean the same."""
    groups = {rule.name: rule.find.__module__.rpartition(".")[2] for rule in RULES}
    assert {rule.name: rule.group for rule in RULES} == groups
    assert all("audit" in rule.commands for rule in RULES)


def test_every_error_names_a_rule():
    """The rule that an error names is a rule of audit."""
    kinds = [StateError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.rule for kind in kinds if kind.rule} <= {rule.name for rule in RULES}


def test_a_renamed_rule_keeps_its_fingerprint():
    """GitHub and GitLab would show a known finding as new."""
    for new, former in FORMER_NAMES.items():
        old = Finding(former, Severity.ERROR, "message", "net.py:Net", "fc.weight")
        assert compute_fingerprint(
            DICTIONARY[new].finding("message", target="net.py:Net", fqn="fc.weight")
        ) == compute_fingerprint(old)


def test_rules_with_equal_texts_are_equal():
    """Two rules with the same text are equal, even if different code built the rules."""
    rule = DICTIONARY["added"]
    assert rule == Rule(*(getattr(rule, field) for field in Rule.__struct_fields__))


def list_severities(tree):
    """Lines of `Severity.X` outside comparisons, definitions of rules, keys of dicts and thresholds."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Severity"):
            continue
        ancestors, nearest_ancestor = [], parents[node]
        while (child := ancestors[-1] if ancestors else node) in parents:
            ancestors.append(parents[child])
        definitions = {ast.unparse(item.func) for item in ancestors if isinstance(item, ast.Call)}
        thresholds = {ast.unparse(item.target) for item in ancestors if isinstance(item, ast.AnnAssign)}
        thresholds |= {item.arg for item in ancestors if isinstance(item, ast.keyword)}
        is_key = isinstance(nearest_ancestor, ast.Dict) and node in nearest_ancestor.keys
        if not (
            is_key or isinstance(nearest_ancestor, ast.Compare) or "fail_on" in thresholds or definitions & DEFINITIONS
        ):
            yield node.lineno


DEFINITIONS = {"Rule", "rule", "_build_rule"}


def test_each_severity_is_in_the_definition_of_its_rule():
    """Code names a case of the rule. A function of `core/severity.py` decides for a possibly lost tensor."""
    definitions = ("severity.py", "rules.py", "registration_rules.py")
    misplaced_severities = {
        (path, line)
        for path, tree in iter_trees("Severity.")
        for line in list_severities(tree)
        if path.startswith(("commands/", "rules/", "core/")) and not path.endswith(definitions)
        if (path, TEXTS[path].splitlines()[line - 1].strip()) not in MEASURED_SEVERITIES
    }
    assert misplaced_severities == set()


#: A severity that `inspect` compares, and the default of --fail-on.
MEASURED_SEVERITIES = {
    ("commands/inspect/run.py", "if tensor_harm.severity in (None, Severity.NOTE):"),
    ("core/option_defaults.py", "AUDIT_FAIL_ON = Severity.WARNING"),
}


def test_cases_named_in_code_are_cases_of_rules():
    """The name of a case is text, so no type checker checks the spelling. Code outside of the definitions names each
    case.
    """
    users = [re.sub(r"cases=\{[^}]*\}", "", text) for text in TEXTS.values() if ".cases[" in text]
    quoted_names = {case for text in users for case in re.findall(r'"([^"\n]+)"', text)}
    cases = {case for rule in DICTIONARY.values() for case in rule.cases}
    used = {case for text in TEXTS.values() for case in re.findall(r'\.cases\["([^"]+)"', text)}
    assert used <= cases <= quoted_names
