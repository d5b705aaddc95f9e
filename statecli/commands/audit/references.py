"""What targets are held to, and a target beside it as a diff: a class that is to load it, and another checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from statecli import formats, live
from statecli.commands.diff.pairing import pair_sections
from statecli.commands.diff.result import Diff
from statecli.commands.diff.run import SETTINGS_NAME, VALUES_INCONCLUSIVE, Request, compare_states
from statecli.core.errors import MalformedError, UnreadableError, UsageError
from statecli.core.kinds import MODEL_KINDS
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import Kind, ModelState, Oddity
from statecli.storage import checkpoint_folder, files
from statecli.storage.file_version import FileVersion
from statecli.targets import load

if TYPE_CHECKING:
    from statecli.live.built_model import BuiltModel


class Side(msgspec.Struct, frozen=True):
    """What was read: the module of a class; of a checkpoint the stamps of its files, from before."""

    text: str
    state: ModelState
    built: BuiltModel | None = None
    stamps: Mapping[str, FileVersion | None] = {}

    @property
    def is_lazy(self) -> bool:
        """Whether a load gives the module shapes, which no other target may meet."""
        return self.built is not None and any(tensor.shape is None for tensor in self.state.tensors)


def read(text: str, init_device: str) -> Side:
    """The class or the checkpoint that is named. Raises StateError."""
    spec = load.spec_of(text)
    if spec is None:
        text = _only_model(text) if files.is_folder(text) else text
        with files.record_opened_files() as opened:
            state = load.checkpoint(text)
        return Side(text, state, None, opened)
    built = load.model(spec, init_device=init_device, values=False)
    return Side(text, live.read(built, text), built)


def _only_model(folder: str) -> str:
    """The file of a folder that has no index and is the only one with a model in it; else the folder itself."""
    try:
        formats.members(folder)
    except UnreadableError as error:
        # One whose index or shards contradict each other is that, whatever its files are.
        paths = [] if error.rule else [files.join(folder, name) for name in sorted(files.list_names(folder))]
        found = [path for path in paths if files.is_file(path) and _holds_model(path)]
        return found[0] if len(found) == 1 else folder
    return folder


def _holds_model(path: str) -> bool:
    """Or may: of what is damaged nobody can tell."""
    try:
        return why_not(load.whole(path), beside=False) is None
    except UnreadableError as error:
        return isinstance(error, MalformedError)


def to_class(side: Side, model: Side) -> Diff:
    """What a strict load of the checkpoint into the class says. Raises StateError."""
    return _told(_compared(side, model, Request(side.text, model.text, values=False)), side)


def to_checkpoint(side: Side, reference: Side, *, values: bool, jobs: int = 0) -> Diff:
    """How the checkpoint differs from `reference`; in its values too where `values`.

    Raises UsageError where both hold models and which is which cannot be told, and StateError.
    """
    beside = _refuse_apart(reference.state, side.state)
    asked = Request(reference.text, side.text, values=values, renames=False, prefixes=True, jobs=jobs)
    found = _told(_compared(reference, side, asked), side)
    return msgspec.structs.replace(found, notes=(*found.notes, *beside))


def _refuse_apart(before: ModelState, after: ModelState) -> list[Oddity]:
    """A note of what of the reference has no counterpart; UsageError where its models have none, and would all miss."""
    left, right = (models(state) for state in (before, after))
    pairs, notes = pair_sections(before, after)
    apart = [note.message for note in notes if note.kind is OddityKind.SECTIONS_APART]
    if apart and left and right and not set(left).intersection(pairs):
        raise UsageError(apart[0])
    alone = [section for section in before.sections if section not in pairs]
    message = f"{', '.join(alone)} of {before.target}: {after.target} has no counterpart"
    return [Oddity(OddityKind.SECTIONS_LEFT_OUT.value, message)] if alone else []


def models(state: ModelState) -> list[str]:
    """The sections that hold a model's tensors."""
    return list(dict.fromkeys(tensor.section for tensor in state.tensors if tensor.kind in MODEL_KINDS))


def _told(diff: Diff, side: Side) -> Diff:
    """The diff. Raises UnreadableError for what could not be compared in it, which no rule would say: that is no pass.

    What is damaged in the target itself makes it fail without this; of values rules say what they cannot tell.
    """
    known = {tensor.damage for tensor in side.state.tensors}
    for one in diff.broken:
        if one.fqn != SETTINGS_NAME and one.message not in known and VALUES_INCONCLUSIVE not in one.message:
            raise UnreadableError(one.message)
    return diff


def _compared(before: Side, after: Side, request: Request) -> Diff:
    built = {side.text: side.built for side in (before, after) if side.built is not None}
    return compare_states(request, before.state, after.state, built, {**before.stamps, **after.stamps})


#: Why a file that a walk found is held to nothing.
EMPTY = "holds no tensor"
OPTIMIZER = "holds an optimizer's state, no model"
OTHERS = "holds no model's tensors"
NO_PART = "lies beside a model and is no part of it: name the file to have it held"
INNER = "lies in the folder of a model and is no step of its training: name the folder to have it held"
#: Of these nothing is said of a model.
NO_MODEL = frozenset([EMPTY, OPTIMIZER, OTHERS])
WHYS = NO_MODEL | {NO_PART, INNER}


def why_not(state: ModelState, *, beside: bool) -> str | None:
    """Why the state of a file that a walk found is held to nothing; None where it holds a model.

    `beside`: it lies in the folder of a model that is a target itself.
    """
    kinds = {tensor.kind for tensor in state.tensors}
    if not kinds.intersection(MODEL_KINDS):
        return OTHERS if kinds - {Kind.OPTIMIZER} else OPTIMIZER if kinds else EMPTY
    return NO_PART if beside else None


def is_step(folder: str) -> bool:
    """Whether it is a step of a training, with all of the model: those lie in the folder of the model that was kept."""
    return any(checkpoint_folder.COMPANIONS.match(name) for name in files.list_names(folder))


def is_inside(path: str, folders: Collection[str]) -> bool:
    """Whether it lies in one of these folders, which are absolute, however deep."""
    return bool(folders) and any(above in folders for above in files.iter_parents(files.make_absolute(path)))
