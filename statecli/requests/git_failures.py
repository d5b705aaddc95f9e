"""Errors of the commands that git calls: a line on standard output and status 0, because git stops at another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from statecli.core.errors import StateError
from statecli.core.escaping import escape


def end_with_failure(lines: Iterable[str], describe: Callable[[Exception], str]) -> Iterator[str]:
    """Yield the lines, and a line for an error that ends them."""
    try:
        yield from lines
    except Exception as error:  # noqa: BLE001  # a bug of ours must not end somebody's git diff
        yield describe(error)


def describe_failure(error: Exception) -> str:
    """Return the text of an error."""
    return escape(str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}")
