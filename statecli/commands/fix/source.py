"""A source file as a concrete syntax tree: find statements by line, and replace them. Comments and formatting stay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar, cast

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from statecli.live.attribute_source import find_torch_names

_Node = TypeVar("_Node", bound=cst.CSTNode)
_Line = TypeVar("_Line", cst.SimpleStatementLine, cst.SimpleStatementSuite)
#: Nodes of the tree, each with the nodes that replace it.
Changes = Mapping[cst.CSTNode, Sequence[cst.CSTNode]]
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


class NoEdit(Exception):
    """Error: no edit is possible. The message is the reason in one line."""


@lru_cache(maxsize=16)
def parse(data: bytes) -> ParsedFile:
    """Parse a file, once for all defects in it. Raises NoEdit if libcst cannot reproduce the file byte for byte."""
    return ParsedFile(data)


class ParsedFile:
    """A parsed file. Each change returns the bytes of a new file; the tree stays as it was."""

    def __init__(self, data: bytes) -> None:
        """Parse the file. Raises NoEdit if libcst cannot reproduce the file byte for byte."""
        try:
            module = cst.parse_module(data)
        except (cst.ParserSyntaxError, ValueError, RecursionError) as error:
            raise NoEdit(f"the file cannot be parsed: {str(error).splitlines()[0]}") from error
        if module.bytes != data:
            raise NoEdit("libcst cannot reproduce the file byte for byte")
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._nodes = list(_walk(module))

    def find(self, kind: type[_Node], line: int | None = None, within: cst.CSTNode | None = None) -> Iterator[_Node]:
        """Yield the nodes of type `kind` in source order, limited to a line and to the node `within` if given."""
        nodes = self._nodes if within is None else list(_walk(within))
        for node in nodes:
            if isinstance(node, kind) and (line is None or self._covers(node, line)):
                yield node

    def get_line(self, node: cst.CSTNode) -> int:
        """Return the number of the line on which a node begins."""
        line: int = self._positions[node].start.line
        return line

    def get_last_line(self, node: cst.CSTNode) -> int:
        """Return the number of the line on which a node ends."""
        line: int = self._positions[node].end.line
        return line

    def _covers(self, node: cst.CSTNode, line: int) -> bool:
        position = self._positions.get(node)
        return position is not None and position.start.line <= line <= position.end.line

    def find_around(self, node: cst.CSTNode, kind: type[_Node]) -> _Node | None:
        """Return the innermost node of type `kind` that contains a node."""
        parent = self._parents.get(node)
        while parent is not None and not isinstance(parent, kind):
            parent = self._parents.get(parent)
        return parent

    def get_parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the node that directly contains a node."""
        parent: cst.CSTNode = self._parents[node]
        return parent

    def find_class(self, node: cst.CSTNode) -> cst.ClassDef:
        """Return the class around a node. Raises NoEdit outside of a class."""
        owner = self.find_around(node, cst.ClassDef)
        if owner is None:
            raise NoEdit("the line is not in a class")
        return owner

    def find_method(self, owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
        """Return the method of a class, or None if the class does not define the method."""
        methods = (node for node in owner.body.body if isinstance(node, cst.FunctionDef))
        return next((method for method in methods if method.name.value == name), None)

    def find_torch_name(self) -> str | None:
        """Return the name under which the file imports torch, or None if the top of the file does not import torch."""
        for node in self.find(cst.Import):
            for alias in node.names if self.find_around(node, cst.FunctionDef) is None else ():
                module, name = alias.evaluated_name, alias.evaluated_alias
                if module == "torch" or (module.startswith("torch.") and name is None):
                    return name or "torch"
        return None

    def find_torch_names(self) -> dict[str, str]:
        """Map each name that the file imports from torch to its full name: `stack` to `torch.stack`."""
        return find_torch_names(self.module.bytes)

    def format(self, node: cst.CSTNode) -> str:
        """Return the code of a node."""
        return self.module.code_for_node(node)

    def format_detached(self, value: cst.BaseExpression) -> str:
        """Return the code of `value.detach()`, with parentheses around the value if needed."""
        is_simple = bool(value.lpar) or isinstance(value, (cst.Call, cst.Name, cst.Attribute))
        return f"{self.format(value)}.detach()" if is_simple else f"({self.format(value)}).detach()"

    def indent(self, code: str) -> str:
        """Return the code with the indentation of the file instead of four spaces."""
        return re.sub(r"(?m)^(?: {4})+", lambda spaces: self.module.default_indent * (len(spaces[0]) // 4), code)

    def parse_statements(self, code: str) -> list[Statement]:
        """Parse code, and return its statements."""
        parsed_module = cst.parse_module(code + "\n", config=self.module.config_for_parsing)
        return list(parsed_module.body)

    def parse_expression(self, code: str) -> cst.BaseExpression:
        """Parse an expression, and return its node."""
        return cst.parse_expression(code, config=self.module.config_for_parsing)

    def replace(self, changes: Changes) -> bytes:
        """Return the bytes of the file after the changes; a node that is mapped to an empty list is removed."""
        changed_module = self.module.visit(
            _Replacer({node: self._separate(node, new) for node, new in changes.items()})
        )
        return changed_module.bytes

    def _separate(self, node: cst.CSTNode, new: Sequence[cst.CSTNode]) -> Sequence[cst.CSTNode]:
        """Add an empty line after a new method if a statement follows without an empty line."""
        last = new[-1] if new else node
        if last is node or not isinstance(last, cst.FunctionDef):
            return new
        body = list(getattr(self._parents[node], "body", ()))
        following = body[body.index(node) + 1 :] if node in body else []
        return [*new[:-1], add_blank_line(last)] if following and not starts_with_blank_line(following[0]) else new


def starts_with_blank_line(statement: cst.CSTNode) -> bool:
    """Return True if an empty line comes before a statement."""
    return any(line.comment is None for line in getattr(statement, "leading_lines", ()))


def add_blank_line(method: cst.FunctionDef) -> cst.FunctionDef:
    """Return a method with an empty line at its end."""
    footer = (*getattr(method.body, "footer", ()), cst.EmptyLine(indent=False))
    return method.with_changes(body=method.body.with_changes(footer=footer))


def join_changes(first: Changes, second: Changes) -> Changes:
    """Join two changes; if both change a node, `second` is applied to the result of `first`."""
    joined_changes = dict(first)
    for node, new in second.items():
        old = joined_changes.get(node, (node,))
        joined_changes[node] = [part for entry in new for part in (old if entry is node else (entry,))]
    return joined_changes


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children))


class _Replacer(cst.CSTTransformer):
    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self._changes = {id(node): new for node, new in changes.items()}

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        return _remove_last_semicolon(original_node, updated_node)

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        return _remove_last_semicolon(original_node, updated_node)

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> cst.CSTNodeT:
        new = self._changes.get(id(original_node))
        if new is None:
            return super().on_leave(original_node, updated_node)  # type: ignore[return-value]
        new = [updated_node if node is original_node else node for node in new]
        result = cst.RemoveFromParent() if not new else new[0] if len(new) == 1 else cst.FlattenSentinel(new)
        return cast(cst.CSTNodeT, result)


def _remove_last_semicolon(original: _Line, updated: _Line) -> _Line:
    """Remove the semicolon after the last statement of a line if the edit removed the next statement."""
    if not updated.body or original.body[-1].semicolon is not cst.MaybeSentinel.DEFAULT:
        return updated
    last = updated.body[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
    return updated.with_changes(body=[*updated.body[:-1], last])


def keep_comments(old: cst.CSTNode, new: Sequence[Statement]) -> list[Statement]:
    """Give the new statements the comments and empty lines of the statement that they replace."""
    if not isinstance(old, cst.SimpleStatementLine) or not new:
        return list(new)
    statements = list(new)
    first = statements[0]
    statements[0] = first.with_changes(leading_lines=old.leading_lines)
    if old.trailing_whitespace.comment is None:
        return statements
    if len(statements) == 1 and isinstance(statements[0], cst.SimpleStatementLine):
        statements[0] = statements[0].with_changes(trailing_whitespace=old.trailing_whitespace)
        return statements
    comment = cst.EmptyLine(comment=old.trailing_whitespace.comment)
    statements[0] = statements[0].with_changes(leading_lines=[*old.leading_lines, comment])
    return statements


def get_instance_name(method: cst.FunctionDef) -> str:
    """Return the name of the method's first argument, usually `self`. Raises NoEdit if the method has no argument."""
    parameters = (*method.params.posonly_params, *method.params.params)
    if not parameters:
        raise NoEdit(f"{method.name.value} has no self argument")
    return parameters[0].name.value


def is_attribute(node: cst.CSTNode, owner: str, name: str | None = None) -> bool:
    """Return True if the node is the attribute `name` of `owner`, or any attribute if `name` is None."""
    return (
        isinstance(node, cst.Attribute)
        and isinstance(node.value, cst.Name)
        and node.value.value == owner
        and (name is None or node.attr.value == name)
    )


def list_targets(statement: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the targets of an assignment, and each target of an unpacked tuple."""
    if isinstance(statement, cst.Assign):
        targets = [target.target for target in statement.targets]
        return [
            part
            for target in targets
            for part in ([part.value for part in target.elements] if isinstance(target, cst.Tuple) else [target])
        ]
    return [statement.target] if isinstance(statement, cst.AnnAssign) else []
