"""Read the reference (a class or a checkpoint), and compare targets with the reference.

Values are compared only if a policy asks for changes, so that an audit of metadata imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from statecli import live
from statecli.commands.diff.pairing import pair_sections
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Diff, Inconclusive
from statecli.commands.diff.run import compare_states
from statecli.core.errors import UnreadableError, UsageError
from statecli.core.model_state import Kind, ModelState, Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.core.parameter_or_buffer import MODEL_KINDS, list_model_sections
from statecli.storage import checkpoint_folder, files
from statecli.storage.file_version import FileVersion
from statecli.targets import load

if TYPE_CHECKING:
    from statecli.live.built_model import BuiltModel


class ReferenceSide(msgspec.Struct, frozen=True):
    """One side of a comparison. A class has its built module; a checkpoint has the versions of its files."""

    text: str
    state: ModelState
    built_model: BuiltModel | None = None
    versions: Mapping[str, FileVersion | None] = {}

    @property
    def is_lazy(self) -> bool:
        """Return whether the first load decides the module's shapes. Only one target may use this module."""
        return self.built_model is not None and any(tensor.shape is None for tensor in self.state.tensors)


def read_side(text: str, init_device: str | None) -> ReferenceSide:
    """Read the class or checkpoint named by the text. Raises StateError."""
    spec = load.find_class_spec(text)
    if spec is None:
        with files.record_opened_files() as opened_files:
            state = load.read_checkpoint(text)
        return ReferenceSide(text, state, None, opened_files)
    built_model = live.build.build(spec, init_device=init_device)
    return ReferenceSide(text, live.model_reader.read(built_model, text), built_model)


def compare_with_class(side: ReferenceSide, model: ReferenceSide) -> Diff:
    """Return the result of a strict load of the checkpoint into the class. Raises StateError."""
    return _compare(side, model, Request(side.text, model.text, values=False), target=side)


def compare_with_checkpoint(side: ReferenceSide, reference: ReferenceSide, *, values: bool) -> Diff:
    """Compare the checkpoint with `reference`; if `values` is True, compare the values too.

    Raises UsageError if the models to compare are ambiguous, and StateError.
    """
    notes = _check_sections(reference.state, side.state)
    request = Request(reference.text, side.text, values=values, renames=False, prefixes=True)
    diff = _compare(reference, side, request, target=side)
    return msgspec.structs.replace(diff, notes=(*diff.notes, *notes))


def _check_sections(before: ModelState, after: ModelState) -> list[Oddity]:
    """Return a note about sections that only the reference has. Raises UsageError if no models can be paired."""
    left, right = (list_model_sections(state) for state in (before, after))
    sections = pair_sections(before, after)
    ambiguous = [note.message for note in sections.notes if note.kind is OddityKind.SECTIONS_APART]
    if ambiguous and left and right and not set(left).intersection(sections.by_section):
        raise UsageError(ambiguous[0])
    unpaired_sections = [section for section in before.sections if section not in sections.by_section]
    names = ", ".join(unpaired_sections)
    message = f"statecli did not compare these sections, because only {before.target} has them: {names}"
    return [Oddity(OddityKind.SECTIONS_LEFT_OUT.value, message)] if unpaired_sections else []


def _compare(before: ReferenceSide, after: ReferenceSide, request: Request, *, target: ReferenceSide) -> Diff:
    """Return the differences. Raises UnreadableError if a tensor cannot be compared and no rule will report this.

    Damage in the target itself makes the target fail elsewhere; rules report inconclusive values.
    """
    built_models = {side.text: side.built_model for side in (before, after) if side.built_model is not None}
    diff = compare_states(request, before.state, after.state, built_models, {**before.versions, **after.versions})
    damages = {tensor.damage for tensor in target.state.tensors}
    for pair in diff.broken:
        if not isinstance(pair, Inconclusive) and pair.message not in damages:
            raise UnreadableError(pair.message)
    return diff


#: Reasons why a file found by a walk is not compared with the reference.
NO_TENSOR = "contains no tensors"
ONLY_OPTIMIZER = "contains only the state of an optimizer"
NO_MODEL_TENSOR = "contains no tensors of a model"
NOT_PART_OF_MODEL = "is next to a model but not part of the model; to compare this file, give its path as a target"
INSIDE_MODEL_FOLDER = (
    "is in the folder of a model but is not a training step; to compare this folder, give its path as a target"
)
#: Reasons of files without a model.
REASONS_WITHOUT_MODEL = frozenset([NO_TENSOR, ONLY_OPTIMIZER, NO_MODEL_TENSOR])
NOT_COMPARED_REASONS = REASONS_WITHOUT_MODEL | {NOT_PART_OF_MODEL, INSIDE_MODEL_FOLDER}


def explain_not_compared(state: ModelState, *, in_model_folder: bool) -> str | None:
    """Return why a file found by a walk is not compared with the reference, or None for a model.

    `in_model_folder`: the file lies in the folder of a model among the targets.
    """
    kinds = {tensor.kind for tensor in state.tensors}
    if not kinds.intersection(MODEL_KINDS):
        return NO_MODEL_TENSOR if kinds - {Kind.OPTIMIZER} else ONLY_OPTIMIZER if kinds else NO_TENSOR
    return NOT_PART_OF_MODEL if in_model_folder else None


def is_training_step(folder: str) -> bool:
    """Return whether the folder has files of a training step, such as optimizer.pt or trainer_state.json."""
    return any(checkpoint_folder.COMPANIONS.match(name) for name in files.list_names(folder))


def is_in_any_folder(path: str, folders: Collection[str]) -> bool:
    """Return whether the path lies below any of the absolute folders."""
    return bool(folders) and any(parent in folders for parent in files.iter_parents(files.make_absolute(path)))
