"""Measure a model in a copy of its project: checks of `verify`, output of forward, and a load of the old state_dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from statecli import live
from statecli.commands.fix.project_copy import Project, ProjectCopy, copy_project
from statecli.commands.verify import run as verify_run
from statecli.commands.verify.result import Verification
from statecli.core.errors import ModelError

if TYPE_CHECKING:
    import torch

    from statecli.commands.verify.model_under_test import ModelUnderTest


@dataclass(frozen=True)
class OldStateLoad:
    """Result of loading the old state_dict: the keys that the state_dict lacks, or the error."""

    missing: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Measurement:
    """Measurements of a model in a copy of its project.

    Attributes:
        verification: Result of the checks.
        entries: The state_dict of an instance built with seed 0.
        output: The values that forward returns after a load of the old state_dict; None if forward was not called.
        load: Result of loading the old state_dict.
        attributes: Names of the attributes of each module, by the name of the module.
        input_dependent: Names of the tensors created by forward whose values depend on the input or the seed.
        copy: The measured copy.
    """

    verification: Verification
    copy: ProjectCopy
    entries: dict[str, Any] = field(default_factory=dict)
    output: tuple[torch.Tensor | int, ...] | None = None
    load: OldStateLoad = OldStateLoad()
    attributes: dict[str, frozenset[str]] = field(default_factory=dict)
    input_dependent: frozenset[str] = frozenset()


def measure(
    project: Project,
    request: verify_run.Request,
    contents: Mapping[str, bytes],
    old: Measurement | None = None,
) -> Measurement:
    """Verify the model with the edited files of `contents`. Raises StateError if the model cannot be built."""
    with copy_project(project, contents) as copy:
        request = replace(request, target=copy.text)
        try:
            subject = verify_run.build_model_under_test(request)
            # Before the checks, because their training steps permanently change a parameter in a class body.
            instance = _measure_instance(subject, old)
            dependent_names = subject.input_dependent
            verification = verify_run.verify_model(subject, request)
            attributes = _list_attributes(subject.build_fresh())
            return Measurement(verification, copy, *instance, attributes, dependent_names)
        except ModelError as error:
            raise ModelError(copy.hide(str(error))) from error


def _measure_instance(
    subject: ModelUnderTest, old: Measurement | None
) -> tuple[dict[str, Any], tuple[torch.Tensor | int, ...] | None, OldStateLoad]:
    """Return the state_dict, the output of forward, and the result of loading the old state_dict."""
    import torch

    try:
        module = subject.build_fresh(values=True)
        with subject.user_code("saving the model"), torch.no_grad():
            entries = {name: _clone(value) for name, value in module.state_dict().items()}
    except ModelError as error:
        return {}, None, OldStateLoad(error=str(error))
    load = OldStateLoad() if old is None else _load(subject, module, old.entries)
    output: tuple[torch.Tensor | int, ...] | None = None
    if subject.inputs is not None and not load.error:
        with suppress(ModelError):
            output = tuple(_list_values(subject.call(module)))
    return entries, output, load


def _list_attributes(module: torch.nn.Module) -> dict[str, frozenset[str]]:
    """Return the attribute names of each module, including the attributes of its class."""
    return {
        name: frozenset(
            # keys(), because the stores of a ScriptModule refuse to be iterated over
            (*vars(part), *part._parameters.keys(), *part._buffers.keys(), *part._modules.keys(), *dir(type(part)))
        )
        for name, part in module.named_modules()
    }


def _clone(value: object) -> Any:
    import torch

    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _load(subject: ModelUnderTest, module: torch.nn.Module, entries: Mapping[str, Any]) -> OldStateLoad:
    """Load the old entries. Report errors, unexpected keys and entries that are not restored, but not missing keys."""
    import torch

    try:
        with subject.user_code("loading the old state_dict"), torch.no_grad():
            result = module.load_state_dict({name: _clone(value) for name, value in entries.items()}, strict=False)
    except ModelError as error:
        return OldStateLoad(error=str(error))
    if result.unexpected_keys:
        name = result.unexpected_keys[0]
        return OldStateLoad(error=f"the fixed class does not accept the entry {name} of older state_dicts")
    loaded_state = module.state_dict()
    for name, value in entries.items():
        if (
            isinstance(value, torch.Tensor)
            and value.device.type == "cpu"
            and not _is_restored(value, loaded_state[name])
        ):
            return OldStateLoad(error=f"the fixed class does not restore the entry {name} of older state_dicts")
    return OldStateLoad(tuple(result.missing_keys))


def _is_restored(value: torch.Tensor, loaded_value: torch.Tensor) -> bool:
    import torch

    if value.is_complex() and not loaded_value.is_complex():
        value = torch.view_as_real(value)
    if value.layout is not torch.strided or value.dtype.is_complex or value.is_quantized:
        return True
    return value.shape == loaded_value.shape and torch.allclose(value, loaded_value.to(value.dtype), equal_nan=True)


def is_same_output(old: Sequence[torch.Tensor | int], new: Sequence[torch.Tensor | int]) -> bool:
    """Return True if two calls of forward returned the same values, up to rounding in their dtype."""
    return len(old) == len(new) and all(map(_is_same_value, old, new))


def _is_same_value(old: torch.Tensor | int, new: torch.Tensor | int) -> bool:
    import torch

    if isinstance(old, int) or isinstance(new, int):
        return bool(type(old) is type(new) and old == new)
    if old.is_nested and new.is_nested:
        return old.layout is new.layout and is_same_output(old.unbind(), new.unbind())
    if live.tensor_bits.is_same(old, new):
        return True
    is_rounded = old.layout is torch.strided and (old.is_floating_point() or old.is_complex())
    if not is_rounded or old.is_nested or new.is_nested or old.shape != new.shape or old.dtype != new.dtype:
        return False
    precision = min(1.0, torch.finfo(old.dtype).eps / torch.finfo(torch.float32).eps)
    return torch.allclose(old, new, rtol=1e-4 * precision, atol=1e-6 * precision, equal_nan=True)


def _list_values(output: object) -> list[torch.Tensor | int]:
    """Return the tensors and numbers inside a result (tuples, lists, dicts, dataclasses); floats become tensors."""
    import torch

    if isinstance(output, torch.Tensor):
        return [output.detach()]
    if isinstance(output, int):
        return [output]
    if isinstance(output, float):
        return [torch.tensor(output, dtype=torch.float64)]
    if isinstance(output, dict):
        return [value for part in output.values() for value in _list_values(part)]
    if is_dataclass(output):
        output = [getattr(output, output_field.name, None) for output_field in fields(output)]
    if isinstance(output, (tuple, list)):
        return [value for part in output for value in _list_values(part)]
    return []
