"""Objects that live as long as a command, or as long as the process, by the factory that creates them.

A module that remembers something keeps it in an object of its own, and asks for the object here. So one assignment in
`forget_command` drops all that a command has learned. There is no lock, because a fork could leave it locked: two
threads may both call the factory, and both get the object that was stored first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Object = TypeVar("_Object")


class _Session:
    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}

    def get(self, factory: Callable[[], _Object]) -> _Object:
        if factory not in self._objects:
            self._objects.setdefault(factory, factory())
        stored: _Object = self._objects[factory]
        return stored


_process = _Session()
_command = _Session()


def for_command(factory: Callable[[], _Object]) -> _Object:
    """Return the object that the factory created during this command; create the object on the first call."""
    return _command.get(factory)


def for_process(factory: Callable[[], _Object]) -> _Object:
    """Return the object that the factory created in this process; create the object on the first call."""
    return _process.get(factory)


def forget_command() -> None:
    """Begin another command, which knows nothing of the one before."""
    global _command
    _command = _Session()
