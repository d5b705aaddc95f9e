"""The class of a spec as lines of Python, and its integer arguments, one of which may be the cause."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator

from statecli.commands.explain.recipe import ModelCode
from statecli.live import configured_model
from statecli.live.config_document import Library
from statecli.live.import_model import load_object
from statecli.live.spec import ModelSpec
from statecli.live.spec_objects import format_call


def build_model_code(spec: ModelSpec, *, is_instance: bool = False) -> ModelCode:
    """Return the import of the class, and the expression that builds the model."""
    if spec.config is not None:
        return _build_configured_code(spec)
    first = spec.attribute.partition(".")[0]
    if spec.is_file:
        folder, file = os.path.split(spec.module)
        where = f"  # in the folder {folder}" if folder else ""
        line = f"from {file.removesuffix('.py')} import {first}{where}"
    else:
        line = f"from {spec.module} import {first}"
    return ModelCode((line,), spec.attribute if is_instance else f"{spec.attribute}({format_arguments(spec)})")


def _build_configured_code(spec: ModelSpec) -> ModelCode:
    """Return the lines that build a model from its configuration file."""
    built = configured_model.find_class(spec)
    name, arguments, folder = built.name, format_call((), built.arguments), repr(built.folder)
    if built.library is Library.DIFFUSERS:
        configuration = ", ".join(filter(None, [f"{name}.load_config({folder})", arguments]))
        return ModelCode((f"from diffusers import {name}",), f"{name}.from_config({configuration})")
    if built.library is Library.TIMM:
        return ModelCode(("import timm",), f"timm.create_model({', '.join(filter(None, [repr(name), arguments]))})")
    if built.library is Library.SENTENCE_TRANSFORMERS:
        line = "from sentence_transformers import SentenceTransformer  # the folder must contain weights"
        return ModelCode((line,), f"SentenceTransformer({folder})")
    replaced = ", ".join(filter(None, [folder, format_call((), built.replaced)]))
    configuration = ", ".join(filter(None, [f"AutoConfig.from_pretrained({replaced})", arguments]))
    builder = f"{name}.from_config" if name.startswith("AutoModel") else name
    return ModelCode((f"from transformers import AutoConfig, {name}",), f"{builder}({configuration})")


def format_arguments(spec: ModelSpec) -> str:
    """Return the arguments as written in a call."""
    return format_call(spec.args, spec.kwargs)


def change_argument(spec: ModelSpec, name: str, value: int) -> ModelSpec:
    """Return the spec with another value of an argument."""
    kwargs, args = dict(spec.kwargs), list(spec.args)
    names = list_parameters(spec)
    position = names.index(name) if name in names else len(args)
    if name not in kwargs and position < len(args):
        args[position] = value
    else:
        kwargs[name] = value
    head = spec.text.partition("(")[0]
    changed = ModelSpec(spec.text, spec.module, spec.is_file, spec.attribute, tuple(args), kwargs, True)
    text = f"{head}({format_arguments(changed)})"
    return ModelSpec(text, spec.module, spec.is_file, spec.attribute, tuple(args), kwargs, True)


def list_parameters(spec: ModelSpec) -> list[str]:
    """Return the names of the positional parameters; [] if the object has no signature."""
    return [
        parameter.name
        for parameter in _get_parameters(spec)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def list_integer_arguments(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield the integer arguments of the call with their values, given or default."""
    names = list_parameters(spec)
    given = dict(zip(names, spec.args, strict=False)) | spec.kwargs
    for parameter in _get_parameters(spec):
        value = given.get(parameter.name, parameter.default)
        if type(value) is int and parameter.kind is not parameter.POSITIONAL_ONLY:
            yield parameter.name, value


def _get_parameters(spec: ModelSpec) -> list[inspect.Parameter]:
    if spec.config is not None:
        return []
    try:
        return list(inspect.signature(load_object(spec)).parameters.values())
    except (TypeError, ValueError):
        return []
