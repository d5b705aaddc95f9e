"""Inputs of forward: from the user, from the model, or derived from its configuration.

In order: `--input` (texts such as `int64:2x16<30522`), `--input-from` (a function), attributes of the model
(`dummy_inputs` of transformers, `example_input_array` of Lightning), and shapes in the configuration of transformers.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statecli.core.errors import ModelError, UsageError, option
from statecli.core.input_text import COMPLEX_DTYPES, DEFAULT_BOUND, LARGEST_INTEGERS, InputSpec, parse_inputs
from statecli.core.python_arguments import PYTHON_ARGUMENTS
from statecli.live import spec as specs
from statecli.live.built_model import BuiltModel
from statecli.live.constructor_arguments import resolve_arguments
from statecli.live.import_model import LoadedObject, load_with_module
from statecli.live.model_errors import describe_type
from statecli.live.seeds import seed_cpu_generators

if TYPE_CHECKING:
    import torch
    from torch import nn

    Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class MissingInput:
    """Reason why forward has no inputs, and the value of `--input` to suggest.

    `shape`: value of `--input` that the first layer takes; None if this layer is unknown. `remark`: why the model's own
    inputs are not used.
    """

    shape: str | None = None
    remark: str = ""

    def __str__(self) -> str:
        if "--input" in PYTHON_ARGUMENTS.get():
            shape = self.shape or "2x3"
            return f"no input given: pass inputs='{shape}', tensors, or a function that returns tensors{self.remark}"
        shape = self.shape or "SHAPE"
        quoted = f"'{shape}'" if "<" in shape else shape
        return f"no input given: --input {quoted} or --input-from FILE.PY:MAKE{self.remark}"


@dataclass(frozen=True)
class Inputs:
    """Inputs of forward. `make_call(seed=0)` returns (args, kwargs): new tensors on the CPU, equal for equal seeds.

    `text` describes the inputs in a few words: "int64 2×16 below 30522". `chosen_by_user`: given by the command or by
    the model, so that forward is called as intended; otherwise guessed. `requested`: given by the command, so that an
    error in forward leaves the proofs inconclusive; otherwise the proofs are skipped.
    """

    text: str
    make_call: Callable[..., Call]
    chosen_by_user: bool = True
    requested: bool = True

    def move(self, device: str) -> Inputs:
        """Return the inputs with their tensors on `device`."""
        if device == "cpu":
            return self

        def make_call(seed: int = 0) -> Call:
            call: Call = map_tensors(self.make_call(seed=seed), lambda tensor: tensor.to(device))
            return call

        return dataclasses.replace(self, make_call=make_call)


#: The inputs, or None and the reason.
FoundInputs = tuple[Inputs | None, MissingInput | None]
#: Reason if statecli has found nothing about the inputs.
NO_INPUT = MissingInput()


def draw_input(spec: InputSpec, generator: torch.Generator) -> torch.Tensor:
    """Draw a random input tensor: standard normal floats, integers from 0 to below `spec.bound`, or booleans."""
    import torch

    dtype = getattr(torch, spec.dtype)
    if spec.dtype in LARGEST_INTEGERS or spec.dtype == "bool":
        integers = torch.randint(0, spec.bound or DEFAULT_BOUND, spec.shape, generator=generator, device="cpu")
        return integers.to(dtype)
    # Draw in a single precision, so that a seed gives the same numbers in every dtype.
    wide_dtype = torch.complex64 if spec.dtype in COMPLEX_DTYPES else torch.float32
    return torch.randn(spec.shape, generator=generator, dtype=wide_dtype, device="cpu").to(dtype)


def _build_from_texts(texts: Sequence[str]) -> Inputs:
    specs_ = parse_inputs(texts)

    def make_call(seed: int = 0) -> Call:
        import torch

        generator = torch.Generator("cpu").manual_seed(seed)
        tensors = [(spec.name, draw_input(spec, generator)) for spec in specs_]
        return tuple(t for name, t in tensors if not name), {name: t for name, t in tensors if name}

    return Inputs(", ".join(spec.text for spec in specs_), make_call)


# --- sources of inputs --------------------------------------------------------------------------------------


def find_inputs(input: Sequence[str], inputs: str | None, built_model: BuiltModel) -> FoundInputs:
    """Return the user's inputs, or else the model's own inputs. Without any inputs, return (None, reason).

    Raises UsageError for invalid texts, ModelError if the function of `--input-from` raises or returns no inputs.
    """
    if input and inputs is not None:
        options = f"{option('--input')} and {option('--input-from')}"
        raise UsageError(f"{options} contradict each other: both set the inputs of forward; give one of them")
    if input:
        return _build_from_texts(input), None
    if inputs is not None:
        return _build_from_function(inputs, built_model), None
    return _find_carried_inputs(built_model)


def _build_from_function(text: str, built_model: BuiltModel) -> Inputs:
    spec = specs.parse_spec(text)
    if spec is None:
        raise UsageError(f"{option('--input-from', text)}: must name a function: file.py:make or package.module:make")
    loaded_object = _load_without_forgetting(spec)
    function = loaded_object.value
    if not callable(function):
        raise UsageError(
            f"{option('--input-from', text)}: names an object of type {type(function).__name__}, not a function that "
            "returns inputs"
        )
    # The guard of the model's code, with the spec of --input-from in its errors.
    model = dataclasses.replace(built_model, spec=spec)

    def make_call(seed: int = 0) -> Call:
        with model.user_code("calling the function"), use_seed(seed):
            arguments = resolve_arguments(spec, loaded_object.module, function)
            return convert_to_call(text, function(*arguments.args, **arguments.kwargs))

    return Inputs(describe_call(make_call()), make_call)


def _load_without_forgetting(spec: specs.ModelSpec) -> LoadedObject:
    """Import the object that `spec` names. Keep the model's modules in `sys.modules`, even if the import drops them."""
    before = dict(sys.modules)
    try:
        return load_with_module(spec, is_model=False)
    finally:
        for name, module in before.items():
            sys.modules.setdefault(name, module)


def convert_to_call(
    text: str, value: object, is_or_gave: str = "the function returned", advice: str = "return at least one tensor"
) -> Call:
    """Convert the user's inputs to (args, kwargs). Copy the tensors, because a function may return them again.

    Raises ModelError for a value without a tensor; `advice` names the needed inputs.
    """
    import torch

    args, kwargs = split_arguments(value)
    if not args and not kwargs:
        description = "nothing" if value is None else f"an empty {type(value).__name__}"
        raise ModelError(
            f"{text}: {is_or_gave} {description}; expected a tensor, a tuple or a dict of keyword arguments"
        )
    if not any(issubclass(type(leaf), torch.Tensor) for leaf in iter_leaves((args, kwargs))):
        raise ModelError(f"{text}: {is_or_gave} {describe_type(value)}, which contains no tensor; {advice}")
    bad_key = next((key for key in kwargs if type(key) is not str), None)
    if bad_key is not None:
        raise ModelError(f"{text}: {bad_key!r} is not a keyword argument name; give a dict with names as keys")
    call: Call = map_tensors((args, kwargs), _copy_tensor)
    return call


def split_arguments(value: Any) -> Call:
    """Split the user's inputs for forward into positional and keyword arguments."""
    if value is None:
        return (), {}
    if isinstance(value, Mapping):
        return (), dict(value)
    if _is_args_and_kwargs(value):
        return tuple(value[0]), dict(value[1])
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return tuple(value), {}
    return (value,), {}


def _is_args_and_kwargs(value: object) -> bool:
    """Return True for a pair (args, kwargs): a tuple or list, and a dict with string keys."""
    if type(value) is not tuple or len(value) != 2:
        return False
    return isinstance(value[0], (tuple, list)) and isinstance(value[1], dict) and all(type(k) is str for k in value[1])


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def describe_call(call: Call) -> str:
    """Describe the first four arguments of a call, with the names of keyword arguments."""
    args, kwargs = call
    texts = [_describe_value(value) for value in args] + [
        f"{name} {_describe_value(value)}" for name, value in kwargs.items()
    ]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def _describe_value(value: Any) -> str:
    import torch

    if not issubclass(type(value), torch.Tensor):
        return type(value).__name__
    size = "nested" if value.is_nested else "×".join(map(str, value.shape)) or "scalar"
    return f"{str(value.dtype).removeprefix('torch.')} {size}"


# --- inputs in the model ------------------------------------------------------------------------------------


def _find_carried_inputs(built_model: BuiltModel) -> FoundInputs:
    """Return the first inputs that forward accepts: `dummy_inputs`, `example_input_array`, or built from the config."""
    try:
        with built_model.user_code("reading the example inputs of the model"):
            for name in ("dummy_inputs", "example_input_array"):
                call = _read_attribute(built_model, name)
                if call is not None and _is_accepted(built_model, call):
                    call = _add_decoder_ids(built_model, call)
                    # A class of transformers inherits `dummy_inputs`, so its inputs are not the author's.
                    is_own = not _is_of_transformers(built_model)
                    return _build_constant(f"{describe_call(call)} (its {name})", call, chosen_by_user=is_own), None
            return _build_from_config(built_model)
    except ModelError as error:
        return None, MissingInput(remark=f" ({str(error).removeprefix(f'{built_model.spec.text}: ')})")


def _read_attribute(built_model: BuiltModel, name: str) -> Call | None:
    import torch

    if not hasattr(type(built_model.module), name) and name not in vars(built_model.module):
        return None
    with torch.no_grad():
        attribute = getattr(built_model.module, name)
        value = attribute() if callable(attribute) and not issubclass(type(attribute), torch.Tensor) else attribute
    if value is None:
        return None
    args, kwargs = split_arguments(value)
    return args, {key: value for key, value in kwargs.items() if value is not None}


def _build_constant(text: str, call: Call, *, chosen_by_user: bool) -> Inputs:
    def make_call(seed: int = 0) -> Call:  # noqa: ARG001 - the values are the model's own
        copied_call: Call = map_tensors(call, _copy_tensor)
        return copied_call

    return Inputs(text, make_call, chosen_by_user=chosen_by_user, requested=False)


def _is_of_transformers(built_model: BuiltModel) -> bool:
    return hasattr(built_model.module, "config") and hasattr(type(built_model.module), "main_input_name")


def _add_decoder_ids(built_model: BuiltModel, call: Call) -> Call:
    """Add `decoder_input_ids`, equal to `input_ids`, to a call of an encoder-decoder model."""
    args, kwargs = call
    signature = _get_signature(built_model)
    ids = kwargs.get("input_ids")
    takes_decoder_ids = signature is not None and "decoder_input_ids" in signature.parameters
    if not takes_decoder_ids or ids is None or not getattr(built_model.module.config, "is_encoder_decoder", False):
        return call
    return args, {"decoder_input_ids": ids, **kwargs}


def _is_accepted(built_model: BuiltModel, call: Call) -> bool:
    """Return True if forward accepts the arguments, and the token ids among them fit the vocabulary.

    Every class of transformers has `dummy_inputs`: token ids up to 7, even for images or audio.
    """
    signature = _get_signature(built_model)
    config = getattr(built_model.module, "config", None)
    vocabulary_size = getattr(config, "vocab_size", None)
    ids = call[1].get("input_ids")
    if isinstance(vocabulary_size, int) and ids is not None and int(ids.max()) >= vocabulary_size:
        return False
    main_input = getattr(built_model.module, "main_input_name", None)
    if config is not None and isinstance(main_input, str) and main_input not in call[1]:
        return False
    if _needs_text_and_images(signature, config):
        return False
    return _fits_signature(signature, call)


def _get_signature(built_model: BuiltModel) -> inspect.Signature | None:
    try:
        return inspect.signature(built_model.module.forward)
    except (TypeError, ValueError):
        return None


def _fits_signature(signature: inspect.Signature | None, call: Call) -> bool:
    try:
        if signature is not None:
            signature.bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


def _needs_text_and_images(signature: inspect.Signature | None, config: object) -> bool:
    """Return True for a model of text and images, such as CLIP."""
    return (
        hasattr(config, "vision_config")
        and hasattr(config, "text_config")
        and signature is not None
        and {"input_ids", "pixel_values"} <= set(signature.parameters)
    )


def _build_from_config(built_model: BuiltModel) -> FoundInputs:
    """Return images and token ids in the sizes of a transformers config. Return (None, reason) for other models."""
    config, signature = getattr(built_model.module, "config", None), _get_signature(built_model)
    if not _is_of_transformers(built_model) or signature is None:
        return None, MissingInput(_suggest_shape(built_model.module, signature))
    texts = [_format_ids(config, signature), _format_pixels(config, signature)]
    input_texts = [text for text in texts if text]
    inputs = _build_from_texts(input_texts) if input_texts else None
    main_input = str(built_model.module.main_input_name)
    if inputs is None or not _fits_signature(signature, inputs.make_call()) or main_input not in inputs.make_call()[1]:
        return None, MissingInput(remark=f"; forward needs the argument {main_input}")
    return Inputs(f"{inputs.text} (from its config)", inputs.make_call, chosen_by_user=False, requested=False), None


def _suggest_shape(module: nn.Module, signature: inspect.Signature | None) -> str | None:
    """Return a value of `--input` that fits the model's first layer, such as `2x3xHxW`, or None if it is unknown.

    The first layer is the first registered module with parameters. Forward must have a single argument without a
    default.
    """
    import torch

    arguments = signature.parameters.values() if signature is not None else ()
    if sum(argument.default is inspect.Parameter.empty for argument in arguments) != 1:
        return None
    for layer in module.modules():
        parameter = next(layer.parameters(recurse=False), None)
        shape = _format_layer_shape(layer)
        if not shape and (parameter is None or layer is module):
            continue
        is_other_float = parameter is not None and parameter.dtype in (torch.float16, torch.bfloat16, torch.float64)
        if parameter is not None and is_other_float and shape and ":" not in shape:
            return f"{str(parameter.dtype).removeprefix('torch.')}:{shape}"
        return shape or None
    return None


def _format_layer_shape(layer: nn.Module) -> str:
    """Return a value of `--input` for a torch layer. Letters stand for sizes that the layer leaves open."""
    from torch import nn

    if isinstance(layer, nn.Linear) and layer.in_features:
        return f"2x{layer.in_features}"
    if isinstance(layer, nn.Embedding):
        return f"int64:2x16<{layer.num_embeddings}"
    if isinstance(layer, nn.RNNBase):
        return f"2x8x{layer.input_size}"
    sizes = {nn.Conv1d: "L", nn.Conv2d: "HxW", nn.Conv3d: "DxHxW"}
    size = next((size for kind, size in sizes.items() if isinstance(layer, kind)), "")
    return f"2x{layer.in_channels}x{size}" if size and layer.in_channels else ""


def _format_ids(config: object, signature: inspect.Signature) -> str | None:
    vocabulary_size = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if "input_ids" not in signature.parameters or not isinstance(vocabulary_size, int) or vocabulary_size < 1:
        return None
    return f"input_ids=int64:2x8<{vocabulary_size}"


def _format_pixels(config: object, signature: inspect.Signature) -> str | None:
    vision_config = getattr(config, "vision_config", config)
    size, channels = getattr(vision_config, "image_size", None), getattr(vision_config, "num_channels", 3)
    if isinstance(size, int):
        size = (size, size)
    if "pixel_values" not in signature.parameters or not isinstance(size, (tuple, list)) or len(size) != 2:
        return None
    return f"pixel_values=2x{channels}x{size[0]}x{size[1]}"


# --- nested containers --------------------------------------------------------------------------------------


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `function` to each tensor in `value`. Return new tuples, lists, dicts and dataclasses with the results."""
    import torch

    if issubclass(type(value), torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        mapped_items = {key: map_tensors(item, function) for key, item in value.items()}
        return mapped_items if type(value) is dict else _rebuild_mapping(value, mapped_items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field_.name: getattr(value, field_.name) for field_ in dataclasses.fields(value) if field_.init}
        return dataclasses.replace(value, **{name: map_tensors(item, function) for name, item in fields.items()})
    return value


def _rebuild_mapping(value: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class, or a plain dict if the constructor of the class refuses one."""
    try:
        return type(value)(items)
    except Exception:  # noqa: BLE001 - the user's constructor may raise anything; a dict serves forward as well
        return items


def iter_leaves(value: object) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists, dicts and dataclasses, at any depth."""
    pending, visited_ids = [value], set()
    while pending:
        current = pending.pop()
        children = _list_children(current)
        if children is None:
            yield current
        elif id(current) not in visited_ids:
            visited_ids.add(id(current))
            pending += reversed(children)


def _list_children(value: object) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field_.name, None) for field_ in dataclasses.fields(value)]
    return None


@contextmanager
def use_seed(seed: int, module: nn.Module | None = None) -> Iterator[None]:
    """Seed the random generators of torch, Python and numpy while the block runs, and restore them afterwards.

    For torch: the CPU, each GPU if CUDA is in use, and generators in attributes of `module`.
    """
    import torch

    before = get_random_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    attributes = [value for part in (() if module is None else module.modules()) for value in vars(part).values()]
    generators = {id(value): value for value in attributes if isinstance(value, torch.Generator)}
    states = [(generator, generator.get_state()) for generator in generators.values()]
    with torch.random.fork_rng(devices=list(gpus)):
        try:
            for generator in generators.values():
                generator.manual_seed(seed)
            seed_cpu_generators(seed)
            if gpus:
                torch.cuda.manual_seed_all(seed)
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)
            set_random_state(before)


def get_random_state() -> tuple[Any, ...]:
    """Return the states of the random generators of torch on the CPU, Python and numpy."""
    import torch

    numpy: Any = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


def set_random_state(state: tuple[Any, ...]) -> None:
    """Set the random generators to the states that `get_random_state` returned."""
    import torch

    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
