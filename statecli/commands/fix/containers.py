"""Turn a list or dict into a property after its tensors became buffers, so that `self.anchors` keeps working."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from statecli.commands.fix.init_edits import Assigned, add_property
from statecli.commands.fix.source import Changes, NoEdit, ParsedFile, get_instance_name


def build_container_property(source: ParsedFile, assigned: Assigned, name: str, names: Sequence[str]) -> Changes:
    """Return the change that adds a property: at each read, build the list or dict from the buffers. Raises NoEdit."""
    if assigned.method is None:
        raise NoEdit(f"the class body, not a method, assigns {name}")
    _check_not_changed(source, assigned, name)
    instance = get_instance_name(assigned.method)
    if _is_dict(source, assigned.value, names):
        text = _format_dict(source, assigned.value, name, instance)
    else:
        text = _format_list(assigned.value, name, instance)
    return add_property(source, assigned.owner, name, text)


def _check_not_changed(source: ParsedFile, assigned: Assigned, name: str) -> None:
    """Raise NoEdit if the class changes the container, because a property returns a new container each time."""
    for node in source.find(cst.Attribute, within=assigned.owner.body):
        if node.attr.value != name or source.find_around(node, cst.FunctionDef) is None:
            continue
        parent = source.get_parent(node)
        if isinstance(parent, cst.Subscript):
            is_changed = isinstance(source.get_parent(parent), (cst.AssignTarget, cst.AugAssign, cst.Del))
        else:
            is_changed = isinstance(parent, cst.Attribute) and parent.attr.value in _CHANGING_METHODS
        if is_changed:
            raise NoEdit(f"a method of {assigned.owner.name.value} changes the items of {name}")


#: Methods that change a list or dict.
_CHANGING_METHODS = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update")
)


def _is_dict(source: ParsedFile, value: cst.BaseExpression, names: Sequence[str]) -> bool:
    if isinstance(value, (cst.Dict, cst.DictComp)) or source.format(value).startswith("dict("):
        return True
    return any("['" in entry or '["' in entry for entry in names)


def _format_list(value: cst.BaseExpression, name: str, instance: str) -> str:
    begin, end = ("tuple(", ")") if isinstance(value, cst.Tuple) else ("[", "]")
    count = _count_items(value)
    if count is not None:
        return f'{begin}getattr({instance}, f"{name}_{{i}}") for i in range({count}){end}'
    return f'{begin}buffer for key, buffer in {instance}.named_buffers(recurse=False) if key.startswith("{name}_"){end}'


def _count_items(value: cst.BaseExpression) -> int | None:
    """Return the number of items of a list, tuple or comprehension, or None if the code does not show the number."""
    if isinstance(value, (cst.List, cst.Tuple)):
        return None if any(isinstance(item, cst.StarredElement) for item in value.elements) else len(value.elements)
    if isinstance(value, (cst.ListComp, cst.GeneratorExp)):
        loop = value.for_in
        return None if loop.ifs or loop.inner_for_in else _count_items_of_iterable(loop.iter)
    return None


def _count_items_of_iterable(value: cst.BaseExpression) -> int | None:
    if isinstance(value, cst.Call) and isinstance(value.func, cst.Name) and value.func.value == "range":
        is_number = len(value.args) == 1 and isinstance(value.args[0].value, cst.Integer)
        return value.args[0].value.evaluated_value if is_number else None  # type: ignore[attr-defined]
    return _count_items(value)


def _format_dict(source: ParsedFile, value: cst.BaseExpression, name: str, instance: str) -> str:
    elements = value.elements if isinstance(value, cst.Dict) else ()
    keys = [item.key for item in elements if isinstance(item, cst.DictElement)]
    if isinstance(value, cst.Dict) and len(keys) == len(elements):
        texts = [source.format(key) for key in keys]
        are_identifiers = all(
            isinstance(key, cst.SimpleString) and str(key.evaluated_value).isidentifier() for key in keys
        )
        part = "{key}" if are_identifiers else "{str(key).replace('.', '_')}"
        keys_text = ", ".join(texts) + ("," if len(texts) == 1 else "")
        return f'{{key: getattr({instance}, f"{name}_{part}") for key in ({keys_text})}}'
    if isinstance(value, cst.Call) and all(arg.keyword is not None for arg in value.args):  # dict(a=..., b=...)
        keys_text = ", ".join(f'"{arg.keyword.value}"' for arg in value.args if arg.keyword) + ","
        return f'{{key: getattr({instance}, f"{name}_{{key}}") for key in ({keys_text})}}'
    return (
        f'{{key.removeprefix("{name}_"): buffer for key, buffer in {instance}.named_buffers(recurse=False) '
        f'if key.startswith("{name}_")}}'
    )
