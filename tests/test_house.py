"""The structure of the package is as designed: the tuple of a folder lists its modules, and imports go one way."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

import statecli
from statecli import formats, render
from statecli.core.errors import StateError
from statecli.core.oddity_kind import OddityKind
from statecli.formats.registry import FormatReader
from statecli.report.documents.schemas import DOCUMENTS
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import parameters_of
from statecli.requests.run import CommandModule, PlainCommandModule

PACKAGE = Path(statecli.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parse(path):
    """Return the syntax tree of a file; each file is parsed once."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path):
    """Each node of the syntax tree of a file."""
    return tuple(ast.walk(parse(path)))


@pytest.fixture(autouse=True, scope="module")
def _forget_trees():
    """The collector of later tests would walk them."""
    yield
    for function in (parse, nodes, imports):
        function.cache_clear()


def dotted_name(node):
    """Return a name with its attributes as written; "" for any other expression."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def public_modules(folder):
    return {path.stem for path in (PACKAGE / folder).glob("*.py") if not path.stem.startswith("_")}


def test_every_format_in_the_folder_is_listed():
    """A format missing in FORMATS would be ignored silently."""
    other_modules = {"registry", "unsupported"}
    readers = [format.reader for format in formats.FORMATS]
    assert {reader.__name__.rpartition(".")[2] for reader in readers} == public_modules("formats") - other_modules
    assert [reader.NAME for reader in readers] == [format.name for format in formats.FORMATS]
    assert all(reader.TRAITS and reader.sniff and reader.read for reader in readers)
    assert all(format.reader.members for format in formats.FOLDERS)


def test_every_output_in_the_folder_is_listed():
    """Its value is the name of its module."""
    assert public_modules("render") == {output.value for output in render.Output}


def test_the_functions_of_a_module_have_the_parameters_of_its_protocol():
    """These modules are imported by their names, so mypy compares no module with its protocol."""
    names = [f"statecli.requests.{name.replace('-', '_').replace(' ', '_')}" for name in COMMANDS]
    modules = [import_module(name) for name in names if name in _files_by_module()]
    implementations = {
        FormatReader: [format.reader for format in formats.FORMATS],
        render.Renderer: [import_module(f"statecli.render.{output.value}") for output in render.Output],
        CommandModule: [module for module in modules if hasattr(module, "prepare")],
        PlainCommandModule: [module for module in modules if not hasattr(module, "prepare")],
    }
    for protocol, modules in implementations.items():
        assert modules
        for name in (name for name in vars(protocol) if not name.startswith("_")):
            count = len(inspect.signature(getattr(protocol, name)).parameters) - 1
            for module in (module for module in modules if hasattr(module, name)):
                assert len(inspect.signature(getattr(module, name)).parameters) == count, f"{module.__name__}.{name}"


class ImportStatement(NamedTuple):
    node: ast.Import | ast.ImportFrom
    in_function: bool
    for_types: bool

    def list_modules(self):
        """Return the imported modules; of `from . import name` none."""
        if isinstance(self.node, ast.Import):
            return [alias.name for alias in self.node.names]
        return [] if self.node.level else [self.node.module]


@functools.cache
def imports(path):
    """Return each import statement of a file. Only statements contain statements."""
    statements, todo = [], [(node, False, False) for node in parse(path).body]
    while todo:
        node, in_function, for_types = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements.append(ImportStatement(node, in_function, for_types))
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        checks_types = isinstance(node, ast.If) and dotted_name(node.test) == "TYPE_CHECKING"
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            only_types = for_types or (checks_types and field == "body")
            todo += [(child, in_function, only_types) for child in getattr(node, field, ())]
    return statements


def list_modules(path):
    return [module for statement in imports(path) for module in statement.list_modules()]


def allowed_top(path):
    """The heavy packages of a room: live models need torch, values numpy, and the screen of browse rich."""
    room = path.relative_to(PACKAGE).parts[:2]
    heavy = {"live": {"torch"}, "values": {"numpy", "torch"}, "browse": {"rich"}}
    return {"torch"} if room in (("commands", "verify"), ("commands", "resume_check")) else heavy.get(room[0], set())


def test_heavy_packages_are_imported_only_in_their_packages():
    """torch in live/, values/ and two commands, numpy in values/, rich in browse/, at import time."""
    for path in MODULES:
        at_top = [statement for statement in imports(path) if not statement.in_function and not statement.for_types]
        packages = {module.partition(".")[0] for statement in at_top for module in statement.list_modules()}
        assert packages & {"torch", "numpy", "rich"} <= allowed_top(path), path


@functools.cache
def _own_imports(path, *, in_functions):
    """Return the modules of ours that a file imports at its top, or only in functions; not imports for types."""
    modules = set()
    for statement in imports(path):
        if statement.for_types or statement.in_function is not in_functions:
            continue
        names = statement.list_modules()
        if isinstance(statement.node, ast.ImportFrom):
            inner = {f"{statement.node.module}.{alias.name}" for alias in statement.node.names}
            names = inner & _files_by_module().keys() or names
        modules.update(names)
    return modules & _files_by_module().keys()


@functools.cache
def _imports_on_use(path):
    """Return the modules that a file uses as attributes of their package, which imports them then: `live.build`."""
    files, packages = _files_by_module(), {}
    for statement in imports(path):
        if isinstance(statement.node, ast.ImportFrom):
            names = {
                alias.asname or alias.name: f"{statement.node.module}.{alias.name}" for alias in statement.node.names
            }
            packages |= {name: module for name, module in names.items() if module in files}
    modules = set()
    for node in nodes(path):
        first, _, rest = dotted_name(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
        if first in packages:
            steps = rest.split(".")
            modules |= {".".join([packages[first], *steps[:length]]) for length in range(1, len(steps) + 1)}
    return modules & files.keys()


@functools.cache
def _files_by_module():
    parts = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in MODULES}
    return {".".join(names).removesuffix(".__init__"): path for path, names in parts.items()}


#: Module and imported module -> what the function chooses. Other modules are used through their package.
IMPORTED_IN_FUNCTIONS = {
    ("statecli.pytest_plugin", "statecli.testing"): "the first test of a model, in a run of pytest",
    ("statecli.browse.run", "statecli.browse.app"): "the screen, if textual is installed",
    ("statecli.cli.command_runner", "statecli.render.github"): "an output",
    ("statecli.cli.completion", "statecli.report.documents.schema_texts"): "words to complete",
    ("statecli.cli.completion", "statecli.rules.dictionary"): "words to complete",
    ("statecli.cli.completion", "statecli.targets.load"): "words to complete",
    ("statecli.cli.console", "statecli.render.plain"): "an output",
    ("statecli.formats", "statecli.formats.torch.settings"): "a format",
    ("statecli.formats", "statecli.formats.unsupported"): "a format",
    ("statecli.workers.executors", "statecli.workers.executors.dask"): "an engine",
    ("statecli.workers.executors", "statecli.workers.executors.futures"): "an engine",
    ("statecli.workers.executors", "statecli.workers.executors.mpi"): "an engine",
    ("statecli.workers.executors", "statecli.workers.executors.ray"): "an engine",
}


def test_an_import_in_a_function_spares_a_module():
    """Our own modules are imported in functions for a light start only, never to hide a circle or by habit."""
    files = _files_by_module()
    in_functions = {
        (name, module)
        for name, path in files.items()
        for module in _own_imports(path, in_functions=True) - _own_imports(path, in_functions=False)
    }
    assert in_functions == IMPORTED_IN_FUNCTIONS.keys()

    def list_loaded_modules(name):
        loaded, todo = set(), [name]
        while todo:
            module = todo.pop()
            if module in files and module not in loaded:
                loaded.add(module)
                todo += [module.rpartition(".")[0], *_own_imports(files[module], in_functions=False)]
        return loaded

    needless = {
        name: modules
        for name, path in files.items()
        if (
            modules := (_own_imports(path, in_functions=True) - _own_imports(path, in_functions=False))
            & list_loaded_modules(name) - {"statecli"}
        )
    }
    assert not needless


def test_a_package_lists_the_modules_that_are_used_through_it():
    """Type checkers read the list: a module that is missing there is an error of mypy, a needless one is found here."""
    used = {module for path in MODULES for module in _imports_on_use(path)}
    needless = {
        module
        for name, path in _files_by_module().items()
        if path.stem == "__init__"
        for statement in imports(path)
        if statement.for_types and statement.list_modules() == [name]
        for alias in statement.node.names
        if alias.asname and (module := f"{name}.{alias.name}") not in used
    }
    assert not needless


def test_imports_have_no_circle_and_stay_out_of_other_packages():
    """import-linter looks for circles among packages and in the two upper levels.

    Also imports in functions count, and modules that are used through their package, but not the modules of commands
    and proofs, which are chosen by `getattr`.

    A name that begins with `_` belongs to the package around it: no other package imports it.
    """
    names = _files_by_module()
    imports_by_module = {
        name: _own_imports(path, in_functions=False) | _own_imports(path, in_functions=True) | _imports_on_use(path)
        for name, path in names.items()
    }
    graphlib.TopologicalSorter({name: modules - {name} for name, modules in imports_by_module.items()}).prepare()
    for name, path in names.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        assert [*private_imports(nodes(path), package)] == [], path


def private_imports(tree_nodes, package):
    """Yield the imported names of ours with a part that begins with `_` and belongs to another package."""
    for node in tree_nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                outer, private, _ = re.split(r"(\._(?!_)|$)", f"{node.module}.{alias.name}", maxsplit=1)
                if private and outer.startswith("statecli") and not f"{package}.".startswith(f"{outer}."):
                    yield f"{node.module}.{alias.name}"


def test_model_state_imports_only_two_modules_of_statecli():
    """All other modules depend on model_state.py; model_state.py imports two modules, and they import nothing."""
    below = {"statecli.core.format_traits", "statecli.core.oddity_kind"}
    used = set(list_modules(PACKAGE / "core" / "model_state.py"))
    assert {module for module in used if module.startswith("statecli")} == below
    for name in ("format_traits", "oddity_kind"):
        modules = list_modules(PACKAGE / "core" / f"{name}.py")
        assert not [module for module in modules if module.startswith("statecli")]


def list_text_comparisons(tree_nodes, attribute, is_name):
    """Yield lines that compare the attribute with a text for which `is_name` holds, or look for such a prefix."""
    for node in tree_nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == attribute for side in sides):
                leaves = [leaf.value for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)]
                if any(isinstance(text, str) and is_name(text) for text in leaves):
                    yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of, texts = (
                node.func.value,
                [argument.value for argument in node.args if isinstance(argument, ast.Constant)],
            )
            if isinstance(of, ast.Attribute) and of.attr == attribute and any(map(is_name, texts)):
                yield node.lineno


def list_comparisons(tree_nodes, attribute, owners):
    """Yield lines that compare the attribute of a variable with one of the names, or of any value."""
    for node in tree_nodes:
        if isinstance(node, ast.Compare):
            sides = [leaf for side in (node.left, *node.comparators) for leaf in (side, *getattr(side, "elts", ()))]
            named = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == attribute]
            if any(owners is None or (isinstance(side.value, ast.Name) and side.value.id in owners) for side in named):
                yield node.lineno


def test_no_command_compares_the_name_of_a_format():
    """A command reads the traits of a format, filled by its reader: see core/format_traits.py. So does formats.read."""
    assert not [*list_comparisons(nodes(PACKAGE / "formats" / "__init__.py"), "name", ("format",))]
    for path in MODULES:
        if path.relative_to(PACKAGE).parts[0] != "formats":
            assert not [
                *list_text_comparisons(nodes(path), "format", bool),
                *list_comparisons(nodes(path), "format", None),
            ], path


def test_a_reader_does_not_ask_where_a_file_is():
    """Code that reads asks the store for the cost of a read: `reads_are_requests`, `is_trusted`, `prefetch`.

    Code about the text of a target asks for a URL: what is printed, resolved from a folder, or refused.
    """
    for path in MODULES:
        if path.relative_to(PACKAGE).parts[0] in ("formats", "file_scan", "pickle_scan", "values", "browse"):
            linenos = [
                node.lineno for node in nodes(path) if getattr(node, "attr", getattr(node, "id", "")) == "is_remote"
            ]
            assert not linenos, path


def test_no_module_compares_the_name_of_an_oddity():
    """Code decides by the kind of an oddity, because mypy reports a misspelt kind."""
    kinds = {kind.value for kind in OddityKind}

    def is_oddity(text):
        return text in kinds or re.fullmatch("[a-z]+(-[a-z]+)+", text)

    matched = PACKAGE / "core" / "finding.py"  # an oddity with the rule of a finding
    for path in MODULES:
        assert not [*list_text_comparisons(nodes(path), "name", is_oddity)], path
    assert [path for path in MODULES if [*list_comparisons(nodes(path), "name", ("note", "oddity"))]] == [matched]


def is_sentence(node):
    """Return True for a text that people read: the message of a finding, a note, or the text of an error."""
    if isinstance(node, ast.BoolOp):
        return any(map(is_sentence, node.values))
    if isinstance(node, ast.Attribute):
        return node.attr in ("message", "note", "help", "reason")
    is_str = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
    return is_str and [getattr(argument, "id", "") for argument in node.args] in (["error"], ["why"])


def list_sentence_comparisons(tree_nodes):
    """Yield lines that compare a sentence with anything but None, or look for a part of it."""
    for node in tree_nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_none = any(isinstance(side, ast.Constant) and side.value is None for side in sides)
            if any(map(is_sentence, sides)) and not is_none:
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_method = node.func.attr in ("startswith", "endswith") and is_sentence(node.func.value)
            is_pattern = node.func.attr in ("search", "match", "fullmatch") and any(map(is_sentence, node.args))
            if is_method or is_pattern:
                yield node.lineno


_FOREIGN = "the error comes from Python or a library, and only its text differs"
_ONCE = "a text that is shown already is not shown again"
#: Modules that compare a sentence, and why.
COMPARES_SENTENCES = {
    "commands/audit/references.py": "the damage of a tensor has the same text in the diff",
    "commands/verify/proofs/shard.py": _FOREIGN,
    "commands/verify/run.py": _ONCE,
    "commands/verify/save_roundtrip.py": _FOREIGN,
    "live/build.py": _ONCE,
    "live/fake_gpu_values.py": _FOREIGN,
    "report/__init__.py": _ONCE,
    "report/audit.py": _ONCE,
    "report/change_totals.py": "ZERO_BEFORE is a constant of the module that writes the reason",
    "report/verify.py": _ONCE,
    "values/require_numpy.py": _FOREIGN,
    "workers/executors/futures.py": _FOREIGN,
    "workers/pool.py": _FOREIGN,
}


def test_no_module_compares_a_sentence():
    """A sentence has names and paths of the user in it, and changes: code decides by a type, a field or an enum."""
    for path in MODULES:
        if path.relative_to(PACKAGE).as_posix() not in COMPARES_SENTENCES:
            assert not [*list_sentence_comparisons(nodes(path))], path


def test_searches_of_this_file_find_forbidden_code():
    """Both functions find a comparison, a set, a prefix, or a comparison with a constant or another state."""
    texts = ('s.format == "dcp"', '"gguf" in s.format', 's.format in ("a", "b")', 's.format.startswith("deepspeed")')
    assert all([*list_text_comparisons(ast.walk(ast.parse(text)), "format", bool)] for text in texts)
    assert not [*list_text_comparisons(ast.walk(ast.parse("a.format == b.format")), "format", bool)]
    for text in ("a.format == b.format", "FORMAT != a.format", "a.format in KNOWN", "(a.format, 1) == b"):
        assert [*list_comparisons(ast.walk(ast.parse(text)), "format", None)] == [1]
    for text in ("note.name not in NOTES", "(note.name, note.fqn) in reported", "NAME == note.name"):
        assert [*list_comparisons(ast.walk(ast.parse(text)), "name", ("note",))] == [1]
    assert not [*list_comparisons(ast.walk(ast.parse("row.name == a.name")), "name", ("note",))]
    for text in (
        'note.message.endswith(" of a.pt")',
        '"derived from" not in (row.note or "")',
        "row.note == OF_A_METRIC",
        '"cut" in str(why)',
        "PATTERN.search(str(error))",
    ):
        assert [*list_sentence_comparisons(ast.walk(ast.parse(text)))] == [1]
    assert not [*list_sentence_comparisons(ast.walk(ast.parse("row.note is None or str(error)")))]
    for text in ("from statecli.render import _ansi", "from statecli.render._ansi import paint"):
        assert [*private_imports(ast.walk(ast.parse(text)), "statecli.report")]
        assert not [*private_imports(ast.walk(ast.parse(text)), "statecli.render")]


def test_nothing_unpickles_or_evaluates():
    """No module imports pickle, marshal or zipfile, or calls eval, exec or torch.load.

    Two modules may. The proofs load files that they have just saved, of the user's own model. A worker of an engine
    unpickles messages of this command, as Dask, Ray and MPI do with all their messages. A chain of URLs
    (`zip://…::https://…`), whose archive fsspec would unpack with zipfile, is refused.
    """
    ours = {PACKAGE / "commands" / "verify" / "save_roundtrip.py", PACKAGE / "workers" / "executors" / "batch.py"}
    importing, calls_of = set(), {}
    for path in MODULES:
        named = {module.partition(".")[0] for module in list_modules(path)}
        if named & {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "zipfile"}:
            importing.add(path)
        called = {dotted_name(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
        if refused := called & {"eval", "exec", "torch.load", "torch.jit.load"}:
            calls_of[path] = refused
    assert importing == ours
    assert calls_of == {PACKAGE / "commands" / "verify" / "save_roundtrip.py": {"torch.load"}}


def test_state_errors_are_caught_only_in_listed_modules():
    """StateError becomes text in one place, and errors of Python in one place. An error about one pair of a diff, one
    target of an audit or one checkpoint of a run becomes its result, and git gets the error as a line. So does the
    screen of `browse`, which stays open.
    """
    places = """
        api/errors api/live_targets browse/app browse/peek callbacks/training_check
        cli/process_exit commands/audit/run commands/diff/renames commands/log/checkpoints commands/log/follow
        commands/bisect/run commands/watch/run requests/git_driver requests/git_textconv
        values/pair_plan values/recorded_checksums values/histogram values/audit_facts values/copy_evidence
        values/ratios values/stats workers/pool workers/task
    """
    keeps = {PACKAGE / f"{name}.py" for name in places.split()}
    catching_paths = set()
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                is_passed_on = isinstance(node.body[0], ast.Raise) and node.body[0].exc is None
                if "StateError" in ast.unparse(node.type) and not is_passed_on:
                    catching_paths.add(path)
    assert catching_paths == keeps


def test_every_error_is_in_the_drawn_tree():
    """The docstring of errors.py draws each class."""
    from statecli.core import errors

    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, StateError)]
    assert all(kind.__name__ in errors.__doc__ for kind in kinds)
    assert len(kinds) >= 6


def test_no_function_is_over_sixty_lines():
    """A function is read in one look. Docstrings of the Python API do not count: they describe each argument."""
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                is_api = path in (PACKAGE / "__init__.py", PACKAGE / "testing.py") and ast.get_docstring(node)
                documented = node.body[0].end_lineno - node.body[0].lineno if is_api else 0
                assert node.end_lineno - node.lineno - documented < 60, f"{path}:{node.lineno} {node.name}"


def test_everything_public_has_a_docstring():
    """Modules, classes and functions without an underscore are described."""
    for path in MODULES:
        tree = parse(path)
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                exempt = node.name in ("write", "sniff") or path.name == "opcodes.py"  # handlers, named by opcode
                assert exempt or ast.get_docstring(node), f"{path}:{node.lineno} {node.name}"


@pytest.mark.parametrize("command", ["inspect", "diff", "verify", "audit"])
def test_every_option_of_the_contract_is_there(command):
    """The shared options exist on each command with a target."""
    shared = {"output_format", "output", "include", "exclude", "kind", "quiet", "verbose", "color", "debug"}
    assert shared | {"no_progress"} <= set(COMMANDS[command].__struct_fields__)


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_in_the_recipes_exists(document):
    """Each path in backticks exists; NAME, COMMAND and x are placeholders."""
    root = PACKAGE.parent
    text = (root / document).read_text()
    paths = [
        match
        for match in re.findall(r"`([\w/.]+(?:\.py|/))`", text)
        if not re.search(r"NAME|COMMAND|fuzz/found", match)
    ]
    assert paths
    for path in paths:
        assert (root / path).exists() or (PACKAGE / path).exists(), path


def test_every_module_that_a_docstring_names_exists():
    """The docstring of a module names the modules around it, and no renamed module."""
    others = {"net.py", "setup.py"}  # examples, and the build of the package
    modules = {path.name for path in MODULES}
    for path in MODULES:
        text = ast.get_docstring(parse(path)) or ""
        assert {*re.findall(r"`(\w+\.py)`", text)} - others <= modules, path


def skip_reasons(tree):
    """The reason of each skip up to a colon, or the package of an importorskip without a reason."""
    for node in ast.walk(tree):
        called = dotted_name(node.func) if isinstance(node, ast.Call) else ""
        if called in ("pytest.mark.skip", "pytest.mark.skipif", "pytest.importorskip", "pytest.skip"):
            reasons = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            text = (reasons or node.args)[0]
            text = text.values[0] if isinstance(text, ast.JoinedStr) else text
            assert isinstance(text, ast.Constant), f"the reason does not begin with a text: {ast.unparse(node)}"
            is_package = called == "pytest.importorskip" and not reasons
            yield text.value.partition("." if is_package else ":")[0]


def test_every_skip_has_a_row():
    """The table of CONTRIBUTING.md has each reason and each package of a skip in the tests, and no other."""
    root = PACKAGE.parent
    table = (root / "CONTRIBUTING.md").read_text().partition("## Skipped tests")[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [reason for cell in first_cells for reason in re.findall(r"`([^`]+)`", cell)]
    texts = [path.read_text() for path in (root / "tests").rglob("*.py")]
    trees = [ast.parse(text) for text in texts if re.search(r"\.(?:importor)?skip(?:if)?\(", text)]
    assert sorted(listed) == sorted({reason for tree in trees for reason in skip_reasons(tree)})


def test_the_reasons_of_skips_are_found():
    """Reasons are found in a mark, a call, an f-string and an import."""
    text = """
pytest.mark.skipif(True, reason="no git: here")
pytest.skip(f"no file: {path}")
pytest.importorskip("torch.masked")
pytest.importorskip("torch", reason="needs torch 2.8: archives")
"""
    assert [*skip_reasons(ast.parse(text))] == ["no git", "no file", "torch", "needs torch 2.8"]


#: `A` and to `B`, in the steps of a recipe.
_NAMES = r"((?:`\w+`(?:,? (?:and|or) (?:to )?|, )?)+)"


def recipes():
    """Return the text of each recipe of CONTRIBUTING.md, in one line."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    section = text.partition("## How to add something")[2].partition("\n## ")[0]
    return [" ".join(recipe.split()) for recipe in re.split(r"\n\n(?=An? [^\n]*:\n)", section)[1:]]


def list_claims(recipe):
    """Yield each path and name for which a recipe states that the file defines the name."""
    for match in re.finditer(rf"{_NAMES} in `([\w/.]+)`", recipe):
        yield from ((match[2], name) for name in re.findall(r"\w+", match[1]) if name not in ("and", "or", "to"))
    for match in re.finditer(rf"`(\w+/[\w/.]+)` with {_NAMES}", recipe):
        yield from ((match[1], name) for name in re.findall(r"`(\w+)`", match[2]))
    for match in re.finditer(rf"{_NAMES} there", recipe):
        path = re.findall(r"`(\w+/[\w/.]+)`", recipe[: match.start()])[-1]
        yield from ((path, name) for name in re.findall(r"`(\w+)`", match[1]))


def definitions(path):
    """Yield classes, functions, constants and fields defined in a file; imports do not count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.partition(":")[0])
def test_each_step_of_a_recipe_is_true(recipe):
    """Each file exists, NAME stands for at least one file, and the file defines the stated name; other names exist."""
    for path in re.findall(r"`(\w+/[\w/.]+)`", recipe):
        pattern = re.sub("NAME|COMMAND|PART", "*", path)
        assert [*PACKAGE.parent.glob(pattern), *PACKAGE.glob(pattern)], path
    bound = {*list_claims(recipe)}
    for path, name in bound:
        files = [*PACKAGE.parent.glob(re.sub("NAME|COMMAND", "*", path))]
        assert any(name in definitions(file) for file in files), (path, name)
    names = {*re.findall(r"`([A-Za-z_]+)`", recipe)} - {name for _, name in bound} - {"NAME", "sh"}
    code = "\n".join(path.read_text() for path in MODULES)
    for name in names:
        assert re.search(rf"^ *(?:class |def )?{name}\b", code, re.MULTILINE), name


def test_the_claims_of_a_recipe_are_found():
    """Before the file, after the file, and of the file before; several at once."""
    recipe = "Write `a/x.py` with `N`, `f` and `g`. Add `A` or `B` in `a/b.py`, to `C` in `d.py`, and to `D` there."
    assert {*list_claims(recipe)} == {
        *(("a/x.py", name) for name in "Nfg"),
        *(("a/b.py", name) for name in "AB"),
        ("d.py", "C"),
        ("a/b.py", "D"),
    }
    all_claims = {claim for recipe in recipes() for claim in list_claims(recipe)}
    assert ("statecli/core/proof_names.py", "Name") in all_claims
    assert ("statecli/formats/NAME.py", "sniff") in all_claims
    assert ("statecli/requests/options.py", "COMMANDS") in all_claims
    assert "Name" not in definitions(PACKAGE / "commands" / "verify" / "result.py")


def test_the_help_of_schema_names_each_command_with_a_document():
    """The table of options is below the documents, and cannot ask them."""
    help = next(row.help for row in parameters_of(COMMANDS["schema"]) if row.field == "command")
    listed = re.split(", | or ", help.partition(": ")[2].removesuffix("."))
    assert sorted(listed) == sorted(DOCUMENTS)


def test_every_name_in_the_list_of_mutants_exists():
    """`make mutants` does not run for each change: a renamed function or test must be renamed in the list too."""
    root = PACKAGE.parent
    text = (root / "mutation" / "modules.toml").read_text()
    functions = re.findall(r'^\[\[equivalent\."(.+)"\]\]\nfunction = "(?:\w+\.)?(\w+)"', text, re.MULTILINE)
    tests = re.findall(r'"(tests/[\w/]+\.py)(?:::(\w+))?', text)
    assert len(functions) == text.count("function = ")
    for module, function in functions:
        assert f"def {function}(" in (PACKAGE / f"{module}.py").read_text(), f"{module}: {function}"
    for path, test in tests:
        assert f"def {test}" in (root / path).read_text(), f"{path}: {test}"
