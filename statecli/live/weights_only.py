"""Find names in a pickle that `torch.load(weights_only=True)` refuses. Nothing is loaded."""

from __future__ import annotations

import _compat_pickle
from collections.abc import Iterable

import torch


def list_refused_names(names: Iterable[str]) -> list[str]:
    """Return the names, such as `argparse.Namespace`, that the installed torch refuses in a pickle by default."""
    from torch import _weights_only_unpickler

    allowed_names = set(_weights_only_unpickler._get_allowed_globals())
    return [
        name
        for name in dict.fromkeys(names)
        if not {name, _rename_from_python_2(name)} & allowed_names and not _is_special(name)
    ]


def _rename_from_python_2(name: str) -> str:
    """Return the Python 3 name of a Python 2 name, because pickles of protocol 2 contain `__builtin__.set`."""
    module, _, attribute = name.rpartition(".")
    new_module_and_name = _compat_pickle.NAME_MAPPING.get((module, attribute))
    if new_module_and_name is not None:
        return ".".join(new_module_and_name)
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{attribute}"


def _is_special(name: str) -> bool:
    """Return True for storage classes, which are always allowed as part of a persistent id."""
    module, _, attribute = name.rpartition(".")
    return (
        module in ("torch", "torch.cuda", "torch.storage")
        and attribute.endswith("Storage")
        and hasattr(torch, "Storage")
    )
