"""Read the classes of a file from its syntax tree: bases, constructors and code."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

#: Largest number of base classes searched for a class, because odd code could have thousands.
MAX_ANCESTORS = 50


def find_init(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> ast.FunctionDef | None:
    """Return the `__init__` of a class, or of its nearest base class in the file."""
    parts = (part for ancestor in list_ancestors(node, classes) for part in ancestor.body)
    return next((part for part in parts if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)


def list_ancestors(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and its base classes in the file, depth first, in the order of the bases."""
    ancestors: dict[str, ast.ClassDef] = {}
    pending = [node]
    while pending and len(ancestors) < MAX_ANCESTORS:
        ancestor = pending.pop()
        if ancestor.name not in ancestors:
            ancestors[ancestor.name] = ancestor
            pending += [classes[base] for base in reversed(_list_bases(ancestor, classes))]
    return list(ancestors.values())


def _list_bases(node: ast.ClassDef, classes: Iterable[str]) -> list[str]:
    return [base for base in map(write_code, node.bases) if base in classes]


def write_code(node: ast.AST) -> str:
    """Return the source code of a syntax node, or "" if the node is nested too deeply for `ast.unparse`."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return ""
