"""Find classes that break if statecli edits a different class of the same file.

`verify` checks a single class. If an edit turns an attribute into a buffer, a subclass that assigns a number to the
attribute raises TypeError. So an edit is refused if related code assigns the attribute, or if a related class can no
longer be built.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping, Set

from statecli.commands.fix.project_copy import Project, copy_project
from statecli.core.errors import ModelError, UsageError
from statecli.live import build
from statecli.live.spec import parse_spec

#: Calls whose result an assignment registers: parameters and containers of modules or parameters.
_REGISTERED_CALLS = frozenset(["Parameter", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict"])
#: Largest number of related classes of a file that are built.
MAX_CLASSES = 20

_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)

Classes = Mapping[str, ast.ClassDef]


def find_conflict(before: bytes, after: bytes) -> str:
    """Return why other code of the file contradicts the edit, or "" if no code does."""
    tree, new_tree = ast.parse(before), ast.parse(after)
    old, new = _list_classes(tree), _list_classes(new_tree)
    kept = {ast.dump(node) for node in ast.walk(new_tree) if isinstance(node, _ASSIGNMENTS)}
    for name, owner in old.items():
        for attribute, kinds in _list_changed_attributes(owner, new.get(name)).items():
            conflict = _find_assignment(tree, old, name, attribute, kept, is_property="method" in kinds)
            conflict = conflict or _find_lost_method(tree, owner, attribute, kinds)
            if conflict:
                return conflict
    return ""


def list_related_classes(before: bytes, after: bytes) -> list[str]:
    """Return the classes of the file that inherit from an edited class or use an edited class."""
    old, new = _list_classes(ast.parse(before)), _list_classes(ast.parse(after))
    changed_names = {name for name, owner in old.items() if name not in new or ast.dump(owner) != ast.dump(new[name])}
    related = {
        name
        for name, owner in old.items()
        if any(isinstance(node, ast.Name) and node.id in changed_names for node in ast.walk(owner))
    }
    for name in changed_names:
        related |= _list_descendants(old, name)
    return [name for name in old if name in related][:MAX_CLASSES]


def find_unbuildable(
    project: Project, before: Mapping[str, bytes], after: Mapping[str, bytes], classes: Mapping[str, Iterable[str]]
) -> str:
    """Return a class that cannot be built after the edit, with its error, or "" if the edit breaks no class.

    `before` and `after` are the contents of the changed files. `classes`: names of classes by the path of their file. A
    class with required arguments is not built.
    """
    errors = _list_build_errors(project, after, classes)
    if not errors:
        return ""
    old_errors = _list_build_errors(project, before, classes)
    unbuildable_class = next((name for name in errors if name not in old_errors), None)
    return (
        ""
        if unbuildable_class is None
        else f"the class {unbuildable_class} cannot be built with the fix: {errors[unbuildable_class]}"
    )


def _list_build_errors(
    project: Project, contents: Mapping[str, bytes], classes: Mapping[str, Iterable[str]]
) -> dict[str, str]:
    """Return the error of each class that cannot be built without arguments."""
    errors: dict[str, str] = {}
    with copy_project(project, contents) as copy:
        for path, names in classes.items():
            for name in names:
                spec = parse_spec(f"{os.path.join(copy.root, os.path.relpath(path, project.root))}:{name}")
                assert spec is not None  # noqa: S101 - the text has a path and a name
                try:
                    build.build(spec)
                except ModelError as error:
                    errors[name] = copy.hide(str(error)).rpartition(f":{name}: ")[2]
                except UsageError:
                    continue
    return errors


def _list_classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _list_changed_attributes(old: ast.ClassDef, new: ast.ClassDef | None) -> dict[str, set[str]]:
    """Return the attributes that two versions of a class define differently, and how the new version defines each."""
    old_kinds, new_kinds = _list_kinds(old), _list_kinds(new) if new is not None else {}
    names = dict.fromkeys((*old_kinds, *new_kinds))
    changed_kinds = {name: new_kinds.get(name, set()) for name in names if old_kinds.get(name) != new_kinds.get(name)}
    # A method defined only by the edit, such as __init__, calls the method of the base class.
    return {name: kinds for name, kinds in changed_kinds.items() if name in old_kinds or kinds != {"method"}}


def _list_kinds(owner: ast.ClassDef) -> dict[str, set[str]]:
    """Return how a class defines each attribute: assigned, registered, as a method or as a class attribute."""
    kinds: dict[str, set[str]] = {}
    for name, kind, _ in _iter_definitions(owner):
        kinds.setdefault(name, set()).add(kind)
    return kinds


def _iter_definitions(owner: ast.ClassDef) -> Iterator[tuple[str, str, int]]:
    """Yield name, kind and line of each attribute that a class defines."""
    for statement in owner.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name, "method", statement.lineno
        for target, _ in _list_assignments(statement):
            if isinstance(target, ast.Name):
                yield target.id, "class attribute", statement.lineno
    for node in ast.walk(owner):
        for target, value in _list_assignments(node):
            if isinstance(target, ast.Attribute):
                yield target.attr, _describe_value(value), target.lineno
        if isinstance(node, ast.Call) and (registered := _get_registered_name(node)) is not None:
            yield registered, "registered", node.lineno


def _list_assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield (target, value) for each target of an assignment. The value is None for `+=` and for unpacked targets."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                yield from ((part, None) for part in target.elts)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, None


def _describe_value(value: ast.expr | None) -> str:
    call = value.func if isinstance(value, ast.Call) else None
    name = call.attr if isinstance(call, ast.Attribute) else call.id if isinstance(call, ast.Name) else ""
    return name if name in _REGISTERED_CALLS else "assigned"


def _get_registered_name(call: ast.Call) -> str | None:
    """Return the name that a call such as `self.register_buffer("table", …)` registers, or None for another call."""
    if not (isinstance(call.func, ast.Attribute) and call.args):
        return None
    if call.func.attr not in ("register_buffer", "register_parameter", "register_module", "add_module"):
        return None
    name = call.args[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


# --- related classes --------------------------------------------------------------------------------------------------


def _list_bases(owner: ast.ClassDef) -> Iterator[str]:
    for base in owner.bases:
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, (ast.Name, ast.Attribute)):
            yield base.id if isinstance(base, ast.Name) else base.attr


def _list_descendants(classes: Classes, name: str) -> set[str]:
    return {other for other in classes if other != name and name in _list_ancestors(classes, other)}


def _list_ancestors(classes: Classes, name: str) -> set[str]:
    ancestors: set[str] = set()
    stack = [name]
    while stack:
        for base in _list_bases(classes[stack.pop()]):
            if base in classes and base not in ancestors:
                ancestors.add(base)
                stack.append(base)
    return ancestors


def _find_assignment(
    tree: ast.Module, classes: Classes, owner: str, attribute: str, kept: Set[str], *, is_property: bool
) -> str:
    """Describe an assignment of the attribute in a related class or outside of the class. Return "" if not found.

    `kept`: the `ast.dump` of each assignment that the edit does not replace. `is_property`: the edit makes the
    attribute a property, which refuses even None.
    """
    heirs = _list_descendants(classes, owner)
    related = {name for heir in (owner, *heirs) for name in _list_ancestors(classes, heir)} | heirs
    for name, class_node in classes.items():
        if name == owner or name not in related:
            continue
        line = next((line for defined, _, line in _iter_definitions(class_node) if defined == attribute), None)
        if line is not None:
            kind = "a subclass" if name in heirs else "a base class"
            return f"{name}, {kind} of {owner}, also defines {attribute} (line {line})"
    line = _find_outer_line(tree, attribute, kept, is_property=is_property)
    return "" if line is None else f"code outside of {owner} assigns {attribute} (line {line})"


def _find_outer_line(tree: ast.Module, attribute: str, kept: Set[str], *, is_property: bool) -> int | None:
    """Return the line with `model.name = …`, where `model` is not the first argument of a method."""
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    instances = {id(node): instance for owner in owners for node, instance in _walk_methods(owner)}
    for node in ast.walk(tree):
        for target, value in _list_assignments(node):
            if not (isinstance(target, ast.Attribute) and target.attr == attribute):
                continue
            is_allowed = not is_property and isinstance(value, ast.Constant) and value.value is None
            is_own = isinstance(target.value, ast.Name) and target.value.id == instances.get(id(node))
            if not is_allowed and not is_own and ast.dump(node) in kept:
                return target.lineno
    return None


def _find_lost_method(tree: ast.Module, owner: ast.ClassDef, attribute: str, kinds: set[str]) -> str:
    """Describe code outside of the class that uses a list or dict method which the new torch.nn container lacks."""
    from torch import nn

    containers = [getattr(nn, kind) for kind in kinds if kind in _REGISTERED_CALLS and kind != "Parameter"]
    inside = set(map(id, ast.walk(owner)))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)) or id(node) in inside:
            continue
        if node.value.attr == attribute and containers and not any(hasattr(kind, node.attr) for kind in containers):
            name = containers[0].__name__
            return f"line {node.lineno} reads .{attribute}.{node.attr}, which nn.{name} does not have"
    return ""


def _walk_methods(owner: ast.ClassDef) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node in the methods of a class, with the name of the method's first argument (`self`)."""
    for method in owner.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = (*method.args.posonlyargs, *method.args.args)
            if arguments:
                yield from ((node, arguments[0].arg) for node in ast.walk(method))
