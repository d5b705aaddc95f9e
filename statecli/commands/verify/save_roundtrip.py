"""Save objects by `torch.save` and load them again, in memory.

The only module that unpickles, and only bytes written by the module itself from objects in memory.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from statecli.core.lazy_pattern import compile_on_use

_REFUSED_GLOBAL = compile_on_use(r"GLOBAL ([\w.]+)")


def copy_module(obj: Any) -> Any:
    """Copy an object of any class by pickling. Errors of its code and of pickle pass."""
    return torch.load(_write(obj), weights_only=False)


def copy_state_dict(obj: Any) -> tuple[Any, str | None]:
    """Copy a state_dict by a load with `weights_only=True`; return the copy and None.

    If the load is refused, return a copy by pickling and the name of the refused class ("" if unknown).
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
