"""A built model -> `ModelState`: one row a tensor, with what was measured about it."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from msgspec import UNSET
from torch import nn

from statecli.core import tied_tensors as ties
from statecli.core.errors import UsageError
from statecli.core.format_traits import FormatTraits
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import SAMPLE_INPUT_NOTE, After, Evidence, Kind, ModelState, Oddity, Origin, Stats, TensorInfo
from statecli.live import measure, origin, suggest_fix
from statecli.live.build import Built
from statecli.live.tensors import Facts, derived_by, facts, is_lazy, kind_of, leaves_of
from statecli.live.walk import Held, Registered, Walk, in_code, walk

#: Attributes of a model that hold what it may be called with; Lightning keeps the second behind the first.
_INPUTS = ("example_input_array", "_example_input_array", "dummy_inputs")


@dataclass
class _Row:
    """A tensor under one name, while its table is being made."""

    fqn: str
    tensor: torch.Tensor
    facts: Facts
    kind: Kind
    persistent: bool | None
    owner: nn.Module
    place: tuple[str, int] | None
    key: str = ""
    held: Held | None = None
    aliases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: What it was computed from: its grad_fn, or in words.
    derived: str | None = None
    stats: Stats | None = None
    saved: bool | None = None
    moves: bool | None = None
    after: After | None = None


@dataclass
class _Sharing:
    """The rows of one storage: how many there are, the largest tensor (the first of several), and the first rows."""

    count: int = 0
    largest: _Row | None = None
    first: list[_Row] = field(default_factory=list)

    def add(self, row: _Row) -> None:
        self.count += 1
        if self.largest is None or row.facts.elements > self.largest.facts.elements:
            self.largest = row
        if len(self.first) <= suggest_fix.FEW_NAMES:
            self.first.append(row)


@dataclass
class _Sheet:
    built: Built
    found: Walk
    rows: list[_Row] = field(default_factory=list)
    #: alias -> the row it is a further name of, and the module that keeps it.
    aliases: dict[str, tuple[_Row, Held]] = field(default_factory=dict)
    oddities: list[Oddity] = field(default_factory=list)
    #: Of each name that a copy of the model does not hold as the model does: what the copy does.
    unlike: dict[str, str] = field(default_factory=dict)
    _by_storage: dict[int | str, _Sharing] = field(default_factory=dict)
    suggestions: suggest_fix.Suggestions = field(default_factory=suggest_fix.Suggestions)
    _modules: dict[str, nn.Module] = field(default_factory=dict)

    def module(self, name: str) -> nn.Module:
        """The registered module of that name; "" is the root."""
        if not self._modules:
            self._modules = {prefix.rstrip("."): module for prefix, module in self.found.modules}
        return self._modules[name]

    def in_storage_of(self, row: _Row) -> _Sharing:
        """The rows that lie in the storage of `row`, itself among them."""
        if not self._by_storage:
            for one in self.rows:
                self._by_storage.setdefault(one.facts.storage, _Sharing()).add(one)
        return self._by_storage[row.facts.storage]


def read(built: Built, target: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None) -> ModelState:
    """See `statecli.live.read`."""
    sheet = _sheet(built)
    _measure_values(sheet, stats_of)
    trial = _try_move(sheet)
    _judge(sheet, trial)
    if trial.reason is None and measure.has_own_move(built.listed, (one for _, one in sheet.found.modules)):
        _judge_by_own_move(sheet)
    return _state(sheet, target)


def listed(
    built: Built, target: str, why_not: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """See `statecli.live.listed`."""
    sheet = _sheet(built)
    _measure_values(sheet, stats_of)
    sheet.oddities.append(Oddity(OddityKind.NOT_MEASURED.value, f"cannot tell what moves: {why_not}"))
    return _state(sheet, target)


def _judge_by_own_move(sheet: _Sheet) -> None:
    """The class's own `.to` decides, and what the stand-in left behind may be moved by its own `_apply`.

    Such code may look at the device, or at values when it makes its tensors again: where a move to meta cannot tell, a
    fake CUDA device does. Where neither can, what the stand-in left behind may move all the same.
    """
    built = sheet.built
    own_to, on_meta = measure.overrides_to(built.module), built.init_device == "meta"
    own = measure.by_own_to(built, walk(built.module)) if own_to and not on_meta else None
    if own is not None:
        _judge_rows(sheet, own)
        return
    if not own_to and all(row.moves is not False for row in sheet.rows):
        return
    follows = None if on_meta else measure.by_fake_gpu(built)
    for row in sheet.rows:
        if follows is not None and row.moves is not None:
            row.moves = follows.get(row.fqn, row.moves)
        elif row.moves is False and own_to:
            row.moves = None
            row.notes.append(f"cannot tell whether the class's own .to moves it: {_UNTRIED[on_meta]}")


#: Why the class's own `.to` could not be tried, and why on meta.
_UNTRIED = {
    False: "it fails when moving to meta and to a fake CUDA device",
    True: "nothing can be seen of it on meta; build it on the cpu",
}


def _try_move(sheet: _Sheet) -> measure.Trial:
    """What a move shows of the instance that may be moved; notes where that instance is unlike the original."""
    built = sheet.built
    if built.original is None:
        return measure.stand_in(built, sheet.found)
    found = walk(built.module)
    copied = found.layout()
    for name, how in sheet.found.layout().items():
        if copied.get(name) is not how:
            does = "does not hold it" if name not in copied else f"holds it as {copied[name].value}"
            sheet.unlike[name] = does
            message = (
                f"{name} is {how.value} of the model, and a copy of the model {does}: cannot tell whether it moves"
            )
            sheet.oddities.append(Oddity(OddityKind.UNLIKE_COPY.value, message, name))
    return measure.stand_in(built, found)


def _measure_values(sheet: _Sheet, stats_of: Callable[[torch.Tensor], Stats] | None) -> None:
    for row in sheet.rows if stats_of else ():
        row.stats = stats_of(row.tensor) if stats_of and not is_lazy(row.tensor) else None


def move(
    built: Built, target: str, device: str, *, stats_of: Callable[[torch.Tensor], Stats] | None = None
) -> ModelState:
    """See `statecli.live.move`."""
    wanted = _device(device)
    sheet = _sheet(built)
    _check_move(sheet, target, wanted)
    _measure_values(sheet, stats_of)
    trial = _try_move(sheet)
    _judge(sheet, trial)
    # A failed trial leaves the instance half moved.
    module = built.module if trial.reason is None and trial.identity else built.again()
    with built.user_code(f"moving it to {device}"):
        module = measure.moved(module, module.to(wanted))
    now: dict[str, torch.Tensor] = {}
    for name, tensor in measure.names(walk(module)):
        now.setdefault(name, tensor)
    for row in sheet.rows:
        row.after = _after(None if row.fqn in sheet.unlike else now.get(row.fqn), wanted)
        if row.after.followed is not None:
            if row.moves is not None and row.moves is not row.after.followed:
                row.notes.append(_treated_apart(row.moves, wanted))
            row.moves = row.after.followed
    return _state(sheet, target)


# --- the rows -----------------------------------------------------------------------------------------------


def _sheet(built: Built) -> _Sheet:
    found = walk(built.listed)
    sheet = _Sheet(built, found)
    _odd_places(sheet)
    for entry in found.registered:
        _add_registered(sheet, entry)
    _add_held(sheet)
    if not sheet.rows and not sheet.found.packed:
        sheet.oddities.append(
            Oddity(OddityKind.NO_TENSORS.value, "the model holds no tensor: there is nothing to inspect")
        )
    saved = measure.saved(built, found)
    if saved.reason is not None:
        sheet.oddities.append(Oddity("no-state-dict", f"cannot tell what is saved: {saved.reason}"))
    for row in sheet.rows:
        row.saved = saved.holds(row.key, row.fqn, row.tensor, row.facts.storage)
        if row.saved and row.held is not None and _is_recomputed(row.held):
            row.saved = False  # what it is computed from is, in the same memory
        if row.saved is False and row.facts.storage in saved.storages:
            row.notes.append("not saved under its own name; what it is tied to is")
        if row.saved is None and saved.reason is None:
            row.notes.append("cannot tell whether get_extra_state saves a copy of it")
    return sheet


def _odd_places(sheet: _Sheet) -> None:
    for name in sheet.found.cycles:
        sheet.oddities.append(Oddity("module-cycle", f"{name} contains itself; it is listed once", name))
    for name, why in sheet.found.cut:
        shown = name if len(name) <= 80 else f"{name[:60]}…"
        sheet.oddities.append(
            Oddity(OddityKind.NOT_SEARCHED.value, f"{shown} {why}: tensors beyond are not listed", shown)
        )
    if measure.overrides_cuda_alone(sheet.built.module):
        message = f"{type(sheet.built.module).__name__}.cuda is its own and is not tried: what moves is what .to moves"
        sheet.oddities.append(Oddity("own-cuda", message))
    for prefix, module in sheet.found.modules:
        count = in_code(module)
        if count:
            name = prefix.rstrip(".")
            what = f"the TorchScript code of {name or 'the model'} holds tensors as constants ({count})"
            message = f"{what}: no move and no state_dict reaches them, and they are not listed"
            sheet.oddities.append(Oddity(OddityKind.SCRIPT_MODULE.value, message, name or None))
    for name in sheet.found.packed:
        message = f"{name} holds weights in C++ that cannot be seen; they are not listed"
        sheet.oddities.append(Oddity(OddityKind.PACKED_PARAMS.value, message, name))
    for entry in sheet.found.registered:
        if entry.tensor is None and entry.is_parameter:
            sheet.oddities.append(
                Oddity(OddityKind.NONE_PARAMETER.value, f"{entry.fqn} is registered as None", entry.fqn)
            )


def _add_registered(sheet: _Sheet, entry: Registered) -> None:
    if entry.tensor is None:
        return
    place = _registered_at(sheet, entry)
    persistent = None if entry.is_parameter else entry.persistent
    kind = kind_of(entry.is_parameter)
    row = _Row(entry.fqn, entry.tensor, facts(entry.tensor), kind, persistent, entry.owner, place, entry.key)
    _note_no_shape(row)
    sheet.rows.append(row)


def _registered_at(sheet: _Sheet, entry: Registered) -> tuple[str, int] | None:
    """The line that assigned it, else the nearest module that it is in: what was deep-copied has passed no setter."""
    place = sheet.built.origins.raw(entry.owner, entry.attribute)
    path = entry.key.removesuffix(entry.attribute).rstrip(".")
    while place is None and path:
        above, _, name = path.rpartition(".")
        place = sheet.built.origins.raw(sheet.module(above), name)
        path = above
    return place


def _add_held(sheet: _Sheet) -> None:
    by_object = {id(row.tensor): row for row in reversed(sheet.rows)}
    by_storage = {row.facts.storage: row for row in reversed(sheet.rows)}
    for held in sheet.found.held:
        known = by_object.get(id(held.tensor))
        about = facts(held.tensor) if known is None else known.facts
        shared = by_storage.get(about.storage)
        is_part = known is None and shared is not None and about.elements <= shared.facts.elements
        if is_part and not _is_recomputed(held):  # which shares memory until the first forward only
            known = shared
        if known is not None:
            known.aliases.append(held.fqn)
            sheet.aliases[held.fqn] = (known, held)
            continue
        row = _unregistered(sheet, held, about)
        by_object[id(held.tensor)] = row
        sheet.rows.append(row)


def _unregistered(sheet: _Sheet, held: Held, about: Facts) -> _Row:
    row = _Row(held.fqn, held.tensor, about, Kind.UNREGISTERED, None, held.owner, _place(sheet, held), held=held)
    operation = row.derived = derived_by(held.tensor)
    if operation is None and _is_recomputed(held):
        row.derived = "a hook of torch"
        row.notes.append("derived from registered tensors by a hook of torch, before each forward")
    elif operation:
        known = {id(entry.tensor) for entry in sheet.found.registered}
        leaves = leaves_of(held.tensor)
        whose = "registered" if leaves is not None and all(id(leaf) in known for leaf in leaves) else "other"
        row.notes.append(f"derived from {whose} tensors (grad_fn {operation})")
    if held.steps[0].how == "class" or any(step.how == "class" for step in held.steps):
        row.notes.append("class attribute, shared by all instances")
    if held.steps[0].how == "hidden":
        row.notes.append("hides what is registered under that name: Python reads this one")
    if held.steps[-1].how == "registered":
        what = "parameter" if issubclass(type(held.tensor), nn.Parameter) else "buffer"
        row.notes.append(f"{what} of an unregistered module")
    _note_no_shape(row)
    return row


def _note_no_shape(row: _Row) -> None:
    if row.facts.shape is None:
        row.notes.append("uninitialized (lazy)" if is_lazy(row.tensor) else "nested: its parts differ in shape")


def _place(sheet: _Sheet, held: Held) -> tuple[str, int] | None:
    first = held.steps[0]
    if first.how == "hidden":
        return None  # the line noted for that name is the registered one's
    name = first.label.rpartition(".")[2]
    if first.how != "class":
        return sheet.built.origins.raw(held.owner, name) or _of_function(held)
    for base in type(held.owner).__mro__:
        if name in vars(base):
            return origin.class_attribute(base, name)
    return None


def _of_function(held: Held) -> tuple[str, int] | None:
    """Where the function begins that has captured it: a hook is no attribute that anybody has assigned."""
    holders = (step.parent.held for step in held.steps if step.parent and step.how in ("closure", "default"))
    code = next((holder.__code__ for holder in holders if type(holder) is types.FunctionType), None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def _is_input(sheet: _Sheet, row: _Row) -> bool:
    """Whether the model itself holds it as something to be called with, and nothing else holds it."""
    helds = [row.held, *(sheet.aliases[alias][1] for alias in row.aliases)]
    return all(
        held is not None
        and held.owner is sheet.built.listed
        and held.steps[0].label.rpartition(".")[2] in _INPUTS
        and held.steps[0].how in ("attribute", "class")
        for held in helds
    )


# --- what the move showed -----------------------------------------------------------------------------------


def _judge(sheet: _Sheet, trial: measure.Trial) -> None:
    if trial.reason is not None:
        sheet.oddities.append(Oddity(OddityKind.NOT_MEASURED.value, f"cannot tell what moves: {trial.reason}"))
        return
    _judge_rows(sheet, trial)
    for row in sheet.rows:
        if row.fqn in sheet.unlike:
            row.notes.append(f"cannot tell whether it moves: a copy of the model {sheet.unlike[row.fqn]}")
        elif row.fqn not in trial.after:
            row.notes.append("gone after a move: the model clears it")
    if trial.identity:
        _broken_ties(sheet, trial)
        _note_recomputed(sheet, trial)
        _stale_views(sheet, trial)


def _judge_rows(sheet: _Sheet, trial: measure.Trial) -> None:
    for row in sheet.rows:
        row.moves = None if row.fqn in sheet.unlike else trial.followed(row.fqn)


def _broken_ties(sheet: _Sheet, trial: measure.Trial) -> None:
    ties: dict[int | str, _Tie] = {}
    for row in sheet.rows:
        if row.fqn not in trial.after or row.fqn not in trial.before or (row.held and _is_recomputed(row.held)):
            continue
        # As it was in the instance that was moved: a copy may have parted what the model itself has tied.
        tie, after = ties.setdefault(trial.before[row.fqn], _Tie()), trial.after[row.fqn][1]
        count, names = tie.apart_from(after)
        if count:
            shown = ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")
            message = f"{row.fqn} shares one storage with {shown}, and a move gives each its own"
            sheet.oddities.append(Oddity(OddityKind.UNTIED_BY_MOVE.value, message, row.fqn))
        tie.add(row.fqn, after)


#: Names that a broken tie is shown with.
_FEW_TIED = 3


@dataclass
class _Tie:
    """Names that lay in one storage before a move: how many lie in each storage after it, and the first of them.

    `first` has at most three names of a storage, and six in all: for any storage, three names that lie in others.
    """

    counts: dict[int | str, int] = field(default_factory=dict)
    total: int = 0
    first: list[tuple[str, int | str]] = field(default_factory=list)

    def add(self, fqn: str, after: int | str) -> None:
        known = self.counts.get(after, 0)
        if known < _FEW_TIED and len(self.first) < 2 * _FEW_TIED:
            self.first.append((fqn, after))
        self.counts[after] = known + 1
        self.total += 1

    def apart_from(self, after: int | str) -> tuple[int, list[str]]:
        """How many names lie in other storages than `after`, and the first of them."""
        names = [fqn for fqn, storage in self.first if storage != after]
        return self.total - self.counts.get(after, 0), names[:_FEW_TIED]


def _stale_views(sheet: _Sheet, trial: measure.Trial) -> None:
    for name, (row, held) in sheet.aliases.items():
        if name in sheet.unlike or row.fqn in sheet.unlike:
            continue
        if not trial.followed(row.fqn) or trial.followed(name) is not False or _set_anew(held):
            continue
        origin = sheet.built.origins.shown(_place(sheet, held))
        line = f" (assigned at {origin.file}:{origin.line})" if origin else ""
        message = f"{name}{line} is another name of {row.fqn}, and after a move it still points at the old storage"
        sheet.oddities.append(Oddity(OddityKind.STALE_VIEW.value, message, name, origin=origin or UNSET))


def _note_recomputed(sheet: _Sheet, trial: measure.Trial) -> None:
    aliases = [(name, held) for name, (_, held) in sheet.aliases.items()]
    for name, held in [(row.fqn, row.held) for row in sheet.rows if row.held is not None] + aliases:
        how = _set_anew(held) if trial.followed(name) is False else None
        if how:
            sheet.oddities.append(Oddity(OddityKind.RECOMPUTED.value, f"{name} stays behind on a move; {how}", name))


def _set_anew(held: Held) -> str | None:
    """How torch itself sets this attribute anew before it reads it, if so."""
    name = held.steps[0].label.rpartition(".")[2]
    if name in _OF_DDP and _is_ddp(type(held.owner)):
        return "DistributedDataParallel lists the buffers anew before it synchronizes them"
    return f"torch {_RECOMPUTED} before each forward" if _is_recomputed(held) else None


#: What `_assign_modules_buffers` sets, which torch calls each time before it reads them.
_OF_DDP = ("modules_buffers", "named_module_buffers")


def _is_ddp(kind: type) -> bool:
    torchs = nn.parallel.DistributedDataParallel
    own = "_assign_modules_buffers"
    return issubclass(kind, torchs) and getattr(kind, own, None) is getattr(torchs, own, None)


_RECOMPUTED = "recomputes it from what is registered"


def _is_recomputed(held: Held) -> bool:
    """Whether it is what old weight_norm, spectral_norm or pruning computes in a hook."""
    name = held.steps[0].label.rpartition(".")[2]
    hooks = held.owner._forward_pre_hooks.values()
    ours = [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]
    return any(name in (vars(hook).get("name"), vars(hook).get("_tensor_name")) for hook in ours)


# --- a real move --------------------------------------------------------------------------------------------


def _device(text: str) -> torch.device:
    try:
        wanted = torch.device(text)
    except RuntimeError as error:
        raise UsageError(f"--to {text}: torch knows no such device; cuda, cuda:1 and meta are devices") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--to {text}: there is no CUDA here; --to meta makes the same check on any machine")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--to {text}: this machine has {torch.cuda.device_count()} CUDA device(s), numbered from 0")
    try:
        return torch.empty(0, device=wanted).device  # "cuda" is the current device, "cuda:0"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--to {text}: no such device here; --to meta makes the same check on any machine") from error


def _check_move(sheet: _Sheet, target: str, wanted: torch.device) -> None:
    if not sheet.rows:
        why = " that can be seen: its weights are packed in C++" if sheet.found.packed else ""
        raise UsageError(f"{target}: the model holds no tensor{why}, so there is nothing to move")
    devices = {row.facts.device for row in sheet.rows}
    if devices == {str(wanted)}:
        instead = "leave --init-device out" if wanted.type == "meta" else "use --to meta"
        raise UsageError(f"{target}: everything is on {wanted} already, so moving it there proves nothing; {instead}")
    if "meta" in devices and wanted.type != "meta":
        raise UsageError(f"{target}: it was built on meta and holds no values to move to {wanted}; build it on the cpu")


def _after(tensor: torch.Tensor | None, wanted: torch.device) -> After:
    if tensor is None:
        return After(None, None)
    return After(str(tensor.device), tensor.device == wanted)


def _treated_apart(moves: bool, wanted: torch.device) -> str:
    """The stand-in moves within one device; a class may treat the device itself apart (`if not t.is_meta`)."""
    other = "follows to new memory" if moves else "stays in its memory"
    return f"{other} on the device it is on: its class treats {wanted.type} apart"


# --- the state ----------------------------------------------------------------------------------------------


def _state(sheet: _Sheet, target: str) -> ModelState:
    numbers: dict[int | str, int] = {}
    for row in sheet.rows:
        numbers.setdefault(row.facts.storage, len(numbers))
    rows = [_info(sheet, row, numbers[row.facts.storage]) for row in sheet.rows]
    return ties.fill_tied_to(
        ModelState(target, "module", tuple(rows), oddities=tuple(sheet.oddities), traits=FormatTraits(is_class=True))
    )


def _info(sheet: _Sheet, row: _Row, number: int) -> TensorInfo:
    about, is_input = row.facts, _is_input(sheet, row)
    if is_input:
        row.notes.append(SAMPLE_INPUT_NOTE)
    return TensorInfo(
        fqn=row.fqn,
        dtype=about.dtype,
        shape=about.shape,
        elements=about.elements,
        nbytes=about.nbytes,
        kind=row.kind,
        evidence=Evidence.REGISTERED,
        persistent=row.persistent,
        device=about.device,
        requires_grad=about.requires_grad,
        saved=row.saved,
        moves=row.moves,
        origin=_origin(sheet, row),
        layout=about.layout,
        aliases=tuple(row.aliases),
        note="; ".join(row.notes) or None,
        fix=None if is_input else _fix(sheet, row),
        after=row.after,
        stats=row.stats,
        storage=number,
        storage_bytes=about.storage_bytes,
        storage_offset=about.storage_offset,
        within=_within(row.held),
        derived=row.derived,
        is_input=is_input,
    )


def _within(held: Held | None) -> str | None:
    outside = held is not None and held.steps[-1].how == "registered"
    return held.fqn.rpartition(".")[0] if held and outside else None


def _origin(sheet: _Sheet, row: _Row) -> Origin | None:
    return sheet.built.origins.shown(row.place)


def _fix(sheet: _Sheet, row: _Row) -> str | None:
    if row.held is None or row.moves is not False or row.derived:
        return None
    name = row.held.steps[0].label.rpartition(".")[2]
    sharing = sheet.in_storage_of(row)
    if sharing.largest is not None and sharing.largest.facts.elements > row.facts.elements:
        return suggest_fix.part_of(sharing.largest.fqn)
    repeated = sheet.built.origins.repeated(row.held.owner, name)
    return sheet.suggestions.suggest(row.held, row.place, repeated=repeated, others=_others(sheet, row, sharing))


def _others(sheet: _Sheet, row: _Row, sharing: _Sharing) -> suggest_fix.Others:
    """The further names of the memory of `row`: its aliases, then the other rows that lie there."""
    names = [*row.aliases[: suggest_fix.FEW_NAMES], *(other.fqn for other in sharing.first if other is not row)]
    same = sharing.count == 1 and all(sheet.aliases[alias][1].tensor is row.tensor for alias in row.aliases)
    return suggest_fix.Others(tuple(names[: suggest_fix.FEW_NAMES]), len(row.aliases) + sharing.count - 1, same)
