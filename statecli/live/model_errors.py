"""Describe an error of the user's model code in one line: exception type, message and line of code."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from statecli.core.errors import ModelError, StateError, option
from statecli.core.installed_package import INSTALL_COMMAND, MODEL_LIBRARIES, install_module, install_packages
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.quoting import quote_for_shell
from statecli.live import argument_errors, downloads, torchscript_errors, without_download
from statecli.live.exception_text import get_exception_text
from statecli.live.installed_code import PACKAGE_FOLDER, format_path, is_installed_file
from statecli.live.source_line import SourceLine
from statecli.live.spec import ModelSpec
from statecli.live.spec_objects import format_call
from statecli.live.suggested_arguments import set_argument

#: The message of torch for a package whose compiled part was not loaded.
_OPERATOR = compile_on_use(r"operator (?P<package>torch\w+)::\w+ does not exist")


@contextmanager
def report_as_model_error(spec: ModelSpec, doing: str, callee: Any = None) -> Iterator[None]:
    """Convert any exception in the block except KeyboardInterrupt to a one-line ModelError, even SystemExit."""
    try:
        yield
        _wait_for_gpu()
    except (StateError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # Only an error of the call itself is an error of its arguments.
        is_call = callee is not None and isinstance(error, TypeError) and _find_deepest_user_line(error) is None
        mismatch = argument_errors.explain_arguments(spec, callee) if is_call else None
        raise mismatch or _explain_error(spec, doing, callee, error) from error


def _wait_for_gpu() -> None:
    """Wait for the GPU kernels that the code started, because their errors are raised only then."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)


def _explain_error(spec: ModelSpec, doing: str, callee: Any, error: BaseException) -> ModelError:
    hint = f"; try {option('--init-device', 'cpu')}" if doing.endswith("on meta") and spec.config is None else ""
    script_error = torchscript_errors.parse_script_error(error, is_installed_file)
    error_text = (
        _truncate(script_error.text)
        if script_error
        else f"{type(error).__name__}: {format_exception(error)}".rstrip(": ")
    )
    place = script_error.place if script_error else _locate_error(error)
    own_place = "" if place is None or is_installed_file(place.file) else _format_place(spec, place)
    refusal = _explain_refusal(spec, callee, error, f"{spec.text}: {doing}{own_place}")
    if refusal is not None:
        return refusal
    problem = f"{spec.text}: {doing} raised {error_text}{_format_place(spec, place)}{hint}"
    command = _suggest_command(error)
    if command is not None:
        return ModelError(problem, advice=command)
    return ModelError(f"{problem}{_suggest_package(error) or _suggest_input(error)}")


def _suggest_command(error: BaseException) -> str | None:
    """Suggest the last `pip install` command in the text of an ImportError, or return None without a command."""
    commands = INSTALL_COMMAND.findall(get_exception_text(error)) if isinstance(error, ImportError) else []
    return f"install the package: {commands[-1]}" if commands else None


def _suggest_package(error: BaseException) -> str:
    """Return advice to install a missing package, or to upgrade a package built for another version of torch."""
    unfit = _OPERATOR.search(get_exception_text(error)) if isinstance(error, RuntimeError) else None
    if unfit is not None:
        command = install_packages("torch", unfit["package"], upgrade=True)
        return f"; {unfit['package']} was built for another version of torch: {command}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    place = _find_deepest_user_line(error)
    if not missing or place is None or not (is_installed_file(place.file) or missing in MODEL_LIBRARIES):
        return ""
    return f"; install the package: {install_module(missing)}"


def _explain_refusal(spec: ModelSpec, callee: Any, error: BaseException, caller: str) -> ModelError | None:
    """Return the ModelError for a refused download, or None if `error` has another cause.

    The ModelError suggests how to name the model without a download, or how to allow downloads.
    """
    refusal = downloads.find_refusal(error)
    if refusal is None:
        return None
    problem = f"{caller} needs a download from {refusal.source}, but statecli does not download by default:"
    # A function may take `pretrained=True` for `weights`, and refuses both.
    argument = downloads.find_request(spec.kwargs) or refusal.argument
    if argument is None:
        return ModelError(problem, advice=without_download.advise(spec, callee, error))
    name, value = argument
    changed_spec = set_argument(spec, callee, name, value)
    line = quote_for_shell(f"{spec.base}({format_call(changed_spec.args, changed_spec.kwargs)})")
    try:
        inspect.signature(callee).bind(*changed_spec.args, **changed_spec.kwargs)
    except (TypeError, ValueError):  # an argument of a function that the class calls
        line = f"{name}={value}"
    return ModelError(problem, advice=f"write {line}, or {downloads.ALLOW}")


def _suggest_input(error: BaseException) -> str:
    """Return the `--input` that the model expects if a torch layer got a wrong input, or else an empty text.

    An nn.Embedding takes ids. An nn.Linear with the model's own input takes another size of its last dimension, an
    nn.Conv1d, Conv2d or Conv3d another number of channels.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        layer, value = frame.f_locals.get("self"), frame.f_locals.get("input")
        shape = list(getattr(value, "shape", ()))
        if frame.f_code.co_name != "forward" or not shape:
            continue
        rows = getattr(layer, "num_embeddings", None)
        if isinstance(rows, int):
            ids = option("--input", f"int64:{_format_sizes(shape)}<{rows}", quoted=True)
            return f"; the embedding takes integers from 0 to {rows - 1}: {ids}"
        taken_size = _find_taken_size(layer, shape)
        if taken_size is not None and _is_input_of_model(value, frames):
            dimension, size, unit = taken_size
            shape[dimension] = size
            return f"; the first layer takes {size:,} {unit}: {option('--input', _format_sizes(shape))}"
    return ""


def _find_taken_size(layer: object, shape: Sequence[int]) -> tuple[int, int, str] | None:
    """Return the refused dimension of a layer's input, the size that the layer accepts, and what this size counts."""
    features, channels = getattr(layer, "in_features", None), getattr(layer, "in_channels", None)
    if isinstance(features, int) and shape[-1] != features:
        return -1, features, "values in the last dimension"
    rank = len(getattr(layer, "kernel_size", ()))
    if isinstance(channels, int) and rank and len(shape) in (rank + 1, rank + 2) and shape[-rank - 1] != channels:
        return -rank - 1, channels, "channels"
    return None


def _is_input_of_model(value: object, frames: Sequence[types.FrameType]) -> bool:
    """Return whether `value` is an argument of the outermost module that was called."""
    call = next((frame for frame in frames if frame.f_code.co_name == "_call_impl"), None)
    return call is not None and any(value is argument for argument in call.f_locals.get("args", ()))


def _format_sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def format_exception(error: BaseException) -> str:
    """Return the message of an exception in one line of at most 400 characters, with short paths."""
    return str(error.msg) if isinstance(error, SyntaxError) else _truncate(" ".join(get_exception_text(error).split()))


def _truncate(text: str) -> str:
    text = _shorten_paths(text)
    return text if len(text) <= 400 else text[:397] + "…"


def _shorten_paths(text: str) -> str:
    """Shorten each absolute path below the current directory or a sys.path entry to a relative path."""
    entries = sorted({os.path.abspath(entry) for entry in sys.path if entry}, key=len, reverse=True)
    with suppress(OSError):
        entries.insert(0, os.getcwd())
    for entry in entries:
        if entry.strip(os.sep):
            text = re.sub(r"(?<![\w./\\-])" + re.escape(entry + os.sep), "", text)
    return text


def _locate_error(error: BaseException) -> SourceLine | None:
    if isinstance(error, SyntaxError) and error.filename:
        return SourceLine(error.filename, error.lineno or 1)
    return _find_deepest_user_line(error)


def describe_model_error(error: BaseException) -> str | None:
    """Return `TypeError: message (net.py:3)` if code outside of statecli and torch raised `error`, otherwise None."""
    place = _find_deepest_user_line(error)
    if place is None:
        return None
    return f"{type(error).__name__}: {format_exception(error)} ({format_path(place.file, {})}:{place.line})"


def _format_place(spec: ModelSpec, place: SourceLine | None) -> str:
    if place is None or place.file.startswith("<"):
        return ""
    return f" ({format_path(place.file, get_typed_paths(spec))}:{place.line})"


def get_typed_paths(spec: ModelSpec) -> dict[str, str]:
    """Map the absolute path of the model spec's file to the path that the user typed, or return {} for other specs."""
    return {os.path.abspath(spec.module): spec.module} if spec.is_file else {}


def _find_deepest_user_line(error: BaseException) -> SourceLine | None:
    """Return the deepest line of the user's code, or else the deepest line outside of statecli and torch.

    For an endless recursion, return the line that recurses.
    """
    frames = [
        SourceLine(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((PACKAGE_FOLDER, "<frozen"))
    ]
    user_places = [place for place in frames if not is_installed_file(place.file)]
    other_places = [place for place in frames if f"{os.sep}torch{os.sep}" not in place.file]
    places = user_places or other_places
    if places and isinstance(error, RecursionError):
        return Counter(places).most_common(1)[0][0]  # the stack may run out at any line
    return places[-1] if places else None


def describe_type(obj: object) -> str:
    """Return the type of an object as a phrase, such as "a Tensor" or "None"."""
    if obj is None:
        return "None"
    if isinstance(obj, types.ModuleType):
        return "a Python module"
    name = type(obj).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
