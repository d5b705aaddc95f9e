"""The configuration: searched upwards and checked; a mistake is reported in one line with similar names."""

from __future__ import annotations

import json
import os

import pytest

from statecli.cli import command_runner
from statecli.commands.audit import config
from statecli.commands.audit.config import Config
from statecli.core.errors import StateError, UnreadableError, UsageError
from statecli.core.finding import Severity
from statecli.render import Output
from statecli.requests import audit
from statecli.requests.options import AuditOptions, ConfigOptions
from statecli.rules.dictionary import RULES
from statecli.rules.policy_config import Policy


@pytest.fixture
def load_text(tmp_path):
    """Write the text to a file and load the file as configuration."""

    def load(text, name="statecli.toml"):
        (tmp_path / name).write_text(text)
        return config.load_config(str(tmp_path / name))

    return load


def test_nearest_configuration_above_is_used(tmp_path):
    """`statecli.toml` comes before `pyproject.toml`; a `pyproject.toml` counts only with a table for statecli."""
    (tmp_path / ".git").mkdir()
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.statecli]\nfail-on = "error"\n')
    (tmp_path / "a" / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert config.load_config(start=str(inner)).config.fail_on is Severity.ERROR
    (tmp_path / "a" / "statecli.toml").write_text('fail-on = "note"\n')
    assert config.load_config(start=str(inner)).config.fail_on is Severity.NOTE


def test_defaults_apply_without_a_configuration(tmp_path, monkeypatch):
    """By default, warnings fail and every rule runs."""
    monkeypatch.setattr(config, "CONFIG_FILE_NAMES", ("no-such-name.toml",))
    assert config.load_config(start=str(tmp_path)) == config.LoadedConfig()


def test_values_of_the_configuration_are_converted(load_text, tmp_path, monkeypatch):
    """A single text stands for a list, sizes may have a unit, and paths are relative to the file's own folder."""
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    text = '[policy]\ndtype = "torch.bfloat16"\nmax-bytes = "1.5 GiB"\nreference = "../old.pt"\n'
    policy = load_text(text, "inner/statecli.toml").config.policy
    assert policy.dtype == ("bfloat16",)
    assert policy.max_bytes == 1536 * 1024 * 1024
    assert policy.reference == str(tmp_path / "old.pt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selct = []", "unknown key 'selct'; did you mean select?"),
        ('[policy]\ndtypes = "float32"', "unknown key 'policy.dtypes'; did you mean dtype?"),
        ('select = ["case-colision"]', "unknown rule 'case-colision'; did you mean case-collision?"),
        ('[severity]\nnames = "fatal"', "severity.names: 'fatal' is not a severity; write note, warning, error"),
        ("[severity]\nnames = 3", "severity.names: expected a text, got a whole number"),
        ('fail-on = "fatal"', "fail-on: 'fatal' is not a severity; write note, warning, error"),
        ("select = 3", "select: expected a list, got a whole number"),
        ("policy = 3", "policy: expected a table, got a whole number"),
        ("[policy]\nfrozen = [1]", "policy.frozen[0]: expected a text, got a whole number"),
        (
            "[tool.statecli]",
            "[tool.statecli] is only for pyproject.toml; in this file, write the keys at the top level",
        ),
        ('[policy]\nmax-bytes = "much"', "'much' is not a size"),
        (f'[policy]\nmax-bytes = "{"9" * 400}"', "policy.max-bytes: '999"),
        ("[policy]\nmax-bytes = -1", "policy.max-bytes: expected a whole number >= 0"),
        (f"[policy]\nmax-bytes = {10**30}", "policy.max-bytes: expected a whole number <= 9223372036854775807"),
        ('[policy]\nmax-bytes = "99999999 TiB"', "policy.max-bytes: expected a whole number <= 9223372036854775807"),
        ('[per-target-ignore."*.pt"]\nrules = [3]\nreason = "x"', "per-target-ignore.*.pt.rules[0]: expected a text"),
        ('[per-target-ignore."*.pt"]\nrules = ["nan"]\nreason = " "', "per-target-ignore.*.pt: reason is empty"),
        ('[policy]\ndtype = "float"', "unknown dtype 'float'"),
        ('[per-target-ignore."*.pt"]\nrules = ["names"]', "missing required field `reason`"),
    ],
)
def test_invalid_key_or_value_is_a_one_line_error(load_text, text, message):
    """A misspelt key or value is never ignored."""
    with pytest.raises(UsageError) as raised:
        load_text(text)
    assert message in str(raised.value)
    assert "statecli.toml: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_byte_order_mark_of_a_windows_editor_is_ignored(load_text):
    """PowerShell and Notepad write the mark before UTF-8."""
    assert load_text('\ufefffail-on = "error"\n').config.fail_on is Severity.ERROR


def test_invalid_toml_is_reported_with_its_line(load_text):
    """The message is the TOML reader's own, with the line."""
    with pytest.raises(UnreadableError, match=r"statecli\.toml: is not valid TOML: .*line 1"):
        load_text("select = nothing")


@pytest.mark.parametrize("text", [f"values = {'[' * 50_000}", f"values = {'9' * 5_000}", "values = '\udcff'"])
def test_toml_that_no_parser_reads_is_a_one_line_error(tmp_path, text):
    """Deeply nested arrays, a number of thousands of digits, and bytes that are not text need one line each."""
    (tmp_path / "c.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        UnreadableError, match=r"c\.toml: (tables or lists are nested too deeply; .*|is not valid TOML: .*)$"
    ):
        config.load_config(str(tmp_path / "c.toml"))


def test_error_gives_the_relative_path_of_the_configuration(tmp_path, monkeypatch):
    """The message gives the file's path from the current folder, for each kind of mistake."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for text in ("select = nothing", "selct = []"):
        (tmp_path / "statecli.toml").write_text(text)
        with pytest.raises(StateError, match=r"^\.\./statecli\.toml: "):
            config.load_config()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX: named pipes")
def test_pipe_device_or_folder_is_refused_as_configuration(tmp_path):
    """Reading a named pipe would block, and reading a device would not end. An empty file is a valid configuration."""
    os.mkfifo(tmp_path / "pipe.toml")
    for path, file_kind in (
        (tmp_path / "pipe.toml", "a named pipe"),
        ("/dev/zero", "a character device"),
        (tmp_path, "dir"),
    ):
        with pytest.raises(UnreadableError, match=file_kind):
            config.load_config(str(path))
    (tmp_path / "empty.toml").touch()
    assert config.load_config(str(tmp_path / "empty.toml")).config == Config()


def test_configuration_over_the_size_limit_is_refused(tmp_path):
    """A configuration of four megabytes is not written by hand."""
    (tmp_path / "c.toml").write_bytes(b"#" * (config.MAX_CONFIG_BYTES + 1))
    with pytest.raises(UnreadableError, match=r"c\.toml: the configuration is too long"):
        config.load_config(str(tmp_path / "c.toml"))


def test_single_text_is_a_list_of_one_item(load_text):
    """A single text stands for a list of rules or a list of globs."""
    text = 'select = "nan"\nignore = "inf"\n[per-target-ignore."*"]\nrules = "names"\nreason = "x"\n'
    actual_config = load_text(text + '[policy]\nfrozen = "a.*"\n').config
    assert (actual_config.select, actual_config.ignore, actual_config.policy.frozen) == (("nan",), ("inf",), ("a.*",))
    assert actual_config.per_target_ignore["*"].rules == ("names",)


@pytest.mark.parametrize(
    ("text", "size"), [("0.1 GB", 10**8), ("1.5KiB", 1536), ("7", 7), ("9007199254740993", 2**53 + 1)]
)
def test_a_size_is_exact(load_text, text, size):
    """Sizes are not rounded to binary floats."""
    assert load_text(f'[policy]\nmax-bytes = "{text}"').config.policy.max_bytes == size


def test_pyproject_entry_that_is_not_a_table_is_refused(load_text):
    """The entry is meant for statecli, but none of its content would take effect."""
    with pytest.raises(UsageError, match=r"tool\.statecli: must be a table"):
        load_text("[tool]\nstatecli = 3\n", "pyproject.toml")


@pytest.mark.parametrize("order", [1, -1])
def test_entry_of_a_rule_overrides_the_entry_of_its_group(order):
    """The order of the two entries does not matter."""
    entries = [("shared-slices", "own"), ("storage", "subject")][::order]
    to_rules = config.map_to_rules(entries, "severity", RULES)
    assert (to_rules["shared-slices"], to_rules["tied-tensors"]) == ("own", "subject")


def test_named_pyproject_without_a_statecli_table_is_refused(load_text):
    """A file named with `--config` is expected to have settings for statecli."""
    with pytest.raises(UsageError, match=r"does not have a table \[tool\.statecli\]"):
        load_text("[project]\n", "pyproject.toml")


def test_group_name_expands_to_all_its_rules():
    """`names` stands for each rule about names."""
    expanded = config.expand_rules(("names",), "--select", RULES)
    assert "case-collision" in expanded
    assert all(rule.group == "names" for rule in RULES if rule.name in expanded)


def test_config_command_lists_each_setting_with_its_source(tmp_path, capsysbinary):
    """Each key of the configuration and of the policy is printed once."""
    (tmp_path / "statecli.toml").write_text('fail-on = "error"\n[policy]\ndtype = "float16"\n')
    assert command_runner.execute(ConfigOptions(config=str(tmp_path / "statecli.toml"), output_format=Output.JSON)) == 0
    actual = {setting["key"]: setting for setting in json.loads(capsysbinary.readouterr().out)["settings"]}
    assert (actual["fail-on"]["value"], actual["policy.dtype"]["value"]) == ("error", ["float16"])
    assert actual["policy.dtype"]["source"].endswith("statecli.toml")
    assert actual["select"] == {"key": "select", "value": [], "source": "default"}
    fields = set(Config.__struct_encode_fields__) - {"policy"}
    assert set(actual) == fields | {f"policy.{name}" for name in Policy.__struct_encode_fields__}


def test_configuration_turns_on_reading_of_values(tmp_path):
    """`values = true` has the effect of --values."""
    (tmp_path / "statecli.toml").write_text("values = true\n")
    options = AuditOptions(targets=("a.pt",), config=str(tmp_path / "statecli.toml"))
    assert audit.build_request(options).values
    assert not audit.build_request(AuditOptions(targets=("a.pt",), config=None)).values
