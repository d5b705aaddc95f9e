"""Call a moved instance, and record the devices of its tensors, each device mismatch and the error of the call."""

from __future__ import annotations

import re
import time
import traceback
from dataclasses import dataclass, field

import torch
from torch import nn

from statecli.commands.verify import check_builder, read_by_forward
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.training_loss import find_floating_outputs
from statecli.core.errors import ModelError
from statecli.core.lazy_pattern import compile_on_use
from statecli.live import fake_gpu, measure
from statecli.live.device_rules import DeviceWatch
from statecli.live.exception_text import get_exception_text
from statecli.live.move_model import move_model
from statecli.live.source_line import SourceLine
from statecli.live.tensor_sources import CallStack, CudaRefusal, Fault, Mismatch, TensorSource, is_user_code
from statecli.live.tensors import is_lazy

#: Torch's errors about several devices: "Expected all tensors to be on the same device", "are not at the same device".
SAME_DEVICE_ERROR = compile_on_use(r"\b(on|at) the same device\b")
#: Torch's errors about an argument that must be on the CPU, with the name of the argument.
_ON_CPU_ERROR = compile_on_use(r"(\w+)'? (?:to|must|argument should) be (?:on|a 1D) cpu\b", re.IGNORECASE)
#: Seconds of careful runs. Each run ignores only mismatches that ended earlier runs, because the model may catch other
#: mismatches. After this time, a last run ignores and reports all mismatches that the model did not catch.
_CAREFUL_RUNS_S = 2.0


@dataclass(frozen=True)
class ForwardTrial:
    """Way to call the model on a device. `how` describes it, and `backward` also runs backward from the outputs."""

    device: torch.device
    device_name: str
    how: str
    context: fake_gpu.FakeGpuContext
    values: bool
    training: bool = False
    backward: bool = False


@dataclass
class ForwardRun:
    """Result of a call of a moved instance: the devices of its tensors, and its error (None if it passed).

    `refused`: the error of mismatches not caught by the model. `cuda_checks`: lines of the model with
    `torch.cuda.is_available()`.
    `replaced`: names to which forward assigned another tensor. `mismatches_of_forward`: the mismatches before backward.
    """

    trial: ForwardTrial
    watch: DeviceWatch
    devices: dict[str, str] = field(default_factory=dict)
    error_text: str | None = None
    refused: CudaRefusal | None = None
    cuda_checks: list[SourceLine] = field(default_factory=list)
    replaced: frozenset[str] = frozenset()
    mismatches_of_forward: tuple[Mismatch, ...] = ()

    @property
    def has_proved(self) -> bool:
        """True if the run shows all device mismatches: forward passed, and did not ask whether CUDA is available."""
        return self.error_text is None and not self.cuda_checks


def run_until_not_refused(
    subject: ModelUnderTest, trial: ForwardTrial, earlier_watch: DeviceWatch | None = None
) -> ForwardRun:
    """Repeat the run until it ends without a new device mismatch, or time is up. Each run ignores known mismatches."""
    carried_over: frozenset[Mismatch] = (earlier_watch and earlier_watch.carried_over) or frozenset()
    uncaught_calls: frozenset[CallStack] = earlier_watch.uncaught_calls if earlier_watch else frozenset()
    caught_mismatches: frozenset[Mismatch] = frozenset()
    end = time.monotonic() + _CAREFUL_RUNS_S
    while time.monotonic() < end:
        watch = DeviceWatch(trial.device, carried_over=carried_over, uncaught_calls=uncaught_calls)
        run = _run_once(subject, trial, watch)
        if run.refused is None:
            return run
        caught_mismatches |= watch.raised - run.refused.mismatches
        carried_over |= run.refused.mismatches
        uncaught_calls |= {run.refused.stack}
    return _run_once(subject, trial, DeviceWatch(trial.device, caught=caught_mismatches - carried_over))


def _run_once(subject: ModelUnderTest, trial: ForwardTrial, watch: DeviceWatch) -> ForwardRun:
    assert subject.inputs is not None  # noqa: S101 - prove has looked
    run = ForwardRun(trial, watch)
    module = subject.build_used(values=trial.values)
    inputs = subject.inputs.make_call(seed=0)
    try:
        with (
            check_builder.keep_class_attributes(module),
            trial.context(watch) as record,
            torch.set_grad_enabled(trial.backward),
        ):
            with subject.user_code(f"moving the model to {trial.device_name}"):
                module = move_model(module, trial.device)
            run.cuda_checks = record.cuda_checks
            tensors = _record_devices(run, module, record)
            with subject.user_code(f"calling the model on {trial.device_name}"):
                args, kwargs = read_by_forward.convert_inputs(inputs, trial.device)
                outputs = module.train(trial.training)(*args, **kwargs)
            if trial.backward:
                run.mismatches_of_forward = tuple(watch.mismatches)
                with subject.user_code(f"backward on {trial.device_name}"):
                    run.error_text = _call_backward(outputs)
            after = measure.map_tensors(module)
            run.replaced = frozenset(name for name, tensor in tensors.items() if after.get(name, tensor) is not tensor)
    except ModelError as error:
        run.error_text = fake_gpu.describe_failure(check_builder.get_reason(subject, error), error.__cause__)
        run.refused = _find_refused(error.__cause__)
        _record_torch_error(run, error.__cause__)
    return run


def _call_backward(outputs: object) -> str | None:
    """Call backward from the outputs that require grad. Return an error text if no output requires grad."""
    roots = [output for output in find_floating_outputs(outputs) if output.requires_grad]
    if not roots:
        return "no output of forward requires grad"
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return None


def _find_refused(error: BaseException | None) -> CudaRefusal | None:
    """Return the CudaRefusal among `error` and its causes, or None."""
    while error is not None and not isinstance(error, CudaRefusal):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


def _record_torch_error(run: ForwardRun, cause: BaseException | None) -> None:
    """Record an error about devices that torch or a kernel raised but `DeviceWatch` did not see."""
    text, place = get_exception_text(cause), _locate_error(cause)
    if run.refused:
        return
    if fake_gpu.NUMPY_ERROR in text:
        run.watch.mismatches.append(Mismatch(TensorSource(), run.trial.device_name, "", "numpy", place, Fault.NUMPY))
    elif match := _ON_CPU_ERROR.search(text):
        run.watch.mismatches.append(Mismatch(TensorSource(), "", match[1], "", place, Fault.NOT_ON_CPU))
    elif SAME_DEVICE_ERROR.search(text) and not any(mismatch.place == place for mismatch in run.watch.mismatches):
        run.watch.mismatches.append(Mismatch(TensorSource(), "", "", "", place, Fault.UNTOLD))


def _locate_error(error: BaseException | None) -> SourceLine | None:
    frames = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    places = [SourceLine(frame.f_code.co_filename, line) for frame, line in frames]
    return next((place for place in reversed(places) if is_user_code(place.file)), None)


def _record_devices(run: ForwardRun, module: nn.Module, record: fake_gpu.MoveRecord) -> dict[str, torch.Tensor]:
    tensors = {name: tensor for name, tensor in measure.map_tensors(module).items() if not is_lazy(tensor)}
    excused = [name for name, tensor in tensors.items() if tensor in record]
    run.watch.add_names(tensors.items())
    run.watch.excuse(excused)
    run.devices = {name: fake_gpu.describe_device(tensor) for name, tensor in tensors.items()} | dict.fromkeys(
        excused, run.trial.device_name
    )
    return tensors
