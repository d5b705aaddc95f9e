"""Build the `ModelState` of a built model: a row for each tensor, with its measured properties."""

from __future__ import annotations

import io
import itertools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field

import torch
from msgspec import UNSET
from torch import nn

from statecli.core import tied_tensors as ties
from statecli.core.errors import ModelError, UsageError, option
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import (
    SAMPLE_INPUT_NOTE,
    After,
    Evidence,
    Kind,
    ModelState,
    NoteKind,
    Oddity,
    Stats,
    TensorInfo,
)
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import plural
from statecli.live import attribute_source, container_fix, measure, suggest_fix
from statecli.live.built_model import BuiltModel
from statecli.live.installed_code import is_installed_file
from statecli.live.library_output import hide_library_lines
from statecli.live.move_model import move_model
from statecli.live.object_attributes import count_constants_in_code
from statecli.live.object_contents import has_own_to
from statecli.live.quantized_parameters import find_holding_tensor, has_lost_class
from statecli.live.rebuild import Rebuild, compare_builds
from statecli.live.requested_device import parse_device
from statecli.live.source_line import SourceLine
from statecli.live.tensors import (
    TensorFacts,
    describe_sharding,
    find_leaves,
    get_grad_fn_name,
    is_lazy,
    may_overlap,
    read_facts,
)
from statecli.live.walk import RegisteredName, UnregisteredTensor, WalkResult, walk

#: Attributes with sample inputs of a model; Lightning stores `example_input_array` in `_example_input_array`.
_INPUT_ATTRIBUTES = ("example_input_array", "_example_input_array", "dummy_inputs")


@dataclass
class _Row:
    """Tensor under one of its names, with the properties measured so far."""

    fqn: str
    tensor: torch.Tensor
    facts: TensorFacts
    kind: Kind
    persistent: bool | None
    #: Line that assigned the tensor. `user_place` is the line of user code if `place` is in a library.
    place: SourceLine | None
    user_place: SourceLine | None = None
    key: str = ""
    unregistered: UnregisteredTensor | None = None
    aliases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    note_kind: NoteKind | None = None
    #: The grad_fn that computed the tensor, or a description.
    derived_by: str | None = None
    stats: Stats | None = None
    saved: bool | None = None
    follows_device: bool | None = None
    after: After | None = None


@dataclass
class _StorageRows:
    """Rows of all tensors in one storage: their number, the row of the largest tensor, and the first few rows."""

    count: int = 0
    largest: _Row | None = None
    first_rows: list[_Row] = field(default_factory=list)

    def add(self, row: _Row) -> None:
        self.count += 1
        if self.largest is None or row.facts.elements > self.largest.facts.elements:
            self.largest = row
        if len(self.first_rows) < container_fix.MAX_COMPARED_PARTS:
            self.first_rows.append(row)


@dataclass
class _Table:
    built: BuiltModel
    walk: WalkResult
    rows: list[_Row] = field(default_factory=list)
    #: alias -> the row of the same tensor, and how the model holds the alias.
    aliases: dict[str, tuple[_Row, UnregisteredTensor]] = field(default_factory=dict)
    oddities: list[Oddity] = field(default_factory=list)
    #: name -> how a copy of the model holds the tensor, if not as the model does.
    copy_differences: dict[str, str] = field(default_factory=dict)
    _by_storage: dict[int | str, _StorageRows] = field(default_factory=dict)
    _suggestions: suggest_fix.Suggestions | None = None
    _rebuilds: dict[str, Rebuild] | None = None
    _modules: dict[str, nn.Module] = field(default_factory=dict)
    _module_names: dict[int, str] = field(default_factory=dict)

    def add_oddity(
        self, kind: OddityKind, message: str, name: str | None = None, place: SourceLine | None = None
    ) -> None:
        origin = self.built.origins.describe(place) or UNSET
        self.oddities.append(Oddity(kind.value, message, name, origin=origin))

    def get_module(self, name: str) -> nn.Module:
        """Return the registered module of this name. The name of the root is ""."""
        if not self._modules:
            self._modules = {prefix.rstrip("."): module for prefix, module in self.walk.modules}
        return self._modules[name]

    def get_module_name(self, module: nn.Module) -> str:
        """Return the first name of a registered module, or "" for the root and for an unregistered module."""
        if not self._module_names:
            self._module_names = {
                id(registered_module): prefix.rstrip(".") for prefix, registered_module in reversed(self.walk.modules)
            }
        return self._module_names.get(id(module), "")

    def find_rows_sharing(self, row: _Row) -> _StorageRows:
        """Return the rows of all tensors that share the storage of `row`, including `row`."""
        if not self._by_storage:
            for sharing_row in self.rows:
                self._by_storage.setdefault(sharing_row.facts.storage, _StorageRows()).add(sharing_row)
        return self._by_storage[row.facts.storage]

    def get_suggestions(self) -> suggest_fix.Suggestions:
        """Return the fix suggestions for this model. Call only when all rows have been added."""
        if self._suggestions is None:
            aliases = (alias for row, alias in self.aliases.values() if row.kind is Kind.BUFFER)
            self._suggestions = suggest_fix.Suggestions(frozenset(id(alias.steps[0].value) for alias in aliases))
        return self._suggestions

    def get_rebuild(self, row: _Row) -> Rebuild:
        """Return whether two more builds of the model give the tensor the same bits. The first call makes the builds.

        UNKNOWN if the tensor requires grad or is in an unregistered module: its fix does not depend on the builds.
        """
        if row.tensor.requires_grad or _find_unregistered_module(row.unregistered):
            return Rebuild.UNKNOWN
        if self._rebuilds is None:
            # No checkpoint holds these tensors.
            rows = [row for row in self.rows if row.unregistered is not None or row.persistent is False]
            self._rebuilds = _compare_builds(self.built, rows)
        return self._rebuilds.get(row.fqn, Rebuild.UNKNOWN)


def _compare_builds(built: BuiltModel, rows: list[_Row]) -> dict[str, Rebuild]:
    """Compare two more builds of a model. Return {} for a large model, or if statecli did not call the constructor.

    If there are unregistered tensors, the builds draw the random values of large parameters. Without these values, a
    table computed from a large parameter would look identical. A model above `_MAX_DRAWN_BYTES` is not compared then.
    If there are only buffers, values are not drawn, because the builds of a language model would take too long.
    """
    if built.settings_after_init is None or built.init_device != "cpu":
        return {}
    draws_values = any(row.unregistered is not None for row in rows)
    sizes = (parameter.nbytes for parameter in built.module.parameters() if not is_lazy(parameter))
    if draws_values and sum(sizes) > _MAX_DRAWN_BYTES:
        return {}

    def build(seed: int) -> nn.Module:
        output = io.StringIO()  # the first build has shown prints and warnings
        with (
            redirect_stdout(output),
            redirect_stderr(output),
            warnings.catch_warnings(),
            torch._C._EnableTorchFunction(),
        ):
            warnings.simplefilter("ignore")
            return built.build_again(values=draws_values, seed=seed)

    try:
        return compare_builds(build, {row.fqn: row.facts.elements for row in rows})
    except ModelError:  # the class cannot be built twice
        return {}


#: Bytes of parameters whose random values take about a second.
_MAX_DRAWN_BYTES = 512 * 1024**2


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
    table = _build_table(built)
    _measure_stats(table, stats_of)
    trial = _try_move(table)
    _record_move(table, trial)
    if trial.reason is None and measure.has_own_move(built.listed_module, (module for _, module in table.walk.modules)):
        _measure_own_move(table)
    return _build_state(table, target)


@_read_quietly()
def read_without_move(
    built: BuiltModel, target: str, why_not: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """Describe a live model without a test move, because statecli cannot copy the model.

    `why_not` is noted as the reason. Raises ModelError.
    """
    table = _build_table(built)
    _measure_stats(table, stats_of)
    table.add_oddity(OddityKind.NOT_MEASURED, f"cannot check which tensors move: {why_not}")
    return _build_state(table, target)


def _measure_own_move(table: _Table) -> None:
    """Record the tensors that follow the class's own `.to` or `_apply`, which may move more than `try_stand_in_move`.

    The class's code may read the device or values. If a move to meta is inconclusive, a fake CUDA device is tried. If
    both are inconclusive, so is each tensor that the stand-in move does not move.
    """
    built = table.built
    own_to, on_meta = measure.has_own_to(built.module), built.init_device == "meta"
    own_trial = measure.try_own_to(built, walk(built.module)) if own_to and not on_meta else None
    if own_trial is not None:
        _record_follows_device(table, own_trial)
        return
    if not own_to and all(row.follows_device is not False for row in table.rows):
        return
    follows_by_name = None if on_meta else measure.try_fake_gpu_move(built)
    for row in table.rows:
        if follows_by_name is not None and row.follows_device is not None:
            row.follows_device = follows_by_name.get(row.fqn, row.follows_device)
        elif row.follows_device is False and own_to:
            row.follows_device = None
            reason = "the method fails on meta and on a fake CUDA device"
            if on_meta:
                reason = "the effect of .to is not visible on meta; build the model on the cpu"
            row.notes.append(f"statecli does not know whether the class's own .to moves the tensor: {reason}")


def _try_move(table: _Table) -> measure.MoveTrial:
    """Make a test move of the built module. If the module is a copy of a live model, record how the copy differs."""
    built = table.built
    if built.original is None:
        return measure.try_stand_in_move(built, table.walk)
    copy_walk = walk(built.module)
    copy_holdings = copy_walk.map_holdings()
    for name, holding in table.walk.map_holdings().items():
        copy_holding = copy_holdings.get(name)
        if copy_holding is not holding:
            copy_does = f"has the tensor as {copy_holding.value}" if copy_holding else "lacks the tensor"
            table.copy_differences[name] = copy_does
            held_as = f"{name} is {holding.value} of the model"
            message = f"{held_as}, but a copy of the model {copy_does}: statecli does not know whether the tensor moves"
            table.add_oddity(OddityKind.UNLIKE_COPY, message, name)
    return measure.try_stand_in_move(built, copy_walk)


def _measure_stats(table: _Table, stats_of: Callable[[torch.Tensor], Stats] | None) -> None:
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
    table = _build_table(built)
    _check_move(table, target, device_)
    _measure_stats(table, stats_of)
    trial = _try_move(table)
    _record_move(table, trial)
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


# --- the rows -----------------------------------------------------------------------------------------------


def _build_table(built: BuiltModel) -> _Table:
    result = walk(built.listed_module)
    table = _Table(built, result)
    _add_oddities(table)
    for entry in result.registered:
        _add_registered(table, entry)
    _add_unregistered(table)
    if not table.rows and not table.walk.packed:
        table.add_oddity(OddityKind.NO_TENSORS, "the model has no tensors, so there is nothing to inspect")
    saved_state = measure.measure_state_dict(built, result)
    if saved_state.reason is not None:
        table.oddities.append(Oddity("no-state-dict", f"cannot check which tensors are saved: {saved_state.reason}"))
    for row in table.rows:
        row.saved = saved_state.includes(row.key, row.fqn, row.tensor, row.facts.storage)
        if row.saved and row.unregistered is not None and _is_recomputed(row.unregistered):
            row.saved = False  # torch saves the tensor from which this tensor is computed, in the same memory
        if row.saved is False and row.facts.storage in saved_state.storages:
            row.notes.append("saved only under the name of a tied tensor, not under this name")
        if row.saved is None and saved_state.reason is None:
            row.notes.append("statecli does not know whether get_extra_state saves a copy of the tensor")
    return table


def _add_oddities(table: _Table) -> None:
    for name in table.walk.cycles:
        table.oddities.append(Oddity("module-cycle", f"{name} contains itself and is listed once", name))
    for name, reason in table.walk.unopened:
        short_name = name if len(name) <= 80 else f"{name[:60]}…"
        table.add_oddity(OddityKind.NOT_SEARCHED, f"{short_name} {reason}: deeper tensors are not listed", short_name)
    if measure.has_own_cuda_only(table.built.module):
        message = f"{type(table.built.module).__name__}.cuda is overridden; statecli tests only .to and not .cuda"
        table.oddities.append(Oddity("own-cuda", message))
    for prefix, module in table.walk.modules:
        count = count_constants_in_code(module)
        if count:
            name = prefix.rstrip(".")
            constants_text = (
                f"the TorchScript code of {name or 'the model'} contains {plural(count, 'constant tensor')}"
            )
            effect = ".to() does not move such tensors, state_dict() does not contain them"
            message = f"{constants_text}; {effect}, and statecli does not list them"
            table.add_oddity(OddityKind.SCRIPT_MODULE, message, name or None)
    for name in table.walk.packed:
        message = f"{name} stores weights in C++, where statecli cannot read them; these weights are not listed"
        table.add_oddity(OddityKind.PACKED_PARAMS, message, name)
    for entry in table.walk.registered:
        if entry.tensor is None and entry.is_parameter:
            table.add_oddity(OddityKind.NONE_PARAMETER, f"{entry.fqn} is registered as None", entry.fqn)


def _add_registered(table: _Table, entry: RegisteredName) -> None:
    if entry.tensor is None:
        return
    place = _locate_registration(table, entry)
    persistent = None if entry.is_parameter else entry.persistent
    kind = Kind.PARAMETER if entry.is_parameter else Kind.BUFFER
    user_place = _find_user_place(table, entry.owner, entry.attribute, place)
    row = _Row(entry.fqn, entry.tensor, read_facts(entry.tensor), kind, persistent, place, user_place, entry.key)
    _note_extent(row)
    table.rows.append(row)


def _locate_registration(table: _Table, entry: RegisteredName) -> SourceLine | None:
    """Return the line that assigned the tensor, or else the line that assigned its nearest parent module."""
    place = table.built.origins.locate(entry.owner, entry.attribute)
    path = entry.key.removesuffix(entry.attribute).rstrip(".")
    while place is None and path:
        parent_path, _, name = path.rpartition(".")
        place = table.built.origins.locate(table.get_module(parent_path), name)
        path = parent_path
    return place


def _find_user_place(table: _Table, owner: nn.Module, attribute: str, place: SourceLine | None) -> SourceLine | None:
    """Return the user's line that led to an assignment in a library, or `place` in all other cases.

    This is the line that called the library, or else the line that assigned the nearest parent module.
    """
    if place is None or not is_installed_file(place.file):
        return place
    origins, path = table.built.origins, table.get_module_name(owner)
    user_place = origins.locate_caller(owner, attribute)
    while user_place is None and path:
        path, _, name = path.rpartition(".")
        user_place = origins.locate(table.get_module(path), name)
        if user_place is not None and is_installed_file(user_place.file):
            user_place = origins.locate_caller(table.get_module(path), name)
    return user_place or place


def _add_unregistered(table: _Table) -> None:
    by_object = {id(new_row.tensor): new_row for new_row in reversed(table.rows)}
    by_storage = {new_row.facts.storage: new_row for new_row in reversed(table.rows)}
    for unregistered in table.walk.unregistered:
        row = by_object.get(id(unregistered.tensor))
        facts = read_facts(unregistered.tensor) if row is None else row.facts
        row_in_storage = by_storage.get(facts.storage)
        is_part = row is None and row_in_storage is not None and facts.elements <= row_in_storage.facts.elements
        # A recomputed tensor shares memory only until the first forward.
        if is_part and not _is_recomputed(unregistered):
            row = row_in_storage
        if row is not None:
            row.aliases.append(unregistered.fqn)
            table.aliases[unregistered.fqn] = (row, unregistered)
            continue
        new_row = _build_unregistered_row(table, unregistered, facts)
        by_object[id(unregistered.tensor)] = new_row
        table.rows.append(new_row)


def _build_unregistered_row(table: _Table, unregistered: UnregisteredTensor, facts: TensorFacts) -> _Row:
    place, tensor = _locate_assignment(table, unregistered), unregistered.tensor
    user_place = _find_user_place(table, unregistered.owner, _get_attribute(unregistered), place)
    row = _Row(unregistered.fqn, tensor, facts, Kind.UNREGISTERED, None, place, user_place, unregistered=unregistered)
    operation = row.derived_by = get_grad_fn_name(tensor)
    if operation is None and _is_recomputed(unregistered):
        row.derived_by = "a hook of torch"
        row.notes.append("derived from registered tensors by a hook of torch, before each forward")
    elif operation:
        whose = "registered" if _is_derived_from_registered(table, tensor) else "other"
        row.notes.append(f"derived from {whose} tensors (grad_fn {operation})")
    if any(step.how == "class" for step in unregistered.steps):
        row.notes.append("class attribute, shared by all instances")
    if unregistered.steps[0].how == "hidden":
        row.notes.append("hides the registered tensor of this name: Python reads the plain attribute instead")
    if unregistered.steps[-1].how == "registered":
        kind = "parameter" if issubclass(type(tensor), nn.Parameter) else "buffer"
        row.notes.append(f"{kind} of an unregistered module")
        row.note_kind = NoteKind.IN_UNREGISTERED_MODULE
    _note_extent(row)
    return row


def _is_derived_from_registered(table: _Table, tensor: torch.Tensor) -> bool:
    registered_ids = {id(entry.tensor) for entry in table.walk.registered}
    leaves = find_leaves(tensor)
    return leaves is not None and all(id(leaf) in registered_ids for leaf in leaves)


def _note_extent(row: _Row) -> None:
    """Add a note if a tensor has no shape, or if this process holds only a part of a DTensor."""
    if row.facts.shape is None and is_lazy(row.tensor):
        row.notes.append("uninitialized (lazy)")
        row.note_kind = NoteKind.UNINITIALIZED
    elif row.facts.shape is None:
        row.notes.append("nested: the parts differ in shape")
    elif (sharding := describe_sharding(row.tensor)) is not None:
        row.notes.append(sharding)


def _get_attribute(unregistered: UnregisteredTensor) -> str:
    """Return the name of the owner's attribute through which the tensor was found."""
    return unregistered.steps[0].label.rpartition(".")[2]


def _locate_assignment(table: _Table, unregistered: UnregisteredTensor) -> SourceLine | None:
    first_step = unregistered.steps[0]
    if first_step.how == "hidden":
        return None  # the recorded line of this name assigned the registered tensor
    name = _get_attribute(unregistered)
    if first_step.how != "class":
        return table.built.origins.locate(unregistered.owner, name) or _locate_function(unregistered)
    for base in type(unregistered.owner).__mro__:
        if name in vars(base):
            return attribute_source.locate_class_attribute(base, name)
    return None


def _locate_function(unregistered: UnregisteredTensor) -> SourceLine | None:
    """Return file and line of the function that has the tensor in its closure or defaults, or None if unknown."""
    holders = (step.parent.value for step in unregistered.steps if step.parent and step.how in ("closure", "default"))
    code = next((holder.__code__ for holder in holders if type(holder) is types.FunctionType), None)
    return None if code is None else SourceLine(code.co_filename, code.co_firstlineno)


def _is_input(table: _Table, row: _Row) -> bool:
    """Return True if the model holds the tensor only as an example input, such as `example_input_array`."""
    names = [row.unregistered, *(table.aliases[alias][1] for alias in row.aliases)]
    return all(
        unregistered is not None
        and unregistered.owner is table.built.listed_module
        and _get_attribute(unregistered) in _INPUT_ATTRIBUTES
        and unregistered.steps[0].how in ("attribute", "class")
        for unregistered in names
    )


# --- results of the move ------------------------------------------------------------------------------------


def _record_move(table: _Table, trial: measure.MoveTrial) -> None:
    if trial.reason is not None:
        table.add_oddity(OddityKind.NOT_MEASURED, f"cannot check which tensors move: {trial.reason}")
        return
    _record_follows_device(table, trial)
    for row in table.rows:
        holder = find_holding_tensor(row.unregistered) if row.unregistered is not None else None
        if holder is not None and has_own_to(type(holder)) and row.follows_device is False:
            row.follows_device = None
            row.notes.append(f"statecli does not know whether {type(holder).__name__}.to moves the tensor")
        if row.fqn in table.copy_differences:
            copy = f"a copy of the model {table.copy_differences[row.fqn]}"
            row.notes.append(f"statecli does not know whether the tensor moves: {copy}")
        elif row.fqn not in trial.after:
            row.notes.append("the model removes the tensor during the move")
    if trial.keeps_objects:
        _add_broken_ties(table, trial)
        _add_recomputed(table, trial)
        _add_stale_views(table, trial)


def _record_follows_device(table: _Table, trial: measure.MoveTrial) -> None:
    for row in table.rows:
        row.follows_device = None if row.fqn in table.copy_differences else trial.follows_device(row.fqn)


def _add_broken_ties(table: _Table, trial: measure.MoveTrial) -> None:
    ties: dict[str, _Tie] = {}
    for row in table.rows:
        is_measured = row.fqn in trial.after and row.fqn in trial.memories
        if not is_measured or (row.unregistered and _is_recomputed(row.unregistered)):
            continue
        # Compare the moved instance with itself, because a copy may have separated tied weights.
        tie, after = ties.setdefault(trial.memories[row.fqn], _Tie()), trial.after[row.fqn][1]
        count, names = tie.find_apart_from(after)
        tie.add(row.fqn, after, row.place)
        if count:
            names_text = ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")
            message = f"{row.fqn} shares memory with {names_text}, but a move gives each its own memory"
            table.add_oddity(OddityKind.UNTIED_BY_MOVE, message, row.fqn, tie.place)


#: Largest number of names in the message about a broken tie.
_MAX_TIED_NAMES = 3


@dataclass
class _Tie:
    """Names that shared a storage before a move, and the number of names in each storage after the move.

    `first_names` has at most three names per storage and six in all: enough to show three names of other storages.
    `place` is the line to report: the last of the lines that are in the same file as the first known line.
    """

    counts: dict[int | str, int] = field(default_factory=dict)
    total: int = 0
    first_names: list[tuple[str, int | str]] = field(default_factory=list)
    place: SourceLine | None = None

    def add(self, fqn: str, after: int | str, place: SourceLine | None) -> None:
        if self.place is None or (place is not None and place.file == self.place.file):
            self.place = max(filter(None, (self.place, place)), default=None)
        count = self.counts.get(after, 0)
        if count < _MAX_TIED_NAMES and len(self.first_names) < 2 * _MAX_TIED_NAMES:
            self.first_names.append((fqn, after))
        self.counts[after] = count + 1
        self.total += 1

    def find_apart_from(self, after: int | str) -> tuple[int, list[str]]:
        """Count the names whose storage after the move is not `after`. Also return the first few of these names."""
        names = [fqn for fqn, storage in self.first_names if storage != after]
        return self.total - self.counts.get(after, 0), names[:_MAX_TIED_NAMES]


def _add_stale_views(table: _Table, trial: measure.MoveTrial) -> None:
    for name, (row, unregistered) in table.aliases.items():
        if name in table.copy_differences or row.fqn in table.copy_differences:
            continue
        is_left = trial.follows_device(row.fqn) and trial.follows_device(name) is False
        if not is_left or _describe_reassignment(unregistered):
            continue
        holder = find_holding_tensor(unregistered)
        if holder is not None and (has_own_to(type(holder)) or has_lost_class(unregistered)):
            continue
        place = _locate_assignment(table, unregistered)
        user_place = _find_user_place(table, unregistered.owner, _get_attribute(unregistered), place)
        message = f"{name} is another name of {row.fqn}, but still points to the old memory after a move"
        table.add_oddity(OddityKind.STALE_VIEW, message, name, user_place)


def _add_recomputed(table: _Table, trial: measure.MoveTrial) -> None:
    rows = [(row.fqn, row.unregistered) for row in table.rows]
    for name, unregistered in rows + [(name, alias) for name, (_, alias) in table.aliases.items()]:
        if unregistered is None or trial.follows_device(name) is not False:
            continue
        if reason := _describe_reassignment(unregistered):
            table.add_oddity(OddityKind.RECOMPUTED, f"{name} stays on the old device after a move; {reason}", name)


def _describe_reassignment(unregistered: UnregisteredTensor) -> str | None:
    """Describe how torch itself sets the attribute again before each use. Return None for other attributes."""
    if _get_attribute(unregistered) in _DDP_BUFFER_ATTRIBUTES and _is_torch_ddp(type(unregistered.owner)):
        moment = "from the module's buffers before each synchronization"
        return f"DistributedDataParallel sets this attribute again {moment}, so no action is needed"
    recomputes = "torch recomputes the tensor from registered tensors before each forward"
    return recomputes if _is_recomputed(unregistered) else None


#: Attributes set by `_assign_modules_buffers`, which torch calls each time before reading them.
_DDP_BUFFER_ATTRIBUTES = ("modules_buffers", "named_module_buffers")


def _is_torch_ddp(kind: type) -> bool:
    torch_class = nn.parallel.DistributedDataParallel
    method = "_assign_modules_buffers"
    return issubclass(kind, torch_class) and getattr(kind, method, None) is getattr(torch_class, method, None)


def _is_recomputed(unregistered: UnregisteredTensor) -> bool:
    """Return True if a hook of old weight_norm, spectral_norm or pruning computes the tensor."""
    name = _get_attribute(unregistered)
    hooks = unregistered.owner._forward_pre_hooks.values()
    torch_hooks = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
    return any(name in (vars(hook).get("name"), vars(hook).get("_tensor_name")) for hook in torch_hooks)


# --- a real move --------------------------------------------------------------------------------------------


def _check_move(table: _Table, target: str, device_: torch.device) -> None:
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


def _build_state(table: _Table, target: str) -> ModelState:
    numbers: dict[int | str, int] = {}
    for row in table.rows:
        numbers.setdefault(row.facts.storage, len(numbers))
    rows = [_build_tensor_info(table, row, numbers[row.facts.storage]) for row in table.rows]
    return ties.fill_tied_to(
        ModelState(target, "module", tuple(rows), oddities=tuple(table.oddities), traits=FormatTraits(is_class=True))
    )


#: `TensorInfo.rebuilt` by the result of comparing two builds.
_REBUILT_BY_RESULT = {Rebuild.IDENTICAL: True, Rebuild.DIFFERENT: False}


def _build_tensor_info(table: _Table, row: _Row, number: int) -> TensorInfo:
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
        within=_find_unregistered_module(row.unregistered),
        container=_get_container_type(row.unregistered),
        derived=row.derived_by,
        rebuilt=_REBUILT_BY_RESULT.get(table.get_rebuild(row)) if fix or row.persistent is False else None,
        is_input=is_input,
        note_kind=None if row.note_kind is NoteKind.IN_UNREGISTERED_MODULE and len(row.notes) > 1 else row.note_kind,
    )


def _find_unregistered_module(unregistered: UnregisteredTensor | None) -> str | None:
    is_inside_module = unregistered is not None and unregistered.steps[-1].how == "registered"
    return unregistered.fqn.rpartition(".")[0] if unregistered and is_inside_module else None


def _get_container_type(unregistered: UnregisteredTensor | None) -> str | None:
    """Return the type of the first list, tuple or dictionary on the way to the tensor."""
    steps = unregistered.steps if unregistered is not None else ()
    items = (step for step, next_step in itertools.pairwise(steps) if next_step.how == "item")
    return next((type(step.value).__name__ for step in items), None)


def _suggest_fix(table: _Table, row: _Row) -> str | None:
    if row.unregistered is None or row.follows_device is not False or _is_recomputed(row.unregistered):
        return None
    if suggest_fix.is_in_library(row.unregistered, row.place):
        origin = table.built.origins.describe(row.place)
        return suggest_fix.suggest_for_library(row.unregistered, origin, table.get_rebuild(row))
    if row.derived_by:
        is_from_registered = _is_derived_from_registered(table, row.tensor)
        if is_from_registered or not suggest_fix.creates_leaf(row.place, row.unregistered):
            return suggest_fix.suggest_for_derived(is_from_registered)
    sharing = _find_rows_overlapping(table, row)
    if sharing.largest is not None and sharing.largest.facts.elements > row.facts.elements:
        return suggest_fix.suggest_for_part(sharing.largest.fqn)
    is_repeated = table.built.origins.is_repeated(row.unregistered.owner, _get_attribute(row.unregistered))
    other_names = _find_other_names(table, row, sharing)
    return table.get_suggestions().suggest(
        row.unregistered, row.place, is_repeated=is_repeated, other_names=other_names, rebuild=table.get_rebuild(row)
    )


def _find_rows_overlapping(table: _Table, row: _Row) -> _StorageRows:
    """Return the rows whose tensors may overlap the tensor of `row`, or all rows if the storage has many rows."""
    sharing = table.find_rows_sharing(row)
    if sharing.count == 1 or sharing.count > len(sharing.first_rows):
        return sharing
    overlapping = _StorageRows()
    for sharing_row in sharing.first_rows:
        if sharing_row is row or may_overlap(sharing_row.tensor, row.tensor):
            overlapping.add(sharing_row)
    return overlapping


def _find_other_names(table: _Table, row: _Row, sharing: _StorageRows) -> suggest_fix.MemoryNames:
    """Return other names of the row's memory: aliases of its tensor, then other tensors in its storage."""
    names = [*row.aliases, *(sharing_row.fqn for sharing_row in sharing.first_rows if sharing_row is not row)]
    is_same_tensor = sharing.count == 1 and all(table.aliases[alias][1].tensor is row.tensor for alias in row.aliases)
    is_disjoint = sharing.count < table.find_rows_sharing(row).count
    count = len(row.aliases) + sharing.count - 1
    return suggest_fix.MemoryNames(tuple(names[: suggest_fix.MAX_NAMES_IN_FIX]), count, is_same_tensor, is_disjoint)
