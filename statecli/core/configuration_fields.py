"""Find the class that fits an argument such as `cfg`, by the attributes that the code reads from the argument.

`self.fc = nn.Linear(cfg.width, 2)` reads the field `width`, which the class of the configuration must have.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Set

#: Largest number of base classes searched for a class, because odd code could have thousands.
MAX_ANCESTORS = 50


def list_read_fields(owner: str, argument: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the attributes that `__init__` of the class `owner` reads from `argument` or `self.argument`.

    If the constructor passes the argument on to other classes, the attributes that they read are included.
    """
    fields: set[str] = set()
    visited_names: set[str] = set()
    pending = [owner]
    while pending:
        name = pending.pop()
        init = find_init(classes[name], classes) if name in classes and name not in visited_names else None
        visited_names.add(name)
        if init is None:
            continue
        fields |= {
            node.attr
            for node in ast.walk(init)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_argument(node.value, argument)
        }
        pending += _list_receivers(init, argument)
        pending += _list_bases(classes[name], classes) if "super" in _list_receivers(init, argument) else []
    return fields


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


def _list_receivers(init: ast.FunctionDef, argument: str) -> list[str]:
    """Return the classes to which `__init__` passes the argument. "super" stands for the base class's constructor."""
    calls = [
        node
        for node in ast.walk(init)
        if isinstance(node, ast.Call)
        and any(_is_argument(value, argument) for value in (*node.args, *(keyword.value for keyword in node.keywords)))
    ]
    return [write_code(call.func).partition("(")[0] for call in calls]


def _is_argument(node: ast.expr, argument: str) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == argument and isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Name) and node.id == argument


def fits(read_fields: Set[str], fields: Set[str], *, is_complete: bool) -> bool:
    """Return True if the attributes that code reads from an argument (`read_fields`) fit a class with `fields`.

    `is_complete`: the class has no other fields; else a single known field is enough.
    """
    return bool(read_fields & fields) and (not is_complete or read_fields <= fields)


def list_class_fields(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the fields, methods and `__init__` arguments of a class and of its bases in the file."""
    fields: set[str] = set()
    for part in (part for ancestor in list_ancestors(classes[name], classes) for part in ancestor.body):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            fields.add(part.target.id)
        elif isinstance(part, ast.Assign):
            fields.update(target.id for target in part.targets if isinstance(target, ast.Name))
        elif isinstance(part, ast.FunctionDef):
            fields.add(part.name)
            fields.update(_list_own_attributes(part))
    return fields


def has_all_fields(name: str, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Return True if all bases of the class are in the file, so that all its fields are known."""
    ancestors = list_ancestors(classes[name], classes)
    return all(len(_list_bases(ancestor, classes)) == len(ancestor.bases) for ancestor in ancestors)


def _list_bases(node: ast.ClassDef, classes: Iterable[str]) -> list[str]:
    return [base for base in map(write_code, node.bases) if base in classes]


def write_code(node: ast.AST) -> str:
    """Return the source code of a syntax node, or "" if the node is nested too deeply for `ast.unparse`."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return ""


def _list_own_attributes(function: ast.FunctionDef) -> Iterable[str]:
    """Yield the arguments of `__init__`, and the attributes that a method assigns to `self`."""
    if function.name == "__init__":
        yield from (argument.arg for argument in (*function.args.args, *function.args.kwonlyargs))
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield node.attr
