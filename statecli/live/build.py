"""Build a live `nn.Module` from a `ModelSpec`: import and call the class or function of the spec.

Prints of the user's code go to stderr, and an exception becomes a ModelError with the line of the code. Only `build`
imports torch.
"""

from __future__ import annotations

import functools
import sys
import types
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from statecli import live
from statecli.core.build_function import BUILD_ADVICE
from statecli.core.errors import MissingDependency, ModelError, UsageError
from statecli.core.garbage_collector import pause_gc
from statecli.core.installed_package import install_extra
from statecli.core.progress import report_stage
from statecli.core.quoting import quote_for_shell
from statecli.core.target_suggestions import find_example, suggest_models_of
from statecli.live import hf_auto, import_model
from statecli.live.built_model import BuiltModel
from statecli.live.constructor_arguments import resolve_arguments
from statecli.live.import_model import LoadedObject, load_with_module
from statecli.live.library_output import hide_library_lines
from statecli.live.model_errors import describe_type, format_exception, get_typed_paths, report_as_model_error
from statecli.live.seeds import seed_cpu_generators
from statecli.live.spec import ModelSpec
from statecli.live.user_code import protect_process

if TYPE_CHECKING:
    from torch import nn

    from statecli.live.assignment_lines import Origins


def build(
    spec: ModelSpec, *, init_device: str | None = "cpu", values: bool = False, loaded: LoadedObject | None = None
) -> BuiltModel:
    """Import and call the class or function named by `spec`.

    `init_device`: None means meta if the model is built from a configuration, and the cpu otherwise. `loaded`: the
    object of the spec, if it was imported before. Without `values` large random initial values are not drawn (see
    `skip_random_init`). Raises MissingDependency without torch, UsageError for a device unknown to torch, ModelError
    for an error of the user's code.
    """
    init_device = init_device or ("cpu" if spec.config is None else "meta")
    torch = import_torch()
    _check_device(torch, init_device)
    with hide_library_lines():  # advice imports classes too
        return _build_model(spec, init_device, values, loaded)


def _build_model(spec: ModelSpec, init_device: str, values: bool, loaded: LoadedObject | None = None) -> BuiltModel:
    origins = live.assignment_lines.Origins(get_typed_paths(spec))
    report_stage(f"importing {spec.module if spec.config is None else 'the library of ' + spec.config}")
    loaded = loaded or load_with_module(spec)
    _check_class(spec, loaded.value)
    report_stage(f"building {spec.attribute if spec.config is None else spec.text}")
    make_instance = functools.partial(_build_once, spec, loaded, init_device, None)
    with live.torch_settings.keep_settings_and_grad_mode():
        module = _build_once(spec, loaded, init_device, origins, values)
        settings_after_init = live.torch_settings.read_settings()
    return BuiltModel(
        spec,
        module,
        origins,
        init_device,
        values,
        make_instance,
        loaded=loaded,
        settings_after_init=settings_after_init,
    )


def import_torch() -> Any:
    """Import and return torch. Raises MissingDependency if torch cannot be imported."""
    report_stage("importing torch")
    try:
        with pause_gc():
            import torch
    except ImportError as error:
        if "torch" not in (getattr(error, "name", "") or "torch"):
            raise
        raise MissingDependency(
            f"a model class needs torch, which cannot be imported ({format_exception(error)}): {install_extra('torch')}"
        ) from error
    return torch


def _check_device(torch: Any, text: str) -> None:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"cannot build on device {text!r}: use cpu or meta") from error


def _check_class(spec: ModelSpec, obj: object) -> None:
    """Raise ModelError if instances of the class are not modules, and suggest model classes."""
    from torch import nn

    if not isinstance(obj, type) or issubclass(obj, nn.Module) or type(obj) is not type:
        return  # a metaclass may build anything
    if obj.__new__ is not object.__new__:
        return
    if obj.__module__.startswith("transformers.models.auto.") and hasattr(obj, "_model_mapping"):
        word = quote_for_shell(f"{spec.base}(config=...)")
        path = f"write {word} with the path of a config.json, or of its folder"
        example = hf_auto.find_example(obj)
        end = f", or, for example, {quote_for_shell(example)}" if example else ""
        raise ModelError(f"{spec.text}: needs a configuration; {path}{end}")
    models = suggest_models_of(spec.module, getattr(sys.modules.get(spec.module), "__file__", None))
    example = None if spec.is_file else find_example(spec.module)
    end = (
        "; name a model class or a function:" if models.choices else f"; write, for example, {example}" * bool(example)
    )
    raise models.build_error(ModelError, spec.text, f"the class {spec.attribute} is not an nn.Module{end}")


def _build_once(
    spec: ModelSpec, loaded: LoadedObject, init_device: str, origins: Origins | None, values: bool, seed: int = 0
) -> nn.Module:
    """Build an instance. If the constructor fails without random initial values, build again with random values."""
    skipped_fills = live.skip_random_init.SkippedFills()
    doing = "building the model on meta" if init_device == "meta" else "building the model"
    with protect_process(spec), report_as_model_error(spec, doing, callee=loaded.value):
        if not values:
            start = live.torch_settings.read_settings()
            try:
                with live.skip_random_init.skip_random_fills(skipped_fills):
                    return _call_spec(spec, loaded, init_device, origins, seed)
            except Exception:  # of any kind: the constructor may have failed because values were not drawn
                if not skipped_fills.count:
                    raise
                live.torch_settings.apply_settings(start)
        return _call_spec(spec, loaded, init_device, origins, seed)


def _seed_generators(seed: int) -> None:
    """Seed torch, Python and numpy. Without a GPU, `torch.manual_seed` is not called, because it takes 5 ms."""
    import torch

    seed_cpu_generators(seed)
    if torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available():
        torch.manual_seed(seed)


def _call_spec(
    spec: ModelSpec, loaded: LoadedObject, init_device: str, origins: Origins | None, seed: int
) -> nn.Module:
    import torch
    from torch import nn

    obj = loaded.value
    if isinstance(obj, nn.Module):
        if spec.called:
            raise ModelError(f"{spec.text}: {spec.attribute} is already a model; remove the parentheses")
        return obj
    if not callable(obj):
        type_text = describe_type(obj)
        problem = f"{spec.text}: {spec.attribute} is {type_text}, not a model class or a function that returns a model"
        advice = import_model.describe_models(obj) if isinstance(obj, types.ModuleType) else None
        raise ModelError(problem, advice=advice)
    _seed_generators(seed)
    # No device mode for the cpu: it would override a default device that the user's own code sets.
    device = nullcontext() if init_device == "cpu" else torch.device(init_device)
    with device, origins.record() if origins else nullcontext():
        arguments = resolve_arguments(spec, loaded.module, obj)
        model = obj(*arguments.args, **arguments.kwargs)
    if isinstance(model, types.CoroutineType):
        model.close()  # Python warns about a coroutine that is freed without being awaited
        raise ModelError(f"{spec.text}: {spec.attribute} is async and returned a coroutine, not an nn.Module")
    if not isinstance(model, nn.Module):
        problem = f"{spec.text}: {spec.attribute} returned {describe_type(model)}, not an nn.Module"
        raise ModelError(problem, advice=BUILD_ADVICE)
    return model
