"""The public functions' plumbing: what Python hands over -> the requests that the command line makes too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from statecli.core.errors import UsageError
from statecli.requests.options import DiffOptions, InspectOptions, MergeOptions, Options, VerifyOptions
from statecli.requests.outcome import Caller, Given
from statecli.requests.parameters import Parameter, parameters_of
from statecli.requests.run import run
from statecli.storage import files
from statecli.targets.load import find_class_spec
from statecli.workers import executors

if TYPE_CHECKING:
    from statecli.commands.diff.result import Diff
    from statecli.commands.inspect.run import Inspection
    from statecli.commands.verify.result import Verification

_Options = TypeVar("_Options", InspectOptions, DiffOptions, MergeOptions, VerifyOptions)

#: Options that Python calls otherwise.
ARGUMENTS = {"check": "checks"}

__tracebackhide__ = True  # pytest shows the caller's line

# --- what was handed over ---------------------------------------------------------------------------------------------


def is_live(target: object) -> bool:
    """Whether it is an nn.Module; asking imports no torch, since without torch there is none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def name_of(target: object) -> str:
    """The path or spec; the class's name of a live model. Raises UsageError for anything else."""
    return type(target).__name__ if is_live(target) else path_of(target)


def path_of(target: object) -> str:
    """A path or spec as text. Raises UsageError for anything else."""
    if isinstance(target, (str, os.PathLike)):
        return files.mask_urls(os.fsdecode(target))
    if isinstance(target, type):
        raise UsageError(f"{target.__name__} is a class: give an instance, or name it: 'file.py:{target.__name__}'")
    if is_live(target):
        raise UsageError(f"{type(target).__name__} is a live model; diff takes files and specs: save it first")
    raise UsageError(f"a path, a spec such as 'net.py:Net' or an nn.Module is needed, not {type(target).__name__}")


def engine_of(executor: Any) -> Any:
    """It, with what may be shown of an address."""
    return files.mask_urls(executor) if isinstance(executor, str) else executor


def text(value: object) -> str | None:
    """A device, a dtype or a spec as it is written on the command line."""
    return None if value is None else str(value).removeprefix("torch.")


def many(option: str, words: Iterable[str] | None) -> tuple[str, ...]:
    """Words, of which one may stand alone; None is none. Raises UsageError for anything else."""
    given = _several(option, words)
    odd = next((word for word in given if not isinstance(word, str)), None)
    if odd is not None:
        raise UsageError(f"{option}: {odd!r} is no text")
    return given


def _several(option: str, given: Any) -> tuple[Any, ...]:
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, Iterable):
        raise UsageError(f"{option}: {given!r} is no text, nor a list of some")
    return tuple(given)


def optimizer(given: object) -> str | type | None:
    """A name, or a class of optimizers. Raises UsageError for anything else."""
    if given is None or isinstance(given, str):
        return given
    torch = sys.modules.get("torch")
    if isinstance(given, type) and torch is not None and issubclass(given, torch.optim.Optimizer):
        return given
    raise UsageError(f"optimizer: give a name such as 'adamw' or a class of torch.optim, not {given!r}")


def _words(parameter: Parameter, given: Iterable[Any] | None) -> tuple[Any, ...]:
    """Return choices, of which one may stand alone. Raises UsageError for a word that is not one of them."""
    choices = {choice.value: choice for choice in parameter.type}
    argument = ARGUMENTS.get(parameter.field, parameter.field)
    words = _several(argument, given)
    unknown = next((word for word in words if word not in list(choices)), None)
    if unknown is not None:
        raise UsageError(f"{argument}: {str(unknown)!r} is none of {', '.join(choices)}")
    return tuple(choices[word] for word in words)


def _count(number: object) -> int:
    if type(number) is not int:
        raise UsageError(f"--jobs {number}: must be a whole number")
    return number


def options_of(options: type[_Options], given: Mapping[str, Any]) -> _Options:
    """Return the options of a command with what Python gives: each value as its type says. Raises UsageError."""
    parameters = {parameter.field: parameter for parameter in parameters_of(options)}
    return options(**{field: _convert(parameters[field], value) for field, value in given.items()})


def _convert(parameter: Parameter, value: Any) -> Any:
    if parameter.field in _CONVERTERS:
        return _CONVERTERS[parameter.field](value)
    if parameter.repeatable:
        is_choice = isinstance(parameter.type, type) and issubclass(parameter.type, Enum)
        return _words(parameter, value) if is_choice else many(parameter.field, value)
    return text(value) if parameter.type is str else value


#: Options whose values Python gives in more ways than the command line.
_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "target": name_of,
    "before": path_of,
    "after": path_of,
    "executor": engine_of,
    "optimizer": optimizer,
    "jobs": _count,
}


# --- doing it ---------------------------------------------------------------------------------------------------------


def inspect(target: Any, inputs: Any, executor: Any = None, **given: Any) -> Inspection:
    """See `statecli.inspect`."""
    files.forget_command()
    options = options_of(InspectOptions, {"target": target, "executor": executor, **given})
    model = target if is_live(target) else None
    device = options.to or ""
    if model is not None:
        kept: AbstractContextManager[None] = _untouched(model, device)
    else:
        kept = _as_it_was(device) if find_class_spec(options.target) or options.model else nullcontext()
    with kept:
        result: Inspection = run(options, given=Given(model=model, inputs=inputs)).result
    return result


def diff(before: Any, after: Any, **given: Any) -> Diff:
    """See `statecli.diff`."""
    files.forget_command()
    options = options_of(DiffOptions, {"before": before, "after": after, **given})
    any_class = find_class_spec(options.before) or find_class_spec(options.after)
    with _as_it_was(options.device) if any_class else nullcontext():
        result: Diff = run(options).result
    return result


def merge(parts: Any, **given: Any) -> Inspection | Diff:
    """See `statecli.merge`."""
    several = (parts,) if isinstance(parts, (str, os.PathLike)) else parts
    given["url"] = tuple(map(files.mask_urls, many("url", given["url"])))
    options = options_of(MergeOptions, {"parts": tuple(map(path_of, several)), **given})
    executors.check_executor(options.executor, jobs=options.jobs)
    result: Inspection | Diff = run(options, _ForPython(options.parts[0])).result
    return result


class _ForPython(Caller):
    """Refuses to merge the parts of a command that is not a function of the Python API."""

    def __init__(self, part: str) -> None:
        self._part = part

    def check_command(self, options: Options) -> None:
        if not isinstance(options, (DiffOptions, InspectOptions)):
            raise UsageError(f"{self._part}: is of a command that only the command line merges: statecli merge")


def verify(model: Any, inputs: Any, checks: Any = (), **given: Any) -> Verification:
    """See `statecli.verify`."""
    files.forget_command()
    options = options_of(VerifyOptions, {"target": model, "check": checks, **given})
    live = model if is_live(model) else None
    with nullcontext() if live is not None else _as_it_was(options.device or ""):
        return _worded(run(options, given=Given(model=live, inputs=inputs)).result)


def _worded(found: Verification) -> Verification:
    """What to give where nothing was given to call forward with, as Python gives it."""
    from msgspec.structs import replace

    from statecli.commands.verify.inputs import NO_INPUT

    here = "no input given: inputs='2x3', tensors, or a function that makes them"
    checks = (replace(one, reason=one.reason and one.reason.replace(NO_INPUT, here)) for one in found.checks)
    return replace(found, checks=tuple(checks))


def _as_it_was(device: str) -> AbstractContextManager[None]:
    """Around what runs a class's code. Without torch it ends with the line that says so, in its own place."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return nullcontext()
    from statecli.commands.verify import live_model

    return live_model.keep_unchanged(cuda=device.startswith("cuda"))


def _untouched(model: Any, device: str) -> AbstractContextManager[None]:
    from statecli.commands.verify import live_model

    return live_model.keep_unchanged(model, cuda=device.startswith("cuda"))
