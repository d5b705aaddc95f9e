"""Read from a source file how an attribute is assigned, filled and changed, and how the file spells `torch.nn`."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import tokenize
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from statecli.live.source_line import SourceLine


@dataclass(frozen=True)
class Assignment:
    """Assignment to an attribute, as written in its source file.

    `owner`: the object of the target (`self`); `is_early`: the statement is before `super().__init__()`. `targets`: all
    names assigned at once (`self.x = y = …`), the tensor's first; `is_unpacked`: several values go to several names;
    `is_reused`: the value is a local name used again by the function. `code_before` and `code_after`: the rest of the
    line (`if wide:`, `; self.size = 3`).
    """

    owner: str
    value: ast.expr
    text: str
    is_early: bool = False
    targets: tuple[str, ...] = ()
    is_unpacked: bool = False
    is_reused: bool = False
    code_before: str = ""
    code_after: str = ""


@dataclass(frozen=True)
class AttributeUse:
    """Use of an attribute in a source file, other than the assignment that creates the attribute.

    `action`: `read`, `stored` (as a whole, in a result or under a key), `set` (assigned), `augment` (`+=`) or `item`
    (an item is assigned). For operands and arguments: `left operand` and `right operand` (of `+`), `out`, `batch_norm`,
    `instance_norm`, or `torch argument` (see `refuses_parameter_list`). For a method: its name. `function`: the
    function around the use; `constructs`: `__init__` runs this function. `value`: the assigned expression, or the
    function of torch; `arguments`: the number of arguments of the method.
    """

    action: str
    function: str
    constructs: bool
    value: ast.expr | None = None
    arguments: int = 0
    #: The action is on an item of the attribute (`self.stages[0].append`).
    nested: bool = False


@dataclass(frozen=True)
class SourceScope:
    """Class and function that contain a source line, and the name of the instance in the function (`self`)."""

    class_name: str | None = None
    function: str = ""
    instance: str = "self"
    returns_early: bool = False


class _SourceFile:
    """A parsed source file.

    `early_statements`: statements before `super().__init__()` of their function, where nothing can be registered.
    `constructing`: the functions that `__init__` runs. `torch_names`: see `find_torch_names`.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.lines = text.split("\n")
        self.assignments: dict[int, list[ast.Assign | ast.AnnAssign]] = {}
        self.early_statements: set[ast.stmt] = set()
        self.parents: dict[ast.AST, ast.AST] = {}
        self.attributes: dict[str, list[ast.Attribute]] = {}
        self.torch_names: dict[str, str] = {}
        calls: dict[str, set[str]] = {}
        for node in ast.walk(self.tree):
            self.parents.update((child, node) for child in ast.iter_child_nodes(node))
            if isinstance(node, ast.Attribute):
                self.attributes.setdefault(node.attr, []).append(node)
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self.assignments.setdefault(line, []).append(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.torch_names.update(_find_torch_names(node))
            if isinstance(node, ast.FunctionDef):
                calls.setdefault(node.name, set()).update(_find_called_functions(node))
                if node.name == "__init__":
                    self.early_statements.update(_find_early_statements(node))
        self.constructing = _close_over_calls("__init__", calls)

    def assigns(self, owner: type, node: ast.Assign | ast.AnnAssign, name: str) -> bool:
        """Return True if the statement assigns `name` in the body of a class with the same name as `owner`."""
        parent = self.parents[node]
        is_owner = isinstance(parent, ast.ClassDef) and parent.name == owner.__qualname__.rpartition(".")[2]
        return is_owner and _names(node, name)

    def find_around(self, node: ast.AST, kind: type[ast.AST]) -> ast.AST | None:
        """Return the innermost syntax node of type `kind` that contains `node`."""
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, kind):
            parent = self.parents.get(parent)
        return parent


def _parse_file(filename: str) -> _SourceFile | None:
    """Return the parsed file. A changed file is parsed again, because a notebook may redefine a class."""
    try:
        status = os.stat(filename)
    except (OSError, ValueError):
        return None
    return _parse_version(filename, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _parse_version(filename: str, modified_ns: int, size: int) -> _SourceFile | None:  # noqa: ARG001 - part of the key
    try:
        with tokenize.open(filename) as file:  # in the encoding that the file declares
            return _SourceFile(file.read())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def _find_called_functions(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of the functions that a function calls as `build()`, `self.build()` or `super().build()`."""
    instance = function.args.args[0].arg if function.args.args else ""
    for call in (node.func for node in ast.walk(function) if isinstance(node, ast.Call)):
        if isinstance(call, ast.Name):
            yield call.id
        elif isinstance(call, ast.Attribute) and ast.unparse(call.value) in (instance, "super()"):
            yield call.attr


def find_torch_names(text: bytes) -> dict[str, str]:
    """Map each name that a file imports from torch to its full name: `stack` to `torch.stack`."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom)))
    return dict(pair for node in nodes for pair in _find_torch_names(node))


def _find_torch_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield (name in the file, full name) for each name that the statement imports from torch."""
    for alias in node.names:
        full_name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        if full_name.partition(".")[0] == "torch":
            is_root = isinstance(node, ast.Import) and not alias.asname
            yield alias.asname or ("torch" if is_root else alias.name), "torch" if is_root else full_name


def refuses_parameter_list(function: str, torch_names: Mapping[str, str]) -> bool:
    """Return True for torch and torch.linalg functions: they accept lists of tensors, but not an nn.ParameterList."""
    root, dot, rest = function.partition(".")
    module, _, name = f"{torch_names.get(root, '')}{dot}{rest}".rpartition(".")
    return module in ("torch", "torch.linalg") and name != "save"


def _close_over_calls(start: str, calls: dict[str, set[str]]) -> Set[str]:
    """Return `start`, the name of a function, and the names of all functions that it calls, directly or indirectly."""
    reached_names, pending_names = {start}, [start]
    while pending_names:
        names = (calls.get(pending_names.pop(), set()) & calls.keys()) - reached_names
        reached_names |= names
        pending_names.extend(names)
    return reached_names


def _find_early_statements(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the statements of an `__init__` before its `super().__init__()`."""
    calls = [sub for sub in ast.walk(function) if isinstance(sub, ast.Call)]
    starts = [c.lineno for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "__init__"]
    return [statement for statement in function.body if starts and statement.lineno < min(starts)]


# --- the assignment -----------------------------------------------------------------------------------------


def read_assignment(place: SourceLine | None, name: str) -> Assignment | None:
    """Return the assignment to `name` at the line `place`, or None if its statement is not a plain assignment."""
    file = _parse_file(place.file) if place else None
    return None if place is None or file is None else _find_assignment(file, place.line, name)


@functools.lru_cache(maxsize=256)
def _find_assignment(file: _SourceFile, line: int, name: str) -> Assignment | None:
    for node in file.assignments.get(line, ()):
        owner_and_value = _find_target(node, name)
        if owner_and_value is not None:
            owner, value = owner_and_value
            targets = _get_targets(node)
            target_texts = [ast.unparse(target) for target in targets]
            target_text = f"{owner}.{name}"
            other_targets = [
                text_ for text_ in target_texts if text_ != (target_text if target_text in target_texts else name)
            ]
            is_unpacked = any(isinstance(target, (ast.Tuple, ast.List)) for target in targets)
            return Assignment(
                owner,
                value,
                _get_source_text(file.lines, value),
                node in file.early_statements,
                (target_text, *other_targets),
                is_unpacked,
                _is_reused(file, node),
                *_get_rest_of_line(file.lines, node),
            )
    return None


def _get_rest_of_line(lines: list[str], node: ast.stmt) -> tuple[str, str]:
    """Return the code before and after a statement on its lines. The code after the statement begins with `;`."""
    code_before = lines[node.lineno - 1].encode()[: node.col_offset].decode().lstrip()
    code_after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode().rstrip()
    return code_before, code_after if code_after.lstrip().startswith(";") else ""


def _is_reused(file: _SourceFile, node: ast.Assign | ast.AnnAssign) -> bool:
    """Return True if the value is a local variable that later code uses, because that code may add items."""
    function, value = file.find_around(node, ast.FunctionDef), node.value
    names = (
        [n for n in ast.walk(function) if isinstance(n, ast.Name)] if function and isinstance(value, ast.Name) else []
    )
    return any(name.id == value.id and name.lineno > node.lineno for name in names)  # type: ignore[union-attr]


def _find_target(node: ast.Assign | ast.AnnAssign, name: str) -> tuple[str, ast.expr] | None:
    if node.value is None:
        return None
    for target in _get_targets(node):
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
        if isinstance(target, ast.Tuple):
            is_pairwise = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts)
            values = node.value.elts if is_pairwise else [node.value] * len(target.elts)  # type: ignore[attr-defined]
            pairs = list(zip(target.elts, values, strict=True))
        for element, value in pairs:
            if isinstance(element, ast.Attribute) and element.attr == name:
                return ast.unparse(element.value), value
            if isinstance(element, ast.Name) and element.id == name:
                return "self", value  # in a class body
    return None


def _get_targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _names(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    """Return True if the statement assigns the variable `name`, alone or in a tuple."""
    leaves = (leaf for target in _get_targets(node) for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
    return any(leaf.id == name and isinstance(leaf.ctx, ast.Store) for leaf in leaves)


def _get_source_text(lines: list[str], value: ast.expr) -> str:
    first, last = value.lineno - 1, (value.end_lineno or value.lineno) - 1
    encoded_lines = [line.encode() for line in lines[first : last + 1]]
    encoded_lines[-1] = encoded_lines[-1][: value.end_col_offset]  # offsets count bytes
    encoded_lines[0] = encoded_lines[0][value.col_offset :]
    text = b"\n".join(encoded_lines).decode()
    is_bare_tuple = isinstance(value, ast.Tuple) and not text.startswith("(")
    return f"({text})" if is_bare_tuple else text


def find_class_file(kind: type) -> str | None:
    """Return the source file of a class, or None if the class has no source file."""
    try:
        return inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None


def locate_class_attribute(owner: type, name: str) -> SourceLine | None:
    """Return the first line that assigns `name` in the body of a class, or None if the source has no such line."""
    filename = find_class_file(owner)
    file = _parse_file(filename) if filename else None
    if filename is None or file is None:
        return None
    lines = [node.lineno for nodes in file.assignments.values() for node in nodes if file.assigns(owner, node, name)]
    return SourceLine(filename, min(lines)) if lines else None


def locate_variable(filename: str, name: str) -> int | None:
    """Return the last line that assigns a variable at the top of a file, or None if the file has no such line."""
    file = _parse_file(filename)
    nodes = (node for node in file.tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))) if file else ()
    return max((node.lineno for node in nodes if node.value is not None and _names(node, name)), default=None)


def read_scope(place: SourceLine | None) -> SourceScope | None:
    """Return the class and the function that contain the line at `place`, or None if the source cannot be read."""
    file = _parse_file(place.file) if place else None
    return None if place is None or file is None else _find_scope(file, place.line)


@functools.lru_cache(maxsize=256)
def _find_scope(file: _SourceFile, line: int) -> SourceScope:
    nodes = [node for node in ast.walk(file.tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)]
    classes = [node.name for node in around if isinstance(node, ast.ClassDef)]
    methods = [n for n in around if isinstance(n, ast.FunctionDef) and isinstance(file.parents.get(n), ast.ClassDef)]
    if not methods:
        return SourceScope(classes[-1] if classes else None)
    arguments = methods[-1].args.posonlyargs + methods[-1].args.args
    instance = arguments[0].arg if arguments else "self"
    returns_early = any(isinstance(node, ast.Return) for node in ast.walk(methods[-1]))
    return SourceScope(classes[-1], methods[-1].name, instance, returns_early)


# --- the uses -----------------------------------------------------------------------------------------------


def find_uses(filename: str, name: str, class_names: frozenset[str], line: int | None) -> tuple[AttributeUse, ...]:
    """Return the uses of attribute `name` in the given classes, except its assignment on `line`."""
    file = _parse_file(filename)
    return () if file is None else _find_uses(file, name, class_names, line)


@functools.lru_cache(maxsize=256)
def _find_uses(file: _SourceFile, name: str, class_names: frozenset[str], line: int | None) -> tuple[AttributeUse, ...]:
    uses: list[AttributeUse] = []
    for node in file.attributes.get(name, ()):
        class_node, function = file.find_around(node, ast.ClassDef), file.find_around(node, ast.FunctionDef)
        is_others = isinstance(class_node, ast.ClassDef) and class_node.name not in class_names
        use = None if is_others else _describe_use(file, node, function)
        if use is not None and not (use.action == "set" and _covers(file, node, line)):
            uses.append(use)
    return tuple(uses)


def _covers(file: _SourceFile, node: ast.AST, line: int | None) -> bool:
    statement = file.find_around(node, ast.stmt)
    is_statement = line is not None and isinstance(statement, ast.stmt)
    return is_statement and statement.lineno <= line <= (statement.end_lineno or statement.lineno)  # type: ignore


def _describe_use(file: _SourceFile, attribute: ast.Attribute, function: ast.AST | None) -> AttributeUse | None:
    name = function.name if isinstance(function, ast.FunctionDef) else ""
    node: ast.expr = attribute
    parent = file.parents[node]
    is_nested = False
    while (isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.ctx, ast.Load)) or (
        isinstance(parent, ast.Attribute) and parent.attr == "data"
    ):
        is_nested = is_nested or (isinstance(parent, ast.Subscript) and not isinstance(parent.slice, ast.Slice))
        node, parent = parent, file.parents[parent]
    use = functools.partial(AttributeUse, function=name, constructs=name in file.constructing, nested=is_nested)
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return use("item")
    if isinstance(parent, ast.Attribute):
        call = file.parents[parent]
        is_call = isinstance(call, ast.Call) and call.func is parent
        return use(parent.attr, arguments=len(call.args)) if is_call else use("read")  # type: ignore[attr-defined]
    if isinstance(getattr(node, "ctx", None), ast.Store):
        statement = file.find_around(node, ast.stmt)
        is_augment = isinstance(statement, ast.AugAssign)
        return use("augment") if is_augment else use("set", value=getattr(statement, "value", None))
    if isinstance(parent, ast.keyword) and parent.arg == "out":
        return use("out")
    call = file.parents[parent] if isinstance(parent, ast.keyword) else parent
    if isinstance(call, ast.Call) and call.func is not node:
        return _describe_argument(file, call.func, use)
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
        return use("right operand" if parent.right is node else "left operand")
    return use("stored" if node is attribute and _is_stored(file, node) else "read")


def _is_stored(file: _SourceFile, value: ast.expr) -> bool:
    """Return True if code returns the value, assigns it to an item (`d[key]`), or assigns a container that holds it."""
    node, parent = value, file.parents[value]
    while isinstance(parent, (ast.Dict, ast.List, ast.Tuple)):
        node, parent = parent, file.parents[parent]
    if not isinstance(parent, (ast.Assign, ast.AnnAssign)):
        return isinstance(parent, ast.Return)
    return node is not value or any(isinstance(target, ast.Subscript) for target in _get_targets(parent))


def _describe_argument(file: _SourceFile, function: ast.expr, use: functools.partial[AttributeUse]) -> AttributeUse:
    name = getattr(function, "attr", getattr(function, "id", ""))
    if name in ("batch_norm", "instance_norm"):  # torch's functions that update running statistics
        return use(name)
    is_refused = refuses_parameter_list(ast.unparse(function), file.torch_names)
    return use("torch argument", value=function) if is_refused else use("read")


def reads(value: ast.expr | None, name: str) -> bool:
    """Return True if the expression reads an attribute of this name."""
    nodes = ast.walk(value) if value is not None else ()
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes)


# --- the name of torch.nn -----------------------------------------------------------------------------------


def find_torch_nn_name(filename: str) -> str | None:
    """Return the name of `torch.nn` in a file, "nn" if unreadable, or None if the file imports neither torch nor nn."""
    file = _parse_file(filename)
    return "nn" if file is None else _find_torch_nn_name(file)


@functools.lru_cache(maxsize=64)
def _find_torch_nn_name(file: _SourceFile) -> str | None:
    torch_name = None
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            alias_ = next((alias for alias in node.names if alias.name == "nn"), None)
            if alias_:
                return alias_.asname or "nn"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch.nn" and alias.asname:
                    return alias.asname
                if alias.name == "torch" or (alias.name.startswith("torch.") and not alias.asname):
                    torch_name = alias.asname or "torch"
    return torch_name and f"{torch_name}.nn"
