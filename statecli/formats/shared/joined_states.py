"""Join the states of several files of one checkpoint, and build rows of tensors that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.model_state import ModelState, Oddity, Settings, TensorInfo
from statecli.core.setting_paths import is_same_setting, join, put_below, select


def join_states(states: Sequence[ModelState], **fields: Any) -> ModelState:
    """Join the tensors and the facts about sections of several states. `fields` are the other fields of the result."""
    joined = {
        "tensors": tuple(tensor for state in states for tensor in state.tensors),
        "sections": tuple(dict.fromkeys(section for state in states for section in state.sections)),
        "globals": tuple(dict.fromkeys(mention for state in states for mention in state.globals)),
        "optimizers": tuple(facts for state in states for facts in state.optimizers),
        "state_dicts": tuple(state_dict for state in states for state_dict in state.state_dicts),
    }
    return replace(states[0], **(joined | fields))


def join_settings(settings_by_file: Mapping[str, Settings]) -> Settings:
    """Join the settings of files. If a setting differs between files, prefix it with the name of each file."""
    sides = list(settings_by_file.values())
    joined = join(reversed(sides))
    common = select(
        joined,
        lambda key: all(
            is_same_setting(key, joined, side) for side in sides if key in side.values or key in side.kinds
        ),
    )

    def is_uncommon(key: str) -> bool:
        return key not in common.values and key not in common.kinds

    uncommon = (put_below(select(settings, is_uncommon), f"{file}.") for file, settings in settings_by_file.items())
    return join((common, *uncommon))


def rename_sections(state: ModelState, rename: Callable[[str], str], file: str) -> ModelState:
    """Rename the sections of a state, and add the name of its file to the storages."""
    tensors = (replace(add_file(tensor, file), section=rename(tensor.section)) for tensor in state.tensors)
    return replace(
        state,
        tensors=tuple(tensors),
        sections=tuple(map(rename, state.sections)),
        optimizers=tuple(replace(facts, section=rename(facts.section)) for facts in state.optimizers),
        state_dicts=tuple(replace(state_dict, section=rename(state_dict.section)) for state_dict in state.state_dicts),
    )


def add_file(tensor: TensorInfo, file: str) -> TensorInfo:
    """Add the file's name to the storage of a tensor, because storages count from 0 in each file."""
    return tensor if tensor.storage is None else replace(tensor, storage=f"{file}:{tensor.storage}")


def add_rows(state: ModelState, rows: Iterable[TensorInfo], *oddities: Oddity) -> ModelState:
    """Add tensor rows with their sections, and oddities."""
    rows = tuple(rows)
    sections = dict.fromkeys((*state.sections, *(row.section for row in rows)))
    return replace(
        state,
        tensors=(*state.tensors, *rows),
        sections=tuple(sections),
        oddities=(*state.oddities, *oddities),
    )


def mark_unreadable(row: TensorInfo, path: str, why: str) -> TensorInfo:
    """Return the tensor row without values, with the reason in its note."""
    damage = f"{path}: {quoting.name(row.fqn)}: {why}"
    return replace(row, nbytes=0, note=f"cannot be read: {why}", data=None, damage=damage)


def build_unreadable_row(fqn: str, path: str, why: str) -> TensorInfo:
    """Build the row of a tensor of which only the name is known."""
    return mark_unreadable(TensorInfo(fqn, "unknown", None, 0, 0, saved=True), path, why)
