"""The examples of the README and of docs/audit.md run, and what they name is there."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import typer
import yaml
from safetensors.torch import save_file

from statecli.cli.typer_app import build_app
from statecli.commands.audit import config
from statecli.commands.audit.config import Config, IgnoreEntry
from statecli.rules.policy_config import Policy

ROOT = Path(__file__).parent.parent
README, AUDIT = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/audit.md"))


def blocks(text, language):
    """The fenced blocks of a page that are in this language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


RUN = tuple(f"statecli {command}" for command in ("inspect", "diff", "audit", "rules", "config"))
#: What needs a server is run in tests/remote.
LINES = [
    line
    for block in blocks(README + AUDIT, "sh")
    for line in block.splitlines()
    if line.startswith(RUN) and "https://models.example/" not in line
]
#: What other examples write, of which the order of the tests must not be the cause.
WRITTEN = {
    "statecli.lock.json": ("lock", "checkpoints"),
    "known.json": (
        "audit",
        "checkpoints",
        "-q",
        "--write-baseline",
        "known.json",
        "--reason",
        "as it was",
    ),
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder that holds every file the examples name."""
    shutil.copy(ROOT / "sample_models" / "net.py", tmp_path / "net.py")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self, hidden=2):\n"
        "        super().__init__(hidden, hidden)\n\n\ndef build():\n    return Net()\n"
    )
    state = {"param": torch.ones(3, 3), "mybuffer1": torch.ones(2, 2)}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "net.pt")
    optimizer = {"state": {0: {"exp_avg": torch.ones(3, 3)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": state, "optimizer": optimizer}, tmp_path / "train.ckpt")
    torch.save(state, tmp_path / "a.pt")
    for name, prefix in (("old.pt", "net."), ("new.pt", "model.")):
        torch.save({prefix + key: value for key, value in state.items()}, tmp_path / name)
    for name in ("epoch1.ckpt", "epoch2.ckpt"):
        torch.save({"model": state, "optimizer": optimizer}, tmp_path / name)
    save_file(state, tmp_path / "b.safetensors")
    runpy.run_path(str(ROOT / "sample_models" / "finetune.py"))["main"](str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(tmp_path / "net.pt", tmp_path / "checkpoints" / "net.pt")
    return tmp_path


def test_there_are_examples():
    """The pattern finds them."""
    assert len(LINES) >= 30


@pytest.mark.parametrize("line", LINES)
def test_an_example_runs(statecli, desk, line):
    """Each ends 0 or 1, or, where it needs CUDA and there is none, says so."""
    words = shlex.split(re.split(r" #| \|", line)[0])
    for path, made_by in WRITTEN.items():
        if path in words:
            assert statecli(*made_by, *(() if path in made_by else ("-o", path))).code == 0
    result = statecli(*words[1:])
    if result.code == 2 and not torch.cuda.is_available():
        assert "--to meta" in result.err
        assert any("cuda" in word for word in words)
    else:
        assert result.code in (0, 1), result


def keys(kind):
    return dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """The configuration of docs/audit.md that has every key: its text, and what it is taken for."""
    (text,) = blocks(AUDIT, "toml")
    (tmp_path / "pyproject.toml").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return text, config.load_config()


def test_the_whole_configuration_has_every_key(whole):
    """Each that there is has a value other than its default, which no unknown key can have."""
    _, loaded = whole
    for kind, given in ((Config, loaded.config), (Policy, loaded.config.policy)):
        same = [key for field, key in keys(kind).items() if getattr(given, field) == getattr(kind(), field)]
        assert not same
    assert all(one.rules and one.reason for one in loaded.config.per_target_ignore.values())


def test_the_whole_configuration_says_what_each_key_is_for(whole):
    """A comment stands behind each."""
    text, _ = whole
    said = [line for line in text.splitlines() if re.search(r"\S  +# \S", line)]
    for key in (*keys(Config).values(), *keys(Policy).values(), *keys(IgnoreEntry).values()):
        assert [
            line for line in said if re.match(rf"({re.escape(key)} =|\[tool\.statecli\.{re.escape(key)}\b)", line)
        ], key


def test_the_short_configuration_is_one(tmp_path, monkeypatch):
    """The README's."""
    (text,) = blocks(README, "toml")
    (tmp_path / "pyproject.toml").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert config.load_config().config.lock == "statecli.lock.json"


def uses(found):
    """Each mapping in a YAML document, however deep."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [found] * isinstance(found, dict) + [one for value in inner for one in uses(value)]


@pytest.mark.parametrize("page", [README, AUDIT], ids=["README.md", "audit.md"])
def test_the_integrations_are_called_as_they_are(page):
    """The action with inputs that it has, the hook by its id, the component with inputs that it has."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    component = next(yaml.safe_load_all((ROOT / "templates" / "audit.yml").read_text()))["spec"]["inputs"]
    hooks = {one["id"] for one in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    steps = [one for text in blocks(page, "yaml") for one in uses(yaml.safe_load(text))]
    actions = [one["with"] for one in steps if "statecli" in one.get("uses", "")]
    components = [one["inputs"] for one in steps if "component" in one]
    assert all("targets" in one and set(one) <= set(action) for one in actions)
    assert all("targets" in one and set(one) <= set(component) for one in components)
    assert {one["id"] for one in steps if "id" in one and "uses" not in one} == hooks
    assert (len(actions), len(components)) == (1, 1)


def commands(group, before=""):
    """Each command's words, and the command."""
    for name, command in group.commands.items():
        yield from commands(command, f"{name} ") if hasattr(command, "commands") else [(before + name, command)]


def test_every_command_and_option_is_documented():
    """In the README or the page of the audit, or of `merge`; `git`'s own two are called by git."""
    pages = README + AUDIT + "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("outputs.md", "merge.md"))
    for words, command in commands(typer.main.get_command(build_app())):
        if words in ("git textconv", "git difftool"):
            continue
        assert f"statecli {words}" in pages, words
        for one in command.params:
            if one.param_type_name == "option" and one.name != "help":
                assert any(f"`{spelled}`" in pages for spelled in one.opts), (words, one.name)
