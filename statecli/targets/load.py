"""Load a target (a checkpoint or a model class, named by a text) as a ModelState."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli import core, formats, live
from statecli.core import parameter_or_buffer
from statecli.core.errors import MalformedError, UnreadableError, UsageError, option
from statecli.core.installed_package import MODEL_LIBRARIES
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ModelState
from statecli.core.oddity_kind import OddityKind
from statecli.live import search_path
from statecli.live.spec import AUTO, ModelSpec, correct_package, parse_spec, split_class_options
from statecli.storage import checkpoint_folder, files
from statecli.targets.section_of_target import split_section

if TYPE_CHECKING:
    from statecli.core.target_suggestions import ModuleName

LoadedNames = dict[str, tuple[str, ...]]


def find_class_spec(text: str) -> ModelSpec | None:
    """Return the model class that the text names, or None for a file, a folder or a URL. Raises UsageError."""
    model, options = split_class_options(text)
    if files.is_remote(model) or os.path.lexists(model):
        config = _find_configuration(model)
        return None if config is None else live.configured_model.name_config(text, config, options)
    spec = parse_spec(text)
    if spec is None:
        spec = _parse_hub_model(text) or _parse_dotted_name(text)
        return spec and replace(spec, text=text)
    package = spec.module.partition(".")[0]
    if spec.is_file or package not in (*_CONFIGURED_LIBRARIES, *_REGISTRIES):
        return spec
    # Not a module of this name in the current folder, because the user named a library.
    spec = replace(spec, is_library=True)
    return spec if package in _REGISTRIES else live.configured_model.resolve_config(spec)


#: Libraries whose classes are built from a configuration file, and libraries that build models by name.
_CONFIGURED_LIBRARIES = ("transformers", "diffusers", "sentence_transformers")
_REGISTRIES = ("timm", "torchvision")
#: Files that may name a model class, as the end of a path.
_CONFIGURATION = (checkpoint_folder.MODULES, checkpoint_folder.CONFIG)
#: Dotted name with an optional call: `package.Class`, `package.Class(…)`, `package.module.function(…)`.
_DOTTED_NAME = compile_on_use(r"(?P<path>[A-Za-z_][\w-]*(?:\.\w+)*\.(?P<name>\w+))(?P<call>\(.*)?\Z", re.DOTALL)
#: Name that can only be a class; another name after a dot may be the extension of a file.
_CLASS_NAME = compile_on_use(r"[A-Z]\w*[a-z]\w*")
#: Model of torch.hub: `torchhub:pytorch/vision/resnet18`, `torch.hub:pytorch/vision:main/resnet18`.
_HUB_MODEL = compile_on_use(r"torch[._-]?hub:(?P<repository>[\w.-]+/[\w.-]+(?::[\w.-]+(?=[/:]))?)[/:](?P<model>\w+)\Z")


def _find_configuration(path: str) -> str | None:
    """Return the configuration file that names the model class of a file, folder or URL, or None if not found.

    A folder is a class only if it has no weights. Of files, only `config.json` and `modules.json` are classes; on local
    disk they must also name a class.
    """
    if files.is_remote(path):
        return path if files.get_name(split_section(path)[0]) in _CONFIGURATION else None
    config = path if os.path.basename(path) in _CONFIGURATION and os.path.isfile(path) else None
    if os.path.isdir(path):
        config = checkpoint_folder.find_configuration(path)
        if config is not None and formats.is_recognised_folder(path):
            return None
    return config if config is not None and live.config_document.names_model(config) else None


def name_class(text: str) -> str:
    """Replace a folder or repository by its configuration file. Return any other text unchanged."""
    path, _ = split_class_options(text)
    if files.get_name(path) in _CONFIGURATION or not files.is_folder(path):
        return text
    config = next(filter(files.exists, (files.join(path, name) for name in _CONFIGURATION)), None)
    return text if config is None else config + text[len(path) :]


def _parse_hub_model(text: str) -> ModelSpec | None:
    match = _HUB_MODEL.match(text)
    return match and parse_spec(f"torch.hub:load({match['repository']!r}, {match['model']!r})")


def _parse_dotted_name(text: str) -> ModelSpec | None:
    """Return the model spec of `torch.nn.Identity` or `timm.create_model('resnet18')`, or None for other text.

    The name belongs to an installed package, and has a call, is a class name, or is defined by a library of models.
    """
    suggestions = core.target_suggestions
    layer = text.removeprefix("nn.")
    if layer[:1].isupper() and layer.isidentifier() and suggestions.is_layer(layer):
        return parse_spec(f"torch.nn:{layer}")
    if layer != text and not os.path.isfile("nn.py"):
        return _parse_dotted_name(f"torch.nn.{layer}")
    match = _DOTTED_NAME.match(text)
    if match is None or (not match["call"] and os.path.isfile(f"{text.partition('.')[0]}.py")):  # a local file
        return None
    path = correct_package(match["path"])
    with search_path.use_installed_only():
        split_name = (
            suggestions.split_module_name(path)
            or suggestions.split_loaded_class(path)
            or suggestions.split_inner_module(path, is_called=bool(match["call"]))
        )
    is_class = match["call"] or _CLASS_NAME.fullmatch(match["name"])
    if split_name is None or not (is_class or _is_in_library(split_name)):
        return None
    spec = find_class_spec(f"{split_name.module}:{split_name.attribute}{match['call'] or ''}")
    return spec and replace(spec, is_library=True)


def _is_in_library(name: ModuleName) -> bool:
    """Return whether a library of models defines the dotted name (`timm.resnet18`). Other names may be file names."""
    return name.module.partition(".")[0] in MODEL_LIBRARIES and live.import_model.has_attribute(name)


def resolve_auto_class(text: str, checkpoint: str) -> str:
    """Return `text`, or for `auto` the class that the configuration next to the checkpoint names.

    Raises as `configured_model.build_spec_text` does.
    """
    if text != AUTO:
        return text
    return live.configured_model.build_spec_text(split_section(checkpoint)[0])


def read_checkpoint(text: str) -> ModelState:
    """Read a checkpoint or one of its sections (`train.ckpt#optimizer`), and classify its tensors.

    Raises MalformedError for a pickle without tensors, because there is nothing to list or compare.
    """
    state = read_whole_checkpoint(text)
    for oddity in state.oddities if not state.tensors else ():
        if oddity.kind is OddityKind.NO_TENSORS:
            raise MalformedError(f"{state.target}: {oddity.message}")
    return select_section(state, text)


def read_whole_checkpoint(text: str) -> ModelState:
    """Read all sections of the checkpoint and classify its tensors, even if the text names a single section.

    Other sections help to classify them: the optimizer's section shows which tensors of the model are parameters.
    """
    path, section = split_section(text)
    if not files.is_remote(path) and not files.exists(path):
        problem = "cannot be opened: no such file or directory"
        raise core.target_suggestions.suggest_for_missing(path).build_error(UnreadableError, path, problem)
    if path.endswith(".py") and os.path.isfile(path):
        raise core.target_suggestions.describe_python_file(path).build_error(UnreadableError, path)
    return parameter_or_buffer.classify_tensors(formats.read(path, section))


def select_section(state: ModelState, text: str) -> ModelState:
    """Return the section of `state` that the text names, or all of `state` if the text names no section."""
    _, section = split_section(text)
    return replace(state if section is None else _filter_section(state, section), target=text)


def _filter_section(state: ModelState, section: str) -> ModelState:
    matching = tuple(name for name in state.sections if name == section or (section and name.startswith(section + ".")))
    has_settings_alone = any(optimizer.section == section for optimizer in state.optimizers)
    if not matching and not has_settings_alone:
        from difflib import get_close_matches

        close_matches = get_close_matches(section, state.sections, n=1)
        names_text = ", ".join("#" + name for name in state.sections)
        inventory = f"the sections are {names_text}" if state.sections[1:] else f"the only section is {names_text}"
        inventory = inventory if state.sections else "the checkpoint contains no tensors"
        hint = f"did you mean #{close_matches[0]}?" if close_matches else inventory
        raise UnreadableError(f"{state.target}: has no section {section!r}; {hint}")
    tensors = tuple(tensor for tensor in state.tensors if tensor.section in matching)
    return replace(state, sections=matching, tensors=tensors)


def read_class_state(
    text: str, *, init_device: str | None, names: Sequence[str] = ()
) -> tuple[ModelState, LoadedNames]:
    """Return the state of the class in `--model`, and a map from checkpoint names to the names that the class loads.

    Only a transformers class with a configuration renames keys. Raises UsageError if the text does not name a class.
    """
    spec = find_class_spec(text)
    if spec is None:
        option_text = option("--model", text)
        raise UsageError(f"{option_text}: must be a class; write file.py:Class, package.module:Class or auto")
    built_model = live.build.build(spec, init_device=init_device)
    state = live.model_reader.read(built_model, text)
    return state, {} if spec.config is None else live.hf_auto.map_loaded_names(built_model.module, names)
