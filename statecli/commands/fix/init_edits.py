"""Edits of constructors: put a printed fix into the code, and turn attributes into properties."""

from __future__ import annotations

import builtins
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import cast

import libcst as cst
import msgspec

from statecli.commands.fix.source import (
    Changes,
    NoEdit,
    ParsedFile,
    Statement,
    add_blank_line,
    get_instance_name,
    is_attribute,
    keep_comments,
    list_targets,
    starts_with_blank_line,
)
from statecli.core.lazy_pattern import compile_on_use

#: Placeholder for the assigned value in parsed code.
VALUE_PLACEHOLDER = "_statecli_value"
#: Reason why the assignment cannot become several statements.
SHARED_LINE_REASON = "the assignment shares its line with other code; put the assignment on its own line"


class Assigned(msgspec.Struct, frozen=True):
    """An assignment of an attribute, the statement around it, and the method or class around the statement."""

    node: cst.Assign | cst.AnnAssign | cst.AugAssign
    line: cst.SimpleStatementLine | cst.SimpleStatementSuite
    method: cst.FunctionDef | None
    owner: cst.ClassDef

    @property
    def value(self) -> cst.BaseExpression:
        """The assigned expression."""
        assert self.node.value is not None  # noqa: S101 - `find_assigned` skips annotations without a value
        return self.node.value


def find_assigned(source: ParsedFile, name: str, line: int) -> Assigned:
    """Return the assignment of the attribute on a line. Raises NoEdit for anything but a plain assignment."""
    assignments: list[cst.Assign | cst.AnnAssign] = [*source.find(cst.Assign, line), *source.find(cst.AnnAssign, line)]
    for node in (*assignments, *source.find(cst.AugAssign, line)):
        targets = [node.target] if isinstance(node, cst.AugAssign) else list_targets(node)
        if node.value is None or not any(_names(target, name) for target in targets):
            continue
        parent = source.get_parent(node)
        if isinstance(parent, (cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            return Assigned(node, parent, source.find_around(node, cst.FunctionDef), source.find_class(node))
    raise NoEdit(f"the line is not a plain assignment of {name}")


def _names(target: cst.BaseExpression, name: str) -> bool:
    if isinstance(target, cst.Attribute):
        return target.attr.value == name
    return isinstance(target, cst.Name) and target.value == name


# --- statements -------------------------------------------------------------------------------------------------------


def replace_statement(source: ParsedFile, assigned: Assigned, code: str) -> Changes:
    """Return the change that replaces the assignment with `code`. `code` may include other statements of the line."""
    if code.startswith("for ") and "\n" in code:
        head, _, body = code.rpartition("\n")
        code = f"{head}\n{source.indent(body)}"
    try:
        new = parse_with_value(source, code, assigned)
    except cst.ParserSyntaxError as error:
        raise NoEdit("the printed fix is not complete Python code") from error
    if isinstance(assigned.line, cst.SimpleStatementLine):
        same_line = new[0].body if len(new) == 1 and isinstance(new[0], cst.SimpleStatementLine) else ()
        if len(assigned.line.body) == 1:
            return {assigned.line: _declare_type(assigned, keep_comments(assigned.line, _annotate(assigned, new)))}
        if len(same_line) >= len(assigned.line.body):
            return {assigned.line: keep_comments(assigned.line, new)}
    elif len(new) == 1 and isinstance(suite := getattr(new[0], "body", None), cst.SimpleStatementSuite):
        return {assigned.line: [suite.with_changes(trailing_whitespace=assigned.line.trailing_whitespace)]}
    smalls = [statement for line in new if isinstance(line, cst.SimpleStatementLine) for statement in line.body]
    if not smalls or any(not isinstance(line, cst.SimpleStatementLine) for line in new):
        raise NoEdit(SHARED_LINE_REASON)
    *first, last = smalls
    semicolon = cst.Semicolon(whitespace_after=cst.SimpleWhitespace(" "))
    ends = [statement.with_changes(semicolon=semicolon) for statement in first]
    return {assigned.node: [*ends, last.with_changes(semicolon=assigned.node.semicolon)]}


#: Annotations that allow a parameter or a buffer, unlike list[torch.Tensor].
_TENSOR_ANNOTATION = compile_on_use(r"([\w.]*Optional\[)?[\w.]*\b(Tensor|Parameter)\]?(\s*\|\s*None)?")


def get_tensor_annotation(assigned: Assigned) -> str:
    """Return the annotation of the attribute if it allows a tensor, as `Tensor | None` does. Otherwise return ""."""
    node = assigned.node
    text = cst.Module([]).code_for_node(node.annotation.annotation) if isinstance(node, cst.AnnAssign) else ""
    return text if _TENSOR_ANNOTATION.fullmatch(text) else ""


def _annotate(assigned: Assigned, new: Sequence[Statement]) -> list[Statement]:
    """Return the new statements; an assignment to the same attribute gets the old annotation."""
    node = assigned.node
    if not isinstance(node, cst.AnnAssign) or not get_tensor_annotation(assigned):
        return list(new)
    statements = list(new)
    for index, line in enumerate(statements):
        statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
        if (
            isinstance(statement, cst.Assign)
            and len(statement.targets) == 1
            and statement.targets[0].target.deep_equals(node.target)
        ):
            annotated = cst.AnnAssign(node.target, node.annotation, statement.value)
            statements[index] = line.with_changes(body=[annotated])
    return statements


def _declare_type(assigned: Assigned, new: list[Statement]) -> list[Statement]:
    """Add the old annotation as a line `self.name: Tensor`, unless the first new statement has an annotation."""
    node, first = assigned.node, new[0]
    smalls = first.body if isinstance(first, cst.SimpleStatementLine) else ()
    is_annotated = any(isinstance(small, cst.AnnAssign) for small in smalls)
    if not isinstance(node, cst.AnnAssign) or not get_tensor_annotation(assigned) or is_annotated:
        return new
    declaration = cst.SimpleStatementLine([cst.AnnAssign(node.target, node.annotation)], first.leading_lines)
    return [declaration, first.with_changes(leading_lines=()), *new[1:]]


def parse_with_value(source: ParsedFile, code: str, assigned: Assigned) -> list[Statement]:
    """Return the parsed statements of `code`, with the assigned value in place of VALUE_PLACEHOLDER."""
    statements = source.parse_statements(code)
    if VALUE_PLACEHOLDER not in code:
        return statements
    value = assigned.value
    parentheses = [source.format(part) for part in (*value.lpar, *value.rpar)]
    if not any("#" in text for text in parentheses) and not isinstance(value, cst.Tuple):
        value = value.with_changes(lpar=(), rpar=())
    replacer = _ValueReplacer(lambda node: value if node.value == VALUE_PLACEHOLDER else None)
    return [cast(Statement, statement.visit(replacer)) for statement in statements]


def remove_statement(assigned: Assigned) -> Changes:
    """Return the change that removes the assignment."""
    if isinstance(assigned.line, cst.SimpleStatementLine) and len(assigned.line.body) == 1:
        return {assigned.line: []}
    if len(assigned.line.body) == 1:
        return {assigned.node: [cst.Pass()]}
    return {assigned.node: []}


def append_to_init(source: ParsedFile, owner: cst.ClassDef, method: cst.FunctionDef | None, code: str) -> Changes:
    """Return the change that adds statements at the end of the constructor."""
    method = method or source.find_method(owner, "__init__")
    if method is None:
        raise NoEdit(f"{owner.name.value} does not define __init__")
    if not isinstance(method.body, cst.IndentedBlock):
        raise NoEdit(_describe_one_line_body(f"{owner.name.value}.{method.name.value}"))
    last = method.body.body[-1]
    return {last: [last, *source.parse_statements(source.indent(_allow_second_call(method, code)))]}


_POPPED_ATTRIBUTE = compile_on_use(r"(\w+)\.__dict__\.pop\((\"\w+\")\)")


def _allow_second_call(method: cst.FunctionDef | None, code: str) -> str:
    """Return `code`. In a method that may run twice, add a condition so that only the first call registers."""
    popped = _POPPED_ATTRIBUTE.search(code)
    if popped is None or method is None or method.name.value in ("__init__", "__post_init__"):
        return code
    return f"if {popped[2]} in {popped[1]}.__dict__:\n{textwrap.indent(code, '    ')}"


def _describe_one_line_body(name: str) -> str:
    return f"the body of {name} is on its first line; put the body on separate lines"


def insert_after_line(source: ParsedFile, assigned: Assigned, code: str) -> Changes:
    """Return the change that adds statements after the assignment."""
    if not isinstance(assigned.line, cst.SimpleStatementLine):
        raise NoEdit(SHARED_LINE_REASON)
    code = _allow_second_call(assigned.method, code)
    return {assigned.line: [assigned.line, *source.parse_statements(source.indent(code))]}


def insert_after_super(source: ParsedFile, owner: cst.ClassDef, code: str, removed: Assigned) -> Changes:
    """Return the change that removes an assignment and puts `code` after `super().__init__()`."""
    if removed.method is None and _is_read_from_class(source, owner, removed):
        raise NoEdit(
            f"the file also reads this attribute of the class {owner.name.value}, and a buffer exists only in instances"
        )
    method = source.find_method(owner, "__init__")
    new = keep_comments(removed.line, parse_with_value(source, code, removed))
    if method is None:
        return {**remove_statement(removed), owner.body: [_add_init(source, owner, removed, new)]}
    if not isinstance(method.body, cst.IndentedBlock):
        raise NoEdit(_describe_one_line_body(f"{owner.name.value}.__init__"))
    anchor = next((line for line in method.body.body if _calls_super(line)), None)
    if anchor is None:
        raise NoEdit(f"{owner.name.value}.__init__ has no separate statement super().__init__()")
    return {**remove_statement(removed), anchor: [anchor, *new]}


def _is_read_from_class(source: ParsedFile, owner: cst.ClassDef, removed: Assigned) -> bool:
    """Return True if the file reads the attribute from the class, as `Net.table`, or as `table` in the class body."""
    names = {target.value for target in list_targets(removed.node) if isinstance(target, cst.Name)}
    in_body = any(
        node.value in names and node not in list_targets(removed.node) and _is_read(source, node)
        for line in owner.body.body
        if not isinstance(line, cst.FunctionDef)
        for node in source.find(cst.Name, within=line)
    )
    classes = (owner.name.value, "cls")
    reads = source.find(cst.Attribute)
    return in_body or any(
        node.attr.value in names and isinstance(node.value, cst.Name) and node.value.value in classes for node in reads
    )


def _calls_super(line: cst.BaseStatement) -> bool:
    smalls = line.body if isinstance(line, cst.SimpleStatementLine) else ()
    calls = [
        statement.value
        for statement in smalls
        if isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call)
    ]
    return any(isinstance(call.func, cst.Attribute) and call.func.attr.value == "__init__" for call in calls)


def _add_init(source: ParsedFile, owner: cst.ClassDef, removed: Assigned, new: Sequence[Statement]) -> cst.BaseSuite:
    if not isinstance(owner.body, cst.IndentedBlock):
        raise NoEdit(_describe_one_line_body(owner.name.value))
    code = source.indent("def __init__(self, *args, **kwargs):\n    super().__init__(*args, **kwargs)")
    method = source.parse_statements(code)[0]
    assert isinstance(method, cst.FunctionDef)  # noqa: S101 - from the code above
    assert isinstance(method.body, cst.IndentedBlock)  # noqa: S101 - as above
    body_lines = [line.with_changes(leading_lines=()) for line in new]
    method = method.with_changes(body=method.body.with_changes(body=[*method.body.body, *body_lines]))
    statements = [line for line in owner.body.body if line is not removed.line]
    position = 1 if statements and _is_docstring(statements[0]) else 0
    if len(statements) > position and not starts_with_blank_line(statements[position]):
        method = add_blank_line(method)
    lines = [cst.EmptyLine(indent=False)] if position else []
    return owner.body.with_changes(
        body=[*statements[:position], method.with_changes(leading_lines=lines), *statements[position:]]
    )


def _is_docstring(line: cst.BaseStatement) -> bool:
    statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    return isinstance(statement, cst.Expr) and isinstance(statement.value, (cst.SimpleString, cst.ConcatenatedString))


def add_import(source: ParsedFile, code: str) -> Changes:
    """Return the change that adds an import below the last import at the top of the file."""
    imports = [line for line in source.module.body if _is_import(line)]
    if not imports:
        raise NoEdit("the fix adds a line below the imports of the file, but the file has no imports")
    return {imports[-1]: [imports[-1], *source.parse_statements(code)]}


def _is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], (cst.Import, cst.ImportFrom))


# --- properties -------------------------------------------------------------------------------------------------------


def add_property(
    source: ParsedFile, owner: cst.ClassDef, name: str, value: str, *, replaced: Assigned | None = None, kind: str = ""
) -> Changes:
    """Return the change that adds a property after the constructor. The property gets the comments of `replaced`.

    The property returns the annotation of the replaced statement, or else `kind` if the constructor has annotations.
    """
    if source.find_method(owner, name) is not None:
        raise NoEdit(f"{owner.name.value} already has a method {name}")
    if not isinstance(owner.body, cst.IndentedBlock):
        raise NoEdit(_describe_one_line_body(owner.name.value))
    method = replaced.method if replaced is not None else None
    anchor = method or source.find_method(owner, "__init__")
    if anchor is None or anchor not in owner.body.body:
        raise NoEdit(f"{owner.name.value} does not define __init__")
    instance = get_instance_name(anchor)
    own_kind = get_tensor_annotation(replaced) if replaced is not None else ""
    kind = own_kind or (kind if anchor.returns is not None else "")
    result = f" -> {kind}" if kind else ""
    comment = ""
    lines = [cst.EmptyLine(indent=False)]
    if replaced is not None and isinstance(replaced.line, cst.SimpleStatementLine):
        lines += [line for line in replaced.line.leading_lines if line.comment is not None]
        trailing = replaced.line.trailing_whitespace.comment
        comment = f"  {trailing.value}" if trailing is not None and len(replaced.line.body) == 1 else ""
    code = source.indent(f"@property\ndef {name}({instance}){result}:\n    return ") + f"{value}{comment}"
    try:
        method_node = source.parse_statements(code)[0]
    except cst.ParserSyntaxError as error:
        raise NoEdit(
            f"statecli cannot turn {name} into a property, because its value is not a single expression"
        ) from error
    return {anchor: [anchor, method_node.with_changes(leading_lines=lines)]}


def express_with_attributes(source: ParsedFile, assigned: Assigned) -> str:
    """Return the code of the assigned value, with attributes of the module instead of local names.

    A local name is replaced by the attribute that holds its value. Raises NoEdit if no attribute does.
    """
    method, value = assigned.method, assigned.value
    if method is None:
        raise NoEdit("the class body, not a method, computes the value")
    instance = get_instance_name(method)
    bound_names = {parameter.name.value for parameter in source.find(cst.Param, within=value)}
    for loop in source.find(cst.CompFor, within=value):
        bound_names |= {part.value for part in source.find(cst.Name, within=loop.target)}
    changes: dict[cst.CSTNode, cst.BaseExpression] = {}
    for node in source.find(cst.Name, within=value):
        if node.value in bound_names or node.value == instance or not _is_read(source, node):
            continue
        if _is_local(source, method, node.value):
            attribute = _find_attribute_of(source, method, node.value, instance, assigned)
            changes[node] = source.parse_expression(f"{instance}.{attribute}")
        elif not hasattr(builtins, node.value) and not _is_global(source, node.value):
            raise NoEdit(f"the value uses {node.value}, which the file does not define")
    if next(source.find(cst.NamedExpr, within=value), None) is not None:
        raise NoEdit("the value contains an assignment expression (:=)")
    by_id = {id(node): new for node, new in changes.items()}
    changed_value = value.visit(_ValueReplacer(lambda node: by_id.get(id(node)))) if changes else value
    text = source.module.code_for_node(changed_value)  # type: ignore[arg-type]
    return f"({text})" if "\n" in text and not text.startswith(("(", "[", "{")) else text


class _ValueReplacer(cst.CSTTransformer):
    def __init__(self, find_value: Callable[[cst.Name], cst.BaseExpression | None]) -> None:
        super().__init__()
        self._find_value = find_value

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return self._find_value(original_node) or updated_node


def _is_read(source: ParsedFile, node: cst.Name) -> bool:
    parent = source.get_parent(node)
    if isinstance(parent, cst.Attribute) and parent.attr is node:
        return False
    return not (isinstance(parent, cst.Arg) and parent.keyword is node)


def _is_local(source: ParsedFile, method: cst.FunctionDef, name: str) -> bool:
    if any(parameter.name.value == name for parameter in source.find(cst.Param, within=method.params)):
        return True
    targets: list[cst.BaseExpression] = [target.target for target in source.find(cst.AssignTarget, within=method.body)]
    targets += [node.target for node in source.find(cst.AnnAssign, within=method.body)]
    targets += [node.target for node in source.find(cst.For, within=method.body)]
    targets += [node.target for node in source.find(cst.NamedExpr, within=method.body)]
    plain_targets = (target for target in targets if not isinstance(target, cst.Attribute))
    return any(part.value == name for target in plain_targets for part in source.find(cst.Name, within=target))


def _is_global(source: ParsedFile, name: str) -> bool:
    definition = rf"(?m)^(?:from|import|def|class|async def)\b.*\b{name}\b|^{name}\b\s*[:=]"
    if re.search(definition, source.module.code) is not None:
        return True
    imports = (line for line in source.module.body if _is_import(line))
    return any(part.value == name for line in imports for part in source.find(cst.Name, within=line))


def _find_attribute_of(
    source: ParsedFile, method: cst.FunctionDef, name: str, instance: str, assigned: Assigned
) -> str:
    """Return the attribute in which the method stores a local variable: directly, as a parameter or as a buffer."""
    for node in source.find(cst.Assign, within=method.body):
        value = node.value
        if node is assigned.node or len(node.targets) != 1 or not is_attribute(node.targets[0].target, instance):
            continue
        inner = value.args[0].value if isinstance(value, cst.Call) and _is_parameter_call(source, value) else value
        if isinstance(inner, cst.Name) and inner.value == name:
            target = node.targets[0].target
            assert isinstance(target, cst.Attribute)  # noqa: S101 - from `is_attribute`
            return target.attr.value
    for call in source.find(cst.Call, within=method.body):
        if is_attribute(call.func, instance, "register_buffer") and len(call.args) > 1:
            key, registered = call.args[0].value, call.args[1].value
            if isinstance(key, cst.SimpleString) and isinstance(registered, cst.Name) and registered.value == name:
                return str(key.evaluated_value)
    raise NoEdit(f"the value uses {name}, a local variable of {method.name.value} that no attribute stores")


def _is_parameter_call(source: ParsedFile, call: cst.Call) -> bool:
    return bool(call.args) and source.format(call.func).rpartition(".")[2] == "Parameter"


def list_assignments(source: ParsedFile, owner: cst.ClassDef, name: str) -> list[cst.CSTNode]:
    """Return the statements in the methods of a class that assign `self.name`."""
    statements: list[cst.CSTNode] = []
    for kind in (cst.Assign, cst.AnnAssign, cst.AugAssign):
        for node in source.find(kind, within=owner.body):
            targets = [node.target] if isinstance(node, cst.AugAssign) else list_targets(node)
            if any(isinstance(target, cst.Attribute) and _names(target, name) for target in targets):
                statements.append(node)
    return statements


def check_single_target(statement: cst.CSTNode, name: str) -> None:
    """Raise NoEdit if a statement assigns its value to more names than `self.name`."""
    if len(list_targets(statement)) != 1:
        raise NoEdit(f"the statement also assigns other names; assign {name} in its own statement")
