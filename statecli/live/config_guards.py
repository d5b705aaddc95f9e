"""Limit sizes, downloads and log messages, and set the dtype, while a model is built from a configuration file.

A configuration may come from anywhere. A number in the file must not make statecli build for hours, and no entry may
fetch code or weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from statecli.core.errors import ModelError
from statecli.core.lazy_pattern import compile_on_use
from statecli.live.attribute_patch import replace_attribute

#: Largest number of modules and parameters of a model, and of seconds of processor time to register them. A model of
#: 12 layers with 256 experts as modules has fewer. Building takes 50 us for each, the walk 200 us for each tensor: less
#: than 10 s in all.
MAX_REGISTERED = 30_000
MAX_SECONDS = 4
#: Largest number of layers, heads or experts in a configuration, because lists with an entry for each are built before
#: any module.
MAX_COUNT = 4_096
#: Largest number of entries of a list in a configuration.
MAX_LIST_ENTRIES = 100_000
_COUNT_KEY = compile_on_use(r"^(?:n|num)_\w*(?:layers?|blocks?|heads?|experts?|stages?)$|^depths?$")
#: Keys of a configuration that would fetch code or weights, or select another class.
_FETCHING_KEY = compile_on_use(r"^_?(?:attn|experts)_implementation|^(?:auto_map|use_kernels|custom_pipelines)$")


def check_config(document: Mapping[str, Any], config: str) -> None:
    """Raise ModelError for a quantized model, and for a count or a list that is too large."""
    for key, value in _iter_entries(document):
        if key == "quantization_config" and type(value) is dict:
            quant_method = str(value.get("quant_method"))[:40]
            raise ModelError(
                f"{config}: is quantized ({quant_method}), so the file does not say which tensors the class has; name "
                "the class, as in file.py:Class"
            )
        values = value if type(value) is list else [value]
        count = sum(number for number in values if type(number) is int) if _COUNT_KEY.match(key) else 0
        if count > MAX_COUNT or len(values) > MAX_LIST_ENTRIES:
            raise ModelError(
                f"{config}: {key} is {max(count, len(values)):,}, larger than in any model; correct the file"
            )


def _iter_entries(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key and value of a configuration, including nested configurations."""
    stack = [document]
    while stack:
        for key, value in stack.pop().items():
            yield key, value
            if type(value) is dict:
                stack.append(value)


def remove_fetches(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without entries that fetch code or weights."""
    config = {key: value for key, value in document.items() if not _FETCHING_KEY.match(key)}
    if "use_pretrained_backbone" in config:
        config["use_pretrained_backbone"] = False
    return {key: remove_fetches(value) if type(value) is dict else value for key, value in config.items()}


def disable_hub() -> AbstractContextManager[None]:
    """Disable the Hugging Face hub while the block runs, because a configuration may name repositories."""
    from huggingface_hub import constants

    return replace_attribute(constants, "HF_HUB_OFFLINE", True)


@contextmanager
def silence_logging(logging: Any) -> Iterator[None]:
    """Silence transformers' log messages about a configuration, because statecli reports the errors itself."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def limit_registrations(config: str) -> Iterator[None]:
    """Raise ModelError if the block registers too many modules and parameters, or takes too much processor time."""
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
def use_saved_dtype(torch: Any, document: Mapping[str, Any]) -> Iterator[None]:
    """Use the dtype of the saved weights as torch's default dtype in the block, as `from_pretrained` does."""
    dtype = getattr(torch, str(document.get("dtype") or document.get("torch_dtype")), None)
    before = torch.get_default_dtype()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
