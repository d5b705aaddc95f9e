"""`--model auto`: build the class in a folder's config.json by transformers, without weights.

Nothing in the configuration is downloaded or run: the class must be part of transformers, entries that fetch kernels,
backbones or a quantizer are removed or refused, and the hub is off during the build. Written out, the target is
`transformers:BertModel(config='folder/config.json')`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from statecli.core import quoting
from statecli.core.errors import MissingDependency, ModelError, UnreadableError, UsageError, option
from statecli.formats.shared import config_files
from statecli.live import search_path
from statecli.live.spec import ModelSpec
from statecli.storage import files
from statecli.storage.checkpoint_folder import CONFIG

if TYPE_CHECKING:
    from torch import nn

#: Modules and parameters of one model, more than 12 layers of 256 experts that are modules have, and seconds of work
#: for them. Building takes 50 us each, looking at what was built 200 us a tensor: 10 s in all are not reached.
MAX_REGISTERED = 30_000
MAX_SECONDS = 4
#: Layers, heads, experts that a configuration may ask for: before any module is made, lists of their kinds are.
MAX_COUNT = 4_096
#: Entries of a list in it.
MAX_LISTED = 100_000
_COUNT = re.compile(r"^(?:n|num)_\w*(?:layers?|blocks?|heads?|experts?|stages?)$|^depths?$")
#: What would fetch code or weights, or makes another class of it.
_FETCHES = re.compile(r"^_?(?:attn|experts)_implementation|^(?:auto_map|use_kernels|custom_pipelines)$")
_NAME = re.compile(r"[A-Za-z_]\w*")


def build_spec_text(path: str) -> str:
    """Return the spec of the class of a checkpoint; `path` is a folder or a file in a folder.

    Raises UsageError without a configuration in the folder, and for a configuration without a class.
    """
    folder = path if files.is_folder(path) else files.get_folder(path) or os.curdir
    config = files.join(folder, CONFIG)
    if not files.exists(config):
        adapter = files.is_file(files.join(folder, "adapter_config.json"))
        what = "name the class of the adapter's base model" if adapter else "name the class instead"
        auto = option("--model", "auto")
        raise UsageError(f"{path}: {auto} needs a {CONFIG} next to the checkpoint; {what}")
    return f"transformers:{_find_class_name(_read_config(config), config)}(config={config!r})"


def resolve_auto_spec(spec: ModelSpec) -> ModelSpec:
    """Return the spec to build a class of transformers from a configuration; other specs unchanged."""
    config = spec.kwargs.get("config")
    if (
        spec.module != "transformers"
        or spec.is_file
        or type(config) is not str
        or len(spec.kwargs) + len(spec.args) > 1
    ):
        return spec
    return ModelSpec(spec.text, __name__, False, build_from_config.__name__, (spec.attribute, config), {}, True)


def is_auto(spec: ModelSpec) -> bool:
    """Return True for the spec of a class given by a configuration."""
    return spec.module == __name__


def _read_config(config: str) -> dict[str, Any]:
    folder, name = files.split(config)
    try:
        return config_files.read_document(folder, name)
    except UnreadableError as error:
        raise UsageError(f"{folder}: {error}") from error


def _find_class_name(document: Mapping[str, Any], config: str) -> str:
    names = document.get("architectures")
    name = names[0] if type(names) is list and names else None
    if type(name) is str and _NAME.fullmatch(name):
        return name
    if type(document.get("_class_name")) is str:
        auto = option("--model", "auto")
        raise UsageError(
            f"{config}: belongs to diffusers, but {auto} builds only classes of transformers; name the class instead"
        )
    kind = document.get("model_type")
    if type(kind) is str and not names:
        class_name = _import_transformers(config).models.auto.modeling_auto.MODEL_MAPPING_NAMES.get(kind)
        if type(class_name) is str:
            return class_name
    what = "does not name a class" if name is None else f"has {quoting.value(name)}, which is not the name of a class"
    auto = option("--model", "auto")
    raise UsageError(f"{config}: architectures {what}, but {auto} needs one; name the class instead")


def _import_transformers(config: str) -> Any:
    """Return the installed package, never a module in the current folder or the configuration's."""
    try:
        with search_path.use_installed_only(files.get_folder(config)):
            import transformers
            import transformers.models.auto.modeling_auto
    except ImportError as error:
        raise MissingDependency(
            "--model auto needs transformers, which cannot be imported: pip install transformers"
        ) from error
    return transformers


# --- building --------------------------------------------------------------------------------------------------------


def build_from_config(name: str, config: str) -> nn.Module:
    """Build the class from the configuration in the file `config`. Raises UsageError, ModelError."""
    import torch

    transformers = _import_transformers(config)
    document = _read_config(config)
    _check_config(document, config)
    model_class: Any = getattr(transformers, name, None)
    config_class = getattr(model_class, "config_class", None)
    if config_class is None or not issubclass(model_class, transformers.PreTrainedModel):
        raise ModelError(_describe_unknown_class(name, document, config, transformers.__version__))
    kind, model_type = document.get("model_type"), config_class.model_type
    if kind not in (None, model_type):
        raise ModelError(
            f"{config}: names {name}, whose model_type is {model_type!r}, but the file has {str(kind)[:80]!r}"
        )
    with (
        _disable_hub(),
        _silence_logging(transformers.logging),
        _limit_registrations(config),
        _use_saved_dtype(torch, document),
    ):
        settings = config_class.from_dict(_remove_fetches(document))
        settings._attn_implementation = "eager"
        model: nn.Module = model_class(settings)
    return model


def _describe_unknown_class(name: str, document: Mapping[str, Any], config: str, version: str) -> str:
    if document.get("auto_map"):
        return f"{config}: {name} is code of the checkpoint (auto_map), which --model auto does not run; name the class"
    return f"{config}: names {name}, which is not a model class of transformers {version}"


def _check_config(document: Mapping[str, Any], config: str) -> None:
    for key, value in _iter_entries(document):
        if key == "quantization_config" and type(value) is dict:
            how = str(value.get("quant_method"))[:40]
            raise ModelError(
                f"{config}: is quantized ({how}), so the file does not say which tensors the class has; name the class"
            )
        values = value if type(value) is list else [value]
        count = sum(number for number in values if type(number) is int) if _COUNT.match(key) else 0
        if count > MAX_COUNT or len(values) > MAX_LISTED:
            raise ModelError(
                f"{config}: {key} is {max(count, len(values)):,}, larger than in any model; correct the file"
            )


def _iter_entries(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, also of nested configurations."""
    stack = [document]
    while stack:
        for key, value in stack.pop().items():
            yield key, value
            if type(value) is dict:
                stack.append(value)


def _remove_fetches(document: Mapping[str, Any]) -> dict[str, Any]:
    """Remove entries for fetching anything."""
    config = {key: value for key, value in document.items() if not _FETCHES.match(key)}
    if "use_pretrained_backbone" in config:
        config["use_pretrained_backbone"] = False
    return {key: _remove_fetches(value) if type(value) is dict else value for key, value in config.items()}


@contextmanager
def _disable_hub() -> Iterator[None]:
    """The hub is off: a configuration may name repositories."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _silence_logging(logging: Any) -> Iterator[None]:
    """Silence the log of transformers about a configuration, because statecli reports the errors."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _limit_registrations(config: str) -> Iterator[None]:
    """Stop endless registrations of a class."""
    from torch.nn.modules import module

    count, start = 0, time.process_time()

    def count_registration(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MAX_REGISTERED or (count % 64 == 0 and time.process_time() - start > MAX_SECONDS):
            limits = f"the limit is {MAX_REGISTERED:,}, or {MAX_SECONDS} seconds"
            raise ModelError(f"{config}: the model is too large: {count:,} modules and parameters so far; {limits}")

    hooks = (
        module.register_module_module_registration_hook(count_registration),
        module.register_module_parameter_registration_hook(count_registration),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _use_saved_dtype(torch: Any, document: Mapping[str, Any]) -> Iterator[None]:
    """Use the dtype of the saved weights for the build, as `from_pretrained` does."""
    dtype = getattr(torch, str(document.get("dtype") or document.get("torch_dtype")), None)
    before = torch.get_default_dtype()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- what it loads as what -------------------------------------------------------------------------------------------


def map_loaded_names(model: Any, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Map names in a checkpoint to names of the class, as `from_pretrained` loads them.

    Names may differ by the base model's prefix, by renames, and by tensors merged or split. `model`: a built class of
    transformers.
    """
    class_tensors = dict(model.state_dict())
    with search_path.use_installed_only():
        rename = _build_renaming(model, class_tensors)
    renamed: dict[str, tuple[str, ...]] = {}
    for name in names:
        targets = tuple(target for target in rename(name) if target in class_tensors)
        if targets and targets != (name,):
            renamed[name] = targets
    return renamed


def _build_renaming(model: Any, class_tensors: dict[str, Any]) -> Callable[[str], list[str]]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before transformers 5, which has no such mappings
        return lambda name: _swap_prefix(name, model.base_model_prefix, class_tensors)
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_source = {source: conversion for conversion in converters for source in conversion.source_patterns}

    def rename(name: str) -> list[str]:
        renamed, source = rename_source_key(name, renamings, converters, model.base_model_prefix, class_tensors)
        targets = by_source[source].target_patterns if source in by_source else []
        first = targets[0] if targets else ""
        return [renamed.replace(first, conversion) for conversion in targets] if len(targets) > 1 else [renamed]

    return rename


def _swap_prefix(name: str, prefix: str, class_tensors: Mapping[str, Any]) -> list[str]:
    if f"{prefix}.{name}" in class_tensors:
        return [f"{prefix}.{name}"]
    return [name.removeprefix(f"{prefix}.") if name not in class_tensors else name]
