"""Run a training script in this process, and record the state before each step of its first optimizer.

torch calls global hooks before each step and each forward. Schedulers, scalers and averaged models have no hooks: they
are found among the objects of the process, and named by the variables of the script.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import random
import sys
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from statecli.commands.resume_check.record import UNREADABLE, Digests, GeneratorKind, RunRecord, StepRecord
from statecli.core.units import join_names
from statecli.live.installed_code import PACKAGE_FOLDER, is_installed_file

#: Number of hexadecimal digits of a digest.
_DIGEST_DIGITS = 16
#: Largest number of functions of a script in an error.
MAX_FUNCTIONS = 5
#: Largest depth of nested objects in a state; deeper values count as unreadable.
_MAX_DEPTH = 20
#: Largest number of objects and containers of a state whose values are read; further objects are unreadable.
_MAX_OBJECTS = 100_000
#: Largest number of items of a list, tuple or dict of the script in which models are searched.
_MAX_ITEMS = 1000


def main(arguments: list[str]) -> None:
    """Record a run of the script. `arguments`: target, steps, save_every, save_to, checkpoint (or ""), output file."""
    target, steps, save_every, save_to, checkpoint, path = arguments
    record = record_run(target, int(steps), int(save_every), save_to, checkpoint or None)
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(record))


def record_run(target: str, steps: int, save_every: int, save_to: str, checkpoint: str | None) -> RunRecord:
    """Call the function of the script, and return the record of the run. The record includes an error of the script."""
    recorder = Recorder(first_step=0 if checkpoint else save_every)
    error = None
    gc.freeze()  # objects of torch and of this program are not searched
    with_hooks = recorder.install()
    try:
        function = _load_function(target)
        arguments = {"steps": steps, "save_every": save_every, "save_to": save_to, "checkpoint": checkpoint}
        _check_signature(function, target, arguments)
        function(**arguments)
    except BaseException as raised:  # noqa: BLE001 - code of the user, sys.exit() included
        error = _describe_error(raised)
    finally:
        gc.unfreeze()
        for handle in with_hooks:
            handle.remove()
    return RunRecord(
        tuple(recorder.steps),
        recorder.optimizer_name,
        recorder.model_name,
        tuple(recorder.copied_averages),
        recorder.generators,
        error,
    )


def _load_function(target: str) -> Callable[..., Any]:
    """Import the script under its file's name, because checkpoints store its classes under this module name."""
    module_path, _, name = target.replace("::", ":").rpartition(":")
    if not module_path.endswith(".py"):
        return _find_function(importlib.import_module(module_path), name)
    sys.path.insert(0, os.path.dirname(os.path.abspath(module_path)))
    module_name = os.path.basename(module_path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(module_name, module_path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {module_path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return _find_function(module, name)


class _NoFunction(Exception):
    """Error of a script that does not define the function, or defines the function with other arguments."""


def _find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the function `name` of the imported script. The script may create the function at runtime."""
    if callable(getattr(module, name, None)):
        return getattr(module, name)  # type: ignore[no-any-return]
    defined = (
        (function_name, value) for function_name, value in vars(module).items() if isinstance(value, FunctionType)
    )
    functions = [function_name for function_name, value in defined if value.__module__ == module.__name__]
    raise _NoFunction(f"has no function {name}; its functions: {join_names(functions, MAX_FUNCTIONS) or 'none'}")


def _check_signature(function: Callable[..., Any], target: str, arguments: dict[str, Any]) -> None:
    """Raise _NoFunction if the function cannot be called with these arguments by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin or the like: its call decides
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        name = target.rpartition(":")[2]
        names = ", ".join(parameter.partition(":")[0] for parameter in map(str, signature.parameters.values()))
        required = ", ".join(arguments)
        raise _NoFunction(
            f"defines {name}({names}), but statecli passes {required} to {name} as keyword arguments: {error}; write "
            f"`def {name}({required}):`, and give every other argument a default"
        ) from None


def _describe_error(error: BaseException) -> str:
    """Return the error and its deepest line of the user's code."""
    text = str(error).strip().split("\n")[0]
    if isinstance(error, _NoFunction):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_script(frame.filename)]
    location = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {text}{location}" if text else f"raised {type(error).__name__}{location}"


def _is_script(filename: str) -> bool:
    return not (filename.startswith("<") or is_installed_file(filename) or filename == __file__)


class Recorder:
    """Records the state before each step of the first optimizer that steps.

    At the step with the index `first_step`, the first step after the resume, all states are recorded.
    """

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self.steps: list[StepRecord] = []
        self.optimizer_name = "optimizer"
        self.model_name = "model"
        self.copied_averages: set[str] = set()
        self.generators: dict[str, GeneratorKind] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._models: list[nn.Module] = []
        self._batches: list[str] = []
        self._depth = 0

    def install(self) -> list[Any]:
        """Install the hooks of torch and return their handles."""
        return [
            register_module_forward_pre_hook(self._enter_forward),
            register_module_forward_hook(self._leave_forward, always_call=True),
            register_optimizer_step_pre_hook(self._record_step),
            register_optimizer_step_post_hook(self._end_step),
        ]

    def _enter_forward(self, module: nn.Module, args: object) -> None:
        if self._depth == 0 and torch.is_grad_enabled():
            if not any(model is module for model in self._models):
                self._models.append(module)
            # torch passes no keyword arguments to a global hook, but they are a variable of its caller.
            named = sys._getframe(1).f_locals.get("kwargs", {})
            tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
            self._batches.append(_join_digests([_digest(tensor) for tensor in tensors]))
        self._depth += 1

    def _leave_forward(self, *_: Any) -> None:
        self._depth -= 1

    def _record_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        names = _list_variables()
        self.optimizer_name = names.get(id(optimizer), self.optimizer_name)
        is_first = len(self.steps) == self._first_step
        tracked = [item for item in gc.get_objects() if issubclass(type(item), _TRACKED_CLASSES)] if is_first else []
        models = _find_whole_models([*self._models, *_find_trained_models(tracked)])
        if models:
            self.model_name = names.get(id(models[0]), self.model_name)
        self.steps.append(
            StepRecord(
                _read_models(models, names, nn.Module.named_parameters),
                _read_models(models, names, nn.Module.named_buffers),
                _read_gradients(optimizer),
                _read_optimizer(optimizer),
                _read_groups(optimizer),
                _read_other_optimizers(tracked, optimizer, names),
                _read_states(tracked, torch.optim.lr_scheduler.LRScheduler, names),
                _read_states(tracked, torch.amp.GradScaler, names),
                self._read_averages(tracked, models, names),
                tuple(self._batches),
                self._read_random(),
            )
        )
        self._batches.clear()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Add the forward calls in the optimizer's closure to the step, and start the next step without calls."""
        if optimizer is self._optimizer and self._batches:
            step = self.steps[-1]
            batches = (*step.batches, *self._batches)
            self.steps[-1] = msgspec.structs.replace(step, batches=batches, gradients=_read_gradients(optimizer))
        self._batches.clear()

    def _read_averages(self, objects: list[Any], models: list[nn.Module], names: dict[int, str]) -> dict[str, Digests]:
        """Read averages: AveragedModel, other instances of a called class, and dicts and lists of a model's shapes."""
        part_ids = {id(part) for model in models for part in model.modules()}
        kinds = {type(model) for model in models}
        modules = [item for item in objects if isinstance(item, nn.Module) and id(item) not in part_ids]
        averaged: list[nn.Module] = [
            module for module in modules if isinstance(module, torch.optim.swa_utils.AveragedModel)
        ]
        inner = {id(part) for module in averaged for part in list(module.modules())[1:]}
        averaged += [module for module in modules if type(module) in kinds and id(module) not in inner]
        states = {
            name: _read_tensors(module.state_dict().items())
            for name, module in zip(_name_objects(averaged, names), averaged, strict=True)
        }
        for name, value in _iter_containers():
            tensors = next(filter(None, (_find_average(value, model) for model in models)), {})
            if tensors:
                self.copied_averages.add(name)
                states[name] = {key: _digest(tensor) for key, tensor in tensors.items()}
        return states

    def _read_random(self) -> Digests:
        numpy: Any = sys.modules.get("numpy")
        states = {"torch": _digest(torch.get_rng_state()), "random": _hash(repr(random.getstate()))}
        if numpy:
            _, keys, *state_fields = numpy.random.get_state()
            states["numpy"] = _hash(bytes(keys).hex(), repr(state_fields))
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states["cuda"] = _hash(*map(_digest, torch.cuda.get_rng_state_all()))
        for name, value in _iter_variables():
            kind = _get_generator_kind(value)
            if kind is not None and name not in states:
                self.generators[name] = kind
                states[name] = _hash(_encode(_GENERATOR_STATES[kind](value)))
        return states


#: Classes whose instances are searched for in the process.
_TRACKED_CLASSES = (
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    torch.optim.Optimizer,
    nn.Module,
)


def _find_trained_models(objects: list[Any]) -> list[nn.Module]:
    """Return the modules with parameters that an optimizer trains. A resumed run may not have called them yet."""
    optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
    trained_ids = {id(parameter) for optimizer in optimizers for _, parameter in _iter_parameters(optimizer)}
    modules = [item for item in objects if isinstance(item, nn.Module)]
    return [module for module in modules if any(id(parameter) in trained_ids for parameter in module.parameters())]


def _find_whole_models(models: list[nn.Module]) -> list[nn.Module]:
    """Return the models that are not parts of another model."""
    parts = {id(part) for model in models for part in list(model.modules())[1:]}
    return [model for model in {id(model): model for model in models}.values() if id(model) not in parts]


def _find_average(value: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a dict or list by their names in the model; {} if the shapes are not those of the model.

    A list has a tensor for each parameter, or for each trained parameter.
    """
    state = {name: item for name, item in model.state_dict().items() if isinstance(item, torch.Tensor)}
    if isinstance(value, dict) and value and all(_is_average_of(value[key], state.get(str(key))) for key in value):
        return {str(key): tensor for key, tensor in value.items()}
    parameters = dict(model.named_parameters())
    for names in (list(parameters), [name for name, tensor in parameters.items() if tensor.requires_grad]):
        if (
            type(value) is list
            and len(value) == len(names) > 0
            and all(_is_average_of(tensor, parameters[name]) for name, tensor in zip(names, value, strict=True))
        ):
            return dict(zip(names, value, strict=True))
    return {}


def _is_average_of(tensor: object, original: torch.Tensor | None) -> bool:
    if original is None or not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter):
        return False
    return tensor.shape == original.shape


# --- variables of the script ------------------------------------------------------------------------------------------


def _iter_variables() -> Iterator[tuple[str, Any]]:
    """Yield the local variables of the script's running functions and the attributes of `self`, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_script(frame.f_code.co_filename) and not frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
            yield from tuple(frame.f_locals.items())
            owner = frame.f_locals.get("self")
            attributes = getattr(owner, "__dict__", None)
            if type(attributes) is dict:
                yield from ((f"self.{name}", value) for name, value in tuple(attributes.items()))
        frame = frame.f_back


def _iter_containers() -> Iterator[tuple[str, Any]]:
    """Yield the dicts of the script, and the dicts and lists of its objects, such as `ema.shadow`.

    A list in a variable is left out, because it may hold gradients of an earlier step.
    """
    for name, value in tuple(_iter_variables()):
        if type(value) in (dict, OrderedDict):
            yield name, value
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and not isinstance(value, (type, ModuleType, FunctionType, *_TRACKED_CLASSES)):
            items = tuple(attributes.items())
            yield from ((f"{name}.{key}", item) for key, item in items if type(item) in (dict, OrderedDict, list))


def _list_variables() -> dict[int, str]:
    """Map the `id` of each value to its variable, or to an item of a variable such as `nets[0]`."""
    names: dict[int, str] = {}
    item_names: dict[int, str] = {}
    for name, value in _iter_variables():
        names.setdefault(id(value), name)
        if type(value) in (list, tuple, dict) and len(value) <= _MAX_ITEMS:
            for key, item in tuple(value.items() if type(value) is dict else enumerate(value)):
                if issubclass(type(item), _TRACKED_CLASSES):
                    item_names.setdefault(id(item), f"{name}[{key!r}]")
    return item_names | names


def _name_objects(objects: list[Any], names: dict[int, str]) -> list[str]:
    """Return a name for each object: its variable, or else its class. The second object of a class is `Net 2`."""
    counts: dict[str, int] = {}
    unique_names = []
    for item in objects:
        name = names.get(id(item), type(item).__name__)
        counts[name] = counts.get(name, 0) + 1
        unique_names.append(name if counts[name] == 1 else f"{name} {counts[name]}")
    return unique_names


# --- digests ----------------------------------------------------------------------------------------------------------


def _hash(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode()).hexdigest()[:_DIGEST_DIGITS]


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of dtype, shape and bits. For a tensor wrapper subclass, digest its inner tensors.

    A digest that starts with UNREADABLE does not depend on the values.
    """
    head = f"{tensor.dtype} {tuple(tensor.shape)} "
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return _join_digests([head, *(_digest(getattr(tensor, name)) for name in names), _encode(context)])
    try:
        values = tensor.detach().cpu()
        values = values.dequantize() if values.is_quantized else values.to_dense().resolve_conj().resolve_neg()
        values = values.contiguous()
        address, size = values.data_ptr(), values.numel() * values.element_size()
    except (RuntimeError, NotImplementedError):
        address, size = 0, 1
    if size and not address:  # ctypes returns arbitrary bytes for address 0
        return f"{UNREADABLE} ({type(tensor).__name__})"
    data = ctypes.string_at(address, size) if size else b""
    return hashlib.blake2b(head.encode() + data).hexdigest()[:_DIGEST_DIGITS]


def _join_digests(digests: list[str]) -> str:
    """Return a digest of the digests, or the first digest that stands for an unreadable value."""
    unreadable = [digest for digest in digests if UNREADABLE in digest]
    return unreadable[0] if unreadable else _hash(*digests)


def _encode(value: object) -> str:
    """Encode a state as text that differs if a number or tensor differs. Unreadable values become UNREADABLE."""
    return _Encoder().encode(value)


class _Encoder:
    """Encoder of one state. The state's objects may refer to each other in cycles, or to a whole model."""

    def __init__(self) -> None:
        self._count = 0
        self._outer_ids: list[int] = []

    def encode(self, value: object) -> str:
        """Encode a value as text. Values that are nested too deep count as unreadable."""
        if isinstance(value, torch.Tensor):
            return _digest(value)
        if isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))):
            return repr(value)
        if id(value) in self._outer_ids:
            return f"(circle {len(self._outer_ids) - self._outer_ids.index(id(value))})"
        self._count += 1
        if len(self._outer_ids) == _MAX_DEPTH or self._count > _MAX_OBJECTS:
            return f"{UNREADABLE} ({type(value).__name__})"
        self._outer_ids.append(id(value))
        try:
            return self._encode_object(value)
        finally:
            self._outer_ids.pop()

    def _encode_object(self, value: object) -> str:
        """Return the text of a container, a numpy array, a function or class, or of an object's attributes."""
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self.encode(value[key])}' for key in value)}}}"
        if isinstance(value, (list, tuple, deque)):
            return f"[{', '.join(map(self.encode, value))}]"
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(map(self.encode, value)))}}}"
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, nn.Module):
            return self.encode(value.state_dict())
        numpy: Any = sys.modules.get("numpy")
        if numpy and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
            return _hash(str(value.dtype), str(value.shape), value.tobytes().hex())
        attributes = getattr(value, "__dict__", None)
        text = self.encode(attributes) if type(attributes) is dict and attributes else UNREADABLE
        return f"{text} ({type(value).__name__})"


def _read_tensors(named: Iterable[tuple[str, Any]]) -> Digests:
    return {name: _digest(tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)}


def _read_models(
    models: list[nn.Module],
    names: dict[int, str],
    list_tensors: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]],
) -> dict[str, Digests]:
    model_names = _name_objects(models, names)
    return {name: _read_tensors(list_tensors(model)) for name, model in zip(model_names, models, strict=True)}


def _iter_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"{number}.{position}", parameter


def _read_gradients(optimizer: torch.optim.Optimizer) -> Digests:
    named = _iter_parameters(optimizer)
    return {name: _digest(parameter.grad) for name, parameter in named if parameter.grad is not None}


def _read_optimizer(optimizer: torch.optim.Optimizer) -> Digests:
    return {
        f"{name}.{key}": _encode(value)
        for name, parameter in _iter_parameters(optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _read_groups(optimizer: torch.optim.Optimizer) -> Digests:
    return {
        f"{number}.{key}": _encode(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }


def _read_other_optimizers(
    objects: list[Any], first: torch.optim.Optimizer, names: dict[int, str]
) -> dict[str, Digests]:
    """Read the state and the settings of each optimizer but the first."""
    others = [item for item in objects if isinstance(item, torch.optim.Optimizer) and item is not first]
    return {
        name: _read_optimizer(optimizer) | _read_groups(optimizer)
        for name, optimizer in zip(_name_objects(others, names), others, strict=True)
    }


def _get_generator_kind(value: object) -> GeneratorKind | None:
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return None if value is torch.default_generator else GeneratorKind.TORCH
    if isinstance(value, random.Random):
        return GeneratorKind.PYTHON
    if numpy and isinstance(value, numpy.random.RandomState):
        return GeneratorKind.RANDOM_STATE
    return GeneratorKind.NUMPY if numpy and isinstance(value, numpy.random.Generator) else None


#: How to read the state of a generator of the script.
_GENERATOR_STATES: dict[GeneratorKind, Callable[[Any], object]] = {
    GeneratorKind.TORCH: lambda generator: generator.get_state(),
    GeneratorKind.PYTHON: lambda generator: generator.getstate(),
    GeneratorKind.RANDOM_STATE: lambda generator: generator.get_state(),
    GeneratorKind.NUMPY: lambda generator: generator.bit_generator.state,
}


def _read_states(objects: list[Any], kind: type, names: dict[int, str]) -> dict[str, str]:
    matching_objects: list[Any] = [item for item in objects if isinstance(item, kind)]
    # The state of a SequentialLR or ChainedScheduler contains the states of its inner schedulers.
    inner_ids = {id(inner) for item in matching_objects for inner in getattr(item, "_schedulers", ())}
    matching_objects = [item for item in matching_objects if id(item) not in inner_ids]
    object_names = _name_objects(matching_objects, names)
    return {name: _encode(item.state_dict()) for name, item in zip(object_names, matching_objects, strict=True)}
