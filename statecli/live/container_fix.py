"""Suggest source code that registers the tensors or modules of a list, tuple or dictionary."""

from __future__ import annotations

import ast
import collections
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from statecli.live.attribute_site import AT_END_OF_INIT, Site
from statecli.live.attribute_source import AttributeUse
from statecli.live.rebuild import Rebuild
from statecli.live.registration_code import SAVING_COMMENT, add_loading
from statecli.live.tensors import identify_storage, may_overlap

#: Ids of the types of keys that `str` converts without running the user's code.
_PLAIN_KEYS = frozenset(id(kind) for kind in (str, int, float, bool, bytes, type(None)))
#: Largest number of tensors in the same memory that are compared with one another.
MAX_COMPARED_PARTS = 64


@dataclass(frozen=True)
class ContainerFix:
    """Fix for all tensors of a container. If `needs_single_name`, the fix is wrong for tensors with several names."""

    text: str | None
    needs_single_name: bool = False


def suggest_for_container(
    site: Site, has_modules: bool, has_buffers: bool, is_deeper: bool, rebuild: Rebuild, *, container: object
) -> ContainerFix:
    """Return the fix for a container in an attribute. Its text is None if the container also holds other objects."""
    if has_modules:
        return ContainerFix(_suggest_for_modules(container, site))
    if has_buffers:
        text = f"# read the registered buffers in {site.name} under their own names, and register the others"
        return ContainerFix(text)
    if is_deeper or not _are_all(_list_members(container), torch.Tensor):
        return ContainerFix(None)
    return _suggest_for_tensors(container, site, rebuild)


def suggest_single_attributes(container: str, names_text: str) -> str:
    """Return the advice to register each tensor of a container as one attribute, read under this name alone."""
    advice = f"# register each tensor of {container} as one attribute, and read this attribute instead of {names_text}:"
    return f"{advice}\n{OLD_MEMORY}"


#: Last line of advice on a tensor with several names.
OLD_MEMORY = "# a move copies the registered tensor to new memory; other names still refer to the old memory"


def _suggest_for_tensors(container: object, site: Site, rebuild: Rebuild) -> ContainerFix:
    members = _list_members(container)
    parameters = [issubclass(type(member), nn.Parameter) or member.requires_grad for member in members]
    if any(parameters) and not all(parameters):
        text = "# put the trained tensors into an nn.ParameterList, and register the others with self.register_buffer"
        return ContainerFix(text)
    needs_single_name = not _are_all(members, nn.Parameter)
    share_storages = len({identify_storage(member) for member in members}) < len(members)
    if needs_single_name and share_storages and _have_common_elements(members):
        return ContainerFix(
            suggest_single_attributes(site.name, "the entries that share its memory"), needs_single_name
        )
    if any(parameters):
        text = add_loading(_format_container("Parameter", container, site), site.get_keys())
        return ContainerFix(text, needs_single_name)
    return ContainerFix(_format_loop(container, site, rebuild, share_storages), needs_single_name)


def _have_common_elements(members: list[torch.Tensor]) -> bool:
    """Return True if any two of the tensors may overlap, or if there are too many tensors to compare."""
    pairs = itertools.combinations(members[:MAX_COMPARED_PARTS], 2)
    return len(members) > MAX_COMPARED_PARTS or any(may_overlap(first, second) for first, second in pairs)


def _suggest_for_modules(container: object, site: Site) -> str:
    """Return the fix for a container of modules, and how to load older checkpoints if the fix adds state_dict keys."""
    text = _suggest_module_container(container, site)
    if not any(map(_may_save, _list_modules(container))):
        return text
    return add_loading(text, "the keys of these modules" if text.startswith("# keep ") else site.get_keys())


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


def _suggest_module_container(container: Any, site: Site) -> str:
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


def _format_assignment(kind: str, site: Site, value: str, container: object) -> str:
    """Return `self.name = nn.<kind>(value)`. In `value`, `{}` stands for the present value of the attribute."""
    lacking_uses = _find_lacking(kind, site, container)
    if any(use.constructs for use in lacking_uses) or site.source is None or not _is_complete(site, container):
        text = f"{AT_END_OF_INIT}self.{site.name} = nn.{kind}({value.format(f'self.{site.name}')})"
    else:
        text = f"{' = '.join(site.source.targets)} = nn.{kind}({value.format(site.source.text)})"
    changes = [_describe_lacking(use, kind, site.name) for use in lacking_uses if not use.constructs]
    return "\n".join(dict.fromkeys((text, *changes)))


def _find_lacking(kind: str, site: Site, container: object) -> list[AttributeUse]:
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


def is_container(obj: object) -> bool:
    """Return True for a list, tuple, dictionary or deque, or an object of a subclass."""
    return issubclass(type(obj), (list, tuple, dict, collections.deque))


def _list_members(container: Any) -> list[Any]:
    """Return the items of a container, without calling a subclass's `__iter__`."""
    if issubclass(type(container), dict):
        return list(dict.values(container))
    base = next(base for base in (list, tuple, collections.deque) if issubclass(type(container), base))
    return list(base.__iter__(container))


def _are_all(members: list[Any], kind: type) -> bool:
    return all(issubclass(type(member), kind) for member in members)


def _format_container(class_prefix: str, container: object, site: Site) -> str:
    """Return code with nn.ModuleList or a similar class for the container. append and item assignment keep working."""
    if issubclass(type(container), dict):
        return _format_dictionary(f"{class_prefix}Dict", container, site)
    return _format_empty(f"{class_prefix}List", container, site) or _format_assignment(
        f"{class_prefix}List", site, "{}", container
    )


def _format_empty(kind: str, container: object, site: Site) -> str | None:
    """Return `self.name = nn.<kind>()` if the container starts empty and the class supports its uses, or else None."""
    source = site.source
    if source is None or source.text not in ("[]", "list()", "{}", "dict()") or _find_lacking(kind, site, container):
        return None
    return f"{' = '.join(source.targets)} = nn.{kind}()"


def _format_dictionary(kind: str, container: Any, site: Site) -> str:
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


def _format_loop(container: Any, site: Site, rebuild: Rebuild, needs_clone: bool) -> str:
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
        return add_loading(text, f"{name}_*")
    return text if rebuild is Rebuild.IDENTICAL else f"{text}\n{SAVING_COMMENT}"


def _is_complete(site: Site, container: object) -> bool:
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
