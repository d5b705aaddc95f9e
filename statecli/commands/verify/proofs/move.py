"""Run the proof `move`: move the model, and compare the device of each tensor before and after.

A tensor has followed the move if its device has changed. Tied weights and aliases are tested by an emulated move (see
`check_builder.measure_stand_in_move`), because a move to meta, unlike a move to CUDA, creates a new object for each
name. Only the emulated move can test tensors that are already on the device.

Every tensor left on the old device fails. Class attributes fail too, because forward reads them through the instance.
Not tested:

- tensors recomputed by torch before each forward (old weight_norm, spectral_norm, pruning);
- tensors created by the first forward that forward does not read on another device;
- tensors in functools.lru_cache of a function of the class: no move of a model reaches them, and the proof `forward`
  reports a mix of devices;
- tensors cleared by the model's own `_apply`.

A 0-dim or empty tensor left on the CPU is a warning: operators on CUDA accept a 0-dim tensor from the CPU.

If the model has values and moves to another device, the values are compared after the move back. Otherwise statecli
trusts torch's own code. If a class has its own `_apply` or `to`, the values are compared after a move to the CPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import nn

from statecli.commands.verify import check_builder, read_by_forward, rules
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core.errors import ModelError
from statecli.core.finding import Finding
from statecli.core.model_state import ModelState, TensorInfo
from statecli.core.move_rules import KEEPS_MEMORY_REMARK, LEFT_BEHIND, report_broken_ties
from statecli.core.oddity_kind import OddityKind
from statecli.core.rule import Rule
from statecli.core.severity import Effect, decide_tensor_severity, measure_effect
from statecli.live import fake_gpu, fake_gpu_values, measure, requested_device, tensor_bits
from statecli.live.device_rules import DeviceWatch
from statecli.live.move_model import get_moved_model

FAKE_CUDA = "fake-cuda"
#: Description of the fake move in the report.
_FAKE_MOVE_TEXT = '.to("cuda") on a fake CUDA device'
#: Methods of a class that decide about moves.
_MOVE_METHODS = ("to", "cuda", "_apply")


def prove(subject: ModelUnderTest, device: str) -> Check:
    """Move an instance to `device`, and back if it has values. Raises UsageError if `device` does not exist."""
    if device == FAKE_CUDA:
        move, device_name, kind = move_to_fake_gpu(subject), fake_gpu.DISPLAY_NAME, FAKE_CUDA
    else:
        destination = parse_device(device)
        move, device_name, kind = _move_model(subject, destination), str(destination), destination.type
    if move.has_own_move and kind in (FAKE_CUDA, "meta"):
        compare_on_cpu(subject, move)
    return check_builder.check_empty_model(subject, Name.MOVE) or _Proof(subject, device_name, move).check()


def move_to_fake_gpu(subject: ModelUnderTest) -> MoveResult:
    """Move an instance to a fake GPU without data or, if that is inconclusive, with data.

    A model with only torch's `_apply` is moved without a fake GPU, whose import takes as long as that of torch.
    """
    move = _move_plain_model(subject)
    if move is not None:
        return move
    move = _move_once_to_fake_gpu(subject, fake_gpu.use_fake_gpu, values=False)
    if not move.reasons or any(row.device == "meta" for row in subject.state.tensors):
        return move
    moved_with_values = _move_once_to_fake_gpu(subject, fake_gpu_values.use_fake_gpu_with_values, values=True)
    return moved_with_values if not moved_with_values.reasons else move


def _move_plain_model(subject: ModelUnderTest) -> MoveResult | None:
    """Emulate `.to` by giving each registered tensor new memory. Return None if `.to` might do something else."""
    try:
        module = subject.build_used(values=False)
    except ModelError:
        return None  # the fake GPU reports the error
    tensors = measure.map_tensors(module)
    if measure.has_own_move(module, module.modules()) or not all(map(_is_plain_on_cpu, tensors.values())):
        return None
    try:
        trial = measure.try_fresh_memory(module)
    except RuntimeError:
        return None  # torch refuses other memory for a tensor; the fake GPU reports the effect of a move
    after = {name: fake_gpu.DISPLAY_NAME if trial.follows_device(name) else "cpu" for name in trial.after}
    return MoveResult(before=dict.fromkeys(tensors, "cpu"), after=after, call=_FAKE_MOVE_TEXT)


def _is_plain_on_cpu(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_quantized
    return is_plain and tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested


def _move_once_to_fake_gpu(subject: ModelUnderTest, context: fake_gpu.FakeGpuContext, *, values: bool) -> MoveResult:
    move = MoveResult(call=_FAKE_MOVE_TEXT)
    try:
        module = subject.build_used(values=values)
        move.before = {name: str(tensor.device) for name, tensor in measure.map_tensors(module).items()}
        move.has_own_move = measure.has_own_move(module, module.modules())
        with context(DeviceWatch(fake_gpu.DEVICE)) as record:
            with subject.user_code(f"moving the model to {fake_gpu.DISPLAY_NAME}"):
                moved_module = move.record_returned(subject, module, module.to(fake_gpu.DEVICE))
            move.after = {
                name: fake_gpu.describe_device_after_move(tensor, record)
                for name, tensor in measure.map_tensors(moved_module).items()
            }
    except ModelError as error:
        move.reasons.append(fake_gpu.describe_failure(check_builder.get_reason(subject, error), error.__cause__))
    return move


def parse_device(text: str) -> torch.device:
    """Parse the value of `--device` and add the GPU's index. Raises UsageError for an invalid value."""
    devices = "fake-cuda, cuda, cuda:1, cpu or meta"
    return requested_device.parse_device("--device", text, devices=devices, anywhere=FAKE_CUDA)


@dataclass
class MoveResult:
    """Devices of the tensors before and after a move. `changed`: tensors whose values differ after the move back.

    `reasons`: failed steps. `call`: description of the moves. `lost_model`: a finding if the move did not return a
    model. `has_own_move`: code outside of torch took part.
    """

    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    has_own_move: bool = False
    call: str = ""
    lost_model: Finding | None = None

    def record_returned(self, subject: ModelUnderTest, module: nn.Module, returned_object: object) -> nn.Module:
        """Return the moved model. Record a finding if `.to` returned an object that is not a module."""
        if not isinstance(returned_object, nn.Module):
            self.lost_model = _build_lost_finding(subject, type(module), returned_object)
        return get_moved_model(module, returned_object)


def _build_lost_finding(subject: ModelUnderTest, owner: type[nn.Module], returned_object: object) -> Finding:
    type_text = "None" if returned_object is None else f"a {type(returned_object).__name__}"
    message = f"{owner.__name__}.to returns {type_text}, so model = model.to(...) loses the model"
    return check_builder.build_finding(
        subject,
        rules.TO_RETURNS_NO_MODEL,
        message,
        None,
        help=check_builder.place_at_method(subject, owner.to, "end the method with: return self"),
    )


class _Proof(Proof):
    """Decide the verdict of each tensor from its devices. `device_name` is the requested device."""

    def __init__(self, subject: ModelUnderTest, device_name: str, move: MoveResult) -> None:
        super().__init__(subject, Name.MOVE, move.call, "moves")
        self._device_name, self._moved = device_name, move
        self._stand_in: ModelState = check_builder.measure_stand_in_move(subject)
        self._follows_device = {row.fqn: row.moves for row in self._stand_in.tensors}
        self._recomputed = self._stand_in.recomputed
        self._excuses = read_by_forward.Excuses(
            subject, "device", lambda: read_by_forward.find_reads_on(subject, device_name)
        )

    def _run(self) -> None:
        self._findings += [self._moved.lost_model] if self._moved.lost_model else []
        self._reasons[:0] = self._moved.reasons
        self._cells.update({row.fqn: self._build_cell(row) for row in self._subject.state.tensors})
        self._fail_broken_ties()
        if set(self._moved.before.values()) == {self._device_name}:
            self._how = (
                f"all tensors are already on {self._device_name}; statecli copied them to new memory with _apply, and "
                f"{self._how}"
            )

    # --- one tensor ----------------------------------------------------------------------------------------------

    def _build_cell(self, row: TensorInfo) -> Cell:
        before, after = self._moved.before.get(row.fqn), self._moved.after.get(row.fqn)
        if before is None:
            return check_builder.build_inconclusive_cell(check_builder.ABSENT_REASON)
        if not self._moved.after or before == self._device_name:
            return self._judge_by_stand_in(row, before)
        if after is None:
            return check_builder.skip_cell("the model removes the tensor during the move", before=before)
        if after != self._device_name:
            return self._judge_left_behind(
                row, before, after, f"left on {after} when the model moves to {self._device_name}"
            )
        return self._judge_changed(row, before, after)

    def _judge_by_stand_in(self, row: TensorInfo, before: str) -> Cell:
        follows = self._follows_device.get(row.fqn)
        if follows is None:
            note = next(
                (oddity.message for oddity in self._stand_in.oddities if oddity.kind is OddityKind.NOT_MEASURED), None
            )
            return check_builder.build_inconclusive_cell(
                note or "statecli does not know whether the tensor moves with the model", before=before
            )
        if not follows:
            return self._judge_left_behind(row, before, before, KEEPS_MEMORY_REMARK)
        return self._judge_changed(row, before, f"{before}, new memory")

    def _judge_changed(self, row: TensorInfo, before: str, after: str) -> Cell:
        difference = self._moved.changed.get(row.fqn)
        if difference is None:
            return Cell(Verdict.PASSED, before, after)
        message = f"{difference} when the model is moved and moved back"
        return self._fail(rules.CHANGED_BY_MOVE, row, message, before, after, "change only the device in {}")

    def _judge_left_behind(self, row: TensorInfo, before: str, after: str, explanation: str) -> Cell:
        cell = self._excuses.build_cell(row.fqn, self._recomputed, before=before, after=after)
        if cell is not None:
            return cell
        return self._fail(LEFT_BEHIND, row, explanation, before, after, "call super() in {} and move this tensor too")

    def _fail(self, rule: Rule, row: TensorInfo, explanation: str, before: str, after: str, remedy: str) -> Cell:
        """Report a failed tensor. `remedy`: advice for the class's own `_apply` or `to`, if no better fix is known."""
        effect = measure_effect(row, is_harmless=lambda: self._subject.forward_passed)
        help: check_builder.Help = None
        if row.fqn in self._subject.created_by_forward:
            effect = Effect.LOSS  # the next forward on the device reads what the first forward left on the CPU
            help = read_by_forward.suggest_recreation(self._subject, row.fqn, "device")
        elif not row.fix:
            help = check_builder.suggest_in_own_method(self._subject, self._instance, row.fqn, _MOVE_METHODS, remedy)
        severity, message = None, f"{row.fqn}: {explanation}"
        if rule == LEFT_BEHIND:
            severity = decide_tensor_severity(row, effect)
            message += "; forward ran without an error after the move" if effect is Effect.HARMLESS else ""
        self.report(rule, message, row.fqn, severity=severity, help=help)
        return Cell(Verdict.FAILED, before, after, explanation)

    @functools.cached_property
    def _instance(self) -> nn.Module:
        """An instance whose methods may be inspected, but must not be called."""
        return self._subject.build_fresh()

    # --- ties and views ------------------------------------------------------------------------------------------

    def _fail_broken_ties(self) -> None:
        """Report each tensor that is no longer tied after the move, or that keeps the storage from before the move."""
        for finding in report_broken_ties(self._stand_in):
            name = finding.fqn or ""
            if name in self._recomputed:
                continue
            cell = self._cells.get(name) or Cell(
                Verdict.PASSED, self._moved.before.get(name), self._moved.after.get(name)
            )
            if cell.verdict is Verdict.PASSED:
                self._cells[name] = Cell(Verdict.FAILED, cell.before, cell.after, finding.message)
                self._findings.append(finding)


def _move_model(subject: ModelUnderTest, device: torch.device) -> MoveResult:
    move = MoveResult(call=f'.to("{device}")')
    try:
        module = subject.build_used()
    except ModelError as error:
        move.reasons.append(check_builder.get_reason(subject, error))
        return move
    tensors = measure.map_tensors(module)
    move.before = _list_devices(tensors)
    if set(move.before.values()) == {"meta"} and device.type != "meta":
        move.reasons.append(
            f"the model was built on meta and has no values to move to {device}; build the model on the cpu: "
            "--init-device cpu"
        )
        return move
    move.has_own_move = measure.has_own_move(module, module.modules())
    if device.type == "meta":
        _move_there(subject, module, device, move)
    else:
        _move_there_and_back(subject, module, device, tensors, move)
    return move


def _move_there(subject: ModelUnderTest, module: nn.Module, device: torch.device, move: MoveResult) -> nn.Module | None:
    """Move the model and record the devices. Return the moved model, or None if the move raised."""
    returned_object, error_text = check_builder.run_user_code(
        subject, f'moving the model to "{device}"', lambda: module.to(device)
    )
    if error_text:
        move.reasons.append(error_text)
        return None
    moved_module = move.record_returned(subject, module, returned_object)
    move.after = _list_devices(measure.map_tensors(moved_module))
    return moved_module


def _move_there_and_back(
    subject: ModelUnderTest,
    module: nn.Module,
    device: torch.device,
    tensors: dict[str, torch.Tensor],
    move: MoveResult,
) -> None:
    # Only Parameters are changed, because their values were not drawn. All instances may share other tensors.
    tensor_bits.perturb(tensor for tensor in tensors.values() if type(tensor) is nn.Parameter)
    before = {name: check_builder.copy_values(tensor) for name, tensor in tensors.items()}
    moved_module = _move_there(subject, module, device, move)
    if moved_module is None:
        return
    move.call += " and back"
    returned_object, error_text = check_builder.run_user_code(
        subject, "moving the model back", lambda: moved_module.to("cpu")
    )
    if error_text:
        move.reasons.append(error_text)
        return
    after = measure.map_tensors(get_moved_model(moved_module, returned_object))
    for name, tensor in before.items():
        if name in after and tensor is not None and tensor_bits.is_same(tensor, after[name]) is False:
            move.changed[name] = _describe_difference(tensor, after[name])


def compare_on_cpu(subject: ModelUnderTest, move: MoveResult) -> None:
    """Record which values change in a move to the CPU. Do nothing for a model on meta."""
    if any(row.device == "meta" for row in subject.state.tensors):
        return
    moved_on_cpu = _move_model(subject, torch.device("cpu"))
    move.changed = moved_on_cpu.changed
    move.reasons += moved_on_cpu.reasons
    move.call += ", values compared on the cpu"


def _describe_difference(before: torch.Tensor, after: torch.Tensor) -> str:
    if before.dtype != after.dtype:
        return f"{before.dtype} becomes {after.dtype}".replace("torch.", "")
    if before.shape != after.shape:
        return f"shape {list(before.shape)} becomes {list(after.shape)}"
    return "values change"


def _list_devices(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: str(tensor.device) for name, tensor in tensors.items()}
