"""Find the attribute that holds a tensor in the source file, and how its class uses the value."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from statecli.core.lazy_pattern import compile_on_use
from statecli.live.attribute_source import (
    Assignment,
    AttributeUse,
    find_class_file,
    find_uses,
    read_assignment,
    read_scope,
    reads,
)
from statecli.live.rebuild import Rebuild
from statecli.live.source_line import SourceLine
from statecli.live.walk import UnregisteredTensor

#: First lines of a fix, which name its place.
AT_END_OF_INIT = "# at the end of __init__:\n"
AFTER_LAST_ASSIGNMENT = "# after its last assignment:\n"
AFTER_SUPER_INIT = "# after super().__init__():\n"


@dataclass(frozen=True)
class Site:
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


def read_site(unregistered: UnregisteredTensor, place: SourceLine | None) -> Site:
    """Return the site of the tensor's attribute. `place` is the line that assigns the attribute, if one is known."""
    name = unregistered.steps[0].label.rpartition(".")[2]
    classes = frozenset(base.__name__ for base in type(unregistered.owner).__mro__ if not is_of_torch(base))
    source, scope = read_assignment(place, name), read_scope(place)
    files = {file for file in (place and place.file, find_class_file(type(unregistered.owner))) if file}
    line = place.line if place and source else None
    uses = tuple(use for file in sorted(files) for use in find_uses(file, name, classes, line))
    if scope is None:
        return Site(name, source, uses)
    owner = source.owner if source else scope.instance
    is_at_end = owner == scope.instance and not (scope.function == "__init__" and scope.returns_early)
    placement = AT_END_OF_INIT if is_at_end else AFTER_LAST_ASSIGNMENT
    if scope.function == "__post_init__":
        placement = placement.replace("__init__", scope.function)
    return Site(name, source, uses, owner, placement, scope.class_name not in classes)


def is_of_torch(kind: type) -> bool:
    """Return True for a class of torch, and for `object`."""
    return kind is object or kind.__module__.partition(".")[0] == "torch"


def weigh_changes(site: Site, rebuild: Rebuild) -> Rebuild:
    """Correct `rebuild` by how the class uses the value: DIFFERENT if methods accumulate in the value.

    IDENTICAL if the class saves the value in its own way, because a buffer would save the value a second time.
    """
    if any(use.action == "stored" and use.function in _SAVING_METHODS for use in site.uses):
        return Rebuild.IDENTICAL
    if rebuild is not Rebuild.IDENTICAL:
        return rebuild
    changes = [use for use in site.find_uses_after_init() if use.action in _CHANGING_ACTIONS or is_write(use)]
    if any(_accumulates(use, site.name) for use in changes):
        return Rebuild.DIFFERENT
    return Rebuild.UNKNOWN if changes else rebuild


#: Methods by which a class saves attributes that are not registered.
_SAVING_METHODS = frozenset(["get_extra_state", "state_dict", "_save_to_state_dict"])


def is_write(use: AttributeUse) -> bool:
    """Return True if the use calls a method of a tensor that changes its value in place."""
    return use.action.endswith("_") and not use.action.startswith("_") and use.action not in _KEEPING_METHODS


def _accumulates(use: AttributeUse, name: str) -> bool:
    if use.action == "set":
        return isinstance(use.value, ast.BinOp) and reads(use.value, name)
    return _ACCUMULATING_ACTION.fullmatch(use.action) is not None
