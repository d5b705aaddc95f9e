"""Import the module named by a `ModelSpec` and look up its attribute, without calling anything.

A file is imported under a name of its own, so that two files called net.py can be open at once. A file with relative
imports is imported as a module of its package. Naming `net.py:Net` runs the code at the user's request.
"""

from __future__ import annotations

import ast
import difflib
import glob
import importlib
import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.core.errors import ModelError
from statecli.core.installed_package import MODEL_LIBRARIES, install_module
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.similar_paths import suggest_similar_paths
from statecli.core.target_suggestions import ModuleName, find_example
from statecli.core.units import join_names
from statecli.live import model_registries, object_scope, search_path
from statecli.live.library_output import hide_library_lines
from statecli.live.model_errors import report_as_model_error
from statecli.live.module_names import list_names
from statecli.live.spec import ModelSpec
from statecli.live.suggested_arguments import is_module_class
from statecli.live.suggested_target import Advice, advise_line
from statecli.live.user_code import protect_process

#: Least similarity of a suggested name, from 0 to 1. 0.65 excludes timeit (0.6) as a suggestion for timm.
_SIMILARITY = 0.65
#: Least similarity of a suggested module that has the named class: nn (0.5) is suggested for nm.
_SIMILARITY_WITH_CLASS = 0.5
#: Least similarity of suggested names with an equal first word: BertForQA and BertForQuestionAnswering.
_SIMILARITY_OF_FAMILY = 0.4
#: Largest number of names in an error.
_MAX_NAMES = 8
#: First word of a class name: `Llama` of `LlamaAttention`. A library may load the module of a class only when another
#: class of the module is named.
_FIRST_WORD = compile_on_use(r"[A-Z]+[a-z0-9]+")
#: A name of initials (`PSNR`), and the letters between the initials of a class name.
_INITIALS = compile_on_use(r"[A-Z]{2,}")
_NOT_INITIALS = compile_on_use(r"[^A-Z]+")
#: A class statement at the start of a line.
_CLASS = compile_on_use(r"^class (\w+)", re.MULTILINE)
_module_numbers = itertools.count()
#: Names of the modules that a spec's file imported from the file's own folder, by folder.
_sibling_modules: dict[str, set[str]] = {}


class LoadedObject(msgspec.Struct, frozen=True):
    """The object named by a model spec, and the module of the spec."""

    value: Any
    module: types.ModuleType


def load_with_module(spec: ModelSpec, *, is_model: bool = True) -> LoadedObject:
    """Import the object named by `spec`, without calling it. Raises ModelError for an error of the user's code.

    `is_model`: False for a function that returns inputs; the error for a wrong name then suggests functions.
    """
    suggest = _suggest_models if is_model else _suggest_functions
    with protect_process(spec), report_as_model_error(spec, "importing it"):
        module = _import_file(spec) if spec.is_file else _import_dotted(spec)
        builder = None if spec.is_file else model_registries.find_builder(spec, module)
        return LoadedObject(_get_attribute(spec, module, suggest) if builder is None else builder, module)


def _import_file(spec: ModelSpec) -> types.ModuleType:
    path = os.path.abspath(spec.module)
    if not os.path.isfile(path):
        problem = "it is a folder" if os.path.isdir(path) else f"no such file{_suggest_files(spec.module)}"
        raise ModelError(f"{spec.module}: {problem}")
    folder, stem = os.path.split(path[: -len(".py")])
    level = _find_relative_level(path)
    if level:
        return _import_in_package(spec, path, level)
    # A unique name, so that two files called net.py can be open at once, and neither shadows an installed package.
    name = f"_statecli_{next(_module_numbers)}_{stem}"
    loader_spec = importlib.util.spec_from_file_location(name, path)
    if loader_spec is None or loader_spec.loader is None:
        raise ModelError(f"{spec.module}: Python cannot import this file as a module; give it a name that ends in .py")
    module = importlib.util.module_from_spec(loader_spec)
    sys.modules[name] = module  # dataclasses and pickle look the module of a class up there
    with _record_siblings(folder):
        try:
            loader_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _find_relative_level(path: str) -> int:
    """Return the largest number of dots in the relative imports of a file, or 0 if it has none."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return 0  # the import reports the error
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


def _import_in_package(spec: ModelSpec, path: str, level: int) -> types.ModuleType:
    """Import a file that has relative imports as a module of its topmost package."""
    top = find_import_folder(path, level)
    if top is None:
        raise ModelError(f"{spec.module}: a relative import points above the top folder")
    names = os.path.relpath(path, top)[: -len(".py")].split(os.sep)
    module_name = ".".join(names)
    package = os.path.join(top, names[0])
    sys.path.insert(0, top)
    with _record_siblings(package):
        try:
            module = importlib.import_module(module_name)
        finally:
            with suppress(ValueError):
                sys.path.remove(top)
    if os.path.abspath(module.__file__ or "") != path:
        raise ModelError(
            f"{spec.module}: imports from its package {names[0]}, but another package of this name is already loaded"
        )
    return module


def find_import_folder(path: str, level: int | None = None) -> str | None:
    """Return the folder from which a file is imported: above its topmost package, or else the file's own folder.

    `level`: the largest number of dots in its relative imports; None to read the file. Returns None if a relative
    import points above the top folder.
    """
    level = _find_relative_level(path) if level is None else level
    top, depth = os.path.dirname(path), 1
    while level and (depth <= level or os.path.isfile(os.path.join(top, "__init__.py"))):
        top, folder = os.path.split(top)
        if not folder:
            return None
        depth += 1
    return top


@contextmanager
def _record_siblings(folder: str) -> Iterator[None]:
    """Record the modules that the block imports from `folder`. Forget modules imported earlier from other folders.

    `a/net.py` and `b/net.py` may both `import layers`.
    """
    for previous_folder in _sibling_modules.keys() - {folder}:
        for name in _sibling_modules.pop(previous_folder):
            sys.modules.pop(name, None)
    before = set(sys.modules)
    try:
        yield
    finally:
        siblings = _sibling_modules.setdefault(folder, set())
        for name in sys.modules.keys() - before:
            module = sys.modules.get(name)
            path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
            if isinstance(path, str) and (os.path.abspath(path) + os.sep).startswith(folder + os.sep):
                siblings.add(name)


def _suggest_files(path: str) -> str:
    suggestion = suggest_similar_paths(path, ".py")
    if suggestion:
        return f"; {suggestion}"
    folder = os.path.dirname(path)
    return f" (the folder {folder} does not exist)" if folder and not os.path.isdir(folder) else ""


def _import_dotted(spec: ModelSpec) -> types.ModuleType:
    try:
        return importlib.import_module(spec.module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if spec.module != missing and not spec.module.startswith(missing + "."):
            raise
        problem = f"{spec.text}: no module is named {missing}"
        raise _suggest_modules(spec, missing).build_error(problem) from error


def _suggest_modules(spec: ModelSpec, missing: str) -> Advice:
    parent, _, name = missing.rpartition(".")
    path = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else None
    names = [module.name for module in pkgutil.iter_modules(path)]
    if os.path.isfile(f"{missing}.py"):
        return Advice(f"to import the file, write {missing}.py:{spec.attribute}")
    if missing in MODEL_LIBRARIES:
        return Advice(f"install the package: {install_module(missing)}")
    top = spec.attribute.partition(".")[0]
    with_class = [
        module_name for module_name in names if parent and hasattr(sys.modules.get(f"{parent}.{module_name}"), top)
    ]
    similar_names = difflib.get_close_matches(name, with_class, 1, _SIMILARITY_WITH_CLASS) or _find_near(name, names)
    if similar_names:
        module = ".".join(filter(None, [parent, similar_names[0]])) + spec.module[len(missing) :]
        line = object_scope.spell(replace(spec, module=module))
        return advise_line(line, question=f"did you mean {' or '.join(similar_names)}?")
    return Advice(f"install the package of {missing}, or correct the name")


def _find_near(name: str, names: list[str]) -> list[str]:
    equal_names = [candidate for candidate in names if candidate.lower() == name.lower()]
    return equal_names or difflib.get_close_matches(name, names, 3, _SIMILARITY)


def _find_near_class(name: str, names: list[str]) -> list[str]:
    """Return class names that `name` may stand for: with equal initials, a similar spelling or the same beginning.

    For example PeakSignalNoiseRatio for PSNR, GPT2Model for gpt2.
    """
    similar_names = _find_initials(name, names) or _find_near(name, names)
    if similar_names or len(name) < 2:
        return similar_names
    longer_names = [
        candidate for candidate in names if candidate[0].isupper() and candidate.lower().startswith(name.lower())
    ]
    models = [candidate for candidate in longer_names if candidate.lower() == f"{name}model".lower()]
    return models or sorted(longer_names, key=lambda candidate: (len(candidate), candidate))[:3]


def _find_initials(name: str, names: Iterable[str]) -> list[str]:
    """Return the classes with these initials: PeakSignalNoiseRatio for PSNR."""
    if not _INITIALS.fullmatch(name):
        return []
    return [
        candidate for candidate in names if _NOT_INITIALS.sub("", candidate) == name and candidate.upper() != candidate
    ][:3]


class _Hint(msgspec.Struct, frozen=True):
    """Text to append to an error, and the suggested name `near` in `module` (None: in the inspected object)."""

    text: str
    near: str | None = None
    module: str | None = None


def _get_attribute(spec: ModelSpec, module: types.ModuleType, suggest: Callable[[Any, str], _Hint]) -> Any:
    obj: Any = module
    names_done: list[str] = []
    names = spec.attribute.split(".")
    for name in names:
        try:
            obj = _get_member(obj, name)
        except AttributeError as error:
            owner_name = (
                ".".join([spec.module, *names_done]) if not spec.is_file else ":".join([spec.module, *names_done])
            )
            # UNet for nets.UNet is tried before names similar to nets.
            last = _find_named_class(obj, names[-1]) if name != names[-1] else None
            spec, hint = (spec, suggest(obj, name)) if last is None else (replace(spec, attribute=names[-1]), last)
            line = _write_near(spec, names_done, obj, hint)
            problem = f"{owner_name} has no {name}{hint.text}"
            raise (advise_line(line).build_error(problem) if line else ModelError(problem)) from error
        names_done.append(name)
    return obj


def has_attribute(name: ModuleName) -> bool:
    """Return True if the module can be imported and has the attribute. Only installed modules are imported."""
    with hide_library_lines(), search_path.use_installed_only():
        obj: Any = _import_quietly(name.module)
        with suppress(AttributeError):
            for part in name.attribute.split("."):
                obj = _get_member(obj, part)
            return True
    return False


def _get_member(obj: Any, name: str) -> Any:
    """Return an attribute, or import the submodule of this name. Raises AttributeError if both are missing.

    A library may build a deprecated module only when the module is imported by its full name.
    """
    try:
        return getattr(obj, name)
    except AttributeError:
        is_package = isinstance(obj, types.ModuleType) and hasattr(obj, "__path__")
        module = _import_quietly(f"{obj.__name__}.{name}") if is_package else None
        if module is None:
            raise
        return module


def _find_named_class(module: object, name: str) -> _Hint | None:
    """Suggest the model class `name` in a package, or return None if there is no such class."""
    if not isinstance(module, types.ModuleType):
        return None
    # A library may load the module of a class only when the class is named.
    own_module = module.__name__ if is_module_class(getattr(module, name, None)) else None
    owner = own_module or _map_model_classes(module).get(name)
    return _Hint("", name, owner) if owner else _find_moved_class(module, name)


def _write_near(spec: ModelSpec, owners: list[str], obj: object, hint: _Hint) -> str:
    """Return the model spec with the suggested name for the wrong name, or "" if the suggestion is not callable."""
    if hint.near is None:
        return ""
    owner = obj if hint.module is None else sys.modules[hint.module]
    value, names_after = getattr(owner, hint.near, None), spec.attribute.split(".")[len(owners) + 1 :]
    if not callable(value):
        return ""
    parts = [hint.near, *names_after] if hint.module else [*owners, hint.near, *names_after]
    return object_scope.spell(replace(spec, module=hint.module or spec.module, attribute=".".join(parts)))


def _find_inner_class(package: object, name: str, *, is_similar: bool) -> _Hint | None:
    """Suggest a class in the package's imported modules whose name equals or resembles `name`, or return None."""
    modules = _map_model_classes(package)
    if name in modules:
        return _Hint("", name, modules[name])
    similar_names = _find_near_class(name, list(modules)) if is_similar else _find_initials(name, modules)
    return (
        _Hint(f"; did you mean {similar_names[0]}?", similar_names[0], modules[similar_names[0]])
        if similar_names
        else None
    )


def _find_moved_class(module: object, name: str) -> _Hint | None:
    """Suggest the model class `name` in another module of the package, or return None if no module has this class."""
    package = sys.modules.get(getattr(module, "__name__", "").partition(".")[0])
    if package is None or package is module or not hasattr(package, "__path__"):
        return None
    owner = _map_model_classes(package).get(name)
    hint = _Hint("", name, owner) if owner else _find_unloaded_class(package, name)
    return hint if hint is not None and hint.near == name else None


def _find_unloaded_class(package: object, name: str) -> _Hint | None:
    """Suggest a class that has the name or the initials `name`, in a module that is not imported yet."""
    start = f"{getattr(package, '__name__', '')}."
    for folder in getattr(package, "__path__", ()):
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "**", "[!_]*.py"), recursive=True)):
            with open(path, encoding="utf-8", errors="replace") as file:
                names = _CLASS.findall(file.read())
            matching_names = [name] if name in names else _find_initials(name, names)
            parts = os.path.relpath(path, folder).removesuffix(".py").split(os.sep)
            module = _import_quietly(start + ".".join(parts)) if matching_names else None
            if module is not None and is_module_class(getattr(module, matching_names[0], None)):
                return _Hint(
                    "" if matching_names[0] == name else f"; did you mean {matching_names[0]}?",
                    matching_names[0],
                    module.__name__,
                )
    return None


def _import_quietly(name: str) -> types.ModuleType | None:
    """Import and return a module of a library, or return None if the import fails."""
    with suppress(Exception):  # any error may be ignored, because the user named another class of the library
        return importlib.import_module(name)
    return None


def _map_model_classes(package: object) -> dict[str, str]:
    """Map each model class in a package to an imported module with this class: the module with the fewest dots."""
    start = f"{getattr(package, '__name__', '')}."
    keys = sorted((key for key in list(sys.modules) if key.startswith(start)), key=lambda key: (key.count("."), key))
    modules: dict[str, str] = {}
    for key in keys:
        members = vars(sys.modules[key]) if isinstance(sys.modules[key], types.ModuleType) else {}
        for name, value in members.items():
            if is_module_class(value) and not name.startswith("_"):
                modules.setdefault(name, key)
    return modules


def _suggest_functions(obj: object, name: str) -> _Hint:
    """Suggest functions with a similar name, or else list the functions that the module itself defines."""
    functions_by_name = {name_: value for name_, value in vars(obj).items() if inspect.isfunction(value)}
    similar_names = _find_near(name, list(functions_by_name))
    if similar_names:
        return _Hint(f"; did you mean {' or '.join(similar_names)}?")
    functions = [
        name_ for name_, value in functions_by_name.items() if value.__module__ == getattr(obj, "__name__", None)
    ]
    if not functions:
        return _Hint("; the file defines no function")
    are = "its functions are" if len(functions) > 1 else "its only function is"
    return _Hint(f"; {are} {join_names(functions, _MAX_NAMES)}")


def _suggest_models(obj: object, name: str) -> _Hint:
    public_names = [candidate for candidate in list_names(obj) if not candidate.startswith("__")]
    # Not by getattr, because getattr loads each module of transformers.
    named_modules = [candidate for candidate in public_names if isinstance(vars(obj).get(candidate), types.ModuleType)]
    similar_names = _find_near_class(name, [candidate for candidate in public_names if candidate not in named_modules])
    family = [
        candidate for candidate in public_names if (word := _FIRST_WORD.match(name)) and candidate.startswith(word[0])
    ]
    # Models come before configurations and tokenizers, whose modules have no layers.
    family.sort(key=lambda candidate: (not candidate.endswith("Model"), "For" not in candidate, len(candidate)))
    defining_modules = [
        getattr(getattr(obj, candidate, None), "__module__", None) or ""
        for candidate in (*similar_names, *family[:_MAX_NAMES])
    ]
    inner_module = next((key for key in defining_modules if hasattr(sys.modules.get(key), name)), None)
    if inner_module is not None:  # BertEncoder, in the module of BertModel
        return _Hint("", name, inner_module)
    models = [n for n in public_names if is_module_class(vars(obj).get(n))]
    inner_hint = _find_inner_class(obj, name, is_similar=not models)
    if inner_hint is not None and (inner_hint.near == name or not similar_names):
        return inner_hint
    moved_hint = _find_moved_class(obj, name)
    if moved_hint is not None:
        return moved_hint
    similar_names = similar_names or _find_near(name, named_modules)  # nn for nm, in torch:nm.Linear
    similar_names = similar_names or difflib.get_close_matches(name, family, 3, _SIMILARITY_OF_FAMILY)
    if similar_names:
        return _Hint(f"; did you mean {' or '.join(similar_names)}?", similar_names[0])
    unloaded_hint = _find_unloaded_class(obj, name)
    if unloaded_hint is not None:
        return unloaded_hint
    example = find_example(getattr(obj, "__name__", ""))
    end = f"; for example, write {example}" if example else ""
    if not models:
        return _Hint(f"; no model class is defined there{end}")
    classes = "its model classes are" if len(models) > 1 else "its only model class is"
    return _Hint(f"; {classes} {join_names(models, _MAX_NAMES)}{end}")
