"""Resolve names in the arguments of a model spec to Python objects, and suggest replacements for unknown names.

A name is looked up in the module of the spec, in the module that defines the class, and in the packages around them.
`torch.nn.Linear` is a class of an installed package, `pkg.mod:Layer` a class of any module found by Python. The
arguments of this class may also use the names of its module. Names of Python's standard library are refused, so that no
argument runs a command.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import msgspec

from statecli.core.build_function import BUILD_ADVICE
from statecli.core.errors import ModelError
from statecli.core.quoting import quote_for_shell
from statecli.core.target_suggestions import split_module_name
from statecli.live import search_path
from statecli.live.module_names import list_names
from statecli.live.spec import Callee, ModelSpec
from statecli.live.spec_objects import ObjectCall, ObjectName, format_call, map_items

#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7
_STANDARD_LIBRARY = sys.stdlib_module_names
#: Modules in which a class is looked up that the spec's own module does not have.
_LIBRARIES = ("torch.nn", "transformers", "diffusers", "peft", "torch_geometric.nn", "torchmetrics", "torch")
_MISSING = object()


class FoundObject(msgspec.Struct, frozen=True):
    """Object that a name refers to.

    `owner` is the module of the object if the name begins with a module: torch.nn for `nn.Linear`. `imported` is the
    name of this module, if the name begins with the full name: "torch.nn" for `torch.nn.Linear`.
    """

    value: Any
    owner: types.ModuleType | None = None
    imported: str | None = None


@dataclass(frozen=True)
class Scope:
    """Modules in which the names in a model spec's arguments are looked up, the most specific module first."""

    spec: ModelSpec
    namespaces: tuple[types.ModuleType, ...]

    @classmethod
    def around(cls, spec: ModelSpec, module: types.ModuleType, callee: Callee) -> Scope:
        """Return the scope for the arguments of `callee`. The model spec found `callee` in `module`."""
        return cls(spec, tuple(_iter_namespaces(module, callee)))

    def enter(self, callee: FoundObject) -> Scope:
        """Return the scope for the arguments of a class inside the arguments, as in `Net(cfg=Config(depth=2))`."""
        if callee.owner is None:
            return self
        return replace(self, namespaces=(*_iter_namespaces(callee.owner, callee.value), *self.namespaces))

    def find(self, object_name: ObjectName) -> FoundObject:
        """Return the object that a name refers to. Raises ModelError if the name is unknown or not allowed."""
        found_object = self._look_up(object_name)
        if found_object is None:
            problem = f"{self.spec.text}: {object_name.name} is not defined in {self._get_module_name(object_name)}"
            raise ModelError(problem, advice=self._advise(object_name))
        if found_object.value is _MISSING or isinstance(found_object.value, types.ModuleType):
            problem = f"{object_name.name} is not a class or a value in {self._get_module_name(object_name)}"
            advice = self._advise(object_name) if found_object.owner is not None else None
            raise ModelError(f"{self.spec.text}: {problem}", advice=advice)
        if callable(found_object.value) and _is_standard(str(getattr(found_object.value, "__module__", ""))):
            raise ModelError(
                f"{self.spec.text}: {object_name.name} belongs to Python's standard library, "
                f"not to {self._get_module_name(object_name)}"
            )
        return found_object

    def find_namespace(self, object_name: ObjectName) -> types.ModuleType | None:
        """Return the first module that defines the first part of a name (`nn` of `nn.GELU`); None without a module."""
        first = object_name.name.partition(".")[0]
        return next((space for space in self.namespaces if hasattr(space, first)), None)

    def _get_module_name(self, object_name: ObjectName) -> str:
        return object_name.module or self.spec.module

    def _look_up(self, object_name: ObjectName) -> FoundObject | None:
        """Return the object of a name: `_MISSING` if only the first part is known, or None if no part is known."""
        if object_name.module is not None:
            owner = self._import(object_name.module)
            return (
                FoundObject(_get_nested(owner, object_name.name), owner, object_name.module)
                if _has_nested(owner, object_name.name)
                else None
            )
        first, _, attribute_path = object_name.name.partition(".")
        value: Any = getattr(self.find_namespace(object_name), first, _MISSING)
        if value is not _MISSING and (not attribute_path or _has_nested(value, attribute_path)):
            return FoundObject(
                _get_nested(value, attribute_path) if attribute_path else value, _find_owner(value, attribute_path)
            )

        with search_path.use_installed_only():
            split_name = split_module_name(object_name.name) if attribute_path and not _is_standard(first) else None
            package = importlib.import_module(split_name.module) if split_name is not None else None
        if split_name is not None and _has_nested(package, split_name.attribute):
            return FoundObject(_get_nested(package, split_name.attribute), package, split_name.module)
        return (
            None if value is _MISSING else FoundObject(_MISSING, value if isinstance(value, types.ModuleType) else None)
        )

    def _import(self, module: str) -> types.ModuleType:
        if _is_standard(module):
            raise ModelError(f"{self.spec.text}: {module} belongs to Python's standard library")
        try:
            with search_path.use_folder_last():
                return importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if module != missing and not module.startswith(f"{missing}."):
                raise
            if module.endswith(".py") and os.path.isfile(module):
                problem = f"{self.spec.text}: an argument cannot be a class of the file {module}"
                raise ModelError(problem, advice=BUILD_ADVICE) from error
            raise ModelError(
                f"{self.spec.text}: no module is named {missing}; install the package of {missing}, or correct the name"
            ) from error

    # --- the suggested spec -------------------------------------------------------------------------------------------

    def _advise(self, object_name: ObjectName) -> str:
        replacement = self._find_replacement(object_name)
        if replacement is None:
            return "an argument is a number, a string in quotes, or a call of a class, such as torch.nn.Linear(2, 3)"
        line = spell(self.spec, self.rewrite)
        if line == spell(self.spec):
            return BUILD_ADVICE
        if isinstance(replacement, str):
            return f"for a string, write {line}"
        return f"did you mean {replacement}? write {line}"

    def rewrite(self, value: object) -> Any:
        """Replace the unknown names in an argument with known names."""
        if isinstance(value, ObjectName):
            return value if self._is_known(value) else self._replace(value)
        if isinstance(value, ObjectCall):
            callee = value.callee if self._is_known(value.callee) else self._replace(value.callee)
            if isinstance(callee, str):
                return value
            scope = self.enter(self.find(callee)) if self._is_known(callee) else self
            return map_items(value, scope.rewrite, callee)
        return map_items(value, self.rewrite)

    def _is_known(self, object_name: ObjectName) -> bool:
        try:
            found_object = self._look_up(object_name)
        except ModelError:
            return False
        return found_object is not None and found_object.value is not _MISSING

    def _replace(self, object_name: ObjectName) -> ObjectName | str:
        return self._find_replacement(object_name) or object_name

    def _find_replacement(self, object_name: ObjectName) -> ObjectName | str | None:
        """Return the name that an unknown name may stand for, a string for its text, or None if nothing fits."""
        owner, _, last = object_name.name.rpartition(".")
        is_own = object_name.module is not None
        names = {} if is_own else {key: ObjectName(f"{library}.{key}") for library, key in _iter_library_names()}
        names |= {} if owner else {key: ObjectName(key, object_name.module) for key in self._list_own(object_name)}
        # `relu` may stand for a function, but not for a class; nn.relu may stand for nn.ReLU.
        likely_names = [key for key in names if owner or key[0].isupper() == last[0].isupper()]
        similar_names = [last] if last in names else get_close_matches(last, likely_names, 1, _SIMILARITY)
        if similar_names:
            return names[similar_names[0]]
        return None if owner or is_own else object_name.name

    def _list_own(self, object_name: ObjectName) -> Iterator[str]:
        return _list_public(*(self.namespaces if object_name.module is None else (self._import(object_name.module),)))


def spell(spec: ModelSpec, change: Callable[[Any], Any] | None = None) -> str:
    """Return the model spec as text quoted for a shell. If `change` is given, apply it to each argument first."""
    args, kwargs = spec.args, spec.kwargs
    if change is not None:
        args, kwargs = tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}
    word = quote_for_shell(f"{spec.base}({format_call(args, kwargs)})" if spec.called else spec.base)
    config = spec.options.config_json
    return word if config is None else f"{word} --config-json {quote_for_shell(config)}"


def _iter_namespaces(module: types.ModuleType, callee: Callee) -> Iterator[types.ModuleType]:
    defining_module = sys.modules.get(getattr(callee, "__module__", None) or "")
    for start in filter(None, (module, defining_module)):
        if _is_standard(start.__name__):
            continue
        yield start
        package = start.__name__
        while "." in package:
            package = package.rpartition(".")[0]
            if package in sys.modules:
                yield sys.modules[package]


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in _STANDARD_LIBRARY


def _get_nested(value: object, dotted_name: str) -> Any:
    for attribute in dotted_name.split("."):
        value = getattr(value, attribute, _MISSING) if isinstance(value, (types.ModuleType, type)) else _MISSING
    return value


def _find_owner(value: object, dotted_name: str) -> types.ModuleType | None:
    """Return the last module on the path `dotted_name` that begins at `value`, or None if there is no module."""
    owner = None
    for attribute in dotted_name.split(".") if dotted_name else ():
        owner = value if isinstance(value, types.ModuleType) else owner
        value = _get_nested(value, attribute)
    return owner


def _has_nested(value: object, dotted_name: str) -> bool:
    return _get_nested(value, dotted_name) is not _MISSING


def _list_public(*modules: types.ModuleType) -> Iterator[str]:
    return (key for module in modules for key in list_names(module) if not key.startswith("_"))


def _iter_library_names() -> Iterator[tuple[str, str]]:
    """Yield (module, class name) for each class in the imported libraries. The preferred library comes last."""
    for library in reversed(_LIBRARIES):
        if library in sys.modules:
            yield from ((library, key) for key in _list_public(sys.modules[library]) if key[0].isupper())
