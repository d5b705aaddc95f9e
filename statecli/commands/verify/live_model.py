"""Support for live models from Python: find inputs, copy the model, and leave the original unchanged."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from statecli.commands.verify import copy_model, inputs, model_under_test
from statecli.commands.verify.inputs import FoundInputs, Inputs
from statecli.core.errors import UsageError
from statecli.core.input_text import is_input_text
from statecli.live import measure, tensor_bits, torch_settings
from statecli.live.spec import ModelSpec
from statecli.live.tensors import is_freed
from statecli.live.walk import walk

if TYPE_CHECKING:
    from torch import nn

    from statecli.commands.verify.inputs import Call
    from statecli.live.built_model import BuiltModel


# --- inputs -----------------------------------------------------------------------------------------------------------


def _suggest_inputs(args: tuple[Any, ...]) -> str:
    """Return advice for inputs without a tensor: pass tensors, or shapes as strings such as '2x3'."""
    shapes = [arg for arg in (args, *args) if isinstance(arg, (tuple, list)) and arg]
    sizes = next((shape for shape in shapes if all(type(size) is int for size in shape)), (2, 3))
    return f"pass a tensor, or its shape as a string, such as {'x'.join(map(str, sizes))!r}"


def find_live_inputs(python_inputs: object, built_model: BuiltModel) -> FoundInputs:
    """Return (inputs, None), or (None, reason) if no inputs for forward are found.

    `python_inputs` is a tensor, a tuple or list (positional), a dict (by keyword), (args, kwargs), or a function that
    returns any of these. Texts such as "int64:2x16<30522" may replace the tensors: alone, in a sequence or by keyword.
    None means the model's own example inputs (`dummy_inputs`). Texts and example inputs become tensors on the model's
    device.

    Raises UsageError for an invalid text, and for texts mixed with other values, ModelError if a function raises or
    returns no tensor.
    """
    texts = _get_texts(python_inputs)
    if python_inputs is None or texts:
        inputs_found, why_not = inputs.find_inputs(texts, None, built_model)
        return (inputs_found and _move_beside_model(built_model.module, inputs_found)), why_not
    args, kwargs = inputs.split_arguments(python_inputs)
    input_text = next(filter(is_input_text, (*args, *kwargs.values())), None)
    if input_text is not None:
        examples = "'2x3', ('2x3', '4x3') or {'x': '2x3'}"
        raise UsageError(
            f"inputs: {input_text!r} is a shape, but another input is not; give only tensors or only shapes: {examples}"
        )
    model = replace(built_model, spec=ModelSpec("inputs", "", False, "inputs"))

    def make_call(seed: int = 0) -> Call:
        if not callable(python_inputs) or isinstance(python_inputs, torch.Tensor):
            return inputs.convert_to_call("inputs", python_inputs, "the value is", _suggest_inputs(args))
        with model.user_code("calling the function"), inputs.use_seed(seed):
            return inputs.convert_to_call("inputs", python_inputs())

    return Inputs(inputs.describe_call(make_call()), make_call), None


def _get_texts(python_inputs: object) -> tuple[str, ...]:
    if isinstance(python_inputs, str):
        return (python_inputs,)
    if isinstance(python_inputs, dict) and all(isinstance(text_, str) for text_ in python_inputs.values()):
        return tuple(f"{name}={text}" for name, text in python_inputs.items())
    if isinstance(python_inputs, (tuple, list)) and all(isinstance(text_, str) for text_ in python_inputs):
        return tuple(python_inputs)
    return ()


def _move_beside_model(model: nn.Module, inputs_found: Inputs) -> Inputs:
    """Move the inputs to the model's device, or to the CPU if the model has several devices. On meta, move nothing."""
    devices = {tensor.device for _, tensor in measure.iter_tensors(walk(model))}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return inputs_found if device.type == "meta" else inputs_found.move(str(device))


# --- copies -----------------------------------------------------------------------------------------------------------


def build_copy(module: nn.Module) -> BuiltModel:
    """Return a `BuiltModel` for a live model. Only copies of the model are moved or called.

    The copy has values only in small tensors. Raises ModelError if the model cannot be copied.
    """
    wrapped, contents = model_under_test.wrap_live_model(module), copy_model.list_contents(module)

    def copy_instance(values: bool, _: int) -> nn.Module:
        with wrapped.user_code("copying the model"):
            return copy_model.copy_live_model(module, values=values, contents=contents)

    return replace(wrapped, module=copy_instance(False, 0), original=module, values=False, make_instance=copy_instance)


# --- restoring the model ----------------------------------------------------------------------------------------------


@contextmanager
def keep_unchanged(module: nn.Module | None = None, *, cuda: bool = False) -> Iterator[None]:
    """After the `with` block, restore the global settings and the live model, whatever the model's code has changed.

    Restored in the process: the random generators (torch on the CPU and, if CUDA is in use or `cuda` is True, on each
    GPU; Python; numpy), the grad mode, the default dtype and device, deterministic algorithms, the number of threads.
    Restored in the model: the mode and registrations of each module; device, dtype, `requires_grad` and `.grad` of each
    tensor; all values except those of parameters. Proofs work only on copies, but the code of a copy may reach the
    original, for example by a global variable.
    """
    with (
        torch_settings.keep_settings(),
        _keep_generators(cuda),
        torch.inference_mode(False),
        torch.enable_grad(),
        nullcontext() if module is None else _keep_model(module),
    ):
        yield


@contextmanager
def _keep_generators(cuda: bool) -> Iterator[None]:
    if cuda and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    is_cuda_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    state, on_cuda = inputs.get_random_state(), torch.cuda.get_rng_state_all() if is_cuda_used else []
    try:
        yield
    finally:
        inputs.set_random_state(state)
        if on_cuda:
            torch.cuda.set_rng_state_all(on_cuda)


@contextmanager
def _keep_model(module: nn.Module) -> Iterator[None]:
    with torch._C.DisableTorchFunctionSubclass():
        result = walk(module)
        tensors = [tensor for _, tensor in measure.iter_tensors(result)]
    # Not module.modules(), which recurses.
    modules = {id(part): part for part in (*(part for _, part in result.modules), *result.modules_beyond_limit)}
    with _keep_tensors(tensors), _keep_modules(modules.values()):
        yield


@contextmanager
def _keep_modules(modules: Collection[nn.Module]) -> Iterator[None]:
    """After the `with` block, restore the training mode and the registered tensors of each module."""
    with torch._C.DisableTorchFunctionSubclass():
        modes = [(part, part.training) for part in modules if hasattr(part, "training")]
        registries: list[Any] = [registry for part in modules for registry in (part._parameters, part._buffers)]
        # A ScriptModule's registry lies in C++.
        entries_of = [(registry, dict(registry)) for registry in registries if isinstance(registry, dict)]
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for part, training in modes:
                part.training = training
            for registry, entries in entries_of:
                if list(map(id, registry.values())) != list(map(id, entries.values())):
                    registry.clear()
                    registry.update(entries)


@contextmanager
def _keep_tensors(tensors: list[torch.Tensor]) -> Iterator[None]:
    """After the `with` block, restore the tensors' memory, values and gradients. In the block, `.grad` is None."""
    with torch._C.DisableTorchFunctionSubclass():
        memory = [(tensor, tensor.data) for tensor in tensors if type(tensor) is torch.nn.Parameter]
        values = [(tensor, tensor.detach().clone()) for tensor in tensors if _is_small(tensor)]
        gradients = [(tensor, tensor.requires_grad, tensor.grad) for tensor in tensors if tensor.is_leaf]
        for tensor, _, grad in gradients:
            if grad is not None:
                tensor.grad = None
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for tensor, data in memory:
                if (tensor.device, tensor.dtype) != (data.device, data.dtype):
                    tensor.data = data
            for tensor, value in values:
                # Compare values, because BatchNorm's kernels write without raising a tensor's version.
                if tensor_bits.is_same(tensor, value) is False:
                    tensor.copy_(value)
            for tensor, requires_grad, grad in gradients:
                if tensor.requires_grad is not requires_grad:
                    tensor.requires_grad_(requires_grad)
                if tensor.grad is not grad:
                    tensor.grad = grad


#: Maximum bytes of a tensor, other than a parameter, whose values are copied to restore them. Forward rarely changes
#: larger tensors, such as tables.
_SAVED_TENSOR_BYTES = 1 << 20


def _is_small(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_inference()
    return is_plain and not (tensor.is_meta or is_freed(tensor)) and tensor.nbytes <= _SAVED_TENSOR_BYTES
