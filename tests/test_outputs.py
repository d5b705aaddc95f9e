"""Several outputs in one run: options refused before anything is read, and every output of every command."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli.render import Output
from statecli.requests.options import COMMANDS, DiffOptions, RulesOptions
from statecli.requests.parameters import parameters_of
from statecli.storage.replace_file import replace_file

from .forked_python import write_command
from .published import github, gitlab, junit, sarif

csv.field_size_limit(10_000_000)  # names of 600 kB
SAMPLES = Path(__file__).parent.parent / "sample_models"

#: Names that an output could read as its own syntax.
HOSTILE = (
    "two\nlines\r\n::error file=x::injected",
    "\x1b[31mred\x1b[0m\x9b1m\x00",
    "]]><x>&amp;\"'</x>\ufffe\uffff\x0b",
    "::error::x%0A::warning::y ##[error]z ::stop-commands::t",
    "[click](https://example.org) `code` | <script>alert(1)</script> @here",
    "lone \ud800 surrogate \u202e\u2028",
    "=cmd|' /C calc'!A0,\t{0}",
    "m" * 600_000,
    "",
)


@pytest.fixture
def target_folder(tmp_path, in_tmp_path):
    """A folder of small targets, as the current folder."""
    torch.save({"fc.weight": torch.zeros(2, 3), "fc.bias": torch.ones(2)}, "a.pt")
    torch.save({"fc.weight": torch.zeros(2, 3), "fc.bias": torch.zeros(2)}, "b.pt")
    torch.save({"w": torch.zeros(2), "W": torch.ones(2)}, "found.pt")
    save_file({"w": torch.zeros(2)}, "a.safetensors")
    (tmp_path / "net.py").write_text((SAMPLES / "net.py").read_text())
    (tmp_path / "fixed.py").write_text((SAMPLES / "net_fixed.py").read_text())
    Path("empty.pt").write_bytes(b"")
    return tmp_path


def reports(*outputs):
    return [word for output in outputs for word in ("--report", f"{output.value}=out.{output.value}")]


# Refused outputs.


@pytest.mark.parametrize(
    ("words", "expected_text"),
    [
        (("--report", "sarf=x"), "--report sarf=x: 'sarf' is not a format; did you mean sarif?"),
        (("--report", "=x"), "is not a format; choose one of: table, plain, json"),
        (("--report", "sarif"), "--report sarif: the file name is missing; write --report sarif=FILE"),
        (("--report", "sarif="), "the file name is missing"),
        (("--report", "sarif=-"), "needs the name of a file; to write the report to standard output, give -f sarif"),
        (("--report", "sarif=x", "--report", "json=./x"), "--report json=./x: --report sarif=x writes to the same"),
        (("--report", "sarif=x", "-o", "x"), "-o x: --report sarif=x writes to the same file; give another"),
        (("--report", "sarif=no/x"), "--report sarif=no/x: cannot be written: the folder no does not exist"),
        (("--report", "sarif=."), "cannot be written: is a folder"),
        (
            ("--report", "sarif=a.pt"),
            "--report sarif=a.pt: the command also reads this file; write to another file",
        ),
    ],
)
def test_invalid_report_option_is_a_one_line_error(statecli, target_folder, words, expected_text):
    """Exit 2, nothing on stdout, and nothing is written."""
    before = sorted(os.listdir())
    result = statecli("diff", "a.pt", "b.pt", *words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert expected_text in result.err
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("command", [("inspect", "no.pt"), ("audit", "no.pt"), ("verify", "no.py:Net")])
def test_invalid_report_option_fails_before_a_file_is_read(statecli, target_folder, command):
    """Other errors in the line are not reported."""
    assert "is not a format" in statecli(*command, "--report", "x=y").err


@pytest.mark.parametrize("path", ["statecli.toml", "l.json", "b.json", "a.safetensors"])
@pytest.mark.parametrize("option", ["-o", "--report"])
def test_files_that_the_configuration_names_are_not_overwritten(statecli, target_folder, path, option):
    """The configuration file itself is not overwritten either."""
    statecli("lock", "b.pt", "-o", "l.json")
    statecli("audit", "found.pt", "--write-baseline", "b.json", "--reason", "x")
    reference = '[policy]\nreference = "a.safetensors"\n'
    Path("statecli.toml").write_text(f'lock = "l.json"\nbaseline = "b.json"\n{reference}')
    before = Path(path).read_bytes()
    result = statecli("audit", "b.pt", *((option, path) if option == "-o" else (option, f"json={path}")))
    assert (result.code, result.out) == (2, "")
    assert "the command also reads this file; write to another file" in result.err
    assert Path(path).read_bytes() == before


#: A file for the value of an option or target, and the value; by the word for the value in the help.
INPUT_VALUES = {
    "MODULE": ("in.py", "./in.py"),
    "SPEC": ("in.py", "in.py:Net"),
    "MODEL": ("in.py", "in.py:Net(2)"),
    "FILE.PY:MAKE": ("in.py", "in.py:make"),
    "SCRIPT::FUNCTION": ("in.py", "in.py::main"),
}
READERS = [
    (command, parameter)
    for command, kind in COMMANDS.items()
    for parameter in parameters_of(kind)
    if parameter.reads_file and {"output", "report", "write_baseline"} & set(kind.__struct_fields__)
]


@pytest.mark.parametrize(("command", "parameter"), READERS, ids=lambda part: getattr(part, "field", part))
def test_no_output_replaces_an_input_of_any_command(statecli, target_folder, command, parameter):
    """The input may be named by any option or target, and by any name of the file; the error is one line."""
    file, value = INPUT_VALUES.get(parameter.metavar, ("in.bin", "in.bin"))
    Path(file).write_text("content")
    Path("folder").mkdir()
    Path("link").symlink_to(file)
    os.link(file, "hard")
    fields = {row.field: row for row in parameters_of(COMMANDS[command])}
    targets = [row for row in fields.values() if row.is_target and (row is parameter or row.is_required)]
    words = [value if row is parameter else f"other{n}.bin" for n, row in enumerate(targets)]
    words = ["net.py:Net"] * (parameter.field == "checkpoint") + words
    words += [] if parameter.is_target else [parameter.flags[0], value]
    others = ["-o", "other.json"] if command == "report" else []
    for name in (file, "link", "hard", f"folder/../{file}", str(target_folder / file)):
        outputs = [["-o", name]] if "output" in fields else []
        outputs += [[*others, "--report", f"json={name}"]] if "report" in fields else []
        outputs += [["--write-baseline", name, "--reason", "x"]] if "write_baseline" in fields else []
        for output in outputs:
            if output[0] == "--write-baseline" and parameter.field == "baseline":
                continue  # the reasons of the file are kept
            result = statecli(*command.split(), *words, *output)
            flag = "--report" if "--report" in output else output[0]
            option_value = f"json={name}" if flag == "--report" else name
            message = f"{flag} {option_value}: the command also reads this file; write to another file"
            assert (result.code, result.out, result.err) == (2, "", f"statecli: {message}\n")
    assert Path(file).read_text() == "content"
    assert not Path("other.json").exists()


def test_each_option_that_names_a_file_reads_or_writes_the_file():
    """A new option with a file as value declares whether it reads the file."""
    words = ("FILE", "MODULE", "SPEC", "CHECKPOINT", "ADAPTER")
    rows = [row for kind in COMMANDS.values() for row in parameters_of(kind)]
    named = [row for row in rows if any(word in row.metavar for word in words)]
    assert {row.field for row in named if not row.reads_file} == {"output", "report", "write_baseline"}


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("inspect net.py:Net --config-json net.json", "net.json"),
        ("inspect 'net.py:Net --config-json net.json'", "net.json"),
        ("diff a.pt b.pt --adapter a.safetensors", "a.safetensors"),
        ("audit a.pt --plugin ./rules.py", "rules.py"),
        ("audit a.pt --plugin rules", "rules.py"),
        ("rules --plugin ./rules.py", "rules.py"),
        ("inspect a.pt#model", "a.pt"),
        ("audit '*.pt'", "b.pt"),
        ("audit .", "a.safetensors"),
        ("config", "pyproject.toml"),
        ("config --config pyproject.toml", "pyproject.toml"),
        ("audit a.pt", "pyproject.toml"),
        ("inspect model", "model/config.json"),
        ("inspect model --from-config", "model/config.json"),
        ("inspect model --trust-remote-code", "model/modeling.py"),
    ],
)
def test_an_input_without_an_option_of_its_own_is_not_replaced(statecli, target_folder, words, path):
    """The input may be a section, a glob, a folder, a found configuration, or a file in the folder of a model."""
    Path("net.json").write_text("{}")
    Path("rules.py").write_text("RULES = ()")
    Path("pyproject.toml").write_text("[tool.statecli]\n")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/modeling.py").write_text("")
    before = Path(path).read_bytes()
    result = statecli(*shlex.split(words), "-f", "json", "-o", path)
    message = f"statecli: -o {path}: the command also reads this file; write to another file\n"
    assert (result.code, result.out, result.err) == (2, "", message)
    assert Path(path).read_bytes() == before


def test_a_locked_file_is_not_replaced_by_its_lock(statecli, target_folder):
    """A lock in the folder of its model cannot contain its own digest."""
    Path("model/sub").mkdir(parents=True)
    os.rename("a.safetensors", "model/model.safetensors")
    for name in ("tokenizer.json", "sub/vocab.txt"):
        Path("model", name).write_text("text")
        result = statecli("lock", "model", "-o", f"model/{name}")
        message = f"statecli: -o model/{name}: the command also reads this file; write to another file\n"
        assert (result.code, result.out, result.err) == (2, "", message)
        assert Path("model", name).read_text() == "text"
    assert statecli("lock", "model", "-o", "lock.json").code == 0
    assert statecli("lock", "model", "-o", "lock.json").code == 0


def test_standard_input_is_not_replaced(target_folder):
    """A shell opens the file of `<`; the name of the file is not on the command line."""
    before = Path("a.pt").read_bytes()
    words = [sys.executable, "-m", "statecli", "inspect", "-", "-f", "json", "-o", "a.pt"]
    with Path("a.pt").open("rb") as file:
        result = subprocess.run(words, stdin=file, capture_output=True, text=True, check=False)
    message = "statecli: -o a.pt: the command also reads this file; write to another file\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
    assert Path("a.pt").read_bytes() == before


def test_merge_replaces_no_input_of_the_command(statecli, target_folder):
    """The command of the parts reads the adapter, and `merge` has no option for the adapter."""
    statecli("diff", "a.pt", "b.pt", "--adapter", "a.safetensors", "--shard", "1/1", "-o", "1.part")
    before = Path("a.safetensors").read_bytes()
    result = statecli("merge", "1.part", "-f", "json", "-o", "a.safetensors")
    message = "statecli: -o a.safetensors: the command also reads this file; write to another file\n"
    assert (result.code, result.out, result.err) == (2, "", message)
    assert Path("a.safetensors").read_bytes() == before


def test_a_baseline_is_written_again_with_its_reasons(statecli, target_folder):
    """A baseline is the only file that one run may both read and write."""
    for _ in range(2):
        words = ["--baseline", "b.json"] if Path("b.json").exists() else []
        assert statecli("audit", "found.pt", *words, "--write-baseline", "b.json", "--reason", "x").code == 0


def test_hard_links_of_one_file_are_refused_as_two_outputs(statecli, target_folder):
    """A hard link is another name of the file."""
    Path("x.json").write_text("")
    os.link("x.json", "y.json")
    result = statecli("inspect", "a.pt", "-o", "x.json", "--report", "json=y.json")
    assert "writes to the same file" in result.err
    assert Path("x.json").read_text() == ""


def test_a_report_in_an_audited_folder_is_written_again(statecli, target_folder):
    """The second run finds the report of the first run, and does not take the report for a checkpoint."""
    for _ in range(2):
        result = statecli("audit", ".", "--report", "sarif=out.sarif", "--report", "json=out.json", "-x", "nothing")
        assert "the command also reads" not in result.err
        assert sarif(Path("out.sarif").read_text())


# Content of the outputs.


def test_each_report_equals_the_output_of_its_format(statecli, target_folder):
    """The reports are written next to the output of -f, and the exit code is the same."""
    result = statecli("audit", "found.pt", "-f", "json", *reports(*Output))
    assert result.code == 1
    assert result.json["findings"]
    for output in Output:
        report_text = Path(f"out.{output.value}").read_bytes().decode()
        assert report_text == statecli("audit", "found.pt", "-f", output.value).out


def test_quiet_does_not_shorten_reports(statecli, target_folder):
    """-q of a clean target prints nothing, and the reports are whole."""
    result = statecli("audit", "a.pt", "-q", "--report", "markdown=out.md", "--report", "plain=out.txt")
    assert (result.code, result.out) == (0, "")
    assert "1 audited" in Path("out.md").read_text()
    assert "1 audited" in Path("out.txt").read_text()


def test_a_result_in_a_file_has_its_verdict_on_stderr(statecli, target_folder):
    """The line of a failing job names the reason and the file; a clean or quiet run prints nothing."""
    result = statecli("inspect", "net.py:Net", "-f", "sarif", "-o", "out.sarif")
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(r"statecli: net\.py:Net: \d+ errors?: .* not registered; see out\.sarif\n", result.err)
    assert statecli("inspect", "net.py:Net", "-o", "out.txt", "-q").err == ""
    assert statecli("inspect", "a.pt", "-o", "out.txt").err == ""


def test_report_of_name_only_is_complete(statecli, target_folder):
    """--name-only applies to stdout; a document next to stdout is complete."""
    result = statecli("diff", "a.pt", "b.pt", "--name-only", "--report", "json=out.json")
    assert result.out == "fc.bias\n"
    assert json.loads(Path("out.json").read_text())["summary"]["changed"] == 1


def test_a_page_has_its_pictures_in_a_report_too(statecli, target_folder):
    """Histograms are counted where a page asks for them."""
    statecli("diff", "a.pt", "b.pt", "--report", "html=out.html")
    statecli("diff", "a.pt", "b.pt", "-f", "html", "-o", "alone.html")
    assert Path("out.html").read_text() == Path("alone.html").read_text()


# Every output of every command.

RUNS = {
    "inspect clean": ("inspect", "a.pt"),
    "inspect found": ("inspect", "net.py:Net", "--to", "meta"),
    "inspect model": ("inspect", "a.pt", "--model", "net.py:Net"),
    "diff clean": ("diff", "a.pt", "a.pt"),
    "diff found": ("diff", "a.pt", "b.pt"),
    "diff expected": ("diff", "a.pt", "b.pt", "--may-change", "fc.*"),
    "verify clean": ("verify", "fixed.py:Net", "--check", "move", "--device", "meta"),
    "verify found": ("verify", "net.py:Net", "--check", "move", "--check", "save", "--device", "meta"),
    "verify untold": ("verify", "net.py:Net", "--check", "forward"),
    "audit clean": ("audit", "a.pt"),
    "audit found": ("audit", "found.pt", "net.py:Net"),
    "audit failed": ("audit", "a.pt", "empty.pt", "no.pt"),
}
#: Exit codes of runs, if not 1 for findings and 0 otherwise.
CODES = {"verify untold": 2, "audit failed": 2}
#: Words of a finding, in each output.
REASONS = {"inspect found": "table", "diff found": "fc.bias", "verify found": "table", "audit found": "case-collision"}
#: Outputs of findings; the other outputs show problems.
UNGROUPED = (Output.CSV,)


def check_valid(output, text):
    """Raise an error unless the text is valid for the output."""
    checks = {
        Output.SARIF: sarif,
        Output.JUNIT: junit,
        Output.GITHUB: github,
        Output.GITLAB: gitlab,
        Output.JSON: json.loads,
        Output.JSONL: lambda text: [json.loads(line) for line in text.splitlines()],
        Output.CSV: lambda text: {len(row) for row in csv.reader(io.StringIO(text))},
    }
    return checks[output](text) if output in checks else text


@pytest.mark.parametrize("run", RUNS)
def test_every_output_of_every_command(statecli, target_folder, run):
    """Each output is valid, says why the status is 1, and has exactly the findings of the run."""
    result = statecli(*RUNS[run], *reports(*Output))
    actual = run.split()[1] in ("found", "model")
    assert result.code == CODES.get(run, 1 if actual else 0), result
    texts = {output: Path(f"out.{output.value}").read_bytes().decode() for output in Output}
    for output, text in texts.items():
        assert REASONS.get(run, "") in text
        if run in ("inspect found", "verify found"):
            assert ("left-behind" if output in UNGROUPED else "unregistered-tensor") in text
    parsed = {output: check_valid(output, text) for output, text in texts.items()}
    findings = parsed[Output.JSON]["findings"]
    assert bool(findings) == actual
    assert len(parsed[Output.CSV]) == 1
    problems = parsed[Output.JSON].get("problems", findings)
    assert bool(problems) == actual
    results = parsed[Output.SARIF]["results"]
    assert [(result["ruleId"], result["level"]) for result in results] == [
        (problem["rule"], problem["severity"]) for problem in problems
    ]
    (invocation,) = parsed[Output.SARIF]["invocations"]
    assert invocation["executionSuccessful"] is (result.code != 2)
    failed = [finding for finding in parsed[Output.JUNIT].iter("testcase") if finding.find("failure") is not None]
    assert bool(failed) == (result.code == 1)
    assert bool(list(parsed[Output.JUNIT].iter("error"))) == (result.code == 2)
    assert len(parsed[Output.GITLAB]) == len(problems) + len(result.err.splitlines()) * (result.code == 2)
    assert bool(parsed[Output.GITHUB]) == bool(parsed[Output.GITLAB])
    for output in (Output.SARIF, Output.JUNIT, Output.GITHUB, Output.GITLAB):
        assert str(target_folder) not in texts[output], "the path of the machine's folder"
    for rule in parsed[Output.SARIF]["tool"]["driver"]["rules"]:
        assert rule["shortDescription"]["text"].endswith("."), "a sentence, not only a name"


# Hostile names.


@pytest.fixture
def hostile_files(target_folder):
    """Checkpoints and a class with hostile names; every command reports findings about these files."""
    names = HOSTILE[:-1]
    torch.save({name + end: torch.zeros(1) for name in names for end in ("w", "W")}, "before.pt")
    torch.save({name + end: torch.ones(1) for name in names for end in ("w", "W")}, "after.pt")
    body = "".join(f"        setattr(self, {name!r}, torch.ones(1))\n" for name in names)
    (target_folder / "odd.py").write_text(
        "import torch\n\n\nclass Odd(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n" + body,
        "utf-8",
        "backslashreplace",
    )
    return target_folder


HOSTILE_RUNS = {
    "inspect": ("inspect", "odd.py:Odd", "--to", "meta", "--fail-on", "warning"),
    "model": ("inspect", "before.pt", "--model", "net.py:Net"),
    "diff": ("diff", "before.pt", "after.pt"),
    "verify": ("verify", "odd.py:Odd", "--check", "move", "--device", "meta", "--fail-on", "warning"),
    "audit": ("audit", "before.pt", "odd.py:Odd"),
}


@pytest.mark.parametrize("run", HOSTILE_RUNS)
def test_every_output_escapes_hostile_names(statecli, hostile_files, run):
    """Every output is valid, without a control character for a terminal. A name of 600 kB is whole only in JSON."""
    result = statecli(*HOSTILE_RUNS[run], "-q", *reports(*Output))
    assert result.code == 1, result.err[:500]
    for output in Output:
        text = Path(f"out.{output.value}").read_bytes().decode("utf-8")
        assert check_valid(output, text)
        assert not any(char in text for char in "\x1b\x9b\x00\u202e\u2028\ud800")
        if output is Output.GITHUB:
            assert all(properties["title"].startswith("statecli ") for _, properties, _ in github(text))
        if run in ("audit", "diff") and output in (Output.SARIF, Output.JUNIT, Output.GITHUB, Output.GITLAB):
            assert len(text) < 500_000
        if run in ("audit", "diff") and output is Output.JSON:
            assert "m" * 600_000 in text


@pytest.mark.parametrize(
    "name", ["a b.pt", "100%.pt", "a:b,c.pt", "two\nlines.pt", "q'\"<&>.pt", "ü.pt", "::error::x.pt"]
)
def test_every_output_is_valid_for_hostile_file_names(statecli, target_folder, name):
    """JSON, JSON Lines, SARIF, GitHub and GitLab have the name that finds the file again; CSV and JUnit have the same
    name, except that a control character is escaped, and that CSV has an apostrophe before a workflow command.
    """
    os.rename("found.pt", name)
    statecli("audit", name, *reports(*Output))
    texts = {output: Path(f"out.{output.value}").read_bytes().decode("utf-8") for output in Output}
    parsed = {output: check_valid(output, text) for output, text in texts.items()}
    assert all(parsed.values())
    (result,) = parsed[Output.SARIF]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert urllib.parse.unquote(uri).removeprefix("./") == name
    assert [target["target"] for target in parsed[Output.JSON]["targets"]] == [name]
    assert {line.get("target") for line in parsed[Output.JSONL]} - {None} == {name}
    escaped = name.replace("\n", "\\n")
    (row,) = csv.DictReader(io.StringIO(texts[Output.CSV]))
    assert row["target"] == ("'" * name.startswith("::") + escaped)
    assert [suite.get("name") for suite in parsed[Output.JUNIT]] == [escaped]
    assert [properties["file"] for _, properties, _ in parsed[Output.GITHUB]] == [name]
    assert [issue["location"]["path"] for issue in parsed[Output.GITLAB]] == [name]


def test_file_name_that_is_not_utf8_is_encoded_in_every_output(statecli, target_folder):
    """The bytes of the name are percent-encoded in SARIF, and escaped in the other outputs."""
    os.rename("found.pt", b"caf\xe9.pt")
    statecli("audit", os.fsdecode(b"caf\xe9.pt"), *reports(*Output))
    (result,) = sarif(Path("out.sarif").read_text("utf-8"))["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "caf%E9.pt"
    for output in Output:
        assert check_valid(output, Path(f"out.{output.value}").read_bytes().decode("utf-8"))


def test_the_page_of_the_outputs_has_each():
    """docs/reference/outputs.md names every output there is, and none else."""
    page = (SAMPLES.parent / "docs" / "reference" / "outputs.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(output.value for output in Output)


# Writing of the files.

#: For each option that writes a file, a command; `{}` is the file.
WRITES = {
    "-o": ("inspect", "a.pt", "-f", "json", "-o", "{}"),
    "--report": ("diff", "a.pt", "b.pt", "--report", "sarif={}"),
    "--write-baseline": ("audit", "found.pt", "--write-baseline", "{}", "--reason", "x"),
    "lock": ("lock", "a.pt", "-o", "{}"),
    "rules": ("rules", "-o", "{}"),
    "rule": ("rules", "nan", "-o", "{}"),
    "config": ("config", "-o", "{}"),
}
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX: files")


def words(write, path):
    return [word.format(path) for word in WRITES[write]]


def process(line, *targets, limit=""):
    """Run the command in a shell of its own. With a limit the process is new, because a fork does not get the limit."""
    if limit:
        command = [sys.executable, "-m", "statecli"]
    else:
        write_command(Path("statecli.sh"), "-m", "statecli")
        command = ["./statecli.sh"]
    quoted = shlex.join([*command, *targets])
    return subprocess.run(["bash", "-c", f"{limit} {quoted} {line}"], capture_output=True, text=True, check=False)


@posix
@pytest.mark.parametrize("write", WRITES)
def test_failed_write_keeps_the_old_file(target_folder, write):
    """The old file is complete, no other file is left, and one line names the file and the reason."""
    old = Path("old.json")
    statement = b"{}" if write != "--write-baseline" else b'{"schema": "statecli.baseline/2", "findings": []}'
    old.write_bytes(statement)
    files = sorted(os.listdir())
    result = process("> /dev/null", *words(write, "old.json"), limit="ulimit -f 0; trap '' XFSZ;")
    assert (result.returncode, result.stderr) == (2, "statecli: old.json: cannot be written: File too large\n")
    assert old.read_bytes() == statement
    assert sorted(os.listdir()) == files


@posix
def test_interrupted_write_keeps_the_old_file(target_folder, monkeypatch):
    """No other file is left: an output is written completely, or not at all."""
    Path("old.json").write_text("old")
    files = sorted(os.listdir())
    with pytest.raises(KeyboardInterrupt), replace_file("old.json") as file:  # noqa: PT012  # the block is the test
        file.write(b"half of")
        raise KeyboardInterrupt
    assert Path("old.json").read_text() == "old"
    assert sorted(os.listdir()) == files


@posix
@pytest.mark.parametrize("write", WRITES)
def test_a_file_keeps_its_mode_and_its_links(statecli, target_folder, write):
    """A symbolic link still leads to the file, a hard link still names it, and a new file has the mode of the umask."""
    Path("real").mkdir()
    real = Path("real/r.json")
    statement = "old" if write != "--write-baseline" else '{"schema": "statecli.baseline/2", "findings": []}'
    real.write_text(statement)
    real.chmod(0o640)
    os.link(real, "other.json")
    os.symlink("real/r.json", "link.json")
    assert statecli(*words(write, "link.json")).code < 2
    assert os.readlink("link.json") == "real/r.json"
    assert real.read_text() != statement
    assert real.stat().st_mode & 0o777 == 0o640
    assert real.samefile("other.json")
    assert statecli(*words(write, "new.json")).code < 2
    Path("plain").touch()
    assert Path("new.json").stat().st_mode == Path("plain").stat().st_mode
    assert os.listdir("real") == ["r.json"]


@posix
def test_output_to_a_dangling_link_creates_its_target(statecli, target_folder):
    """-o with a dangling link creates the target of the link, as `>` of a shell does."""
    os.symlink("made.json", "link.json")
    assert statecli("inspect", "a.pt", "-f", "json", "-o", "link.json").code == 0
    assert json.loads(Path("made.json").read_text())["target"] == "a.pt"
    assert os.readlink("link.json") == "made.json"


@posix
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "stdout"])
@pytest.mark.parametrize("redirection", ["| cat", "> into.json; cat into.json"])
def test_path_of_standard_output_writes_to_standard_output(target_folder, name, redirection):
    """Standard output is a pipe or an open file of the shell, although a command keeps prints of a model apart."""
    if not os.path.exists(os.path.dirname(name) or "."):
        pytest.skip(f"no such file: {name}")
    os.symlink("/dev/stdout", "stdout")
    result = process(redirection, "inspect", "a.pt", "-f", "json", "-o", name)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["target"] == "a.pt"


@posix
@pytest.mark.parametrize("write", ["-o", "--report", "lock", "rule"])
def test_pipes_and_devices_are_not_replaced(target_folder, write):
    """A process substitution, a fifo, the null device."""
    os.mkfifo("fifo")
    result = process("> /dev/null & timeout 30 cat fifo; wait $!", *words(write, "fifo"))
    assert result.stdout, result.stderr
    assert stat.S_ISFIFO(os.stat("fifo").st_mode)
    assert process("", *words(write, "/dev/null")).returncode < 2
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@posix
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_error_names_the_output_that_failed(target_folder):
    """The other outputs are complete."""
    reports = ("--report", "json=one.json", "--report", "sarif=/dev/full", "-o", "three.txt")
    result = process("", "inspect", "a.pt", *reports)
    assert (result.returncode, result.stderr) == (
        2,
        "statecli: /dev/full: cannot be written: No space left on device\n",
    )
    assert json.loads(Path("one.json").read_text())["target"] == "a.pt"
    result = process("> /dev/full", "inspect", "a.pt", "--report", "json=one.json")
    assert result.stderr == "statecli: cannot write to standard output: No space left on device\n"


@posix
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="runs as root: may write anywhere")
def test_writable_file_in_a_read_only_folder_is_written_in_place(statecli, target_folder):
    """The file is written in place; a read-only file is left, although its folder would permit a replacement."""
    Path("shut").mkdir()
    Path("shut/o.json").write_text("old")
    Path("shut").chmod(0o555)
    assert statecli("inspect", "a.pt", "-f", "json", "-o", "shut/o.json").code == 0
    assert json.loads(Path("shut/o.json").read_text())["target"] == "a.pt"
    Path("shut").chmod(0o755)
    Path("shut/o.json").chmod(0o444)
    assert "cannot be written: Permission denied" in statecli("inspect", "a.pt", "-o", "shut/o.json").err


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.html", Output.HTML),
        ("a.JSON", Output.JSON),
        ("a.jsonl", Output.JSONL),
        ("a.csv", Output.CSV),
        ("a.md", Output.MARKDOWN),
        ("a.sarif", Output.SARIF),
        ("a.txt", None),
        ("html", None),
        ("-", None),
    ],
)
def test_the_suffix_of_the_output_file_names_the_format(name, form):
    """A file called `.html` gets a page, as users expect; `-f` decides if given."""
    assert DiffOptions(before="a.pt", after="b.pt", output=name).output_format is form
    plain = DiffOptions(before="a.pt", after="b.pt", output=name, output_format=Output.PLAIN)
    assert plain.output_format is Output.PLAIN
    listed = RulesOptions(output=name).output_format
    assert (listed and listed.value) == ((form and form is not Output.SARIF and form.value) or None)
