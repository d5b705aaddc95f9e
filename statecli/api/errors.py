"""Raise errors for users of the Python API: with argument names in place of options, without statecli's frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import cache
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

from statecli.core.errors import EngineError, MissingDependency, StateError, UnreadableError
from statecli.core.python_arguments import PYTHON_ARGUMENTS
from statecli.requests.options import COMMANDS
from statecli.requests.parameters import parameters_of
from statecli.storage import files

_Result = TypeVar("_Result")

__tracebackhide__ = True  # pytest shows the caller's line

#: Errors of packages (stores, engines), whose frames may hold secrets.
_PACKAGE_ERRORS = (EngineError, MissingDependency, UnreadableError)


def call(
    function: Callable[..., _Result], arguments: dict[str, Any], names: Mapping[str, str] = MappingProxyType({})
) -> _Result:
    """Return `function(**arguments)`. An error of statecli is raised again here, without its inner frames.

    Errors, and reasons in the result, name arguments of the function in place of options.

    After an error `arguments` is empty, so that a traceback with variables shows no URL as typed. `names`: arguments
    that have another name in the caller's function.
    """
    files.forget_command()
    flags = {flag: names.get(argument, argument) for flag, argument in map_flags(arguments).items()}
    token = PYTHON_ARGUMENTS.set(flags)
    try:
        return function(**arguments)
    except StateError as error:
        error.use_arguments(flags)
        error.args = tuple(files.remove_secrets(arg) if isinstance(arg, str) else arg for arg in error.args)
        cause = None if isinstance(error, _PACKAGE_ERRORS) else error.__cause__
        user_frames = _skip_own_frames(cause.__traceback__) if cause is not None else None
        arguments.clear()
        error.__context__ = None
        raise error.with_traceback(None) from (cause.with_traceback(user_frames) if cause and user_frames else None)
    finally:
        PYTHON_ARGUMENTS.reset(token)


def map_flags(arguments: Collection[str]) -> dict[str, str]:
    """Map each flag or target of the command line to its Python argument, limited to the names in `arguments`."""
    return {flag: argument for flag, argument in _list_spellings() if argument in arguments}


@cache
def _list_spellings() -> list[tuple[str, str]]:
    parameters = [parameter for options in COMMANDS.values() for parameter in parameters_of(options)]
    return [(flag, each.argument) for each in parameters for flag in each.spellings or (each.metavar,)]


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the leading frames of statecli, or None if no other frame remains."""
    own_folder = os.path.dirname(os.path.dirname(__file__)) + os.sep
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own_folder):
        trace = trace.tb_next
    return trace
