"""The command line of audit: exit codes, streams, tables of any width, and any number of targets."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch

import statecli as package
from statecli.commands.audit import baseline
from statecli.core import documentation
from statecli.core.documentation import rule_url
from statecli.core.rule import FORMER_NAMES
from statecli.render import Output
from statecli.report import View
from statecli.requests.options import ListOutput
from statecli.rules.dictionary import DICTIONARY

from .audits import (
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
from .test_cli import on_a_terminal


@pytest.fixture(autouse=True)
def _audit_folder(in_tmp_path):
    """A folder with a clean checkpoint, a checkpoint with a warning, and an unreadable file."""
    torch.save({"w": torch.ones(2)}, "clean.pt")
    torch.save({"w": torch.ones(2), "W": torch.ones(2)}, "found.pt")
    Path("empty.pt").write_bytes(b"")


# Exit codes and streams.


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("clean.pt",), 0),
        (("clean.pt", "found.pt"), 1),
        (("found.pt", "--fail-on", "error"), 0),
        (("found.pt", "--ignore", "case-collision"), 0),
        (("clean.pt", "empty.pt"), 2),
        (("found.pt", "empty.pt"), 2),
        (("no.pt",), 2),
        (("clean.pt", "--select", "nan"), 0),
        (("clean.pt", "--select", "nan", "--no-values"), 2),
        (("clean.pt", "--no-values", "--select", "nan", "--select", "case-collision"), 2),
        (("clean.pt", "--select", "values", "--select", "names"), 0),
    ],
)
def test_exit_status_tells_clean_from_findings_and_failures(statecli, words, code):
    """Status 0: clean, 1: findings, 2: targets that could not be audited, whatever the other findings."""
    assert statecli("audit", *words).code == code


def test_failed_target_does_not_stop_the_run(statecli):
    """The other targets are audited; the failure is a line on stderr and in the result."""
    result = statecli("audit", "empty.pt", "found.pt", "-f", "json")
    assert result.err.count("\n") == 1
    assert [(target["target"], target["status"]) for target in result.json["targets"]] == [
        ("empty.pt", "failed"),
        ("found.pt", "audited"),
    ]
    assert result.json["findings"]


def test_json_fits_its_schema(statecli):
    """The schema of `statecli schema audit` fits the output of `-f json`."""
    described = statecli("schema", "audit").json
    jsonschema.validate(statecli("audit", "found.pt", "clean.pt", "empty.pt", "-f", "json").json, described)


@pytest.mark.parametrize("output", [Output.TABLE, Output.PLAIN, Output.MARKDOWN, Output.GITHUB])
def test_quiet_prints_only_findings_that_fail(statecli, output):
    """With -q, clean targets print nothing; findings that cause status 1 are printed with their target."""
    assert statecli("audit", "clean.pt", "-q", "-f", output.value).out == ""
    text = statecli("audit", "found.pt", "clean.pt", "-q", "-f", output.value).out
    assert "case-collision" in text
    assert "found.pt" in text
    assert "clean.pt" not in text


@pytest.mark.parametrize("output", ["plain", "table", "markdown", "github"])
def test_quiet_names_rules_that_the_configuration_disables(statecli, output):
    """A clean target prints nothing else; a rule disabled by a pull request is never silent."""
    Path("statecli.toml").write_text('ignore = ["nan"]\n')
    assert "configuration statecli.toml: disables 1 rule (nan)" in statecli("audit", "clean.pt", "-q", "-f", output).out


def test_quiet_leaves_out_findings_below_fail_on(statecli):
    """A finding below --fail-on does not cause the exit status."""
    assert statecli("audit", "found.pt", "-q", "--fail-on", "error").out == ""


# Outputs for people.


def test_several_targets_share_one_progress_bar():
    """The targets are several checkpoints: bars do not pile up, and no bar is left at the end."""
    for n in range(5):
        torch.save({"w": torch.ones(9) + n}, f"more-{n}.pt")
    out, code = on_a_terminal(["audit", "--values", *(f"more-{n}.pt" for n in range(5))])
    assert code == 0
    assert "180/180 bytes" in out
    assert "bytes" not in [line.partition("bytes")[1] for line in out.split("\n")[1:]]


def render_table(*targets, width=80, **options):
    return render_audit("table", *targets, terminal=True, width=width, **options)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("count", [1, 300])
def test_a_table_keeps_to_its_width(width, count):
    """The width holds for all texts, of one target or of many."""
    long = finding(
        "unregistered-tensor", message=f"model.{'block.' * 30}w: {'is not registered ' * 9}", help="fix it " * 30
    )
    targets = [target(f"runs/{'x' * 60}/step-{n}.pt", long, finding()) for n in range(count)]
    text = render_table(
        *targets, failed_target("no.pt", "is " + "very " * 40 + "empty"), skipped_target("R.md"), width=width
    )
    assert max(map(len, text.splitlines())) <= width


def test_one_target_is_grouped_by_rule():
    """The worst rule is first; equal remedies are given once."""
    actual = [finding("inf", WARNING, fqn="a"), *(finding(fqn=name, help="go back") for name in "bc")]
    assert render_table(target("a.pt", *actual)).splitlines() == [
        "a.pt",
        "1 audited: 1 error, 1 warning; 2 rules ran",
        "torch-zip, 2 tensors, 64 B",
        "",
        "error[nan]: b, c: each is nan",
        "  help  go back",
        "",
        "warning[inf]: a: is inf",
    ]


def test_each_target_with_findings_has_a_group():
    """Each group has the rules of its findings; a clean target is named in the heading."""
    text = render_table(target("a.pt", finding()), target("b.pt"), target("c.pt", finding("inf", NOTE, target="c.pt")))
    assert [line for line in text.splitlines() if "." in line] == [
        "torch-zip, 6 tensors, 192 B; clean: b.pt",
        "a.pt  1 error",
        "error[nan]: fc.weight: is nan",
        "c.pt  1 note",
        "note[inf]: fc.weight: is inf",
    ]
    assert text.splitlines()[1] == "3 audited: 1 error, 1 note in 2 targets; 2 rules ran"


def test_targets_with_the_same_finding_are_one_group():
    """Checkpoints of one run with the same finding are one group; --all lists each."""
    targets = [target(f"step-{n}.pt", finding(target=f"step-{n}.pt")) for n in range(300)]
    text = render_table(*targets)
    assert "step-0.pt\n  and 299 more, each with the same 1 error: step-1.pt, step-2.pt, step-3.pt," in text
    assert "step-10.pt\n  and 289 more\n" in text
    assert text.count("is nan") == 1
    assert render_table(*targets, view=View(unfold=True)).count("is nan") == 300


@pytest.mark.parametrize("output", ["table", "markdown", "html"])
def test_a_target_that_is_folded_into_another_is_named(output):
    """The second malicious file of two; of many the first ten, however long they are called, and how many more."""
    evil = [target(name, finding("unsafe-global", target=name)) for name in ("evil.pt", "mix/sub/evil.dat")]
    assert "and 1 more, each with the same 1 error: mix/sub/evil.dat" in render_audit(output, *evil, terminal=True)
    names = [f"{n:02}{'x' * 4_000}.pt" for n in range(40)]
    text = render_audit(output, *(target(name, finding(target=name)) for name in names), terminal=True, width=10_000)
    assert [name[:8] for name in names if name[:8] in text] == [name[:8] for name in names[:11]]
    assert "and 29 more" in text


def test_ten_thousand_findings_are_a_page_that_is_read():
    """A readable number of findings is shown, with the number of the others; --all has each."""
    numbers = [
        finding(fqn=f"w{'x' * (n % 7)}.{n}.{n * 7919 % 1000}", message=f"w: {n * 7919} NaN") for n in range(10_000)
    ]
    text = render_table(target("a.pt", *numbers))
    assert len(text.splitlines()) < 12
    assert "… and 9,992 more (--all)" in text
    assert render_table(target("a.pt", *numbers), view=View(unfold=True)).count("NaN") == 10_000


def test_the_rest_of_a_problem_is_counted_in_findings():
    """A folded line counts all its tensors: of 10 lines with 4 tensors each, 8 are shown."""
    numbers = [
        finding(fqn=f"layers.{n}.w{m}", message=f"layers.{n}.w{m}: {m} NaN") for m in range(10) for n in range(4)
    ]
    text = render_table(target("a.pt", *numbers))
    assert "(40 findings)" in text
    assert "… and 8 more (--all)" in text
    assert "; 8 more" in render_audit("github", target("a.pt", *numbers))


def test_repeated_layers_are_folded():
    """Repeated layers are folded on a terminal and in a pipe; data for programs has each layer."""
    numbers = [finding(fqn=f"layers.{n}.w") for n in range(48)]
    assert "layers.{0..47}.w: each is nan" in render_table(target("a.pt", *numbers))
    assert render_audit("plain", target("a.pt", *numbers)).count("each is nan") == 1
    assert render_audit("csv", target("a.pt", *numbers)).count("is nan") == 48


def test_a_piped_table_is_not_cut():
    """Each problem is one row with its target and remedy, whatever the length."""
    long = finding(message="w: " + "x" * 900, help="mend it")
    header, row, *rest = render_audit("plain", target("a.pt", long)).splitlines()
    assert header.split() == ["target", "severity", "rule", "message", "help"]
    assert row.split() == ["a.pt", "error", "nan", "w:", "x" * 900, "mend", "it"]
    assert rest == ["", "1 audited: 1 error; 2 rules ran"]


def test_csv_has_every_fact_in_a_column():
    """The columns include section, name, remedy and place."""
    (row,) = csv.DictReader(io.StringIO(render_audit("csv", target("a.pt", finding(section="ema", help="go back")))))
    assert row == {
        "target": "a.pt",
        "severity": "error",
        "rule": "nan",
        "section": "ema",
        "fqn": "fc.weight",
        "message": "fc.weight: is nan",
        "help": "go back",
        "place": "",
    }


OUTPUTS_FOR_PEOPLE = ("table", "plain", "markdown", "html")


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
def test_failed_and_skipped_targets_are_listed(output):
    """Each failed target is named; skipped targets are grouped by reason, with their number."""
    texts = [skipped_target(f"{name}.md") for name in "abcd"]
    text = render_audit(output, target(), failed_target("no.pt", "is empty"), *texts, terminal=True)
    assert "failed: no.pt" in text
    assert "is empty" in text
    assert "4 skipped: a.md, b.md and 2 more" in text
    assert "1 audited: clean; 1 failed; 4 skipped" in text


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
def test_accepted_findings_are_counted_with_their_reason(output):
    """Accepted findings with one remedy are counted as one problem, by rule and reason; -v lists each."""
    accepted = accept_findings("known since v1", finding(fqn="a"), finding(fqn="b"))
    text = render_audit(output, target("a.pt", accepted=accepted), terminal=True)
    assert "1 problem accepted (nan)" in text
    assert "known since v1" in text
    assert "a: is nan" not in text
    assert "a: is nan" in render_audit(
        output, target("a.pt", accepted=accepted), terminal=True, view=View(verbose=True)
    )


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
def test_verbose_says_which_rules_did_not_run(output):
    """With -v, skipped rules are listed by reason; without -v they are counted."""
    audited = target(
        "a.pt", skipped=(skipped_rule("broken-tie", "give --against"), skipped_rule("dtype-mismatch", "give --against"))
    )
    assert "2 rules ran, 2 skipped (-v shows why)" in render_audit(output, audited, terminal=True)
    verbose = render_audit(output, audited, terminal=True, view=View(verbose=True))
    assert "not run: broken-tie, dtype-mismatch" in verbose
    assert "give --against" in verbose
    assert "(-v" not in verbose


def test_verbose_does_not_advise_to_run_audit(statecli):
    """The note about foreign names is of `inspect`; the rules of audit report the names."""
    torch.save({"w": torch.ones(2), "posix": os.system}, "evil.pt")
    text = statecli("audit", "evil.pt", "-v").out
    assert "unsafe-global" in text
    assert "run statecli audit" not in text


def test_verbose_names_the_target_on_which_a_rule_did_not_run(statecli):
    """A class has no pickles; the other target, a checkpoint, was scanned."""
    text = statecli("audit", "clean.pt", "torch.nn:Linear(2, 2)", "-v").out
    (of_class,) = (line for line in text.splitlines() if "unsafe-global" in line)
    assert of_class.startswith("not run on torch.nn:Linear(2, 2): ")
    (of_file,) = (line for line in text.splitlines() if "unregistered-tensor" in line)
    assert of_file.startswith("not run on clean.pt: unregistered-tensor, ")


def test_rules_of_the_other_sort_are_not_listed_with_model(statecli):
    """A class has no values to check, and a file no code: neither is a gap of the audit."""
    result = statecli("audit", "clean.pt", "--model", "torch.nn:Linear(2, 2)", "-v", "--no-values")
    lines = [line for line in result.out.splitlines() if line.startswith("not run")]
    assert [line.endswith(": values not read, because of --no-values") for line in lines if "nan, " in line] == [True]
    assert not any(
        word in line for line in lines for word in ("unregistered-tensor", "a class", "give --model", " on ")
    )


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
def test_failed_and_skipped_targets_are_not_called_clean(output):
    """Failed and skipped targets are not called clean."""
    text = render_audit(output, failed_target("no.pt"), skipped_target("a.md"), terminal=True)
    assert "nothing audited; 1 failed; 1 skipped" in text
    assert "clean" not in text.replace("clean up", "")


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
def test_verdict_counts_findings_in_a_failed_target(output):
    """Often only the last line is read: it counts an error in a file that is not a checkpoint."""
    refused = msgspec.structs.replace(failed_target("no.bin"), findings=(finding("unsafe-global", target="no.bin"),))
    assert "nothing audited: 1 error; 1 failed" in render_audit(output, refused, terminal=True)
    text = render_audit(output, refused, skipped_target("a.md"), terminal=True)
    assert "nothing audited: 1 error in 1 target; 1 failed; 1 skipped" in text


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
def test_a_damaged_file_is_counted_once(output):
    """A finding with the reason of the failure is not counted as an error too."""
    unscanned_pickle = finding("unscanned-pickle", target="no.pt", message="the file: not scanned to the end: is empty")
    failed = msgspec.structs.replace(failed_target("no.pt"), findings=(unscanned_pickle,))
    assert "nothing audited; 1 failed; 0 rules ran" in render_audit(output, failed, terminal=True)
    text = render_audit(output, failed, target("a.pt", finding()), terminal=True)
    assert "1 audited: 1 error in 1 target; 1 failed" in text
    assert "unscanned-pickle" in text
    headings = render_table(failed, target("a.pt", finding())).splitlines()
    assert [line for line in headings if line.startswith(("no.pt", "a.pt"))] == ["no.pt  failed", "a.pt  1 error"]


@pytest.mark.parametrize(
    ("of_class", "of_file", "counts"),
    [
        ((), (), "clean"),
        ((), ("b",), "1 error in 1 target"),
        (("a",), (), "1 error in the class"),
        (("a",), ("b",), "2 errors in 1 target and the class"),
    ],
)
def test_the_class_of_model_is_not_a_target(of_class, of_file, counts):
    """The class is the reference for the file: only the file is counted, with its tensors and bytes."""
    spec = "net.py:Net"
    model = target(spec, *(finding(target=spec, fqn=fqn) for fqn in of_class))
    file = target("a.pt", *(finding(fqn=fqn) for fqn in of_file))
    text = render_table(msgspec.structs.replace(model, tensors=9, bytes=90), file, model=spec).splitlines()
    assert text[:2] == ["a.pt", f"1 audited against {spec}: {counts}; 2 rules ran"]
    assert text[2].startswith("torch-zip, 2 tensors, 64 B")


def test_a_class_that_is_given_as_a_target_is_counted(statecli):
    """--model names one of the targets."""
    spec = "torch.nn:Linear(2, 2)"
    assert "2 audited: " in statecli("audit", "clean.pt", spec, "--model", spec).out
    assert f"1 audited against {spec}: " in statecli("audit", "clean.pt", "--model", spec).out


NOTHING_AUDITED = [
    (("clean.pt", "--select", "nan", "--no-values"), "nan did not run: values not read, because of --no-values"),
    (("none/",), "nothing was audited"),
]


@pytest.mark.parametrize("output", ["sarif", "junit", "gitlab", "github", "markdown"])
@pytest.mark.parametrize(("words", "reason"), NOTHING_AUDITED, ids=["no-rule-ran", "nothing-there"])
def test_audit_of_nothing_fails_in_every_output(statecli, output, words, reason):
    """The status is 2, and the output alone shows the failure, also with -q. A log of github has the failure once."""
    Path("none").mkdir()
    result = statecli("audit", *words, "-q", "-f", output)
    assert (result.code, result.err) == (2, "" if output == "github" else f"statecli: {reason}\n")
    assert SIGNS.get(output, reason) in result.out


#: Texts for a failed run, in outputs with such a text.
SIGNS = {"sarif": '"executionSuccessful":false', "junit": ' errors="1"', "gitlab": '"blocker"', "markdown": "**"}


@pytest.mark.parametrize("output", ["sarif", "junit", "gitlab", "github", "markdown"])
def test_allow_empty_makes_an_audit_of_nothing_clean(statecli, output):
    """With --allow-empty, nothing to audit is not an error."""
    Path("none").mkdir()
    result = statecli("audit", "none", "--allow-empty", "-q", "-f", output)
    assert (result.code, result.err) == (0, "")
    assert SIGNS.get(output, "::error") not in result.out


def test_quiet_markdown_says_that_a_target_failed(statecli):
    """The status is 2, and an empty summary would look clean."""
    assert "1 failed" in statecli("audit", "clean.pt", "empty.pt", "-q", "-f", "markdown").out


def test_a_terminal_has_each_failure_once():
    """The table on the terminal names the failure; with -q, without a table, stderr does."""
    for words in (("clean.pt", "empty.pt"), ("clean.pt", "empty.pt", "-q")):
        out, code = on_a_terminal(["audit", *words], columns=100)
        assert (out.count("is an empty file"), code) == (1, 2)


# The documents, and the configuration.


def test_the_configuration_fits_its_schema(statecli):
    """The values are texts, numbers, lists, tables and unset values."""
    Path("statecli.toml").write_text(
        'select = ["nan"]\nlock = "a.lock"\n[policy]\nmax-bytes = 9\n[severity]\nnan = "note"\n'
        '[per-target-ignore."*.pt"]\nrules = ["inf"]\nreason = "a mask"\n'
    )
    document = statecli("config", "-f", "json").json
    jsonschema.validate(document, statecli("schema", "config").json)
    values = {setting["key"]: setting["value"] for setting in document["settings"]}
    assert (values["lock"], values["policy.max-bytes"], values["baseline"]) == ("a.lock", 9, None)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "file": 1}, statecli("schema", "config").json)


def test_the_configuration_as_csv_has_plain_values(statecli):
    """A text has no quotes, an unset value is empty; there is no column for findings, because a list has none."""
    rows = {row.pop("key"): row for row in csv.DictReader(io.StringIO(statecli("config", "-f", "csv").out))}
    assert rows["fail-on"] == {"value": "warning", "from": "default"}
    assert [rows[key]["value"] for key in ("lock", "values", "select")] == ["", "", "[]"]
    assert "finding" not in csv.DictReader(io.StringIO(statecli("rules", "-f", "csv").out)).fieldnames


# The rules.


def test_rules_are_listed(statecli):
    """Name, severity and the first line of each."""
    result = statecli("rules")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()[1 : len(DICTIONARY) + 1]] == [*DICTIONARY]


@pytest.mark.parametrize("output", list(Output))
def test_lists_are_written_in_every_output_except_for_findings(statecli, output):
    """A format for findings is refused, because a list has no findings."""
    for command, entry in (("rules", "case-collision"), ("config", "fail-on")):
        result = statecli(command, "-f", output.value)
        if output.value in list(ListOutput):
            assert (result.code, result.err, entry in result.out) == (0, "", True)
        else:
            assert (result.code, result.out) == (2, "")
            assert f"-f {output.value}: must be table, plain" in result.err


def test_rules_as_json_fit_their_schema(statecli):
    """The JSON has the whole explanation of each rule."""
    document = statecli("rules", "-f", "json").json
    jsonschema.validate(document, statecli("schema", "rules").json)
    assert [(rule["name"], rule["explanation"], tuple(rule["commands"])) for rule in document["rules"]] == [
        (rule.name, rule.explanation, rule.commands) for rule in DICTIONARY.values()
    ]


def test_a_rule_is_explained(statecli, monkeypatch):
    """All of its words, filled to 80 columns off a terminal, and the address of its page."""
    monkeypatch.setattr(documentation, "DOCUMENTATION_URL", "https://statecli.dev/")
    for rule in DICTIONARY.values():
        result = statecli("rules", rule.name)
        assert result.code == 0, rule.name
        first, second, *rest = result.out.splitlines()
        assert first == f"{rule.name} ({rule.severity.value})"
        assert second == f"reported by {', '.join(rule.commands)}", rule.name
        assert " ".join(rest).split() == [*rule.explanation.split(), rule_url(rule.name)]
        longest = max(80, *map(len, rule.explanation.split()), len(rule_url(rule.name)))
        assert max(map(len, result.out.splitlines())) <= longest, rule.name


def test_placeholder_address_is_not_shown(statecli, monkeypatch):
    """A placeholder address cannot be opened."""
    monkeypatch.setattr(documentation, "DOCUMENTATION_URL", "https://statecli.example/")
    assert "statecli.example" not in statecli("rules", "nan").out


@pytest.mark.parametrize("former", ["cannot-tell", "lost-by-move", "module-size-mismatch", "other-lines"])
def test_a_former_name_stands_for_the_rule(statecli, in_tmp_path, former):
    """`rules` shows the present name, and options accept the former name; both print one warning."""
    result = statecli("rules", former)
    present = next(new for new, name in FORMER_NAMES.items() if name == former)
    assert (result.code, result.out.startswith(f"{present} (")) == (0, True)
    warning = result.err
    assert warning.startswith(f"statecli: warning: {former}: ")
    assert warning.endswith(f"with this name are now called {present}\n")
    command = "audit" if former == "module-size-mismatch" else "verify"
    if former != "other-lines":  # explain has no option for rules
        line = (command, "torch.nn:Linear(2, 2)", "--ignore", former, "--ignore", former)
        assert statecli(*line).err == warning
        assert statecli(command, "torch.nn:Linear(2, 2)", "--ignore", present).err == ""


TIED = """import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        table = torch.randn(3, 3)
        self.register_buffer("a", table)
        self.register_buffer("b", table)
"""
RENAME_WARNING = (
    "broken-tie: findings of inspect and verify with this name are now called untied-by-move or untied-by-copy"
)


@pytest.mark.parametrize("line", [("inspect", "tie.py:Net"), ("verify", "tie.py:Net", "--check", "move")])
def test_a_former_name_that_audit_still_has_means_the_renamed_rule(statecli, in_tmp_path, line):
    """`inspect` and `verify` never reported the rule of audit with the name."""
    Path("tie.py").write_text(TIED)
    reported = {finding["rule"] for finding in statecli(*line, "-f", "json").json["findings"]}
    assert "untied-by-move" in reported
    result = statecli(*line, "--ignore", "broken-tie", "-f", "json")
    assert "untied-by-move" not in {finding["rule"] for finding in result.json["findings"]}
    assert result.err == f"statecli: warning: {RENAME_WARNING}\n"


def test_former_rule_name_in_a_configuration_is_accepted(statecli, in_tmp_path):
    """Each key that takes rules accepts the name, and one line warns about it."""
    torch.save({"w": torch.ones(1)}, "a.pt")
    ignored = '[per-target-ignore]\n"*.pt" = { rules = ["module-size-mismatch"], reason = "known" }\n'
    for text in (
        'ignore = ["module-size-mismatch"]',
        'select = ["module-size-mismatch", "nan"]',
        'severity.module-size-mismatch = "note"',
        ignored,
    ):
        Path("statecli.toml").write_text(text)
        result = statecli("audit", "a.pt", "-q")
        assert result.code != 2
        assert result.err.count("are now called inconsistent-module\n") == 1, text
        assert statecli("config").err.count("are now called inconsistent-module\n") == 1


def test_former_rule_name_in_a_baseline_is_translated(in_tmp_path):
    """The entry accepts the finding with the present name."""
    entry = {"target": "a.pt", "rule": "module-size-mismatch", "section": None, "fqn": "w", "reason": "known"}
    Path("old.json").write_text(json.dumps({"schema": "statecli.baseline/2", "findings": [entry]}))
    assert [entry.rule for entry in baseline.read_baseline("old.json").findings] == ["inconsistent-module"]


def test_former_rule_name_in_python_is_a_future_warning(in_tmp_path):
    """The warning of the command is a FutureWarning at the caller's line."""
    Path("tie.py").write_text(TIED)
    with pytest.warns(FutureWarning, match=RENAME_WARNING) as caught:
        assert package.inspect("tie.py:Net", ignore=["broken-tie"]).findings == ()
    with pytest.warns(FutureWarning, match="now called inconsistent-module") as caught_in_audit:
        package.audit({"w": torch.ones(1)}, ignore=["module-size-mismatch"], no_config=True)
    assert {warning.filename for warning in (*caught, *caught_in_audit)} == {__file__}


@pytest.mark.parametrize(
    ("former", "warning"),
    [
        ("broken-tie", "inspect and verify with this name are now called untied-by-move or untied-by-copy"),
        ("frozen-changed", "verify with this name are now called frozen-updated"),
    ],
)
def test_former_name_of_two_rules_is_explained_with_a_warning(statecli, former, warning):
    """The name stands for the rule that kept the name; one line on stderr names the other rule."""
    result = statecli("rules", former)
    assert (result.code, result.err) == (0, f"statecli: warning: {former}: findings of {warning}\n")
    assert result.out.startswith(f"{former} (")


def test_a_rule_whose_name_had_two_meanings_stays_in_configuration_and_baseline(statecli):
    """`broken-tie` in a configuration, in --select and in a baseline still means the rule of audit."""
    Path("statecli.toml").write_text('ignore = ["broken-tie"]\nseverity.broken-tie = "note"\n')
    entry = {
        "target": "found.pt",
        "rule": "broken-tie",
        "section": None,
        "fqn": None,
        "reason": "known",
        "message": "m",
    }
    Path("old.json").write_text(json.dumps({"schema": "statecli.baseline/2", "findings": [entry]}))
    result = statecli("audit", "found.pt", "--select", "broken-tie", "--select", "nan", "--baseline", "old.json")
    assert "unknown rule" not in result.err
    assert "are now called" not in result.err
    assert result.code != 2, result.err


def test_error_about_an_unknown_rule_suggests_similar_names(statecli):
    """The status is 2, and the error is one line."""
    result = statecli("rules", "case-colision")
    assert (result.code, result.out) == (2, "")
    assert result.err == "statecli: unknown rule 'case-colision'; did you mean case-collision?\n"
    assert statecli("rules", "mapped").err.endswith("; some notes do not come from a rule\n")


def test_a_rule_goes_into_a_file(statecli):
    """-o."""
    statecli("rules", "case-collision", "-o", "rule.txt")
    statecli("rules", "-f", "json", "-o", "rules.json")
    assert Path("rule.txt").read_text().startswith("case-collision (warning)")
    assert json.loads(Path("rules.json").read_text())["schema"] == "statecli.rules/1"
    assert os.path.getsize("rule.txt") < os.path.getsize("rules.json")


def test_a_comment_has_room_for_everything_that_failed():
    """The comment has as many lines as fit, and the number of the other lines; the verdict counts all."""
    targets = [failed_target(f"{'x' * 200}-{n}.pt", "is " + "very " * 100 + "empty") for n in range(500)]
    text = render_audit("markdown", target("a.pt", finding()), *targets)
    assert len(text) <= 65_536
    assert "500 failed" in text
    assert "error[nan]: fc.weight: is nan" in text
    assert "more lines, because a comment has at most 65,536 characters" in text


def test_quiet_does_not_change_a_report_file(statecli):
    """-q is of stdout."""
    statecli("audit", "found.pt", "-q", "--report", "markdown=quiet.md")
    statecli("audit", "found.pt", "--report", "markdown=loud.md")
    assert Path("quiet.md").read_text() == Path("loud.md").read_text()
    statecli("diff", "clean.pt", "found.pt", "-q", "--report", "markdown=quiet.md")
    statecli("diff", "clean.pt", "found.pt", "--report", "markdown=loud.md")
    assert Path("quiet.md").read_text() == Path("loud.md").read_text()


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
def test_reason_of_skipped_targets_has_the_right_number(output):
    """For several skipped targets the line has "each is"."""
    first, text_files = skipped_target("z.md", "is an XML document"), [skipped_target(f"{name}.md") for name in "abcd"]
    text = " ".join(render_audit(output, target(), first, *text_files, terminal=True, width=200).split())
    assert "each is a text file" in text
    assert "each is an XML" not in text
    assert "is an XML document" in text


@pytest.mark.parametrize("output", OUTPUTS_FOR_PEOPLE)
def test_targets_that_failed_for_a_common_reason_share_a_line(output):
    """A missing checkpoint of --against is one line for all targets; an error of a target has a line of its own."""
    reason = "--against acc: is a folder without a checkpoint"
    shared = [msgspec.structs.replace(failed_target(f"{name}.pt"), reason=reason) for name in "abcd"]
    text = render_audit(output, *shared, failed_target("e.pt"), failed_target("f.pt"), terminal=True, width=200)
    assert text.count(reason) == 1
    assert "failed: a.pt, b.pt and 2 more" in text
    assert "failed: e.pt" in text
    assert "failed: f.pt" in text


def test_a_walk_gives_no_advice_about_a_document(statecli):
    """A walk skips the settings next to a model; the advice is for a user who names the settings as a target."""
    Path("config.json").write_text("{}")
    assert "skipped: config.json: is a JSON document\n" in statecli("audit", ".").out
    assert "does not name a model class; name the class too" in statecli("audit", "config.json").err


def test_error_about_the_reference_is_written_once(statecli):
    """A folder of steps is compared with itself: the error names the option once, not for each step."""
    for step in ("step_0", "step_1", "step_2"):
        Path("acc", step).mkdir(parents=True)
        torch.save({"w": torch.zeros(1)}, Path("acc", step, "pytorch_model.bin"))
    result = statecli("audit", "acc", "--against", "acc")
    assert result.code == 2
    reason = "--against acc: is a folder without a checkpoint"
    assert result.err.count(reason) == result.out.count(reason) == 1
    assert "failed: acc/step_0, acc/step_1 and 1 more" in result.out


def test_a_reason_in_json_does_not_repeat_its_target(statecli):
    """The row already has the target."""
    (row,) = statecli("audit", "empty.pt", "-f", "json").json["targets"]
    assert (row["target"], row["reason"]) == ("empty.pt", "is an empty file")


def test_each_target_has_its_reason_why_a_rule_did_not_run():
    """The reason for the first target differs from the reason for the second."""
    first = target("a.pt", skipped=(skipped_rule("nan", "there is no optimizer"),))
    second = target("b.pt", skipped=(skipped_rule("nan", "it saved no names"),))
    targets = [msgspec.structs.replace(each, ran=()) for each in (first, second)]
    text = render_audit("plain", *targets, view=View(verbose=True))
    assert "not run on a.pt: nan: there is no optimizer" in text
    assert "not run on b.pt: nan: it saved no names" in text


def test_reason_of_a_failed_target_is_written_once(statecli, in_tmp_path):
    """A finding has the reason why the target failed; an audit of nothing does not count its tensors."""
    torch.save({"w": torch.ones(100)}, "a.pt")
    Path("a.pt").write_bytes(Path("a.pt").read_bytes()[:500])
    text = " ".join(statecli("audit", "a.pt", "-f", "table").out.split())
    assert "failed: a.pt see unscanned-pickle" in text
    assert text.count("file is truncated") == 1
    assert "0 tensors" not in text


def test_a_quiet_line_names_its_target_once(statecli, in_tmp_path):
    """The target is at the beginning of the line, for grep."""
    for name in "ab":
        torch.save({"w": torch.tensor([float("nan")])}, f"{name}.pt")
    lines = statecli("audit", "a.pt", "b.pt", "-q", "-f", "plain").out.splitlines()
    assert [line.partition(": w")[0] for line in lines] == ["a.pt: error[nan]", "b.pt: error[nan]"]
