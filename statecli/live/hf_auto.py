"""`--model auto`: the class that a folder's config.json names, built by transformers without weights.

Nothing that the configuration names is downloaded or run: the class must be transformers' own, what would fetch
kernels, backbones or a quantizer is taken out of it or refused, and the hub is off while the class is built. Written
out it is `transformers:BertModel(config='folder/config.json')`, which is a target like any class.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from statecli.core import quoting
from statecli.core.errors import MissingDependency, ModelError, UnreadableError, UsageError
from statecli.formats.shared import config_files
from statecli.live import search_path
from statecli.live.spec import Spec
from statecli.storage import files

if TYPE_CHECKING:
    from torch import nn

#: What stands for the class in place of its name.
AUTO = "auto"
#: What `--model auto` reads; where it lies is the folder of the weights.
CONFIG = "config.json"
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


def text_for(path: str) -> str:
    """The class of the checkpoint at `path`, a folder or a file in one, as one types it.

    Raises UsageError where there is no configuration beside it, or none that names a class.
    """
    folder = path if files.is_folder(path) else files.get_folder(path) or os.curdir
    config = files.join(folder, CONFIG)
    if not files.exists(config):
        adapter = files.is_file(files.join(folder, "adapter_config.json"))
        what = "an adapter has none: name the class of its base model" if adapter else "name the class instead"
        raise UsageError(f"{path}: there is no {CONFIG} beside it, and --model auto has no class; {what}")
    return f"transformers:{_class_name(_document(config), config)}(config={config!r})"


def spec_of(spec: Spec) -> Spec:
    """The same; where it is a class of transformers given by a configuration, what builds it."""
    config = spec.kwargs.get("config")
    if (
        spec.module != "transformers"
        or spec.is_file
        or type(config) is not str
        or len(spec.kwargs) + len(spec.args) > 1
    ):
        return spec
    return Spec(spec.text, __name__, False, made.__name__, (spec.attribute, config), {}, True)


def is_auto(spec: Spec) -> bool:
    """Whether it is a class given by a configuration."""
    return spec.module == __name__


def _document(config: str) -> dict[str, Any]:
    folder, name = files.split(config)
    try:
        return config_files.read_document(folder, name)
    except UnreadableError as error:
        raise UsageError(f"{folder}: {error}") from error


def _class_name(document: Mapping[str, Any], config: str) -> str:
    names = document.get("architectures")
    name = names[0] if type(names) is list and names else None
    if type(name) is str and _NAME.fullmatch(name):
        return name
    if type(document.get("_class_name")) is str:
        raise UsageError(f"{config}: is of diffusers; --model auto builds classes of transformers: name the class")
    kind = document.get("model_type")
    if type(kind) is str and not names:
        known = _transformers(config).models.auto.modeling_auto.MODEL_MAPPING_NAMES.get(kind)
        if type(known) is str:
            return known
    what = "names no class in" if name is None else f"names {quoting.value(name)}, no class name, in"
    raise UsageError(f"{config}: {what} architectures, and --model auto has none; name the class instead")


def _transformers(config: str) -> Any:
    """Return the installed package, whatever lies in the current folder and in that of the configuration."""
    try:
        with search_path.installed_only(files.get_folder(config)):
            import transformers
            import transformers.models.auto.modeling_auto
    except ImportError as error:
        raise MissingDependency(
            "--model auto needs transformers, which does not import here: pip install transformers"
        ) from error
    return transformers


# --- building --------------------------------------------------------------------------------------------------------


def made(name: str, config: str) -> nn.Module:
    """The class of that name, as the configuration in the file `config` says. Raises UsageError, ModelError."""
    import torch

    transformers = _transformers(config)
    document = _document(config)
    _refuse(document, config)
    found: Any = getattr(transformers, name, None)
    configured = getattr(found, "config_class", None)
    if configured is None or not issubclass(found, transformers.PreTrainedModel):
        raise ModelError(_unknown(name, document, config, transformers.__version__))
    kind, own = document.get("model_type"), configured.model_type
    if kind not in (None, own):
        raise ModelError(f"{config}: names {name}, whose model_type is {own!r}, and says {str(kind)[:80]!r} itself")
    with _offline(), _quiet(transformers.logging), _counted(config), _dtype(torch, document):
        settings = configured.from_dict(_cleaned(document))
        settings._attn_implementation = "eager"
        model: nn.Module = found(settings)
    return model


def _unknown(name: str, document: Mapping[str, Any], config: str, version: str) -> str:
    if document.get("auto_map"):
        return f"{config}: {name} is code that comes with the checkpoint (auto_map), which is not run; name its class"
    return f"{config}: names {name}, which is no model class of transformers {version}"


def _refuse(document: Mapping[str, Any], config: str) -> None:
    for key, value in _entries(document):
        if key == "quantization_config" and type(value) is dict:
            how = str(value.get("quant_method"))[:40]
            raise ModelError(f"{config}: is quantized ({how}): which tensors its class has then is not told by it")
        several = value if type(value) is list else [value]
        count = sum(one for one in several if type(one) is int) if _COUNT.match(key) else 0
        if count > MAX_COUNT or len(several) > MAX_LISTED:
            raise ModelError(f"{config}: {key} asks for {max(count, len(several)):,}, more than any model has")


def _entries(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, those of configurations in it too."""
    stack = [document]
    while stack:
        for key, value in stack.pop().items():
            yield key, value
            if type(value) is dict:
                stack.append(value)


def _cleaned(document: Mapping[str, Any]) -> dict[str, Any]:
    """Without what would fetch anything."""
    kept = {key: value for key, value in document.items() if not _FETCHES.match(key)}
    if "use_pretrained_backbone" in kept:
        kept["use_pretrained_backbone"] = False
    return {key: _cleaned(value) if type(value) is dict else value for key, value in kept.items()}


@contextmanager
def _offline() -> Iterator[None]:
    """The hub is off: a configuration may name repositories."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without what transformers logs of a configuration: what is wrong for its model is said in our own words."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _counted(config: str) -> Iterator[None]:
    """Stops a class that registers without end."""
    from torch.nn.modules import module

    count, start = 0, time.process_time()

    def registered(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MAX_REGISTERED or (count % 64 == 0 and time.process_time() - start > MAX_SECONDS):
            limits = f"{MAX_REGISTERED:,}, or {MAX_SECONDS} seconds of work, are the most"
            raise ModelError(
                f"{config}: asks for too large a model: {count:,} modules and parameters, and no end; {limits}"
            )

    hooks = (
        module.register_module_module_registration_hook(registered),
        module.register_module_parameter_registration_hook(registered),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _dtype(torch: Any, document: Mapping[str, Any]) -> Iterator[None]:
    """The type that the weights are saved in, as `from_pretrained` builds it."""
    found = getattr(torch, str(document.get("dtype") or document.get("torch_dtype")), None)
    before = torch.get_default_dtype()
    if isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1:
        torch.set_default_dtype(found)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- what it loads as what -------------------------------------------------------------------------------------------


def loaded_as(model: Any, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """By a checkpoint's names those of the class, where `from_pretrained` takes them for others: without or with the
    base model's prefix, renamed since, several put into one or one parted. `model` is a built class of transformers.
    """
    known = dict(model.state_dict())
    with search_path.installed_only():
        rename = _renaming(model, known)
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        targets = tuple(one for one in rename(name) if one in known)
        if targets and targets != (name,):
            found[name] = targets
    return found


def _renaming(model: Any, known: dict[str, Any]) -> Callable[[str], list[str]]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before transformers 5, which has no such mappings
        return lambda name: _prefixed(name, model.base_model_prefix, known)
    every = get_model_conversion_mapping(model)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    converters = [one for one in every if isinstance(one, WeightConverter)]
    by_source = {source: one for one in converters for source in one.source_patterns}

    def rename(name: str) -> list[str]:
        renamed, source = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        targets = by_source[source].target_patterns if source in by_source else []
        first = targets[0] if targets else ""
        return [renamed.replace(first, one) for one in targets] if len(targets) > 1 else [renamed]

    return rename


def _prefixed(name: str, prefix: str, known: Mapping[str, Any]) -> list[str]:
    if f"{prefix}.{name}" in known:
        return [f"{prefix}.{name}"]
    return [name.removeprefix(f"{prefix}.") if name not in known else name]
