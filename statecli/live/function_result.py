"""Explain that a function did not return a model, and suggest a layer or code that gets the model."""

from __future__ import annotations

import inspect
import sys

from msgspec.structs import replace

from statecli.core.errors import ModelError
from statecli.core.target_suggestions import find_example
from statecli.live import object_scope
from statecli.live.builder_function import write_builder
from statecli.live.model_errors import describe_type
from statecli.live.object_scope import Scope
from statecli.live.spec import Callee, ModelSpec
from statecli.live.suggested_arguments import is_module_class
from statecli.live.suggested_target import Advice

#: A module whose functions have no annotation.
_FUNCTIONAL = "torch.nn.functional"


def check_function(spec: ModelSpec, callee: Callee) -> None:
    """Raise ModelError for a function of tensors (`functional.linear`), and suggest a layer with a similar name."""
    if spec.is_file or isinstance(callee, type) or not inspect.isroutine(callee):
        return
    annotation = str(getattr(callee, "__annotations__", {}).get("return", ""))
    is_of_tensors = spec.module == _FUNCTIONAL or annotation.rpartition(".")[2].rstrip("'>") == "Tensor"
    if inspect.isbuiltin(callee) or is_of_tensors:
        problem = f"{spec.text}: {spec.attribute} is a function of tensors, not a model class"
        raise _advise_layer(spec).build_error(problem)


def explain_result(spec: ModelSpec, scope: Scope, result: object) -> ModelError:
    """Return the error for a function that returned no module, with advice on how to get a model."""
    from torch import nn

    problem = f"{spec.text}: {spec.attribute} returned {describe_type(result)}, not an nn.Module"
    items = list(result) if isinstance(result, tuple) else []
    models = [f"[{number}]" for number, item in enumerate(items) if isinstance(item, nn.Module)]
    if isinstance(getattr(result, "model", None), nn.Module):
        models = [".model"]
    if len(models) == 1:
        return ModelError(f"{problem}; for its model, {write_builder(spec, scope.namespaces, ending=models[0])}")
    return ModelError(problem) if spec.is_file else _advise_layer(spec).build_error(problem)


def _advise_layer(spec: ModelSpec) -> Advice:
    """Return advice to use the layer with the function's name (Conv2d for conv2d), or else an example model."""
    name = spec.attribute.rpartition(".")[2].replace("_", "").lower()
    parts = spec.module.split(".")
    packages = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    for module in filter(None, map(sys.modules.get, (*packages, "torch.nn"))):
        layer_names = [
            key for key in vars(module) if key.lower().startswith(name) and is_module_class(vars(module)[key])
        ]
        if layer_names:
            layer = replace(spec, module=module.__name__, attribute=min(layer_names, key=lambda key: (len(key), key)))
            lines = (object_scope.spell(layer), object_scope.spell(replace(layer, args=(), kwargs={}, called=False)))
            return Advice(f"write {lines[0]}", tuple(dict.fromkeys(lines)))
    return Advice(f"for a model, write {find_example(spec.module) or find_example('torch')}")
