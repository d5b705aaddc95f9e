"""Objects that live as long as a command or as the process. Each object belongs to the factory that creates it.

A module keeps its state in an object that it gets here, so a single assignment in `forget_command` drops the state of a
command. The module uses no lock, because a fork could leave a lock locked. If two threads both call the factory, both
get the object that was stored first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Object = TypeVar("_Object")


class _Session:
    def __init__(self) -> None:
        self._objects: dict[Callable[[], Any], Any] = {}

    def get(self, factory: Callable[[], _Object]) -> _Object:
        objects = self._objects  # local, because another thread may replace it
        if factory not in objects:
            objects.setdefault(factory, factory())
        stored: _Object = objects[factory]
        return stored

    def forget(self) -> None:
        self._objects = {}


_process = _Session()
_command = _Session()


def for_command(factory: Callable[[], _Object]) -> _Object:
    """Return the object that the factory created for this command; create the object on the first call."""
    return _command.get(factory)


def for_process(factory: Callable[[], _Object]) -> _Object:
    """Return the object that the factory created for this process; create the object on the first call."""
    return _process.get(factory)


def forget_command() -> None:
    """Drop the state of the previous command, because another command begins."""
    _command.forget()
