"""The metadata of the package agree: name, extras, licence, files."""

from __future__ import annotations

import ast
import email
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest

from statecli.core.documentation import DOCUMENTATION_URL
from statecli.core.installed_package import DISTRIBUTION, install_extra
from statecli.core.version import __version__
from statecli.report.documents import schemas
from statecli.requests import samples

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tools")]
import release_check  # noqa: E402
import site_pages  # noqa: E402
import smoke  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
#: A command that installs statecli: the name of the package, quoted or with extras.
INSTALL = re.compile(r"(?:pip|pipx|uv tool|uv pip) install (?:-\S+ )*['\"]?((?:torch-)?statecli)\b")


def test_name_is_the_name_that_messages_advise():
    """pyproject.toml and the advice in messages have the same distribution name."""
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["urls"]["Documentation"] == DOCUMENTATION_URL


def test_advised_extras_exist():
    """Each extra in a message exists in pyproject.toml."""
    advised = set()
    for path in (ROOT / "statecli").rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if "install_extra" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "install_extra":
                (argument,) = node.args
                if isinstance(argument, ast.Constant):
                    advised.add(argument.value)
    assert len(advised) > 5
    assert advised <= set(PROJECT["optional-dependencies"])
    assert install_extra("hf") == "pip install 'torch-statecli[hf]'"


def test_the_advice_in_a_hook_is_a_key_of_the_hook(monkeypatch):
    """pre-commit installs packages for a hook alone, and sets this variable."""
    monkeypatch.setenv("PRE_COMMIT", "1")
    assert install_extra("values") == "add to the hook: additional_dependencies: ['.[values]']"


def test_one_module_writes_the_commands_that_install():
    """No other module has `pip install` in a text, except in docstrings."""
    actual = set()
    for path in (ROOT / "statecli").rglob("*.py"):
        text = path.read_text("utf-8")
        if not re.search(r"pip[\s'\"]+install", text):
            continue
        tree = ast.parse(text)
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in statements)
        actual |= {path.name for node in texts if isinstance(node.value, str) and "pip install" in node.value}
    assert actual == {"installed_package.py"}


@pytest.mark.parametrize("suffix", ["md", "py", "yml", "yaml", "j2", "toml", "sh"])
def test_no_advice_installs_the_package_of_another_project(suffix):
    """No page, message or template advises to install `statecli` from the index, because it is another project."""
    folders = ("docs", "statecli", "templates", "tools", ".github", "sample_models")
    paths = [*ROOT.glob(f"*.{suffix}"), *(path for name in folders for path in (ROOT / name).rglob(f"*.{suffix}"))]
    for path in paths:
        assert "statecli" not in INSTALL.findall(path.read_text("utf-8")), path
    assert INSTALL.findall("pip install 'statecli[hf]'") == ["statecli"]
    assert INSTALL.findall("uv tool install torch-statecli") == ["torch-statecli"]


def test_template_installs_the_package():
    """The default of the GitLab component is the distribution of this project."""
    (default,) = re.findall(
        r"^    package:\n(?:      .*\n)*?      default: (\S+)",
        (ROOT / "templates" / "audit.yml").read_text("utf-8"),
        re.M,
    )
    assert default == DISTRIBUTION


def test_source_archive_has_every_file():
    """MANIFEST.in names the folder of each file that git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()]
    grafted = {word for words in lines if words and words[0] == "graft" for word in words[1:]}
    included = {word for words in lines if words and words[0] == "include" for word in words[1:]}
    # setuptools adds these itself.
    included |= {"pyproject.toml", "setup.py", "MANIFEST.in"}
    for name in filter(None, tracked):
        assert name.partition("/")[0] in grafted or any(Path(name).match(pattern) for pattern in included), name


@pytest.mark.parametrize("is_last", [True, False], ids=["theirs-last", "ours-last"])
def test_package_of_the_other_project_is_an_error(tmp_path, is_last):
    """If `statecli` of the index is installed in the same folder, each command exits with status 2 and one line."""
    shutil.copytree(ROOT / "statecli", tmp_path / "statecli", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "statecli" / "langchain_tools.py").write_text("")
    if is_last:
        (tmp_path / "statecli" / "__init__.py").write_text('__version__ = "0.3.0"\n')
    for words in (["--version"], ["inspect", "a.pt"]):
        process = subprocess.run(
            [sys.executable, "-m", "statecli", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (process.returncode, process.stdout, process.stderr.count("\n")) == (2, "", 1)
        assert "pip uninstall statecli torch-statecli" in process.stderr
        assert str(tmp_path) in process.stderr


def test_importing_a_package_mixed_with_the_other_project_is_an_error(tmp_path):
    """A program that imports statecli, and pytest with the plugin, stop with the same advice as the command."""
    shutil.copytree(ROOT / "statecli", tmp_path / "statecli", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "statecli" / "langchain_tools.py").write_text("")
    for code in ("import statecli", "from statecli.testing import assert_same_state", "import statecli.callbacks"):
        process = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (process.returncode, process.stdout) == (1, "")
        last = process.stderr.splitlines()[-1]
        assert last.startswith(
            f"ImportError: {tmp_path / 'statecli'}: the package statecli of another project is also installed"
        )
        assert "pip uninstall statecli torch-statecli" in last


@pytest.mark.parametrize(
    ("has_gil", "code", "status"),
    [
        (
            False,
            "import sys; sys.argv = ['statecli', '--version']; from statecli.__main__ import command; command()",
            2,
        ),
        (False, "import statecli", 1),
        (True, "import sys; sys.argv = ['statecli', '--version']; from statecli.__main__ import command; command()", 0),
        (True, "import statecli", 0),
    ],
)
def test_python_without_its_lock_is_refused(has_gil, code, status):
    """Simulated, because no free-threaded Python is available: the command and the import name the variable to set."""
    code = f"import sys; sys._is_gil_enabled = lambda: {has_gil}; {code}"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == status, process.stderr
    assert process.stdout == (f"statecli {__version__}\n" if "command" in code and has_gil else "")
    if not has_gil:
        last = process.stderr.splitlines()[-1]
        assert last.startswith("statecli: " if status == 2 else "ImportError: ")
        assert last.endswith("set PYTHON_GIL=1, or install statecli for another Python")


def test_links_of_the_built_description_are_absolute(tmp_path):
    """On the page of a package index, each link and picture of the README leads to the site; the text is the same."""
    if find_spec("setuptools") is None:
        pytest.skip("needs pip and setuptools")
    words = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    (path,) = tmp_path.glob("*/PKG-INFO")
    metadata = email.message_from_string(path.read_text("utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    link = re.compile(r'(?:\]\(|src="|srcset=")([^)"\s]+)')
    readme = (ROOT / "README.md").read_text("utf-8")
    links = link.findall(metadata.get_payload())
    assert len(links) == len(link.findall(readme)) > 20
    files = {name.replace(".md", ".html") for name in site_pages.build_pages()}
    files |= {f"pictures/{path.name}" for path in (ROOT / "docs" / "pictures").iterdir()}
    pages = {address.removeprefix(DOCUMENTATION_URL).partition("#")[0] for address in links}
    assert pages - files == {"https://www.apache.org/licenses/LICENSE-2.0"}
    assert link.sub("", metadata.get_payload()).strip() == link.sub("", readme).strip()


def test_details_of_the_version_name_the_kernel(statecli):
    """`--version -v` names the kernel in use; both orders and spellings are accepted."""
    lines = statecli("--version", "-v").out.splitlines()
    assert lines[0] == statecli("--version").out.strip()
    assert [line.split()[0] for line in lines[1:5]] == ["package", "kernel", "python", "packages"]
    assert lines[2].split(maxsplit=1)[1] in (
        *("compiled, baseline", "compiled, avx2", "compiled, avx512f"),
        "numpy: the compiled kernel is missing",
    )
    assert all(len(line) <= 80 for line in lines)
    assert statecli("--verbose", "version").out.splitlines() == lines


class TestSamples:
    """`statecli samples DIR`."""

    def test_every_sample_is_written(self, statecli, tmp_path):
        """Each sample of the repository, byte for byte; a second call changes nothing."""
        folder = tmp_path / "new" / "samples"
        for _ in range(2):
            result = statecli("samples", folder)
            assert (result.code, result.err) == (0, "")
            assert f"statecli inspect {folder}/net.py:Net" in result.out
        contents = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert contents == {path.name: path.read_bytes() for path in (ROOT / "sample_models").glob("*.py")}

    def test_existing_file_is_not_overwritten_by_a_sample(self, statecli, tmp_path):
        """An edited sample, or a folder with the name of a sample, is an error before anything is written."""
        for block_path in (lambda path: path.write_text("mine\n"), lambda path: (path.unlink(), path.mkdir())):
            block_path(tmp_path / "net.py")
            result = statecli("samples", tmp_path)
            assert (result.code, result.out) == (2, "")
            assert (
                result.err == f"statecli: {tmp_path}/net.py: exists already and differs from the sample; give another "
                "folder\n"
            )
            assert [path.name for path in tmp_path.iterdir()] == ["net.py"]

    def test_an_installation_without_samples_says_so(self, statecli, tmp_path, monkeypatch):
        """The samples are neither in the package nor next to the package."""
        monkeypatch.setattr(samples, "_PACKAGE", str(tmp_path / "statecli"))
        result = statecli("samples", tmp_path / "to")
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "install the package again" in result.err


def test_schemas_have_addresses_of_their_versions(statecli):
    """Each is valid, with its version in `$id`, a title, and text without the indentation of the source."""
    for command, document in schemas.DOCUMENTS.items():
        text = statecli("schema", command).out
        schema = json.loads(text)
        jsonschema.Draft202012Validator.check_schema(schema)
        version = schemas.get_version(command)
        assert schema["$id"] == f"{DOCUMENTATION_URL}schemas/{command}-{version}.json"
        assert "statecli" in schema["title"]
        module = Path(sys.modules[document.__module__].__file__).read_text("utf-8")
        assert f'"statecli.{command}/{version}"' in module
        assert "\\n    \\n" not in text
        assert "\\n    Attributes:" not in text


def test_the_smoke_script_prints_every_schema():
    """The script asks the program for the schemas, so a new schema is not left out."""
    program = [sys.executable, "-m", "statecli"]
    assert smoke.list_schemas(program) == list(schemas.DOCUMENTS)
    lines = {line for line, *_ in smoke.list_commands("", smoke.list_schemas(program), "")}
    assert {f"schema {name}" for name in schemas.DOCUMENTS} <= lines


@pytest.fixture(scope="module")
def cells():
    """The names of the cells of the release check."""
    return [cell.name for cell in release_check.list_cells()]


def test_the_release_check_has_a_cell_for_each_interpreter_and_each_extra(cells):
    """The interpreters of the classifiers, and the extras of users in their lowest releases."""
    prefix = "Programming Language :: Python :: 3."
    versions = [f"3.{name.removeprefix(prefix)}" for name in PROJECT["classifiers"] if name.startswith(prefix)]
    assert list(release_check.PYTHONS) == versions
    for version in versions:
        assert sum(f"Python {version}," in name for name in cells) == 1
    assert {*release_check.EXTRAS, "values", "test"} == set(PROJECT["optional-dependencies"])
    assert len(cells) == len(set(cells))


def test_ci_installs_the_lowest_and_the_newest_dependencies(cells):
    """The cells use every interpreter of the machine, and do not download torch."""
    (word,) = re.findall(r"make release-check CELL=(\w+)", (ROOT / ".ci" / "run").read_text("utf-8"))
    names = [name for name in cells if word in name]
    assert [name for name in names if "lowest" in name] == ["lowest dependencies, wheel, values"]
    assert [name.split()[3] for name in names if "newest" in name] == [f"{python}," for python in release_check.PYTHONS]
    assert all(name.endswith("values") for name in names)


def test_alternatives_of_schemas_have_one_order():
    """Null is last, in every release of msgspec."""
    alternatives = []

    def walk(value):
        if isinstance(value, dict):
            alternatives.extend([value["anyOf"]] if "anyOf" in value else [])
            value = list(value.values())
        for item in value if isinstance(value, list) else ():
            walk(item)

    walk(json.loads(schemas.encode_schema("diff")))
    with_null = [items for items in alternatives if {"type": "null"} in items]
    assert len(with_null) > 10
    assert all(items.index({"type": "null"}) == len(items) - 1 for items in with_null)
