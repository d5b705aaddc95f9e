"""Functions behind the Python API: turn arguments into options of commands, and run the commands."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from statecli.api.live_targets import (
    SavedObjects,
    is_live,
    is_live_model,
    refuse_class_options,
    refuse_executor,
    use_saved_objects,
)
from statecli.api.snapshot import Snapshot
from statecli.commands import verify as verify_package
from statecli.core.errors import UsageError, option
from statecli.requests.options import (
    AuditOptions,
    DiffOptions,
    InspectOptions,
    LockOptions,
    MergeOptions,
    Options,
    VerifyOptions,
)
from statecli.requests.outcome import Caller, ExtraInputs, Outcome
from statecli.requests.parameters import Parameter, parameters_of
from statecli.requests.run import run
from statecli.storage import files
from statecli.targets.load import find_class_spec
from statecli.targets.location import make_relative_name
from statecli.workers import executors

if TYPE_CHECKING:
    from statecli.commands.audit.result import Audit
    from statecli.commands.diff.result import Diff
    from statecli.commands.diff.snapshot import StateDigests
    from statecli.commands.inspect.run import Inspection
    from statecli.commands.lock.lock_file import Lock
    from statecli.commands.verify.result import Verification

_Result = TypeVar("_Result")
_Options = TypeVar("_Options", AuditOptions, DiffOptions, InspectOptions, LockOptions, MergeOptions, VerifyOptions)

__tracebackhide__ = True  # pytest shows the caller's line

# --- arguments to options ---------------------------------------------------------------------------------------------


def to_name(target: object) -> str:
    """Return a path or model spec as text, or the class name of a live model. Raises UsageError for anything else."""
    return type(target).__name__ if is_live_model(target) else to_path(target)


def to_path(target: object) -> str:
    """Return a path, or a model spec such as `net.py:Net`, as text. Raises UsageError for any other object."""
    if isinstance(target, (str, os.PathLike)):
        return files.mask_urls(os.fsdecode(target))
    if isinstance(target, type):
        raise UsageError(f"{target.__name__} is a class: pass an instance, or the spec 'file.py:{target.__name__}'")
    raise UsageError(
        "expected a path, a spec such as 'net.py:Net', an nn.Module, an optimizer or a state_dict, "
        f"not {type(target).__name__}"
    )


def to_paths(targets: object) -> tuple[str, ...]:
    """Return paths or model specs as texts."""
    return tuple(map(to_path, targets)) if isinstance(targets, tuple) else (to_path(targets),)


def list_targets(targets: object) -> tuple[object, ...]:
    """Return the targets of audit and lock: a single target, or each item of an iterable."""
    if isinstance(targets, (str, os.PathLike)) or is_live(targets) or not isinstance(targets, Iterable):
        return (targets,)
    return tuple(targets)


def save_if_live(target: object, saved_objects: SavedObjects) -> object:
    """Save a live object and return the path of its temporary file. Return any other target unchanged."""
    return saved_objects.save(target) if is_live(target) else target


def to_executor(executor: object) -> Any:
    """Return the executor. If it is an address, mask the secrets in it."""
    return files.mask_urls(executor) if isinstance(executor, str) else executor


def to_text(value: object) -> str:
    """Return a device or a dtype in the spelling of the command line."""
    return str(value).removeprefix("torch.")


def to_texts(argument: str, words: Iterable[str] | None) -> tuple[str, ...]:
    """Return a string or strings as a tuple, and None as (). Raises UsageError for any other value."""
    texts = to_tuple(argument, words)
    invalid = next((text for text in texts if not isinstance(text, str)), None)
    if invalid is not None:
        raise UsageError(f"{argument}: {invalid!r} is not a string")
    return texts


def to_tuple(argument: str, value: object) -> tuple[Any, ...]:
    """Return a string or an iterable as a tuple, and None as (). Raises UsageError for any other value."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if not isinstance(value, Iterable):
        raise UsageError(f"{argument}: {value!r} is not a string or an iterable of strings")
    return tuple(value)


def to_optimizer(value: object) -> str | type | None:
    """Return the name or class of an optimizer. Raises UsageError for anything else."""
    if value is None or isinstance(value, str):
        return value
    torch = sys.modules.get("torch")
    if isinstance(value, type) and torch is not None and issubclass(value, torch.optim.Optimizer):
        return value
    raise UsageError(f"optimizer: pass a name such as 'adamw' or a class of torch.optim, not {value!r}")


def _to_choices(parameter: Parameter, value: Iterable[Any] | None) -> tuple[Any, ...]:
    """Convert a string or several strings to the choices with these names. Raises UsageError for an unknown name."""
    choices = {choice.value: choice for choice in parameter.type}
    words = to_tuple(parameter.argument, value)
    unknown = next((word for word in words if word not in list(choices)), None)
    if unknown is not None:
        raise UsageError(f"{parameter.argument}: {str(unknown)!r} is not one of {', '.join(choices)}")
    return tuple(choices[word] for word in words)


def _to_choice(parameter: Parameter, value: object) -> Any:
    """Convert a string to the choice with this name. Raises UsageError for any other value."""
    choices = {choice.value: choice for choice in parameter.type}
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{parameter.argument}: {str(value)!r} is not one of {', '.join(choices)}")
    return choices[value]


def _to_count(number: object) -> int:
    if type(number) is not int:
        raise UsageError(f"{option('--jobs', number)}: must be a whole number")
    return number


def build_options(options: type[_Options], values: Mapping[str, Any]) -> _Options:
    """Build the options of a command from Python values. Keys are names of arguments or fields. Raises UsageError."""
    all_parameters = parameters_of(options)
    parameters = {each.argument: each for each in all_parameters} | {each.field: each for each in all_parameters}
    return options(**{parameters[name].field: _convert(parameters[name], value) for name, value in values.items()})


def _convert(parameter: Parameter, value: Any) -> Any:
    if parameter.field in _CONVERTER_BY_OPTION:
        return _CONVERTER_BY_OPTION[parameter.field](value)
    if parameter.repeatable:
        return _to_choices(parameter, value) if parameter.choices else to_texts(parameter.argument, value)
    if value is None and not parameter.is_required:
        return None
    if parameter.choices:
        return _to_choice(parameter, value)
    if parameter.reads_file:
        return to_path(value)
    return to_text(value) if parameter.type is str else value


#: Options with more types in Python than on the command line.
_CONVERTER_BY_OPTION: dict[str, Callable[[Any], Any]] = {
    "target": to_name,
    "targets": to_paths,
    "executor": to_executor,
    "optimizer": to_optimizer,
    "jobs": _to_count,
}


# --- options to results -----------------------------------------------------------------------------------------------


def _get_result(outcome: Outcome[_Result], frames: int = 5) -> _Result:
    """Return the outcome's result. Issue its warning as a FutureWarning at the user's line, `frames` frames above."""
    if outcome.warning is not None:
        warnings.warn(outcome.warning, FutureWarning, stacklevel=frames)
    return outcome.result


def inspect(target: Any, inputs: Any, executor: Any = None, **arguments: Any) -> Inspection:
    """See `statecli.inspect`."""
    refuse_class_options(arguments, [target, arguments.get("model")])
    if is_live(target) and not is_live_model(target):
        refuse_executor(executor, [target])
        with use_saved_objects() as saved_objects:
            return saved_objects.rename(inspect(saved_objects.save(target), inputs, executor, **arguments))
    options = build_options(InspectOptions, {"target": target, "executor": executor, **arguments})
    model = target if is_live_model(target) else None
    runs_code = model is not None or find_class_spec(options.target) or options.model
    with _keep_unchanged(options.to or "", model) if runs_code else nullcontext():
        result: Inspection = _get_result(run(options, extra=ExtraInputs(model=model, inputs=inputs)))
    return result


def diff(before: object, after: object, **arguments: Any) -> Diff:
    """See `statecli.diff`."""
    refuse_executor(arguments.get("executor"), [before, after])
    refuse_class_options(arguments, [before, after])
    if arguments.get("executor") is not None and (isinstance(before, Snapshot) or isinstance(after, Snapshot)):
        raise UsageError(
            "executor: workers cannot read a snapshot, because a snapshot exists only in this process; leave "
            "executor out"
        )
    with use_saved_objects() as saved_objects:
        snapshots: dict[str, StateDigests] = {}
        sides = {
            "before": _name_side(before, saved_objects, snapshots),
            "after": _name_side(after, saved_objects, snapshots),
        }
        options = build_options(DiffOptions, {**sides, **arguments})
        any_class = find_class_spec(options.before) or find_class_spec(options.after)
        with _keep_unchanged(options.device) if any_class else nullcontext():
            result: Diff = run(options, extra=ExtraInputs(snapshots=snapshots)).result
        return saved_objects.rename(result)


def _name_side(side: object, saved_objects: SavedObjects, snapshots: dict[str, StateDigests]) -> object:
    """Return the name of one side of a diff: a saved object's path, a snapshot's name, or the given text."""
    if not isinstance(side, Snapshot):
        return save_if_live(side, saved_objects)
    if side.path is not None:
        saved_objects.names |= {side.path: side.name, make_relative_name(side.path): side.name}
        return side.path
    assert side.digests is not None  # noqa: S101 - a snapshot has values or digests
    name = side.name if side.name not in snapshots else f"{side.name} 2"
    snapshots[name] = replace(side.digests, state=replace(side.digests.state, target=name))
    return name


def lock(targets: object, **arguments: Any) -> Lock:
    """See `statecli.lock`."""
    result: Lock = _run_on_targets(LockOptions, targets, arguments)
    return replace(result, targets=tuple(sorted(result.targets, key=lambda target: str(target.target))))


def audit(
    targets: object, against: object = None, values: bool | None = None, plugins: object = (), **arguments: Any
) -> Audit:
    """See `statecli.audit`."""
    arguments |= {"against": against, "values": values is True, "no_values": values is False, "plugin": plugins}
    result: Audit = _run_on_targets(AuditOptions, targets, arguments)
    return result


def _run_on_targets(options_type: type[_Options], targets: object, arguments: dict[str, Any]) -> Any:
    target_list: tuple[object, ...] = list_targets(targets)
    if not target_list:
        raise UsageError("targets: is empty; pass a path, an nn.Module, an optimizer or a state_dict")
    refuse_executor(arguments.get("executor"), [*target_list, arguments.get("against")])
    refuse_class_options(arguments, [*target_list, arguments.get("model"), arguments.get("against")])
    with use_saved_objects() as saved_objects:
        if "against" in arguments:
            arguments = {**arguments, "against": save_if_live(arguments["against"], saved_objects)}
        paths = tuple(save_if_live(target, saved_objects) for target in target_list)
        options: Any = build_options(options_type, {"targets": paths, **arguments})
        device = "" if all(find_class_spec(text) is None for text in options.targets) else "cpu"
        with _keep_unchanged(device) if device or getattr(options, "model", None) else nullcontext():
            return saved_objects.rename(_get_result(run(options), frames=6))


def merge(parts: Any, **arguments: Any) -> Inspection | Diff:
    """See `statecli.merge`."""
    paths = (parts,) if isinstance(parts, (str, os.PathLike)) else parts
    arguments["url"] = tuple(map(files.mask_urls, to_texts("url", arguments["url"])))
    options = build_options(MergeOptions, {"parts": tuple(map(to_path, paths)), **arguments})
    executors.check_executor(options.executor, jobs=options.jobs)
    result: Inspection | Diff = run(options, _ForPython(options.parts[0])).result
    return result


class _ForPython(Caller):
    """Caller of `merge` for the Python API. It accepts only part files of `diff` and `inspect`."""

    def __init__(self, part: str) -> None:
        self._part = part

    def check_command(self, options: Options) -> None:
        if not isinstance(options, (DiffOptions, InspectOptions)):
            raise UsageError(
                f"{self._part}: statecli.merge accepts only part files of diff and inspect; for other part "
                "files, run the command statecli merge"
            )


def verify(model: Any, inputs: Any, checks: Any = (), **arguments: Any) -> Verification:
    """See `statecli.verify`."""
    refuse_class_options(arguments, [model])
    options = build_options(VerifyOptions, {"target": model, "check": checks, **arguments})
    live = model if is_live_model(model) else None
    with nullcontext() if live is not None else _keep_unchanged(options.device or ""):
        verification: Verification = _get_result(run(options, extra=ExtraInputs(model=live, inputs=inputs)))
    return verification


def _keep_unchanged(device: str, model: Any = None) -> AbstractContextManager[None]:
    """Return a context manager that restores torch's settings and the model after the block, if torch is installed."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return nullcontext()
    return verify_package.live_model.keep_unchanged(model, cuda=device.startswith("cuda"))
