"""The GitHub action, the pre-commit hook and the GitLab template: valid, and their commands run for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent


def run(*words, **more):
    return subprocess.run(words, capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize(("schema", "name"), [("vendor.github-actions", "action.yml")])
def test_the_action_is_valid(schema, name):
    """By the schema that GitHub's own is published as."""
    done = run(str(SCRIPTS / "check-jsonschema"), "--builtin-schema", schema, str(ROOT / name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gitlab_component_is_valid(tmp_path):
    """Its second document is a pipeline by GitLab's schema; its first says the inputs that the pipeline uses."""
    header, pipeline = (ROOT / "templates" / "audit.yml").read_text().split("\n---\n")
    (tmp_path / "pipeline.yml").write_text(pipeline)
    schema = ("--builtin-schema", "vendor.gitlab-ci")
    done = run(str(SCRIPTS / "check-jsonschema"), *schema, str(tmp_path / "pipeline.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in yaml.safe_load(header)["spec"]["inputs"]:
        assert f"$[[ inputs.{name} ]]" in pipeline


def test_the_hooks_are_valid():
    """pre-commit says so itself."""
    done = run(str(SCRIPTS / "pre-commit"), "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a locked checkpoint, in which `statecli` and `python3` are this interpreter's."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, words in (("statecli", '-m statecli "$@"'), ("python3", '"$@"')):
        (bin / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}\n')
        (bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    save_file({"fc.weight": torch.eye(3), "fc.bias": torch.arange(3.0)}, "m.safetensors")
    assert run("statecli", "lock", "m.safetensors", "-o", "statecli.lock.json").returncode == 0
    return folder


def nudge():
    save_file({"fc.weight": torch.eye(3), "fc.bias": torch.tensor([0.0, 1.0, 2.0000002])}, "m.safetensors")


def act(name, **inputs):
    """Run one step of the action as a runner does; its exit code, and what it wrote for GitHub."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = next(one for one in action["runs"]["steps"] if one["name"] == name)
    given = {key: one.get("default", "") for key, one in action["inputs"].items()} | inputs
    environment = {key: given[value.split("inputs.")[1].rstrip(" }")] for key, value in step["env"].items()}
    files = {key: key.lower() for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for path in files.values():
        Path(path).write_text("")
    done = run(
        "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"], env=os.environ | environment | files
    )
    return done, *(Path(path).read_text() for path in files.values())


def test_the_actions_command_passes_a_checkpoint_that_is_what_it_was(repository):
    """With its summary and a SARIF report whose path is an output."""
    done, outputs, summary = act("Audit", targets="m.safetensors\n", args="--lock=statecli.lock.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outputs.splitlines() == ["sarif=statecli.sarif", "exit-code=0"]
    assert "m.safetensors" in summary
    assert json.loads(Path("statecli.sarif").read_text())["version"] == "2.1.0"


def test_the_actions_command_fails_where_one_weight_was_nudged_and_names_it(repository):
    """As an annotation, in the summary and in SARIF."""
    nudge()
    done, outputs, summary = act("Audit", targets="m.safetensors", args="--lock\nstatecli.lock.json")
    assert done.returncode == 1
    assert "exit-code=1" in outputs
    assert "::error" in done.stdout
    results = json.dumps(json.loads(Path("statecli.sarif").read_text())["runs"][0]["results"])
    for text in (done.stdout, summary, results):
        assert "fc.bias" in text
        assert "fc.weight" not in text


def test_the_actions_command_takes_no_input_for_shell(repository):
    """Blanks, quotes, globs and `$(…)` in a name reach statecli as they are."""
    name = "a $(touch pwned) `touch pwned` '\".safetensors"
    Path("m.safetensors").rename(name)
    done, _, _ = act("Audit", targets=name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not Path("pwned").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_pre_commit_stops_a_commit_that_nudges_a_locked_weight(repository):
    """pre-commit itself runs the hook's entry on the files that its pattern names."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    # What is installed here stands for the environment that pre-commit would make of this package.
    local = hook | {"language": "system", "args": ["--lock", "statecli.lock.json"]}
    config = {"repos": [{"repo": "local", "hooks": [local]}]}
    Path(".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    environment = os.environ | {"PRE_COMMIT_HOME": str(repository.parent / "cache")}
    for words in (("init", "-q"), ("add", "-A")):
        assert run("git", *words).returncode == 0
    words = (str(SCRIPTS / "pre-commit"), "run", "--all-files", "--verbose")
    clean = run(*words, env=environment)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert "1 audited" in clean.stdout
    nudge()
    assert run("git", "add", "-A").returncode == 0
    stopped = run(*words, env=environment)
    assert stopped.returncode == 1
    assert "fc.bias" in stopped.stdout
