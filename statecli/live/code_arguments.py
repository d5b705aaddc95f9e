"""Write a function that builds a model, for arguments that are code: a lambda, a comprehension, `partial(...)`."""

from __future__ import annotations

import ast
import builtins

from statecli.core import build_function, registry_functions
from statecli.core.installed_package import MODEL_LIBRARIES
from statecli.core.target_suggestions import is_layer

#: Imports of names that code of models uses.
_IMPORTS = {
    "F": "from torch.nn import functional as F",
    "functools": "import functools",
    "math": "import math",
    "nn": "from torch import nn",
    "np": "import numpy as np",
    "partial": "from functools import partial",
}


def write_function(base: str, call: ast.Call) -> str:
    """Return code to add to a file: a function that calls `base` (a class or function) with the arguments of `call`.

    `base`: `net.py:Net`, `torch.nn:Linear`. `call`: `f(2, act=lambda: nn.ReLU())`.
    """
    module, _, attribute = base.rpartition(":")
    builder = registry_functions.find_function(module, attribute)
    if builder is not None:
        module, name, attribute = builder.module, attribute, builder.build
        call = ast.Call(call.func, [ast.Constant(name), *call.args], call.keywords)
    call = ast.Call(ast.parse(attribute, mode="eval").body, call.args, call.keywords)
    names_from_module, imports = {attribute.partition(".")[0]}, set()
    for name in _list_free_names(call) - names_from_module:
        if name in _IMPORTS:
            imports.add(_IMPORTS[name])
        elif name == "torch" or name in MODEL_LIBRARIES:
            imports.add(f"import {name}")
        elif is_layer(name) and module != "torch.nn":
            imports.add(f"from torch.nn import {name}")
        elif name[:1].isupper():
            names_from_module.add(name)
    lines = "".join(f"{line}; " for line in sorted(imports))
    return build_function.write_function(module, ast.unparse(call), sorted(names_from_module), imports=lines)


def parse_call(code: str) -> ast.Call:
    """Return the syntax tree of a call."""
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)  # noqa: S101 - the caller writes a call
    return call


def _list_free_names(call: ast.Call) -> set[str]:
    """Return the names that the code reads but does not define."""
    nodes = list(ast.walk(call))
    loaded_names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assigned_names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (
        loaded_names - assigned_names - {node.arg for node in nodes if isinstance(node, ast.arg)} - set(dir(builtins))
    )
