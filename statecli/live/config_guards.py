"""Guards around building a model from a configuration file: sizes, downloads, log, and the dtype of the weights.

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

#: Modules and parameters of one model, more than 12 layers of 256 experts that are modules have, and seconds of work
#: for them. Building takes 50 us each, looking at what was built 200 us a tensor: 10 s in all are not reached.
MAX_REGISTERED = 30_000
MAX_SECONDS = 4
#: Layers, heads, experts that a configuration may ask for: before any module is made, lists of their kinds are.
MAX_COUNT = 4_096
#: Entries of a list in it.
MAX_LISTED = 100_000
_COUNT = compile_on_use(r"^(?:n|num)_\w*(?:layers?|blocks?|heads?|experts?|stages?)$|^depths?$")
#: What would fetch code or weights, or makes another class of it.
_FETCHES = compile_on_use(r"^_?(?:attn|experts)_implementation|^(?:auto_map|use_kernels|custom_pipelines)$")


def check_config(document: Mapping[str, Any], config: str) -> None:
    """Raise ModelError for a quantized model, and for a number or list larger than in any model."""
    for key, value in _iter_entries(document):
        if key == "quantization_config" and type(value) is dict:
            quant_method = str(value.get("quant_method"))[:40]
            raise ModelError(
                f"{config}: is quantized ({quant_method}), so the file does not say which tensors the class has; name "
                "the class"
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


def remove_fetches(document: Mapping[str, Any]) -> dict[str, Any]:
    """Remove entries for fetching anything."""
    config = {key: value for key, value in document.items() if not _FETCHES.match(key)}
    if "use_pretrained_backbone" in config:
        config["use_pretrained_backbone"] = False
    return {key: remove_fetches(value) if type(value) is dict else value for key, value in config.items()}


def disable_hub() -> AbstractContextManager[None]:
    """The hub is off: a configuration may name repositories."""
    from huggingface_hub import constants

    return replace_attribute(constants, "HF_HUB_OFFLINE", True)


@contextmanager
def silence_logging(logging: Any) -> Iterator[None]:
    """Silence the log of transformers about a configuration, because statecli reports the errors."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def limit_registrations(config: str) -> Iterator[None]:
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
def use_saved_dtype(torch: Any, document: Mapping[str, Any]) -> Iterator[None]:
    """Use the dtype of the saved weights for the build, as `from_pretrained` does."""
    dtype = getattr(torch, str(document.get("dtype") or document.get("torch_dtype")), None)
    before = torch.get_default_dtype()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
