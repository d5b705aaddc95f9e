"""Objects with the lifetime of a command or of the process, by their factory.

A module keeps its memory in an object of its own, and asks for the object here. So a single assignment in
`forget_command` drops everything learned by a command. There is no lock, because a fork could leave a lock locked: two
threads may both call the factory, and both get the object stored first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Object = TypeVar("_Object")


class _Session:
    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}

    def get(self, factory: Callable[[], _Object]) -> _Object:
        objects = self._objects  # which another thread may replace
        if factory not in objects:
            objects.setdefault(factory, factory())
        stored: _Object = objects[factory]
        return stored

    def forget(self) -> None:
        self._objects = {}


_process = _Session()
_command = _Session()


def for_command(factory: Callable[[], _Object]) -> _Object:
    """Return the object created by the factory during this command; create the object on the first call."""
    return _command.get(factory)


def for_process(factory: Callable[[], _Object]) -> _Object:
    """Return the object created by the factory in this process; create the object on the first call."""
    return _process.get(factory)


def forget_command() -> None:
    """Begin another command without knowledge of the previous command."""
    _command.forget()
