"""Turn errors into a line of output and exit status 0 in commands called by git. Git stops at any other status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from statecli.core.errors import StateError
from statecli.core.escaping import escape


def end_with_failure(lines: Iterable[str], describe: Callable[[Exception], str]) -> Iterator[str]:
    """Yield the lines. If an exception occurs, yield its description as the last line."""
    try:
        yield from lines
    except Exception as error:  # noqa: BLE001  # a bug of ours must not end somebody's git diff
        yield describe(error)


def describe_failure(error: Exception) -> str:
    """Return the message of an error in one line. The type of the error comes first, except for a StateError."""
    return escape(str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}")
