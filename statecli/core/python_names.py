"""Names defined by a Python file, from its syntax tree: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple


class ModelClass(NamedTuple):
    """Module class of a file, and the required arguments of its own `__init__`.

    `takes_object`: an argument is an object that a command line cannot spell, like a configuration.
    """

    name: str
    required: tuple[str, ...]
    takes_object: bool


def list_model_classes(path: str) -> Iterator[ModelClass]:
    """Yield each module class of a file."""
    modules: set[str] = set()
    for node in _parse(path):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if any(base in modules or base.endswith(("Module", "Model")) for base in bases):
                modules.add(node.name)
                required = _list_init_arguments(node)
                takes_object = any(takes_configuration(arg.arg, _format_annotation(arg)) for arg in required)
                yield ModelClass(node.name, tuple(arg.arg for arg in required), takes_object)


def list_model_factories(path: str) -> Iterator[str]:
    """Yield the name of each function of `list_factories` that returns an instance: `return Net(…)`."""
    functions = {node.name: node for node in _parse(path) if isinstance(node, ast.FunctionDef)}
    yield from (name for name in list_factories(path) if _returns_instance(functions[name]))


def list_definitions(path: str) -> Iterator[str]:
    """Yield the name of each class and function of a file."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    yield from (node.name for node in _parse(path) if isinstance(node, kinds))


def takes_configuration(name: str, annotation: str) -> bool:
    """Return True if an argument takes a configuration, an object that no command line can spell."""
    return name in ("config", "cfg") or annotation.endswith("Config")


def list_classes(path: str) -> Iterator[str]:
    """Yield the name of each class of a file with a base class, possibly a module defined by another file."""
    yield from (node.name for node in _parse(path) if isinstance(node, ast.ClassDef) and node.bases)


def list_factories(path: str) -> Iterator[str]:
    """Yield the name of each public function of a file without required arguments."""
    functions = (node for node in _parse(path) if isinstance(node, ast.FunctionDef))
    for function in functions:
        if not function.name.startswith("_") and not _list_required_arguments(function.args):
            yield function.name


def _parse(path: str) -> list[ast.stmt]:
    """Return the statements of a file; none for a file not in Python."""
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read()).body
    except (OSError, ValueError, SyntaxError):
        return []


def _format_annotation(argument: ast.arg) -> str:
    return ast.unparse(argument.annotation).strip("'") if argument.annotation is not None else ""


def _returns_instance(function: ast.FunctionDef) -> bool:
    values = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    names = (ast.unparse(value.func).rpartition(".")[2] for value in values if isinstance(value, ast.Call))
    return any(name[:1].isupper() for name in names)


def _list_init_arguments(node: ast.ClassDef) -> list[ast.arg]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return _list_required_arguments(part.args, skip=1)
    return []


def _list_required_arguments(arguments: ast.arguments, skip: int = 0) -> list[ast.arg]:
    """Return the arguments without a default, after the first `skip`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[skip : len(positional) - len(arguments.defaults)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    keywords = [argument for argument, default in pairs if not default]
    return [*required, *keywords]
