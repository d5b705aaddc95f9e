"""The configuration: found upwards, checked, its mistakes told in one line with the near names."""

from __future__ import annotations

import json

import pytest

from statecli import cli
from statecli.auditing import asked, config
from statecli.auditing.config import Config
from statecli.auditing.policy import Policy
from statecli.errors import UnreadableError, UsageError
from statecli.finding import Severity
from statecli.options import AuditOptions
from statecli.render import Output


@pytest.fixture
def written(tmp_path):
    """The configuration in a file of this text."""

    def load(text, name="statecli.toml"):
        (tmp_path / name).write_text(text)
        return config.load(str(tmp_path / name))

    return load


def test_the_nearest_file_upwards_is_taken(tmp_path):
    """`statecli.toml` before `pyproject.toml`, which counts only where it has a table for statecli."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.statecli]\nfail-on = "error"\n')
    (tmp_path / "a" / "pyproject.toml").write_text('[project]\nname = "x"\n')
    assert config.load(start=str(inner)).config.fail_on is Severity.ERROR
    (tmp_path / "a" / "statecli.toml").write_text('fail-on = "note"\n')
    assert config.load(start=str(inner)).config.fail_on is Severity.NOTE


def test_without_any_file_defaults_are_in_force(tmp_path, monkeypatch):
    """Warnings fail, every rule runs."""
    monkeypatch.setattr(config, "FILES", ("no-such-name.toml",))
    assert config.load(start=str(tmp_path)) == config.Loaded()


def test_values_come_as_they_are_meant(written):
    """One text for a list of one; sizes with a unit; paths from the file's own folder."""
    text = '[policy]\ndtype = "torch.bfloat16"\nmax-bytes = "1.5 GiB"\nreference = "../old.pt"\n'
    policy = written(text).config.policy
    assert policy.dtype == ("bfloat16",)
    assert policy.max_bytes == 1536 * 1024 * 1024
    assert policy.reference.endswith("old.pt")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("selct = []", "there is no key 'selct'; did you mean select?"),
        ('[policy]\ndtypes = "float32"', "there is no key 'policy.dtypes'; did you mean dtype?"),
        ('select = ["case-colision"]', "there is no rule 'case-colision'; did you mean case-collision?"),
        ('[severity]\nnames = "fatal"', "severity"),
        ('select = "names"', "select: expected `array`, got `str`"),
        ('[policy]\nmax-bytes = "much"', "'much' is no size"),
        ('[policy]\ndtype = "float"', "there is no dtype 'float'"),
        ('[per-target-ignore."*.pt"]\nrules = ["names"]', "missing required field `reason`"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file_and_the_near_names(written, text, said):
    """Nothing that is misspelt is left aside."""
    with pytest.raises(UsageError) as raised:
        written(text)
    assert said in str(raised.value)
    assert "statecli.toml: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_no_toml_is_said_with_its_place(written):
    """As TOML's reader says it."""
    with pytest.raises(UnreadableError, match=r"statecli\.toml: is no TOML: .*line 1"):
        written("select = nothing")


def test_a_pyproject_without_a_table_is_refused_where_it_is_named(written):
    """`--config` means it."""
    with pytest.raises(UsageError, match=r"has no \[tool\.statecli\]"):
        written("[project]\n", "pyproject.toml")


def test_a_subject_stands_for_all_of_its_rules():
    """`names` for each rule about names."""
    expanded = config.expand(("names",), "--select")
    assert "case-collision" in expanded
    assert all(rule.about == "names" for rule in config.RULES if rule.name in expanded)


def test_the_command_says_what_is_in_force_and_where_it_comes_from(tmp_path, capsysbinary):
    """Each key of the configuration and of the policy, once."""
    (tmp_path / "statecli.toml").write_text('fail-on = "error"\n[policy]\ndtype = "float16"\n')
    assert cli.config(str(tmp_path / "statecli.toml"), Output.JSON, None, "never") == 0
    found = {one["key"]: one for one in json.loads(capsysbinary.readouterr().out)["settings"]}
    assert (found["fail-on"]["value"], found["policy.dtype"]["value"]) == ("error", ["float16"])
    assert found["policy.dtype"]["source"].endswith("statecli.toml")
    assert found["select"] == {"key": "select", "value": [], "source": "default"}
    fields = set(Config.__struct_encode_fields__) - {"policy"}
    assert set(found) == fields | {f"policy.{name}" for name in Policy.__struct_encode_fields__}


def test_values_are_read_where_the_configuration_says_so(tmp_path):
    """As if --values had been given."""
    (tmp_path / "statecli.toml").write_text("values = true\n")
    options = AuditOptions(targets=("a.pt",), config=str(tmp_path / "statecli.toml"))
    assert asked.request(options).values
    assert not asked.request(AuditOptions(targets=("a.pt",), config=None)).values
