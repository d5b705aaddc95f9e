"""Which configuration file an audit uses, and that every output names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ..formats.attacks import Call

OTHER_RULES_CONFIG = 'select = ["tied-tensors"]\n'
#: Ways of a configuration to let a NaN pass, and the text in the outputs for each.
WEAKENINGS = {
    "select": ('select = ["case-collision"]\n', "disables "),
    "ignore": ('ignore = ["values"]\n', "disables "),
    "severity": ('[severity]\nnan = "note"\n', "severity.nan = note"),
    "fail-on": ('fail-on = "error"\n', "fail-on = error"),
    "per-target-ignore": (
        '[per-target-ignore."*.pt"]\nrules = ["nan"]\nreason = "because"\n',
        "per-target-ignore.*.pt: nan",
    ),
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a subfolder `inner`, which has a checkpoint with a NaN; `inner` is the current folder."""
    repository = tmp_path / "repository"
    (repository / "inner").mkdir(parents=True)
    (repository / ".git").mkdir()
    torch.save({"w": torch.tensor([float("nan"), 1.0])}, repository / "inner" / "a.pt")
    monkeypatch.chdir(repository / "inner")
    return repository


@pytest.mark.parametrize(
    ("git", "place", "file"),
    [
        ("folder", "../..", None),  # of another project
        ("folder", "..", "../statecli.toml"),
        ("file", "../..", None),  # as in a worktree or a submodule
        (None, "..", None),  # every user may write into /tmp
        (None, ".", "statecli.toml"),
    ],
)
def test_the_search_ends_at_the_root_of_the_repository(statecli, project, git, place, file):
    """Without a repository, only the current folder is searched."""
    if git != "folder":
        (project / ".git").rmdir()
    if git == "file":
        (project / ".git").write_text("gitdir: elsewhere\n")
    Path(place, "statecli.toml").write_text(OTHER_RULES_CONFIG)
    result = statecli("audit", "a.pt", "-f", "json")
    assert (result.code, result.json["configuration"]["file"]) == (int(file is None), file)


def test_no_config_uses_no_file(statecli, project):
    """`--no-config` also ignores the file in the current folder, and the verdict says so."""
    Path("statecli.toml").write_text(OTHER_RULES_CONFIG)
    result = statecli("audit", "a.pt", "--values", "--no-config")
    assert result.code == 1
    assert "no configuration (--no-config)" in result.out


def test_config_and_no_config_contradict_each_other(statecli, project):
    """Each command that has both options reports the contradiction and exits with status 2."""
    for command in (("audit", "a.pt"), ("config",)):
        result = statecli(*command, "--config", "x.toml", "--no-config")
        assert (result.code, "contradict each other" in result.err) == (2, True)


def test_config_option_takes_a_file_outside_the_repository(statecli, project):
    """Paths and globs of a file outside of the repository are relative to the current folder."""
    config_file = project.parent / "ci.toml"
    assert statecli("lock", "a.pt", "-o", "lock.json").code == 0
    text = 'lock = "lock.json"\nselect = ["lock", "nan"]\n[per-target-ignore."a.pt"]\nrules = ["nan"]\nreason = "x"\n'
    config_file.write_text(text)
    result = statecli("audit", "a.pt", "--values", "--config", config_file, "-f", "json")
    assert "lock-mismatch" in result.json["ran"]
    assert [finding["rule"] for finding in result.json["accepted"]] == ["nan"]


def test_config_command_has_the_option_no_config(statecli, project):
    """`config --no-config` prints the defaults."""
    Path("statecli.toml").write_text(OTHER_RULES_CONFIG)
    assert statecli("config", "--no-config", "-f", "json").json["file"] is None


OUTPUTS = ("json", "jsonl", "csv", "markdown", "html", "sarif", "junit", "github", "gitlab")


@pytest.mark.parametrize("weakening", WEAKENINGS)
def test_every_output_lists_what_the_configuration_weakens(statecli, project, weakening):
    """Every output names the configuration file and each entry that lets more pass."""
    text, entry = WEAKENINGS[weakening]
    Path("statecli.toml").write_text(text)
    result = statecli("audit", "a.pt", *(f"--report={output}=../{output}" for output in OUTPUTS))
    for report_text in (result.out, *(Path("..", output).read_text("utf-8") for output in OUTPUTS)):
        assert "statecli.toml" in report_text
        assert entry in report_text.replace("&#42;", "*").replace("`", "")


def test_json_lists_the_disabled_rules(statecli, project):
    """Each disabled rule is listed by name."""
    Path("statecli.toml").write_text('ignore = ["nan", "inf"]\n')
    configuration = statecli("audit", "a.pt", "-f", "json").json["configuration"]
    assert configuration == {
        "file": "statecli.toml",
        "disabled": ["nan", "inf"],
        "weakened": [],
        "no_config": False,
        "plugins": [],
    }


def test_select_option_replaces_select_of_the_configuration(statecli, project):
    """With --select, the configuration disables no rule."""
    Path("statecli.toml").write_text(OTHER_RULES_CONFIG)
    result = statecli("audit", "a.pt", "--select", "values", "--values", "-f", "json")
    assert (result.code, result.json["configuration"]["disabled"]) == (1, [])


def test_the_verdict_counts_rules_that_the_line_leaves_out(statecli, project):
    """A target that is clean under one rule is not reported as plainly `clean`."""
    assert "1 rule ran, " in (out := statecli("audit", "a.pt", "--select", "case-collision").out)
    assert " disabled" in out


@pytest.mark.parametrize(
    "glob", ["https://me:hunter2@a.example/*", "*://me:hunter3@a.example/*", "https:/me:hunter4@a/*"]
)
def test_no_output_shows_a_password_of_a_glob(statecli, project, glob):
    """Verdict, notes and `config` hide the password, also at its first use in the process."""
    Path("statecli.toml").write_text(f'[per-target-ignore."{glob}"]\nrules = ["nan"]\nreason = "see {glob}"\n')
    audited, in_force = statecli("audit", "a.pt", "-f", "json"), statecli("config")
    assert audited.json["configuration"]["weakened"]
    assert "hunter" not in audited.out + audited.err + in_force.out + in_force.err


#: Ways of a configuration to let a pickle pass.
EXCUSES = {
    "ignore": 'ignore = ["pickles"]\n',
    "select": 'select = ["values"]\n',
    "severity": 'fail-on = "error"\n[severity]\npickles = "note"\n',
    "fail-on": 'fail-on = "error"\n[severity]\nunsafe-global = "warning"\n',
    "per-target-ignore": '[per-target-ignore."*"]\nrules = ["pickles"]\nreason = "so"\ncontents = [{content}]\n',
    "baseline": 'baseline = "b.json"\n',
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model folder with an unsafe pickle; it is the current folder."""
    (tmp_path / "model").mkdir()
    torch.save({"w": torch.ones(2), "x": Call(os.system, "true")}, tmp_path / "model" / "a.pt")
    monkeypatch.chdir(tmp_path / "model")
    return tmp_path / "model"


def excuse(statecli, excuse_name):
    """Write the configuration and the baseline that the configuration names."""
    statecli("audit", "a.pt", "--write-baseline", "b.json", "--reason", "so", "--no-config")
    contents = [entry["content"] for entry in json.loads(Path("b.json").read_text())["findings"] if "content" in entry]
    text = EXCUSES[excuse_name].replace("{content}", ", ".join(map(json.dumps, contents)))
    Path("statecli.toml").write_text(text)


EXCUSES_OF_FOLDERS = [(excuse_name, ".") for excuse_name in EXCUSES]
EXCUSES_OF_FOLDERS += [("ignore", target) for target in ("a.pt", "../model", "*.pt", "**/*.pt", "..")]
EXCUSES_OF_FOLDERS += [("per-target-ignore", "a.pt"), ("baseline", "a.pt"), ("baseline", "..")]


@pytest.mark.parametrize(("excuse_name", "target"), EXCUSES_OF_FOLDERS)
def test_config_in_the_audited_folder_does_not_excuse_pickles(excuse_name, target, statecli, model):
    """The author of a pickle may also have written the configuration in the same folder; the verdict says so."""
    excuse(statecli, excuse_name)
    result = statecli("audit", target, "-f", "json")
    assert result.code == 1
    assert any("cannot weaken rules about pickles" in line for line in result.json["configuration"]["weakened"])
    assert "unsafe-global" in {finding["rule"] for finding in result.json["findings"]}


@pytest.mark.parametrize("text", ['ignore = ["trailing-bytes"]\n', '[severity]\ntrailing-bytes = "note"\n'])
def test_config_in_the_audited_folder_does_not_excuse_a_second_array(text, statecli, tmp_path, monkeypatch):
    """A second `numpy.load` of the same open file reads the bytes after the first array; they may be a pickle."""
    with (tmp_path / "two.npy").open("wb") as file:
        np.save(file, np.ones(2))
        np.save(file, np.array([Call(os.system, "true")], dtype=object), allow_pickle=True)
    (tmp_path / "statecli.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert statecli("audit", ".").code == 1


@pytest.mark.parametrize(
    "text",
    [
        'ignore = ["template-code"]\n',
        'select = ["values"]\n',
        '[severity]\nmodel_code = "note"\n',
        '[per-target-ignore."*"]\nrules = ["template-code"]\nreason = "so"\n',
    ],
)
def test_config_in_the_audited_folder_does_not_excuse_a_chat_template(text, statecli, tmp_path, monkeypatch):
    """The author of a chat template may also have written the configuration next to the template."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "a.pt")
    Path("chat_template.jinja").write_text("{{ cycler.__init__.__globals__ }}")
    Path("statecli.toml").write_text(text)
    assert statecli("audit", ".").code == 1


@pytest.mark.parametrize("excuse_name", EXCUSES)
def test_a_configuration_of_the_user_excuses_pickles(excuse_name, statecli, model, monkeypatch):
    """The configuration is in the user's repository, or is given by --config."""
    excuse(statecli, excuse_name)
    assert statecli("audit", "a.pt", "--config", "statecli.toml").code == 0
    Path(".git").mkdir()
    assert statecli("audit", ".").code == 0


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A snapshot as in the cache of the Hub, with links as files; the snapshot is the current folder."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c"
    blobs.mkdir(parents=True)
    (snapshot / "sub").mkdir(parents=True)
    torch.save({"w": torch.ones(2), "x": Call(os.system, "true")}, blobs / "e1")
    (blobs / "e2").write_text('ignore = ["pickles"]\n')
    for name, blob in (("a.bin", "../../blobs/e1"), ("statecli.toml", "../../blobs/e2"), ("sub/b.pt", "../a.bin")):
        (snapshot / name).symlink_to(blob)
    (snapshot / "sub" / "c.pt").write_bytes((blobs / "e1").read_bytes())
    # A link to the snapshot, a link to a link in the snapshot, and a folder of links.
    (tmp_path / "current").symlink_to("models--a--b/snapshots/c")
    (tmp_path / "far.pt").symlink_to(snapshot / "a.bin")
    (tmp_path / "view").symlink_to(snapshot / "inner")
    (snapshot / "inner").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "d.pt").write_bytes((blobs / "e1").read_bytes())
    monkeypatch.chdir(snapshot)
    return snapshot


@pytest.mark.parametrize(
    "target",
    ["a.bin", "a*.bin", "sub/c.pt", "sub/b.pt", "sub", "sub/", "sub/*.pt", "s*/c.pt", "inner/d.pt", "sub/../a.bin"]
    + [f"../../../{name}" for name in ("current/a.bin", "far.pt", "view/d.pt", "current/sub/*.pt")],
)
def test_a_configuration_above_the_target_excuses_no_pickle(target, statecli, snapshot):
    """The files of a download may be in subfolders, and are links in the cache of the Hub."""
    result = statecli("audit", target, "-f", "json")
    assert result.code == 1
    assert "unsafe-global" in {finding["rule"] for finding in result.json["findings"]}


def test_a_configuration_excuses_pickles_of_other_folders(statecli, snapshot, tmp_path):
    """The current folder is the user's own, next to the download."""
    assert statecli("audit", str(tmp_path / "elsewhere")).code == 0
    assert statecli("audit", str(tmp_path / "elsewhere" / "*.pt")).code == 0


def test_configuration_of_other_rules_is_not_listed_as_weakening(statecli, model):
    """The verdict mentions no weakened rules about pickles, and other rules may be left out."""
    Path("statecli.toml").write_text('ignore = ["values"]\n[severity]\nunsafe-global = "error"\n')
    assert statecli("audit", ".", "-f", "json").json["configuration"]["weakened"] == []
