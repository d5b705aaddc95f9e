"""Result of `statecli log`: a row for each checkpoint of a run, and the norms of each module over the steps."""

from __future__ import annotations

import msgspec

from statecli.commands.diff.result import ScalarChange
from statecli.core.error_causes import Failure
from statecli.core.finding import Finding
from statecli.core.model_state import Oddity

#: `Step.source` of a step from the name of a checkpoint; any other source is a setting.
NAME_SOURCE = "name"


class Step(msgspec.Struct, frozen=True):
    """Training step of a checkpoint. `source`: the setting that records the step, or `name` for a step in the name."""

    number: int
    source: str


class CheckpointRow(msgspec.Struct, frozen=True):
    """Row of a checkpoint. Norms cover the finite values of the model's parameters; tied parameters count once.

    Attributes:
        path: The target.
        step: Step of the checkpoint; None if neither its settings nor its name have a step.
        format: Format of the file or folder; None if the checkpoint could not be read.
        tensors: Number of tensors of the model, buffers too.
        elements: Number of elements of the parameters.
        norm: L2 norm of the parameters.
        compared_with: Path of the checkpoint before, used for the comparison.
        change: L2 norm of the difference from the checkpoint before, over the parameters in both.
        relative_change: `change` divided by the norm of the same parameters before; None if the norm before is zero.
        cosine: Cosine of the parameters before and now, over tensors finite in both.
        changed: Number of parameters and buffers whose values, dtype or shape changed; None for a first checkpoint.
        added, removed: Names only in this checkpoint, or only in the checkpoint before.
        nan, inf: Number of NaN or infinite elements.
        became_nan: Names of the tensors with NaN or an infinity for the first time in the run.
        stopped: Names of the modules that moved for the last time in this checkpoint.
        settings: Settings changed since the checkpoint before.
        other_sections: Sections outside of the norm: optimizer state, averaged weights.
        not_compared: A line for each tensor whose values could not be compared or have no norm.
        error: Why the checkpoint could not be read; the other fields are then empty.
    """

    path: str
    step: Step | None = None
    format: str | None = None
    tensors: int = 0
    elements: int = 0
    norm: float | None = None
    compared_with: str | None = None
    change: float | None = None
    relative_change: float | None = None
    cosine: float | None = None
    changed: int | None = None
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    nan: int = 0
    inf: int = 0
    became_nan: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    settings: tuple[ScalarChange, ...] = ()
    other_sections: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    error: str | None = None

    @property
    def is_copy(self) -> bool:
        """True if no tensor differs from the previous checkpoint."""
        return self.changed == 0 and not (self.added or self.removed or self.not_compared)


class ModuleRow(msgspec.Struct, frozen=True):
    """Row of a module that has parameters of its own, with one value for each checkpoint of the run.

    Attributes:
        name: FQN of the module in the last checkpoint, "" for parameters without a module.
        elements: Number of elements of its parameters in the last checkpoint with them.
        norms: L2 norm of its parameters in each checkpoint; None if not known.
        relative_changes: L2 norm of the difference from the checkpoint before, divided by the norm before; None if
            unknown.
        last_moved: Index of the last checkpoint with a difference from the checkpoint before; None without a
            difference.
        stopped: True if the module moved before, and has been equal bit for bit since `last_moved`.
        has_nan: True if its parameters have NaN or infinities in the last checkpoint.
    """

    name: str
    elements: int
    norms: tuple[float | None, ...]
    relative_changes: tuple[float | None, ...]
    last_moved: int | None
    stopped: bool
    has_nan: bool = False


class Log(msgspec.Struct, frozen=True):
    """Result of `statecli log`.

    Attributes:
        rows: The checkpoints in the order of their steps.
        modules: The modules in the order of the last checkpoint.
        findings: Values that became NaN, modules that stopped.
        notes: Source of the steps, checkpoints left out, sections that the norm does not count.
        changing: Settings changed in every checkpoint (a counter), left out of human-readable rows.
    """

    target: str
    rows: tuple[CheckpointRow, ...]
    modules: tuple[ModuleRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[Oddity, ...] = ()
    changing: tuple[str, ...] = ()

    @property
    def broken(self) -> list[Failure]:
        """The path and the error of each checkpoint that could not be read or compared."""
        errors = [Failure(row.path, row.error) for row in self.rows if row.error is not None]
        return errors + [Failure(row.path, line) for row in self.rows for line in row.not_compared]
