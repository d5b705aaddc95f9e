"""Build the model that a configuration file names, on any device, with the library that defines the class.

`bert/config.json` (transformers, diffusers, timm) and `minilm/modules.json` (sentence-transformers) are specs, and so
are `transformers:BertModel(config='bert')` and `diffusers:UNet2DModel('unet/config.json')`. Nothing is downloaded, and
no code of the checkpoint runs without `--trust-remote-code`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from statecli.core.errors import UsageError, option
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.live import hf_auto, library_models, sentence_model
from statecli.live.config_document import Library, find_config_file, find_library, read_document
from statecli.live.spec import ClassOptions, ModelSpec
from statecli.storage import files
from statecli.storage.checkpoint_folder import CONFIG, MODULES

if TYPE_CHECKING:
    from torch import nn

#: Endings of a class name in other spellings of the same build: `BertModel.from_config`.
_BUILDERS = (".from_config", "._from_config")
#: Suffixes of the files from which `from_pretrained` reads weights.
_WEIGHT_ENDS = (".safetensors", ".bin", ".index.json", ".h5", ".msgpack", ".gguf", ".ckpt.index")
#: Name without dots in a spec with `config=...`. The class is built from the configuration and the name is never
#: called, because `--model auto` takes the name from a file.
_PLAIN_NAME = compile_on_use(r"\w+")
#: Name of a class in a spec with a single text. Other callables with a text (pipeline, AutoModel.from_pretrained) are
#: called as the user wrote them.
_CLASS_NAME = compile_on_use(r"[A-Z]\w*")


def build_spec_text(path: str) -> str:
    """Return a model spec for the class that config.json names. `path` is a checkpoint or its folder.

    Raises UsageError if the folder has no configuration, or the configuration names no class.
    """
    folder = path if files.is_folder(path) else files.get_folder(path) or os.curdir
    config = files.join(folder, CONFIG)
    if not files.exists(config):
        adapter = files.is_file(files.join(folder, "adapter_config.json"))
        instruction = "name the class of the adapter's base model" if adapter else "name the class instead"
        auto = option("--model", "auto")
        raise UsageError(f"{path}: {auto} needs a {CONFIG} next to the checkpoint; {instruction}")
    document = read_document(config)
    if find_library(document) is not Library.TRANSFORMERS:
        return config
    return f"transformers:{hf_auto.find_class_name(document, config, for_auto=True)}(config={config!r})"


def name_config(text: str, path: str, options: ClassOptions) -> ModelSpec:
    """Return a model spec for the class that the configuration file `path` names. `text` is the target as typed."""
    return _name_build(text, None, Library.TRANSFORMERS, path, {}, options)


def resolve_config(spec: ModelSpec) -> ModelSpec:
    """Return a model spec that builds a transformers, diffusers or sentence-transformers class from its configuration.

    Other specs are unchanged.
    """
    if spec.attribute == "SentenceTransformer" and not spec.is_file and not spec.kwargs and len(spec.args) == 1:
        modules = os.path.join(spec.args[0], MODULES) if type(spec.args[0]) is str else ""
        return name_config(spec.text, modules, spec.options) if os.path.isfile(modules) else spec
    library = next((member for member in Library if member.value == spec.module.partition(".")[0]), None)
    if spec.is_file or library not in (Library.TRANSFORMERS, Library.DIFFUSERS):
        return spec
    name = spec.attribute
    _check_weights(spec, name)
    for builder in _BUILDERS:
        name = name.removesuffix(builder)
    is_given = type(spec.kwargs.get("config")) is str
    config = spec.kwargs["config"] if is_given else spec.args[0] if len(spec.args) == 1 else None
    if (
        type(config) is not str
        or (spec.args and is_given)
        or not (_PLAIN_NAME if is_given else _CLASS_NAME).fullmatch(name)
    ):
        return spec
    arguments = {key: value for key, value in spec.kwargs.items() if key != "config"}
    return _name_build(spec.text, name, library, config, arguments, spec.options)


def _check_weights(spec: ModelSpec, name: str) -> None:
    """Raise UsageError if `from_pretrained` gets a folder with a configuration but without weights."""
    class_name, _, method = name.rpartition(".")
    folder = spec.args[0] if len(spec.args) == 1 else None
    if method != "from_pretrained" or type(folder) is not str or not os.path.isfile(os.path.join(folder, CONFIG)):
        return
    if not any(file.endswith(_WEIGHT_ENDS) for file in os.listdir(folder)):
        line = quote_for_shell(f"{spec.module}:{class_name}({folder!r})")
        raise UsageError(f"{spec.text}: {folder} has no weights; to build the class from its {CONFIG}, write {line}")


def _name_build(
    text: str, name: str | None, library: Library, config: str, arguments: Mapping[str, Any], options: ClassOptions
) -> ModelSpec:
    args = (name, library.value, config, options.trusts_code)
    return ModelSpec(text, __name__, False, build_configured.__name__, args, dict(arguments), True, options, config)


def _spell_default(name: str, config: str) -> str:
    """Return a model spec for a transformers class with its default configuration, or "" for an unknown class.

    `config`: the typed text, from which an Auto class chooses the model.
    """
    return hf_auto.find_example(getattr(hf_auto.import_transformers(name), name, None), config) or ""


class ConfiguredClass(msgspec.Struct, frozen=True):
    """Class that a configuration names, with the folder of the configuration and the constructor's arguments.

    `replaced`: entries of a configuration of transformers to replace.
    """

    library: Library
    name: str
    folder: str
    arguments: Mapping[str, Any] = {}
    replaced: Mapping[str, Any] = {}


def find_class(spec: ModelSpec) -> ConfiguredClass:
    """Return the class that a model spec builds from a configuration. Raises UsageError."""
    name, library, config, _ = spec.args
    config = find_config_file(config)
    folder = files.get_folder(config) or os.curdir
    if files.get_name(config) == MODULES:
        return ConfiguredClass(Library.SENTENCE_TRANSFORMERS, "SentenceTransformer", folder)
    if name is not None and library == Library.TRANSFORMERS.value:
        return ConfiguredClass(Library.TRANSFORMERS, name, folder, *hf_auto.divide_arguments(name, config, spec.kwargs))
    if name is not None:
        return ConfiguredClass(Library(library), name, folder, spec.kwargs)
    document = read_document(config)
    library_of_file = find_library(document)
    if library_of_file is Library.TRANSFORMERS:
        return ConfiguredClass(library_of_file, hf_auto.find_class_name(document, config), folder)
    if library_of_file is Library.TIMM:
        return ConfiguredClass(
            library_of_file, document["architecture"], folder, library_models.list_timm_arguments(document)
        )
    return ConfiguredClass(library_of_file, document["_class_name"], folder)


def build_configured(name: str | None, library: str, config: str, trusts_code: bool, **arguments: Any) -> nn.Module:
    """Build the class `name` from a configuration. If `name` is None, build the class that the configuration names.

    `config`: a file, or the folder with the file. Raises UsageError, ModelError, MissingDependency.
    """
    config = find_config_file(
        config, "" if name is None or library != Library.TRANSFORMERS.value else _spell_default(name, config)
    )
    if files.get_name(config) == MODULES:
        return sentence_model.build_sentence_model(config)
    document = read_document(config)
    if name is None:
        library = find_library(document).value
    if trusts_code and document.get("auto_map") and name is None:
        return hf_auto.build_remote_code(config, document, arguments)
    if library == Library.DIFFUSERS.value:
        return library_models.build_diffusers(name, config, document, arguments)
    if library == Library.TIMM.value:
        return library_models.build_timm(config, document)
    return hf_auto.build_transformers(name, config, arguments)
