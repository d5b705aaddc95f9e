"""Proof `cast`: the model is cast to other dtypes, and each tensor's dtype and integers are read after each.

`.to(torch.float64)`, `.half()` and `.bfloat16()` in turn on one instance, or the one dtype that was asked for. A
floating-point tensor has to follow each, integers and bools have to stay what they are, complex numbers complex.

Not judged: what torch computes anew before each forward; what forward itself makes anew each time; and what is
unregistered, follows moves by the class's own `_apply` and keeps its dtype, because the class has decided so
(torchmetrics keeps its sums out of half precision), as it has where it overrides `half()` to do nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from statecli.errors import ModelError, UsageError
from statecli.finding import Finding, Severity
from statecli.modules import measure
from statecli.modules.walk import is_scripted
from statecli.proofs import bits, judging, move
from statecli.proofs.result import Cell, Check, Name, Verdict
from statecli.proofs.subject import Subject
from statecli.state import Kind, TensorInfo

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
    """What one tensor was after each way: dtypes, and the first that is wrong with its rule and one line on it.

    `declined` is the way that the class which holds it has a method of its own for, one that keeps its dtype.
    """

    before: torch.dtype
    values: torch.Tensor | None
    dtypes: list[torch.dtype] = field(default_factory=list)
    wrong: tuple[str, str] | None = None
    declined: str | None = None

    @property
    def last(self) -> torch.dtype:
        """What it was before the way that is being looked at."""
        return self.dtypes[-1] if self.dtypes else self.before

    def after(self) -> str:
        """`float64 → float16`, each once."""
        return " → ".join(_short(dtype) for dtype in dict.fromkeys(self.dtypes))


class _Proof:
    def __init__(self, subject: Subject, ways: tuple[_Way, ...]) -> None:
        self._subject, self._ways = subject, ways
        self._steps: dict[str, _Steps] = {}
        self._reasons: list[str] = judging.out_of_reach(subject)
        self._done: list[str] = []
        self._findings: list[Finding] = []
        self._known_remade: frozenset[str] | None = None
        self._used = nn.Module()
        self._recomputed = judging.recomputed(judging.stand_in(subject))

    def check(self) -> Check:
        module: nn.Module | None = None
        for called, dtype, cast in self._ways:
            module = self._cast(module, called, dtype, cast)
        cells = {row.fqn: self._cell(row) for row in self._subject.state.tensors}
        how = ", ".join(self._done or [called for called, _, _ in self._ways])
        return judging.check(Name.CAST, how, {"casts": cells}, self._findings, self._reasons)

    def _cast(
        self, module: nn.Module | None, called: str, dtype: torch.dtype, cast: Callable[[nn.Module], object]
    ) -> nn.Module | None:
        """Cast `module`, a fresh instance where there is none; it, or None where that failed and it is half cast."""
        try:
            start = self._subject.used() if module is None else module
        except ModelError as error:
            self._reasons.append(judging.reason_of(self._subject, error))
            return None
        if is_scripted(start) and called == ".bfloat16()":  # a ScriptModule has none of its own
            called, dtype, cast = _way("bfloat16")
        for name, tensor in judging.tensors(start).items():
            self._steps.setdefault(name, _Steps(tensor.dtype, _integers(tensor)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the cells say
            given, raised = judging.attempt(self._subject, f"{called} of it", lambda: cast(start))
        if raised:
            self._reasons.append(raised)
            return None
        module = self._used = measure.moved(start, given)
        self._done.append(called)
        now = {name: tensor for name, tensor in judging.tensors(module).items() if name in self._steps}
        declining = _declining(module, called, [n for n, tensor in now.items() if tensor.dtype != self._steps[n].last])
        for name, tensor in now.items():
            if name.rpartition(".")[0] in declining:
                self._steps[name].declined = called
            _note(self._steps[name], tensor, dtype, called)
        return module

    def _cell(self, row: TensorInfo) -> Cell:
        steps = self._steps.get(row.fqn)
        if steps is None:
            return judging.unclear("; ".join(self._reasons) or "it is not there in a second instance of the model")
        before = _short(steps.before)
        if not steps.dtypes:
            return judging.unclear("it could not be cast", before=before) if not self._done else _gone(before)
        if steps.wrong is None:
            why = f"the class's own {steps.declined} keeps its dtype" if steps.declined else None
            return Cell(Verdict.PASSED, before, steps.after(), why)
        rule, what = steps.wrong
        harmless = self._harmless(row) if rule == "keeps-dtype" else None
        if harmless:
            return judging.skipped(harmless, before=before, after=steps.after())
        mild = rule == "keeps-dtype" and judging.dimensionless(row)
        severity = Severity.WARNING if mild else Severity.ERROR
        self._findings.append(
            judging.finding(self._subject, rule, f"{row.fqn}: {what}", row.fqn, severity=severity, help=_HELP.get(rule))
        )
        return Cell(Verdict.FAILED, before, steps.after(), what)

    def _harmless(self, row: TensorInfo) -> str | None:
        if row.fqn in self._recomputed:
            return judging.RECOMPUTED
        if judging.is_memo(self._subject, row):
            return judging.MEMO
        if row.fqn in self._subject.appeared and row.fqn in self._remade():
            return move.REMADE
        if row.kind is Kind.UNREGISTERED and row.moves and judging.is_moved_by_its_class(self._used, row.fqn):
            return "moved by the class's own _apply, which keeps its dtype"
        return None

    def _remade(self) -> frozenset[str]:
        if self._known_remade is None:
            self._known_remade = move.remade(self._subject)
        return self._known_remade


_HELP = {
    "imaginary-lost": "keep real and imaginary part as a last dimension (torch.view_as_real), "
    "and make it complex in forward (torch.view_as_complex)"
}


def _note(steps: _Steps, tensor: torch.Tensor, dtype: torch.dtype, called: str) -> None:
    steps.dtypes.append(tensor.dtype)
    if steps.wrong is None and steps.declined != called:
        steps.wrong = _wrong(steps, tensor, dtype, called)


def _wrong(steps: _Steps, tensor: torch.Tensor, dtype: torch.dtype, called: str) -> tuple[str, str] | None:
    before = steps.before
    if before.is_floating_point:
        if tensor.dtype == dtype:
            return None
        return "keeps-dtype", f"is {_short(tensor.dtype)} after {called}"
    if before.is_complex:
        if tensor.dtype.is_complex:
            return None
        return "imaginary-lost", f"is {_short(tensor.dtype)} after {called}, its imaginary part gone"
    if tensor.dtype != before:
        return "integer-cast", f"{_short(before)} is {_short(tensor.dtype)} after {called}"
    if steps.values is not None and bits.same(steps.values, tensor) is False:
        return "integer-changed", f"its {_short(before)} values change with {called}"
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
    return frozenset(name for name in own if not any(one.startswith(f"{name}." if name else "") for one in followed))


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
