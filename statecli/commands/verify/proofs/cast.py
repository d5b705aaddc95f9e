"""Proof `cast`: the model is cast to other dtypes, and each tensor's dtype and integers are read after each.

`.to(torch.float64)`, `.half()` and `.bfloat16()` in turn, or the one dtype that was asked for; on one instance as long
as all is well, else each on its own. A floating-point tensor has to follow each, integers and bools have to stay what
they are, complex numbers complex. So has each further name of a tensor, which is no row of its own.

Not judged: what torch computes anew before each forward; what forward itself makes anew each time, or for another
dtype; and what is unregistered, follows moves by the class's own `_apply` and keeps its dtype, because the class has
decided so (torchmetrics keeps its sums out of half precision), as it has where it overrides `half()` to do nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from statecli.commands.verify import judging, recreated_by_forward, rules, tensor_bits
from statecli.commands.verify.model_under_test import Subject
from statecli.commands.verify.proofs import move
from statecli.commands.verify.result import Cell, Check, Name, Verdict
from statecli.core.errors import ModelError, UsageError
from statecli.core.finding import Finding, Severity
from statecli.core.move_rules import STALE_VIEW
from statecli.core.oddity_kind import OddityKind
from statecli.core.rule import Rule
from statecli.core.state import Kind, TensorInfo
from statecli.live import measure
from statecli.live.walk import is_scripted

#: What is called, as a person writes it, the dtype that floating-point tensors have afterwards, and the call.
_Way = tuple[str, torch.dtype, Callable[[nn.Module], object]]
_WAYS: tuple[_Way, ...] = (
    (".to(torch.float64)", torch.float64, lambda module: module.to(torch.float64)),
    (".half()", torch.float16, lambda module: module.half()),
    (".bfloat16()", torch.bfloat16, lambda module: module.bfloat16()),
)


def prove(subject: Subject, dtype: str | None) -> Check:
    """Cast an instance to `dtype`, or in turn to three. Raises UsageError for what torch casts no module to."""
    ways = _WAYS if dtype is None else (_way(dtype),)
    return judging.nothing(subject, Name.CAST) or _Proof(subject, ways).check()


def _way(text: str) -> _Way:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    known = "float64, float32, float16 and bfloat16 are dtypes to cast a model to"
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--dtype {text}: torch knows no such dtype; {known}")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"--dtype {text}: torch casts no model to integers; {known}")
    return f".to({dtype})", dtype, lambda module: module.to(dtype)


@dataclass
class _Steps:
    """What one tensor was after each way: dtypes, and the rule that it broke with one line on it, by way.

    `declined` is the way that the class which holds it has a method of its own for, one that keeps its dtype.
    """

    before: torch.dtype
    values: torch.Tensor | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    wrong: dict[str, tuple[Rule, str]] = field(default_factory=dict)
    declined: str | None = None

    def after(self) -> str:
        """`float64 → float16`, each once."""
        return " → ".join(_short(dtype) for dtype in dict.fromkeys(self.dtypes.values()))

    def fault(self) -> tuple[Rule, str] | None:
        """The first rule that it broke and one line on it, with the ways that it does follow."""
        for rule, what in self.wrong.values():
            followed = [called for called in self.dtypes if called not in self.wrong and called != self.declined]
            return rule, f"{what}, though it follows {followed[0]}" if followed and rule == rules.KEEPS_DTYPE else what
        return None


class _Proof:
    def __init__(self, subject: Subject, ways: tuple[_Way, ...]) -> None:
        self._subject, self._ways = subject, ways
        self._steps: dict[str, _Steps] = {}
        self._reasons: list[str] = judging.out_of_reach(subject)
        self._done: list[str] = []
        self._findings: list[Finding] = []
        self._known_remade: frozenset[str] | None = None
        self._known_again: recreated_by_forward.Again | None = None
        self._used = nn.Module()
        self._found: dict[str, torch.Tensor] = {}
        self._stand_in = judging.stand_in(subject)
        self._recomputed = judging.recomputed(self._stand_in)
        self._memos = judging.memos(subject)

    def check(self) -> Check:
        module: nn.Module | None = None
        for way in self._ways:
            module = self._cast(module, way)
        cells = {row.fqn: self._cell(row) for row in self._subject.state.tensors}
        for row in self._subject.state.tensors:
            if cells[row.fqn].verdict is Verdict.PASSED:
                cells.update(self._stale(row))
        how = ", ".join(self._done or [called for called, _, _ in self._ways])
        return judging.check(Name.CAST, how, {"casts": cells}, self._findings, self._reasons)

    # --- one way ---------------------------------------------------------------------------------------------------

    def _cast(self, module: nn.Module | None, way: _Way) -> nn.Module | None:
        """Cast `module`, a fresh instance where there is none; it, or None where the next way needs a fresh one."""
        try:
            start = self._fresh() if module is None else module
        except ModelError as error:
            self._reasons.append(judging.reason_of(self._subject, error))
            return None
        if is_scripted(start) and way[0] == ".bfloat16()":  # a ScriptModule has none of its own
            way = _way("bfloat16")
        before = {name: tensor.dtype for name, tensor in self._found.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the cells say
            given, raised = judging.attempt(self._subject, f"{way[0]} of it", lambda: way[2](start))
        if raised:
            self._reasons.append(raised)
            return None
        self._used = measure.moved(start, given)
        self._found = judging.tensors(self._used)
        wrong = self._wrong(way, before)
        if wrong and module is not None:
            return self._cast(None, way)  # what it is now may be left over from the way before
        self._note(way[0], wrong)
        return None if wrong else self._used

    def _fresh(self) -> nn.Module:
        start = self._subject.used()
        self._found = judging.tensors(start)
        for name, tensor in self._found.items():
            self._steps.setdefault(name, _Steps(tensor.dtype)).values = _integers(tensor)
        return start

    def _wrong(self, way: _Way, before: dict[str, torch.dtype]) -> dict[str, tuple[Rule, str]]:
        """The rule that each tensor breaks, with one line on it."""
        called, dtype, _ = way
        now = {name: tensor for name, tensor in self._found.items() if name in self._steps}
        followed = [name for name, tensor in now.items() if tensor.dtype != before.get(name)]
        declining = _declining(self._used, called, followed)
        wrong: dict[str, tuple[Rule, str]] = {}
        for name, tensor in now.items():
            if name.rpartition(".")[0] in declining:
                self._steps[name].declined = called
            elif fault := _wrong(self._steps[name], tensor, dtype, called):
                wrong[name] = fault
        return wrong

    def _note(self, called: str, wrong: dict[str, tuple[Rule, str]]) -> None:
        self._done.append(called)
        for name, tensor in self._found.items():
            if name in self._steps:
                self._steps[name].dtypes[called] = tensor.dtype
        for name, fault in wrong.items():
            self._steps[name].wrong[called] = fault

    # --- one tensor ------------------------------------------------------------------------------------------------

    def _cell(self, row: TensorInfo) -> Cell:
        steps = self._steps.get(row.fqn)
        if steps is None:
            return judging.unclear("; ".join(self._reasons) or "it is not there in a second instance of the model")
        before = _short(steps.before)
        if not steps.dtypes:
            return judging.unclear("it could not be cast", before=before) if not self._done else _gone(before)
        fault = steps.fault()
        if fault is None:
            why = f"the class's own {steps.declined} keeps its dtype" if steps.declined else None
            return Cell(Verdict.PASSED, before, steps.after(), why)
        rule, what = fault
        excused = self._excused(row, steps) if rule == rules.KEEPS_DTYPE else None
        return excused or self._fail(rule, row, what, steps)

    def _fail(self, rule: Rule, row: TensorInfo, what: str, steps: _Steps) -> Cell:
        mild = rule == rules.KEEPS_DTYPE and judging.dimensionless(row)
        severity = Severity.WARNING if mild else Severity.ERROR
        message, help = f"{row.fqn}: {what}", self._help(rule, row, steps)
        self._findings.append(judging.finding(self._subject, rule, message, row.fqn, severity=severity, help=help))
        return Cell(Verdict.FAILED, _short(steps.before), steps.after(), what)

    def _help(self, rule: Rule, row: TensorInfo, steps: _Steps) -> str | None:
        """What to do where the row itself has no fix."""
        if rule == rules.IMAGINARY_LOST:
            return _AS_REAL
        if row.fqn in self._subject.appeared:
            return recreated_by_forward.MEND.format("dtype")
        if row.kind is Kind.UNREGISTERED:
            return None if row.fix else _IN_APPLY
        methods = [called.lstrip(".").partition("(")[0] for called in steps.wrong]
        return judging.in_own_method(self._subject, self._used, row.fqn, (*methods, "_apply"), _OWN[rule.name])

    def _excused(self, row: TensorInfo, steps: _Steps) -> Cell | None:
        """The cell of what keeps its dtype and does no harm by it, or may do none."""
        measured = {"before": _short(steps.before), "after": steps.after()}
        harmless = self._harmless(row)
        if harmless:
            return judging.skipped(harmless, **measured)
        if row.fqn not in self._subject.appeared:
            return None
        again = self._again()
        if again.reason is None or row.fqn in again.read:
            return None
        return judging.unclear(f"whether forward makes it anew cannot be told: {again.reason}", **measured)

    def _harmless(self, row: TensorInfo) -> str | None:
        if row.fqn in self._recomputed:
            return judging.RECOMPUTED
        if row.fqn in self._memos:
            return judging.MEMO
        if row.fqn in self._subject.appeared and row.fqn in self._remade():
            return recreated_by_forward.EACH_TIME
        if row.fqn in self._subject.appeared and row.fqn in self._again().made:
            return recreated_by_forward.ELSEWHERE.format("dtype")
        if row.kind is Kind.UNREGISTERED and row.moves and judging.is_moved_by_its_class(self._used, row.fqn):
            return "moved by the class's own _apply, which keeps its dtype"
        return None

    def _remade(self) -> frozenset[str]:
        if self._known_remade is None:
            self._known_remade = recreated_by_forward.each_time(self._subject)
        return self._known_remade

    def _again(self) -> recreated_by_forward.Again:
        if self._known_again is None:
            doubles = any(self._steps[name].before is torch.float64 for name in self._subject.appeared & {*self._steps})
            self._known_again = recreated_by_forward.of_dtype(
                self._subject, torch.float32 if doubles else torch.float64
            )
        return self._known_again

    # --- further names -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _stale_views(self) -> dict[str | None, str]:
        """The messages of the stand-in on further names that a move leaves at the old memory."""
        return {odd.fqn: odd.message for odd in self._stand_in.oddities if odd.kind is OddityKind.STALE_VIEW}

    def _stale(self, row: TensorInfo) -> dict[str, Cell]:
        """The cells of further names of a tensor that was cast, which are left with the memory that it had."""
        cells: dict[str, Cell] = {}
        for name in row.aliases:
            steps = self._steps.get(name)
            fault = steps.fault() if steps else None
            if steps is None or fault is None or fault[0] != rules.KEEPS_DTYPE or name in self._recomputed:
                continue
            what = f"{self._stale_views.get(name, f'{name} is another name of {row.fqn}')}: it {fault[1]}"
            help = move.HELP[STALE_VIEW.name]
            finding = judging.finding(self._subject, STALE_VIEW, what, name, help=help, severity=Severity.ERROR)
            self._findings.append(finding)
            cells[name] = Cell(Verdict.FAILED, _short(steps.before), steps.after(), what)
        return cells


_AS_REAL = (
    "keep real and imaginary part as a last dimension (torch.view_as_real), "
    "and make it complex in forward (torch.view_as_complex)"
)
_IN_APPLY = "register it, or cast it in an _apply of the class's own, which .to(), .half() and .bfloat16() all call"
#: What to do with the method of the class's own that breaks a rule.
_OWN = {
    rules.KEEPS_DTYPE.name: "let {} call super() and cast this one too",
    rules.INTEGER_CAST.name: "let {} leave integers what they are",
    rules.INTEGER_CHANGED.name: "let {} leave integers what they are",
}


def _wrong(steps: _Steps, tensor: torch.Tensor, dtype: torch.dtype, called: str) -> tuple[Rule, str] | None:
    before = steps.before
    if before.is_floating_point:
        if tensor.dtype == dtype:
            return None
        return rules.KEEPS_DTYPE, f"is {_short(tensor.dtype)} after {called}"
    if before.is_complex:
        if tensor.dtype.is_complex:
            return None
        return rules.IMAGINARY_LOST, f"is {_short(tensor.dtype)} after {called}, its imaginary part gone"
    if tensor.dtype != before:
        return rules.INTEGER_CAST, f"{_short(before)} is {_short(tensor.dtype)} after {called}"
    if steps.values is not None and tensor_bits.same(steps.values, tensor) is False:
        return rules.INTEGER_CHANGED, f"its {_short(before)} values change with {called}"
    return None


def _declining(module: nn.Module, called: str, followed: list[str]) -> frozenset[str]:
    """The names of modules that have a `half()` of their own that does nothing, as torchmetrics' have.

    `followed` are the names of what was cast: one that casts a part of its tensors has forgotten the rest.
    """
    method = called.strip(".()")
    torchs = getattr(nn.Module, method, None)
    if torchs is None:  # the way is .to(dtype)
        return frozenset()
    own = [name for name, one in module.named_modules() if getattr(type(one), method, None) is not torchs]
    parts = {one[:end] for one in followed for end, sign in enumerate(one) if sign == "."} | (
        {""} if followed else set()
    )
    return frozenset(name for name in own if name not in parts)


def _integers(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of the values that have to stay; None for what is cast, and where there are none to copy."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or judging.lazy(tensor):
            return None
        try:
            return tensor.detach().clone()
        except (RuntimeError, NotImplementedError):
            return None


def _gone(before: str) -> Cell:
    return judging.skipped("gone after the cast: the model clears it", before=before)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
