"""Edits of forward: create tensors on the input's device, move cached tensors, and add or remove `.detach()`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from statecli.commands.fix.init_edits import Assigned, check_single_target, find_assigned, list_assignments
from statecli.commands.fix.source import (
    Changes,
    NoEdit,
    ParsedFile,
    get_instance_name,
    is_attribute,
    join_changes,
    list_targets,
)

#: Functions of torch that create a tensor on the default device.
_FACTORIES = frozenset(
    [
        *("arange", "empty", "eye", "full", "hamming_window", "hann_window", "linspace", "logspace", "ones", "rand"),
        *("randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    ]
)


def list_input_devices(source: ParsedFile, method: cst.FunctionDef) -> list[str]:
    """Return `x.device` for each required argument that may be a tensor; arguments annotated as Tensor come first."""
    parameters = (*method.params.posonly_params, *method.params.params)
    is_method = source.find_around(method, cst.ClassDef) is not None and not any(
        source.format(decorator.decorator) == "staticmethod" for decorator in method.decorators
    )
    parameters = parameters[is_method:]
    named = [(parameter.name.value, parameter) for parameter in parameters if parameter.default is None]
    annotated = [name for name, parameter in named if _is_tensor(parameter)]
    unannotated_names = [name for name, parameter in named if parameter.annotation is None]
    return [f"{name}.device" for name in (*annotated, *unannotated_names)]


def _is_tensor(parameter: cst.Param) -> bool:
    if parameter.annotation is None:
        return False
    return re.search(r"\bTensor\b", cst.Module([]).code_for_node(parameter.annotation.annotation)) is not None


def add_device(source: ParsedFile, line: int) -> Iterator[Changes]:
    """Yield changes that add `device=x.device` to calls such as torch.zeros(...) on the line. Raises NoEdit."""
    torch = source.find_torch_name()
    factories = {f"{torch}.{name}" for name in _FACTORIES}
    calls = [
        call
        for call in source.find(cst.Call, line)
        if source.format(call.func) in factories
        and not any(arg.keyword is not None and arg.keyword.value == "device" for arg in call.args)
        and source.find_around(call, cst.FunctionDef) is not None
    ]
    if not calls:
        raise NoEdit("the line has no call that creates a tensor without a device, such as torch.zeros(...)")
    method = source.find_around(calls[0], cst.FunctionDef)
    assert method is not None  # noqa: S101 - of the calls above
    devices = list_input_devices(source, method)
    if not devices:
        raise NoEdit(f"{method.name.value} has no required tensor argument to take the device from")
    for device in devices:
        yield {call: [_add_keyword(source, call, f"device={device}")] for call in calls}


def _add_keyword(source: ParsedFile, call: cst.Call, code: str) -> cst.Call:
    parsed_call = source.parse_expression(f"f({code})")
    assert isinstance(parsed_call, cst.Call)  # noqa: S101 - from the code above
    if not call.args:
        return call.with_changes(args=[parsed_call.args[0]])
    last = call.args[-1]
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    trailing = last.comma if isinstance(last.comma, cst.Comma) else cst.MaybeSentinel.DEFAULT
    spread = isinstance(last.whitespace_after_arg, cst.ParenthesizedWhitespace)
    new = parsed_call.args[0].with_changes(comma=trailing)
    if isinstance(trailing, cst.Comma) and isinstance(trailing.whitespace_after, cst.ParenthesizedWhitespace):
        comma = _find_comma_between(call) or comma
    elif spread:
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        last = last.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*call.args[:-1], last.with_changes(comma=comma), new])


def _find_comma_between(call: cst.Call) -> cst.Comma | None:
    """Return the comma between arguments, with the call's line break if any. Return None for the default comma."""
    if len(call.args) > 1 and isinstance(call.args[0].comma, cst.Comma):
        return call.args[0].comma
    before = call.whitespace_before_args
    return cst.Comma(whitespace_after=before) if isinstance(before, cst.ParenthesizedWhitespace) else None


def recreate_on_device(source: ParsedFile, name: str, line: int) -> Iterator[Changes]:
    """Yield changes that let forward create a cached tensor again if the input changes device. Raises NoEdit."""
    assigned = find_assigned(source, name, line)
    condition = source.find_around(assigned.node, cst.If)
    if (
        condition is None
        or assigned.method is None
        or source.find_around(condition, cst.FunctionDef) is not assigned.method
    ):
        raise NoEdit(f"no if statement controls the assignment of {name}, so there is no condition to change")
    instance = get_instance_name(assigned.method)
    device_values = [
        arg.value
        for arg in source.find(cst.Arg, within=assigned.value)
        if arg.keyword and arg.keyword.value == "device"
    ]
    devices = [source.format(value) for value in device_values if isinstance(value, (cst.Name, cst.Attribute))]
    for device in dict.fromkeys((*devices, *list_input_devices(source, assigned.method))):
        test = condition.test
        if isinstance(test, (cst.Lambda, cst.IfExp, cst.NamedExpr)) and not test.lpar:
            test = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        device_test = source.parse_expression(f"{instance}.{name}.device != {device}")
        changes: Changes = {condition.test: [cst.BooleanOperation(test, cst.Or(), device_test)]}
        yield changes
        yield from _recreate_with_dtype(source, assigned, f"{instance}.{name}", device, test, has_device=bool(devices))
        if not devices:
            moved_value = source.parse_expression(f"({source.format(assigned.value)}).to({device})")
            yield join_changes(changes, {assigned.value: [moved_value]})


def _recreate_with_dtype(
    source: ParsedFile,
    assigned: Assigned,
    name: str,
    device: str,
    test: cst.BaseExpression,
    *,
    has_device: bool,
) -> Iterator[Changes]:
    """Yield the change that lets forward create a cached tensor again if the input changes device or dtype."""
    condition, value = source.find_around(assigned.node, cst.If), assigned.value
    owner, dot, _ = device.rpartition(".device")
    if condition is None or not dot or not isinstance(value, cst.Call):
        return
    if any(arg.keyword is not None and arg.keyword.value == "dtype" for arg in value.args):
        return
    if not has_device:
        value = _add_keyword(source, value, f"device={device}")
    device_or_dtype_test = source.parse_expression(f"{name}.device != {device} or {name}.dtype != {owner}.dtype")
    yield {
        condition.test: [cst.BooleanOperation(test, cst.Or(), device_or_dtype_test)],
        assigned.value: [_add_keyword(source, value, f"dtype={owner}.dtype")],
    }


def move_where_read(source: ParsedFile, name: str, line: int) -> Iterator[Changes]:
    """Yield the change that reads `self.name.to(x.device)` instead of `self.name` in other methods. Raises NoEdit."""
    assigned = find_assigned(source, name, line)
    changes: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for node in source.find(cst.Attribute, within=assigned.owner.body):
        method = source.find_around(node, cst.FunctionDef)
        if node.attr.value != name or method is None or method is assigned.method:
            continue
        devices = list_input_devices(source, method)
        if not is_attribute(node, get_instance_name(method)) or isinstance(source.get_parent(node), cst.AssignTarget):
            continue
        if not devices:
            raise NoEdit(f"{method.name.value} has no required tensor argument to take the device from")
        changes[node] = [source.parse_expression(f"{source.format(node)}.to({devices[0]})")]
    if not changes:
        raise NoEdit(f"no other method of {assigned.owner.name.value} reads {name}")
    yield changes


def detach_when_stored(source: ParsedFile, name: str, line: int) -> Iterator[Changes]:
    """Yield the change that stores `value.detach()` in `self.name` outside of the constructor. Raises NoEdit.

    Also raises NoEdit if code in the file reads the value with its graph, because the edit would change gradients.
    """
    owner = next(reversed(list(source.find(cst.ClassDef, line))), None)
    changes: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    inside: set[int] = set()
    for node in list_assignments(source, owner, name) if owner is not None else ():
        method = source.find_around(node, cst.FunctionDef)
        value = getattr(node, "value", None)
        if value is None or method is None or method.name.value == "__init__":
            continue
        if not isinstance(node, cst.AugAssign):
            check_single_target(node, name)
        inside.update(map(id, source.find(cst.Attribute, within=node)))
        changes[value] = [source.parse_expression(source.format_detached(value))]
    if owner is None or not changes:
        raise NoEdit(f"no method other than __init__ assigns {name}")
    for read in source.find(cst.Attribute):
        parent = source.get_parent(read)
        is_detached = isinstance(parent, cst.Attribute) and parent.attr.value in ("data", "detach")
        is_read = not is_detached and not isinstance(parent, cst.AssignTarget)
        if read.attr.value == name and id(read) not in inside and is_read:
            raise NoEdit(
                f"line {source.get_line(read)} reads {name} with its graph, so .detach() would change the gradients"
            )
    yield changes


def keep_graph(source: ParsedFile, layers: Sequence[str], line: int) -> Iterator[Changes]:
    """Yield the change that removes `.detach()` from a layer's result, if only in-place updates need `.detach()`.

    A buffer that forward updates in place still gets the value without its graph. `layers`: the attributes that lead to
    the layer, the layer first. Raises NoEdit with both remedies if `.detach()` may freeze the layer on purpose.
    """
    nodes = [*source.find(cst.Assign, line), *source.find(cst.AnnAssign, line)]
    layer, *outer = layers
    for call, method in _find_detached(source, layer, source.find_class(nodes[0]).body if nodes else None):
        assert isinstance(call.func, cst.Attribute)  # noqa: S101 - from `_find_detached`
        instance, targets = get_instance_name(method), list_targets(source.get_parent(call))
        name = targets[0].value if len(targets) == 1 and isinstance(targets[0], cst.Name) else None
        updates = _detach_in_updates(source, method, name, instance) if name is not None else {}
        if not updates:
            raise NoEdit(_describe_choice(source, call, layer, instance))
        yield join_changes({call: [call.func.value]}, updates)
        return
    for module in outer:
        owner = _find_only_user(source, module, line)
        for call, method in _find_detached(source, module, owner) if owner is not None else ():
            raise NoEdit(_describe_choice(source, call, module, get_instance_name(method)))
    layer_name = next(filter(str.isidentifier, layers), layer)
    raise NoEdit(f"no method calls detach() on a result of {layer_name}")


def _find_detached(
    source: ParsedFile, layer: str, within: cst.CSTNode | None = None
) -> Iterator[tuple[cst.Call, cst.FunctionDef]]:
    """Yield each call of detach() on a value computed by the layer, with the method around the call."""
    for call in source.find(cst.Call, within=within):
        method = source.find_around(call, cst.FunctionDef)
        if method is None or not isinstance(call.func, cst.Attribute) or call.func.attr.value != "detach" or call.args:
            continue
        parameters = (*method.params.posonly_params, *method.params.params)
        names = [parameter.name.value for parameter in parameters[:1]]
        inner = source.find(cst.Attribute, within=call.func.value)
        if any(is_attribute(node, name, layer) for node in inner for name in names):
            yield call, method


def _find_only_user(source: ParsedFile, attribute: str, line: int) -> cst.ClassDef | None:
    """Return the class that uses the attribute: the class around the line, or else the only class that uses it."""
    users: dict[int, cst.ClassDef] = {}
    for node in source.find(cst.Attribute):
        owner = source.find_around(node, cst.ClassDef)
        if owner is not None and node.attr.value == attribute:
            users[id(owner)] = owner
            if source.get_line(owner) <= line <= source.get_last_line(owner):
                return owner
    return next(iter(users.values())) if len(users) == 1 else None


def _describe_choice(source: ParsedFile, call: cst.Call, layer: str, instance: str) -> str:
    return (
        f"line {source.get_line(call)} detaches the result of {layer}: to freeze {layer}, call "
        f"{instance}.{layer}.requires_grad_(False) in __init__; to train {layer}, remove .detach()"
    )


def _detach_in_updates(source: ParsedFile, method: cst.FunctionDef, name: str, instance: str) -> Changes:
    """Return the change that detaches `name` in in-place updates: `self.mean.lerp_(name.detach(), 0.1)`."""
    changes: dict[cst.CSTNode, list[cst.CSTNode]] = {}
    for call in source.find(cst.Call, within=method.body):
        function = call.func
        if not isinstance(function, cst.Attribute) or not function.attr.value.endswith("_"):
            continue
        if not is_attribute(function.value, instance):
            continue
        for arg in call.args:
            for node in source.find(cst.Name, within=arg.value):
                if node.value == name:
                    changes[node] = [source.parse_expression(f"{name}.detach()")]
    return changes
