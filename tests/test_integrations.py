"""The GitHub action, the pre-commit hook and the GitLab template: valid, and their commands run for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from statecli.storage import checkpoint_names

from .forked_python import run_python, write_command

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent


def run(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(("schema", "name"), [("vendor.github-actions", "action.yml")])
def test_the_action_is_valid(schema, name):
    """The schema is GitHub's own, as published."""
    process = run(str(SCRIPTS / "check-jsonschema"), "--builtin-schema", schema, str(ROOT / name))
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_gitlab_component_is_valid(tmp_path):
    """The second document is a pipeline by GitLab's schema; the first declares the inputs of the pipeline."""
    header, pipeline = (ROOT / "templates" / "audit.yml").read_text().split("\n---\n")
    (tmp_path / "pipeline.yml").write_text(pipeline)
    schema = ("--builtin-schema", "vendor.gitlab-ci")
    process = run(str(SCRIPTS / "check-jsonschema"), *schema, str(tmp_path / "pipeline.yml"))
    assert process.returncode == 0, process.stdout + process.stderr
    for name in yaml.safe_load(header)["spec"]["inputs"]:
        assert f"$[[ inputs.{name} ]]" in pipeline


def test_the_hooks_are_valid():
    """pre-commit itself validates the hooks."""
    process = run(str(SCRIPTS / "pre-commit"), "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml"))
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="module")
def locked_folder(tmp_path_factory):
    """A folder with a checkpoint and its lock."""
    folder = tmp_path_factory.mktemp("locked")
    save_file({"fc.weight": torch.eye(3), "fc.bias": torch.arange(3.0)}, folder / "m.safetensors")
    words = ["-m", "statecli", "lock", "m.safetensors", "-o", "statecli.lock.json"]
    run_python(words, "statecli", cwd=folder, check=True)
    return folder


@pytest.fixture
def repository(locked_folder, tmp_path, monkeypatch):
    """A repository with a locked checkpoint; `statecli` and `python3` are run by this interpreter."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, words in (("statecli", ["-m", "statecli"]), ("python3", [])):
        write_command(bin / name, *words)
    monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = shutil.copytree(locked_folder, tmp_path / "repository")
    monkeypatch.chdir(folder)
    return folder


def change_one_weight():
    save_file({"fc.weight": torch.eye(3), "fc.bias": torch.tensor([0.0, 1.0, 2.0000002])}, "m.safetensors")


def run_action_step(name, **inputs):
    """Run one step of the action as a runner does; return the process, and the texts written for GitHub.

    `GITHUB_BASE_REF` and other names in capitals are variables of the runner.
    """
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = next(step for step in action["runs"]["steps"] if step["name"] == name)
    given = {key: first.get("default", "") for key, first in action["inputs"].items()} | inputs
    names = {key: value.rpartition(".")[2].rstrip(" }") for key, value in step["env"].items()}
    environment = {key: given.get(name, str(ROOT)) for key, name in names.items()}
    environment |= {key: value for key, value in inputs.items() if key.isupper()}
    environment["RUNNER_TEMP"] = str(Path.cwd().parent)
    files = {key: key.lower() for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for path in files.values():
        Path(path).write_text("")
    process = run(
        "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"], env=os.environ | environment | files
    )
    return process, *(Path(path).read_text() for path in files.values())


def test_action_passes_an_unchanged_checkpoint(repository):
    """The action passes, with a summary and a SARIF report whose path is an output."""
    process, outputs, summary = run_action_step("Audit", targets="m.safetensors\n", args="--lock=statecli.lock.json")
    assert process.returncode == 0, process.stdout + process.stderr
    assert outputs.splitlines() == ["sarif=statecli.sarif", "exit-code=0"]
    assert "m.safetensors" in summary
    assert json.loads(Path("statecli.sarif").read_text())["version"] == "2.1.0"


def test_action_fails_and_names_the_changed_weight(repository):
    """The nudged weight is named in an annotation, in the summary and in SARIF."""
    change_one_weight()
    process, outputs, summary = run_action_step("Audit", targets="m.safetensors", args="--lock\nstatecli.lock.json")
    assert process.returncode == 1
    assert "exit-code=1" in outputs
    assert "::error" in process.stdout
    results = json.dumps(json.loads(Path("statecli.sarif").read_text())["runs"][0]["results"])
    for text in (process.stdout, summary, results):
        assert "fc.bias" in text
        assert "fc.weight" not in text


def test_targets_of_the_action_are_not_read_as_options(repository):
    """A file named like an option is audited; a missing file has failed."""
    Path("m.safetensors").rename("-o.safetensors")
    process, _, summary = run_action_step("Audit", targets="-o.safetensors")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "o.safetensors" in summary
    assert run_action_step("Audit", targets="-h")[0].returncode == 2
    assert run_action_step("Audit", targets="--allow-empty")[0].returncode == 2


def test_blanks_around_lines_of_the_action_are_ignored(repository):
    """The blanks are from blocks of YAML, the carriage returns from Windows; blanks inside a name are kept."""
    Path("m.safetensors").rename("a m.safetensors")
    process, outputs, _ = run_action_step(
        "Audit", targets="  a m.safetensors \r\n\r\n", args="\t--values\r\n --fail-on=error \r"
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "exit-code=0" in outputs


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"args": "--nope"}, "has no option --nope"),
        ({"sarif": "none/x.sarif"}, "none/x.sarif"),
        ({"args": "--reason=100%"}, "--reason"),
        ({"python": "false"}, "ended with 1"),
        ({"python": "true"}, "ended with 0"),
        ({"args": "--help"}, "ended with 0 and audited nothing"),
        ({"args": "--values\n  --help"}, "ended with 0 and audited nothing"),
        ({"sarif": "x.sarif\nexit-code=0"}, "sarif: a path is one line"),
        ({"sarif": "x.sarif\rsarif=y"}, "sarif: a path is one line"),
    ],
)
def test_an_action_that_could_not_begin_says_why_in_an_annotation(repository, inputs, says):
    """Then no report exists, also if an earlier step has left a report, and no output names a report."""
    Path("statecli.sarif").write_text("of an earlier step")
    process, outputs, summary = run_action_step("Audit", targets="m.safetensors", **inputs)
    assert process.returncode == (1 if says == "ended with 1" else 2)
    assert outputs == f"sarif=\nexit-code={process.returncode}\n"
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("::")]
    assert line.startswith("::error title=statecli::")
    assert says in line
    assert not summary


def test_the_actions_command_takes_no_input_for_shell(repository):
    """Blanks, quotes, globs and `$(…)` in a name reach statecli as they are."""
    name = "a $(touch pwned) `touch pwned` '\".safetensors"
    Path("m.safetensors").rename(name)
    process, _, _ = run_action_step("Audit", targets=name)
    assert process.returncode == 0, process.stdout + process.stderr
    assert not Path("pwned").exists()


#: Modules that Python, pip or statecli import by name before anything else, or at startup.
SHADOWED = (
    *("json", "re", "struct", "typing", "runpy", "__future__", "contextlib", "enum", "tomllib", "numpy", "msgspec"),
    *("pip", "statecli", "sitecustomize", "usercustomize", "site", "encodings", "torch", "rich", "urllib3"),
)


@pytest.fixture
def hostile_repository(repository):
    """The same repository with a module for each of the SHADOWED names; importing a module ends the process with 0.

    `python3` is a new process, because a fork has already imported its modules.
    """
    for name in SHADOWED:
        (repository / f"{name}.py").write_text(
            f"open('{repository.parent}/ran', 'a').write('{name}\\n')\nimport os; os._exit(0)\n"
        )
    (repository.parent / "bin" / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    change_one_weight()
    yield repository
    ran = repository.parent / "ran"
    assert not ran.exists(), ran.read_text()


@pytest.mark.parametrize("path", [None, ".", ""])
def test_the_actions_audit_imports_nothing_of_the_checkout(hostile_repository, monkeypatch, path):
    """Modules of the checkout are not imported, even if PYTHONPATH names the checkout."""
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setenv("PYTHONSTARTUP", "json.py")
    process, outputs, _ = run_action_step("Audit", targets="m.safetensors", args="--lock=statecli.lock.json")
    assert process.returncode == 1, process.stdout + process.stderr
    assert "exit-code=1" in outputs


def test_the_actions_installation_imports_nothing_of_the_checkout(hostile_repository, monkeypatch):
    """pip is that of the interpreter, and no file of the checkout configures pip."""
    for name in ("pip.conf", "setup.cfg", "pip.ini"):
        (hostile_repository / name).write_text("[global]\nindex-url = http://127.0.0.1:1/\n")
    step = next(
        step
        for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
        if step["name"] == "Install statecli"
    )
    nothing = str(hostile_repository / "no-such-folder")
    environment = os.environ | {"STATECLI_SOURCE": nothing, "STATECLI_PYTHON": "python3"}
    process = run("bash", "-eo", "pipefail", "-c", step["run"], env=environment)
    assert (process.returncode, "no-such-folder" in process.stderr) == (1, True), process.stderr


#: The file of the checkout and another file switch a setting on; `config` or `args` choose one of them.
LOCK, VALUES = 'lock = "statecli.lock.json"\n', "values = true\n"


@pytest.mark.parametrize(
    ("args", "config", "own", "other", "needs_numpy"),
    [
        ("", "", "", "", False),
        ("--fail-on=error", "", "ignore = []\n", "", False),
        ("--values", "", "", "", True),
        ("--fail-on=error\n--lock=statecli.lock.json", "", "", "", True),
        ("", "", LOCK, "", True),
        ("", "", VALUES, "", True),
        ("", "", "values = false\n", "", False),
        ("", "", '[policy]\nreference = "m.safetensors"\n', "", True),
        ("", "none", VALUES, "", False),
        ("", "other.toml", "", VALUES, True),
        ("", "other.toml", VALUES, "values = false\n", False),
        ("--config=other.toml", "", "", LOCK, True),
        ("--config\nother.toml", "", "", LOCK, True),
        ("--no-config", "", VALUES, "", False),
    ],
)
def test_no_more_is_installed_than_the_audit_needs(repository, args, config, own, other, needs_numpy):
    """The action and the GitLab component read in their configuration whether the audit needs values."""
    Path("statecli.toml").write_text(own)
    Path("other.toml").write_text(other)
    installed = record_installations(repository)
    process, *_ = run_action_step("Audit", targets="m.safetensors", args=args, config=config)
    assert (process.returncode, installed()) == (0, ["numpy"] if needs_numpy else []), process.stdout + process.stderr
    process = run_component("m.safetensors", args.replace("\n", " "), STATECLI_CONFIG=config, CI_COMMIT_BRANCH="main")
    assert (process.returncode, installed()) == (0, ["numpy"] if needs_numpy else []), process.stdout + process.stderr


def test_installation_step_installs_only_the_package(repository):
    """The action and the GitLab component install only the package."""
    installed = record_installations(repository)
    given = {"STATECLI_SOURCE": "SOURCE", "STATECLI_PACKAGE": "SOURCE", "STATECLI_PYTHON": "python3"}
    step = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][0]
    (script,) = read_component()["before_script"]
    for line in (["bash", "-eo", "pipefail", "-c", step["run"]], ["sh", "-e", "-c", script]):
        process = run(*line, env=os.environ | given | {"STATECLI_CHANGES": "false"})
        assert (process.returncode, installed()) == (0, ["SOURCE"]), process.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_configuration_of_the_base_decides_about_numpy(configured_upstream, repository, monkeypatch):
    """The configuration of the base names a lock for comparison; that of the pull request does not."""
    Path("statecli.toml").write_text("")
    installed = record_installations(repository)
    run_action_step("Audit", targets="m.safetensors")
    assert installed() == []
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    run_action_step("Audit", targets="m.safetensors")
    assert installed() == ["numpy"]


def record_installations(repository):
    """Let `python3` install nothing and find no numpy; return a function that lists the packages of its last calls."""
    python = repository.parent / "bin" / "python3"
    python.rename(python.with_name("real"))
    record = repository.parent / "packages"
    python.write_text(f"""#!/bin/bash
case "$*" in
  *find_spec*) exit 1 ;;
  *pip\\ install*) for word; do case $word in SOURCE | numpy) echo "$word" >> "{record}" ;; esac; done ;;
  *) exec "{python.with_name("real")}" "$@" ;;
esac
""")
    python.chmod(0o755)

    def read_installed():
        packages = record.read_text().splitlines() if record.exists() else []
        record.write_text("")
        return packages

    return read_installed


def read_component():
    """Return the job of the GitLab component."""
    return yaml.safe_load((ROOT / "templates" / "audit.yml").read_text().split("\n---\n")[1])["statecli-audit"]


def test_the_gitlab_script_imports_nothing_of_the_checkout(hostile_repository, monkeypatch):
    """The audit of the script fails for the nudged weight."""
    assert run_component("m.safetensors", "--lock=statecli.lock.json").returncode == 1


def test_report_does_not_follow_a_link_of_the_checkout(repository):
    """The reports for GitLab and of the action are files of the checkout; the target of a link is not changed."""
    reports = ("gl-code-quality-report.json", "statecli.xml", "statecli.sarif")
    victims = [repository.parent / f"victim-{name}" for name in reports]
    for name, victim in zip(reports, victims, strict=True):
        victim.write_text("own")
        Path(name).symlink_to(victim)
    assert run_component("m.safetensors").returncode == 0
    assert run_action_step("Audit", targets="m.safetensors")[0].returncode == 0
    assert {victim.read_text() for victim in victims} == {"own"}
    assert all(Path(name).is_file() and not Path(name).is_symlink() for name in reports)


def test_report_does_not_follow_a_linked_folder_of_the_checkout(repository):
    """A link in the way of the action's report ends the step; a folder does not."""
    outside = repository.parent / "outside"
    outside.mkdir()
    Path("linked").symlink_to(outside)
    Path("reports").mkdir()
    process, *_ = run_action_step("Audit", targets="m.safetensors", sarif="linked/x.sarif")
    assert (process.returncode, os.listdir(outside)) == (2, [])
    assert "sarif: linked lies below a symbolic link of the checkout" in process.stdout
    assert run_action_step("Audit", targets="m.safetensors", sarif="reports/x.sarif")[0].returncode == 0
    assert Path("reports/x.sarif").is_file()


def run_component(targets, args="", **variables):
    """Run the script of the GitLab component as a runner does."""
    given = {"STATECLI_TARGETS": targets, "STATECLI_ARGS": args, "STATECLI_CONFIG": "", **variables}
    return run("sh", "-ec", "\n".join(read_component()["script"]), env=os.environ | given)


@pytest.fixture
def configured_upstream(repository, monkeypatch):
    """A clone on a branch whose statecli.toml makes findings about the lock notes, unlike that of main."""
    change_one_weight()
    upstream = repository.parent / "upstream"
    upstream.mkdir()
    (upstream / "statecli.toml").write_text('lock = "statecli.lock.json"\n')
    shutil.copy("statecli.lock.json", upstream)
    git = ("git", "-C", str(upstream), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q", "-b", "main"), ("add", "."), ("commit", "-qm", "x")):
        assert run(*git, *words).returncode == 0
    for words in (("init", "-q", "-b", "topic"), ("remote", "add", "origin", str(upstream))):
        assert run("git", *words).returncode == 0
    Path("statecli.toml").write_text('lock = "statecli.lock.json"\n[severity]\nlock = "note"\n')
    monkeypatch.delenv("GITHUB_BASE_REF", raising=False)
    return upstream


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_pull_request_is_audited_with_the_configuration_of_its_base(configured_upstream, monkeypatch):
    """The configuration of the branch would accept the nudged weight, as it does without a base branch."""
    assert run_action_step("Audit", targets="m.safetensors")[0].returncode == 0
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    process, _, summary = run_action_step("Audit", targets="m.safetensors")
    assert process.returncode == 1, process.stdout + process.stderr
    assert "lock-mismatch" in process.stdout
    assert "configuration /" in summary


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_pull_request_whose_base_cannot_be_fetched_is_audited_without_a_configuration(
    configured_upstream, monkeypatch
):
    """A warning and the verdict say so."""
    monkeypatch.setenv("GITHUB_BASE_REF", "gone")
    process, _, _ = run_action_step("Audit", targets="m.safetensors")
    assert "::warning title=statecli::audited without a configuration" in process.stdout
    assert "no configuration (--no-config)" in process.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize(("config", "code", "expected_text"), [("none", 0, "--no-config"), ("own.toml", 1, "own.toml")])
def test_the_actions_configuration_can_be_named(configured_upstream, monkeypatch, config, code, expected_text):
    """A file, or `none`."""
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    Path("own.toml").write_text('lock = "statecli.lock.json"\n')
    process, _, _ = run_action_step("Audit", targets="m.safetensors", config=config)
    assert (process.returncode, expected_text in process.stdout) == (code, True), process.stdout + process.stderr


def commit_to_base(upstream, **files):
    """Commit these files to the base branch."""
    for name, text in files.items():
        (upstream / name).parent.mkdir(exist_ok=True)
        (upstream / name).write_bytes(text)
    git = ("git", "-C", str(upstream), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("add", "."), ("commit", "-qm", "y")):
        assert run(*git, *words).returncode == 0


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("baseline", ["baseline.json", "./ci/baseline.json"])
def test_a_pull_request_does_not_accept_its_own_findings(configured_upstream, monkeypatch, baseline):
    """The baseline is the base branch's, and the checkout has its own again afterwards."""
    empty = b'{"schema": "statecli.baseline/2", "findings": []}'
    commit_to_base(configured_upstream, **{"statecli.toml": f'baseline = "{baseline}"'.encode(), baseline: empty})
    Path("evil.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    Path(baseline).parent.mkdir(exist_ok=True)
    line = ("audit", "evil.pt", "--no-config", "--write-baseline", baseline, "--reason", "x")
    run("statecli", *line)
    own = Path(baseline).read_bytes()
    assert b"unsafe-global" in own
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    process, _, _ = run_action_step("Audit", targets="evil.pt")
    assert process.returncode == 2
    assert "unsafe-global" in process.stdout
    assert " accepted" not in process.stdout
    assert Path(baseline).read_bytes() == own


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_pull_request_does_not_lock_its_own_weights(configured_upstream, monkeypatch):
    """A nudged weight with a lock of its own differs from the base branch's lock."""
    assert run("statecli", "lock", "m.safetensors", "-o", "statecli.lock.json").returncode == 0
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    process, _, _ = run_action_step("Audit", targets="m.safetensors")
    assert (process.returncode, "lock-mismatch" in process.stdout) == (1, True), process.stdout + process.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_pull_request_does_not_change_the_reference(configured_upstream, monkeypatch):
    """The reference of the pull request has the nudged weight too; the reference of the base has the former weight."""
    former = (torch.eye(3), torch.arange(3.0))
    save_file(dict(zip(("fc.weight", "fc.bias"), former, strict=True)), configured_upstream / "m.safetensors")
    policy = b'[policy]\nreference = "m.safetensors"\nmust-not-change = "*"\n'
    commit_to_base(configured_upstream, **{"statecli.toml": policy})
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    process, _, _ = run_action_step("Audit", targets="m.safetensors")
    assert (process.returncode, "fc.bias" in process.stdout) == (1, True), process.stdout + process.stderr


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_lock_that_the_base_branch_lacks_cannot_be_replaced_by_the_pull_request(configured_upstream, monkeypatch):
    """The audit ends without a verdict."""
    (configured_upstream / "statecli.lock.json").unlink()
    commit_to_base(configured_upstream)
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    process, outputs, _ = run_action_step("Audit", targets="m.safetensors")
    assert (process.returncode, "exit-code=2" in outputs) == (2, True), process.stdout + process.stderr
    assert Path("statecli.lock.json").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_folder_that_a_pull_request_redirects_ends_the_audit(configured_upstream, monkeypatch):
    """A symbolic link in the way of a named file would be followed to any folder."""
    commit_to_base(configured_upstream, **{"statecli.toml": b'baseline = "ci/baseline.json"'})
    Path("ci").symlink_to("..")
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    process, outputs, _ = run_action_step("Audit", targets="m.safetensors")
    assert (process.returncode, "symbolic link" in process.stdout, outputs) == (2, True, "sarif=\nexit-code=2\n")


def test_gitlab_uses_only_the_configuration_of_the_default_branch(configured_upstream):
    """A merge request is audited without any, unless the input names a file."""
    args = "--lock=statecli.lock.json"
    assert run_component("m.safetensors", args, CI_COMMIT_BRANCH="main", CI_DEFAULT_BRANCH="main").returncode == 0
    assert run_component("m.safetensors", args, CI_COMMIT_BRANCH="topic", CI_DEFAULT_BRANCH="main").returncode == 1
    assert run_component("m.safetensors", args, STATECLI_CONFIG="statecli.toml").returncode == 0


def run_hook(repository, **own):
    """Run the hook with pre-commit on all files, with the given keys. The installed statecli replaces the environment
    that
    pre-commit would create for this package.
    """
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    config = {"repos": [{"repo": "local", "hooks": [hook | {"language": "system"} | own]}]}
    Path(".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    for words in (("init", "-q"), ("add", "-A")):
        assert run("git", *words).returncode == 0
    environment = os.environ | {"PRE_COMMIT_HOME": str(repository.parent / "cache")}
    return run(str(SCRIPTS / "pre-commit"), "run", "--all-files", "--verbose", env=environment)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_pre_commit_stops_a_commit_that_nudges_a_locked_weight(repository):
    """The entry of the hook runs on the files that match its pattern."""
    clean = run_hook(repository, args=["--lock", "statecli.lock.json", "--"])
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert "1 audited" in clean.stdout
    change_one_weight()
    stopped = run_hook(repository, args=["--lock", "statecli.lock.json", "--"])
    assert stopped.returncode == 1
    assert "fc.bias" in stopped.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_pre_commit_follows_a_link_with_the_name_of_a_checkpoint(repository):
    """torch.load opens the target of the link, whatever its name."""
    Path("firmware.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    Path("evil.pt").symlink_to("firmware.bin")
    stopped = run_hook(repository)
    assert stopped.returncode == 1
    assert "unsafe-global" in stopped.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("what", ["run", "run/model.safetensors.index.json"])
def test_pre_commit_holds_the_shards_of_a_commit_as_their_model(repository, what):
    """Each model is audited once; other files are not compared with its lock or the policy. A nudge is named."""
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    Path("run").mkdir()
    for name, shard in zip("ab", shards, strict=True):
        save_file({name: torch.ones(2)}, f"run/{shard}", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict(zip("ab", shards, strict=True))}
    Path("run/model.safetensors.index.json").write_text(json.dumps(index))
    assert run("statecli", "lock", what, "-o", "statecli.lock.json").returncode == 0
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}, "run/optimizer.pt")
    Path("m.safetensors").unlink()
    Path("statecli.toml").write_text('policy = { require-metadata = "format" }')
    clean = run_hook(repository, args=["--lock", "statecli.lock.json", "--"])
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert "1 audited: clean" in clean.stdout
    assert "optimizer: not part of a model and not in the lock, so not compared" in clean.stdout
    save_file({"b": torch.zeros(2)}, f"run/{shards[1]}", metadata={"format": "pt"})
    stopped = run_hook(repository, args=["--lock", "statecli.lock.json", "--"])
    assert stopped.returncode == 1
    assert "b: values differ from the lock" in stopped.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("own", [{}, {"args": ["--values", "--"]}, {"args": ["--values"]}])
def test_hook_fails_for_a_file_named_like_an_option(repository, own):
    """A file named like `-o .pt` is audited after `--`, and refused if the user's own args omit `--`."""
    torch.save({"w": torch.ones(2)}, "-o.pt")
    Path("evil.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    process = run_hook(repository, **own)
    assert process.returncode == 1
    assert (
        "unsafe-global" if "--" in own.get("args", ["--"]) else "a file has the name of this option"
    ) in process.stdout
    assert not Path(".pt").exists()


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("a/b.safetensors", True),
        ("b.PT", True),
        ("step-1.ckpt", True),
        ("pytorch_model.bin", True),
        ("x/pytorch_model-00001-of-00002.bin", True),
        ("adapter_model.bin", True),
        ("optimizer.bin", True),
        ("x/model.safetensors.index.json", True),
        ("pytorch_model.bin.index.json", True),
        ("model.safetensors.index.fp16.json", True),
        ("config.json", False),
        ("index.json", False),
        ("firmware.bin", False),
        ("openvino_model.bin", False),
        ("data.pkl", False),
        ("model.pt.md", False),
    ],
)
def test_hook_takes_files_with_the_name_of_a_checkpoint(name, is_taken):
    """A name that any file may have is not taken; the user can set `files:`."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert (re.search(hook["files"], name) is not None) is is_taken
    if name.endswith(".bin"):
        assert (checkpoint_names.WEIGHT_BIN_NAME.search(Path(name).name) is not None) is is_taken


def test_the_action_writes_the_page_of_the_audit(repository):
    """The page is next to the summary, for the uploading step; an audit that could not begin leaves no page."""
    page = repository.parent / "statecli-page" / "audit.html"
    assert run_action_step("Audit", targets="m.safetensors")[0].returncode == 0
    assert "m.safetensors" in page.read_text()
    assert run_action_step("Audit", targets="m.safetensors", args="--nonsense")[0].returncode == 2
    assert not page.exists()


def test_the_action_compares_the_checkpoints_of_a_pull_request(repository, monkeypatch):
    """The clone is a shallow clone of the merge, with a module of the checkout that must not be imported."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "s@example.org")
    first = ("init -qb main", "add .", "commit -qm one", "switch -qc change")
    assert [run("git", *words.split()).stderr for words in first] == [""] * 4
    change_one_weight()
    Path("json.py").write_text("raise SystemExit('imported')\n")
    assert [run("git", *words.split()).stderr for words in ("add .", "commit -qm two")] == ["", ""]
    clone = repository.parent / "clone"
    assert run("git", "clone", "-q", "--depth=1", "-b", "change", repository.as_uri(), str(clone)).returncode == 0
    monkeypatch.chdir(clone)
    process, _, summary = run_action_step("Compare", GITHUB_BASE_REF="main")
    assert process.returncode == 0, process.stderr
    assert "<code>m.safetensors</code>: 1 of 2 parameters changed" in summary
    assert (repository.parent / "statecli-changes.md").read_text() == summary
    process, _, summary = run_action_step("Compare", GITHUB_BASE_REF="nowhere")
    assert (process.returncode, summary) == (0, "")
    assert "cannot be fetched" in process.stdout
