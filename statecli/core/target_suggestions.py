"""What to type instead of a target that is not there, or that is a Python file without a class."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from statecli.core.python_names import list_model_classes

#: Classes of a file that a message names.
MAX_CLASSES = 5
#: `package.Class`, with a call behind it: a class is named after a colon.
_DOTTED = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.\w+)*)\.(?P<name>[A-Za-z_]\w*)(?P<call>\(.*\))?\Z", re.DOTALL)


def suggest_for_missing(path: str) -> str:
    """Return `; did you mean weights.pt?` or how to name a class, for a path that does not exist; else ""."""
    if os.path.isfile(f"{path}.py"):
        return f"; name a class of the file {path}.py: {_join_specs(f'{path}.py')}"
    if path.isidentifier() and _is_module(path):
        return f"; {path} is a Python package: name a class or function in the package, such as {path}:CLASS"
    dotted = _DOTTED.match(path)
    if dotted and not dotted["module"].startswith(".") and _is_module(dotted["module"].partition(".")[0]):
        return f"; name a class or function after a colon: {dotted['module']}:{dotted['name']}{dotted['call'] or ''}"
    from difflib import get_close_matches

    folder, name = os.path.split(path)
    try:
        near = get_close_matches(name, os.listdir(folder or os.curdir), n=1)
    except OSError:
        return ""
    return f"; did you mean {os.path.join(folder, near[0])}?" if near else ""


def describe_python_file(path: str) -> str:
    """Return `is a Python file, not a checkpoint; name a class in it: net.py:Net`."""
    return f"is a Python file, not a checkpoint; name a class in it: {_join_specs(path)}"


def _join_specs(path: str) -> str:
    specs = list(_list_specs(path))
    more = f" or one of {len(specs) - MAX_CLASSES} more" if len(specs) > MAX_CLASSES else ""
    return f"{', '.join(specs[:MAX_CLASSES])}{more}" if specs else f"{path}:CLASS"


def _list_specs(path: str) -> Iterator[str]:
    """Yield `net.py:Net(size=...)` for each module class of a file."""
    for name, required in list_model_classes(path):
        call = f"({', '.join(f'{argument}=...' for argument in required)})" if required else ""
        yield f"{path}:{name}{call}"


def _is_module(name: str) -> bool:
    """Return True if Python could import the top-level module; nothing is imported."""
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
