"""Build a sentence-transformers model from modules.json: all modules in their order, without weights."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from statecli.core.errors import ModelError, UnreadableError, UsageError
from statecli.live import config_guards, hf_auto
from statecli.live.config_document import read_document
from statecli.live.library_models import import_library
from statecli.live.suggested_arguments import is_module_class
from statecli.storage import files
from statecli.storage.byte_source import read_small_file
from statecli.storage.checkpoint_folder import CONFIG, MAX_MODULES_BYTES, split_module_folder

if TYPE_CHECKING:
    from torch import nn

#: Packages with the module classes of sentence-transformers: of version 6, and of earlier versions.
_PACKAGES = (
    "sentence_transformers.sentence_transformer.modules",
    "sentence_transformers.base.modules",
    "sentence_transformers.models",
)
#: Name of the module class that holds a model of transformers.
_TRANSFORMER_CLASS = "Transformer"
#: Key in the configuration of a module whose value names code.
_ACTIVATION_KEY = "activation_function"


def build_sentence_model(modules: str) -> nn.Module:
    """Build the modules that the file `modules` lists. Raises UsageError, ModelError, MissingDependency."""
    from torch import nn

    import_library("sentence_transformers", modules)
    folder = files.get_folder(modules)
    named_modules = [(name, _build_module(modules, folder, kind, path)) for name, kind, path in _iter_modules(modules)]
    model = nn.Sequential()
    for name, module in named_modules:
        model.add_module(name, module)
    return model


def _iter_modules(modules: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type and the folder of each module. Raises UsageError."""
    try:
        document = json.loads(read_small_file(modules, MAX_MODULES_BYTES))
    except UnreadableError as error:
        raise UsageError(f"{modules}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{modules}: is not a JSON document; copy or download the file again") from error
    if not isinstance(document, list) or not document:
        raise UsageError(f"{modules}: lists no modules; copy or download the file again")
    for number, entry in enumerate(document):
        kind, path = (entry.get("type"), entry.get("path", "")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or split_module_folder(path) is None:
            raise UsageError(
                f"{modules}: entry {number} must have a type, and the path of a folder inside the checkpoint; correct "
                "the file"
            )
        yield str(entry.get("name", number)).replace(".", "_") or str(number), kind, path


def _build_module(modules: str, root: str, kind: str, path: str) -> nn.Module:
    from torch import nn

    name = kind.rpartition(".")[2]
    module_class = _find_class(modules, kind, name)
    folder = files.join(root, path) if path else root
    if name == _TRANSFORMER_CLASS:
        model = hf_auto.build_transformers(None, files.join(folder, CONFIG), {})
        module: nn.Module = module_class.__new__(module_class)  # its constructor needs a tokenizer, and loads weights
        nn.Module.__init__(module)
        setattr(
            module, "model" if isinstance(getattr(module_class, "auto_model", None), property) else "auto_model", model
        )
        return module
    config = files.join(folder, getattr(module_class, "config_file_name", CONFIG))
    arguments = read_document(config) if path and files.exists(config) else {}
    config_guards.check_config(arguments, config)
    if _ACTIVATION_KEY in arguments:
        arguments[_ACTIVATION_KEY] = _find_activation(config, str(arguments[_ACTIVATION_KEY]))
    new_key_by_old = getattr(module_class, "config_key_renames", {})
    arguments = {new_key_by_old.get(key, key): value for key, value in arguments.items()}
    with _silence_log(), config_guards.disable_hub(), config_guards.limit_registrations(config):
        built_module: nn.Module = module_class(**arguments)
    return built_module


@contextmanager
def _silence_log() -> Iterator[None]:
    """Silence sentence-transformers' log and warnings in the block: they are about settings of older versions."""
    logger = logging.getLogger("sentence_transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _find_class(modules: str, kind: str, name: str) -> Any:
    if kind.partition(".")[0] != "sentence_transformers":
        raise ModelError(
            f"{modules}: {kind[:80]} is code of the checkpoint, which statecli does not run; name the class: "
            "file.py:Class"
        )
    for package in _PACKAGES:
        try:
            module_class = getattr(import_library(package, modules), name, None)
        except Exception:  # noqa: BLE001, S112 - another version of the library has another package
            continue
        if is_module_class(module_class):
            return module_class
    raise ModelError(f"{modules}: {kind[:80]} is not a module of the installed sentence-transformers")


def _find_activation(config: str, text: str) -> nn.Module:
    """Return an instance of the torch.nn class that `text` names (`torch.nn.modules.activation.Tanh`)."""
    from torch import nn

    activation_class: Any = getattr(nn, text.rpartition(".")[2], None)
    if not text.startswith("torch.nn.") or not is_module_class(activation_class):
        raise ModelError(f"{config}: activation_function is {text[:80]!r}, which is not a class of torch.nn")
    activation: nn.Module = activation_class()
    return activation
