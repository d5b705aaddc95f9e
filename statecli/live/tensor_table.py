"""Table of a model's tensors: a row for each tensor, with its other names and the line that assigned it."""

from __future__ import annotations

import io
import types
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field

import torch
from msgspec import UNSET
from torch import nn

from statecli.core.errors import ModelError
from statecli.core.model_state import After, Kind, NoteKind, Oddity, Stats
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import plural
from statecli.live import attribute_source, container_fix, measure, suggest_fix
from statecli.live.built_model import BuiltModel
from statecli.live.installed_code import is_installed_file
from statecli.live.object_attributes import count_constants_in_code
from statecli.live.rebuild import Rebuild, compare_builds
from statecli.live.source_line import SourceLine
from statecli.live.tensors import TensorFacts, describe_sharding, find_leaves, get_grad_fn_name, is_lazy, read_facts
from statecli.live.walk import RegisteredName, UnregisteredTensor, WalkResult, walk


@dataclass
class TensorRow:
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
class StorageRows:
    """Rows of all tensors in one storage: their number, the row of the largest tensor, and the first few rows."""

    count: int = 0
    largest: TensorRow | None = None
    first_rows: list[TensorRow] = field(default_factory=list)

    def add(self, row: TensorRow) -> None:
        self.count += 1
        if self.largest is None or row.facts.elements > self.largest.facts.elements:
            self.largest = row
        if len(self.first_rows) < container_fix.MAX_COMPARED_PARTS:
            self.first_rows.append(row)


@dataclass
class TensorTable:
    """Rows of a model, with the oddities of the model and with facts that several rows share."""

    built: BuiltModel
    walk: WalkResult
    rows: list[TensorRow] = field(default_factory=list)
    #: alias -> the row of the same tensor, and how the model holds the alias.
    aliases: dict[str, tuple[TensorRow, UnregisteredTensor]] = field(default_factory=dict)
    oddities: list[Oddity] = field(default_factory=list)
    #: name -> how a copy of the model holds the tensor, if not as the model does.
    copy_differences: dict[str, str] = field(default_factory=dict)
    _by_storage: dict[int | str, StorageRows] = field(default_factory=dict)
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

    def find_rows_sharing(self, row: TensorRow) -> StorageRows:
        """Return the rows of all tensors that share the storage of `row`, including `row`."""
        if not self._by_storage:
            for sharing_row in self.rows:
                self._by_storage.setdefault(sharing_row.facts.storage, StorageRows()).add(sharing_row)
        return self._by_storage[row.facts.storage]

    def get_suggestions(self) -> suggest_fix.Suggestions:
        """Return the fix suggestions for this model. Call only when all rows have been added."""
        if self._suggestions is None:
            aliases = (alias for row, alias in self.aliases.values() if row.kind is Kind.BUFFER)
            self._suggestions = suggest_fix.Suggestions(frozenset(id(alias.steps[0].value) for alias in aliases))
        return self._suggestions

    def get_rebuild(self, row: TensorRow) -> Rebuild:
        """Return whether two more builds of the model give the tensor the same bits. The first call makes the builds.

        UNKNOWN if the tensor requires grad or is in an unregistered module: its fix does not depend on the builds.
        """
        if row.tensor.requires_grad or find_unregistered_module(row.unregistered):
            return Rebuild.UNKNOWN
        if self._rebuilds is None:
            # No checkpoint holds these tensors.
            rows = [row for row in self.rows if row.unregistered is not None or row.persistent is False]
            self._rebuilds = _compare_builds(self.built, rows)
        return self._rebuilds.get(row.fqn, Rebuild.UNKNOWN)


def _compare_builds(built: BuiltModel, rows: list[TensorRow]) -> dict[str, Rebuild]:
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


def build_table(built: BuiltModel) -> TensorTable:
    """List the tensors of a built model, with their lines in the source. Do not move the model."""
    result = walk(built.listed_module)
    table = TensorTable(built, result)
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
        if row.saved and row.unregistered is not None and is_recomputed(row.unregistered):
            row.saved = False  # torch saves the tensor from which this tensor is computed, in the same memory
        if row.saved is False and row.facts.storage in saved_state.storages:
            row.notes.append("saved only under the name of a tied tensor, not under this name")
        if row.saved is None and saved_state.reason is None:
            row.notes.append("statecli does not know whether get_extra_state saves a copy of the tensor")
    return table


def _add_oddities(table: TensorTable) -> None:
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


def _add_registered(table: TensorTable, entry: RegisteredName) -> None:
    if entry.tensor is None:
        return
    place = _locate_registration(table, entry)
    persistent = None if entry.is_parameter else entry.persistent
    kind = Kind.PARAMETER if entry.is_parameter else Kind.BUFFER
    user_place = find_user_place(table, entry.owner, entry.attribute, place)
    row = TensorRow(entry.fqn, entry.tensor, read_facts(entry.tensor), kind, persistent, place, user_place, entry.key)
    _note_extent(row)
    table.rows.append(row)


def _locate_registration(table: TensorTable, entry: RegisteredName) -> SourceLine | None:
    """Return the line that assigned the tensor, or else the line that assigned its nearest parent module."""
    place = table.built.origins.locate(entry.owner, entry.attribute)
    path = entry.key.removesuffix(entry.attribute).rstrip(".")
    while place is None and path:
        parent_path, _, name = path.rpartition(".")
        place = table.built.origins.locate(table.get_module(parent_path), name)
        path = parent_path
    return place


def find_user_place(
    table: TensorTable, owner: nn.Module, attribute: str, place: SourceLine | None
) -> SourceLine | None:
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


def _add_unregistered(table: TensorTable) -> None:
    by_object = {id(new_row.tensor): new_row for new_row in reversed(table.rows)}
    by_storage = {new_row.facts.storage: new_row for new_row in reversed(table.rows)}
    for unregistered in table.walk.unregistered:
        row = by_object.get(id(unregistered.tensor))
        facts = read_facts(unregistered.tensor) if row is None else row.facts
        row_in_storage = by_storage.get(facts.storage)
        is_part = row is None and row_in_storage is not None and facts.elements <= row_in_storage.facts.elements
        # A recomputed tensor shares memory only until the first forward.
        if is_part and not is_recomputed(unregistered):
            row = row_in_storage
        if row is not None:
            row.aliases.append(unregistered.fqn)
            table.aliases[unregistered.fqn] = (row, unregistered)
            continue
        new_row = _build_unregistered_row(table, unregistered, facts)
        by_object[id(unregistered.tensor)] = new_row
        table.rows.append(new_row)


def _build_unregistered_row(table: TensorTable, unregistered: UnregisteredTensor, facts: TensorFacts) -> TensorRow:
    place, tensor = locate_assignment(table, unregistered), unregistered.tensor
    user_place = find_user_place(table, unregistered.owner, get_attribute(unregistered), place)
    row = TensorRow(
        unregistered.fqn, tensor, facts, Kind.UNREGISTERED, None, place, user_place, unregistered=unregistered
    )
    operation = row.derived_by = get_grad_fn_name(tensor)
    if operation is None and is_recomputed(unregistered):
        row.derived_by = "a hook of torch"
        row.notes.append("derived from registered tensors by a hook of torch, before each forward")
    elif operation:
        whose = "registered" if is_derived_from_registered(table, tensor) else "other"
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


def is_derived_from_registered(table: TensorTable, tensor: torch.Tensor) -> bool:
    """Return True if the tensor was computed from registered tensors only."""
    registered_ids = {id(entry.tensor) for entry in table.walk.registered}
    leaves = find_leaves(tensor)
    return leaves is not None and all(id(leaf) in registered_ids for leaf in leaves)


def _note_extent(row: TensorRow) -> None:
    """Add a note if a tensor has no shape, or if this process holds only a part of a DTensor."""
    if row.facts.shape is None and is_lazy(row.tensor):
        row.notes.append("uninitialized (lazy)")
        row.note_kind = NoteKind.UNINITIALIZED
    elif row.facts.shape is None:
        row.notes.append("nested: the parts differ in shape")
    elif (sharding := describe_sharding(row.tensor)) is not None:
        row.notes.append(sharding)


def get_attribute(unregistered: UnregisteredTensor) -> str:
    """Return the name of the owner's attribute through which the tensor was found."""
    return unregistered.steps[0].label.rpartition(".")[2]


def locate_assignment(table: TensorTable, unregistered: UnregisteredTensor) -> SourceLine | None:
    """Return the line that assigned the attribute of an unregistered tensor, or None if it is unknown."""
    first_step = unregistered.steps[0]
    if first_step.how == "hidden":
        return None  # the recorded line of this name assigned the registered tensor
    name = get_attribute(unregistered)
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


def is_recomputed(unregistered: UnregisteredTensor) -> bool:
    """Return True if a hook of old weight_norm, spectral_norm or pruning computes the tensor."""
    name = get_attribute(unregistered)
    hooks = unregistered.owner._forward_pre_hooks.values()
    torch_hooks = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
    return any(name in (vars(hook).get("name"), vars(hook).get("_tensor_name")) for hook in torch_hooks)


def find_unregistered_module(unregistered: UnregisteredTensor | None) -> str | None:
    """Return the name of the unregistered module that registers the tensor, or None."""
    is_inside_module = unregistered is not None and unregistered.steps[-1].how == "registered"
    return unregistered.fqn.rpartition(".")[0] if unregistered and is_inside_module else None
