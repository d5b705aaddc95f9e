"""The help and the man page of each command: every option, examples that run, exit statuses, at any width."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from statecli.cli import help_page, help_table, man_page, manuals
from statecli.commands.resume_check import run as resume_run
from statecli.commands.watch.run import watch_run
from statecli.requests.options import COMMANDS, OptionGroup
from statecli.requests.parameters import parameters_of

from .forked_python import run_command

PAGES = ("", *help_table.GROUPS, *COMMANDS)
MANUALS = {"": manuals.ROOT, **manuals.GROUPS, **manuals.MANUALS}
EXAMPLES = [(command, line) for command, manual in MANUALS.items() for line in manual.examples]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.encoder = nn.Linear(3, hidden)
        self.head = nn.Linear(hidden, 2)

    def forward(self, x):
        return self.head(self.encoder(x))

def make_batch():
    return torch.ones(2, 3)
"""


def join_words(text):
    """A text without its line breaks and indents."""
    return " ".join(text.split())


def help_page_lines():
    """Each line of the pages, without their headings."""
    return (Path(help_page.__file__).parent / "help_pages.txt").read_text("utf-8").splitlines()


def render_help(command, width=80, **options):
    return help_page.format_help(help_page.read_page(command), width, **options)


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory):
    """A folder with every file named in an example."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "net.py").write_text(NET)
    shutil.copy(Path(__file__).parents[1] / "sample_models" / "train.py", folder)
    (folder / "ci.toml").write_text('select = ["pickles"]\n')
    torch.manual_seed(0)
    state = {"encoder.weight": torch.randn(4, 3), "encoder.bias": torch.ones(4)}
    state |= {"head.weight": torch.randn(2, 4), "head.bias": torch.ones(2)}
    tuned = state | {"head.bias": torch.zeros(2)}
    for name in ("old.pt", "base.pt"):
        torch.save(state, folder / name)
    for name in ("new.pt", "finetuned.pt"):
        torch.save(tuned, folder / name)
    for name in ("new.safetensors", "model.safetensors"):
        save_file(tuned, folder / name)
    moments = {index: {"exp_avg": torch.ones_like(tensor)} for index, tensor in enumerate(state.values())}
    groups = [{"params": [*moments]}]
    torch.save({"model": state, "optimizer": {"state": moments, "param_groups": groups}}, folder / "train.ckpt")
    (folder / "checkpoints").mkdir()
    shutil.copy(folder / "old.pt", folder / "checkpoints" / "step-100.pt")
    return folder


@pytest.fixture
def working_folder(example_folder, tmp_path, monkeypatch, statecli):
    """A copy of the example folder as current folder, with its own home and the files of earlier commands."""
    working_folder = tmp_path / "desk"
    shutil.copytree(example_folder, working_folder)
    monkeypatch.chdir(working_folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / ".gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    # No wait between two looks, and no import of torch for each training.
    monkeypatch.setattr(watch_run, "__defaults__", (lambda _: None, itertools.count(0, 10).__next__))
    started = SimpleNamespace(run=run_command, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(resume_run, "subprocess", started)
    return working_folder


#: Command -> lines to run before its examples.
BEFORE = {
    "audit": ["lock checkpoints/ -o statecli.lock.json"],
    "merge": [f"diff old.pt new.pt --shard {part}/2 -o {part}.part" for part in (1, 2)],
}


def test_every_command_has_three_to_five_examples_and_its_statuses():
    """Exactly the commands and groups have manuals, and each manual has examples and statuses."""
    assert set(manuals.MANUALS) == set(COMMANDS)
    assert set(manuals.GROUPS) == set(help_table.GROUPS)
    for command, manual in MANUALS.items():
        assert 3 <= len(manual.examples) <= 5, command
        statuses = [status for status, _ in manual.list_statuses()]
        assert {"0", "2", "130"} <= set(statuses), command
        assert statuses == sorted(statuses, key=int)
        assert all(f"statecli {command}".rstrip() in line or line == "git diff" for line in list_examples(command))


def list_examples(command):
    return [line for name, line in EXAMPLES if name == command]


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_command_line_exits_with_2(statecli, command):
    """Each command exits with 2, as its help states."""
    assert statecli(*command.split(), "--no-such-option").code == 2


#: Beginnings of the examples that exit with 1: the diff, the search or the check has a finding.
FOUND = ("statecli diff old.pt new.", "statecli bisect ", "statecli resume-check ", "statecli merge ")


@pytest.mark.parametrize(("command", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_runs(statecli, working_folder, command, line):
    """The help of the command lists the exit status as success or findings."""
    if line.startswith("git ") or command.startswith("git"):
        if shutil.which("git") is None:
            pytest.skip("git is not installed")
        subprocess.run(["git", "init", "--quiet"], check=True)
    for before in BEFORE.get(command, ()):
        assert statecli(*shlex.split(before)).code == 0
    if line.startswith("git "):
        assert subprocess.run(shlex.split(line), check=False).returncode == 0
        return
    if line.startswith("python "):
        words = shlex.split(line.rpartition(" | ")[2])
        text = 'Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "head.bias". '
        process = subprocess.run(
            [sys.executable, "-m", *words], input=text, capture_output=True, text=True, check=False
        )
        assert process.returncode == 1, process.stderr
        return
    typed = re.sub(r"^source <\((.*)\)$", r"\1", line)
    words = shlex.split(re.split(r" [>|] ", typed)[0])
    result = statecli(*words[1:])
    if command == "browse":  # the screen: tests/browse/test_terminal.py
        assert result.err == "statecli: browse: standard input is not a terminal; use statecli inspect\n"
        return
    assert str(result.code) in dict(MANUALS[command].list_statuses())
    assert result.code == line.startswith(FOUND), result
    output_name = words[words.index("-o") + 1] if "-o" in words else None
    assert (working_folder / output_name).stat().st_size if output_name else result.out


# --- text of the help -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_every_listed_option_with_default_and_choices(command):
    """The whole text of each, under its group; hidden options and old spellings are left out."""
    text = render_help(command)
    joined_text = join_words(text)
    for parameter in parameters_of(COMMANDS[command]):
        is_shown = not parameter.hidden
        assert all((f"{flag} " in text or f"{flag}," in text) == is_shown for flag in parameter.flags if len(flag) > 2)
        assert all(f"{alias} " not in text for alias in parameter.aliases)
        assert (join_words(parameter.help) in joined_text) == is_shown
        if is_shown and not parameter.is_target:
            assert f"\n{parameter.group.value}\n" in text
            assert all(re.search(rf"\b{choice}\b", joined_text) for choice in parameter.choices)
    assert len(help_table.build_page(command).options) <= len(OptionGroup)


@pytest.mark.parametrize(
    ("command", "expected_text"),
    [
        ("inspect", "a higher one. [default: error]"),
        ("diff", "treat values as equal if |after - before| <= ATOL + RTOL * |before|. [default: 0]"),
        ("diff", "0 means one per core. [default: 0]"),
        ("lock", "--digest blake3|sha256 Hash algorithm for tensor values. [default: blake3]"),
        ("verify", "[default: cpu; meta for a model that is built from a config.json]"),
        ("audit", "[default: warning]"),
        ("inspect", "-v, --verbose Also show why each tensor counts as parameter or buffer"),
        ("report", "-v, --verbose Also show why each tensor counts as parameter or buffer"),
        ("bisect", "-v, --verbose Show all notes, even if there are many of the same kind."),
    ],
)
def test_defaults_are_shown(command, expected_text):
    """A default of 0 is shown too."""
    assert expected_text in join_words(render_help(command))


@pytest.mark.parametrize("command", PAGES)
def test_help_fits_the_requested_width(command):
    """Only a word, a usage or an example that cannot be broken may be wider."""
    page = help_table.build_page(command)
    unbreakable = {line for line, _ in page.examples}
    for width in (40, 60, 80, 100, 200):
        for line in render_help(command, width).splitlines():
            assert len(line) <= width or line.strip() in unbreakable or " " not in line.strip() or width == 40, line


@pytest.mark.parametrize("color", [False, True])
def test_lines_break_like_those_of_textwrap(color):
    """Lines break as those of textwrap, at every width, with the colour of the usage too."""
    texts = [line.partition("\t")[2] for line in help_page_lines() if "\t" in line]
    texts += [f"\x1b[1mUsage:\x1b[0m {texts[0]}"] if color else []
    assert len(texts) > 300
    for width in (1, 20, 21, *range(40, 201, 7)):
        style = help_page._Style(width, color=color)
        for text in texts:
            expected = textwrap.wrap(text, max(width - 6, 20), break_long_words=False, break_on_hyphens=False)
            assert style.wrap(text, 6) == expected


def test_help_imports_neither_msgspec_nor_typing():
    """A help imports none of the heavy modules."""
    heavy = ("msgspec", "typing", "textwrap", "json", "torch", "numpy", "rich", "pickle", "jinja2")
    heavy += ("statecli.requests.options", "statecli.cli.console")
    lines = [("--help",), ("inspect", "--help"), ("help", "diff")]
    command = "import runpy, sys; sys.argv[0] = 'statecli'; runpy.run_module('statecli', run_name='__main__')"
    for words in lines:
        process = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", command, *words], capture_output=True, text=True
        )
        modules = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines() if "|" in line}
        assert process.returncode == 0
        assert "statecli.cli.help_page" in modules
        assert not modules & set(heavy)


def test_a_wide_terminal_is_used():
    """With 200 columns, some line is longer than 120."""
    assert max(map(len, render_help("inspect", 200).splitlines())) > 120
    assert len(render_help("inspect", 200).splitlines()) < len(render_help("inspect", 80).splitlines())


def test_the_list_of_commands_has_whole_descriptions():
    """Each command has one line of 80 columns: the first sentence of its description, without truncation."""
    lines = render_help("").splitlines()
    for name, options in COMMANDS.items():
        if " " not in name:
            summary = help_table.summarize(options)
            assert f"  {name:<12}  {summary}" in lines
            assert join_words(options.__doc__).startswith(summary)
            assert summary.endswith(".")
    assert "..." not in render_help("").partition("OPTIONS")[0].replace("[ARGS]...", "")


def test_help_ends_with_examples_and_exit_statuses():
    """The options are first, then the examples, then the exit statuses."""
    for command in COMMANDS:
        text = render_help(command)
        examples, statuses = text.index("\nEXAMPLES\n"), text.index("\nEXIT STATUS\n")
        assert text.index("--help") < examples < statuses
        assert text.rstrip().splitlines()[-1].split()[0] in ("130",)


def test_options_of_distribution_have_a_group():
    """`--copies`, `--allow-code` and `--url` are of merge."""
    grouped = {
        flag
        for options in COMMANDS.values()
        for option in parameters_of(options)
        if option.group is OptionGroup.DISTRIBUTION
        for flag in option.flags
    }
    assert grouped == {"--executor", "--shard", "--copies", "--allow-code", "--url"}


def test_a_hidden_option_still_works(statecli, working_folder):
    """`--as-found` is of the hook for pre-commit."""
    assert "--as-found" not in statecli("audit", "--help").out
    assert statecli("audit", "--as-found", "checkpoints/step-100.pt").code == 0
    assert statecli("audit", "--as-found", "checkpoints/step-100.pt", "-qv").code == 0


@pytest.mark.parametrize(
    ("line", "expected_text"),
    [
        ("inspect a.pt --inputz x", "inspect has no option --inputz; did you mean --input?"),
        ("inspect a.pt --reasn x", "inspect has no option --reasn; did you mean --reason?"),
        ("inspect a.pt --format x", "inspect has no option --format; did you mean --output-format?"),
        ("verify a.py:A --opt x", "verify has no option --opt; did you mean --optimizer?"),
        ("verify a.py:A --devcie x", "verify has no option --devcie; did you mean --device?"),
        ("audit a.pt --as-foun", "audit has no option --as-foun; see statecli audit --help"),
        ("completion", "completion needs SHELL: "),
    ],
)
def test_error_suggests_only_listed_options(statecli, line, expected_text):
    """The answer is one line; old spellings are not proposed."""
    result = statecli(*line.split())
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(f"statecli: {expected_text}")
    assert "--inputs" not in result.err
    assert "--as-found" not in result.err


# --- ways to get the help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("--help", ""),
        ("-h", ""),
        ("help", ""),
        ("help help", ""),
        ("version --help", ""),
        ("help diff", "diff"),
        ("help git", "git"),
        ("help git setup", "git setup"),
        ("git setup -h", "git setup"),
        ("git --help", "git"),
        ("diff --help", "diff"),
        ("diff a.pt --atol x --nope -h", "diff"),
        ("diff a.pt b.pt -qh", "diff"),
    ],
)
def test_each_way_to_ask_gives_the_same_page(statecli, line, command):
    """Each way prints the page on stdout, with status 0."""
    result = statecli(*line.split())
    assert (result.code, result.out, result.err) == (0, render_help(command), "")


@pytest.mark.parametrize("line", ["nope --help", "help nope", "git nope --help"])
def test_help_of_a_command_that_does_not_exist_is_a_mistake(statecli, line):
    """The error is one line."""
    result = statecli(*line.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("statecli: No such command 'nope'")


@pytest.mark.parametrize("line", ["version x", "version -v x", "--version a.pt", "-V -q"])
def test_the_version_takes_no_argument(statecli, line):
    result = statecli(*line.split())
    assert (result.code, result.out) == (2, "")
    assert result.err == f"statecli: {line.split()[0]} takes no argument but -v; see statecli --help\n"


def test_help_option_after_two_dashes_is_a_target(statecli):
    """`--help` after `--` is a target, as in every command."""
    assert "--help: cannot be opened" in statecli("inspect", "--", "--help").err


def test_the_width_is_that_of_columns(statecli, monkeypatch):
    """A value of COLUMNS that is not a number is ignored."""
    for columns, width in (("100", 100), ("200", 200), ("wide", 80), ("9" * 5000, 80), ("0", 80), ("", 80)):
        monkeypatch.setenv("COLUMNS", columns)
        assert statecli("inspect", "--help").out == render_help("inspect", width)


def test_the_width_is_that_of_the_terminal():
    """A terminal also gets colours; the colours change no other character."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 111, 0, 0))
    environment = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, "-m", "statecli", "schema", "--help"]
    with subprocess.Popen(command, stdout=theirs, env=environment | {"TERM": "xterm"}) as process:
        os.close(theirs)
        pieces = []
        try:
            while piece := os.read(ours, 1 << 16):
                pieces.append(piece)
        except OSError:  # Linux: the other end is closed
            pass
    os.close(ours)
    output = b"".join(pieces).decode().replace("\r\n", "\n")
    assert process.returncode == 0
    assert output == render_help("schema", 111, color=True)
    assert re.sub(r"\x1b\[\d*m", "", output) == render_help("schema", 111)


@pytest.mark.parametrize(
    ("words", "variables", "colored"),
    [
        (["--help"], {}, False),
        (["--help"], {"FORCE_COLOR": "1"}, True),
        (["--help"], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (["--color", "always", "--help"], {"NO_COLOR": "1"}, True),
        (["--color=never", "--help"], {"FORCE_COLOR": "1"}, False),
        (["--color=purple", "--help"], {}, False),
    ],
)
def test_colours_are_as_in_results(statecli, monkeypatch, words, variables, colored):
    """The order is `--color`, NO_COLOR, FORCE_COLOR, then the terminal. Here standard output is not a terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[1mUsage:" in statecli("inspect", *words).out) == colored


# --- manual pages -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The source of each manual page by its name."""
    paths = man_page.write_man_pages(str(tmp_path_factory.mktemp("man")))
    return {os.path.basename(path): Path(path).read_text("utf-8") for path in paths}


def plain(source):
    """Return the text of a source as a reader of roff shows it."""
    for escape, character in (
        (r"\-", "-"),
        (r"\(aq", "'"),
        (r"\(dq", '"'),
        (r"\(ha", "^"),
        (r"\(ti", "~"),
        (r"\(ga", "`"),
    ):
        source = source.replace(escape, character)
    return join_words(re.sub(r"\\f[BIR]|\\&", "", source).replace(r"\e", "\\"))


def test_there_is_a_page_for_each_command(sources):
    """Each command has a page, and so have statecli and its group git."""
    assert set(sources) == {"-".join(["statecli", *command.split()]) + ".1" for command in PAGES}


@pytest.mark.parametrize("command", PAGES)
def test_a_manual_page_has_all_that_the_help_has(sources, command):
    """Each term with its text, each example and status, from the same table."""
    page = help_table.build_page(command)
    text = plain(sources["-".join(["statecli", *command.split()]) + ".1"])
    for section in filter(None, (page.operands, *page.options)):
        assert all(join_words(f"{term} {description}") in text for term, description in section.lines)
    assert all(f"{line} {purpose}" in text for line, purpose in page.examples)
    assert all(f"{status} {meaning}" in text for status, meaning in page.statuses)


def test_no_text_is_read_as_markup(sources):
    """For any help text, only our own requests start a line, no line is longer than 80, no raw hyphen is left."""
    ours = (".TH", ".nh", ".ad", ".SH", ".SS", ".TP", ".BR")
    for source in sources.values():
        for line in source.splitlines():
            assert len(line) <= 80 or line.startswith(("\\fB", ".TH"))
            assert not line.startswith(("'", " "))
            assert not line.startswith(".") or line.split()[0] in ours
            assert "-" not in re.sub(r"\\-", "", line) or line.startswith(".TH")


@pytest.mark.parametrize("text", [".git", "'quoted'", r"^net\.=model.", '"a" `b` ~c', "a --b"])
def test_any_text_survives_roff(text):
    """The text starts a line, and has each character that is special in roff."""
    page = replace(help_table.build_page("rules"), summary=text, statuses=(("0", text),))
    source = man_page.format_man_page(page, "2026-01-01")
    assert f".SH DESCRIPTION {text} .SH" in plain(source)
    assert f"0 {text} .SH" in plain(source)


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_reports_no_problem(tmp_path):
    """mandoc reports no problem, not even about style."""
    paths = man_page.write_man_pages(str(tmp_path))
    lint = subprocess.run(["mandoc", "-T", "lint", *paths], capture_output=True, text=True, check=False)
    assert (lint.returncode, lint.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_reports_no_warning(tmp_path):
    """groff reports no warning, as `man --warnings` would."""
    paths = man_page.write_man_pages(str(tmp_path))
    lint = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", *paths], capture_output=True, text=True, check=False)
    assert (lint.returncode, lint.stderr) == (0, "")


def test_the_build_puts_the_pages_where_man_looks(tmp_path, sources):
    """The pages are data of the wheel, installed by the command of setuptools for data."""
    build = [sys.executable, "setup.py", "--quiet", "install_data", "--install-dir", str(tmp_path)]
    subprocess.run(build, cwd=Path(__file__).parent.parent, check=True, capture_output=True)
    installed_pages = {path.name: path.read_text("utf-8") for path in (tmp_path / "share" / "man" / "man1").iterdir()}
    assert installed_pages == sources


def test_a_build_can_be_reproduced(tmp_path, monkeypatch):
    """The date of the page is that of SOURCE_DATE_EPOCH."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    paths = man_page.write_man_pages(str(tmp_path))
    assert Path(paths[0]).read_text("utf-8").startswith('.TH "STATECLI" 1 "1970-01-02"')


def test_the_help_of_lock_names_the_check(statecli):
    """The command to compare a checkpoint with a lock is audit."""
    assert "audit --lock FILE" in statecli("lock", "--help").out
