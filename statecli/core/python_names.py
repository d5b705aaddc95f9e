"""Names that a Python file defines, by its syntax tree: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def list_model_classes(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each module class of a file, and the arguments without a default of its own `__init__`."""
    modules: set[str] = set()
    for node in _parse(path):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if any(base in modules or base.endswith(("Module", "Model")) for base in bases):
                modules.add(node.name)
                yield node.name, _list_init_arguments(node)


def list_classes(path: str) -> Iterator[str]:
    """Yield the name of each class of a file with a base class, which may be a module that another file defines."""
    yield from (node.name for node in _parse(path) if isinstance(node, ast.ClassDef) and node.bases)


def list_factories(path: str) -> Iterator[str]:
    """Yield the name of each public function of a file that can be called without arguments."""
    functions = (node for node in _parse(path) if isinstance(node, ast.FunctionDef))
    for function in functions:
        if not function.name.startswith("_") and not _list_required_arguments(function.args):
            yield function.name


def _parse(path: str) -> list[ast.stmt]:
    """Return the statements of a file; none if it is not Python."""
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read()).body
    except (OSError, ValueError, SyntaxError):
        return []


def _list_init_arguments(node: ast.ClassDef) -> list[str]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return _list_required_arguments(part.args, skip=1)
    return []


def _list_required_arguments(arguments: ast.arguments, skip: int = 0) -> list[str]:
    """Return the arguments without a default, after the first `skip`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[skip : len(positional) - len(arguments.defaults)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    keywords = [argument for argument, default in pairs if not default]
    return [argument.arg for argument in (*required, *keywords)]
