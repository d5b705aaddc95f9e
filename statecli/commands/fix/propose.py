"""Propose edits for a defect, the likely edits first; `verify` decides about each edit."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from statecli.commands.fix import buffer_edits, forward_edits, init_edits, printed_fix
from statecli.commands.fix.defects import Defect, DefectCause
from statecli.commands.fix.fix_text import BY_HAND_REASON, read_fix
from statecli.commands.fix.init_edits import Assigned, find_assigned
from statecli.commands.fix.source import (
    Changes,
    NoEdit,
    ParsedFile,
    get_instance_name,
    is_attribute,
    join_changes,
    list_targets,
    parse,
)
from statecli.core.registration_rules import UNREGISTERED_PARAMETER
from statecli.live.attribute_source import find_torch_nn_name

#: Largest number of edits to try for a defect.
MAX_EDITS = 6


def propose_edits(defect: Defect, data: bytes, filename: str) -> Iterator[bytes]:
    """Yield the bytes of the file after each possible edit. Raises NoEdit if no edit is possible.

    `filename` is the file on disk, in which the name of torch.nn is looked up.
    """
    source = parse(data)
    comments = _list_comments(source)
    for count, changes in enumerate(_propose_changes(defect, source, filename)):
        if count == MAX_EDITS:
            return
        edited = source.replace(changes)
        if edited == data:
            continue
        if dropped_comments := comments - _list_comments(parse(edited)):
            raise NoEdit(f"the fix would drop the comment {min(dropped_comments)}")
        yield edited


def _list_comments(source: ParsedFile) -> set[str]:
    return {comment.value for comment in source.find(cst.Comment)}


def _propose_changes(defect: Defect, source: ParsedFile, filename: str) -> Iterator[Changes]:
    attribute = _get_attribute(defect)
    if defect.cause is DefectCause.FILE_VARIABLE:
        raise NoEdit(f"{defect.file_variable} is a variable of the file; statecli edits only classes")
    if defect.cause is DefectCause.CREATED_IN_FORWARD:
        return forward_edits.add_device(source, defect.line)
    if defect.cause is DefectCause.CACHED_BY_FORWARD:
        return forward_edits.recreate_on_device(source, attribute, defect.line)
    if defect.cause is DefectCause.CUT_GRAPH:
        return forward_edits.keep_graph(source, _list_layers(defect), defect.line)
    if defect.cause is DefectCause.STORED_GRAPH:
        return forward_edits.detach_when_stored(source, attribute, defect.line)
    if defect.cause is DefectCause.BUFFER_WITH_GRAD:
        return buffer_edits.make_parameter(source, attribute, defect.line, filename)
    if defect.cause is DefectCause.COMPLEX_BUFFER:
        return buffer_edits.store_real_parts(source, attribute, defect.line, defect.dtype)
    if defect.cause is DefectCause.STALE_VIEW:
        return _replace_view(source, attribute, defect.line)
    if defect.cause is DefectCause.UNREGISTERED:
        return _register(defect, source, attribute, filename)
    raise NoEdit(f"statecli has no fix for the rule {defect.rule}")


def _get_attribute(defect: Defect) -> str:
    """Return the attribute that the defect's line assigns: `anchors` for the tensor `head.anchors[0]`.

    The owner of an unregistered tensor is a registered module, so the last part before a subscript is the attribute.
    An exception is a tensor of a module inside a container: `blocks[0].weight`.
    """
    name = defect.names[0] if defect.names else ""
    head = name.partition("[")[0]
    return head.rpartition(".")[2]


def _list_layers(defect: Defect) -> list[str]:
    """Return the attributes that lead to a parameter's layer, innermost first: conv, net for `net.conv.weight`."""
    name = defect.names[0]
    return name.split(".")[-2::-1] or [name]


def _register(defect: Defect, source: ParsedFile, attribute: str, filename: str) -> Iterator[Changes]:
    """Yield the changes that follow the printed fix of an unregistered tensor."""
    fix = read_fix(defect.fix)
    if fix.code:
        name = _find_attribute(source, attribute, defect)
        yield printed_fix.apply_code(source, defect.fix, name, defect.line, defect.names)
        return
    if fix.find_comment("# compute the tensor in forward"):
        yield from _compute_when_read(source, attribute, defect.line)
    elif fix.find_comment("# to train the tensor, make the result an nn.Parameter"):
        yield from _detach(source, attribute, defect.line)
    elif fix.find_comment("# leave the tensor unregistered, and move it where forward reads it"):
        yield from forward_edits.move_where_read(source, attribute, defect.line)
    elif (comment := fix.find_comment("# register the tensor once, as ")) is not None:
        yield from _register_once(defect, source, comment, filename)
    else:
        raise NoEdit(BY_HAND_REASON if defect.fix else "statecli has no fix")


def _find_attribute(source: ParsedFile, attribute: str, defect: Defect) -> str:
    """Return the part of the tensor's name that the line assigns: `heads` for `net.heads['a'].weight`."""
    parts = [part for part in re.split(r"[.\[\]']+", defect.names[0]) if part.isidentifier()]
    for name in (attribute, *reversed(parts)):
        try:
            find_assigned(source, name, defect.line)
        except NoEdit:
            continue
        return name
    return attribute


def _check_assigned_once(source: ParsedFile, assigned: Assigned, name: str) -> None:
    if len(init_edits.list_assignments(source, assigned.owner, name)) > 1:
        raise NoEdit(f"{assigned.owner.name.value} assigns {name} more than once")


def _add_property(source: ParsedFile, assigned: Assigned, name: str, value: str) -> Changes:
    torch = source.find_torch_name()
    kind = f"{torch}.Tensor" if torch is not None else ""
    property_changes = init_edits.add_property(source, assigned.owner, name, value, replaced=assigned, kind=kind)
    return join_changes(init_edits.remove_statement(assigned), property_changes)


def _compute_when_read(source: ParsedFile, name: str, line: int) -> Iterator[Changes]:
    """Yield the change that turns an attribute computed from parameters into a property."""
    assigned = find_assigned(source, name, line)
    _check_assigned_once(source, assigned, name)
    init_edits.check_single_target(assigned.node, name)
    yield _add_property(source, assigned, name, init_edits.express_with_attributes(source, assigned))


def _replace_view(source: ParsedFile, name: str, line: int) -> Iterator[Changes]:
    """Yield the edits of a view: a property (unless a method changes the view's base), and a buffer with a copy."""
    assigned = find_assigned(source, name, line)
    _check_assigned_once(source, assigned, name)
    value = init_edits.express_with_attributes(source, assigned)
    if assigned.method is None:
        raise NoEdit(f"the class body, not a method, assigns {name}")
    init_edits.check_single_target(assigned.node, name)
    instance = get_instance_name(assigned.method)
    expression = source.parse_expression(value)
    bases = {node.attr.value for node in source.find(cst.Attribute, within=expression) if is_attribute(node, instance)}
    if not any(_changes_after_init(source, assigned, base) for base in bases):
        yield _add_property(source, assigned, name, value)
    code = f'{instance}.register_buffer("{name}", {value}.clone(), persistent=False)'
    yield init_edits.replace_statement(source, assigned, code)


def _changes_after_init(source: ParsedFile, assigned: Assigned, base: str) -> bool:
    """Return True if a method other than the constructor assigns the attribute, or changes the tensor in place."""
    for node in source.find(cst.Attribute, within=assigned.owner.body):
        method = source.find_around(node, cst.FunctionDef)
        if node.attr.value != base or method is None or method is assigned.method:
            continue
        parent = source.get_parent(node)
        if isinstance(parent, (cst.AssignTarget, cst.AugAssign)):
            return True
        if (
            isinstance(parent, cst.Attribute)
            and parent.attr.value.endswith("_")
            and not parent.attr.value.startswith("_")
        ):
            return True
    return any(
        isinstance(call.args[0].value, cst.SimpleString)
        and call.args[0].value.evaluated_value == base
        and source.find_around(call, cst.FunctionDef) is not assigned.method
        for call in source.find(cst.Call, within=assigned.owner.body)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "register_buffer" and call.args
    )


def _detach(source: ParsedFile, name: str, line: int) -> Iterator[Changes]:
    """Yield changes that store a result as a detached buffer, first as non-persistent, then as persistent buffer."""
    assigned = find_assigned(source, name, line)
    if assigned.method is None:
        raise NoEdit(f"the class body, not a method, assigns {name}")
    init_edits.check_single_target(assigned.node, name)
    value, instance = source.format_detached(assigned.value), get_instance_name(assigned.method)
    for code in printed_fix.build_registrations(name, value, instance, None):
        yield init_edits.replace_statement(source, assigned, code)


def _register_once(defect: Defect, source: ParsedFile, comment: str, filename: str) -> Iterator[Changes]:
    """Yield changes that register a tensor under a single name, and turn its other names into properties."""
    named = re.match(r"# register the tensor once, as (\S+), and read this name instead of ([^:]+?)(?: \(|:)", comment)
    if named is None or named[2].endswith("…") or "." in named[1]:
        raise NoEdit(BY_HAND_REASON)
    name, others = named[1], [other_name.rpartition(".")[2] for other_name in named[2].split(", ")]
    assigned = find_assigned(source, name, defect.line)
    _check_assigned_once(source, assigned, name)
    if assigned.method is None:
        raise NoEdit(f"the class body, not a method, assigns {name}")
    instance, text = get_instance_name(assigned.method), source.format(assigned.value)
    torch_nn = find_torch_nn_name(filename) or "nn" if defect.rule == UNREGISTERED_PARAMETER.name else None
    targets = {target.attr.value for target in list_targets(assigned.node) if isinstance(target, cst.Attribute)}
    properties: Changes = {}
    for other_name in others:
        if other_name in targets:
            property_changes = init_edits.add_property(source, assigned.owner, other_name, f"{instance}.{name}")
            properties = join_changes(properties, property_changes)
            continue
        second = _find_second_name(source, assigned, other_name)
        value = init_edits.express_with_attributes(source, second)
        properties = join_changes(properties, _add_property(source, second, other_name, value))
    for code in printed_fix.build_registrations(name, text, instance, torch_nn):
        yield join_changes(init_edits.replace_statement(source, assigned, code), properties)


def _find_second_name(source: ParsedFile, assigned: Assigned, name: str) -> Assigned:
    statements = init_edits.list_assignments(source, assigned.owner, name)
    if len(statements) != 1:
        raise NoEdit(f"{assigned.owner.name.value} assigns {name} more than once")
    return find_assigned(source, name, source.get_line(statements[0]))
