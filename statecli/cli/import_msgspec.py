"""Import msgspec, but defer its imports that statecli does not need. They take a seventh of a command's start time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

#: Modules that msgspec imports but rarely needs, each with the functions that msgspec takes from it at import.
_DEFERRED_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "msgspec.inspect": (),
    "msgspec._json_schema": ("schema", "schema_components"),
    "msgspec.toml": (),
    "msgspec.yaml": (),
}


class _DeferredModule(ModuleType):
    """Stand-in for a module. Reading an attribute of the stand-in imports the module."""

    def __init__(self, name: str, functions: tuple[str, ...] = (), types: Mapping[str, Any] | None = None) -> None:
        super().__init__(name)
        vars(self).update(types or {})
        for function in functions:
            setattr(self, function, self._forward(function))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real module. Raises AttributeError for a name that begins with `__`."""
        if name.startswith("__"):  # read by the import system, and by code that looks through sys.modules
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        vars(self).update(vars(importlib.import_module(self.__name__)))
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None

    def _forward(self, function: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.__getattr__(function)(*args, **kwargs)


def _list_date_types() -> dict[str, Any]:
    module = importlib.import_module("_datetime")
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def import_msgspec() -> None:
    """Import msgspec. Call this only in a process that runs only code of statecli."""
    if "msgspec" in sys.modules:
        return
    modules: dict[str, Any] = {
        name: _DeferredModule(name, functions) for name, functions in _DEFERRED_FUNCTIONS.items()
    }
    temporary: dict[str, Any] = {}
    if sys.version_info >= (3, 11):
        temporary["typing_extensions"] = None  # its import then fails, and msgspec uses typing instead
    # msgspec needs only the class uuid.UUID, and _uuid only makes new UUIDs from the time.
    temporary["_uuid"] = None
    if sys.version_info < (3, 12):
        # Before Python 3.12, the module datetime defines all classes in Python, and then replaces them by those in C.
        modules["datetime"] = _DeferredModule("datetime", types=_list_date_types())
    if sys.platform == "linux":
        # uuid imports platform only for the name of the system.
        temporary["platform"] = platform = ModuleType("platform")
        platform.system = lambda: "Linux"  # type: ignore[attr-defined]
    temporary = {name: module for name, module in temporary.items() if name not in sys.modules}
    sys.modules.update({name: module for name, module in modules.items() if name not in sys.modules} | temporary)
    try:
        import msgspec  # noqa: F401
    finally:
        for name in temporary:
            del sys.modules[name]
