"""Write the code of a function that builds a model, for models that no spec on the command line can build."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence

from statecli.core import build_function
from statecli.core.python_names import list_factories
from statecli.live.spec import ModelSpec
from statecli.live.spec_objects import ObjectName, format_call, map_names


def write_builder(
    spec: ModelSpec,
    namespaces: Sequence[types.ModuleType],
    file: str = "build.py",
    *,
    in_place: bool = False,
    ending: str = "",
) -> str:
    """Return code to add to a file: a function that calls the class or function of a model spec.

    `namespaces`: the modules whose names the arguments use. `in_place`: the function changes its first argument.
    `ending`: code after the call, `.model` or `[0]`.
    """
    top = spec.attribute.partition(".")[0]
    names = {spec.module: {top}}
    packages: set[str] = set()
    named_modules: list[types.ModuleType] = []

    def write_name(object_name: ObjectName) -> ObjectName:
        first, dot, _ = object_name.name.partition(".")
        owner = next((space.__name__ for space in (*namespaces, *named_modules) if hasattr(space, first)), None)
        owner = None if dot and first in sys.modules else owner
        # For example BertConfig in the arguments of transformers.BertModel.
        named_modules.extend(filter(None, [sys.modules.get(object_name.module or object_name.name.rpartition(".")[0])]))
        if object_name.module != file and (object_name.module or owner):
            names.setdefault(str(object_name.module or owner), set()).add(first)
        elif object_name.module != file and dot:
            packages.add(first)
        return ObjectName(object_name.name)

    args = [map_names(value, write_name) for value in spec.args]
    kwargs = {name: map_names(value, write_name) for name, value in spec.kwargs.items()}
    body, call = "", f"{spec.attribute}({format_call(args, kwargs)}){ending}"
    if in_place:
        model = (*args, *kwargs.values())[0]
        args, kwargs = ([ObjectName("model")] * bool(args) + args[1:]), dict(kwargs)
        if not args:
            kwargs[next(iter(kwargs))] = ObjectName("model")
        body, call = f"model = {model!r}; {spec.attribute}({format_call(args, kwargs)}); ", "model"
    used_names = set() if file == "build.py" else set(list_factories(file))
    imports = [f"from {module} import {', '.join(sorted(names[module]))}; " for module in sorted(names)]
    imports += [f"import {package}; " for package in sorted(packages)]
    return build_function.write_function(file, call, (top,), used_names, "".join(imports) + body)
