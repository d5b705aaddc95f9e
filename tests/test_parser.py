"""The parser that avoids the start of Typer returns the result of Typer, or nothing."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from statecli.cli import command_runner, parser, typer_app
from statecli.requests.options import COMMANDS as TABLE
from statecli.requests.parameters import parameters_of

APP = typer_app.build_command()


def find_command(name):
    """Return Typer's command for a name of one or two words."""
    command = APP
    for word in name.split():
        command = command.commands[word]
    return command


COMMANDS = sorted(TABLE)
OPTIONS = {
    command: [
        param for param in find_command(command).params if param.param_type_name == "option" and param.name != "help"
    ]
    for command in COMMANDS
}
#: A valid word for each target with a fixed set of words.
CHOSEN = {"shell": "zsh"}
TARGETS = {
    command: tuple(parameter.field for parameter in parameters_of(TABLE[command]) if parameter.is_target)
    for command in COMMANDS
}


def parse_with_typer(words):
    """Return the options that Typer parses from the words; None if Typer refuses the words."""
    parsed = []
    leave, command_runner.run_and_exit = command_runner.run_and_exit, parsed.append
    try:
        APP.main(list(words), standalone_mode=False)
    except Exception as error:  # noqa: BLE001
        # Typer's errors moved from click to a module of its own; all of them are usage errors.
        assert hasattr(error, "format_message"), error  # noqa: PT017
        return None
    finally:
        command_runner.run_and_exit = leave
    return parsed[0] if parsed else None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_table(command):
    """Typer's command has the options and the targets of the table, and the table has every field."""
    rows = parameters_of(TABLE[command])
    assert {flag for row in rows for flag in row.spellings} == {
        name for option in OPTIONS[command] for name in option.opts
    }
    assert [row.field for row in rows] == [param.name for param in find_command(command).params if param.name != "help"]
    assert {row.field for row in rows} == set(TABLE[command].__struct_fields__)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help_and_a_long_spelling_first(command):
    """The help and the documents show these fields."""
    options = [row for row in parameters_of(TABLE[command]) if not row.is_target]
    assert all(row.help for row in options)
    first = {row.field: row.flags[0] for row in options if row.flags[0] != f"--{row.field.replace('_', '-')}"}
    assert first == ({"everywhere": "--global"} if command == "git setup" else {})


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_typers(command):
    """Nothing given means the same to both parsers."""
    words = [*command.split(), *(CHOSEN.get(name, name) for name in TARGETS[command])]
    assert parser.parse(words) == parse_with_typer(words) is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_targets_come_in_order(command):
    """The first word is before, the second after."""
    words = tuple(CHOSEN.get(name, name) for name in TARGETS[command])
    quick = parser.parse([*command.split(), *words])
    actual = [getattr(quick, name) for name in TARGETS[command]]
    is_repeatable = any(parameter.is_target and parameter.repeatable for parameter in parameters_of(TABLE[command]))
    assert actual == ([words] if is_repeatable else list(words))


VALUES = {
    "output_format": ["json", "table"],
    "color": ["never"],
    "kind": ["buffer", "parameter"],
    "ignore": ["dtype", "values", "names"],
    "atol": ["1e-6", "0", "inf", "-1", "x", " 2", "1_0", ""],
    "rtol": ["1e-6", ".5"],
    "lines": ["3", "-3", "0x1", "", "1_0", " 4"],
    "jobs": ["2", "2.0", "-1"],
    "digest": ["sha256", "md5"],
}

word = st.sampled_from(["net.pt", "", "a b", "x=y", "*.weight", "net.py:Net(a=1)", "--"])


@st.composite
def lines(draw):
    """Command lines of any options in any order, some of them twice, some wrong."""
    command = draw(st.sampled_from(COMMANDS))
    words = command.split()
    for option in draw(st.lists(st.sampled_from(OPTIONS[command]), max_size=5) if OPTIONS[command] else st.just([])):
        name = draw(st.sampled_from(option.opts))
        if option.is_flag:
            words.append(name)
            continue
        value = draw(st.sampled_from(VALUES.get(option.name, ["v", "-v", "a=b", ""])))
        words += [f"{name}={value}"] if name.startswith("--") and draw(st.booleans()) else [name, value]
    for target in draw(st.lists(word, min_size=0, max_size=3)):
        words.insert(draw(st.integers(len(command.split()), len(words))), target)
    return words


@settings(max_examples=100, deadline=None)
@given(lines())
def test_parsed_line_has_the_options_of_typer(words):
    """The options are equal, or the parser leaves the line to Typer."""
    quick = parser.parse(words)
    if quick is not None:
        assert quick == parse_with_typer(words)


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "a.pt"],
        ["inspect", "a.pt", "-f", "json", "-q"],
        ["inspect", "-q", "--", "-a.pt"],
        ["audit", "--lock", "l.json", "a.pt", "--", "-o.pt", "--values", "--"],
        ["inspect", "--to=meta", "net.py:Net(a=1)", "--kind", "buffer", "--kind", "parameter"],
        ["inspect", "-i", "*.weight", "-x", "b.*", "a.pt", "--stats", "--no-progress", "-o", "out.json"],
        ["lock", "a.pt", "-o", "-"],
        ["diff", "a.pt", "b.pt"],
        ["diff", "a.pt", "--atol=1e-6", "--rtol", "1e-5", "b.pt", "-j", "2", "-f", "html", "-o", "out.html"],
        ["diff", "--map", "^a=b", "--map", "c=d", "a.pt", "b.pt", "--ignore", "dtype", "--ignore=device", "--tree"],
        [
            "diff",
            "a.pt",
            "b.pt",
            "--must-not-change",
            "encoder.*",
            "--must-change",
            "head.*",
            "--may-change=head.*",
            "-n",
            "5",
            "-q",
        ],
        ["audit", "a.pt", "--values", "b.pt", "--select", "nan", "--fail-on", "note", "c.pt", "--report=sarif=o.sarif"],
        ["diff", "a.pt", "b.pt", "--bitwise", "--metadata-only", "--no-renames", "--name-only", "--device", "cuda"],
    ],
)
def test_everyday_lines_are_parsed(words):
    """These lines need no Typer, so the fast parser is useful."""
    quick = parser.parse(words)
    assert quick is not None
    assert quick == parse_with_typer(words)


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("diff a b --only x --frozen y --changed z", "diff a b --may-change x --must-not-change y --must-change z"),
        ("lock a --weights-only", "lock a --tensors-only"),
        ("audit a --weights-only", "audit a --tensors-only"),
        ("bisect a --first nan", "bisect a --condition nan"),
        ("inspect a --class", "inspect a --from-config"),
        ("merge a --code x.py:X", "merge a --allow-code x.py:X"),
    ],
)
def test_former_spellings_of_options_are_parsed(former, present):
    assert parser.parse(former.split()) == parser.parse(present.split()) == parse_with_typer(former.split())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["inspect"],
        ["inspect", "--help"],
        ["inspect", "a.pt", "b.pt"],
        ["inspect", "a.pt", "-qv"],
        ["inspect", "a.pt", "--nope"],
        ["inspect", "a.pt", "-f", "yaml"],
        ["inspect", "a.pt", "--to"],
        ["schema"],
        ["diff", "a.pt"],
        ["diff", "a.pt", "b.pt", "c.pt"],
        ["diff", "a.pt", "b.pt", "--atol", "little"],
        ["diff", "a.pt", "b.pt", "-n", "2.5"],
        ["diff", "a.pt", "b.pt", "--ignore", "names"],
        ["diff", "a.pt", "b.pt", "--stats"],
        ["--version"],
    ],
)
def test_lines_with_mistakes_or_help_are_left_to_typer(words):
    """Mistakes and help are Typer's to explain."""
    assert parser.parse(words) is None


@pytest.mark.parametrize("name", ["-o.pt", "-h", "-q", "--values", "--ignore=pickles"])
def test_a_file_that_reads_as_an_option_is_refused(in_tmp_path, statecli, name):
    """The word may come from a glob of the shell, so its meaning is unclear. After `--` a word is a file."""
    for path in ("a.pt", name):
        torch.save({"w": torch.ones(1)}, path)
    result = statecli("audit", name, "a.pt")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"statecli: {name}: a file has the name of this option")
    result = statecli("audit", "-f", "json", "--", name, "a.pt")
    assert [target["target"] for target in result.json["targets"]] == [name, "a.pt"]
    assert set(os.listdir()) == {"a.pt", name}
