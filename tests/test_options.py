"""The table of options has each option once, and an empty value is never read as an option that was not given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import statecli as api
from statecli.core import early_flags
from statecli.core.errors import UsageError
from statecli.requests import options
from statecli.requests.parameters import parameters_of


@pytest.fixture(autouse=True)
def _checkpoint(in_tmp_path):
    """Save a checkpoint without a finding."""
    torch.save({"w": torch.ones(2)}, "a.pt")


def test_flags_recognised_at_the_start_are_options():
    """The start recognises these flags before the table of options is imported."""
    flags = {parameter.flags for kind in options.COMMANDS.values() for parameter in parameters_of(kind)}
    early = [(early_flags.COLOR_FLAG,), (early_flags.PLUGIN_FLAG,), (early_flags.TIMEOUT_FLAG,)]
    assert {*early, early_flags.VERBOSE_FLAGS} <= flags


def test_each_help_of_a_command_belongs_to_an_option_of_the_command():
    """Another name in `command_help` would never be read."""
    rows = {name: parameters_of(kind) for name, kind in options.COMMANDS.items()}
    options_of = {(name, row.flags[0]) for name in rows for row in rows[name] if row.flags}
    assert {(name, row.flags[0]) for each in rows.values() for row in each for name in row.command_help} <= options_of


TEXTS = {
    "audit a.pt": (
        "model lock against baseline write-baseline reason config init-device output report select ignore shard"
    ),
    "lock a.pt": "init-device output shard",
    "inspect a.pt": "to model input-from input init-device output report shard",
    "diff a.pt a.pt": "device init-device output report shard",
    "verify net.py:Net": "device dtype optimizer input-from input init-device output report",
    "merge a.pt": "allow-code url output report",
    "rules": "output",
    "config": "config output",
}


@pytest.mark.parametrize("line", TEXTS)
def test_an_empty_value_is_refused(statecli, line):
    """Each parser refuses the value with one line that names the option; nothing is written."""
    for option in TEXTS[line].split():
        for words in ((f"--{option}=",), (f"--{option}", "")):
            result = statecli(*line.split(), *words)
            assert (result.code, result.out) == (2, "")
            assert result.err == f"statecli: --{option}: is empty; give a value, or leave the option out\n"


@pytest.mark.parametrize(
    ("line", "name"),
    [("audit", "TARGET"), ("lock", "TARGET"), ("inspect", "TARGET"), ("verify", "MODEL"), ("diff a.pt", "AFTER"),
     ("audit a.pt", "TARGET"), ("rules", "RULE"), ("merge", "PART")],
)  # fmt: skip
def test_an_empty_target_is_refused(statecli, line, name):
    """The error names the target as the help does; `: cannot be opened` would name nothing, and no option is named."""
    result = statecli(*line.split(), "")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"statecli: {name}: is empty; give a value\n"


def test_an_empty_target_has_its_name_in_python():
    """The error names the argument `target`, as errors about options do."""
    with pytest.raises(UsageError, match=r"^target: is empty; give a value$"):
        api.inspect("")


@pytest.mark.parametrize("key", ["lock", "baseline", "reference"])
def test_an_empty_path_in_a_configuration_is_refused(statecli, key):
    """An empty path would mean the folder of the configuration, but the key needs a file."""
    Path("statecli.toml").write_text('policy.reference = ""' if key == "reference" else f'{key} = ""')
    result = statecli("audit", "a.pt")
    assert (result.code, result.out) == (2, "")
    assert f"{key}: is empty; write the path of a file, or remove the key" in result.err


def test_empty_glob_selects_the_tensor_with_the_empty_name(statecli):
    """The empty name is a name like any other; an empty glob matches only the empty name."""
    torch.save({"": torch.ones(2), "w": torch.ones(2)}, "a.pt")
    assert [tensor["fqn"] for tensor in statecli("inspect", "a.pt", "-i", "", "-f", "json").json["tensors"]] == [""]
