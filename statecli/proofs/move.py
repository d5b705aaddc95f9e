"""Proof `move`: the model is really moved, and each tensor's device is read before and after.

Whether a tensor follows is read from the device it is on. Ties and further names are judged by a stand-in instead (see
`judging.stand_in`), since a move to meta makes a new object for each name, which no move to CUDA does. What is on the
device already can only be judged by the stand-in.

Every tensor that stays behind fails, class attributes too: forward reads them through the instance. Not judged:

- what torch computes anew before each forward (old weight_norm, spectral_norm, pruning);
- an entry of a cache whose key names the device it is for: the new device gets one of its own;
- what appeared with the first forward and is made anew, whatever it held, by every other;
- what a function of the class remembers (functools.lru_cache): no move of a model can reach it, and whether forward
  mixes it with what has moved is for the proof `forward` to say;
- what the model's own `_apply` clears.

A 0-dim or empty tensor that stays is a warning: operators on CUDA take a 0-dim one from the CPU.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

import torch
from torch import nn

from statecli.errors import ModelError, UsageError
from statecli.finding import Finding, Severity
from statecli.modules import measure
from statecli.proofs import bits, judging, sources
from statecli.proofs.result import Cell, Check, Name, Verdict
from statecli.proofs.subject import Subject
from statecli.state import ModelState, TensorInfo

FAKE = "fake-cuda"
_DEVICE_KEY = re.compile(r"\[[^\]]*\b(cpu|cuda(:\d+)?|meta|mps|xpu)\b[^\]]*\]")


def prove(subject: Subject, device: str) -> Check:
    """Move an instance to `device` and, where it has values, back. Raises UsageError for a device that is not here."""
    if device == FAKE:
        from statecli.proofs import fake

        return fake.move(subject)
    wanted = device_of(device)
    return judging.nothing(subject, Name.MOVE) or judged(subject, str(wanted), _moved(subject, wanted))


def device_of(text: str) -> torch.device:
    """The device that `--device` names, with its index. Raises UsageError."""
    try:
        wanted = torch.device(text)
    except RuntimeError as error:
        known = "fake-cuda, cuda, cuda:1, cpu and meta are devices"
        raise UsageError(f"--device {text}: torch knows no such device; {known}") from error
    instead = "--device fake-cuda makes the same check on any machine"
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {text}: there is no CUDA here; {instead}")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(f"--device {text}: this machine has {count} CUDA device(s), numbered from 0")
    try:
        return torch.empty(0, device=wanted).device  # "cuda" is the current device, "cuda:0"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {text}: no such device here; {instead}") from error


REMADE = "every forward makes it anew, whatever it held"
_HELP = {
    "broken-tie": "register it once and read it under the other name through a property, "
    "or tie them again in an _apply of the class's own",
    "stale-view": "make it a property that computes it from the registered tensor",
}


@dataclass
class Moved:
    """Devices by name before and after; `changed` are what is not what it was after the way there and back.

    `reasons` say what could not be done; `one_way`: nothing came back, so that values are not compared. `call` is what
    was done, `lost` a finding if it gave no model.
    """

    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    one_way: bool = False
    call: str = ""
    lost: Finding | None = None

    def gave(self, subject: Subject, module: nn.Module, given: object) -> nn.Module:
        """The model that `.to` moved and gave, or moved where it gave something else, which is a finding."""
        if not isinstance(given, nn.Module):
            self.lost = _lost(subject, type(module), given)
        return measure.moved(module, given)


def _lost(subject: Subject, owner: type[nn.Module], given: object) -> Finding:
    code = getattr(inspect.unwrap(owner.to), "__code__", None)
    at = f"{sources.shown(code.co_filename, subject.target)}:{code.co_firstlineno}: " if code else ""
    what = "None" if given is None else f"a {type(given).__name__}"
    message = f"{owner.__name__}.to gives {what}: model = model.to(...) loses the model"
    return judging.finding(subject, "lost-by-move", message, None, help=f"{at}end it with: return self")


def judged(subject: Subject, wanted: str, moved: Moved) -> Check:
    """What the devices that were read, in the words of `wanted`, say of each tensor."""
    return _Proof(subject, wanted, moved).check()


class _Proof:
    def __init__(self, subject: Subject, wanted: str, moved: Moved) -> None:
        self._subject, self._wanted = subject, wanted
        self._stand_in: ModelState = judging.stand_in(subject)
        self._follows = {row.fqn: row.moves for row in self._stand_in.tensors}
        self._recomputed = judging.recomputed(self._stand_in)
        self._moved = moved
        self._remade: frozenset[str] | None = None
        self._findings: list[Finding] = [moved.lost] if moved.lost else []

    def check(self) -> Check:
        cells = {row.fqn: self._cell(row) for row in self._subject.state.tensors}
        self._broken(cells)
        how = self._moved.call + ("" if self._moved.one_way else " and back")
        if set(self._moved.before.values()) == {self._wanted}:
            how = f"everything is on {self._wanted} already: memory given anew by _apply, and {how}"
        return judging.check(Name.MOVE, how, {"moves": cells}, self._findings, self._reasons())

    def _reasons(self) -> list[str]:
        return [*self._moved.reasons, *judging.out_of_reach(self._subject)]

    # --- one tensor ----------------------------------------------------------------------------------------------

    def _cell(self, row: TensorInfo) -> Cell:
        before, after = self._moved.before.get(row.fqn), self._moved.after.get(row.fqn)
        if before is None:
            return judging.unclear("it is not there in a second instance of the model")
        if not self._moved.after or before == self._wanted:
            return self._by_stand_in(row, before)
        if after is None:
            return judging.skipped("gone after the move: the model clears it", before=before)
        if after != self._wanted:
            return self._stayed(row, before, after)
        return self._changed(row, before, after)

    def _by_stand_in(self, row: TensorInfo, before: str) -> Cell:
        follows = self._follows.get(row.fqn)
        if follows is None:
            note = next((one.message for one in self._stand_in.oddities if one.name == "not-measured"), None)
            return judging.unclear(note or "cannot tell whether it follows", before=before)
        if not follows:
            return self._stayed(row, before, before)
        return self._changed(row, before, f"{before}, new memory")

    def _changed(self, row: TensorInfo, before: str, after: str) -> Cell:
        what = self._moved.changed.get(row.fqn)
        if what is None:
            return Cell(Verdict.PASSED, before, after)
        return self._fail(
            "changed-by-move", row, f"{row.fqn}: {what} when the model moves there and back", before, after
        )

    def _stayed(self, row: TensorInfo, before: str, after: str) -> Cell:
        harmless = self._harmless(row)
        if harmless:
            return judging.skipped(harmless, before=before, after=after)
        message = f"{row.fqn}: stays on {after} when the model moves to {self._wanted}"
        return self._fail("left-behind", row, message, before, after)

    def _fail(self, rule: str, row: TensorInfo, message: str, before: str, after: str) -> Cell:
        mild = rule == "left-behind" and judging.dimensionless(row)
        severity = Severity.WARNING if mild else Severity.ERROR
        self._findings.append(judging.finding(self._subject, rule, message, row.fqn, severity=severity))
        return Cell(Verdict.FAILED, before, after, message.removeprefix(f"{row.fqn}: "))

    def _harmless(self, row: TensorInfo) -> str | None:
        if row.fqn in self._recomputed:
            return judging.RECOMPUTED
        if judging.is_memo(self._subject, row):
            return judging.MEMO
        if row.fqn not in self._subject.appeared:
            return None
        if _DEVICE_KEY.search(row.fqn):
            return "a cache with a key for each device: forward makes one for the new device"
        if self._remade is None:
            self._remade = remade(self._subject)
        return REMADE if row.fqn in self._remade else None

    # --- ties and views ------------------------------------------------------------------------------------------

    def _broken(self, cells: dict[str, Cell]) -> None:
        """The cell of a name that a move parts from its tie, or leaves pointing at the old storage, fails."""
        for oddity in self._stand_in.oddities:
            name = oddity.fqn or ""
            if oddity.name not in ("broken-tie", "stale-view") or name in self._recomputed:
                continue
            cell = cells.get(name) or Cell(Verdict.PASSED, self._moved.before.get(name), self._moved.after.get(name))
            if cell.verdict is Verdict.PASSED:
                cells[name] = Cell(Verdict.FAILED, cell.before, cell.after, oddity.message)
                help = _HELP[oddity.name]
                self._findings.append(judging.finding(self._subject, oddity.name, oddity.message, name, help=help))


def _moved(subject: Subject, wanted: torch.device) -> Moved:
    moved = Moved(call=f'.to("{wanted}")')
    try:
        module = subject.used()
    except ModelError as error:
        moved.reasons.append(judging.reason_of(subject, error))
        return moved
    found = judging.tensors(module)
    moved.before = _devices(found)
    if set(moved.before.values()) == {"meta"} and wanted.type != "meta":
        moved.reasons.append(f"it was built on meta and holds no values to move to {wanted}; build it on the cpu")
        return moved
    moved.one_way = wanted.type == "meta"
    if moved.one_way:
        _move(subject, module, wanted, moved)
    else:
        _there_and_back(subject, module, wanted, found, moved)
    return moved


def _move(subject: Subject, module: nn.Module, wanted: torch.device, moved: Moved) -> nn.Module | None:
    """The model that has moved; None where that raised."""
    given, raised = judging.attempt(subject, f'moving it to "{wanted}"', lambda: module.to(wanted))
    if raised:
        moved.reasons.append(raised)
        return None
    there = moved.gave(subject, module, given)
    moved.after = _devices(judging.tensors(there))
    return there


def _there_and_back(
    subject: Subject, module: nn.Module, wanted: torch.device, found: dict[str, torch.Tensor], moved: Moved
) -> None:
    # Only Parameters, which are left undrawn: what else there is has its values, and may be shared by all instances.
    bits.perturb(tensor for tensor in found.values() if type(tensor) is nn.Parameter)
    before = {name: _copy(tensor) for name, tensor in found.items()}
    there = _move(subject, module, wanted, moved)
    if there is None:
        return
    given, raised = judging.attempt(subject, "moving it back", lambda: there.to("cpu"))
    if raised:
        moved.reasons.append(raised)
        return
    after = judging.tensors(measure.moved(there, given))
    for name, tensor in before.items():
        if name in after and tensor is not None and bits.same(tensor, after[name]) is False:
            moved.changed[name] = _difference(tensor, after[name])


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values that were there; None where they cannot be copied, or were not on the CPU, where all ends."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if judging.lazy(tensor) or tensor.device.type != "cpu":
            return None
        try:
            return tensor.detach().clone()
        except (RuntimeError, NotImplementedError):
            return None


def _difference(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.dtype != other.dtype:
        return f"{one.dtype} becomes {other.dtype}".replace("torch.", "")
    if one.shape != other.shape:
        return f"shape {list(one.shape)} becomes {list(other.shape)}"
    return "values change"


def _devices(found: dict[str, torch.Tensor]) -> dict[str, str]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: str(tensor.device) for name, tensor in found.items()}


# --- what forward makes anew -----------------------------------------------------------------------------------------


def remade(subject: Subject) -> frozenset[str]:
    """What appeared, and a second forward replaces by a tensor of the same bits though it had been overwritten."""
    try:
        module = subject.used(values=True)
    except ModelError:
        return frozenset()
    found = judging.tensors(module)
    appeared = {name: found[name] for name in subject.appeared if name in found}
    known = {name: (tensor, _copy(tensor)) for name, tensor in appeared.items()}
    put_back = bits.keeper(appeared.values())  # all instances share some, the user's too: a memo, a dict of the class
    try:
        bits.perturb(appeared.values())
        subject.call(module)
    except ModelError:
        return frozenset()  # it reads what was overwritten
    finally:
        put_back()
    after = judging.tensors(module)
    return frozenset(
        name
        for name, (tensor, values) in known.items()
        if name in after and after[name] is not tensor and values is not None and bits.same(values, after[name])
    )
