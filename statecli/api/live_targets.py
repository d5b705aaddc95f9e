"""Live objects as targets: a model, state_dict or optimizer is saved to a temporary file for the time of a call.

Commands read byte ranges of files, in several processes. So an object is written with `torch.save` to a temporary file,
in /dev/shm if its free memory is enough and in the temporary folder otherwise. In results and errors the name of the
object stands in place of the path.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from statecli.core.errors import MissingDependency, StateError, UsageError
from statecli.core.installed_package import install_extra
from statecli.core.model_state import ModelState, Oddity, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.targets.location import make_relative_name

_Value = TypeVar("_Value")

#: Format of an object in memory, in results.
_FORMAT_NAME = "in memory"
#: File system in memory on Linux.
_MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - each file is in a new folder of its own, of mode 0700
#: Largest number of bytes of the file besides the tensors: names, records of the archive.
_OVERHEAD_BYTES = 64 << 20
#: Largest depth at which tensors of a state_dict are counted.
_MAX_DEPTH = 8


def is_live_model(target: object) -> bool:
    """Return True for an nn.Module. Does not import torch, because nothing is a module before torch is imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def is_live(target: object) -> bool:
    """Return True for an object that `SavedObjects.save` writes: a model, an optimizer, a state_dict."""
    torch = sys.modules.get("torch")
    return isinstance(target, Mapping) or (
        torch is not None and isinstance(target, (torch.nn.Module, torch.optim.Optimizer))
    )


def name_object(target: object) -> str:
    """Return the name of an object in results: its class, or `state_dict`."""
    return "state_dict" if isinstance(target, Mapping) else type(target).__name__


class SavedObjects:
    """Live objects of a call, each saved in a file of its own."""

    def __init__(self) -> None:
        self._folders: list[str] = []
        #: Name of each object by the path of its file.
        self.names: dict[str, str] = {}

    def save(self, target: object) -> str:
        """Write the object and return the path of the file. Raises UsageError for an object that cannot be saved."""
        name = name_object(target)
        count = sum(used_name.partition(" (")[0] == name for used_name in {*self.names.values()})
        content = target if isinstance(target, Mapping) else get_state_dict(target)
        folder = tempfile.mkdtemp(prefix="statecli-", dir=_choose_folder(_count_bytes(content)))
        self._folders.append(folder)
        path = os.path.join(folder, f"{name}.pt")
        torch = _import_torch()
        try:
            torch.save(content, path)
        except Exception as error:  # the objects of a state_dict have code of their own
            raise UsageError(f"{name}: torch.save cannot write the object: {_get_first_line(error)}") from error
        display_name = name if not count else f"{name} ({count + 1})"
        self.names |= {path: display_name, make_relative_name(path): display_name}
        return path

    def close(self) -> None:
        """Remove the files of all saved objects."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def rename(self, value: _Value) -> _Value:
        """Return a result with the names of the objects in place of the paths."""
        # Longest first, because a relative name (`../../tmp/x.pt`) contains the absolute path.
        names = {path: self.names[path] for path in sorted(self.names, key=len, reverse=True)}
        renamed_value: _Value = _replace_texts(value, names) if names else value
        return renamed_value


@contextmanager
def use_saved_objects() -> Iterator[SavedObjects]:
    """Yield the saved objects, and remove their files after the block. Errors of the block name the objects."""
    saved_objects = SavedObjects()
    try:
        yield saved_objects
    except StateError as error:
        error.args = tuple(saved_objects.rename(argument) for argument in error.args)
        raise
    finally:
        saved_objects.close()


def get_state_dict(target: Any) -> Any:
    """Return the state_dict of a model or an optimizer. Raises UsageError if its own code fails."""
    try:
        return target.state_dict()
    except Exception as error:  # code of the user
        raise UsageError(f"{name_object(target)}: state_dict() raises {_get_first_line(error)}") from error


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        advice = install_extra("torch")
        raise MissingDependency(f"saving a state_dict needs torch, which is not installed: {advice}") from error
    return torch


def _get_first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _choose_folder(size: int) -> str | None:
    """Return a folder in memory that has room for `size` bytes, or None to use the temporary folder."""
    try:
        free_bytes = shutil.disk_usage(_MEMORY_FOLDER).free if os.access(_MEMORY_FOLDER, os.W_OK) else 0
    except OSError:
        return None
    return _MEMORY_FOLDER if free_bytes > size + _OVERHEAD_BYTES else None


def _count_bytes(content: object) -> int:
    """Return the bytes of all storages, each counted once."""
    torch: Any = sys.modules.get("torch")
    storages: dict[int, int] = {}
    pending: list[tuple[Any, int]] = [(content, 0)]
    while pending and torch is not None:
        value, depth = pending.pop()
        if isinstance(value, torch.Tensor):
            try:
                storage = value.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
            except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have no storage
                storages[id(value)] = value.numel() * value.element_size()
            except ValueError:  # a lazy parameter has no size yet
                continue
        elif depth < _MAX_DEPTH and isinstance(value, Mapping):
            pending += [(inner, depth + 1) for inner in value.values()]
        elif depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
            pending += [(inner, depth + 1) for inner in value]
    return sum(storages.values())


def _replace_texts(value: object, names: Mapping[str, str]) -> Any:
    """Return plain data with object names in place of paths. A tensor row without `damage` is returned unchanged."""
    if isinstance(value, str) and type(value) is str:
        for path, name in names.items():
            if path in value:
                value = value.replace(path, name)
        return value
    if isinstance(value, tuple) and type(value) is tuple:
        items = tuple(_replace_texts(item, names) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, dict):
        return {_replace_texts(key, names): _replace_texts(item, names) for key, item in value.items()}
    if isinstance(value, TensorInfo) and value.damage is None:
        return value
    if not isinstance(value, msgspec.Struct):
        return value
    pairs = {field: (old := getattr(value, field), _replace_texts(old, names)) for field in value.__struct_fields__}
    changed_fields = {field: new for field, (old, new) in pairs.items() if new is not old}
    if "target" in changed_fields and "format" in pairs:
        changed_fields["format"] = _FORMAT_NAME
    if "target" in changed_fields and isinstance(value, ModelState):  # nothing loads an object in memory
        oddities: tuple[Oddity, ...] = changed_fields.get("oddities", value.oddities)
        changed_fields["oddities"] = tuple(
            oddity for oddity in oddities if oddity.kind is not OddityKind.FOREIGN_GLOBALS
        )
    return replace(value, **changed_fields) if changed_fields else value


def refuse_executor(executor: object, targets: Sequence[object]) -> None:
    """Raise UsageError if a live object is given with an executor, because its file is only on this machine."""
    live = next((target for target in targets if is_live(target)), None)
    if executor is not None and live is not None:
        raise UsageError(
            f"executor: workers cannot read {name_object(live)}, because it is an object of this process; "
            "leave executor out, or save the object and pass its path"
        )


def refuse_class_options(arguments: Mapping[str, object], targets: Sequence[object]) -> None:
    """Raise UsageError for an option about building a class if every given target is a live object."""
    for argument in ("config_json", "trust_remote_code"):
        if arguments.get(argument) and all(target is None or is_live(target) for target in targets):
            live = name_object(targets[0])
            raise UsageError(
                f"{argument}: works only with a class, such as 'net.py:Net', but {live} is an object of this process; "
                "leave the argument out"
            )
