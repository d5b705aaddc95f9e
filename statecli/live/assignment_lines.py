"""Record the source line of each attribute's assignment while the user's constructor runs.

`Origins.record()` wraps the four methods through which a module gets its state and restores them afterwards. An
entry is the innermost frame outside the torch package, so `self.fc = nn.Linear(2, 2)` is the origin of `fc` and of
`fc.weight` alike. If this frame is in an installed library, the innermost frame of the user's code is recorded too.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from statecli.core.model_state import Origin
from statecli.live.attribute_patch import replace_attribute
from statecli.live.installed_code import PACKAGE_FOLDER, format_path, is_installed_file
from statecli.live.object_attributes import get_own_dict
from statecli.live.source_line import SourceLine, get_current_line

_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIVE_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: Suffixes of files with wrappers of torch's functions; their lines are never the origin of an attribute.
_WRAPPER_FILES = ("typing_extensions.py", f"{os.sep}contextlib.py", f"{os.sep}functools.py")
_WRAPPED_METHODS = ("__setattr__", "register_buffer", "register_parameter", "add_module")


class Origins:
    """Source lines of attribute assignments, by module and attribute, recorded while `record()` is active.

    `typed_paths` maps absolute paths to the paths that the user typed.
    """

    def __init__(self, typed_paths: dict[str, str] | None = None) -> None:
        self._typed_paths = typed_paths or {}
        self._lines: dict[int, tuple[weakref.ref[nn.Module], dict[str, SourceLine]]] = {}
        # Lines by class and name, for copies made by copy.deepcopy, because such copies run no setter.
        self._by_class: dict[tuple[int, str], SourceLine] = {}
        #: Lines of the user's code that ran a library's assignment.
        self._callers: dict[tuple[int, str], SourceLine] = {}
        self._repeated: set[tuple[int, str]] = set()
        self._repeated_by_class: set[tuple[int, str]] = set()
        self._is_continued = False

    def continue_for_instance(self) -> Origins:
        """Return origins for another instance of the model. They begin with the lines recorded for each class."""
        continued_origins = Origins(self._typed_paths)
        continued_origins._by_class = dict(self._by_class)
        continued_origins._is_continued = True
        return continued_origins

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record attribute assignments until the block ends. The methods of `nn.Module` are restored in any case."""
        with ExitStack() as stack:
            for name in _WRAPPED_METHODS:
                stack.enter_context(replace_attribute(nn.Module, name, self._wrap(getattr(nn.Module, name))))
            yield

    def _wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        origins, is_setattr = self, method.__name__ == "__setattr__"

        # Only `self` is bound, because `name` may be a keyword argument: register_buffer(name="x", ...).
        @functools.wraps(method, ("__name__", "__qualname__", "__doc__"))
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = args[0] if args else kwargs.get("name")
            was_there = is_setattr and type(name) is str and name in get_own_dict(self)
            result = method(self, *args, **kwargs)
            if type(name) is str:
                if was_there:
                    origins._repeated.add((id(self), name))
                    origins._repeated_by_class.add((id(type(self)), name))
                origins._note(self, name, sys._getframe(1))
            return result

        return wrapper

    def _note(self, module: nn.Module, name: str, frame: FrameType | None) -> None:
        # An override such as `def __setattr__(self, name, value): super().__setattr__(name, value)` is skipped as well.
        while frame is not None and (
            is_skipped_frame(frame.f_code.co_filename) or frame.f_code.co_name in _WRAPPED_METHODS
        ):
            frame = frame.f_back
        if frame is None:
            return
        entry = self._lines.get(id(module))
        if entry is None or entry[0]() is not module:
            entry = (weakref.ref(module), {})
            self._lines[id(module)] = entry
        # The last assignment wins, because its value is the present value.
        place = entry[1][name] = get_current_line(frame)
        caller = _find_caller(frame) if is_installed_file(place.file) else None
        if caller is not None:
            self._callers[id(module), name] = caller
        else:
            self._callers.pop((id(module), name), None)
        if getattr(sys.modules.get(type(module).__module__), "__file__", None) == place.file:
            self._by_class[id(type(module)), name] = place

    def locate(self, module: nn.Module, name: str) -> SourceLine | None:
        """Return the file and line of the last assignment to attribute `name`, or None if unknown."""
        entry = self._lines.get(id(module))
        if entry is None or entry[0]() is not module:
            return self._by_class.get((id(type(module)), name))
        by_class = self._by_class.get((id(type(module)), name)) if self._is_continued else None
        return entry[1].get(name, by_class)

    def locate_caller(self, module: nn.Module, name: str) -> SourceLine | None:
        """Return the user's line that called the library function which assigned the attribute, or None if unknown."""
        entry = self._lines.get(id(module))
        is_known = entry is not None and entry[0]() is module and name in entry[1]
        return self._callers.get((id(module), name)) if is_known else None

    def is_repeated(self, module: nn.Module, name: str) -> bool:
        """Return True if attribute `name` was assigned repeatedly. An unknown instance has the record of its class."""
        entry = self._lines.get(id(module))
        if entry is None or entry[0]() is not module:
            return (id(type(module)), name) in self._repeated_by_class
        return (id(module), name) in self._repeated

    def describe(self, place: SourceLine | None) -> Origin | None:
        """Return the source line `place` with the file name as shown to users, or None for a line of statecli."""
        if place is None or place.file.startswith(("<", PACKAGE_FOLDER)):
            return None  # for example a class of torch, which statecli itself calls
        return Origin(format_path(place.file, self._typed_paths), place.line)


def _find_caller(frame: FrameType | None) -> SourceLine | None:
    """Return file and line of the innermost frame in the user's code, or None if statecli called the library itself."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(PACKAGE_FOLDER) and filename != __file__:
            return None
        if not (filename.startswith("<") or is_skipped_frame(filename) or is_installed_file(filename)):
            return get_current_line(frame)
        frame = frame.f_back
    return None


def is_skipped_frame(filename: str) -> bool:
    """Return True for files of torch, statecli or wrapper modules. Their lines are never an attribute's origin."""
    return filename.startswith((_TORCH_FOLDER, _LIVE_FOLDER)) or filename.endswith(_WRAPPER_FILES)
