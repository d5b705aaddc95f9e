"""Apply the fix that statecli prints for an unregistered tensor: insert its code, and follow its comments.

`live/suggest_fix.py` decides the code, its place and whether a buffer is persistent. Instructions in the comments of
the fix ("and read each tensor as …") are followed here too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import libcst as cst

from statecli.commands.fix import init_edits
from statecli.commands.fix.containers import build_container_property
from statecli.commands.fix.fix_text import BY_HAND_REASON, PrintedFix, read_fix
from statecli.commands.fix.init_edits import VALUE_PLACEHOLDER, Assigned, find_assigned
from statecli.commands.fix.source import (
    Changes,
    NoEdit,
    ParsedFile,
    get_instance_name,
    is_attribute,
    join_changes,
    list_targets,
)
from statecli.live.attribute_site import AFTER_LAST_ASSIGNMENT, AFTER_SUPER_INIT, AT_END_OF_INIT
from statecli.live.attribute_source import refuses_parameter_list


def apply_code(source: ParsedFile, text: str, attribute: str, line: int, names: Sequence[str]) -> Changes:
    """Return the changes that apply a printed fix with code. Raises NoEdit."""
    assigned = find_assigned(source, attribute, line)
    # A value of several lines keeps its own nodes, with comments and indentation.
    value_text = get_value_text(source, assigned)
    fix = read_fix(text.replace(value_text, VALUE_PLACEHOLDER) if "\n" in value_text else text)
    if fix.find_comment("# and replace "):
        raise NoEdit(f"the class needs another change first: {str(fix.find_comment('# and ')).removeprefix('# and ')}")
    if not fix.is_editable():
        raise NoEdit(BY_HAND_REASON)
    has_place = any(fix.find_comment(start) for start in ("# at the end of ", "# after ", "# delete "))
    if _has_other_branch(source, assigned, attribute) and not has_place:
        changes = _register_at_end(source, fix, assigned, attribute, value_text)
    else:
        changes = _put_code(source, fix, assigned)
    if fix.find_comment("# first delete the class attribute"):
        changes = join_changes(changes, _delete_class_attribute(assigned.owner, attribute))
    if fix.find_comment("# and read each tensor as getattr"):
        changes = join_changes(changes, build_container_property(source, assigned, attribute, names))
    if fix.find_comment("# and iterate over the items()"):
        changes = join_changes(changes, _iterate_items(source, assigned, attribute))
    if fix.find_comment("# the keys must be strings without dots"):
        changes = join_changes(changes, _rename_keys(source, assigned, attribute, fix.code))
    if fix.find_comment("# and write "):
        is_parameters = ".ParameterList(" in fix.code
        changes = join_changes(changes, _convert_to_lists(source, assigned, attribute, is_parameters))
    if fix.find_comment("# and import torch.nn"):
        changes = join_changes(changes, init_edits.add_import(source, "from torch import nn"))
    return changes


def get_value_text(source: ParsedFile, assigned: Assigned) -> str:
    """Return the text of the assigned expression without outer parentheses, as the printed fix shows it."""
    code = source.module.code.replace("\r\n", "\n")
    line = source.get_line(assigned.node)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno == line and node.value is not None:
            return ast.get_source_segment(code, node.value) or ""
    return ""


def _has_other_branch(source: ParsedFile, assigned: Assigned, name: str) -> bool:
    """Return True if the method assigns another value to the attribute, as in `else:`; empty values do not count."""
    if assigned.method is None:
        return False
    others = [
        node
        for node in init_edits.list_assignments(source, assigned.owner, name)
        if node is not assigned.node and source.find_around(node, cst.FunctionDef) is assigned.method
    ]
    values = [source.format(value) for node in others if (value := getattr(node, "value", None)) is not None]
    return any(value not in ("None", "[]", "{}", "list()", "dict()") for value in values)


def _register_at_end(source: ParsedFile, fix: PrintedFix, assigned: Assigned, name: str, value_text: str) -> Changes:
    """Return the change that registers the attribute at the end of the method, after every branch."""
    instance = get_instance_name(assigned.method) if assigned.method is not None else "self"
    is_container = re.search(r"\.(Module|Parameter)(List|Dict)\(", fix.code) is not None
    value = f"{instance}.{name}" if is_container else f'{instance}.__dict__.pop("{name}")'
    present = VALUE_PLACEHOLDER if VALUE_PLACEHOLDER in fix.code else value_text
    if fix.code.count(present) != 1:
        raise NoEdit(f"several branches assign {name}")
    return init_edits.append_to_init(source, assigned.owner, assigned.method, fix.code.replace(present, value))


def _put_code(source: ParsedFile, fix: PrintedFix, assigned: Assigned) -> Changes:
    owner = assigned.owner
    if fix.find_comment(AT_END_OF_INIT.strip()) or fix.find_comment("# at the end of __post_init__:"):
        return init_edits.append_to_init(source, owner, assigned.method, fix.code)
    if fix.find_comment(AFTER_LAST_ASSIGNMENT.strip()):
        return init_edits.insert_after_line(source, assigned, fix.code)
    if fix.find_comment(AFTER_SUPER_INIT.strip()) or fix.find_comment("# delete "):
        return init_edits.insert_after_super(source, owner, fix.code, assigned)
    return init_edits.replace_statement(source, assigned, fix.code)


def _delete_class_attribute(owner: cst.ClassDef, name: str) -> Changes:
    for line in owner.body.body:
        smalls = line.body if isinstance(line, cst.SimpleStatementLine) else ()
        for small in smalls:
            targets = list_targets(small)
            if len(smalls) == 1 and any(isinstance(target, cst.Name) and target.value == name for target in targets):
                return {line: []}
    raise NoEdit(
        f"the fix would delete the class attribute {name}, but {owner.name.value} does not assign {name} on a "
        "separate line"
    )


def _list_reads(source: ParsedFile, assigned: Assigned, name: str) -> list[cst.Attribute]:
    """Return each `self.name` in the class, except targets of assignments."""
    reads = []
    for node in source.find(cst.Attribute, within=assigned.owner.body):
        method = source.find_around(node, cst.FunctionDef)
        if node.attr.value != name or method is None or isinstance(source.get_parent(node), cst.AssignTarget):
            continue
        if (method.params.params or method.params.posonly_params) and is_attribute(node, get_instance_name(method)):
            reads.append(node)
    return reads


def _iterate_items(source: ParsedFile, assigned: Assigned, name: str) -> Changes:
    """Return the change that iterates over `self.name.items()` instead of `self.name`. Raises NoEdit."""
    changes: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for node in _list_reads(source, assigned, name):
        parent = source.get_parent(node)
        if not (isinstance(parent, (cst.For, cst.CompFor)) and parent.iter is node):
            raise NoEdit(f"{assigned.owner.name.value} also uses {name} outside of a for loop")
        changes[node] = [cst.Call(cst.Attribute(node, cst.Name("items")))]
    return changes


def _rename_keys(source: ParsedFile, assigned: Assigned, name: str, code: str) -> Changes:
    """Return the change that replaces `key` in each `self.name[key]` by the new container's key. Raises NoEdit."""
    formula = re.search(r"Dict\(\{(str\(k\).+?): v for k, v in ", code)
    if formula is None:
        raise NoEdit("the printed fix does not show how to compute the new keys")
    changes: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for node in _list_reads(source, assigned, name):
        parent = source.get_parent(node)
        slices = parent.slice if isinstance(parent, cst.Subscript) else ()
        if len(slices) != 1 or not isinstance(slices[0].slice, cst.Index):
            raise NoEdit(f"{assigned.owner.name.value} also uses {name} in another way than {name}[key]")
        key = slices[0].slice.value
        changes[key] = [source.parse_expression(_format_key(source, key, formula[1]))]
    return changes


def _format_key(source: ParsedFile, key: cst.BaseExpression, formula: str) -> str:
    if isinstance(key, (cst.Integer, cst.SimpleString)):
        text = str(key.evaluated_value).replace(".", "_") + ("_" if formula.endswith("'_'") else "")
        return f'"{text}"' if text.isidentifier() or text.isalnum() else repr(text)
    return formula.replace("str(k)", f"str({source.format(key)})")


def _convert_to_lists(source: ParsedFile, assigned: Assigned, name: str, is_parameters: bool) -> Changes:
    """Return the change that wraps `self.name` in `list()` where a list is needed, as in `a_list + self.name`.

    A ParameterList, unlike a ModuleList, also refuses `self.name + a_list`. Functions of torch that need a list refuse
    the ParameterList.
    """
    changes: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for read in _list_reads(source, assigned, name):
        node: cst.BaseExpression = read
        while isinstance(part := source.get_parent(node), cst.Subscript) and _is_slice(part):
            node = part
        parent = source.get_parent(node)
        if isinstance(parent, cst.BinaryOperation) and isinstance(parent.operator, cst.Add):
            is_refused = is_parameters or parent.right is node
        else:
            is_refused = is_parameters and _is_refused(source, parent)
        if is_refused:
            changes[node] = [cst.Call(cst.Name("list"), [cst.Arg(node)])]
    return changes


def _is_slice(subscript: cst.Subscript) -> bool:
    return len(subscript.slice) == 1 and isinstance(subscript.slice[0].slice, cst.Slice)


def _is_refused(source: ParsedFile, argument: cst.CSTNode) -> bool:
    """Return True if the call around this argument refuses an nn.ParameterList. `*argument` is not refused."""
    call = source.get_parent(argument) if isinstance(argument, cst.Arg) and not argument.star else None
    return isinstance(call, cst.Call) and refuses_parameter_list(source.format(call.func), source.find_torch_names())


def build_registrations(name: str, value: str, instance: str, torch_nn: str | None) -> list[str]:
    """Return the statements that may register the value, most likely first. `verify` decides between them.

    `torch_nn`: for a parameter, the name under which the file imports torch.nn; for a buffer, None.
    """
    if torch_nn is not None:
        return [f"{instance}.{name} = {torch_nn}.Parameter({value})"]
    registration = f'{instance}.register_buffer("{name}", {value}'
    return [f"{registration}, persistent=False)", f"{registration})"]
