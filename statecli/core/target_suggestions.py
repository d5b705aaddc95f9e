"""Suggest words to type instead of a missing target or a Python file without a class."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import NamedTuple

from statecli.core import python_names
from statecli.core.quoting import quote_for_shell

#: `package.Class`, with a call behind it: a class is named after a colon.
_DOTTED = re.compile(r"(?P<path>[A-Za-z_]\w*(?:\.\w+)*)(?P<call>\(.*\))?\Z", re.DOTALL)
#: A model of each package that has functions, or classes with plain arguments.
_EXAMPLES = {
    "timm": "timm:create_model('resnet18')",
    "torch": "torch.nn:Linear(2, 3)",
    "torch.nn": "torch.nn:Linear(2, 3)",
    "torchvision": "torchvision.models:resnet18",
    "torchvision.models": "torchvision.models:resnet18",
}
_BUILD = "write a function without arguments that builds the model, and name it: build.py:make"


class Suggestion(NamedTuple):
    """Sentence, and the targets to type named in the sentence."""

    text: str = ""
    choices: tuple[str, ...] = ()


def suggest_for_missing(path: str) -> Suggestion:
    """Return `did you mean weights.pt?` or how to name a class, for a nonexistent path; else nothing."""
    dotted = _DOTTED.match(path)
    suggestion = _suggest_name(dotted["path"].split("."), dotted["call"] or "") if dotted else None
    if suggestion is not None:
        return suggestion
    if os.path.isfile(f"{path}.py"):
        return _suggest_names_of_file(f"{path}.py")
    from difflib import get_close_matches

    folder, name = os.path.split(path)
    try:
        near = get_close_matches(name, os.listdir(folder or os.curdir), n=1)
    except OSError:
        return Suggestion()
    return Suggestion(f"did you mean {os.path.join(folder, near[0])}?") if near else Suggestion()


def describe_python_file(path: str) -> Suggestion:
    """Return `is a Python file, not a checkpoint; name a class in it: net.py:Net`."""
    choices = tuple(_list_specs(path))
    what = "is a Python file, not a checkpoint; "
    return Suggestion(f"{what}name a class or function in it:", choices) if choices else Suggestion(f"{what}{_BUILD}")


def _suggest_name(parts: Sequence[str], call: str) -> Suggestion | None:
    """Return how to name a class of a local file or of an installed module, for a name with dots."""
    for end in range(len(parts), 0, -1):
        file, rest = f"{os.path.join(*parts[:end])}.py", ".".join(parts[end:])
        if not os.path.isfile(file):
            continue
        if rest and parts[end] in python_names.list_definitions(file):
            return Suggestion(f"name a class or function after a colon: {quote_for_shell(f'{file}:{rest}{call}')}")
        if not rest or rest[0].isupper():
            return _suggest_names_of_file(file)
    modules = list(_find_modules(parts))
    if not modules:
        return None
    module, rest = ".".join(parts[: len(modules)]), ".".join(parts[len(modules) :])
    if rest:
        return Suggestion(f"name a class or function after a colon: {quote_for_shell(f'{module}:{rest}{call}')}")
    return _suggest_names_of_module(module, modules[-1])


def _suggest_names_of_file(path: str) -> Suggestion:
    choices = tuple(_list_specs(path))
    if not choices:
        return Suggestion(f"{path} is a Python file: {_BUILD}")
    return Suggestion(f"name a class or function of the file {path}:", choices)


def _suggest_names_of_module(name: str, spec: ModuleSpec) -> Suggestion:
    what = f"{name} is a Python {'module' if spec.submodule_search_locations is None else 'package'}"
    if name in _EXAMPLES:
        return Suggestion(f"{what}: name a class or function in it, such as {quote_for_shell(_EXAMPLES[name])}")
    choices = tuple(_list_specs(spec.origin, name)) if spec.origin else ()
    if choices:
        return Suggestion(f"{what}; name a class in it:", choices)
    return Suggestion(f"{what}: name a class or function in it after a colon, or {_BUILD}")


def _list_specs(path: str, module: str | None = None) -> Iterator[str]:
    """Yield `net.py:Net`, or `'net.py:Net(size=...)'`, for each builder of a model: classes, else functions."""
    models = list(python_names.list_model_classes(path))
    for model in models:
        call = f"({', '.join(f'{argument}=...' for argument in model.required)})" if model.required else ""
        if not model.takes_object:
            yield quote_for_shell(f"{module or path}:{model.name}{call}")
    if all(model.takes_object for model in models):
        yield from (f"{module or path}:{name}" for name in python_names.list_model_factories(path))


def _find_modules(parts: Sequence[str]) -> Iterator[ModuleSpec]:
    """Yield the specs of the module and of its submodules as found by Python; nothing is imported."""
    from importlib.util import find_spec

    try:
        spec = find_spec(parts[0])
    except (ImportError, ValueError):
        return
    for end in range(1, len(parts) + 1):
        if spec is None:
            return
        yield spec
        if end < len(parts):
            locations = spec.submodule_search_locations
            spec = PathFinder.find_spec(".".join(parts[: end + 1]), locations) if locations is not None else None
