"""The parser that spares Typer's start gives what Typer gives, or nothing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import typer
from hypothesis import given, settings

from statecli import arguments, cli, shortcut
from statecli.options import InspectOptions

COMMAND = typer.main.get_command(arguments.app).commands["inspect"]
OPTIONS = [one for one in COMMAND.params if one.param_type_name == "option" and one.name != "help"]


def by_typer(words):
    """What Typer makes of the same words; None where it refuses them."""
    found = []
    leave, cli.leave = cli.leave, lambda run, _debug: run()
    inspect, cli.inspect = cli.inspect, found.append
    try:
        typer.main.get_command(arguments.app).main(words, standalone_mode=False)
    except Exception as error:  # noqa: BLE001
        # Typer's errors moved from click to a module of its own; all of them are usage errors.
        assert hasattr(error, "format_message"), error  # noqa: PT017
        return None
    finally:
        cli.leave, cli.inspect = leave, inspect
    return found[0] if found else None


def test_every_option_is_known():
    """An option that only Typer knows would be slow; one that only the shortcut knows would be a lie."""
    known = {*shortcut.FLAGS, *shortcut.VALUES, *shortcut.REPEATABLE}
    assert known == {name for one in OPTIONS for name in one.opts}


def test_every_field_is_an_option():
    """The plain data has a field for each option and the same default."""
    assert set(InspectOptions.__struct_fields__) == {one.name for one in COMMAND.params if one.name != "help"}


VALUES = {
    "output_format": ["json", "table"],
    "color": ["never"],
    "kind": ["buffer", "parameter"],
}

word = st.sampled_from(["net.pt", "", "a b", "x=y", "*.weight", "net.py:Net(a=1)"])


@st.composite
def lines(draw):
    """Command lines of any options in any order, some of them twice, some wrong."""
    words = ["inspect"]
    for option in draw(st.lists(st.sampled_from(OPTIONS), max_size=5)):
        name = draw(st.sampled_from(option.opts))
        if option.is_flag:
            words.append(name)
            continue
        value = draw(st.sampled_from(VALUES.get(option.name, ["v", "-v", "a=b", ""])))
        words += [f"{name}={value}"] if name.startswith("--") and draw(st.booleans()) else [name, value]
    for target in draw(st.lists(word, min_size=0, max_size=2)):
        words.insert(draw(st.integers(1, len(words))), target)
    return words


@settings(max_examples=400, deadline=None)
@given(lines())
def test_whatever_it_parses_typer_parses_the_same(words):
    """Equal options, or it leaves the line to Typer."""
    quick = shortcut.parse(words)
    if quick is not None:
        assert quick == by_typer(words)


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "a.pt"],
        ["inspect", "a.pt", "-f", "json", "-q"],
        ["inspect", "--to=meta", "net.py:Net(a=1)", "--kind", "buffer", "--kind", "parameter"],
        ["inspect", "-i", "*.weight", "-x", "b.*", "a.pt", "--stats", "--no-progress", "-o", "out.json"],
    ],
)
def test_everyday_lines_are_parsed(words):
    """The shortcut is worth having: these lines need no Typer."""
    quick = shortcut.parse(words)
    assert quick is not None
    assert quick == by_typer(words)


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
        ["inspect", "--", "a.pt"],
        ["schema", "inspect"],
        ["--version"],
    ],
)
def test_all_else_is_left_to_typer(words):
    """Mistakes and help are Typer's to explain."""
    assert shortcut.parse(words) is None
