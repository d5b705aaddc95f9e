"""Live models, as Python hands them over: what forward is called with, and that all is left as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from statecli.commands.verify import copy_model, inputs, model_under_test, tensor_bits
from statecli.commands.verify.inputs import Inputs
from statecli.core.errors import UsageError
from statecli.live import measure, torch_settings
from statecli.live.spec import Spec
from statecli.live.tensors import is_freed
from statecli.live.walk import walk

if TYPE_CHECKING:
    from torch import nn

    from statecli.commands.verify.inputs import Call
    from statecli.live.build import Built


# --- inputs -----------------------------------------------------------------------------------------------------------


def inputs_of(given: Any, built: Built) -> tuple[Inputs | None, str]:
    """What forward is called with, or None and why.

    `given` is a tensor, a tuple or list (positional), a dict (by keyword), (args, kwargs), a function that gives one of
    these, or texts such as "int64:2x16<30522", one, several or by keyword; None for what the model carries
    (`dummy_inputs`). What is not given as tensors is put where the model is. Raises UsageError for a text that is no
    input, or that stands beside what is none, ModelError for what a function raises, or gives that has no tensor in it.
    """
    texts = _texts(given)
    if given is None or texts:
        found, why_not = inputs.find(texts, None, built)
        return (found and _beside(built.module, found)), why_not
    args, kwargs = inputs._split(given)
    odd = next(filter(inputs.is_one, (*args, *kwargs.values())), None)
    if odd is not None:
        how = "'2x3', ('2x3', '4x3') or {'x': '2x3'}"
        raise UsageError(f"inputs: {odd!r} becomes a tensor only where all are such texts: {how}; give a tensor")
    guard = replace(built, spec=Spec("inputs", "", False, "inputs"))

    def make(seed: int = 0) -> Call:
        if not callable(given) or isinstance(given, torch.Tensor):
            return inputs._as_call("inputs", given, "it is")
        with guard.user_code("calling it"), inputs.seeded(seed):
            return inputs._as_call("inputs", given())

    return Inputs(inputs.described(make()), make), ""


def _texts(given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, dict) and all(isinstance(one, str) for one in given.values()):
        return tuple(f"{name}={text}" for name, text in given.items())
    many = isinstance(given, (tuple, list)) and given and all(isinstance(one, str) for one in given)
    return tuple(given) if many else ()


def _beside(model: nn.Module, found: Inputs) -> Inputs:
    """The same inputs on the device of the model, where that is one device with values."""
    devices = {tensor.device for _, tensor in measure.names(walk(model))}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    if device.type in ("cpu", "meta"):
        return found

    def make(seed: int = 0) -> Call:
        moved: Call = inputs.mapped(found.make(seed=seed), lambda tensor: tensor.to(device))
        return moved

    return Inputs(found.text, make, found.given)


# --- copies -----------------------------------------------------------------------------------------------------------


def copied(module: nn.Module) -> Built:
    """A live model as what was built: listed as it is, and moved as a copy; `again` copies again.

    The copy has no values but small ones. Raises ModelError where the model cannot be copied.
    """
    known, found = model_under_test.built_of(module), copy_model.found_in(module)

    def make(values: bool, _: int) -> nn.Module:
        with known.user_code("copying it"):
            return copy_model.of_live(module, values=values, found=found)

    return replace(known, module=make(False, 0), original=module, values=False, _make=make)


# --- as it was --------------------------------------------------------------------------------------------------------


@contextmanager
def untouched(module: nn.Module | None = None, *, cuda: bool = False) -> Iterator[None]:
    """Afterwards the process and a live model are as they were, whatever the model's own code did.

    Of the process: the random generators (torch's on the CPU and, where CUDA is in use or `cuda` says that it will be,
    on each GPU; Python's; numpy's), the grad mode, the default dtype and device, whether algorithms are deterministic,
    the number of threads. Of the model: each module's mode and what is registered in it, each tensor's device, dtype,
    `requires_grad` and `.grad`, and the values of all that is no parameter. Only copies are worked on; but a copy's
    code may know the original, by a global name for instance.
    """
    with ExitStack() as stack:
        stack.enter_context(torch_settings.kept())
        stack.enter_context(_generators(cuda))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if module is not None:
            stack.enter_context(_kept(module))
        yield


@contextmanager
def _generators(cuda: bool) -> Iterator[None]:
    if cuda and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    numpy: Any = sys.modules.get("numpy")
    on_cpu, on_cuda = torch.get_rng_state(), _of_cuda()
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(on_cpu)
        if on_cuda:
            torch.cuda.set_rng_state_all(on_cuda)
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)


def _of_cuda() -> list[torch.Tensor]:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if used else []


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    with torch._C.DisableTorchFunctionSubclass():
        found = walk(module)
        tensors = [tensor for _, tensor in measure.names(found)]
        # Not module.modules(), which recurses.
        modules = list({id(one): one for one in (*(one for _, one in found.modules), *found.beyond)}.values())
        restores = [_modes(modules), _registries(modules), _memory(tensors), _values(tensors), _gradients(tensors)]
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for restore in restores:
                restore()


def _modes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    modes = [(one, one.training) for one in modules if hasattr(one, "training")]

    def restore() -> None:
        for one, training in modes:
            one.training = training

    return restore


def _registries(modules: Iterable[nn.Module]) -> Callable[[], None]:
    registries: list[Any] = [one for part in modules for one in (part._parameters, part._buffers)]
    held = [(one, dict(one)) for one in registries if isinstance(one, dict)]  # a ScriptModule's lies in C++

    def restore() -> None:
        for registry, entries in held:
            if list(map(id, registry.values())) != list(map(id, entries.values())):
                registry.clear()
                registry.update(entries)

    return restore


def _memory(tensors: list[torch.Tensor]) -> Callable[[], None]:
    memory = [(one, one.data) for one in tensors if type(one) is torch.nn.Parameter]

    def restore() -> None:
        for one, data in memory:
            if (one.device, one.dtype) != (data.device, data.dtype):
                one.data = data

    return restore


def _values(tensors: list[torch.Tensor]) -> Callable[[], None]:
    values = [(one, one.detach().clone()) for one in tensors if _is_small(one)]

    def restore() -> None:
        for one, value in values:
            if tensor_bits.same(one, value) is False:  # its count of writes misses those of BatchNorm's kernels
                one.copy_(value)

    return restore


def _gradients(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Takes the gradients away as well: one that comes all the same is not added to them."""
    kept = [(one, one.requires_grad, one.grad) for one in tensors if one.is_leaf]
    for one, _, grad in kept:
        if grad is not None:
            one.grad = None

    def restore() -> None:
        for one, requires_grad, grad in kept:
            if one.requires_grad is not requires_grad:
                one.requires_grad_(requires_grad)
            if one.grad is not grad:
                one.grad = grad

    return restore


#: Bytes up to which what is no parameter is kept beside the model. More is a table that forward reads.
_SMALL = 1 << 20


def _is_small(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_inference()
    return plain and not (tensor.is_meta or is_freed(tensor)) and tensor.nbytes <= _SMALL
