"""Follow a run checkpoint by checkpoint, and keep only the last checkpoint and the norms of modules in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from statecli.commands.diff.settings import compare_settings
from statecli.commands.log.cache import Cache
from statecli.commands.log.checkpoints import Checkpoint
from statecli.commands.log.measure import (
    ComparedPair,
    Measured,
    compare_checkpoints,
    compute_distance,
    list_counted,
    map_figures,
    measure_checkpoint,
)
from statecli.commands.log.result import CheckpointRow, ModuleRow
from statecli.core.errors import StateError
from statecli.core.model_state import TensorKey
from statecli.storage import files

#: Largest number of settings in a row, because a configuration of thousands of lines may change.
MAX_SETTINGS = 100


class _Norms(msgspec.Struct):
    """L2 norms over the parameters of a module in a checkpoint. A norm is None if it is unknown.

    `previous_name`: name of the module in the checkpoint before; None if the checkpoint before lacks the module.
    """

    elements: int = 0
    norm: float | None = 0.0
    before: float | None = 0.0
    change: float | None = 0.0
    has_nan: bool = False
    previous_name: str | None = None
    parameters_changed: list[bool | None] = []

    @property
    def has_changed(self) -> bool | None:
        """True if a parameter changed since the previous checkpoint, or None if this is unknown."""
        if True in self.parameters_changed:
            return True
        return False if self.parameters_changed and None not in self.parameters_changed else None


class _Module(msgspec.Struct):
    """Measurements of a module over all checkpoints so far."""

    norms: list[float | None]
    changes: list[float | None]
    elements: int = 0
    last_moved: int | None = None
    has_nan: bool = False
    is_known: bool = True


class Follower:
    """Measure the checkpoints of a run in their order."""

    def __init__(self, cache: Cache, *, keeps_modules: bool = True) -> None:
        """Create a follower. If `keeps_modules` is False, it drops the norms of modules to save memory."""
        self._cache, self._keeps_modules = cache, keeps_modules
        self._last: Measured | None = None
        self._last_row: CheckpointRow | None = None
        self._count = 0
        self._modules: dict[str, _Module] = {}
        self._order: list[str] = []
        #: Tensors with NaN or an infinity in an earlier checkpoint.
        self._not_finite: set[TensorKey] = set()

    def add(self, checkpoint: Checkpoint) -> CheckpointRow:
        """Measure a checkpoint, compare it with the last readable checkpoint, and return its row."""
        measured: Measured | None = None
        pairs: Sequence[ComparedPair] = ()
        try:
            if checkpoint.error is not None:
                raise StateError(checkpoint.error)
            measured = measure_checkpoint(checkpoint.path, self._cache)
            deleted = self._find_deleted()
            if deleted:
                self._last = None
            if self._last is not None:
                pairs = compare_checkpoints(self._last, measured, self._cache)
            row = self._build_row(checkpoint, measured, pairs)
            row = replace(row, not_compared=(*row.not_compared, *deleted))
        except StateError as error:
            measured, pairs = None, ()
            row = CheckpointRow(checkpoint.path, checkpoint.step, error=str(error))
        is_repeated = self._last_row is not None and row.is_copy and row.step == self._last_row.step
        if self._keeps_modules:
            self._add_modules(measured, pairs, is_repeated=is_repeated)
        if measured is not None:
            self._last, self._last_row = measured, row
        self._count += 1
        return row

    def _find_deleted(self) -> tuple[str, ...]:
        """Return a message if a file of the previous checkpoint was deleted, else ()."""
        if self._last is None or all(files.exists(path) for path in self._last.versions):
            return ()
        return (f"{self._last.state.target}: was deleted before statecli could compare it with the next checkpoint",)

    def _build_row(self, checkpoint: Checkpoint, current: Measured, pairs: Sequence[ComparedPair]) -> CheckpointRow:
        counted_tensors = list_counted(current)
        norms = [figures.norm for _, figures in counted_tensors if figures.norm is not None]
        row = CheckpointRow(
            checkpoint.path,
            checkpoint.step,
            current.state.format,
            len(current.model.tensors),
            sum(tensor.elements for tensor, _ in counted_tensors),
            math.hypot(*norms) if norms else None,
            nan=sum(figures.nan for figures in current.figures),
            inf=sum(figures.inf for figures in current.figures),
            became_nan=self._find_new_nan(current, pairs),
            other_sections=tuple(name for name in current.state.sections if name not in current.model.sections),
            not_compared=tuple(
                f"{tensor.fqn}: {figures.reason}" for tensor, figures in counted_tensors if figures.reason is not None
            ),
        )
        if self._last is None:
            return row
        distance = compute_distance(self._last, current, pairs)
        reasons = (pair.change.reason for pair in pairs if pair.change.differs is None and pair.change.reason)
        return replace(
            row,
            compared_with=self._last_row.path if self._last_row else None,
            change=distance.change,
            relative_change=distance.relative_change,
            cosine=distance.cosine,
            changed=sum(_has_changed(pair) is True for pair in pairs),
            added=tuple(pair.match.output_row.fqn for pair in pairs if pair.match.before is None),
            removed=tuple(pair.match.output_row.fqn for pair in pairs if pair.match.after is None),
            settings=tuple(compare_settings(self._last.state, current.state, (None, None)).changes[:MAX_SETTINGS]),
            not_compared=(*row.not_compared, *reasons),
        )

    def _find_new_nan(self, current: Measured, pairs: Sequence[ComparedPair]) -> tuple[str, ...]:
        names: list[str] = []
        for pair in pairs if self._not_finite else ():
            old, new = pair.match.before, pair.match.after
            if old is not None and new is not None and old.key in self._not_finite:
                self._not_finite.add(new.key)
        for tensor, figures in zip(current.model.tensors, current.figures, strict=True):
            if (figures.nan or figures.inf) and tensor.key not in self._not_finite:
                self._not_finite.add(tensor.key)
                names.append(tensor.fqn)
        return tuple(names)

    # --- modules ------------------------------------------------------------------------------------------------------

    def _add_modules(self, current: Measured | None, pairs: Sequence[ComparedPair], *, is_repeated: bool) -> None:
        norms = {} if current is None else _measure_modules(self._last, current, pairs)
        if current is not None:
            self._order = list(norms)
        self._rename_modules(norms)
        for name in norms:
            if name not in self._modules:
                self._modules[name] = _Module([None] * self._count, [None] * self._count)
        for name, module in self._modules.items():
            entry = norms.get(name)
            module.norms.append(None if entry is None else entry.norm)
            module.changes.append(None if entry is None or is_repeated else _compute_relative(entry))
            if entry is None:
                continue
            module.elements, module.has_nan = entry.elements, entry.has_nan
            if entry.has_changed:
                module.last_moved, module.is_known = self._count, True
            elif entry.has_changed is None and pairs:
                module.is_known = False

    def _rename_modules(self, norms: Mapping[str, _Norms]) -> None:
        """Move the measurements of a renamed module, for example with a wrapper's prefix, to its new name."""
        renamed_modules = {}
        for name, entry in norms.items():
            old = entry.previous_name
            if old is None or old == name or old not in self._modules:
                continue
            if old not in norms or norms[old].previous_name != old:
                renamed_modules[name] = self._modules.pop(old)
        self._modules.update(renamed_modules)

    def list_modules(self) -> tuple[ModuleRow, ...]:
        """Return a row for each module of the last readable checkpoint, in the order of the checkpoint."""
        modules = {name: self._modules[name] for name in self._order}
        # Index of the last checkpoint with a known change of a module.
        last = max((n for m in modules.values() for n, value in enumerate(m.changes) if value is not None), default=0)
        return tuple(
            ModuleRow(
                name,
                module.elements,
                tuple(module.norms),
                tuple(module.changes),
                module.last_moved,
                module.last_moved is not None and module.last_moved < last and module.is_known,
                module.has_nan,
            )
            for name, module in modules.items()
        )


def _has_changed(pair: ComparedPair) -> bool | None:
    """Return True if the values or the dtype of the tensor changed, or None if unknown."""
    old, new = pair.match.before, pair.match.after
    if old is None or new is None:
        return False
    return True if old.dtype != new.dtype else pair.change.differs


def _compute_relative(norms: _Norms) -> float | None:
    if norms.change is None or norms.before is None or norms.has_changed is None:
        return None
    if not norms.change:
        return None if norms.has_nan and norms.has_changed else 0.0  # a change only to NaN has no size
    return norms.change / norms.before if norms.before else math.inf


def _measure_modules(last: Measured | None, current: Measured, pairs: Sequence[ComparedPair]) -> dict[str, _Norms]:
    norms: dict[str, _Norms] = {}
    counted_tensors = list_counted(current)
    for tensor, figures in counted_tensors:
        entry = norms.setdefault(tensor.fqn.rpartition(".")[0], _Norms())
        entry.elements += tensor.elements
        entry.norm = _join_norms(entry.norm, figures.norm)
        entry.has_nan = entry.has_nan or bool(figures.nan or figures.inf)
    if last is None:
        return norms
    old_figures = map_figures(last)
    is_counted = {id(tensor) for tensor, _ in counted_tensors}
    for pair in pairs:
        old, new = pair.match.before, pair.match.after
        if old is None or new is None or id(new) not in is_counted:
            continue
        name = new.fqn.rpartition(".")[0]
        entry = norms[name]
        if entry.previous_name != name:
            entry.previous_name = old.fqn.rpartition(".")[0]
        entry.parameters_changed.append(_has_changed(pair))
        entry.change = _join_norms(entry.change, pair.change.norm)
        entry.before = _join_norms(entry.before, old_figures[id(old)].norm)
    return norms


def _join_norms(total: float | None, norm: float | None) -> float | None:
    return None if total is None or norm is None else math.hypot(total, norm)
