"""Suggest a model spec that needs no download: the class with random values, or a copy on this disk."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.live import hf_auto, model_registries
from statecli.live.configuration_argument import list_parameters
from statecli.live.downloads import ALLOW, iter_causes
from statecli.live.object_scope import spell
from statecli.live.spec import ModelSpec
from statecli.live.spec_objects import format_call
from statecli.live.suggested_arguments import is_module_class, set_argument, write_options
from statecli.live.suggested_target import Advice

#: Argument of transformers' functions with the name of a repository.
_REPOSITORY_ARGUMENT = "pretrained_model_name_or_path"
#: `organization/name`.
_REPOSITORY = compile_on_use(r"[\w.-]+/[\w.-]+")


def advise_line(spec: ModelSpec, callee: object, error: BaseException) -> Advice:
    """Return advice for a call that started a download: a model spec without downloads, and how to allow downloads."""
    repository = _find_repository(error)
    line = _write_loaded_class(spec, callee) or (repository and _write_class_of_repository(callee, repository))
    line = line or _write_model_of_registry(spec)
    if line is not None:
        word = quote_for_shell(line)
        return Advice(f"for random values, write {word}, or {ALLOW}", (word,))
    if spec.module == "torch.hub" and spec.attribute == "load" and spec.args and "source" not in spec.kwargs:
        arguments = format_call(("FOLDER", *spec.args[1:]), {**spec.kwargs, "source": "local"})
        copy = quote_for_shell(f"{spec.base}({arguments})")
        return Advice(f"with a copy of the repository in FOLDER, write {copy}, or {ALLOW}")
    if repository is not None and _REPOSITORY.fullmatch(repository):
        return Advice(f"to list the tensors of the repository, write hf://{repository}, or {ALLOW}")
    return Advice(ALLOW, tuple(_list_lines(spec, callee)))


def _list_lines(spec: ModelSpec, callee: Any) -> Iterator[str]:
    """Yield model specs that may avoid a download: another allowed value, or None or False in place of a default."""
    yield from write_options(spec, callee)
    for parameter in list_parameters(callee) if not spec.is_file else ():
        if parameter.default is True or type(parameter.default) is str:
            value = False if parameter.default is True else None
            yield spell(replace(set_argument(spec, callee, parameter.name, value), called=True))


def _write_loaded_class(spec: ModelSpec, callee: Any) -> str | None:
    """Return a model spec for a method's class (`diffusers:UNet2DModel` for its `from_pretrained`), or else None."""
    owner = spec.attribute.rpartition(".")[0]
    return f"{spec.module}:{owner}" if owner and is_module_class(getattr(callee, "__self__", None)) else None


def _write_class_of_repository(callee: object, repository: str) -> str | None:
    """Return a model spec for the transformers class that a repository's name suggests, or None if unknown."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return None
    kind = hf_auto.find_model_type(repository, transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    if kind is None:
        return None
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    mapping = getattr(getattr(callee, "__self__", None), "_model_mapping", None)
    for classes in filter(None, (mapping, transformers.AutoModel._model_mapping)):
        if config_class in classes:
            model_classes = classes[config_class]
            model_class = model_classes[0] if isinstance(model_classes, (tuple, list)) else model_classes
            return f"transformers:{model_class.__name__}(config={config_class.__name__}())"
    return None


def _find_repository(error: BaseException) -> str | None:
    """Return the repository in the arguments of the calls that raised the error, or None if there is none."""
    for cause in iter_causes(error):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            name = frame.f_locals.get(_REPOSITORY_ARGUMENT)
            if isinstance(name, str):
                return name
    return None


def _write_model_of_registry(spec: ModelSpec) -> str | None:
    """Return `timm:resnet18` if an argument names this model of an installed library, otherwise None."""
    names = [value for value in (*spec.args, *spec.kwargs.values()) if type(value) is str and value.isidentifier()]
    return next(filter(None, map(model_registries.find_target, names)), None)
