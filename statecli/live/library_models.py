"""Build a model of diffusers or timm from its config.json, without weights and without a download."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from statecli.core.errors import MissingDependency, ModelError
from statecli.core.installed_package import install_module
from statecli.core.quoting import quote_for_shell
from statecli.core.units import join_names
from statecli.live import config_guards, search_path
from statecli.live.library_output import hide_library_lines
from statecli.live.suggested_arguments import is_module_class
from statecli.storage import files

if TYPE_CHECKING:
    from torch import nn

#: Least similarity of a suggested name, from 0 to 1.
_SIMILARITY = 0.7
#: Arguments of `timm.create_model` that load a file or download weights.
_TIMM_FETCHES = ("pretrained", "checkpoint", "cache_dir")


def import_library(name: str, config: str) -> Any:
    """Import the package `name`, never from the current folder or the folder of `config`. Raises MissingDependency."""
    try:
        with hide_library_lines(), search_path.use_installed_only(files.get_folder(config)):
            return importlib.import_module(name)
    except ImportError as error:
        package, missing = name.partition(".")[0], (error.name or "").partition(".")[0]
        reason = "is not installed" if missing == package else f"needs {missing}" if missing else "cannot be imported"
        problem = f"{config}: needs {package.replace('_', '-')}, which {reason}"
        raise MissingDependency(f"{problem}: {install_module(missing or package)}") from error


def build_diffusers(
    name: str | None, config: str, document: Mapping[str, Any], arguments: Mapping[str, Any]
) -> nn.Module:
    """Build the diffusers class `name`, or the class in the configuration's `_class_name`. Raises ModelError."""
    diffusers = import_library("diffusers", config)
    file_class = document.get("_class_name")
    is_unknown = type(file_class) is str and _find_diffusers_class(diffusers, file_class) is None
    if type(file_class) is not str or (name is not None and not is_unknown and name != file_class.rpartition(".")[2]):
        has = f"names {file_class[:80]}, not {name}" if type(file_class) is str else "has no _class_name"
        raise ModelError(f"{config}: {has}, so it is not a configuration of this class of diffusers")
    name = name or file_class
    config_guards.check_config(document, config)
    model_class = _find_diffusers_class(diffusers, name)
    if model_class is None:
        problem = f"names {name[:80]}, which is not a model class of diffusers {diffusers.__version__}"
        line = quote_for_shell(f"diffusers:Class(config={config!r})")
        raise ModelError(f"{config}: {problem}; name the class: {line}")
    parameter_names = list(inspect.signature(model_class.__init__).parameters)[1:]
    unknown = [key for key in arguments if key not in parameter_names]
    if unknown:
        raise ModelError(
            f"{name} does not take {join_names(unknown, 3)}; {name} takes {join_names(parameter_names, 8)}"
        )
    with config_guards.disable_hub(), config_guards.limit_registrations(config):
        model: nn.Module = model_class.from_config({**document, **arguments})
    return model


def _find_diffusers_class(diffusers: object, name: str) -> Any:
    model_class = getattr(diffusers, name.rpartition(".")[2], None)
    return model_class if is_module_class(model_class) else None


def build_timm(config: str, document: Mapping[str, Any]) -> nn.Module:
    """Build the timm model that the configuration's `architecture` names. Raises ModelError."""
    timm = import_library("timm", config)
    name, arguments = str(document["architecture"]), list_timm_arguments(document)
    config_guards.check_config(document, config)
    if not timm.is_model(name):  # a name with a colon would be downloaded
        similar_names = difflib.get_close_matches(name, timm.list_models(), 3, _SIMILARITY)
        hint = f"did you mean {' or '.join(similar_names)}?" if similar_names else "name the class: file.py:Class"
        problem = f"architecture is {name[:80]!r}, which is not a model of timm {timm.__version__}"
        raise ModelError(f"{config}: {problem}; {hint}")
    fetching_keys = [key for key in arguments if key.startswith(_TIMM_FETCHES)]
    if fetching_keys:
        raise ModelError(
            f"{config}: model_args has {join_names(fetching_keys, 3)}, which loads other files; remove the entry"
        )
    config_guards.check_config(arguments, config)
    with config_guards.disable_hub(), config_guards.limit_registrations(config):
        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    return model


def list_timm_arguments(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for `timm.create_model` that a configuration contains."""
    model_args = document.get("model_args")
    arguments = dict(model_args) if type(model_args) is dict else {}
    for key, kind in (("num_classes", int), ("global_pool", str)):
        if type(document.get(key)) is kind:
            arguments.setdefault(key, document[key])
    return arguments
