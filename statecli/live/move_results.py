"""Move an instance of a model, and record in its tensor table which tensors follow the move."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from statecli.core.oddity_kind import OddityKind
from statecli.live import measure
from statecli.live.object_contents import has_own_to
from statecli.live.quantized_parameters import find_holding_tensor, has_lost_class
from statecli.live.source_line import SourceLine
from statecli.live.tensor_table import TensorTable, find_user_place, get_attribute, is_recomputed, locate_assignment
from statecli.live.walk import UnregisteredTensor, walk


def measure_own_move(table: TensorTable) -> None:
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


def try_move(table: TensorTable) -> measure.MoveTrial:
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


def record_move(table: TensorTable, trial: measure.MoveTrial) -> None:
    """Record which tensors follow the test move, and report separated ties and names of old memory."""
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


def _record_follows_device(table: TensorTable, trial: measure.MoveTrial) -> None:
    for row in table.rows:
        row.follows_device = None if row.fqn in table.copy_differences else trial.follows_device(row.fqn)


def _add_broken_ties(table: TensorTable, trial: measure.MoveTrial) -> None:
    ties: dict[str, _Tie] = {}
    for row in table.rows:
        is_measured = row.fqn in trial.after and row.fqn in trial.memories
        if not is_measured or (row.unregistered and is_recomputed(row.unregistered)):
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


def _add_stale_views(table: TensorTable, trial: measure.MoveTrial) -> None:
    for name, (row, unregistered) in table.aliases.items():
        if name in table.copy_differences or row.fqn in table.copy_differences:
            continue
        is_left = trial.follows_device(row.fqn) and trial.follows_device(name) is False
        if not is_left or _describe_reassignment(unregistered):
            continue
        holder = find_holding_tensor(unregistered)
        if holder is not None and (has_own_to(type(holder)) or has_lost_class(unregistered)):
            continue
        place = locate_assignment(table, unregistered)
        user_place = find_user_place(table, unregistered.owner, get_attribute(unregistered), place)
        message = f"{name} is another name of {row.fqn}, but still points to the old memory after a move"
        table.add_oddity(OddityKind.STALE_VIEW, message, name, user_place)


def _add_recomputed(table: TensorTable, trial: measure.MoveTrial) -> None:
    rows = [(row.fqn, row.unregistered) for row in table.rows]
    for name, unregistered in rows + [(name, alias) for name, (_, alias) in table.aliases.items()]:
        if unregistered is None or trial.follows_device(name) is not False:
            continue
        if reason := _describe_reassignment(unregistered):
            table.add_oddity(OddityKind.RECOMPUTED, f"{name} stays on the old device after a move; {reason}", name)


def _describe_reassignment(unregistered: UnregisteredTensor) -> str | None:
    """Describe how torch itself sets the attribute again before each use. Return None for other attributes."""
    if get_attribute(unregistered) in _DDP_BUFFER_ATTRIBUTES and _is_torch_ddp(type(unregistered.owner)):
        moment = "from the module's buffers before each synchronization"
        return f"DistributedDataParallel sets this attribute again {moment}, so no action is needed"
    recomputes = "torch recomputes the tensor from registered tensors before each forward"
    return recomputes if is_recomputed(unregistered) else None


#: Attributes set by `_assign_modules_buffers`, which torch calls each time before reading them.
_DDP_BUFFER_ATTRIBUTES = ("modules_buffers", "named_module_buffers")


def _is_torch_ddp(kind: type) -> bool:
    torch_class = nn.parallel.DistributedDataParallel
    method = "_assign_modules_buffers"
    return issubclass(kind, torch_class) and getattr(kind, method, None) is getattr(torch_class, method, None)
