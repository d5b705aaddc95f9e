"""Suggest source code that registers an unregistered tensor, ready to paste.

If the assignment can be read (`self.table = torch.randn(5, 5)`), the fix replaces the statement. Otherwise, or if a
list is filled later, the first line of the fix is a comment that names the place.

Checkpoints of the unfixed model must load into the fixed model. A tensor rebuilt identically by the constructor becomes
a buffer with `persistent=False`, without a key in the state_dict. Where a fix adds a key (a parameter, a module, a
random value), its last line says how to load older checkpoints.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import re
import types
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Origin
from statecli.live.attribute_source import (
    Assignment,
    AttributeUse,
    find_class_file,
    find_torch_nn_name,
    find_uses,
    read_assignment,
    read_scope,
    reads,
)
from statecli.live.installed_code import is_installed_file
from statecli.live.quantized_parameters import has_lost_class
from statecli.live.rebuild import Rebuild
from statecli.live.source_line import SourceLine
from statecli.live.tensors import identify_storage, may_overlap
from statecli.live.walk import UnregisteredTensor, WalkStep

AT_END_OF_INIT = "# at the end of __init__:\n"
#: Ids of the types of keys that `str` converts without running the user's code.
_PLAIN_KEYS = frozenset(id(kind) for kind in (str, int, float, bool, bytes, type(None)))
AFTER_LAST_ASSIGNMENT = "# after its last assignment:\n"
AFTER_SUPER_INIT = "# after super().__init__():\n"
#: Largest number of further names of the tensor's memory that a fix mentions.
MAX_NAMES_IN_FIX = 3
#: Largest number of tensors in the same memory that are compared with one another.
MAX_COMPARED_PARTS = 64


@dataclass(frozen=True)
class MemoryNames:
    """Other names of a tensor's memory. A move would separate these names from the registered name.

    `names`: the first `MAX_NAMES_IN_FIX`; `count`: number of all names; `are_same_object`: all refer to the same
    tensor. `is_disjoint`: the memory also holds other tensors that share no element with this tensor.
    """

    names: tuple[str, ...] = ()
    count: int = 0
    are_same_object: bool = True
    is_disjoint: bool = False


@dataclass(frozen=True)
class _Site:
    """The attribute that holds a tensor, as found in the source file.

    `source`: its assignment, if the fix can replace it; `uses`: other uses in the classes of the module. `owner`: the
    name of the module in the file (`self`); `placement`: the comment above a fix that belongs in another place.
    `is_foreign`: the line lies in a class of which the module is not an instance.
    """

    name: str
    source: Assignment | None = None
    uses: tuple[AttributeUse, ...] = ()
    owner: str = "self"
    placement: str = AT_END_OF_INIT
    is_foreign: bool = False

    def get_key(self) -> str:
        """Return the tensor's state_dict key in the class that assigns the attribute: `m.0.t` for `self.m[0].t`.

        Return "its key" if the source does not show the name, as in `self.m[i].t`.
        """
        path = _WRITTEN_INDEX.sub(r".\1\2", f"{self.owner}.{self.name}").partition(".")[2]
        return path if re.fullmatch(r"[\w.]+", path) else "its key"

    def get_keys(self) -> str:
        """Return a pattern for the state_dict keys of several tensors, such as `m.0.t.*`, or "its keys" if unknown."""
        key = self.get_key()
        return "its keys" if key == "its key" else f"{key}.*"

    def is_filled(self) -> bool:
        """Return True if statements other than the assignment add items to the container or remove items."""
        return any(_FILLING_ACTION.fullmatch(use.action) for use in self.uses)

    def find_uses_after_init(self) -> list[AttributeUse]:
        """Return the uses of the attribute in functions that the constructor does not run."""
        return [use for use in self.uses if use.function and not use.constructs]


#: An index or a key written as itself: `[0]`, `['a']`.
_WRITTEN_INDEX = compile_on_use(r"""\[(?:(\d+)|['"](\w+)['"])\]""")
#: Uses of a container that change its contents.
_FILLING_ACTION = compile_on_use(
    r"(append|extend)(left)?|augment|clear|insert|item|pop(item|left)?|remove|reverse|rotate|setdefault|sort|update"
)
#: Uses that change the value of a tensor, besides methods ending in _.
_CHANGING_ACTIONS = frozenset(["set", "item", "augment", "out", "batch_norm", "instance_norm"])
#: Uses that accumulate in a tensor: the new value depends on the old value.
_ACCUMULATING_ACTION = compile_on_use(r"augment|(batch|instance)_norm|(add|sub|mul|div|lerp)\w*_")
#: Methods of tensors that end in _ and do not change the value.
_KEEPING_METHODS = frozenset(["requires_grad_", "share_memory_", "detach_", "retain_grad"])


@dataclass(frozen=True)
class _ContainerFix:
    """Fix for all tensors of a container. If `needs_single_name`, the fix is wrong for tensors with several names."""

    text: str | None
    needs_single_name: bool = False


class Suggestions:
    """Fixes for the tensors of a model. The fix for a container is computed once, for all its tensors.

    `holders_of_buffers`: ids of the containers that also hold registered buffers.
    """

    def __init__(self, holders_of_buffers: Set[int] = frozenset()) -> None:
        self._holders_of_buffers = holders_of_buffers
        self._containers: dict[tuple[int, _Site, bool, bool, bool, Rebuild], _ContainerFix] = {}

    def suggest(
        self,
        unregistered: UnregisteredTensor,
        place: SourceLine | None,
        *,
        is_repeated: bool = False,
        other_names: MemoryNames = MemoryNames(),
        rebuild: Rebuild = Rebuild.UNKNOWN,
    ) -> str | None:
        """Return code that registers the tensor, or None if nothing must be registered, as in an optimizer's state.

        `is_repeated`: the constructor assigns the attribute more than once, so that no statement can be replaced.
        `rebuild`: how the tensors of two builds compare.
        """
        if unregistered.tensor.is_complex() and not unregistered.tensor.requires_grad:
            return _suggest_for_complex(unregistered, _read_site(unregistered, place))
        if rebuild is Rebuild.ABSENT and unregistered.steps[0].how != "hidden":
            return _suggest_for_created_later(unregistered)
        site = _read_site(unregistered, place)
        text = _suggest(unregistered, site, is_repeated, other_names, _weigh_changes(site, rebuild), self)
        return text and _use_names_of_file(text, unregistered, site, place)

    def suggest_for_container(self, unregistered: UnregisteredTensor, site: _Site, rebuild: Rebuild) -> _ContainerFix:
        """Return the fix for the outermost container that holds the unregistered tensor."""
        steps = unregistered.steps
        has_modules = any(issubclass(type(step.value), nn.Module) for step in steps)
        has_buffers = id(steps[0].value) in self._holders_of_buffers
        key = (id(steps[0].value), site, has_modules, has_buffers, len(steps) > 2, rebuild)
        fix = self._containers.get(key)
        if fix is None:
            fix = self._containers[key] = _suggest_for_container(*key[1:], container=steps[0].value)
        return fix


def _read_site(unregistered: UnregisteredTensor, place: SourceLine | None) -> _Site:
    name = unregistered.steps[0].label.rpartition(".")[2]
    classes = frozenset(base.__name__ for base in type(unregistered.owner).__mro__ if not _is_of_torch(base))
    source, scope = read_assignment(place, name), read_scope(place)
    files = {file for file in (place and place.file, find_class_file(type(unregistered.owner))) if file}
    line = place.line if place and source else None
    uses = tuple(use for file in sorted(files) for use in find_uses(file, name, classes, line))
    if scope is None:
        return _Site(name, source, uses)
    owner = source.owner if source else scope.instance
    is_at_end = owner == scope.instance and not (scope.function == "__init__" and scope.returns_early)
    placement = AT_END_OF_INIT if is_at_end else AFTER_LAST_ASSIGNMENT
    if scope.function == "__post_init__":
        placement = placement.replace("__init__", scope.function)
    return _Site(name, source, uses, owner, placement, scope.class_name not in classes)


def _is_of_torch(kind: type) -> bool:
    return kind is object or kind.__module__.partition(".")[0] == "torch"


def _weigh_changes(site: _Site, rebuild: Rebuild) -> Rebuild:
    """Correct `rebuild` by how the class uses the value: DIFFERENT if methods accumulate in the value.

    IDENTICAL if the class saves the value in its own way, because a buffer would save the value a second time.
    """
    if any(use.action == "stored" and use.function in _SAVING_METHODS for use in site.uses):
        return Rebuild.IDENTICAL
    if rebuild is not Rebuild.IDENTICAL:
        return rebuild
    changes = [use for use in site.find_uses_after_init() if use.action in _CHANGING_ACTIONS or _is_write(use)]
    if any(_accumulates(use, site.name) for use in changes):
        return Rebuild.DIFFERENT
    return Rebuild.UNKNOWN if changes else rebuild


#: Methods by which a class saves attributes that are not registered.
_SAVING_METHODS = frozenset(["get_extra_state", "state_dict", "_save_to_state_dict"])


def _is_write(use: AttributeUse) -> bool:
    return use.action.endswith("_") and not use.action.startswith("_") and use.action not in _KEEPING_METHODS


def _accumulates(use: AttributeUse, name: str) -> bool:
    if use.action == "set":
        return isinstance(use.value, ast.BinOp) and reads(use.value, name)
    return _ACCUMULATING_ACTION.fullmatch(use.action) is not None


def _use_names_of_file(text: str, unregistered: UnregisteredTensor, site: _Site, place: SourceLine | None) -> str:
    """Return the code `text`, spelled with the names by which the file refers to `self` and to torch.nn."""
    if text.startswith(AT_END_OF_INIT):
        text = re.sub(r"\bself\b", site.owner, site.placement + text.removeprefix(AT_END_OF_INIT))
    filename = place.file if place else find_class_file(type(unregistered.owner))
    torch_nn = find_torch_nn_name(filename) if filename else "nn"
    if torch_nn == "nn" or not _NN_CLASS.search(text):
        return text
    if torch_nn is None:
        return f"{text}\n# and import torch.nn at the top of the file: from torch import nn"
    return "\n".join(line if line[:1] == "#" else _NN_CLASS.sub(f"{torch_nn}.", line) for line in text.split("\n"))


#: The prefix `nn.` in the code of a fix.
_NN_CLASS = compile_on_use(r"(?<![\w.])nn\.(?=(Parameter|Module)(List|Dict)?\()", re.M)


def _suggest(
    unregistered: UnregisteredTensor,
    site: _Site,
    is_repeated: bool,
    other_names: MemoryNames,
    rebuild: Rebuild,
    suggestions: Suggestions,
) -> str | None:
    first, source = unregistered.steps[0], site.source
    if any(issubclass(type(step.value), torch.optim.Optimizer) for step in unregistered.steps):
        return None
    if first.how == "hidden":
        return (
            f"# two tensors have the name {unregistered.fqn}: rename the plain attribute and register it,\n"
            "# or delete the attribute if the registered tensor is the right one"
        )
    if any(step.how in ("closure", "default") for step in unregistered.steps):
        return _suggest_for_captured(unregistered, site, rebuild)
    if first.how == "class":
        return _suggest_for_class_attribute(unregistered, site, rebuild, suggestions)
    obstacle = _describe_class_attribute(unregistered, site.name) or _describe_obstacle(unregistered, site, rebuild)
    if obstacle is not None:
        return obstacle
    at_end = source is not None and (is_repeated or source.is_unpacked)
    text = _suggest_registration(
        unregistered, replace(site, source=None) if at_end else site, other_names, rebuild, suggestions
    )
    if text is None:
        return _suggest_for_other_holder(unregistered, rebuild)
    if _find_class_value(unregistered, site.name) is not _ABSENT:
        text = f"# first delete the class attribute {site.name}, which hides the registered tensor\n{text}"
    if source is None or text.startswith("#"):
        return text
    return AFTER_SUPER_INIT + text if source.is_early else _keep_rest_of_line(text, source)


def _keep_rest_of_line(text: str, source: Assignment) -> str:
    """Add the other code on the assignment's line to the fix, if the fix has a single line of code."""
    code = [line for line in text.split("\n") if not line.startswith("#")]
    return text.replace(code[0], f"{source.code_before}{code[0]}{source.code_after}", 1) if len(code) == 1 else text


def _describe_class_attribute(unregistered: UnregisteredTensor, name: str) -> str | None:
    """Return advice if the class has a method or property `name`, which prevents a registration, otherwise None."""
    value = _find_class_value(unregistered, name)
    if isinstance(value, functools.cached_property):
        return f"# compute {name} in __init__ and register it there, instead of caching it in a property"
    is_descriptor = hasattr(type(value), "__get__")
    owner = type(unregistered.owner).__name__
    if isinstance(value, types.MemberDescriptorType):
        return f"# delete {name} from __slots__ of {owner}, and register the tensor with self.register_buffer"
    return f"# rename the attribute: {owner} has a method or a property {name}" if is_descriptor else None


def _describe_obstacle(unregistered: UnregisteredTensor, site: _Site, rebuild: Rebuild) -> str | None:
    """Return the first step of the fix if the attribute cannot be registered under its name or at its assignment."""
    name, first = site.name, unregistered.steps[0]
    is_single = first.how == "attribute" and len(unregistered.steps) == 1
    if site.is_foreign and site.source is None:
        return _suggest_in_own_class(unregistered, name if is_single else f"each tensor of {name}", rebuild)
    for use in site.find_uses_after_init():
        if use.action == "set" and is_single and unregistered.tensor.requires_grad:
            return (
                f"# change {name} in place in {use.function}(), because an nn.Parameter refuses a new tensor;\n"
                f"# then make {name} an nn.Parameter here"
            )
        if use.action == "set" and isinstance(use.value, _REFUSED_VALUES) and _is_refused(use.value):
            return (
                f"# assign the same type in {use.function}() as here: a registered {name} refuses any other type;\n"
                f"# then register {name} here"
            )
    return None


def _suggest_in_own_class(unregistered: UnregisteredTensor, description: str, rebuild: Rebuild) -> str:
    """Return the advice for an attribute that another class sets with setattr."""
    role, kind = _describe_registration(unregistered.tensor, rebuild), type(unregistered.owner).__name__
    text = f"# register {description} in the class {kind} as {role}, and change only its value here"
    return _add_loading_if_new(text, unregistered.tensor, rebuild)


#: Expressions whose values cannot be assigned to the name of a buffer or a module.
_REFUSED_VALUES = (ast.Constant, ast.List, ast.ListComp, ast.Tuple, ast.Dict, ast.DictComp)


def _is_refused(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and value.value is None)


def _suggest_registration(
    unregistered: UnregisteredTensor, site: _Site, other_names: MemoryNames, rebuild: Rebuild, suggestions: Suggestions
) -> str | None:
    """Return the fix for a tensor in an attribute or in a container in an attribute, or None for a deeper tensor."""
    steps = unregistered.steps
    if len(steps) == 1 and steps[0].how == "attribute":
        return (
            _suggest_single_name(site.name, other_names)
            if _would_separate(unregistered.tensor, site.source, other_names)
            else _format_registration(unregistered.tensor, site, rebuild, other_names.is_disjoint)
        )
    if issubclass(type(steps[0].value), nn.Module) and steps[0].how == "attribute":  # in __dict__
        text = f'{AT_END_OF_INIT}self.{site.name} = self.__dict__.pop("{site.name}")'
        return _add_loading(text, site.get_keys())
    if not _is_container(steps[0].value) or len(steps) < 2 or steps[1].how != "item":
        return None
    fix = suggestions.suggest_for_container(unregistered, site, rebuild)
    if fix.needs_single_name and other_names.count:
        return _suggest_single_attributes(site.name, ", ".join(other_names.names) or "the other names")
    return fix.text


def _suggest_for_container(
    site: _Site, has_modules: bool, has_buffers: bool, is_deeper: bool, rebuild: Rebuild, *, container: object
) -> _ContainerFix:
    if has_modules:
        return _ContainerFix(_suggest_for_modules(container, site))
    if has_buffers:
        text = f"# read the registered buffers in {site.name} under their own names, and register the others"
        return _ContainerFix(text)
    if is_deeper or not _are_all(_list_members(container), torch.Tensor):
        return _ContainerFix(None)
    return _suggest_for_tensors(container, site, rebuild)


def _would_separate(tensor: torch.Tensor, source: Assignment | None, other_names: MemoryNames) -> bool:
    """Return True if a move would separate the registered tensor from other names of the same memory.

    A new nn.Parameter is a single object for all names assigned later, so these names stay together.
    """
    if not other_names.count:
        return False
    is_new_object = source is not None and isinstance(source.value, ast.Call)
    return not (tensor.requires_grad and is_new_object and other_names.are_same_object)


def _suggest_single_name(name: str, other_names: MemoryNames) -> str:
    names_text = ", ".join(other_names.names) + (", …" if other_names.count > len(other_names.names) else "")
    view = "" if other_names.are_same_object else " (compute a view from it)"
    return f"# register the tensor once, as {name}, and read this name instead of {names_text}{view}:\n{_OLD_MEMORY}"


def _suggest_single_attributes(container: str, names_text: str) -> str:
    advice = f"# register each tensor of {container} as one attribute, and read this attribute instead of {names_text}:"
    return f"{advice}\n{_OLD_MEMORY}"


_OLD_MEMORY = "# a move copies the registered tensor to new memory; other names still refer to the old memory"


def suggest_for_part(fqn: str) -> str:
    """Return advice for a tensor that shares memory with the tensor `fqn`: registering it would separate the two."""
    return (
        f"# the tensor shares memory with {fqn}: compute it from {fqn} at each use,\n"
        "# or register a clone() if the two tensors may have different values"
    )


def _suggest_for_tensors(container: object, site: _Site, rebuild: Rebuild) -> _ContainerFix:
    members = _list_members(container)
    parameters = [issubclass(type(member), nn.Parameter) or member.requires_grad for member in members]
    if any(parameters) and not all(parameters):
        text = "# put the trained tensors into an nn.ParameterList, and register the others with self.register_buffer"
        return _ContainerFix(text)
    needs_single_name = not _are_all(members, nn.Parameter)
    share_storages = len({identify_storage(member) for member in members}) < len(members)
    if needs_single_name and share_storages and _have_common_elements(members):
        return _ContainerFix(
            _suggest_single_attributes(site.name, "the entries that share its memory"), needs_single_name
        )
    if any(parameters):
        text = _add_loading(_format_container("Parameter", container, site), site.get_keys())
        return _ContainerFix(text, needs_single_name)
    return _ContainerFix(_format_loop(container, site, rebuild, share_storages), needs_single_name)


def _have_common_elements(members: list[torch.Tensor]) -> bool:
    """Return True if any two of the tensors may overlap, or if there are too many tensors to compare."""
    pairs = itertools.combinations(members[:MAX_COMPARED_PARTS], 2)
    return len(members) > MAX_COMPARED_PARTS or any(may_overlap(first, second) for first, second in pairs)


def _suggest_for_modules(container: object, site: _Site) -> str:
    """Return the fix for a container of modules, and how to load older checkpoints if the fix adds state_dict keys."""
    text = _suggest_module_container(container, site)
    if not any(map(_may_save, _list_modules(container))):
        return text
    return _add_loading(text, "the keys of these modules" if text.startswith("# keep ") else site.get_keys())


def _list_modules(container: object) -> list[nn.Module]:
    members = _list_members(container)
    inner = [part for member in members if issubclass(type(member), (list, tuple)) for part in _list_members(member)]
    return [member for member in (*members, *inner) if issubclass(type(member), nn.Module)]


def _may_save(module: nn.Module) -> bool:
    """Return True if a state_dict may have a key of the module. By default, a torchmetrics metric saves no state."""
    if next(module.parameters(), None) is not None:
        return True
    return any(
        type(part).get_extra_state is not nn.Module.get_extra_state
        or any(name not in part._non_persistent_buffers_set for name in part._buffers)
        or any(getattr(part, "_persistent", {}).values())
        for part in module.modules()
    )


def _suggest_module_container(container: Any, site: _Site) -> str:
    """Return the fix for a container of modules, of (name, module) pairs, or of containers of modules."""
    members = [member for member in _list_members(container) if member is not None]
    if hasattr(type(container), "_fields"):
        return f"# keep the modules of {site.name} in attributes of self: a named tuple does not register them"
    if _are_all(members, nn.Module):
        return _format_container("Module", container, site)
    is_dict = issubclass(type(container), dict)
    if not is_dict and all(_is_named_module(member) for member in members):
        keys = [member[0] for member in members]
        if len(set(keys)) == len(keys) and not any(_is_bad_key(key, nn.ModuleDict) for key in keys):
            assignment = _format_assignment("ModuleDict", site, "{}", container)
            return f"# and iterate over the items() of the nn.ModuleDict\n{assignment}"
    is_nested = [issubclass(type(m), (list, tuple)) and _are_all(_list_members(m), nn.Module) for m in members]
    if is_nested and all(is_nested) and len(members) == len(_list_members(container)):
        part = "nn.ModuleList(part)"
        if not is_dict:
            return _format_assignment("ModuleList", site, f"{part} for part in {{}}", container)
        if not any(_is_bad_key(key, nn.ModuleDict) for key in dict.keys(container)):
            inner = f"{{{{key: {part} for key, part in ({{}}).items()}}}}"
            return _format_assignment("ModuleDict", site, inner, container)
    return (
        f"# keep the modules of {site.name} in an nn.ModuleList or nn.ModuleDict, separate from the other objects in it"
    )


def _is_named_module(member: object) -> bool:
    return type(member) is tuple and len(member) == 2 and type(member[0]) is str and _are_all([member[1]], nn.Module)


def _format_assignment(kind: str, site: _Site, value: str, container: object) -> str:
    """Return `self.name = nn.<kind>(value)`. In `value`, `{}` stands for the present value of the attribute."""
    lacking_uses = _find_lacking(kind, site, container)
    if any(use.constructs for use in lacking_uses) or site.source is None or not _is_complete(site, container):
        text = f"{AT_END_OF_INIT}self.{site.name} = nn.{kind}({value.format(f'self.{site.name}')})"
    else:
        text = f"{' = '.join(site.source.targets)} = nn.{kind}({value.format(site.source.text)})"
    changes = [_describe_lacking(use, kind, site.name) for use in lacking_uses if not use.constructs]
    return "\n".join(dict.fromkeys((text, *changes)))


def _find_lacking(kind: str, site: _Site, container: object) -> list[AttributeUse]:
    """Return the uses of a list or dictionary that the container `nn.<kind>` does not support."""
    new_class, is_dict = getattr(nn, kind), issubclass(type(container), dict)
    pops_last = not is_dict and any(use.action == "pop" and not use.arguments for use in site.uses)
    supported = {
        "augment": hasattr(new_class, "__ior__" if is_dict else "__iadd__"),
        "left operand": is_dict or hasattr(new_class, "__add__"),
        "pop": hasattr(new_class, "pop") and not pops_last,
        "right operand": is_dict,
        "torch argument": kind != "ParameterList",
    }
    known_actions = set(dir(type(container))) | supported.keys()
    return [
        use
        for use in site.uses
        if not use.nested
        and use.action in known_actions
        and not supported.get(use.action, hasattr(new_class, use.action))
    ]


def _describe_lacking(use: AttributeUse, kind: str, name: str) -> str:
    if use.action == "right operand":
        return f"# and write list + list({name}) instead of list + {name}, because list + nn.{kind} raises TypeError"
    if use.action == "left operand":
        return f"# and write list({name}) + list instead of {name} + list, because nn.{kind} does not support +"
    if use.action == "torch argument" and use.value is not None:
        call_text = f"{ast.unparse(use.value)}(list({name}))"
        return f"# and write {call_text} in {use.function}(), because torch refuses an nn.{kind}"
    if use.action == "augment":
        return f"# and replace the |= in {use.function}(), because nn.{kind} does not support |="
    call_text = "()" if use.action != "pop" else "() without an index"
    return f"# and replace .{use.action}{call_text} in {use.function}(), because nn.{kind} does not support the call"


def _is_container(obj: object) -> bool:
    return issubclass(type(obj), (list, tuple, dict, collections.deque))


def _list_members(container: Any) -> list[Any]:
    """Return the items of a container, without calling a subclass's `__iter__`."""
    if issubclass(type(container), dict):
        return list(dict.values(container))
    base = next(base for base in (list, tuple, collections.deque) if issubclass(type(container), base))
    return list(base.__iter__(container))


def _are_all(members: list[Any], kind: type) -> bool:
    return all(issubclass(type(member), kind) for member in members)


def _format_registration(tensor: torch.Tensor, site: _Site, rebuild: Rebuild, is_disjoint: bool = False) -> str:
    source = site.source
    if source is None or is_disjoint or (tensor.requires_grad and any(_is_refused_by_leaf(use) for use in site.uses)):
        value = f'self.__dict__.pop("{site.name}")' + ".clone()" * is_disjoint
        registration = _format_buffer_or_parameter(tensor, site, value, rebuild)
        return f"{AT_END_OF_INIT}{registration}"
    if tensor.requires_grad:
        names = [
            replace(site, name=target.removeprefix(f"{source.owner}.")).get_key()
            for target in source.targets
            if target.startswith(f"{source.owner}.")
        ]
        value = source.text if _is_parameter_call(source.value) else f"nn.Parameter({source.text})"
        text = f"{' = '.join(source.targets)} = {value}"
        return _add_loading(text, ", ".join(dict.fromkeys(names)) or site.get_key())
    further_targets = "".join(f"\n{target} = {source.targets[0]}" for target in source.targets[1:])
    return _format_buffer(site, source.owner, source.text, rebuild, further_targets)


def _is_parameter_call(value: ast.expr) -> bool:
    """Return True if the expression is `nn.Parameter(…)`. In a class body, no module registers this parameter."""
    return isinstance(value, ast.Call) and getattr(value.func, "attr", getattr(value.func, "id", "")) == "Parameter"


def _is_refused_by_leaf(use: AttributeUse) -> bool:
    """Return True if the constructor changes the tensor in place, which torch refuses for a parameter."""
    return use.constructs and (use.action in ("item", "augment") or _is_write(use))


def _format_buffer(site: _Site, owner: str, value: str, rebuild: Rebuild, further_lines: str = "") -> str:
    """Return code that registers a buffer: persistent for a random value, not persistent for any other value."""
    if rebuild is Rebuild.DIFFERENT:
        return _add_loading(f'{owner}.register_buffer("{site.name}", {value}){further_lines}', site.get_key())
    text = f'{owner}.register_buffer("{site.name}", {value}, persistent=False){further_lines}'
    return text if rebuild is Rebuild.IDENTICAL else f"{text}\n{SAVING_COMMENT}"


#: Comment below a buffer if statecli does not know whether the constructor rebuilds the value.
SAVING_COMMENT = (
    "# to save the value too, delete persistent=False, and load older checkpoints with\n"
    "# model.load_state_dict(state, strict=False)"
)


def _add_loading(text: str, keys: str) -> str:
    return f"{text}\n# older checkpoints lack {keys}; load_state_dict(state, strict=False) keeps initial values"


def is_in_library(unregistered: UnregisteredTensor, place: SourceLine | None) -> bool:
    """Return True if an installed library assigns the tensor, because users do not edit the files of libraries.

    Without a line, the class of the owner decides; torch's own classes may hold a user's assignments.
    """
    if place is not None:
        return is_installed_file(place.file)
    kind = type(unregistered.owner)
    file = None if _is_of_torch(kind) else find_class_file(kind)
    return file is not None and is_installed_file(file)


def suggest_for_library(unregistered: UnregisteredTensor, origin: Origin | None, rebuild: Rebuild) -> str | None:
    """Return the advice for a tensor that a library leaves unregistered, or None if nothing needs registering."""
    steps = unregistered.steps
    if any(issubclass(type(step.value), torch.optim.Optimizer) for step in steps):
        return None
    name = steps[0].label.lstrip(".")
    location = f"{origin.file}:{origin.line}" if origin else type(unregistered.owner).__name__
    if unregistered.tensor.requires_grad or steps[-1].how == "registered":
        action = f"or pass {name} to the optimizer, move it after each .to(), and save it yourself"
    elif rebuild is Rebuild.DIFFERENT:
        action = f"or move {name} yourself after each .to(), and save it next to the state_dict()"
    else:
        action = f"or move {name} yourself after each .to()"
    if has_lost_class(unregistered):
        return (
            f"# {name} lost its class: torch.save(model) writes a plain Parameter, and .to() does not move its\n"
            "# attributes; save model.state_dict() instead, and load the file into a new model"
        )
    return (
        f"# {location} is in an installed package and does not register {name}:\n"
        f"# report the problem to the authors of the package, {action}"
    )


def suggest_for_derived(is_from_registered: bool) -> str:
    """Return the advice for a tensor with a grad_fn, if a fix cannot replace the code that computed the tensor."""
    if is_from_registered:
        return "# compute the tensor in forward: a value computed once stays old when its parameters change or move"
    return (
        "# to train the tensor, make the result an nn.Parameter; to keep the values fixed, register a buffer with the\n"
        "# result of .detach(): the source of the computation is not registered"
    )


def creates_leaf(place: SourceLine | None, unregistered: UnregisteredTensor) -> bool:
    """Return True if the assigned expression creates a leaf that requires grad: `nn.Parameter(…).to(device)`."""
    source = read_assignment(place, unregistered.steps[0].label.rpartition(".")[2])
    return source is not None and re.search(r"\bParameter\(|requires_grad(=True|_\()", source.text) is not None


def _suggest_for_complex(unregistered: UnregisteredTensor, site: _Site) -> str:
    """Return the advice for a complex tensor. A buffer would lose its imaginary part in a cast of the model."""
    uses = site.find_uses_after_init()
    if uses and all(use.action in _MOVING_METHODS for use in uses):
        return f"# leave the tensor unregistered: {uses[0].function}() moves it at each call\n{_COMPLEX_BUFFER}"
    name, value = unregistered.steps[0].label.lstrip("."), unregistered.steps[0].value
    moving_code = f"self.{name}.to(x.device)"
    if issubclass(type(value), dict):
        moving_code = f"{{key: part.to(x.device) for key, part in self.{name}.items()}}"
    elif issubclass(type(value), (list, tuple)):
        moving_code = f"[part.to(x.device) for part in self.{name}]"
    text = f"# leave the tensor unregistered, and move it where forward reads it: {name} = {moving_code}"
    return f"{text}\n{_COMPLEX_BUFFER}"


_COMPLEX_BUFFER = "# do not register a complex tensor: .half() or .to(torch.bfloat16) would drop the imaginary part"
#: Methods that move a tensor to another device, if a function of the class calls them on the attribute.
_MOVING_METHODS = frozenset(["to", "cuda", "type_as"])


def _suggest_for_created_later(unregistered: UnregisteredTensor) -> str:
    """Return the advice for a tensor that only a call of the model creates."""
    name = unregistered.steps[0].label.lstrip(".")
    return (
        f"# the constructor does not create this tensor. For a cache, create the tensor on the device of the inputs\n"
        f"# at each call; for state, register self.{name} in __init__ with its final shape"
    )


def _format_container(class_prefix: str, container: object, site: _Site) -> str:
    """Return code with nn.ModuleList or a similar class for the container. append and item assignment keep working."""
    if issubclass(type(container), dict):
        return _format_dictionary(f"{class_prefix}Dict", container, site)
    return _format_empty(f"{class_prefix}List", container, site) or _format_assignment(
        f"{class_prefix}List", site, "{}", container
    )


def _format_empty(kind: str, container: object, site: _Site) -> str | None:
    """Return `self.name = nn.<kind>()` if the container starts empty and the class supports its uses, or else None."""
    source = site.source
    if source is None or source.text not in ("[]", "list()", "{}", "dict()") or _find_lacking(kind, site, container):
        return None
    return f"{' = '.join(source.targets)} = nn.{kind}()"


def _format_dictionary(kind: str, container: Any, site: _Site) -> str:
    """Return code for nn.ModuleDict or nn.ParameterDict, with other keys if these containers refuse the keys."""
    keys = list(dict.keys(container))
    container_class: type = getattr(nn, kind)
    if not any(_is_bad_key(key, container_class) for key in keys):
        return _format_empty(kind, container, site) or _format_assignment(kind, site, "{}", container)
    if any(id(type(key)) not in _PLAIN_KEYS for key in keys):
        return f"# use an nn.{kind} whose keys are strings without dots"
    comment = "# the keys must be strings without dots"
    for suffix in ("", "_"):
        new_keys = [str(key).replace(".", "_") + suffix for key in keys]
        if len(set(new_keys)) == len(keys) and not any(_is_bad_key(key, container_class) for key in new_keys):
            key = f"str(k).replace('.', '_') + {suffix!r}" if suffix else "str(k).replace('.', '_')"
            inner = f"{{{{{key}: v for k, v in ({{}}).items()}}}}"
            key_comment = f": read self.{site.name}[{new_keys[0]!r}] instead of self.{site.name}[{keys[0]!r}]"
            return _add_comment(comment + key_comment, _format_assignment(kind, site, inner, container))
        comment = f"# the keys must be strings without dots; _ is added, because a key equals an attribute of nn.{kind}"
    return f"# use an nn.{kind} whose keys are strings without dots that are not attributes of nn.{kind}"


def _add_comment(comment: str, text: str) -> str:
    """Insert `comment` above the code of a fix, but below a first line `# at the end of __init__:`."""
    at_end = text.startswith(AT_END_OF_INIT)
    return f"{AT_END_OF_INIT if at_end else ''}{comment}\n{text.removeprefix(AT_END_OF_INIT)}"


def _is_bad_key(key: object, container_class: type) -> bool:
    """Return True if nn.ModuleDict or nn.ParameterDict refuses the key."""
    return type(key) is not str or not key or "." in key or hasattr(container_class(), key)


def _format_loop(container: Any, site: _Site, rebuild: Rebuild, needs_clone: bool) -> str:
    """Return code that registers each tensor as a buffer, because a move does not change the container's items."""
    source, name = site.source, site.name
    is_complete = source is not None and _is_complete(site, container) and not any(use.constructs for use in site.uses)
    owner = source.owner if source and is_complete else "self"
    value = source.text if source and is_complete else f'{owner}.__dict__.pop("{name}")'
    placement, key, pairs = "" if is_complete else AT_END_OF_INIT, "i", f"enumerate({value})"
    if issubclass(type(container), dict):
        pairs = f"{value}.items()" if not is_complete or value.endswith((")", "}")) else f"({value}).items()"
        keys = list(dict.keys(container))
        are_identifiers = all(type(key) is str and key.isidentifier() for key in keys)
        if any(id(type(key)) not in _PLAIN_KEYS for key in keys) or (
            not are_identifiers and len({str(key).replace(".", "_") for key in keys}) < len(keys)
        ):
            return "# register each tensor with self.register_buffer, under a separate name"
        key = "key" if are_identifiers else "str(key).replace('.', '_')"
    copy = ".clone()" if needs_clone else ""
    persistence = "" if rebuild is Rebuild.DIFFERENT else ", persistent=False"
    text = (
        f"{placement}for {'i' if key == 'i' else 'key'}, tensor in {pairs}:\n"
        f'    {owner}.register_buffer(f"{name}_{{{key}}}", tensor{copy}{persistence})\n'
        f'# and read each tensor as getattr(self, f"{name}_{{{key}}}")'
    )
    if rebuild is Rebuild.DIFFERENT:
        return _add_loading(text, f"{name}_*")
    return text if rebuild is Rebuild.IDENTICAL else f"{text}\n{SAVING_COMMENT}"


def _is_complete(site: _Site, container: object) -> bool:
    """Return True if the assigned expression is the whole container and no later statement changes the container."""
    if site.source is None or site.source.is_reused or site.is_filled():
        return False
    if issubclass(type(container), collections.defaultdict):
        return False  # reading a missing key adds the key
    value, count = site.source.value, len(_list_members(container))
    if isinstance(value, (ast.List, ast.Tuple)):
        return len(value.elts) == count or any(isinstance(element, ast.Starred) for element in value.elts)
    if isinstance(value, ast.Dict):
        return len(value.keys) == count or None in value.keys
    return True


def _suggest_for_class_attribute(
    unregistered: UnregisteredTensor, site: _Site, rebuild: Rebuild, suggestions: Suggestions
) -> str | None:
    source, name = site.source, site.name
    placement = f"# delete {name} from the class body; in __init__, after super().__init__():\n"
    advice = f"{placement}# register the tensor there with self.register_buffer(…, persistent=False)"
    is_plain = all(step.how in ("item", "registered") for step in unregistered.steps[1:])
    if source is None or source.is_unpacked or not is_plain:
        return advice
    if len(unregistered.steps) == 1:
        return placement + _format_registration(unregistered.tensor, site, rebuild)
    if issubclass(type(unregistered.steps[0].value), nn.Module):
        return _add_loading(f"{placement}self.{name} = {source.text}", f"{name}.*")
    text = _suggest_registration(unregistered, site, MemoryNames(), rebuild, suggestions)
    return advice if text is None or text.startswith(AT_END_OF_INIT) else placement + text


def _suggest_for_captured(unregistered: UnregisteredTensor, site: _Site, rebuild: Rebuild) -> str:
    """Return the fix for a tensor in a closure or a default: a method or hook must read the tensor from the module."""
    step, tensor = next(s for s in unregistered.steps if s.how in ("closure", "default")), unregistered.tensor
    name, is_module = _get_captured_name(step), issubclass(type(step.value), nn.Module)
    if site.is_foreign or step.how == "default" or (step.value is not tensor and not is_module):
        role = "a submodule" if is_module else _describe_registration(tensor, rebuild)
        text = f"# {_describe_reader(unregistered, site, name)}, and register {name} there as {role}"
        return _add_loading(text, "its keys") if is_module else _add_loading_if_new(text, tensor, rebuild)
    text = (
        f"# {_describe_reader(unregistered, site, name)};\n"
        f"# in a copy of the model, a function that captures {name} or self still uses the original tensors\n"
    )
    if is_module:
        return text + _add_loading(f"self.{name} = {name}", f"{name}.*")
    return text + _format_buffer_or_parameter(tensor, _Site(name), name, rebuild)


def _get_captured_name(step: WalkStep) -> str:
    """Return the name of the captured variable, or of the argument with the default."""
    name_match = re.search(r"'(\w+)'|\[(\d+)\]", step.label)
    if name_match is None or step.parent is None:
        return "the value"
    if name_match[1]:
        return name_match[1]
    function: types.FunctionType = step.parent.value
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__  # may be of a class of the user
    return arguments[int(name_match[2]) - (0 if defaults is None else tuple.__len__(defaults))]


def _describe_reader(unregistered: UnregisteredTensor, site: _Site, name: str) -> str:
    """Return the advice on how to read `name` from the module: in a hook, or otherwise in a method of the class.

    A function with `self` in its closure is never advised, because `copy.deepcopy` does not copy functions.
    """
    first = unregistered.steps[0]
    if site.name.endswith("_hooks"):
        return f"in the hook, read {name} from the first argument, the module"
    if first.how == "class":
        return f"in {site.name}, read self.{name}"
    function = site.name if type(first.value) is types.FunctionType else f"the function in {site.name}"
    return f"make {function} a method of {type(unregistered.owner).__name__} that reads self.{name}"


def _describe_registration(tensor: torch.Tensor, rebuild: Rebuild) -> str:
    if tensor.requires_grad:
        return "an nn.Parameter"
    return "a buffer" if rebuild is Rebuild.DIFFERENT else "a buffer with persistent=False"


def _add_loading_if_new(text: str, tensor: torch.Tensor, rebuild: Rebuild) -> str:
    is_new = tensor.requires_grad or rebuild is Rebuild.DIFFERENT
    return _add_loading(text, "its key") if is_new else text


def _format_buffer_or_parameter(tensor: torch.Tensor, site: _Site, value: str, rebuild: Rebuild) -> str:
    if tensor.requires_grad:
        return _add_loading(f"self.{site.name} = nn.Parameter({value})", site.get_key())
    return _format_buffer(site, "self", value, rebuild)


def _suggest_for_other_holder(unregistered: UnregisteredTensor, rebuild: Rebuild) -> str:
    """Return the advice for a tensor in another object: make the object a module, or move the tensor to a module.

    The advice has no code, because the object must give up the tensor. Otherwise, its name would refer to the old
    memory after a move.
    """
    holder, tensor = _find_holder(unregistered), unregistered.tensor
    kind, role = type(holder).__name__, _describe_registration(tensor, rebuild)
    if issubclass(type(holder), nn.Module):
        steps = [step for step in unregistered.steps if step.value is not holder]
        text = f"# make {type(steps[0].value).__name__} an nn.Module, so that the module in it is registered"
        return _add_loading(text, "the keys of this module")
    if issubclass(type(holder), torch.Tensor):
        text = f"# register the tensor in the module as {role}, because a move does not reach attributes of a tensor"
    elif issubclass(type(holder), torch.distributions.Distribution):
        text = f"# register its parameters in the module, each as {role}, and build the distribution in forward"
    elif _is_container(holder) or type(holder).__module__ in _LIBRARY_MODULES:
        text = f"# register the tensor in the module as {role}, and read it from the module, not from the {kind}"
    else:
        attribute = unregistered.steps[-1].label.lstrip(".")
        text = f"# make {kind} an nn.Module that registers {attribute} as {role}, or move {attribute} to this module"
    return _add_loading_if_new(text, tensor, rebuild)


#: Modules with classes of holders that cannot become an nn.Module.
_LIBRARY_MODULES = ("argparse", "builtins", "functools", "itertools", "types")


def _find_holder(unregistered: UnregisteredTensor) -> Any:
    """Return the holder of the tensor: an unregistered module, or else the object that holds the tensor directly."""
    for step in unregistered.steps[:-1]:
        if issubclass(type(step.value), nn.Module):
            return step.value
    return unregistered.steps[-2].value if len(unregistered.steps) > 1 else unregistered.owner


_ABSENT = object()


def _find_class_value(unregistered: UnregisteredTensor, name: str) -> Any:
    """Return the class attribute `name`, which makes register_buffer fail, or `_ABSENT` if there is none."""
    bases = (vars(base) for base in type(unregistered.owner).__mro__)
    return next((base[name] for base in bases if name in base), _ABSENT)
