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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from statecli.live.tensors import storage
from statecli.live.walk import Held, Step

_AT_END = "# at the end of __init__:\n"
#: Types of keys that `str` writes without running the user's code.
_PLAIN_KEYS = frozenset(id(kind) for kind in (str, int, float, bool, bytes, type(None)))
_BEFORE = "# after super().__init__():\n"
#: Further names of a memory that a fix shows.
FEW_NAMES = 3


@dataclass(frozen=True)
class _Source:
    """An assignment as it stands in the file.

    `owner` is what the target hangs on (`self`), `nn` how the file writes torch.nn; `early` when the statement comes
    before `super().__init__()`. `targets` are all that it assigns at once (`self.x = y = …`), the one in question
    first; `unpacked` when it assigns several values to several names.
    """

    owner: str
    value: ast.expr
    text: str
    nn: str
    early: bool = False
    targets: tuple[str, ...] = ()
    unpacked: bool = False


@dataclass(frozen=True)
class Others:
    """Further names of the memory of a tensor, which a move would part from what is registered.

    `names` are the first `FEW_NAMES` of them, `count` is how many there are. `same`: all name one tensor object.
    """

    names: tuple[str, ...] = ()
    count: int = 0
    same: bool = True


@dataclass(frozen=True)
class _OfContainer:
    """The fix for all that one container holds. `parts`: tensors with further names need another one."""

    text: str | None
    parts: bool = False


class Suggestions:
    """Fixes for the tensors of one model. A container is read once, however many tensors it holds."""

    def __init__(self) -> None:
        self._containers: dict[tuple[int, str, _Source | None, bool, bool], _OfContainer] = {}

    def suggest(
        self, held: Held, place: tuple[str, int] | None, *, repeated: bool = False, others: Others = Others()
    ) -> str | None:
        """What to write instead, or None where nothing needs registering (an optimizer's state).

        `repeated`: the constructor assigns the attribute more than once, so that no one statement can be replaced.
        """
        return _suggested(held, place, repeated, others, self)

    def for_container(self, held: Held, name: str, source: _Source | None) -> _OfContainer:
        """The fix for the container that the first step of `held` leads to."""
        steps = held.steps
        has_modules = any(issubclass(type(step.held), nn.Module) for step in steps)
        key = (id(steps[0].held), name, source, has_modules, len(steps) > 2)
        found = self._containers.get(key)
        if found is None:
            found = self._containers[key] = _of_container(*key[1:], container=steps[0].held)
        return found


def _suggested(
    held: Held, place: tuple[str, int] | None, repeated: bool, others: Others, known: Suggestions
) -> str | None:
    first = held.steps[0]
    if any(issubclass(type(step.held), torch.optim.Optimizer) for step in held.steps):
        return None
    if first.how == "hidden":
        return (
            f"# one name for two things: give {held.fqn} another name, and register that,\n"
            "# or delete it if what is registered is meant"
        )
    name = first.label.rpartition(".")[2]
    source = _read(place, name)
    if any(step.how in ("closure", "default") for step in held.steps):
        return _captured(held)
    if first.how == "class":
        return _in_class(held, name, source, known)
    at_end = source is not None and (repeated or source.unpacked)
    text = _registration(held, name, None if at_end else source, others, known)
    if text is None:
        return _elsewhere(held)
    if at_end and source and source.owner != "self":
        text = re.sub(r"\bself\b", source.owner, text.replace(_AT_END, "# after its last assignment:\n"))
    if _in_the_way(held, name):
        text = f"# delete the class attribute {name} first: it is in the way\n{text}"
    return _BEFORE + text if source and source.early and not text.startswith("#") else text


def _registration(held: Held, name: str, source: _Source | None, others: Others, known: Suggestions) -> str | None:
    """The fix for what hangs on the attribute itself or in one container on it; None for anything further away."""
    steps = held.steps
    if len(steps) == 1 and steps[0].how == "attribute":
        return _once(name, others) if _would_part(held.tensor, source, others) else _plain(held.tensor, name, source)
    if not _is_container(steps[0].held) or len(steps) < 2 or steps[1].how != "item":
        return None
    found = known.for_container(held, name, source)
    if found.parts and others.count:
        return _once(f"an attribute for each tensor of {name}", others)
    return found.text


def _of_container(
    name: str, source: _Source | None, has_modules: bool, is_deeper: bool, *, container: Any
) -> _OfContainer:
    if has_modules:
        return _OfContainer(_of_modules(container, name, source))
    if is_deeper or not _all(_members(container), torch.Tensor):
        return _OfContainer(None)
    return _of_tensors(container, name, source)


def _would_part(tensor: torch.Tensor, source: _Source | None, others: Others) -> bool:
    """Whether registering `tensor` leaves its further names behind. A new nn.Parameter is one object for all names
    given to it later, and keeps them together."""
    if not others.count:
        return False
    fresh = source is not None and isinstance(source.value, ast.Call)
    return not (tensor.requires_grad and fresh and others.same)


def _once(name: str, others: Others) -> str:
    shown = ", ".join(others.names) + (", …" if others.count > len(others.names) else "")
    return (
        f"# register it once, as {name}, and wherever {shown} is read, read that instead:\n"
        "# a move gives what is registered new memory, and further names stay in the old"
    )


def part_of(fqn: str) -> str:
    """For a tensor that lies in the memory of another one, `fqn`: registered by itself it would come apart from it."""
    return (
        f"# it lies in the memory of {fqn}: take it from there wherever it is read,\n"
        "# or register a clone() of it if the two may come apart"
    )


def _of_tensors(container: Any, name: str, source: _Source | None) -> _OfContainer:
    members = _members(container)
    parameters = [issubclass(type(member), nn.Parameter) or member.requires_grad for member in members]
    if any(parameters) and not all(parameters):
        text = "# put what is learned into an nn.ParameterList, and register the others with self.register_buffer"
        return _OfContainer(text)
    parts = not _all(members, nn.Parameter)
    if parts and len({storage(member)[0] for member in members}) < len(members):
        return _OfContainer(_once(f"an attribute for each tensor of {name}", Others(("a second entry",), 1)), parts)
    if any(parameters):
        return _OfContainer(_container("Parameter", container, name, source), parts)
    return _OfContainer(_loop(container, name, source), parts)


def _of_modules(container: Any, name: str, source: _Source | None) -> str | None:
    """For a container with modules in it: directly, in pairs with their names, or one container further down."""
    members = [member for member in _members(container) if member is not None]
    if _all(members, nn.Module):
        return _container("Module", container, name, source)
    is_dict = issubclass(type(container), dict)
    if not is_dict and all(_is_named(member) for member in members):
        keys = [member[0] for member in members]
        if len(set(keys)) == len(keys) and not any(_is_bad_key(key, nn.ModuleDict) for key in keys):
            return f"# and iterate over its items()\n{_assigned('ModuleDict', name, source, '{}')}"
    nested = [issubclass(type(m), (list, tuple)) and _all(_members(m), nn.Module) for m in members]
    if nested and all(nested) and len(members) == len(_members(container)):
        part = f"{source.nn if source else 'nn'}.ModuleList(part)"
        if not is_dict:
            return _assigned("ModuleList", name, source, f"{part} for part in {{}}", container)
        if not any(_is_bad_key(key, nn.ModuleDict) for key in dict.keys(container)):
            inner = f"{{{{key: {part} for key, part in ({{}}).items()}}}}"
            return _assigned("ModuleDict", name, source, inner, container)
    return f"# keep the modules of {name} in an nn.ModuleList or nn.ModuleDict, apart from whatever else is in it"


def _is_named(member: Any) -> bool:
    return type(member) is tuple and len(member) == 2 and type(member[0]) is str and _all([member[1]], nn.Module)


def _assigned(kind: str, name: str, source: _Source | None, value: str, container: Any = None) -> str:
    """`self.name = nn.kind(value)`, `{}` in `value` standing for what is assigned now."""
    if source is None or (container is not None and not _is_complete(source.value, len(_members(container)))):
        return f"{_AT_END}self.{name} = {source.nn if source else 'nn'}.{kind}({value.format(f'self.{name}')})"
    return f"{' = '.join(source.targets)} = {source.nn}.{kind}({value.format(source.text)})"


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
    if source is None and tensor.requires_grad:
        return f'{_AT_END}self.{name} = nn.Parameter(self.__dict__.pop("{name}"))'
    if source is None:
        return f'{_AT_END}self.register_buffer("{name}", self.__dict__.pop("{name}"))'
    if tensor.requires_grad:
        return f"{' = '.join(source.targets)} = {source.nn}.Parameter({source.text})"
    also = "".join(f"\n{target} = {source.targets[0]}" for target in source.targets[1:])
    return f'{source.owner}.register_buffer("{name}", {source.text}){also}'


def _container(what: str, container: Any, name: str, source: _Source | None) -> str:
    """nn.ModuleList and its like take the place of the container; append and item assignment go on working."""
    if issubclass(type(container), dict):
        return _dictionary(f"{what}Dict", container, name, source)
    if source and source.text in ("[]", "list()"):
        return f"{' = '.join(source.targets)} = {source.nn}.{what}List()"
    return _assigned(f"{what}List", name, source, "{}")


def _dictionary(kind: str, container: Any, name: str, source: _Source | None) -> str:
    """nn.ModuleDict or nn.ParameterDict, with other keys where it would not take these."""
    keys = list(dict.keys(container))
    taker: type = getattr(nn, kind)
    if not any(_is_bad_key(key, taker) for key in keys):
        if source and source.text in ("{}", "dict()"):
            return f"{' = '.join(source.targets)} = {source.nn}.{kind}()"
        return _assigned(kind, name, source, "{}")
    if any(id(type(key)) not in _PLAIN_KEYS for key in keys):
        return f"# make it an nn.{kind}, under keys that are strings without dots"
    comment = "# its keys become strings without dots"
    for suffix in ("", "_"):
        new = [str(key).replace(".", "_") + suffix for key in keys]
        if len(set(new)) == len(keys) and not any(_is_bad_key(key, taker) for key in new):
            key = f"str(k).replace('.', '_') + {suffix!r}" if suffix else "str(k).replace('.', '_')"
            inner = f"{{{{{key}: v for k, v in ({{}}).items()}}}}"
            return _headed(comment, _assigned(kind, name, source, inner, container))
        comment = f"# its keys become strings without dots that end in _: nn.{kind} has attributes of such names"
    return f"# make it an nn.{kind}, under keys that are strings without dots and no attributes of nn.{kind}"


def _headed(comment: str, text: str) -> str:
    """`comment` above `text`, below the line that says where it goes."""
    at_end = text.startswith(_AT_END)
    return f"{_AT_END if at_end else ''}{comment}\n{text.removeprefix(_AT_END)}"


def _is_bad_key(key: Any, taker: type) -> bool:
    """Whether nn.ModuleDict or nn.ParameterDict refuses the key."""
    return type(key) is not str or not key or "." in key or hasattr(taker(), key)


def _loop(container: Any, name: str, source: _Source | None) -> str:
    """One buffer a tensor. The container goes: its entries would be left pointing at the old storage by a move."""
    owner = source.owner if source else "self"
    complete = source is not None and _is_complete(source.value, len(_members(container)))
    value = source.text if source and complete else f'{owner}.__dict__.pop("{name}")'
    where, key, pairs = "" if complete else _AT_END, "i", f"enumerate({value})"
    if issubclass(type(container), dict):
        pairs = f"{value}.items()" if not complete or value.endswith((")", "}")) else f"({value}).items()"
        keys = list(dict.keys(container))
        plain = all(type(key) is str and key.isidentifier() for key in keys)
        if any(id(type(key)) not in _PLAIN_KEYS for key in keys) or (
            not plain and len({str(key).replace(".", "_") for key in keys}) < len(keys)
        ):
            return "# register each with self.register_buffer, under a name of its own"
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


def _in_class(held: Held, name: str, source: _Source | None, known: Suggestions) -> str | None:
    where = f"# delete {name} from the class body; in __init__, after super().__init__():\n"
    if source is None or any(_attribute_like(step) for step in held.steps[1:]):
        return f"{where}# register it there with self.register_buffer"
    if len(held.steps) == 1:
        return where + _plain(held.tensor, name, source)
    if issubclass(type(held.steps[0].held), nn.Module):
        return f"{where}self.{name} = {source.text}"
    text = _registration(held, name, source, Others(), known)
    if text is None or text.startswith(_AT_END):
        return f"{where}# register it there with self.register_buffer"
    return where + text


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
            f"# make {_kind(holder)} an nn.Module; in its own __init__, instead of self.{attribute} = value:\n"
            f"{_buffer_or_parameter(held.tensor, attribute, 'value')}"
        )
    path = "".join(step.label for step in held.steps).lstrip(".")
    if "#" in path:  # no Python reaches it by that name
        return comment.removesuffix("\n") + f": register it there, as {name} for one"
    return comment + _buffer_or_parameter(held.tensor, name, f"self.{path}")


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


@dataclass(frozen=True)
class _File:
    """A parsed source file: its lines, how it writes torch.nn, and its assignments by each line they cover.

    `early` are those that come before `super().__init__()` of their own function, where nothing can be registered.
    """

    lines: list[str]
    nn: str
    assignments: dict[int, list[ast.Assign | ast.AnnAssign]] = field(default_factory=dict)
    early: set[ast.stmt] = field(default_factory=set)


@functools.lru_cache(maxsize=64)
def _parsed(filename: str) -> _File | None:
    try:
        text = Path(filename).read_text("utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    file = _File(text.split("\n"), _torch_nn(tree))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                file.assignments.setdefault(line, []).append(node)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            file.early.update(_early(node))
    return file


@functools.lru_cache(maxsize=256)
def _read(place: tuple[str, int] | None, name: str) -> _Source | None:
    """The statement at `place` that assigns `name`; None where the line is not a plain assignment of it."""
    file = _parsed(place[0]) if place else None
    if place is None or file is None:
        return None
    for node in file.assignments.get(place[1], ()):
        found = _target(node, name)
        if found is not None:
            owner, value = found
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            written = [ast.unparse(target) for target in targets]
            own = f"{owner}.{name}"
            others = [one for one in written if one != (own if own in written else name)]
            unpacked = any(isinstance(target, (ast.Tuple, ast.List)) for target in targets)
            text = _text(file.lines, value)
            return _Source(owner, value, text, file.nn, node in file.early, (own, *others), unpacked)
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


def _text(lines: list[str], value: ast.expr) -> str:
    first, last = value.lineno - 1, (value.end_lineno or value.lineno) - 1
    encoded = [line.encode() for line in lines[first : last + 1]]
    encoded[-1] = encoded[-1][: value.end_col_offset]  # offsets count bytes
    encoded[0] = encoded[0][value.col_offset :]
    written = b"\n".join(encoded).decode()
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


def _early(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of an `__init__` that come before its `super().__init__()`."""
    calls = [sub for sub in ast.walk(function) if isinstance(sub, ast.Call)]
    starts = [c.lineno for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "__init__"]
    return [statement for statement in function.body if starts and statement.lineno < min(starts)]
