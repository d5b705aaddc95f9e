"""Where a tensor comes from that an operator was given on the wrong device, as far as it is known."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import FrameType, ModuleType
from typing import Any

import torch

from statecli.live import origin
from statecli.live.origin import _passed_over
from statecli.live.spec import parse

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

Place = tuple[str, int]


class How(Enum):
    """What forward did at a line that gave a tensor.

    It made one of nothing, or drew it with a generator of its own; it copied one off the device; or it computed it from
    others, of which it is not known where they come from.
    """

    MADE = "made"
    DRAWN = "drawn"
    BROUGHT = "brought"
    COMPUTED = "computed"


@dataclass(frozen=True)
class Source:
    """`fqn` names a tensor of the model, `of_file` a variable of a file and that file; else forward had it at `place`.

    `derived`: it was computed from that tensor. Without any of the three it is not known. `beside` is where the others
    come from that it was computed from and that CUDA would refuse beside the first, were the first on the device.
    """

    fqn: str | None = None
    of_file: tuple[str, str] | None = None
    place: Place | None = None
    how: How = How.MADE
    derived: bool = False
    beside: tuple[Source, ...] = ()

    @property
    def each(self) -> tuple[Source, ...]:
        """It and what was computed with it, one by one: all of them have to move."""
        return (replace(self, beside=()), *self.beside) if self.beside else (self,)

    def along(self, others: Iterable[Source]) -> Source:
        """The same, computed from others too."""
        fresh = (replace(one, derived=True) for other in others for one in other.each)
        known = {(one.fqn, one.of_file, one.place): one for one in (*self.each, *fresh)[::-1]}
        del known[self.fqn, self.of_file, self.place]
        return replace(self, beside=tuple(known.values())[::-1])


class Fault(Enum):
    """What is wrong with devices in a call.

    Tensors of several meet; a generator is not where it is to draw; an argument that has to be on the CPU is not; an
    array is asked of what is not on the CPU; torch says itself that devices differ, and not of which tensors.
    """

    MIXED = "mixed"
    GENERATOR = "generator"
    NOT_ON_CPU = "not on cpu"
    NUMPY = "numpy"
    UNTOLD = "untold"


@dataclass(frozen=True)
class Mismatch:
    """One operator that got `source` on `device`, where it cannot be.

    `other` is the name of a tensor that was where it should be, or of the argument that is not, or "".
    """

    source: Source
    device: str
    other: str
    operator: str
    place: Place | None
    fault: Fault = Fault.MIXED

    def is_as(self, known: Mismatch) -> bool:
        """Whether both are one mistake: of a tensor of the model in any line, of all else in that line."""
        if self.source.fqn is None or self.fault is not Fault.MIXED:
            return (self.source, self.place, self.fault) == (known.source, known.place, known.fault)
        return self.source.fqn == known.source.fqn


class Refused(RuntimeError):
    """What CUDA would raise; a model may catch it."""

    def __init__(self, words: str, mismatches: Iterable[Mismatch]) -> None:
        super().__init__(words)
        self.mismatches = frozenset(mismatches)


def line() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours."""
    return next(_theirs(sys._getframe(1)), None)


def _theirs(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if is_theirs(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def is_theirs(filename: str) -> bool:
    """Whether it is neither torch's nor ours."""
    return not (filename.startswith((_PACKAGE, "<")) or _passed_over(filename))


def place(frame: FrameType | None) -> Place | None:
    """The file and the line that `frame` is at."""
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def local(frame: FrameType | None, tensor: torch.Tensor) -> str | None:
    """The local variable that holds `tensor` in `frame`."""
    names = {} if frame is None else frame.f_locals
    return next((name for name, value in names.items() if value is tensor), None)


def of_file(tensor: torch.Tensor) -> tuple[str, str] | None:
    """The variable of a file whose code is running, or of one that it imports, that holds `tensor`; and that file."""
    looked_in: set[int] = set()
    for frame in _theirs(sys._getframe(1)):
        for scope in (frame.f_globals, *_imported(frame.f_globals)):
            name = None if id(scope) in looked_in else _variable(scope, tensor)
            if name is not None:
                return name, str(scope.get("__file__", frame.f_code.co_filename))
            looked_in.add(id(scope))
    return None


def _imported(scope: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the modules define that a file imports, where they are files of the user's."""
    for value in list(scope.values()):
        names = vars(value) if issubclass(type(value), ModuleType) else {}
        filename = names.get("__file__")
        if type(filename) is str and is_theirs(filename) and "-packages" not in filename:
            yield names


def _variable(scope: dict[str, Any], tensor: torch.Tensor) -> str | None:
    """The variable that holds `tensor`, or the list or dict that does, with its key."""
    for name, value in list(scope.items()):
        if value is tensor:
            return name
        kind = type(value)
        if kind not in (list, tuple, dict) or len(value) > _MANY:
            continue
        for key, one in list(value.items()) if kind is dict else enumerate(value):
            if one is tensor:
                return f"{name}[{key!r}]"
    return None


#: Entries. A larger table of a file is not looked through.
_MANY = 1_000


def shown(filename: str, target: str) -> str:
    """A file as the user typed it in `target`, or as short as it can be found again."""
    spec = parse(target)
    typed = {os.path.abspath(spec.module): spec.module} if spec is not None and spec.is_file else {}
    return origin.display(filename, typed)
