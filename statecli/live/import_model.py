"""Import the module named by a `ModelSpec` and look up its attribute, without calling anything.

A file is imported under a name of its own, so that two files called net.py can be open at once. A file with relative
imports is imported as a module of its package. Naming `net.py:Net` runs the code at the user's request.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import itertools
import os
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli.core.errors import ModelError
from statecli.core.installed_package import MODEL_LIBRARIES, install_module
from statecli.core.similar_paths import suggest_similar_paths
from statecli.core.target_suggestions import ModuleName, find_example
from statecli.core.units import join_names
from statecli.live import model_registries, object_scope, search_path
from statecli.live.library_output import hide_library_lines
from statecli.live.model_errors import report_as_model_error
from statecli.live.module_names import list_names
from statecli.live.spec import ModelSpec
from statecli.live.suggested_arguments import is_module_class
from statecli.live.user_code import protect_process

#: Least similarity of a suggested name, from 0 to 1. 0.65 excludes timeit (0.6) as a suggestion for timm.
_SIMILARITY = 0.65
#: Largest number of names in an error.
_MAX_NAMES = 8
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
        raise ModelError(problem, advice=_suggest_modules(spec, missing)) from error


def _suggest_modules(spec: ModelSpec, missing: str) -> str:
    parent, _, name = missing.rpartition(".")
    path = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else None
    if os.path.isfile(f"{missing}.py"):
        return f"to import the file, write {missing}.py:{spec.attribute}"
    if missing in MODEL_LIBRARIES:
        return f"install the package: {install_module(missing)}"
    similar_names = _find_near(name, [module.name for module in pkgutil.iter_modules(path)])
    if similar_names:
        module = ".".join(filter(None, [parent, similar_names[0]])) + spec.module[len(missing) :]
        line = object_scope.spell(replace(spec, module=module))
        return f"did you mean {' or '.join(similar_names)}? write {line}"
    return f"install the package of {missing}, or correct the name"


def _find_near(name: str, names: list[str]) -> list[str]:
    """Return names that are equal but for the case, or up to three that are similar, or that begin with the name."""
    equal_names = [candidate for candidate in names if candidate.lower() == name.lower()]
    similar_names = equal_names or difflib.get_close_matches(name, names, 3, _SIMILARITY)
    longer_names = [candidate for candidate in names if candidate.lower().startswith(name.lower())]
    return similar_names or sorted(longer_names, key=len)[:3]


def _get_attribute(spec: ModelSpec, module: types.ModuleType, suggest: Callable[[Any, str], str]) -> Any:
    obj: Any = module
    names_done: list[str] = []
    for name in spec.attribute.split("."):
        try:
            obj = _get_member(obj, name)
        except AttributeError as error:
            owner_name = (":" if spec.is_file else ".").join([spec.module, *names_done])
            raise ModelError(f"{owner_name} has no {name}", advice=suggest(obj, name)) from error
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


def _suggest_functions(obj: object, name: str) -> str:
    """Suggest functions with a similar name, or else list the functions that the module itself defines."""
    functions_by_name = {name_: value for name_, value in vars(obj).items() if inspect.isfunction(value)}
    similar_names = _find_near(name, list(functions_by_name))
    if similar_names:
        return f"did you mean {' or '.join(similar_names)}?"
    functions = [
        name_ for name_, value in functions_by_name.items() if value.__module__ == getattr(obj, "__name__", None)
    ]
    if not functions:
        return "the file defines no function"
    are = "its functions are" if len(functions) > 1 else "its only function is"
    return f"{are} {join_names(functions, _MAX_NAMES)}"


def _suggest_models(obj: object, name: str) -> str:
    """Suggest the class of this name in another module of the package, or classes with a similar name."""
    package = sys.modules.get(getattr(obj, "__name__", "").partition(".")[0])
    owner = _map_model_classes(package).get(name)
    if owner is not None:
        return f"did you mean {owner}:{name}?"
    similar_names = _find_near(name, [candidate for candidate in list_names(obj) if not candidate.startswith("__")])
    return f"did you mean {' or '.join(similar_names)}?" if similar_names else describe_models(obj)


def describe_models(obj: object) -> str:
    """List the model classes of a module or a class, with an example of a model in its library."""
    attributes = getattr(obj, "__dict__", {})  # getattr(obj, name) would load each module of transformers
    models = [name for name in list_names(obj) if name[0] != "_" and is_module_class(attributes.get(name))]
    example = find_example(getattr(obj, "__name__", ""))
    example_text = f"for example, write {example}" if example else ""
    if not models:  # a library may load its classes later
        return example_text or "no model class is defined there"
    classes = "its model classes are" if len(models) > 1 else "its only model class is"
    return "; ".join(filter(None, [f"{classes} {join_names(models, _MAX_NAMES)}", example_text]))
