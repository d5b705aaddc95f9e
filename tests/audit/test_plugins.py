"""Plugins: rules of an organisation, imported only from where the user or an installation vouches for them."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import statecli as api
from statecli import plugin
from statecli.commands.audit import config, plugin_trust
from statecli.core.errors import UsageError
from statecli.core.output import Output
from statecli.requests import audit as requests_audit
from statecli.requests.options import AuditOptions
from statecli.rules.dictionary import DICTIONARY, RULES

ROOT = Path(__file__).parent.parent.parent
HEAD = "from statecli.plugin import *\n"
RULE = '''
@rule(Severity.ERROR)
def {name}(subject):
    """A summary.

    Why: a reason.

    Example: a case.

    Fix: a remedy.
    """
    {body}
'''


def write_plugin(path, *rules, text=HEAD, rule_list=None):
    """Write a module with the given rules, each a name and a body. Importing the module writes a mark file."""
    text += "".join(RULE.format(name=name, body=body) for name, body in rules)
    rule_list = rule_list if rule_list is not None else "".join(f"{name}, " for name, _ in rules)
    mark = path.with_suffix(".ran")
    path.write_text(f"open({str(mark)!r}, 'w').close()\n{text}\nRULES = ({rule_list})\n", "utf-8")
    return mark


ISSUE = ("acme_always", "yield Issue('found')")


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A repository with a plugin `acme_rules_here.py` as the current folder, and a checkpoint outside."""
    (tmp_path / "here" / ".git").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    save_file({"fc.weight": torch.ones(3)}, tmp_path / "models" / "a.safetensors")
    monkeypatch.chdir(tmp_path / "here")
    for name in [name for name in sys.modules if name.startswith("acme")]:
        monkeypatch.delitem(sys.modules, name)
    before = list(sys.modules)
    yield tmp_path
    for name in set(sys.modules).difference(before):
        if name.startswith("acme"):
            del sys.modules[name]


def audit(*plugins, target="../models/a.safetensors", **arguments):
    return api.audit(target, plugins=plugins, **arguments)


def list_rules(result):
    return [finding.rule for finding in result.findings]


# --- a typed plugin ---------------------------------------------------------------------------------------------------


def test_a_typed_file_is_imported_from_the_current_folder(workspace):
    """The plugin's rules run after statecli's own, and the configuration of the result names the file."""
    write_plugin(Path("acme_here.py"), ISSUE)
    result = audit("./acme_here.py")
    assert list_rules(result) == ["acme-always"]
    assert result.ran[-1] == "acme-always"
    assert result.configuration.plugins == ("./acme_here.py",)


def test_a_call_does_not_keep_the_plugins_of_an_earlier_call(workspace):
    """Neither the rules of statecli nor the next audit have the rule of the plugin."""
    write_plugin(Path("acme_here.py"), ISSUE)
    before = RULES, dict(DICTIONARY)
    assert list_rules(audit("./acme_here.py")) == ["acme-always"]
    assert list_rules(audit()) == []
    with pytest.raises(UsageError, match="unknown rule 'acme-always'"):
        audit(select=["acme-always"])
    assert before == (RULES, DICTIONARY)


def test_calls_in_threads_have_their_own_plugins(workspace):
    """Two audits run at once, each with another plugin."""
    for letter in "ab":
        write_plugin(Path(f"acme_{letter}.py"), (f"acme_{letter}_rule", "yield Issue('found')"))
    path = str(workspace / "models" / "a.safetensors")
    loaded = [config.load_config(plugins=(f"./acme_{letter}.py",), no_config=True, targets=(path,)) for letter in "ab"]
    with ThreadPoolExecutor(2) as pool:
        actual = list(pool.map(lambda plugins: [rule.name for rule in plugins.rules[len(RULES) :]], loaded))
    assert actual == [["acme-a-rule"], ["acme-b-rule"]]


def test_audits_in_threads_restore_standard_output(workspace):
    """Two rules print at the same time, and each audit restores standard output."""
    body = "import time; print('noise', file=sys.stderr); time.sleep(0.01); yield Issue('found')"
    write_plugin(Path("acme_here.py"), ("acme_always", body), text=HEAD + "import sys\n")
    before = os.fstat(1).st_ino, sys.stdout, list(sys.path)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: list_rules(audit("./acme_here.py", jobs=1)), range(16)))
    assert results == [["acme-always"]] * 16
    assert (os.fstat(1).st_ino, sys.stdout, sys.path) == before


def test_a_typed_name_stands_for_an_installed_module(workspace, monkeypatch):
    """A downloaded file with the name of the user's package does not replace the package."""
    mark = write_plugin(Path("acme_twice.py"), ("acme_hostile", "yield Issue('found')"))
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    message = get_error("acme_twice")
    assert message.startswith("plugins='acme_twice': the module acme_twice is not installed; give ")
    assert message.endswith("or a file, such as plugins='./rules.py'")
    (workspace / "installed").mkdir()
    write_plugin(workspace / "installed" / "acme_twice.py", ISSUE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(workspace / "installed")])
    assert list_rules(audit("acme_twice")) == ["acme-always"]
    assert not mark.exists()


@pytest.mark.parametrize("target", [".", "*.safetensors", "a.safetensors"])
def test_a_typed_file_may_be_at_a_target(workspace, target):
    """The user vouches for a file that is typed as a file."""
    write_plugin(Path("acme_here.py"), ISSUE)
    save_file({"fc.weight": torch.ones(3)}, "a.safetensors")
    assert set(list_rules(audit("./acme_here.py", target=target))) == {"acme-always"}


def test_a_plugin_file_sees_the_modules_next_to_it(workspace):
    """As with a script, the folder is searched, but after installed modules."""
    Path("acme_names.py").write_text("MESSAGE = 'from a sibling'\n")
    Path("json.py").write_text("raise RuntimeError('shadowed')\n")
    text = "import json\nfrom acme_names import MESSAGE\n" + HEAD
    write_plugin(Path("rules.py"), ("acme_always", "yield Issue(MESSAGE)"), text=text)
    assert [finding.message for finding in audit("./rules.py").findings] == ["from a sibling"]


def test_plugin_files_have_their_own_siblings(workspace):
    """Each of two plugins has its own module `acme_names` in its folder."""
    text = "from acme_names import MESSAGE\n" + HEAD
    for letter in "ab":
        Path(letter).mkdir()
        Path(letter, "acme_names.py").write_text(f"MESSAGE = {letter!r}\n")
        write_plugin(Path(letter, "rules.py"), (f"acme_{letter}", "yield Issue(MESSAGE)"), text=text)
    result = audit("a/rules.py", "b/rules.py")
    assert [finding.message for finding in result.findings] == ["a", "b"]
    assert "acme_names" not in sys.modules


def test_a_result_can_be_pickled(workspace):
    """A result has the texts of the rules, and none of their functions."""
    write_plugin(Path("acme_here.py"), ISSUE)
    result = audit("./acme_here.py")
    assert pickle.loads(pickle.dumps(result)) == result


# --- a plugin that a configuration names ------------------------------------------------------------------------------


def configure(text='plugins = ["acme_here"]\n'):
    Path("statecli.toml").write_text(text)


def get_error(*plugins, **arguments):
    with pytest.raises(UsageError) as error:
        audit(*plugins, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_configured_module_must_be_installed(workspace, monkeypatch):
    """A file of the checkout is not installed, even if PYTHONPATH has its folder and a dist-info declares it."""
    mark = write_plugin(Path("acme_here.py"), ISSUE)
    info = Path("acme_here-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-here\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[statecli.rules]\nacme = acme_here\n")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.syspath_prepend(os.getcwd())
    configure()
    message = get_error()
    assert message.startswith(
        "statecli.toml: plugins: 'acme_here': statecli does not import this plugin, because no package in site-packages"
    )
    assert message.endswith("install the package, or use plugins='acme_here'")
    assert not mark.exists()


@pytest.fixture
def site(workspace, monkeypatch):
    """A folder of installed packages, one of which declares the module acme_here."""
    info = workspace / "site" / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[statecli.rules]\nacme = acme_here\n")
    monkeypatch.setattr(plugin_trust, "_list_site_folders", lambda: [os.path.realpath(workspace / "site")])
    monkeypatch.syspath_prepend(workspace / "site")
    return workspace / "site"


@pytest.mark.parametrize(
    ("entry", "is_declared"),
    [
        ("[statecli.rules]\nacme = acme_here\n", True),
        ("[statecli.rules]\nacme = acme_here:RULES\n", True),
        ("[statecli.rules]\nacme = acme_here.rules\n", False),
        ("[statecli.rules]\nacme_here = other\n", False),
        ("[pytest11]\nacme = acme_here\n", False),
        ("", False),
    ],
)
def test_an_installed_package_declares_a_module_by_an_entry_point(site, entry, is_declared):
    """The value of an entry in the group `statecli.rules` names the module; undeclared modules are not imported."""
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text(entry)
    mark = write_plugin(site / "acme_here.py", ISSUE)
    configure()
    if is_declared:
        assert list_rules(audit()) == ["acme-always"]
    else:
        assert "no package in site-packages declares this module" in get_error()
    assert mark.exists() == is_declared


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_declared_module_outside_of_site_packages_is_refused(site, workspace, monkeypatch, is_linked):
    """After `pip install --editable .`, or with PYTHONPATH, a pull request can change the code of the module."""
    (workspace / "source").mkdir()
    mark = write_plugin(workspace / "source" / "acme_here.py", ISSUE)
    if is_linked:
        (site / "acme_here.py").symlink_to(workspace / "source" / "acme_here.py")
    else:
        monkeypatch.syspath_prepend(workspace / "source")
    configure()
    assert "acme_here.py is not in site-packages; install the package as a wheel, or use plugins=" in get_error()
    assert not mark.exists()


def test_a_namespace_package_is_refused_if_a_part_is_outside_of_site_packages(site, workspace, monkeypatch):
    """Python would look for the module in each folder of the package."""
    (site / "acme-1.0.dist-info" / "entry_points.txt").write_text("[statecli.rules]\nacme = acme_pkg.rules\n")
    for folder in (site, workspace / "source"):
        (folder / "acme_pkg").mkdir(parents=True)
    mark = write_plugin(workspace / "source" / "acme_pkg" / "rules.py", ISSUE)
    monkeypatch.syspath_prepend(workspace / "source")
    configure('plugins = ["acme_pkg.rules"]\n')
    assert "is not in site-packages" in get_error()
    assert not mark.exists()


def test_a_declared_module_in_site_packages_is_imported(site):
    """The configuration of the result names the module."""
    write_plugin(site / "acme_here.py", ISSUE)
    configure()
    result = audit()
    assert (list_rules(result), result.configuration.plugins) == (["acme-always"], ("acme_here",))


def test_configuration_of_a_download_cannot_name_plugins(site, workspace, monkeypatch):
    """Even an installed plugin is refused: audited files must not make code run."""
    mark = write_plugin(site / "acme_here.py", ISSUE)
    monkeypatch.chdir(workspace / "models")
    configure()
    assert "the author of the checkpoints may have written this configuration" in get_error(target=".")
    assert not mark.exists()
    assert list_rules(audit(target=".", config="statecli.toml")) == ["acme-always"]


@pytest.mark.parametrize(
    "text",
    [
        'ignore = ["acme"]\n',
        'ignore = ["acme-always"]\n',
        'select = ["nan"]\n',
        '[severity]\nacme = "note"\n',
        '[per-target-ignore."*"]\nrules = ["acme-always"]\nreason = "x"\n',
    ],
)
def test_a_configuration_of_a_download_switches_no_rule_of_a_plugin_off(workspace, monkeypatch, text):
    """The rules of a plugin are protected like the rules about pickles."""
    write_plugin(workspace / "acme_above.py", ISSUE)
    monkeypatch.syspath_prepend(workspace)
    monkeypatch.chdir(workspace / "models")
    configure(text)
    result = audit(str(workspace / "acme_above.py"), target="a.safetensors")
    assert [finding.rule for finding in result.failing] == ["acme-always"]
    monkeypatch.chdir(workspace / "here")
    configure(text)
    assert not audit(str(workspace / "acme_above.py")).failing  # the user's own configuration may


@pytest.mark.parametrize("name", ["acme-rules", "./rules.py", "", "acme..rules", "a b"])
def test_configured_plugin_must_be_a_module_name(workspace, name):
    """A file path, or a name that Python could not import, is refused."""
    configure(f'plugins = ["{name}"]\n')
    assert "is not the name of a module" in get_error()


# --- mistakes in a plugin ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a tuple RULES with at least one rule; write RULES"),
        ("RULES = ()", "a tuple RULES with at least one rule"),
        ("RULES = 5", "a tuple RULES with at least one rule"),
        ("RULES = (print,)", "which is not a rule"),
        ("import acme_missing_module", "cannot be imported: ModuleNotFoundError"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit"),
        ("import os; os._exit(0)", "cannot be imported: SystemExit"),
        ("def broken(:", "cannot be imported: SyntaxError"),
        (
            f"{HEAD}@rule(Severity.ERROR)\ndef acme_x(subject):\n    'text'",
            "the docstring of acme_x must have a summary",
        ),
        (HEAD + RULE.format(name="acme", body="yield") + "RULES = (acme,)", "the name is not valid; use a prefix"),
        (HEAD + RULE.format(name="nan_like", body="yield") + "RULES = (nan_like,)", "belongs to statecli"),
        (HEAD + RULE.format(name="pickles_x", body="yield") + "RULES = (pickles_x,)", "belongs to statecli"),
        (HEAD + RULE.format(name="acme_x", body="yield") + "RULES = (acme_x, acme_x)", "is defined twice"),
        (
            HEAD + RULE.format(name="acme_x", body="yield").replace("Severity.ERROR", "'error'") + "RULES = (acme_x,)",
            "use Severity.NOTE",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_an_error_in_one_line(statecli, workspace, text, message):
    """A child process exits with status 2 and prints no traceback."""
    Path("rules.py").write_text(text)
    result = statecli("audit", "../models/a.safetensors", "--plugin", "./rules.py")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1


def test_two_plugins_with_one_name_of_a_rule_are_an_error(workspace):
    """The line names both modules."""
    for name in ("acme_a", "acme_b"):
        write_plugin(Path(f"{name}.py"), ISSUE)
    with pytest.raises(UsageError, match=r"'acme-always' is defined twice, in \./acme_a\.py and \./acme_b\.py"):
        audit("./acme_a.py", "./acme_b.py")


def test_rules_of_one_plugin_have_one_prefix(workspace):
    """The prefix is the group of the rules."""
    write_plugin(Path("acme_here.py"), ISSUE, ("beta_rule", "yield"))
    with pytest.raises(UsageError, match="begin with acme- and beta-"):
        audit("./acme_here.py")


def test_a_missing_module_is_an_error_in_one_line(workspace):
    """A missing module of an existing package, or of a module that is not a package, is reported too."""
    assert "the module acme_nowhere is not installed" in get_error("acme_nowhere")
    for name in ("json.acme", "math.acme", "__main__.acme"):
        assert "not installed" in (message := get_error(name)) or "cannot be imported: ModuleNotFoundError" in message
    assert "no such file" in get_error("./nowhere.py")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "SystemExit: 0"),
        ("from statecli import UsageError; raise UsageError('x')", "UsageError: x"),
        ("return None", "TypeError: "),
        ("return ['text']", "TypeError: the rule yielded 'text', which is not an Issue with a message"),
        ("return [Issue('')]", "which is not an Issue with a message"),
        ("return [Issue(5)]", "Expected `str`, got `int`"),
        ("return [Issue('x', severity='fatal')]", "Invalid enum value"),
    ],
)
def test_a_rule_that_fails_is_an_internal_error(workspace, body, message):
    """A failed rule never counts as passed, and the rules after the failed rule run."""
    write_plugin(Path("acme_here.py"), ("acme_bad", body), ISSUE)
    result = audit("./acme_here.py")
    assert list_rules(result) == ["internal-error", "acme-always"]
    assert message in result.findings[0].message
    assert result.findings[0].message.endswith("(please report this bug to the author of the plugin ./acme_here.py)")


def test_a_need_that_fails_is_an_internal_error(workspace):
    """A failing need must not count as a skipped rule."""
    text = HEAD + "def need(subject):\n    return 1 / 0\n"
    write_plugin(Path("acme_here.py"), ISSUE, text=text)
    path = Path("acme_here.py")
    path.write_text(path.read_text().replace("@rule(Severity.ERROR)", "@rule(Severity.ERROR, need)"))
    assert list_rules(audit("./acme_here.py")) == ["internal-error"]


def test_prints_of_a_plugin_do_not_reach_standard_output(statecli, workspace):
    """The JSON document on standard output stays valid."""
    body = "print('noise'); import os; os.write(1, b'noise'); yield Issue('found')"
    write_plugin(Path("acme_here.py"), ("acme_always", body), text=HEAD + "print('noise')\n")
    result = statecli("audit", "../models/a.safetensors", "--plugin", "./acme_here.py", "-f", "json")
    assert [finding["rule"] for finding in json.loads(result.out)["findings"]] == ["acme-always"]


# --- the rules of a plugin are rules ----------------------------------------------------------------------------------

ISSUE_PER_TENSOR = (
    "acme_always",
    "yield from (Issue(f'{t.fqn}: is bad {t.fqn}', t.fqn) for t in subject.state.tensors)",
)


def test_every_output_shows_a_finding_of_a_plugin(statecli, workspace):
    """Several findings of a rule are listed under the rule's summary."""
    save_file({f"fc{n}.weight": torch.ones(3) for n in range(3)}, workspace / "models" / "a.safetensors")
    write_plugin(Path("acme_here.py"), ISSUE_PER_TENSOR)
    reports = [f"--report={output.value}=../{output.value}" for output in Output]
    result = statecli("audit", "../models/a.safetensors", "--plugin", "./acme_here.py", *reports)
    assert result.code == 1, result.err
    for output in Output:
        text = (workspace / output.value).read_text("utf-8")
        assert "acme-always" in text, output
        assert "reference/rules/acme" not in text, output


def test_a_rule_of_a_plugin_may_have_a_heading(statecli, workspace):
    """Several findings are a problem with this heading; without a heading, with the summary."""
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, workspace / "models" / "a.safetensors")
    body = "yield from (Issue(f'{row.fqn}: is {row.nbytes} bytes', row.fqn) for row in subject.state.tensors)"
    text = HEAD + RULE.format(name="acme_size", body=body).replace("ERROR)", "ERROR, heading='{} tensors are small')")
    write_plugin(Path("acme_here.py"), text=text, rule_list="acme_size,")
    result = statecli("audit", "../models/a.safetensors", "--plugin", "./acme_here.py")
    assert (result.code, "2 tensors are small" in result.out) == (1, True), result.err


def test_rules_lists_and_explains_the_rules_of_a_plugin(statecli, workspace):
    """The explanation has no link to the documentation of statecli."""
    write_plugin(Path("acme_here.py"), ISSUE)
    result = statecli("rules", "acme", "--plugin", "./acme_here.py", "-f", "json")
    assert [rule["name"] for rule in json.loads(result.out)["rules"]] == ["acme-always"]
    explained = statecli("rules", "acme-always", "--plugin", "./acme_here.py")
    assert "Why: a reason." in explained.out
    assert "https://" not in explained.out
    assert "add --plugin MODULE for the rules of a plugin" in statecli("rules", "acme-always").err


def test_a_configuration_selects_and_weighs_rules_of_a_typed_plugin(workspace):
    """The configuration names the rule or the prefix."""
    write_plugin(Path("acme_here.py"), ISSUE, ("acme_other", "yield Issue('found')"))
    configure('select = ["acme"]\nignore = ["acme-other"]\n[severity]\nacme = "note"\n')
    result = audit("./acme_here.py")
    assert result.ran == ("acme-always",)
    assert [finding.severity.value for finding in result.findings] == ["note"]
    assert "unknown rule 'acme'" in get_error()


def test_a_baseline_accepts_a_finding_of_a_plugin(statecli, workspace):
    """Without the plugin, `audit` refuses the baseline; `inspect` has no plugins and still reads the file."""
    write_plugin(Path("acme_here.py"), ISSUE)
    line = ("audit", "../models/a.safetensors", "--plugin", "./acme_here.py")
    assert statecli(*line, "--write-baseline", "known.json", "--reason", "as it was").code == 0
    assert statecli(*line, "--baseline", "known.json").code == 0
    result_without_plugin = statecli("audit", "../models/a.safetensors", "--baseline", "known.json")
    assert (result_without_plugin.code, result_without_plugin.err.count("\n")) == (2, 1)
    assert "use --plugin to load the plugin that defines the rule" in result_without_plugin.err
    assert statecli("inspect", "../models/a.safetensors", "--baseline", "known.json").code == 0


VALUES_RULE = ("acme_high", "yield from (Issue(f'{f.high:g}') for f in subject.values)")


@pytest.fixture
def values_plugin(workspace):
    """The current folder, with a plugin that needs values."""
    write_plugin(Path("acme_here.py"), VALUES_RULE)
    path = Path("acme_here.py")
    path.write_text(path.read_text().replace("@rule(Severity.ERROR)", "@rule(Severity.ERROR, needs_values)"))
    return workspace


@pytest.mark.parametrize("executor", [None, "threads"])
def test_executors_do_the_work_for_rules_of_plugins(values_plugin, executor):
    """Rules run in the process of the command; workers only read values and need no plugin."""
    with ThreadPoolExecutor(2) as pool:
        result = audit("./acme_here.py", select=["acme"], executor=pool if executor else None, values=True)
    assert [finding.message for finding in result.findings] == ["1"]


def test_merge_runs_the_plugin_of_the_parts_only_with_permission(statecli, values_plugin):
    """The parts are files, and a file must not run code."""
    line = ("audit", "../models/a.safetensors", "--plugin", "./acme_here.py", "--select", "acme", "--values")
    for n in (1, 2):
        assert statecli(*line, "--shard", f"{n}/2", "-o", f"part{n}.jsonl").code == 0
    Path("acme_here.ran").unlink()
    result = statecli("merge", "part1.jsonl", "part2.jsonl")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "if you trust the code, give --allow-code './acme_here.py'" in result.err
    assert not Path("acme_here.ran").exists()
    merged = statecli("merge", "part1.jsonl", "part2.jsonl", "--allow-code", "./acme_here.py", "-f", "json")
    assert merged.code == 1
    assert merged.out == statecli(*line, "-f", "json").out


# --- an installed plugin ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The Python of an environment with the sample package installed by pip and with this statecli."""
    if find_spec("pip") is None or find_spec("setuptools") is None:
        pytest.skip("needs pip and setuptools")
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    python = folder / ".venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    (site,) = (folder / ".venv").rglob("site-packages")
    search_paths = [sysconfig.get_path("purelib"), str(ROOT)]
    (site / "ours.pth").write_text("".join(f"{path}\n" for path in search_paths))
    sample = tmp_path_factory.mktemp("sample") / "sample_plugin"
    shutil.copytree(ROOT / "sample_plugin", sample)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--no-index", "-q", sample], check=True)
    return python


def test_an_installed_sample_package_runs_by_the_configuration(environment):
    """The audited folder may contain the environment and a module with the same name."""
    folder = environment.parent.parent.parent
    save_file({"fc.weight": torch.full((3,), 5000.0)}, folder / "a.safetensors")
    (folder / ".git").mkdir(exist_ok=True)
    (folder / "statecli.toml").write_text('plugins = ["acme_rules"]\nselect = ["acme"]\n')
    mark = write_plugin(folder / "acme_rules.py", ISSUE)
    line = [environment, "-m", "statecli", "audit", ".", "-f", "json"]
    result = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    document = json.loads(result.stdout)
    assert [finding["rule"] for finding in document["findings"]] == ["acme-missing-owner", "acme-large-weight"]
    assert document["configuration"]["plugins"] == ["acme_rules"]
    assert not mark.exists()


def test_the_request_of_an_audit_has_the_plugins(workspace):
    """`explain` and the documents build a request without running the audit."""
    write_plugin(Path("acme_here.py"), ISSUE)
    options = AuditOptions(targets=("../models/a.safetensors",), plugin=("./acme_here.py",))
    request = requests_audit.build_request(options)
    assert [plugin.name for plugin in request.plugins] == ["./acme_here.py"]
    assert request.rules[-1].name == "acme-always"


def test_the_page_for_authors_lists_every_name(workspace):
    """The page lists exactly the names of `statecli.plugin`."""
    page = (ROOT / "docs" / "how-to" / "own-rules.md").read_text("utf-8")
    listed_names = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(listed_names) == sorted(plugin.__all__)
    assert all(getattr(plugin, name, None) is not None for name in listed_names)
