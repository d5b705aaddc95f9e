"""Through `torch.save` and back, in memory.

The one place that unpickles: it takes an object, not a file, and reads the bytes that it has itself just written.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch

_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def copy_module(obj: Any) -> Any:
    """A copy of `thing` by pickling, whatever its class. Raises what its own code and pickle do."""
    return torch.load(_write(obj), weights_only=False)


def copy_state_dict(obj: Any) -> tuple[Any, str | None]:
    """A copy of a state_dict as `weights_only=True` reads it, and None.

    Where that refuses it, a copy by pickling and the name of the class it refuses ("" where it names none).
    """
    file = _write(obj)
    try:
        return torch.load(file, weights_only=True), None
    except pickle.UnpicklingError as error:
        match = _REFUSED_GLOBAL.search(str(error))
    file.seek(0)
    return torch.load(file, weights_only=False), match[1].rpartition(".")[2] if match else ""


def _write(obj: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return file
