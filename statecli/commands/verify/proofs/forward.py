"""Proof `forward`: the moved model is called with moved inputs, and each operator's devices are looked at.

On CUDA it is really run, below the same watch that sees a pretended run. A pretended GPU is tried without data first,
then with data where that cannot tell; where neither can, the proof is inconclusive. It is called in eval mode and, by
another instance, in train mode.

A pretended GPU knows shapes and devices, and little of dtypes, indices and values: a model that raises in a plain call
on the CPU is inconclusive there, unless what it raised is of the CPU's own.

An operator that gets tensors of several devices raises as on CUDA; what the model catches is its own. What it does not
catch is told with the operator's line, then carried over in one more run, so that the next is found too.

A forward that passes does not clear a tensor that stayed behind: it may have copied it on the way, or not read it.
"""

from __future__ import annotations

import re
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from statecli.commands.verify import judging, recreated_by_forward
from statecli.commands.verify.model_under_test import Subject
from statecli.commands.verify.proofs import move
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.commands.verify.rules import DEVICE_MISMATCH
from statecli.core.errors import ModelError
from statecli.core.finding import Finding
from statecli.core.state import TensorInfo
from statecli.live import fake_gpu, fake_gpu_values, measure, tensor_sources
from statecli.live.build import text_of
from statecli.live.device_rules import Watch, Watching
from statecli.live.tensor_sources import Fault, How, Mismatch, Place, Refused, Source, is_theirs

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How torch's own checks put it: "Expected all tensors to be on the same device", "are not at the same device".
_SAME_DEVICE = re.compile(r"\b(on|at) the same device\b")
#: And of an argument that has to be on the CPU, by its name.
_ON_CPU = re.compile(r"(\w+)'? (?:to|must|argument should) be (?:on|a 1D) cpu\b", re.IGNORECASE)
#: What a plain call raises because it is on the CPU, or half on a GPU: it says nothing of the moved model.
_OF_THE_CPU = re.compile(
    rf"\bCUDA\b|NVIDIA|\bGPU\b|not implemented for '|from the 'CPU' backend|{_SAME_DEVICE.pattern}"
)
_UNTOLD = "the model asks torch.cuda.is_available(), which is not so here,"
_ADVICE = {
    How.MADE: "make it where it is needed, device=x.device, or copy it there: .to(x.device)",
    How.DRAWN: "copy what is drawn: .to(x.device); device=x.device asks for a generator that is there too",
    How.BROUGHT: "copy it to where the model is, next(self.parameters()).device, not to a device that was remembered",
    How.COMPUTED: "copy it to where it is needed: .to(x.device)",
}


#: Seconds of runs that carry over no more than the mismatches which ended those before: what a model catches is its
#: own. After them one run carries over all that was not caught so far, and what it finds is told.
_CAREFUL = 2.0


@dataclass(frozen=True)
class _Trial:
    """One way to call the model on a device: `shown` is the device's name, `how` says what is done."""

    device: torch.device
    shown: str
    how: str
    stage: fake_gpu.Stage
    values: bool
    training: bool = False


@dataclass
class _Run:
    """One moved and called instance: where its tensors were before the call, and what it raised (None: it passed).

    `refused` are the mismatches that it did not catch; `asked` the lines that were not told of the pretended GPU.
    """

    trial: _Trial
    watch: Watch
    devices: dict[str, str] = field(default_factory=dict)
    raised: str | None = None
    refused: frozenset[Mismatch] = frozenset()
    asked: list[Place] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether it is a proof for the tensors that no mismatch was found of."""
        return self.raised is None and not self.asked


def prove(subject: Subject, device: str) -> Check:
    """Call an instance that was moved to `device`: "fake-cuda", "cuda:1", "cpu". On meta there is nothing to prove.

    Raises UsageError for a device that is not here, ModelError where the plain call raises too.
    """
    if subject.inputs is None:
        return Check(Name.FORWARD, Verdict.SKIPPED, reason=subject.no_inputs)
    if device == move.FAKE:
        return _pretended(subject)
    wanted = move.device_of(device)
    if wanted.type == "meta":
        why = "a forward on meta says nothing of devices, most operators take any there; --device fake-cuda does"
        return Check(Name.FORWARD, Verdict.SKIPPED, reason=why)
    if wanted.type == "cpu":
        return _on_cpu(subject)
    return _both(subject, [_Trial(wanted, str(wanted), "called on the moved model", _watched, values=True)])


def _on_cpu(subject: Subject) -> Check:
    subject.call(subject.used(values=True))
    why = "nothing was moved, so it says nothing of devices" if not subject.appeared else None
    return Check(Name.FORWARD, Verdict.PASSED, "called on the cpu in eval mode", why)


def _pretended(subject: Subject) -> Check:
    trials = [
        _Trial(fake_gpu.DEVICE, fake_gpu.SHOWN, "called on a pretended GPU, without data", fake_gpu.faked, values=False)
    ]
    if not any(row.device == "meta" for row in subject.state.tensors):
        if subject.raises and not _OF_THE_CPU.search(subject.raises):
            raise ModelError(subject.raises)
        how = "called on a pretended GPU, with data on the cpu"
        trials.append(_Trial(fake_gpu.DEVICE, fake_gpu.SHOWN, how, fake_gpu_values.pretended, values=True))
    return _both(subject, trials)


def _both(subject: Subject, trials: list[_Trial]) -> Check:
    """In eval mode, then in train mode. What raises on the CPU as well is a ModelError; train mode is left out then."""
    runs = _tried(subject, trials)
    if runs[0].raised is not None:
        subject.call(subject.used(values=True))
    train = _tried(subject, [replace(trial, training=True) for trial in trials])
    if train[0].raised is not None:
        try:
            subject.call(subject.used(values=True).train(), training=True)
        except ModelError:
            return _answer(subject, runs, [])
    return _answer(subject, runs, train)


def _tried(subject: Subject, trials: list[_Trial]) -> list[_Run]:
    """One run for each trial until one comes to its end; the last is first."""
    runs: list[_Run] = []
    for trial in trials:
        runs.insert(0, _run(subject, trial))
        if runs[0].raised is None:
            break
    return runs


@contextmanager
def _watched(watch: Watch) -> Iterator[fake_gpu.Kept]:
    with Watching(watch):
        yield fake_gpu.Kept(lambda: None)


def _run(subject: Subject, trial: _Trial) -> _Run:
    """The run that has come to its end by carrying over what those before it were refused."""
    carried: frozenset[Mismatch] = frozenset()
    caught: frozenset[Mismatch] = frozenset()
    end = time.monotonic() + _CAREFUL
    while time.monotonic() < end:
        run = _once(subject, trial, Watch(trial.device, carried=carried))
        caught |= run.watch.raised - run.refused
        if not run.refused:
            return run
        carried |= run.refused
    return _once(subject, trial, Watch(trial.device, caught=caught - carried))


def _once(subject: Subject, trial: _Trial, watch: Watch) -> _Run:
    assert subject.inputs is not None  # noqa: S101 - prove has looked
    run = _Run(trial, watch)
    module = subject.used(values=trial.values)
    inputs = subject.inputs.make(seed=0)
    try:
        with judging.class_attributes_kept(module), trial.stage(watch) as kept, torch.no_grad():
            with subject.user_code(f"moving it to {trial.shown}"):
                module = measure.moved(module, module.to(trial.device))
            run.asked = kept.asked
            _look(run, module, kept)
            with subject.user_code(f"calling it on {trial.shown}"):
                args, kwargs = tree_map(lambda leaf: _moved(leaf, trial.device), inputs)
                module.train(trial.training)(*args, **kwargs)
    except ModelError as error:
        run.raised = fake_gpu.why(judging.reason_of(subject, error), error.__cause__)
        run.refused = _refused(error.__cause__)
        _note(run, error.__cause__)
    return run


def _refused(error: BaseException | None) -> frozenset[Mismatch]:
    """The mismatches that ended the call, raised as they were or as the cause of something of the model's own."""
    while error is not None:
        if isinstance(error, Refused):
            return error.mismatches
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return frozenset()


def _note(run: _Run, cause: BaseException | None) -> None:
    """What torch, or a kernel that no watch can look into, says itself of devices."""
    text, at = text_of(cause), _raised_at(cause)
    if run.refused:
        return
    if fake_gpu.NO_NUMPY in text:
        run.watch.mismatches.append(Mismatch(Source(), run.trial.shown, "", "numpy", at, Fault.NUMPY))
    elif found := _ON_CPU.search(text):
        run.watch.mismatches.append(Mismatch(Source(), "", found[1], "", at, Fault.NOT_ON_CPU))
    elif _SAME_DEVICE.search(text) and not any(one.place == at for one in run.watch.mismatches):
        run.watch.mismatches.append(Mismatch(Source(), "", "", "", at, Fault.UNTOLD))


def _raised_at(error: BaseException | None) -> Place | None:
    frames = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    return next((place for place in reversed(places) if is_theirs(place[0])), None)


def _look(run: _Run, module: nn.Module, kept: fake_gpu.Kept) -> None:
    found = {name: tensor for name, tensor in judging.tensors(module).items() if not judging.lazy(tensor)}
    excused = [name for name, tensor in found.items() if tensor in kept]
    run.watch.know(found.items())
    run.watch.excuse(excused)
    run.devices = {name: fake_gpu.shown(tensor) for name, tensor in found.items()} | dict.fromkeys(
        excused, run.trial.shown
    )


def _moved(leaf: Any, device: torch.device) -> Any:
    """An input on `device`: a tensor, or an object that moves itself (a batch)."""
    return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf


# --- the answer ------------------------------------------------------------------------------------------------------


def _answer(subject: Subject, runs: list[_Run], train: list[_Run]) -> Check:
    """Of both modes: the run that passed, else all: what they found counts, and why they went no further."""
    told = [one for mode in (runs, train) for one in (mode if mode and mode[0].raised is not None else mode[:1])]
    found = _distinct([(one, run) for run in told for one in run.watch.mismatches])
    findings = [_finding(subject, one, run.trial) for one, run in found]
    blamed = {one.source.fqn: finding for (one, _), finding in zip(found, findings, strict=True)}
    last = [mode[0] for mode in (runs, train) if mode]
    cells = {row.fqn: _worst([_cell(subject, row, run, blamed) for run in last]) for row in subject.state.tensors}
    for fqn, finding in blamed.items():
        if fqn is not None and fqn not in cells:
            cells[fqn] = _failed(last[0], fqn, finding)
    reasons = list(dict.fromkeys(run.raised for run in told if run.raised is not None))
    reasons += dict.fromkeys(f"{_UNTOLD}{_at(subject, place)}" for run in told for place in run.asked)
    nothing = judging.nothing(subject, Name.FORWARD)
    if nothing is not None and not findings and not reasons:
        return nothing
    return judging.check(Name.FORWARD, _how(last), {"forward": cells}, findings, reasons)


_ORDER = (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED, Verdict.SKIPPED)


def _worst(cells: list[Cell]) -> Cell:
    return min(cells, key=lambda cell: _ORDER.index(cell.verdict))


def _how(last: list[_Run]) -> str:
    """What was done, with the modes in which it was."""
    how = last[0].trial.how
    if len(last) == 1:
        return f"{how}, in eval mode (in train mode it raises on the cpu too)"
    if how == last[1].trial.how:
        return f"{how}, in eval and train mode"
    return f"{how}, in eval mode; {last[1].trial.how}, in train mode"


def _distinct(found: list[tuple[Mismatch, _Run]]) -> list[tuple[Mismatch, _Run]]:
    first: dict[Any, tuple[Mismatch, _Run]] = {}
    for one, run in found:
        first.setdefault(one.source.fqn or (one.source, one.place), (one, run))
    return list(first.values())


def _cell(subject: Subject, row: TensorInfo, run: _Run, blamed: dict[str | None, Finding]) -> Cell:
    if row.fqn in blamed:
        return _failed(run, row.fqn, blamed[row.fqn])
    device = run.devices.get(row.fqn)
    if not run.ended:
        why = "the call did not come to its end" if run.raised is not None else _UNTOLD
        return judging.unclear(why, after=device)
    if device is None or device == run.trial.shown:
        return Cell(Verdict.PASSED, after=device)
    if row.fqn in run.watch.copied:
        at = _at(subject, run.watch.copied[row.fqn])
        return Cell(Verdict.PASSED, after=device, reason=f"stays on {device}; forward copies it at each call{at}")
    if row.fqn in run.watch.touched:
        return Cell(Verdict.PASSED, after=device, reason=f"stays on {device}{_harmless(subject, row.fqn, run)}")
    return judging.skipped(f"stays on {device}, and this forward does not read it", after=device)


def _failed(run: _Run, fqn: str, finding: Finding) -> Cell:
    return Cell(Verdict.FAILED, after=run.devices.get(fqn), reason=finding.message.removeprefix(f"{fqn}: "))


def _harmless(subject: Subject, fqn: str, run: _Run) -> str:
    """Why it does no harm that forward reads `fqn` where it is."""
    caught = next((one for one in run.watch.raised if one.source.fqn == fqn), None)
    if caught is not None:
        return f"; forward catches the error that this is in {caught.operator}{_at(subject, caught.place)}"
    if fqn in run.watch.taken:
        operator, place = run.watch.taken[fqn]
        return f", and forward mixes it only where CUDA takes it from there: {operator}{_at(subject, place)}"
    return ", and forward mixes it with nothing elsewhere"


def _finding(subject: Subject, one: Mismatch, trial: _Trial) -> Finding:
    device = trial.shown.removesuffix(" (fake)")
    where = _at(subject, one.place) + (", in train mode" if trial.training else "")
    if one.fault is Fault.MIXED:
        return _mixed(subject, one, device, where)
    if one.fault is Fault.GENERATOR:
        message = f"a torch.Generator on {one.device} draws values for {device}, in {one.operator}{where}"
        help = "make one there: torch.Generator(x.device)"
    elif one.fault is Fault.NOT_ON_CPU:
        message = f"the argument {one.other!r} has to be on the cpu, and is on {device}{where}"
        help = "copy it there first, with .cpu()"
    elif one.fault is Fault.NUMPY:
        message, help = (
            f"a tensor on {device} is read as a numpy array{where}",
            "copy it to the cpu first: x.cpu().numpy()",
        )
    else:
        message, help = f"tensors on several devices meet{where}", "move what is made or kept on the cpu: .to(x.device)"
    return judging.finding(subject, DEVICE_MISMATCH, message, one.source.fqn, help=help)


def _mixed(subject: Subject, one: Mismatch, device: str, where: str) -> Finding:
    what, help = _what(subject, one.source, one.device)
    message = f"{what} while {one.other or 'the rest'} is on {device}, in {one.operator}{where}"
    row = subject.rows().get(one.source.fqn or "")
    if row is not None and row.origin is not None:
        message += f"; assigned at {row.origin.file}:{row.origin.line}"
    return judging.finding(subject, DEVICE_MISMATCH, message, one.source.fqn, help=help)


def _what(subject: Subject, source: Source, device: str) -> tuple[str, str | None]:
    """What is on `device`, and what to do; None is the fix of the tensor's row."""
    is_on = f"{'what is computed from it is ' if source.derived else ''}on {device}"
    if source.fqn is not None:
        return f"{source.fqn}: {is_on}", recreated_by_forward.MEND.format(
            "device"
        ) if source.fqn in subject.appeared else None
    if source.of_file is not None:
        name, filename = source.of_file
        help = f"make it a buffer of the model, or read {name}.to(x.device)"
        return f"{name} of {tensor_sources.shown(filename, subject.target)}: {is_on}", help
    at, help = _at(subject, source.place), _ADVICE[source.how]
    if source.place is None:
        return f"a tensor, of which it is not known where it was made, is on {device}", _ADVICE[How.COMPUTED]
    if source.how is How.BROUGHT:
        return f"a tensor that forward copies to {device}{at} is there", help
    if source.how is How.COMPUTED:
        return f"a tensor that forward computes{at} is on {device}", help
    return f"a tensor made in forward{at} is on {device}", help


def _at(subject: Subject, place: Place | None) -> str:
    return "" if place is None else f" at {tensor_sources.shown(place[0], subject.target)}:{place[1]}"
