"""Proof `forward`: the moved model is called with moved inputs, and each operator's devices are looked at.

On CUDA it is really run, below the same watch that sees a pretended run. A pretended GPU is tried without data first,
then with data where that cannot tell; where neither can, the proof is inconclusive. A tensor that an operator got from
the wrong device is told with the operator's line; then it is carried over, so that one run finds them all.

A forward that passes does not clear a tensor that stayed behind: it may have copied it on the way, or not read it.
"""

from __future__ import annotations

import os
import re
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from statecli.errors import ModelError
from statecli.finding import Finding, Severity
from statecli.modules import measure, origin
from statecli.modules.spec import parse
from statecli.proofs import fake, judging, move, pretend
from statecli.proofs.devices import Mismatch, Place, Source, Watch, Watching, is_theirs
from statecli.proofs.result import Cell, Check, Name, Verdict
from statecli.proofs.subject import Subject
from statecli.state import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

RULE = "device-mismatch"
#: How torch's own checks put it: "Expected all tensors to be on the same device", "are not at the same device".
_SAME_DEVICE = re.compile(r"\b(on|at) the same device\b")
_ADVICE = "make it where it is needed: device=x.device"
_OF_CACHES = "an earlier forward left it there: keep one for each device, or make it again where the device is another"


@dataclass
class _Run:
    """One moved and called instance: where its tensors were before the call, and what it raised (None: it passed)."""

    how: str
    device: str
    watch: Watch
    devices: dict[str, str] = field(default_factory=dict)
    raised: str | None = None


def prove(subject: Subject, device: str) -> Check:
    """Call an instance that was moved to `device`: "fake-cuda", "cuda:1", "cpu". On meta there is nothing to prove.

    Raises UsageError for a device that is not here.
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
    return _answer(subject, [_run(subject, wanted, str(wanted), "called on the moved model", _watched, values=True)])


def _on_cpu(subject: Subject) -> Check:
    subject.call(subject.used(values=True))
    why = "nothing was moved, so it says nothing of devices" if not subject.appeared else None
    return Check(Name.FORWARD, Verdict.PASSED, "called on the cpu", why)


def _pretended(subject: Subject) -> Check:
    device, shown = fake.DEVICE, fake.SHOWN
    runs = [_run(subject, device, shown, "called on a pretended GPU, without data", fake.faked, values=False)]
    if runs[0].raised is not None and not any(row.device == "meta" for row in subject.state.tensors):
        how = "called on a pretended GPU, with data on the cpu"
        runs.insert(0, _run(subject, device, shown, how, pretend.pretended, values=True))
    if runs[0].raised is not None:
        # What the model does on the CPU as well is its own; else it is the pretending.
        subject.call(subject.used(values=True))
    return _answer(subject, runs)


@contextmanager
def _watched(watch: Watch) -> Iterator[fake.Kept]:
    with Watching(watch):
        yield fake.Kept(lambda: None)


def _run(subject: Subject, device: torch.device, shown: str, how: str, stage: fake.Stage, *, values: bool) -> _Run:
    assert subject.inputs is not None  # noqa: S101 - prove has looked
    run = _Run(how, shown, Watch(device))
    module = subject.used(values=values)
    inputs = subject.inputs.make(seed=0)
    try:
        with stage(run.watch) as kept, torch.no_grad():
            with subject.user_code(f"moving it to {shown}"):
                module = measure.moved(module, module.to(device))
            _look(run, module, kept)
            with subject.user_code(f"calling it on {shown}"):
                args, kwargs = tree_map(lambda leaf: _moved(leaf, device), inputs)
                module.eval()(*args, **kwargs)
    except ModelError as error:
        run.raised = fake.why(judging.reason_of(subject, error), error.__cause__)
        _note(run, error.__cause__)
    return run


def _note(run: _Run, cause: BaseException | None) -> None:
    """What torch, or a kernel that no watch can look into, says itself of devices."""
    text, at = str(cause), _raised_at(cause)
    if fake.NO_NUMPY in text:
        run.watch.mismatches.append(Mismatch(Source(), run.device, "", "numpy", at))
    elif _SAME_DEVICE.search(text) and not any(one.place == at for one in run.watch.mismatches):
        run.watch.mismatches.append(Mismatch(Source(), "", "", "", at))


def _raised_at(error: BaseException | None) -> Place | None:
    frames = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    return next((place for place in reversed(places) if is_theirs(place[0])), None)


def _look(run: _Run, module: nn.Module, kept: fake.Kept) -> None:
    found = {name: tensor for name, tensor in judging.tensors(module).items() if not judging.lazy(tensor)}
    excused = [name for name, tensor in found.items() if tensor in kept]
    run.watch.know(found.items())
    run.watch.excuse(excused)
    run.devices = {name: fake.shown(tensor) for name, tensor in found.items()} | dict.fromkeys(excused, run.device)


def _moved(leaf: Any, device: torch.device) -> Any:
    """An input on `device`: a tensor, or an object that moves itself (a batch)."""
    return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf


# --- the answer ------------------------------------------------------------------------------------------------------


def _answer(subject: Subject, runs: list[_Run]) -> Check:
    """Of the first run that passed, else of all: what they found counts, and why they went no further."""
    last = runs[0]
    told = runs if last.raised is not None else runs[:1]
    mismatches = _distinct([one for run in told for one in run.watch.mismatches])
    findings = [_finding(subject, one, last.device) for one in mismatches]
    blamed = {one.source.fqn: finding for one, finding in zip(mismatches, findings, strict=True)}
    cells = {row.fqn: _cell(subject, row, last, blamed) for row in subject.state.tensors}
    for fqn, finding in blamed.items():
        if fqn is not None and fqn not in cells:
            cells[fqn] = _failed(last, fqn, finding)
    reasons = list(dict.fromkeys(run.raised for run in told if run.raised is not None))
    nothing = judging.nothing(subject, Name.FORWARD)
    if nothing is not None and not findings and not reasons:
        return nothing
    return judging.check(Name.FORWARD, last.how, {"forward": cells}, findings, reasons)


def _distinct(mismatches: list[Mismatch]) -> list[Mismatch]:
    first: dict[Any, Mismatch] = {}
    for one in mismatches:
        first.setdefault(one.source.fqn or (one.source.place, one.place), one)
    return list(first.values())


def _cell(subject: Subject, row: TensorInfo, run: _Run, blamed: dict[str | None, Finding]) -> Cell:
    if row.fqn in blamed:
        return _failed(run, row.fqn, blamed[row.fqn])
    device = run.devices.get(row.fqn)
    if run.raised is not None:
        return judging.unclear("the call did not come to its end", after=device)
    if device is None or device == run.device:
        return Cell(Verdict.PASSED, after=device)
    if row.fqn in run.watch.copied:
        at = _at(subject, run.watch.copied[row.fqn])
        return Cell(Verdict.PASSED, after=device, reason=f"stays on {device}; forward copies it at each call{at}")
    if row.fqn in run.watch.touched:
        return Cell(
            Verdict.PASSED, after=device, reason=f"stays on {device}, and forward mixes it with nothing elsewhere"
        )
    return judging.skipped(f"stays on {device}, and this forward does not read it", after=device)


def _failed(run: _Run, fqn: str, finding: Finding) -> Cell:
    return Cell(Verdict.FAILED, after=run.devices.get(fqn), reason=finding.message.removeprefix(f"{fqn}: "))


def _finding(subject: Subject, one: Mismatch, device: str) -> Finding:
    device = device.removesuffix(" (fake)")
    if one.generator:
        at = _at(subject, one.place)
        message = f"a torch.Generator on {one.device} draws values for {device}, in {one.operator}{at}"
        return judging.finding(subject, RULE, message, None, help="make one there: torch.Generator(x.device)")
    if not one.operator:
        message = f"tensors on several devices meet{_at(subject, one.place)}"
        return judging.finding(subject, RULE, message, None, help="move what is made or kept on the cpu: .to(x.device)")
    if one.operator == "numpy":
        message = f"a tensor on {device} is read as a numpy array{_at(subject, one.place)}"
        return judging.finding(subject, RULE, message, None, help="copy it to the cpu first: x.cpu().numpy()")
    while_ = f"while {one.other or 'the rest'} is on {device}, in {one.operator}{_at(subject, one.place)}"
    message = f"{_what(subject, one.source, one.device)} {while_}"
    row = subject.rows().get(one.source.fqn or "")
    if row is not None and row.origin is not None:
        message += f"; assigned at {row.origin.file}:{row.origin.line}"
    advice = _ADVICE if one.source.fqn is None else _OF_CACHES if one.source.fqn in subject.appeared else None
    return judging.finding(subject, RULE, message, one.source.fqn, help=advice, severity=Severity.ERROR)


def _what(subject: Subject, source: Source, device: str) -> str:
    if source.fqn is not None:
        return f"{source.fqn}: {'what is computed from it is ' if source.derived else ''}on {device}"
    at = _at(subject, source.place)
    if source.brought:
        return f"a tensor that forward copies to {device}{at} is there"
    return f"a tensor made in forward without device={at} is on {device}"


def _at(subject: Subject, place: Place | None) -> str:
    if place is None:
        return ""
    spec = parse(subject.target)
    typed = {os.path.abspath(spec.module): spec.module} if spec is not None and spec.is_file else {}
    return f" at {origin.display(place[0], typed)}:{place[1]}"
