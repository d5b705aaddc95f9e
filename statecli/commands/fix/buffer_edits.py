"""Edit registered buffers: turn them into parameters, or store complex values as pairs of real numbers."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from statecli.commands.fix.source import Changes, NoEdit, ParsedFile, get_instance_name, is_attribute, join_changes
from statecli.live.attribute_source import find_torch_nn_name


def _find_registration(source: ParsedFile, name: str, line: int) -> tuple[cst.Call, cst.FunctionDef, str]:
    """Return the register_buffer call on the line, its method, and the name of the method's first argument (`self`)."""
    for call in source.find(cst.Call, line):
        method = source.find_around(call, cst.FunctionDef)
        if method is None or len(call.args) < 2:
            continue
        instance, key = get_instance_name(method), call.args[0].value
        is_named = isinstance(key, cst.SimpleString) and key.evaluated_value == name
        if is_attribute(call.func, instance, "register_buffer") and is_named and call.args[1].keyword is None:
            return call, method, instance
    raise NoEdit(f'the line has no call of the form self.register_buffer("{name}", tensor)')


def make_parameter(source: ParsedFile, name: str, line: int, filename: str) -> Iterator[Changes]:
    """Yield the change that turns a buffer with requires_grad into a parameter of the same name. Raises NoEdit."""
    call, _, instance = _find_registration(source, name, line)
    statement = source.get_parent(call)
    if not isinstance(statement, cst.Expr):
        raise NoEdit(f"the call of register_buffer for {name} is part of a larger expression")
    nn = find_torch_nn_name(filename)
    if nn is None:
        raise NoEdit("the fix uses torch.nn, which the file does not import")
    value = source.format(_drop_requires_grad(call.args[1].value))
    new = source.parse_statements(f"{instance}.{name} = {nn}.Parameter({value})")[0]
    assert isinstance(new, cst.SimpleStatementLine)  # noqa: S101 - from the code above
    yield {statement: [new.body[0].with_changes(semicolon=statement.semicolon)]}


def _drop_requires_grad(value: cst.BaseExpression) -> cst.BaseExpression:
    """Return the expression without requires_grad: `torch.ones(4)` for `torch.ones(4, requires_grad=True)`."""
    if not isinstance(value, cst.Call):
        return value
    if isinstance(value.func, cst.Attribute) and value.func.attr.value == "requires_grad_":
        return value.func.value
    kept_arguments = [arg for arg in value.args if arg.keyword is None or arg.keyword.value != "requires_grad"]
    if len(kept_arguments) == len(value.args):
        return value
    if kept_arguments:
        kept_arguments[-1] = kept_arguments[-1].with_changes(comma=value.args[-1].comma)
    return value.with_changes(args=kept_arguments)


_LOADING = """def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
    {name} = state_dict.get(prefix + "{name}")
    if {name} is not None and {name}.is_complex():
        state_dict[prefix + "{name}"] = {torch}.view_as_real({name})
    super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)"""


#: Methods that restore the precision of the real numbers, because a cast of the model may have changed it.
_CASTS = {"complex32": "half", "complex64": "float", "complex128": "double"}


def store_real_parts(source: ParsedFile, name: str, line: int, dtype: str) -> Iterator[Changes]:
    """Yield the change that stores a complex buffer as real numbers; old state_dicts still load. Raises NoEdit."""
    call, method, _ = _find_registration(source, name, line)
    owner = source.find_class(call)
    is_saved = not any(source.format(arg).replace(" ", "").startswith("persistent=False") for arg in call.args)
    if is_saved and source.find_method(owner, "_load_from_state_dict") is not None:
        raise NoEdit(f"the fix adds _load_from_state_dict, which {owner.name.value} already defines")
    torch = source.find_torch_name()
    if torch is None:
        raise NoEdit("the fix uses torch, which the file does not import")
    inside = set(map(id, source.find(cst.Attribute, within=owner.body)))
    outside = [node for node in source.find(cst.Attribute) if node.attr.value == name and id(node) not in inside]
    if outside:
        line = source.get_line(outside[0])
        raise NoEdit(f"code outside of {owner.name.value} uses {name} as a complex tensor (line {line})")
    value = call.args[1].value
    changes: Changes = {value: [source.parse_expression(f"{torch}.view_as_real({source.format(value)})")]}
    for node in source.find(cst.Attribute, within=owner.body):
        enclosing_method = source.find_around(node, cst.FunctionDef)
        if node.attr.value != name or enclosing_method is None or enclosing_method is method:
            continue
        if not is_attribute(node, get_instance_name(enclosing_method)):
            continue
        if isinstance(source.get_parent(node), (cst.AssignTarget, cst.AugAssign)):
            raise NoEdit(f"the method {enclosing_method.name.value} also assigns {name}")
        parts = f"{source.format(node)}.{_CASTS[dtype]}()"
        expression = source.parse_expression(f"{torch}.view_as_complex({parts})")
        changes = join_changes(changes, {node: [expression]})
    if is_saved:
        loading = source.parse_statements(source.indent(_LOADING.format(name=name, torch=torch)))[0]
        loading_method = loading.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        changes = join_changes(changes, {method: [method, loading_method]})
    yield changes
