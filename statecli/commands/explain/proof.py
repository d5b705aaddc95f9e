"""Test the printed code on the meta device: load tensors of the same names and shapes into the class."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from statecli import live
from statecli.commands.explain.recipe import Loader, Recipe
from statecli.commands.explain.renaming import apply_steps
from statecli.commands.explain.source import ModelEntries
from statecli.core.errors import ModelError
from statecli.live.built_model import BuiltModel
from statecli.live.load_state_dict_result import Entries, LoadReport


class LoadResult(msgspec.Struct, frozen=True):
    """Report of a test load. If code of the class raised an error, `error` is set and the report is empty."""

    answer: LoadReport = LoadReport()
    error: str = ""

    @property
    def is_accepted(self) -> bool:
        """Return True if a strict load would succeed."""
        answer = self.answer
        return not (self.error or answer.missing or answer.unexpected or answer.mismatched or answer.refused)


def load_as_is(entries: ModelEntries, built_model: BuiltModel) -> LoadResult:
    """Load the entries of the checkpoint strictly under their own names, on the meta device."""
    return _load(entries, {name: name for name in entries.names}, built_model, keeps_metadata=True)


def try_recipe(recipe: Recipe, entries: ModelEntries, built_model: BuiltModel) -> LoadResult:
    """Load the entries as the recipe does, on the meta device. Names that keep initial values can be missing."""
    if recipe.source.loader is Loader.DCP:  # the printed lines read only tensors
        entries = replace(entries, state_dict=replace(entries.state_dict, others=()))
    others = (apply_steps(recipe.steps, name) for name in entries.state_dict.others)
    kept_others = tuple(name for name in others if name not in recipe.left_out.names)
    entries = replace(entries, state_dict=replace(entries.state_dict, others=kept_others))
    names = recipe.rename_entries(entries.names)
    transposed = {names[name] for name in recipe.transposed}
    rows = (replace(row, shape=(row.shape or ())[::-1]) if row.fqn in transposed else row for row in entries.rows)
    result = _load(replace(entries, rows=tuple(rows)), names, built_model, keeps_metadata=not recipe.rebuilds_dict)
    answer, initial = result.answer, set(recipe.initial)
    if initial and set(answer.missing) <= initial:  # an old BatchNorm sets num_batches_tracked itself
        return replace(result, answer=replace(answer, missing=()))
    return result


def _load(
    entries: ModelEntries, names: Mapping[str, str], built_model: BuiltModel, *, keeps_metadata: bool
) -> LoadResult:
    rows = {row.fqn: row for row in entries.rows}
    tensors = {new: rows[name] for new, name in names.items()}
    state_dict = entries.state_dict
    metadata = state_dict.metadata if keeps_metadata else None
    as_saved = state_dict.is_module and keeps_metadata
    try:
        answer = live.load_state_dict.load(
            built_model, Entries(tensors, state_dict.others, metadata, as_saved), by_from_pretrained=False
        )
    except ModelError as error:
        return LoadResult(error=str(error))
    return LoadResult(answer)
