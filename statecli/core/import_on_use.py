"""Import the modules of a package when they are first used, because they need numpy or torch.

The two libraries take longer to import than most commands take, and may not be installed. A file imports the package at
its top, and uses its modules as attributes: `values.stats.fill_stats(…)`. The package's `__getattr__` imports them.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from types import ModuleType


def import_submodule(package: str, name: str) -> ModuleType:
    """Return the module of this name in the package, for a package's `__getattr__`.

    Raises AttributeError if the package has no such module, and what importing the module raises.
    """
    module = f"{package}.{name}"
    try:
        __import__(module)  # importlib would add a tenth to the shortest start
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from error
    return sys.modules[module]
