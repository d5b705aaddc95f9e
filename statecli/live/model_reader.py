"""Build the `ModelState` of a built model: a row for each tensor, with its measured properties."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from statecli.core import tied_tensors as ties
from statecli.core.errors import UsageError, option
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import SAMPLE_INPUT_NOTE, After, Evidence, ModelState, NoteKind, Stats, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.live import measure, suggest_fix
from statecli.live.built_model import BuiltModel
from statecli.live.library_output import hide_library_lines
from statecli.live.move_model import move_model
from statecli.live.move_results import measure_own_move, record_move, try_move
from statecli.live.rebuild import Rebuild
from statecli.live.requested_device import parse_device
from statecli.live.tensor_table import (
    StorageRows,
    TensorRow,
    TensorTable,
    build_table,
    find_unregistered_module,
    get_attribute,
    is_derived_from_registered,
    is_recomputed,
)
from statecli.live.tensors import is_lazy, may_overlap
from statecli.live.walk import UnregisteredTensor

#: Attributes with sample inputs of a model; Lightning stores `example_input_array` in `_example_input_array`.
_INPUT_ATTRIBUTES = ("example_input_array", "_example_input_array", "dummy_inputs")


@contextmanager
def _read_quietly() -> Iterator[None]:
    """Hide library output in the block, and read tensors without calling `__torch_function__` of their classes."""
    with hide_library_lines(), torch._C.DisableTorchFunctionSubclass():
        yield


@_read_quietly()
def read(built: BuiltModel, target: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None) -> ModelState:
    """Describe every tensor of a built model: registered tensors in state_dict order, then unregistered tensors.

    Overwrites the values of the instance to measure `moves` and `saved`; calls `stats_of` with each tensor before.
    Raises ModelError.
    """
    table = build_table(built)
    _measure_stats(table, stats_of)
    trial = try_move(table)
    record_move(table, trial)
    if trial.reason is None and measure.has_own_move(built.listed_module, (module for _, module in table.walk.modules)):
        measure_own_move(table)
    return _build_state(table, target)


@_read_quietly()
def read_without_move(
    built: BuiltModel, target: str, why_not: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """Describe a live model without a test move, because statecli cannot copy the model.

    `why_not` is noted as the reason. Raises ModelError.
    """
    table = build_table(built)
    _measure_stats(table, stats_of)
    table.add_oddity(OddityKind.NOT_MEASURED, f"cannot check which tensors move: {why_not}")
    return _build_state(table, target)


def _measure_stats(table: TensorTable, stats_of: Callable[[torch.Tensor], Stats] | None) -> None:
    for row in table.rows if stats_of else ():
        row.stats = stats_of(row.tensor) if stats_of and not is_lazy(row.tensor) else None


@_read_quietly()
def move(
    built: BuiltModel, target: str, device: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """Describe a built model, call `module.to(device)`, and set `after` of each tensor to its new device.

    Raises UsageError if the move would test nothing or the device does not exist, ModelError if the model's own code
    fails.
    """
    device_ = parse_device("--to", device, devices="cuda, cuda:1 or meta", anywhere="meta")
    table = build_table(built)
    _check_move(table, target, device_)
    _measure_stats(table, stats_of)
    trial = try_move(table)
    record_move(table, trial)
    # A failed trial leaves the instance half moved.
    module = built.module if trial.reason is None and trial.keeps_objects else built.build_again()
    with built.user_code(f"moving the model to {device}"):
        module = move_model(module, device_)
    tensors_after = measure.map_tensors(module)
    for row in table.rows:
        tensor = None if row.fqn in table.copy_differences else tensors_after.get(row.fqn)
        if tensor is not None and row.facts.device == str(device_):
            # Already on the device before the move, so the stand-in decides.
            row.after = After(row.facts.device, row.follows_device)
            continue
        row.after = After(None, None) if tensor is None else After(str(tensor.device), tensor.device == device_)
        if row.after.followed is not None:
            if row.follows_device is not None and row.follows_device is not row.after.followed:
                row.notes.append(_describe_device_special_case(row.follows_device, device_))
            row.follows_device = row.after.followed
    return _build_state(table, target)


def _is_input(table: TensorTable, row: TensorRow) -> bool:
    """Return True if the model holds the tensor only as an example input, such as `example_input_array`."""
    names = [row.unregistered, *(table.aliases[alias][1] for alias in row.aliases)]
    return all(
        unregistered is not None
        and unregistered.owner is table.built.listed_module
        and get_attribute(unregistered) in _INPUT_ATTRIBUTES
        and unregistered.steps[0].how in ("attribute", "class")
        for unregistered in names
    )


# --- a real move --------------------------------------------------------------------------------------------


def _check_move(table: TensorTable, target: str, device_: torch.device) -> None:
    if not table.rows:
        packed_text = " that statecli can see, because its weights are packed in C++" if table.walk.packed else ""
        raise UsageError(f"{target}: the model has no tensors{packed_text}, so there is nothing to move")
    devices = {row.facts.device for row in table.rows}
    if devices == {str(device_)}:
        instead = f"use {option('--to', 'meta')}" if device_.type != "meta" else f"leave {option('--init-device')} out"
        raise UsageError(f"{target}: all tensors are already on {device_}, so this move tests nothing; {instead}")
    if "meta" in devices and device_.type != "meta":
        raise UsageError(
            f"{target}: was built on meta and has no values to move to {device_}; build the model on the cpu"
        )


def _describe_device_special_case(follows_move: bool, device_: torch.device) -> str:
    """Explain why a tensor followed only one of two moves: the class has special code for a device (`t.is_meta`)."""
    copy, move = "when torch copies it to new memory on the same device", f"in the move to {device_}"
    first, second = (copy, move) if follows_move else (move, copy)
    return f"moves {first}, but not {second}, because the class has special code for {device_.type}"


# --- the state ----------------------------------------------------------------------------------------------


def _build_state(table: TensorTable, target: str) -> ModelState:
    numbers: dict[int | str, int] = {}
    for row in table.rows:
        numbers.setdefault(row.facts.storage, len(numbers))
    rows = [_build_tensor_info(table, row, numbers[row.facts.storage]) for row in table.rows]
    return ties.fill_tied_to(
        ModelState(target, "module", tuple(rows), oddities=tuple(table.oddities), traits=FormatTraits(is_class=True))
    )


#: `TensorInfo.rebuilt` by the result of comparing two builds.
_REBUILT_BY_RESULT = {Rebuild.IDENTICAL: True, Rebuild.DIFFERENT: False}


def _build_tensor_info(table: TensorTable, row: TensorRow, number: int) -> TensorInfo:
    facts, is_input = row.facts, _is_input(table, row)
    fix = None if is_input else _suggest_fix(table, row)
    if is_input:
        row.notes.append(SAMPLE_INPUT_NOTE)
    return TensorInfo(
        fqn=row.fqn,
        dtype=facts.dtype,
        shape=facts.shape,
        elements=facts.elements,
        nbytes=facts.nbytes,
        kind=row.kind,
        evidence=Evidence.REGISTERED,
        persistent=row.persistent,
        device=facts.device,
        requires_grad=facts.requires_grad,
        saved=row.saved,
        moves=row.follows_device,
        origin=table.built.origins.describe(row.user_place),
        layout=facts.layout,
        aliases=tuple(row.aliases),
        note="; ".join(row.notes) or None,
        fix=fix,
        after=row.after,
        stats=row.stats,
        storage=number,
        storage_bytes=facts.storage_bytes,
        storage_offset=facts.storage_offset,
        within=find_unregistered_module(row.unregistered),
        container=_get_container_type(row.unregistered),
        derived=row.derived_by,
        rebuilt=_REBUILT_BY_RESULT.get(table.get_rebuild(row)) if fix or row.persistent is False else None,
        is_input=is_input,
        note_kind=None if row.note_kind is NoteKind.IN_UNREGISTERED_MODULE and len(row.notes) > 1 else row.note_kind,
    )


def _get_container_type(unregistered: UnregisteredTensor | None) -> str | None:
    """Return the type of the first list, tuple or dictionary on the way to the tensor."""
    steps = unregistered.steps if unregistered is not None else ()
    items = (step for step, next_step in itertools.pairwise(steps) if next_step.how == "item")
    return next((type(step.value).__name__ for step in items), None)


def _suggest_fix(table: TensorTable, row: TensorRow) -> str | None:
    if row.unregistered is None or row.follows_device is not False or is_recomputed(row.unregistered):
        return None
    if suggest_fix.is_in_library(row.unregistered, row.place):
        origin = table.built.origins.describe(row.place)
        return suggest_fix.suggest_for_library(row.unregistered, origin, table.get_rebuild(row))
    if row.derived_by:
        is_from_registered = is_derived_from_registered(table, row.tensor)
        if is_from_registered or not suggest_fix.creates_leaf(row.place, row.unregistered):
            return suggest_fix.suggest_for_derived(is_from_registered)
    sharing = _find_rows_overlapping(table, row)
    if sharing.largest is not None and sharing.largest.facts.elements > row.facts.elements:
        return suggest_fix.suggest_for_part(sharing.largest.fqn)
    is_repeated = table.built.origins.is_repeated(row.unregistered.owner, get_attribute(row.unregistered))
    other_names = _find_other_names(table, row, sharing)
    return table.get_suggestions().suggest(
        row.unregistered, row.place, is_repeated=is_repeated, other_names=other_names, rebuild=table.get_rebuild(row)
    )


def _find_rows_overlapping(table: TensorTable, row: TensorRow) -> StorageRows:
    """Return the rows whose tensors may overlap the tensor of `row`, or all rows if the storage has many rows."""
    sharing = table.find_rows_sharing(row)
    if sharing.count == 1 or sharing.count > len(sharing.first_rows):
        return sharing
    overlapping = StorageRows()
    for sharing_row in sharing.first_rows:
        if sharing_row is row or may_overlap(sharing_row.tensor, row.tensor):
            overlapping.add(sharing_row)
    return overlapping


def _find_other_names(table: TensorTable, row: TensorRow, sharing: StorageRows) -> suggest_fix.MemoryNames:
    """Return other names of the row's memory: aliases of its tensor, then other tensors in its storage."""
    names = [*row.aliases, *(sharing_row.fqn for sharing_row in sharing.first_rows if sharing_row is not row)]
    is_same_tensor = sharing.count == 1 and all(table.aliases[alias][1].tensor is row.tensor for alias in row.aliases)
    is_disjoint = sharing.count < table.find_rows_sharing(row).count
    count = len(row.aliases) + sharing.count - 1
    return suggest_fix.MemoryNames(tuple(names[: suggest_fix.MAX_NAMES_IN_FIX]), count, is_same_tensor, is_disjoint)
