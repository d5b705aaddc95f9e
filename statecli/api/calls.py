"""The public functions' plumbing: what Python hands over -> the requests that the command line makes too."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from statecli.core.errors import UsageError
from statecli.storage import files

if TYPE_CHECKING:
    from statecli.commands.diff.result import Diff, Field
    from statecli.commands.inspect.run import Inspection
    from statecli.commands.inspect.run import Request as InspectRequest
    from statecli.commands.verify.result import Name, Verification
    from statecli.commands.verify.run import Request as VerifyRequest
    from statecli.core.state import Kind
    from statecli.requests.options import DiffOptions

_Word = TypeVar("_Word", bound=Enum)

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
        return files.shown(os.fsdecode(target))
    if isinstance(target, type):
        raise UsageError(f"{target.__name__} is a class: give an instance, or name it: 'file.py:{target.__name__}'")
    if is_live(target):
        raise UsageError(f"{type(target).__name__} is a live model; diff takes files and specs: save it first")
    raise UsageError(f"a path, a spec such as 'net.py:Net' or an nn.Module is needed, not {type(target).__name__}")


def engine_of(executor: Any) -> Any:
    """It, with what may be shown of an address."""
    return files.shown(executor) if isinstance(executor, str) else executor


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


def checks(words: Iterable[Name | str] | None) -> tuple[Name, ...]:
    """Proofs, each once, in the order in which they are run. Raises UsageError for a name that is none."""
    from statecli.commands.verify.result import Name

    asked = _words("checks", words, Name)
    return tuple(name for name in Name if name in asked)


def kinds(words: Iterable[Kind | str] | None) -> tuple[Kind, ...]:
    """Kinds of tensors. Raises UsageError for a word that is none."""
    from statecli.core.state import Kind

    return _words("kind", words, Kind)


def fields(words: Iterable[Field | str] | None) -> tuple[Field, ...]:
    """What a diff ignores. Raises UsageError for a word that is none."""
    from statecli.commands.diff.result import Field

    return _words("ignore", words, Field)


def _words(option: str, given: Iterable[Any] | None, of: type[_Word]) -> tuple[_Word, ...]:
    known = {one.value: one for one in of}
    asked = _several(option, given)
    unknown = next((word for word in asked if word not in list(known)), None)
    if unknown is not None:
        raise UsageError(f"{option}: {str(unknown)!r} is none of {', '.join(known)}")
    return tuple(known[word] for word in asked)


def _count(jobs: object) -> int:
    if type(jobs) is not int:
        raise UsageError(f"--jobs {jobs}: must be a whole number")
    return jobs


def diff_options(before: object, after: object, **given: Any) -> DiffOptions:
    """The parameters of `statecli.diff` as the options of the command. Raises UsageError."""
    from statecli.requests.options import DiffOptions

    globs = ("map", "only", "frozen", "changed", "include", "exclude")
    read: dict[str, Callable[[Any], Any]] = {
        "ignore": fields,
        "kind": kinds,
        "device": str,
        "init_device": str,
        "executor": engine_of,
        "jobs": _count,
        **{name: functools.partial(many, name) for name in globs},
    }
    options = {name: read[name](value) if name in read else value for name, value in given.items()}
    return DiffOptions(before=path_of(before), after=path_of(after), **options)


# --- doing it ---------------------------------------------------------------------------------------------------------


def inspect(target: Any, inputs: Any, executor: Any = None, **given: Any) -> Inspection:
    """See `statecli.inspect`."""
    from statecli.commands.inspect import run
    from statecli.targets.load import spec_of
    from statecli.workers import executors

    files.forget()
    request = _inspect_request(target, **given)
    executor = engine_of(executor)
    executors.check(executor)
    if executor is not None and (is_live(target) or spec_of(request.target) or not request.stats):
        raise UsageError(f"--executor {executors.named(executor)}: is for stats=True of a checkpoint")
    if executor is not None:
        with executors.working(executor):
            return run.inspect(request)
    if not is_live(target):
        with _as_it_was(request.to or "") if spec_of(request.target) or request.model else nullcontext():
            return run.inspect(request, handed=inputs)
    if request.model is not None:
        raise UsageError(f"model groups a checkpoint; {request.target} is a model already")
    from statecli.commands.verify import live_model

    with live_model.untouched(target, cuda=(request.to or "").startswith("cuda")):
        return run.of_live(target, request, inputs)


def _inspect_request(target: Any, **given: Any) -> InspectRequest:
    from statecli.commands.inspect import run

    options = {
        **given,
        "to": text(given["to"]),
        "model": text(given["model"]),
        "init_device": str(given["init_device"]),
    }
    return run.Request(target=name_of(target), **{**options, **_filters(given)})


def _filters(given: Mapping[str, Any]) -> dict[str, Any]:
    globs = {option: many(option, given[option]) for option in ("include", "exclude")}
    return {**globs, "kind": kinds(given["kind"])}


def diff(before: Any, after: Any, **given: Any) -> Diff:
    """See `statecli.diff`."""
    from statecli.commands.diff.run import compare
    from statecli.requests import diff as asked
    from statecli.targets.load import spec_of
    from statecli.workers import executors

    files.forget()
    options = diff_options(before, after, **given)
    asked.check(options)
    any_class = spec_of(options.before) or spec_of(options.after)
    with _as_it_was(options.device) if any_class else nullcontext(), executors.working(options.executor):
        return compare(asked.request(options))


def merge(parts: Any, **given: Any) -> Inspection | Diff:
    """See `statecli.merge`."""
    from statecli.commands.diff.run import compare
    from statecli.commands.inspect import run
    from statecli.requests import diff as asked
    from statecli.requests import inspect as inspect_request
    from statecli.requests.merge import merging
    from statecli.requests.options import DiffOptions, InspectOptions, MergeOptions
    from statecli.workers import executors

    several = (parts,) if isinstance(parts, (str, os.PathLike)) else parts
    code, url = many("code", given.pop("code")), tuple(map(files.shown, many("url", given.pop("url"))))
    given["executor"] = engine_of(given.get("executor"))
    options = MergeOptions(parts=tuple(map(path_of, several)), code=code, url=url, **given)
    executors.check(options.executor, jobs=options.jobs)
    with merging(options) as command, executors.working(options.executor):
        if isinstance(command, DiffOptions):
            asked.check(command)
            return compare(asked.request(command))
        if isinstance(command, InspectOptions):
            return run.inspect(inspect_request.requested(command))
    raise UsageError(f"{options.parts[0]}: is of a command that only the command line merges: statecli merge")


def verify(model: Any, inputs: Any, **given: Any) -> Verification:
    """See `statecli.verify`."""
    from statecli.commands.verify import run
    from statecli.requests import verify as asked

    files.forget()
    request = _verify_request(model, **given)
    asked.check(request)
    if is_live(model):
        return _worded(run.of_live(model, request, inputs))
    with _as_it_was(request.device or ""):
        return _worded(run.run(request, given=inputs))


def _verify_request(model: Any, **given: Any) -> VerifyRequest:
    from statecli.commands.verify import run

    return run.Request(
        target=name_of(model),
        checks=checks(given["checks"]),
        device=text(given["device"]),
        dtype=text(given["dtype"]),
        optimizer=optimizer(given["optimizer"]),
        **_filters(given),
    )


def _worded(found: Verification) -> Verification:
    """What to give where nothing was given to call forward with, as Python gives it."""
    from msgspec.structs import replace

    from statecli.commands.verify.inputs import NONE_GIVEN

    here = "no input given: inputs='2x3', tensors, or a function that makes them"
    checks = (replace(one, reason=one.reason and one.reason.replace(NONE_GIVEN, here)) for one in found.checks)
    return replace(found, checks=tuple(checks))


def _as_it_was(device: str) -> AbstractContextManager[None]:
    """Around what runs a class's code. Without torch it ends with the line that says so, in its own place."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return nullcontext()
    from statecli.commands.verify import live_model

    return live_model.untouched(cuda=device.startswith("cuda"))
