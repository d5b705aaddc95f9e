"""Save objects by `torch.save` and load them again, in memory.

Only this module unpickles. It unpickles only bytes that it wrote itself from objects in memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from statecli.core.lazy_pattern import compile_on_use

_REFUSED_GLOBAL = compile_on_use(r"GLOBAL ([\w.]+)")


def copy_module(module: nn.Module) -> Any:
    """Copy a module by pickling. The class's code decides the type of the result, and may raise any error."""
    return torch.load(_write(module), weights_only=False)


class StateDictCopy(NamedTuple):
    """Copy of a state_dict. `refused_class`: name of a class refused by weights_only=True ("" if unknown), or None."""

    state: Any
    refused_class: str | None


def copy_state_dict(state: Mapping[str, Any]) -> StateDictCopy:
    """Copy a state_dict by a load with `weights_only=True`, or by pickling if that load is refused."""
    file = _write(state)
    try:
        return StateDictCopy(torch.load(file, weights_only=True), None)
    except pickle.UnpicklingError as error:
        match = _REFUSED_GLOBAL.search(str(error))
    file.seek(0)
    return StateDictCopy(torch.load(file, weights_only=False), match[1].rpartition(".")[2] if match else "")


def _write(obj: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return file
