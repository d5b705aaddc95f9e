"""The parser of command lines: options and targets in any order, in every spelling, and mistakes as errors."""

from __future__ import annotations

import enum
import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from statecli.cli import parser
from statecli.core.errors import UsageError
from statecli.requests.options import COMMANDS as TABLE
from statecli.requests.parameters import parameters_of

COMMANDS = sorted(TABLE)
#: A valid word for each target with a fixed set of words.
CHOSEN = {"shell": "zsh"}


def list_targets(command):
    return [parameter for parameter in parameters_of(TABLE[command]) if parameter.is_target]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help_and_a_long_spelling_first(command):
    """The help and the documents show these fields."""
    options = [row for row in parameters_of(TABLE[command]) if not row.is_target]
    assert all(row.help for row in options)
    first = {row.field: row.flags[0] for row in options if row.flags[0] != f"--{row.field.replace('_', '-')}"}
    assert first == ({"everywhere": "--global"} if command == "git setup" else {})


@pytest.mark.parametrize("command", COMMANDS)
def test_targets_come_in_order(command):
    """The first word is before, the second after. The table has every field."""
    assert {row.field for row in parameters_of(TABLE[command])} == set(TABLE[command].__struct_fields__)
    words = {target.field: CHOSEN.get(target.field, target.field) for target in list_targets(command)}
    expected = {target.field: (words[target.field],) for target in list_targets(command) if target.repeatable}
    assert parser.parse([*command.split(), *words.values()]) == TABLE[command](**(words | expected))


#: Texts for an option whose value is a text.
TEXTS = st.sampled_from(["v", "-v", "a=b", "", "a b", "--", "--all"])


def draw_value(draw, parameter):
    """Return a value of the parameter's type, and the word for the value."""
    if issubclass(parameter.type, enum.Enum):
        choice = draw(st.sampled_from(list(parameter.type)))
        return choice, choice.value
    if parameter.type in (int, float):
        number = draw(st.integers(-9, 9)) if parameter.type is int else draw(st.sampled_from([0.5, 1e-6, -3.0]))
        return number, str(number)
    text = draw(TEXTS)
    return text, text


@st.composite
def draw_line(draw):
    """Return a command line of options and targets in any order, and the options that it stands for."""
    command = draw(st.sampled_from(COMMANDS))
    rows = [row for row in parameters_of(TABLE[command]) if not row.is_target]
    values, options, targets = {}, [], []
    for row in draw(st.lists(st.sampled_from(rows), max_size=5, unique_by=lambda row: row.field)) if rows else ():
        flag = draw(st.sampled_from(row.flags))
        if row.is_flag:
            values[row.field] = True
            options.append([flag])
            continue
        value, word = draw_value(draw, row)
        values[row.field] = (value,) if row.repeatable else value
        joined = f"{flag}={word}" if flag.startswith("--") else f"{flag}{word}"
        options.append([joined] if word and draw(st.booleans()) else [flag, word])
    for target in list_targets(command):
        word = CHOSEN.get(target.field, draw(st.sampled_from(["net.pt", "a b", "net.py:Net(a=1)", "-", "-#model"])))
        values[target.field] = (word,) if target.repeatable else target.type(word)
        targets.append([word])
    position = draw(st.integers(0, len(options)))
    groups = [*options[:position], *targets, *options[position:]]
    return [*command.split(), *(word for group in groups for word in group)], TABLE[command](**values)


@settings(max_examples=200, deadline=None)
@given(draw_line())
def test_options_and_targets_may_be_in_any_order(line):
    """The parsed options are those from which the line was made."""
    words, options = line
    assert parser.parse(words) == options


@pytest.mark.parametrize(
    ("line", "same_line"),
    [
        ("inspect a.pt -qv", "inspect a.pt --quiet --verbose"),
        ("inspect -qf json a.pt", "inspect a.pt --quiet --output-format=json"),
        ("inspect -n3 a.pt", "inspect a.pt --lines 3"),
        ("inspect a.pt -f json -f csv", "inspect a.pt -f csv"),
        ("audit a.pt --select nan --select inf -- -b.pt", "audit --select=nan --select=inf -- a.pt -b.pt"),
        ("diff --map ^a=b a.pt b.pt", "diff a.pt b.pt --map=^a=b"),
    ],
)
def test_spellings_of_one_line(line, same_line):
    """Short options may share a dash; of an option that is not repeatable, the last value counts."""
    assert parser.parse(line.split()) == parser.parse(same_line.split())


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
    assert parser.parse(former.split()) == parser.parse(present.split())


@pytest.mark.parametrize(
    "line",
    [
        "inspect",
        "inspect a.pt b.pt",
        "inspect a.pt --nope",
        "inspect a.pt -qz",
        "inspect a.pt --all=3",
        "inspect a.pt -f yaml",
        "inspect a.pt --to",
        "inspect a.pt -n",
        "schema",
        "diff a.pt",
        "diff a.pt b.pt c.pt",
        "diff a.pt b.pt --atol little",
        "diff a.pt b.pt -n 2.5",
        "diff a.pt b.pt --ignore names",
        "git nope",
        "nope",
        "-q inspect",
    ],
)
def test_a_line_with_a_mistake_is_refused(line):
    with pytest.raises(UsageError):
        parser.parse(line.split())


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
