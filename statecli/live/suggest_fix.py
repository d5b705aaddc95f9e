"""Suggest source lines that register an unregistered tensor, ready to paste.

If the assignment can be read (`self.table = torch.randn(5, 5)`), the fix replaces the statement. Otherwise, or if a
list is filled later, the first line of the fix is a comment with the place.

Checkpoints of the unfixed model must load into the fixed one. A tensor that the constructor rebuilds identically
becomes a buffer with `persistent=False`, which adds no key to the state_dict. Where a fix adds a key (a parameter, a
module, a random value), its last line says how to load older checkpoints.
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

from statecli.live.rebuild import Rebuild
from statecli.live.tensors import storage
from statecli.live.walk import Step, UnregisteredTensor

_AT_END_OF_INIT = "# at the end of __init__:\n"
#: Types of keys that `str` writes without running the user's code.
_PLAIN_KEYS = frozenset(id(kind) for kind in (str, int, float, bool, bytes, type(None)))
_AFTER_SUPER_INIT = "# after super().__init__():\n"
#: Further names of a memory that a fix shows.
MAX_NAMES_IN_FIX = 3


@dataclass(frozen=True)
class _Assignment:
    """An assignment as written in the file.

    `owner`: the object of the target (`self`); `nn`: torch.nn as the file writes it; `early`: the statement is before
    `super().__init__()`. `targets`: all names assigned at once (`self.x = y = …`), the tensor's first; `unpacked`:
    several values go to several names.
    """

    owner: str
    value: ast.expr
    text: str
    nn: str
    early: bool = False
    targets: tuple[str, ...] = ()
    unpacked: bool = False


@dataclass(frozen=True)
class OtherNames:
    """Further names of the memory of a tensor, which a move would separate from the registered name.

    `names`: the first `FEW_NAMES` of them; `count`: their number; `same`: all refer to one tensor object.
    """

    names: tuple[str, ...] = ()
    count: int = 0
    same: bool = True


@dataclass(frozen=True)
class _ContainerFix:
    """Fix for all tensors of a container. `parts`: tensors with further names, which need another fix."""

    text: str | None
    needs_single_name: bool = False


class Suggestions:
    """Fixes for the tensors of a model. A container is read once, for all its tensors."""

    def __init__(self) -> None:
        self._containers: dict[tuple[int, str, _Assignment | None, bool, bool, Rebuild], _ContainerFix] = {}

    def suggest(
        self,
        unregistered: UnregisteredTensor,
        place: tuple[str, int] | None,
        *,
        repeated: bool = False,
        others: OtherNames = OtherNames(),
        rebuild: Rebuild = Rebuild.UNKNOWN,
    ) -> str | None:
        """Return the code to write instead; None if nothing needs registering (an optimizer's state).

        `repeated`: the constructor assigns the attribute more than once, so that no statement can be replaced.
        `rebuild`: how the tensors of two builds compare.
        """
        if unregistered.tensor.is_complex() and not unregistered.tensor.requires_grad:
            return _suggest_for_complex(unregistered)
        if rebuild is Rebuild.ABSENT and unregistered.steps[0].how != "hidden":
            return _suggest_for_created_later(unregistered)
        return _suggest(unregistered, place, repeated, others, rebuild, self)

    def suggest_for_container(
        self, unregistered: UnregisteredTensor, name: str, source: _Assignment | None, rebuild: Rebuild
    ) -> _ContainerFix:
        """Return the fix for the container at the first step of `unregistered`."""
        steps = unregistered.steps
        has_modules = any(issubclass(type(step.value), nn.Module) for step in steps)
        key = (id(steps[0].value), name, source, has_modules, len(steps) > 2, rebuild)
        fix = self._containers.get(key)
        if fix is None:
            fix = self._containers[key] = _suggest_for_container(*key[1:], container=steps[0].value)
        return fix


def _suggest(
    unregistered: UnregisteredTensor,
    place: tuple[str, int] | None,
    repeated: bool,
    others: OtherNames,
    rebuild: Rebuild,
    suggestions: Suggestions,
) -> str | None:
    first = unregistered.steps[0]
    if any(issubclass(type(step.value), torch.optim.Optimizer) for step in unregistered.steps):
        return None
    if first.how == "hidden":
        return (
            f"# two tensors have the name {unregistered.fqn}: rename the plain attribute and register it,\n"
            "# or delete the attribute if the registered tensor is the right one"
        )
    name = first.label.rpartition(".")[2]
    source = _read_assignment(place, name)
    if any(step.how in ("closure", "default") for step in unregistered.steps):
        return _suggest_for_captured(unregistered, rebuild)
    if first.how == "class":
        return _suggest_for_class_attribute(unregistered, name, source, rebuild, suggestions)
    at_end = source is not None and (repeated or source.unpacked)
    text = _suggest_registration(unregistered, name, None if at_end else source, others, rebuild, suggestions)
    if text is None:
        return _suggest_for_other_holder(unregistered, rebuild)
    if at_end and source and source.owner != "self":
        text = re.sub(r"\bself\b", source.owner, text.replace(_AT_END_OF_INIT, "# after its last assignment:\n"))
    if _is_class_attribute(unregistered, name):
        text = f"# first delete the class attribute {name}, which hides the registered tensor\n{text}"
    return _AFTER_SUPER_INIT + text if source and source.early and not text.startswith("#") else text


def _suggest_registration(
    unregistered: UnregisteredTensor,
    name: str,
    source: _Assignment | None,
    others: OtherNames,
    rebuild: Rebuild,
    suggestions: Suggestions,
) -> str | None:
    """Return the fix for a tensor in the attribute or in a container in the attribute; None for deeper tensors."""
    steps = unregistered.steps
    if len(steps) == 1 and steps[0].how == "attribute":
        return (
            _suggest_single_name(name, others)
            if _would_separate(unregistered.tensor, source, others)
            else _format_registration(unregistered.tensor, name, source, rebuild)
        )
    if not _is_container(steps[0].value) or len(steps) < 2 or steps[1].how != "item":
        return None
    fix = suggestions.suggest_for_container(unregistered, name, source, rebuild)
    if fix.needs_single_name and others.count:
        return _suggest_single_name(f"an attribute for each tensor of {name}", others)
    return fix.text


def _suggest_for_container(
    name: str, source: _Assignment | None, has_modules: bool, is_deeper: bool, rebuild: Rebuild, *, container: Any
) -> _ContainerFix:
    if has_modules:
        return _ContainerFix(_suggest_for_modules(container, name, source))
    if is_deeper or not _are_all(_members(container), torch.Tensor):
        return _ContainerFix(None)
    return _suggest_for_tensors(container, name, source, rebuild)


def _would_separate(tensor: torch.Tensor, source: _Assignment | None, others: OtherNames) -> bool:
    """Return True if registering `tensor` leaves its further names behind.

    A new nn.Parameter is one object for all names assigned later, and keeps them together.
    """
    if not others.count:
        return False
    is_new_object = source is not None and isinstance(source.value, ast.Call)
    return not (tensor.requires_grad and is_new_object and others.same)


def _suggest_single_name(name: str, others: OtherNames) -> str:
    listed = ", ".join(others.names) + (", …" if others.count > len(others.names) else "")
    return (
        f"# register the tensor once, as {name}, and read this name instead of {listed}:\n"
        "# a move copies the registered tensor to new memory; other names still refer to the old memory"
    )


def suggest_for_part(fqn: str) -> str:
    """Return the fix for a tensor in the memory of another, `fqn`: registered alone, the tensor would be separated."""
    return (
        f"# the tensor is a part of {fqn}: compute it from {fqn} where it is read,\n"
        "# or register a clone() if the two may have different values"
    )


def _suggest_for_tensors(container: Any, name: str, source: _Assignment | None, rebuild: Rebuild) -> _ContainerFix:
    members = _members(container)
    parameters = [issubclass(type(member), nn.Parameter) or member.requires_grad for member in members]
    if any(parameters) and not all(parameters):
        text = "# put the trained tensors into an nn.ParameterList, and register the others with self.register_buffer"
        return _ContainerFix(text)
    parts = not _are_all(members, nn.Parameter)
    if parts and len({storage(member)[0] for member in members}) < len(members):
        return _ContainerFix(
            _suggest_single_name(f"an attribute for each tensor of {name}", OtherNames(("a second entry",), 1)), parts
        )
    if any(parameters):
        text = _add_loading(_format_container("Parameter", container, name, source), f"{name}.*")
        return _ContainerFix(text, parts)
    return _ContainerFix(_format_loop(container, name, source, rebuild), parts)


def _suggest_for_modules(container: Any, name: str, source: _Assignment | None) -> str:
    """Return the fix for a container with modules, with the line that loads older checkpoints."""
    text = _suggest_module_container(container, name, source)
    return text if text.startswith("# keep ") else _add_loading(text, f"{name}.*")


def _suggest_module_container(container: Any, name: str, source: _Assignment | None) -> str:
    """Return the fix for a container with modules: directly, in pairs with names, or one container deeper."""
    members = [member for member in _members(container) if member is not None]
    if _are_all(members, nn.Module):
        return _format_container("Module", container, name, source)
    is_dict = issubclass(type(container), dict)
    if not is_dict and all(_is_named_module(member) for member in members):
        keys = [member[0] for member in members]
        if len(set(keys)) == len(keys) and not any(_is_bad_key(key, nn.ModuleDict) for key in keys):
            return f"# and iterate over its items()\n{_format_assignment('ModuleDict', name, source, '{}')}"
    is_nested = [issubclass(type(m), (list, tuple)) and _are_all(_members(m), nn.Module) for m in members]
    if is_nested and all(is_nested) and len(members) == len(_members(container)):
        part = f"{source.nn if source else 'nn'}.ModuleList(part)"
        if not is_dict:
            return _format_assignment("ModuleList", name, source, f"{part} for part in {{}}", container)
        if not any(_is_bad_key(key, nn.ModuleDict) for key in dict.keys(container)):
            inner = f"{{{{key: {part} for key, part in ({{}}).items()}}}}"
            return _format_assignment("ModuleDict", name, source, inner, container)
    return f"# keep the modules of {name} in an nn.ModuleList or nn.ModuleDict, separate from the other objects in it"


def _is_named_module(member: Any) -> bool:
    return type(member) is tuple and len(member) == 2 and type(member[0]) is str and _are_all([member[1]], nn.Module)


def _format_assignment(kind: str, name: str, source: _Assignment | None, value: str, container: Any = None) -> str:
    """Return `self.name = nn.kind(value)`; `{}` in `value` stands for the present value."""
    if source is None or (container is not None and not _is_complete(source.value, len(_members(container)))):
        return f"{_AT_END_OF_INIT}self.{name} = {source.nn if source else 'nn'}.{kind}({value.format(f'self.{name}')})"
    return f"{' = '.join(source.targets)} = {source.nn}.{kind}({value.format(source.text)})"


def _is_container(obj: Any) -> bool:
    return issubclass(type(obj), (list, tuple, dict, collections.deque))


def _members(container: Any) -> list[Any]:
    """Return the items of a container, without calling a subclass's `__iter__`."""
    if issubclass(type(container), dict):
        return list(dict.values(container))
    base = next(base for base in (list, tuple, collections.deque) if issubclass(type(container), base))
    return list(base.__iter__(container))


def _are_all(members: list[Any], kind: type) -> bool:
    return all(issubclass(type(member), kind) for member in members)


def _format_registration(tensor: torch.Tensor, name: str, source: _Assignment | None, rebuild: Rebuild) -> str:
    if source is None:
        registration = _format_buffer_or_parameter(tensor, name, f'self.__dict__.pop("{name}")', rebuild)
        return f"{_AT_END_OF_INIT}{registration}"
    if tensor.requires_grad:
        names = [
            target.removeprefix(f"{source.owner}.") for target in source.targets if target.startswith(source.owner)
        ]
        return _add_loading(
            f"{' = '.join(source.targets)} = {source.nn}.Parameter({source.text})", ", ".join(names) or name
        )
    further_targets = "".join(f"\n{target} = {source.targets[0]}" for target in source.targets[1:])
    return _format_buffer(source.owner, name, source.text, rebuild, further_targets)


def _format_buffer(owner: str, name: str, value: str, rebuild: Rebuild, further_lines: str = "") -> str:
    """Return the registration of a buffer; a random value is saved from now on, any other stays out of the file."""
    if rebuild is Rebuild.DIFFERENT:
        return _add_loading(f'{owner}.register_buffer("{name}", {value}){further_lines}', name)
    text = f'{owner}.register_buffer("{name}", {value}, persistent=False){further_lines}'
    return text if rebuild is Rebuild.IDENTICAL else f"{text}\n{_IF_SAVED}"


#: Line after a buffer of which it is not known whether the constructor rebuilds its value.
_IF_SAVED = "# to save the value too, delete persistent=False and load older checkpoints with strict=False"


def _add_loading(text: str, keys: str) -> str:
    """Add the line that loads checkpoints without the keys that the fix adds to the state_dict."""
    return f"{text}\n# older checkpoints have no {keys}: load them with strict=False, which keeps the initial values"


def _suggest_for_complex(unregistered: UnregisteredTensor) -> str:
    """Return what to decide for a complex tensor: a cast of the model casts buffers, and drops imaginary parts."""
    name, value = unregistered.steps[0].label.lstrip("."), unregistered.steps[0].value
    moved = f"self.{name}.to(x.device)"
    if issubclass(type(value), dict):
        moved = f"{{key: part.to(x.device) for key, part in self.{name}.items()}}"
    elif issubclass(type(value), (list, tuple)):
        moved = f"[part.to(x.device) for part in self.{name}]"
    return (
        f"# leave the tensor unregistered, and move it where forward reads it: {name} = {moved}\n"
        "# if it were a buffer, .half() or .to(torch.bfloat16) would drop its imaginary part"
    )


def _suggest_for_created_later(unregistered: UnregisteredTensor) -> str:
    """Return what to decide for a tensor that only a call of the model creates."""
    name = unregistered.steps[0].label.lstrip(".")
    return (
        f"# the constructor does not create this tensor. If it is a cache, create it on the device of the inputs\n"
        f"# at each call; if it is state, register self.{name} in __init__ with its final shape"
    )


def _format_container(what: str, container: Any, name: str, source: _Assignment | None) -> str:
    """nn.ModuleList and its like take the place of the container; append and item assignment go on working."""
    if issubclass(type(container), dict):
        return _format_dictionary(f"{what}Dict", container, name, source)
    if source and source.text in ("[]", "list()"):
        return f"{' = '.join(source.targets)} = {source.nn}.{what}List()"
    return _format_assignment(f"{what}List", name, source, "{}")


def _format_dictionary(kind: str, container: Any, name: str, source: _Assignment | None) -> str:
    """Return code for nn.ModuleDict or nn.ParameterDict, with other keys if these refuse the keys."""
    keys = list(dict.keys(container))
    container_class: type = getattr(nn, kind)
    if not any(_is_bad_key(key, container_class) for key in keys):
        if source and source.text in ("{}", "dict()"):
            return f"{' = '.join(source.targets)} = {source.nn}.{kind}()"
        return _format_assignment(kind, name, source, "{}")
    if any(id(type(key)) not in _PLAIN_KEYS for key in keys):
        return f"# use an nn.{kind} whose keys are strings without dots"
    comment = "# the keys must be strings without dots"
    for suffix in ("", "_"):
        new_keys = [str(key).replace(".", "_") + suffix for key in keys]
        if len(set(new_keys)) == len(keys) and not any(_is_bad_key(key, container_class) for key in new_keys):
            key = f"str(k).replace('.', '_') + {suffix!r}" if suffix else "str(k).replace('.', '_')"
            inner = f"{{{{{key}: v for k, v in ({{}}).items()}}}}"
            return _add_comment(comment, _format_assignment(kind, name, source, inner, container))
        comment = (
            f"# the keys must be strings without dots; they end in _, because nn.{kind} has attributes of these names"
        )
    return f"# use an nn.{kind} whose keys are strings without dots and not names of its attributes"


def _add_comment(comment: str, text: str) -> str:
    """Return `text` with `comment` above, below the line with the place."""
    at_end = text.startswith(_AT_END_OF_INIT)
    return f"{_AT_END_OF_INIT if at_end else ''}{comment}\n{text.removeprefix(_AT_END_OF_INIT)}"


def _is_bad_key(key: Any, container_class: type) -> bool:
    """Whether nn.ModuleDict or nn.ParameterDict refuses the key."""
    return type(key) is not str or not key or "." in key or hasattr(container_class(), key)


def _format_loop(container: Any, name: str, source: _Assignment | None, rebuild: Rebuild) -> str:
    """Return code with a buffer for each tensor, without the container, because a move would not update it."""
    owner = source.owner if source else "self"
    complete = source is not None and _is_complete(source.value, len(_members(container)))
    value = source.text if source and complete else f'{owner}.__dict__.pop("{name}")'
    placement, key, pairs = "" if complete else _AT_END_OF_INIT, "i", f"enumerate({value})"
    if issubclass(type(container), dict):
        pairs = f"{value}.items()" if not complete or value.endswith((")", "}")) else f"({value}).items()"
        keys = list(dict.keys(container))
        are_identifiers = all(type(key) is str and key.isidentifier() for key in keys)
        if any(id(type(key)) not in _PLAIN_KEYS for key in keys) or (
            not are_identifiers and len({str(key).replace(".", "_") for key in keys}) < len(keys)
        ):
            return "# register each tensor with self.register_buffer, under a separate name"
        key = "key" if are_identifiers else "str(key).replace('.', '_')"
    persistence = "" if rebuild is Rebuild.DIFFERENT else ", persistent=False"
    text = (
        f"{placement}for {'i' if key == 'i' else 'key'}, tensor in {pairs}:\n"
        f'    {owner}.register_buffer(f"{name}_{{{key}}}", tensor{persistence})\n'
        f'# and read each as getattr(self, f"{name}_{{{key}}}")'
    )
    if rebuild is Rebuild.DIFFERENT:
        return _add_loading(text, f"{name}_*")
    return text if rebuild is Rebuild.IDENTICAL else f"{text}\n{_IF_SAVED}"


def _is_complete(value: ast.expr, count: int) -> bool:
    """Return True if the assigned expression is the whole container, not an empty container to be filled later."""
    if isinstance(value, (ast.List, ast.Tuple)):
        return len(value.elts) == count
    if isinstance(value, ast.Dict):
        return len(value.keys) == count
    return isinstance(value, (ast.ListComp, ast.DictComp)) or (isinstance(value, ast.Call) and bool(value.args))


def _suggest_for_class_attribute(
    unregistered: UnregisteredTensor,
    name: str,
    source: _Assignment | None,
    rebuild: Rebuild,
    suggestions: Suggestions,
) -> str | None:
    placement = f"# delete {name} from the class body; in __init__, after super().__init__():\n"
    if source is None or any(_is_attribute_step(step) for step in unregistered.steps[1:]):
        return f"{placement}# register it there with self.register_buffer"
    if len(unregistered.steps) == 1:
        return placement + _format_registration(unregistered.tensor, name, source, rebuild)
    if issubclass(type(unregistered.steps[0].value), nn.Module):
        return f"{placement}self.{name} = {source.text}"
    text = _suggest_registration(unregistered, name, source, OtherNames(), rebuild, suggestions)
    if text is None or text.startswith(_AT_END_OF_INIT):
        return f"{placement}# register it there with self.register_buffer"
    return placement + text


def _is_attribute_step(step: Step) -> bool:
    return step.how not in ("item", "registered")


def _suggest_for_captured(unregistered: UnregisteredTensor, rebuild: Rebuild) -> str:
    """Return the fix for a tensor in a closure or a default: the function must read the tensor from the module."""
    step = next(step for step in unregistered.steps if step.how in ("closure", "default"))
    match = re.search(r"'(\w+)'", step.label)
    name = match.group(1) if match else unregistered.steps[0].label.rpartition(".")[2] + "_default"
    comment = (
        f"# do not capture the tensor: read self.{name} in the function (a hook gets the module as first argument)\n"
    )
    return comment + _format_buffer_or_parameter(unregistered.tensor, name, name, rebuild)


def _format_buffer_or_parameter(tensor: torch.Tensor, name: str, value: str, rebuild: Rebuild) -> str:
    if tensor.requires_grad:
        return _add_loading(f"self.{name} = nn.Parameter({value})", name)
    return _format_buffer("self", name, value, rebuild)


def _suggest_for_other_holder(unregistered: UnregisteredTensor, rebuild: Rebuild) -> str:
    """Return the fix for a tensor in another object: make the object a module, or move the tensor to a module."""
    holder = _find_holder(unregistered)
    name = "_".join(re.findall(r"\w+", "".join(step.label for step in unregistered.steps)))
    if issubclass(type(holder), nn.Module):
        steps = [step for step in unregistered.steps if step.value is not holder]
        return f"# make {_get_type_name(steps[0].value)} an nn.Module, so that the module in it is registered"
    if issubclass(type(holder), torch.Tensor):
        comment = "# keep the tensor on the module, because a move does not reach attributes of a tensor\n"
    elif issubclass(type(holder), torch.distributions.Distribution):
        comment = "# keep the distribution's parameters on the module, and build the distribution in forward\n"
    elif _is_container(holder) or type(holder).__module__ in ("builtins", "itertools", "functools"):
        comment = f"# keep the tensor on the module, and read it from there, not from the {_get_type_name(holder)}\n"
    else:
        attribute = unregistered.steps[-1].label.lstrip(".")
        return (
            f"# make {_get_type_name(holder)} an nn.Module; in its own __init__, instead of self.{attribute} = value:\n"
            f"{_format_buffer_or_parameter(unregistered.tensor, attribute, 'value', rebuild)}"
        )
    path = "".join(step.label for step in unregistered.steps).lstrip(".")
    if "#" in path:  # no Python reaches it by that name
        return comment.removesuffix("\n") + f": register it there, for example as {name}"
    return comment + _format_buffer_or_parameter(unregistered.tensor, name, f"self.{path}", rebuild)


def _find_holder(unregistered: UnregisteredTensor) -> Any:
    """Return the holder of the tensor: an unregistered module, else the object one step before the tensor."""
    for step in unregistered.steps[:-1]:
        if issubclass(type(step.value), nn.Module):
            return step.value
    return unregistered.steps[-2].value if len(unregistered.steps) > 1 else unregistered.owner


def _get_type_name(obj: Any) -> str:
    return type(obj).__name__


def _is_class_attribute(unregistered: UnregisteredTensor, name: str) -> bool:
    """Return True for an attribute of the class, because register_buffer refuses its name."""
    return any(name in vars(base) for base in type(unregistered.owner).__mro__)


# --- reading the assignment ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SourceFile:
    """A parsed source file: its lines, its spelling of torch.nn, and its assignments by line.

    `early`: statements before `super().__init__()` of their function, where nothing can be registered.
    """

    lines: list[str]
    nn: str
    assignments: dict[int, list[ast.Assign | ast.AnnAssign]] = field(default_factory=dict)
    early: set[ast.stmt] = field(default_factory=set)


@functools.lru_cache(maxsize=64)
def _parse_file(filename: str) -> _SourceFile | None:
    try:
        text = Path(filename).read_text("utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    file = _SourceFile(text.split("\n"), _find_torch_nn_name(tree))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                file.assignments.setdefault(line, []).append(node)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            file.early.update(_find_early_statements(node))
    return file


@functools.lru_cache(maxsize=256)
def _read_assignment(place: tuple[str, int] | None, name: str) -> _Assignment | None:
    """Return the statement at `place` with the assignment of `name`; None for anything but a plain assignment."""
    file = _parse_file(place[0]) if place else None
    if place is None or file is None:
        return None
    for node in file.assignments.get(place[1], ()):
        owner_and_value = _find_target(node, name)
        if owner_and_value is not None:
            owner, value = owner_and_value
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            target_texts = [ast.unparse(target) for target in targets]
            target_text = f"{owner}.{name}"
            other_targets = [
                text_ for text_ in target_texts if text_ != (target_text if target_text in target_texts else name)
            ]
            unpacked = any(isinstance(target, (ast.Tuple, ast.List)) for target in targets)
            text = _get_source_text(file.lines, value)
            return _Assignment(owner, value, text, file.nn, node in file.early, (target_text, *other_targets), unpacked)
    return None


def _find_target(node: ast.Assign | ast.AnnAssign, name: str) -> tuple[str, ast.expr] | None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if node.value is None:
        return None
    for target in targets:
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
        if isinstance(target, ast.Tuple):
            is_pairwise = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts)
            pairs = list(zip(target.elts, node.value.elts, strict=True)) if is_pairwise else []  # type: ignore[attr-defined]
        for element, value in pairs:
            if isinstance(element, ast.Attribute) and element.attr == name:
                return ast.unparse(element.value), value
            if isinstance(element, ast.Name) and element.id == name:
                return "self", value  # in a class body
    return None


def _get_source_text(lines: list[str], value: ast.expr) -> str:
    first, last = value.lineno - 1, (value.end_lineno or value.lineno) - 1
    encoded = [line.encode() for line in lines[first : last + 1]]
    encoded[-1] = encoded[-1][: value.end_col_offset]  # offsets count bytes
    encoded[0] = encoded[0][value.col_offset :]
    text = b"\n".join(encoded).decode()
    is_bare_tuple = isinstance(value, ast.Tuple) and not text.startswith("(")
    return f"({text})" if is_bare_tuple else text


def _find_torch_nn_name(tree: ast.Module) -> str:
    """How this file writes torch.nn."""
    torch_name = "torch"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            alias_ = next((alias for alias in node.names if alias.name == "nn"), None)
            if alias_:
                return alias_.asname or "nn"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch.nn" and alias.asname:
                    return alias.asname
                if alias.name == "torch" and alias.asname:
                    torch_name = alias.asname
    return f"{torch_name}.nn"


def _find_early_statements(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the statements of an `__init__` before its `super().__init__()`."""
    calls = [sub for sub in ast.walk(function) if isinstance(sub, ast.Call)]
    starts = [c.lineno for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "__init__"]
    return [statement for statement in function.body if starts and statement.lineno < min(starts)]
