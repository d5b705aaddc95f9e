"""What targets are held to, and a target beside it as a diff: a class that is to load it, and another checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from statecli import modules, target
from statecli.comparison.result import Diff
from statecli.comparison.run import Request, of_states
from statecli.kinds import MODEL_KINDS
from statecli.stamps import Stamp, stamps
from statecli.state import Kind, ModelState

if TYPE_CHECKING:
    from statecli.modules.build import Built


class Side(msgspec.Struct, frozen=True):
    """What was read: the module of a class; of a checkpoint the stamps of its files, from before."""

    text: str
    state: ModelState
    built: Built | None = None
    stamps: Mapping[str, Stamp] = {}

    @property
    def is_lazy(self) -> bool:
        """Whether a load gives the module shapes, which no other target may meet."""
        return self.built is not None and any(tensor.shape is None for tensor in self.state.tensors)


def read(text: str, init_device: str) -> Side:
    """The class or the checkpoint that is named. Raises StateError."""
    spec = target.spec_of(text)
    if spec is None:
        seen = stamps([target.split(text)[0]])
        return Side(text, target.checkpoint(text), None, seen)
    built = target.model(spec, init_device=init_device, values=False)
    return Side(text, modules.read(built, text), built)


def to_class(side: Side, model: Side) -> Diff:
    """What a strict load of the checkpoint into the class says. Raises StateError."""
    return _compared(side, model, Request(side.text, model.text, values=False))


def to_checkpoint(side: Side, reference: Side, *, values: bool, jobs: int = 0) -> Diff:
    """How the checkpoint differs from `reference`; in its values too where `values`. Raises StateError."""
    return _compared(reference, side, Request(reference.text, side.text, values=values, renames=False, jobs=jobs))


def _compared(before: Side, after: Side, request: Request) -> Diff:
    built = {side.text: side.built for side in (before, after) if side.built is not None}
    return of_states(request, before.state, after.state, built, {**before.stamps, **after.stamps})


#: Why a file that a walk found is held to nothing.
EMPTY = "holds no tensor"
OPTIMIZER = "holds an optimizer's state, no model"
OTHERS = "holds no model's tensors"
NO_PART = "lies beside a model and is no part of it: name the file to have it held"
WHYS = frozenset([EMPTY, OPTIMIZER, OTHERS, NO_PART])


def why_not(state: ModelState, *, beside: bool) -> str | None:
    """Why the state of a file that a walk found is held to nothing; None where it holds a model.

    `beside`: it lies in the folder of a model that is a target itself.
    """
    kinds = {tensor.kind for tensor in state.tensors}
    if not kinds.intersection(MODEL_KINDS):
        return OTHERS if kinds - {Kind.OPTIMIZER} else OPTIMIZER if kinds else EMPTY
    return NO_PART if beside else None


def is_inside(path: str, folders: Collection[str]) -> bool:
    """Whether it lies in one of these folders, which are absolute, however deep."""
    return bool(folders) and any(str(above) in folders for above in PurePath(os.path.abspath(path)).parents)
