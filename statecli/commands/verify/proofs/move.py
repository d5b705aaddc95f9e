"""Proof `move`: the model is really moved, and each tensor's device is read before and after.

Whether a tensor follows is read from the device it is on. Ties and further names are judged by a stand-in instead (see
`judging.stand_in`), since a move to meta makes a new object for each name, which no move to CUDA does. What is on the
device already can only be judged by the stand-in.

Every tensor that stays behind fails, class attributes too: forward reads them through the instance. Not judged:

- what torch computes anew before each forward (old weight_norm, spectral_norm, pruning);
- what appeared with the first forward and is made anew, whatever it held, by every other, or for another device;
- what a function of the class remembers (functools.lru_cache): no move of a model can reach it, and whether forward
  mixes it with what has moved is for the proof `forward` to say;
- what the model's own `_apply` clears.

A 0-dim or empty tensor that stays is a warning: operators on CUDA take a 0-dim one from the CPU.

Whether values survive, and whether all comes back, is looked at where there are values and another device. Elsewhere
torch's own code is taken to be right; of a class with an `_apply` or a `to` of its own, values are compared on the
CPU, and the way back is tried on a pretended GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import nn

from statecli.commands.verify import judging, recreated_by_forward, rules, tensor_bits
from statecli.commands.verify.model_under_test import Subject
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core.errors import ModelError, UsageError
from statecli.core.finding import Finding, Severity
from statecli.core.move_rules import LEFT_BEHIND, STALE_VIEW, UNTIED_BY_MOVE
from statecli.core.oddity_kind import OddityKind
from statecli.core.rule import Rule
from statecli.core.state import ModelState, TensorInfo
from statecli.live import fake_gpu, fake_gpu_values, measure
from statecli.live.device_rules import Watch

FAKE = "fake-cuda"
#: Methods that decide what moves, where a class has its own.
_MOVERS = ("to", "cuda", "_apply")


def prove(subject: Subject, device: str) -> Check:
    """Move an instance to `device` and, where it has values, back. Raises UsageError for a device that is not here."""
    if device == FAKE:
        return prove_on_fake_gpu(subject)
    wanted = device_of(device)
    moved = _moved(subject, wanted)
    if moved.own and wanted.type == "meta":
        compare(subject, moved)
    if moved.own and wanted.type in ("cpu", "meta"):
        _pretend(subject, moved)
    return judging.nothing(subject, Name.MOVE) or judged(subject, str(wanted), moved)


def prove_on_fake_gpu(subject: Subject) -> Check:
    """Proof `move` of a pretended GPU: column `moves`, the rules of a real move. Needs no values."""
    moved = try_on_fake_gpu(subject)
    if moved.own:
        compare(subject, moved)
    return judging.nothing(subject, Name.MOVE) or judged(subject, fake_gpu.SHOWN, moved)


def try_on_fake_gpu(subject: Subject) -> Moved:
    """What moved there, without data, or with data where that cannot tell; and what came back of a class's own move."""
    moved = _move_to_fake_gpu(subject, fake_gpu.faked, values=False)
    if not moved.reasons or any(row.device == "meta" for row in subject.state.tensors):
        return moved
    again = _move_to_fake_gpu(subject, fake_gpu_values.pretended, values=True)
    return again if not again.reasons else moved


def _move_to_fake_gpu(subject: Subject, stage: fake_gpu.Stage, *, values: bool) -> Moved:
    moved = Moved(call='.to("cuda") on a pretended GPU')
    try:
        module = subject.used(values=values)
        moved.before = {name: str(tensor.device) for name, tensor in judging.tensors(module).items()}
        moved.own = moves_itself(module)
        with stage(Watch(fake_gpu.DEVICE)) as kept:
            with subject.user_code(f"moving it to {fake_gpu.SHOWN}"):
                there = moved.gave(subject, module, module.to(fake_gpu.DEVICE))
            moved.after = {name: fake_gpu.device_after(tensor, kept) for name, tensor in judging.tensors(there).items()}
            if there is not module:
                moved.untried = "its .to gives another model"  # which may be the user's own
            elif moved.own:
                _move_back(subject, module, moved)
    except ModelError as error:
        moved.reasons.append(fake_gpu.why(judging.reason_of(subject, error), error.__cause__))
    return moved


def _move_back(subject: Subject, module: nn.Module, moved: Moved) -> None:
    with subject.user_code("moving it back"):
        module = measure.moved(module, module.to("cpu"))
    back = {name: fake_gpu.shown(tensor) for name, tensor in judging.tensors(module).items()}
    moved.stuck = stuck(moved.after, back, fake_gpu.SHOWN)
    moved.call += " and back"


def moves_itself(module: nn.Module) -> bool:
    """Whether code that is not torch's has a part in what `module.to` does."""
    return measure.has_own_move(module, module.modules())


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


_RULES = {OddityKind.UNTIED_BY_MOVE: UNTIED_BY_MOVE, OddityKind.STALE_VIEW: STALE_VIEW}
#: What to do about a name that is no longer what it was a name of.
HELP = {
    UNTIED_BY_MOVE.name: "register it once and read it under the other name through a property, "
    "or tie them again in an _apply of the class's own",
    STALE_VIEW.name: "make it a property that computes it from the registered tensor",
}


@dataclass
class Moved:
    """Devices by name before and after; `changed` are what is not what it was after the way there and back.

    `stuck` are those that followed and did not come back, each with the device on which it stays. `reasons` say what
    could not be done. `call` is what was done, `lost` a finding if it gave no model. `own`: code that is not torch's
    has a part in it. `untried`: why the way back from a pretended GPU was not.
    """

    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    stuck: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    own: bool = False
    untried: str | None = None
    call: str = ""
    lost: Finding | None = None

    def gave(self, subject: Subject, module: nn.Module, given: object) -> nn.Module:
        """The model that `.to` moved and gave, or moved where it gave something else, which is a finding."""
        if not isinstance(given, nn.Module):
            self.lost = _lost(subject, type(module), given)
        return measure.moved(module, given)


def _lost(subject: Subject, owner: type[nn.Module], given: object) -> Finding:
    what = "None" if given is None else f"a {type(given).__name__}"
    message = f"{owner.__name__}.to gives {what}: model = model.to(...) loses the model"
    return judging.finding(
        subject,
        rules.LOST_BY_MOVE,
        message,
        None,
        help=judging.at_method(subject, owner.to, "end it with: return self"),
    )


def judged(subject: Subject, wanted: str, moved: Moved) -> Check:
    """What the devices that were read, in the words of `wanted`, say of each tensor."""
    return _Proof(subject, wanted, moved).check()


class _Proof:
    def __init__(self, subject: Subject, wanted: str, moved: Moved) -> None:
        self._subject, self._wanted = subject, wanted
        self._stand_in: ModelState = judging.stand_in(subject)
        self._follows = {row.fqn: row.moves for row in self._stand_in.tensors}
        self._recomputed = judging.recomputed(self._stand_in)
        self._memos = judging.memos(subject)
        self._moved = moved
        self._remade: frozenset[str] | None = None
        self._again: recreated_by_forward.Again | None = None
        self._findings: list[Finding] = [moved.lost] if moved.lost else []

    def check(self) -> Check:
        cells = {row.fqn: self._cell(row) for row in self._subject.state.tensors}
        self._broken(cells)
        how = self._moved.call
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
            return self._stayed(row, before, after, f"stays on {after} when the model moves to {self._wanted}")
        return self._changed(row, before, after)

    def _by_stand_in(self, row: TensorInfo, before: str) -> Cell:
        follows = self._follows.get(row.fqn)
        if follows is None:
            note = next((one.message for one in self._stand_in.oddities if one.kind is OddityKind.NOT_MEASURED), None)
            return judging.unclear(note or "cannot tell whether it follows", before=before)
        if not follows:
            what = "memory was given anew to what is registered and not to it: a move elsewhere leaves it behind"
            return self._stayed(row, before, before, what)
        return self._changed(row, before, f"{before}, new memory")

    def _changed(self, row: TensorInfo, before: str, after: str) -> Cell:
        what = self._moved.changed.get(row.fqn)
        if what is None and row.fqn in self._moved.stuck:
            there = self._moved.stuck[row.fqn]
            return self._stayed(row, before, there, f"stays on {there} when the model moves back to the cpu")
        if what is None:
            return Cell(Verdict.PASSED, before, after)
        message = f"{what} when the model moves there and back"
        return self._fail(rules.CHANGED_BY_MOVE, row, message, before, after, "let {} change nothing but the device")

    def _stayed(self, row: TensorInfo, before: str, after: str, what: str) -> Cell:
        harmless = self._harmless(row)
        if harmless:
            return judging.skipped(harmless, before=before, after=after)
        untold = self._left_by_forward().reason if row.fqn in self._subject.appeared else None
        if untold and row.fqn not in self._left_by_forward().read:
            return judging.unclear(
                f"whether forward makes it anew cannot be told: {untold}", before=before, after=after
            )
        return self._fail(LEFT_BEHIND, row, what, before, after, "let {} call super() and move this one too")

    def _fail(self, rule: Rule, row: TensorInfo, what: str, before: str, after: str, mend: str) -> Cell:
        """`mend` is what to do with the class's own `_apply` or `to`, where there is one and nothing else is known."""
        mild = rule == LEFT_BEHIND and judging.dimensionless(row)
        severity = Severity.WARNING if mild else Severity.ERROR
        help = None
        if row.fqn in self._subject.appeared:
            help = recreated_by_forward.MEND.format("device")
        elif not row.fix:
            help = judging.in_own_method(self._subject, self._instance, row.fqn, _MOVERS, mend)
        message = f"{row.fqn}: {what}"
        self._findings.append(judging.finding(self._subject, rule, message, row.fqn, severity=severity, help=help))
        return Cell(Verdict.FAILED, before, after, what)

    @functools.cached_property
    def _instance(self) -> nn.Module:
        """An instance whose methods are looked at, and that is not called."""
        return self._subject.fresh()

    def _harmless(self, row: TensorInfo) -> str | None:
        if row.fqn in self._recomputed:
            return judging.RECOMPUTED
        if row.fqn in self._memos:
            return judging.MEMO
        if row.fqn not in self._subject.appeared:
            return None
        if self._remade is None:
            self._remade = recreated_by_forward.each_time(self._subject)
        if row.fqn in self._remade:
            return recreated_by_forward.EACH_TIME
        return recreated_by_forward.ELSEWHERE.format("device") if row.fqn in self._left_by_forward().made else None

    def _left_by_forward(self) -> recreated_by_forward.Again:
        if self._again is None:
            self._again = recreated_by_forward.on_device(self._subject, self._wanted)
        return self._again

    # --- ties and views ------------------------------------------------------------------------------------------

    def _broken(self, cells: dict[str, Cell]) -> None:
        """The cell of a name that a move parts from its tie, or leaves pointing at the old storage, fails."""
        for oddity in self._stand_in.oddities:
            name = oddity.fqn or ""
            rule = _RULES.get(oddity.kind) if oddity.kind else None
            if rule is None or name in self._recomputed:
                continue
            cell = cells.get(name) or Cell(Verdict.PASSED, self._moved.before.get(name), self._moved.after.get(name))
            if cell.verdict is Verdict.PASSED:
                cells[name] = Cell(Verdict.FAILED, cell.before, cell.after, oddity.message)
                help, severity = HELP[oddity.name], Severity.ERROR
                finding = judging.finding(self._subject, rule, oddity.message, name, help=help, severity=severity)
                self._findings.append(finding)


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
    moved.own = moves_itself(module)
    if wanted.type == "meta":
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
    tensor_bits.perturb(tensor for tensor in found.values() if type(tensor) is nn.Parameter)
    before = {name: judging.values_of(tensor) for name, tensor in found.items()}
    there = _move(subject, module, wanted, moved)
    if there is None:
        return
    moved.call += " and back"
    given, raised = judging.attempt(subject, "moving it back", lambda: there.to("cpu"))
    if raised:
        moved.reasons.append(raised)
        return
    after = judging.tensors(measure.moved(there, given))
    moved.stuck = stuck(moved.after, _devices(after), str(wanted))
    for name, tensor in before.items():
        if name in after and tensor is not None and tensor_bits.same(tensor, after[name]) is False:
            moved.changed[name] = _difference(tensor, after[name])


def stuck(there: dict[str, str], back: dict[str, str], wanted: str) -> dict[str, str]:
    """What was on `wanted`, and is when all is `back`."""
    return {name: wanted for name, device in there.items() if device == back.get(name) == wanted != "cpu"}


def compare(subject: Subject, moved: Moved) -> None:
    """Notes what the model's own code does to values, there and back on the CPU; a model on meta has none."""
    if any(row.device == "meta" for row in subject.state.tensors):
        return
    here = _moved(subject, torch.device("cpu"))
    moved.changed = here.changed
    moved.reasons += here.reasons
    moved.call += ", values compared on the cpu"


def _pretend(subject: Subject, moved: Moved) -> None:
    """Notes what does not come back from a pretended GPU: on the CPU nothing moves, and meta is no way back."""
    there = try_on_fake_gpu(subject)
    moved.stuck = there.stuck
    why = next(iter(there.reasons), there.untried)
    moved.call += f"; the way back cannot be tried: {why}" if why else ", to a pretended GPU and back"


def _difference(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.dtype != other.dtype:
        return f"{one.dtype} becomes {other.dtype}".replace("torch.", "")
    if one.shape != other.shape:
        return f"shape {list(one.shape)} becomes {list(other.shape)}"
    return "values change"


def _devices(found: dict[str, torch.Tensor]) -> dict[str, str]:
    with torch._C.DisableTorchFunctionSubclass():
        return {name: str(tensor.device) for name, tensor in found.items()}
