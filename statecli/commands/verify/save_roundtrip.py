"""Through `torch.save` and back, in memory.

The one place that unpickles: it takes an object, not a file, and reads the bytes that it has itself just written.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def module(thing: Any) -> Any:
    """A copy of `thing` by pickling, whatever its class. Raises what its own code and pickle do."""
    return torch.load(_written(thing), weights_only=False)


def state(thing: Any) -> tuple[Any, str | None]:
    """A copy of a state_dict as `weights_only=True` reads it, and None.

    Where that refuses it, a copy by pickling and the name of the class it refuses ("" where it names none).
    """
    file = _written(thing)
    try:
        return torch.load(file, weights_only=True), None
    except pickle.UnpicklingError as error:
        found = _REFUSED.search(str(error))
    file.seek(0)
    return torch.load(file, weights_only=False), found[1].rpartition(".")[2] if found else ""


def _written(thing: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file
