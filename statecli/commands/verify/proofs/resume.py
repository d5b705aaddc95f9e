"""Run the proof `resume`: train, save, build again, load, continue, and compare with uninterrupted training.

A value outside of the checkpoint starts again after the load. To find the cause of a difference, all such values but
one are restored after the load, and the training is repeated. If the training still differs, the value left out is
lost. If the training differs although all values are restored, the cause is unknown, and the proof is inconclusive.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from statecli.commands.verify import check_builder, kept_values, rules
from statecli.commands.verify.kept_values import Parts, Slot, Values, list_differing_parts
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.proofs.step import find_optimizer_class
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.commands.verify.resumed_training import (
    STEPS,
    STEPS_BEFORE,
    SavedTraining,
    Trainer,
    TrainingRecord,
    find_effect,
)
from statecli.core import registration_rules
from statecli.core.finding import Consequence, Wording
from statecli.core.model_state import Kind, Origin, TensorInfo
from statecli.core.option_defaults import RESUME_OPTIMIZER
from statecli.core.units import format_origin, plural
from statecli.live import measure, tensor_bits
from statecli.live.metric_states import MAKE_PERSISTENT_HELP, SAVED_ON_REQUEST_REASON, MetricStates
from statecli.live.tensors import is_lazy

HOW = f"{STEPS_BEFORE} training steps, save, build again, load, {STEPS - STEPS_BEFORE} more steps"
#: Largest number of values to test, each in a separate training. Further values rarely have causes of their own.
MAX_SLOTS = 16


def prove(subject: ModelUnderTest, optimizer: str | type = RESUME_OPTIMIZER) -> Check:
    """Compare a resumed training with an uninterrupted training. Raises UsageError for an unknown optimizer."""
    made_by = find_optimizer_class(optimizer)
    skipped = check_builder.check_without_values(subject, Name.RESUME, HOW, "train")
    if skipped is None and subject.inputs is None:
        skipped = subject.skip_without_inputs(Name.RESUME, HOW)
    return skipped or _Proof(subject, made_by).check()


class _Proof(Proof):
    def __init__(self, subject: ModelUnderTest, made_by: type[torch.optim.Optimizer]) -> None:
        super().__init__(subject, Name.RESUME, f"{HOW}, with {made_by.__name__}", "resumed")
        self._made_by = made_by
        self._metrics: MetricStates | None = None
        self._skipped_slots: list[Slot] = []
        self._unstable_parts: dict[Slot, frozenset[str]] = {}
        self._has_cause = False

    def _run(self) -> None:
        trainer = Trainer(self._subject, self._made_by)
        training = trainer.train()
        loaded_values, resumed = trainer.resume(training)
        # A slot that the training has removed, such as a hook of the first call, is not state.
        unrestored_slots = [slot for slot in _list_differing(training.values, loaded_values) if slot in training.values]
        recovered = find_effect(training.record, resumed) is None and not _list_differing(
            training.record.values, resumed.values, unrestored_slots
        )
        if not recovered:
            self._find_causes(trainer, training, loaded_values, unrestored_slots)
            effect = find_effect(training.record, resumed, excluded_slots=self._skipped_slots)
            if effect is not None and not (self._has_cause or self._reasons):
                self._reasons.append(
                    f"after the load, {effect}, but no single attribute of the model explains the difference; look "
                    "for a value that several attributes store, or that depends on the time"
                )
        tensors = measure.map_tensors(training.module)
        for row in self._subject.state.tensors:
            if row.fqn in self._subject.state.recomputed:
                self._cells[row.fqn] = check_builder.skip_cell(check_builder.RECOMPUTED_REASON)
            elif not self._reasons:
                self._cells.setdefault(row.fqn, self._judge_resumed(row, tensors.get(row.fqn)))

    def _judge_resumed(self, row: TensorInfo, tensor: torch.Tensor | None) -> Cell:
        """Return the cell of a tensor without a finding. In copied instances, an unsaved tensor is not tested."""
        if tensor is not None and not is_lazy(tensor) and tensor_bits.is_same(tensor, tensor) is None:
            return check_builder.build_inconclusive_cell("the values cannot be compared")
        is_unsaved = row.saved is False and row.fqn not in self._subject.created_by_forward
        if is_unsaved and not self._subject.rebuilds:
            return check_builder.judge_unsaved_in_copy(row)
        return Cell(Verdict.PASSED)

    # --- causes --------------------------------------------------------------------------------------------------

    def _find_causes(
        self, trainer: Trainer, training: SavedTraining, loaded_values: Values, unrestored_slots: list[Slot]
    ) -> None:
        _, complete = trainer.resume(training, unrestored_slots)
        if (effect := find_effect(training.record, complete)) is not None:
            self._reasons.append(self._explain_unknown_cause(trainer, training, effect))
            return
        # Two trainings with equal values differ in the time of day, or in an object that cannot be read.
        self._unstable_parts = {
            slot: frozenset(list_differing_parts(training.record.values.get(slot), complete.values.get(slot)))
            for slot in unrestored_slots
        }
        unrestored_slots = self._leave_metrics_out(
            trainer,
            training,
            loaded_values,
            [slot for slot in unrestored_slots if self._list_lost_parts(slot, training.values, loaded_values)],
        )
        for slot in unrestored_slots[:MAX_SLOTS]:
            _, record = trainer.resume(training, [other for other in unrestored_slots if other is not slot])
            self._judge(slot, training, loaded_values, record)
        if len(unrestored_slots) > MAX_SLOTS:
            self._reasons.append(
                f"a load does not restore {plural(len(unrestored_slots) - MAX_SLOTS, 'more value')}; statecli did not "
                "check whether they change the training"
            )

    def _list_lost_parts(self, slot: Slot, first: Values, second: Values) -> list[str]:
        """Return the paths at which two trainings differ, except paths that differ even between two equal trainings."""
        unstable_parts = self._unstable_parts[slot]
        return [part for part in list_differing_parts(first.get(slot), second.get(slot)) if part not in unstable_parts]

    def _leave_metrics_out(
        self, trainer: Trainer, training: SavedTraining, loaded_values: Values, unrestored_slots: list[Slot]
    ) -> list[Slot]:
        """Remove torchmetrics metrics from `unrestored_slots`, unless the metrics change the training."""
        self._metrics = MetricStates(training.module)
        metric_slots = [slot for slot in unrestored_slots if self._is_of_metric(slot)]
        others = [slot for slot in unrestored_slots if slot not in metric_slots]
        if not metric_slots:
            return unrestored_slots
        _, record = trainer.resume(training, others)
        if find_effect(training.record, record, excluded_slots=metric_slots) is not None:
            return unrestored_slots
        self._skipped_slots = metric_slots
        for slot in metric_slots:
            for row in self._list_rows(slot, self._list_lost_parts(slot, training.values, loaded_values)):
                self._cells[row.fqn] = check_builder.skip_cell(SAVED_ON_REQUEST_REASON)
        return others

    def _is_of_metric(self, slot: Slot) -> bool:
        return slot.owner_kind == "module" and self._metrics is not None and self._metrics.has(slot.fqn)

    def _explain_unknown_cause(self, trainer: Trainer, training: SavedTraining, effect: str) -> str:
        if find_effect(training.record, trainer.train().record) is not None:
            return (
                "two training runs with the same seed differ, so statecli cannot compare a resumed run; look for code "
                "that uses the time, threads, uuid or an unseeded random generator"
            )
        return (
            f"after the load, {effect}, but no attribute of the model explains the difference; "
            "look for a value in a closure, a partial, a slot, an iterator, or an object of a library written in C"
        )

    def _judge(self, slot: Slot, training: SavedTraining, loaded_values: Values, record: TrainingRecord) -> None:
        """Report a value that a load does not restore, if the training or the value differs after the load."""
        effect = find_effect(training.record, record, excluded_slots=(slot,))
        self._has_cause |= effect is not None
        remains = bool(self._list_lost_parts(slot, training.record.values, record.values))
        is_saved = slot not in training.initial
        is_changed = is_saved or bool(self._list_lost_parts(slot, training.initial, training.values))
        is_harmless = _is_of_torch(slot, training) or self._is_of_metric(slot)
        if effect is None and (not (remains and is_changed) or is_harmless):
            return
        differing = self._list_lost_parts(slot, training.values, loaded_values)
        consequence = effect or "in the steps that statecli ran, no output depends on the value"
        rows = self._list_rows(slot, differing)
        if rows:
            running = all(part in loaded_values.get(slot, {}) for part in differing)
            case = "lost" if effect or running else "no effect"
            for row in rows:
                help = MAKE_PERSISTENT_HELP if self._is_of_metric(slot) else check_builder.build_saved_fix(row)
                self._report_tensor(row, consequence, case, help, is_changed=is_changed, is_saved=is_saved)
            return
        case = "lost" if effect else "no effect"
        self._report_value(slot, training, loaded_values, differing, consequence, case)

    def _list_rows(self, slot: Slot, differing: list[str]) -> list[TensorInfo]:
        if slot.owner_kind != "module":
            return []
        rows = self._subject.rows_by_fqn
        return [rows[f"{slot.fqn}{part}"] for part in differing if f"{slot.fqn}{part}" in rows]

    # --- findings ------------------------------------------------------------------------------------------------

    def _report_tensor(
        self,
        row: TensorInfo,
        consequence: str,
        case: str,
        fix: check_builder.Help,
        *,
        is_changed: bool,
        is_saved: bool,
    ) -> None:
        rule, help, wording = rules.LOST_BY_RESUMING, None, None
        if row.kind is Kind.UNREGISTERED:
            rule, help = registration_rules.choose_rule(row), fix
            text = f"starts again at its initial value when training is resumed: {consequence}"
            wording = registration_rules.build_wording(row, Consequence(text))
        elif is_saved:
            description, help = "in state_dict(), but load_state_dict() does not restore it", _LOAD_HELP
        elif row.persistent is False:
            reason = "training changes it" if is_changed else "the constructor sets other values each time"
            description, help = f"a buffer with persistent=False; {reason}", registration_rules.PERSISTENT_HELP
        else:
            description = "not in state_dict()"
        wording = wording or Wording(f"{description}: {consequence}", row.fqn)
        self.report(rule, wording, row.fqn, help=help, severity=rule.cases[case])
        self._cells[row.fqn] = Cell(Verdict.FAILED, reason="not restored by a load")

    def _report_value(
        self,
        slot: Slot,
        training: SavedTraining,
        loaded_values: Values,
        differing: list[str],
        consequence: str,
        case: str,
    ) -> None:
        is_generator = kept_values.is_generator(training.copies.values.get(slot))
        part = differing[0] if len(differing) == 1 and not is_generator else ""
        name = f"{slot.fqn}{part}"
        if is_generator:
            loss = "the random generator starts again in a new instance"
        else:
            loss = _describe_loss(slot, part, training.values, loaded_values)
        message = f"{name}: {loss}, because state_dict() does not contain the value: {consequence}"
        fix = self._build_fix(slot, part, training)
        if slot.owner_kind == "module":
            fix = check_builder.address_to_library(type(training.module.get_submodule(slot.path)), fix)
        origin = self._find_line(slot, training)
        help = check_builder.PlacedHelp(f"{fix}; assigned at {format_origin(origin)}" if origin else fix, origin)
        rule = rules.LOST_BY_RESUMING
        self.report(rule, message, name, help=help, severity=rule.cases[case])

    def _build_fix(self, slot: Slot, part: str, training: SavedTraining) -> str:
        """Return the fix for a lost value: a `register_buffer` line for a number, or advice for any other value."""
        value = training.copies.values.get(slot)
        if isinstance(value, torch.Generator):
            return _EXTRA_STATE.format(f"self.{slot.name}.get_state()")
        if slot.owner_kind != "module":
            return "keep the value in a buffer of the model, and do not change the buffer in other code"
        if type(value) in (bool, int, float):
            return f'call self.register_buffer("{slot.name}", torch.tensor(...)), and change the buffer in place'
        return _EXTRA_STATE.format(f"self.{slot.name}{part}")

    def _find_line(self, slot: Slot, training: SavedTraining) -> Origin | None:
        if slot.owner_kind != "module":
            return None
        module: Any = training.module.get_submodule(slot.path)
        return training.lines.describe(training.lines.locate(module, slot.name))


_EXTRA_STATE = "return {0} from get_extra_state(), and restore the value in set_extra_state()"
_LOAD_HELP = "check load_state_dict, _load_from_state_dict and the load hooks of the class"


def _is_of_torch(slot: Slot, training: SavedTraining) -> bool:
    """Return True for an attribute of a torch module, such as `in_channels` of a lazy convolution."""
    return slot.owner_kind == "module" and type(training.module.get_submodule(slot.path)).__module__.startswith(
        "torch."
    )


def _list_differing(first: Values, second: Values, candidates: Collection[Slot] | None = None) -> list[Slot]:
    slots = dict.fromkeys((*first, *second)) if candidates is None else candidates
    return [slot for slot in slots if list_differing_parts(first.get(slot), second.get(slot))]


#: Largest number of characters of a value in a message.
_MAX_VALUE_CHARACTERS = 40


def _describe_loss(slot: Slot, part: str, saved_values: Values, loaded_values: Values) -> str:
    """Describe the loss of a value: the saved and the new value, if both are short."""
    before, after = (_describe_value(values.get(slot, {}), part) for values in (saved_values, loaded_values))
    if slot.owner_kind == "module" and before is not None and after is not None and before != after:
        return f"{before} when saved, {after} in a new instance after the load"
    return "other values in a new instance after the load"


def _describe_value(parts: Parts, part: str) -> str | None:
    """Return a short plain value as text, "missing" if the slot has no values, or None for other values."""
    if part not in parts:
        return "missing" if not parts else None
    value = parts[part]
    return value if isinstance(value, str) and len(value) <= _MAX_VALUE_CHARACTERS else None
