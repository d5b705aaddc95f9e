"""The source lines that would register an unregistered tensor, ready to paste.

Where the assignment can be read (`self.table = torch.randn(5, 5)`) the fix replaces that statement; where it cannot,
or a list is filled later, the fix goes where its first line, a comment, says. `persistent=False` is right for what the
constructor computes anyway (tables, anchors, masks); leave it out for what must come back from a checkpoint.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from statecli.modules.walk import Held, Step

_AT_END = "# at the end of __init__:\n"
_BEFORE = "# after super().__init__():\n"


@dataclass(frozen=True)
class _Source:
    """An assignment as it stands in the file.

    `owner` is what the target hangs on (`self`), `nn` how the file writes torch.nn; `early` when the statement comes
    before `super().__init__()`.
    """

    owner: str
    value: ast.expr
    text: str
    nn: str
    early: bool = False


def suggest(held: Held, place: tuple[str, int] | None) -> str | None:
    """What to write instead, or None where nothing needs registering (an optimizer's state)."""
    first = held.steps[0]
    if any(issubclass(type(step.held), torch.optim.Optimizer) for step in held.steps):
        return None
    name = first.label.rpartition(".")[2]
    source = _read(place, name)
    if any(step.how in ("closure", "default") for step in held.steps):
        return _captured(held)
    if first.how == "class":
        return _in_class(held, name, source)
    text = _registration(held, name, source)
    if text is None:
        return _elsewhere(held)
    if _in_the_way(held, name):
        text = f"# delete the class attribute {name} first: it is in the way\n{text}"
    return _BEFORE + text if source and source.early and not text.startswith("#") else text


def _registration(held: Held, name: str, source: _Source | None) -> str | None:
    """The fix for what hangs on the attribute itself or in one container on it; None for anything further away."""
    steps = held.steps
    if len(steps) == 1 and steps[0].how == "attribute":
        return _plain(held.tensor, name, source)
    container = steps[0].held
    if not _is_container(container) or len(steps) < 2 or steps[1].how != "item":
        return None
    members = _members(container)
    if _all(members, nn.Module):
        return _container("Module", container, name, source)
    if len(steps) > 2 or not _all(members, torch.Tensor):
        return None
    if any(tensor.requires_grad for tensor in members):
        return _container("Parameter", container, name, source)
    return _loop(container, name, source)


def _is_container(thing: Any) -> bool:
    return issubclass(type(thing), (list, tuple, dict, collections.deque))


def _members(container: Any) -> list[Any]:
    """What a container holds, past whatever a subclass made of `__iter__`."""
    if issubclass(type(container), dict):
        return list(dict.values(container))
    base = next(base for base in (list, tuple, collections.deque) if issubclass(type(container), base))
    return list(base.__iter__(container))


def _all(members: list[Any], kind: type) -> bool:
    return all(issubclass(type(member), kind) for member in members)


def _plain(tensor: torch.Tensor, name: str, source: _Source | None) -> str:
    owner = source.owner if source else "self"
    if tensor.requires_grad:
        if source is None:
            return f'{_AT_END}self.{name} = nn.Parameter(self.__dict__.pop("{name}"))'
        return f"{owner}.{name} = {source.nn}.Parameter({source.text})"
    if source is None:
        return f'{_AT_END}self.register_buffer("{name}", self.__dict__.pop("{name}"))'
    return f'{owner}.register_buffer("{name}", {source.text})'


def _container(what: str, container: Any, name: str, source: _Source | None) -> str:
    """nn.ModuleList and its like take the place of the container; append and item assignment go on working."""
    is_dict = issubclass(type(container), dict)
    new = f"{source.nn if source else 'nn'}.{what}{'Dict' if is_dict else 'List'}"
    value = source.text if source else f"self.{name}"
    value = "" if value in ("[]", "list()", "{}", "dict()") else value
    target = f"{source.owner if source else 'self'}.{name}"
    if is_dict and any(type(key) is not str or "." in key for key in dict.keys(container)):
        keys = "# its keys become strings without dots\n"
        return f'{keys}{target} = {new}({{str(k).replace(".", "_"): v for k, v in ({value}).items()}})'
    return f"{'' if source else _AT_END}{target} = {new}({value})"


def _loop(container: Any, name: str, source: _Source | None) -> str:
    """One buffer a tensor. The container goes: its entries would be left pointing at the old storage by a move."""
    owner = source.owner if source else "self"
    complete = source is not None and _is_complete(source.value, len(_members(container)))
    value = source.text if source and complete else f'{owner}.__dict__.pop("{name}")'
    where, key, pairs = "" if complete else _AT_END, "i", f"enumerate({value})"
    if issubclass(type(container), dict):
        pairs = f"{value}.items()" if not complete or value.endswith((")", "}")) else f"({value}).items()"
        plain = all(type(key) is str and key.isidentifier() for key in dict.keys(container))
        key = "key" if plain else "str(key).replace('.', '_')"
    return (
        f"{where}for {'i' if key == 'i' else 'key'}, tensor in {pairs}:\n"
        f'    {owner}.register_buffer(f"{name}_{{{key}}}", tensor, persistent=False)\n'
        f'# and read each as getattr(self, f"{name}_{{{key}}}")'
    )


def _is_complete(value: ast.expr, count: int) -> bool:
    """Whether the assigned expression gives the whole container, not an empty one that is filled later."""
    if isinstance(value, (ast.List, ast.Tuple)):
        return len(value.elts) == count
    if isinstance(value, ast.Dict):
        return len(value.keys) == count
    return isinstance(value, (ast.ListComp, ast.DictComp)) or (isinstance(value, ast.Call) and bool(value.args))


def _in_class(held: Held, name: str, source: _Source | None) -> str | None:
    where = f"# delete {name} from the class body; in __init__, after super().__init__():\n"
    if source is None or any(_attribute_like(step) for step in held.steps[1:]):
        return f"{where}# register it there with self.register_buffer"
    if len(held.steps) == 1:
        return where + _plain(held.tensor, name, source)
    if issubclass(type(held.steps[0].held), nn.Module):
        return f"{where}self.{name} = {source.text}"
    text = _registration(held, name, source)
    return None if text is None else where + text.removeprefix(_AT_END)


def _attribute_like(step: Step) -> bool:
    return step.how not in ("item", "registered")


def _captured(held: Held) -> str:
    """A tensor in a closure or a default: moved only when the function reads it from the module."""
    step = next(step for step in held.steps if step.how in ("closure", "default"))
    quoted = re.search(r"'(\w+)'", step.label)
    name = quoted.group(1) if quoted else held.steps[0].label.rpartition(".")[2] + "_default"
    comment = f"# in the function read self.{name} (a hook gets the module as its first argument), do not capture it\n"
    return comment + _buffer_or_parameter(held.tensor, name, name)


def _buffer_or_parameter(tensor: torch.Tensor, name: str, value: str) -> str:
    if tensor.requires_grad:
        return f"self.{name} = nn.Parameter({value})"
    return f'self.register_buffer("{name}", {value})'


def _elsewhere(held: Held) -> str:
    """Held by some object: that object has to become a module, or the tensor has to live on one."""
    holder = _holder(held)
    name = "_".join(re.findall(r"\w+", "".join(step.label for step in held.steps)))
    if issubclass(type(holder), nn.Module):
        steps = [step for step in held.steps if step.held is not holder]
        return f"# make {_kind(steps[0].held)} an nn.Module, so that the module in it is registered"
    if issubclass(type(holder), torch.Tensor):
        comment = "# keep it on the module: no move reaches what hangs on a tensor\n"
    elif issubclass(type(holder), torch.distributions.Distribution):
        comment = "# keep what it is made of on the module and build the distribution in forward\n"
    elif _is_container(holder) or type(holder).__module__ in ("builtins", "itertools", "functools"):
        comment = f"# keep it on the module and pass it from there, not through the {_kind(holder)}\n"
    else:
        attribute = held.steps[-1].label.lstrip(".")
        return (
            f"# make {_kind(holder)} an nn.Module that registers it, in its own __init__:\n"
            f"{_buffer_or_parameter(held.tensor, attribute, attribute)}"
        )
    path = "".join(step.label for step in held.steps).lstrip(".")
    return comment + _buffer_or_parameter(held.tensor, name, f"self.{path}" if "#" not in path else name)


def _holder(held: Held) -> Any:
    """What holds the tensor: its module, if an unregistered one does, else the object one step before it."""
    for step in held.steps[:-1]:
        if issubclass(type(step.held), nn.Module):
            return step.held
    return held.steps[-2].held if len(held.steps) > 1 else held.owner


def _kind(thing: Any) -> str:
    return type(thing).__name__


def _in_the_way(held: Held, name: str) -> bool:
    """register_buffer refuses a name that the class has as an attribute of its own."""
    return any(name in vars(base) for base in type(held.owner).__mro__)


# --- reading the assignment ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _parsed(filename: str) -> tuple[str, ast.Module] | None:
    try:
        text = Path(filename).read_text("utf-8")
        return text, ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None


@functools.lru_cache(maxsize=256)
def _read(place: tuple[str, int] | None, name: str) -> _Source | None:
    """The statement at `place` that assigns `name`; None where the line is not a plain assignment of it."""
    parsed = _parsed(place[0]) if place else None
    if place is None or parsed is None:
        return None
    text, tree = parsed
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno <= place[1] <= (node.end_lineno or 0):
            found = _target(node, name)
            if found is not None:
                owner, value = found
                return _Source(owner, value, _text(text, value), _torch_nn(tree), _is_early(tree, node))
    return None


def _target(node: ast.Assign | ast.AnnAssign, name: str) -> tuple[str, ast.expr] | None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if node.value is None:
        return None
    for target in targets:
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
        if isinstance(target, ast.Tuple):
            same = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts)
            pairs = list(zip(target.elts, node.value.elts, strict=True)) if same else []  # type: ignore[attr-defined]
        for one, value in pairs:
            if isinstance(one, ast.Attribute) and one.attr == name:
                return ast.unparse(one.value), value
            if isinstance(one, ast.Name) and one.id == name:
                return "self", value  # in a class body
    return None


def _text(text: str, value: ast.expr) -> str:
    written = ast.get_source_segment(text, value) or ast.unparse(value)
    bare = isinstance(value, ast.Tuple) and not written.startswith("(")
    return f"({written})" if bare else written


def _torch_nn(tree: ast.Module) -> str:
    """How this file writes torch.nn."""
    whole = "torch"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found = next((alias for alias in node.names if alias.name == "nn"), None)
            if found:
                return found.asname or "nn"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch.nn" and alias.asname:
                    return alias.asname
                if alias.name == "torch" and alias.asname:
                    whole = alias.asname
    return f"{whole}.nn"


def _is_early(tree: ast.Module, statement: ast.stmt) -> bool:
    """Whether the statement comes before `super().__init__()` of its own function, where nothing can be registered."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and statement in node.body:
            calls = [sub for sub in ast.walk(node) if isinstance(sub, ast.Call)]
            starts = [c.lineno for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "__init__"]
            return bool(starts) and statement.lineno < min(starts)
    return False
