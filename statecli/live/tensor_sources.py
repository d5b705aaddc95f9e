"""Find where a tensor on the wrong device comes from, and the user's line that runs the operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from statecli.live.assignment_lines import is_skipped_frame
from statecli.live.installed_code import PACKAGE_FOLDER, format_path, is_installed_file
from statecli.live.source_line import SourceLine, get_current_line
from statecli.live.spec import parse_spec

#: Folder of statecli's files that user code may call, such as patches of torch. Statecli's other files call user code.
_LIVE_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep

#: For each frame, its code and the index of the instruction in progress.
CallStack = tuple[tuple[CodeType, int], ...]


class FileVariable(NamedTuple):
    """A variable that holds a tensor, such as `tables['cos']`, and its file."""

    name: str
    file: str


class How(Enum):
    """Way in which a line of forward got a tensor: created, drawn with a generator, copied off the device, or computed.

    COMPUTED: computed from tensors of unknown source.
    """

    MADE = "made"
    DRAWN = "drawn"
    BROUGHT = "brought"
    COMPUTED = "computed"


@dataclass(frozen=True)
class TensorSource:
    """Origin of a tensor. The origin is unknown if `fqn`, `file_variable` and `place` are None.

    Attributes:
        fqn: Name of a tensor of the model.
        file_variable: The variable of a file that holds the tensor.
        place: The line of forward that gave the tensor.
        derived: Whether the tensor was computed from this source.
        companions: Sources of further inputs, which CUDA would refuse if only the first input were on the device.
    """

    fqn: str | None = None
    file_variable: FileVariable | None = None
    place: SourceLine | None = None
    how: How = How.MADE
    derived: bool = False
    companions: tuple[TensorSource, ...] = ()

    @property
    def all_sources(self) -> tuple[TensorSource, ...]:
        """This source and its `companions`. The tensors of all these sources must move to the device."""
        return (replace(self, companions=()), *self.companions) if self.companions else (self,)

    def combine_with(self, other_sources: Iterable[TensorSource]) -> TensorSource:
        """Return the source of a tensor that was also computed from tensors of other sources."""
        fresh = (replace(source, derived=True) for other_source in other_sources for source in other_source.all_sources)
        sources_by_origin = {
            (source.fqn, source.file_variable, source.place): source for source in (*self.all_sources, *fresh)[::-1]
        }
        del sources_by_origin[self.fqn, self.file_variable, self.place]
        return replace(self, companions=tuple(sources_by_origin.values())[::-1])


class Fault(Enum):
    """Kind of device error in a call.

    MIXED: tensors of several devices. GENERATOR: the generator is on another device than the drawn values. NOT_ON_CPU:
    an argument needed on the CPU. NUMPY: a tensor on a GPU is read as an array. UNTOLD: torch reports different devices
    without naming the tensors.
    """

    MIXED = "mixed"
    GENERATOR = "generator"
    NOT_ON_CPU = "not on cpu"
    NUMPY = "numpy"
    UNTOLD = "untold"


@dataclass(frozen=True)
class Mismatch:
    """Error in an operator: a tensor that comes from `source` is on the wrong `device`.

    `other` is the name of a tensor on the right device, of the argument on the wrong device, or "".
    """

    source: TensorSource
    device: str
    other: str
    operator: str
    place: SourceLine | None
    fault: Fault = Fault.MIXED

    def is_same_mistake_as(self, other: Mismatch) -> bool:
        """Return True if both mismatches have the same cause: the same model tensor, or the same source and line."""
        if self.source.fqn is None or self.fault is not Fault.MIXED:
            return (self.source, self.place, self.fault) == (other.source, other.place, other.fault)
        return self.source.fqn == other.source.fqn


class CudaRefusal(RuntimeError):
    """The error that CUDA would raise. A model may catch the error."""

    def __init__(self, message: str, mismatches: Iterable[Mismatch], stack: CallStack) -> None:
        super().__init__(message)
        self.mismatches = frozenset(mismatches)
        self.stack = stack


def find_user_frame() -> FrameType | None:
    """Return the innermost frame of user code, or None if statecli itself called torch."""
    return next(_iter_called_frames(sys._getframe(1)), None)


def find_user_place() -> SourceLine | None:
    """Return file and line of the innermost frame of user code, or None if there is none."""
    return get_place(find_user_frame())


def list_user_calls() -> CallStack:
    """Return (code, instruction index) of each frame of user code that statecli called, the innermost first."""
    return tuple((frame.f_code, frame.f_lasti) for frame in _iter_called_frames(sys._getframe(1)))


def _iter_called_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of user code up to the call by statecli. Callers of statecli do not belong to the model."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.startswith(PACKAGE_FOLDER) and not filename.startswith(_LIVE_FOLDER):
            return
        if is_user_code(filename):
            yield frame
        frame = frame.f_back


def _iter_user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def is_user_code(filename: str) -> bool:
    """Return True if the file belongs to neither torch nor statecli."""
    return not (filename.startswith((PACKAGE_FOLDER, "<")) or is_skipped_frame(filename))


def get_place(frame: FrameType | None) -> SourceLine | None:
    """Return file and line of `frame`."""
    return None if frame is None else get_current_line(frame)


def find_local_name(frame: FrameType | None, tensor: torch.Tensor) -> str | None:
    """Return the name of the local variable that holds `tensor` in `frame`."""
    names = {} if frame is None else frame.f_locals
    return next((name for name, value in names.items() if value is tensor), None)


def find_file_variable(tensor: torch.Tensor) -> FileVariable | None:
    """Find the variable that holds `tensor` in the running user files, or in user files that they import."""
    looked_in: set[int] = set()
    for frame in _iter_user_frames(sys._getframe(1)):
        for scope in (frame.f_globals, *_iter_imported_globals(frame.f_globals)):
            name = None if id(scope) in looked_in else _find_variable_name(scope, tensor)
            if name is not None:
                return FileVariable(name, str(scope.get("__file__", frame.f_code.co_filename)))
            looked_in.add(id(scope))
    return None


def find_module_variable(tensor: torch.Tensor, module: torch.nn.Module) -> FileVariable | None:
    """Find the variable that holds `tensor` in the files of the model's classes, or in user files that they import."""
    for part in module.modules():
        scope = vars(sys.modules.get(type(part).__module__, sys))
        filename = scope.get("__file__")
        if type(filename) is not str or not is_user_code(filename) or is_installed_file(filename):
            continue
        for names in (scope, *_iter_imported_globals(scope)):
            name = _find_variable_name(names, tensor)
            if name is not None:
                return FileVariable(name, str(names.get("__file__", filename)))
    return None


def _iter_imported_globals(scope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the globals of each user module that a file has imported."""
    for value in list(scope.values()):
        names = vars(value) if issubclass(type(value), ModuleType) else {}
        filename = names.get("__file__")
        if type(filename) is str and is_user_code(filename) and not is_installed_file(filename):
            yield names


def _find_variable_name(scope: dict[str, Any], tensor: torch.Tensor) -> str | None:
    """Return the variable or item that holds `tensor`, such as `tables['cos']`, or None if there is none."""
    for name, value in list(scope.items()):
        if value is tensor:
            return name
        kind = type(value)
        if kind not in (list, tuple, dict) or len(value) > _MAX_TABLE_ENTRIES:
            continue
        for key, item in list(value.items()) if kind is dict else enumerate(value):
            if item is tensor:
                return f"{name}[{key!r}]"
    return None


#: Largest number of entries of a list or dict of a file that is searched.
_MAX_TABLE_ENTRIES = 1_000


def format_file(filename: str, target: str) -> str:
    """Return a file name as typed in `target`, or else relative to the current folder or to a sys.path entry."""
    spec = parse_spec(target)
    typed_paths = {os.path.abspath(spec.module): spec.module} if spec is not None and spec.is_file else {}
    return format_path(filename, typed_paths)
