"""Import a package's modules on first use, because most runs do not need them all, and some import torch or numpy.

A file imports the package at its top, and uses its modules as attributes: `live.build.build(…)`. The `__getattr__` of
the package imports the module. The package lists its modules of this kind for type checkers.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import ModuleType


def import_on_use(
    package: str, build_context: Callable[[], AbstractContextManager[object]] | None = None
) -> Callable[[str], ModuleType]:
    """Return a `__getattr__` for the package that imports the submodule with the requested name.

    `build_context` builds a context for the import, such as `require_numpy`. `__getattr__` raises AttributeError if the
    package has no such module, and passes on errors of the import.
    """

    def __getattr__(name: str) -> ModuleType:
        if name.startswith("_"):  # Python asks for names such as __path__; values._native needs no numpy
            raise AttributeError(name)
        if build_context is None:
            return _import_submodule(package, name)
        with build_context():
            return _import_submodule(package, name)

    return __getattr__


def _import_submodule(package: str, name: str) -> ModuleType:
    module = f"{package}.{name}"
    try:
        __import__(module)  # importlib would add a tenth to the shortest start
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from error
    return sys.modules[module]
